//! Runs programs with a fault and without it, at every pace, with several seeds.

use std::collections::{BTreeMap, BTreeSet};

use cuda_sim::{FindingKind, MissingEdge, Pace, Race, RaceAccess, RaceCheck, SimConfig, SimDriver};

use crate::races::run::Edges;
pub(crate) use crate::races::run::{Call, Edge, LANES, Range, Run, Side, Stream};

/// Number of seeds for each program and pace.
const SEEDS: u64 = 3;

/// Paces for each program.
pub(crate) const PACES: [Pace; 4] = [Pace::Slowest, Pace::Fastest, Pace::OneBehind, Pace::Random];

/// The race that a run must find.
pub(crate) struct Planted {
    first: Side,
    second: Side,
    range: Range,
    hazard: Option<&'static str>,
    nearest: Vec<(&'static str, u64, Call)>,
    faults_late: bool,
    loses_objects: bool,
    varies: bool,
}

/// A race between two sides, over the bytes that both use. The program called `first` first.
pub(crate) fn race(first: Side, second: Side) -> Planted {
    let ends = [first, second].map(|side| side.range.0 + side.range.1);
    let start = first.range.0.max(second.range.0);
    let both = first.range.1 > 0 && second.range.1 > 0;
    Planted {
        first,
        second,
        range: if both { (start, ends[0].min(ends[1]).saturating_sub(start)) } else { (0, 0) },
        hazard: None,
        nearest: Vec::new(),
        faults_late: false,
        loses_objects: false,
        varies: false,
    }
}

impl Planted {
    /// Sets the bytes that the report names, where they are not those that both sides use.
    pub(crate) fn over(self, address: u64, bytes: u64) -> Self {
        Self { range: (address, bytes), ..self }
    }

    pub(crate) fn hazard(self, hazard: impl Into<Option<&'static str>>) -> Self {
        Self { hazard: hazard.into(), ..self }
    }

    /// Sets the nearest existing edge: that of `event`, made by `call`, and why it does not
    /// suffice. With two such edges, the first is nearest when the second side is called, and the
    /// other at the end of the program.
    pub(crate) fn nearest(mut self, why: &'static str, event: u64, call: Call) -> Self {
        self.nearest.push((why, event, call));
        Self { varies: self.nearest.len() > 1, ..self }
    }

    /// Allows that an operation that runs late meets no memory.
    pub(crate) fn faults_late(self) -> Self {
        Self { faults_late: true, ..self }
    }

    /// Allows that a context ends with memory in it.
    pub(crate) fn loses_objects(self) -> Self {
        Self { loses_objects: true, ..self }
    }

    /// Allows that the known range depends on which side ran first.
    pub(crate) fn varies(self) -> Self {
        Self { varies: true, ..self }
    }
}

/// A configuration of two devices in which kernels may read unwritten memory.
pub(crate) fn config() -> SimConfig {
    SimConfig {
        devices: 2,
        track_initialised: false,
        races: RaceCheck::Report,
        ..SimConfig::default()
    }
}

/// The same configuration, but frees do not count as waits.
pub(crate) fn without_waits() -> SimConfig {
    SimConfig { implicit_waits: false, ..config() }
}

/// Calls `visit` with each pace and seed.
fn each_schedule(mut visit: impl FnMut(Pace, u64)) {
    for pace in PACES {
        for seed in 0..SEEDS {
            visit(pace, seed);
        }
    }
}

/// Runs a program with one race, which the report says how to fix. Without the edge only this race
/// is found. With the edge nothing is found.
#[track_caller]
pub(crate) fn planted(program: impl Fn(&Run) -> Planted) {
    planted_on(&config(), program);
}

#[track_caller]
pub(crate) fn planted_on(config: &SimConfig, program: impl Fn(&Run) -> Planted) {
    let mut texts = BTreeSet::new();
    each_schedule(|pace, seed| {
        let context = format!("{pace:?}, seed {seed}");
        let run = Run::new(config, seed, pace, Edges::None);
        let planted = program(&run);
        run.sim.run_all();
        let texts_before = texts.len();
        let race = check_findings(&run, &planted, pace, &context);
        check_race(&race, &planted, &context);
        check_nearest(&race, &planted, pace, &context);
        let offered = run.offered.borrow();
        assert_eq!(*offered, [edge_of(&race)], "{context}: what mends it\n{race}");
        texts.insert(without_handles(&race.to_string()));
        assert!(planted.varies || texts_before <= 1 && texts.len() == 1, "{context}: {texts:#?}");

        let run = Run::new(config, seed, pace, Edges::All);
        let mended = program(&run);
        run.sim.run_all();
        assert_eq!(run.sim.races(), [], "mended, {context}");
        assert_eq!(other_findings(&run, &mended), [], "mended, {context}");
    });
}

/// The only race of a run.
#[track_caller]
fn check_findings(run: &Run, planted: &Planted, pace: Pace, context: &str) -> Race {
    let findings = run.sim.findings();
    let races = run.sim.races();
    assert_eq!(races.len(), 1, "{context}: {findings:#?}");
    let others = other_findings(run, planted);
    let fault = [FindingKind::IllegalAccess];
    match pace {
        Pace::Slowest if planted.faults_late => assert_eq!(others, fault, "{context}"),
        Pace::Random | Pace::OneBehind if planted.faults_late => {
            assert!(others.is_empty() || others == fault, "{context}");
        }
        _ => assert_eq!(others, [], "{context}"),
    }
    assert_eq!(run.sim.races_unseen(), 0);
    races.into_iter().next().unwrap()
}

/// Kinds of findings, except races and the objects that the program expects to lose.
fn other_findings(run: &Run, planted: &Planted) -> Vec<FindingKind> {
    let mut kinds: Vec<_> = run.sim.findings().iter().map(|one| one.kind).collect();
    kinds.retain(|&kind| kind != FindingKind::Race);
    let lost = kinds.iter().position(|&kind| kind == FindingKind::LostObjects);
    assert_eq!(lost.is_some(), planted.loses_objects);
    lost.map(|index| kinds.remove(index));
    kinds
}

/// Compares a race and its texts with the planted one.
#[track_caller]
pub(crate) fn check_race(race: &Race, planted: &Planted, context: &str) {
    for (found, expected) in [(&race.first, planted.first), (&race.second, planted.second)] {
        check_side(found, expected, &format!("{context}\n{race}"));
    }
    assert!(race.first.sequence < race.second.sequence);
    let (address, bytes) = planted.range;
    if planted.varies {
        let inside = address <= race.address && race.address + race.bytes <= address + bytes;
        assert!(inside, "{context}\n{race}");
    } else {
        assert_eq!((race.address, race.bytes), planted.range, "{context}\n{race}");
    }
    match race.memory {
        Some(memory) => assert!(memory.missed_by == 0 && race.bytes > 0, "{context}\n{race}"),
        None => assert_eq!(race.bytes, 0, "{context}\n{race}"),
    }
    assert_eq!(race.hazard, planted.hazard, "{context}\n{race}");
    check_texts(race, planted);
}

/// Checks that the nearest edge in the report is the one that the program knows, with its place.
#[track_caller]
fn check_nearest(race: &Race, planted: &Planted, pace: Pace, context: &str) {
    let (found, all) = (race.nearest_edge(), &planted.nearest);
    let fits = |&(why, event, call): &(&str, u64, Call)| {
        let found = found.unwrap_or_default();
        let place = format!(" at {}:{}", call.at.file(), call.at.line());
        let named = [format!("event {event:#x}{place}, "), format!("event {event:#x}, ")];
        found.contains(why)
            && found.contains(&place)
            && named.iter().any(|named| found.contains(named))
    };
    let is_nearest = match pace {
        _ if all.is_empty() => found.is_none(),
        Pace::Fastest => all.first().is_some_and(fits),
        Pace::Slowest => all.last().is_some_and(fits),
        _ => all.iter().any(fits),
    };
    assert!(is_nearest, "{context}: the nearest edge\n{race}");
}

fn check_side(found: &RaceAccess, expected: Side, context: &str) {
    let Side { call, used, .. } = expected;
    assert_eq!((found.operation.as_str(), found.used), (call.name, used), "{context}");
    assert_eq!(found.actor, call.actor, "{context}");
    let site = found.site.unwrap_or_else(|| panic!("no place: {context}"));
    assert_eq!((site.at, site.through), (call.at, None), "{context}");
}

/// Checks that the text names both places, and the fix in terms of them.
fn check_texts(race: &Race, planted: &Planted) {
    let text = race.to_string();
    let (first, second) = (planted.first.call, planted.second.call);
    let name = |stream| match stream {
        0 => "the default stream".to_owned(),
        stream => format!("stream {stream:#x}"),
    };
    let mend = match edge_of(race) {
        Edge::StreamWait(from, to) => format!(
            "an event recorded on {} after {}, and waited for by {} before {}",
            name(from),
            first.named(),
            name(to),
            second.named(),
        ),
        Edge::HostWait(stream) => format!(
            "the host waits for {} ({}, or an event recorded on it after that call) before {}",
            first.named(),
            name(stream),
            second.named(),
        ),
        Edge::HostFirst(_) => format!("{} must come before {}", second.named(), first.named()),
    };
    assert_eq!(race.mend(), mend);
    assert!(text.contains(&format!("missing: {mend}")), "{text}");
    for side in [planted.first, planted.second] {
        let at = side.call.at;
        assert!(text.contains(&format!(" at {}:{}", at.file(), at.line())), "{text}");
        assert!(text.contains(&side.call.actor.to_string()), "{text}");
    }
    assert_eq!(without_colours(&race.render(true)), text);
    assert_eq!(race.render(false), text);
}

/// Removes terminal escape sequences from a text, which must contain some.
pub(crate) fn without_colours(text: &str) -> String {
    let mut parts = text.split("\x1b[");
    let mut plain = parts.next().unwrap().to_owned();
    let mut count = 0;
    for part in parts {
        plain.push_str(part.split_once('m').unwrap().1);
        count += 1;
    }
    assert!(count > 0, "no colours: {text}");
    plain
}

/// Replaces hexadecimal numbers of a text by names, in the order of first appearance.
fn without_handles(text: &str) -> String {
    let mut names = BTreeMap::new();
    let mut parts = text.split("0x");
    let mut plain = parts.next().unwrap().to_owned();
    for part in parts {
        let end = part.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(part.len());
        let (number, rest) = part.split_at(end);
        let next = names.len();
        let name = names.entry(number).or_insert(next);
        plain.push_str(&format!("#{name}{rest}"));
    }
    plain
}

/// The edge that a report asks for.
pub(crate) fn edge_of(race: &Race) -> Edge {
    match race.missing {
        MissingEdge::StreamWait { record_on, wait_on, .. } => Edge::StreamWait(record_on, wait_on),
        MissingEdge::HostWait { stream, .. } => Edge::HostWait(stream),
        MissingEdge::HostFirst { stream } => Edge::HostFirst(stream),
        ref other => panic!("{other:?}"),
    }
}

/// Runs an ordered program: nothing is found. Then removes each edge in turn: a race is found.
#[track_caller]
pub(crate) fn ordered(program: impl Fn(&Run)) {
    each_schedule(|pace, seed| {
        let run = Run::new(&config(), seed, pace, Edges::All);
        program(&run);
        run.sim.run_all();
        assert_eq!(run.sim.findings(), [], "{pace:?}, seed {seed}");
        assert_eq!(run.sim.races_unseen(), 0);
        let edges = run.asked.get();
        assert!(edges > 0, "a program without an edge tests nothing");
        for left_out in 0..edges {
            let run = Run::new(&config(), seed, pace, Edges::AllBut(left_out));
            program(&run);
            run.sim.run_all();
            let found = run.sim.races().len();
            assert!(found > 0, "no race without edge {left_out}, {pace:?}, seed {seed}");
        }
    });
}

/// Runs a program with all edges at one pace, and returns its machine.
pub(crate) fn run_at(config: &SimConfig, pace: Pace, program: impl Fn(&Run)) -> SimDriver {
    let run = Run::new(config, 0, pace, Edges::None);
    program(&run);
    run.sim.run_all();
    run.sim.clone()
}
