//! What stands before a stored block's bytes: what they are, and a checksum for each section of them.

use kv_pool::{BlockHash, BlockId, guard};
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64, xxh3_64_with_seed};

use super::{BlockFault, HostBlocks};
use crate::GroupId;

/// Bytes of a block that are read at a time for its checksums. They stay in the nearest cache but one.
pub(crate) const PIECE: usize = 32 << 10;

/// Bytes that a record of a block with `sections` sections has before the block's bytes.
#[must_use]
pub const fn header_bytes(sections: usize) -> usize {
    FIXED + sections * SUM
}

/// The layout of the header. Another layout has another one.
const MAGIC: [u8; 8] = *b"KVTIER02";
const NAME: usize = 8;
const FORMAT: usize = 24;
const LENGTH: usize = 32;
const SECTION: usize = 40;
const GROUP: usize = 48;
const CHECKSUM: usize = 56;
/// Behind these come the checksums of the sections.
const FIXED: usize = 64;
/// Bytes of a checksum.
const SUM: usize = 8;

/// What a record is of.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Label {
    pub(crate) name: BlockHash,
    pub(crate) group: GroupId,
    /// What decides the meaning of the bytes beside the name: model, shape, layout, share.
    pub(crate) format: u64,
}

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
}

/// The checksum of a section, whose bytes come piece by piece.
#[derive(Clone, Default)]
pub(crate) struct SectionSum(Xxh3Default);

impl SectionSum {
    pub(crate) fn update(&mut self, piece: &[u8]) {
        self.0.update(piece);
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.digest()
    }
}

impl Label {
    /// The header of a block whose sections have these checksums.
    pub(crate) fn header(&self, sections: Sections, sums: &[u64]) -> Vec<u8> {
        let mut header = self.fixed(sections).to_vec();
        for sum in sums {
            header.extend_from_slice(&sum.to_le_bytes());
        }
        let checksum = checksum(&header);
        header[CHECKSUM..FIXED].copy_from_slice(&checksum.to_le_bytes());
        header
    }

    /// Checks that a header is that of this block; the checksums of its sections.
    pub(crate) fn check(&self, sections: Sections, header: &[u8]) -> Result<Vec<u64>, BlockFault> {
        if header.len() != sections.header_bytes() {
            return Err(BlockFault::Short);
        }
        // A record of something else that is right in itself is told apart from a spoilt one.
        check_header(header)?;
        let is_foreign = header[..CHECKSUM] != self.fixed(sections)[..CHECKSUM];
        if guard!("manager.foreign-records-are-refused", is_foreign, else false) {
            return Err(BlockFault::Foreign);
        }
        let sums = header[FIXED..].as_chunks::<SUM>().0.iter();
        Ok(sums.map(|sum| u64::from_le_bytes(*sum)).collect())
    }

    /// What is the same for all bytes, and no checksum yet.
    fn fixed(&self, sections: Sections) -> [u8; FIXED] {
        let Sections { block_bytes, section_bytes } = sections;
        let mut fixed = [0; FIXED];
        fixed[..NAME].copy_from_slice(&MAGIC);
        fixed[NAME..FORMAT].copy_from_slice(&self.name.to_u128().to_le_bytes());
        fixed[FORMAT..LENGTH].copy_from_slice(&self.format.to_le_bytes());
        fixed[LENGTH..SECTION].copy_from_slice(&(block_bytes as u64).to_le_bytes());
        fixed[SECTION..GROUP].copy_from_slice(&(section_bytes as u64).to_le_bytes());
        fixed[GROUP..GROUP + 2].copy_from_slice(&self.group.0.to_le_bytes());
        fixed
    }
}

/// The header of a block in host memory, as it is now.
pub(crate) fn header_of(
    host: &dyn HostBlocks,
    block: BlockId,
    (name, group, format): (BlockHash, GroupId, u64),
) -> Result<Vec<u8>, BlockFault> {
    let sections = Sections::new(host.block_bytes(), host.section_bytes());
    let mut sums = Vec::with_capacity(sections.count());
    let mut piece = [0; PIECE];
    for section in 0..sections.count() {
        let range = sections.end_of(section)..sections.end_of(section + 1);
        let mut sum = SectionSum::default();
        for start in range.clone().step_by(PIECE) {
            let piece = &mut piece[..PIECE.min(range.end - start)];
            if !host.read(block, start, piece) {
                return Err(BlockFault::Missing);
            }
            sum.update(piece);
        }
        sums.push(sum.value());
    }
    Ok(Label { name, group, format }.header(sections, &sums))
}

/// Compares a header of some length with its own checksum.
fn check_header(header: &[u8]) -> Result<(), BlockFault> {
    if header[CHECKSUM..FIXED] != checksum(header).to_le_bytes() {
        return Err(BlockFault::Checksum);
    }
    Ok(())
}

/// Checks that a record is that of a block, and whole: its header, and each section of its bytes by the checksum that the header
/// has. A [`BlockSink`](super::BlockSink) also checks of which format it is.
///
/// # Errors
/// [`BlockFault::Short`] for other lengths than the header says, [`BlockFault::Checksum`], and [`BlockFault::Foreign`].
pub fn check_record(
    (group, name): (GroupId, BlockHash),
    header: &[u8],
    bytes: &[u8],
) -> Result<(), BlockFault> {
    if header.len() < FIXED {
        return Err(BlockFault::Short);
    }
    check_header(header)?;
    if header[NAME..FORMAT] != name.to_u128().to_le_bytes()
        || header[GROUP..GROUP + 2] != group.0.to_le_bytes()
    {
        return Err(BlockFault::Foreign);
    }
    let word = |at: usize| header[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
    let sections = Sections::new(bytes.len(), usize::try_from(word(SECTION)).unwrap_or(usize::MAX));
    if word(LENGTH) != bytes.len() as u64 || header.len() != sections.header_bytes() {
        return Err(BlockFault::Short);
    }
    let sums = header[FIXED..].as_chunks::<SUM>().0;
    let mut each = bytes.chunks(sections.section_bytes).zip(sums);
    let is_right = each.all(|(section, sum)| xxh3_64(section).to_le_bytes() == *sum);
    match guard!("manager.lent-bytes-have-their-sums", is_right, else true) {
        true => Ok(()),
        false => Err(BlockFault::Checksum),
    }
}

/// The checksum of a header, but for its own place.
fn checksum(header: &[u8]) -> u64 {
    xxh3_64_with_seed(&header[..CHECKSUM], xxh3_64(&header[FIXED..]))
}
