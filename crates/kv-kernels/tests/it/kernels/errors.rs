//! Every wrong quantity is a typed error with its numbers, and nothing is enqueued.

use std::sync::Arc;

use cuda_driver::{CopyError, Device, DeviceBuffer, DeviceSpan, ErrorCode, ModuleError, Stream};
use kv_kernels::{
    Direction, GatherRows, KernelError, KvFormat, KvKernels, KvShape, KvShapeOptions, PagedKv,
    PagedLayout, Slot, Transfer,
    error::{Operand, OperandError, PagedKvError},
    layout::{FormatOptions, LayoutError},
    verify::{ChecksumArgs, FillPattern},
};

use super::machine::{Machine, Paged};

const BLOCKS: u64 = 4;

fn shape() -> KvShape {
    let options = KvShapeOptions { layers: 2, kv_count: 2, row_bytes: 16, block_tokens: 4 };
    KvShape::new(options).unwrap()
}

fn too_short(operand: Operand, needed_bytes: u64, bytes: u64) -> KernelError {
    OperandError::TooShort { operand, needed_bytes, bytes }.into()
}

fn misaligned(operand: Operand, address: u64, alignment: u64) -> KernelError {
    OperandError::Misaligned { operand, address, alignment }.into()
}

/// A machine with paged memory and scratch memory for every operand.
struct Bench {
    machine: Machine,
    paged: Paged,
    scratch: DeviceBuffer,
}

impl Bench {
    fn new() -> Self {
        let machine = Machine::new();
        let layout = PagedLayout::block_major(&shape());
        let paged = Paged::new(&machine, shape(), layout, BLOCKS);
        let scratch = machine.memory(1 << 16);
        Self { machine, paged, scratch }
    }

    /// `bytes` bytes of scratch memory from `offset` on.
    fn span(&self, offset: u64, bytes: u64) -> cuda_driver::DeviceSpan {
        self.scratch.span().slice(offset, bytes).unwrap()
    }

    fn transfer<'a>(&self, host_slots: &'a [Slot]) -> Transfer<'a> {
        let tokens = host_slots.len() as u64;
        Transfer {
            chunk: self.span(0, tokens * 64),
            slot_mapping: self.span(4096, tokens * 8),
            host_slots,
            tokens,
            skip_prefix_n_tokens: 0,
            direction: Direction::ChunkToPaged,
            num_blocks: BLOCKS,
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.machine.launches(), 0, "a refused launch was enqueued");
        }
    }
}

#[test]
fn nothing_to_do_is_done_without_a_launch() {
    let bench = Bench::new();
    let Bench { machine, paged, .. } = &bench;
    let (stream, kernels) = (&machine.stream, &machine.kernels);
    let none = bench.transfer(&[]);
    assert_eq!(kernels.multi_layer_transfer(stream, &paged.kv, none), Ok(()));
    let far = [Slot::from(99); 2];
    let skipped = Transfer { skip_prefix_n_tokens: 2, ..bench.transfer(&far) };
    assert_eq!(kernels.multi_layer_transfer(stream, &paged.kv, skipped), Ok(()));
    let span = bench.span(0, 0);
    let fill = FillPattern { chunk: span, token_keys: span, tokens: 0 };
    assert_eq!(kernels.fill_pattern(stream, &shape(), fill), Ok(()));
    let checksum = ChecksumArgs {
        block_table: span,
        table_stride: 8,
        seq_lens: span,
        sequences: 0,
        checksums: span,
        num_blocks: BLOCKS,
    };
    assert_eq!(kernels.paged_checksum(stream, &paged.kv, checksum), Ok(()));
}

#[test]
fn checksums() {
    let bench = Bench::new();
    let good = ChecksumArgs {
        block_table: bench.span(0, 2 * 3 * 4),
        table_stride: 3,
        seq_lens: bench.span(1024, 8),
        sequences: 2,
        checksums: bench.span(2048, 2 * 3 * 8),
        num_blocks: BLOCKS,
    };
    let refused = |args| {
        let Bench { machine, paged, .. } = &bench;
        machine.kernels.paged_checksum(&machine.stream, &paged.kv, args).unwrap_err()
    };
    assert_eq!(
        refused(ChecksumArgs { block_table: bench.span(0, 23), ..good }),
        too_short(Operand::BlockTable, 24, 23)
    );
    assert_eq!(
        refused(ChecksumArgs { checksums: bench.span(0, 47), ..good }),
        too_short(Operand::Checksums, 48, 47)
    );
    assert_eq!(
        refused(ChecksumArgs { seq_lens: bench.span(0, 7), ..good }),
        too_short(Operand::SeqLens, 8, 7)
    );
    for (offset, operand, alignment) in
        [(2, Operand::BlockTable, 4), (4, Operand::Checksums, 8), (2, Operand::SeqLens, 4)]
    {
        let span = bench.span(offset, 64);
        let args = match operand {
            Operand::BlockTable => ChecksumArgs { block_table: span, ..good },
            Operand::Checksums => ChecksumArgs { checksums: span, ..good },
            _ => ChecksumArgs { seq_lens: span, ..good },
        };
        assert_eq!(refused(args), misaligned(operand, span.address(), alignment));
    }
    assert_eq!(
        refused(ChecksumArgs { table_stride: 1 << 62, ..good }),
        OperandError::Overflow { operand: Operand::BlockTable, rows: 2, row_bytes: u64::MAX }
            .into()
    );
    assert_eq!(
        refused(ChecksumArgs { num_blocks: 5, ..good }),
        KernelError::Blocks { num_blocks: 5, capacity: 4 }
    );
}

#[test]
fn fills() {
    let bench = Bench::new();
    let good =
        FillPattern { chunk: bench.span(0, 192), token_keys: bench.span(1024, 24), tokens: 3 };
    let refused = |fill| {
        let machine = &bench.machine;
        machine.kernels.fill_pattern(&machine.stream, &shape(), fill).unwrap_err()
    };
    assert_eq!(
        refused(FillPattern { chunk: bench.span(0, 200), ..good }),
        KernelError::ChunkTokens { bytes: 200, tokens: 3, token_bytes: 64 }
    );
    assert_eq!(
        refused(FillPattern { token_keys: bench.span(0, 16), ..good }),
        too_short(Operand::TokenKeys, 24, 16)
    );
    let chunk = bench.span(4, 192);
    assert_eq!(
        refused(FillPattern { chunk, ..good }),
        misaligned(Operand::Chunk, chunk.address(), 8)
    );
}

#[test]
fn gathers() {
    let bench = Bench::new();
    // The last row of either needs no more than its width.
    let good = GatherRows {
        out: bench.span(0, (8 + 5) * 4),
        out_stride: 8,
        table: bench.span(1024, (2 * 6 + 5) * 4),
        table_stride: 6,
        row_index: bench.span(2048, 8),
        rows: 2,
        width: 5,
        table_rows: 3,
    };
    let refused = |gather| {
        let machine = &bench.machine;
        machine.kernels.gather_rows(&machine.stream, gather).unwrap_err()
    };
    assert_eq!(
        refused(GatherRows { out: bench.span(0, 51), ..good }),
        too_short(Operand::Out, 52, 51)
    );
    assert_eq!(
        refused(GatherRows { table: bench.span(0, 67), ..good }),
        too_short(Operand::Table, 68, 67)
    );
    assert_eq!(
        refused(GatherRows { row_index: bench.span(0, 7), ..good }),
        too_short(Operand::RowIndex, 8, 7)
    );
    assert_eq!(
        refused(GatherRows { table_stride: 4, ..good }),
        OperandError::Stride { operand: Operand::Table, width: 5, stride: 4 }.into()
    );
    let out = bench.span(2, 52);
    assert_eq!(refused(GatherRows { out, ..good }), misaligned(Operand::Out, out.address(), 4));
}

/// What a kernel writes while it reads it is in no order.
#[test]
fn what_is_written_is_not_read() {
    let bench = Bench::new();
    let Bench { machine, paged, .. } = &bench;
    let (kernels, stream) = (&machine.kernels, &machine.stream);
    let overlap = |error: KernelError| match error {
        KernelError::Operand(OperandError::Overlap { written, read, bytes, .. }) => {
            (written, read, bytes)
        }
        other => panic!("{other}"),
    };
    let gather = GatherRows {
        out: bench.span(0, 40),
        out_stride: 5,
        table: bench.span(1024, 60),
        table_stride: 5,
        row_index: bench.span(2048, 8),
        rows: 2,
        width: 5,
        table_rows: 3,
    };
    let gathers = |gather| overlap(kernels.gather_rows(stream, gather).unwrap_err());
    let table = bench.span(36, 60);
    assert_eq!(gathers(GatherRows { table, ..gather }), (Operand::Out, Operand::Table, 4));
    let row_index = bench.span(8, 8);
    assert_eq!(gathers(GatherRows { row_index, ..gather }), (Operand::Out, Operand::RowIndex, 8));
    let fill =
        FillPattern { chunk: bench.span(0, 192), token_keys: bench.span(184, 24), tokens: 3 };
    let filled = kernels.fill_pattern(stream, &shape(), fill).unwrap_err();
    assert_eq!(overlap(filled), (Operand::Chunk, Operand::TokenKeys, 8));
    let checksum = ChecksumArgs {
        block_table: bench.span(0, 24),
        table_stride: 3,
        seq_lens: bench.span(1024, 8),
        sequences: 2,
        checksums: bench.span(2048, 48),
        num_blocks: BLOCKS,
    };
    let sums = |args| overlap(kernels.paged_checksum(stream, &paged.kv, args).unwrap_err());
    let written = Operand::Checksums;
    let block_table = bench.span(2088, 24);
    assert_eq!(sums(ChecksumArgs { block_table, ..checksum }), (written, Operand::BlockTable, 8));
    let seq_lens = bench.span(2048, 8);
    assert_eq!(sums(ChecksumArgs { seq_lens, ..checksum }), (written, Operand::SeqLens, 8));
    let checksums = paged.memory.span().slice(8, 48).unwrap();
    assert_eq!(sums(ChecksumArgs { checksums, ..checksum }), (written, Operand::Pages, 48));
}

#[test]
fn devices_are_not_mixed() {
    let bench = Bench::new();
    let Bench { machine, paged, .. } = &bench;
    let other = Device::open(Arc::new(machine.sim.clone()), 1).unwrap();
    let stream = Stream::new(&other).unwrap();
    let elsewhere = |operand| KernelError::OtherDevice { kernels: 0, operand, other: 1 };
    let first = [Slot::from(0)];
    let transfer = bench.transfer(&first);
    assert_eq!(
        machine.kernels.multi_layer_transfer(&stream, &paged.kv, transfer),
        Err(elsewhere("stream"))
    );
    let memory = DeviceBuffer::alloc(&other, 1024).unwrap();
    let layout = PagedLayout::block_major(&shape());
    let foreign = PagedKv::new(&stream, shape(), layout, memory.span(), BLOCKS).unwrap();
    assert_eq!(
        machine.kernels.multi_layer_transfer(&machine.stream, &foreign, transfer),
        Err(elsewhere("paged memory"))
    );
}

#[test]
fn memory_whose_owner_was_dropped_is_refused() {
    let bench = Bench::new();
    let Bench { machine, paged, .. } = &bench;
    let layout = PagedLayout::block_major(&shape());
    let pages = DeviceBuffer::alloc(machine.stream.device(), 1024).unwrap();
    let kv = PagedKv::new(&machine.stream, shape(), layout, pages.span(), BLOCKS).unwrap();
    let gone = |span: DeviceSpan| {
        let (address, bytes) = (span.address(), span.bytes());
        Err(KernelError::Memory(CopyError::Gone { address, bytes }))
    };
    let transfer =
        |kv, transfer| machine.kernels.multi_layer_transfer(&machine.stream, kv, transfer);
    drop(pages);
    let first = [Slot::from(0)];
    assert_eq!(transfer(&kv, bench.transfer(&first)), gone(kv.span()));
    // An operand of a launch is no different.
    let keys = DeviceBuffer::alloc(machine.stream.device(), 64).unwrap();
    let (memory, token_keys) = (keys.span(), keys.span().slice(0, 8).unwrap());
    let chunk = bench.span(0, 64);
    drop(keys);
    let fill = FillPattern { chunk, token_keys, tokens: 1 };
    let refused = machine.kernels.fill_pattern(&machine.stream, &shape(), fill);
    assert_eq!(refused, gone(token_keys));
    for stale in [
        Transfer { chunk: memory, ..bench.transfer(&first) },
        Transfer { slot_mapping: token_keys, ..bench.transfer(&first) },
    ] {
        let span = if stale.chunk == memory { memory } else { token_keys };
        assert_eq!(transfer(&paged.kv, stale), gone(span));
    }
    machine.stream.synchronize().unwrap();
    assert_eq!(machine.sim.findings(), []);
}

/// The contexts of two simulated machines have the same numbers, as adopted ones of two driver objects may.
#[test]
fn devices_of_one_ordinal_and_context_number_are_not_mixed_either() {
    let (bench, other) = (Bench::new(), Bench::new());
    let [ours, theirs] = [&bench, &other].map(|bench| bench.machine.stream.device());
    assert_eq!((ours.ordinal(), ours.context()), (theirs.ordinal(), theirs.context()));
    let elsewhere = |operand| Err(KernelError::OtherDevice { kernels: 0, operand, other: 0 });
    let first = [Slot::from(0)];
    let transfer = |stream, paged| {
        bench.machine.kernels.multi_layer_transfer(stream, paged, bench.transfer(&first))
    };
    assert_eq!(transfer(&other.machine.stream, &bench.paged.kv), elsewhere("stream"));
    assert_eq!(transfer(&bench.machine.stream, &other.paged.kv), elsewhere("paged memory"));
    bench.machine.stream.synchronize().unwrap();
    assert_eq!(bench.machine.sim.findings(), []);
}

#[test]
fn paged_memory_that_cannot_be() {
    let bench = Bench::new();
    let layout = PagedLayout::block_major(&shape());
    let refused = |layout, span, blocks| {
        PagedKv::new(&bench.machine.stream, shape(), layout, span, blocks).unwrap_err()
    };
    for blocks in [0, 1 << 31] {
        assert_eq!(
            refused(layout, bench.span(0, 1024), blocks),
            PagedKvError::Blocks { blocks, block_tokens: 4 }
        );
    }
    let short = OperandError::TooShort { operand: Operand::Pages, needed_bytes: 1024, bytes: 1023 };
    assert_eq!(refused(layout, bench.span(0, 1023), 4), short.into());
    let layer_major = PagedLayout::layer_major(&shape(), 3).unwrap();
    let overlap = LayoutError::Overlap { axis: "kv", stride_bytes: 192, inner_bytes: 256 };
    assert_eq!(refused(layer_major, bench.span(0, 1024), 4), overlap.into());
    bench.machine.sim.fail_nth("cuMemAlloc", 1, ErrorCode::OUT_OF_MEMORY);
    let failed = PagedKv::new(&bench.machine.stream, shape(), layout, bench.span(0, 1024), 4);
    assert!(matches!(failed, Err(PagedKvError::Device(error)) if error.is_out_of_memory()));
}

#[test]
fn blocks_of_whole_pieces_can_be_named() {
    let bench = Bench::new();
    let kv = &bench.paged.kv;
    assert_eq!((kv.blocks(), kv.slots(), kv.shape()), (4, 16, &shape()));
    let block = kv.block_span(3).unwrap().unwrap();
    assert_eq!((block.address(), block.bytes()), (kv.span().address() + 768, 256));
    let error = kv.block_span(4).unwrap_err();
    assert_eq!((error.offset, error.bytes, error.capacity), (1024, 256, 1024));
    let layer_major = PagedLayout::layer_major(&shape(), 4).unwrap();
    let planes = Paged::new(&bench.machine, shape(), layer_major, 4);
    assert_eq!(planes.kv.block_span(0), Ok(None));
}

#[test]
fn the_planes_of_any_layout_have_addresses() {
    let bench = Bench::new();
    let planes = |kv: &PagedKv| {
        let all = [(0, 0), (0, 1), (1, 0), (1, 1)];
        all.map(|(layer, of)| kv.plane_address(layer, of).unwrap())
    };
    let kv = &bench.paged.kv;
    let start = kv.span().address();
    assert_eq!(planes(kv), [start, start + 64, start + 128, start + 192]);
    for (layer, of) in [(2, 0), (0, 2), (u32::MAX, 0), (0, u32::MAX)] {
        assert_eq!(kv.plane_address(layer, of), None);
    }
    let layer_major = PagedLayout::layer_major(&shape(), 4).unwrap();
    let paged = Paged::new(&bench.machine, shape(), layer_major, 4);
    let start = paged.kv.span().address();
    assert_eq!(planes(&paged.kv), [start, start + 256, start + 512, start + 768]);
    // Tensors of keys, one for each layer, before those of values.
    let format = KvFormat::KvListsNhd;
    let options = FormatOptions {
        layers: 2,
        heads: 1,
        head_bytes: 16,
        element_bytes: 2,
        block_tokens: 4,
        blocks: 4,
        block_padding_bytes: 0,
    };
    let (shape, layout) = (format.shape(&options).unwrap(), format.layout(&options).unwrap());
    let tensors: Vec<_> = (0..4).map(|n| bench.span(n * 256, 256)).collect();
    let kv = PagedKv::over(&bench.machine.stream, shape, layout, &tensors, 4).unwrap();
    assert_eq!(planes(&kv), [0, 2, 1, 3].map(|tensor: usize| tensors[tensor].address()));
}

#[test]
fn a_refused_module_is_told_as_such() {
    let machine = Machine::new();
    machine.sim.fail_nth("cuModuleLoadDataEx", 2, ErrorCode::INVALID_PTX);
    assert!(matches!(KvKernels::load(&machine.device), Err(ModuleError::Load { .. })));
    machine.sim.fail_nth("cuModuleGetFunction", 1, ErrorCode::NOT_FOUND);
    assert!(matches!(KvKernels::load(&machine.device), Err(ModuleError::Kernel { .. })));
    machine.device.free_retired().unwrap();
    KvKernels::load(&machine.device).unwrap();
}

#[test]
fn a_refused_launch_is_told_as_such() {
    let machine = Machine::new();
    let paged = Paged::new(&machine, shape(), PagedLayout::block_major(&shape()), BLOCKS);
    let (chunk, slots) = (machine.memory(64), machine.upload(&[0i64]));
    machine.sim.fail_nth("cuLaunchKernel", 1, ErrorCode::OUT_OF_MEMORY);
    let transfer = Transfer {
        chunk: chunk.span(),
        slot_mapping: slots.span(),
        host_slots: &[0].map(Slot::from),
        tokens: 1,
        skip_prefix_n_tokens: 0,
        direction: Direction::ChunkToPaged,
        num_blocks: BLOCKS,
    };
    let refused = machine.kernels.multi_layer_transfer(&machine.stream, &paged.kv, transfer);
    assert!(matches!(refused, Err(KernelError::Device(error)) if error.is_out_of_memory()));
}
