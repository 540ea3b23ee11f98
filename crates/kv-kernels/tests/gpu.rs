//! The kernels on a real GPU: every byte they write is what their CPU references write.
//!
//! Needs one device. Without one every trial is listed as ignored; with `KV_REQUIRE_GPU=1` it fails.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, unused_imports, reason = "the tests of the lists run on the simulated device")]
#[path = "it/ops/mod.rs"]
mod ops;

use std::sync::Arc;

use cuda_driver::{CudaDriver, Device};
use kv_kernels::{
    Direction, GatherRows, KvShape, KvShapeOptions, PagedKv, PagedLayout, Slot, Transfer,
    references,
    verify::{BAD_BLOCK, ChecksumArgs, Expected, FillPattern, token_word},
};
use libtest_mimic::{Arguments, Failed, Trial};
use ops::on::{On, Outputs, Random, block, compare, noise};

type Run = fn(&On);

fn main() {
    let trials: &[(&str, Run)] = &[
        ("rows_of_8_bytes_equal_the_references", |gpu| every_shape(gpu, 8)),
        ("rows_of_24_bytes_equal_the_references", |gpu| every_shape(gpu, 24)),
        ("rows_of_128_bytes_equal_the_references", |gpu| every_shape(gpu, 128)),
        ("rows_of_2048_bytes_equal_the_references", |gpu| every_shape(gpu, 2048)),
        ("gathered_rows_equal_the_reference", gathered_rows),
        ("tables_and_mappings_are_checked_on_the_device", device_side_checks),
        ("offsets_beyond_32_bits", offsets_beyond_32_bits),
        ("chunks_of_every_format_equal_the_reference", |gpu| same(gpu, ops::chunks::outputs)),
        ("one_chunk_of_every_format_equals_the_reference", |gpu| same(gpu, ops::chunks::ones)),
        ("strides_beyond_32_bits_equal_the_reference", |gpu| same(gpu, ops::huge::outputs)),
        ("readers_of_a_skipped_prefix_see_it_unchanged", |gpu| {
            assert!(ops::skip::readers_see_no_change(gpu, 300));
        }),
        ("copied_blocks_equal_the_reference", |gpu| same(gpu, ops::block_copy::outputs)),
        ("adopted_tensors_equal_the_reference", |gpu| same(gpu, ops::adopt::outputs)),
        ("appended_tokens_equal_the_reference", |gpu| same(gpu, ops::append::outputs)),
        ("sums_of_blocks_equal_the_reference", |gpu| same(gpu, ops::block_sum::outputs)),
        ("no_damage_to_a_block_leaves_its_sums_as_they_are", ops::block_sum::damage_is_seen),
        ("operations_beyond_32_bits_equal_the_reference", |gpu| same(gpu, ops::far::outputs)),
        ("blocks_copied_by_links_are_those_of_the_pairs", |gpu| {
            ops::host_link::check_blocks(&ops::on::On::device(gpu.device.clone()));
        }),
        ("every_way_keeps_to_the_strides_of_blocks", |gpu| {
            ops::ways::check(&ops::on::On::device(gpu.device.clone()));
        }),
        ("a_stream_is_busy_as_long_as_was_asked", |gpu| {
            let begun = std::time::Instant::now();
            let time = std::time::Duration::from_millis(50);
            gpu.kernels.keep_busy(&gpu.stream, time).unwrap();
            gpu.stream.synchronize().unwrap();
            assert!(begun.elapsed() >= time, "{:?}", begun.elapsed());
        }),
        ("a_skipped_prefix_is_not_overwritten", |gpu| assert!(prefix_survives(gpu))),
        #[cfg(all(feature = "sabotage", debug_assertions))]
        ("a_transfer_that_ignores_the_skip_overwrites_the_prefix", |gpu| {
            gpu.kernels.sabotage_ignore_skip(true);
            assert!(!prefix_survives(gpu), "the test would not see the bug it is for");
        }),
    ];
    let required = std::env::var_os("KV_REQUIRE_GPU").is_some_and(|value| value == "1");
    let missing = open().err();
    let trials = trials.iter().map(|&(name, run)| {
        let trial = Trial::test(name, move || {
            run(&On::device(open().map_err(Failed::from)?));
            Ok(())
        });
        trial.with_ignored_flag(missing.is_some() && !required)
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}

fn open() -> Result<Device, String> {
    let driver = CudaDriver::load().map_err(|error| error.to_string())?;
    Device::open(Arc::new(driver), 0).map_err(|error| format!("{error}: {error:?}"))
}

/// Runs a list of launches on the GPU and, by the references, on the simulated device.
fn same(gpu: &On, outputs: fn(&On) -> Outputs) {
    compare(&On::sim(references()), gpu, outputs);
}

/// What a run of all kernels over one shape works on.
struct Case {
    shape: KvShape,
    layout: PagedLayout,
    blocks: u64,
    skip: u64,
    host_slots: Vec<Slot>,
}

/// Larger blocks would take the time of many smaller ones and show nothing else.
const BLOCK_BYTES_MAX: u64 = 8 << 20;

fn every_shape(gpu: &On, row_bytes: u64) {
    let reference = On::sim(references());
    let mut cases = 0u64;
    for block_tokens in [1, 16, 64, 512] {
        for (layers, kv_count) in [(1, 1), (1, 2), (3, 1), (3, 2), (32, 1), (32, 2)] {
            let options = KvShapeOptions { layers, kv_count, row_bytes, block_tokens };
            let shape = KvShape::new(options).unwrap();
            if shape.block_bytes() > BLOCK_BYTES_MAX {
                continue;
            }
            let blocks = (24 / u64::from(block_tokens)).max(3);
            let layer_major = PagedLayout::layer_major(&shape, blocks).unwrap();
            for layout in [PagedLayout::block_major(&shape), layer_major] {
                for skip_fourths in [0, 1 + cases % 3] {
                    let case = Case::new(shape, layout, blocks, skip_fourths);
                    case.compare(gpu, &reference);
                }
                cases += 1;
            }
        }
    }
    assert!(cases >= 40, "only {cases} shapes were small enough");
}

impl Case {
    fn new(shape: KvShape, layout: PagedLayout, blocks: u64, skip_fourths: u64) -> Self {
        let slots = blocks * u64::from(shape.block_tokens());
        let mut host_slots: Vec<_> = (0..slots as u32).map(Slot::from).collect();
        let mut random = Random(slots);
        // Half of the tokens in runs, half scattered; some skipped.
        random.shuffle(&mut host_slots[slots as usize / 2..]);
        host_slots.truncate(slots as usize - slots as usize / 8);
        for slot in &mut host_slots {
            if random.below(9) == 0 {
                *slot = Slot::NONE;
            }
        }
        // An odd number of tokens, not only whole fourths.
        let skip = (host_slots.len() as u64 * skip_fourths / 4) | (skip_fourths & 1);
        Self { shape, layout, blocks, skip, host_slots }
    }

    fn compare(&self, gpu: &On, reference: &On) {
        for (got, expected) in self.outputs(gpu).iter().zip(self.outputs(reference)) {
            let ((what, got), (_, expected)) = (got, expected);
            let differs = got.iter().zip(&expected).position(|(a, b)| a != b);
            assert!(
                got.len() == expected.len() && differs.is_none(),
                "{what} differ at {differs:?}: {:?}, {:?}, skip {} of {}",
                self.shape,
                self.layout,
                self.skip,
                self.host_slots.len()
            );
        }
    }

    /// Runs every kernel that the shape matters to; all that they may have written.
    fn outputs(&self, side: &On) -> Vec<(&'static str, Vec<u8>)> {
        let (stream, kernels, shape) = (&side.stream, &side.kernels, &self.shape);
        let tokens = self.host_slots.len() as u64;
        let keys: Vec<u64> = (0..tokens).map(|t| token_word(0, t ^ 0x5A5A_0000)).collect();
        let token_keys = side.upload(&keys);
        let pages = side.upload(&noise(self.layout.extent_bytes(shape, self.blocks).unwrap()));
        let paged = PagedKv::new(stream, *shape, self.layout, pages.span(), self.blocks).unwrap();
        let chunk = side.memory(tokens * shape.token_bytes());
        let gathered = side.upload(&noise(chunk.bytes()));
        let slot_mapping = side.upload(&self.host_slots);

        let fill = FillPattern { chunk: chunk.span(), token_keys: token_keys.span(), tokens };
        kernels.fill_pattern(stream, shape, fill).unwrap();
        for (chunk, direction) in
            [(&chunk, Direction::ChunkToPaged), (&gathered, Direction::PagedToChunk)]
        {
            let transfer = Transfer {
                chunk: chunk.span(),
                slot_mapping: slot_mapping.span(),
                host_slots: &self.host_slots,
                tokens,
                skip_prefix_n_tokens: self.skip,
                direction,
                num_blocks: self.blocks,
            };
            kernels.multi_layer_transfer(stream, &paged, transfer).unwrap();
        }
        let sums = self.checksums(side, &paged);
        vec![
            ("filled chunks", side.read(chunk.span())),
            ("pages", side.read(pages.span())),
            ("gathered chunks", side.read(gathered.span())),
            ("checksums", sums),
        ]
    }

    fn checksums(&self, side: &On, paged: &PagedKv) -> Vec<u8> {
        const STRIDE: u64 = 5;
        let block = self.shape.block_tokens();
        let lens = [0, 1, block, block + 1, 4 * block + block.div_ceil(3), 5 * block, 99 * block];
        let mut random = Random(self.skip + 1);
        let mut table: Vec<i32> =
            (0..lens.len() as u64 * STRIDE).map(|_| random.below(self.blocks) as i32).collect();
        table[4 * STRIDE as usize + 1] = -1;
        table[5 * STRIDE as usize + 3] = self.blocks as i32;
        let (table, seq_lens) = (side.upload(&table), side.upload(&lens));
        let sums = side.upload(&noise(lens.len() as u64 * STRIDE * 8));
        let args = ChecksumArgs {
            block_table: table.span(),
            table_stride: STRIDE,
            seq_lens: seq_lens.span(),
            sequences: lens.len() as u32,
            checksums: sums.span(),
            num_blocks: self.blocks,
        };
        side.kernels.paged_checksum(&side.stream, paged, args).unwrap();
        side.read(sums.span())
    }
}

fn gathered_rows(gpu: &On) {
    let reference = On::sim(references());
    for (rows, width, table_rows) in
        [(1, 1, 1), (7, 33, 5), (256, 2048, 300), (70_000, 3, 11), (3, 5000, 2)]
    {
        let (table_stride, out_stride) = (u64::from(width) + 3, u64::from(width) + 1);
        let mut random = Random(u64::from(rows));
        let index: Vec<u32> = (0..rows)
            .map(|_| match random.below(8) {
                0 => u32::MAX - random.below(3) as u32,
                1 => table_rows,
                _ => random.below(u64::from(table_rows)) as u32,
            })
            .collect();
        let gathered = [gpu, &reference].map(|side| {
            let table = side.upload(&noise(u64::from(table_rows) * table_stride * 4));
            let out = side.upload(&noise(u64::from(rows) * out_stride * 4));
            let row_index = side.upload(&index);
            let gather = GatherRows {
                out: out.span(),
                out_stride,
                table: table.span(),
                table_stride,
                row_index: row_index.span(),
                rows,
                width,
                table_rows,
            };
            side.kernels.gather_rows(&side.stream, gather).unwrap();
            side.read(out.span())
        });
        assert!(gathered[0] == gathered[1], "{rows} rows of {width}, of {table_rows}");
    }
}

fn small_shape() -> KvShape {
    let options = KvShapeOptions { layers: 2, kv_count: 2, row_bytes: 64, block_tokens: 4 };
    KvShape::new(options).unwrap()
}

/// Slots, ids and lengths that only the device sees to be wrong touch nothing.
fn device_side_checks(gpu: &On) {
    let shape = small_shape();
    let before = noise(8 * shape.block_bytes());
    let pages = gpu.upload(&before);
    let layout = PagedLayout::block_major(&shape);
    let paged = PagedKv::new(&gpu.stream, shape, layout, pages.span(), 8).unwrap();
    let slot_mapping = gpu.upload(&[8i64, i64::MAX, i64::MIN, 31, 1 << 40]);
    let chunk = gpu.upload(&noise(5 * shape.token_bytes() + 8)[8..]);
    let transfer = Transfer {
        chunk: chunk.span(),
        slot_mapping: slot_mapping.span(),
        host_slots: &[0, 1, 2, 3, 4].map(Slot::from),
        tokens: 5,
        skip_prefix_n_tokens: 0,
        direction: Direction::ChunkToPaged,
        num_blocks: 2,
    };
    gpu.kernels.multi_layer_transfer(&gpu.stream, &paged, transfer).unwrap();
    assert!(gpu.read(pages.span()) == before, "a slot beyond the ready blocks was written");

    let table = gpu.upload(&[2i32, -1, i32::MAX, i32::MIN]);
    let (seq_lens, sums) = (gpu.upload(&[u32::MAX, 16]), gpu.upload(&[7u64; 4]));
    let args = ChecksumArgs {
        block_table: table.span(),
        table_stride: 2,
        seq_lens: seq_lens.span(),
        sequences: 2,
        checksums: sums.span(),
        num_blocks: 2,
    };
    gpu.kernels.paged_checksum(&gpu.stream, &paged, args).unwrap();
    let sums: Vec<u64> = bytemuck::pod_collect_to_vec(&gpu.read(sums.span()));
    assert_eq!(sums, [BAD_BLOCK; 4]);
}

/// The pages span 6 GiB, in both layouts; what is stored at their ends reads back as foretold.
fn offsets_beyond_32_bits(gpu: &On) {
    let options = KvShapeOptions { layers: 3, kv_count: 1, row_bytes: 2048, block_tokens: 16 };
    let shape = KvShape::new(options).unwrap();
    let blocks = (6 << 30) / shape.block_bytes();
    let pages = gpu.memory(blocks * shape.block_bytes());
    let expected = Expected::new(&shape).unwrap();
    let layer_major = PagedLayout::layer_major(&shape, blocks).unwrap();
    for layout in [PagedLayout::block_major(&shape), layer_major] {
        let paged = PagedKv::new(&gpu.stream, shape, layout, pages.span(), blocks).unwrap();
        let ids = [0, blocks - 1, blocks / 2, blocks - 2].map(block);
        let host_slots: Vec<_> =
            ids.iter().flat_map(|id| (0..16).map(move |token| id.slot(16, token))).collect();
        let keys: Vec<u64> = (0..64).map(|t| token_word(0, t)).collect();
        let (slot_mapping, token_keys) = (gpu.upload(&host_slots), gpu.upload(&keys));
        let chunk = gpu.memory(64 * shape.token_bytes());
        let fill = FillPattern { chunk: chunk.span(), token_keys: token_keys.span(), tokens: 64 };
        gpu.kernels.fill_pattern(&gpu.stream, &shape, fill).unwrap();
        let transfer = Transfer {
            chunk: chunk.span(),
            slot_mapping: slot_mapping.span(),
            host_slots: &host_slots,
            tokens: 64,
            skip_prefix_n_tokens: 0,
            direction: Direction::ChunkToPaged,
            num_blocks: blocks,
        };
        gpu.kernels.multi_layer_transfer(&gpu.stream, &paged, transfer).unwrap();
        let (table, seq_lens) = (gpu.upload(&ids), gpu.upload(&[60u32]));
        let sums = gpu.memory(4 * 8);
        let args = ChecksumArgs {
            block_table: table.span(),
            table_stride: 4,
            seq_lens: seq_lens.span(),
            sequences: 1,
            checksums: sums.span(),
            num_blocks: blocks,
        };
        gpu.kernels.paged_checksum(&gpu.stream, &paged, args).unwrap();
        let sums: Vec<u64> = bytemuck::pod_collect_to_vec(&gpu.read(sums.span()));
        for (sum, keys) in sums.iter().zip(keys[..60].chunks(16)) {
            assert_eq!(Some(*sum), expected.checksum(keys), "{layout:?}");
        }
    }
}

/// A retrieve of 10 tokens whose first 5 lie in blocks that others read: whether those survive.
fn prefix_survives(gpu: &On) -> bool {
    let shape = small_shape();
    let before = noise(8 * shape.block_bytes());
    let pages = gpu.upload(&before);
    let layout = PagedLayout::block_major(&shape);
    let paged = PagedKv::new(&gpu.stream, shape, layout, pages.span(), 8).unwrap();
    let host_slots: Vec<_> = (8..18).map(Slot::from).collect();
    let slot_mapping = gpu.upload(&host_slots);
    let chunk = gpu.memory(10 * shape.token_bytes());
    gpu.stream.fill(chunk.span(), 0xEE).unwrap();
    let transfer = Transfer {
        chunk: chunk.span(),
        slot_mapping: slot_mapping.span(),
        host_slots: &host_slots,
        tokens: 10,
        skip_prefix_n_tokens: 5,
        direction: Direction::ChunkToPaged,
        num_blocks: 8,
    };
    gpu.kernels.multi_layer_transfer(&gpu.stream, &paged, transfer).unwrap();
    let after = gpu.read(pages.span());
    let row = |plane: u64, slot: u64| {
        let start = slot / 4 * shape.block_bytes() + plane * 256 + slot % 4 * 64;
        start as usize..start as usize + 64
    };
    let rows = |slots: std::ops::Range<u64>| {
        slots.flat_map(|slot| (0..shape.planes()).map(move |plane| row(plane, slot)))
    };
    assert!(rows(13..18).all(|row| after[row] == [0xEE; 64]), "the rest did not arrive");
    rows(8..13).all(|row| after[row.clone()] == before[row])
}
