//! Copies between device and host memory, decided by the pool and enqueued here.

use kv_kernels::{BlockPair, link::HostDirection};
use kv_pool::{
    Claimed, Pinned,
    moves::{Offload, Onboarded},
};

use crate::{AdmitError, HostCopyError, KvCache};

/// So many decided copies are enqueued without a step.
const BLOCKS_DECIDED_MAX: usize = 1 << 16;

impl KvCache {
    /// Decides the copy of evicted content to host memory.
    pub(crate) fn offload(&mut self, offload: Offload) {
        self.note_copy(HostDirection::ToHost, offload.from().as_i32(), offload.to().as_i32());
        self.stats.offloaded_blocks += 1;
        // Every later use of the host block is a copy on the same streams, after this one.
        offload.commit();
    }

    /// Decides the copies of content in host memory to as many claimed blocks.
    ///
    /// In its stream the copy comes before every later use of its host block, so the pins of blocks
    /// that did not move need not outlive the call.
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
        // A caller that admits and never stages must not fill memory with decided copies.
        if self.runs.blocks().is_multiple_of(BLOCKS_DECIDED_MAX)
            && let Err(error) = self.send_copies()
        {
            tracing::debug!(%error, "copies were refused, and are tried again with the next step");
        }
    }

    /// Enqueues the decided copies, on every device in the order of the decisions. After a refusal,
    /// copies that a device has already been sent are not sent to it again.
    pub(crate) fn send_copies(&mut self) -> Result<(), HostCopyError> {
        if self.runs.is_empty() {
            return Ok(());
        }
        // Taken before the first copy, so that copies which are enqueued in part are waited for
        // too.
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
        self.parts.iter_mut().for_each(|part| part.sent.clear());
        self.runs.clear();
        Ok(())
    }
}
