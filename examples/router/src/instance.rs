//! An instance: an engine with a cache of its own, whose model takes no time. It says what happens to its cache in
//! vLLM's format.

use std::collections::VecDeque;
use std::sync::Arc;

use anyhow::{Context, bail};
use cuda_driver::{Device, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{KvShape, KvShapeOptions};
use kv_plane::manager::{EventReader, vllm};
use kv_plane::tier::{MemoryTier, MemoryTierOptions};
use kv_plane::{
    GroupOptions, HostPinning, KvCache, KvCacheOptions, LowerTiers, PoolRules, Request, Room,
    Sequence,
};
use kv_pool::clock::ManualClock;

use crate::prompt::Prompt;

/// Tokens of a block.
pub const BLOCK_TOKENS: u32 = 64;

/// Tokens of a step, at most: longer prompts take several steps, and are told of in several batches.
const STEP_TOKENS: u32 = 4096;

/// Tokens of an answer in a step: as if that many drafts were tried, and all of them stood.
const ANSWER_TOKENS: u64 = 64;

/// Blocks of an instance, in each tier.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub device: u32,
    pub host: u32,
    /// Records of a tier below host memory.
    pub below: usize,
    /// Events that are kept for the publisher. It reads after each step, and is told of a loss if that is too late.
    pub events: usize,
}

/// An answer that is being generated.
struct Running {
    sequence: Sequence,
    number: usize,
    generated: u64,
    wanted: u64,
    /// Tokens of it in the last step, all of which stand.
    computed: u64,
}

/// What came of a request.
#[derive(Debug)]
pub struct Served {
    /// Tokens of the prompt that were found in the cache.
    pub cached_tokens: u64,
    /// Of these, tokens that were not on the device.
    pub far_tokens: u64,
    /// Requests whose answers have ended meanwhile.
    pub ended: Vec<usize>,
}

pub struct Instance {
    kv: KvCache,
    events: EventReader,
    running: Vec<Running>,
    ended: Vec<usize>,
    /// Batches that are to be published.
    pub outbox: Vec<Vec<u8>>,
    rank: u32,
    /// How often more had happened between two reads than is kept.
    pub log_losses: u64,
    /// Answers that ended early, because a prompt needed their room.
    pub cut_short: u64,
}

impl Instance {
    pub fn new(rank: u32, sizes: Sizes) -> anyhow::Result<Self> {
        let sim = SimDriver::new(SimConfig::default())?;
        sim.register_kernels(&kv_plane::references());
        let device = Device::open(Arc::new(sim), 0)?;
        // The smallest rows, so that a thousand requests take seconds. Nobody computes with them.
        let shape = KvShape::new(KvShapeOptions {
            layers: 1,
            kv_count: 1,
            row_bytes: 16,
            block_tokens: BLOCK_TOKENS,
        })?;
        let mut tiers = LowerTiers::new(b"no model");
        let records_max = sizes.below;
        tiers.push(move || {
            Box::new(MemoryTier::new(MemoryTierOptions { records_max, ..Default::default() }))
        });
        let group = GroupOptions {
            host_blocks: sizes.host,
            blocks_per_sequence_max: 4096,
            ..GroupOptions::new(shape, sizes.device)
        };
        let options = KvCacheOptions {
            pinning: HostPinning::AT_ONCE,
            sequences_max: 64,
            step_tokens_max: STEP_TOKENS + 64 * ANSWER_TOKENS as u32,
            // Time stands still, so that no load is ever too late.
            pool: PoolRules {
                events: Some(sizes.events),
                clock: Some(Arc::new(ManualClock::new())),
                ..PoolRules::default()
            },
            tiers,
            ..KvCacheOptions::of(vec![group])
        };
        let kv = KvCache::new(&[Stream::new(&device)?], options)?;
        let events = kv.manager().events().context("the cache keeps events")?;
        Ok(Self {
            kv,
            events,
            running: Vec::new(),
            ended: Vec::new(),
            outbox: Vec::new(),
            rank,
            log_losses: 0,
            cut_short: 0,
        })
    }

    /// Computes a prompt, and the answers that run beside it, until the prompt is computed. When it returns, all
    /// that has happened to the cache is in the outbox.
    pub fn serve(&mut self, prompt: &Prompt) -> anyhow::Result<Served> {
        let mut request = Request::new(prompt.ids.clone());
        request.content = prompt.content();
        request.tokens_max = prompt.ids.len() as u64 + prompt.answer_tokens;
        let mut sequence = self.admit(request)?;
        let cached_tokens = sequence.cached_tokens();
        let far_tokens = sequence.onboarded_blocks() as u64 * u64::from(BLOCK_TOKENS);
        while sequence.to_compute() > 0 {
            let step = self.kv.begin_step()?;
            self.take_answers()?;
            let tokens = sequence.to_compute().min(STEP_TOKENS.into()) as u32;
            while let Room::Lacks(_) = self.kv.reserve(&mut sequence, tokens)? {
                self.cut_one()?;
            }
            let answers = self.running.iter_mut().map(|run| &mut run.sequence);
            let mut batch: Vec<_> = answers.filter(|answer| answer.next() > 0).collect();
            batch.push(&mut sequence);
            self.kv.stage(&step, &mut batch)?;
            self.kv.finish_step(step)?;
            self.note()?;
        }
        let wanted = prompt.answer_tokens;
        let number = prompt.number;
        self.running.push(Running { sequence, number, generated: 0, wanted, computed: 1 });
        self.settle()?;
        Ok(Served { cached_tokens, far_tokens, ended: std::mem::take(&mut self.ended) })
    }

    /// Admits a request in a step that computes nothing else, so that nothing is evicted between the router's
    /// look and this one.
    fn admit(&mut self, request: Request) -> anyhow::Result<Sequence> {
        let mut queue = VecDeque::from([request]);
        loop {
            let step = self.kv.begin_step()?;
            let mut admission = self.kv.admit(&mut queue, STEP_TOKENS.into())?;
            if let Some((_, mut sequence)) = admission.admitted.pop() {
                self.kv.stage(&step, &mut [&mut sequence])?;
                self.kv.finish_step(step)?;
                self.note()?;
                return Ok(sequence);
            }
            if let Some((_, error)) = admission.refused.pop() {
                bail!("the prompt was not taken: {error}");
            }
            if admission.no_room.is_some() {
                self.cut_one()?;
            }
            // Otherwise it waits, and the tier below works while steps pass.
            self.kv.finish_step(step)?;
            self.note()?;
        }
    }

    /// Takes in what came out of the last step for each answer, and reserves room for what comes next.
    fn take_answers(&mut self) -> anyhow::Result<()> {
        for run in &mut self.running {
            let Some(step) = run.sequence.awaits() else { continue };
            let ids = Prompt::answer(run.number, run.generated, run.computed);
            self.kv.commit(&mut run.sequence, step, &ids)?;
            run.generated += run.computed;
        }
        let ended = self.running.extract_if(.., |run| run.generated >= run.wanted);
        self.ended.extend(ended.map(|run| run.number));
        let (kv, running) = (&mut self.kv, &mut self.running);
        for run in running {
            let tokens = (run.wanted - run.generated).min(ANSWER_TOKENS) as u32;
            // Without room it waits for a later step.
            if let Room::Given(_) = kv.reserve(&mut run.sequence, tokens)? {
                run.computed = tokens.into();
            }
        }
        Ok(())
    }

    /// Ends the answer that has run longest, to make room.
    fn cut_one(&mut self) -> anyhow::Result<()> {
        if self.running.is_empty() {
            bail!("an instance is too small for a prompt");
        }
        self.ended.push(self.running.remove(0).number);
        self.cut_short += 1;
        Ok(())
    }

    /// Lets the devices and the tier finish what they have begun.
    pub fn settle(&mut self) -> anyhow::Result<()> {
        loop {
            self.kv.drain()?;
            // A step without a batch does what the tier and the copies have to do.
            let step = self.kv.begin_step()?;
            self.kv.finish_step(step)?;
            if self.kv.manager().lower_stats().open_tickets == 0 {
                self.kv.drain()?;
                return self.note();
            }
        }
    }

    /// New weights: nothing that was cached means anything.
    pub fn reset(&mut self) -> anyhow::Result<()> {
        self.kv.reset();
        self.settle()
    }

    /// Tells everything anew, for a router that has missed too much: `AllBlocksCleared`, and all that is cached.
    pub fn tell_all(&mut self) -> anyhow::Result<()> {
        self.events = self.kv.manager().events().context("the cache keeps events")?;
        self.note()
    }

    /// Puts what has happened since the last call into the outbox.
    fn note(&mut self) -> anyhow::Result<()> {
        let mut events = Vec::new();
        while self.events.read(&mut events).is_err() {
            self.log_losses += 1;
        }
        if !events.is_empty() {
            self.outbox.push(self.batch(&events));
        }
        Ok(())
    }

    /// A batch without events: whoever has missed the one before sees that by the number of this one.
    pub fn heartbeat(&self) -> Vec<u8> {
        self.batch(&[])
    }

    fn batch(&self, events: &[kv_plane::manager::CacheEvent]) -> Vec<u8> {
        let mut bytes = Vec::new();
        vllm::encode(events, 0.0, Some(self.rank), &mut bytes);
        bytes
    }

    pub fn close(mut self) -> anyhow::Result<()> {
        self.running.clear();
        self.settle()?;
        self.kv.close()?;
        Ok(())
    }
}
