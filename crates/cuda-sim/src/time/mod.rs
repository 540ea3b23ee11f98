//! Virtual time: when everything would have happened on the machine that a profile describes.
//!
//! There is one clock for the host and one for each stream. A call moves the host's clock by what it
//! costs; a wait moves it to the end of what is waited for. An operation begins when the call that
//! enqueued it was over, all before it in its stream has ended, and the engine it needs is free.
//!
//! Time follows from what the program does and never steers it: which stream advances is the
//! scheduler's choice alone.

mod engine;
mod profile;
mod traffic;
mod values;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

pub use profile::{Profile, ProfileError};
use traffic::Traffic;
pub(crate) use traffic::{SHARDS, TrafficCounter, shard};
use values::nanos;
pub use values::{Curve, Rate};

use crate::host_memory::HOST_END;
use crate::scheduler::Goal;
use crate::state::Machine;
use crate::streams::{DefaultOrder, Point};
use crate::work::{Operation, Work};
use engine::Engine;

/// Ends of operations that are remembered for waits; of older ones, the end of their stream counts.
const POINTS_MAX: usize = 4096;

/// Streams whose ends are remembered, however many of them are gone.
const STREAMS_MAX: usize = 256;

/// Operations that run before their time is told unasked.
const UNTOLD_MAX: usize = 1024;

/// A call whose cost depends on a size.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum SizedCall {
    PinnedAlloc,
    PinnedFree,
    Register,
    Unregister,
    Create,
    Map,
    Release,
    /// Staging of pageable memory.
    Pageable,
    /// Of so many mappings, which have the bytes together.
    SetAccess(u64),
    /// Likewise.
    Unmap(u64),
}

/// The clocks, in nanoseconds since the machine was built.
#[derive(Debug)]
pub(crate) struct Clock {
    profile: Profile,
    host: u64,
    devices: Vec<DeviceTime>,
    /// End of the last operation of each stream.
    streams: HashMap<u64, u64>,
    /// Ends of the latest operations that something may wait for, by sequence number.
    points: BTreeMap<u64, u64>,
    /// By stream, the operations that have run since time was told last.
    untold: BTreeMap<u64, VecDeque<Charge>>,
    untold_count: usize,
}

/// What a device's operations compete for.
#[derive(Clone, Debug, Default)]
struct DeviceTime {
    down: LinkTime,
    up: LinkTime,
    /// What copies in both directions set up with, one after the other.
    shared: Engine,
    /// Between this device and others, in the direction away from it.
    peers: Engine,
    /// Memory and multiprocessors: two kernels, or a kernel and a copy, have half of it each, which
    /// in sum is the same as one after the other.
    memory: Engine,
    /// End of the operation that ends last: of all, of those in blocking streams, and of those in the
    /// legacy default stream.
    end: u64,
    blocking: u64,
    legacy: u64,
}

/// One direction of the link to the host.
#[derive(Clone, Debug, Default)]
struct LinkTime {
    engines: Vec<Engine>,
    wires: Engine,
}

/// A copy over the link, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct LinkCopy {
    /// On an engine, before the bytes.
    setup: u64,
    /// Of which first this on what both directions share.
    shared: u64,
    /// On the wires, alone.
    transfer: u64,
}

/// What a copy over the link meets of the other direction.
struct Beside<'d> {
    shared: &'d mut Engine,
    /// While these are busy, bytes take `percent` percent.
    wires: &'d Engine,
    percent: u32,
}

impl LinkTime {
    /// Places a copy; its end. The time that it waits for what it shares, its engine is held.
    fn place(&mut self, ready: u64, copy: LinkCopy, beside: Beside<'_>) -> u64 {
        let LinkCopy { setup, shared, transfer } = copy;
        // Where there is room for the transfer it may be slowed, and then need more room, and so on:
        // each turn begins later or is the last, and there are only so many gaps.
        let mut on_wires = transfer;
        loop {
            let length = setup.saturating_add(on_wires);
            let free = |engine: &&mut Engine| engine.earliest(ready, length);
            let Some(engine) = self.engines.iter_mut().min_by_key(free) else { return ready };
            let start = engine.earliest(ready, length);
            let set_up = beside.shared.earliest(start, shared);
            let begin = self.wires.earliest(set_up.saturating_add(setup), on_wires);
            let end = beside.wires.beside(begin, transfer, beside.percent);
            if end - begin <= on_wires {
                beside.shared.take(set_up, set_up.saturating_add(shared));
                self.wires.take(begin, end);
                engine.take(start, end);
                return end;
            }
            on_wires = end - begin;
        }
    }
}

/// An operation that has run, and whose time is not told yet.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub(crate) struct Charge {
    device: u32,
    order: DefaultOrder,
    point: Point,
    /// The host's clock when its call was over.
    enqueued: u64,
    /// The event that it completes.
    event: Option<u64>,
    /// Whether something may wait for it alone.
    awaited: bool,
    demand: Demand,
}

/// What an operation asks of its device; numbers are bytes.
#[derive(Clone, Copy, Debug)]
enum Demand {
    Nothing,
    Wait(Point),
    Down(u64),
    Up(u64),
    Staged,
    Fetch(u64),
    Copy(u64),
    /// Copies and bytes of each direction: down, up, and within the device.
    Batch([(u64, u64); 3]),
    Fill(u64),
    Peer {
        from: u32,
        bytes: u64,
    },
    Kernel(Traffic),
}

impl Clock {
    pub(crate) fn new(profile: Profile, devices: u32) -> Self {
        let engines = vec![Engine::default(); profile.copy_engines as usize];
        let link = LinkTime { engines, wires: Engine::default() };
        let device = DeviceTime { down: link.clone(), up: link, ..DeviceTime::default() };
        Self {
            profile,
            host: 0,
            devices: vec![device; devices as usize],
            streams: HashMap::new(),
            points: BTreeMap::new(),
            untold: BTreeMap::new(),
            untold_count: 0,
        }
    }

    /// The host's clock.
    pub(crate) fn now(&self) -> u64 {
        self.host
    }

    pub(crate) fn advance_host(&mut self, nanos: u64) {
        self.host = self.host.saturating_add(nanos);
    }

    /// Moves the host's clock on by what a call costs, whatever it answers; what depends on a size
    /// comes on top ([`Clock::sized`]).
    pub(crate) fn call(&mut self, call: &'static str) {
        let profile = &self.profile;
        let cost = match call {
            "cuCtxGetCurrent" | "cuCtxSetCurrent" | "cuCtxGetDevice" => profile.context_call,
            "cuLaunchKernel" => profile.launch_call,
            "cuGraphLaunch" => profile.graph_launch_call,
            "cuMemcpyHtoDAsync" | "cuMemcpyPeerAsync" | "cuMemcpyBatchAsync" => profile.htod_call,
            "cuMemcpyDtoHAsync" => profile.dtoh_call,
            "cuMemcpyDtoDAsync" => profile.dtod_call,
            "cuMemsetD8Async" => profile.fill_call,
            "cuEventRecord" => profile.event_record_call,
            "cuEventQuery" | "cuStreamQuery" => profile.query_call,
            "cuMemAddressReserve" => profile.reserve,
            "cuMemAddressFree" => profile.address_free,
            "cuMemAlloc" => profile.device_alloc,
            "cuMemFree" => profile.device_free,
            "cuModuleLoadDataEx" => profile.module_load,
            // What they cost depends on a size.
            "cuMemHostAlloc"
            | "cuMemFreeHost"
            | "cuMemHostRegister"
            | "cuMemHostUnregister"
            | "cuMemCreate"
            | "cuMemMap"
            | "cuMemRelease"
            | "cuMemSetAccess"
            | "cuMemUnmap" => return,
            _ => profile.other_call,
        };
        self.advance_host(nanos(cost));
    }

    /// Moves the host's clock on by what a new primary context costs.
    pub(crate) fn created_context(&mut self) {
        self.advance_host(nanos(self.profile.context_create));
    }

    /// Moves the host's clock on by what a successful call costs for `bytes` bytes.
    pub(crate) fn sized(&mut self, call: SizedCall, bytes: u64) {
        let profile = &self.profile;
        let several = |curve: &Curve, mappings: u64, percent: u32| match mappings {
            0 => nanos(profile.other_call),
            1 => curve.nanos(bytes),
            many => {
                curve.nanos(bytes / many).saturating_mul(many.saturating_mul(percent.into())) / 100
            }
        };
        let cost = match call {
            SizedCall::PinnedAlloc => profile.pinned_alloc.nanos(bytes),
            SizedCall::PinnedFree => profile.pinned_free.nanos(bytes),
            SizedCall::Register => profile.register.nanos(bytes),
            SizedCall::Unregister => profile.unregister.nanos(bytes),
            SizedCall::Create => profile.create.nanos(bytes),
            SizedCall::Map => profile.map.nanos(bytes),
            SizedCall::Release => profile.release.nanos(bytes),
            SizedCall::Pageable => profile.pageable.nanos(bytes),
            SizedCall::SetAccess(mappings) => {
                several(&profile.set_access, mappings, profile.set_access_many_percent)
            }
            SizedCall::Unmap(mappings) => {
                several(&profile.unmap, mappings, profile.unmap_many_percent)
            }
        };
        self.advance_host(cost);
    }

    fn stream(&self, stream: u64) -> u64 {
        self.streams.get(&stream).copied().unwrap_or(0)
    }

    /// End of the operation at `point`, which has run.
    pub(crate) fn point(&self, point: Point) -> u64 {
        self.points.get(&point.sequence).copied().unwrap_or_else(|| self.stream(point.stream))
    }

    fn note_point(&mut self, sequence: u64, end: u64) {
        self.points.insert(sequence, end);
        if self.points.len() > POINTS_MAX {
            self.points.pop_first();
        }
    }

    /// An operation ends at `end`.
    fn ended(&mut self, charge: &Charge, end: u64) {
        let last = self.streams.entry(charge.point.stream).or_default();
        *last = (*last).max(end);
        let device = &mut self.devices[charge.device as usize];
        device.end = device.end.max(end);
        match charge.order {
            DefaultOrder::NonBlocking => {}
            DefaultOrder::Blocking => device.blocking = device.blocking.max(end),
            DefaultOrder::Legacy => device.legacy = device.legacy.max(end),
        }
    }

    /// The operation of all that have run which is ready first: its stream, and when.
    fn first_ready(&self) -> Option<(u64, u64)> {
        let heads = self.untold.values().filter_map(VecDeque::front);
        let ready = heads.filter_map(|head| Some((self.ready_at(head)?, head.point)));
        let first = ready.min_by_key(|&(ready, point)| (ready, point.sequence))?;
        Some((first.1.stream, first.0))
    }

    /// When the operation can begin: its call is over, and so is all that it is ordered after. None
    /// while the time of some of that is not told.
    fn ready_at(&self, charge: &Charge) -> Option<u64> {
        let next = |stream| self.untold.get(&stream).and_then(VecDeque::front);
        let is_told = |point: Point| {
            next(point.stream).is_none_or(|next| next.point.sequence > point.sequence)
        };
        if let Demand::Wait(point) = charge.demand
            && !is_told(point)
        {
            return None;
        }
        let latency = match charge.demand {
            Demand::Kernel(_) => self.profile.kernel_start_latency,
            _ => self.profile.start_latency,
        };
        let enqueued = charge.enqueued.saturating_add(nanos(latency));
        let mut ready = enqueued.max(self.stream(charge.point.stream));
        let around = match charge.order {
            DefaultOrder::NonBlocking => None,
            DefaultOrder::Blocking => Some(DefaultOrder::Legacy),
            DefaultOrder::Legacy => Some(DefaultOrder::Blocking),
        };
        if let Some(order) = around {
            let time = &self.devices[charge.device as usize];
            let untold = self.untold.values().filter_map(VecDeque::front).any(|other| {
                other.device == charge.device
                    && other.order == order
                    && other.point.sequence < charge.point.sequence
            });
            if untold {
                return None;
            }
            ready =
                ready.max(if order == DefaultOrder::Legacy { time.legacy } else { time.blocking });
        }
        Some(ready)
    }

    /// End of an operation that is ready at `ready`.
    fn place(&mut self, charge: &Charge, ready: u64) -> u64 {
        let profile = &self.profile;
        let time = &mut self.devices[charge.device as usize];
        let on_device = |time: &mut DeviceTime, length: u64| {
            let length = length.saturating_add(nanos(profile.dtod_setup));
            time.memory.place(ready, length).saturating_add(length)
        };
        match charge.demand {
            Demand::Nothing => ready,
            Demand::Wait(point) => {
                let is_other = point.stream != charge.point.stream;
                let latency = if is_other { nanos(profile.event_wait_latency) } else { 0 };
                ready.max(self.point(point).saturating_add(latency))
            }
            Demand::Down(bytes) => time.place_down(profile, ready, profile.htod.nanos(bytes)),
            Demand::Up(bytes) => time.place_up(profile, ready, profile.dtoh.nanos(bytes)),
            // The bytes were on their way while the host staged them.
            Demand::Staged => time.place_down(profile, ready, 0),
            Demand::Fetch(bytes) => {
                let wires = profile.dtoh.nanos(bytes);
                let staging = profile.pageable.nanos(bytes).saturating_sub(wires);
                time.place_up(profile, ready, wires).saturating_add(staging)
            }
            Demand::Copy(bytes) => on_device(time, profile.dtod.nanos(bytes)),
            Demand::Batch([down, up, within]) => {
                let setups = |copies: u64| copies.saturating_mul(nanos(profile.batch_setup));
                let length = |rate: Rate, (copies, bytes): (u64, u64)| {
                    setups(copies).saturating_add(rate.nanos(bytes))
                };
                let mut end = ready;
                if down.0 > 0 {
                    end = end.max(time.place_down(profile, ready, length(profile.htod, down)));
                }
                if up.0 > 0 {
                    end = end.max(time.place_up(profile, ready, length(profile.dtoh, up)));
                }
                if within.0 > 0 {
                    end = end.max(on_device(time, length(profile.dtod, within)));
                }
                end
            }
            Demand::Fill(bytes) => on_device(time, profile.fill.nanos(bytes)),
            Demand::Peer { from, bytes } => {
                let length = profile.peer.nanos(bytes);
                let peers = &mut self.devices[from as usize].peers;
                peers.place(ready, length).saturating_add(length)
            }
            Demand::Kernel(traffic) => time.place_kernel(profile, ready, traffic),
        }
    }
}

impl DeviceTime {
    /// End of a copy to the device that is ready at `ready` and takes the wires for `transfer`.
    fn place_down(&mut self, profile: &Profile, ready: u64, transfer: u64) -> u64 {
        let copy = link_copy(profile, profile.htod_setup, transfer);
        let percent = profile.duplex_percent;
        let beside = Beside { shared: &mut self.shared, wires: &self.up.wires, percent };
        self.down.place(ready, copy, beside)
    }

    /// Likewise of a copy to the host.
    fn place_up(&mut self, profile: &Profile, ready: u64, transfer: u64) -> u64 {
        let copy = link_copy(profile, profile.dtoh_setup, transfer);
        let percent = profile.duplex_percent;
        let beside = Beside { shared: &mut self.shared, wires: &self.down.wires, percent };
        self.up.place(ready, copy, beside)
    }

    /// End of a kernel that is ready at `ready` and moves `traffic`.
    fn place_kernel(&mut self, profile: &Profile, ready: u64, traffic: Traffic) -> u64 {
        let loading = profile.kernel_load.nanos(traffic.loaded);
        let moving = loading.saturating_add(profile.kernel_store.nanos(traffic.stored));
        let overhead = nanos(profile.kernel_overhead);
        let busy = overhead.saturating_add(moving);
        let start = self.memory.place(ready, busy);
        let mut end = start.saturating_add(busy);
        for (link, rate, bytes) in [
            (&mut self.down, profile.kernel_host_load, traffic.host_loaded),
            (&mut self.up, profile.kernel_host_store, traffic.host_stored),
        ] {
            if bytes > 0 {
                let length = rate.nanos(bytes);
                let begin = link.wires.place(start.saturating_add(overhead), length);
                end = end.max(begin.saturating_add(length));
            }
        }
        end
    }
}

fn link_copy(profile: &Profile, setup: Duration, transfer: u64) -> LinkCopy {
    // It is a part of the set-up, whatever the profile says.
    let shared = nanos(profile.shared_setup.min(setup));
    LinkCopy { setup: nanos(setup), shared, transfer }
}

impl Demand {
    fn of(work: &Work) -> Self {
        match *work {
            Work::Copy { source: (_, source), bytes, .. } if source < HOST_END => Self::Down(bytes),
            Work::Copy { destination: (_, to), bytes, .. } if to < HOST_END => Self::Up(bytes),
            Work::Copy { destination, source, bytes } if destination.0 != source.0 => {
                Self::Peer { from: source.0, bytes }
            }
            Work::Copy { bytes, .. } => Self::Copy(bytes),
            Work::CopyBatch(ref copies) => {
                let mut sums = [(0, 0); 3];
                for copy in copies {
                    let direction = match copy {
                        copy if copy.source < HOST_END => 0,
                        copy if copy.destination < HOST_END => 1,
                        _ => 2,
                    };
                    sums[direction].0 += 1;
                    sums[direction].1 += copy.bytes;
                }
                Self::Batch(sums)
            }
            Work::WriteStaged { .. } => Self::Staged,
            Work::Fetch { bytes, .. } => Self::Fetch(bytes),
            Work::Fill { bytes, .. } => Self::Fill(bytes),
            Work::Launch(_) => Self::Kernel(Traffic::default()),
            Work::Record(_) | Work::CallHost(_) => Self::Nothing,
            Work::Wait(point) => Self::Wait(point),
        }
    }
}

impl Machine {
    /// What the operation, which is about to run, asks of the device.
    pub(crate) fn charge(&mut self, (device, stream): (u32, u64), operation: &Operation) -> Charge {
        self.memory.traffic.take();
        let order = self.streams.get(&stream).map(|stream| stream.order);
        Charge {
            device,
            order: order.unwrap_or(DefaultOrder::NonBlocking),
            point: Point { stream, sequence: operation.sequence },
            enqueued: operation.enqueued_ns,
            event: if let Work::Record(event) = operation.work { Some(event) } else { None },
            awaited: matches!(operation.work, Work::Record(_) | Work::Fetch { .. }),
            demand: Demand::of(&operation.work),
        }
    }

    /// The operation has run. When, is told when somebody asks.
    pub(crate) fn charged(&mut self, mut charge: Charge) {
        if let Demand::Kernel(traffic) = &mut charge.demand {
            *traffic = self.memory.traffic.take();
        }
        self.clock.untold.entry(charge.point.stream).or_default().push_back(charge);
        self.clock.untold_count += 1;
        if self.clock.untold_count > UNTOLD_MAX {
            self.tell_time();
        }
    }

    /// Tells the time of every operation that has run: always of the one next that is ready first, as
    /// hardware takes them up, since the scheduler runs them in an order of its own.
    pub(crate) fn tell_time(&mut self) {
        while let Some((stream, ready)) = self.clock.first_ready() {
            let clock = &mut self.clock;
            let Some(charge) = clock.untold.get_mut(&stream).and_then(VecDeque::pop_front) else {
                break;
            };
            clock.untold_count -= 1;
            let end = clock.place(&charge, ready);
            if charge.awaited {
                clock.note_point(charge.point.sequence, end);
            }
            clock.ended(&charge, end);
            if let Some(event) = charge.event {
                self.event_completed(event, charge.point, end);
            }
        }
        self.clock.untold.retain(|_, charges| !charges.is_empty());
        if self.clock.streams.len() > STREAMS_MAX.max(2 * self.streams.len()) {
            self.clock.streams.retain(|stream, _| self.streams.contains_key(stream));
        }
    }

    /// The host has waited for the goal.
    pub(crate) fn waited_for(&mut self, goal: Goal) {
        self.tell_time();
        let clock = &mut self.clock;
        let end = match goal {
            Goal::Point(point) => clock.point(point),
            Goal::Stream(stream) => clock.stream(stream),
            Goal::Device(device) => clock.devices[device as usize].end,
            Goal::Everything => clock.devices.iter().map(|device| device.end).max().unwrap_or(0),
        };
        if end > clock.host {
            clock.host = end.saturating_add(nanos(clock.profile.wait_latency));
        }
    }

    /// A query, which waits for nothing, has told the host that the goal is reached.
    pub(crate) fn seen(&mut self, goal: Goal) {
        self.tell_time();
        let clock = &mut self.clock;
        let end = match goal {
            Goal::Point(point) => clock.point(point),
            Goal::Stream(stream) => clock.stream(stream),
            Goal::Device(_) | Goal::Everything => return,
        };
        clock.host = clock.host.max(end);
    }
}
