//! The scheduler: which requests have a range, and what each iteration writes and reads.

use std::collections::{BTreeMap, VecDeque};

use cuda_driver::Fence;
use cuda_vmm::sequences::{RoomError, Sequence};

use super::RunError;
use super::ranges::{Batch, Ranges, Size};
use crate::config::{Progress, ProgressState, RunConfig};
use crate::device::OpenDevices;
use crate::engine::chance::Chance;
use crate::engine::content::{Content, RequestContent};
use crate::engine::expected::{ExpectedSums, Oracle};
use crate::engine::groups::Reads;
use crate::engine::scheduler::IDLE_ITERATIONS_MAX;
use crate::engine::verify::{Compared, PartSums, Reading, SequenceSums, Verifier};
use crate::engine::{OVERLAP_DEPTH, Warmth};
use crate::report::{RunReport, tenants};
use crate::trace::Trace;

/// A request, until its last checksums were compared.
#[derive(Debug)]
struct Live {
    content: RequestContent,
    expected: ExpectedSums,
    /// Its range; `None` while it waits and when it is over.
    sequence: Option<Sequence>,
    /// The seat of its range, also when it has left it.
    seat: u64,
    written: u64,
    /// Number of tokens that exist: those of its prompt, and those computed before it was preempted.
    known: u64,
    /// Number of tokens that it will have at its end.
    total: u64,
    size: Size,
    /// The iteration in which it is cancelled; drawn at its first admission.
    dies: Option<u64>,
    admitted: bool,
    cancelled: bool,
    /// The step after which it is over.
    over_in: Option<u64>,
}

impl Live {
    fn prompt(&self) -> u64 {
        self.content.prompt_tokens()
    }

    /// Pages of each plane that it needs to go on for a while.
    fn rows(&self) -> u64 {
        self.size.rows_for(self.known.max(self.written) + 1)
    }

    /// Number of tokens to write next: one if it is generating, else a piece of what is known.
    fn next(&self, chunk: u64, budget: u64) -> u64 {
        match self.known.saturating_sub(self.written) {
            0 => 1.min(budget),
            more => more.min(chunk).min(budget),
        }
    }
}

impl Compared for Live {
    fn expected(&self) -> &ExpectedSums {
        &self.expected
    }

    fn physical(&self, block: usize) -> u64 {
        self.size.block_of(self.seat, block as u64)
    }
}

/// A step that has not completed, as far as the host has seen.
#[derive(Debug)]
struct Step {
    fence: Fence,
    reading: Reading,
}

/// The state of a run between two iterations.
pub(super) struct Scheduler<'a> {
    trace: &'a Trace,
    ranges: Ranges,
    size: Size,
    live: BTreeMap<usize, Live>,
    verifier: Verifier,
    content: Content,
    oracle: Oracle,
    chance: Chance,
    chunk: u64,
    step_tokens: u64,
    /// Index of the first request of the trace that nothing is known of yet.
    next: usize,
    /// Requests to be admitted, in this order. Preempted ones come first.
    waiting: VecDeque<usize>,
    /// Requests with tokens to write, in the order of their admission.
    running: Vec<usize>,
    /// What the present iteration writes: requests, each with a number of tokens.
    planned: Vec<(usize, u64)>,
    in_flight: VecDeque<Step>,
    step: u64,
    /// The last step that may use a range which a request has left.
    left_in: u64,
    /// The request that got no memory since the last admission, and the reason.
    refused: Option<RunError>,
    iteration: u64,
    idle_iterations: u32,
    batch: Batch,
    checksums: Vec<u64>,
}

impl<'a> Scheduler<'a> {
    pub(super) fn new(
        ranges: Ranges,
        config: &RunConfig,
        trace: &'a Trace,
    ) -> Result<Self, RunError> {
        Ok(Self {
            trace,
            size: *ranges.size(),
            live: BTreeMap::new(),
            verifier: Verifier::new(config.verify, config.block_tokens, config.seed),
            content: Content::new(config.seed, config.block_tokens, trace.block_tokens),
            oracle: Oracle::new(vec![(*ranges.shape(), Reads::All)], config.block_tokens)?,
            chance: Chance::new(config.life, config.seed),
            chunk: config.life.chunk(),
            step_tokens: config.step_tokens.into(),
            ranges,
            next: 0,
            waiting: VecDeque::new(),
            running: Vec::new(),
            planned: Vec::new(),
            in_flight: VecDeque::new(),
            step: 0,
            left_in: 0,
            refused: None,
            iteration: 0,
            idle_iterations: 0,
            batch: Batch::default(),
            checksums: Vec::new(),
        })
    }

    pub(super) fn play(
        &mut self,
        devices: &OpenDevices,
        report: &mut RunReport,
        progress: &mut dyn Progress,
    ) -> Result<(), RunError> {
        let mut warmth = Warmth::default();
        while self.next < self.trace.requests.len() || !self.live.is_empty() {
            self.ranges.work(devices);
            self.iterate(report)?;
            warmth.note(devices, report);
            progress.update(&self.state(report));
        }
        Ok(())
    }

    /// Returns the ranges, with every request gone and all work done.
    pub(super) fn into_ranges(mut self) -> Ranges {
        // On a lost device no work is left; the run has failed with that error already.
        let _ = self.ranges.settle();
        for request in self.live.values_mut() {
            if let Some(sequence) = request.sequence.take() {
                self.ranges.leave(sequence);
            }
        }
        self.ranges
    }

    fn iterate(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        self.iteration += 1;
        self.catch_up(OVERLAP_DEPTH as usize, report)?;
        self.cancel(report);
        self.planned.clear();
        self.advance_running(report)?;
        self.admit_waiting(report)?;
        if self.planned.is_empty() {
            return self.idle(report);
        }
        self.idle_iterations = 0;
        self.note_peaks(report);
        self.launch(report)?;
        report.iterations += 1;
        Ok(())
    }

    /// Records the memory in use, before requests leave.
    fn note_peaks(&self, report: &mut RunReport) {
        let Some(figures) = &mut report.contiguous else { return };
        let stats = self.ranges.space().stats();
        let mapped = stats.mapped_bytes + stats.parked_bytes;
        figures.peak_mapped_bytes = figures.peak_mapped_bytes.max(mapped);
        figures.peak_used_bytes = figures.peak_used_bytes.max(stats.used_bytes);
    }

    /// An iteration without work: waits for the device, because its work uses ranges that waiting
    /// requests need.
    fn idle(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        self.catch_up(0, report)?;
        self.idle_iterations += 1;
        match self.refused.take() {
            Some(refused) if self.idle_iterations > IDLE_ITERATIONS_MAX => Err(refused),
            _ => Ok(()),
        }
    }

    /// Waits until at most `ahead` steps are in flight, compares what the others have read, and
    /// forgets requests whose last step was compared.
    fn catch_up(&mut self, ahead: usize, report: &mut RunReport) -> Result<(), RunError> {
        while self.in_flight.len() > ahead {
            let Some(Step { fence, reading }) = self.in_flight.pop_front() else { break };
            fence.wait()?;
            if self.verifier.reads() {
                self.ranges.arrived(reading.step, &mut self.checksums)?;
                let sums = PartSums { sums: &self.checksums, width: self.size.width as usize };
                self.verifier.compare(&reading, (0, Reads::All), &sums, &self.live, report);
            }
        }
        let completed = self.completed();
        self.live.retain(|&number, request| {
            let over = request.over_in.is_some_and(|step| step <= completed);
            if over && !request.cancelled {
                let (prompt, generated) = (request.prompt(), request.total - request.prompt());
                report.finished += 1;
                report.prompt_tokens += prompt;
                report.generated_tokens += generated;
                tenants::note(&mut report.tenants, self.trace, number, |tenant| {
                    tenant.finish(prompt, generated);
                });
            }
            !over
        });
        Ok(())
    }

    fn completed(&self) -> u64 {
        self.step - self.in_flight.len() as u64
    }

    fn cancel(&mut self, report: &mut RunReport) {
        let iteration = self.iteration;
        let dying = |(number, request): (&usize, &Live)| {
            let dies = request.over_in.is_none() && request.dies.is_some_and(|at| at <= iteration);
            dies.then_some(*number)
        };
        let dying: Vec<_> = self.live.iter().filter_map(dying).collect();
        for number in dying {
            self.leave(number);
            if let Some(request) = self.live.get_mut(&number) {
                (request.cancelled, request.over_in) = (true, Some(self.step));
            }
            self.running.retain(|running| *running != number);
            self.waiting.retain(|waiting| *waiting != number);
            report.cancelled += 1;
        }
    }

    /// Takes a request's range away. Steps in flight may still use it.
    fn leave(&mut self, number: usize) {
        let sequence = self.live.get_mut(&number).and_then(|request| request.sequence.take());
        if let Some(sequence) = sequence {
            self.ranges.leave(sequence);
            self.left_in = self.step;
        }
    }

    fn advance_running(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        let mut index = 0;
        while index < self.running.len() {
            let number = self.running[index];
            index += 1;
            let Some(refused) = self.advance(number, report)? else { continue };
            if self.left_in > self.completed() {
                // Pages are being released. The request skips this iteration.
                continue;
            }
            if self.running.len() == 1 {
                return Err(refused);
            }
            // Requests behind this one have written nothing in this iteration yet.
            self.preempt_last(report);
        }
        Ok(())
    }

    /// Grows a request's range for its next tokens, and plans them. Returns why there is no memory,
    /// if so.
    fn advance(
        &mut self,
        number: usize,
        report: &mut RunReport,
    ) -> Result<Option<RunError>, RunError> {
        let budget = self.budget();
        let Some(request) = self.live.get_mut(&number) else { return Ok(None) };
        let tokens = request.next(self.chunk, budget);
        let Some(sequence) = request.sequence.as_mut().filter(|_| tokens > 0) else {
            return Ok(None);
        };
        if let Some(figures) = &mut report.contiguous {
            figures.growth_calls += 1;
        }
        let grown = sequence.extend_blocking(request.written + tokens);
        let refused = |source| RunError::ExtendRange { request: number, source };
        match grown {
            Ok(()) => {
                self.planned.push((number, tokens));
                Ok(None)
            }
            Err(source @ RoomError::NotReady { .. }) => Ok(Some(refused(source))),
            Err(source) => Err(refused(source)),
        }
    }

    fn budget(&self) -> u64 {
        self.step_tokens - self.planned.iter().map(|(_, tokens)| tokens).sum::<u64>()
    }

    /// Preempts the request that was admitted last. It is computed again later.
    fn preempt_last(&mut self, report: &mut RunReport) {
        let Some(number) = self.running.pop() else { return };
        self.leave(number);
        if let Some(request) = self.live.get_mut(&number) {
            request.known = request.known.max(request.written);
            request.written = 0;
        }
        self.waiting.push_front(number);
        report.preemptions += 1;
    }

    /// Admits waiting requests in order, until the seats, the budget or the pages are used up.
    fn admit_waiting(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        let mut admitted = 0;
        while self.budget() > 0 {
            let Some(number) = self.look_ahead() else { break };
            if !self.fits(number) || !self.admit(number, report)? {
                break;
            }
            self.waiting.pop_front();
            self.running.push(number);
            admitted += 1;
        }
        if admitted > 0 {
            self.refused = None;
            report.admissions += 1;
            report.most_admitted_at_once = report.most_admitted_at_once.max(admitted);
        }
        Ok(())
    }

    /// The first waiting request, prepared from the trace if need be.
    fn look_ahead(&mut self) -> Option<usize> {
        if self.waiting.is_empty() {
            let (number, entry) = (self.next, self.trace.requests.get(self.next)?);
            let content = self.content.of(number, entry);
            let prompt = content.prompt_tokens();
            let request = Live {
                content,
                expected: ExpectedSums::new(&self.oracle),
                sequence: None,
                seat: 0,
                written: 0,
                known: prompt,
                total: prompt + entry.output_length,
                size: self.size,
                dies: None,
                admitted: false,
                cancelled: false,
                over_in: None,
            };
            self.live.insert(number, request);
            self.waiting.push_back(number);
            self.next += 1;
        }
        self.waiting.front().copied()
    }

    /// Whether there are pages for all that is known of a request beside the running ones. Else it
    /// would be preempted soon. A request that runs alone has room.
    fn fits(&self, number: usize) -> bool {
        let rows = |number: &usize| self.live.get(number).map_or(0, Live::rows);
        let taken: u64 = self.running.iter().map(rows).sum();
        self.running.is_empty() || taken + rows(&number) <= self.size.rows_max
    }

    /// Gives a request a range, and plans its first tokens; false if there is none at present.
    fn admit(&mut self, number: usize, report: &mut RunReport) -> Result<bool, RunError> {
        let budget = self.budget();
        let Some(request) = self.live.get_mut(&number) else { return Ok(false) };
        let tokens = request.next(self.chunk, budget);
        let sequence = match self.ranges.space().admit(tokens) {
            Ok(sequence) => sequence,
            Err(source @ RoomError::NoSeat { .. }) => {
                self.refused = Some(RunError::AdmitRange { request: number, source });
                return Ok(false);
            }
            Err(source) => return Err(RunError::AdmitRange { request: number, source }),
        };
        request.seat = sequence.seat();
        request.sequence = Some(sequence);
        if let Some(refused) = self.advance(number, report)? {
            self.leave(number);
            self.refused = Some(refused);
            return Ok(false);
        }
        let (chance, iteration) = (self.chance, self.iteration);
        if let Some(request) = self.live.get_mut(&number)
            && !std::mem::replace(&mut request.admitted, true)
        {
            let lives = chance.lives(number, request.total - request.prompt());
            request.dies = lives.map(|iterations| iteration + 1 + iterations);
        }
        Ok(true)
    }

    /// Enqueues the iteration, and records what it reads. Requests whose last token it writes leave.
    fn launch(&mut self, report: &mut RunReport) -> Result<(), RunError> {
        let Batch { slots, keys, lengths } = &mut self.batch;
        slots.clear();
        keys.clear();
        lengths.clear();
        lengths.resize(self.size.seats as usize, 0);
        let (step, mut rows, mut over) = (self.step + 1, Vec::new(), Vec::new());
        for &(number, tokens) in &self.planned {
            let Some(request) = self.live.get_mut(&number) else { continue };
            let seat = request.seat;
            let (start, end) = (request.written, request.written + tokens);
            slots.extend(self.size.slots(seat, start..end));
            keys.extend((start..end).map(|token| request.content.key(token)));
            lengths[seat as usize] = end as u32;
            request.written = end;
            request.expected.cover(&request.content, end);
            let partial = request.expected.partial(&request.content, end);
            let (row, states) = (seat as usize, Vec::new());
            let tokens = end;
            let drafted = (0, Vec::new());
            rows.push(SequenceSums {
                row,
                request: number,
                start,
                tokens,
                partial,
                states,
                drafted,
            });
            if end >= request.total {
                over.push(number);
            }
        }
        let tokens = keys.len() as u64;
        let fence = self.ranges.enqueue(step, &self.batch, self.verifier.reads())?;
        self.step = step;
        let reading = Reading { step, rows };
        self.in_flight.push_back(Step { fence, reading });
        for number in over {
            self.leave(number);
            self.running.retain(|running| *running != number);
            if let Some(request) = self.live.get_mut(&number) {
                request.over_in = Some(step);
            }
        }
        report.bytes_transferred += tokens * self.size.token_bytes;
        Ok(())
    }

    fn state(&self, report: &RunReport) -> ProgressState {
        let stats = self.ranges.space().stats();
        let block_bytes = self.size.token_bytes * self.size.block_tokens;
        ProgressState {
            requests: report.requests,
            finished: report.finished,
            running: self.running.len() as u64,
            iterations: report.iterations,
            corrupt_blocks: report.corrupt_blocks,
            verified_blocks: report.verified_blocks,
            device_blocks_in_use: (stats.mapped_bytes + stats.parked_bytes) / block_bytes,
            hit_rate: 0.0,
        }
    }
}
