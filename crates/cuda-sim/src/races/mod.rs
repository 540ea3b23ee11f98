//! Finds pairs of accesses that nothing orders, in whatever order the device ran them.
//!
//! When an operation is enqueued, the work ordered before it is known: earlier work of its stream,
//! work that the stream waited for, work ordered by default streams, and work that the host knew to
//! be complete. The ranges that an operation touches are known after it has run. So each operation
//! carries its [`Order`] from enqueue to run, and its ranges are then compared with the [`Shadow`]
//! of earlier accesses.
//!
//! A report names two conflicting accesses that nothing visible to the driver orders. For each
//! byte, page of addresses, module and context with such a pair, at least one pair is reported, in
//! whatever order the device ran the work. With more than two unordered accesses, the reported pair
//! may depend on that order. `tests/it/race_programs` compares this with a graph of all order that
//! CUDA guarantees. One pair may be missing: an access that work of an ended context covers, and a
//! later one. The end of the context is then reported as a race with that work.
//!
//! The host is one actor. The detector cannot see locks and channels between host threads, so a
//! call of one thread counts as before every later call of another.

mod epoch;
mod explain;
mod hooks;
mod machine;
mod record;
mod report;
mod shadow;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::thread::ThreadId;

use cuda_driver::guard;
use cuda_driver::site::Site;

use epoch::{Clock, Epoch, HOST};
pub(crate) use epoch::{How, Order, StrongMark};
use explain::Edge;
pub(crate) use machine::Touches;
pub(crate) use record::Recorder;
pub use report::{MissingEdge, Race, RaceAccess, RaceActor, RaceUse};
use shadow::{Accesses, Clash, Shadow};

use crate::RangeKind;
use crate::ptx::Program;
use crate::streams::{DefaultOrder, Point};

/// Whether a simulated machine looks for races, and how it reacts to one.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum RaceCheck {
    /// The machine does not look for races.
    Off,
    /// A race is a finding.
    #[default]
    Report,
    /// A race ends the process, with its report on standard error: for test suites that do not
    /// check findings.
    Abort,
}

/// Number of shadow segments at which a sweep removes those that no longer matter.
const SWEEP_AT: usize = 1 << 16;

/// Maximum number of segments. Beyond it the history is dropped, and the drop is counted.
const SEGMENTS_MAX: usize = 1 << 22;

/// Number of begun or ended ranges at which those older than all pending work are forgotten.
const CHANGES_AT: usize = 1024;

/// Maximum number of begun or ended ranges that are remembered.
const CHANGES_MAX: usize = 1 << 16;

const TOLD_MAX: usize = 4096;

/// Number of event records and waits that are remembered, to name the nearest one in a report.
const EDGES_MAX: usize = 4096;

const ACTORS_MAX: usize = u16::MAX as usize;

/// Maximum number of bits of an offset in a page of the shadow.
const PAGE_SHIFT_MAX: u32 = 18;

/// Name of an access of the host through a buffer.
const HOST_ACCESS: &str = "host access";

/// A stream in the detector, live or destroyed.
#[derive(Debug)]
struct Actor {
    stream: u64,
    device: u32,
    order: DefaultOrder,
    /// The work ordered before the next enqueued operation, besides the stream's own calls.
    clock: Arc<Clock>,
    /// Its last call, and the one before.
    last: u64,
    before: u64,
    is_alive: bool,
    /// Whether its work was dropped. Its last calls never ran, and did not wait for anything.
    is_stopped: bool,
}

impl Actor {
    /// Records that the host knows a call to be complete, and all that comes before it.
    fn tell(&self, host: &mut Arc<Clock>, call: (u16, u64)) {
        let clock = if self.is_stopped { Arc::clone(host) } else { Arc::clone(&self.clock) };
        learn(host, &clock, Some(call));
    }
}

/// The names of a call in reports.
#[derive(Clone, Debug)]
pub(crate) enum CallName {
    Fixed(&'static str),
    Program(Arc<Program>),
}

impl CallName {
    fn text(&self) -> &str {
        match self {
            Self::Fixed(name) => name,
            Self::Program(program) => program.name(),
        }
    }
}

/// A call that enqueued an operation, or in which the host accessed memory itself.
#[derive(Clone, Debug)]
struct Call {
    sequence: u64,
    name: CallName,
    actor: RaceActor,
    thread: Arc<str>,
    site: Option<Site>,
}

/// A range of addresses where memory began (by the first access right) or ended.
#[derive(Clone, Copy, Debug)]
struct Change {
    start: u64,
    end: u64,
    sequence: u64,
    used: RaceUse,
    /// The kind of the ended range; an unmapped page belongs to a reservation.
    kind: Option<RangeKind>,
}

/// The point in a stream that an event marks, with all that comes before it.
#[derive(Clone, Debug)]
pub(crate) struct KnownPoint {
    stream: u64,
    actor: u16,
    sequence: u64,
    clock: Arc<Clock>,
}

/// A race before its report is written.
#[derive(Debug)]
struct Found {
    earlier: u64,
    earlier_use: RaceUse,
    later: u64,
    later_use: RaceUse,
    address: u64,
    bytes: u64,
}

#[derive(Debug)]
pub(crate) struct Races {
    check: RaceCheck,
    shadow: Shadow,
    /// The work that the host knows to be complete.
    host: Arc<Clock>,
    /// The actors. The first entry is the host, and is not used.
    actors: Vec<Actor>,
    /// Actors of live streams by handle.
    numbers: HashMap<u64, u16>,
    /// Calls, in order of sequence.
    calls: VecDeque<Call>,
    threads: HashMap<ThreadId, Arc<str>>,
    edges: VecDeque<Edge>,
    changes: VecDeque<Change>,
    /// Launches that used a module, by its handle.
    modules: HashMap<u64, Accesses>,
    found: Vec<Found>,
    told: HashSet<Pair>,
    sweep_at: usize,
    forget_calls_at: usize,
    forget_changes_at: usize,
    unseen: u64,
}

/// One side of a race, without what differs between repetitions.
type RaceSide = (String, RaceActor, Option<Site>);

/// Two sides, and the start of the memory if a side has no known place in the program.
type Pair = (RaceSide, RaceSide, Option<u64>);

impl Races {
    pub(crate) fn new(check: RaceCheck, granularity: u64) -> Self {
        let host = Actor {
            stream: 0,
            device: 0,
            order: DefaultOrder::NonBlocking,
            clock: Arc::default(),
            last: 0,
            before: 0,
            is_alive: true,
            is_stopped: false,
        };
        Self {
            check,
            shadow: Shadow::new(granularity.trailing_zeros().min(PAGE_SHIFT_MAX)),
            host: Arc::default(),
            actors: vec![host],
            numbers: HashMap::new(),
            calls: VecDeque::new(),
            threads: HashMap::new(),
            edges: VecDeque::new(),
            changes: VecDeque::new(),
            modules: HashMap::new(),
            found: Vec::new(),
            told: HashSet::new(),
            sweep_at: SWEEP_AT,
            forget_calls_at: SWEEP_AT,
            forget_changes_at: CHANGES_AT,
            unseen: 0,
        }
    }

    /// Sets the reaction to races from now on. Turning the check on or off drops the history,
    /// because the order of work enqueued meanwhile is unknown. Returns whether that happened.
    pub(crate) fn set_check(&mut self, check: RaceCheck) -> bool {
        let was_on = self.is_on();
        self.check = check;
        let changes = was_on != self.is_on();
        if changes {
            guard!("sim.check-begins-anew", self.shadow.clear());
            self.modules.clear();
            self.changes.clear();
            self.edges.clear();
        }
        changes
    }

    pub(crate) fn is_on(&self) -> bool {
        self.check != RaceCheck::Off
    }

    /// How often something was not checked.
    pub(crate) fn unseen(&self) -> u64 {
        self.unseen
    }

    /// Number of a stream, known or new; `None` if there are too many.
    fn actor(&mut self, stream: u64, device: u32, order: DefaultOrder) -> Option<u16> {
        if let Some(&number) = self.numbers.get(&stream) {
            return Some(number);
        }
        let clock = Arc::clone(&self.host);
        let (is_alive, is_stopped) = (true, false);
        let new = Actor { stream, device, order, clock, last: 0, before: 0, is_alive, is_stopped };
        // Reuses the number of a destroyed stream if the host knows all its work to be complete.
        // Being ordered after that work, or after the host, is then the same.
        let host = Arc::clone(&self.host);
        let unused = (1u16..).zip(&self.actors[1..]).find(|(number, actor)| {
            let is_over = actor.last <= host.of(*number) && host.includes(&actor.clock);
            guard!("sim.live-number", !actor.is_alive, else true)
                && guard!("sim.number-over", is_over, else true)
        });
        let number = match unused {
            Some((number, _)) => {
                self.actors[usize::from(number)] = new;
                number
            }
            None if self.actors.len() < ACTORS_MAX => {
                self.actors.push(new);
                (self.actors.len() - 1) as u16
            }
            None => return None,
        };
        self.numbers.insert(stream, number);
        Some(number)
    }

    /// Records that a stream takes no more work.
    pub(crate) fn stream_ended(&mut self, stream: u64) {
        if let Some(number) = self.numbers.remove(&stream) {
            self.actors[usize::from(number)].is_alive = false;
        }
    }

    /// The work ordered before an operation that is enqueued now.
    pub(crate) fn enqueued(
        &mut self,
        (stream, device, order): (u64, u32, DefaultOrder),
        sequence: u64,
        name: impl FnOnce() -> CallName,
    ) -> Option<Order> {
        if !self.is_on() {
            return None;
        }
        let Some(number) = self.actor(stream, device, order) else {
            self.unseen += 1;
            return None;
        };
        let host = Arc::clone(&self.host);
        self.learn(number, &host, None);
        for other in self.defaults(number) {
            let (clock, last) = {
                let other = &self.actors[usize::from(other)];
                (Arc::clone(&other.clock), other.last)
            };
            self.learn(number, &clock, Some((other, last)));
        }
        let actor = &mut self.actors[usize::from(number)];
        (actor.before, actor.last) = (actor.last, sequence);
        let clock = Arc::clone(&actor.clock);
        // Programs know the legacy default stream as 0.
        let stream = if order == DefaultOrder::Legacy { 0 } else { stream };
        self.note_call(sequence, name(), RaceActor::Stream { device, stream });
        Some(Order { actor: number, sequence, clock })
    }

    /// Records that the last enqueued operation of a stream was removed again.
    pub(crate) fn taken_back(&mut self, point: Point) {
        if let Some(&number) = self.numbers.get(&point.stream) {
            let actor = &mut self.actors[usize::from(number)];
            if actor.last == point.sequence {
                actor.last = actor.before;
            }
        }
    }

    /// The streams whose earlier work is ordered before new work of a stream by the default stream
    /// rules.
    fn defaults(&self, number: u16) -> Vec<u16> {
        let this = &self.actors[usize::from(number)];
        let wanted = match this.order {
            DefaultOrder::NonBlocking => {
                guard!("sim.non-blocking-apart", return Vec::new(), else DefaultOrder::Legacy)
            }
            DefaultOrder::Blocking => {
                guard!("sim.blocking-after-default", DefaultOrder::Legacy, else return Vec::new())
            }
            DefaultOrder::Legacy => {
                guard!("sim.default-after-blocking", DefaultOrder::Blocking, else return Vec::new())
            }
        };
        (1u16..)
            .zip(&self.actors[1..])
            .filter(|(_, other)| other.device == this.device && other.order == wanted)
            // Stopped streams did not wait for anything, and the host knows their own work.
            .filter(|(_, other)| guard!("sim.stopped-order-nothing", !other.is_stopped, else true))
            .map(|(other, _)| other)
            .collect()
    }

    /// Adds to what is ordered before the next operation of a stream: a clock, and a call with its
    /// actor.
    fn learn(&mut self, number: u16, clock: &Arc<Clock>, point: Option<(u16, u64)>) {
        let known = &mut self.actors[usize::from(number)].clock;
        learn(known, clock, point);
    }

    /// The known point of call `sequence` of a stream, its last call.
    pub(crate) fn known(&self, stream: u64, sequence: u64) -> Option<KnownPoint> {
        let &actor = self.numbers.get(&stream).filter(|_| self.is_on())?;
        let before = Arc::clone(&self.actors[usize::from(actor)].clock);
        let clock = guard!("sim.event-carries", before, else Arc::default());
        Some(KnownPoint { stream, actor, sequence, clock })
    }

    /// The known point of an event recorded by call `sequence` of a stream.
    pub(crate) fn recorded(
        &mut self,
        stream: u64,
        sequence: u64,
        event: u64,
    ) -> Option<KnownPoint> {
        let known = self.known(stream, sequence)?;
        self.note_edge(Edge::record(stream, sequence, event));
        Some(known)
    }

    /// Orders all later work of a stream after a known point.
    pub(crate) fn follows(&mut self, stream: u64, known: &KnownPoint) {
        let Some(&number) = self.numbers.get(&stream) else { return };
        let sequence = guard!(
            "sim.event-is-its-record",
            known.sequence,
            else self.actors[usize::from(known.actor)].last
        );
        self.learn(number, &known.clock, Some((known.actor, sequence)));
    }

    /// Records that a stream waits for an event, in call `sequence`.
    pub(crate) fn waits(&mut self, stream: u64, sequence: u64, event: u64, known: &KnownPoint) {
        self.follows(stream, known);
        let recorded = (known.stream, known.sequence);
        self.note_edge(Edge::wait(stream, sequence, event, recorded));
    }

    /// Records that the host knows an event to be complete.
    pub(crate) fn host_knows(&mut self, known: &KnownPoint) {
        let clock = guard!("sim.host-learns-others", &known.clock, else &Arc::default());
        learn(&mut self.host, clock, Some((known.actor, known.sequence)));
    }

    /// Records that a device runs nothing any more, which orders like a wait. Work that the device
    /// would have waited for may still run, and is not known to be complete.
    pub(crate) fn device_stopped(&mut self, device: u32) {
        for actor in self.actors.iter_mut().skip(1).filter(|actor| actor.device == device) {
            guard!("sim.stopped-waits-for-nothing", actor.is_stopped = true);
        }
        self.host_knows_device(device);
    }

    /// Records that the host knows all enqueued work of the streams selected by `is_idle` to be
    /// complete.
    fn host_knows_streams(&mut self, is_idle: impl Fn(&Actor) -> bool) {
        for (number, actor) in (1u16..).zip(&self.actors[1..]) {
            if is_idle(actor) {
                actor.tell(&mut self.host, (number, actor.last));
            }
        }
    }

    /// Records that the host knows the last operation of a stream to be complete.
    pub(crate) fn host_knows_stream(&mut self, stream: u64) {
        if let Some(&number) = self.numbers.get(&stream) {
            let actor = &self.actors[usize::from(number)];
            actor.tell(&mut self.host, (number, actor.last));
        }
    }

    pub(crate) fn host_knows_device(&mut self, device: u32) {
        self.host_knows_streams(
            |actor| guard!("sim.one-device-known", actor.device == device, else true),
        );
    }

    pub(crate) fn host_knows_everything(&mut self) {
        self.host_knows_streams(|_| true);
    }

    /// Records that the host knows the last enqueued operation of a stream to be complete.
    pub(crate) fn host_knows_point(&mut self, point: Point) {
        let Some(&number) = self.numbers.get(&point.stream) else { return };
        self.actors[usize::from(number)].tell(&mut self.host, (number, point.sequence));
    }

    fn host_order(&self, sequence: u64) -> Order {
        Order { actor: HOST, sequence, clock: Arc::clone(&self.host) }
    }

    fn note_call(&mut self, sequence: u64, name: CallName, actor: RaceActor) {
        let thread = std::thread::current();
        let name_of = || match thread.name() {
            Some(name) => name.into(),
            None => format!("{:?}", thread.id()).into(),
        };
        let thread = Arc::clone(self.threads.entry(thread.id()).or_insert_with(name_of));
        let site = explain::here();
        self.calls.push_back(Call { sequence, name, actor, thread, site });
    }

    fn note_edge(&mut self, edge: Edge) {
        if self.edges.len() == EDGES_MAX {
            self.edges.pop_front();
        }
        self.edges.push_back(edge);
    }

    fn call(&self, sequence: u64) -> Option<&Call> {
        let index = self.calls.partition_point(|call| call.sequence < sequence);
        self.calls.get(index).filter(|call| call.sequence == sequence)
    }
}

/// Adds a clock's knowledge, and a call of an actor, to a clock that others may share.
fn learn(known: &mut Arc<Clock>, clock: &Arc<Clock>, point: Option<(u16, u64)>) {
    if !Arc::ptr_eq(known, clock) && !known.includes(clock) {
        if clock.includes(known) {
            *known = Arc::clone(clock);
        } else {
            Arc::make_mut(known).join(clock);
        }
    }
    if let Some((actor, sequence)) = point
        && known.of(actor) < sequence
    {
        Arc::make_mut(known).learn(actor, sequence);
    }
}
