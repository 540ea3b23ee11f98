//! Pinning slab by slab: at once, when asked, or behind the caller's back.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use cuda_driver::host_pages::PinError;
use parking_lot::{Condvar, Mutex};

use crate::retire::PoolShared;
use crate::slab::UnpinnedSlab;

/// When a pool's slabs are pinned. The driver takes about 0.4 s a GiB for it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum Pinning {
    /// All of them before the pool is handed out.
    #[default]
    AtOnce,
    /// One slab of each size before the pool is handed out, the rest on a thread of its own, which
    /// ends when all are pinned, when the driver refuses, or with the pool.
    Background,
    /// One slab of each size before the pool is handed out, the rest by calls of
    /// [`StagingPool::pin_next`](crate::StagingPool::pin_next), on the caller's thread.
    OnCall,
}

/// What is yet to be pinned.
#[derive(Debug)]
pub(crate) struct Backlog {
    /// Held for moments: the driver is called without it.
    state: Mutex<BacklogState>,
    /// Told when a slab is no longer under way.
    settled: Condvar,
}

#[derive(Debug)]
struct BacklogState {
    slabs: VecDeque<UnpinnedSlab>,
    /// Slabs that some thread is pinning at the moment.
    under_way: usize,
    /// What stopped the pinning.
    refused: Option<PinError>,
    /// Threads in [`wait`](Backlog::wait).
    #[cfg(test)]
    waiting: usize,
}

impl Backlog {
    pub(crate) fn new(slabs: VecDeque<UnpinnedSlab>) -> Self {
        let state = BacklogState {
            slabs,
            under_way: 0,
            refused: None,
            #[cfg(test)]
            waiting: 0,
        };
        Self { state: Mutex::new(state), settled: Condvar::new() }
    }

    /// Takes one slab off the list, to be pinned; [`settle`](Backlog::settle) follows.
    pub(crate) fn take(&self) -> Option<UnpinnedSlab> {
        let mut state = self.state.lock();
        let slab = state.slabs.pop_front()?;
        state.under_way += 1;
        Some(slab)
    }

    /// Says how the pinning of `slab` ended; a refused one goes back on the list.
    pub(crate) fn settle(&self, slab: UnpinnedSlab, refused: Option<PinError>) {
        let mut state = self.state.lock();
        state.under_way -= 1;
        if refused.is_some() {
            state.slabs.push_front(slab);
        }
        state.refused = refused;
        drop(state);
        self.settled.notify_all();
    }

    /// Forgets what is not under way.
    pub(crate) fn give_up(&self) {
        self.state.lock().slabs.clear();
    }

    /// Waits until no thread is pinning.
    ///
    /// # Ordering
    /// Waits on the host, for one slab of each pinning thread.
    pub(crate) fn wait(&self) {
        let mut state = self.state.lock();
        while state.under_way > 0 {
            #[cfg(test)]
            {
                state.waiting += 1;
            }
            self.settled.wait(&mut state);
        }
    }

    /// Buffers that are not pinned yet, and what the last attempt was refused with.
    pub(crate) fn outlook(&self) -> (usize, Option<PinError>) {
        let state = self.state.lock();
        (state.slabs.iter().map(|slab| slab.buffers).sum(), state.refused)
    }
}

/// Pins what is left, on a thread of its own. The pool may be dropped meanwhile.
///
/// The thread holds the pool for one slab at a time, and nothing else.
pub(crate) fn spawn(shared: &Arc<PoolShared>) -> std::io::Result<()> {
    let pool = Arc::downgrade(shared);
    let body = move || while pin_one(&pool) {};
    // Detached: it ends by itself, and `close` waits for the slab under way.
    std::thread::Builder::new().name("kv-stage-pin".to_owned()).spawn(body).map(drop)
}

fn pin_one(pool: &Weak<PoolShared>) -> bool {
    let Some(pool) = pool.upgrade() else { return false };
    match pool.pin_next() {
        Ok(more) => more,
        Err(error) => {
            // Told again by `StagingPool::finish_pinning`.
            tracing::warn!(%error, "pinning of staging buffers stopped");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use cuda_driver::Device;
    use cuda_driver::host_pages::{HostPagesError, PinError};
    use cuda_sim::{SimConfig, SimDriver};

    use crate::{PoolOptions, StagingOptions, StagingPool};

    /// A pool of which one slab is being pinned, by a thread that the test stands for, while another
    /// thread runs `work`; both go on when that thread waits for the slab, or is done without it. Then the
    /// slab is pinned, or it is `refused`.
    fn while_pinning(
        refused: Option<PinError>,
        work: impl FnOnce(StagingPool) + Send + 'static,
    ) -> (SimDriver, StagingPool) {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        let device = Device::open(std::sync::Arc::new(sim.clone()), 0).unwrap();
        let class = StagingOptions { buffer_bytes: 4096, buffers_max: 3 };
        let options = PoolOptions {
            slab_bytes: 4096,
            pinning: super::Pinning::OnCall,
            ..PoolOptions::new(vec![class])
        };
        let pool = StagingPool::with_classes(&device, &options).unwrap();
        let shared = &pool.shared;
        let slab = shared.backlog.take().unwrap();
        let clone = pool.clone();
        let other = std::thread::spawn(move || work(clone));
        while shared.backlog.state.lock().waiting == 0 && !other.is_finished() {
            std::thread::yield_now();
        }
        if refused.is_none() {
            let (pooled, got) = slab.pin(&device, shared.memory, &shared.pinned_bytes).unwrap();
            shared.state.lock().admit(slab.class, pooled, got);
        }
        shared.backlog.settle(slab, refused);
        other.join().unwrap();
        (sim, pool)
    }

    #[test]
    fn close_waits_for_a_slab_that_is_being_pinned() {
        let (sim, pool) = while_pinning(None, |pool| pool.close().unwrap());
        assert_eq!((pool.unpinned(), pool.pinned_bytes(), sim.pinned_bytes()), (0, 0, 0));
    }

    #[test]
    fn a_slab_that_is_refused_while_its_pool_is_closed_is_given_up() {
        let refused = PinError::Pages(HostPagesError::Unsupported);
        let (_, pool) = while_pinning(Some(refused), |pool| pool.close().unwrap());
        assert_eq!(pool.unpinned(), 0);
        assert_eq!(pool.pin_next(), Ok(false), "a closed pool pins nothing");
    }

    #[test]
    fn finished_pinning_waits_for_a_slab_that_another_thread_pins() {
        let (_, pool) = while_pinning(None, |pool| {
            pool.finish_pinning().unwrap();
            assert_eq!((pool.unpinned(), pool.pinned_bytes()), (0, 3 * 4096));
        });
        assert_eq!(pool.pinned_bytes(), 3 * 4096);
    }
}
