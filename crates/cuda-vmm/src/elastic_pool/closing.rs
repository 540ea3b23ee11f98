//! A pool that is being closed.

use crate::pages::close::release_pages;
use crate::pages::{Closing, PagePool};
use crate::{CloseReport, gate::NotAtRest};

/// A pool that is being closed; see [`ElasticPool::close`](crate::ElasticPool::close).
///
/// Dropping it instead follows the rule for dropping a [`Reservation`](crate::pages::Reservation).
#[derive(Debug)]
#[must_use = "nothing is unmapped until `try_complete` or `wait`"]
pub struct PoolClosing {
    pub(super) closing: Closing,
    pub(super) pages: PagePool,
}

impl PoolClosing {
    /// Finishes if everything is at rest: unmaps every page, frees the addresses, and releases the
    /// physical pages. Does not wait for the device.
    ///
    /// # Errors
    /// [`NotAtRest`] with this request; nothing was unmapped.
    #[track_caller]
    pub fn try_complete(self) -> Result<CloseReport, NotAtRest<Self>> {
        let _site = cuda_driver::site::enter();
        let Self { closing, pages } = self;
        Self::finish(closing.try_complete(), pages)
    }

    /// Waits on the host until everything is at rest, and finishes.
    ///
    /// # Ordering
    /// Waits for the leases and the fences, and without either for all work of the device. Never
    /// call it while holding a lease of the same gate: it would deadlock.
    ///
    /// # Errors
    /// [`NotAtRest`] with this request if a fence cannot be waited for.
    #[track_caller]
    pub fn wait(self) -> Result<CloseReport, NotAtRest<Self>> {
        let _site = cuda_driver::site::enter();
        let Self { closing, pages } = self;
        Self::finish(closing.wait(), pages)
    }

    fn finish(
        closed: Result<CloseReport, NotAtRest<Closing>>,
        pages: PagePool,
    ) -> Result<CloseReport, NotAtRest<Self>> {
        match closed {
            Ok(mut report) => {
                report.pages.extend(pages.take_idle());
                release_pages(&mut report);
                Ok(report)
            }
            Err(NotAtRest { request, reason }) => {
                Err(NotAtRest { request: Self { closing: request, pages }, reason })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cuda_driver::Device;
    use cuda_sim::{SimConfig, SimDriver};

    use crate::limit::Holder;
    use crate::{ElasticPool, ElasticPoolOptions};

    #[test]
    fn a_limit_that_asks_while_a_pool_closes_takes_none_of_its_pages() {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        let device = Device::open(Arc::new(sim), 0).unwrap();
        let options = ElasticPoolOptions {
            block_bytes: 1 << 21,
            capacity_blocks: 4,
            page_bytes: None,
            initial_blocks: 4,
        };
        let pool = ElasticPool::new(&device, options).unwrap();
        assert_eq!(pool.park_to(1, &[]).unwrap().parked_blocks, 3);
        // The limit has found the pool just before it closes.
        let found = Arc::clone(&pool.core);
        let closing = pool.close(&[]);
        assert_eq!(found.release_parked(u64::MAX), 0);
        let report = closing.try_complete().unwrap();
        assert_eq!((report.unmapped, report.released), (4, 4));
    }
}
