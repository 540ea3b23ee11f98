//! The files in their folders: found, looked at with suspicion, locked, and given their room.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, OFlags};

use crate::error::Hostility;
use crate::io::PAGE_BYTES;
use crate::layout::Heading;
use crate::{DiskOptions, Mismatch, OpenError};

/// How often a file is tried that another process has.
const LOCK_AGAIN: Duration = Duration::from_millis(5);

/// A file that was found or made, and is locked.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    /// Bytes that it had.
    pub(crate) bytes: u64,
    /// It has no content yet.
    pub(crate) is_new: bool,
    /// The set that it says it belongs to.
    pub(crate) set: Option<u128>,
    /// Reads and writes pass by the page cache.
    pub(crate) direct: bool,
}

/// The file of a number in a folder.
pub(crate) fn path_of(folder: &Path, stripe: usize) -> PathBuf {
    folder.join(format!("kv-disk-{stripe:03}.slots"))
}

/// Finds or makes a file, and locks it.
pub(crate) fn find(
    folder: &Path,
    stripe: usize,
    options: &DiskOptions,
) -> Result<Found, OpenError> {
    fs::create_dir_all(folder).map_err(OpenError::system("making the folder"))?;
    let path = path_of(folder, stripe);
    let mut flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    if options.survives_power_loss {
        flags |= OFlags::DSYNC;
    }
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(flags.bits().cast_signed())
        .open(&path);
    let hostile = |reason| OpenError::Hostile { path: path.clone(), reason };
    let file = opened.map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => hostile(Hostility::Link),
        Some(libc::EISDIR | libc::ENXIO) => hostile(Hostility::NotRegular),
        _ => OpenError::system("opening the file")(error),
    })?;
    let seen = file.metadata().map_err(OpenError::system("looking at the file"))?;
    if let Some(reason) = hostility(&seen) {
        return Err(hostile(reason));
    }
    if !lock(&file, options.lock_wait)? {
        return Err(OpenError::Locked { path });
    }
    let (is_new, set) = beginning(&file).map_err(OpenError::system("reading the heading"))?;
    // Nobody else had it while we looked.
    let bytes = file.metadata().map_err(OpenError::system("looking at the file"))?.len();
    // Some file systems have no direct access.
    let direct = rustix::fs::fcntl_setfl(&file, OFlags::DIRECT).is_ok();
    if !direct {
        let plain = rustix::fs::fcntl_setfl(&file, OFlags::empty());
        plain.map_err(|error| OpenError::system("setting flags of the file")(error.into()))?;
    }
    Ok(Found { path, file, bytes, is_new, set, direct })
}

/// Locks a file, unless another tier has it for as long as `wait`.
fn lock(file: &File, wait: Duration) -> Result<bool, OpenError> {
    let since = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) if since.elapsed() >= wait => return Ok(false),
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_AGAIN.min(wait)),
            Err(TryLockError::Error(error)) => {
                return Err(OpenError::system("locking the file")(error));
            }
        }
    }
}

fn hostility(seen: &fs::Metadata) -> Option<Hostility> {
    let (owner, user) = (seen.uid(), rustix::process::geteuid().as_raw());
    let mode = seen.mode() & 0o777;
    if !seen.is_file() {
        return Some(Hostility::NotRegular);
    }
    if owner != user {
        return Some(Hostility::Owner { owner, user });
    }
    if mode & 0o022 != 0 {
        return Some(Hostility::Writable { mode });
    }
    (seen.nlink() != 1).then_some(Hostility::Links { links: seen.nlink() })
}

/// Whether a file begins with zeros alone, as one whose making was cut short does, and the set that it names.
fn beginning(file: &File) -> io::Result<(bool, Option<u128>)> {
    let mut pages = Vec::new();
    // Before direct access is asked for, a read may have any length.
    let start = file;
    start.take(2 * PAGE_BYTES as u64).read_to_end(&mut pages)?;
    let is_new = pages.iter().all(|byte| *byte == 0);
    pages.resize(2 * PAGE_BYTES, 0);
    let (first, second) = pages.split_at(PAGE_BYTES);
    Ok((is_new, Heading::newer(first, second).ok().map(|heading| heading.set)))
}

/// Gives a file its room, if it is new or is to be wiped.
pub(crate) fn make_room(found: &Found, options: &DiskOptions, bytes: u64) -> Result<(), OpenError> {
    let wipes = options.rules.mismatch == Mismatch::Wipe && found.bytes != bytes;
    let is_ours = found.set.is_some();
    if !found.is_new && (!wipes || !is_ours) {
        return Ok(());
    }
    let folder = found.path.parent().unwrap_or(Path::new("."));
    let system = rustix::fs::statvfs(folder)
        .map_err(|error| OpenError::system("looking at the file system")(error.into()))?;
    let seen = found.file.metadata().map_err(OpenError::system("looking at the file"))?;
    let free = system.f_bavail.saturating_mul(system.f_frsize);
    let reserve = options.reserve_bytes;
    let needed = bytes.saturating_sub(seen.blocks() * 512).saturating_add(reserve);
    if free < needed {
        return Err(OpenError::NoRoom { path: folder.to_owned(), free, needed, reserve });
    }
    match rustix::fs::fallocate(&found.file, FallocateFlags::empty(), 0, bytes) {
        // A file system that cannot set blocks aside gives them one by one.
        Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
        Err(error) => return Err(OpenError::system("setting room aside")(error.into())),
    }
    found.file.set_len(bytes).map_err(OpenError::system("setting the length of the file"))
}

/// Random numbers.
pub(crate) fn random() -> Result<u128, OpenError> {
    let mut bytes = [0; 16];
    let read = File::open("/dev/urandom").and_then(|file| file.read_exact_at(&mut bytes, 0));
    read.map_err(OpenError::system("reading random numbers"))?;
    Ok(u128::from_le_bytes(bytes))
}
