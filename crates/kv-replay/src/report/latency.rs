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
    /// Seconds by which the wait for a first token grows in each second of arrivals; from [`OVERLOADED`] on more arrives than
    /// is served.
    pub queue_growth: f64,
}

/// The growth of waits from which on a queue grows without end: a server that falls behind by 3 s in a minute.
pub const OVERLOADED: f64 = 0.05;

/// Fewest requests whose waits have a trend.
const TREND_MIN: usize = 16;

/// By how much waits grow in each second of arrivals, at most from one quarter of all requests to the next, by their medians; 0
/// for too few of them, or if all arrive at once.
///
/// Where work comes in `load` times as fast as it is done, a wait grows by `load - 1`. A busy server that keeps up has long
/// waits, but no growth.
pub fn queue_growth(mut waits: Vec<(Duration, Duration)>) -> f64 {
    if waits.len() < TREND_MIN {
        return 0.0;
    }
    waits.sort_unstable();
    let medians = |part: &[(Duration, Duration)]| {
        let mut waits: Vec<_> = part.iter().map(|(_, wait)| wait.as_secs_f64()).collect();
        waits.sort_unstable_by(f64::total_cmp);
        (part[part.len() / 2].0.as_secs_f64(), waits[part.len() / 2])
    };
    let quarters: Vec<_> = waits.chunks_exact(waits.len() / 4).map(medians).collect();
    let grown = |pair: &[(f64, f64)]| match pair {
        &[(begun, before), (ended, after)] if ended > begun => (after - before) / (ended - begun),
        _ => 0.0,
    };
    quarters.windows(2).map(grown).fold(0.0, f64::max)
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LatencyReport {
    pub count: u64,
    /// Their mean; 0 if there are none.
    pub mean: f64,
    /// The median: the least value that half of all do not exceed.
    pub p50: f64,
    /// The least value that 99 % of all do not exceed.
    pub p99: f64,
    pub max: f64,
}

impl LatencyReport {
    pub fn of(times: &[Duration]) -> Self {
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
