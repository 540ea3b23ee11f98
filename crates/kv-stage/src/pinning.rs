//! Pins the slabs one by one: at once, on request, or in the background.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use cuda_driver::guard;
use cuda_driver::host_pages::PinError;
use parking_lot::{Condvar, Mutex};

use crate::retire::PoolShared;
use crate::slab::UnpinnedSlab;

/// When a pool's slabs are pinned. The driver takes about 0.4 s per GiB.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum Pinning {
    /// All slabs before the pool is returned.
    #[default]
    AtOnce,
    /// One slab of each size before the pool is returned. A background thread pins the rest. It
    /// ends when all are pinned, when the driver refuses, or with the pool.
    Background,
    /// One slab of each size before the pool is returned. Calls of
    /// [`StagingPool::pin_next`](crate::StagingPool::pin_next) pin the rest, on the caller's
    /// thread.
    OnCall,
}

/// The slabs that are not pinned yet.
#[derive(Debug)]
pub(crate) struct Backlog {
    /// Held briefly: the driver is called without it.
    state: Mutex<BacklogState>,
    /// Notified when the pinning of a slab has ended.
    settled: Condvar,
}

#[derive(Debug)]
struct BacklogState {
    slabs: VecDeque<UnpinnedSlab>,
    /// Number of buffers of the slabs that are being pinned now. A slab has at least one.
    under_way: usize,
    /// The error that stopped the pinning.
    refused: Option<PinError>,
    /// Number of threads in [`wait`](Backlog::wait).
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

    /// Takes one slab to be pinned. The caller then calls [`settle`](Backlog::settle).
    pub(crate) fn take(&self) -> Option<UnpinnedSlab> {
        let mut state = self.state.lock();
        let slab = state.slabs.pop_front()?;
        state.under_way += slab.buffers;
        Some(slab)
    }

    /// Records the result of pinning `slab`. A refused slab returns to the list.
    pub(crate) fn settle(&self, slab: UnpinnedSlab, refused: Option<PinError>) {
        let mut state = self.state.lock();
        state.under_way -= slab.buffers;
        if refused.is_some() {
            state.slabs.push_front(slab);
        }
        state.refused = refused;
        drop(state);
        self.settled.notify_all();
    }

    /// Drops all slabs that are not being pinned.
    pub(crate) fn give_up(&self) {
        self.state.lock().slabs.clear();
    }

    /// Waits until no thread is pinning.
    ///
    /// # Ordering
    /// Waits on the host, at most for one slab per pinning thread.
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

    /// Number of buffers that are not in the pool yet, and the error of the last attempt, if it was
    /// refused.
    pub(crate) fn outlook(&self) -> (usize, Option<PinError>) {
        let state = self.state.lock();
        let listed: usize = state.slabs.iter().map(|slab| slab.buffers).sum();
        let under_way = guard!("stage.pinning-is-unpinned", state.under_way, else 0);
        (listed + under_way, state.refused)
    }
}

/// Pins the rest in a background thread. The pool may be dropped meanwhile.
///
/// The thread holds the pool for one slab at a time, and nothing else.
pub(crate) fn spawn(shared: &Arc<PoolShared>) -> std::io::Result<()> {
    let pool = Arc::downgrade(shared);
    let body = move || while pin_one(&pool) {};
    // Detached: it ends by itself, and `close` waits for the slab being pinned.
    std::thread::Builder::new().name("kv-stage-pin".to_owned()).spawn(body).map(drop)
}

fn pin_one(pool: &Weak<PoolShared>) -> bool {
    let Some(pool) = pool.upgrade() else { return false };
    match pool.pin_next() {
        Ok(more) => more,
        Err(error) => {
            // `StagingPool::finish_pinning` reports the error again.
            tracing::warn!(%error, "pinning of staging buffers stopped");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use cuda_driver::Device;
    use cuda_driver::host_pages::PinError;
    use cuda_sim::{SimConfig, SimDriver};

    use crate::{PoolOptions, StagingOptions, StagingPool};

    /// A pool with one slab being pinned by the test's own thread, while another thread runs
    /// `work`. Both continue when that thread waits for the slab, or finishes without it. Then the
    /// slab is pinned, or `refused`.
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
        assert_eq!(pool.unpinned(), 2, "what is being pinned is not there yet");
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
        let refused = PinError::Unsupported;
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
