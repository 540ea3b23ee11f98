//! What the blocks of a group of layers are, and what tells their records from others.

use kv_pool::{BlockHash, GroupId, guard};

/// What a group of layers keeps of a sequence.
///
/// Layers with latent attention, with other bytes a token, or that share another layer's KV keep all of it: their
/// kind is [`Full`](Self::Full). How many bytes a block has is no matter of the kind.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum GroupKind {
    /// The KV of all tokens.
    #[default]
    Full,
    /// The KV of the last tokens, and of the first ones.
    ///
    /// A token reads the `tokens` tokens that end with itself, and the first `sinks`. Blocks that no later step
    /// reads leave the sequence: their entries of the block table are -1 from the next plan on.
    Window {
        /// Tokens that a token reads, itself included; 1 or more.
        tokens: u32,
        /// The first tokens, which all read.
        sinks: u32,
    },
    /// One state, that all tokens have changed: the first entry of the sequence's row of the block table. A step that
    /// begins at token 0 does not read it.
    ///
    /// Drafts may be rejected, so a step leaves a state behind each of them: entry 0 of the row is the one behind the
    /// tokens before the first draft, entry `n` the one behind `n` drafts. The next step begins
    /// with the entry of as many drafts as were accepted. It reads that before it writes any: without drafts, in place.
    ///
    /// Content of the cache are states behind certain numbers of tokens (checkpoints). A sequence that begins
    /// there, or goes on behind one of its own, has the state copied first, so a checkpoint does not change.
    /// A step ends at the next position of a checkpoint, at the latest, and computes fewer tokens than it was to, if need be.
    State {
        /// Tokens between checkpoints; a multiple of the block sizes of all groups. Another one is behind the last
        /// such block size that a prompt is longer than.
        checkpoint_tokens: u32,
        /// The most drafts of a step: a row has one entry more. A sequence has one state until drafts are reserved
        /// for it, and then one for each beside.
        drafts: u32,
    },
}

/// What the blocks of a group are: those of two managers mean the same only if this is the same.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct GroupFormat {
    /// What the group keeps of a sequence.
    pub kind: GroupKind,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Whether a draft model writes it.
    pub draft_model: bool,
}

/// What tells a record from all others, in whatever tier it is. A record under another key is a miss.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct RecordKey {
    /// What the bytes mean: see [`record_format`].
    pub format: u64,
    /// The block's group. Blocks of two groups may have the same name.
    pub group: GroupId,
    /// The block's name.
    pub name: BlockHash,
}

/// A number for all that decides what the bytes of a block mean beside its name: the model, its weights and the type of its KV (`model`);
/// the shape and layout of the KV at this worker (`layout`); and which worker this is of how many, since each of several ranks has heads or
/// layers of its own. The same in every process.
#[must_use]
pub fn record_format(model: &[u8], layout: &str, (worker, workers): (u16, u16)) -> u64 {
    let rank = || [worker.to_le_bytes(), workers.to_le_bytes()].concat();
    let rank = guard!("tier.ranks-have-records-of-their-own", rank(), else Vec::new());
    // Each part alone: two that are joined could be two others.
    let parts = [model, layout.as_bytes(), &rank];
    let parts = parts.map(|part| BlockHash::salted(part).to_u128().to_le_bytes());
    BlockHash::salted(&parts.concat()).to_u128() as u64
}
