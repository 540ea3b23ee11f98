//! Latent attention and its indexer: what a reader finds through the block table.

use crate::prelude::*;

const BLOCK: u64 = 4;
const LAYERS: u64 = 2;
/// Bytes of a token's latent part, and of its part with positions, in one row.
const LATENT: [u64; 2] = [48, 16];
/// Bytes of a token's values of the indexer, and of their scale.
const INDEXER: [u64; 2] = [28, 4];

fn machine() -> (SimDriver, Vec<Stream>) {
    let sim = sim(SimConfig::default());
    let device = device(&sim);
    let streams = streams(&[device]);
    (sim, streams)
}

/// Rows of one component, which is neither keys nor values.
fn shape(layers: u64, row_bytes: u64) -> KvShape {
    let layers = layers as u32;
    let block_tokens = BLOCK as u32;
    KvShape::new(KvShapeOptions { layers, kv_count: 1, row_bytes, block_tokens }).unwrap()
}

/// Latent attention in the first group, and its indexer in one of its own, in one memory by granules.
fn latent() -> KvCacheOptions {
    let mut options = options(shape(LAYERS, LATENT.iter().sum()), 1, 32);
    options.groups.push(group(GroupKind::Full, shape(LAYERS, INDEXER.iter().sum()), 1, 32));
    options.sharing(16 << 20, 1).unwrap()
}

/// A view of a part of a token's row, which begins at byte `first`: through the table of the first sequence of the batch.
fn view(
    cache: &KvCache,
    group: GroupId,
    ids: &[i32],
    (layer, token): (u64, u64),
    (first, bytes): (u64, u64),
) -> DeviceSpan {
    let part = &cache.parts()[0].groups()[usize::from(group.0)];
    let row = part.shape().row_bytes();
    let block = ids[(token / BLOCK) as usize] as u64;
    let block = part.paged().block_span(block).unwrap().unwrap();
    block.slice((layer * BLOCK + token % BLOCK) * row + first, bytes).unwrap()
}

fn table(cache: &KvCache, stream: &Stream, group: GroupId) -> Vec<i32> {
    read_words(stream, cache.parts()[0].batch().tables[usize::from(group.0)].block_table)
}

/// The byte of a part of a token's row.
fn byte(seed: u8, group: GroupId, part: usize, (layer, token): (u64, u64)) -> u8 {
    seed ^ ((group.0 as u8) << 7 | (part as u8) << 6 | (layer as u8) << 4 | token as u8)
}

const PARTS: [(GroupId, [u64; 2]); 2] = [(GroupId(0), LATENT), (GroupId(1), INDEXER)];

/// Calls `each` with every part of every token's row in every group.
fn for_each_part(tokens: u64, mut each: impl FnMut(GroupId, usize, (u64, u64), (u64, u64))) {
    for (group, parts) in PARTS {
        for (layer, token) in (0..LAYERS).flat_map(|layer| (0..tokens).map(move |at| (layer, at))) {
            each(group, 0, (layer, token), (0, parts[0]));
            each(group, 1, (layer, token), (parts[0], parts[1]));
        }
    }
}

/// A sequence whose prompt is computed: each view of each row has bytes of its own.
fn computed(cache: &mut KvCache, stream: &Stream, seed: u8, tokens: u64) -> Sequence {
    let ids = (0..tokens as u32).map(|id| u32::from(seed) * 100 + id);
    let step = cache.begin_step().unwrap();
    let mut sequence = admitted(cache, Request::new(ids.collect()), tokens);
    cache.stage(&step, &mut [&mut sequence]).unwrap();
    let tables = PARTS.map(|(group, _)| table(cache, stream, group));
    for_each_part(tokens, |group, part, at, bytes| {
        let to = view(cache, group, &tables[usize::from(group.0)], at, bytes);
        stream.fill(to, byte(seed, group, part, at)).unwrap();
    });
    let number = step.number();
    cache.finish_step(step).unwrap();
    cache.drain().unwrap();
    cache.commit(&mut sequence, number, &[7]).unwrap();
    sequence
}

#[test]
fn a_latent_and_its_rope_part_are_one_row_and_an_indexer_is_a_group_beside() {
    let (sim, streams) = machine();
    let stream = &streams[0];
    let options = latent();
    let granules = options.shared.clone().unwrap();
    let bytes = options.groups.iter().map(|group| group.shape.block_bytes());
    let bytes: Vec<_> =
        bytes.zip(&granules.granule_blocks).map(|(of, &n)| of * u64::from(n)).collect();
    assert_eq!(bytes[0], bytes[1], "a granule is filled by blocks of either: none is padded");
    let mut cache = KvCache::new(&streams, options).unwrap();
    let mut sequence = computed(&mut cache, stream, 0, 14);
    let before = PARTS.map(|(group, _)| cache.manager().block_ids(group, &sequence).to_vec());
    // To host memory and back, to other blocks.
    cache.suspend(&mut sequence).unwrap();
    one_step(&mut cache, &mut []);
    let others: Vec<_> = (1..5).map(|seed| computed(&mut cache, stream, seed, 14)).collect();
    cache.resume(&mut sequence).unwrap().given().unwrap();
    cache.reserve(&mut sequence, 1).unwrap().given().unwrap();
    let step = cache.begin_step().unwrap();
    cache.stage(&step, &mut [&mut sequence]).unwrap();
    let tables = PARTS.map(|(group, _)| table(&cache, stream, group));
    assert_ne!(tables[0][3], before[0][3].get(), "its partly filled block came back elsewhere");
    for_each_part(14, |group, part, at, bytes| {
        let from = view(&cache, group, &tables[usize::from(group.0)], at, bytes);
        let expected = vec![byte(0, group, part, at); bytes.1 as usize];
        assert_eq!(read(stream, from), expected, "{group:?}, part {part} of {at:?}");
    });
    cache.finish_step(step).unwrap();
    cache.drain().unwrap();
    drop((sequence, others));
    cache.close().unwrap();
    assert!(sim.findings().is_empty());
}
