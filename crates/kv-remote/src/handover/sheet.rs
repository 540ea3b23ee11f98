//! What is handed over: the format of each group, which blocks there are, and in which order their parts come.

use kv_pool::GroupId;
use kv_tier::codec::{FieldError, Fields, Writer};
use kv_tier::{GroupFormat, GroupKind};

use super::{HandoverError, Part};

/// Groups of a sheet, at most.
const GROUPS_MAX: usize = 64;
/// Parts of a hand-over, at most.
const PARTS_MAX: u64 = 1 << 22;
/// Ids of a sheet, at most.
const IDS_MAX: usize = 1 << 24;
/// Readers of a hand-over, at most.
const READERS_MAX: u32 = 1024;
/// Bytes of a sheet, at most.
const BYTES_MAX: usize = 128 << 20;

/// A sequence on its way from one host to another.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Sheet {
    /// Tokens that have KV when all parts are there, the last block partly full.
    pub tokens: u64,
    /// Tokens that have KV of a draft model.
    pub draft_tokens: u64,
    /// The ids of the tokens; empty if the engines name blocks themselves.
    pub ids: Vec<u32>,
    /// The degree of tensor parallelism of the host that computes: each part comes once of each shard.
    pub shards: u32,
    /// How many readers take it over, such as the ranks of a tensor-parallel group that each take the shards that they need: it is
    /// taken when all have.
    pub readers: u32,
    /// Parts come in the order of chunks of so many places, at least 1; within a chunk by layer, then by group, place and
    /// shard. 1 is block by block; [`u32::MAX`] is layer by layer.
    pub chunk_places: u32,
    /// A number for what the tokens are and what their KV depends on, as both engines count it: `Sequence::fingerprint` of `kv-manager`. A
    /// reader that wants other tokens takes no part.
    pub content: u128,
    /// The groups.
    pub groups: Vec<GroupSheet>,
}

/// A group of a [`Sheet`].
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct GroupSheet {
    /// What its blocks are: as `Manager::formats` of the host that computes has it.
    pub format: GroupFormat,
    /// Layers of it.
    pub layers: u32,
    /// Bytes of one layer of one block of one shard.
    pub part_bytes: u32,
    /// The places of its blocks in the sequence, ascending: those of `Export::blocks`.
    pub places: Vec<u32>,
}

impl Sheet {
    /// Whether it may be one: bounds that no hand-over comes near to, and places in order.
    pub(super) fn check(&self) -> Result<(), HandoverError> {
        let wrong = |field| HandoverError::Sheet { field };
        if self.groups.is_empty() || self.groups.len() > GROUPS_MAX {
            return Err(wrong("groups"));
        }
        if self.shards == 0 {
            return Err(wrong("shards"));
        }
        if self.readers == 0 || self.readers > READERS_MAX {
            return Err(wrong("readers"));
        }
        if self.chunk_places == 0 {
            return Err(wrong("chunk_places"));
        }
        if self.ids.len() > IDS_MAX || !self.ids.is_empty() && self.tokens > self.ids.len() as u64 {
            return Err(wrong("ids"));
        }
        if self.draft_tokens > self.tokens {
            return Err(wrong("draft_tokens"));
        }
        for group in &self.groups {
            if group.part_bytes == 0 || u64::from(group.part_bytes) > crate::node::FRAME_MAX {
                return Err(wrong("part_bytes"));
            }
            if group.layers == 0 || group.format.block_tokens == 0 {
                return Err(wrong("layers"));
            }
            let blocks = self.tokens.div_ceil(group.format.block_tokens.into());
            let last = group.places.last().copied().map(u64::from);
            let fits = match group.format.kind {
                // All blocks of the tokens, the partly full one at the end included.
                GroupKind::Full if !group.format.draft_model => {
                    group.places.len() as u64 == blocks
                        && last.is_none_or(|last| last + 1 == blocks)
                }
                GroupKind::State { .. } => group.places.len() <= 1,
                _ => last.is_none_or(|last| last < blocks),
            };
            if !fits || !group.places.is_sorted_by(|a, b| a < b) {
                return Err(wrong("places"));
            }
        }
        match self.part_count() {
            Some(count) if count <= PARTS_MAX => Ok(()),
            _ => Err(wrong("parts")),
        }
    }

    /// Parts of it; none if they cannot be counted.
    pub(super) fn part_count(&self) -> Option<u64> {
        self.groups.iter().try_fold(0_u64, |sum, group| {
            let blocks = (group.places.len() as u64).checked_mul(group.layers.into())?;
            sum.checked_add(blocks.checked_mul(self.shards.into())?)
        })
    }

    /// All parts, in the order in which they come.
    #[must_use]
    pub fn parts(&self) -> Vec<Part> {
        let mut parts = Vec::new();
        for (group, id) in self.groups.iter().zip(0..) {
            for &place in &group.places {
                for layer in 0..group.layers {
                    let of = |shard| Part { group: GroupId(id), place, layer, shard };
                    parts.extend((0..self.shards).map(of));
                }
            }
        }
        let chunk = self.chunk_places.max(1);
        parts.sort_by_key(|part| {
            (part.place / chunk, part.layer, part.group, part.place, part.shard)
        });
        parts
    }

    /// Bytes of a part; none if it is none.
    #[must_use]
    pub fn part_bytes(&self, part: Part) -> Option<u32> {
        let group = self.groups.get(usize::from(part.group.0))?;
        let is_part = part.layer < group.layers
            && part.shard < self.shards
            && group.places.binary_search(&part.place).is_ok();
        is_part.then_some(group.part_bytes)
    }

    /// Its records, of at most so many bytes each: before each piece of it, the length of the whole.
    pub(super) fn records(&self, bytes_max: usize) -> Vec<Vec<u8>> {
        let whole = self.to_bytes();
        let length = (whole.len() as u32).to_le_bytes();
        let pieces = whole.chunks(bytes_max.saturating_sub(length.len()).max(1));
        pieces.map(|piece| [length.as_slice(), piece].concat()).collect()
    }

    /// What a record of it says: the length of the whole, and the piece.
    pub(super) fn piece(record: &[u8]) -> Result<(usize, &[u8]), HandoverError> {
        let wrong = HandoverError::Sheet { field: "length" };
        let (length, piece) = record.split_first_chunk().ok_or(wrong)?;
        let length = u32::from_le_bytes(*length) as usize;
        if length == 0 || length > BYTES_MAX || piece.is_empty() || piece.len() > length {
            return Err(HandoverError::Sheet { field: "length" });
        }
        Ok((length, piece))
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.u64(self.tokens);
        writer.u64(self.draft_tokens);
        writer.u32(self.shards);
        writer.u32(self.readers);
        writer.u32(self.chunk_places);
        writer.u128(self.content);
        writer.list(&self.ids, |writer, id| writer.u32(*id));
        writer.u32(self.groups.len() as u32);
        for group in &self.groups {
            let (kind, first, second) = match group.format.kind {
                GroupKind::Window { tokens, sinks } => (1, tokens, sinks),
                GroupKind::State { checkpoint_tokens, drafts } => (2, checkpoint_tokens, drafts),
                GroupKind::Full => (0, 0, 0),
            };
            writer.u32(kind);
            writer.u32(first);
            writer.u32(second);
            writer.u32(group.format.block_tokens);
            writer.u32(group.format.draft_model.into());
            writer.u32(group.layers);
            writer.u32(group.part_bytes);
            writer.list(&group.places, |writer, place| writer.u32(*place));
        }
        writer.0
    }

    pub(super) fn parse(record: &[u8]) -> Result<Self, HandoverError> {
        let sheet = Self::read(record).map_err(|_| HandoverError::Sheet { field: "length" })?;
        let sheet = sheet.ok_or(HandoverError::Sheet { field: "format" })?;
        sheet.check()?;
        Ok(sheet)
    }

    /// None if a group has a kind or a flag that there is not.
    fn read(record: &[u8]) -> Result<Option<Self>, FieldError> {
        let mut fields = Fields::new(record);
        let (tokens, draft_tokens) = (fields.u64()?, fields.u64()?);
        let (shards, readers, chunk_places) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let (content, ids) = (fields.u128()?, fields.list(IDS_MAX, 4, Fields::u32)?);
        let count = fields.u32()? as usize;
        let mut groups = Vec::new();
        for _ in 0..count.min(GROUPS_MAX + 1) {
            let kind = match (fields.u32()?, fields.u32()?, fields.u32()?) {
                (0, 0, 0) => GroupKind::Full,
                (1, tokens, sinks) => GroupKind::Window { tokens, sinks },
                (2, checkpoint_tokens, drafts) => GroupKind::State { checkpoint_tokens, drafts },
                _ => return Ok(None),
            };
            let block_tokens = fields.u32()?;
            let draft_model = match fields.u32()? {
                0 => false,
                1 => true,
                _ => return Ok(None),
            };
            let format = GroupFormat { kind, block_tokens, draft_model };
            let (layers, part_bytes) = (fields.u32()?, fields.u32()?);
            let places = fields.list(PARTS_MAX as usize, 4, Fields::u32)?;
            groups.push(GroupSheet { format, layers, part_bytes, places });
        }
        fields.end()?;
        Ok(Some(Self { tokens, draft_tokens, ids, shards, readers, chunk_places, content, groups }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(kind: GroupKind, draft_model: bool, places: &[u32]) -> GroupSheet {
        let format = GroupFormat { kind, block_tokens: 16, draft_model };
        GroupSheet { format, layers: 2, part_bytes: 4096, places: places.to_vec() }
    }

    #[test]
    fn a_sheet_has_the_bytes_that_it_had() {
        const SHEET: [&str; 2] = [
            "4c010000280000000000000020000000000000000200000004000000ffffffff100f0e0d0c0b0a09\
             0807060504030201280000006400000065000000660000006700000068000000690000006a000000\
             6b0000006c0000006d0000006e0000006f0000007000000071000000720000007300000074000000\
             75000000760000007700000078000000790000007a0000007b0000007c0000007d0000007e000000\
             7f000000800000008100000082000000830000008400000085000000860000008700000088000000",
            "4c010000890000008a0000008b000000030000000000000000000000000000001000000000000000\
             02000000001000000300000000000000010000000200000001000000110000000300000010000000\
             01000000020000000010000002000000010000000200000002000000400000000200000010000000\
             0000000002000000001000000100000002000000",
        ];
        let sheet = Sheet {
            tokens: 40,
            draft_tokens: 32,
            ids: (100..140).collect(),
            shards: 2,
            readers: 4,
            chunk_places: u32::MAX,
            content: 0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10,
            groups: vec![
                group(GroupKind::Full, false, &[0, 1, 2]),
                group(GroupKind::Window { tokens: 17, sinks: 3 }, true, &[1, 2]),
                group(GroupKind::State { checkpoint_tokens: 64, drafts: 2 }, false, &[2]),
            ],
        };
        let records = sheet.records(200);
        let hex = |record: &Vec<u8>| record.iter().map(|of| format!("{of:02x}")).collect();
        let found: Vec<String> = records.iter().map(hex).collect();
        assert_eq!(found, SHEET);
        let whole: Vec<u8> = records.iter().flat_map(|of| &of[4..]).copied().collect();
        assert_eq!(Sheet::parse(&whole).unwrap(), sheet);
    }

    fn sheet_of(groups: Vec<GroupSheet>) -> Sheet {
        let (tokens, draft_tokens, ids) = (40, 32, (100..140).collect());
        Sheet {
            tokens,
            draft_tokens,
            ids,
            shards: 2,
            readers: 4,
            chunk_places: 1,
            content: 0,
            groups,
        }
    }

    fn parsed(sheet: &Sheet, more: &[u8]) -> Result<Sheet, String> {
        let records = sheet.records(200);
        let whole = records.iter().flat_map(|of| &of[4..]).chain(more);
        Sheet::parse(&whole.copied().collect::<Vec<u8>>()).map_err(|error| format!("{error:?}"))
    }

    #[test]
    fn a_sheet_whose_places_are_not_those_of_its_tokens_is_refused() {
        let window = GroupKind::Window { tokens: 17, sinks: 3 };
        let state = GroupKind::State { checkpoint_tokens: 64, drafts: 2 };
        let full = GroupKind::Full;
        let rows: [(GroupKind, bool, &[u32], bool); 12] = [
            (full, false, &[0, 1, 2], true),
            (full, false, &[0, 2], false),
            (full, false, &[0, 1, 3], false),
            (full, false, &[1, 0, 2], false),
            (full, false, &[2, 2, 2], false),
            (full, true, &[0, 1], true),
            (window, false, &[0, 2], true),
            (window, false, &[1, 1, 2], false),
            (window, false, &[3], false),
            (state, false, &[7], true),
            (state, false, &[1, 2], false),
            (state, false, &[], true),
        ];
        for (kind, draft_model, places, is_taken) in rows {
            let sheet = sheet_of(vec![group(kind, draft_model, places)]);
            let of = parsed(&sheet, &[]);
            assert_eq!(of.is_ok_and(|of| of == sheet), is_taken, "{kind:?} {places:?}");
        }
    }

    #[test]
    fn a_sheet_of_as_many_groups_as_may_be_is_read_whole_and_to_its_end() {
        let groups = |count| vec![group(GroupKind::Full, false, &[0, 1, 2]); count];
        let sheet = sheet_of(groups(GROUPS_MAX));
        assert_eq!(parsed(&sheet, &[]).as_ref(), Ok(&sheet));
        assert!(parsed(&sheet, &[0]).is_err(), "a byte behind its end");
        for count in [0, GROUPS_MAX + 1, GROUPS_MAX + 2] {
            assert!(parsed(&sheet_of(groups(count)), &[]).is_err(), "{count} groups");
        }
    }

    #[test]
    fn a_sheet_has_as_many_bytes_as_are_taken_and_no_more() {
        let record = |length: usize| [(length as u32).to_le_bytes().as_slice(), b"piece"].concat();
        for (length, is_taken) in [(BYTES_MAX, true), (BYTES_MAX + 1, false), (5, true), (4, false)]
        {
            let record = record(length);
            let piece = Sheet::piece(&record);
            assert_eq!(piece.is_ok_and(|piece| piece == (length, b"piece")), is_taken, "{length}");
        }
    }
}
