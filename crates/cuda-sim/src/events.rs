//! Events: points in streams that calls ask for and wait for.

use std::collections::BTreeMap;

use cuda_driver::ErrorCode;
use cuda_driver::guard;

use crate::races::KnownPoint;
use crate::state::{Answer, Machine};
use crate::streams::{Goal, Point};
use crate::work::Work;

#[derive(Debug)]
struct Event {
    device: u32,
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

/// All events, by handle.
#[derive(Debug, Default)]
pub(crate) struct Events(BTreeMap<u64, Event>);

impl Events {
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Removes all events of a device whose context ends.
    pub(crate) fn end_device(&mut self, device: u32) {
        self.0.retain(|_, event| event.device != device);
    }

    /// Forgets the known points of all records.
    pub(crate) fn forget_known(&mut self) {
        self.0.values_mut().for_each(|event| event.known = None);
    }

    /// After it completes, `queries` further queries of the event still answer "not ready".
    pub(crate) fn delay(&mut self, event: u64, queries: u64) {
        if let Some(event) = self.0.get_mut(&event) {
            event.late = queries;
        }
    }

    /// Stores when a record of `event` at `point` completed, unless the event was recorded again
    /// since.
    pub(crate) fn completed(&mut self, event: u64, point: Point, ended_ns: u64) {
        let record = self.0.get_mut(&event).and_then(|event| event.record.as_mut());
        if let Some(record) = record.filter(|record| record.point == point) {
            record.ended_ns = ended_ns;
        }
    }

    fn recorded(&mut self, event: u64, point: Point, known: Option<KnownPoint>) {
        if let Some(event) = self.0.get_mut(&event) {
            event.record = Some(Record { point, ended_ns: 0 });
            event.known = guard!("sim.last-record", known, else event.known.take().or(known));
        }
    }

    /// Counts one query of the delay of a completed event. Whether it is over.
    fn count_query(&mut self, event: u64) -> bool {
        let Some(found) = self.0.get_mut(&event) else { return true };
        let on_time = found.late == 0;
        found.late = found.late.saturating_sub(1);
        on_time
    }
}

impl Machine {
    fn event(&self, event: u64) -> Answer<&Event> {
        let event = self.events.0.get(&event).ok_or(ErrorCode::INVALID_HANDLE)?;
        self.health(event.device)?;
        Ok(event)
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
        self.events.0.insert(handle, Event { device, timing, record: None, known: None, late: 0 });
        Ok(handle)
    }

    pub(crate) fn event_destroy(&mut self, event: u64) -> Answer<()> {
        let event = self.events.0.remove(&event).ok_or(ErrorCode::INVALID_HANDLE)?;
        self.health(event.device)
    }

    pub(crate) fn event_record(&mut self, event: u64, stream: u64) -> Answer<()> {
        let (stream, device) = self.stream(stream)?;
        if self.event(event)?.device != device {
            return Err(ErrorCode::INVALID_HANDLE);
        }
        let point = self.enqueue(stream, "cuEventRecord", Work::Record(event));
        let known = self.races.recorded(stream, point.sequence, event);
        self.events.recorded(event, point, known);
        Ok(())
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
        let Some(record) = self.events.0.get(&event).and_then(|event| event.record) else {
            return true;
        };
        if !self.has_ended(Goal::Point(record.point)) {
            return false;
        }
        let on_time = self.events.count_query(event);
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
        self.events.delay(event, 0);
        self.health(device)
    }

    /// Records for the race check that the host knows the event, and so all work before it, to be
    /// complete.
    fn host_learns_event(&mut self, event: u64) {
        // A lost device did not run its work, so the host learns nothing from its events.
        let is_well = |event: &&Event| self.health(event.device).is_ok();
        let known =
            self.events.0.get(&event).filter(is_well).and_then(|event| event.known.as_ref());
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
        let is_done = |record: Record| self.streams.is_reached(Goal::Point(record.point));
        if is_late || !is_done(from) || !is_done(to) {
            return Err(ErrorCode::NOT_READY);
        }
        self.host_learns_event(from_event);
        self.host_learns_event(to_event);
        let nanos = i128::from(to.ended_ns) - i128::from(from.ended_ns);
        Ok(nanos as f32 / 1e6)
    }
}
