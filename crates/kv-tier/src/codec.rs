//! Numbers, names and lists as bytes, in little-endian order.
//!
//! What is read is not trusted: nothing panics, and nothing is allocated for entries that are not there.

use kv_pool::{BlockHash, GroupId};

use crate::RecordKey;

/// Bytes of a block's group and name.
pub const KEY_BYTES: usize = 18;

/// Bytes of a record's key.
pub const RECORD_KEY_BYTES: usize = 8 + KEY_BYTES;

/// Why bytes are not what they are read as.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FieldError {
    /// More bytes are wanted than are left.
    Short {
        /// Bytes that are wanted.
        wanted: usize,
        /// Bytes that are left.
        left: usize,
    },
    /// A list has more entries than any has.
    TooMany {
        /// Its entries.
        count: usize,
        /// The most that any has.
        max: usize,
    },
    /// There are more bytes than anything has.
    TooLong {
        /// Their number.
        bytes: usize,
        /// The most that anything has.
        max: usize,
    },
    /// Bytes are left behind the last field.
    Trailing {
        /// Their number.
        bytes: usize,
    },
    /// A field has a value that it cannot have.
    Value {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}

/// Bytes of which the fields are read, one behind the other.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    /// All fields.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// So many bytes.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], FieldError> {
        let left = self.rest.len();
        let (head, rest) =
            self.rest.split_first_chunk().ok_or(FieldError::Short { wanted: N, left })?;
        self.rest = rest;
        Ok(*head)
    }

    /// A number of 8 bits.
    pub fn u8(&mut self) -> Result<u8, FieldError> {
        self.array().map(u8::from_le_bytes)
    }

    /// A number of 16 bits.
    pub fn u16(&mut self) -> Result<u16, FieldError> {
        self.array().map(u16::from_le_bytes)
    }

    /// A number of 32 bits.
    pub fn u32(&mut self) -> Result<u32, FieldError> {
        self.array().map(u32::from_le_bytes)
    }

    /// A number of 64 bits.
    pub fn u64(&mut self) -> Result<u64, FieldError> {
        self.array().map(u64::from_le_bytes)
    }

    /// A number of 128 bits.
    pub fn u128(&mut self) -> Result<u128, FieldError> {
        self.array().map(u128::from_le_bytes)
    }

    /// A number of 32 bits that is less than `count`.
    pub fn choice(&mut self, field: &'static str, count: u32) -> Result<u32, FieldError> {
        match self.u32()? {
            value if value < count => Ok(value),
            value => Err(FieldError::Value { field, value: value.into() }),
        }
    }

    /// A byte that is 0 or 1.
    pub fn flag(&mut self, field: &'static str) -> Result<bool, FieldError> {
        match self.u8()? {
            value @ 0..=1 => Ok(value == 1),
            value => Err(FieldError::Value { field, value: value.into() }),
        }
    }

    /// A block's name.
    pub fn name(&mut self) -> Result<BlockHash, FieldError> {
        self.u128().map(BlockHash::from_u128)
    }

    /// A block's group and name, of [`KEY_BYTES`].
    pub fn key(&mut self) -> Result<(GroupId, BlockHash), FieldError> {
        Ok((GroupId(self.u16()?), self.name()?))
    }

    /// A record's key, of [`RECORD_KEY_BYTES`].
    pub fn record_key(&mut self) -> Result<RecordKey, FieldError> {
        let (format, (group, name)) = (self.u64()?, self.key()?);
        Ok(RecordKey { format, group, name })
    }

    /// A list of at most `max` entries, behind their number. Each has `bytes` bytes or more.
    pub fn list<T, E: From<FieldError>>(
        &mut self,
        max: usize,
        bytes: usize,
        mut entry: impl FnMut(&mut Self) -> Result<T, E>,
    ) -> Result<Vec<T>, E> {
        let count = self.u32()? as usize;
        if count > max {
            return Err(FieldError::TooMany { count, max }.into());
        }
        let (wanted, left) = (count.saturating_mul(bytes), self.rest.len());
        if wanted > left {
            return Err(FieldError::Short { wanted, left }.into());
        }
        (0..count).map(|_| entry(self)).collect()
    }

    /// At most `max` bytes, behind their number.
    pub fn bytes(&mut self, max: usize) -> Result<&'a [u8], FieldError> {
        let (wanted, left) = (self.u32()? as usize, self.rest.len());
        if wanted > max {
            return Err(FieldError::TooLong { bytes: wanted, max });
        }
        let (bytes, rest) =
            self.rest.split_at_checked(wanted).ok_or(FieldError::Short { wanted, left })?;
        self.rest = rest;
        Ok(bytes)
    }

    /// All bytes that are left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    /// Checks that nothing is left.
    pub fn end(self) -> Result<(), FieldError> {
        match self.rest.len() {
            0 => Ok(()),
            bytes => Err(FieldError::Trailing { bytes }),
        }
    }
}

/// Bytes to which fields are appended.
#[derive(Debug, Default)]
pub struct Writer(pub Vec<u8>);

impl Writer {
    /// These bytes, without their number.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// A number of 8 bits.
    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    /// A number of 16 bits.
    pub fn u16(&mut self, value: u16) {
        self.raw(&value.to_le_bytes());
    }

    /// A number of 32 bits.
    pub fn u32(&mut self, value: u32) {
        self.raw(&value.to_le_bytes());
    }

    /// A number of 64 bits.
    pub fn u64(&mut self, value: u64) {
        self.raw(&value.to_le_bytes());
    }

    /// A number of 128 bits.
    pub fn u128(&mut self, value: u128) {
        self.raw(&value.to_le_bytes());
    }

    /// A block's name.
    pub fn name(&mut self, name: BlockHash) {
        self.u128(name.to_u128());
    }

    /// A block's group and name.
    pub fn key(&mut self, &(group, name): &(GroupId, BlockHash)) {
        self.u16(group.0);
        self.name(name);
    }

    /// A record's key.
    pub fn record_key(&mut self, &RecordKey { format, group, name }: &RecordKey) {
        self.u64(format);
        self.key(&(group, name));
    }

    /// A list, behind the number of its entries.
    pub fn list<T>(&mut self, entries: &[T], mut entry: impl FnMut(&mut Self, &T)) {
        self.u32(entries.len() as u32);
        entries.iter().for_each(|of| entry(self, of));
    }

    /// Bytes, behind their number.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.u32(bytes.len() as u32);
        self.raw(bytes);
    }
}
