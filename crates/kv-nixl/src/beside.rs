//! Reads in a thread of their own, while the caller looks at what has come.
//!
//! UCX may copy in the thread that makes its calls, as it does from another process's memory. So a long read makes them in a second
//! thread: the caller checks one piece while the next one is copied.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Instant;

use cuda_driver::guard;
use kv_remote::message::Span;

use crate::landing::{Came, Landing};
use crate::piece::{Arrived, Here, Taker};
use crate::reader::{Failure, Reader};

/// Landings that are written or looked at, at most.
const LANDINGS: usize = 4;

/// Hands pieces to another thread.
struct There {
    came: Sender<Arrived>,
    looked_at: Receiver<Arc<Landing>>,
    /// Landings that are with the other thread.
    lent: usize,
}

impl Taker for There {
    fn take(&mut self, piece: Arrived, _: &mut Vec<Arc<Landing>>) -> Result<bool, Failure> {
        self.lent += 1;
        Ok(self.came.send(piece).is_ok())
    }

    fn room(&self) -> usize {
        LANDINGS.saturating_sub(self.lent)
    }

    fn give_back(&mut self, free: &mut Vec<Arc<Landing>>) {
        let before = free.len();
        free.extend(self.looked_at.try_iter());
        self.lent -= free.len() - before;
    }

    fn wait(&mut self, deadline: Instant, free: &mut Vec<Arc<Landing>>) -> Result<bool, Failure> {
        let left = deadline.saturating_duration_since(Instant::now());
        match self.looked_at.recv_timeout(left) {
            Ok(landing) => {
                self.lent -= 1;
                free.push(landing);
                Ok(true)
            }
            Err(RecvTimeoutError::Timeout) => Err(Failure::Unused),
            Err(RecvTimeoutError::Disconnected) => Ok(false),
        }
    }
}

/// Reads spans by a second thread, and says each once it has come, in order and on the thread of the caller.
///
/// If `each` panics, so does this, once the second thread has ended: at its next piece, or by the deadline. What is on its way then stays
/// with the reader.
pub(crate) fn read(
    reader: &mut Reader,
    spans: &[Span],
    deadline: Instant,
    each: &mut dyn FnMut(usize, Came<'_>),
) -> Result<(), Failure> {
    let ended = std::thread::scope(|scope| {
        // This side's ends are dropped with this closure, whether it panics or not: the second thread waits for nobody who is gone.
        let (came, pieces) = channel::<Arrived>();
        let (give_back, looked_at) = channel();
        let reader = &mut *reader;
        let bring = move || {
            let mut there = There { came, looked_at, lent: 0 };
            let brought = reader.bring(spans, deadline, &mut there);
            (brought, there.looked_at)
        };
        let thread = std::thread::Builder::new().name("kv-nixl-read".to_owned());
        let thread = thread.spawn_scoped(scope, bring).ok()?;
        for piece in pieces.iter() {
            let landing = guard!("nixl.landing-returns-last", piece.say(spans, each), else {
                drop(give_back.send(Arc::clone(&piece.landing)));
                piece.say(spans, each);
                continue;
            });
            // The receiver is kept until all have been sent.
            drop(give_back.send(landing));
        }
        Some(thread.join())
    });
    match ended {
        Some(Ok((brought, looked_at))) => {
            reader.give_back(looked_at.try_iter());
            brought
        }
        Some(Err(panic)) => std::panic::resume_unwind(panic),
        // The system has no thread: it is slower.
        None => reader.bring(spans, deadline, &mut Here { spans, each }),
    }
}
