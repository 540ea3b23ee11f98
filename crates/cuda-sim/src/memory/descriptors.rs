//! The file descriptors of exported memory: one table for all machines of this process.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use parking_lot::Mutex;

use super::sharing::SharedMemory;

/// Identity of the file behind a descriptor: device and inode. A duplicate has the same identity.
type FileKey = (u64, u64);

/// The memory behind a descriptor, and the ordinal of its device.
#[derive(Clone, Debug)]
pub(super) struct Exported {
    pub(super) memory: Arc<SharedMemory>,
    pub(super) device: u32,
}

/// The exported memory, by the file that was handed out.
///
/// The file is one end of a socket pair, whose other end is kept here. The kept end reads an end of
/// file as soon as no process has the handed-out end open. The memory is freed then, as by the
/// driver.
static EXPORTS: Mutex<BTreeMap<FileKey, (UnixStream, Exported)>> = Mutex::new(BTreeMap::new());

/// Creates a descriptor that keeps the memory alive until it is closed.
pub(super) fn export(exported: Exported) -> io::Result<OwnedFd> {
    let (given, kept) = UnixStream::pair()?;
    kept.set_nonblocking(true)?;
    let given = OwnedFd::from(given);
    let key = key(&given)?;
    EXPORTS.lock().insert(key, (kept, exported));
    Ok(given)
}

/// The memory behind an open descriptor; `None` if the descriptor is not an exported one.
pub(super) fn import(fd: BorrowedFd<'_>) -> Option<Exported> {
    let key = key(fd.try_clone_to_owned().ok().as_ref()?).ok()?;
    sweep();
    EXPORTS.lock().get(&key).map(|(_, exported)| exported.clone())
}

/// Releases the memory whose descriptors are all closed.
pub(super) fn sweep() {
    let mut exports = EXPORTS.lock();
    let closed: Vec<_> = exports.extract_if(.., |_, (kept, _)| is_closed(kept)).collect();
    drop(exports);
    // Dropped outside the lock, because this may free much memory.
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
