//! The files in their folders: found, looked at with suspicion, locked, and given their room.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cuda_driver::guard;
use rustix::fs::{FallocateFlags, OFlags, SeekFrom};

use crate::error::Hostility;
use crate::io::PAGE_BYTES;
use crate::layout::{Heading, HeadingFault};
use crate::{DiskOptions, OpenError};

/// How often a file is tried that another process has.
const LOCK_AGAIN: Duration = Duration::from_millis(5);

/// Bytes that are read at a time of a file that may be empty.
const PIECE_BYTES: usize = 1 << 20;

/// A place for a file that was looked at, and is as it was. A file that is there is locked.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) path: PathBuf,
    file: Option<File>,
    /// Bytes that the file has.
    pub(crate) bytes: u64,
    /// Bytes that the file system has set aside for it.
    allocated: u64,
    mode: u32,
    /// What the file says of itself; none if it has no content yet.
    pub(crate) heading: Option<Result<Heading, HeadingFault>>,
}

/// A file that is locked and has its room.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    /// Reads and writes pass by the page cache.
    pub(crate) direct: bool,
}

/// The file of a number in a folder.
pub(crate) fn path_of(folder: &Path, stripe: usize) -> PathBuf {
    folder.join(format!("kv-disk-{stripe:03}.slots"))
}

fn open(path: &Path, options: &DiskOptions, create: bool) -> io::Result<File> {
    let mut flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    if options.survives_power_loss {
        flags |= OFlags::DSYNC;
    }
    let mut open = OpenOptions::new();
    open.read(true).write(true).create_new(create).mode(0o600);
    open.custom_flags(flags.bits().cast_signed()).open(path)
}

/// Looks for a file, and locks it if it is there.
pub(crate) fn find(
    folder: &Path,
    stripe: usize,
    options: &DiskOptions,
) -> Result<Found, OpenError> {
    let path = path_of(folder, stripe);
    let hostile = |reason| OpenError::Hostile { path: path.clone(), reason };
    let file = match open(&path, options, false) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Found {
                path,
                file: None,
                bytes: 0,
                allocated: 0,
                mode: 0o600,
                heading: None,
            });
        }
        Err(error) => {
            return Err(match error.raw_os_error() {
                Some(libc::ELOOP) => hostile(Hostility::Link),
                Some(libc::EISDIR | libc::ENXIO) => hostile(Hostility::NotRegular),
                _ => OpenError::system("opening the file")(error).at(&path),
            });
        }
    };
    let looked = OpenError::system("looking at the file");
    let seen = file.metadata().map_err(|error| looked(error).at(&path))?;
    if let Some(reason) = hostility(&seen) {
        return Err(hostile(reason));
    }
    let is_locked = lock(&file, options.lock_wait).map_err(|error| error.at(&path))?;
    if guard!("disk.has-its-file-alone", !is_locked, else false) {
        return Err(OpenError::Locked { path });
    }
    // Nobody else has it while we look.
    let looked = || -> io::Result<_> { Ok((beginning(&file)?, file.metadata()?)) };
    let (heading, seen) =
        looked().map_err(|error| OpenError::system("looking at the file")(error).at(&path))?;
    if heading == Some(Err(HeadingFault::Foreign)) {
        return Err(hostile(Hostility::Foreign));
    }
    let (bytes, allocated) = (seen.len(), seen.blocks().saturating_mul(512));
    Ok(Found { path, file: Some(file), bytes, allocated, mode: seen.mode() & 0o777, heading })
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

/// What a file says of itself; none if it has nothing but zeros, as one whose making was cut short.
fn beginning(file: &File) -> io::Result<Option<Result<Heading, HeadingFault>>> {
    let mut pages = [0; 2 * PAGE_BYTES];
    // Before direct access is asked for, a read may have any length.
    let mut read = 0;
    while let Some(rest) = pages.get_mut(read..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, read as u64)? {
            0 => break,
            more => read += more,
        }
    }
    let (first, second) = pages.split_at(PAGE_BYTES);
    match Heading::newer(first, second) {
        // Somebody's image may begin with zeros.
        Err(HeadingFault::Foreign) if guard!("disk.looks-at-all-zeros", is_zero(file)?, else pages == [0; 2 * PAGE_BYTES]) => {
            Ok(None)
        }
        found => Ok(Some(found)),
    }
}

/// Whether all bytes of a file are zero. Holes are not read, nor is what is behind the first byte that is not.
fn is_zero(file: &File) -> io::Result<bool> {
    let (mut at, mut piece) = (0, vec![0; PIECE_BYTES]);
    loop {
        at = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(at) => at,
            Err(rustix::io::Errno::NXIO) => return Ok(true),
            // A file system that knows no holes has data everywhere.
            Err(rustix::io::Errno::INVAL) => at,
            Err(error) => return Err(error.into()),
        };
        let read = file.read_at(&mut piece, at)?;
        if read == 0 {
            return Ok(true);
        }
        if piece.iter().take(read).any(|byte| *byte != 0) {
            return Ok(false);
        }
        at += read as u64;
    }
}

/// The part of a path that is there.
fn existing(path: &Path) -> &Path {
    let mut parts = path.ancestors().filter(|part| !part.as_os_str().is_empty());
    parts.find(|part| part.exists()).unwrap_or(Path::new("."))
}

/// Checks that the file systems have room for files that are to be made anew, each of so many bytes.
pub(crate) fn check_room<'a>(
    anew: impl Iterator<Item = &'a Found>,
    options: &DiskOptions,
    bytes: u64,
) -> Result<(), OpenError> {
    let reserve = options.reserve_bytes;
    // Several may lie in one file system.
    let mut wanted: Vec<(u64, u64)> = Vec::new();
    for found in anew {
        let folder = found.path.parent().unwrap_or(Path::new("."));
        let there = existing(folder);
        let looked = |error| OpenError::system("looking at the file system")(error).at(folder);
        let device = fs::metadata(there).map_err(looked)?.dev();
        let system = rustix::fs::statvfs(there).map_err(|error| looked(error.into()))?;
        let free = system.f_bavail.saturating_mul(system.f_frsize);
        let more = bytes.saturating_sub(found.allocated);
        let at = wanted.iter().position(|(of, _)| *of == device).unwrap_or(wanted.len());
        if at == wanted.len() {
            wanted.push((device, reserve));
        }
        let Some((_, needed)) = wanted.get_mut(at) else { continue };
        *needed = needed.saturating_add(more);
        if free < *needed {
            let (path, needed) = (folder.to_owned(), *needed);
            return Err(OpenError::NoRoom { path, free, needed, reserve });
        }
    }
    Ok(())
}

/// Makes a file if there is none, gives its content up and sets its room aside if it is to be made anew, and closes it to others.
pub(crate) fn prepare(
    found: Found,
    options: &DiskOptions,
    anew: Option<u64>,
) -> Result<Ready, OpenError> {
    let Found { path, file, mode, .. } = found;
    let system = |what| OpenError::system(what);
    let file = match file {
        Some(file) => file,
        None => make(&path, options)?,
    };
    if guard!("disk.closes-its-file", mode & 0o077 != 0, else false) {
        tracing::warn!(path = %path.display(), "others could read a file of slots, and cannot any more: its mode was {mode:o}");
        file.set_permissions(fs::Permissions::from_mode(0o600))
            .map_err(system("closing the file to others"))?;
    }
    if let Some(bytes) = anew {
        // Nothing of what was given up is left to be read.
        file.set_len(0).map_err(system("emptying the file"))?;
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            // A file system that cannot set blocks aside gives them one by one.
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
            Err(error) => return Err(system("setting room aside")(error.into())),
        }
        file.set_len(bytes).map_err(system("setting the length of the file"))?;
    }
    // Some file systems have no direct access.
    let direct = rustix::fs::fcntl_setfl(&file, OFlags::DIRECT).is_ok();
    if !direct {
        let plain = rustix::fs::fcntl_setfl(&file, OFlags::empty());
        plain.map_err(|error| system("setting flags of the file")(error.into()))?;
    }
    Ok(Ready { path, file, direct })
}

/// Makes and locks a file that was not there.
fn make(path: &Path, options: &DiskOptions) -> Result<File, OpenError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(OpenError::system("making the folder"))?;
    let locked = || OpenError::Locked { path: path.to_owned() };
    let file = open(path, options, true).map_err(|error| match error.kind() {
        // Another process has made it just now.
        io::ErrorKind::AlreadyExists => locked(),
        _ => OpenError::system("making the file")(error),
    })?;
    if lock(&file, options.lock_wait)? { Ok(file) } else { Err(locked()) }
}
