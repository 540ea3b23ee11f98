//! Waits for room in a full queue.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::completion::quietly;
use super::queue::Queue;

/// A future that is ready when a device thread may accept a task again, or accepts none any more.
///
/// Another caller may be faster: submit, and wait again if that is refused. The future reserves no
/// place.
#[must_use = "a future does nothing unless it is awaited"]
pub struct Room<'a, C = cuda_driver::Device> {
    queue: &'a Queue<C>,
    /// Place among the waiting ones.
    id: Option<u64>,
}

impl<'a, C> Room<'a, C> {
    pub(crate) fn new(queue: &'a Queue<C>) -> Self {
        Self { queue, id: None }
    }
}

impl<C> Future for Room<'_, C> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        this.queue.poll_room(&mut this.id, context.waker())
    }
}

impl<C> Drop for Room<'_, C> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            quietly(|| self.queue.leave_room(id));
        }
    }
}

impl<C> fmt::Debug for Room<'_, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Room").field("waits", &self.id.is_some()).finish_non_exhaustive()
    }
}
