//! Virtual time: when everything would have happened on the machine that a profile describes.
//!
//! The host has a clock, and so has each stream. A call advances the host's clock by the call's
//! cost. A wait advances it to the end of the awaited work. An operation starts when its enqueuing
//! call is over, all earlier work of its stream has ended, and the engine that it needs is free.
//!
//! Time follows from the program and never influences it: only the scheduler chooses which stream
//! advances.

mod engine;
mod profile;
mod record;
mod traffic;
mod values;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

pub use profile::Profile;
pub use record::OperationTime;
use record::Record;
use traffic::Traffic;
pub(crate) use traffic::{SHARDS, TrafficCounter, shard};
use values::nanos;
pub use values::{Curve, Rate};

use crate::host_memory::HOST_END;
use crate::scheduler::Pace;
use crate::state::Machine;
use crate::streams::{DefaultOrder, Goal, Point, Stream};
use crate::work::{Operation, Work};
use engine::Engine;

/// Number of operation ends that are remembered for waits. For older operations, the end of their
/// stream counts.
const POINTS_MAX: usize = 4096;

/// Number of streams whose ends are remembered, including destroyed ones.
const STREAMS_MAX: usize = 256;

/// Number of operations that may run before their times are computed unasked.
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
    /// Access to so many mappings, which have the bytes together.
    SetAccess(u64),
    /// Unmapping of so many mappings, which have the bytes together.
    Unmap(u64),
}

/// The clocks, in nanoseconds since the machine was built.
#[derive(Debug)]
pub(crate) struct Clock {
    profile: Profile,
    host: u64,
    /// Of this, time in which the host waited.
    waited: u64,
    devices: Vec<DeviceTime>,
    /// End of the last operation of each stream.
    streams: HashMap<u64, u64>,
    /// Ends of the latest operations that others may wait for, by sequence number.
    points: BTreeMap<u64, u64>,
    /// For each stream, the operations that ran since times were last computed.
    untold: BTreeMap<u64, VecDeque<Charge>>,
    untold_count: usize,
    record: Record,
}

#[derive(Clone, Debug, Default)]
struct DeviceTime {
    down: LinkTime,
    up: LinkTime,
    /// The shared part of the set-up of copies in both directions.
    shared: Engine,
    /// The link from this device to other devices.
    peers: Engine,
    /// Memory and multiprocessors. Two kernels, or a kernel and a copy, would each get half; in sum
    /// that equals one after the other.
    memory: Engine,
    /// The latest end of an operation: of all operations, of those in blocking streams, and of
    /// those in the legacy default stream.
    end: u64,
    blocking: u64,
    legacy: u64,
}

#[derive(Clone, Debug, Default)]
struct LinkTime {
    engines: Vec<Engine>,
    wires: Engine,
}

/// A copy over the link, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct LinkCopy {
    /// Time on an engine before the bytes are sent.
    setup: u64,
    /// The first part of the set-up, on the resource that both directions share.
    shared: u64,
    /// Time on the link, without traffic in the other direction.
    transfer: u64,
}

/// The effect of the other direction on a copy over the link.
struct Beside<'d> {
    shared: &'d mut Engine,
    /// While these wires are busy, bytes take `percent` percent of their time.
    wires: &'d Engine,
    percent: u32,
}

impl LinkTime {
    /// Reserves the time of a copy, and returns its end. While the copy waits for shared resources,
    /// it holds its engine.
    fn place(&mut self, ready: u64, copy: LinkCopy, beside: Beside<'_>) -> u64 {
        let LinkCopy { setup, shared, transfer } = copy;
        // A gap may fit the transfer only without slowdown; the slowed transfer may need a longer
        // gap. Each round starts later or is the last, and the number of gaps is finite.
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

/// An operation that has run and whose time is not computed yet.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub(crate) struct Charge {
    device: u32,
    order: DefaultOrder,
    point: Point,
    /// The host's clock at the end of the enqueuing call.
    enqueued: u64,
    event: Option<u64>,
    /// Whether others may wait for this operation alone.
    awaited: bool,
    /// The kernel, or the call.
    name: &'static str,
    demand: Demand,
}

/// The demand of an operation on its device; numbers are bytes.
#[derive(Clone, Copy, Debug)]
enum Demand {
    Nothing,
    Wait(Point),
    Down(u64),
    Up(u64),
    Staged,
    Fetch(u64),
    Copy(u64),
    /// The copies and bytes in each direction: to the device, to the host, and within the device.
    Batch([(u64, u64); 3]),
    Fill(u64),
    Peer {
        from: u32,
        bytes: u64,
    },
    Kernel(Traffic),
    Compute(u64),
}

impl Clock {
    pub(crate) fn new(profile: Profile, devices: u32) -> Self {
        let engines = vec![Engine::default(); profile.copy_engines as usize];
        let link = LinkTime { engines, wires: Engine::default() };
        let device = DeviceTime { down: link.clone(), up: link, ..DeviceTime::default() };
        Self {
            profile,
            host: 0,
            waited: 0,
            devices: vec![device; devices as usize],
            streams: HashMap::new(),
            points: BTreeMap::new(),
            untold: BTreeMap::new(),
            untold_count: 0,
            record: Record::default(),
        }
    }

    pub(crate) fn now(&self) -> u64 {
        self.host
    }

    /// Of the host's clock, time in which it waited for devices.
    pub(crate) fn waited(&self) -> u64 {
        self.waited
    }

    fn wait_until(&mut self, end: u64) {
        self.waited = self.waited.saturating_add(end.saturating_sub(self.host));
        self.host = self.host.max(end);
    }

    pub(crate) fn advance_host(&mut self, nanos: u64) {
        self.host = self.host.saturating_add(nanos);
    }

    /// Advances the host's clock by a call's cost, whatever the result of the call. A cost that
    /// depends on a size is added by [`Clock::sized`].
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
            // The cost of these calls depends on a size.
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

    /// Advances the host's clock by the cost of a new primary context.
    pub(crate) fn created_context(&mut self) {
        self.advance_host(nanos(self.profile.context_create));
    }

    /// Advances the host's clock by the cost of a successful call for `bytes` bytes.
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

    /// Keeps the times of up to `limit` operations from now on, until they are taken.
    pub(crate) fn keep_times(&mut self, limit: usize) {
        self.record.limit = limit;
    }

    /// The times that were kept since they were last taken.
    pub(crate) fn take_times(&mut self) -> Vec<OperationTime> {
        self.record.take()
    }

    fn stream(&self, stream: u64) -> u64 {
        self.streams.get(&stream).copied().unwrap_or(0)
    }

    /// End of the operation at `point`. The operation has run.
    pub(crate) fn point(&self, point: Point) -> u64 {
        self.points.get(&point.sequence).copied().unwrap_or_else(|| self.stream(point.stream))
    }

    /// End of all work of a goal. It has run.
    fn end_of(&self, goal: Goal) -> u64 {
        match goal {
            Goal::Point(point) => self.point(point),
            Goal::Stream(stream) => self.stream(stream),
            Goal::Device(device) => self.devices[device as usize].end,
            Goal::Everything => self.devices.iter().map(|device| device.end).max().unwrap_or(0),
        }
    }

    fn note_point(&mut self, sequence: u64, end: u64) {
        self.points.insert(sequence, end);
        if self.points.len() > POINTS_MAX {
            self.points.pop_first();
        }
    }

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

    /// Of the operations that ran, the one that was ready first: its stream, and the time.
    fn first_ready(&self) -> Option<(u64, u64)> {
        let heads = self.untold.values().filter_map(VecDeque::front);
        let ready = heads.filter_map(|head| Some((self.ready_at(head)?, head.point)));
        let first = ready.min_by_key(|&(ready, point)| (ready, point.sequence))?;
        Some((first.1.stream, first.0))
    }

    /// The time at which the operation is ready: its call is over, and so is everything ordered
    /// before it. `None` while one of these times is not computed.
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
            // The bytes were already on their way while the host staged them.
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
            Demand::Compute(length) => time.memory.place(ready, length).saturating_add(length),
        }
    }
}

impl DeviceTime {
    /// End of a copy to the device that is ready at `ready` and uses the wires for `transfer`.
    fn place_down(&mut self, profile: &Profile, ready: u64, transfer: u64) -> u64 {
        let copy = link_copy(profile, profile.htod_setup, transfer);
        let percent = profile.duplex_percent;
        let beside = Beside { shared: &mut self.shared, wires: &self.up.wires, percent };
        self.down.place(ready, copy, beside)
    }

    /// End of a copy to the host, with the same arguments.
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
    // The shared part belongs to the set-up, so it cannot be longer.
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
            Work::Compute(nanos) => Self::Compute(nanos),
            Work::Record(_) => Self::Nothing,
            Work::Wait(point) => Self::Wait(point),
        }
    }
}

impl Machine {
    /// The demand of an operation that is about to run.
    pub(crate) fn charge(&mut self, (device, stream): (u32, u64), operation: &Operation) -> Charge {
        self.memory.traffic.take();
        let order = self.streams.get(stream).map(Stream::order);
        Charge {
            device,
            order: order.unwrap_or(DefaultOrder::NonBlocking),
            point: Point { stream, sequence: operation.sequence },
            enqueued: operation.enqueued_ns,
            event: if let Work::Record(event) = operation.work { Some(event) } else { None },
            awaited: matches!(operation.work, Work::Record(_) | Work::Fetch { .. }),
            name: record::name(&operation.work, operation.call),
            demand: Demand::of(&operation.work),
        }
    }

    /// Records that the operation has run. Its time is computed on demand.
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

    /// Computes the times of all operations that have run, always of the operation that was ready
    /// first. Hardware uses that order; the scheduler runs operations in another one.
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
            clock.record.note(&charge, ready, end);
            if let Some(event) = charge.event {
                self.events.completed(event, charge.point, end);
            }
        }
        self.clock.untold.retain(|_, charges| !charges.is_empty());
        if self.clock.streams.len() > STREAMS_MAX.max(2 * self.streams.count()) {
            self.clock.streams.retain(|&stream, _| self.streams.get(stream).is_some());
        }
    }

    /// Records that the host has waited for the goal.
    pub(crate) fn waited_for(&mut self, goal: Goal) {
        self.tell_time();
        let clock = &mut self.clock;
        let end = clock.end_of(goal);
        if end > clock.host {
            let end = end.saturating_add(nanos(clock.profile.wait_latency));
            clock.wait_until(end);
        }
    }

    /// Whether a query finds the goal reached: at the pace of the clock, by its time too.
    pub(crate) fn has_ended(&mut self, goal: Goal) -> bool {
        if !self.streams.is_reached(goal) {
            return false;
        }
        if self.scheduler.pace() != Pace::Timed {
            return true;
        }
        self.tell_time();
        self.clock.end_of(goal) <= self.clock.host
    }

    /// Records that a query, which does not wait, has shown the goal to be reached.
    pub(crate) fn seen(&mut self, goal: Goal) {
        self.tell_time();
        let clock = &mut self.clock;
        let end = match goal {
            Goal::Point(point) => clock.point(point),
            Goal::Stream(stream) => clock.stream(stream),
            Goal::Device(_) | Goal::Everything => return,
        };
        clock.wait_until(end);
    }
}
