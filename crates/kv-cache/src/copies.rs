//! Copies between device and host memory, decided by the pool and enqueued here.

use kv_pool::{BlockPin, ClaimedBlock, Offload, Onboarded};

use crate::sequence::Held;
use crate::{AdmitError, KvCache};

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
    /// Enqueues the copy of evicted content to host memory.
    pub(crate) fn offload(&mut self, offload: Offload) -> Result<(), AdmitError> {
        self.expect_copies();
        for part in &self.parts {
            part.offload(offload.from().index(), offload.to().index())?;
        }
        self.stats.offloaded_blocks += 1;
        self.stats.copied_bytes += self.options.shape.block_bytes();
        // Every later use of the host slot is a copy on the same streams.
        offload.commit();
        Ok(())
    }

    /// Enqueues the copy of content in host memory to a claimed block.
    pub(crate) fn onboard(
        &mut self,
        pin: BlockPin,
        target: ClaimedBlock,
    ) -> Result<Arrival, AdmitError> {
        let onboard = self
            .pool
            .begin_onboard(pin, target)
            .map_err(|refused| AdmitError::Onboard(refused.reason))?;
        self.expect_copies();
        for part in &self.parts {
            part.onboard(onboard.from().index(), onboard.to().index())?;
        }
        self.stats.onboarded_blocks += 1;
        self.stats.copied_bytes += self.options.shape.block_bytes();
        Ok(match onboard.commit() {
            Onboarded::Moved(pin) => Arrival::Moved(pin),
            Onboarded::Copied { copy, source } => Arrival::Copied { copy, source },
        })
    }

    /// To be called before a copy is enqueued, so that also copies of which only some can be enqueued
    /// are waited for.
    fn expect_copies(&mut self) {
        self.copies.get_or_insert_with(|| self.gate.lease());
    }
}
