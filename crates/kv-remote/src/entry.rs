//! What stands before a record in a slot, so that a reader knows what it has read without asking.

use std::borrow::Cow;

use kv_pool::{GroupId, guard};
use kv_tier::codec::{FieldError, Fields, Writer};
use kv_tier::{BlockFault, RecordKey, check_record};
use xxhash_rust::xxh3::xxh3_64;

use crate::message::{Located, Span};

/// Bytes of an entry.
pub(crate) const ENTRY_BYTES: usize = 64;

const MAGIC: [u8; 8] = *b"KVREMOT2";

/// Why a record that was read is none that may be used.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Unfit {
    /// Another write has taken the slot since: the lease had ended, or the node has started anew.
    Stale,
    /// The bytes are not those of their checksum: they were read while they were written, or changed on their way.
    Torn,
    /// The record of another block or format.
    Foreign,
    /// Fewer bytes than an entry or its record has.
    Short,
}

/// An entry: of which block and which write the record behind it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Entry {
    pub(crate) key: RecordKey,
    pub(crate) generation: u64,
    /// Bytes of the record.
    pub(crate) length: u32,
    /// XXH3 of the record.
    pub(crate) sum: u64,
}

impl Entry {
    pub(crate) fn of(key: RecordKey, generation: u64, record: &[u8]) -> Self {
        // No frame has more.
        Self { key, generation, length: record.len() as u32, sum: xxh3_64(record) }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let RecordKey { format, group, name } = self.key;
        let mut bytes = Writer(Vec::with_capacity(ENTRY_BYTES));
        bytes.raw(&MAGIC);
        bytes.name(name);
        bytes.u64(format);
        bytes.u32(group.0.into());
        bytes.u32(self.length);
        bytes.u64(self.generation);
        bytes.u64(self.sum);
        bytes.u64(xxh3_64(&bytes.0));
        bytes.0
    }

    fn parse(bytes: &[u8]) -> Result<Self, Unfit> {
        let head = bytes.get(..ENTRY_BYTES).ok_or(Unfit::Short)?;
        let (body, own) = head.split_at(ENTRY_BYTES - 8);
        if body[..MAGIC.len()] != MAGIC || own != xxh3_64(body).to_le_bytes() {
            return Err(Unfit::Torn);
        }
        let read = |mut fields: Fields<'_>| -> Result<_, FieldError> {
            let (name, format) = (fields.name()?, fields.u64()?);
            let (group, length) = (fields.u32()?, fields.u32()?);
            Ok((name, format, group, length, fields.u64()?, fields.u64()?))
        };
        let (name, format, group, length, generation, sum) =
            read(Fields::new(&body[MAGIC.len()..])).map_err(|_| Unfit::Short)?;
        let group = GroupId(u16::try_from(group).map_err(|_| Unfit::Foreign)?);
        Ok(Self { key: RecordKey { format, group, name }, generation, length, sum })
    }
}

impl Located {
    /// Where the record alone is, behind its entry; of a block with a head, the rest of it.
    #[must_use]
    pub fn record_span(&self) -> Span {
        if self.head.is_some() {
            return self.span;
        }
        let Span { address, bytes } = self.span;
        let head = ENTRY_BYTES as u32;
        Span { address: address.saturating_add(head.into()), bytes: bytes.saturating_sub(head) }
    }

    /// The record in the bytes of this slot, if it is that of `key` and of the write that was found, whole (H8, H21).
    /// The lease may have ended before or while the bytes were read. It is copied if it has a head.
    ///
    /// # Errors
    /// [`Unfit`]: it is not to be used.
    pub fn record<'a>(&self, bytes: &'a [u8], key: RecordKey) -> Result<Cow<'a, [u8]>, Unfit> {
        if let Some(head) = &self.head {
            let checked =
                guard!("remote.checks-heads", check_record(key, head, bytes), else Ok(()));
            checked.map_err(|fault| match fault {
                BlockFault::Foreign => Unfit::Foreign,
                BlockFault::Short => Unfit::Short,
                _ => Unfit::Torn,
            })?;
            return Ok([head, bytes].concat().into());
        }
        let entry = Entry::parse(bytes)?;
        if guard!("remote.compares-the-write", entry.generation != self.generation, else false) {
            return Err(Unfit::Stale);
        }
        if guard!("remote.compares-the-name", entry.key != key, else false) {
            return Err(Unfit::Foreign);
        }
        let length = usize::try_from(entry.length).map_err(|_| Unfit::Short)?;
        let record = bytes.get(ENTRY_BYTES..).and_then(|behind| behind.get(..length));
        let record = record.ok_or(Unfit::Short)?;
        if guard!("remote.compares-the-sum", xxh3_64(record) != entry.sum, else false) {
            return Err(Unfit::Torn);
        }
        Ok(record.into())
    }
}

#[cfg(test)]
mod tests {
    use kv_pool::BlockHash;

    use super::*;

    fn check(bytes: &[u8], key: RecordKey, generation: u64) -> Result<Cow<'_, [u8]>, Unfit> {
        let span = Span { address: 0, bytes: bytes.len() as u32 };
        Located { span, generation, sum: 0, head: None }.record(bytes, key)
    }

    fn block(name: u128) -> RecordKey {
        RecordKey { format: 9, group: GroupId(3), name: BlockHash::from_u128(name) }
    }

    fn slot(generation: u64, record: &[u8]) -> Vec<u8> {
        let entry = Entry::of(block(7), generation, record);
        [entry.bytes().as_slice(), record].concat()
    }

    #[test]
    fn a_record_is_read_whole_or_its_fault_is_named() {
        let bytes = slot(5, b"some bytes of a record");
        assert_eq!(check(&bytes, block(7), 5), Ok(b"some bytes of a record".as_slice().into()));
        assert_eq!(check(&bytes, block(7), 4), Err(Unfit::Stale));
        assert_eq!(check(&bytes, block(8), 5), Err(Unfit::Foreign));
        let others =
            [RecordKey { group: GroupId(2), ..block(7) }, RecordKey { format: 8, ..block(7) }];
        others.into_iter().for_each(|of| assert_eq!(check(&bytes, of, 5), Err(Unfit::Foreign)));
        for length in 0..bytes.len() {
            assert_eq!(check(&bytes[..length], block(7), 5), Err(Unfit::Short), "{length}");
        }
        // What comes behind the record is not part of it.
        let longer = [bytes.as_slice(), &[1; 40]].concat();
        assert_eq!(check(&longer, block(7), 5), Ok(b"some bytes of a record".as_slice().into()));
    }

    #[test]
    fn a_mixture_of_two_writes_is_never_taken_for_either() {
        let (old, new) = (slot(5, &[1; 100]), slot(6, &[2; 100]));
        for cut in 1..old.len() {
            let mixed = [&new[..cut], &old[cut..]].concat();
            for generation in [5, 6] {
                if mixed != old && mixed != new {
                    assert!(check(&mixed, block(7), generation).is_err(), "{cut}, {generation}");
                }
            }
        }
    }
}
