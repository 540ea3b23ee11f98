//! Random programs against an oracle. Ordered accesses are never reported, and unordered ones are,
//! whatever order the device took.
//!
//! The guarantee for programs whose operations all find their memory: each reported race is a pair
//! of conflicting accesses that nothing orders, and each byte, page of addresses, module and
//! context with such a pair has a report. With more than two unordered accesses, the reported pair
//! may depend on the schedule. Where work of an ended context covers the first access of a pair, the
//! race of that work with the end of the context may be reported instead of the pair. A program that
//! ends because an operation met no memory has a report.
//!
//! `KV_PROGRAMS` is the number of programs (2,000 by default), with seeds from `KV_SEED` (0) on.
//! `cargo xtask races` runs 1,000,000.

mod check;
mod generator;
mod machine;
mod oracle;
mod program;

use std::ops::Range;
use std::time::Instant;

use check::{PACES, Wrong, check, shrink};
use cuda_sim::Pace;
use generator::{Random, generate};
use program::{Line, Place, Program, Span, Step, Work};

fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// Number of programs from which they are distributed over the cores.
const SHARED_FROM: u64 = 10_000;

/// Number of programs after which a long campaign prints its progress.
const TOLD_EVERY: u64 = 50_000;

/// Number of failures that are shrunk and printed.
const TOLD: u64 = 2;

#[derive(Debug, Default)]
struct Counts {
    programs: u64,
    runs: u64,
    /// Programs with one edge removed: reported ones, ones that are ordered otherwise, and ones
    /// where that depends on the answers of queries.
    removed: u64,
    reported: u64,
    ordered: u64,
    answered: u64,
    /// Programs with about half of their edges removed. Some may still be ordered.
    thinned: u64,
    false_alarms: u64,
    missed: u64,
    others: u64,
}

impl Counts {
    fn failures(&self) -> u64 {
        self.false_alarms + self.missed + self.others
    }

    fn add(&mut self, other: &Self) {
        self.programs += other.programs;
        self.runs += other.runs;
        self.removed += other.removed;
        self.reported += other.reported;
        self.ordered += other.ordered;
        self.answered += other.answered;
        self.thinned += other.thinned;
        self.false_alarms += other.false_alarms;
        self.missed += other.missed;
        self.others += other.others;
    }

    /// Counts a failure, and prints the first ones.
    fn failed(&mut self, program: &Program, pace: Pace, wrong: &Wrong) {
        match wrong {
            Wrong::False(_) => self.false_alarms += 1,
            Wrong::Missed(_) => self.missed += 1,
            Wrong::Other(_) => self.others += 1,
        }
        if self.failures() <= TOLD {
            let kind = std::mem::discriminant(wrong);
            let again = |less: &Program| check(less, less.seed, pace).err();
            let fails = |less: &Program| {
                again(less).is_some_and(|again| std::mem::discriminant(&again) == kind)
            };
            let less = shrink(program, fails);
            let wrong = again(&less).unwrap_or_else(|| wrong.clone());
            println!("at the pace {pace:?}: {wrong}\n{less}");
        }
    }

    /// Runs a program at every pace. Returns whether it has races, if all paces agree.
    fn run(&mut self, program: &Program) -> Option<bool> {
        let mut verdicts = Vec::new();
        for pace in PACES {
            self.runs += 1;
            match check(program, program.seed, pace) {
                Ok(verdict) => verdicts.push((pace, verdict.is_racy)),
                Err(wrong) => self.failed(program, pace, &wrong),
            }
        }
        let &(_, first) = verdicts.first()?;
        let other = verdicts.iter().find(|(_, verdict)| *verdict != first);
        match other {
            None => Some(first),
            // The answers of queries decide.
            Some(_) if program.has_queries() => None,
            Some(&(pace, _)) => {
                let what = "the same program has races at one pace and none at another";
                self.failed(program, pace, &Wrong::Other(what.to_owned()));
                None
            }
        }
    }

    /// Removes an edge, or a part of one, and runs the rest.
    fn remove(&mut self, program: &Program, random: &mut Random) {
        let edges = program.edges();
        if edges.is_empty() {
            return;
        }
        let edge = edges[random.below(edges.len())];
        let mut less = program.clone();
        let is_of_edge = |line: &usize| program.lines[*line].edge == Some(edge);
        let of_edge: Vec<usize> = (0..program.lines.len()).filter(is_of_edge).collect();
        match random.below(3) {
            0 => drop(less.lines.remove(of_edge[0])),
            1 => drop(less.lines.remove(of_edge[of_edge.len() - 1])),
            _ => less.lines.retain(|line| line.edge != Some(edge)),
        }
        self.removed += 1;
        match self.run(&less) {
            Some(true) => self.reported += 1,
            Some(false) => self.ordered += 1,
            None => self.answered += 1,
        }
    }

    /// Removes about half of all edges, which leaves many unordered pairs at once.
    fn thin(&mut self, program: &Program, random: &mut Random) {
        let mut less = program.clone();
        less.lines.retain(|line| line.edge.is_none() || random.percent(50));
        self.thinned += 1;
        self.run(&less);
    }
}

fn campaign(seeds: Range<u64>) -> Counts {
    let mut counts = Counts::default();
    let start = seeds.start;
    for seed in seeds {
        if seed > start && seed.is_multiple_of(TOLD_EVERY) {
            println!("from seed {start} to {seed}: {} failures", counts.failures());
        }
        let program = generate(seed);
        counts.programs += 1;
        if counts.run(&program) == Some(true) {
            let what = "the program is not ordered by construction";
            counts.failed(&program, Pace::Random, &Wrong::Other(what.to_owned()));
        }
        let mut random = Random::new(!seed);
        counts.remove(&program, &mut random);
        if seed.is_multiple_of(8) {
            counts.thin(&program, &mut random);
        }
    }
    counts
}

#[test]
fn random_programs_are_told_apart_by_their_order() {
    let (programs, first) = (variable("KV_PROGRAMS", 2_000), variable("KV_SEED", 0));
    let start = Instant::now();
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let parts = if programs < SHARED_FROM { 1 } else { cores };
    let from = |part: u64| first + programs / parts * part + (programs % parts).min(part);
    let mut counts = Counts::default();
    std::thread::scope(|scope| {
        let parts: Vec<_> = (0..parts)
            .map(|part| scope.spawn(move || campaign(from(part)..from(part + 1))))
            .collect();
        for part in parts {
            counts.add(&part.join().unwrap());
        }
    });
    let rate = counts.programs as f64 / start.elapsed().as_secs_f64();
    println!("{counts:?}, {rate:.0} programs a second");
    assert_eq!(counts.programs, programs);
    assert_eq!(counts.failures(), 0);
    // A campaign in which no program was reported or ordered proves nothing.
    assert!(programs < 400 || counts.reported > 0 && counts.ordered > 0);
}

/// Memory that ended before an operation was called is not a race: the program is wrong in every
/// order.
#[test]
fn an_operation_called_after_the_end_of_its_memory_is_no_race() {
    let mut program = (0..).map(generate).find(|program| program.devices == 1).unwrap();
    let stream = program.streams.iter().position(|stream| stream.is_first).unwrap();
    let at = |place| Span { place, start: 0, units: 4 };
    let (to, from) = (at(Place::Pinned(0)), at(Place::Alloc(0)));
    let kernel = Step::Enqueue { stream, work: Work::Kernel { to, from } };
    let line = |id, step| Line { id, step, edge: None };
    program.lines = vec![line(0, Step::Free(0)), line(1, kernel)];
    program.graphs.clear();
    for pace in PACES {
        let run = machine::run(&program, 0, pace).unwrap();
        assert!(run.is_lost && run.races.is_empty(), "{run:?}");
    }
}
