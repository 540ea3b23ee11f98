//! The device memory of a model's groups of layers: what blocks in use take, and what they would take if all had a
//! common size.

use serde::Serialize;

use crate::config::RunConfig;
use crate::shape::{KV_COUNT, ShapeError};

/// What layers of a group keep of a sequence.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupKindReport {
    /// The keys and values of all tokens.
    #[default]
    Full,
    /// Those of the last tokens.
    Window,
    State,
    /// The keys and values of a draft model, of all tokens that it has computed.
    Draft,
}

/// A group of layers, and its blocks in use at one time.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct GroupMemory {
    /// What its layers keep of a sequence.
    pub kind: GroupKindReport,
    pub layers: u32,
    /// Bytes of a block in all its layers, over all devices.
    pub block_bytes: u64,
    /// Number of device blocks that sequences and transfers used.
    pub blocks: u64,
    /// Bytes of these blocks.
    pub bytes: u64,
    /// Largest number of device blocks that sequences and transfers used at any time.
    pub peak_blocks: u64,
}

/// The device memory in use when most bytes of it were. Blocks that are only cached are not in use.
///
/// Bytes of padded blocks are calculated from the same numbers of blocks; no run is made with them.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct MemoryReport {
    /// The groups, in the order of their block tables.
    pub groups: Vec<GroupMemory>,
    /// Bytes of the blocks in use, as this cache keeps them.
    pub bytes: u64,
    /// Bytes of as many blocks, each padded to the bytes of the largest group's block: one block size for all
    /// groups, with the layers grouped as here.
    pub padded_bytes: u64,
    /// Bytes of as many blocks if they were laid out by the rules of vLLM's hybrid KV cache manager, which has one
    /// page size for all layers, and groups of equal numbers of layers.
    ///
    /// Groups have as many layers as the smallest kind has, or as the largest if that has less than one and a half
    /// times as many; layers that are missing in the last group of a kind are padding. A block takes a page for each
    /// layer of its group. The page is a block of one attention layer, or as many of them as a state of one layer
    /// needs, and a state is padded to it. Attention layers then have more tokens in a page: what a larger last page
    /// of a sequence wastes is not counted, in favour of vLLM.
    pub common_page_bytes: u64,
    /// The memory that groups share; `None` where each has its own.
    pub shared: Option<SharedReport>,
}

/// Device memory that groups share by granules.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct SharedReport {
    pub granules: u32,
    /// Blocks of a granule in each group, in the order of the groups.
    pub granule_blocks: Vec<u32>,
    /// Bytes of a granule over all devices: those of the group whose blocks there have most.
    pub granule_bytes: u64,
    /// Largest number of granules that groups had at once, cached blocks included.
    pub peak_granules: u64,
    /// Fewest granules that groups had after the first change of their budget; `None` without one.
    pub fewest_granules: Option<u64>,
    /// Number of times that the cached prefix of a request was forgotten, because its blocks were spread over
    /// granules that other groups needed for the request.
    pub forgotten: u64,
    /// Number of times that a group was given a granule.
    pub granted: u64,
    /// Of these, granules that were taken from another group.
    pub taken: u64,
}

impl MemoryReport {
    /// The groups of a model without blocks in use.
    pub fn new(config: &RunConfig) -> Result<Self, ShapeError> {
        let row_bytes = config.shape.row_bytes()?;
        let token_bytes = row_bytes.saturating_mul(KV_COUNT);
        let block_bytes = token_bytes.saturating_mul(config.block_tokens.into());
        let (windows, states) = (config.window_layers(), config.state_layers);
        let kinds = [
            (GroupKindReport::Full, config.shape.layers.saturating_sub(windows), block_bytes),
            (GroupKindReport::Window, windows, block_bytes),
            (
                GroupKindReport::State,
                states,
                token_bytes.saturating_mul(config.state_tokens.into()),
            ),
            (GroupKindReport::Draft, config.draft_layers, block_bytes),
        ];
        let groups = kinds.into_iter().filter(|&(_, layers, _)| layers > 0);
        let groups = groups.map(|(kind, layers, bytes)| {
            let block_bytes = bytes.saturating_mul(layers.into());
            GroupMemory { kind, layers, block_bytes, ..GroupMemory::default() }
        });
        Ok(Self { groups: groups.collect(), ..Self::default() })
    }

    /// Records the numbers of blocks in use in each group, if that is the most memory so far.
    pub fn note(&mut self, blocks: &[u64]) {
        let used = self.groups.iter().zip(blocks);
        let used = used.map(|(group, &blocks)| group.block_bytes.saturating_mul(blocks));
        let bytes = used.fold(0, u64::saturating_add);
        for (group, &blocks) in self.groups.iter_mut().zip(blocks) {
            group.peak_blocks = group.peak_blocks.max(blocks);
            if bytes > self.bytes {
                (group.blocks, group.bytes) = (blocks, group.block_bytes.saturating_mul(blocks));
            }
        }
        if bytes > self.bytes {
            self.bytes = bytes;
            self.padded_bytes = self.padded();
            self.common_page_bytes = self.common_page();
        }
    }

    fn padded(&self) -> u64 {
        let block_bytes = self.groups.iter().map(|group| group.block_bytes).max().unwrap_or(0);
        let blocks = self.groups.iter().fold(0, |all: u64, group| all.saturating_add(group.blocks));
        blocks.saturating_mul(block_bytes)
    }

    /// See [`common_page_bytes`](Self::common_page_bytes).
    fn common_page(&self) -> u64 {
        let layers = || self.groups.iter().map(|group| u64::from(group.layers));
        let (least, most) = (layers().min().unwrap_or(1).max(1), layers().max().unwrap_or(1));
        let group_layers =
            if most.saturating_mul(2) < least.saturating_mul(3) { most } else { least };
        let of_layer = |group: &GroupMemory| group.block_bytes / u64::from(group.layers).max(1);
        let attention = self.groups.iter().filter(|group| group.kind != GroupKindReport::State);
        let attention = attention.map(of_layer).max().unwrap_or(1).max(1);
        let bytes = |group: &GroupMemory| {
            let page = of_layer(group).max(1).div_ceil(attention).saturating_mul(attention);
            let padded_layers = u64::from(group.layers).next_multiple_of(group_layers);
            padded_layers.saturating_mul(page).saturating_mul(group.blocks)
        };
        self.groups.iter().map(bytes).fold(0, u64::saturating_add)
    }
}
