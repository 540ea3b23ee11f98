//! Events in the format that vLLM publishes, for routers that read it: llm-d, NVIDIA Dynamo, the vLLM router.
//!
//! A batch is msgpack: `[ts, [event, ...], data_parallel_rank]`, each event an array that begins with its tag, as
//! vLLM's publisher writes them (`array_like=True`). How it travels, with a sequence number in a ZeroMQ frame of its
//! own, is the engine's matter; the repository's `examples/router` does it.
//!
//! | event | fields behind the tag |
//! | --- | --- |
//! | `BlockStored` | hashes, parent hash, token ids, tokens of a block, nil (LoRA number), medium, LoRA name, extra keys, group, kind of group, tokens of a window |
//! | `BlockRemoved` | hashes, medium, group |
//! | `AllBlocksCleared` | none |
//!
//! Content whose place in a prefix is not known is left out: routers would take it for the beginning of one. A tier may have it
//! since before its worker began. It is told of when it is loaded, with the name before it.
//!
//! The format has no event for content that moves: it is stored in one medium, and then removed from the other.
//! Media are `GPU`, `CPU`, `DISK` and `REMOTE`; kinds are `full_attention`, `sliding_window` and `mamba`.
//!
//! Routers that make hashes of their own, from token ids, need what else content depends on. The adapter is named
//! as it is if it is UTF-8, else in hexadecimal, and so are the *extra keys*, which are a list for each block, or nil:
//!
//! - the salt, in the first salted block of each event. vLLM names it in the first block of a prefix only. But a block
//!   may be told of long after that one, and in a tier below host memory without it;
//! - what stands behind placeholder tokens that begin in the block, each with its offset there.
//!
//! NVIDIA Dynamo takes an extra key for a salt if it begins with `dynamo-cache-salt:`. Its engines give the cache
//! such a salt. Whoever may read events may read salts.
//!
//! Msgpack needs six encodings here, so they are written out, and the crate has no dependency for them.

use kv_pool::{BlockHash, Tier};
use kv_tier::GroupKind;

use crate::{CacheEvent, Content, GroupId, StoredBlocks};

/// A name as routers know it: its lower 64 bits. Routers keep names as 64-bit numbers. Among a million names, two
/// are the same number with a probability of 3 in 100 million.
#[must_use]
pub fn block_hash(name: BlockHash) -> u64 {
    name.to_u128() as u64
}

/// Appends `events` to `into` as one batch, published at `ts`, in seconds since 1970, by this rank of a
/// data-parallel engine.
///
/// # Examples
///
/// ```
/// use kv_manager::{CacheEvent, vllm};
///
/// let mut bytes = Vec::new();
/// vllm::encode(&[CacheEvent::Cleared], 0.0, None, &mut bytes);
/// assert_eq!(bytes.len(), 1 + 9 + 1 + 1 + 17 + 1);
/// ```
pub fn encode(events: &[CacheEvent], ts: f64, data_parallel_rank: Option<u32>, into: &mut Vec<u8>) {
    let mut out = Msgpack { into };
    out.array(3);
    out.float(ts);
    let told = || {
        let unplaced =
            |event: &&CacheEvent| matches!(event, CacheEvent::Stored(of) if !of.is_placed());
        events.iter().filter(move |event| !unplaced(event))
    };
    let moved = told().filter(|event| matches!(event, CacheEvent::Moved { .. })).count();
    out.array(told().count() + moved);
    for event in told() {
        match event {
            CacheEvent::Stored(stored) => out.stored(stored),
            CacheEvent::Removed { group, tier, names } => out.removed(*group, *tier, names),
            CacheEvent::Moved { from, to } => {
                out.stored(to);
                out.removed(to.group, *from, &to.names);
            }
            CacheEvent::Cleared => {
                out.array(1);
                out.text("AllBlocksCleared");
            }
        }
    }
    match data_parallel_rank {
        Some(rank) => out.number(rank.into()),
        None => out.nil(),
    }
}

/// Writes msgpack.
struct Msgpack<'a> {
    into: &'a mut Vec<u8>,
}

impl Msgpack<'_> {
    fn stored(&mut self, stored: &StoredBlocks) {
        self.array(12);
        self.text("BlockStored");
        self.hashes(&stored.names);
        match stored.parent {
            Some(parent) => self.number(block_hash(parent)),
            None => self.nil(),
        }
        self.array(stored.token_ids.len());
        stored.token_ids.iter().for_each(|&id| self.number(id.into()));
        self.number(stored.block_tokens.into());
        self.nil();
        self.text(medium(stored.tier));
        match stored.content.as_deref().map(|content| &content.adapter[..]) {
            None | Some([]) => self.nil(),
            Some(adapter) => self.text(&printed(adapter)),
        }
        self.extra_keys(stored);
        self.number(stored.group.0.into());
        let (kind, window) = match stored.kind {
            GroupKind::Window { tokens, .. } => ("sliding_window", Some(tokens)),
            GroupKind::State { .. } => ("mamba", None),
            GroupKind::Full => ("full_attention", None),
        };
        self.text(kind);
        match window {
            Some(tokens) => self.number(tokens.into()),
            None => self.nil(),
        }
    }

    /// A list of keys for each block, or nil; nil for all if no block has any.
    fn extra_keys(&mut self, stored: &StoredBlocks) {
        let keyed = stored.content.as_deref().zip(stored.first_token);
        let block_tokens = u64::from(stored.block_tokens);
        let blocks = (0_u64..).take(stored.names.len());
        let keys: Vec<_> = keyed.map_or_else(Vec::new, |(content, first)| {
            let starts = blocks.map(|block| first + block * block_tokens);
            starts.map(|start| Keys::of(content, start, first, block_tokens)).collect()
        });
        if keys.iter().all(Keys::is_empty) {
            return self.nil();
        }
        self.array(keys.len());
        for Keys { start, salt, inputs } in &keys {
            let count = usize::from(salt.is_some()) + inputs.len();
            if count == 0 {
                self.nil();
                continue;
            }
            self.array(count);
            for (at, input) in *inputs {
                self.array(2);
                self.text(&printed(input));
                self.number(at - start);
            }
            if let Some(salt) = salt {
                self.text(&printed(salt));
            }
        }
    }

    fn removed(&mut self, group: GroupId, tier: Tier, names: &[BlockHash]) {
        self.array(4);
        self.text("BlockRemoved");
        self.hashes(names);
        self.text(medium(tier));
        self.number(group.0.into());
    }

    fn hashes(&mut self, names: &[BlockHash]) {
        self.array(names.len());
        names.iter().for_each(|&name| self.number(block_hash(name)));
    }

    fn nil(&mut self) {
        self.into.push(0xc0);
    }

    fn float(&mut self, value: f64) {
        self.into.push(0xcb);
        self.into.extend_from_slice(&value.to_be_bytes());
    }

    /// An unsigned number, in the fewest bytes.
    fn number(&mut self, value: u64) {
        match value {
            0..=0x7f => self.into.push(value as u8),
            0x80..=0xff => self.into.extend_from_slice(&[0xcc, value as u8]),
            0x100..=0xffff => self.headed(0xcd, &(value as u16).to_be_bytes()),
            0x1_0000..=0xffff_ffff => self.headed(0xce, &(value as u32).to_be_bytes()),
            _ => self.headed(0xcf, &value.to_be_bytes()),
        }
    }

    /// The head of an array. Arrays of events have fewer than 2^32 elements.
    fn array(&mut self, len: usize) {
        match len {
            0..=15 => self.into.push(0x90 | len as u8),
            16..=0xffff => self.headed(0xdc, &(len as u16).to_be_bytes()),
            _ => self.headed(0xdd, &(len as u32).to_be_bytes()),
        }
    }

    fn text(&mut self, text: &str) {
        let len = text.len();
        match len {
            0..=31 => self.into.push(0xa0 | len as u8),
            32..=0xff => self.into.extend_from_slice(&[0xd9, len as u8]),
            0x100..=0xffff => self.headed(0xda, &(len as u16).to_be_bytes()),
            _ => self.headed(0xdb, &(len as u32).to_be_bytes()),
        }
        self.into.extend_from_slice(text.as_bytes());
    }

    fn headed(&mut self, head: u8, bytes: &[u8]) {
        self.into.push(head);
        self.into.extend_from_slice(bytes);
    }
}

fn medium(tier: Tier) -> &'static str {
    match tier {
        Tier::Primary => "GPU",
        Tier::Secondary => "CPU",
        Tier::Third => "DISK",
        Tier::Fourth => "REMOTE",
    }
}

/// What a block's content depends on beside token ids.
struct Keys<'a> {
    /// The tokens before the block.
    start: u64,
    salt: Option<&'a [u8]>,
    inputs: &'a [(u64, Vec<u8>)],
}

impl<'a> Keys<'a> {
    /// Those of the block that begins at token `start`, of an event whose first block begins at `first`.
    fn of(content: &'a Content, start: u64, first: u64, block_tokens: u64) -> Self {
        let end = start + block_tokens;
        // The block's name covers all tokens up to its end, and is salted if one of them is.
        let salted = end > content.shared_tokens;
        let told = start > first && start > content.shared_tokens;
        let salt = Some(&content.salt[..]).filter(|salt| salted && !told && !salt.is_empty());
        let position = |token| content.inputs.partition_point(|(at, _)| *at < token);
        Self { start, salt, inputs: &content.inputs[position(start)..position(end)] }
    }

    fn is_empty(&self) -> bool {
        self.salt.is_none() && self.inputs.is_empty()
    }
}

/// Bytes as text: as they are, or in hexadecimal.
fn printed(bytes: &[u8]) -> std::borrow::Cow<'_, str> {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.into(),
        Err(_) => bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::Content;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn stored() -> StoredBlocks {
        StoredBlocks {
            group: GroupId(1),
            kind: GroupKind::Window { tokens: 128, sinks: 0 },
            tier: Tier::Secondary,
            names: vec![
                BlockHash::from_u128(5),
                BlockHash::from_u128((7 << 64) | 0x1234_5678_9abc),
            ],
            parent: Some(BlockHash::from_u128(0x80)),
            first_token: Some(6),
            token_ids: vec![1, 0xffff, 0x1_0000, 4],
            block_tokens: 2,
            content: Some(Arc::new(Content { adapter: b"ab".to_vec(), ..Content::default() })),
        }
    }

    #[test]
    fn batches_have_the_bytes_that_msgspec_writes() {
        let removed = CacheEvent::Removed {
            group: GroupId(0),
            tier: Tier::Primary,
            names: vec![BlockHash::from_u128(300)],
        };
        let events = [CacheEvent::Stored(stored()), removed, CacheEvent::Cleared];
        let mut bytes = Vec::new();
        encode(&events, 1.5, Some(3), &mut bytes);
        let expected = [
            "93cb3ff8000000000000",                 // [1.5,
            "93",                                   // [
            "9cab426c6f636b53746f726564",           // ["BlockStored",
            "9205cf0000123456789abc",               // [5, 0x123456789abc],
            "cc80",                                 // 0x80,
            "9401cdffffce0001000004",               // [1, 0xffff, 0x10000, 4],
            "02c0a3435055a26162c001",               // 2, nil, "CPU", "ab", nil, 1,
            "ae736c6964696e675f77696e646f77",       // "sliding_window",
            "cc80",                                 // 128],
            "94ac426c6f636b52656d6f766564",         // ["BlockRemoved",
            "91cd012ca347505500",                   // [300], "GPU", 0],
            "91b0416c6c426c6f636b73436c6561726564", // ["AllBlocksCleared"]],
            "03",                                   // 3]
        ];
        assert_eq!(hex(&bytes), expected.concat());
    }

    /// The extra keys of five blocks of four tokens, the first of which begins at token `first`.
    fn keys(content: &Content, first: u64) -> Vec<(Option<&[u8]>, Vec<u64>)> {
        let blocks = (0..5).map(|block| Keys::of(content, first + block * 4, first, 4));
        blocks
            .map(|keys| (keys.salt, keys.inputs.iter().map(|(at, _)| at - keys.start).collect()))
            .collect()
    }

    #[test]
    fn the_first_salted_block_of_an_event_names_the_salt() {
        let salted = |content: &Content, first| {
            let keys = keys(content, first);
            keys.iter().position(|(salt, _)| *salt == Some(b"s")).inspect(|_| {
                assert_eq!(keys.iter().filter(|(salt, _)| salt.is_some()).count(), 1);
            })
        };
        let content = Content { salt: b"s".to_vec(), ..Content::default() };
        assert_eq!((salted(&content, 0), salted(&content, 8)), (Some(0), Some(0)));
        // Tokens 0 to 9 are shared, so the block of tokens 8 to 11 is the first that is salted.
        let content = Content { shared_tokens: 10, ..content };
        assert_eq!((salted(&content, 0), salted(&content, 4)), (Some(2), Some(1)));
        assert_eq!((salted(&content, 8), salted(&content, 12)), (Some(0), Some(0)));
        let content = Content { shared_tokens: 40, ..content };
        assert_eq!(salted(&content, 0), None);
        assert_eq!(salted(&Content::default(), 0), None);
    }

    #[test]
    fn inputs_are_named_in_the_block_in_which_they_begin() {
        let inputs = [4, 7, 7, 8, 40].map(|at| (at, b"image".to_vec())).to_vec();
        let content = Content { inputs, ..Content::default() };
        let offsets = |first| keys(&content, first).into_iter().map(|(_, at)| at);
        let expected: [&[u64]; 5] = [&[], &[0, 3, 3], &[0], &[], &[]];
        assert!(offsets(0).eq(expected));
        assert!(offsets(4).eq([expected[1], expected[2], &[], &[], &[]]));
        assert!(offsets(24).eq([&[], &[], &[], &[], &[0][..]]));
    }

    #[test]
    fn extra_keys_have_the_bytes_that_msgspec_writes() {
        let inputs = vec![(9, b"image".to_vec())];
        let content = Content { inputs, salt: b"s".to_vec(), ..Content::default() };
        let mut stored = stored();
        stored.content = Some(Arc::new(content));
        let mut bytes = Vec::new();
        Msgpack { into: &mut bytes }.extra_keys(&stored);
        // [["s"], [["image", 1]]]
        assert_eq!(hex(&bytes), "9291a1739192a5696d61676501");
        stored.content = Some(Arc::new(Content { salt: b"s".to_vec(), ..Content::default() }));
        bytes.clear();
        Msgpack { into: &mut bytes }.extra_keys(&stored);
        assert_eq!(hex(&bytes), "9291a173c0", "[[\"s\"], nil]");
        // Of content that came from somewhere, it is not known where in its prefix it lies.
        stored.first_token = None;
        bytes.clear();
        Msgpack { into: &mut bytes }.extra_keys(&stored);
        assert_eq!(hex(&bytes), "c0");
    }

    #[test]
    fn what_moves_is_stored_there_and_then_removed_here() {
        let mut moved = Vec::new();
        encode(&[CacheEvent::Moved { from: Tier::Primary, to: stored() }], 0.0, None, &mut moved);
        let (group, names) = (stored().group, stored().names);
        let removed = CacheEvent::Removed { group, tier: Tier::Primary, names };
        let mut both = Vec::new();
        encode(&[CacheEvent::Stored(stored()), removed], 0.0, None, &mut both);
        assert_eq!(moved, both);
    }

    #[test]
    fn long_lists_and_texts_have_longer_heads() {
        for (len, head) in
            [(15, "9f"), (16, "dc0010"), (0xffff, "dcffff"), (0x1_0000, "dd00010000")]
        {
            let mut bytes = Vec::new();
            Msgpack { into: &mut bytes }.array(len);
            assert_eq!(hex(&bytes), head);
        }
        for (len, head) in [(31, "bf"), (32, "d920"), (256, "da0100"), (0x1_0000, "db00010000")] {
            let mut bytes = Vec::new();
            Msgpack { into: &mut bytes }.text(&"x".repeat(len));
            assert_eq!(
                (hex(&bytes[..head.len() / 2]), bytes.len()),
                (head.into(), head.len() / 2 + len)
            );
        }
        assert_eq!(printed(&[0xff, 0x0a]), "ff0a");
    }
}
