//! Which stream advances next, and how far the device runs while a host waits.

use cuda_driver::ErrorCode;
use cuda_driver::guard;

use crate::findings::{Finding, FindingKind};
use crate::state::{Answer, Machine};
use crate::streams::{DefaultOrder, Point, Stream};
use crate::work::{Operation, Work};

/// How far the devices advance on their own between the host's calls, and while the host waits.
///
/// At every pace, operations run in an order that streams, events and default streams allow. A
/// query reports the state at the moment of the query; operations that the pace allows run after
/// the answer. If a wait cannot end because of a held stream, everything else runs first. An
/// exploration ([`explore`](crate::explore())) chooses for itself and ignores the pace.
///
/// A machine begins with the pace of [`SimConfig::pace`](crate::SimConfig::pace);
/// [`SimDriver::set_pace`](crate::SimDriver::set_pace) changes it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum Pace {
    /// The default. After each query up to three operations run, as the seed chooses. A wait runs
    /// ready operations of any stream until it can end.
    #[default]
    Random,
    /// As late as is legal. Only waits run operations, and only those that they must wait for, in
    /// an order that the seed chooses. After the 65,536th query in a row one operation runs, so a
    /// program that polls in a loop ends, slowly.
    Slowest,
    /// One operation behind the host in each stream. When a call returns, the last enqueued
    /// operation of a stream has not run, unless the host waited for it. Every earlier operation
    /// has run, unless a hold, another stream or a default stream blocks it. A stream that waits
    /// for the last operation of another stream is blocked too. Waits and polling work as at the
    /// slowest pace.
    OneBehind,
    /// As early as is legal. When an enqueuing call returns, or a hold is released, every operation
    /// that can run has run.
    Fastest,
    /// By the virtual clock: operations run as at the fastest pace, and a query is answered "done" only if the work has
    /// ended by the host's clock, which the query does not move. A program then sees what it would see on the machine of
    /// the profile, at the time when it would. Fewer orders are tried than at other paces.
    Timed,
}

/// Maximum number of operations that run after a query at the random pace.
const QUERY_STEPS_MAX: usize = 3;

/// At the paces "slowest" and "one behind": number of queries in a row after which an operation
/// runs.
const QUERIES_MAX: u64 = 1 << 16;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Goal {
    Point(Point),
    Stream(u64),
    Device(u32),
    Everything,
}

impl Machine {
    /// Appends work to a stream. Nothing runs yet.
    pub(crate) fn enqueue(&mut self, stream: u64, call: &'static str, work: Work) -> Point {
        self.enqueued += 1;
        let sequence = self.next_sequence();
        if let Some(found) = self.streams.get_mut(&stream) {
            let enqueued_ns = self.clock.now();
            let place = (stream, found.device, found.order);
            let order = self.races.enqueued(place, sequence, || work.name(call));
            if let (Some(order), Work::Launch(launch)) = (&order, &work) {
                self.races.uses_module(launch.module, order);
            }
            found.queue.push_back(Operation { sequence, enqueued_ns, call, work, order });
        }
        self.trace_enqueued(stream);
        Point { stream, sequence }
    }

    pub(crate) fn is_reached(&self, goal: Goal) -> bool {
        let is_idle = |stream: &Stream| stream.queue.is_empty();
        match goal {
            Goal::Point(point) => self.streams.get(&point.stream).is_none_or(|stream| {
                stream.queue.front().is_none_or(|next| next.sequence > point.sequence)
            }),
            Goal::Stream(stream) => self.streams.get(&stream).is_none_or(is_idle),
            Goal::Device(device) => {
                self.streams.values().all(|stream| stream.device != device || is_idle(stream))
            }
            Goal::Everything => self.streams.values().all(is_idle),
        }
    }

    /// Waits, and the host then knows that the goal was reached.
    pub(crate) fn wait(&mut self, call: &'static str, goal: Goal) -> Answer<()> {
        self.run_until(call, goal)?;
        self.host_learns(goal);
        Ok(())
    }

    /// Waits on behalf of a call that frees or destroys something.
    pub(crate) fn wait_to_end(&mut self, call: &'static str, goal: Goal) -> Answer<()> {
        self.run_until(call, goal)?;
        if guard!("sim.implicit-waits", self.config.implicit_waits, else true) {
            self.host_learns(goal);
        }
        Ok(())
    }

    /// Runs operations of any streams, and stops as soon as the goal is reached.
    fn run_until(&mut self, call: &'static str, goal: Goal) -> Answer<()> {
        self.trace(|_| format!("host    waits in {call}"));
        while !self.is_reached(goal) {
            let advanced = match self.pace {
                Pace::Slowest | Pace::OneBehind if self.choices.is_none() => {
                    // A host that would hang still lets everything else run.
                    guard!("sim.wait-runs-no-more", self.step_towards(goal), else false)
                        || guard!("sim.hang-goes-on", self.step(), else false)
                }
                _ => self.step(),
            };
            if !advanced {
                self.note_stuck(call);
                return Err(ErrorCode::LAUNCH_TIMEOUT);
            }
        }
        self.waited_for(goal);
        Ok(())
    }

    fn note_stuck(&mut self, call: &'static str) {
        let held: Vec<String> = self
            .streams
            .iter()
            .filter(|(_, stream)| stream.held)
            .map(|(handle, stream)| format!("{handle:#x} with {} operations", stream.queue.len()))
            .collect();
        let detail = format!("the host waits for work behind held streams: {}", held.join(", "));
        self.findings.add(Finding::new(FindingKind::CannotComplete, call, detail));
    }

    /// Runs the next operation of one ready stream; returns false if no stream is ready.
    pub(crate) fn step(&mut self) -> bool {
        let ready = self.ready();
        self.step_one(&ready)
    }

    /// Runs the next operation of one of the ready streams `ready`; returns false if there is none.
    fn step_one(&mut self, ready: &[u64]) -> bool {
        if ready.is_empty() {
            return false;
        }
        let choice = match &mut self.choices {
            Some(choices) => choices.stream(ready.len()),
            None => self.random.below(ready.len()),
        };
        self.run_next(ready[choice]);
        true
    }

    /// At a pace that follows the host, runs every operation that can run, except the last
    /// operations of each stream that the pace delays.
    pub(crate) fn keep_pace(&mut self) {
        let kept_back = match self.pace {
            _ if self.choices.is_some() => return,
            Pace::Random | Pace::Slowest => return,
            Pace::OneBehind => guard!("sim.one-behind", 1, else 0),
            Pace::Fastest | Pace::Timed => 0,
        };
        loop {
            let mut ready = self.ready();
            ready.retain(|stream| self.streams[stream].queue.len() > kept_back);
            if !self.step_one(&ready) {
                break;
            }
        }
    }

    /// Lets the devices advance after a query was answered.
    pub(crate) fn go_on_after_query(&mut self) {
        match self.pace {
            Pace::Random => {
                for _ in 0..self.random.below(QUERY_STEPS_MAX + 1) {
                    self.step();
                }
            }
            Pace::Slowest | Pace::OneBehind => self.poll_slowly(),
            Pace::Fastest => {}
            // A program that polls in a loop ends, though its queries cost nothing.
            Pace::Timed => self.clock.advance_host(1),
        }
    }

    /// Lets the devices advance after very many queries.
    fn poll_slowly(&mut self) {
        let (ticks, queries) = self.polled;
        let queries = if ticks == self.ticks { queries + 1 } else { 1 };
        self.polled = (self.ticks, queries);
        if queries >= QUERIES_MAX {
            guard!("sim.polls-end", self.step(), else false);
            self.polled = (self.ticks, 0);
        }
    }

    /// Runs one operation that `goal` has to wait for; returns false if none of them is ready.
    fn step_towards(&mut self, goal: Goal) -> bool {
        let mut needed = self.streams_of(goal);
        let mut ready = Vec::new();
        let mut at = 0;
        while let Some(&handle) = needed.get(at) {
            at += 1;
            let Some(stream) = self.streams.get(&handle) else { continue };
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
        self.step_one(&ready)
    }

    /// The streams with work that belongs to `goal`.
    fn streams_of(&self, goal: Goal) -> Vec<u64> {
        let is_of = |handle: u64, stream: &Stream| match goal {
            Goal::Point(point) => handle == point.stream,
            Goal::Stream(wanted) => handle == wanted,
            Goal::Device(device) => stream.device == device,
            Goal::Everything => true,
        };
        let of = self
            .streams
            .iter()
            .filter(|&(&handle, stream)| is_of(handle, stream) && !stream.queue.is_empty());
        of.map(|(&handle, _)| handle).collect()
    }

    /// The streams that block operation `next` at the head of `stream`.
    fn waited_for_by(&self, stream: &Stream, next: &Operation) -> Vec<u64> {
        let mut streams = Vec::new();
        if let Work::Wait(point) = next.work
            && !self.is_reached(Goal::Point(point))
        {
            streams.push(point.stream);
        }
        let is_ordered = |other: &Stream| match stream.order {
            DefaultOrder::NonBlocking => false,
            DefaultOrder::Blocking => other.order == DefaultOrder::Legacy,
            DefaultOrder::Legacy => other.order == DefaultOrder::Blocking,
        };
        let is_earlier = |other: &Stream| {
            other.queue.front().is_some_and(|operation| operation.sequence < next.sequence)
        };
        let earlier = self.streams.iter().filter(|(_, other)| {
            other.device == stream.device && is_ordered(other) && is_earlier(other)
        });
        streams.extend(earlier.map(|(&handle, _)| handle));
        streams
    }

    /// The streams whose next operation can run, the oldest stream first.
    pub(crate) fn ready(&self) -> Vec<u64> {
        let ready = self.streams.iter().filter(|(_, stream)| self.is_ready(stream));
        ready.map(|(&handle, _)| handle).collect()
    }

    pub(crate) fn run_next(&mut self, handle: u64) {
        let Some(stream) = self.streams.get_mut(&handle) else { return };
        let Some(operation) = stream.queue.pop_front() else { return };
        let place = (stream.device, handle);
        self.trace_run(handle, &operation);
        let charge = self.charge(place, &operation);
        let Some(stream) = self.streams.get(&handle) else { return };
        if stream.destroyed && stream.queue.is_empty() {
            self.streams.remove(&handle);
        }
        self.ticks += 1;
        if let Some(choices) = &mut self.choices {
            choices.advanced();
        }
        self.run(place, operation);
        self.charged(charge);
        if let Some(code) = self.faults.ran(place.0) {
            self.poison(place.0, code);
        }
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
        let is_later = |other: &Stream| {
            other.queue.front().is_none_or(|operation| operation.sequence > sequence)
        };
        match stream.order {
            DefaultOrder::NonBlocking => true,
            DefaultOrder::Blocking => {
                let legacy = self.devices[stream.device as usize].legacy_stream;
                self.streams.get(&legacy).is_none_or(is_later)
            }
            DefaultOrder::Legacy => self.streams.values().all(|other| {
                let is_ordered =
                    other.device == stream.device && other.order == DefaultOrder::Blocking;
                !is_ordered || is_later(other)
            }),
        }
    }

    /// Drops all pending work of a device.
    pub(crate) fn discard_work(&mut self, device: u32) {
        for stream in self.streams.values_mut().filter(|stream| stream.device == device) {
            stream.queue.clear();
        }
        self.streams.retain(|_, stream| !stream.destroyed || !stream.queue.is_empty());
    }

    /// Removes the operation that was enqueued last on a stream, if it has not run.
    pub(crate) fn take_back(&mut self, point: Point) {
        let Some(stream) = self.streams.get_mut(&point.stream) else { return };
        stream.queue.retain(|operation| operation.sequence != point.sequence);
        guard!("sim.race-taken-back", self.races.taken_back(point));
    }
}
