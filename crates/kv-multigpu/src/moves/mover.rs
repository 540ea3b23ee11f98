//! The mover: the streams, events, chunks, tables and kernels that moves between two devices need.

use std::sync::Arc;

use cuda_driver::host_pages::HostPages;
use cuda_driver::{Device, DeviceError, DeviceSpan, Event, Fence, FencePool, Stream, guard};
use kv_kernels::raw::BlockCopyKernels;
use smallvec::{SmallVec, smallvec};

use super::held::{Fences, Parking};
use super::ring::Ring;
use super::table::PairTables;
use super::{Held, Move, MoveError, MoveFailed, Withheld};

/// Maximum number of chunks, of tables, and of buffers of a boundary. Each is a separate
/// allocation.
pub(super) const COUNT_MAX: u64 = 4096;
/// More than a host's memory.
const CHUNK_BYTES_MAX: u64 = 1 << 40;
const TABLE_PAIRS_MAX: u64 = 1 << 24;
/// More than any GPU runs at a time.
const KERNEL_BLOCKS_MAX: u64 = 1 << 16;

/// The sizes of a [`Mover`]. [`Mover::new`] refuses sizes for which there is no memory.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct MoverConfig {
    /// The preferred path. Moves go through the host if the device whose kernels would move the
    /// blocks cannot access the other one.
    pub prefer: Route,
    /// Size of a pinned chunk on the path through the host, in bytes.
    pub chunk_bytes: u64,
    /// Number of chunks, at most 4,096. Three are enough to fill and drain at the same time.
    pub chunks: usize,
    /// Number of block pairs that a table holds, at most 2^24. One launch uses one table.
    pub table_pairs: usize,
    /// Number of tables, at most 4,096. It bounds the number of running launches. A mover without
    /// tables loads no kernels and moves no blocks.
    pub tables: usize,
    /// Number of thread blocks of a kernel that moves scattered blocks, at most 65,536. It bounds
    /// the share of the GPU that a move uses.
    pub kernel_blocks: u32,
}

impl Default for MoverConfig {
    /// Blocks are pulled. The path through the host uses 16 MiB of pinned memory, and tables use 2
    /// MiB.
    fn default() -> Self {
        Self {
            prefer: Route::Pull,
            chunk_bytes: 4 << 20,
            chunks: 4,
            table_pairs: 32 << 10,
            tables: 8,
            kernel_blocks: 64,
        }
    }
}

/// The path of a mover.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Route {
    /// From device to device. Kernels of the source write to the destination, on a stream of the
    /// mover, and use no multiprocessor of the destination. The devices wait for each other before
    /// and after each move.
    Push,
    /// From device to device. Kernels of the destination read from the source, in the order of the destination's
    /// stream. The devices wait for each other once, which saves about 12 µs for each move.
    Pull,
    /// Through pinned chunks of the host.
    Host,
}

/// The streams that a move is ordered by.
#[derive(Clone, Copy, Debug)]
pub struct MoveOrder<'a> {
    /// A stream of the source's device. The move reads after the present work of this stream.
    pub after: &'a Stream,
    /// A stream of the destination's device. The move writes after the present work of this stream,
    /// and before its later work.
    pub on: &'a Stream,
}

/// Moves memory from one device to another.
///
/// A program makes one for each ordered pair of devices. `&mut self` keeps its moves in order. [`Mover::new`] loads
/// the kernels, enables access between the devices where they can have it, and otherwise allocates pinned chunks.
#[derive(Debug)]
pub struct Mover {
    pub(super) from: Device,
    pub(super) to: Device,
    pub(super) config: MoverConfig,
    pub(super) route: Route,
    pub(super) parking: Arc<Parking>,
    /// Present on the path through the host.
    pub(super) ring: Option<Ring>,
    /// A stream of the source's device, for kernels that push.
    pub(super) push: Stream,
    /// Kernels for each device; `None` in a mover without tables.
    pub(super) kernels: Option<[BlockCopyKernels; 2]>,
    pub(super) tables: PairTables,
    /// Recorded on the streams of an order. A wait refers to the event's last record at that
    /// moment, so one event serves all moves.
    pub(super) ready: Event,
    pub(super) room: Event,
    /// Of the ends of moves. An event is recorded again when its move is dropped.
    pub(super) arrived: FencePool,
}

impl Mover {
    /// A mover from `from` to `to`. Both may be the same device; kernels and copies then run on
    /// that device.
    ///
    /// # Errors
    /// [`MoveError::Zero`], [`MoveError::TooMany`]; [`MoveError::Memory`] for more pinned memory
    /// than the host has; the driver's error.
    #[track_caller]
    pub fn new(from: &Device, to: &Device, config: MoverConfig) -> Result<Self, MoveError> {
        let _site = cuda_driver::site::enter();
        config.check()?;
        let route = route(from, to, &config)?;
        config.check_memory(route)?;
        let ring = match route {
            Route::Host => Some(Ring::new(from, to, &config)?),
            Route::Push | Route::Pull => None,
        };
        Ok(Self {
            from: from.clone(),
            to: to.clone(),
            config,
            route,
            parking: Arc::default(),
            ring,
            push: Stream::new(from)?,
            kernels: match config.tables {
                0 => None,
                _ => Some([BlockCopyKernels::load(from)?, BlockCopyKernels::load(to)?]),
            },
            tables: PairTables::new(from, &config)?,
            ready: Event::new(from)?,
            room: Event::new(to)?,
            arrived: FencePool::default(),
        })
    }

    /// The device that moves read from.
    #[must_use]
    pub fn from(&self) -> &Device {
        &self.from
    }

    /// The device that moves write to.
    #[must_use]
    pub fn to(&self) -> &Device {
        &self.to
    }

    /// The path of the moves.
    #[must_use]
    pub fn route(&self) -> Route {
        self.route
    }

    /// Moves one range to another of the same length.
    ///
    /// # Ordering
    /// The move reads the source after the present work of [`after`](MoveOrder::after). It writes
    /// in the order of [`on`](MoveOrder::on), whose later work sees the bytes. The host does not
    /// wait. Later work of `after` does not wait either, so the source must not be written until it
    /// was returned ([`Move::reclaim_on`], [`Move::try_finish`]).
    ///
    /// # Errors
    /// [`MoveFailed`] with both ends, and with [`MoveError::Lengths`], [`MoveError::WrongDevice`]
    /// or the driver's error.
    #[track_caller]
    pub fn move_tensor<S: Send, D: Send>(
        &mut self,
        source: Held<S>,
        destination: Held<D>,
        order: MoveOrder<'_>,
    ) -> Result<Move<S, D>, MoveFailed<S, D>> {
        let _site = cuda_driver::site::enter();
        self.parking.sweep_oldest();
        let ends = [(&source.device, source.span), (&destination.device, destination.span)];
        let enqueued = self.check(ends, order).and_then(|()| {
            self.ordered(order, self.copy_lane(), |mover, started| {
                mover.copy(source.span, destination.span, order.on, started)
            })
        });
        self.conclude(enqueued, source.keeper, destination.keeper)
    }

    /// Drops the owners of dropped moves that have completed. Returns the number of those that have
    /// not.
    #[track_caller]
    pub fn sweep(&mut self) -> usize {
        let _site = cuda_driver::site::enter();
        self.parking.sweep()
    }

    /// Waits on the host for dropped moves, and drops their owners.
    ///
    /// # Errors
    /// The driver's error. Owners of moves whose wait failed are kept.
    #[track_caller]
    pub fn settle(&mut self) -> Result<(), DeviceError> {
        let _site = cuda_driver::site::enter();
        self.parking.settle()
    }

    fn check(
        &self,
        [(from, source), (to, destination)]: [(&Device, DeviceSpan); 2],
        order: MoveOrder<'_>,
    ) -> Result<(), Interrupted> {
        self.check_order(order)?;
        check_device("source", &self.from, from)?;
        check_device("destination", &self.to, to)?;
        let (source_bytes, destination_bytes) = (source.bytes(), destination.bytes());
        if source_bytes != destination_bytes {
            return Err(MoveError::Lengths { source_bytes, destination_bytes }.into());
        }
        Ok(check_apart(source, destination)?)
    }

    pub(super) fn check_order(&self, order: MoveOrder<'_>) -> Result<(), MoveError> {
        check_device("stream before the move", &self.from, order.after.device())?;
        check_device("stream of the move", &self.to, order.on.device())
    }

    /// Enqueues `work` on `lane`, after the present work and before the later work of the streams
    /// of `order`.
    ///
    /// `work` sets its second argument when it has enqueued an operation.
    pub(super) fn ordered(
        &mut self,
        order: MoveOrder<'_>,
        lane: MovePath,
        work: impl FnOnce(&mut Self, &mut bool) -> Result<(), MoveError>,
    ) -> Result<Fences, Interrupted> {
        // Bound once for all calls of the lane's device.
        let device = match lane {
            MovePath::Push => self.from.clone(),
            MovePath::Order | MovePath::Ring => self.to.clone(),
        };
        let bound = device.run(|_| Ok(self.ordered_until(order, lane, work)));
        let arrived = bound.map_err(Interrupted::from).flatten()?;
        let mut fences = Fences { arrived: Some(arrived), ..Fences::default() };
        if let (MovePath::Ring, Some(ring)) = (lane, &self.ring) {
            let sent = Fence::without_event(&ring.down);
            guard!("multigpu.relayed-on-sender", fences.parts.push(sent));
        }
        Ok(fences)
    }

    /// Like [`ordered`](Mover::ordered), with the one fence after the work's end. The caller has bound
    /// the context of the device where the lane ends.
    pub(super) fn ordered_until(
        &mut self,
        order: MoveOrder<'_>,
        lane: MovePath,
        work: impl FnOnce(&mut Self, &mut bool) -> Result<(), MoveError>,
    ) -> Result<Fence, Interrupted> {
        let streams = self.join(order, lane)?;
        // An event that cannot be had stops the move before it begins.
        self.arrived.prepare(streams[0].device(), 1)?;
        let under_way = |error: MoveError| {
            let parts = streams.iter().map(Fence::without_event).collect();
            Interrupted { error, fences: Fences { arrived: None, parts } }
        };
        let mut started = false;
        if let Err(error) = work(self, &mut started) {
            return Err(if started { under_way(error) } else { error.into() });
        }
        let arrived = self.arrived.record(&streams[0]).and_then(|arrived| {
            if lane != MovePath::Order {
                guard!("multigpu.order-waits-move", arrived.hold_back(order.on)?);
            }
            Ok(arrived)
        });
        arrived.map_err(|error| under_way(error.into()))
    }

    /// Makes the streams of `lane` wait for both sides of the order, and returns them, first the
    /// one that ends a move.
    fn join(
        &mut self,
        order: MoveOrder<'_>,
        lane: MovePath,
    ) -> Result<SmallVec<[Stream; 2]>, MoveError> {
        let (reader, writer) = match (lane, &mut self.ring) {
            (MovePath::Push, _) => (&self.push, &self.push),
            (MovePath::Ring, Some(ring)) => {
                guard!("multigpu.ring-refreshed", ring.refresh()?);
                (&ring.down, &ring.up)
            }
            _ => (order.on, order.on),
        };
        guard!("multigpu.source-order", reader.wait_for(order.after, &self.ready)?);
        if lane != MovePath::Order {
            guard!("multigpu.destination-order", writer.wait_for(order.on, &self.room)?);
        }
        Ok(match lane {
            MovePath::Ring => smallvec![writer.clone(), reader.clone()],
            MovePath::Order | MovePath::Push => smallvec![writer.clone()],
        })
    }

    /// The lane of a copy.
    pub(super) fn copy_lane(&self) -> MovePath {
        if self.ring.is_some() { MovePath::Ring } else { MovePath::Order }
    }

    /// Enqueues one copy on the copy lane.
    pub(super) fn copy(
        &mut self,
        source: DeviceSpan,
        destination: DeviceSpan,
        on: &Stream,
        started: &mut bool,
    ) -> Result<(), MoveError> {
        match &mut self.ring {
            Some(ring) => {
                *started = true;
                ring.copy(source, destination)
            }
            None => Ok(on.copy_between((&self.to, destination), (&self.from, source))?),
        }
    }

    pub(super) fn conclude<S: Send, D: Send>(
        &self,
        enqueued: Result<Fences, Interrupted>,
        source: S,
        destination: D,
    ) -> Result<Move<S, D>, MoveFailed<S, D>> {
        match enqueued {
            Ok(fences) => {
                let fences = guard!("multigpu.source-held", fences, else Fences::default());
                Ok(Move::new(&self.parking, fences, source, destination))
            }
            Err(Interrupted { error, fences }) => {
                let held = Withheld::new(&self.parking, fences, source, destination);
                let gpus = [self.from.ordinal(), self.to.ordinal()];
                Err(MoveFailed { error, held, gpus })
            }
        }
    }
}

impl MoverConfig {
    fn check(&self) -> Result<(), MoveError> {
        let Self { prefer: _, chunk_bytes, chunks, table_pairs, tables, kernel_blocks } = *self;
        let zero = |what| Err(MoveError::Zero { what });
        match self {
            Self { chunk_bytes: 0, .. } => return zero("bytes of a chunk"),
            Self { chunks: 0, .. } => return zero("chunks"),
            Self { table_pairs: 0, .. } => return zero("pairs of a table"),
            Self { kernel_blocks: 0, .. } => return zero("thread blocks"),
            _ => {}
        }
        check_count("chunks", chunks as u64, COUNT_MAX)?;
        check_count("bytes of a chunk", chunk_bytes, CHUNK_BYTES_MAX)?;
        check_count("tables", tables as u64, COUNT_MAX)?;
        check_count("pairs of a table", table_pairs as u64, TABLE_PAIRS_MAX)?;
        check_count("thread blocks", u64::from(kernel_blocks), KERNEL_BLOCKS_MAX)
    }

    /// Refuses to pin more memory than the host has. Without this check the system would end the process.
    fn check_memory(&self, route: Route) -> Result<(), MoveError> {
        let ring_bytes = match route {
            Route::Host => self.chunk_bytes.saturating_mul(self.chunks as u64),
            Route::Push | Route::Pull => 0,
        };
        let table_bytes = PairTables::table_bytes(self).saturating_mul(self.tables as u64);
        let bytes = ring_bytes.saturating_add(table_bytes);
        match HostPages::host_bytes() {
            Some(host_bytes) if bytes > host_bytes => Err(MoveError::Memory { bytes, host_bytes }),
            _ => Ok(()),
        }
    }
}

/// Refuses counts that are too large for any machine.
pub(super) fn check_count(what: &'static str, count: u64, most: u64) -> Result<(), MoveError> {
    if guard!("multigpu.counts-bounded", count > most, else false) {
        Err(MoveError::TooMany { what, count, most })
    } else {
        Ok(())
    }
}

/// Chooses the path between two devices, and enables their access to each other.
fn route(from: &Device, to: &Device, config: &MoverConfig) -> Result<Route, MoveError> {
    if from.shares_context(to) {
        return Ok(config.prefer);
    }
    let (push, pull) = (from.can_access(to)?, to.can_access(from)?);
    let route = match config.prefer {
        Route::Push if push => Route::Push,
        Route::Pull if pull => Route::Pull,
        _ => return Ok(Route::Host),
    };
    // Copies are direct only with access, whichever device they are enqueued on.
    if push {
        from.enable_access_to(to)?;
    }
    if pull {
        to.enable_access_to(from)?;
    }
    Ok(route)
}

pub(super) fn check_device(
    what: &'static str,
    expected: &Device,
    found: &Device,
) -> Result<(), MoveError> {
    let same = guard!(
        "multigpu.own-context",
        expected.shares_context(found),
        else expected.ordinal() == found.ordinal()
    );
    if same {
        return Ok(());
    }
    let device = expected.ordinal();
    if found.ordinal() != device {
        return Err(MoveError::WrongDevice { what, expected: device, found: found.ordinal() });
    }
    let (expected, found) = (expected.context(), found.context());
    Err(MoveError::WrongContext { what, device, expected, found })
}

/// Refuses memory that is both read and written.
pub(super) fn check_apart(source: DeviceSpan, destination: DeviceSpan) -> Result<(), MoveError> {
    let end = |span: DeviceSpan| span.address().saturating_add(span.bytes());
    let start = source.address().max(destination.address());
    match end(source).min(end(destination)).saturating_sub(start) {
        0 => Ok(()),
        bytes => Err(MoveError::Overlap { bytes }),
    }
}

/// The streams that carry a move.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum MovePath {
    /// The stream that the move is ordered on.
    Order,
    /// The mover's own stream, on the source's device.
    Push,
    /// The two streams of the ring.
    Ring,
}

/// A move that failed, with the part of it that was enqueued.
pub(super) struct Interrupted {
    pub(super) error: MoveError,
    pub(super) fences: Fences,
}

impl From<MoveError> for Interrupted {
    /// A failure before any work that uses the ends of the move was enqueued.
    fn from(error: MoveError) -> Self {
        Self { error, fences: Fences::default() }
    }
}

impl From<DeviceError> for Interrupted {
    fn from(error: DeviceError) -> Self {
        MoveError::from(error).into()
    }
}
