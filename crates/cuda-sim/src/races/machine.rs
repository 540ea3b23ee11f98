//! Connects the machine to the race detector: reports what operations and callers do.

use std::io::{IsTerminal, Write};

use cuda_driver::guard;
use cuda_driver::{BatchCopy, HostAccess};

use super::epoch::Strong;
use super::record::Recorded;
use super::{How, Order, Race, RaceCheck, Races};
use crate::RangeKind;
use crate::findings::{Finding, FindingKind};
use crate::memory::{Memory, Viewer};
use crate::state::Machine;
use crate::streams::Goal;
use crate::work::Work;

/// A range that an operation touches, with the access rights used.
type Touch = (Viewer, (u64, u64), How);

/// The ranges that an operation touches, as far as they are known before it runs.
#[derive(Debug, Default)]
pub(crate) struct Touches(Vec<Touch>);

impl Touches {
    /// The ranges of an operation in a stream of `device`. A kernel's ranges are recorded while it
    /// runs.
    pub(crate) fn of(device: u32, work: &Work) -> Self {
        let engine = Viewer::enqueuing;
        let one = |copy: &BatchCopy| {
            [
                (engine(device), (copy.source, copy.bytes), How::READ),
                (engine(device), (copy.destination, copy.bytes), How::WRITE),
            ]
        };
        Self(match work {
            Work::Copy { destination, source, bytes } => vec![
                (engine(source.0), (source.1, *bytes), How::READ),
                (engine(destination.0), (destination.1, *bytes), How::WRITE),
            ],
            Work::CopyBatch(copies) => copies.iter().flat_map(one).collect(),
            Work::WriteStaged { destination, data } => {
                vec![(engine(device), (*destination, data.len() as u64), How::WRITE)]
            }
            Work::Fetch { source, bytes } => {
                vec![(engine(device), (*source, *bytes), How::READ)]
            }
            Work::Fill { destination, bytes, .. } => {
                vec![(engine(device), (*destination, *bytes), How::WRITE)]
            }
            Work::Launch(_) | Work::Compute(_) | Work::Record(_) | Work::Wait(_) => Vec::new(),
        })
    }
}

/// The ranges touched by the kernel that ran last, on `device`.
fn recorded(memory: &mut Memory, device: u32, viewer: Viewer) -> Vec<Touch> {
    let mut touches = Vec::new();
    for Recorded { writes, mark, ranges } in memory.recorder.take() {
        let how = How { writes, strong: mark.map(|mark| Strong { device, mark }) };
        touches.extend(ranges.into_iter().map(|range| (viewer, range, how)));
    }
    touches
}

impl Machine {
    /// Compares the ranges of an operation that ran, or should have run, with earlier accesses.
    pub(crate) fn look_for_races(&mut self, order: &Order, device: u32, touches: Touches) {
        let viewer = self.viewer(device);
        let kernel = recorded(&mut self.memory, device, viewer);
        for (viewer, range, how) in touches.0.into_iter().chain(kernel) {
            self.races.touched(&self.memory, order, viewer, range, how);
        }
        self.tell_races();
    }

    /// Records an access that the host made through a buffer of its own.
    pub(crate) fn host_access(&mut self, access: HostAccess) {
        if !self.races.is_on() {
            return;
        }
        let sequence = self.next_sequence();
        let how = How { writes: access.writes, strong: None };
        let range = (access.address, access.bytes);
        self.races.host_accessed(&self.memory, sequence, range, how);
        self.tell_races();
    }

    /// Records that the host now knows a goal to be reached. For a point, the caller reports its
    /// known point.
    pub(crate) fn host_learns(&mut self, goal: Goal) {
        match goal {
            Goal::Point(_) => {}
            Goal::Stream(stream) => self.races.host_knows_stream(stream),
            Goal::Device(device) => {
                guard!("sim.device-wait-tells", self.races.host_knows_device(device));
            }
            Goal::Everything => self.races.host_knows_everything(),
        }
    }

    /// Lets the detector look at a call that begins or ends something: its name and number.
    pub(crate) fn note_change(
        &mut self,
        call: &'static str,
        look: impl FnOnce(&mut Races, &Memory, (&'static str, u64)),
    ) {
        let sequence = self.next_sequence();
        look(&mut self.races, &self.memory, (call, sequence));
        self.tell_races();
    }

    /// Records that a call frees memory which these addresses stood for.
    pub(crate) fn note_freed(&mut self, call: &'static str, kind: RangeKind, range: (u64, u64)) {
        self.note_change(call, |races, _, call| races.freed(call, kind, range));
    }

    /// The mapped pages of a range, if the race check is on. With `denied`, only those that no device
    /// may access.
    pub(crate) fn mapped_pages(&self, address: u64, bytes: u64, denied: bool) -> Vec<u64> {
        if !self.races.is_on() {
            return Vec::new();
        }
        self.memory.virtual_memory.mapped_pages(address, bytes, denied)
    }

    pub(crate) fn set_race_check(&mut self, check: RaceCheck) {
        if !self.races.set_check(check) {
            return;
        }
        // The order of work enqueued while the check was off is unknown.
        self.streams.forget_orders();
        self.events.forget_known();
        self.graphs.forget_known();
    }

    /// Turns the races found into findings, and sweeps the history.
    pub(crate) fn tell_races(&mut self) {
        for race in self.races.take_found(&self.memory) {
            if guard!("sim.abort", self.races.aborts(), else false) {
                abort(&race);
            }
            self.findings.add(finding(race));
        }
        if self.races.is_large() {
            self.sweep_races();
        }
    }

    /// Forgets the history that can no longer lead to a race.
    pub(crate) fn sweep_races(&mut self) {
        let pending = self.streams.all().flat_map(|(_, stream)| stream.pending());
        self.races.sweep(pending.filter_map(|operation| operation.order.as_ref()));
    }
}

fn finding(race: Race) -> Finding {
    let side = &race.second;
    let (device, stream) = match side.actor {
        super::RaceActor::Host => (None, None),
        super::RaceActor::Stream { device, stream } => (Some(device), Some(stream)),
    };
    Finding {
        device,
        stream,
        address: Some(race.address).filter(|_| race.bytes > 0),
        bytes: race.bytes,
        nearest: race.memory,
        ..Finding::new(FindingKind::Race, &side.operation, race.to_string())
    }
    .with_race(race)
}

/// Ends the process, as the configuration requests.
#[cold]
fn abort(race: &Race) -> ! {
    let mut out = std::io::stderr().lock();
    // Not `eprintln`, because a test harness captures its output. A write error is ignored: no
    // reader is left then.
    let _ = writeln!(out, "{}", race.render(out.is_terminal()));
    std::process::abort();
}
