//! Time as the requests see it: arrivals, on the simulated device's clock or on the host's.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_sim::SimDriver;

use super::RunError;
use crate::config::RunConfig;
use crate::report::tenants::Tenants;
use crate::report::{LatencyReport, OpenLoopReport, queue_growth};
use crate::trace::Trace;

/// What time is, since the run began.
#[derive(Debug)]
enum Clock {
    Virtual { sim: Arc<SimDriver>, began: Duration },
    Host { began: Instant },
}

impl Clock {
    fn now(&self) -> Duration {
        match self {
            Self::Virtual { sim, began } => sim.virtual_now().saturating_sub(*began),
            Self::Host { began } => began.elapsed(),
        }
    }

    fn wait_until(&self, then: Duration) {
        match self {
            Self::Virtual { sim, .. } => sim.advance_host(then.saturating_sub(self.now())),
            Self::Host { .. } => {
                while let Some(left) = then.checked_sub(self.now()).filter(|left| !left.is_zero()) {
                    std::thread::park_timeout(left);
                }
            }
        }
    }
}

/// The latest arrival that a run waits for, in milliseconds: 146 years. Virtual time has 64 bits of nanoseconds, of which
/// half are left for the run.
const ARRIVAL_MAX_MS: u64 = (1 << 62) / 1_000_000;

pub(super) fn check(trace: &Trace) -> Result<(), RunError> {
    let arrival_ms = trace.requests.iter().map(|request| request.timestamp_ms).max().unwrap_or(0);
    match arrival_ms <= ARRIVAL_MAX_MS {
        true => Ok(()),
        false => Err(RunError::LateArrival { arrival_ms, limit_ms: ARRIVAL_MAX_MS }),
    }
}

/// When what happened to a request, since the run began.
#[derive(Clone, Copy, Debug)]
struct Times {
    arrived: Duration,
    admitted: Option<Duration>,
    first_token: Option<Duration>,
}

/// The clock of a run whose requests arrive when the trace says so, and what they waited for.
#[derive(Debug)]
pub(super) struct Arrivals {
    clock: Clock,
    last: Duration,
    running: BTreeMap<usize, Times>,
    /// From arrival to admission, to the first token, and to the end; then for each token behind the first.
    queued: Vec<Duration>,
    /// Of the first token, the request and its arrival too.
    to_first_token: Vec<(usize, Duration, Duration)>,
    to_end: Vec<Duration>,
    each_token: Vec<Duration>,
}

impl Arrivals {
    /// Time begins now: the virtual time of a simulated machine, or else the host's.
    pub(super) fn new(sim: Option<Arc<SimDriver>>) -> Self {
        let clock = match sim {
            Some(sim) => Clock::Virtual { began: sim.virtual_now(), sim },
            None => Clock::Host { began: Instant::now() },
        };
        Self {
            clock,
            last: Duration::ZERO,
            running: BTreeMap::new(),
            queued: Vec::new(),
            to_first_token: Vec::new(),
            to_end: Vec::new(),
            each_token: Vec::new(),
        }
    }

    fn now(&self) -> Duration {
        self.clock.now()
    }

    pub(super) fn is_here(&self, timestamp_ms: u64) -> bool {
        Duration::from_millis(timestamp_ms) <= self.now()
    }

    pub(super) fn wait_for(&self, timestamp_ms: u64) {
        self.clock.wait_until(Duration::from_millis(timestamp_ms));
    }

    pub(super) fn arrive(&mut self, request: usize, timestamp_ms: u64) {
        let arrived = Duration::from_millis(timestamp_ms);
        self.running.insert(request, Times { arrived, admitted: None, first_token: None });
    }

    /// Records a request's first admission; later ones follow a preemption.
    pub(super) fn admit(&mut self, request: usize) {
        let now = self.now();
        if let Some(times) = self.running.get_mut(&request)
            && times.admitted.is_none()
        {
            times.admitted = Some(now);
            self.queued.push(now.saturating_sub(times.arrived));
        }
    }

    pub(super) fn generate(&mut self, request: usize) {
        let now = self.now();
        if let Some(times) = self.running.get_mut(&request)
            && times.first_token.is_none()
        {
            times.first_token = Some(now);
            let wait = now.saturating_sub(times.arrived);
            self.to_first_token.push((request, times.arrived, wait));
        }
    }

    pub(super) fn finish(&mut self, request: usize, tokens: u64) {
        let now = self.now();
        let Some(times) = self.running.remove(&request) else { return };
        self.last = now;
        self.to_end.push(now.saturating_sub(times.arrived));
        // The last step of a request computes its last token, which nothing reads any more.
        let first = times.first_token.unwrap_or(now);
        if times.first_token.is_none() {
            let wait = now.saturating_sub(times.arrived);
            self.to_first_token.push((request, times.arrived, wait));
        }
        if let Some(behind) = tokens.checked_sub(1).filter(|&behind| behind > 0) {
            let each = now.saturating_sub(first).as_nanos() / u128::from(behind);
            self.each_token.push(Duration::from_nanos(u64::try_from(each).unwrap_or(u64::MAX)));
        }
    }

    pub(super) fn cancel(&mut self, request: usize) {
        self.running.remove(&request);
    }

    pub(super) fn tell_tenants(&self, trace: &Trace, tenants: &mut Tenants) {
        let mut times: BTreeMap<&str, Vec<_>> = BTreeMap::new();
        for time in &self.to_first_token {
            let entry = trace.requests.get(time.0);
            if let Some(tenant) = entry.and_then(|entry| entry.tenant.as_deref()) {
                times.entry(tenant).or_default().push(time);
            }
        }
        for (tenant, times) in times {
            let Some(report) = tenants.get_mut(tenant) else { continue };
            let LatencyReport { p50, p99, .. } = first_tokens(times.into_iter());
            report.time_to_first_token_p50_ms = Some(p50);
            report.time_to_first_token_p99_ms = Some(p99);
        }
    }

    pub(super) fn report(&self, config: &RunConfig, generated_tokens: u64) -> OpenLoopReport {
        // What is stored in files behind the last request is none's time.
        let seconds = self.last.as_secs_f64();
        OpenLoopReport {
            prefill_tokens_per_s: config.model.prefill_tokens_per_s,
            decode_step_us: config.model.decode_step_us,
            clock: match self.clock {
                Clock::Virtual { .. } => "virtual",
                Clock::Host { .. } => "host",
            },
            elapsed_s: seconds,
            generated_tokens_per_s: if seconds > 0.0 {
                generated_tokens as f64 / seconds
            } else {
                0.0
            },
            queued_ms: LatencyReport::of(&self.queued),
            time_to_first_token_ms: first_tokens(self.to_first_token.iter()),
            time_per_output_token_ms: LatencyReport::of(&self.each_token),
            end_to_end_ms: LatencyReport::of(&self.to_end),
            queue_growth: queue_growth(
                self.to_first_token.iter().map(|&(_, arrived, wait)| (arrived, wait)).collect(),
            ),
        }
    }
}

fn first_tokens<'a>(times: impl Iterator<Item = &'a (usize, Duration, Duration)>) -> LatencyReport {
    LatencyReport::of(&times.map(|(.., wait)| *wait).collect::<Vec<_>>())
}
