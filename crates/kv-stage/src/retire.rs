//! The state of the buffers: free, or still in use by the device, and until when.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use cuda_driver::{Device, DeviceError, Fence, guard};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::StagingOptions;
use crate::error::AcquireError;
use crate::slab::PooledBuffer;

/// Fences after all reads of a buffer.
pub(crate) type Awaited = SmallVec<[Fence; 2]>;

/// The state shared by the handles of a pool.
#[derive(Debug)]
pub(crate) struct PoolShared {
    pub(crate) device: Device,
    pub(crate) options: StagingOptions,
    /// Guards only the lists: driver calls are made without it.
    pub(crate) state: Mutex<PoolLists>,
    /// Bytes of the slab, until it is dropped.
    pub(crate) pinned_bytes: Arc<AtomicU64>,
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(crate) reuse_before_event: std::sync::atomic::AtomicBool,
}

#[derive(Debug)]
pub(crate) struct PoolLists {
    /// # Invariants
    /// No device operation refers to a buffer in this list, unless the device that ran it is lost:
    /// a buffer enters new, unsubmitted, or once every fence after its readers is at rest.
    pub(crate) free: Vec<PooledBuffer>,
    /// Submitted buffers, in order of submission.
    pub(crate) submitted: Vec<SubmittedBuffer>,
    /// Number of buffers that callers hold.
    pub(crate) held: usize,
    pub(crate) live_peak: usize,
    pub(crate) sequence_next: u64,
    pub(crate) closed: bool,
}

/// A submitted buffer. It is free again when all of `awaited` are at rest.
#[derive(Debug)]
pub(crate) struct SubmittedBuffer {
    sequence: u64,
    /// The single stream that reads the buffer: its submissions complete in order, so only the first is
    /// polled. `None` with several readers, or without an event after them: those are all polled.
    stream: Option<StreamKey>,
    awaited: Awaited,
    pooled: PooledBuffer,
}

/// Context and handle.
pub(crate) type StreamKey = (u64, u64);

impl PoolShared {
    /// Takes a free buffer.
    ///
    /// Events are queried only if no buffer is free, and then only until one is: a
    /// query costs the host about 2 µs, and a pool of many buffers would make one call in many pay for all.
    pub(crate) fn take(&self) -> Result<PooledBuffer, AcquireError> {
        if self.device.poison().is_none() {
            let mut state = self.state.lock();
            self.check(&state)?;
            if let Some(pooled) = state.pop() {
                return Ok(pooled);
            }
        }
        let (mut outcome, mut unfinished) = (Ok(()), SmallVec::new());
        loop {
            let some = self.retire_oldest(&mut unfinished, &mut outcome);
            if self.device.poison().is_some() {
                // It reads nothing any more: all buffers come back, and the loss is reported.
                guard!(
                    "stage.lost-buffers-return",
                    while self.retire_oldest(&mut unfinished, &mut outcome) {}
                );
            }
            let mut state = self.state.lock();
            self.check(&state)?;
            if let Some(pooled) = state.pop() {
                return Ok(pooled);
            }
            if !some {
                // An event that cannot be queried is the reason why no buffer came back.
                outcome?;
                let max = self.options.buffers_max;
                return Err(AcquireError::Exhausted { live: state.live(), max });
            }
        }
    }

    /// Refuses a request that no returning buffer can serve.
    fn check(&self, state: &PoolLists) -> Result<(), AcquireError> {
        if state.closed {
            Err(AcquireError::Closed)
        } else if let Some(first) = self.device.poison() {
            Err(AcquireError::Device(DeviceError::Poisoned { first }))
        } else {
            Ok(())
        }
    }

    /// Takes back a buffer that its holder did not submit.
    pub(crate) fn give_back(&self, pooled: PooledBuffer) {
        let mut state = self.state.lock();
        state.held -= 1;
        let unwanted = state.put_free(pooled);
        drop(state);
        drop(unwanted);
    }

    /// Keeps a submitted buffer until the fences after its readers are at rest.
    pub(crate) fn keep(&self, pooled: PooledBuffer, stream: Option<StreamKey>, awaited: Awaited) {
        let mut state = self.state.lock();
        state.held -= 1;
        #[cfg(all(feature = "sabotage", debug_assertions))]
        if self.reuse_before_event.load(std::sync::atomic::Ordering::Relaxed) {
            // Never a buffer of a closed pool: tests use sabotage only with open pools.
            drop(state.put_free(pooled));
            return;
        }
        let sequence = state.sequence_next;
        state.sequence_next += 1;
        state.submitted.push(SubmittedBuffer { sequence, stream, awaited, pooled });
    }

    /// Moves every buffer whose readers have finished to the free list.
    ///
    /// Events are queried without the lock, so several threads may do this at once. A submission is
    /// removed by its number, so an answer about one that another thread removed has no effect.
    pub(crate) fn retire_completed(&self) -> Result<(), DeviceError> {
        let (mut outcome, mut unfinished) = (Ok(()), SmallVec::new());
        while self.retire_oldest(&mut unfinished, &mut outcome) {}
        outcome
    }

    /// Moves to the free list the oldest buffer of each stream, if its readers have finished, and those with
    /// several readers that have. Whether there was one. `unfinished` collects what has not, and `outcome` the
    /// first refusal.
    fn retire_oldest(
        &self,
        unfinished: &mut SmallVec<[u64; 8]>,
        outcome: &mut Result<(), DeviceError>,
    ) -> bool {
        let candidates = self.state.lock().candidates(unfinished);
        let mut finished: SmallVec<[u64; 8]> = SmallVec::new();
        for (sequence, awaited) in candidates {
            match Fence::are_at_rest(&awaited) {
                Ok(at_rest) if guard!("stage.reuse-waits", at_rest, else true) => {
                    finished.push(sequence);
                }
                Ok(_) => unfinished.push(sequence),
                Err(error) => {
                    tracing::warn!(%error, "a staging buffer's event could not be queried");
                    if outcome.is_ok() {
                        *outcome = Err(error);
                    }
                    guard!(
                        "stage.unknown-readers-hold",
                        unfinished.push(sequence),
                        else finished.push(sequence)
                    );
                }
            }
        }
        let gone = self.state.lock().retire(&finished);
        drop(gone);
        !finished.is_empty()
    }

    /// The fences of the oldest submitted buffer, if its number is below `until`.
    pub(crate) fn oldest_submitted(&self, until: u64) -> Option<Awaited> {
        let state = self.state.lock();
        let oldest = state.submitted.first()?;
        let is_before = guard!("stage.drains-end", oldest.sequence < until, else true);
        is_before.then(|| oldest.awaited.clone())
    }
}

impl PoolLists {
    fn pop(&mut self) -> Option<PooledBuffer> {
        let pooled = self.free.pop()?;
        self.held += 1;
        self.live_peak = self.live_peak.max(self.live());
        Some(pooled)
    }

    pub(crate) fn live(&self) -> usize {
        self.held + self.submitted.len()
    }

    /// Puts a buffer on the free list, or returns it for dropping if the pool is closed.
    #[must_use]
    fn put_free(&mut self, pooled: PooledBuffer) -> Option<PooledBuffer> {
        if guard!("stage.closed-pools-drop", self.closed, else false) {
            return Some(pooled);
        }
        self.free.push(pooled);
        None
    }

    /// The submissions worth querying: the first of each stream, and all with several readers,
    /// except those known to be unfinished.
    fn candidates(&self, unfinished: &[u64]) -> SmallVec<[(u64, Awaited); 8]> {
        let mut streams: SmallVec<[StreamKey; 8]> = SmallVec::new();
        let mut candidates = SmallVec::new();
        for submission in &self.submitted {
            if let Some(stream) = submission.stream {
                if streams.contains(&stream) {
                    continue;
                }
                streams.push(stream);
            }
            if !unfinished.contains(&submission.sequence) {
                candidates.push((submission.sequence, submission.awaited.clone()));
            }
        }
        candidates
    }

    /// Frees the buffers of the submissions numbered `finished`; returns what must be dropped without
    /// the lock, with the buffers that a closed pool drops.
    #[must_use]
    fn retire(&mut self, finished: &[u64]) -> SmallVec<[(Awaited, Option<PooledBuffer>); 8]> {
        let mut gone = SmallVec::new();
        for sequence in finished {
            let position =
                self.submitted.iter().position(|submission| submission.sequence == *sequence);
            if let Some(position) = position {
                let submission = self.submitted.remove(position);
                gone.push((submission.awaited, self.put_free(submission.pooled)));
            }
        }
        gone
    }
}
