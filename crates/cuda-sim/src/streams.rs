//! Streams as queues, and events as points in them.

use std::collections::VecDeque;

use cuda_driver::ErrorCode;
use cuda_driver::guard;

use crate::graphs::Capture;
use crate::races::KnownPoint;
use crate::scheduler::Goal;
use crate::state::{Answer, Machine};
use crate::work::{Operation, Work};

/// The number by which CUDA also names the legacy default stream (`CU_STREAM_LEGACY`).
const LEGACY_ALIAS: u64 = 1;

/// The lowest and the highest priority of a stream, as on an H100.
const STREAM_PRIORITIES: (i32, i32) = (0, -5);

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) device: u32,
    pub(crate) order: DefaultOrder,
    /// The requested priority. Hardware guarantees no effect, so the scheduler ignores it.
    priority: i32,
    /// Whether a test holds the stream.
    pub(crate) held: bool,
    /// Whether the stream is removed when its work has run.
    pub(crate) destroyed: bool,
    pub(crate) queue: VecDeque<Operation>,
    /// Whether what is launched becomes nodes of a graph.
    pub(crate) capture: Option<Capture>,
}

/// How a stream is ordered with the legacy default stream of its context.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum DefaultOrder {
    Legacy,
    /// Ordered in both directions.
    Blocking,
    /// Not ordered.
    NonBlocking,
}

impl Stream {
    fn new(device: u32, order: DefaultOrder) -> Self {
        Self {
            device,
            order,
            priority: 0,
            held: false,
            destroyed: false,
            queue: VecDeque::new(),
            capture: None,
        }
    }

    pub(crate) fn legacy(device: u32) -> Self {
        Self::new(device, DefaultOrder::Legacy)
    }

    /// Whether the program created the stream and has not destroyed it.
    pub(crate) fn is_users(&self) -> bool {
        self.order != DefaultOrder::Legacy && !self.destroyed
    }
}

/// A point in a stream. It is reached when all operations up to `sequence` have run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Point {
    pub(crate) stream: u64,
    pub(crate) sequence: u64,
}

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) device: u32,
    timing: bool,
    record: Option<Record>,
    /// The known point of the last record, for the race check.
    known: Option<KnownPoint>,
    /// Queries that still answer "not ready" after completion.
    late: u64,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    point: Point,
    /// Virtual time at which the event completed, in nanoseconds.
    ended_ns: u64,
}

impl Event {
    /// Forgets the known point of the last record.
    pub(crate) fn forget_known(&mut self) {
        self.known = None;
    }
}

/// Whether a stream argument names the legacy default stream.
pub(crate) fn is_legacy(stream: u64) -> bool {
    stream == 0 || stream == LEGACY_ALIAS
}

impl Machine {
    /// Table key and device of a stream argument, for a call that cannot be captured.
    pub(crate) fn stream(&self, stream: u64) -> Answer<(u64, u32)> {
        let (stream, device) = self.stream_or_capture(stream)?;
        let capture = &self.streams[&stream].capture;
        match guard!("sim.capture-takes-launches", capture, else &None) {
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
            return Ok((self.devices[current as usize].legacy_stream, current));
        }
        let found = self.streams.get(&stream).filter(|stream| stream.is_users());
        let device = found.ok_or(ErrorCode::INVALID_HANDLE)?.device;
        self.health(device)?;
        Ok((stream, device))
    }

    fn event(&self, event: u64) -> Answer<&Event> {
        let event = self.events.get(&event).ok_or(ErrorCode::INVALID_HANDLE)?;
        self.health(event.device)?;
        Ok(event)
    }

    pub(crate) fn stream_priority(&self, stream: u64) -> Answer<i32> {
        let (stream, _) = self.stream_or_capture(stream)?;
        Ok(self.streams[&stream].priority)
    }

    pub(crate) fn stream_create(&mut self, blocking: bool, priority: i32) -> Answer<u64> {
        let device = self.current()?;
        let order = if blocking { DefaultOrder::Blocking } else { DefaultOrder::NonBlocking };
        let handle = self.new_handle();
        let (least, greatest) = STREAM_PRIORITIES;
        let stream =
            Stream { priority: priority.clamp(greatest, least), ..Stream::new(device, order) };
        self.streams.insert(handle, stream);
        Ok(handle)
    }

    pub(crate) fn stream_destroy(&mut self, stream: u64) -> Answer<()> {
        let found = self.streams.get_mut(&stream).filter(|stream| stream.is_users());
        let found = found.ok_or(ErrorCode::INVALID_HANDLE)?;
        found.destroyed = true;
        let device = found.device;
        self.races.stream_ended(stream);
        if found.queue.is_empty() {
            self.streams.remove(&stream);
        }
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
        self.devices[device as usize].context.ok_or(ErrorCode::CONTEXT_IS_DESTROYED)
    }

    pub(crate) fn stream_wait_event(&mut self, stream: u64, event: u64) -> Answer<()> {
        let (stream, _) = self.stream(stream)?;
        let found = self.event(event)?;
        let known = found.known.clone();
        if let Some(record) = found.record {
            let point = self.enqueue(stream, "cuStreamWaitEvent", Work::Wait(record.point));
            if let Some(known) = known {
                self.races.waits(stream, point.sequence, event, &known);
            }
        }
        Ok(())
    }

    pub(crate) fn event_create(&mut self, timing: bool) -> Answer<u64> {
        let device = self.current()?;
        let handle = self.new_handle();
        self.events.insert(handle, Event { device, timing, record: None, known: None, late: 0 });
        Ok(handle)
    }

    pub(crate) fn event_destroy(&mut self, event: u64) -> Answer<()> {
        let event = self.events.remove(&event).ok_or(ErrorCode::INVALID_HANDLE)?;
        self.health(event.device)
    }

    pub(crate) fn event_record(&mut self, event: u64, stream: u64) -> Answer<()> {
        let (stream, device) = self.stream(stream)?;
        if self.event(event)?.device != device {
            return Err(ErrorCode::INVALID_HANDLE);
        }
        let point = self.enqueue(stream, "cuEventRecord", Work::Record(event));
        let known = self.races.recorded(stream, point.sequence, event);
        if let Some(event) = self.events.get_mut(&event) {
            event.record = Some(Record { point, ended_ns: 0 });
            event.known = guard!("sim.last-record", known, else event.known.take().or(known));
        }
        Ok(())
    }

    /// Stores when a record of `event` at `point` completed, unless the event was recorded again
    /// since.
    pub(crate) fn event_completed(&mut self, event: u64, point: Point, ended_ns: u64) {
        let record = self.events.get_mut(&event).and_then(|event| event.record.as_mut());
        if let Some(record) = record.filter(|record| record.point == point) {
            record.ended_ns = ended_ns;
        }
    }

    pub(crate) fn event_query(&mut self, event: u64) -> Answer<bool> {
        self.event(event)?;
        self.may_wait()?;
        let is_done = guard!("sim.query-first", self.look(event), else {
            self.go_on_after_query();
            self.look(event)
        });
        self.queried("cuEventQuery", event, is_done);
        Ok(is_done)
    }

    /// Whether an event has completed and its ordered delay is over. Counts as one query of the
    /// delay.
    fn look(&mut self, event: u64) -> bool {
        let Some(record) = self.events.get(&event).and_then(|event| event.record) else {
            return true;
        };
        if !self.has_ended(Goal::Point(record.point)) {
            return false;
        }
        let Some(found) = self.events.get_mut(&event) else { return true };
        let on_time = found.late == 0;
        found.late = found.late.saturating_sub(1);
        if guard!("sim.late-tells-nothing", on_time, else true) {
            self.seen(Goal::Point(record.point));
            guard!("sim.query-tells", self.host_learns_event(event));
        }
        on_time
    }

    pub(crate) fn event_synchronize(&mut self, event: u64) -> Answer<()> {
        let found = self.event(event)?;
        let (device, record) = (found.device, found.record);
        self.may_wait()?;
        if let Some(record) = record {
            self.wait("cuEventSynchronize", Goal::Point(record.point))?;
            self.host_learns_event(event);
        }
        if let Some(event) = self.events.get_mut(&event) {
            event.late = 0;
        }
        self.health(device)
    }

    /// Records for the race check that the host knows the event, and so all work before it, to be
    /// complete.
    fn host_learns_event(&mut self, event: u64) {
        // A lost device did not run its work, so the host learns nothing from its events.
        let is_well = |event: &&Event| self.devices[event.device as usize].poison.is_none();
        let known = self.events.get(&event).filter(is_well).and_then(|event| event.known.as_ref());
        if let Some(known) = known {
            self.races.host_knows(known);
        }
    }

    /// Virtual time between two events, in milliseconds.
    pub(crate) fn event_elapsed(&mut self, from_event: u64, to_event: u64) -> Answer<f32> {
        self.tell_time();
        let (start, end) = (self.event(from_event)?, self.event(to_event)?);
        let (Some(from), Some(to)) = (start.record, end.record) else {
            return Err(ErrorCode::INVALID_HANDLE);
        };
        if !start.timing || !end.timing || start.device != end.device {
            return Err(ErrorCode::INVALID_HANDLE);
        }
        let is_late = start.late > 0 || end.late > 0;
        let is_done = |record: Record| self.is_reached(Goal::Point(record.point));
        if is_late || !is_done(from) || !is_done(to) {
            return Err(ErrorCode::NOT_READY);
        }
        self.host_learns_event(from_event);
        self.host_learns_event(to_event);
        let nanos = i128::from(to.ended_ns) - i128::from(from.ended_ns);
        Ok(nanos as f32 / 1e6)
    }

    pub(crate) fn delay_event(&mut self, event: u64, steps: u64) {
        if let Some(event) = self.events.get_mut(&event) {
            event.late = steps;
        }
    }
}
