//! Which stream advances next, and how far the device runs while a host waits.

use cuda_driver::ErrorCode;
use cuda_driver::guard;

use crate::SimConfig;
use crate::explore::{Choices, Record};
use crate::findings::{Finding, FindingKind};
use crate::random::Random;
use crate::state::{Answer, Machine};
use crate::streams::{Goal, Point};
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

/// Decides which stream advances next, and knows how far the devices have come.
#[derive(Debug)]
pub(crate) struct Scheduler {
    random: Random,
    /// How far the devices advance on their own.
    pace: Pace,
    /// At the slow paces: `ran` at the last query, and the number of queries in a row that found
    /// the same value.
    polled: (u64, u64),
    /// In an exploration, makes the decisions in place of `random`.
    choices: Option<Box<Choices>>,
    /// The progress at the last point where the device could advance.
    interleaved_at: (u64, u64),
    /// Operations enqueued so far, and run so far.
    enqueued: u64,
    ran: u64,
}

impl Scheduler {
    pub(crate) fn new(config: &SimConfig) -> Self {
        Self {
            random: Random::new(config.seed),
            pace: config.pace,
            polled: (0, 0),
            choices: None,
            interleaved_at: (0, 0),
            enqueued: 0,
            ran: 0,
        }
    }

    pub(crate) fn pace(&self) -> Pace {
        self.pace
    }

    pub(crate) fn set_pace(&mut self, pace: Pace) {
        self.pace = pace;
    }

    /// Operations run so far.
    pub(crate) fn ran(&self) -> u64 {
        self.ran
    }

    /// Has an exploration make the decisions from now on.
    pub(crate) fn explore(&mut self, choices: Choices) {
        self.choices = Some(Box::new(choices));
    }

    pub(crate) fn is_exploring(&self) -> bool {
        self.choices.is_some()
    }

    pub(crate) fn choices(&mut self) -> Option<&mut Choices> {
        self.choices.as_deref_mut()
    }

    pub(crate) fn is_tracing(&self) -> bool {
        self.choices.as_ref().is_some_and(|choices| choices.is_tracing())
    }

    /// Ends an exploration, and returns what was decided in it.
    pub(crate) fn take_record(&mut self) -> Record {
        self.choices.take().map(|choices| choices.into_record()).unwrap_or_default()
    }

    /// Chooses one of so many ready streams.
    fn stream(&mut self, streams: usize) -> usize {
        match &mut self.choices {
            Some(choices) => choices.stream(streams),
            None => self.random.below(streams),
        }
    }

    /// Puts the parts of an operation in the random order in which they run.
    pub(crate) fn shuffle<T>(&mut self, parts: &mut [T]) {
        for last in (1..parts.len()).rev() {
            parts.swap(last, self.random.below(last + 1));
        }
    }

    /// Whether operations were enqueued or run since the device could last advance.
    pub(crate) fn has_moved(&self) -> bool {
        (self.enqueued, self.ran) != self.interleaved_at
    }

    /// Notes that the device could advance.
    pub(crate) fn interleaved(&mut self) {
        self.interleaved_at = (self.enqueued, self.ran);
    }

    fn note_run(&mut self) {
        self.ran += 1;
        if let Some(choices) = &mut self.choices {
            choices.advanced();
        }
    }

    /// Whether the device advances after a query, because very many in a row have found the same.
    fn polled_long(&mut self) -> bool {
        let (ran, queries) = self.polled;
        let queries = if ran == self.ran { queries + 1 } else { 1 };
        self.polled = (self.ran, queries);
        queries >= QUERIES_MAX
    }
}

impl Machine {
    /// Appends work to a stream. Nothing runs yet.
    pub(crate) fn enqueue(&mut self, stream: u64, call: &'static str, work: Work) -> Point {
        self.scheduler.enqueued += 1;
        let sequence = self.next_sequence();
        if let Some(found) = self.streams.get(stream) {
            let enqueued_ns = self.clock.now();
            let place = (stream, found.device(), found.order());
            let order = self.races.enqueued(place, sequence, || work.name(call));
            if let (Some(order), Work::Launch(launch)) = (&order, &work) {
                self.races.uses_module(launch.module, order);
            }
            self.streams.push(stream, Operation { sequence, enqueued_ns, call, work, order });
        }
        self.trace_enqueued(stream);
        Point { stream, sequence }
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
        while !self.streams.is_reached(goal) {
            let advanced = match self.scheduler.pace {
                Pace::Slowest | Pace::OneBehind if !self.scheduler.is_exploring() => {
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
        let held = self.streams.all().filter(|(_, stream)| stream.is_held());
        let held: Vec<String> = held
            .map(|(handle, stream)| {
                format!("{handle:#x} with {} operations", stream.pending().len())
            })
            .collect();
        let detail = format!("the host waits for work behind held streams: {}", held.join(", "));
        self.findings.add(Finding::new(FindingKind::CannotComplete, call, detail));
    }

    /// Runs the next operation of one ready stream; returns false if no stream is ready.
    pub(crate) fn step(&mut self) -> bool {
        let ready = self.streams.ready();
        self.step_one(&ready)
    }

    /// Runs the next operation of one of the ready streams `ready`; returns false if there is none.
    fn step_one(&mut self, ready: &[u64]) -> bool {
        if ready.is_empty() {
            return false;
        }
        let choice = self.scheduler.stream(ready.len());
        self.run_next(ready[choice]);
        true
    }

    /// At a pace that follows the host, runs every operation that can run, except the last
    /// operations of each stream that the pace delays.
    pub(crate) fn keep_pace(&mut self) {
        let kept_back = match self.scheduler.pace {
            _ if self.scheduler.is_exploring() => return,
            Pace::Random | Pace::Slowest => return,
            Pace::OneBehind => guard!("sim.one-behind", 1, else 0),
            Pace::Fastest | Pace::Timed => 0,
        };
        loop {
            let mut ready = self.streams.ready();
            let waiting = |stream| self.streams.get(stream).map_or(0, |s| s.pending().len());
            ready.retain(|&stream| waiting(stream) > kept_back);
            if !self.step_one(&ready) {
                break;
            }
        }
    }

    /// Lets the devices advance after a query was answered.
    pub(crate) fn go_on_after_query(&mut self) {
        match self.scheduler.pace {
            Pace::Random => {
                for _ in 0..self.scheduler.random.below(QUERY_STEPS_MAX + 1) {
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
        if self.scheduler.polled_long() {
            guard!("sim.polls-end", self.step(), else false);
            self.scheduler.polled = (self.scheduler.ran, 0);
        }
    }

    /// Runs one operation that `goal` has to wait for; returns false if none of them is ready.
    fn step_towards(&mut self, goal: Goal) -> bool {
        let ready = self.streams.ready_towards(goal);
        self.step_one(&ready)
    }

    pub(crate) fn run_next(&mut self, handle: u64) {
        let Some((device, operation)) = self.streams.pop(handle) else { return };
        let place = (device, handle);
        self.trace_run(handle, &operation);
        let charge = self.charge(place, &operation);
        self.streams.drop_if_over(handle);
        self.scheduler.note_run();
        self.run(place, operation);
        self.charged(charge);
        if let Some(code) = self.faults.ran(device) {
            self.poison(device, code);
        }
    }

    /// Removes the operation that was enqueued last on a stream, if it has not run.
    pub(crate) fn take_back(&mut self, point: Point) {
        if self.streams.take_back(point) {
            guard!("sim.race-taken-back", self.races.taken_back(point));
        }
    }
}
