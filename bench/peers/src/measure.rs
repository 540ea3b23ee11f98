//! Rounds of all contenders in turn, and what is made of them.
//!
//! The machine may be doing other work, so what is compared lies close together in time: each round
//! runs every contender once, the first of them being another one each time, and a ratio is the
//! median of the ratios within a round.

use std::time::Duration;

use crate::contender::Contender;
use crate::operation::{Operation, Runner, Timed};

/// How a contender is made to run an operation.
#[derive(Clone, Copy)]
pub struct Entry {
    /// How reports call it.
    pub name: &'static str,
    /// Prepares an operation.
    pub runner: fn(Operation) -> Runner,
}

impl Entry {
    /// The entry of `C`.
    #[must_use]
    pub fn of<C: Contender>() -> Self {
        Self { name: C::NAME, runner: |operation| operation.runner::<C>() }
    }
}

/// How long and how often to measure.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Rounds of each contender.
    pub rounds: usize,
    /// About how long one round takes.
    pub round: Duration,
}

/// Figures of one contender, one a round, in the order of the rounds.
pub type Samples = Vec<f64>;

/// Times `operation` on each entry. Figures are nanoseconds an operation.
#[must_use]
pub fn interleaved(entries: &[Entry], operation: Operation, effort: Effort) -> Vec<Samples> {
    let mut runners: Vec<(Runner, u64)> = entries
        .iter()
        .map(|entry| {
            let mut runner = (entry.runner)(operation);
            let iterations = calibrate(&mut runner, operation, effort.round);
            (runner, iterations)
        })
        .collect();
    let mut samples = vec![Samples::with_capacity(effort.rounds); entries.len()];
    for round in 0..effort.rounds {
        for turn in 0..entries.len() {
            let index = (round + turn) % entries.len();
            let (runner, iterations) = &mut runners[index];
            samples[index].push(nanoseconds(runner(*iterations)));
        }
    }
    samples
}

/// As many iterations as fill about `round`.
fn calibrate(runner: &mut Runner, operation: Operation, round: Duration) -> u64 {
    if operation.has_fixed_rounds() {
        return 0;
    }
    let mut iterations = 64;
    loop {
        let elapsed = runner(iterations).elapsed.max(Duration::from_nanos(1));
        let missing = round.as_secs_f64() / elapsed.as_secs_f64();
        if missing < 4.0 {
            return ((iterations as f64 * missing) as u64).max(1);
        }
        iterations = (iterations as f64 * missing.min(16.0)) as u64;
    }
}

fn nanoseconds(timed: Timed) -> f64 {
    timed.elapsed.as_nanos() as f64 / timed.operations as f64
}

/// The middle one.
#[must_use]
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => sorted[len / 2],
        len => f64::midpoint(sorted[len / 2 - 1], sorted[len / 2]),
    }
}

/// The least, which other work on the machine has disturbed least.
#[must_use]
pub fn least(samples: &[f64]) -> f64 {
    samples.iter().copied().fold(f64::INFINITY, f64::min)
}

/// How many times as much the second costs as the first, as the median over the rounds.
#[must_use]
pub fn ratio(ours: &[f64], theirs: &[f64]) -> f64 {
    let ratios: Vec<f64> = ours.iter().zip(theirs).map(|(ours, theirs)| theirs / ours).collect();
    median(&ratios)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_the_median_within_rounds() {
        // The machine was three times as slow in the second round, for both.
        assert_eq!(ratio(&[1.0, 3.0, 1.0], &[10.0, 30.0, 12.0]), 10.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(least(&[4.0, 1.0, 2.0]), 1.0);
    }
}
