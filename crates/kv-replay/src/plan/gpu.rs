//! One simulated GPU without its bytes: a pool that decides which blocks it has, and iterations that take their time.
//!
//! It schedules as [`engine`](crate::engine) does, with the same pool, the same cost of the model and the same link. It leaves
//! out what moves no block: calls, tables and kernels of the cache. A request takes room for its whole answer when it is admitted.

use std::collections::VecDeque;
use std::time::Duration;

use kv_pool::clock::ManualClock;
use kv_pool::policy::PolicyError;
use kv_pool::store::StoreRules;
use kv_pool::{BlockHash, BlockPool, Claimed, Naming, Pinned, PoolConfig, Tier};

use super::Choice;
use super::rules::Rules;
use crate::trace::{Request, Trace};

/// A multiplier that distributes numbers over names: 2^64 divided by the golden ratio.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// The blocks of a request, which are given back from the last one to the first: fields are dropped in this order.
struct Held {
    _unnamed: Claimed,
    _written: Pinned,
    _found: Vec<Pinned>,
}

struct Running {
    request: usize,
    prompt_left: u64,
    decode_left: u64,
    /// What the step in progress computes of it.
    part: Part,
    held: Held,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Part {
    Nothing,
    Prompt,
    EndOfPrompt,
    Token,
}

/// What an iteration does, or several equal ones.
#[derive(Clone, Copy, Debug, Default)]
struct Step {
    begun_ns: u64,
    /// What is moved first, and what each iteration computes.
    moves_ns: u64,
    each_ns: u64,
    iterations: u64,
}

/// What happened to a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Event {
    FirstToken,
    End,
}

/// What was counted on all GPUs together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) lookups: u64,
    pub(super) hits: u64,
    pub(super) host_hits: u64,
    pub(super) stored: u64,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    pub(super) generated_tokens: u64,
    pub(super) busy_ns: u64,
    pub(super) iterations: u64,
}

pub(super) struct Gpu {
    pool: BlockPool,
    clock: ManualClock,
    clock_ms: u64,
    waiting: VecDeque<usize>,
    running: Vec<Running>,
    /// What ended in the last step: the host gives it back when it has seen that.
    over: Vec<Held>,
    step: Option<Step>,
    /// When the last iteration began: the next one was planned then.
    planned_ns: u64,
    names: Vec<BlockHash>,
}

impl Gpu {
    /// # Errors
    ///
    /// [`PolicyError`] for more blocks than a policy can have.
    pub(super) fn new(choice: &Choice, rules: &Rules) -> Result<Self, PolicyError> {
        let (device, host) = (choice.device_blocks, choice.host_blocks);
        let config = PoolConfig { secondary_blocks: host, ..PoolConfig::primary_only(device) };
        let clock = ManualClock::new();
        let make = || choice.policy.make(device.saturating_add(host));
        let builder = BlockPool::builder(&config).clock(clock.clone());
        let builder = builder.policy(Tier::Primary, make()?).policy(Tier::Secondary, make()?);
        let store = rules.store.make(StoreRules::new(host))?;
        let builder = match store.filter(|_| host > 0) {
            Some(store) => builder.store_policy(store),
            None => builder,
        };
        let too_large = |_| PolicyError::TooManyBlocks { blocks: device.saturating_add(host) };
        Ok(Self {
            pool: builder.build().map_err(too_large)?,
            clock,
            clock_ms: 0,
            waiting: VecDeque::new(),
            running: Vec::new(),
            over: Vec::new(),
            step: None,
            planned_ns: 0,
            names: Vec::new(),
        })
    }

    /// Requests that are here and not done.
    pub(super) fn outstanding(&self) -> usize {
        self.waiting.len() + self.running.len()
    }

    /// When the step in progress ends; none if the GPU has nothing to do.
    pub(super) fn ends_ns(&self) -> Option<u64> {
        let step = self.step?;
        let computes = step.each_ns.saturating_mul(step.iterations);
        Some(step.begun_ns.saturating_add(step.moves_ns).saturating_add(computes))
    }

    /// A request arrives. Equal iterations go on up to the one behind that in which it arrives, which is planned already.
    pub(super) fn arrive(&mut self, request: usize, now_ns: u64) {
        self.waiting.push_back(request);
        if let Some(step) = &mut self.step
            && step.each_ns > 0
        {
            let since = now_ns.saturating_sub(step.begun_ns.saturating_add(step.moves_ns));
            step.iterations = step.iterations.min(since / step.each_ns + 2);
        }
    }

    /// Ends the step in progress, and says what came of which request.
    pub(super) fn complete(&mut self, counts: &mut Counts, mut tell: impl FnMut(usize, Event)) {
        let (Some(ends_ns), Some(step)) = (self.ends_ns(), self.step.take()) else { return };
        self.planned_ns = ends_ns.saturating_sub(step.each_ns);
        counts.busy_ns += ends_ns - step.begun_ns;
        counts.iterations += step.iterations;
        let epoch = self.pool.begin_epoch();
        self.over.clear();
        for run in &mut self.running {
            match std::mem::replace(&mut run.part, Part::Nothing) {
                Part::EndOfPrompt => tell(run.request, Event::FirstToken),
                Part::Token => run.decode_left = run.decode_left.saturating_sub(step.iterations),
                Part::Prompt | Part::Nothing => {}
            }
            if run.decode_left == 0 {
                tell(run.request, Event::End);
            }
        }
        let over = self.running.extract_if(.., |run| run.decode_left == 0);
        self.over.extend(over.map(|run| run.held));
        // An epoch that was begun here is open.
        let _ = self.pool.complete_epoch(epoch);
    }

    /// Begins the next step at this moment, if there is something to do.
    pub(super) fn begin(&mut self, trace: &Trace, rules: &Rules, now_ns: u64, counts: &mut Counts) {
        if self.running.is_empty() {
            // The host waits for the device, and gives back what it holds.
            let epoch = self.pool.begin_epoch();
            self.over.clear();
            let _ = self.pool.complete_epoch(epoch);
            self.planned_ns = now_ns;
        }
        let mut budget = u64::from(rules.step_tokens);
        let (mut prompt_tokens, mut decodes) = (0, u64::MAX);
        for run in &mut self.running {
            advance(run, &mut budget, &mut prompt_tokens, &mut decodes);
        }
        let before = self.pool.counters().offloaded;
        let (mut loaded, mut refused) = (0, false);
        while budget > 0 && self.running.len() < rules.max_batch as usize {
            let Some(&number) = self.waiting.front() else { break };
            let request = &trace.requests[number];
            if rules.arrival_ns(request) > self.planned_ns {
                break;
            }
            let Some(mut run) = self.admit(number, trace, rules, counts, &mut loaded) else {
                refused = true;
                break;
            };
            self.waiting.pop_front();
            advance(&mut run, &mut budget, &mut prompt_tokens, &mut decodes);
            self.running.push(run);
        }
        if self.running.is_empty() {
            return;
        }
        let stored = self.pool.counters().offloaded - before;
        counts.stored += stored;
        let moves_ns = rules.load_ns(loaded).saturating_add(rules.store_ns(stored));
        let generates = decodes != u64::MAX;
        let cost = rules.model.of_iteration(prompt_tokens, generates);
        // Without prompts, iterations are equal until one ends, or a request that waits may come in.
        let full = self.running.len() >= rules.max_batch as usize;
        let alike = prompt_tokens == 0 && (self.waiting.is_empty() || full || refused);
        let iterations = if alike { decodes.max(1) } else { 1 };
        let each_ns = u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX);
        self.step = Some(Step { begun_ns: now_ns, moves_ns, each_ns, iterations });
    }

    /// Looks up a request, brings back what host memory has, and takes room for the rest; none if there is too little.
    fn admit(
        &mut self,
        number: usize,
        trace: &Trace,
        rules: &Rules,
        counts: &mut Counts,
        loaded: &mut u64,
    ) -> Option<Running> {
        let request = &trace.requests[number];
        // As in a run, ages are those of arrivals.
        let arrived_ms = rules.arrival_ns(request) / 1_000_000;
        self.clock.advance(Duration::from_millis(arrived_ms.saturating_sub(self.clock_ms)));
        self.clock_ms = self.clock_ms.max(arrived_ms);
        self.pool.tick();
        let tokens = u64::from(rules.block_tokens);
        let all = request.input_length.saturating_add(request.output_length);
        self.names.clear();
        let name = |block| name_of(request, number, block, tokens, trace.block_tokens);
        self.names.extend((0..all / tokens).map(name));
        // The last token of a prompt is always computed.
        let looked_up = (request.input_length.saturating_sub(1) / tokens) as usize;
        let found = self.pool.match_prefix(&self.names[..looked_up]);
        let hits = found.len();
        let far = found.locations().filter(|at| at.tier != Tier::Primary).count();
        let rest = (all.div_ceil(tokens) as usize).saturating_sub(hits);
        let mut claimed = self.claim(rest + far)?;
        let held = self.bring_back(found, claimed.split_off(rest))?;
        let after = hits
            .checked_sub(1)
            .map_or_else(Naming::default, |last| Naming::after(self.names[last]));
        let full = self.names.len().saturating_sub(hits);
        let unnamed = claimed.split_off(full);
        let written = claimed.register(&self.names[hits..], after).ok()?;
        *loaded += far as u64;
        counts.lookups += looked_up as u64;
        counts.hits += hits as u64;
        counts.host_hits += far as u64;
        counts.prompt_tokens += request.input_length;
        counts.cached_tokens += hits as u64 * tokens;
        counts.generated_tokens += request.output_length;
        Some(Running {
            request: number,
            prompt_left: request.input_length - hits as u64 * tokens,
            decode_left: request.output_length,
            part: Part::Nothing,
            held: Held { _unnamed: unnamed, _written: written, _found: held },
        })
    }

    /// Brings the blocks of host memory among the found ones to the device, into these blocks.
    fn bring_back(&self, mut found: Pinned, mut room: Claimed) -> Option<Vec<Pinned>> {
        let mut held = Vec::new();
        loop {
            let Some(tier) = found.locations().next().map(|at| at.tier) else {
                held.reverse();
                return Some(held);
            };
            let run = found.locations().take_while(|at| at.tier == tier).count();
            let rest = found.split_off(run);
            held.push(match tier {
                Tier::Primary => found,
                _ => {
                    let later = room.split_off(run);
                    let here = std::mem::replace(&mut room, later);
                    self.pool.begin_onboard(found, here).ok()?.commit().pinned
                }
            });
            found = rest;
        }
    }

    /// Claims device blocks, and stores what is evicted for them.
    fn claim(&self, count: usize) -> Option<Claimed> {
        let mut claimed = self.pool.claim(count).ok()?;
        while let Some(offload) = claimed.take_offload() {
            offload.commit();
        }
        Some(claimed)
    }
}

/// Plans the next tokens of a request within the budget: one if it generates, otherwise a piece of its prompt.
fn advance(run: &mut Running, budget: &mut u64, prompt_tokens: &mut u64, decodes: &mut u64) {
    if *budget == 0 {
        return;
    }
    if run.prompt_left == 0 {
        *budget -= 1;
        *decodes = (*decodes).min(run.decode_left);
        run.part = Part::Token;
        return;
    }
    let piece = run.prompt_left.min(*budget);
    *budget -= piece;
    *prompt_tokens += piece;
    run.prompt_left -= piece;
    run.part = if run.prompt_left == 0 { Part::EndOfPrompt } else { Part::Prompt };
}

/// The name of a block of a request: of its prompt by the hash id that its last token is in, and of its answer by itself.
fn name_of(
    request: &Request,
    number: usize,
    block: u64,
    tokens: u64,
    trace_tokens: u64,
) -> BlockHash {
    let last = block * tokens + tokens - 1;
    let id = if last < request.input_length {
        request.hash_ids.get((last / trace_tokens) as usize)
    } else {
        None
    };
    let (content, piece) = match id {
        Some(&id) => (id, 2 * ((last % trace_tokens) / tokens)),
        None => (number as u64, 2 * block + 1),
    };
    // Equal for equal content and piece only; the low bits are spread.
    let mut low = content.wrapping_mul(SPREAD).wrapping_add(piece);
    low = (low ^ (low >> 30)).wrapping_mul(SPREAD);
    low = (low ^ (low >> 27)).wrapping_mul(SPREAD);
    BlockHash::from_u128(u128::from(content) << 64 | u128::from(low ^ (low >> 31)))
}
