//! Files below the host memory of a run: where they are, how large, and what came of them.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cuda_driver::guard;
use kv_disk::{DiskOptions, DiskTier, DiskWatch, Keep, Mismatch, Miss, OpenError, Unstored};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct DiskConfig {
    /// The folder. Content of an earlier run of the same shape is found again; other content is refused, unless
    /// [`fresh`](Self::fresh).
    #[serde(with = "bytes_of_path")]
    pub folder: PathBuf,
    pub bytes: u64,
    /// Bytes a second that they are read and written with, at most.
    pub bytes_per_second: Option<u64>,
    /// Whether nothing of an earlier run is found, and files of another shape are begun anew.
    pub fresh: bool,
    /// What a worker process has of the model; empty for all of it.
    pub(crate) share: String,
    /// Shows the tier of the run that is made from this.
    #[serde(skip)]
    watch: Arc<OnceLock<DiskWatch>>,
}

/// A path may be no text.
mod bytes_of_path {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    use std::path::{Path, PathBuf};

    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub(super) fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        path.as_os_str().as_bytes().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        Ok(OsStr::from_bytes(&Vec::<u8>::deserialize(from)?).into())
    }
}

impl DiskConfig {
    pub fn new(folder: PathBuf, bytes: u64) -> Self {
        let (share, watch) = (String::new(), Arc::default());
        Self { folder, bytes, bytes_per_second: None, fresh: false, share, watch }
    }

    /// The files of one of several workers, in a folder of its own, with its part of the bytes and of the rate.
    pub(crate) fn of_worker(&self, worker: u16, workers: u16, share: String) -> Self {
        let part = |all: u64| all / u64::from(workers.max(1));
        let mut own = Self::new(self.folder.join(format!("worker-{worker}")), part(self.bytes));
        own.bytes_per_second = self.bytes_per_second.map(part);
        (own.fresh, own.share) = (self.fresh, share);
        own
    }

    fn options(&self, record_bytes: u64) -> DiskOptions {
        let model = format!("kv-replay{}", self.share);
        let mut options =
            DiskOptions::new(&self.folder, self.bytes, record_bytes, model.as_bytes());
        // A worker that was killed may have reads and writes open.
        options.lock_wait = Duration::from_secs(10);
        // What a run of another shape or size has stored is lost only to those who say so.
        (options.rules.mismatch, options.rules.keep) = match self.fresh {
            true => (Mismatch::Wipe, Keep::Nothing),
            false => guard!(
                "replay.files-of-another-shape-stay",
                (Mismatch::Refuse, Keep::Content),
                else (Mismatch::Wipe, Keep::Content)
            ),
        };
        options.rules.read_bytes_per_second = self.bytes_per_second;
        options.rules.write_bytes_per_second = self.bytes_per_second;
        options
    }

    pub(crate) fn slots(&self, record_bytes: u64) -> u64 {
        self.options(record_bytes).slots().unwrap_or(0)
    }

    pub(crate) fn open(&self, record_bytes: u64) -> Result<DiskTier, OpenError> {
        let options = self.options(record_bytes);
        let tier = DiskTier::open(&options)?;
        // A second run of the same configuration has a tier of its own, which nobody asks.
        let _ = self.watch.set(tier.watch());
        Ok(tier)
    }

    /// What came of the files, and the tokens that they have saved; none if they were not opened.
    pub(crate) fn report(&self, saved_tokens: u64) -> Option<DiskReport> {
        let watch = self.watch.get()?;
        let stats = watch.stats();
        let misses =
            Miss::ALL.into_iter().map(|miss| (miss.name().to_owned(), stats.missed_as(miss)));
        let unstored =
            Unstored::ALL.into_iter().map(|of| (of.name().to_owned(), stats.unstored_as(of)));
        Some(DiskReport {
            disk_backend: watch
                .files()
                .first()
                .map_or_else(String::new, |of| of.backend.to_string()),
            disk_slots: stats.slots,
            disk_used_slots: stats.used_slots,
            disk_survivors: stats.survivors,
            disk_stored: stats.stored,
            disk_loaded: stats.loaded,
            disk_uncopied: stats.uncopied,
            disk_saved_tokens: saved_tokens,
            disk_misses: misses.filter(|(_, count)| *count > 0).collect(),
            disk_unstored: unstored.filter(|(_, count)| *count > 0).collect(),
            disk_evicted: stats.evicted,
            disk_written_bytes: stats.written_bytes,
            disk_read_bytes: stats.read_bytes,
            disk_failed_operations: stats.failed_operations,
            disk_files_off: stats.off,
        })
    }
}

impl PartialEq for DiskConfig {
    fn eq(&self, other: &Self) -> bool {
        let of = |config: &Self| {
            let Self { folder, bytes, bytes_per_second, fresh, share, .. } = config;
            (folder.clone(), *bytes, *bytes_per_second, *fresh, share.clone())
        };
        of(self) == of(other)
    }
}

impl Eq for DiskConfig {}

/// What came of the files below host memory.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct DiskReport {
    /// How the files were reached.
    pub disk_backend: String,
    /// Slots of the files.
    pub disk_slots: u64,
    /// Slots with a block at the end.
    pub disk_used_slots: u64,
    /// Blocks of an earlier run that were found.
    pub disk_survivors: u64,
    /// Blocks that were stored.
    pub disk_stored: u64,
    /// Blocks that were loaded.
    pub disk_loaded: u64,
    /// Blocks among those that the disk has read or written in host memory itself, without a copy.
    pub disk_uncopied: u64,
    /// Tokens whose KV came from the files and was right, so that it was not computed.
    pub disk_saved_tokens: u64,
    /// Loads that were misses, by reason.
    pub disk_misses: BTreeMap<String, u64>,
    /// Blocks that were not stored, by reason.
    pub disk_unstored: BTreeMap<String, u64>,
    /// Blocks that made room.
    pub disk_evicted: u64,
    /// Bytes written to the files.
    pub disk_written_bytes: u64,
    /// Bytes read from them.
    pub disk_read_bytes: u64,
    /// Reads and writes that failed.
    pub disk_failed_operations: u64,
    /// Files that were off at the end.
    pub disk_files_off: u64,
}

impl DiskReport {
    /// Adds what came of the files of another worker. Tokens are saved by all workers together.
    pub(crate) fn add(&mut self, other: Self) {
        if self.disk_backend.is_empty() {
            self.disk_backend = other.disk_backend;
        }
        for (sum, more) in [
            (&mut self.disk_slots, other.disk_slots),
            (&mut self.disk_used_slots, other.disk_used_slots),
            (&mut self.disk_survivors, other.disk_survivors),
            (&mut self.disk_stored, other.disk_stored),
            (&mut self.disk_loaded, other.disk_loaded),
            (&mut self.disk_uncopied, other.disk_uncopied),
            (&mut self.disk_evicted, other.disk_evicted),
            (&mut self.disk_written_bytes, other.disk_written_bytes),
            (&mut self.disk_read_bytes, other.disk_read_bytes),
            (&mut self.disk_failed_operations, other.disk_failed_operations),
            (&mut self.disk_files_off, other.disk_files_off),
        ] {
            *sum += more;
        }
        for (sums, more) in [
            (&mut self.disk_misses, other.disk_misses),
            (&mut self.disk_unstored, other.disk_unstored),
        ] {
            more.into_iter().for_each(|(reason, count)| *sums.entry(reason).or_default() += count);
        }
    }
}

/// A number of bytes as a person writes it: 4096, 256MiB, 4GiB, 2TiB.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ByteSize(pub u64);

#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "{found:?} is no number of bytes; expected a number, with KiB, MiB, GiB or TiB behind it or nothing"
)]
pub struct ByteSizeError {
    pub found: String,
}

impl FromStr for ByteSize {
    type Err = ByteSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];
        let unit = units.iter().find_map(|(unit, bits)| Some((text.strip_suffix(unit)?, *bits)));
        let (number, bits) = unit.unwrap_or((text, 0));
        let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << bits));
        bytes.map(Self).ok_or_else(|| ByteSizeError { found: text.to_owned() })
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
