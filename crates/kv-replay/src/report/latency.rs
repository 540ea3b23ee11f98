//! How long requests waited, as distributions.

use std::time::Duration;

use serde::Serialize;

/// What requests waited for. In virtual time it has the cost of driver calls and of device work by the profile, and of the
/// model's computation by the options, and nothing of the engine's own work; by the host's clock it has all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct OpenLoopReport {
    /// Prompt tokens that the model computes in a second; 0 if that took no time.
    pub prefill_tokens_per_s: u64,
    /// Microseconds of an iteration that generates; 0 if that took no time.
    pub decode_step_us: u64,
    /// Which clock it was: `virtual`, that of simulated devices, or `host`.
    pub clock: &'static str,
    /// Seconds from the start of the trace to the end of the last request.
    pub elapsed_s: f64,
    /// Tokens generated in a second of these.
    pub generated_tokens_per_s: f64,
    /// From arrival to the first admission.
    pub queued_ms: LatencyReport,
    /// From arrival until the host has seen the first generated token.
    pub time_to_first_token_ms: LatencyReport,
    /// From the first token to the end, divided by the tokens behind the first; of requests with two tokens or more.
    pub time_per_output_token_ms: LatencyReport,
    /// From arrival to the end.
    pub end_to_end_ms: LatencyReport,
}

/// The distribution of a time, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LatencyReport {
    /// Number of values.
    pub count: u64,
    /// Their mean; 0 if there are none.
    pub mean: f64,
    /// The median: the least value that half of all do not exceed.
    pub p50: f64,
    /// The least value that 99 % of all do not exceed.
    pub p99: f64,
    /// The largest.
    pub max: f64,
}

impl LatencyReport {
    pub(crate) fn of(times: &[Duration]) -> Self {
        let mut sorted: Vec<_> = times.iter().map(|time| time.as_secs_f64() * 1e3).collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let rank = |percent: usize| (sorted.len() * percent).div_ceil(100).max(1) - 1;
        let at = |rank: usize| sorted.get(rank).copied().unwrap_or(0.0);
        Self {
            count: sorted.len() as u64,
            mean: sorted.iter().sum::<f64>() / sorted.len().max(1) as f64,
            p50: at(rank(50)),
            p99: at(rank(99)),
            max: sorted.last().copied().unwrap_or(0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_those_of_values_that_were_seen() {
        let times: Vec<_> = (1..=200).rev().map(Duration::from_millis).collect();
        let LatencyReport { count, mean, p50, p99, max } = LatencyReport::of(&times);
        assert_eq!((count, mean, p50, p99, max), (200, 100.5, 100.0, 198.0, 200.0));
        let one = LatencyReport::of(&[Duration::from_micros(1500)]);
        assert_eq!((one.p50, one.p99, one.max), (1.5, 1.5, 1.5));
        assert_eq!(LatencyReport::of(&[]), LatencyReport::default());
    }
}
