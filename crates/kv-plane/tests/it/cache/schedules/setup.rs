//! How a cache is made for a schedule: its groups, tiers, tenants, rules and memory.

use kv_pool::store::{StoreKind, StoreRules};

use super::work;
use crate::prelude::*;

/// Most tokens of a sequence.
const TOKENS_MAX: u32 = 32;

/// Blocks of a granule of shared memory, a page in every group.
const GRANULE_BLOCKS: u32 = 4;

/// Blocks with keys and values of some tokens. Where memory is shared, four of them take a page.
fn tokens_shape(block_tokens: u32, is_shared: bool) -> KvShape {
    let row_bytes = if is_shared { 256 / u64::from(block_tokens) } else { 16 };
    KvShape::new(KvShapeOptions { layers: 2, kv_count: 2, row_bytes, block_tokens }).unwrap()
}

fn state_shape(is_shared: bool) -> KvShape {
    let row_bytes = if is_shared { 256 } else { 32 };
    KvShape::new(KvShapeOptions { layers: 2, kv_count: 2, row_bytes, block_tokens: 1 }).unwrap()
}

/// What of a cache is drawn first, because other parts follow from it.
#[derive(Clone, Copy)]
struct Frame {
    block_tokens: u32,
    sequences_max: u32,
    is_shared: bool,
    has_host: bool,
}

fn group(frame: Frame, random: &mut Random) -> GroupOptions {
    let Frame { block_tokens: first, sequences_max, is_shared, has_host } = frame;
    let block_tokens = random.pick(&[first, first, first / 2, first * 2]);
    let kind = match random.index(5) {
        0 => GroupKind::Full,
        1 | 2 => GroupKind::Window {
            tokens: random.from(1, 3 * u64::from(block_tokens)) as u32,
            sinks: random.pick(&[0, 0, 1, block_tokens]),
        },
        // A multiple of every size of blocks.
        _ => GroupKind::State {
            checkpoint_tokens: 2 * first * random.from(1, 2) as u32,
            drafts: random.from(0, 3) as u32,
        },
    };
    let blocks = |blocks: u64| (blocks as u32 * first).div_ceil(block_tokens);
    let (shape, least) = match kind {
        GroupKind::State { drafts, .. } => (state_shape(is_shared), sequences_max + 2 + drafts),
        _ => (tokens_shape(block_tokens, is_shared), 1),
    };
    GroupOptions {
        kind,
        shape,
        device_blocks: blocks(random.from(5, 20)).max(least),
        host_blocks: if has_host && random.chance(80) { random.from(1, 12) as u32 } else { 0 },
        blocks_per_sequence_max: TOKENS_MAX / block_tokens,
        watermark_blocks: random.pick(&[0, 0, 1]),
        draft_model: kind == GroupKind::Full && random.chance(60),
    }
}

/// Tiers below host memory: one as near as a disk, and one as far as other hosts.
fn tiers(clock: &ManualClock, random: &mut Random) -> LowerTiers {
    let mut tiers = LowerTiers::new(b"a model");
    tiers.rules = LowerOptions {
        wait_max: Duration::from_millis(random.from(1, 60)),
        stores_open_max: random.from(1, 4) as u32,
        loads_open_max: random.from(1, 4) as u32,
        ticket_blocks_max: random.from(1, 8) as u32,
        ..LowerOptions::default()
    };
    for tier in 0..random.index(3) {
        let faulty = random.chance(50);
        let seed = random.number();
        let faults = FaultRules { late_polls_max: 4, ..FaultRules::all(seed) };
        let options = MemoryTierOptions {
            records_max: random.from(4, 60) as usize,
            latency: Duration::from_millis(random.from(0, 5)),
            clock: Arc::new(clock.clone()),
            load_pieces: random.from(1, 4) as u32,
            faults: if faulty { faults } else { FaultRules::default() },
        };
        tiers.push(move || Box::new(MemoryTier::new(options.clone())));
        if random.chance(20) {
            let rules = StoreRules { cost: 0.2, ..StoreRules::new(8) };
            tiers.store[tier] = Some(rules);
        }
    }
    tiers
}

fn pool(clock: &ManualClock, random: &mut Random) -> PoolRules {
    let stores = [HostStore::All, HostStore::from(StoreKind::Evidence)];
    PoolRules {
        eviction: random.pick(&PolicyKind::ALL).into(),
        host_eviction: random.pick(&PolicyKind::ALL).into(),
        store: stores[usize::from(random.chance(25))],
        clock: Some(Arc::new(clock.clone())),
        pinned_blocks_max: random.from(0, 6),
        ..PoolRules::default()
    }
}

/// The options of a cache of one to four groups.
pub(super) fn options(clock: &ManualClock, random: &mut Random) -> KvCacheOptions {
    let further = random.index(4);
    let frame = Frame {
        block_tokens: random.pick(&[2, 4, 4, 8]),
        sequences_max: random.from(2, 5) as u32,
        is_shared: further > 0 && random.chance(20),
        has_host: random.chance(75),
    };
    let Frame { block_tokens, sequences_max, is_shared, has_host } = frame;
    let mut groups = vec![GroupOptions::new(tokens_shape(block_tokens, is_shared), 0)];
    groups.extend((0..further).map(|_| group(frame, random)));
    let tokens_max = sequences_max * TOKENS_MAX;
    groups[0].kind = match random.chance(20) {
        true => GroupKind::Window { tokens: random.from(2, 12) as u32, sinks: 0 },
        false => GroupKind::Full,
    };
    groups[0].host_blocks = if has_host { random.from(2, 12) as u32 } else { 0 };
    groups[0].blocks_per_sequence_max = TOKENS_MAX / block_tokens;
    let overlap_depth = random.from(1, 2) as u32;
    groups[0].watermark_blocks = random.pick(&[0, 0, 1, 3]);
    let (scrubs, pool) = (random.chance(40), pool(clock, random));
    groups[0].device_blocks = random.from(6, 20) as u32;
    let tiers = if has_host { tiers(clock, random) } else { LowerTiers::default() };
    if tiers.options().tiers > 0 && random.chance(60) {
        // So that much goes out to the tiers below and comes back.
        groups[0].device_blocks = random.from(6, 9) as u32;
        groups[0].host_blocks = random.from(2, 5) as u32;
    }
    let shared = is_shared.then(|| {
        let granules = random.from(2 + further as u64, 16) as u32;
        groups.iter_mut().for_each(|group| group.device_blocks = granules * GRANULE_BLOCKS);
        SharedMemory { granules, granule_blocks: vec![GRANULE_BLOCKS; groups.len()] }
    });
    let options = KvCacheOptions {
        step_arrays: work::arrays(groups.len(), sequences_max.into(), 2 * u64::from(tokens_max)),
        shared,
        pinning: HostPinning::AT_ONCE,
        sequences_max,
        overlap_depth,
        scrubs,
        tiers,
        step_tokens_max: 2 * tokens_max,
        pool,
        ..KvCacheOptions::of(groups)
    };
    by(random.pick(&TransportChoice::ALL), options)
}
