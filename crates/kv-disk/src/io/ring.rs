//! A file over io_uring.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::time::Duration;

use super::ring_calls::Calls;
use super::{Act, Backend, Buffer, Ended, FileIo, Io, check};

/// A file over io_uring, which is registered with the ring, as its buffers are.
///
/// Dropping it with operations open gives up their buffers for good: the kernel may write them still.
#[derive(Debug)]
pub struct RingFile {
    calls: Calls,
    /// Operations that the kernel has, by their number there.
    open: HashMap<u64, Io>,
    next: u64,
    /// What the kernel was not given.
    refused: Vec<Ended>,
    registered_buffers: bool,
    /// Numbers of what the kernel says has ended, with its result.
    reaped: Vec<(u64, i32)>,
}

impl RingFile {
    /// Sets a ring up for so many operations at a time.
    ///
    /// # Errors
    /// The system's: many containers refuse io_uring.
    pub fn new(file: File, depth: u32) -> io::Result<Self> {
        Ok(Self {
            calls: Calls::new(file, depth)?,
            open: HashMap::new(),
            next: 0,
            refused: Vec::new(),
            registered_buffers: false,
            reaped: Vec::new(),
        })
    }
}

impl FileIo for RingFile {
    fn backend(&self) -> Backend {
        Backend::Ring { registered_buffers: self.registered_buffers }
    }

    fn buffers(&mut self, count: usize, bytes: usize) -> Vec<Buffer> {
        let mut buffers: Vec<_> = (0..count).map(|_| Buffer::new(bytes)).collect();
        // The kernel may lock only so much memory for us. Then it looks up the pages of each operation.
        self.registered_buffers = self.calls.register(&mut buffers).is_ok();
        if self.registered_buffers {
            for (number, buffer) in (0..).zip(&mut buffers) {
                buffer.registered = Some(number);
            }
        }
        buffers
    }

    fn begin(&mut self, mut io: Io) {
        if let Err(error) = check(&io) {
            return self.refused.push(Ended { io, result: Err(error) });
        }
        let number = self.next;
        self.next += 1;
        if !self.registered_buffers
            && let Some(buffer) = &mut io.buffer
        {
            buffer.registered = None;
        }
        match self.calls.push(number, &mut io) {
            // From here on the operation is the kernel's, until it says that it has ended.
            Ok(()) => drop(self.open.insert(number, io)),
            Err(error) => self.refused.push(Ended { io, result: Err(error) }),
        }
    }

    fn ended(&mut self, wait: Duration, ended: &mut Vec<Ended>) {
        ended.append(&mut self.refused);
        if self.open.is_empty() {
            return;
        }
        let wait = if ended.is_empty() { wait } else { Duration::ZERO };
        if let Err(error) = self.calls.submit(wait) {
            tracing::warn!(%error, "a ring was not entered");
        }
        self.calls.reap(&mut self.reaped);
        for (number, result) in self.reaped.drain(..) {
            let Some(io) = self.open.remove(&number) else { continue };
            let result = match usize::try_from(result) {
                // A punch says 0.
                Ok(0) if io.act == Act::Punch => Ok(io.bytes),
                Ok(bytes) => Ok(bytes),
                Err(_) => Err(io::Error::from_raw_os_error(result.wrapping_neg())),
            };
            ended.push(Ended { io, result });
        }
    }

    fn open(&self) -> usize {
        self.open.len() + self.refused.len()
    }
}

impl Drop for RingFile {
    fn drop(&mut self) {
        if self.open.is_empty() {
            self.calls.unlock();
        } else {
            tracing::warn!(open = self.open.len(), "buffers of open operations are given up");
            std::mem::forget(std::mem::take(&mut self.open));
        }
    }
}
