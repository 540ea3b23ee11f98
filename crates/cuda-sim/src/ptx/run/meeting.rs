//! The order between threads that met: which accesses of others came before.

use std::rc::Rc;

use cuda_driver::guard;

use super::block::ThreadBlock;
use super::conflicts::{KnownStretches, StretchId};

/// The state of a thread when it arrived at a barrier.
#[derive(Clone, Debug)]
pub(super) struct Came {
    pub(super) thread: usize,
    stretch: StretchId,
    known: Option<KnownStretches>,
}

/// Adds to `known` the stretches of the arrived threads, and the stretches that these knew.
pub(super) fn gather<'c>(known: &mut [StretchId], came: impl IntoIterator<Item = &'c Came>) {
    let mut last: Option<&KnownStretches> = None;
    for came in came {
        if let Some(theirs) = &came.known
            && !last.is_some_and(|last| Rc::ptr_eq(last, theirs))
        {
            known
                .iter_mut()
                .zip(theirs.iter())
                .for_each(|(mine, &theirs)| *mine = theirs.max(*mine));
            last = Some(theirs);
        }
        let own = &mut known[came.thread];
        *own = came.stretch.max(*own);
    }
}

impl ThreadBlock<'_, '_> {
    /// Ends a thread's stretch, so that other threads can be ordered after it.
    pub(super) fn come(&mut self, thread: usize) -> Came {
        let came = Came {
            thread,
            stretch: self.threads[thread].stretch,
            known: self.known[thread].clone(),
        };
        guard!("sim.arrival-ends-stretch", self.threads[thread].stretch = 0);
        came
    }

    /// All threads of the block have met: every earlier access is ordered before every later one.
    pub(super) fn meet_all(&mut self) {
        self.meetings += 1;
        self.known.fill(None);
        for thread in &mut self.threads {
            thread.stretch = 0;
        }
    }

    /// Orders the threads `after` behind all that `came`.
    pub(super) fn meet(&mut self, came: &[Came], after: impl Iterator<Item = usize>) {
        let mut known = vec![0; self.threads.len()];
        gather(&mut known, came);
        let known: KnownStretches = known.into();
        for thread in after {
            self.known[thread] = Some(known.clone());
            self.threads[thread].stretch = 0;
        }
    }
}
