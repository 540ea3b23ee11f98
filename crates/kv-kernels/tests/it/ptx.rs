//! The committed PTX, run thread by thread on the simulated device, gives the bytes that the CPU
//! references give, and nothing is found wrong with it: no access outside, no conflict, no read of
//! what was never written.

use crate::kernels::machine::{Machine, Paged, Random, noise};
use cuda_driver::{AccessDesc, AddressRange, DeviceBuffer, DeviceSpan, PhysicalMemory};
use kv_kernels::{
    Direction, GatherRows, KvKernels, KvShape, KvShapeOptions, PagedKv, PagedLayout, Slot,
    Transfer,
    layout::Strides,
    references,
    verify::{ChecksumArgs, FillPattern},
};

const BLOCKS: u64 = 5;

/// Every combination of what makes a kernel take another path.
fn shapes() -> impl Iterator<Item = KvShape> {
    let rows = [8, 16, 24, 128, 2048].into_iter();
    let rows = rows.flat_map(|bytes| [1, 16, 64].map(|block_tokens| (bytes, block_tokens)));
    let rows = rows.flat_map(|row| [1, 3].map(|layers| (row, layers)));
    rows.flat_map(|row| [1, 2].map(|kv_count| (row, kv_count))).map(
        |(((row_bytes, block_tokens), layers), kv_count)| {
            KvShape::new(KvShapeOptions { layers, kv_count, row_bytes, block_tokens }).unwrap()
        },
    )
}

/// Rows in order by block or by layer, and with gaps between them that nobody may touch.
fn layouts(shape: &KvShape) -> [PagedLayout; 3] {
    let row_bytes = shape.row_bytes() + 8;
    let strides = Strides {
        plane_bytes: row_bytes,
        token_bytes: row_bytes * shape.planes(),
        block_bytes: row_bytes * shape.planes() * u64::from(shape.block_tokens()) + 16,
    };
    [
        PagedLayout::block_major(shape),
        PagedLayout::layer_major(shape, BLOCKS).unwrap(),
        PagedLayout::custom(shape, strides).unwrap(),
    ]
}

/// Does the same on a machine that runs the references and on one that runs the PTX, and compares
/// all memory that `work` returns.
#[track_caller]
fn compare(context: &str, work: impl Fn(&Machine) -> Vec<DeviceBuffer>) {
    let [expected, found] = [references(), &[]].map(|references| {
        let machine = Machine::with(references);
        let buffers = work(&machine);
        let read = |buffer: &DeviceBuffer| machine.read(buffer.span());
        let contents: Vec<Vec<u8>> = buffers.iter().map(read).collect();
        machine.assert_clean();
        assert!(machine.launches() > 0, "{context}: nothing was launched");
        contents
    });
    for (buffer, (expected, found)) in expected.iter().zip(&found).enumerate() {
        let differs = expected.iter().zip(found).position(|(a, b)| a != b);
        assert_eq!(differs, None, "{context}: first byte of buffer {buffer} that differs");
    }
}

/// What lies after the first `skip` bytes of a buffer.
fn tail(buffer: &DeviceBuffer, skip: u64) -> DeviceSpan {
    buffer.span().slice(skip, buffer.bytes() - skip).unwrap()
}

/// Slots of `tokens` tokens in mixed order, no two the same, some tokens without one.
fn mapping(slots: u64, tokens: u64) -> Vec<Slot> {
    let mut all: Vec<_> = (0..slots as u32).map(Slot::from).collect();
    let mut random = Random(slots);
    random.shuffle(&mut all);
    all.truncate(tokens as usize);
    for slot in &mut all {
        if random.below(6) == 0 {
            *slot = Slot::NONE;
        }
    }
    all
}

#[test]
fn transfers_move_what_the_reference_moves() {
    for shape in shapes() {
        let slots = BLOCKS * u64::from(shape.block_tokens());
        let tokens = (slots - slots / 4).min(37);
        let host_slots = mapping(slots, tokens);
        let layouts = layouts(&shape);
        for (index, layout) in (0..).zip(layouts) {
            // 8 bytes off the alignment of two words, and the skips in turn.
            let shift = index % 2 * 8;
            for (direction, skip) in [
                (Direction::ChunkToPaged, [0, 1, tokens - 1][index as usize]),
                (Direction::PagedToChunk, [tokens / 2, 0, 1.min(tokens - 1)][index as usize]),
            ] {
                let context = format!("{shape:?} {layout:?} {direction:?} skip {skip}");
                compare(&context, |machine| {
                    let paged = Paged::new(machine, shape, layout, BLOCKS);
                    let chunk = machine.upload(&noise(shift + tokens * shape.token_bytes()));
                    let slot_mapping = machine.upload(&host_slots);
                    let transfer = Transfer {
                        chunk: tail(&chunk, shift),
                        slot_mapping: slot_mapping.span(),
                        host_slots: &host_slots,
                        tokens,
                        skip_prefix_n_tokens: skip,
                        direction,
                        num_blocks: BLOCKS,
                    };
                    let (kernels, stream) = (&machine.kernels, &machine.stream);
                    kernels.multi_layer_transfer(stream, &paged.kv, transfer).unwrap();
                    vec![paged.memory, chunk, slot_mapping]
                });
            }
        }
    }
}

#[test]
fn slots_that_only_the_device_sees_to_be_out_of_range_are_skipped() {
    let options = KvShapeOptions { layers: 3, kv_count: 2, row_bytes: 64, block_tokens: 16 };
    let shape = KvShape::new(options).unwrap();
    for direction in [Direction::ChunkToPaged, Direction::PagedToChunk] {
        compare("slots out of range", |machine| {
            let paged = Paged::new(machine, shape, PagedLayout::block_major(&shape), BLOCKS);
            let chunk = machine.upload(&noise(6 * shape.token_bytes()));
            // Two blocks are ready: slots 0 to 31.
            let slot_mapping = machine.upload(&[0i64, 32, i64::MAX, i64::MIN, -1, 31]);
            let transfer = Transfer {
                chunk: chunk.span(),
                slot_mapping: slot_mapping.span(),
                host_slots: &[0, 1, 2, 3, 4, 5].map(Slot::from),
                tokens: 6,
                skip_prefix_n_tokens: 0,
                direction,
                num_blocks: 2,
            };
            machine.kernels.multi_layer_transfer(&machine.stream, &paged.kv, transfer).unwrap();
            vec![paged.memory, chunk, slot_mapping]
        });
    }
}

#[test]
fn checksums_are_those_of_the_reference() {
    const STRIDE: u64 = 4;
    for shape in shapes() {
        let block = shape.block_tokens();
        // Nothing, one token, an odd end, an exact end, and more than the table has room for.
        let lens = [0, 1, block + block.div_ceil(3), 3 * block, 9 * block];
        let entries = lens.len() as u64 * STRIDE;
        let mut random = Random(entries);
        let mut table: Vec<i32> = (0..entries).map(|_| random.below(BLOCKS) as i32).collect();
        // Of two rows that are read: no block, one beyond the memory, and one that is not ready.
        for (entry, bad) in [(9, -1), (17, BLOCKS as i32), (18, i32::MIN), (19, i32::MAX)] {
            table[entry] = bad;
        }
        for layout in layouts(&shape) {
            compare(&format!("{shape:?} {layout:?}"), |machine| {
                let paged = Paged::new(machine, shape, layout, BLOCKS);
                let (block_table, seq_lens) = (machine.upload(&table), machine.upload(&lens));
                let checksums = machine.upload(&vec![u64::MAX; entries as usize]);
                let args = ChecksumArgs {
                    block_table: block_table.span(),
                    table_stride: STRIDE,
                    seq_lens: seq_lens.span(),
                    sequences: lens.len() as u32,
                    checksums: checksums.span(),
                    num_blocks: BLOCKS - 1,
                };
                machine.kernels.paged_checksum(&machine.stream, &paged.kv, args).unwrap();
                vec![paged.memory, block_table, seq_lens, checksums]
            });
        }
    }
}

#[test]
fn patterns_are_those_of_the_reference() {
    for shape in shapes() {
        for (tokens, shift) in [(1, 0), (37, 8)] {
            compare(&format!("{shape:?}, {tokens} tokens"), |machine| {
                let keys: Vec<u64> =
                    (0..tokens).map(|t| kv_kernels::verify::token_word(0, t)).collect();
                let token_keys = machine.upload(&keys);
                // 24 bytes that nobody may touch on either side.
                let chunk = machine.memory(48 + shift + tokens * shape.token_bytes());
                let filled = chunk.span().slice(16 + shift, tokens * shape.token_bytes()).unwrap();
                let fill = FillPattern { chunk: filled, token_keys: token_keys.span(), tokens };
                machine.kernels.fill_pattern(&machine.stream, &shape, fill).unwrap();
                vec![chunk, token_keys]
            });
        }
    }
}

#[test]
fn gathered_rows_are_those_of_the_reference() {
    for (rows, width, table_rows) in [(1, 1, 1), (5, 3, 2), (3, 300, 7), (70, 256, 64)] {
        let (out_stride, table_stride) = (u64::from(width) + 3, u64::from(width) + 1);
        compare(&format!("{rows} rows of {width} entries"), |machine| {
            let mut random = Random(u64::from(rows));
            let table: Vec<i32> =
                (0..u64::from(table_rows) * table_stride).map(|_| random.below(9) as i32).collect();
            // One in three names no row of the table.
            let below = u64::from(table_rows) * 3 / 2 + 1;
            let index: Vec<u32> = (0..rows).map(|_| random.below(below) as u32).collect();
            let (table, row_index) = (machine.upload(&table), machine.upload(&index));
            let out = machine.memory(u64::from(rows) * out_stride * 4);
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
            machine.kernels.gather_rows(&machine.stream, gather).unwrap();
            vec![out, table, row_index]
        });
    }
}

/// Blocks of 32 KiB in 16 GiB of reserved addresses, of which the last page alone is mapped: an
/// offset cut to 32 bits, signed or not, meets a hole.
#[test]
fn offsets_beyond_32_bits_are_right() {
    const BYTES: u64 = 16 << 30;
    const LAST: u64 = BYTES / (32 << 10) - 1;
    let options = KvShapeOptions { layers: 1, kv_count: 1, row_bytes: 2048, block_tokens: 16 };
    let shape = KvShape::new(options).unwrap();
    let [expected, found] = [references(), &[]].map(|references| {
        let machine = Machine::with(references);
        let (device, stream, kernels) = (&machine.device, &machine.stream, &machine.kernels);
        let range = AddressRange::reserve(device, BYTES).unwrap();
        let page = PhysicalMemory::granularity(device).unwrap();
        let memory = PhysicalMemory::create(device, page).unwrap();
        range.map(BYTES - page, &memory).unwrap();
        range.set_access(BYTES - page, page, &[AccessDesc { device: 0 }]).unwrap();
        let layout = PagedLayout::block_major(&shape);
        let pages = range.span(0, BYTES).unwrap();
        let paged = PagedKv::new(stream, shape, layout, pages, LAST + 1).unwrap();

        let host_slots: Vec<_> =
            (0..16).map(|token| Slot::new((LAST * 16 + 15 - token) as i64).unwrap()).collect();
        let slot_mapping = machine.upload(&host_slots);
        let chunk = machine.upload(&noise(shape.block_bytes()));
        let transfer = Transfer {
            chunk: chunk.span(),
            slot_mapping: slot_mapping.span(),
            host_slots: &host_slots,
            tokens: 16,
            skip_prefix_n_tokens: 0,
            direction: Direction::ChunkToPaged,
            num_blocks: LAST + 1,
        };
        kernels.multi_layer_transfer(stream, &paged, transfer).unwrap();
        let (block_table, seq_lens) = (machine.upload(&[LAST as i32]), machine.upload(&[16u32]));
        let checksums = machine.memory(8);
        let args = ChecksumArgs {
            block_table: block_table.span(),
            table_stride: 1,
            seq_lens: seq_lens.span(),
            sequences: 1,
            checksums: checksums.span(),
            num_blocks: LAST + 1,
        };
        kernels.paged_checksum(stream, &paged, args).unwrap();
        let block = range.span(LAST * shape.block_bytes(), shape.block_bytes()).unwrap();
        let contents = [machine.read(block), machine.read(checksums.span())];
        machine.assert_clean();
        contents
    });
    assert!(expected == found);
}

/// On the simulated device the clock counts instructions, so what takes longer runs more of them.
#[test]
fn a_stream_is_kept_busy_and_no_memory_is_touched() {
    let machine = Machine::with(&[]);
    let kernels = KvKernels::load(machine.stream.device()).unwrap();
    for nanoseconds in [0, 1, 5000] {
        kernels.keep_busy(&machine.stream, std::time::Duration::from_nanos(nanoseconds)).unwrap();
        machine.stream.synchronize().unwrap();
        machine.assert_clean();
    }
    // Of no time nothing is launched.
    assert_eq!(machine.launches(), 2);
}
