//! The folder for files below host memory: its space, its rate, and how it is reached.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kv_disk::io::{Act, Buffer, FileIo, Io, RingFile, ThreadFile};
use rustix::fs::{OFlags, fcntl_setfl, statvfs};

use super::Finding;
use kv_replay::report::bytes;

const AREA: &str = "disk";

/// Bytes of an operation.
const PIECE_BYTES: u64 = 1 << 20;

/// Operations that are open at once.
const DEPTH: usize = 8;

/// How long an operation may take before the disk is given up.
const PATIENCE: Duration = Duration::from_secs(20);

/// Space below which a tier of files is of little use.
const FREE_BYTES: u64 = 10 << 30;

/// Rate below which loading is often slower than computing again, in MB/s.
const SLOW_MB_S: f64 = 500.0;

pub(super) fn findings(folder: &Path, measured_bytes: u64) -> Vec<Finding> {
    let mut findings = Vec::new();
    let shown = folder.display();
    match statvfs(folder) {
        Ok(system) => {
            let free = system.f_bavail.saturating_mul(system.f_frsize);
            let found = format!("{shown}: {} free", bytes(free));
            findings.push(match free < FREE_BYTES {
                true => Finding::note(AREA, found, "name a folder with more space by --folder"),
                false => Finding::fine(AREA, found),
            });
        }
        Err(error) => {
            let found = format!("{shown} cannot be used: {}", io::Error::from(error));
            let to_do = "name a folder that is there by --folder, such as one on a local NVMe disk";
            return vec![Finding::problem(AREA, found, to_do)];
        }
    }
    let mut file = match scratch(folder) {
        Ok(file) => file,
        Err(error) => {
            let found = format!("{shown}: no file can be made: {error}");
            let to_do = "name a folder that this user may write to by --folder";
            findings.push(Finding::problem(AREA, found, to_do));
            return findings;
        }
    };
    let direct = fcntl_setfl(&file, OFlags::DIRECT).is_ok();
    if !direct {
        findings.push(Finding::note(
            AREA,
            format!("{shown}: the file system has no direct access (O_DIRECT)"),
            "its reads and writes also fill the page cache; tmpfs and overlay have none, ext4 and xfs have it",
        ));
    }
    let ring = file.try_clone().and_then(|file| RingFile::new(file, DEPTH as u32));
    findings.push(match &ring {
        Ok(_) => Finding::fine(AREA, "io_uring works"),
        Err(error) => Finding::note(
            AREA,
            format!("io_uring cannot be used: {error}"),
            "files are reached by threads instead; see sysctl kernel.io_uring_disabled, and the container's seccomp profile",
        ),
    });
    if measured_bytes > 0 {
        let io: io::Result<Box<dyn FileIo>> = match ring {
            Ok(ring) => Ok(Box::new(ring)),
            Err(_) => file.try_clone().and_then(|file| {
                ThreadFile::new(file, DEPTH).map(|threads| Box::new(threads) as Box<dyn FileIo>)
            }),
        };
        let rates = io.and_then(|mut io| rates(&mut *io, &mut file, measured_bytes));
        findings.push(rate(folder, measured_bytes, direct, rates));
    }
    findings
}

fn rate(folder: &Path, measured: u64, direct: bool, rates: io::Result<(f64, f64)>) -> Finding {
    let shown = folder.display();
    match rates {
        Ok((write, read)) => {
            let cached = if direct { "" } else { "; read out of the page cache" };
            let found = format!(
                "{shown}: writes {write:.0} MB/s, reads {read:.0} MB/s, with {} in pieces of 1 MiB{cached}",
                bytes(measured)
            );
            match write.min(read) < SLOW_MB_S {
                true => Finding::note(
                    AREA,
                    found,
                    "loading may take longer than computing again: use a local NVMe disk, and limit the rate with --disk-rate",
                ),
                false => Finding::fine(AREA, found),
            }
        }
        Err(error) => Finding::problem(
            AREA,
            format!("{shown}: {} cannot be written and read back: {error}", bytes(measured)),
            "free some space, or measure fewer bytes with --disk-test",
        ),
    }
}

/// A file without a name: nothing is left of it, however this process ends.
fn scratch(folder: &Path) -> io::Result<File> {
    let path: PathBuf = folder.join(format!(".kv-replay-doctor.{}", std::process::id()));
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

/// Megabytes a second of writing, made durable, and of reading.
fn rates(io: &mut dyn FileIo, file: &mut File, measured: u64) -> io::Result<(f64, f64)> {
    let pieces = measured.div_ceil(PIECE_BYTES).max(1);
    let mut buffers = io.buffers(DEPTH, PIECE_BYTES as usize);
    for (seed, buffer) in buffers.iter_mut().enumerate() {
        // Not zeros, which some disks do not store.
        for (at, byte) in buffer.bytes_mut().iter_mut().enumerate() {
            *byte =
                (at as u32).wrapping_mul(2_654_435_761).wrapping_add(seed as u32).to_le_bytes()[3];
        }
    }
    let moved = (pieces * PIECE_BYTES) as f64 / 1e6;
    let begun = Instant::now();
    pass(io, Act::Write, pieces, &mut buffers)?;
    file.sync_data()?;
    let write = moved / begun.elapsed().as_secs_f64().max(1e-9);
    let begun = Instant::now();
    pass(io, Act::Read, pieces, &mut buffers)?;
    Ok((write, moved / begun.elapsed().as_secs_f64().max(1e-9)))
}

/// Reads or writes all pieces, with some of them open at once.
fn pass(io: &mut dyn FileIo, act: Act, pieces: u64, buffers: &mut Vec<Buffer>) -> io::Result<()> {
    let (mut next, mut ended, mut failed) = (0, Vec::new(), None);
    while (failed.is_none() && next < pieces) || io.open() > 0 {
        while failed.is_none()
            && next < pieces
            && let Some(buffer) = buffers.pop()
        {
            let (offset, bytes) = (next * PIECE_BYTES, PIECE_BYTES as usize);
            let buffer = Some(buffer);
            io.begin(Io { token: next, act, offset, bytes, buffer, body: None });
            next += 1;
        }
        io.ended(PATIENCE, &mut ended);
        if ended.is_empty() {
            return Err(io::Error::from(io::ErrorKind::TimedOut));
        }
        for one in ended.drain(..) {
            match one.result {
                Ok(moved) if moved as u64 == PIECE_BYTES => {}
                Ok(_) => failed = Some(io::Error::from(io::ErrorKind::WriteZero)),
                Err(error) => failed = Some(error),
            }
            buffers.extend(one.io.buffer);
        }
    }
    failed.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    #[test]
    fn a_folder_is_measured_and_left_empty() {
        let folder = tempfile::tempdir().unwrap();
        let found = findings(folder.path(), 3 << 20);
        let last = found.last().unwrap();
        assert!(last.found.contains("MB/s, with 3 MiB in pieces of 1 MiB"), "{}", last.found);
        assert!(found.iter().all(|finding| finding.status != Status::Problem), "{found:?}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        // Nothing is measured unless that is asked for.
        assert!(findings(folder.path(), 0).iter().all(|finding| !finding.found.contains("MB/s")));
    }

    #[test]
    fn a_folder_that_is_not_there_is_a_problem() {
        let folder = tempfile::tempdir().unwrap();
        let absent = folder.path().join("absent");
        let [Finding { status: Status::Problem, found, to_do: Some(_), .. }] =
            &findings(&absent, 1)[..]
        else {
            panic!("one problem")
        };
        assert!(found.contains("absent cannot be used: No such file"), "{found}");
    }
}
