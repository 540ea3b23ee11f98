//! Simulated GPUs behind a router, from the first arrival of a trace to its last token.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::gpu::{Counts, Event, Gpu};
use super::rules::Rules;
use super::{Choice, ChoiceReport, PlanError};
use kv_replay::report::{LatencyReport, queue_growth};
use kv_replay::trace::{Request, Trace};

/// Which GPU gets a request.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum Router {
    /// The one that got the longest beginning of the prompt last, unless it has much more to do than the others.
    #[default]
    Prefix,
    /// The one with the fewest requests.
    Least,
    /// One after the other.
    Turns,
}

/// A text that is no router.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("unknown router {found:?}; expected prefix, least or turns")]
pub struct UnknownRouter {
    /// The text.
    pub found: String,
}

impl FromStr for Router {
    type Err = UnknownRouter;

    fn from_str(text: &str) -> Result<Self, UnknownRouter> {
        match text {
            "prefix" => Ok(Self::Prefix),
            "least" => Ok(Self::Least),
            "turns" => Ok(Self::Turns),
            _ => Err(UnknownRouter { found: text.to_owned() }),
        }
    }
}

impl fmt::Display for Router {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefix => "prefix",
            Self::Least => "least",
            Self::Turns => "turns",
        })
    }
}

/// A GPU may have so many requests more than the mean, and half as many again, before a prefix there is given up.
const SLACK: usize = 4;

/// What the router knows.
struct Routing {
    router: Router,
    /// The GPU that each hash id was sent to last.
    sent: HashMap<u64, u32>,
    outstanding: usize,
    next: usize,
}

impl Routing {
    fn choose(&mut self, request: &Request, gpus: &[Gpu]) -> usize {
        let least = || (0..gpus.len()).min_by_key(|&at| gpus[at].outstanding()).unwrap_or(0);
        let to = match self.router {
            _ if gpus.len() == 1 => return 0,
            Router::Turns => self.next % gpus.len(),
            Router::Least => least(),
            Router::Prefix => {
                let known = request.hash_ids.iter().rev().find_map(|id| self.sent.get(id));
                let mean = self.outstanding / gpus.len();
                let most = mean + mean / 2 + SLACK;
                let known = known.map(|&to| to as usize);
                let to = known.filter(|&to| gpus[to].outstanding() <= most).unwrap_or_else(least);
                self.sent.extend(request.hash_ids.iter().map(|&id| (id, to as u32)));
                to
            }
        };
        self.next += 1;
        to
    }
}

/// Plays `trace` on the GPUs of a choice.
///
/// # Errors
///
/// [`PlanError`] if a request has no room on a GPU, or the choice is more than can be simulated.
pub fn simulate(trace: &Trace, choice: &Choice, rules: &Rules) -> Result<ChoiceReport, PlanError> {
    let longest = check(trace, choice, rules)?;
    let gpus: Result<Vec<_>, _> =
        (0..choice.gpus).map(|_| Gpu::new(choice, rules, longest)).collect();
    let mut gpus = gpus?;
    let (sent, router) = (HashMap::new(), rules.router);
    let mut routing = Routing { router, sent, outstanding: 0, next: 0 };
    let mut counts = Counts::default();
    let mut ends: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let mut times = Times::new(trace.requests.len());
    let mut last_ns = 0;
    let arrivals = trace.requests.iter().map(Some).chain([None]).enumerate();
    for (number, request) in arrivals {
        let until = request.map_or(u64::MAX, |request| rules.arrival_ns(request));
        while let Some(&Reverse((now_ns, at))) = ends.peek()
            && now_ns <= until
        {
            ends.pop();
            let gpu = &mut gpus[at];
            // A step that was cut short by an arrival has another end.
            if gpu.ends_ns() != Some(now_ns) {
                continue;
            }
            last_ns = last_ns.max(now_ns);
            gpu.complete(&mut counts, |request, event| {
                let entry = &trace.requests[request];
                times.tell(request, rules.arrival_ns(entry), now_ns, (event, entry.output_length));
                if let Event::End = event {
                    routing.outstanding -= 1;
                }
            })?;
            gpu.begin(trace, rules, now_ns, &mut counts)?;
            ends.extend(gpu.ends_ns().map(|end| Reverse((end, at))));
        }
        let Some(request) = request else { break };
        let at = routing.choose(request, &gpus);
        routing.outstanding += 1;
        gpus[at].arrive(number, until);
        if gpus[at].is_idle() {
            gpus[at].begin(trace, rules, until, &mut counts)?;
        }
        ends.extend(gpus[at].ends_ns().map(|end| Reverse((end, at))));
    }
    if times.to_end.len() < trace.requests.len() {
        return Err(unserved(trace.requests.len() - times.to_end.len(), rules));
    }
    Ok(report(choice, rules, &counts, times, last_ns))
}

/// What requests have waited for.
struct Times {
    /// When each request had its first token.
    first_ns: Vec<Option<u64>>,
    /// Arrivals, and the waits for the first token.
    to_first_token: Vec<(Duration, Duration)>,
    each_token: Vec<Duration>,
    to_end: Vec<Duration>,
}

impl Times {
    fn new(requests: usize) -> Self {
        let (to_first_token, each_token, to_end) = (Vec::new(), Vec::new(), Vec::new());
        Self { first_ns: vec![None; requests], to_first_token, each_token, to_end }
    }

    /// Takes in what happened to a request that has so many tokens to generate.
    fn tell(&mut self, request: usize, arrival: u64, now: u64, (event, tokens): (Event, u64)) {
        let since = |then: u64| Duration::from_nanos(now.saturating_sub(then));
        match event {
            Event::FirstToken => {
                self.first_ns[request] = Some(now);
                self.to_first_token.push((Duration::from_nanos(arrival), since(arrival)));
            }
            Event::End => {
                self.to_end.push(since(arrival));
                let behind = u32::try_from(tokens.saturating_sub(1)).unwrap_or(u32::MAX);
                if let Some(first) = self.first_ns[request]
                    && behind > 0
                {
                    self.each_token.push(since(first) / behind);
                }
            }
        }
    }
}

fn unserved(requests: usize, rules: &Rules) -> PlanError {
    PlanError::Unserved { requests, max_batch: rules.max_batch, step_tokens: rules.step_tokens }
}

/// Checks a choice; how many blocks the longest request has.
pub(super) fn check(trace: &Trace, choice: &Choice, rules: &Rules) -> Result<u64, PlanError> {
    let tokens = u64::from(rules.block_tokens);
    let multiple =
        tokens.is_multiple_of(trace.block_tokens) || trace.block_tokens.is_multiple_of(tokens);
    if !multiple || tokens == 0 || trace.block_tokens == 0 {
        return Err(PlanError::BlockTokens { block_tokens: tokens, trace: trace.block_tokens });
    }
    if choice.gpus == 0 || choice.gpus > super::GPUS_MAX {
        return Err(PlanError::Gpus { gpus: choice.gpus });
    }
    if rules.max_batch == 0 || rules.step_tokens == 0 {
        return Err(unserved(trace.requests.len(), rules));
    }
    if choice.disk_blocks > 0 && choice.host_blocks == 0 {
        return Err(PlanError::DiskWithoutHost { disk_blocks: choice.disk_blocks });
    }
    let mut longest = 1;
    for (request, entry) in trace.requests.iter().enumerate() {
        let blocks = entry.input_length.saturating_add(entry.output_length).div_ceil(tokens);
        if blocks > choice.device_blocks {
            let device_blocks = choice.device_blocks;
            return Err(PlanError::RequestTooLarge { request, blocks, device_blocks });
        }
        longest = blocks.max(longest);
    }
    Ok(longest)
}

fn report(
    choice: &Choice,
    rules: &Rules,
    counts: &Counts,
    times: Times,
    last_ns: u64,
) -> ChoiceReport {
    let share = |part: u64, all: u64| if all == 0 { 0.0 } else { part as f64 / all as f64 };
    let all_ns = last_ns.saturating_mul(choice.gpus.into());
    let seconds = last_ns as f64 / 1e9;
    ChoiceReport {
        choice: *choice,
        block_lookups: counts.lookups,
        block_hits: counts.hits,
        hit_rate: share(counts.hits, counts.lookups),
        host_hit_rate: share(counts.host_hits, counts.lookups),
        disk_reads_per_lookup: share(counts.disk_reads, counts.lookups),
        best_hit_rate: 0.0,
        prompt_tokens: counts.prompt_tokens,
        prefill_tokens_saved: counts.cached_tokens,
        generated_tokens: counts.generated_tokens,
        virtual_s: seconds,
        generated_tokens_per_s: if last_ns == 0 {
            0.0
        } else {
            counts.generated_tokens as f64 / seconds
        },
        busy: share(counts.busy_ns, all_ns),
        link_to_device: share(rules.load_ns(counts.host_hits), all_ns),
        link_to_host: share(rules.store_ns(counts.stored), all_ns),
        time_to_first_token_ms: LatencyReport::of(
            &times.to_first_token.iter().map(|&(_, wait)| wait).collect::<Vec<_>>(),
        ),
        time_per_output_token_ms: LatencyReport::of(&times.each_token),
        end_to_end_ms: LatencyReport::of(&times.to_end),
        queue_growth: queue_growth(times.to_first_token),
    }
}
