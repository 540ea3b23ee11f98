//! Turns two conflicting calls into a report: the actors, the places, and the missing order.

use std::cmp::Reverse;

use cuda_driver::guard;
use cuda_driver::site::{self, Site};

use super::{
    Call, Change, Found, MissingEdge, Race, RaceAccess, RaceActor, RaceSide, RaceUse, Races,
    TOLD_MAX, hooks::FOUND_MAX,
};
use crate::NearMiss;
use crate::memory::Memory;

/// A record of an event, or a wait of a stream for one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Edge {
    stream: u64,
    sequence: u64,
    event: u64,
    /// For a wait: the stream of the awaited record, and the call that recorded it.
    recorded: Option<(u64, u64)>,
    site: Option<Site>,
}

impl Edge {
    pub(super) fn record(stream: u64, sequence: u64, event: u64) -> Self {
        Self { stream, sequence, event, recorded: None, site: here() }
    }

    pub(super) fn wait(stream: u64, sequence: u64, event: u64, recorded: (u64, u64)) -> Self {
        Self { stream, sequence, event, recorded: Some(recorded), site: here() }
    }

    fn place(&self) -> String {
        self.site.map(|site| format!(" at {site}")).unwrap_or_default()
    }
}

/// The place of the current call, if known.
pub(super) fn here() -> Option<Site> {
    site::current().or_else(crate::driver::calling)
}

impl Races {
    /// The races found since the last call. Each pair of places is reported once.
    pub(crate) fn take_found(&mut self, memory: &Memory) -> Vec<Race> {
        let mut found = std::mem::take(&mut self.found);
        self.unseen += u64::from(found.len() == FOUND_MAX);
        // If one pair used the bytes in several ways, the clearest is reported, in whichever order
        // the two ran.
        let writes = |used| u8::from(used == RaceUse::Write);
        found.sort_by_key(|one| {
            let writes = writes(one.earlier_use) + writes(one.later_use);
            (one.earlier, one.later, Reverse(writes), one.address)
        });
        let mut races = Vec::new();
        for found in found.drain(..) {
            let Some(race) = self.explain(memory, &found) else { continue };
            let side = |access: &RaceAccess| -> RaceSide {
                (access.operation.clone(), access.actor, access.site)
            };
            // Calls without a known place are distinguished by the memory that they touch.
            let is_placed = race.first.site.is_some() && race.second.site.is_some();
            let base = race.memory.filter(|_| !is_placed).map(|memory| memory.base);
            let pair = (side(&race.first), side(&race.second), base);
            if self.told.len() == TOLD_MAX {
                self.unseen += u64::from(!self.told.contains(&pair));
            } else if guard!("sim.told-once", self.told.insert(pair), else true) {
                races.push(race);
            }
        }
        self.found = found;
        races
    }

    fn explain(&self, memory: &Memory, found: &Found) -> Option<Race> {
        let access = |sequence, used| -> Option<RaceAccess> {
            let Call { name, actor, thread, site, .. } = self.call(sequence)?.clone();
            let operation = name.text().to_owned();
            Some(RaceAccess { operation, used, actor, thread, site, sequence })
        };
        let (a, b) =
            (access(found.earlier, found.earlier_use)?, access(found.later, found.later_use)?);
        let (first, second) = if a.sequence <= b.sequence { (a, b) } else { (b, a) };
        let missing = self.missing(&first, &second);
        let hazard = hazard(&first, &second);
        let memory = self.memory_of(memory, found);
        let (address, bytes) = (found.address, found.bytes);
        Some(Race { first, second, address, bytes, memory, missing, hazard })
    }

    /// The memory of the bytes, as it was until the later call.
    fn memory_of(&self, memory: &Memory, found: &Found) -> Option<NearMiss> {
        let (address, bytes) = (found.address, found.bytes);
        let holds = |change: &&Change| {
            change.sequence == found.later && (change.start..change.end).contains(&address)
        };
        let change = self.changes.iter().rev().find(holds);
        if let Some(&Change { start: base, end, kind: Some(kind), .. }) = change {
            let bytes = end - base;
            return Some(NearMiss { kind, freed: false, base, bytes, missed_by: 0, before: false });
        }
        memory.nearest(address, bytes).filter(|near| bytes > 0 && near.missed_by == 0)
    }

    fn missing(&self, first: &RaceAccess, second: &RaceAccess) -> MissingEdge {
        let Some(record_on) = first.actor.stream() else {
            // The host's own calls are ordered, and come before work that is enqueued later.
            return MissingEdge::HostFirst { stream: second.actor.stream().unwrap_or(0) };
        };
        match second.actor.stream() {
            None if second.used == RaceUse::Map => MissingEdge::HostFirst { stream: record_on },
            None => MissingEdge::HostWait {
                stream: record_on,
                nearest: self.nearest_for_host(first, second),
            },
            Some(wait_on) => MissingEdge::StreamWait {
                record_on,
                wait_on,
                nearest: self.nearest_for_stream(first, second),
            },
        }
    }

    /// The handle under which the edges store the stream of a call.
    fn table_key(&self, access: &RaceAccess) -> Option<u64> {
        match access.actor {
            RaceActor::Stream { device, stream: 0 } => {
                let mut actors = self.actors.iter().skip(1);
                let is_legacy = crate::streams::DefaultOrder::Legacy;
                let found = actors.find(|actor| actor.device == device && actor.order == is_legacy);
                found.map(|actor| actor.stream)
            }
            RaceActor::Stream { stream, .. } => Some(stream),
            RaceActor::Host => None,
        }
    }

    /// The first event recorded after `first` on its stream, if any.
    fn record_after(&self, first: &RaceAccess) -> Option<&Edge> {
        let stream = self.table_key(first)?;
        self.edges.iter().find(|edge| {
            edge.recorded.is_none() && edge.stream == stream && edge.sequence > first.sequence
        })
    }

    fn nearest_for_stream(&self, first: &RaceAccess, second: &RaceAccess) -> Option<String> {
        let (from, to) = (self.table_key(first)?, self.table_key(second)?);
        let between = |edge: &&Edge| {
            edge.stream == to && edge.recorded.is_some_and(|(stream, _)| stream == from)
        };
        let is_early = |edge: &Edge| edge.sequence < second.sequence;
        let covers = |edge: &Edge| edge.recorded.is_some_and(|(_, call)| call > first.sequence);
        let (one, other) = (first.actor, second.actor);
        let waits = || self.edges.iter().filter(between);
        if let Some(late) = waits().find(|edge| covers(edge) && !is_early(edge)) {
            return Some(format!(
                "the {other} waits for event {:#x}{}, but only after {} was enqueued",
                late.event,
                late.place(),
                second.operation,
            ));
        }
        if let Some(after) = self.record_after(first) {
            return Some(format!(
                "event {:#x}, recorded on the {one}{}, comes after {}; the {other} does not wait for \
                 it before {}",
                after.event,
                after.place(),
                first.operation,
                second.operation,
            ));
        }
        let stale = waits().rfind(|edge| is_early(edge))?;
        Some(format!(
            "the {other} waits for event {:#x}{}, which was recorded on the {one} before {}",
            stale.event,
            stale.place(),
            first.operation,
        ))
    }

    fn nearest_for_host(&self, first: &RaceAccess, second: &RaceAccess) -> Option<String> {
        let after = self.record_after(first)?;
        let when = if after.sequence < second.sequence { "" } else { ", but later than that" };
        Some(format!(
            "event {:#x}, recorded on the {}{}{when}, comes after {}; the host did not find it complete \
             before {}",
            after.event,
            first.actor,
            after.place(),
            first.operation,
            second.operation,
        ))
    }
}

/// The hazard of `docs/HAZARDS.md` to which a race belongs.
fn hazard(first: &RaceAccess, second: &RaceAccess) -> Option<&'static str> {
    // A kernel's name can start like a driver call's.
    let is_copy = |access: &RaceAccess| access.operation.starts_with("cuMem");
    match (first.actor, second.actor) {
        (_, RaceActor::Host) => match (first.used, second.used) {
            (_, RaceUse::End) => Some("H3"),
            (_, RaceUse::Map) => Some("H1"),
            // A race on the source of a copy has its own hazard, separate from data that kernels
            // read.
            (RaceUse::Read, RaceUse::Write) if is_copy(first) => Some("H13"),
            (RaceUse::Read, RaceUse::Write) => Some("H14"),
            (RaceUse::Write, RaceUse::Read) => Some("H21"),
            _ => None,
        },
        (RaceActor::Stream { device: a, .. }, RaceActor::Stream { device: b, .. }) => {
            if a != b {
                return Some("H19");
            }
            // A copy of blocks beside a computation that uses them.
            (is_copy(first) || is_copy(second)).then_some("H23")
        }
        (RaceActor::Host, _) => None,
    }
}
