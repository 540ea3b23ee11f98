//! Moving KV between pages and pinned host memory by whichever way is the fastest, and gently.

mod blocks;
mod decision;
mod error;
mod fragments;
mod measure;
mod pieces;
mod profile;
mod ring;
mod two_hops;

use std::fmt;
use std::sync::Arc;

use cuda_driver::{BatchCopy, Device, DeviceError, Event, Stream};

use crate::{Direction, KvKernels};

pub use error::TransportError;
pub use measure::MeasureOptions;
pub use profile::{DirectionCosts, Load, RateBySize, TransportProfile, TransportProfileError};

use decision::Decisions;
use ring::Ring;

/// A way of moving bytes between pages and the host's memory.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Transport {
    /// A kernel reads or writes the host's memory itself.
    DirectKernel,
    /// The copy engine moves each piece that lies together on both sides: by one call for many where
    /// the driver has it, by a call for each where not.
    CopyEngine,
    /// A kernel moves rows between the pages and a small ring on the device in short bursts, and the
    /// copy engine carries the ring, while the kernel is on to the next of its buffers.
    TwoHop,
}

impl Transport {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::DirectKernel, Self::CopyEngine, Self::TwoHop];
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DirectKernel => "direct kernel",
            Self::CopyEngine => "copy engine",
            Self::TwoHop => "two hops",
        })
    }
}

/// Which way bytes go over the link.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum HostDirection {
    /// From the pages to the host's memory.
    ToHost,
    /// From the host's memory to the pages.
    ToPages,
}

impl From<HostDirection> for Direction {
    fn from(direction: HostDirection) -> Self {
        match direction {
            HostDirection::ToHost => Self::PagedToChunk,
            HostDirection::ToPages => Self::ChunkToPaged,
        }
    }
}

/// What a [`HostLink`] may take of its device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct HostLinkOptions {
    /// Multiprocessors that a transfer's kernels occupy at most, at least 1.
    pub multiprocessors: u32,
    /// Buffers of the ring in device memory; 0 for no ring, and so no two hops. No more than 64
    /// are made.
    pub ring_buffers: u32,
    /// Bytes of a buffer. Each buffer costs the copy engine its set-up, which a long one makes little of.
    pub ring_buffer_bytes: u64,
}

impl HostLinkOptions {
    /// Most buffers of a ring: a pipeline of two stages has no use for more.
    const RING_BUFFERS_MAX: u32 = 64;
}

impl Default for HostLinkOptions {
    /// 8 multiprocessors, and a ring of 3 buffers of 12 MiB.
    fn default() -> Self {
        Self { multiprocessors: 8, ring_buffers: 3, ring_buffer_bytes: 12 << 20 }
    }
}

/// The link between one device's pages and pinned host memory.
///
/// It owns a ring of device memory, a stream of copies for each direction and the events that order
/// them, all made once: a transfer allocates nothing on the device. Which way it goes is decided by a
/// [`TransportProfile`], which [`with_profile`](HostLink::with_profile) replaces.
///
/// # Ordering
/// Every transfer is ordered as one operation of the stream that it is given: it begins when what was
/// enqueued there before has completed, and what is enqueued there after waits for all of it, although
/// copies run on streams of the link's. Kernels run on the stream given, so its priority is theirs.
/// Transfers on different streams share the ring, whose buffers events hand over from one to the next.
/// Nothing waits on the host, except after a refusal of the driver whose consequences nothing else can
/// order (see [`TransportError`]).
#[derive(Debug)]
pub struct HostLink {
    kernels: Arc<KvKernels>,
    options: HostLinkOptions,
    profile: TransportProfile,
    decisions: Decisions,
    copies_to_host: Stream,
    copies_to_pages: Stream,
    fork: Event,
    join: Event,
    /// None where there is to be none.
    ring: Option<Ring>,
    /// Whether a refused transfer may still run, and nothing orders it: the next one waits for it first.
    is_unordered: bool,
    /// Whether the driver has refused a batch for lack of the call.
    no_batches: bool,
    /// Filled and emptied by each transfer, kept for its room.
    copies: Vec<BatchCopy>,
}

impl HostLink {
    /// Makes the ring, the stream and the events, with the profile that is assumed of the device.
    ///
    /// # Ordering
    /// May wait for the device, when memory of dropped buffers is freed first.
    ///
    /// # Errors
    /// What the driver answers, such as `OUT_OF_MEMORY` for the ring.
    #[track_caller]
    pub fn new(kernels: Arc<KvKernels>, options: HostLinkOptions) -> Result<Self, DeviceError> {
        let _site = cuda_driver::site::enter();
        let device = kernels.device().clone();
        let options = HostLinkOptions {
            multiprocessors: options.multiprocessors.max(1),
            ring_buffers: options.ring_buffers.min(HostLinkOptions::RING_BUFFERS_MAX),
            ..options
        };
        let profile = TransportProfile::assumed(&device, options.multiprocessors)?;
        let ring = match (options.ring_buffers, options.ring_buffer_bytes) {
            (0, _) | (_, 0) => None,
            (buffers, bytes) => Some(Ring::new(&device, buffers, bytes)?),
        };
        Ok(Self {
            copies_to_host: Stream::new(&device)?,
            copies_to_pages: Stream::new(&device)?,
            fork: Event::new(&device)?,
            join: Event::new(&device)?,
            kernels,
            options,
            profile,
            decisions: Decisions::default(),
            ring,
            is_unordered: false,
            no_batches: false,
            copies: Vec::new(),
        })
    }

    /// The same with another profile.
    #[must_use]
    pub fn with_profile(mut self, profile: TransportProfile) -> Self {
        self.decisions = Decisions::default();
        self.profile = profile;
        self
    }

    /// What decides.
    #[must_use]
    pub fn profile(&self) -> &TransportProfile {
        &self.profile
    }

    /// The device whose pages it serves.
    pub(crate) fn device(&self) -> &Device {
        self.kernels.device()
    }

    fn ring_buffer_bytes(&self) -> u64 {
        self.ring.as_ref().map_or(0, Ring::ring_buffer_bytes)
    }
}
