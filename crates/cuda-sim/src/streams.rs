//! Streams as queues: what waits in each, and what may run next.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cuda_driver::ErrorCode;
use cuda_driver::guard;

use crate::graphs::Capture;
use crate::state::{Answer, Machine};
use crate::work::{Operation, Work};

/// The number by which CUDA also names the legacy default stream (`CU_STREAM_LEGACY`).
const LEGACY_ALIAS: u64 = 1;

#[derive(Debug)]
pub(crate) struct Stream {
    device: u32,
    order: DefaultOrder,
    /// Whether a test holds the stream.
    held: bool,
    /// Whether the stream is removed when its work has run.
    destroyed: bool,
    queue: VecDeque<Operation>,
    /// Whether what is launched becomes nodes of a graph.
    capture: Option<Capture>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum DefaultOrder {
    Legacy,
    /// Ordered in both directions.
    Blocking,
    /// Not ordered.
    NonBlocking,
}

/// A point in a stream. It is reached when all operations up to `sequence` have run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Point {
    pub(crate) stream: u64,
    pub(crate) sequence: u64,
}

/// What a wait waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Goal {
    Point(Point),
    Stream(u64),
    Device(u32),
    Everything,
}

/// Whether a stream argument names the legacy default stream.
pub(crate) fn is_legacy(stream: u64) -> bool {
    stream == 0 || stream == LEGACY_ALIAS
}

impl Stream {
    fn new(device: u32, order: DefaultOrder) -> Self {
        Self { device, order, held: false, destroyed: false, queue: VecDeque::new(), capture: None }
    }

    pub(crate) fn device(&self) -> u32 {
        self.device
    }

    pub(crate) fn order(&self) -> DefaultOrder {
        self.order
    }

    pub(crate) fn is_held(&self) -> bool {
        self.held
    }

    /// Operations that have not run, in their order.
    pub(crate) fn pending(&self) -> &VecDeque<Operation> {
        &self.queue
    }

    pub(crate) fn capture(&self) -> Option<&Capture> {
        self.capture.as_ref()
    }

    /// Whether the program created the stream and has not destroyed it.
    pub(crate) fn is_users(&self) -> bool {
        self.order != DefaultOrder::Legacy && !self.destroyed
    }

    /// Whether nothing of it that was enqueued before `sequence` waits to run.
    fn is_past(&self, sequence: u64) -> bool {
        self.queue.front().is_none_or(|next| next.sequence > sequence)
    }

    /// Whether the default streams order its work with that of `other`.
    fn is_ordered_with(&self, other: &Stream) -> bool {
        self.device == other.device
            && match self.order {
                DefaultOrder::NonBlocking => false,
                DefaultOrder::Blocking => other.order == DefaultOrder::Legacy,
                DefaultOrder::Legacy => other.order == DefaultOrder::Blocking,
            }
    }
}

/// All streams, and which of them may advance. What runs next, the scheduler chooses.
#[derive(Debug)]
pub(crate) struct Streams {
    /// By handle. A destroyed stream stays until its work has run.
    streams: BTreeMap<u64, Stream>,
    /// The legacy default stream of each device; 0 before its first context.
    legacy: Vec<u64>,
    /// Streams that may be captured, so that a call need not look at all streams.
    captured: BTreeSet<u64>,
}

impl Streams {
    pub(crate) fn new(devices: u32) -> Self {
        let legacy = vec![0; devices as usize];
        Self { streams: BTreeMap::new(), legacy, captured: BTreeSet::new() }
    }

    pub(crate) fn get(&self, handle: u64) -> Option<&Stream> {
        self.streams.get(&handle)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (u64, &Stream)> + Clone {
        self.streams.iter().map(|(&handle, stream)| (handle, stream))
    }

    /// Streams, destroyed ones with work among them.
    pub(crate) fn count(&self) -> usize {
        self.streams.len()
    }

    /// Handle of the default stream of a device that has a context.
    pub(crate) fn legacy(&self, device: u32) -> u64 {
        self.legacy[device as usize]
    }

    /// The stream of a program's handle, if it has not destroyed it.
    fn users(&self, handle: u64) -> Answer<&Stream> {
        let found = self.streams.get(&handle).filter(|stream| stream.is_users());
        found.ok_or(ErrorCode::INVALID_HANDLE)
    }

    fn open(&mut self, handle: u64, device: u32, order: DefaultOrder) {
        self.streams.insert(handle, Stream::new(device, order));
    }

    pub(crate) fn open_legacy(&mut self, handle: u64, device: u32) {
        self.legacy[device as usize] = handle;
        self.streams.insert(handle, Stream::new(device, DefaultOrder::Legacy));
    }

    /// Destroys a stream, which goes when its work has run. Returns its device.
    fn destroy(&mut self, handle: u64) -> Answer<u32> {
        let device = self.users(handle)?.device;
        if let Some(stream) = self.streams.get_mut(&handle) {
            stream.destroyed = true;
        }
        self.drop_if_over(handle);
        Ok(device)
    }

    /// Removes a destroyed stream whose work has run.
    pub(crate) fn drop_if_over(&mut self, handle: u64) {
        let is_over = |stream: &Stream| stream.destroyed && stream.queue.is_empty();
        if self.streams.get(&handle).is_some_and(is_over) {
            self.streams.remove(&handle);
        }
    }

    /// Removes all streams of a device whose context ends, and returns them.
    pub(crate) fn end_device(&mut self, device: u32) -> Vec<u64> {
        let of_device = self.all().filter(|(_, stream)| stream.device == device);
        let ended: Vec<u64> = of_device.map(|(handle, _)| handle).collect();
        self.streams.retain(|_, stream| stream.device != device);
        ended
    }

    pub(crate) fn push(&mut self, handle: u64, operation: Operation) {
        if let Some(stream) = self.streams.get_mut(&handle) {
            stream.queue.push_back(operation);
        }
    }

    /// Takes the next operation of a stream, with the stream's device.
    pub(crate) fn pop(&mut self, handle: u64) -> Option<(u32, Operation)> {
        let stream = self.streams.get_mut(&handle)?;
        Some((stream.device, stream.queue.pop_front()?))
    }

    /// Removes the operation at a point, if it has not run.
    pub(crate) fn take_back(&mut self, point: Point) -> bool {
        let Some(stream) = self.streams.get_mut(&point.stream) else { return false };
        stream.queue.retain(|operation| operation.sequence != point.sequence);
        true
    }

    /// Drops all pending work of a device.
    pub(crate) fn discard(&mut self, device: u32) {
        for stream in self.streams.values_mut().filter(|stream| stream.device == device) {
            stream.queue.clear();
        }
        self.streams.retain(|_, stream| !stream.destroyed || !stream.queue.is_empty());
    }

    /// Holds or releases a stream; 0 means the legacy default streams of all devices.
    pub(crate) fn hold(&mut self, handle: u64, held: bool) {
        for (&other, stream) in &mut self.streams {
            let is_default = handle == 0 && stream.order == DefaultOrder::Legacy;
            if is_default || other == handle {
                stream.held = held;
            }
        }
    }

    /// Forgets what pending operations are ordered after.
    pub(crate) fn forget_orders(&mut self) {
        for stream in self.streams.values_mut() {
            stream.queue.iter_mut().for_each(|operation| operation.order = None);
        }
    }

    pub(crate) fn is_reached(&self, goal: Goal) -> bool {
        let is_idle = |stream: &Stream| stream.queue.is_empty();
        match goal {
            Goal::Point(point) => {
                self.get(point.stream).is_none_or(|stream| stream.is_past(point.sequence))
            }
            Goal::Stream(stream) => self.get(stream).is_none_or(is_idle),
            Goal::Device(device) => {
                self.streams.values().all(|stream| stream.device != device || is_idle(stream))
            }
            Goal::Everything => self.streams.values().all(is_idle),
        }
    }

    /// The streams whose next operation can run, the oldest stream first.
    pub(crate) fn ready(&self) -> Vec<u64> {
        let ready = self.all().filter(|(_, stream)| self.is_ready(stream));
        ready.map(|(handle, _)| handle).collect()
    }

    /// The streams whose next operation can run and that `goal` has to wait for.
    pub(crate) fn ready_towards(&self, goal: Goal) -> Vec<u64> {
        let mut needed = self.of_goal(goal);
        let mut ready = Vec::new();
        let mut at = 0;
        while let Some(&handle) = needed.get(at) {
            at += 1;
            let Some(stream) = self.get(handle) else { continue };
            let Some(next) = stream.queue.front() else { continue };
            if self.is_ready(stream) {
                ready.push(handle);
                continue;
            }
            for earlier in self.waited_for_by(stream, next) {
                if !needed.contains(&earlier) {
                    needed.push(earlier);
                }
            }
        }
        ready
    }

    /// The streams with work that belongs to `goal`.
    fn of_goal(&self, goal: Goal) -> Vec<u64> {
        let is_of = |handle: u64, stream: &Stream| match goal {
            Goal::Point(point) => handle == point.stream,
            Goal::Stream(wanted) => handle == wanted,
            Goal::Device(device) => stream.device == device,
            Goal::Everything => true,
        };
        let of = self.all().filter(|&(handle, stream)| is_of(handle, stream));
        of.filter(|(_, stream)| !stream.queue.is_empty()).map(|(handle, _)| handle).collect()
    }

    /// The streams that block operation `next` at the head of `stream`.
    fn waited_for_by(&self, stream: &Stream, next: &Operation) -> Vec<u64> {
        let mut streams = Vec::new();
        if let Work::Wait(point) = next.work
            && !self.is_reached(Goal::Point(point))
        {
            streams.push(point.stream);
        }
        let is_earlier = |other: &Stream| {
            other.queue.front().is_some_and(|operation| operation.sequence < next.sequence)
        };
        let earlier =
            self.all().filter(|(_, other)| stream.is_ordered_with(other) && is_earlier(other));
        streams.extend(earlier.map(|(handle, _)| handle));
        streams
    }

    fn is_ready(&self, stream: &Stream) -> bool {
        let Some(next) = stream.queue.front().filter(|_| !stream.held) else { return false };
        if let Work::Wait(point) = next.work
            && !self.is_reached(Goal::Point(point))
        {
            return false;
        }
        self.is_after_defaults(stream, next.sequence)
    }

    /// Whether the ordering with the legacy default stream allows operation `sequence` of `stream`
    /// to run.
    fn is_after_defaults(&self, stream: &Stream, sequence: u64) -> bool {
        match stream.order {
            DefaultOrder::NonBlocking => true,
            DefaultOrder::Blocking => {
                self.get(self.legacy(stream.device)).is_none_or(|legacy| legacy.is_past(sequence))
            }
            DefaultOrder::Legacy => self
                .streams
                .values()
                .all(|other| !stream.is_ordered_with(other) || other.is_past(sequence)),
        }
    }

    /// Begins to capture a stream.
    pub(crate) fn begin_capture(&mut self, handle: u64, capture: Capture) -> Answer<()> {
        let found = self.streams.get_mut(&handle).ok_or(ErrorCode::INVALID_HANDLE)?;
        if found.capture.is_some() {
            return Err(ErrorCode::ILLEGAL_STATE);
        }
        found.capture = Some(capture);
        self.captured.insert(handle);
        Ok(())
    }

    pub(crate) fn end_capture(&mut self, handle: u64) -> Option<Capture> {
        let capture = self.streams.get_mut(&handle)?.capture.take()?;
        self.captured.remove(&handle);
        Some(capture)
    }

    pub(crate) fn capture_mut(&mut self, handle: u64) -> Option<&mut Capture> {
        self.streams.get_mut(&handle)?.capture.as_mut()
    }

    /// The streams that are captured.
    pub(crate) fn captured(&self) -> impl Iterator<Item = (&Stream, &Capture)> {
        let streams = self.captured.iter().filter_map(|stream| self.streams.get(stream));
        streams.filter_map(|stream| Some((stream, stream.capture.as_ref()?)))
    }
}

impl Machine {
    /// Table key and device of a stream argument, for a call that cannot be captured.
    pub(crate) fn stream(&self, stream: u64) -> Answer<(u64, u32)> {
        let (stream, device) = self.stream_or_capture(stream)?;
        let capture = self.streams.get(stream).and_then(Stream::capture);
        match guard!("sim.capture-takes-launches", capture, else None) {
            Some(capture) => Err(capture.invalidate()),
            None => Ok((stream, device)),
        }
    }

    /// Table key and device of a stream argument. 0 is the current context's default stream; any
    /// other stream needs no current context.
    pub(crate) fn stream_or_capture(&self, stream: u64) -> Answer<(u64, u32)> {
        if is_legacy(stream) {
            let current = self.current()?;
            guard!("sim.capture-legacy", self.may_use_legacy(current)?);
            return Ok((self.streams.legacy(current), current));
        }
        let device = self.streams.users(stream)?.device;
        self.health(device)?;
        Ok((stream, device))
    }

    pub(crate) fn stream_create(&mut self, blocking: bool) -> Answer<u64> {
        let device = self.current()?;
        let order = if blocking { DefaultOrder::Blocking } else { DefaultOrder::NonBlocking };
        let handle = self.new_handle();
        self.streams.open(handle, device, order);
        Ok(handle)
    }

    pub(crate) fn stream_destroy(&mut self, stream: u64) -> Answer<()> {
        let device = self.streams.destroy(stream)?;
        self.races.stream_ended(stream);
        self.health(device)
    }

    pub(crate) fn stream_synchronize(&mut self, stream: u64) -> Answer<()> {
        let (stream, device) = self.stream(stream)?;
        self.may_wait()?;
        self.wait("cuStreamSynchronize", Goal::Stream(stream))?;
        self.health(device)
    }

    pub(crate) fn stream_query(&mut self, stream: u64) -> Answer<bool> {
        let (stream, _) = self.stream(stream)?;
        self.may_wait()?;
        let is_idle = self.has_ended(Goal::Stream(stream));
        if is_idle {
            self.seen(Goal::Stream(stream));
            self.host_learns(Goal::Stream(stream));
        }
        self.queried("cuStreamQuery", stream, is_idle);
        Ok(is_idle)
    }

    pub(crate) fn stream_context(&self, stream: u64) -> Answer<u64> {
        let (_, device) = self.stream_or_capture(stream)?;
        self.contexts.of_device(device).ok_or(ErrorCode::CONTEXT_IS_DESTROYED)
    }
}
