//! What a tier is made with.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kv_pool::BlockHash;
use kv_pool::clock::{Clock, SystemClock};
use kv_pool::policy::PolicyKind;

use crate::Keys;
use crate::layout::Geometry;

/// What a file's content is worth when it is opened.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Keep {
    /// What was stored before can be loaded.
    #[default]
    Content,
    /// It is gone.
    Nothing,
}

/// What is done with a file of another model, version or size, or one that was spoilt.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Mismatch {
    /// It is refused, and stays as it is.
    #[default]
    Refuse,
    /// Its content is given up. A file that is none of this crate's is refused all the same.
    Wipe,
}

/// Which way files are reached.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum BackendChoice {
    /// io_uring where the system has it, and threads where it is refused. What was chosen is reported.
    #[default]
    Best,
    /// io_uring, or an error.
    Ring,
    /// Threads.
    Threads,
}

/// How a file of slots is used.
#[derive(Clone, Debug)]
pub struct SlotRules {
    /// The model that records are of: its weights, and the share of it that this process holds, as a number.
    pub model: u128,
    /// What content is worth when a file is opened.
    pub keep: Keep,
    /// What is done with a file that does not fit.
    pub mismatch: Mismatch,
    /// Reads of a file at a time, at least 1.
    pub read_depth: u32,
    /// Writes of a file at a time, at least 1.
    pub write_depth: u32,
    /// Bytes a second that a file is read with, at most, and at least 1.
    pub read_bytes_per_second: Option<u64>,
    /// Bytes a second that a file is written with, at most, and at least 1.
    pub write_bytes_per_second: Option<u64>,
    /// Bytes a day that a file is written with, at most. Counted by [`clock`](Self::clock), from each opening on.
    pub write_bytes_per_day: Option<u64>,
    /// Operations that fail in a row until the file is off.
    pub failures_max: u32,
    /// Whether what is forgotten is given back to the file system at once, which reads as zeros then.
    pub punches: bool,
    /// Decides which block makes room.
    pub policy: PolicyKind,
    /// Keys for records that are to be encrypted. A file that was opened with keys is refused without, as one of another model is.
    pub keys: Option<Arc<dyn Keys>>,
    /// The time that rates are measured by.
    pub clock: Arc<dyn Clock>,
}

impl SlotRules {
    /// Rules for records of a model, which is named by its weights and the share of it that this process holds.
    #[must_use]
    pub fn new(model: &[u8]) -> Self {
        Self { model: BlockHash::salted(model).to_u128(), ..Self::default() }
    }

    /// Whether encrypted records can be told from others.
    pub(crate) fn seals(&self) -> bool {
        cfg!(feature = "seal") && self.keys.is_some()
    }
}

impl Default for SlotRules {
    /// 16 reads and 8 writes at a time, without limits.
    fn default() -> Self {
        Self {
            model: 0,
            keep: Keep::default(),
            mismatch: Mismatch::default(),
            read_depth: 16,
            write_depth: 8,
            read_bytes_per_second: None,
            write_bytes_per_second: None,
            write_bytes_per_day: None,
            failures_max: 8,
            punches: false,
            policy: PolicyKind::Lru,
            keys: None,
            clock: Arc::new(SystemClock::new()),
        }
    }
}

/// What a [`DiskTier`](crate::DiskTier) is made with.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// A folder for each file, so that blocks are striped over several disks. A folder may be named several times: then
    /// it has several files, and as many threads.
    pub folders: Vec<PathBuf>,
    /// Bytes of all files together.
    pub bytes: u64,
    /// Bytes that stay free in each folder's file system.
    pub reserve_bytes: u64,
    /// Bytes of the longest record.
    pub record_bytes: u64,
    /// How long a file is waited for that another tier has. The kernel keeps the file of a process that was killed until its
    /// reads and writes have ended: before, they could reach what is stored next.
    pub lock_wait: Duration,
    /// Whether a store ends only when it would survive a loss of power. Without this, it survives the end of the process.
    pub survives_power_loss: bool,
    /// Which way files are reached.
    pub backend: BackendChoice,
    /// How each file is used.
    pub rules: SlotRules,
}

impl DiskOptions {
    /// One file of so many bytes in a folder, for records of so many bytes at most. See
    /// [`kv_tier::header_bytes`] for what a record has beside a block's bytes.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>, bytes: u64, record_bytes: u64, model: &[u8]) -> Self {
        Self {
            folders: vec![folder.into()],
            bytes,
            reserve_bytes: 1 << 30,
            record_bytes,
            lock_wait: Duration::from_secs(1),
            survives_power_loss: false,
            backend: BackendChoice::default(),
            rules: SlotRules::new(model),
        }
    }

    /// Slots of each file; none if a file has no room for one.
    #[must_use]
    pub fn slots(&self) -> Option<u64> {
        self.geometry().map(|geometry| geometry.slots)
    }

    pub(crate) fn geometry(&self) -> Option<Geometry> {
        let files = self.folders.len() as u64;
        let sealed = if self.rules.keys.is_some() { crate::seal::SEAL_BYTES as u64 } else { 0 };
        let slot_bytes = Geometry::slot_bytes_for(self.record_bytes.saturating_add(sealed));
        Geometry::within(self.bytes.checked_div(files)?, slot_bytes)
    }
}
