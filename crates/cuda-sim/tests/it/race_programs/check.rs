//! Compares the detector's reports with the oracle.

use std::fmt;

use cuda_sim::{Pace, Race, RaceAccess, RaceUse};

use super::machine::{self, place_of};
use super::oracle::{ALL, Access, Oracle, Resource, Use};
use super::program::Program;

/// All paces.
pub const PACES: [Pace; 4] = [Pace::Random, Pace::Slowest, Pace::Fastest, Pace::OneBehind];

/// The result on which both agree.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Verdict {
    /// Whether there is a pair of conflicting unordered accesses.
    pub is_racy: bool,
}

/// A disagreement.
#[derive(Clone, Debug)]
pub enum Wrong {
    /// A reported race that is not a race.
    False(String),
    /// A race that was not reported.
    Missed(String),
    /// Another failure.
    Other(String),
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::False(what) => write!(f, "reported although ordered: {what}"),
            Self::Missed(what) => write!(f, "not reported: {what}"),
            Self::Other(what) => f.write_str(what),
        }
    }
}

/// Runs a program at one pace and compares the results.
pub fn check(program: &Program, seed: u64, pace: Pace) -> Result<Verdict, Wrong> {
    let run = machine::run(program, seed, pace).map_err(Wrong::Other)?;
    let oracle = Oracle::of(program, run.lines, &run.answers)
        .map_err(|_| Wrong::Other("the program uses an object that does not exist".to_owned()))?;
    let pairs: Vec<(&Access, &Access)> = oracle.pairs().collect();
    let mut explained = Vec::new();
    for race in &run.races {
        explained.extend(explain(&oracle, program, &pairs, race)?);
    }
    if run.is_lost && run.races.is_empty() {
        let detail = format!("the machine was lost without a race: {:?}", run.others);
        return Err(Wrong::Missed(detail));
    }
    if !run.is_lost {
        if let Some(other) = run.others.first() {
            return Err(Wrong::Other(other.clone()));
        }
        complete(&oracle, &pairs, &explained)?;
    }
    let is_racy = pairs.iter().any(|(one, other)| !one.is_late && !other.is_late);
    Ok(Verdict { is_racy: is_racy || run.is_lost })
}

/// Whether a side of a race with `other` may be this access.
fn is_of(access: &Access, side: &RaceAccess, other: &RaceAccess) -> bool {
    let is_bytes = matches!(access.resource, Resource::Bytes(_));
    // If the pages that begin or end are known, the report tells what the operation did through
    // them.
    let is_of_pages = matches!(other.used, RaceUse::Map | RaceUse::End);
    let holds = is_of_pages && access.used == Use::Hold;
    access.sequence == side.sequence
        && match side.used {
            RaceUse::Read => access.used == Use::Read || holds,
            RaceUse::Write => access.used == Use::Write || holds,
            RaceUse::Map => access.used == Use::Map,
            RaceUse::End => access.used == Use::End,
            // For an operation that met no memory, the report does not say whether it was a read or
            // a write.
            RaceUse::Use => access.used == Use::Hold || is_bytes && access.used != Use::End,
            _ => false,
        }
}

/// The pairs that a report may describe.
fn explain<'a>(
    oracle: &Oracle<'_>,
    program: &Program,
    pairs: &[(&'a Access, &'a Access)],
    race: &Race,
) -> Result<Vec<(&'a Access, &'a Access)>, Wrong> {
    if race.first.sequence >= race.second.sequence {
        return Err(Wrong::Other(format!("the second side was called first: {race}")));
    }
    let found: Vec<_> = pairs
        .iter()
        .filter(|(one, other)| {
            let (first, second) = (&race.first, &race.second);
            is_of(one, first, second) && is_of(other, second, first)
                || is_of(other, first, second) && is_of(one, second, first)
        })
        .copied()
        .collect();
    let Some(&(one, other)) = found.first() else {
        let of = |side: &RaceAccess| {
            let found = oracle.accesses.iter().find(|access| access.sequence == side.sequence);
            found.map(|access| program.lines[access.line].id)
        };
        return Err(Wrong::False(format!(
            "lines {:?} and {:?}: {race}",
            of(&race.first),
            of(&race.second)
        )));
    };
    for side in [&race.first, &race.second] {
        let access = if one.sequence == side.sequence { one } else { other };
        let line = program.lines[access.line].id;
        if side.site != place_of(line) {
            return Err(Wrong::Other(format!("{side:?} does not have the place of line {line}")));
        }
    }
    Ok(found)
}

/// Checks that every byte, page and object with a pair has a report.
fn complete(
    oracle: &Oracle<'_>,
    pairs: &[(&Access, &Access)],
    explained: &[(&Access, &Access)],
) -> Result<(), Wrong> {
    // An access whose memory has ended may have touched other memory, or may have been refused.
    let is_sure = |access: &Access| {
        !access.is_late
            && !pairs.iter().any(|(one, other)| {
                let is_end = |access: &Access| matches!(access.used, Use::End);
                matches!(one.resource, Resource::Page(_))
                    && (one.sequence == access.sequence && is_end(other)
                        || other.sequence == access.sequence && is_end(one))
            })
    };
    // Of several pairs at the same two places, only one is reported: the nodes of a graph, and
    // different uses by one side.
    let is_alike = |a: &Access, b: &Access| a.line == b.line;
    let is_told = |(one, other): &&(&Access, &Access)| {
        explained.iter().any(|(a, b)| is_alike(a, one) && is_alike(b, other))
    };
    let told: Vec<_> = pairs.iter().filter(is_told).collect();
    for (one, other) in pairs {
        let is_bytes = matches!(one.resource, Resource::Bytes(_));
        if is_bytes && !(is_sure(one) && is_sure(other)) {
            continue;
        }
        let mut left = one.mask & other.mask & ALL & !oracle.hidden(one, other);
        for (a, b) in &told {
            if a.resource == one.resource {
                left &= !(a.mask & b.mask);
            }
        }
        if left != 0 {
            return Err(Wrong::Missed(format!("units {left:#x} of {one:?} and {other:?}")));
        }
    }
    Ok(())
}

/// Removes lines as long as the program still fails.
pub fn shrink(program: &Program, fails: impl Fn(&Program) -> bool) -> Program {
    let mut program = program.clone();
    let mut step = program.lines.len() / 2;
    while step > 0 {
        let mut at = 0;
        while at < program.lines.len() {
            let mut less = program.clone();
            less.lines.drain(at..(at + step).min(less.lines.len()));
            let is_whole = Oracle::of(&less, less.lines.len(), &[]).is_ok();
            if is_whole && fails(&less) {
                program = less;
            } else {
                at += step;
            }
        }
        step /= 2;
    }
    program
}
