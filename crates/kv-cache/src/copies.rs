//! Copies between device and host memory, decided by the pool and enqueued here.

use kv_kernels::{BlockPair, link::HostDirection};
use kv_pool::{Claimed, Offload, Onboarded, Pinned};

use crate::{AdmitError, HostCopyError, KvCache};

/// Copies that are enqueued without a step, when there are so many.
const BLOCKS_DECIDED_MAX: usize = 1 << 16;

impl KvCache {
    /// Decides the copy of evicted content to host memory.
    pub(crate) fn offload(&mut self, offload: Offload) {
        self.note_copy(HostDirection::ToHost, offload.from().as_i32(), offload.to().as_i32());
        self.stats.offloaded_blocks += 1;
        // Every later use of the host slot is a copy on the same streams, after this one.
        offload.commit();
    }

    /// Decides the copies of content in host memory to as many claimed blocks.
    ///
    /// A copy is in stream order before every later use of the host block that it reads, so the pins of
    /// what has not moved need not outlive the call.
    pub(crate) fn onboard(
        &mut self,
        pinned: Pinned,
        target: Claimed,
    ) -> Result<Onboarded, AdmitError> {
        let onboard = self
            .pool
            .begin_onboard(pinned, target)
            .map_err(|refused| AdmitError::Onboard(refused.reason))?;
        for (from, to) in onboard.pairs() {
            self.note_copy(HostDirection::ToPages, from.id.as_i32(), to.id.as_i32());
            self.arriving.insert(to.id.index());
            self.stats.onboarded_blocks += 1;
        }
        Ok(onboard.commit())
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
