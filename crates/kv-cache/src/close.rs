//! Clean-up: wait, unmap, free, and report every refusal.

use crate::step::Latest;
use crate::{CloseError, KvCache};

impl KvCache {
    /// Waits for all devices and releases everything: mappings, addresses, physical and pinned
    /// memory. Sequences that are still alive lose their memory; dropping them stays safe.
    ///
    /// Dropping a cache instead is safe at any time. A drop does not wait. It releases the memory
    /// under the blocks if that is provably at rest. The pinned memory is freed by the device's
    /// next allocation, or with the device.
    ///
    /// # Ordering
    /// Waits on the host for the compute and transfer streams.
    ///
    /// # Errors
    /// Every refused call, of every device. With a step open, or a device that cannot be waited
    /// for, the cache is dropped instead.
    #[track_caller]
    pub fn close(self) -> Result<(), Vec<CloseError>> {
        let _site = cuda_driver::site::enter();
        // What is left of it is dropped before the place ends; an argument would be after it.
        let mut cache = self;
        if cache.has_open_step() {
            return Err(vec![CloseError::StepOpen]);
        }
        // All devices first: their work shares one gate.
        let restless: Vec<_> = cache
            .parts
            .iter()
            .filter(|part| !part.come_to_rest())
            .map(|part| CloseError::NotAtRest { ordinal: part.device().ordinal() })
            .collect();
        if !restless.is_empty() {
            return Err(restless);
        }
        // Leases of copies and of a dropped step have no fence after their work: with them dropped, each part
        // waits for all work of its device before it unmaps anything.
        cache.copies = None;
        *cache.latest.lock() = Latest::Over;
        let errors: Vec<_> = cache.parts.into_iter().flat_map(|part| part.close()).collect();
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }
}
