//! Every size and count that the crate takes, at 0, 1, a normal value, its greatest value and values whose
//! products overflow: each is answered, with a result or a typed error, in bounded memory and time.

mod launches;

use std::sync::Arc;

use crate::ops::on::pair;
use cuda_driver::{AddressRange, Device, DeviceBuffer, HostAllocFlags, PinnedBuffer, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{
    BlockCopy, BlockPairs, Blocks, HostBlocks, KvFormat, KvKernels, KvShape, KvShapeOptions,
    PagedKv, PagedLayout,
    error::PagedKvError,
    layout::{FormatOptions, LayoutError, LayoutOptions, RowPart, Strides, TensorView, Tensors},
    link::{
        DirectionCosts, HostDirection, HostLink, HostLinkOptions, Load, MeasureOptions, RateBySize,
        Transport, TransportProfile,
    },
    references,
    verify::Expected,
};

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
                                    element_bytes: 1 + blocks % 3,
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
        let _ = [0, 1, 2, u64::MAX].map(|kv| layout.parts_of(kv).len());
        let _ = (layout.has_whole_blocks(shape), layout.has_whole_rows());
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
                    let Some(layout) = answered(PagedLayout::new(shape, options)) else { continue };
                    extents(layout);
                    extents(layout.packed(shape));
                    for values in [&[][..], &[part], &[RowPart { offset_bytes: 1, ..part }]] {
                        let _ = answered(layout.with_value_parts(shape, values)).map(extents);
                    }
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
                let _ = paged.slots();
                let _ = COUNTS.map(|block| answered(paged.block_span(block)));
                let _ = COUNTS.map(|count| paged.plane_address(count as u32, count as u32));
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

/// Tensors of all kinds of numbers, held to be formats of all kinds of numbers.
#[test]
fn tensors_of_an_engine() {
    let bench = Bench::new();
    let mut adopted = 0;
    for format in KvFormat::ALL {
        for heads in [0, 1, u32::MAX] {
            for (head_bytes, element_bytes) in COUNTS.into_iter().zip(COUNTS.into_iter().rev()) {
                for (head_bytes, element_bytes) in [(head_bytes, element_bytes), (16, 1)] {
                    for (block_tokens, blocks) in [(1, 1), (u32::MAX, 1 << 33), (16, u64::MAX)] {
                        for block_padding_bytes in [0, u64::MAX] {
                            let options = FormatOptions {
                                layers: 1,
                                heads,
                                head_bytes,
                                element_bytes,
                                block_tokens,
                                blocks,
                                block_padding_bytes,
                            };
                            adopted += adoptions(&bench, format, &options);
                        }
                    }
                }
            }
        }
    }
    assert!(adopted > 0, "no tensor was ever right");
    bench.assert_clean();
}

/// How many descriptions of tensors are adopted.
fn adoptions(bench: &Bench, format: KvFormat, options: &FormatOptions) -> usize {
    let mut adopted = 0;
    for count in [0, 1, 2, 3] {
        for axes in 0..8 {
            for (length, stride) in [(0, 0), (1, i64::MIN), (2, 1), (u64::MAX, i64::MAX)] {
                let mut shape = vec![length; axes];
                // Heads of 16 bytes, and all else once.
                if let Some(last) = shape.last_mut().filter(|_| length == 1) {
                    *last = 16;
                }
                let mut strides = vec![stride; axes];
                if let Some(last) = strides.last_mut() {
                    *last = 1;
                }
                let tensor = |n: u64| TensorView {
                    span: bench.pages.span().slice(n * 64, 64).unwrap(),
                    element_bytes: options.element_bytes,
                    shape: &shape,
                    strides: &strides,
                };
                let tensors: Vec<_> = (0..count).map(tensor).collect();
                let answer = PagedKv::adopt(&bench.stream, format, options, &tensors);
                adopted += usize::from(answered(answer).is_some());
            }
        }
    }
    adopted
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
fn links() {
    let bench = Bench::new();
    let slots = bench.memory();
    for ring_buffers in SMALL {
        for ring_buffer_bytes in COUNTS {
            for multiprocessors in [0, 1, u32::MAX] {
                let options = HostLinkOptions { multiprocessors, ring_buffers, ring_buffer_bytes };
                // A ring of all of the device's memory takes the simulator as much.
                if ring_buffer_bytes > 1000
                    && u64::from(ring_buffers).saturating_mul(ring_buffer_bytes) < 1 << 40
                {
                    continue;
                }
                let Some(link) = answered(HostLink::new(Arc::clone(&bench.kernels), options))
                else {
                    continue;
                };
                for transport in Transport::ALL {
                    let profile =
                        TransportProfile { forced: Some(transport), ..link.profile().clone() };
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
    bench.assert_clean();
}

fn transfers(bench: &Bench, slots: &DeviceBuffer, mut link: HostLink) {
    let stream = &bench.stream;
    for ids in [0, i32::MAX] {
        let one = [pair(ids, ids)];
        let pairs = BlockPairs::new(&one).unwrap();
        for blocks in [0, 1, 1 << 31, u64::MAX] {
            assert_eq!(pairs.check_within(blocks, blocks).is_ok(), blocks > ids as u64);
        }
    }
    let one = [pair(0, 0)];
    for count in [0, 1, u64::MAX] {
        for host_pairs in [None, BlockPairs::new(&one).ok()] {
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
        for ring_buffer_bytes in sizes {
            for fragment_bytes in [0, 1, u64::MAX] {
                for window_bytes in [0, 1, u64::MAX] {
                    for slots in [0, 1, u32::MAX] {
                        let load = Load {
                            bytes,
                            fragment_bytes,
                            window_bytes,
                            ring_buffer_bytes,
                            ring_buffers: slots,
                        };
                        for direction in [HostDirection::ToHost, HostDirection::ToPages] {
                            let _ = profile.choose(direction, load);
                        }
                    }
                }
            }
        }
    }
}
