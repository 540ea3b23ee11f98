//! Fields of messages: numbers and lists in little-endian order, read without trust.

use kv_manager::GroupId;
use kv_pool::BlockHash;

use crate::FrameError;

/// A block: its group, and its name.
pub(crate) type Key = (GroupId, BlockHash);

/// Bytes of a [`Key`] in a message.
pub(crate) const KEY_BYTES: usize = 18;

/// The fields of a message that have not been read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(crate) fn new(rest: &'a [u8]) -> Self {
        Self { rest }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        let left = self.rest.len();
        let (head, rest) =
            self.rest.split_first_chunk().ok_or(FrameError::Short { wanted: N, left })?;
        self.rest = rest;
        Ok(*head)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, FrameError> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, FrameError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, FrameError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, FrameError> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn key(&mut self) -> Result<Key, FrameError> {
        let group = GroupId(self.u16()?);
        Ok((group, BlockHash::from_u128(u128::from_le_bytes(self.array()?))))
    }

    /// A list: its length, and entries of so many bytes. Nothing is allocated for entries that are not there.
    pub(crate) fn list<T>(
        &mut self,
        max: usize,
        bytes: usize,
        mut entry: impl FnMut(&mut Self) -> Result<T, FrameError>,
    ) -> Result<Vec<T>, FrameError> {
        let count = self.u32()? as usize;
        if count > max {
            return Err(FrameError::TooMany { count, max });
        }
        let (wanted, left) = (count.saturating_mul(bytes), self.rest.len());
        if wanted > left {
            return Err(FrameError::Short { wanted, left });
        }
        (0..count).map(|_| entry(self)).collect()
    }

    /// Bytes, behind their number.
    pub(crate) fn bytes(&mut self, max: usize) -> Result<&'a [u8], FrameError> {
        let (wanted, left) = (self.u32()? as usize, self.rest.len());
        if wanted > max {
            return Err(FrameError::TooLong { bytes: wanted, max });
        }
        let (bytes, rest) =
            self.rest.split_at_checked(wanted).ok_or(FrameError::Short { wanted, left })?;
        self.rest = rest;
        Ok(bytes)
    }

    /// All bytes that are left.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    /// Checks that nothing is left.
    pub(crate) fn end(self) -> Result<(), FrameError> {
        match self.rest.len() {
            0 => Ok(()),
            bytes => Err(FrameError::Trailing { bytes }),
        }
    }
}

/// Writes the fields of a message.
#[derive(Debug, Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn of(kind: u8) -> Self {
        Self(vec![kind])
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn key(&mut self, &(group, name): &Key) {
        self.u16(group.0);
        self.0.extend_from_slice(&name.to_u128().to_le_bytes());
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.u32(bytes.len() as u32);
        self.0.extend_from_slice(bytes);
    }

    pub(crate) fn list<T>(&mut self, entries: &[T], mut entry: impl FnMut(&mut Self, &T)) {
        self.u32(entries.len() as u32);
        entries.iter().for_each(|of| entry(self, of));
    }
}
