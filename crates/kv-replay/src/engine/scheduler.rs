//! The scheduler: which requests run or wait, and what each iteration writes and reads.

mod arriving;
mod budget;
mod ending;
mod split;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use cuda_driver::guard;
use kv_plane::manager::{
    ChangeError, Missing, ReserveError as Refusal, SequenceError, SuspendError,
};
use kv_plane::{
    Admission, Committed, NoRoom, OpenStep, Request, ReserveError, Room, Sequence, Tokens, Waiting,
};
use kv_pool::ClaimError;
use kv_pool::clock::ManualClock;
use kv_pool::policy::ReuseHint;

use super::arrivals::Arrivals;
use super::batch::Batch;
use super::cache::Compute;
use super::chance::{Chance, SLEEP_ITERATIONS_MAX};
use super::content::Content;
use super::error::AdmitError;
use super::expected::Oracle;
use super::handover::Handover;
use super::live::{Live, Staged};
use super::memory;
use super::model::Model;
use super::recorder::Recorder;
use super::verify::{PartSums, Reading, SequenceSums, Verifier};
use super::{OVERLAP_DEPTH, RunError};
use crate::config::{Life, RunConfig};
use crate::hints;
use crate::report::{RunReport, tenants};
use crate::trace::Trace;

/// Number of iterations in a row without work after which a waiting request can never run.
const IDLE_ITERATIONS_MAX: u32 = 4;

/// Number of times that a request is computed anew because nothing else runs and it is stuck.
const STUCK_MAX: u32 = 3;

/// By how much the clock advances in an iteration without work while blocks are on their way.
const WAIT: Duration = Duration::from_millis(1);

/// Time between looks for what other nodes do.
const LOOK: Duration = Duration::from_micros(200);

/// Number of tokens of a chunk of the grid to which stores are aligned: several of the trace's
/// blocks, so that a cached prefix often ends inside a chunk.
pub const GRID_TOKENS: u64 = 2048;

/// The state of a run between two iterations.
pub(super) struct Scheduler<'a, C> {
    trace: &'a Trace,
    pub(super) live: BTreeMap<usize, Live>,
    pub(super) cache: C,
    verifier: Verifier,
    content: Content,
    oracle: Oracle,
    life: Life,
    /// What each request of the trace says when it ends; empty without hints.
    hints: Vec<Option<ReuseHint>>,
    pub(super) chance: Chance,
    step_tokens: u64,
    block_tokens: u64,
    token_bytes: u64,
    /// Index of the first request of the trace that nothing is known of yet.
    next: usize,
    next_branch: usize,
    /// Requests to be admitted, in this order. Preempted ones come first.
    waiting: VecDeque<usize>,
    asleep: Vec<usize>,
    /// Requests with tokens to write, in the order of their admission.
    running: Vec<usize>,
    launched: u64,
    /// Steps whose checksums were not compared yet, oldest first.
    readings: VecDeque<Reading>,
    /// The request that was refused since the last admission, and the reason.
    refused: Option<(usize, AdmitError)>,
    pub(super) iteration: u64,
    idle_iterations: u32,
    /// Set to the latest arrival time among the admitted requests.
    pub(super) clock: ManualClock,
    arrived_ms: u64,
    /// The clock of arrivals, if the run waits for them.
    pub(super) arrivals: Option<Arrivals>,
    pub(super) model: Option<Model>,
    /// What the run does over time, if that is to be recorded.
    pub(super) recorder: Recorder,
    /// When time was last looked at, in a run by the host's clock.
    pub(super) real: Option<Instant>,
    /// Tokens of the present iteration, skipped ones included.
    planned: u64,
    /// Tokens that the draft model can compute in it beside those that are reserved.
    pub(super) drafts_left: u64,
    pub(super) draft_layers: u32,
    batch: Batch,
    checksums: Vec<u64>,
    /// What other nodes compute for this one, or this one for them.
    pub(super) handover: Handover,
}

enum Advance {
    Done,
    /// There is no block for the next token.
    Stalled(NoRoom),
}

impl<'a, C: Compute> Scheduler<'a, C> {
    pub(super) fn new(
        cache: C,
        config: &RunConfig,
        trace: &'a Trace,
        clock: ManualClock,
    ) -> Result<Self, RunError> {
        let shapes = cache.shapes();
        let hints = match config.life.hints {
            true => hints::of_requests(&trace.requests, trace.block_tokens),
            false => Vec::new(),
        };
        Ok(Self {
            trace,
            live: BTreeMap::new(),
            verifier: Verifier::new(config.verify, config.block_tokens, config.seed),
            content: Content::new(config.seed, config.block_tokens, trace.block_tokens),
            oracle: Oracle::new(shapes, config.block_tokens)?,
            life: config.life,
            hints,
            chance: Chance::new(config.life, config.seed),
            step_tokens: config.step_tokens.into(),
            block_tokens: config.block_tokens.into(),
            token_bytes: config.block_bytes()? / u64::from(config.block_tokens).max(1),
            cache,
            next: 0,
            next_branch: trace.requests.len(),
            waiting: VecDeque::new(),
            asleep: Vec::new(),
            running: Vec::new(),
            launched: 0,
            readings: VecDeque::new(),
            refused: None,
            iteration: 0,
            idle_iterations: 0,
            clock,
            arrived_ms: 0,
            arrivals: None,
            model: None,
            recorder: Recorder::default(),
            real: None,
            planned: 0,
            drafts_left: 0,
            draft_layers: config.draft_layers,
            batch: Batch::default(),
            checksums: Vec::new(),
            handover: Handover::None,
        })
    }

    pub(super) fn has_work(&self) -> bool {
        self.next < self.trace.requests.len() || !self.live.is_empty() || self.handover.has_work()
    }

    pub(super) fn running(&self) -> usize {
        self.running.len()
    }

    pub(super) fn blocks_in_use(&self) -> u64 {
        memory::filled(self.cache.manager())
    }

    pub(super) fn iterate(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        let iterated = self.iteration(report);
        let lists = [self.running.len(), self.waiting.len(), self.asleep.len()];
        self.recorder.sample(lists, &self.cache, report);
        iterated
    }

    fn iteration(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        self.wait_for_arrival();
        let begun = self.recorder.begin();
        self.cache.about_to_wait(OVERLAP_DEPTH as usize);
        let step = self.cache.begin_step()?;
        self.recorder.called("begin a step", begun);
        self.iteration += 1;
        self.compare_completed(report)?;
        self.commit(self.cache.manager().completed_step())?;
        self.commit_drafts()?;
        (self.planned, self.drafts_left) = (0, self.step_tokens);
        self.hear(report)?;
        self.swing(report)?;
        self.cancel(report);
        self.wake()?;
        self.advance_running(report)?;
        self.adopt_whole(report)?;
        self.admit_waiting(report)?;
        guard!("replay.adopts-early", self.adopt_early(report)?);
        if self.planned == 0 {
            return self.idle(step, report);
        }
        self.idle_iterations = 0;
        memory::note(report, self.cache.manager());
        self.launch(&step, report)?;
        let number = step.number();
        let begun = self.recorder.begin();
        self.cache.finish_step(step)?;
        self.recorder.called("finish a step", begun);
        self.retire_finished(number);
        report.iterations += 1;
        report.bytes_transferred += self.batch.written() * self.token_bytes;
        report.peak_device_blocks = report.peak_device_blocks.max(self.blocks_in_use());
        Ok(())
    }

    pub(super) fn manager(&self) -> &kv_plane::manager::Manager {
        self.cache.manager()
    }

    /// Returns the cache, with every sequence released.
    pub(super) fn into_cache(self) -> C {
        self.cache
    }

    /// An iteration without work: waits for the work on the device, because it holds the blocks
    /// that waiting requests need.
    fn idle(&mut self, step: OpenStep, report: &mut RunReport) -> Result<(), RunError> {
        let moving = self.cache.manager().lower_stats().open_tickets > 0;
        self.cache.finish_step(step)?;
        let begun = self.recorder.begin();
        self.cache.about_to_wait(0);
        self.cache.drain()?;
        self.recorder.called("drain", begun);
        self.compare_completed(report)?;
        if moving {
            // Time passes while requests wait for loads.
            match self.real {
                Some(_) => self.pause(),
                None => self.clock.advance(WAIT),
            }
            self.refused = None;
            return Ok(());
        }
        if self.handover.waits() {
            return self.wait_for_nodes(report);
        }
        self.idle_iterations += 1;
        if self.idle_iterations == IDLE_ITERATIONS_MAX / 2 {
            let refused = self.refused.iter().map(|(request, _)| *request);
            let stuck: Vec<_> = refused.chain(self.asleep.iter().copied()).collect();
            stuck.into_iter().for_each(|request| self.forget_scattered(request, report));
        }
        match self.refused.take() {
            Some((request, source)) if self.idle_iterations > self.idle_iterations_max() => {
                Err(RunError::Admit { request, source })
            }
            _ => Ok(()),
        }
    }

    /// See [`IDLE_ITERATIONS_MAX`]. Suspended requests may share blocks that keep granules from a group, until they
    /// are resumed.
    fn idle_iterations_max(&self) -> u32 {
        let shares = !self.cache.manager().granules().is_empty();
        match shares && !self.asleep.is_empty() {
            true => IDLE_ITERATIONS_MAX + SLEEP_ITERATIONS_MAX as u32,
            false => IDLE_ITERATIONS_MAX,
        }
    }

    /// Where groups share memory, a cached prefix may keep more granules from other groups than a request leaves
    /// them, though the request fits: its blocks are spread over all of them. It is computed again instead.
    fn forget_scattered(&mut self, number: usize, report: &mut RunReport) {
        let Some(shared) = report.memory.as_mut().and_then(|memory| memory.shared.as_mut()) else {
            return;
        };
        let Some(request) = self.live.get_mut(&number) else { return };
        let waits = request.request.as_ref().map(|request| request.tokens());
        let sleeps = request.sequence.as_ref().map(Sequence::known);
        self.cache.forget(request.content.names(waits.or(sleeps).unwrap_or(0)));
        shared.forgotten += 1;
    }

    /// Commits the ids that have come out of steps up to `step`.
    fn commit(&mut self, step: u64) -> Result<(), RunError> {
        for (&number, request) in &mut self.live {
            let Some(sequence) = request.sequence.as_mut() else { continue };
            while let Some((at, ids)) = request.outcomes.pop_front_if(|(at, _)| *at <= step) {
                let known = sequence.known();
                let full = (known / self.block_tokens) as usize;
                let names = &request.content.names(known + ids)[full..];
                let ids = Tokens::Named { count: ids, names };
                let committed = self.cache.commit(sequence, at, ids);
                let refused = |source| RunError::Commit { request: number, source };
                if let Committed::Redo { .. } = committed.map_err(refused)? {
                    request.drafted = None;
                    request.outcomes.clear();
                }
                if let Some(arrivals) = &mut self.arrivals {
                    arrivals.generate(number);
                }
            }
        }
        Ok(())
    }

    fn wake(&mut self) -> Result<(), RunError> {
        let mut asleep = std::mem::take(&mut self.asleep);
        for &number in &asleep {
            let Some(request) = self.live.get_mut(&number) else { continue };
            let Some(sequence) = request.sequence.as_mut() else { continue };
            if request.wakes > self.iteration {
                continue;
            }
            match self.cache.resume(sequence) {
                Ok(Room::Given(_)) => self.running.push(number),
                Ok(Room::Lacks(_)) => {}
                Err(source) => return Err(RunError::Resume { request: number, source }),
            }
        }
        asleep.retain(|number| !self.running.contains(number));
        self.asleep.append(&mut asleep);
        Ok(())
    }

    fn advance_running(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        let mut index = 0;
        while index < self.running.len() {
            let number = self.running[index];
            if self.rests(number, report)? {
                self.running.remove(index);
                continue;
            }
            index += 1;
            self.branch(number, report)?;
            let Advance::Stalled(no_room) = self.advance(number)? else { continue };
            let releasing = self.live.values().any(|request| request.over_in.is_some());
            if retiring(&no_room) > 0
                || releasing
                || guard!("replay.filled-gives-way", self.gives_way(report)?, else false)
            {
                // Blocks are being released. The request skips this iteration.
                continue;
            }
            // Requests behind this one have written nothing in this iteration yet.
            match self.running.len() {
                1 if self.asleep.is_empty() && !self.begins_anew(number, report) => {
                    return Err(RunError::Admit { request: number, source: no_room.into() });
                }
                1 if self.idle_iterations >= IDLE_ITERATIONS_MAX / 2 => {
                    self.begins_anew(number, report);
                }
                1 => {}
                _ => self.preempt_last(report),
            }
        }
        Ok(())
    }

    /// Suspends a request whose turn it is. Whether it is suspended: it leaves the device with its last ids.
    fn rests(&mut self, number: usize, report: &mut RunReport) -> Result<bool, RunError> {
        let Some(request) = self.live.get_mut(&number) else { return Ok(false) };
        let Some(sequence) = request.sequence.as_mut() else { return Ok(false) };
        let Some(sleep) = self.chance.sleeps(number, self.iteration) else { return Ok(false) };
        match self.cache.suspend(sequence) {
            Ok(()) => {
                request.wakes = self.iteration + sleep;
                request.drafted = None;
                self.asleep.push(number);
                report.suspensions += 1;
                Ok(true)
            }
            Err(SuspendError::NoRoom(_)) => Ok(false),
            Err(source) => Err(RunError::Resume { request: number, source: source.into() }),
        }
    }

    /// Makes the branches of a request whose prompt is computed, as soon as all its ids are there.
    fn branch(&mut self, number: usize, report: &mut RunReport) -> Result<(), RunError> {
        let Some(request) = self.live.get_mut(&number) else { return Ok(()) };
        let branches = request.branches();
        let Some(sequence) = request.sequence.as_mut() else { return Ok(()) };
        if !branches || sequence_open(sequence) {
            return Ok(());
        }
        match self.cache.fork(sequence) {
            Ok(twin) => {
                request.drafted = None;
                request.twins -= 1;
                let (from, branch) = (twin.known(), self.next_branch);
                let twin = request.branch(from, branch as u64, twin);
                self.next_branch += 1;
                self.live.insert(branch, twin);
                self.running.push(branch);
                report.forks += 1;
                Ok(())
            }
            // Another iteration has room for it.
            Err(ChangeError::NoRow { .. }) => Ok(()),
            Err(source) => Err(RunError::Fork { request: number, source }),
        }
    }

    /// Preempts the request that was admitted last. It is computed again later.
    fn preempt_last(&mut self, report: &mut RunReport) {
        let Some(number) = self.running.pop() else { return };
        if let Some(request) = self.live.get_mut(&number) {
            request.preempt();
        }
        self.waiting.push_front(number);
        report.preemptions += 1;
    }

    /// Has the only request that runs computed anew, if it is stuck because its blocks are spread over the granules
    /// that another group needs. Whether it is: a request that is stuck again and again has too little memory.
    fn begins_anew(&mut self, number: usize, report: &mut RunReport) -> bool {
        let shares = !self.cache.manager().granules().is_empty();
        let request = self.live.get_mut(&number).filter(|_| shares);
        let Some(request) = request.filter(|request| request.stuck < STUCK_MAX) else {
            return false;
        };
        request.stuck += 1;
        self.preempt_last(report);
        self.forget_scattered(number, report);
        true
    }

    /// Has every request computed again that no step up to `step` has completed: all that was computed is
    /// lost.
    fn start_over(&mut self, step: u64) {
        guard!("replay.void-sums-dropped", self.readings.retain(|reading| reading.step <= step));
        let mut again: Vec<_> = self.running.drain(..).chain(self.asleep.drain(..)).collect();
        for (&number, request) in &mut self.live {
            if request.cancelled || request.sequence.is_none() {
                continue;
            }
            match request.over_in {
                Some(last) if last <= step => continue,
                // Its last token is in a step that is void, and it is not among the running ones any more.
                Some(_) => guard!("replay.void-last-step-again", again.push(number), else continue),
                None => {}
            }
            request.over_in = None;
            request.preempt();
        }
        again.into_iter().rev().for_each(|number| self.waiting.push_front(number));
    }

    /// Reserves and plans a request's next tokens: one if it is generating, with drafts behind it, else a
    /// piece of its prompt.
    fn advance(&mut self, number: usize) -> Result<Advance, RunError> {
        let budget = self.step_tokens - self.planned;
        let Some(request) = self.live.get_mut(&number) else { return Ok(Advance::Done) };
        let forks = request.branches();
        let Some(sequence) = request.sequence.as_mut() else { return Ok(Advance::Done) };
        // A fork waits for its ids.
        if budget == 0 || forks {
            return Ok(Advance::Done);
        }
        // With drafts in flight, it may be that the next tokens are its last ones.
        let left = request.total.saturating_sub(sequence.upper());
        let wanted = match sequence.to_compute() {
            0 | 1 => (1 + u64::from(self.life.drafts)).min(left),
            more => more.min(self.life.chunk()),
        };
        let mut wanted = wanted.min(budget) as u32;
        if wanted == 0 {
            return Ok(Advance::Done);
        }
        let shares = !self.cache.manager().granules().is_empty();
        let begun = self.recorder.begin();
        let mut reserved = self.cache.reserve(sequence, wanted);
        // Groups that share memory have no blocks of their own for the chunk of a window.
        while let Ok(Room::Lacks(_)) = &reserved
            && shares
            && wanted > 1
        {
            wanted /= 2;
            reserved = self.cache.reserve(sequence, wanted);
        }
        self.recorder.called("reserve", begun);
        match reserved {
            Ok(Room::Given(_)) => {}
            Ok(Room::Lacks(no_room)) => return Ok(Advance::Stalled(no_room)),
            Err(ReserveError::Refused(Refusal::Sequence(SequenceError::Redo { .. }))) => {
                request.drafted = None;
                request.outcomes.clear();
                return Ok(Advance::Done);
            }
            Err(source) => return Err(RunError::Reserve { request: number, source }),
        }
        self.plan(number, 0);
        Ok(Advance::Done)
    }

    /// Plans the tokens that were reserved, with `skip` tokens before them that are cached.
    fn plan(&mut self, number: usize, skip: u64) {
        let Some(request) = self.live.get_mut(&number) else { return };
        let Some(sequence) = request.sequence.as_mut() else { return };
        if sequence.resolved() == sequence.upper() {
            request.truth = sequence.upper();
        }
        // Where the tokens begin, which the device finds out from the counts of accepted drafts.
        let start = request.truth;
        let end = start + u64::from(sequence.next());
        // What is behind the known tokens is drafts. The first unknown one was sampled, and is on its way.
        let sure = sequence.known().max(start + 1).min(end);
        let accepted = self.chance.accepted(number, start, (end - sure) as u32);
        let right = sure + u64::from(accepted);
        request.staged = Some(Staged { skip, start, right, end });
        request.truth = right;
        self.planned += skip + end - start;
        self.reserve_drafts(number);
    }

    /// Admits waiting requests in order, until the batch, the budget or the pool is full. They are
    /// admitted together, so that none claims blocks that another one found.
    fn admit_waiting(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        let budget = self.step_tokens - self.planned;
        let rows = self.cache.manager().free_rows();
        if budget == 0 || rows == 0 {
            return Ok(());
        }
        self.look_ahead(rows);
        let here = |number: &&usize| match &self.handover {
            Handover::Decode(decode) => decode.coming(**number).is_none(),
            Handover::Prefill(prefill) => !prefill.is_full(),
            Handover::None => true,
        };
        let numbers: Vec<usize> = self.waiting.iter().take(rows).filter(here).copied().collect();
        if numbers.is_empty() {
            return Ok(());
        }
        let take = |&number: &usize| Some((number, self.live.get_mut(&number)?.request.take()?));
        let mut queue: VecDeque<(usize, Request)> = numbers.iter().filter_map(take).collect();
        let begun = self.recorder.begin();
        let admission = self.cache.admit(&mut queue, budget);
        self.recorder.called("admit", begun);
        let places: Vec<usize> = queue.iter().map(|(number, _)| *number).collect();
        for (number, asked) in queue {
            if let Some(request) = self.live.get_mut(&number) {
                request.request = Some(asked);
            }
        }
        let Admission { admitted, refused, waiting, no_room } = admission?;
        let count = admitted.len() as u64;
        for ((number, _), sequence) in admitted {
            self.recorder.goes_on(number);
            self.note_arrival(number);
            self.begin(number, sequence, report)?;
        }
        if let Some(((number, _), source)) = refused.into_iter().next() {
            return Err(RunError::Admit { request: number, source: source.into() });
        }
        for (place, waiting) in waiting {
            self.recorder.waits(places[place], &waiting);
            if let Waiting::Bound(missing) = waiting {
                self.refused = Some((places[place], NoRoom::Bound(missing).into()));
            }
        }
        if let Some((place, no_room)) = no_room {
            self.recorder.lacks(places[place], &no_room);
            if no_room != NoRoom::Row {
                self.refused = Some((places[place], no_room.into()));
            }
        }
        self.waiting.retain(|number| {
            self.live.get(number).is_some_and(|request| request.sequence.is_none())
        });
        if count > 0 {
            self.refused = None;
            report.admissions += 1;
            report.most_admitted_at_once = report.most_admitted_at_once.max(count);
        }
        Ok(())
    }

    /// Adds the first tokens of an admitted request to the batch: those after its cached prefix, in
    /// a chunk that begins on the grid if the budget allows it.
    fn begin(
        &mut self,
        number: usize,
        mut sequence: Sequence,
        report: &mut RunReport,
    ) -> Result<(), RunError> {
        let budget = self.step_tokens - self.planned;
        let skipped = sequence.resolved() % GRID_TOKENS;
        // Where drafts are in flight, the device alone knows the slots, and those of cached tokens it does not.
        let skip = if skipped < budget && self.life.drafts == 0 { skipped } else { 0 };
        let chunk = u64::from(sequence.next()).min(self.life.chunk()).min(budget - skip);
        if chunk < sequence.next().into() {
            let reserved = self.cache.reserve(&mut sequence, chunk as u32);
            let reserved =
                reserved.map_err(|source| RunError::Reserve { request: number, source })?;
            // It has room for more.
            let given = reserved.given();
            given.map_err(|no_room| RunError::Admit { request: number, source: no_room.into() })?;
        }
        let Some(request) = self.live.get_mut(&number) else { return Ok(()) };
        if std::mem::replace(&mut request.uncounted, false) {
            let lives = self.chance.lives(number, request.total - request.content.prompt_tokens());
            let dies = lives.map(|iterations| self.iteration + 1 + iterations);
            request.dies = request.dies.or(dies);
            let (lookups, hits) = request.count_lookups(&sequence, self.block_tokens, report);
            tenants::note(&mut report.tenants, self.trace, number, |tenant| {
                tenant.block_lookups += lookups;
                tenant.block_hits += hits;
                tenant.prefix_tokens_reused += sequence.cached_tokens();
            });
            self.recorder.looked_up(self.trace, number, &sequence, self.block_tokens);
        }
        if let Handover::Prefill(prefill) = &mut self.handover {
            prefill.begin(number, &sequence);
        }
        request.sequence = Some(sequence);
        self.running.push(number);
        if chunk > 0 {
            self.plan(number, skip);
        }
        Ok(())
    }

    fn launch(&mut self, step: &OpenStep, report: &mut RunReport) -> Result<(), RunError> {
        let number = step.number();
        self.batch.clear();
        let (mut rows, mut readers) = (Vec::new(), Vec::new());
        let (mut prompt_tokens, mut generates) = (0, false);
        // The batch lists the tokens of its rows in the order of its rows.
        for (&request_number, request) in &mut self.live {
            let Some(staged) = request.staged.take() else { continue };
            let Some(sequence) = request.sequence.as_mut() else { continue };
            let Staged { start, right, end, .. } = staged;
            let prompt = request.content.prompt_tokens();
            prompt_tokens += end.min(prompt).saturating_sub(start);
            generates |= end > prompt;
            // What is behind these may be rejected.
            let sure = sequence.known().max(start + 1).min(end);
            let what = (staged, sure, number);
            self.batch.add_further(&self.cache, sequence, &request.content, what);
            let from = sequence.draft_end();
            let drafted = from.max((from + sequence.next_draft()).min(right));
            if drafted > from {
                request.drafted = Some((number, drafted));
            }
            report.draft_model_tokens += sequence.next_draft();
            match self.life.drafts {
                0 => self.batch.add(&self.cache, sequence, &request.content, staged)?,
                _ => self.batch.add_unplaced(&request.content, staged, number),
            }
            // Ids come out if nothing known is left to compute, wherever the tokens begin.
            if sequence.upper() + u64::from(sequence.next()) >= sequence.known() {
                request.outcomes.push_back((number, 1 + right - sure));
            }
            report.staged_behind_open_ids += u64::from(sequence.resolved() < sequence.upper());
            request.expected.cover(&request.content, right);
            let partial = request.expected.partial(&request.content, right);
            let row = rows.len();
            let states = request.expected.states(&request.content, start);
            let drafted = match self.draft_layers {
                0 => (0, Vec::new()),
                _ => (drafted, request.expected.partial(&request.content, drafted)),
            };
            let sums = SequenceSums {
                row,
                request: request_number,
                start,
                tokens: right,
                partial,
                states,
                drafted,
            };
            rows.push(sums);
            self.batch.read(right, right - staged.start, right < end, sequence.row());
            readers.push(sequence);
            // Whoever ends here is released when this step is compared.
            if right >= request.total {
                request.over_in = Some(number);
            }
        }
        self.batch.finish();
        let read = self.verifier.reads();
        let begun = self.recorder.begin();
        self.cache.launch(step, &self.batch, &mut readers, read)?;
        self.recorder.called("stage", begun);
        self.launched = number;
        if let Some(model) = &self.model {
            // Behind the waits for blocks that are on their way, and before the step's end.
            model.compute(prompt_tokens, generates)?;
        }
        self.commit_drafts()?;
        if read {
            self.readings.push_back(Reading { step: number, rows });
        }
        Ok(())
    }

    /// Compares the checksums that have arrived, and releases requests whose last ones were
    /// compared.
    fn compare_completed(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        if let Some(step) = self.cache.take_loss() {
            self.start_over(step);
        }
        let completed = self.cache.manager().completed_step();
        let comparable = guard!("replay.sums-after-step", completed, else completed + 1);
        while let Some(reading) = self.readings.pop_front_if(|reading| reading.step <= comparable) {
            for part in 0..self.oracle.parts() {
                let width = self.cache.checksums(part, &reading, &mut self.checksums)?;
                let (sums, of) = (&self.checksums[..], (part, self.oracle.reads(part)));
                let sums = PartSums { sums, width };
                self.verifier.compare(&reading, of, &sums, &self.live, report);
            }
        }
        if let Handover::Prefill(prefill) = &mut self.handover {
            prefill.give(&self.cache.local()?.cache, &mut self.live)?;
        }
        self.finish_prompts(completed)?;
        let cache = &mut self.cache;
        let arrivals = &mut self.arrivals;
        self.live.retain(|&number, request| {
            let over = request.over_in.is_some_and(
                |step| guard!("replay.released-after-last-sums", step <= completed, else true),
            );
            if !over {
                return true;
            }
            let prompt = request.content.prompt_tokens();
            if !request.cancelled && !request.forked {
                report.finished += 1;
                report.prompt_tokens += prompt;
                report.generated_tokens += request.total - prompt;
                tenants::note(&mut report.tenants, self.trace, number, |tenant| {
                    tenant.finish(prompt, request.total - prompt);
                });
                if let Some(arrivals) = arrivals {
                    arrivals.finish(number, request.total - prompt);
                }
            }
            if request.sequence.take().is_some() {
                // Nobody asks for an answer again.
                let names = request.content.names(request.total);
                let full = prompt as usize / self.block_tokens as usize;
                cache.forget(&names[full.min(names.len())..]);
            }
            false
        });
        Ok(())
    }
}

impl Live {
    fn branches(&self) -> bool {
        let computed = self.sequence.as_ref().map_or(0, Sequence::upper);
        self.twins > 0 && computed >= self.content.prompt_tokens()
    }
}

fn sequence_open(sequence: &Sequence) -> bool {
    sequence.awaits().is_some()
}

/// Number of blocks that can be claimed once steps have completed.
fn retiring(no_room: &NoRoom) -> usize {
    match no_room {
        NoRoom::Blocks(Missing { reason: ClaimError::Exhausted { retiring, .. }, .. }) => *retiring,
        _ => 0,
    }
}
