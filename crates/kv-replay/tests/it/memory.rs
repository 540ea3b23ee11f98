//! The bytes of blocks in use, and of as many blocks of one size.

use kv_replay::config::RunConfig;
use kv_replay::memory::MemoryReport;
use kv_replay::shape::KvModelShape;

fn memory(layers: [u32; 3], state_tokens: u32, blocks: &[u64]) -> MemoryReport {
    let [full, windows, states] = layers;
    // A block of a layer has 16 tokens of 16 bytes.
    let shape = KvModelShape { layers: full + windows, ..RunConfig::default().shape };
    let config = RunConfig {
        shape,
        window: (windows > 0).then_some(64),
        full_layers: full,
        state_layers: states,
        state_tokens,
        block_tokens: 16,
        ..RunConfig::default()
    };
    let mut memory = MemoryReport::new(&config).unwrap();
    memory.note(blocks);
    memory
}

#[test]
fn layers_with_pages_of_one_size_are_not_padded_in_groups_of_equal_numbers() {
    let gemma = memory([1, 5, 0], 1, &[100, 10]);
    assert_eq!(gemma.bytes, (100 + 5 * 10) * 256);
    assert_eq!(gemma.padded_bytes, 110 * 5 * 256);
    assert_eq!(gemma.common_page_bytes, gemma.bytes);
    // Groups of 10 layers: the sixth of the window has only two.
    let uneven = memory([10, 52, 0], 1, &[100, 10]);
    assert_eq!(uneven.common_page_bytes, (10 * 100 + 60 * 10) * 256);
    // Groups of 13 layers, as the larger kind has.
    let near = memory([13, 12, 0], 1, &[100, 10]);
    assert_eq!(near.common_page_bytes, (13 * 100 + 13 * 10) * 256);
}

#[test]
fn a_state_is_padded_to_pages_of_attention() {
    let small = memory([4, 0, 28], 1, &[100, 8]);
    assert_eq!(small.bytes, 4 * 100 * 256 + 28 * 8 * 16);
    assert_eq!(small.common_page_bytes, (4 * 100 + 28 * 8) * 256);
    let large = memory([4, 0, 28], 40, &[100, 8]);
    assert_eq!(large.common_page_bytes, (4 * 100 + 28 * 8 * 3) * 256);
    assert_eq!(large.padded_bytes, 108 * 28 * 40 * 16);
}

#[test]
fn the_figures_are_those_of_the_time_with_most_bytes() {
    let mut memory = memory([1, 5, 0], 1, &[100, 10]);
    memory.note(&[200, 1]);
    memory.note(&[1, 30]);
    let blocks = |memory: &MemoryReport| {
        memory.groups.iter().map(|group| (group.blocks, group.peak_blocks)).collect::<Vec<_>>()
    };
    assert_eq!(blocks(&memory), [(200, 200), (1, 30)]);
    assert_eq!(memory.bytes, 205 * 256);
}
