//! Measuring a transport profile on the device that it is for.

use std::sync::Arc;

use cuda_driver::{
    BatchCopy, Device, DeviceBuffer, DeviceError, ErrorCode, Event, HostAllocFlags, PinnedBuffer,
    Stream,
};
use kv_pool::{BlockId, Slot};

use super::profile::{DirectionCosts, RateBySize, TransportProfile};
use super::{HostDirection, HostLink, HostLinkOptions, Load, Transport, TransportError};
use crate::launch::{RawChunk, RawMapping, RawTransfer};
use crate::{
    BlockCopy, BlockPair, BlockPairs, Blocks, HostBlocks, KernelError, KvKernels, KvShape,
    KvShapeOptions, PagedKv, PagedLayout, chunks::LaunchLimits,
};

/// How a profile is measured.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct MeasureOptions {
    /// Bytes of the longest operation, at least 1 MiB. As much pinned memory, and three times as much
    /// device memory, is allocated and freed again.
    pub bytes: u64,
    /// Multiprocessors that kernels are limited to, as [`HostLinkOptions`](super::HostLinkOptions) says.
    pub multiprocessors: u32,
    /// Timings of which the median is taken, at least 1 and at most 10,000.
    pub rounds: u32,
    /// Name of the link; `None` is the device's PCI address.
    pub link: Option<String>,
}

impl MeasureOptions {
    /// Most timings: each takes milliseconds, and there are some hundred kinds.
    const ROUNDS_MAX: u32 = 10_000;
}

impl Default for MeasureOptions {
    /// 64 MiB, 8 multiprocessors, 5 rounds.
    fn default() -> Self {
        Self { bytes: 64 << 20, multiprocessors: 8, rounds: 5, link: None }
    }
}

/// Bytes that lie together, of which rates of kernels are taken.
const FRAGMENTS_OF_KERNELS: [u64; 3] = [128, 256, 2048];
/// Bytes of the copies of which rates of the engine are taken.
const FRAGMENTS_OF_ENGINE: [u64; 6] = [4 << 10, 16 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20];
/// Copies by one call, at most.
const COPIES_MAX: u64 = 2048;
/// Bytes of a copy of which the set-up is taken.
const SHORT_BYTES: u64 = 64 << 10;
/// As many of them are queued.
const SHORT_COPIES: u64 = 16;
/// Transfers by two hops, one behind the other, of which hand-overs are taken.
const HANDOVERS: u32 = 4;

impl TransportProfile {
    /// Measures what transports cost between pages of the kernels' device and pinned memory.
    ///
    /// The device should have nothing else to do. Times are the device's own, taken by events.
    ///
    /// # Ordering
    /// Waits on the host for its own work, some tenths of a second on a GPU.
    ///
    /// # Errors
    /// [`TransportError::TooManyRounds`] for more rounds than there may be; what allocation, launches and the
    /// driver answer. Everything is given back then too.
    #[track_caller]
    pub fn measure(
        kernels: &Arc<KvKernels>,
        options: &MeasureOptions,
    ) -> Result<Self, TransportError> {
        let _site = cuda_driver::site::enter();
        let device = kernels.device();
        let (count, most) = (options.rounds, MeasureOptions::ROUNDS_MAX);
        if count > most {
            return Err(TransportError::TooManyRounds { count, most });
        }
        let meter = Meter::new(kernels, options)?;
        let mut profile = Self {
            device: device.info().name.clone(),
            link: options.link.clone().unwrap_or_else(|| device.info().pci_bus_id.clone()),
            multiprocessors: options.multiprocessors.max(1),
            to_host: meter.costs(HostDirection::ToHost)?,
            to_pages: meter.costs(HostDirection::ToPages)?,
            forced: None,
        };
        for direction in [HostDirection::ToHost, HostDirection::ToPages] {
            let ns = meter.handover(&profile, direction)?;
            match direction {
                HostDirection::ToHost => profile.to_host.handover_ns = ns,
                HostDirection::ToPages => profile.to_pages.handover_ns = ns,
            }
        }
        drop(meter);
        device.free_retired()?;
        Ok(profile)
    }
}

/// What measuring needs.
struct Meter<'k> {
    kernels: &'k Arc<KvKernels>,
    stream: Stream,
    begun: Event,
    ended: Event,
    host: Arc<PinnedBuffer>,
    pages: DeviceBuffer,
    ring: DeviceBuffer,
    bytes: u64,
    rounds: u32,
    limits: LaunchLimits,
}

impl<'k> Meter<'k> {
    fn new(kernels: &'k Arc<KvKernels>, options: &MeasureOptions) -> Result<Self, DeviceError> {
        let device = kernels.device();
        let bytes = options.bytes.max(1 << 20).checked_next_multiple_of(4096).unwrap_or(u64::MAX);
        Ok(Self {
            kernels,
            stream: Stream::new(device)?,
            begun: Event::with_timing(device)?,
            ended: Event::with_timing(device)?,
            host: Arc::new(PinnedBuffer::alloc(device, bytes, HostAllocFlags::CACHED)?),
            pages: DeviceBuffer::alloc(device, bytes)?,
            ring: DeviceBuffer::alloc(device, bytes)?,
            bytes,
            rounds: options.rounds.max(1),
            limits: LaunchLimits { blocks: options.multiprocessors.max(1), threads: 1024 },
        })
    }

    fn device(&self) -> &Device {
        self.kernels.device()
    }

    /// Nanoseconds of `work`: the median of the rounds, after one that warms up.
    fn time(
        &self,
        mut work: impl FnMut() -> Result<(), TransportError>,
    ) -> Result<f64, TransportError> {
        let mut times = Vec::new();
        for _ in 0..=self.rounds {
            self.stream.synchronize()?;
            self.begun.record(&self.stream)?;
            work()?;
            self.ended.record(&self.stream)?;
            self.ended.synchronize()?;
            times.push(f64::from(self.ended.elapsed_ms_since(&self.begun)?) * 1e6);
        }
        let rounds = &mut times[1..];
        rounds.sort_by(f64::total_cmp);
        Ok(rounds[rounds.len() / 2])
    }

    fn costs(&self, direction: HostDirection) -> Result<DirectionCosts, TransportError> {
        let [short, long] = [self.bytes / 4, self.bytes];
        let copies = [
            self.time(|| self.copy(direction, 0, short))?,
            self.time(|| self.copy(direction, 0, long))?,
        ];
        let copy_ns = slope(copies, [short, long]);
        let bytes = SHORT_BYTES.min(self.bytes / SHORT_COPIES);
        let queued = self.time(|| {
            (0..SHORT_COPIES).try_for_each(|index| self.copy(direction, index * bytes, bytes))
        })?;
        let setup = queued / SHORT_COPIES as f64 - bytes as f64 * copy_ns;
        let (direct, direct_setup) = self.kernel_rates(direction, self.host.device_address())?;
        let (walk, _) = self.kernel_rates(direction, self.ring.address())?;
        let walk_setup = self.walk_setup(direction)?;
        Ok(DirectionCosts {
            copy_setup_ns: setup.max(0.0) as u64,
            copy_bytes_per_s: rate(copy_ns),
            handover_ns: 0,
            walk_setup_ns: walk_setup.max(0.0) as u64,
            direct_setup_ns: direct_setup.max(0.0) as u64,
            direct,
            walk,
            fragments: self.fragment_rates(direction)?,
        })
    }

    fn copy(
        &self,
        direction: HostDirection,
        offset: u64,
        bytes: u64,
    ) -> Result<(), TransportError> {
        let (host, device) = (self.host.host_address() + offset, self.ring.address() + offset);
        let stream = self.stream.raw();
        Ok(self.device().run(|driver| match direction {
            // SAFETY: both ranges lie in buffers of `bytes` bytes of this struct, which nobody else
            // knows; the stream is live.
            HostDirection::ToHost => unsafe {
                driver.memcpy_dtoh_async(host, device, bytes, stream)
            },
            // SAFETY: likewise.
            HostDirection::ToPages => unsafe {
                driver.memcpy_htod_async(device, host, bytes, stream)
            },
        })?)
    }

    /// Rates of the transfer kernel between scattered fragments and a chunk at `chunk`, and what a
    /// launch takes beside its bytes.
    fn kernel_rates(
        &self,
        direction: HostDirection,
        chunk: u64,
    ) -> Result<(RateBySize, f64), TransportError> {
        let mut points = Vec::new();
        let mut setup = f64::INFINITY;
        for fragment in FRAGMENTS_OF_KERNELS {
            let scattered = Scattered::new(self, fragment)?;
            let counts = [scattered.tokens / 4, scattered.tokens];
            let mut times = [0.0; 2];
            for (time, tokens) in times.iter_mut().zip(counts) {
                *time = self.time(|| self.launch(&scattered, direction, chunk, tokens))?;
            }
            let lengths = counts.map(|tokens| tokens * fragment);
            let ns = slope(times, lengths);
            points.push((fragment, rate(ns)));
            setup = setup.min(times[0] - lengths[0] as f64 * ns);
        }
        Ok((RateBySize::new(&points), setup))
    }

    /// What each of several launches takes that move one fragment each.
    fn walk_setup(&self, direction: HostDirection) -> Result<f64, TransportError> {
        let scattered = Scattered::new(self, FRAGMENTS_OF_KERNELS[2])?;
        let time = self.time(|| {
            (0..SHORT_COPIES)
                .try_for_each(|_| self.launch(&scattered, direction, self.ring.address(), 1))
        })?;
        Ok(time / SHORT_COPIES as f64)
    }

    fn launch(
        &self,
        scattered: &Scattered,
        direction: HostDirection,
        chunk: u64,
        tokens: u64,
    ) -> Result<(), TransportError> {
        let chunk = RawChunk {
            address: chunk,
            mapping: RawMapping::Slots(scattered.slots.address()),
            tokens,
            skip_prefix_n_tokens: 0,
        };
        let transfer = RawTransfer {
            paged: &scattered.paged,
            chunks: &[chunk],
            layers: 0..1,
            direction: direction.into(),
            num_blocks: scattered.paged.blocks(),
            limits: self.limits,
            report: None,
        };
        // SAFETY: `tokens` rows are at most as many bytes as the ring and the pinned memory have, which
        // nobody else knows; the mapping has a slot for each token.
        Ok(unsafe {
            self.kernels.transfers().launch(self.kernels.launcher(), &self.stream, &transfer)
        }?)
    }

    fn upload(&self, bytes: &[u8]) -> Result<DeviceBuffer, TransportError> {
        let buffer = DeviceBuffer::alloc(self.device(), bytes.len() as u64)?;
        self.stream.upload(buffer.span(), bytes).map_err(TransportError::Copy)?;
        Ok(buffer)
    }

    /// What two hops take beyond what `profile`, whose hand-overs cost nothing, says: half of it, since
    /// a transfer pays it at its start and at its end.
    fn handover(
        &self,
        profile: &TransportProfile,
        direction: HostDirection,
    ) -> Result<u64, TransportError> {
        const FRAGMENT: u64 = 2048;
        let scattered = Scattered::new(self, FRAGMENT)?;
        let blocks = scattered.tokens / 4;
        let multiprocessors = self.limits.blocks;
        let options = HostLinkOptions { multiprocessors, ..HostLinkOptions::default() };
        let mut link = HostLink::new(Arc::clone(self.kernels), options)?
            .with_profile(TransportProfile { forced: Some(Transport::TwoHop), ..profile.clone() });
        let paged = &scattered.paged;
        let host = (Arc::clone(&self.host), 0);
        let packed = paged.layout().packed(paged.shape());
        let host = HostBlocks::new(&self.stream, *paged.shape(), packed, host, blocks)?;
        // A run on the host, of blocks that lie in no order in the pages.
        let in_order = (0..blocks as u32).filter_map(BlockId::new);
        let pairs: Vec<BlockPair> = in_order
            .zip(&scattered.blocks)
            .map(|(place, &block)| match direction {
                HostDirection::ToHost => BlockPair { source: block, destination: place },
                HostDirection::ToPages => BlockPair { source: place, destination: block },
            })
            .collect();
        let table = self.upload(bytemuck::cast_slice(&pairs))?;
        let (on_device, on_host) =
            ((Blocks::Device(paged), paged.blocks()), (Blocks::Host(&host), blocks));
        let ((from, from_blocks), (to, to_blocks)) = match direction {
            HostDirection::ToHost => (on_device, on_host),
            HostDirection::ToPages => (on_host, on_device),
        };
        let copy = BlockCopy {
            from,
            to,
            pairs: table.span().into(),
            count: blocks,
            host_pairs: Some(BlockPairs::new(&pairs)?),
            from_blocks,
            to_blocks,
            report: None,
            multiprocessors: None,
        };
        // Several, so that what the host takes for the calls of one is not counted.
        let time = self.time(|| {
            (0..HANDOVERS).try_for_each(|_| link.copy_blocks(&self.stream, copy).map(drop))
        })? / f64::from(HANDOVERS);
        let bytes = blocks * FRAGMENT;
        let load = Load {
            bytes,
            fragment_bytes: FRAGMENT,
            window_bytes: bytes,
            ring_buffer_bytes: options.ring_buffer_bytes,
            ring_buffers: options.ring_buffers,
        };
        let expected = profile.estimate_ns(Transport::TwoHop, direction, load).unwrap_or(0);
        Ok(((time - expected as f64) / 2.0).max(0.0) as u64)
    }

    /// Rates of copies of fragments by one call; none where the driver has no such call.
    fn fragment_rates(&self, direction: HostDirection) -> Result<RateBySize, TransportError> {
        let mut points = Vec::new();
        for bytes in FRAGMENTS_OF_ENGINE.into_iter().filter(|&bytes| 4 * bytes <= self.bytes) {
            let count = (self.bytes / bytes).min(COPIES_MAX);
            let places = permutation(count);
            let copies: Vec<BatchCopy> = (0..count)
                .zip(&places)
                .map(|(place, &other)| {
                    let host = self.host.host_address() + place * bytes;
                    let device = self.ring.address() + other * bytes;
                    let (destination, source) = match direction {
                        HostDirection::ToHost => (host, device),
                        HostDirection::ToPages => (device, host),
                    };
                    BatchCopy { destination, source, bytes }
                })
                .collect();
            let stream = self.stream.raw();
            let timed = self.time(|| {
                // SAFETY: all ranges lie in buffers of this struct, which nobody else knows; the stream
                // is live.
                Ok(self
                    .device()
                    .run(|driver| unsafe { driver.memcpy_batch_async(&copies, stream) })?)
            });
            match timed {
                Err(TransportError::Device(DeviceError::Driver(error)))
                    if error.code == ErrorCode::NOT_SUPPORTED =>
                {
                    break;
                }
                timed => points.push((bytes, rate(timed? / (count * bytes) as f64))),
            }
        }
        Ok(RateBySize::new(&points))
    }
}

/// Pages of one row each, and the same numbers in no order, as blocks and as slots.
struct Scattered {
    paged: PagedKv,
    blocks: Vec<BlockId>,
    slots: DeviceBuffer,
    tokens: u64,
}

impl Scattered {
    fn new(meter: &Meter<'_>, fragment: u64) -> Result<Self, TransportError> {
        let tokens = meter.bytes / fragment;
        let options =
            KvShapeOptions { layers: 1, kv_count: 1, row_bytes: fragment, block_tokens: 1 };
        let unfit = |_| KernelError::Blocks { num_blocks: tokens, capacity: i32::MAX as u64 };
        let shape = KvShape::new(options).map_err(unfit)?;
        let layout = PagedLayout::block_major(&shape);
        let paged = PagedKv::new(&meter.stream, shape, layout, meter.pages.span(), tokens)?;
        let number = |number: u64| u32::try_from(number).ok().and_then(BlockId::new);
        let blocks: Vec<BlockId> = permutation(tokens).into_iter().filter_map(number).collect();
        let slots: Vec<Slot> = blocks.iter().map(|block| block.slot(1, 0)).collect();
        let slots = meter.upload(bytemuck::cast_slice(&slots))?;
        Ok(Self { paged, blocks, slots, tokens })
    }
}

/// The numbers below `count` in no order, always the same.
fn permutation(count: u64) -> Vec<u64> {
    let mut values: Vec<u64> = (0..count).collect();
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    for last in (1..values.len()).rev() {
        random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        values.swap(last, (random >> 33) as usize % (last + 1));
    }
    values
}

/// Nanoseconds of each byte more.
fn slope(times: [f64; 2], bytes: [u64; 2]) -> f64 {
    ((times[1] - times[0]) / (bytes[1] - bytes[0]) as f64).max(1e-6)
}

fn rate(ns_per_byte: f64) -> u64 {
    (1e9 / ns_per_byte.max(1e-6)) as u64
}
