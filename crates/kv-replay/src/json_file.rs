//! Writes files completely or not at all.
//!
//! Other programs read reports and traces, and must never see a partial file. The bytes go to a new
//! file in the same folder and are flushed to disk. Only then is the file renamed to the requested
//! name.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use cuda_driver::guard;
use serde::Serialize;

/// How often a temporary name that already exists is replaced by another before the write fails.
const NAME_ATTEMPTS_MAX: u32 = 64;

/// Maximum number of links that are followed to a file that does not exist yet: more than Linux
/// follows.
const LINKS_MAX: u32 = 64;

static NEXT_TEMPORARY: AtomicU64 = AtomicU64::new(0);

/// The reason why a file was not written. An existing file under the name is unchanged.
#[derive(thiserror::Error)]
pub enum WriteError {
    #[error("cannot write {}: it does not name a file", path.display())]
    NoFileName { path: PathBuf },
    #[error("cannot write {}: it is the same file as {}; name another", path.display(), other.display())]
    Same { path: PathBuf, other: PathBuf },
    #[error("cannot write {}: it is a folder", path.display())]
    Folder { path: PathBuf },
    #[error("cannot write {}: its content has no JSON form", path.display())]
    Encode { path: PathBuf, source: serde_json::Error },
    #[error("cannot write {}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

cuda_driver::messages::one_line_debug!(WriteError);

/// Writes `value` to `path` as indented JSON with a final line break, completely or not at all.
pub fn write_json<T: Serialize + ?Sized>(path: &Path, value: &T) -> Result<(), WriteError> {
    let mut bytes = serde_json::to_vec_pretty(value)
        .map_err(|source| WriteError::Encode { path: path.to_owned(), source })?;
    bytes.push(b'\n');
    write_atomically(path, &bytes)
}

/// Writes `bytes` to `path`, completely or not at all.
///
/// The bytes go to a temporary file in the same folder, which is flushed to disk and then renamed.
/// A symbolic link is followed and remains a link. A pipe, terminal or device cannot be replaced by
/// a rename and is written directly.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    let io = |source| WriteError::Io { path: path.to_owned(), source };
    let target = match Target::of(path)? {
        Target::File(target) => target,
        Target::Stream => {
            let mut stream = OpenOptions::new().write(true).open(path).map_err(io)?;
            return stream.write_all(bytes).and_then(|()| stream.flush()).map_err(io);
        }
    };
    let (mut file, temporary) = create_temporary(&target).map_err(io)?;
    // The new file gets the permissions of the replaced file.
    let permitted = match fs::metadata(&target) {
        Ok(found) => file.set_permissions(found.permissions()),
        Err(_) => Ok(()),
    };
    let written = permitted.and_then(|()| file.write_all(bytes)).and_then(|()| file.sync_all());
    drop(file);
    written.and_then(|()| fs::rename(&temporary, &target)).map_err(|source| {
        // The first error is reported. A temporary file that cannot be removed does not change it.
        let _ = fs::remove_file(&temporary);
        io(source)
    })
}

/// Checks that a command can write its results, so that neither they are lost at the end of a long run nor what it reads.
///
/// Each of `writes` must be a file of its own, which is none of `reads`, whatever link or spelling names it. Creates a
/// temporary file where each will be, and removes it.
pub fn check_files<'a>(
    reads: impl IntoIterator<Item = &'a Path>,
    writes: impl IntoIterator<Item = &'a Path>,
) -> Result<(), WriteError> {
    // What cannot be read is refused by its reader; pipes, terminals and devices may be named as often as one likes.
    let known = |path: &'a Path| match Target::of(path).ok()? {
        Target::File(target) => Some((Identity::of(&target).ok()?, path)),
        Target::Stream => None,
    };
    let mut known: Vec<_> = reads.into_iter().filter_map(known).collect();
    for path in writes {
        let io = |source| WriteError::Io { path: path.to_owned(), source };
        // Opening a pipe would wait for a reader, and a terminal or device has no folder to check.
        let Target::File(target) = Target::of(path)? else { continue };
        let identity = Identity::of(&target).map_err(io)?;
        let same = known.iter().find(|(other, _)| *other == identity);
        if let Some((_, other)) = guard!("replay.no-result-over-input", same, else None) {
            return Err(WriteError::Same { path: path.to_owned(), other: (*other).to_owned() });
        }
        known.push((identity, path));
        let (file, temporary) = create_temporary(&target).map_err(io)?;
        drop(file);
        fs::remove_file(&temporary).map_err(io)?;
    }
    Ok(())
}

/// What makes two paths the same file.
#[derive(Debug, Eq, PartialEq)]
enum Identity {
    /// Device and number of a file.
    File(u64, u64),
    /// Folder and name of one that does not exist yet.
    New(PathBuf, OsString),
}

impl Identity {
    fn of(target: &Path) -> io::Result<Self> {
        match fs::metadata(target) {
            Ok(found) => Ok(Self::File(found.dev(), found.ino())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let folder = target.parent().filter(|folder| *folder != Path::new(""));
                let folder = fs::canonicalize(folder.unwrap_or(Path::new(".")))?;
                Ok(Self::New(folder, target.file_name().unwrap_or_default().to_owned()))
            }
            Err(error) => Err(error),
        }
    }
}

/// The kind of object at a path.
enum Target {
    /// A file, or nothing yet. The path has its links resolved.
    File(PathBuf),
    /// A pipe, terminal or device.
    Stream,
}

impl Target {
    fn of(path: &Path) -> Result<Self, WriteError> {
        let io = |source| WriteError::Io { path: path.to_owned(), source };
        let target = match fs::metadata(path) {
            Ok(found) if found.is_dir() => {
                return Err(WriteError::Folder { path: path.to_owned() });
            }
            Ok(found) if found.is_file() => fs::canonicalize(path).map_err(io)?,
            Ok(_) => return Ok(Self::Stream),
            Err(error) if error.kind() == io::ErrorKind::NotFound => linked(path).map_err(io)?,
            Err(error) => return Err(io(error)),
        };
        match target.file_name() {
            Some(_) => Ok(Self::File(target)),
            None => Err(WriteError::NoFileName { path: path.to_owned() }),
        }
    }
}

/// The end of a chain of links to a file that does not exist. The links remain, and the file will
/// be created.
fn linked(path: &Path) -> io::Result<PathBuf> {
    let mut end = path.to_owned();
    // The system has followed the links before and found no cycle.
    for _ in 0..LINKS_MAX {
        match fs::read_link(&end) {
            Ok(next) => end = end.parent().unwrap_or(Path::new("")).join(next),
            // Not a link: nothing is there.
            Err(_) => return Ok(end),
        }
    }
    Err(io::Error::other(format!("more than {LINKS_MAX} links follow each other")))
}

fn create_temporary(target: &Path) -> io::Result<(File, PathBuf)> {
    let mut attempts = 0;
    loop {
        // Relaxed: the counter only has to give each caller a different number.
        let number = NEXT_TEMPORARY.fetch_add(1, Ordering::Relaxed);
        // Without the name of the target, which may be as long as a name can be.
        let temporary =
            target.with_file_name(format!(".kv-replay-{}-{number}.tmp", std::process::id()));
        match OpenOptions::new().write(true).create_new(true).open(&temporary) {
            Ok(file) => return Ok((file, temporary)),
            Err(error)
                if error.kind() == io::ErrorKind::AlreadyExists && attempts < NAME_ATTEMPTS_MAX =>
            {
                attempts += 1;
            }
            Err(error) => return Err(error),
        }
    }
}
