//! Counts of what a tier has done, and why it did not do more.

use std::ops::AddAssign;

/// Why a load was a miss.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Miss {
    /// Nothing is stored under the name.
    Absent,
    /// It was forgotten while it was read.
    Forgotten,
    /// Fewer bytes came than the record has.
    Short,
    /// A checksum is wrong: the record was torn or changed.
    Torn,
    /// The slot holds what was there before, or what was stored since.
    Stale,
    /// The slot holds a record of another file, model, version or block, or what is no record.
    Foreign,
    /// The file could not be read.
    Failed,
    /// The key of an encrypted record is gone or not the right one, or a record is not encrypted with the key that its block has.
    NoKey,
    /// The tier is off.
    Off,
    /// The worker did not take the record: it had taken its memory back, or the record is of another format.
    Refused,
}

impl Miss {
    /// All reasons.
    pub const ALL: [Self; 10] = [
        Self::Absent,
        Self::Forgotten,
        Self::Short,
        Self::Torn,
        Self::Stale,
        Self::Foreign,
        Self::Failed,
        Self::NoKey,
        Self::Off,
        Self::Refused,
    ];

    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Forgotten => "forgotten",
            Self::Short => "short",
            Self::Torn => "torn",
            Self::Stale => "stale",
            Self::Foreign => "foreign",
            Self::Failed => "failed",
            Self::NoKey => "no_key",
            Self::Off => "off",
            Self::Refused => "refused",
        }
    }
}

/// Why a block was not stored.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Unstored {
    /// The record is longer than a slot.
    TooLong,
    /// The bytes that may be written today are written.
    Daily,
    /// All slots are in use by reads and writes.
    NoSlot,
    /// The file could not be written, or not all of the record was.
    Failed,
    /// The tier is off.
    Off,
    /// It was forgotten while it was written.
    Forgotten,
    /// The worker had taken its memory back.
    Refused,
}

impl Unstored {
    /// All reasons.
    pub const ALL: [Self; 7] = [
        Self::TooLong,
        Self::Daily,
        Self::NoSlot,
        Self::Failed,
        Self::Off,
        Self::Forgotten,
        Self::Refused,
    ];

    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::TooLong => "too_long",
            Self::Daily => "daily",
            Self::NoSlot => "no_slot",
            Self::Failed => "failed",
            Self::Off => "off",
            Self::Forgotten => "forgotten",
            Self::Refused => "refused",
        }
    }
}

/// Why a tier does nothing more, or writes nothing more.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Off {
    /// The disk is full. What is stored is still loaded.
    Full,
    /// The file system has become read-only. What is stored is still loaded.
    ReadOnly,
    /// Too many operations in a row have failed.
    Failing,
}

/// Counts of a tier, or of one of its files.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct DiskStats {
    /// Slots of the files.
    pub slots: u64,
    /// Slots with a record that can be loaded.
    pub used_slots: u64,
    /// Records that were there when the files were opened, and can be loaded.
    pub survivors: u64,
    /// Entries of the table that were not believed when the files were opened.
    pub discarded: u64,
    /// Blocks stored.
    pub stored: u64,
    /// Bytes of records that were stored.
    pub stored_bytes: u64,
    /// Blocks loaded, and taken by the worker as right.
    pub loaded: u64,
    /// Bytes of records that were loaded.
    pub loaded_bytes: u64,
    /// Blocks among those stored and loaded that the disk has read or written in host memory itself, without a copy.
    pub uncopied: u64,
    /// Loads that were misses, by reason, as in [`Miss::ALL`].
    pub misses: [u64; Miss::ALL.len()],
    /// Blocks that were not stored, by reason, as in [`Unstored::ALL`].
    pub unstored: [u64; Unstored::ALL.len()],
    /// Blocks that made room for others.
    pub evicted: u64,
    /// Blocks that were forgotten on request.
    pub forgotten: u64,
    /// Bytes that were written to the files, all told.
    pub written_bytes: u64,
    /// Bytes that were read from the files.
    pub read_bytes: u64,
    /// Operations that ended with an error.
    pub failed_operations: u64,
    /// Files that are off.
    pub off: u64,
}

impl DiskStats {
    /// Loads that were misses, whatever the reason.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.misses.iter().sum()
    }

    /// Loads that were misses for a reason.
    #[must_use]
    pub fn missed_as(&self, miss: Miss) -> u64 {
        self.misses[miss as usize]
    }

    /// Blocks that were not stored for a reason.
    #[must_use]
    pub fn unstored_as(&self, reason: Unstored) -> u64 {
        self.unstored[reason as usize]
    }
}

impl AddAssign for DiskStats {
    fn add_assign(&mut self, other: Self) {
        self.slots += other.slots;
        self.used_slots += other.used_slots;
        self.survivors += other.survivors;
        self.discarded += other.discarded;
        self.stored += other.stored;
        self.stored_bytes += other.stored_bytes;
        self.loaded += other.loaded;
        self.loaded_bytes += other.loaded_bytes;
        self.uncopied += other.uncopied;
        self.misses.iter_mut().zip(other.misses).for_each(|(sum, more)| *sum += more);
        self.unstored.iter_mut().zip(other.unstored).for_each(|(sum, more)| *sum += more);
        self.evicted += other.evicted;
        self.forgotten += other.forgotten;
        self.written_bytes += other.written_bytes;
        self.read_bytes += other.read_bytes;
        self.failed_operations += other.failed_operations;
        self.off += other.off;
    }
}
