//! The scheduler: which requests run or wait, and what each iteration writes and reads.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use kv_cache::{Admission, AdmitError, KvCache, OpenStep, Sequence};
use kv_pool::clock::ManualClock;

use super::RunError;
use super::batch::Batch;
use super::content::Content;
use super::expected::{ExpectedSums, Oracle};
use super::live::Live;
use super::verify::{Reading, SequenceSums, Verifier};
use super::work::DeviceWork;
use crate::config::RunConfig;
use crate::report::RunReport;
use crate::trace::Trace;

/// Number of iterations in a row without work after which a waiting request can never run.
const IDLE_ITERATIONS_MAX: u32 = 4;

/// Number of tokens of a chunk of the grid to which stores are aligned: several of the trace's
/// blocks, so that a cached prefix often ends inside a chunk.
const GRID_TOKENS: u64 = 2048;

/// The state of a run between two iterations.
pub(super) struct Scheduler<'a> {
    trace: &'a Trace,
    live: BTreeMap<usize, Live>,
    cache: KvCache,
    work: DeviceWork,
    verifier: Verifier,
    content: Content,
    oracle: Oracle,
    max_batch: usize,
    step_tokens: u64,
    block_tokens: u64,
    token_bytes: u64,
    /// Index of the first request of the trace that was never admitted.
    next: usize,
    /// The requests from there on whose block hashes are already computed.
    prepared: VecDeque<Live>,
    /// Preempted requests, to be admitted before all others.
    preempted: VecDeque<usize>,
    /// Requests with tokens to write, in the order of their admission.
    running: Vec<usize>,
    /// Steps whose checksums were not compared yet, oldest first.
    readings: VecDeque<Reading>,
    /// The request that was refused since the last admission, and the reason.
    refused: Option<(usize, AdmitError)>,
    idle_iterations: u32,
    /// Set to the latest arrival time among the admitted requests.
    clock: ManualClock,
    arrived_ms: u64,
    batch: Batch,
    checksums: Vec<u64>,
}

/// The result of trying to write a request's next tokens.
enum Advance {
    Done,
    /// There is no block for the next token, but enough blocks are being released.
    Stalled {
        retiring: usize,
        error: AdmitError,
    },
}

impl<'a> Scheduler<'a> {
    pub(super) fn new(
        cache: KvCache,
        config: &RunConfig,
        trace: &'a Trace,
        clock: ManualClock,
    ) -> Result<Self, RunError> {
        let work = DeviceWork::new(&cache, config.step_tokens.into())?;
        let shapes = cache.parts().iter().map(|part| *part.shape());
        Ok(Self {
            trace,
            live: BTreeMap::new(),
            work,
            verifier: Verifier::new(config.verify, config.block_tokens, config.seed),
            content: Content::new(config.seed, config.block_tokens),
            oracle: Oracle::new(shapes, config.block_tokens)?,
            max_batch: config.max_batch as usize,
            step_tokens: config.step_tokens.into(),
            block_tokens: config.block_tokens.into(),
            token_bytes: cache.shape().token_bytes(),
            cache,
            next: 0,
            prepared: VecDeque::new(),
            preempted: VecDeque::new(),
            running: Vec::new(),
            readings: VecDeque::new(),
            refused: None,
            idle_iterations: 0,
            clock,
            arrived_ms: 0,
            batch: Batch::default(),
            checksums: Vec::new(),
        })
    }

    /// Whether some request is not yet finished and compared.
    pub(super) fn has_work(&self) -> bool {
        self.next < self.trace.requests.len() || !self.live.is_empty()
    }

    pub(super) fn running(&self) -> usize {
        self.running.len()
    }

    /// Number of device blocks in use.
    pub(super) fn blocks_in_use(&self) -> u64 {
        self.cache.stats().ready_blocks.saturating_sub(self.cache.pool().empty() as u64)
    }

    /// Runs one iteration.
    pub(super) fn iterate(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        let step = self.cache.begin_step()?;
        self.compare_completed(report)?;
        self.batch.clear();
        self.advance_running(report)?;
        self.admit_waiting(report)?;
        if self.running.is_empty() {
            return self.idle(step, report);
        }
        self.idle_iterations = 0;
        self.launch(&step)?;
        self.seal_written()?;
        self.retire_finished(step.number());
        self.cache.finish_step(step)?;
        report.iterations += 1;
        report.bytes_transferred += self.batch.written() * self.token_bytes;
        report.peak_device_blocks = report.peak_device_blocks.max(self.blocks_in_use());
        Ok(())
    }

    pub(super) fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// Returns the cache, with every sequence released.
    pub(super) fn into_cache(self) -> KvCache {
        self.cache
    }

    /// An iteration without work: waits for the work on the device, because it holds the blocks
    /// that waiting requests need.
    fn idle(&mut self, step: OpenStep, report: &mut RunReport) -> Result<(), RunError> {
        self.cache.finish_step(step)?;
        self.cache.drain()?;
        self.compare_completed(report)?;
        self.idle_iterations += 1;
        match self.refused.take() {
            Some((request, source)) if self.idle_iterations > IDLE_ITERATIONS_MAX => {
                Err(RunError::Admit { request, source })
            }
            _ => Ok(()),
        }
    }

    /// Gives every running request its next tokens, within the budget.
    fn advance_running(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        let mut index = 0;
        while index < self.running.len() {
            let number = self.running[index];
            index += 1;
            let Advance::Stalled { retiring, error } = self.advance(number)? else { continue };
            let releasing = self.live.values().any(|request| request.finished_in.is_some());
            if retiring > 0 || releasing {
                // Blocks are being released. The request skips this iteration.
                continue;
            }
            // Requests behind this one have written nothing in this iteration yet.
            match self.running.len() {
                1 => return Err(RunError::Admit { request: number, source: error }),
                _ => self.preempt_last(report),
            }
        }
        Ok(())
    }

    /// Preempts the request that was admitted last. It is computed again later.
    fn preempt_last(&mut self, report: &mut RunReport) {
        let Some(number) = self.running.pop() else { return };
        if let Some(request) = self.live.get_mut(&number) {
            request.sequence = None;
            request.written = 0;
        }
        self.preempted.push_front(number);
        report.preemptions += 1;
    }

    /// Adds a request's next tokens to the batch: one if it is generating, else a piece of its prompt.
    fn advance(&mut self, number: usize) -> Result<Advance, RunError> {
        let budget = self.step_tokens - self.batch.len() as u64;
        let Some(request) = self.live.get_mut(&number) else { return Ok(Advance::Done) };
        let Some(sequence) = request.sequence.as_mut() else { return Ok(Advance::Done) };
        if budget == 0 {
            return Ok(Advance::Done);
        }
        let start = request.written;
        if request.written == request.known {
            match self.cache.extend(sequence, request.known + 1) {
                Ok(()) => request.known += 1,
                Err(error) if error.is_retryable() => {
                    return Ok(Advance::Stalled { retiring: retiring(&error), error });
                }
                Err(source) => return Err(RunError::Admit { request: number, source }),
            }
        }
        let end = request.known.min(start + budget);
        self.batch.add(&self.cache, sequence, &request.content, start..end)?;
        request.written = end;
        Ok(Advance::Done)
    }

    /// Admits waiting requests in order, until the batch, the budget or the pool is full. They are
    /// admitted together, so that none claims blocks that another one found.
    fn admit_waiting(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        let budget = self.step_tokens - self.batch.len() as u64;
        let mut waiting = if budget > 0 { self.take_waiting() } else { Vec::new() };
        let Some(&(first, _)) = waiting.first() else { return Ok(()) };
        let requests: Vec<_> = waiting.iter().map(|(_, request)| request.to_admit()).collect();
        let admission = self.cache.admit_fitting(&requests, budget);
        let Admission { admitted, refused } =
            admission.map_err(|source| RunError::Admit { request: first, source })?;
        let others = waiting.split_off(admitted.len());
        if let Some((&(first, _), source)) = others.first().zip(refused) {
            if !source.is_retryable() {
                return Err(RunError::Admit { request: first, source });
            }
            self.refused = Some((first, source));
        }
        for (number, request) in others.into_iter().rev() {
            self.put_back(number, request);
        }
        if !admitted.is_empty() {
            self.refused = None;
            report.admissions += 1;
            report.most_admitted_at_once = report.most_admitted_at_once.max(admitted.len() as u64);
        }
        for ((number, mut request), sequence) in waiting.into_iter().zip(admitted) {
            self.note_arrival(number);
            count_lookups(&mut request, &sequence, self.block_tokens, report);
            self.begin(number, request, sequence)?;
        }
        Ok(())
    }

    /// Advances the clock to a request's arrival.
    fn note_arrival(&mut self, number: usize) {
        let Some(entry) = self.trace.requests.get(number) else { return };
        let more_ms = entry.timestamp_ms.saturating_sub(self.arrived_ms);
        self.clock.advance(Duration::from_millis(more_ms));
        self.arrived_ms += more_ms;
    }

    /// Takes the next waiting requests, while rows are free.
    fn take_waiting(&mut self) -> Vec<(usize, Live)> {
        // A row is held until the request's last result was compared, so finished requests count.
        let rows = self.max_batch + self.preempted.len() - self.live.len();
        std::iter::from_fn(|| self.next_waiting()).take(rows).collect()
    }

    /// The request to admit next. Preempted ones come first.
    fn next_waiting(&mut self) -> Option<(usize, Live)> {
        if let Some(number) = self.preempted.front().copied() {
            let request = self.live.remove(&number)?;
            self.preempted.pop_front();
            return Some((number, request));
        }
        let entry = self.trace.requests.get(self.next)?;
        let request = self.prepared.pop_front().unwrap_or_else(|| {
            let content = self.content.of(self.next, entry);
            Live::new(content, ExpectedSums::new(&self.oracle), entry.output_length)
        });
        self.next += 1;
        Some((self.next - 1, request))
    }

    /// Reverts [`next_waiting`](Self::next_waiting), last request first.
    fn put_back(&mut self, number: usize, request: Live) {
        if request.counted {
            self.live.insert(number, request);
            self.preempted.push_front(number);
        } else {
            self.next = number;
            self.prepared.push_front(request);
        }
    }

    /// Adds the first tokens of an admitted request to the batch: those after its cached prefix, in
    /// a chunk that begins on the grid if the budget allows it.
    fn begin(
        &mut self,
        number: usize,
        mut request: Live,
        sequence: Sequence,
    ) -> Result<(), RunError> {
        let budget = self.step_tokens - self.batch.len() as u64;
        let start = sequence.cached_tokens();
        let skipped = start % GRID_TOKENS;
        let (cache, content) = (&self.cache, &request.content);
        let end;
        if skipped > 0 && skipped < budget {
            end = request.known.min(start + budget - skipped);
            self.batch.add_with_skip(cache, &sequence, content, (start - skipped, start, end))?;
        } else {
            end = request.known.min(start + budget);
            self.batch.add(cache, &sequence, content, start..end)?;
        }
        request.written = end;
        request.sequence = Some(sequence);
        self.live.insert(number, request);
        self.running.push(number);
        Ok(())
    }

    /// Enqueues the iteration and records what it reads.
    fn launch(&mut self, step: &OpenStep) -> Result<(), RunError> {
        self.batch.finish();
        let mut rows = Vec::with_capacity(self.running.len());
        for &number in &self.running {
            let Some(request) = self.live.get_mut(&number) else { continue };
            request.expected.cover(&request.content, request.written);
            let partial = request.expected.partial(&request.content, request.written);
            rows.push(SequenceSums { request: number, tokens: request.written, partial });
        }
        let readers: Vec<&Sequence> =
            rows.iter().filter_map(|row| self.live.get(&row.request)?.sequence.as_ref()).collect();
        // Not longer than a sequence that could be staged.
        let lengths: Vec<u32> = rows.iter().map(|row| row.tokens as u32).collect();
        let read = self.verifier.reads();
        let enqueued = self.work.enqueue(
            &mut self.cache,
            step.number(),
            &self.batch,
            &readers,
            &lengths,
            read,
        )?;
        if read {
            let (width, arrival) = (enqueued.width, enqueued.arrival);
            self.readings.push_back(Reading { step: step.number(), width, arrival, rows });
        }
        Ok(())
    }

    /// Makes the prompt blocks written so far findable for other requests.
    fn seal_written(&mut self) -> Result<(), RunError> {
        for number in &self.running {
            let Some(request) = self.live.get_mut(number) else { continue };
            let Some(sequence) = request.sequence.as_mut() else { continue };
            let hashes = request.content.full_block_hashes();
            let written = (request.written / self.block_tokens) as usize;
            self.cache.seal(sequence, &hashes[..written.min(hashes.len())])?;
        }
        Ok(())
    }

    /// Removes requests from the batch whose last token this step writes.
    fn retire_finished(&mut self, step: u64) {
        let live = &mut self.live;
        self.running.retain(|number| {
            let Some(request) = live.get_mut(number) else { return false };
            if request.written == request.total {
                request.finished_in = Some(step);
            }
            request.finished_in.is_none()
        });
    }

    /// Compares the checksums that have arrived, and releases requests whose last ones were
    /// compared.
    fn compare_completed(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        let completed = self.cache.completed_step();
        while let Some(reading) = self.readings.pop_front_if(|reading| reading.step <= completed) {
            let entries = reading.rows.len() * reading.width;
            for part in 0..self.oracle.parts() {
                self.work.arrived(part, reading.arrival, entries, &mut self.checksums)?;
                self.verifier.compare(&reading, part, &self.checksums, &self.live, report);
            }
        }
        self.live.retain(|_, request| {
            let released = request.finished_in.is_some_and(|step| step <= completed);
            if released {
                let prompt = request.content.prompt_tokens();
                report.finished += 1;
                report.prompt_tokens += prompt;
                report.generated_tokens += request.total - prompt;
            }
            !released
        });
        Ok(())
    }
}

/// Number of blocks that can be claimed once steps have completed.
fn retiring(error: &AdmitError) -> usize {
    match error {
        AdmitError::NoSpace(kv_pool::ClaimError::Exhausted { retiring, .. }) => *retiring,
        _ => 0,
    }
}

/// Counts a request's lookups, only at its first admission.
fn count_lookups(
    request: &mut Live,
    sequence: &Sequence,
    block_tokens: u64,
    report: &mut RunReport,
) {
    if std::mem::replace(&mut request.counted, true) {
        return;
    }
    // The last token of a prompt is always computed, so its block is not looked up.
    report.block_lookups += (request.content.prompt_tokens() - 1) / block_tokens;
    report.block_hits += sequence.cached_tokens() / block_tokens;
    report.hit_rate = report.block_hits as f64 / report.block_lookups.max(1) as f64;
    report.prefix_tokens_reused += sequence.cached_tokens();
}
