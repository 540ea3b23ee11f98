//! Which threads wait for which device's thread, so that a wait that would never end is refused.

use cuda_driver::guard;
use std::sync::Arc;
use std::thread::{self, ThreadId};

use parking_lot::Mutex;

/// What a thread waits for.
pub(crate) trait Awaited: Send + Sync {
    /// Whether it has happened.
    fn is_over(&self) -> bool;
}

struct Wait {
    waiter: ThreadId,
    /// The thread that makes it happen, when its tasks before are over.
    worker: ThreadId,
    what: Arc<dyn Awaited>,
}

/// Of all threads of the process, each at most once.
static WAITS: Mutex<Vec<Wait>> = Mutex::new(Vec::new());

/// The wait of this thread, until it is dropped.
pub(crate) struct Waiting(ThreadId);

impl Waiting {
    /// Notes that this thread waits for `what`, which `worker` makes happen. `None` where `worker` waits for this thread
    /// itself, directly or by others: neither would ever go on.
    ///
    /// What is over by now is no wait, though its waiter may not have noticed. What is not, in such a circle, cannot be
    /// over later: the last of it depends on the calling thread.
    pub(crate) fn begin(worker: ThreadId, what: Arc<dyn Awaited>) -> Option<Self> {
        let waiter = thread::current().id();
        let mut waits = WAITS.lock();
        let mut last = worker;
        // Threads without a wait of this one in their way are at most as many as there are waits.
        for _ in 0..=waits.len() {
            if guard!("multigpu.circle-refused", last == waiter, else false) {
                drop(waits);
                return None;
            }
            let next = waits.iter().find(|wait| wait.waiter == last && !wait.what.is_over());
            let Some(next) = next else { break };
            last = next.worker;
        }
        waits.push(Wait { waiter, worker, what });
        Some(Self(waiter))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut waits = WAITS.lock();
        let own = waits.iter().position(|wait| wait.waiter == self.0);
        let own = own.map(|index| waits.swap_remove(index));
        drop(waits);
        // Its result, if it has one, is dropped without the lock.
        drop(own);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;

    use super::*;

    #[derive(Default)]
    struct Over(AtomicBool);

    impl Awaited for Over {
        fn is_over(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn the_wait_that_closes_a_circle_is_refused_as_long_as_it_is_one() {
        let (here, awaited) = (thread::current().id(), Arc::new(Over::default()));
        let what = || Arc::clone(&awaited) as Arc<dyn Awaited>;
        assert!(Waiting::begin(here, what()).is_none(), "of itself");
        thread::scope(|scope| {
            // The second waits for the first, and the third for the second.
            let mut last = here;
            let mut ends = Vec::new();
            for _ in 0..2 {
                let (end, ended) = channel::<()>();
                let (begun, is_begun) = channel();
                let (worker, what) = (last, what());
                let waiter = scope.spawn(move || {
                    let waiting = Waiting::begin(worker, what);
                    begun.send(waiting.is_some()).unwrap();
                    let _ = ended.recv();
                });
                assert!(is_begun.recv().unwrap());
                last = waiter.thread().id();
                ends.push(end);
                assert!(Waiting::begin(last, what_never_ends()).is_none());
            }
            // Who has not noticed yet that its wait is over waits for nobody.
            awaited.0.store(true, Ordering::Relaxed);
            assert!(Waiting::begin(last, what_never_ends()).is_some());
        });
        assert!(WAITS.lock().iter().all(|wait| wait.waiter != here && wait.worker != here));
    }

    fn what_never_ends() -> Arc<dyn Awaited> {
        Arc::new(Over::default())
    }
}
