//! The calls of io_uring that need `unsafe`, each in a block of its own. See `docs/UNSAFE.md`.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use io_uring::types::{Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};

use super::{Act, Buffer, Io};

/// The file's place among those registered.
const FILE: Fixed = Fixed(0);

/// A ring with one registered file.
pub(super) struct Calls {
    ring: IoUring,
    /// Open as long as the ring.
    file: File,
    /// Entries that the kernel has not been told of.
    unsent: bool,
}

impl Calls {
    pub(super) fn new(file: File, depth: u32) -> io::Result<Self> {
        let ring =
            IoUring::builder().setup_clamp().build(depth.clamp(1, 1 << 15).next_power_of_two())?;
        if !ring.params().is_feature_ext_arg() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        Ok(Self { ring, file, unsent: false })
    }

    /// Lets go of the file's lock. The kernel may keep the file itself for a while after the ring was dropped.
    pub(super) fn unlock(&self) {
        if let Err(error) = self.file.unlock() {
            tracing::warn!(%error, "a file stays locked until the kernel lets go of it");
        }
    }

    /// Registers buffers with the kernel.
    pub(super) fn register(&self, buffers: &mut [Buffer]) -> io::Result<()> {
        let parts: Vec<_> = buffers
            .iter_mut()
            .map(|buffer| libc::iovec {
                iov_len: buffer.len(),
                iov_base: buffer.bytes_mut().as_mut_ptr().cast(),
            })
            .collect();
        // SAFETY: each part is the memory of one buffer, which is alive during the call. The kernel holds the pages
        // themselves from then on, and touches them for operations alone that name them (see `push`).
        unsafe { self.ring.submitter().register_buffers(&parts) }
    }

    /// Gives the kernel an operation under a number. If it is taken, `io` must neither be used nor freed until
    /// [`reap`](Self::reap) has named the number: its only caller puts it aside.
    pub(super) fn push(&mut self, number: u64, io: &mut Io) -> io::Result<()> {
        let entry = entry(io).ok_or(io::ErrorKind::InvalidInput)?.user_data(number);
        if self.ring.submission().is_full() {
            self.submit(Duration::ZERO)?;
        }
        // SAFETY: `check` has found that the operation's bytes lie in its buffer and its body, whose pinned memory and list
        // of parts it keeps alive. `RingFile::begin` moves the operation
        // to `RingFile::open`, whose entries no code touches before `reap` has named them; a buffer's pages and the parts lie
        // on the heap and do not move with it. Dropping the ring with open entries leaks these.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        self.unsent |= pushed.is_ok();
        pushed.map_err(|_| io::ErrorKind::WouldBlock.into())
    }

    /// Tells the kernel of new operations, and waits for one to end, at most `wait`.
    pub(super) fn submit(&mut self, wait: Duration) -> io::Result<()> {
        let waits = !wait.is_zero() && self.ring.completion().is_empty();
        if !self.unsent && !waits {
            return Ok(());
        }
        let limit = Timespec::from(wait);
        let args = SubmitArgs::new().timespec(&limit);
        let submitter = self.ring.submitter();
        let sent = if waits { submitter.submit_with_args(1, &args) } else { submitter.submit() };
        match sent {
            Ok(_) => self.unsent = !self.ring.submission().is_empty(),
            // The time is over, or a signal has come: what was new was taken all the same, or is the next time.
            Err(error) => {
                self.unsent = !self.ring.submission().is_empty();
                let over = matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR));
                if !over && error.raw_os_error() != Some(libc::EBUSY) {
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Appends the numbers of operations that have ended, each with its result: bytes, or an error below zero.
    pub(super) fn reap(&mut self, ended: &mut Vec<(u64, i32)>) {
        ended.extend(self.ring.completion().map(|entry| (entry.user_data(), entry.result())));
    }
}

fn entry(io: &mut Io) -> Option<squeue::Entry> {
    let bytes = u32::try_from(io.bytes);
    let (offset, buffer_bytes) = (io.offset, io.buffer_bytes());
    if let (Some(buffer), Some(body)) = (&mut io.buffer, &mut io.body) {
        let parts = body.parts(buffer, buffer_bytes);
        let (at, count) = (parts.as_ptr().cast(), u32::try_from(parts.len()).ok()?);
        match io.act {
            Act::Read => return Some(opcode::Readv::new(FILE, at, count).offset(offset).build()),
            Act::Write => return Some(opcode::Writev::new(FILE, at, count).offset(offset).build()),
            Act::Punch | Act::Sync => {}
        }
    }
    Some(match (io.act, &mut io.buffer) {
        (Act::Read, Some(buffer)) => {
            let (at, registered, bytes) =
                (buffer.bytes_mut().as_mut_ptr(), buffer.registered, bytes.ok()?);
            match registered {
                Some(of) => opcode::ReadFixed::new(FILE, at, bytes, of).offset(offset).build(),
                None => opcode::Read::new(FILE, at, bytes).offset(offset).build(),
            }
        }
        (Act::Write, Some(buffer)) => {
            let at = buffer.bytes_mut().as_mut_ptr().cast_const();
            let (registered, bytes) = (buffer.registered, bytes.ok()?);
            match registered {
                Some(of) => opcode::WriteFixed::new(FILE, at, bytes, of).offset(offset).build(),
                None => opcode::Write::new(FILE, at, bytes).offset(offset).build(),
            }
        }
        (Act::Punch, _) => {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            opcode::Fallocate::new(FILE, io.bytes as u64).offset(offset).mode(mode).build()
        }
        (Act::Sync, _) => {
            let flags = io_uring::types::FsyncFlags::DATASYNC;
            opcode::Fsync::new(FILE).flags(flags).build()
        }
        (Act::Read | Act::Write, None) => return None,
    })
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calls").field("unsent", &self.unsent).finish_non_exhaustive()
    }
}
