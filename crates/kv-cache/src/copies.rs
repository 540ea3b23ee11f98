//! Copies between device and host memory, decided by the pool and enqueued here.

use kv_kernels::{BlockPair, HostDirection};
use kv_pool::{BlockPin, ClaimedBlock, Offload, Onboarded};

use crate::sequence::Held;
use crate::{AdmitError, HostCopyError, KvCache};

/// Copies that are enqueued without a step, when there are so many.
const BLOCKS_DECIDED_MAX: usize = 1 << 16;

/// What came of content in host memory.
#[derive(Debug)]
pub(crate) enum Arrival {
    /// It lies on the device now, for everybody.
    Moved(BlockPin),
    /// Somebody else reads the block in host memory, so this is a copy. It is in stream order before
    /// every later use of the host slot, so the pin need not outlive the call.
    Copied { copy: ClaimedBlock, source: BlockPin },
}

impl Arrival {
    pub(crate) fn into_held(self) -> Held {
        match self {
            Self::Moved(pin) => Held::Shared(pin),
            Self::Copied { copy, .. } => Held::Own(copy),
        }
    }
}

impl KvCache {
    /// Decides the copy of evicted content to host memory.
    pub(crate) fn offload(&mut self, offload: Offload) {
        self.note_copy(HostDirection::ToHost, offload.from().as_i32(), offload.to().as_i32());
        self.stats.offloaded_blocks += 1;
        // Every later use of the host slot is a copy on the same streams, after this one.
        offload.commit();
    }

    /// Decides the copy of content in host memory to a claimed block.
    pub(crate) fn onboard(
        &mut self,
        pin: BlockPin,
        target: ClaimedBlock,
    ) -> Result<Arrival, AdmitError> {
        let onboard = self
            .pool
            .begin_onboard(pin, target)
            .map_err(|refused| AdmitError::Onboard(refused.reason))?;
        self.note_copy(HostDirection::ToPages, onboard.from().as_i32(), onboard.to().as_i32());
        self.arriving.insert(onboard.to().index());
        self.stats.onboarded_blocks += 1;
        Ok(match onboard.commit() {
            Onboarded::Moved(pin) => Arrival::Moved(pin),
            Onboarded::Copied { copy, source } => Arrival::Copied { copy, source },
        })
    }

    fn note_copy(&mut self, direction: HostDirection, source: i32, destination: i32) {
        self.runs.push(direction, BlockPair { source, destination });
        self.stats.copied_bytes += self.options.shape.block_bytes();
        // Who admits and never stages shall not fill memory with what is to be copied.
        if self.runs.blocks().is_multiple_of(BLOCKS_DECIDED_MAX)
            && let Err(error) = self.send_copies()
        {
            tracing::debug!(%error, "copies were refused, and are tried again with the next step");
        }
    }

    /// Enqueues the copies that were decided, on every device in the order of their decision. What one
    /// device has been sent, before another refused, it is not sent again.
    pub(crate) fn send_copies(&mut self) -> Result<(), HostCopyError> {
        if self.runs.is_empty() {
            return Ok(());
        }
        // Before the first is enqueued, so that also copies of which only some are, are waited for.
        self.copies.get_or_insert_with(|| self.gate.lease());
        #[cfg(all(feature = "sabotage", debug_assertions))]
        if self.sabotage.sends_backwards {
            self.runs.reverse();
        }
        let runs = self.runs.as_slice();
        let sent = self.parts.iter_mut().try_for_each(|part| part.send(runs));
        if let Err(error) = sent {
            self.runs.end_last();
            return Err(error);
        }
        self.parts.iter_mut().for_each(|part| part.sent_runs = 0);
        self.runs.clear();
        Ok(())
    }
}
