//! Every size and count that the crate takes, at 0, 1, a normal value, its greatest value and values whose
//! products overflow: each is answered, with a result or a typed error, in bounded memory and time.
//!
//! Covered: `KvShape` (`new`, `with_layers`), `KvFormat` (`shape`, `layout`), `PagedLayout` (`block_major`,
//! `layer_major`, `custom`, `new`, `extent_bytes`), `Tensors::count`, `PagedKv` (`new`, `over`,
//! `block_span`), `HostBlocks` (`new`, `read_block`), `Expected` (`new`, `checksum`, `add`), `reshard` and
//! `HeadMove::rows`, `HostOffsets`, `PackedOffsets`, `block_offsets_on_host`, `copy_block_offsets`, every
//! launch of `KvKernels`, the raw ones with their counts included, `ScatterPackets`, `LaunchLimits`,
//! `HostLink` (`new`, `transfer_chunk`, `transfer_chunks`, `start_chunks`, `copy_blocks`, `start_blocks`),
//! `LayerEvents`, `MeasureOptions`, `TransportProfile` (`assumed`, `parse`, estimates and choices),
//! `RateBySize`.
//!
//! The allocator refuses more than 1 GiB in all, so that an unbounded allocation ends the test.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use cuda_driver::{
    AddressRange, Device, DeviceBuffer, DeviceSpan, HostAllocFlags, PinnedBuffer, Stream,
};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{
    Append, BlockCopy, BlockOffsets, BlockPair, BlockSums, Blocks, ChecksumArgs, Chunk,
    ChunkMapping, ChunkMemory, ChunkTransfer, Conversion, ConversionKind, Direction,
    DirectionCosts, Expected, FillPattern, FormatOptions, GatherRows, HostBlocks, HostDirection,
    HostLink, HostLinkOptions, HostOffsets, HostReady, HostTransfer, KvFormat, KvKernels, KvShape,
    KvShapeOptions, LaunchLimits, LayerEvents, LayoutError, LayoutOptions, Load, MeasureOptions,
    NarrowFormat, PackedOffsets, PagedKv, PagedKvError, PagedLayout, RateBySize, RawAppend,
    RawBlockCopy, RawBlockSide, RawBlockSums, RawBlockUnits, RawChunk, RawConversion, RawFormats,
    RawMapping, RawTransfer, RowPart, RowRange, ScalePer, ScatterWords, Strides, Tensors, Transfer,
    Transport, TransportProfile, WideFormat, block_offsets_on_host, copy_block_offsets, references,
    reshard,
};

/// The system's allocator, with a limit.
struct Limited;

const LIMIT_BYTES: usize = 1 << 30;
static USED: AtomicUsize = AtomicUsize::new(0);

fn fits(bytes: usize) -> bool {
    let fits = USED.fetch_add(bytes, Relaxed).saturating_add(bytes) <= LIMIT_BYTES;
    if !fits {
        USED.fetch_sub(bytes, Relaxed);
    }
    fits
}

// SAFETY: what is not refused is the system allocator's, called as this is called.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !fits(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Limited = Limited;

const COUNTS: [u64; 14] = [
    0,
    1,
    2,
    3,
    16,
    1000,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    1 << 40,
    1 << 62,
    i64::MAX as u64,
    u64::MAX / 2 + 1,
    u64::MAX,
];
const SMALL: [u32; 8] = [0, 1, 2, 16, 1000, i32::MAX as u32, 1 << 31, u32::MAX];

/// Anything may be answered, and an error has a message.
fn answered<T, E: std::error::Error>(answer: Result<T, E>) -> Option<T> {
    if let Err(error) = &answer {
        assert!(!error.to_string().is_empty());
    }
    answer.ok()
}

struct Bench {
    device: Device,
    stream: Stream,
    kernels: Arc<KvKernels>,
    pages: DeviceBuffer,
    paged: PagedKv,
    host: Arc<PinnedBuffer>,
    blocks: HostBlocks,
    _sim: SimDriver,
}

const BLOCKS: u64 = 8;

fn shape(layers: u32, kv_count: u32, row_bytes: u64, block_tokens: u32) -> KvShape {
    KvShape::new(KvShapeOptions { layers, kv_count, row_bytes, block_tokens }).unwrap()
}

impl Bench {
    fn new() -> Self {
        let config = SimConfig { pinned_bytes: 64 << 20, ..SimConfig::default() };
        let sim = SimDriver::new(config).unwrap();
        sim.register_kernels(references());
        let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let kernels = Arc::new(KvKernels::load(&device).unwrap());
        let shape = shape(2, 2, 64, 4);
        let layout = PagedLayout::block_major(&shape);
        let pages = DeviceBuffer::alloc(&device, BLOCKS * shape.block_bytes()).unwrap();
        stream.fill(pages.span(), 1).unwrap();
        let paged = PagedKv::new(&stream, shape, layout, pages.span(), BLOCKS).unwrap();
        let host = PinnedBuffer::alloc(&device, 1 << 16, HostAllocFlags::CACHED).unwrap();
        let host = Arc::new(host);
        let of = (Arc::clone(&host), 0);
        let blocks = HostBlocks::new(&stream, shape, layout, of, BLOCKS).unwrap();
        Self { device, stream, kernels, pages, paged, host, blocks, _sim: sim }
    }

    fn memory(&self) -> DeviceBuffer {
        let memory = DeviceBuffer::alloc(&self.device, 1 << 16).unwrap();
        self.stream.fill(memory.span(), 0).unwrap();
        memory
    }

    /// Nothing that was answered with `Ok` has reached outside.
    fn assert_clean(&self) {
        self.stream.synchronize().unwrap();
        assert!(self._sim.findings().is_empty(), "{:?}", self._sim.findings());
        assert_eq!(self.device.poison(), None);
    }
}

#[test]
fn shapes_and_formats() {
    for layers in SMALL {
        for kv_count in [0, 1, 2, u32::MAX] {
            for row_bytes in COUNTS {
                for block_tokens in SMALL {
                    let options = KvShapeOptions { layers, kv_count, row_bytes, block_tokens };
                    let Some(shape) = answered(KvShape::new(options)) else { continue };
                    let _ = (shape.planes(), shape.token_bytes(), shape.block_plane_bytes());
                    let _ = SMALL.map(|layers| answered(shape.with_layers(layers)));
                    layouts_of(&shape);
                }
            }
        }
    }
    for format in KvFormat::ALL {
        for layers in [0, 1, 2, u32::MAX] {
            for heads in [0, 1, 8, u32::MAX] {
                for head_bytes in COUNTS {
                    for block_tokens in [0, 1, 16, u32::MAX] {
                        for blocks in [0, 1, 1000, 1 << 40, u64::MAX] {
                            for block_padding_bytes in [0, 1, u64::MAX] {
                                let options = FormatOptions {
                                    layers,
                                    heads,
                                    head_bytes,
                                    block_tokens,
                                    blocks,
                                    block_padding_bytes,
                                };
                                answered(format.shape(&options));
                                answered(format.layout(&options));
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Layouts of a shape, and what they take.
fn layouts_of(shape: &KvShape) {
    let extents = |layout: PagedLayout| {
        let _ = COUNTS.map(|blocks| answered(layout.extent_bytes(shape, blocks)));
        let _ = (layout.alignment(), layout.has_whole_blocks(shape), layout.has_whole_rows());
    };
    extents(PagedLayout::block_major(shape));
    for blocks in [0, 1, 1 << 40, u64::MAX] {
        let _ = answered(PagedLayout::layer_major(shape, blocks)).map(extents);
    }
    for bytes in [0, shape.row_bytes(), 1 << 40, u64::MAX] {
        let strides = Strides { plane_bytes: bytes, block_bytes: bytes, token_bytes: bytes };
        let _ = answered(PagedLayout::custom(shape, strides)).map(extents);
        for tensors in
            [Tensors::One, Tensors::PerLayer, Tensors::PerPlane, Tensors::PerPlaneKvFirst]
        {
            let _ = tensors.count(shape);
            for segments in [0, 1, 2, u32::MAX] {
                let part = RowPart {
                    segment_bytes: shape.row_bytes() / u64::from(segments.max(1)),
                    segments,
                    segment_stride_bytes: bytes,
                    token_stride_bytes: bytes,
                    offset_bytes: bytes,
                };
                let second = RowPart { offset_bytes: u64::MAX - bytes, ..part };
                for parts in [&[][..], &[part], &[part, second], &[part; 3]] {
                    let options = LayoutOptions {
                        tensors,
                        layer_stride_bytes: bytes,
                        kv_stride_bytes: bytes,
                        block_stride_bytes: bytes,
                        parts,
                    };
                    let _ = answered(PagedLayout::new(shape, options)).map(extents);
                }
            }
        }
    }
}

#[test]
fn paged_memory_and_host_blocks() {
    let bench = Bench::new();
    let range = AddressRange::reserve(&bench.device, 1 << 40).unwrap();
    let spans = [0, 1, 4096, 1 << 33, 1 << 40].map(|bytes| range.span(0, bytes).unwrap());
    let shapes = [
        shape(1, 1, 1, 1),
        shape(2, 2, 64, 4),
        shape(u32::MAX, 1, 1, 1),
        shape(1 << 30, 2, 1, 1),
        shape(1, 1, 1 << 40, 1),
        shape(1, 1, 1, u32::MAX),
        shape(2, 2, 1 << 59, 1),
    ];
    for shape in shapes {
        let layout = PagedLayout::block_major(&shape);
        for span in spans {
            for blocks in COUNTS {
                let paged = PagedKv::new(&bench.stream, shape, layout, span, blocks);
                let Some(paged) = answered(paged) else { continue };
                let _ = (paged.slots(), paged.alignment());
                let _ = COUNTS.map(|block| answered(paged.block_span(block)));
            }
        }
        for blocks in COUNTS {
            for offset in COUNTS {
                let of = (Arc::clone(&bench.host), offset);
                let host = HostBlocks::new(&bench.stream, shape, layout, of, blocks);
                let Some(host) = answered(host) else { continue };
                let _ = COUNTS.map(|block| answered(host.read_block(block, &mut [0; 3])));
            }
        }
    }
    for count in [0, 1, 2, 1000] {
        let spans = vec![bench.pages.span(); count];
        let layout = PagedLayout::block_major(&shapes[1]);
        answered(PagedKv::over(&bench.stream, shapes[1], layout, &spans, 1));
    }
    bench.assert_clean();
}

/// A layout knows what rows are made of: with a shape of other rows, kernels would leave the memory.
#[test]
fn a_layout_of_other_rows_is_refused() {
    let bench = Bench::new();
    let long = shape(2, 2, 128, 4);
    for row_bytes in [1, 32, 63, 127, 129, 256] {
        let other = shape(2, 2, row_bytes, 4);
        let whole = PagedLayout::block_major(&other);
        let strides = Strides { plane_bytes: 1 << 10, block_bytes: 1 << 12, token_bytes: 256 };
        let custom = PagedLayout::custom(&other, strides).unwrap();
        for layout in [whole, custom] {
            let refused = LayoutError::RowBytes { parts_bytes: row_bytes, row_bytes: 128 };
            assert_eq!(layout.extent_bytes(&long, 2), Err(refused));
            let memory = bench.memory();
            let paged = PagedKv::new(&bench.stream, long, layout, memory.span(), 2);
            assert_eq!(paged.map(drop), Err(PagedKvError::Layout(refused)));
            let of = (Arc::clone(&bench.host), 0);
            let host = HostBlocks::new(&bench.stream, long, layout, of, 2);
            assert_eq!(host.map(drop), Err(PagedKvError::Layout(refused)));
        }
    }
}

#[test]
fn sums_known_beforehand() {
    for (layers, row_bytes, block_tokens) in
        [(1, 8, 1), (2, 64, 4), (1, 1 << 40, 1), (u32::MAX, 8, 1), (1, 1, u32::MAX), (1, 3, 2)]
    {
        let shape = shape(layers, 1, row_bytes, block_tokens);
        let Some(expected) = answered(Expected::new(&shape)) else { continue };
        let _ = (expected.checksum(&[]), expected.checksum(&[1; 9]));
        assert_eq!(expected.add(0, usize::MAX, 1), None);
    }
}

#[test]
fn heads_of_shards() {
    for heads in SMALL {
        for from in SMALL {
            for to in SMALL {
                let Some(moves) = answered(reshard(heads, from, to)) else { continue };
                let last = moves.last().unwrap();
                let _ = SMALL.map(|head_bytes| last.rows(head_bytes));
            }
        }
    }
}

#[test]
fn offsets_on_the_host() {
    let bench = Bench::new();
    let sizes = [0, 1, 4, 1 << 31, 1 << 32, 1 << 40, usize::MAX];
    let mut dense = [0; 64];
    for pool_stride in sizes {
        for row_stride in sizes {
            for width in sizes {
                for index in [&[][..], &[0], &[u32::MAX, 1]] {
                    let live = vec![u32::MAX; index.len()];
                    for live in [None, Some(&live[..])] {
                        let gather = HostOffsets {
                            source: &[1; 16],
                            pool_stride,
                            row_stride,
                            row_index: index,
                            live,
                            scales: &[1, 2],
                            offsets: &[3, 4],
                            width,
                        };
                        answered(block_offsets_on_host(&gather, &mut dense));
                        let Some(packed) = answered(PackedOffsets::new(&gather)) else { continue };
                        let mut staged = vec![0; packed.entries()];
                        answered(packed.pack(&gather, &mut staged));
                        for (rows, width) in [(0, 0), (1, u32::MAX), (u32::MAX, u32::MAX)] {
                            let span = bench.pages.span();
                            let unpack = packed.on_device(span, span, (rows, width));
                            if let Some(unpack) = answered(unpack) {
                                answered(bench.kernels.gather_block_offsets(&bench.stream, unpack));
                            }
                        }
                    }
                }
            }
        }
    }
    for out_rows in SMALL {
        for pools in SMALL {
            for rows in SMALL {
                for width in SMALL {
                    for start in [0, 1 << 40, u64::MAX] {
                        let (out, staged) = (bench.pages.span(), (&*bench.host, start));
                        let sizes = [pools, rows, width];
                        answered(copy_block_offsets(&bench.stream, out, out_rows, staged, sizes));
                    }
                }
            }
        }
    }
    bench.assert_clean();
}

/// Memory of a launch: of the device, and addresses with no memory behind them, which are long.
fn spans(memory: &DeviceBuffer) -> [DeviceSpan; 3] {
    [0, 64, memory.bytes()].map(|bytes| memory.span().slice(0, bytes).unwrap())
}

#[test]
fn chunks_and_transfers() {
    let bench = Bench::new();
    let (memory, slots) = (bench.memory(), bench.memory());
    for tokens in COUNTS {
        for skip in [0, 1, tokens, u64::MAX] {
            for num_blocks in [0, 1, BLOCKS, u64::MAX] {
                for chunk in spans(&memory) {
                    for host_slots in [&[][..], &[0], &[i64::MAX], &[-1; 16], &[3; 16]] {
                        let transfer = Transfer {
                            chunk,
                            slot_mapping: slots.span(),
                            host_slots,
                            tokens,
                            skip_prefix_n_tokens: skip,
                            direction: Direction::PagedToChunk,
                            num_blocks,
                        };
                        let (kernels, stream) = (&bench.kernels, &bench.stream);
                        answered(kernels.multi_layer_transfer(stream, &bench.paged, transfer));
                    }
                    let by_slots = ChunkMapping::Slots { slots: slots.span().into(), host: None };
                    let by_blocks = ChunkMapping::Blocks { ids: slots.span().into(), host: None };
                    for mapping in [by_slots, by_blocks] {
                        for (blocks, threads) in [(0, 0), (u32::MAX, 32), (1, u32::MAX), (1, 1024)]
                        {
                            for offset in [0, 64, u64::MAX] {
                                let (buffer, bytes) = (&*bench.host, chunk.bytes());
                                let pinned = ChunkMemory::Pinned { buffer, offset, bytes };
                                for memory in [chunk.into(), pinned] {
                                    let chunk = Chunk {
                                        memory,
                                        mapping,
                                        tokens,
                                        skip_prefix_n_tokens: skip,
                                    };
                                    let transfer = ChunkTransfer {
                                        chunks: &[chunk],
                                        layers: 0..(num_blocks as u32),
                                        direction: Direction::ChunkToPaged,
                                        num_blocks,
                                        limits: LaunchLimits { blocks, threads },
                                        report: None,
                                    };
                                    let (kernels, stream) = (&bench.kernels, &bench.stream);
                                    answered(kernels.transfer_chunks(
                                        stream,
                                        &bench.paged,
                                        &transfer,
                                    ));
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    bench.assert_clean();
}

/// What no raw launch can do is refused before the launch; none of these may reach the device.
#[test]
fn counts_of_raw_launches() {
    let bench = Bench::new();
    let side = RawBlockSide::default();
    for tokens in COUNTS {
        for rows in [0..0, 0..1, 1..0, 0..u64::MAX, u64::MAX..u64::MAX] {
            let chunk = RawChunk {
                address: u64::MAX,
                mapping: RawMapping::Slots(0),
                tokens,
                skip_prefix_n_tokens: tokens,
                rows,
            };
            let transfer = RawTransfer {
                paged: &bench.paged,
                chunks: &[chunk],
                layers: 0..2,
                direction: Direction::PagedToChunk,
                num_blocks: BLOCKS,
                limits: LaunchLimits::default(),
                report: None,
            };
            // SAFETY: all tokens are skipped, so that nothing is launched.
            answered(unsafe { bench.kernels.multi_layer_transfer_raw(&bench.stream, &transfer) });
        }
        for count in COUNTS {
            for planes in [1, 1 << 31, u64::MAX] {
                let units = RawBlockUnits { planes, tokens, segments: count, unit_vectors: 1 };
                let vectors = u128::from(planes) * u128::from(tokens);
                let vectors = vectors.saturating_mul(count.into());
                if vectors <= i32::MAX as u128 {
                    continue;
                }
                let append = RawAppend {
                    pages: side,
                    from: bytemuck::Zeroable::zeroed(),
                    units,
                    slot_mapping: 0,
                    block_tokens: 0,
                    first_token: u64::MAX,
                    first_plane: u32::MAX,
                    kv_count: 1,
                    report: 0,
                    vector_bytes: 0,
                };
                let sums = RawBlockSums {
                    from: side,
                    dense: side,
                    units,
                    ids: 0,
                    count,
                    sums: 0,
                    first: 0,
                    report: 0,
                    vector_bytes: 0,
                    slices: u32::MAX,
                };
                let copy = RawBlockCopy {
                    to: side,
                    from: side,
                    units,
                    pairs: 0,
                    items: u64::MAX,
                    by_place: None,
                    first_pair: 0,
                    vector_bytes: 0,
                    report: 0,
                    grid: u32::MAX,
                    threads: u32::MAX,
                };
                // SAFETY: more than is counted, so that nothing is launched; as the next three.
                let refused = unsafe { bench.kernels.append_raw(&bench.stream, &append) };
                assert!(refused.is_err(), "{units:?}");
                // SAFETY: as above.
                let refused = unsafe { bench.kernels.sum_blocks_raw(&bench.stream, &sums) };
                assert!(refused.is_err(), "{units:?}");
                // SAFETY: as above.
                let refused = unsafe { bench.kernels.copy_blocks_raw(&bench.stream, &copy) };
                assert!(refused.is_err(), "{units:?}");
                for kind in
                    [ConversionKind::Quantize, ConversionKind::Dequantize, ConversionKind::Measure]
                {
                    let raw = RawConversion {
                        kind,
                        to: side,
                        from: side,
                        units,
                        pairs: 0,
                        count: 1,
                        first_pair: 0,
                        scales: bytemuck::Zeroable::zeroed(),
                        formats: RawFormats { wide: 0, narrow: 0, head_units: 0, first_unit: 0 },
                        report: 0,
                        vector: 1,
                    };
                    // SAFETY: as above.
                    let refused = unsafe { bench.kernels.convert_blocks_raw(&bench.stream, &raw) };
                    assert!(refused.is_err(), "{units:?}");
                }
            }
        }
    }
    bench.assert_clean();
}

#[test]
fn blocks_and_conversions() {
    let bench = Bench::new();
    let (memory, sums) = (bench.memory(), bench.memory());
    let narrow = shape(2, 2, 32, 4);
    let codes = bench.memory();
    let layout = PagedLayout::block_major(&narrow);
    let narrow = PagedKv::new(&bench.stream, narrow, layout, codes.span(), BLOCKS).unwrap();
    let (kernels, stream) = (&bench.kernels, &bench.stream);
    let pair = [BlockPair { source: i32::MAX, destination: i32::MIN }];
    for count in COUNTS {
        for blocks in [0, 1, BLOCKS, 1 << 40, u64::MAX] {
            for pairs in spans(&memory) {
                for host_pairs in [None, Some(&[][..]), Some(&pair[..])] {
                    let (from, to) = (Blocks::Device(&bench.paged), Blocks::Host(&bench.blocks));
                    let copy = BlockCopy {
                        from,
                        to,
                        pairs: pairs.into(),
                        count,
                        host_pairs,
                        from_blocks: blocks,
                        to_blocks: blocks,
                        report: None,
                        multiprocessors: Some(blocks as u32),
                    };
                    answered(kernels.copy_blocks(stream, copy));
                    for bytes in COUNTS {
                        let rows = RowRange { from_byte: bytes, to_byte: 1, bytes };
                        answered(kernels.copy_block_rows(stream, copy, rows));
                    }
                    for head_size in SMALL {
                        let conversion = Conversion {
                            from,
                            to: (&narrow).into(),
                            wide: WideFormat::F16,
                            narrow: NarrowFormat::Int8,
                            head_size,
                            scales: sums.span(),
                            per: ScalePer::TokenHead,
                            pairs: pairs.into(),
                            count,
                            host_pairs,
                            from_blocks: blocks,
                            to_blocks: blocks,
                            report: None,
                        };
                        answered(kernels.quantize_blocks(stream, conversion));
                        answered(kernels.measure_scales(stream, conversion));
                        let (from, to) = (conversion.to, conversion.from);
                        let back = Conversion { from, to, ..conversion };
                        answered(kernels.dequantize_blocks(stream, back));
                    }
                    let sums = BlockSums {
                        blocks: from,
                        ids: pairs.into(),
                        count,
                        host_ids: None,
                        num_blocks: blocks,
                        sums: sums.span(),
                        report: None,
                    };
                    answered(kernels.sum_blocks(stream, sums));
                }
                for layers in SMALL {
                    for stride in [0, 64, 1 << 40, u64::MAX] {
                        let append = Append {
                            keys: sums.span().into(),
                            values: Some(sums.span().into()),
                            layer_stride_bytes: stride,
                            token_stride_bytes: stride,
                            first_layer: layers,
                            layers,
                            slot_mapping: pairs.into(),
                            host_slots: None,
                            tokens: count,
                            num_blocks: blocks,
                            report: None,
                        };
                        answered(kernels.append(stream, &bench.paged, append));
                    }
                }
            }
        }
    }
    bench.assert_clean();
}

#[test]
fn tables_words_and_patterns() {
    let bench = Bench::new();
    let (memory, out) = (bench.memory(), bench.memory());
    let (kernels, stream) = (&bench.kernels, &bench.stream);
    for stride in COUNTS {
        for rows in SMALL {
            for width in SMALL {
                let gather = GatherRows {
                    out: out.span(),
                    out_stride: stride,
                    table: memory.span(),
                    table_stride: stride,
                    row_index: memory.span(),
                    rows,
                    width,
                    table_rows: rows,
                };
                answered(kernels.gather_rows(stream, gather));
                for pools in [0, 1, u32::MAX] {
                    for live in [None, Some(memory.span().into())] {
                        let offsets = BlockOffsets {
                            source: memory.span().into(),
                            pool_stride: stride,
                            row_stride: stride,
                            row_index: None,
                            host_index: None,
                            live,
                            scales: memory.span().into(),
                            offsets: memory.span().into(),
                            out: out.span(),
                            out_rows: rows,
                            pools,
                            rows,
                            width,
                            report: None,
                        };
                        answered(kernels.gather_block_offsets(stream, offsets));
                    }
                }
            }
            let checksum = ChecksumArgs {
                block_table: memory.span(),
                table_stride: stride,
                seq_lens: memory.span(),
                sequences: rows,
                checksums: out.span(),
                num_blocks: stride,
            };
            answered(kernels.paged_checksum(stream, &bench.paged, checksum));
            let scatter = ScatterWords {
                out: out.span(),
                source: bench.host.span(0, bench.host.bytes()).unwrap(),
                data_offset: stride,
                index_offset: stride,
                count: rows,
            };
            answered(kernels.scatter_words(stream, scatter));
            let packet = bench.host.span(0, bench.host.bytes()).unwrap();
            answered(kernels.scatter_packets(out.span(), packet, rows));
        }
        for chunk in spans(&out) {
            let fill = FillPattern { chunk, token_keys: memory.span(), tokens: stride };
            answered(kernels.fill_pattern(stream, bench.paged.shape(), fill));
        }
    }
    bench.assert_clean();
}

#[test]
fn links_and_layer_events() {
    let bench = Bench::new();
    let slots = bench.memory();
    for ring_slots in SMALL {
        for slot_bytes in COUNTS {
            for multiprocessors in [0, 1, u32::MAX] {
                let launch_bytes = slot_bytes;
                let options =
                    HostLinkOptions { multiprocessors, launch_bytes, ring_slots, slot_bytes };
                // A ring of all of the device's memory takes the simulator as much.
                if slot_bytes > 1000 && u64::from(ring_slots).saturating_mul(slot_bytes) < 1 << 40 {
                    continue;
                }
                let Some(link) = answered(HostLink::new(Arc::clone(&bench.kernels), options))
                else {
                    continue;
                };
                for transport in Transport::ALL {
                    let profile = link.profile().clone().forced(transport);
                    transfers(
                        &bench,
                        &slots,
                        HostLink::new(Arc::clone(&bench.kernels), options)
                            .unwrap()
                            .with_profile(profile),
                    );
                }
            }
        }
    }
    for layers in SMALL {
        answered(LayerEvents::new(&bench.device, layers));
    }
    bench.assert_clean();
}

fn transfers(bench: &Bench, slots: &DeviceBuffer, mut link: HostLink) {
    let stream = &bench.stream;
    for tokens in [0, 1, 16, 1 << 40, u64::MAX] {
        for host_offset in [0, 1, u64::MAX] {
            for host_slots in [&[][..], &[3], &[-1; 16], &[i64::MAX]] {
                for skip in [0, 1, u64::MAX] {
                    let transfer = HostTransfer {
                        paged: &bench.paged,
                        host: &bench.host,
                        host_offset,
                        slot_mapping: slots.span(),
                        host_slots,
                        tokens,
                        skip_prefix_n_tokens: skip,
                        direction: Direction::ChunkToPaged,
                        num_blocks: BLOCKS,
                        layer_events: None,
                    };
                    answered(link.transfer_chunk(stream, transfer));
                    answered(link.transfer_chunks(stream, &[]));
                    answered(link.start_chunks(stream, HostReady::Now, &[transfer]));
                }
            }
        }
    }
    let pair = [BlockPair { source: 0, destination: 0 }];
    for count in [0, 1, u64::MAX] {
        for host_pairs in [None, Some(&pair[..])] {
            let copy = BlockCopy {
                from: Blocks::Device(&bench.paged),
                to: Blocks::Host(&bench.blocks),
                pairs: slots.span().into(),
                count,
                host_pairs,
                from_blocks: BLOCKS,
                to_blocks: BLOCKS,
                report: None,
                multiprocessors: Some(u32::MAX),
            };
            answered(link.copy_blocks(stream, copy));
            answered(link.start_blocks(stream, HostReady::Now, copy));
        }
    }
    stream.synchronize().unwrap();
}

#[test]
fn profiles_and_measures() {
    let bench = Bench::new();
    for multiprocessors in SMALL {
        answered(TransportProfile::assumed(&bench.device, multiprocessors));
    }
    for bytes in [0, 1, (1 << 40) + 1, u64::MAX - 4096, u64::MAX] {
        for rounds in [0, 1, u32::MAX] {
            // What can be had is measured by the tests of profiles.
            let options = MeasureOptions { bytes, rounds, multiprocessors: u32::MAX, link: None };
            if rounds == u32::MAX || bytes > 1 << 40 {
                answered(TransportProfile::measure(&bench.kernels, &options));
            }
        }
    }
    let rate = RateBySize::new(&COUNTS.map(|bytes| (bytes, bytes)));
    let _ = COUNTS.map(|bytes| rate.piece_ns(bytes));
    let assumed = TransportProfile::assumed(&bench.device, 8).unwrap();
    for costs in [
        assumed.to_host.clone(),
        DirectionCosts::default(),
        DirectionCosts {
            copy_setup_ns: u64::MAX,
            copy_bytes_per_s: u64::MAX,
            handover_ns: u64::MAX,
            walk_setup_ns: u64::MAX,
            direct_setup_ns: u64::MAX,
            direct: rate.clone(),
            walk: rate.clone(),
            fragments: rate.clone(),
        },
    ] {
        let profile =
            TransportProfile { to_host: costs.clone(), to_pages: costs, ..assumed.clone() };
        let text = profile.to_string();
        assert!(TransportProfile::parse(&text).is_ok());
        estimates(&profile);
    }
    for text in ["", "=", "a", "device = x\nlink = y\nmultiprocessors = 99999999999999999999"] {
        answered(TransportProfile::parse(text));
    }
}

fn estimates(profile: &TransportProfile) {
    let sizes = [0, 1, 4096, 1 << 31, 1 << 62, u64::MAX];
    for bytes in sizes {
        for slot_bytes in sizes {
            for fragment_bytes in [0, 1, u64::MAX] {
                for window_bytes in [0, 1, u64::MAX] {
                    for slots in [0, 1, u32::MAX] {
                        let load = Load { bytes, fragment_bytes, window_bytes, slot_bytes, slots };
                        for direction in [HostDirection::ToHost, HostDirection::ToPages] {
                            let _ = profile.choose(direction, load);
                            let _ = profile.choose_of_many(direction, load);
                            for transport in Transport::ALL {
                                let _ = profile.estimate_ns(transport, direction, load);
                                let _ = profile.estimate_of_many_ns(transport, direction, load);
                            }
                        }
                    }
                }
            }
        }
    }
}
