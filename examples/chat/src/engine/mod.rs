//! An engine: a scheduler with continuous batching, one step ahead of what it knows.
//!
//! A step goes like this ([`Engine::step`]):
//!
//! 1. The step begins. What came out of the step before the last is committed, so that the cache can name its blocks.
//! 2. Every running sequence reserves room for its next tokens. Without room, the youngest is suspended. Waiting prompts
//!    are admitted as far as the step's budget goes ([`schedule`]).
//! 3. The step is staged. Only now is the outcome of the last step needed, which the sampler has worked on meanwhile:
//!    its ids are what the new step begins with.
//! 4. The layers run ([`forward`]), the step is finished, and the sampler is given its hidden states.

mod forward;
mod lane;
mod misuse;
mod running;
mod sampler;
mod schedule;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use kv_plane::manager::Start;
use kv_plane::{Committed, KvCache, Request, Sequence, Waiting};

use crate::job::Job;
use crate::model::Model;
use forward::Layers;
pub use running::Reuse;
use running::Running;
use sampler::{Sampled, Sampler, Wanted};

/// A protection, or a rule of the cache, that a run breaks on purpose.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Sabotage {
    /// Staging buffers are written again before the device has read them.
    StagingReuse,
    /// A sequence that begins behind a cached prefix stores its first block's worth of rows too early, into the prefix.
    IgnoredSkip,
    /// Drafts are committed, and so named, without a look at whether they are right.
    DraftsNamed,
}

/// Limits of an engine.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Tokens of prompts that a step computes at most.
    pub chunk_tokens: u64,
    /// What is broken on purpose.
    pub sabotage: Option<Sabotage>,
}

/// What the engine tells.
#[derive(Debug)]
pub enum Event {
    /// Further tokens of an answer.
    Tokens {
        /// The job.
        job: usize,
        /// Which answer to it.
        answer: u32,
        /// Position of the first of them in the sequence.
        position: u64,
        /// The ids.
        ids: Vec<u32>,
        /// The logits that each was chosen by.
        logits: Vec<Vec<f32>>,
    },
    /// An answer is complete.
    Done {
        /// The job.
        job: usize,
        /// Which answer to it.
        answer: u32,
        /// Prompt and answer.
        ids: Vec<u32>,
        /// Where the prompt's KV came from.
        reuse: Reuse,
        /// From the submission of the job to the first token.
        first_token: Duration,
        /// From the first token to the last.
        rest: Duration,
    },
}

/// What the engine has done.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct EngineCounts {
    /// Steps.
    pub steps: u64,
    /// Answers that were begun.
    pub sequences: u64,
    /// Of these, those that found a part of their prompt in the cache.
    pub reused: u64,
    /// Those that got blocks back from host memory.
    pub onboarded: u64,
    /// Those that waited for a prefix that another one was computing, or went over to its blocks.
    pub joined: u64,
    /// Those that waited for a load from a tier below.
    pub loaded: u64,
    /// Suspensions.
    pub suspended: u64,
    /// Sequences that were dropped for want of room, and computed again.
    pub restarted: u64,
    /// Answers that branched off another one.
    pub forked: u64,
    /// Drafts that were tried.
    pub drafted: u64,
    /// Drafts that were right.
    pub accepted: u64,
    /// Steps that were staged before it was known which drafts of the last one stand.
    pub open_starts: u64,
}

impl EngineCounts {
    /// Adds the counts of another engine.
    pub fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.sequences += other.sequences;
        self.reused += other.reused;
        self.onboarded += other.onboarded;
        self.joined += other.joined;
        self.loaded += other.loaded;
        self.suspended += other.suspended;
        self.restarted += other.restarted;
        self.forked += other.forked;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        self.open_starts += other.open_starts;
    }
}

/// A job that waits for admission.
#[derive(Debug)]
struct Queued {
    job: usize,
    answer: u32,
    asked: Job,
    started: Instant,
    first_token: Option<Instant>,
    forks: u32,
    ids: Vec<u32>,
    /// What it has waited for.
    joined: bool,
    loaded_blocks: u64,
}

/// The step whose outcome the sampler works on.
#[derive(Debug)]
struct Sampling {
    step: u64,
    /// Whether drafts are among it.
    drafted: bool,
}

/// The engine.
#[derive(Debug)]
pub struct Engine {
    cache: KvCache,
    model: Arc<Model>,
    layers: Layers,
    sampler: Sampler,
    options: EngineOptions,
    /// What waits for admission, each with its request.
    queue: VecDeque<(Queued, Request)>,
    running: Vec<Running>,
    suspended: VecDeque<Running>,
    sampling: Option<Sampling>,
    next_number: u64,
    jobs: usize,
    counts: EngineCounts,
    events: Vec<Event>,
    /// Whether a sequence gave up its room in the last step.
    preempted: bool,
    idle_steps: u32,
}

impl Engine {
    /// An engine over a cache whose rows are the model's keys and values.
    ///
    /// # Errors
    /// A cache of another shape, and a device that lacks memory.
    pub fn new(cache: KvCache, model: Arc<Model>, options: EngineOptions) -> anyhow::Result<Self> {
        let layers = Layers::new(&cache, &model, options)?;
        let believes = options.sabotage == Some(Sabotage::DraftsNamed);
        Ok(Self {
            sampler: Sampler::new(Arc::clone(&model), believes)?,
            cache,
            model,
            layers,
            options,
            queue: VecDeque::new(),
            running: Vec::new(),
            suspended: VecDeque::new(),
            sampling: None,
            next_number: 0,
            jobs: 0,
            counts: EngineCounts::default(),
            events: Vec::new(),
            preempted: false,
            idle_steps: 0,
        })
    }

    /// Takes a job, and returns its number.
    pub fn submit(&mut self, asked: Job) -> usize {
        let job = self.jobs;
        self.jobs += 1;
        let (ids, forks) = (asked.prompt.clone(), asked.answers.saturating_sub(1));
        let (started, first_token) = (Instant::now(), None);
        self.enqueue(Queued {
            job,
            answer: 0,
            asked,
            started,
            first_token,
            forks,
            ids,
            joined: false,
            loaded_blocks: 0,
        });
        job
    }

    fn enqueue(&mut self, queued: Queued) {
        let mut request = Request::new(queued.ids.clone());
        request.tokens_max = (queued.asked.prompt.len() + queued.asked.tokens_max) as u64;
        self.queue.push_back((queued, request));
    }

    /// The cache.
    #[must_use]
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// The cache, for budgets.
    pub fn cache_mut(&mut self) -> &mut KvCache {
        &mut self.cache
    }

    /// What the engine has done so far.
    #[must_use]
    pub fn counts(&self) -> EngineCounts {
        self.counts
    }

    /// Whether nothing is left to be done.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty()
            && self.running.is_empty()
            && self.suspended.is_empty()
            && self.sampling.is_none()
    }

    /// Runs steps until nothing is left to be done.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn run(&mut self) -> anyhow::Result<Vec<Event>> {
        let mut events = Vec::new();
        while !self.is_idle() {
            events.append(&mut self.step()?);
        }
        Ok(events)
    }

    /// One step, and what has happened.
    ///
    /// # Errors
    /// What the cache, the device or the model says. Steps that make no progress for long are an error too.
    pub fn step(&mut self) -> anyhow::Result<Vec<Event>> {
        let open = self.cache.begin_step()?;
        self.commit_outcomes()?;
        self.schedule()?;
        if self.sampling.as_ref().is_some_and(|sampling| sampling.drafted) {
            // The device needs to know how many drafts stand, before it makes the next batch. A sampler on the device
            // would write that there; this one is on the host, and so it is waited for.
            self.take_outcome()?;
        }
        let Self { cache, running, .. } = self;
        let mut batch: Vec<&mut Sequence> =
            running.iter_mut().map(|run| &mut run.sequence).filter(|seq| seq.next() > 0).collect();
        if batch.is_empty() {
            self.take_outcome()?;
            self.cache.finish_step(open)?;
            self.note_idle()?;
            return Ok(std::mem::take(&mut self.events));
        }
        self.idle_steps = 0;
        cache.stage(&open, &mut batch)?;
        self.take_outcome()?;
        let wanted = self.forward()?;
        let step = open.number();
        self.cache.finish_step(open)?;
        self.counts.steps += 1;
        let drafted = wanted.iter().any(|wanted| !wanted.drafts.is_empty());
        self.sampler.begin(wanted)?;
        self.sampling = Some(Sampling { step, drafted });
        Ok(std::mem::take(&mut self.events))
    }

    /// Tells the cache what came out of steps, and lets those leave that are complete.
    fn commit_outcomes(&mut self) -> anyhow::Result<()> {
        for run in self.running.iter_mut().chain(&mut self.suspended) {
            while let Some((step, ids)) = run.outcomes.pop_front() {
                match self.cache.commit(&mut run.sequence, step, &ids)? {
                    Committed::Taken | Committed::Stale => {}
                    Committed::Redo { from } => {
                        // What came out of a step that failed is void.
                        run.ids.truncate(run.sequence.known() as usize);
                        run.outcomes.clear();
                        run.kv_end = from;
                    }
                }
            }
        }
        self.running.retain(|run| !run.is_over());
        self.suspended.retain(|run| !run.is_over());
        Ok(())
    }

    /// Takes in what the sampler has chosen.
    fn take_outcome(&mut self) -> anyhow::Result<()> {
        let Some(Sampling { step, .. }) = self.sampling.take() else { return Ok(()) };
        for sampled in self.sampler.end()? {
            let mut all = self.running.iter_mut().chain(&mut self.suspended);
            // Those that have left since do not ask any more.
            let Some(run) = all.find(|run| run.number == sampled.sequence) else { continue };
            if run.is_over() {
                continue;
            }
            self.counts.drafted += sampled.drafts as u64;
            self.counts.accepted += sampled.ids.len() as u64 - 1;
            if sampled.ids.len() <= sampled.drafts {
                self.layers.tell_accepted(&self.cache, &run.sequence, sampled.ids.len() as u32)?;
            }
            run.kv_end = sampled.position + sampled.ids.len() as u64 - 1;
            take_ids(run, step, sampled, &mut self.events);
        }
        Ok(())
    }

    /// Runs the staged step, and returns whose next tokens are wanted.
    fn forward(&mut self) -> anyhow::Result<Vec<Wanted>> {
        let Self { cache, running, layers, model, counts, .. } = self;
        let (mut ids, mut positions, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        let mut last_rows = Vec::new();
        let batch: Vec<_> = cache.manager().last_plan().batch.clone();
        for row in batch {
            let run = running.iter_mut().find(|run| run.sequence.row() == Some(row.row));
            let Some(run) = run else { bail!("a row of the step belongs to no sequence") };
            let start = match row.start {
                Start::At(start) => start,
                Start::Open { resolved, upper } => {
                    counts.open_starts += 1;
                    ensure!(
                        (resolved..=upper).contains(&run.kv_end),
                        "KV ends at {}, outside {resolved} to {upper}",
                        run.kv_end
                    );
                    run.kv_end
                }
            };
            layers.misuse.note_start(cache, &run.sequence, (start, ids.len()))?;
            positions.extend(start..start + u64::from(row.tokens));
            if run.is_over() {
                // It was staged before that was known. Its tokens are nobody's.
                ids.resize(positions.len(), 0);
                continue;
            }
            let (of_row, drafts) = run.ids_from(start, row.tokens);
            ids.extend(of_row);
            run.kv_end = start + u64::from(row.tokens) - drafts.len() as u64;
            if run.kv_end == run.ids.len() as u64 {
                let end = ids.len();
                last_rows.push(end - 1 - drafts.len()..end);
                wanted.push(Wanted {
                    sequence: run.number,
                    hidden: Vec::new(),
                    drafts,
                    position: run.kv_end,
                    sampling: run.asked.sampling.for_answer(run.answer),
                });
            }
        }
        let sequences = cache.manager().last_plan().batch.len() as u32;
        let hidden = layers.run(cache, model, (&ids, &positions), sequences)?;
        let row = model.config().hidden;
        for (wanted, rows) in wanted.iter_mut().zip(last_rows) {
            wanted.hidden = hidden[rows.start * row..rows.end * row].to_vec();
        }
        Ok(wanted)
    }

    fn note_idle(&mut self) -> anyhow::Result<()> {
        // Loads, and copies of evicted blocks, end by themselves.
        std::thread::yield_now();
        self.idle_steps += 1;
        ensure!(
            self.idle_steps < 1 << 20,
            "{} waiting and {} suspended sequences make no progress",
            self.queue.len(),
            self.suspended.len()
        );
        Ok(())
    }

    /// Waits for the devices, and releases everything.
    ///
    /// # Errors
    /// The first refusal.
    pub fn close(self) -> anyhow::Result<()> {
        let Self { cache, layers, running, suspended, .. } = self;
        drop((running, suspended, layers));
        cache.close()?;
        Ok(())
    }
}

/// Adds what was sampled to a sequence's text, up to where the answer ends.
fn take_ids(run: &mut Running, step: u64, sampled: Sampled, events: &mut Vec<Event>) {
    let Sampled { ids, position, mut logits, .. } = sampled;
    let (job, answer, before) = (run.job, run.answer, run.ids.len());
    for &id in &ids {
        if !run.is_over() {
            run.ids.push(id);
        }
    }
    run.outcomes.push_back((step, ids));
    let now = Instant::now();
    let first = *run.first_token.get_or_insert(now);
    let ids = run.ids[before..].to_vec();
    logits.truncate(ids.len());
    events.push(Event::Tokens { job, answer, position, ids, logits });
    if run.is_over() {
        events.push(Event::Done {
            job,
            answer,
            ids: run.ids.clone(),
            reuse: run.reuse,
            first_token: first - run.started,
            rest: now - first,
        });
    }
}

/// Blocks of a load that a request waits for.
fn blocks_of(waiting: &Waiting) -> u64 {
    match waiting {
        Waiting::Load { blocks, .. } => *blocks,
        _ => 0,
    }
}
