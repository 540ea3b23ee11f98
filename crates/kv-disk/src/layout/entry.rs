//! What a slot says of its record.

use kv_pool::{BlockHash, GroupId};
use kv_tier::codec::{FieldError, Fields, Writer};
use xxhash_rust::xxh3::xxh3_64;

use super::VERSION;

/// Bytes of an entry: a divisor of a sector, so that no sector has a part of one.
pub const ENTRY_BYTES: usize = 128;

const MAGIC: [u8; 8] = *b"KVSLOT01";
const CHECKSUM: usize = ENTRY_BYTES - 8;

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
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Writer(Vec::with_capacity(ENTRY_BYTES));
        bytes.raw(&MAGIC);
        bytes.u32(VERSION);
        bytes.u16(self.group.0);
        bytes.u16(if self.key.is_some() { SEALED } else { 0 });
        bytes.name(self.name);
        bytes.u128(self.file);
        bytes.u128(self.model);
        for number in [self.epoch, self.generation, self.slot, self.length, self.sum] {
            bytes.u64(number);
        }
        bytes.u64(self.key.unwrap_or(0));
        bytes.u32(self.head);
        bytes.u32(0);
        bytes.u64(xxh3_64(&bytes.0));
        bytes.0
    }

    /// Reads an entry from the first bytes of `bytes`.
    ///
    /// # Errors
    /// [`EntryFault`].
    pub fn parse(bytes: &[u8]) -> Result<Self, EntryFault> {
        let bytes = bytes.get(..ENTRY_BYTES).ok_or(EntryFault::Short)?;
        let mut fields = Fields::new(bytes);
        if fields.array()? != MAGIC {
            let empty = bytes.iter().all(|byte| *byte == 0);
            return Err(if empty { EntryFault::Empty } else { EntryFault::Foreign });
        }
        let version = fields.u32()?;
        if version != VERSION {
            return Err(EntryFault::Version { version });
        }
        if bytes[CHECKSUM..] != xxh3_64(&bytes[..CHECKSUM]).to_le_bytes() {
            return Err(EntryFault::Checksum);
        }
        let (group, flags) = (GroupId(fields.u16()?), fields.u16()?);
        let entry = Self {
            name: fields.name()?,
            group,
            file: fields.u128()?,
            model: fields.u128()?,
            epoch: fields.u64()?,
            generation: fields.u64()?,
            slot: fields.u64()?,
            length: fields.u64()?,
            sum: fields.u64()?,
            key: Some(fields.u64()?).filter(|key| flags == SEALED || *key != 0),
            head: fields.u32()?,
        };
        let is_sealed = flags == SEALED;
        let is_known = flags <= SEALED && is_sealed == (entry.head == 0) && fields.u32()? == 0;
        // A key of an entry that is not encrypted is none.
        if is_known && is_sealed == entry.key.is_some() {
            Ok(entry)
        } else {
            Err(EntryFault::Field)
        }
    }
}

impl From<FieldError> for EntryFault {
    fn from(_: FieldError) -> Self {
        Self::Short
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
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(Entry::parse(&changed).is_err(), "bit {bit}");
        }
        for len in 0..ENTRY_BYTES {
            assert_eq!(Entry::parse(&bytes[..len]), Err(EntryFault::Short));
        }
        assert_eq!(Entry::parse(&[0; 200]), Err(EntryFault::Empty));
    }

    #[test]
    fn an_entry_of_another_version_is_told_to_be_so() {
        let mut bytes = entry(None).to_bytes();
        bytes[MAGIC.len()..][..4].copy_from_slice(&(VERSION + 1).to_le_bytes());
        let sum = xxh3_64(&bytes[..CHECKSUM]);
        bytes[CHECKSUM..].copy_from_slice(&sum.to_le_bytes());
        let version = VERSION + 1;
        assert_eq!(Entry::parse(&bytes), Err(EntryFault::Version { version }));
    }

    #[test]
    fn a_field_that_no_entry_has_is_refused_with_a_right_checksum() {
        // The flags, the key, the bytes of the header, and what is reserved.
        for (at, value) in [(14, 2), (14, 1), (104, 1), (112, 0), (116, 1), (119, 1)] {
            let mut bytes = entry(None).to_bytes();
            bytes[at] = value;
            let sum = xxh3_64(&bytes[..CHECKSUM]);
            bytes[CHECKSUM..].copy_from_slice(&sum.to_le_bytes());
            assert_eq!(Entry::parse(&bytes), Err(EntryFault::Field), "byte {at}");
        }
    }
}
