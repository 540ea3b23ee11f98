//! Transfers move exactly the rows they should, and touch no other byte on either side.

use kv_kernels::{Direction, KvShape, KvShapeOptions, PagedLayout, Slot, Transfer};

use super::machine::{Machine, Paged, Random, chunk_row, noise, shapes_and_layouts};

const BLOCKS: u64 = 6;

/// Slots of `tokens` tokens: runs and single slots in mixed order, each at most once; some have none.
fn mapping(slots: u64, tokens: usize, random: &mut Random) -> Vec<Slot> {
    let mut all: Vec<_> = (0..slots as u32).map(Slot::from).collect();
    let mut pieces: Vec<&mut [Slot]> = all.chunks_mut(3).collect();
    random.shuffle(&mut pieces);
    let mut mapping = pieces.concat();
    mapping.truncate(tokens);
    for slot in &mut mapping {
        if random.below(7) == 0 {
            *slot = Slot::NONE;
        }
    }
    mapping
}

/// Copies by hand what the kernel should have copied.
fn expect(
    transfer: &Transfer<'_>,
    paged: &Paged,
    shape: &KvShape,
    (chunk, pages): (&mut [u8], &mut [u8]),
) {
    for token in transfer.skip_prefix_n_tokens..transfer.tokens {
        let Some(slot) = transfer.host_slots[token as usize].place() else { continue };
        for plane in 0..shape.planes() {
            let in_chunk = chunk_row(shape, transfer.tokens, plane, token);
            let in_pages = paged.row(plane, slot);
            match transfer.direction {
                Direction::ChunkToPaged => pages[in_pages].copy_from_slice(&chunk[in_chunk]),
                Direction::PagedToChunk => chunk[in_chunk].copy_from_slice(&pages[in_pages]),
            }
        }
    }
}

#[test]
fn every_byte_is_where_it_should_be_for_every_shape_layout_skip_and_direction() {
    let mut random = Random(1);
    for (shape, layout) in shapes_and_layouts(BLOCKS) {
        let machine = Machine::new();
        let slots = BLOCKS * u64::from(shape.block_tokens());
        let host_slots = mapping(slots, (slots - slots / 4) as usize, &mut random);
        let tokens = host_slots.len() as u64;
        let slot_mapping = machine.upload(&host_slots);
        for skip in [0, 1, tokens / 2, tokens - 1, tokens] {
            for direction in [Direction::ChunkToPaged, Direction::PagedToChunk] {
                let paged = Paged::new(&machine, shape, layout, BLOCKS);
                let mut chunk = noise(tokens * shape.token_bytes());
                let chunk_memory = machine.upload(&chunk);
                let mut pages = paged.before.clone();
                let transfer = Transfer {
                    chunk: chunk_memory.span(),
                    slot_mapping: slot_mapping.span(),
                    host_slots: &host_slots,
                    tokens,
                    skip_prefix_n_tokens: skip,
                    direction,
                    num_blocks: BLOCKS,
                };
                let before = machine.launches();
                machine.kernels.multi_layer_transfer(&machine.stream, &paged.kv, transfer).unwrap();
                assert_eq!(machine.launches() - before, u64::from(skip < tokens));
                expect(&transfer, &paged, &shape, (&mut chunk, &mut pages));
                let context = format!("{shape:?} {layout:?} skip {skip} {direction:?}");
                assert!(machine.read(chunk_memory.span()) == chunk, "chunk: {context}");
                assert!(machine.read(paged.memory.span()) == pages, "pages: {context}");
            }
        }
        machine.assert_clean();
    }
}

fn llama_like() -> KvShape {
    let options = KvShapeOptions { layers: 2, kv_count: 2, row_bytes: 64, block_tokens: 4 };
    KvShape::new(options).unwrap()
}

/// A retrieve of 10 tokens of which the first 5 lie in blocks that other requests read: they share
/// the prefix. Whether those blocks still hold what they held.
fn shared_prefix_survives(machine: &Machine) -> bool {
    let shape = llama_like();
    let paged = Paged::new(machine, shape, PagedLayout::block_major(&shape), 8);
    let host_slots: Vec<_> = (8..18).map(Slot::from).collect();
    let slot_mapping = machine.upload(&host_slots);
    let chunk = machine.upload(&noise(10 * shape.token_bytes()));
    let transfer = Transfer {
        chunk: chunk.span(),
        slot_mapping: slot_mapping.span(),
        host_slots: &host_slots,
        tokens: 10,
        // Not a multiple of the block: a store that rounds down to blocks overwrites token 4 too.
        skip_prefix_n_tokens: 5,
        direction: Direction::ChunkToPaged,
        num_blocks: 8,
    };
    machine.kernels.multi_layer_transfer(&machine.stream, &paged.kv, transfer).unwrap();
    let pages = machine.read(paged.memory.span());
    let moved = (13..18).all(|slot| {
        (0..shape.planes()).all(|plane| {
            let row = paged.row(plane, slot);
            pages[row.clone()] != paged.before[row]
        })
    });
    assert!(moved, "the tokens after the prefix did not arrive");
    (8..13).all(|slot| {
        (0..shape.planes()).all(|plane| {
            let row = paged.row(plane, slot);
            pages[row.clone()] == paged.before[row]
        })
    })
}

#[test]
fn a_skipped_prefix_is_not_overwritten() {
    assert!(shared_prefix_survives(&Machine::new()));
}

/// The same with the skip ignored: the test above sees the bug that it is for.
#[cfg(all(feature = "sabotage", debug_assertions))]
#[test]
fn a_transfer_that_ignores_the_skip_overwrites_the_shared_prefix() {
    let machine = Machine::new();
    machine.kernels.sabotage_ignore_skip(true);
    assert!(!shared_prefix_survives(&machine));
    machine.kernels.sabotage_ignore_skip(false);
    assert!(shared_prefix_survives(&machine));
}
