//! What a slot says of its record.

use kv_manager::GroupId;
use kv_pool::BlockHash;
use xxhash_rust::xxh3::xxh3_64;

use super::{VERSION, field};

/// Bytes of an entry: a divisor of a sector, so that no sector has a part of one.
pub const ENTRY_BYTES: usize = 128;

const MAGIC: [u8; 8] = *b"KVSLOT01";
const VERSION_AT: usize = 8;
const GROUP: usize = 12;
const FLAGS: usize = 14;
const NAME: usize = 16;
const FILE: usize = 32;
const MODEL: usize = 48;
const EPOCH: usize = 64;
const GENERATION: usize = 72;
const SLOT: usize = 80;
const LENGTH: usize = 88;
const SUM: usize = 96;
const KEY: usize = 104;
const HEAD: usize = 112;
const RESERVED: usize = 116;
const CHECKSUM: usize = 120;

/// The record is encrypted with the key of the entry.
const SEALED: u16 = 1;

/// What a slot says of its record. A copy stands in the table; the slot of an encrypted record leaves out its name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Entry {
    /// The block's name; 0 in the slot of an encrypted record.
    pub name: BlockHash,
    /// The block's group.
    pub group: GroupId,
    /// The file that the slot is in.
    pub file: u128,
    /// The model that the record is of.
    pub model: u128,
    /// How often the file had been cleared when the record was stored.
    pub epoch: u64,
    /// The number of the write in its file. Never used twice.
    pub generation: u64,
    /// The slot.
    pub slot: u64,
    /// Bytes of the record as it is stored.
    pub length: u64,
    /// Bytes of the record's header, which has the checksums of its block; 0 for a record that is encrypted whole.
    pub head: u32,
    /// XXH3 of the header, or of the whole record if it is encrypted.
    pub sum: u64,
    /// The key that the record is encrypted with.
    pub key: Option<u64>,
}

/// Why bytes are no entry.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EntryFault {
    /// All are zero: nothing was stored there.
    #[error("nothing was stored there")]
    Empty,
    /// There are fewer bytes than an entry has.
    #[error("the entry is cut off")]
    Short,
    /// They do not begin as an entry does.
    #[error("the bytes are no entry")]
    Foreign,
    /// The entry is of another version.
    #[error("the entry has version {version}, and {VERSION} is read")]
    Version {
        /// The version found.
        version: u32,
    },
    /// The checksum is wrong.
    #[error("the entry's checksum is wrong")]
    Checksum,
    /// A field has a value that no entry has.
    #[error("the entry has a field that no entry has")]
    Field,
}

impl Entry {
    /// The bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(VERSION_AT, &VERSION.to_le_bytes());
        put(GROUP, &self.group.0.to_le_bytes());
        put(FLAGS, &(if self.key.is_some() { SEALED } else { 0 }).to_le_bytes());
        put(NAME, &self.name.to_u128().to_le_bytes());
        put(FILE, &self.file.to_le_bytes());
        put(MODEL, &self.model.to_le_bytes());
        put(EPOCH, &self.epoch.to_le_bytes());
        put(GENERATION, &self.generation.to_le_bytes());
        put(SLOT, &self.slot.to_le_bytes());
        put(LENGTH, &self.length.to_le_bytes());
        put(SUM, &self.sum.to_le_bytes());
        put(KEY, &self.key.unwrap_or(0).to_le_bytes());
        put(HEAD, &self.head.to_le_bytes());
        let sum = xxh3_64(&bytes[..CHECKSUM]);
        bytes[CHECKSUM..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads an entry from the first bytes of `bytes`.
    ///
    /// # Errors
    /// [`EntryFault`].
    pub fn parse(bytes: &[u8]) -> Result<Self, EntryFault> {
        let bytes: &[u8; ENTRY_BYTES] = bytes.first_chunk().ok_or(EntryFault::Short)?;
        if bytes[..8] != MAGIC {
            let empty = bytes.iter().all(|byte| *byte == 0);
            return Err(if empty { EntryFault::Empty } else { EntryFault::Foreign });
        }
        let version = u32::from_le_bytes(field(bytes, VERSION_AT));
        if version != VERSION {
            return Err(EntryFault::Version { version });
        }
        if bytes[CHECKSUM..] != xxh3_64(&bytes[..CHECKSUM]).to_le_bytes() {
            return Err(EntryFault::Checksum);
        }
        let flags = u16::from_le_bytes(field(bytes, FLAGS));
        let key = u64::from_le_bytes(field(bytes, KEY));
        let head = u32::from_le_bytes(field(bytes, HEAD));
        let known = flags <= SEALED && (flags == SEALED || key == 0);
        let known = known && (flags == SEALED) == (head == 0);
        if !known || bytes[RESERVED..CHECKSUM].iter().any(|byte| *byte != 0) {
            return Err(EntryFault::Field);
        }
        Ok(Self {
            name: BlockHash::from_u128(u128::from_le_bytes(field(bytes, NAME))),
            group: GroupId(u16::from_le_bytes(field(bytes, GROUP))),
            file: u128::from_le_bytes(field(bytes, FILE)),
            model: u128::from_le_bytes(field(bytes, MODEL)),
            epoch: u64::from_le_bytes(field(bytes, EPOCH)),
            generation: u64::from_le_bytes(field(bytes, GENERATION)),
            slot: u64::from_le_bytes(field(bytes, SLOT)),
            length: u64::from_le_bytes(field(bytes, LENGTH)),
            head,
            sum: u64::from_le_bytes(field(bytes, SUM)),
            key: (flags == SEALED).then_some(key),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: Option<u64>) -> Entry {
        Entry {
            name: BlockHash::from_u128(0x1122_3344_5566_7788_99aa_bbcc_ddee_ff01),
            group: GroupId(3),
            file: 5,
            model: 7,
            epoch: 9,
            generation: 11,
            slot: 13,
            length: 15,
            head: if key.is_some() { 0 } else { 8 },
            sum: 17,
            key,
        }
    }

    #[test]
    fn an_entry_is_read_as_it_was_written() {
        for key in [None, Some(0), Some(u64::MAX)] {
            assert_eq!(Entry::parse(&entry(key).to_bytes()), Ok(entry(key)));
        }
    }

    #[test]
    fn an_entry_with_any_bit_changed_is_none() {
        let bytes = entry(None).to_bytes();
        for bit in 0..ENTRY_BYTES * 8 {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(Entry::parse(&changed).is_err(), "bit {bit}");
        }
        for len in 0..ENTRY_BYTES {
            assert_eq!(Entry::parse(&bytes[..len]), Err(EntryFault::Short));
        }
        assert_eq!(Entry::parse(&[0; 200]), Err(EntryFault::Empty));
    }

    #[test]
    fn a_field_that_no_entry_has_is_refused_with_a_right_checksum() {
        for (at, value) in
            [(FLAGS, 2), (FLAGS, 1), (KEY, 1), (HEAD, 0), (RESERVED, 1), (RESERVED + 3, 1)]
        {
            let mut bytes = entry(None).to_bytes();
            bytes[at] = value;
            let sum = xxh3_64(&bytes[..CHECKSUM]);
            bytes[CHECKSUM..].copy_from_slice(&sum.to_le_bytes());
            assert_eq!(Entry::parse(&bytes), Err(EntryFault::Field), "byte {at}");
        }
    }
}
