//! The file descriptors that stand for exported memory: one table for all machines of this process.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use parking_lot::Mutex;

use super::sharing::SharedMemory;

/// Which file a descriptor is open on: its device and inode. A duplicate is of the same file.
type FileKey = (u64, u64);

/// Memory behind a descriptor, and the ordinal of its device.
#[derive(Clone, Debug)]
pub(super) struct Exported {
    pub(super) memory: Arc<SharedMemory>,
    pub(super) device: u32,
}

/// What is exported, by the file that was given out.
///
/// The file is one end of a pair of sockets whose other end is kept here: that end reads an end of
/// file as soon as no process has the given one open any more, so the memory is let go of then, as by
/// the driver.
static EXPORTS: Mutex<BTreeMap<FileKey, (UnixStream, Exported)>> = Mutex::new(BTreeMap::new());

/// A new descriptor that stands for the memory and keeps it alive until it is closed.
pub(super) fn export(exported: Exported) -> io::Result<OwnedFd> {
    let (given, kept) = UnixStream::pair()?;
    kept.set_nonblocking(true)?;
    let given = OwnedFd::from(given);
    let key = key(&given)?;
    EXPORTS.lock().insert(key, (kept, exported));
    Ok(given)
}

/// The memory that an open descriptor stands for, if it does.
pub(super) fn import(fd: BorrowedFd<'_>) -> Option<Exported> {
    let key = key(fd.try_clone_to_owned().ok().as_ref()?).ok()?;
    sweep();
    EXPORTS.lock().get(&key).map(|(_, exported)| exported.clone())
}

/// Lets go of the memory whose descriptors are all closed.
pub(super) fn sweep() {
    let mut exports = EXPORTS.lock();
    let closed: Vec<_> = exports.extract_if(.., |_, (kept, _)| is_closed(kept)).collect();
    drop(exports);
    // Outside the lock: this may free much memory.
    drop(closed);
}

fn is_closed(mut kept: &UnixStream) -> bool {
    match kept.read(&mut [0]) {
        Ok(count) => count == 0,
        Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    }
}

fn key(fd: &OwnedFd) -> io::Result<FileKey> {
    let metadata = File::from(fd.try_clone()?).metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}
