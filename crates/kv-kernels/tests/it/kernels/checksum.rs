//! Checksums equal a sum taken word by word, whatever the shape, the length and the ids.

use cuda_driver::AddressRange;
use kv_kernels::{
    Direction, KvShape, KvShapeOptions, PagedKv, PagedLayout, Slot, Transfer,
    verify::{BAD_BLOCK, ChecksumArgs, Expected, FillPattern, word_share},
};

use super::machine::{Machine, Paged, Random, shapes_and_layouts};

const BLOCKS: u64 = 7;
const UNWRITTEN: u64 = 0x1234_5678_9ABC_DEF0;

/// The checksum of the first `tokens` tokens of a block, word by word.
fn naive(paged: &Paged, block: u64, tokens: u64) -> u64 {
    let shape = paged.kv.shape();
    let mut sum = 0u64;
    for token in 0..tokens {
        for plane in 0..shape.planes() {
            let row = paged.row(plane, block * u64::from(shape.block_tokens()) + token);
            for (word, bytes) in (0..).zip(paged.before[row].chunks_exact(8)) {
                let index = (token * shape.planes() + plane) * shape.row_words() + word;
                let word = u64::from_le_bytes(bytes.try_into().unwrap());
                sum = sum.wrapping_add(word_share(word, index));
            }
        }
    }
    sum
}

/// Sums `lens.len()` sequences; the checksums, `UNWRITTEN` where nothing was written.
fn checksums(
    machine: &Machine,
    paged: &Paged,
    (table, stride): (&[i32], u64),
    lens: &[u32],
    num_blocks: u64,
) -> Vec<u64> {
    let sums = machine.upload(&vec![UNWRITTEN; lens.len() * stride as usize]);
    let (table, lens_memory) = (machine.upload(table), machine.upload(lens));
    let args = ChecksumArgs {
        block_table: table.span(),
        table_stride: stride,
        seq_lens: lens_memory.span(),
        sequences: lens.len() as u32,
        checksums: sums.span(),
        num_blocks,
    };
    machine.kernels.paged_checksum(&machine.stream, &paged.kv, args).unwrap();
    bytemuck::pod_collect_to_vec(&machine.read(sums.span()))
}

#[test]
fn every_shape_and_length_sums_as_word_by_word() {
    const STRIDE: u64 = 4;
    for (shape, layout) in shapes_and_layouts(BLOCKS) {
        let machine = Machine::new();
        let paged = Paged::new(&machine, shape, layout, BLOCKS);
        let block = shape.block_tokens();
        // Nothing, one token, odd ends, exact ends, and longer than the row of the table.
        let lens = [
            0,
            1,
            block.div_ceil(2),
            block,
            block + 1,
            3 * block + block / 3,
            4 * block,
            9 * block,
        ];
        let mut random = Random(u64::from(block));
        let mut table: Vec<i32> =
            (0..lens.len() as u64 * STRIDE).map(|_| random.below(BLOCKS) as i32).collect();
        table[5 * STRIDE as usize] = -1;
        table[6 * STRIDE as usize + 1] = BLOCKS as i32;
        table[6 * STRIDE as usize + 2] = i32::MIN;
        // One block of the memory is not ready yet.
        let ready = BLOCKS - 1;
        let sums = checksums(&machine, &paged, (&table, STRIDE), &lens, ready);
        for (s, &len) in lens.iter().enumerate() {
            for b in 0..STRIDE {
                let start = b * u64::from(block);
                let id = table[s * STRIDE as usize + b as usize];
                let expected = if start >= u64::from(len) {
                    UNWRITTEN
                } else if !(0..ready as i64).contains(&i64::from(id)) {
                    BAD_BLOCK
                } else {
                    naive(&paged, id as u64, (u64::from(len) - start).min(block.into()))
                };
                let got = sums[s * STRIDE as usize + b as usize];
                assert_eq!(got, expected, "{shape:?} {layout:?} sequence {s} block {b}");
            }
        }
        machine.assert_clean();
    }
}

#[test]
fn a_launch_large_enough_for_threads_sums_the_same() {
    let machine = Machine::new();
    let options = KvShapeOptions { layers: 1, kv_count: 2, row_bytes: 16, block_tokens: 512 };
    let shape = KvShape::new(options).unwrap();
    let paged = Paged::new(&machine, shape, PagedLayout::block_major(&shape), 64);
    let naive: Vec<u64> = (0..64).map(|block| naive(&paged, block, 512)).collect();
    // 24 sequences of uneven length, some empty: about 12 MiB are read.
    let mut random = Random(3);
    let stride = 64;
    let table: Vec<i32> = (0..24 * stride).map(|_| random.below(64) as i32).collect();
    let lens: Vec<u32> = (0..24).map(|s| 512 * (s * 17 % 64)).collect();
    let sums = checksums(&machine, &paged, (&table, stride), &lens, 64);
    for (s, &len) in lens.iter().enumerate() {
        for b in 0..stride as usize {
            let at = s * stride as usize + b;
            let live = (b as u32) < len / 512;
            assert_eq!(sums[at], if live { naive[table[at] as usize] } else { UNWRITTEN });
        }
    }
    machine.assert_clean();
}

#[test]
fn a_fault_in_a_thread_is_the_launch_s_fault() {
    let machine = Machine::new();
    let shape =
        KvShape::new(KvShapeOptions { layers: 1, kv_count: 1, row_bytes: 2048, block_tokens: 16 });
    let shape = shape.unwrap();
    // Addresses with nothing behind them.
    let bytes = 128 * shape.block_bytes();
    let range = AddressRange::reserve(machine.stream.device(), bytes).unwrap();
    let span = range.span(0, bytes).unwrap();
    let layout = PagedLayout::block_major(&shape);
    let kv = PagedKv::new(&machine.stream, shape, layout, span, 128).unwrap();
    let table = machine.upload(&(0..128).collect::<Vec<i32>>());
    let (lens, sums) = (machine.upload(&[2048u32]), machine.memory(128 * 8));
    let args = ChecksumArgs {
        block_table: table.span(),
        table_stride: 128,
        seq_lens: lens.span(),
        sequences: 1,
        checksums: sums.span(),
        num_blocks: 128,
    };
    machine.kernels.paged_checksum(&machine.stream, &kv, args).unwrap();
    machine.stream.synchronize().unwrap_err();
    let finding = &machine.sim.findings()[0];
    assert_eq!((finding.kind, finding.bytes), (cuda_sim::FindingKind::IllegalAccess, 32 << 10));
}

/// The keys of a growing sequence, filled, stored and read: what a replay does.
#[test]
fn stored_patterns_have_the_checksums_that_their_keys_foretell() {
    for (shape, layout) in shapes_and_layouts(BLOCKS) {
        let machine = Machine::new();
        let paged = Paged::new(&machine, shape, layout, BLOCKS);
        let expected = Expected::new(&shape).unwrap();
        let block = u64::from(shape.block_tokens());
        let tokens = 2 * block + block.div_ceil(2);
        let blocks = [5i32, 0, 3];
        let host_slots: Vec<_> = (0..tokens)
            .map(|t| i64::from(blocks[(t / block) as usize]) * block as i64 + (t % block) as i64)
            .map(|slot| Slot::new(slot).unwrap())
            .collect();
        let keys: Vec<u64> =
            (0..tokens).map(|t| kv_kernels::verify::token_word(0, t + 77)).collect();
        let (keys_memory, slots) = (machine.upload(&keys), machine.upload(&host_slots));
        let chunk = machine.memory(tokens * shape.token_bytes());
        let fill = FillPattern { chunk: chunk.span(), token_keys: keys_memory.span(), tokens };
        machine.kernels.fill_pattern(&machine.stream, &shape, fill).unwrap();
        let transfer = Transfer {
            chunk: chunk.span(),
            slot_mapping: slots.span(),
            host_slots: &host_slots,
            tokens,
            skip_prefix_n_tokens: 0,
            direction: Direction::ChunkToPaged,
            num_blocks: BLOCKS,
        };
        machine.kernels.multi_layer_transfer(&machine.stream, &paged.kv, transfer).unwrap();
        let sums = checksums(&machine, &paged, (&blocks, 3), &[tokens as u32], BLOCKS);
        for (sum, keys) in sums.iter().zip(keys.chunks(block as usize)) {
            assert_eq!(Some(*sum), expected.checksum(keys), "{shape:?} {layout:?}");
        }
        machine.assert_clean();
    }
}
