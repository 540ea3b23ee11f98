//! A file that a few threads read and write, where io_uring is refused.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::FallocateFlags;

use super::{Act, Backend, Ended, FileIo, Io, check, thread_calls};

/// Threads of a file, at most.
const THREADS_MAX: usize = 256;

/// A file over `pread` and `pwrite` in threads.
///
/// Dropping it lets the threads end what they have begun, and does not wait for that.
#[derive(Debug)]
pub struct ThreadFile {
    file: Arc<File>,
    orders: Option<Sender<Io>>,
    answers: Receiver<Ended>,
    /// What could not be handed to a thread.
    refused: Vec<Ended>,
    open: usize,
    threads: Vec<JoinHandle<()>>,
}

impl ThreadFile {
    /// Starts so many threads, from 1 to 256.
    ///
    /// # Errors
    /// The system's, if it has no thread.
    pub fn new(file: File, threads: usize) -> io::Result<Self> {
        let file = Arc::new(file);
        let (orders, received) = mpsc::channel();
        let received = Arc::new(Mutex::new(received));
        let (answer, answers) = mpsc::channel();
        let start = |_| {
            let (file, received, answer) =
                (Arc::clone(&file), Arc::clone(&received), answer.clone());
            let thread = std::thread::Builder::new().name("kv-disk-io".to_owned());
            thread.spawn(move || work(&file, &received, &answer))
        };
        let threads =
            (0..threads.clamp(1, THREADS_MAX)).map(start).collect::<io::Result<Vec<_>>>()?;
        Ok(Self { file, orders: Some(orders), answers, refused: Vec::new(), open: 0, threads })
    }
}

fn work(file: &File, orders: &Mutex<Receiver<Io>>, answers: &Sender<Ended>) {
    loop {
        // One thread waits for the next operation, and the others for the lock.
        let next = orders.lock().recv();
        let Ok(mut io) = next else { return };
        let result = carry_out(file, &mut io);
        if answers.send(Ended { io, result }).is_err() {
            return;
        }
    }
}

fn carry_out(file: &File, io: &mut Io) -> io::Result<usize> {
    let missing = || io::Error::from(io::ErrorKind::InvalidInput);
    let bytes = io.buffer_bytes();
    match (io.act, &mut io.body) {
        (Act::Read, Some(body)) => {
            let buffer = io.buffer.as_mut().ok_or_else(missing)?;
            thread_calls::read(file, (buffer, bytes), body, io.offset)
        }
        (Act::Write, Some(body)) => {
            let buffer = io.buffer.as_mut().ok_or_else(missing)?;
            thread_calls::write(file, (buffer, bytes), body, io.offset)
        }
        (Act::Read, None) => {
            let buffer = io.buffer.as_mut().ok_or_else(missing)?;
            file.read_at(&mut buffer.bytes_mut()[..io.bytes], io.offset)
        }
        (Act::Write, None) => {
            let buffer = io.buffer.as_ref().ok_or_else(missing)?;
            file.write_at(&buffer.bytes()[..io.bytes], io.offset)
        }
        (Act::Punch, _) => {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(file, flags, io.offset, io.bytes as u64)?;
            Ok(io.bytes)
        }
        (Act::Sync, _) => file.sync_data().map(|()| 0),
    }
}

impl FileIo for ThreadFile {
    fn backend(&self) -> Backend {
        Backend::Threads { threads: self.threads.len() }
    }

    fn begin(&mut self, io: Io) {
        self.open += 1;
        if let Err(error) = check(&io) {
            return self.refused.push(Ended { io, result: Err(error) });
        }
        let Some(orders) = &self.orders else { return };
        if let Err(mpsc::SendError(io)) = orders.send(io) {
            // All threads have panicked, which nothing here does.
            self.refused.push(Ended { io, result: Err(io::ErrorKind::BrokenPipe.into()) });
        }
    }

    fn ended(&mut self, wait: Duration, ended: &mut Vec<Ended>) {
        let before = ended.len();
        ended.append(&mut self.refused);
        ended.extend(self.answers.try_iter());
        if ended.len() == before && self.open > 0 && !wait.is_zero() {
            match self.answers.recv_timeout(wait) {
                Ok(one) => ended.push(one),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
        }
        self.open -= (ended.len() - before).min(self.open);
    }

    fn open(&self) -> usize {
        self.open
    }
}

impl Drop for ThreadFile {
    fn drop(&mut self) {
        // The threads let go of the file a little later.
        if self.open == 0
            && let Err(error) = self.file.unlock()
        {
            tracing::warn!(%error, "a file stays locked until its threads have ended");
        }
    }
}
