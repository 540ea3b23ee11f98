//! What stands before a stored block's bytes: what they are, and a checksum for each section of them.

use std::ops::Range;

use kv_pool::{GroupId, guard};
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64, xxh3_64_with_seed};

use crate::codec::{FieldError, Fields, Writer};
use crate::{BlockFault, RecordKey};

/// Bytes of a block that are read at a time for its checksums. They stay in the nearest cache but one.
pub(crate) const PIECE: usize = 32 << 10;

/// Bytes that a record of a block with `sections` sections has before the block's bytes.
#[must_use]
pub const fn header_bytes(sections: usize) -> usize {
    FIXED + sections * SUM
}

/// The layout of the header: name, format, bytes of the block and of a section, group, and the header's checksum. Another layout
/// has another one.
const MAGIC: [u8; 8] = *b"KVTIER02";
/// Where the header's checksum is.
const CHECKSUM: usize = 56;
/// Behind these come the checksums of the sections.
const FIXED: usize = 64;
/// Bytes of a checksum.
const SUM: usize = 8;

/// How the bytes of a block are divided: into sections of one length, of which the last may be shorter.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Sections {
    pub(crate) block_bytes: usize,
    pub(crate) section_bytes: usize,
}

impl Sections {
    pub(crate) fn new(block_bytes: usize, section_bytes: usize) -> Self {
        Self { block_bytes, section_bytes: section_bytes.clamp(1, block_bytes.max(1)) }
    }

    pub(crate) fn count(&self) -> usize {
        self.block_bytes.div_ceil(self.section_bytes)
    }

    pub(crate) fn header_bytes(&self) -> usize {
        header_bytes(self.count())
    }

    /// Where the first sections end.
    pub(crate) fn end_of(&self, sections: usize) -> usize {
        (sections * self.section_bytes).min(self.block_bytes)
    }

    pub(crate) fn section(&self, at: usize) -> Range<usize> {
        self.end_of(at)..self.end_of(at + 1)
    }
}

/// The checksum of bytes of a block, which `read` reads piece by piece: host memory is read once, and nothing as large is
/// written.
pub(crate) fn sum_of(
    range: Range<usize>,
    mut read: impl FnMut(usize, &mut [u8]) -> Result<(), BlockFault>,
) -> Result<u64, BlockFault> {
    let (mut piece, mut sum) = ([0; PIECE], Xxh3Default::new());
    for start in range.clone().step_by(PIECE) {
        let piece = &mut piece[..PIECE.min(range.end - start)];
        read(start, piece)?;
        sum.update(piece);
    }
    Ok(sum.digest())
}

impl RecordKey {
    /// The header of a block, whose bytes `read` reads.
    pub(crate) fn header(
        &self,
        sections: Sections,
        mut read: impl FnMut(usize, &mut [u8]) -> Result<(), BlockFault>,
    ) -> Result<Vec<u8>, BlockFault> {
        let mut header = self.fixed(sections);
        header.u64(0);
        for at in 0..sections.count() {
            header.u64(sum_of(sections.section(at), &mut read)?);
        }
        let checksum = checksum(&header.0);
        header.0[CHECKSUM..FIXED].copy_from_slice(&checksum.to_le_bytes());
        Ok(header.0)
    }

    /// Checks that a header is that of this block; the checksums of its sections.
    pub(crate) fn check(&self, sections: Sections, header: &[u8]) -> Result<Vec<u64>, BlockFault> {
        if header.len() != sections.header_bytes() {
            return Err(BlockFault::Short);
        }
        // A record of something else that is right in itself is told apart from a spoilt one.
        check_header(header)?;
        let is_foreign = header[..CHECKSUM] != self.fixed(sections).0;
        if guard!("tier.foreign-records-are-refused", is_foreign, else false) {
            return Err(BlockFault::Foreign);
        }
        let sums = header[FIXED..].as_chunks::<SUM>().0.iter();
        Ok(sums.map(|sum| u64::from_le_bytes(*sum)).collect())
    }

    /// What is the same for all bytes, up to the header's checksum.
    fn fixed(&self, sections: Sections) -> Writer {
        let mut fixed = Writer(Vec::with_capacity(sections.header_bytes()));
        fixed.raw(&MAGIC);
        fixed.name(self.name);
        fixed.u64(self.format);
        fixed.u64(sections.block_bytes as u64);
        fixed.u64(sections.section_bytes as u64);
        fixed.u64(self.group.0.into());
        fixed
    }
}

/// Compares a header of some length with its own checksum.
fn check_header(header: &[u8]) -> Result<(), BlockFault> {
    if header[CHECKSUM..FIXED] != checksum(header).to_le_bytes() {
        return Err(BlockFault::Checksum);
    }
    Ok(())
}

/// Checks that a record is the one of a key, and whole: its header, and each section of its bytes by the checksum that the header
/// has.
///
/// # Errors
/// [`BlockFault::Short`] for other lengths than the header says, [`BlockFault::Checksum`], and [`BlockFault::Foreign`].
pub fn check_record(key: RecordKey, header: &[u8], bytes: &[u8]) -> Result<(), BlockFault> {
    if header.len() < FIXED {
        return Err(BlockFault::Short);
    }
    check_header(header)?;
    let (of, length, section_bytes) = said(header).map_err(|_| BlockFault::Short)?;
    if guard!("tier.lent-records-are-compared", of != key, else false) {
        return Err(BlockFault::Foreign);
    }
    let sections = Sections::new(bytes.len(), usize::try_from(section_bytes).unwrap_or(usize::MAX));
    if length != bytes.len() as u64 || header.len() != sections.header_bytes() {
        return Err(BlockFault::Short);
    }
    let sums = header[FIXED..].as_chunks::<SUM>().0;
    let mut each = bytes.chunks(sections.section_bytes).zip(sums);
    let is_right = each.all(|(section, sum)| xxh3_64(section).to_le_bytes() == *sum);
    if guard!("tier.lent-bytes-have-their-sums", is_right, else true) {
        Ok(())
    } else {
        Err(BlockFault::Checksum)
    }
}

/// Of which record a header is, and the bytes of the block and of a section.
fn said(header: &[u8]) -> Result<(RecordKey, u64, u64), FieldError> {
    let mut fields = Fields::new(&header[MAGIC.len()..]);
    let (name, format) = (fields.name()?, fields.u64()?);
    let (length, section) = (fields.u64()?, fields.u64()?);
    Ok((RecordKey { format, group: GroupId(fields.u16()?), name }, length, section))
}

/// The checksum of a header, but for its own place.
fn checksum(header: &[u8]) -> u64 {
    xxh3_64_with_seed(&header[..CHECKSUM], xxh3_64(&header[FIXED..]))
}
