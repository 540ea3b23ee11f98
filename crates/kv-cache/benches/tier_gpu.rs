//! What a tier under host memory gives a request that hits it, and what requests beside it notice.
//!
//! `cargo bench -p kv-cache --bench tier_gpu`, on a machine with a GPU. The tier keeps its records in ordinary memory,
//! answers after 5 ms, and works in one thread of its own. 32 sequences decode in every step. A request whose first
//! 2,048 tokens are in the tier, and nowhere above it, is loaded whole, loaded by layers, or computed again, in turn.
//!
//! No model runs: fills of device memory, calibrated in the same run, stand for its work. A decode step takes
//! `KV_STEP_US` of them (5,000), and a prompt is computed at `KV_PREFILL_TOKENS_PER_S` (20,000, as models of 8B do), in
//! one step and beside the decoding; `KV_TIER_US` is the tier's latency (5,000). Shapes are those of an 8B model, so
//! the prefix has 256 MiB.
//!
//! The time to the first token is from before the first `admit` to the end of the work of the step that computes the
//! last token of the prompt. A token time is from the end of a step's work to that of the next one's. All are by
//! events of the device. "Alone" are the steps just before each arrival. The bytes of what was loaded are looked at.
//! With `--sim` it runs on the simulated device, where times mean nothing.

#![allow(clippy::print_stdout, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]

mod common;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use common::{BLOCK_TOKENS, Rig, admit, chain, quantile};
use cuda_driver::{DeviceBuffer, Event, Stream};
use kv_cache::kv_manager::LowerOptions;
use kv_cache::kv_tier::{Background, MemoryTier, MemoryTierOptions};
use kv_cache::{
    Answer, Committed, KvCache, KvCacheOptions, LowerTiers, OpenStep, Request, Sequence, Tokens,
};
use kv_pool::BlockHash;

/// Sequences that decode, and blocks of each.
const RUNNING: u32 = 32;
const RUNNING_BLOCKS: u32 = 4;
/// Blocks of a prefix that is in the tier: 2,048 tokens.
const PREFIX: u32 = 128;
/// Prefixes, and those of them that fit on the device and in host memory: each is evicted before it is asked for again.
const PREFIXES: u32 = 8;
const ON_DEVICE: u32 = 2;
const IN_HOST: u32 = 3;
/// Tokens behind the prefix, which nothing has computed before.
const NEW: [u32; 2] = [1, 512];
/// Times that each is measured.
const ROUNDS: usize = 5;
/// Steps before an arrival that are not timed, and that are.
const WARM: usize = 4;
const ALONE: usize = 32;
/// Longer than any request waits.
const LONGEST: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    common::run(|rig| {
        let mut bench = Bench::new(rig);
        bench.report();
        bench.cache.close().unwrap();
    })
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Way {
    Computed,
    Whole,
    ByLayers,
}

impl Way {
    const ALL: [Self; 3] = [Self::Computed, Self::Whole, Self::ByLayers];

    fn name(self) -> &'static str {
        match self {
            Self::Computed => "computed again",
            Self::Whole => "loaded whole",
            Self::ByLayers => "loaded by layers",
        }
    }
}

/// What was seen of one way, in all rounds.
#[derive(Default)]
struct Times {
    first_token: Vec<f64>,
    /// Token times: before the request arrives, while it waits, and of the step that has it.
    alone: Vec<f64>,
    beside: Vec<f64>,
    with: Vec<f64>,
}

struct Bench<'a> {
    rig: &'a Rig,
    cache: KvCache,
    running: Vec<Sequence>,
    busy: Busy,
    /// An idle stream, where an event is over when it is recorded.
    aside: Stream,
    /// Microseconds of a decode step, of a token of a prompt, and of the tier.
    step_us: f64,
    token_us: f64,
    tier_us: u64,
    /// Prefixes that were asked for so far.
    asked: u32,
}

/// Work for the device that takes a given time.
struct Busy {
    memory: DeviceBuffer,
    bytes_per_us: f64,
}

impl Busy {
    fn new(rig: &Rig) -> Self {
        let memory = DeviceBuffer::alloc(&rig.device, rig.either(1 << 30, 4096)).unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let [start, end] = [0, 1].map(|_| Event::with_timing(&rig.device).unwrap());
        let fill = || stream.fill(memory.span(), 1).unwrap();
        (0..16).for_each(|_| fill());
        start.record(&stream).unwrap();
        (0..64).for_each(|_| fill());
        end.record(&stream).unwrap();
        end.synchronize().unwrap();
        let us = f64::from(end.elapsed_ms_since(&start).unwrap()) * 1e3;
        // The simulated device takes no time that could be filled.
        let bytes_per_us = rig.either(64.0 * memory.bytes() as f64 / us, 1.0);
        Self { memory, bytes_per_us }
    }

    fn enqueue(&self, stream: &Stream, us: f64) {
        let mut left = (us * self.bytes_per_us) as u64 / 16 * 16;
        while left > 0 {
            let here = left.min(self.memory.bytes());
            stream.fill(self.memory.span().slice(0, here).unwrap(), 1).unwrap();
            left -= here;
        }
    }
}

fn parameter(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().map_or(otherwise, |value| value.parse().unwrap())
}

/// The byte that fills a prefix.
fn byte_of(prefix: u32) -> u8 {
    prefix as u8 + 1
}

fn tokens(blocks: u32) -> u64 {
    u64::from(blocks * BLOCK_TOKENS)
}

impl<'a> Bench<'a> {
    fn new(rig: &'a Rig) -> Self {
        let tier_us = parameter("KV_TIER_US", 5000);
        let latency = Duration::from_micros(tier_us);
        let records_max = ((PREFIXES + 2) * PREFIX) as usize;
        let mut tiers = LowerTiers::new(b"a model");
        tiers.push(move || {
            let options = MemoryTierOptions { records_max, latency, ..Default::default() };
            Box::new(Background::new(MemoryTier::new(options)).unwrap())
        });
        tiers.rules = LowerOptions { wait_max: LONGEST, ..LowerOptions::default() };
        let shape = common::shape(rig.either(32, 2), rig.either(2048, 64));
        let new_blocks = NEW[1] / BLOCK_TOKENS + 2;
        let device = RUNNING * (RUNNING_BLOCKS + 1) + ON_DEVICE * PREFIX + 2 * new_blocks;
        let cache = rig.cache(KvCacheOptions {
            tiers,
            sequences_max: RUNNING + 4,
            blocks_per_sequence_max: PREFIX + new_blocks,
            ..common::options(shape, device, IN_HOST * PREFIX)
        });
        let prefill = parameter("KV_PREFILL_TOKENS_PER_S", 20_000);
        let mut bench = Self {
            rig,
            cache,
            running: Vec::new(),
            busy: Busy::new(rig),
            aside: Stream::new(&rig.device).unwrap(),
            step_us: parameter("KV_STEP_US", 5000) as f64,
            token_us: 1e6 / prefill as f64,
            tier_us,
            asked: 0,
        };
        bench.fill();
        bench
    }

    /// Computes all prefixes, and has them stored.
    fn fill(&mut self) {
        for number in 0..RUNNING {
            let ids = (0..RUNNING_BLOCKS * BLOCK_TOKENS).map(|at| at + (number << 16)).collect();
            let step = self.cache.begin_step().unwrap();
            let mut sequence = admit(&mut self.cache, &mut [Request::new(ids)]);
            self.cache.stage(&step, &mut [&mut sequence], |_, _| Ok(())).unwrap();
            self.cache.finish_step(step).unwrap();
            self.running.push(sequence);
        }
        for prefix in 0..PREFIXES {
            let names = chain(prefix, PREFIX.into());
            let step = self.cache.begin_step().unwrap();
            let request = Request::named(tokens(PREFIX) + 1, names);
            let mut sequence = admit(&mut self.cache, &mut [request]);
            self.cache.stage(&step, &mut [&mut sequence], |_, _| Ok(())).unwrap();
            self.write(&sequence, byte_of(prefix));
            self.cache.finish_step(step).unwrap();
            drop(sequence);
            self.settle();
        }
        // What is still on the device is stored when it is evicted, long before it is asked for.
        let stats = self.cache.manager().lower_stats();
        assert!(stats.names[0] >= u64::from((PREFIXES - ON_DEVICE - 1) * PREFIX), "{stats:?}");
    }

    /// Runs empty steps until everything is stored that is to be.
    fn settle(&mut self) {
        let (begun, mut quiet, mut before) = (Instant::now(), 0, None);
        while quiet < 8 {
            assert!(begun.elapsed() < LONGEST, "stores do not end: {before:?}");
            let step = self.cache.begin_step().unwrap();
            self.cache.finish_step(step).unwrap();
            self.cache.drain().unwrap();
            let stats = self.cache.manager().lower_stats();
            let is_quiet = stats.open_tickets == 0 && before == Some(stats);
            quiet = if is_quiet { quiet + 1 } else { 0 };
            before = Some(stats);
            std::thread::yield_now();
        }
    }

    /// Fills the blocks of a sequence, as computing them does.
    fn write(&self, sequence: &Sequence, byte: u8) {
        let part = &self.cache.parts()[0];
        for &id in &self.cache.manager().block_ids(sequence)[..sequence.block_count()] {
            let block = part.paged().block_span(id.get() as u64).unwrap().unwrap();
            part.compute().fill(block, byte).unwrap();
        }
    }

    /// Looks at all bytes of a prefix.
    fn check(&self, sequence: &Sequence, byte: u8) {
        let part = &self.cache.parts()[0];
        let mut bytes = vec![0; self.cache.shape().block_bytes() as usize];
        for &id in &self.cache.manager().block_ids(sequence)[..PREFIX as usize] {
            let block = part.paged().block_span(id.get() as u64).unwrap().unwrap();
            part.compute().download(&mut bytes, block).unwrap();
            assert!(bytes.iter().all(|&found| found == byte), "wrong bytes in {id}");
        }
    }

    /// The work of a step: every layer waits for what loads bring of it.
    fn compute(&mut self, step: OpenStep, request: Option<(&mut Sequence, Way, u8)>, end: &Event) {
        for sequence in &mut self.running {
            // The same place in every step.
            self.cache.truncate(sequence, tokens(RUNNING_BLOCKS) - 2).unwrap();
            self.cache.extend(sequence, &[7]).unwrap();
            self.cache.reserve(sequence, 1).unwrap();
        }
        let mut us = self.step_us;
        let mut written = None;
        let mut batch: Vec<_> = self.running.iter_mut().collect();
        if let Some((sequence, way, byte)) = request {
            us += f64::from(sequence.next()) * self.token_us;
            let ids = &self.cache.manager().block_ids(sequence)[..sequence.block_count()];
            written = (way == Way::Computed).then(|| (ids.to_vec(), byte));
            batch.push(sequence);
        }
        self.cache.stage(&step, &mut batch, |_, _| Ok(())).unwrap();
        let layers = self.cache.shape().layers();
        for layer in 0..layers {
            self.cache.wait_for_layer(layer).unwrap();
            let compute = self.cache.parts()[0].compute();
            self.busy.enqueue(compute, us / f64::from(layers));
        }
        let part = &self.cache.parts()[0];
        if let Some((ids, byte)) = written {
            for id in ids {
                let block = part.paged().block_span(id.get() as u64).unwrap().unwrap();
                part.compute().fill(block, byte).unwrap();
            }
        }
        end.record(part.compute()).unwrap();
        self.cache.finish_step(step).unwrap();
    }

    /// One request, which arrives while others decode.
    fn play(&mut self, way: Way, new: u32, times: &mut Times) {
        let timing = || Event::with_timing(&self.rig.device).unwrap();
        let (arrived, mut ends) = (timing(), Vec::new());
        let prefix = self.asked % PREFIXES;
        self.asked += 1;
        let mut names = chain(prefix, PREFIX.into());
        let above = self.cache.pool().match_prefix(&names).len();
        assert_eq!(above, 0, "blocks of the prefix that are above the tier");
        let length = tokens(PREFIX) + u64::from(new);
        while tokens(names.len() as u32 + 1) <= length {
            names.push(BlockHash::chain(*names.last().unwrap(), &[self.asked]));
        }
        let own = names[PREFIX as usize..].to_vec();
        let mut request = Request::named(length, names);
        request.hit_max = if way == Way::Computed { 0 } else { u64::MAX };
        request.by_layers = way == Way::ByLayers;
        let mut requests = [request];
        let entered = self.cache.manager().lower_stats().entered;
        for _ in 0..WARM + ALONE {
            ends.push(Event::with_timing(&self.rig.device).unwrap());
            let step = self.cache.begin_step().unwrap();
            self.compute(step, None, ends.last().unwrap());
        }
        let begun = Instant::now();
        arrived.record(&self.aside).unwrap();
        let mut sequence = loop {
            assert!(begun.elapsed() < LONGEST, "{way:?} waits for ever");
            ends.push(Event::with_timing(&self.rig.device).unwrap());
            let step = self.cache.begin_step().unwrap();
            match self.cache.admit(&mut requests, u64::MAX).unwrap().pop() {
                Some(Answer::Admitted(mut sequence)) => {
                    let request = Some((&mut sequence, way, byte_of(prefix)));
                    self.compute(step, request, ends.last().unwrap());
                    break sequence;
                }
                Some(Answer::Refused(error)) => panic!("{error:?}"),
                _ => self.compute(step, None, ends.last().unwrap()),
            }
        };
        self.cache.drain().unwrap();
        let us = |end: &Event, start| f64::from(end.elapsed_ms_since(start).unwrap()) * 1e3;
        let first_token = us(ends.last().unwrap(), &arrived);
        let steps: Vec<_> = ends.windows(2).map(|two| us(&two[1], &two[0])).collect();
        times.first_token.push(first_token);
        times.alone.extend(&steps[WARM..WARM + ALONE - 1]);
        let (last, beside) = steps[WARM + ALONE - 1..].split_last().unwrap();
        times.beside.extend(beside);
        times.with.push(*last);
        let hit = if way == Way::Computed { 0 } else { tokens(PREFIX) };
        assert_eq!(sequence.cached_tokens(), hit);
        let stats = self.cache.manager().lower_stats();
        assert_eq!(stats.entered - entered, u64::from(way == Way::ByLayers));
        assert_eq!((stats.redone, stats.late), (0, 0), "{stats:?}");
        let step = sequence.awaits().unwrap();
        let given = Tokens::Named { count: 1, names: &[] };
        let committed = self.cache.commit(&mut sequence, step, given).unwrap();
        assert_eq!(committed, Committed::Taken);
        self.check(&sequence, byte_of(prefix));
        drop(sequence);
        self.cache.forget(&own);
        self.settle();
    }

    fn report(&mut self) {
        println!(
            "\n{RUNNING} sequences decode in steps of {:.0} us; prompts are computed at {:.0} tokens/s, both by fills of {:.0} GB/s; a tier of {} us; {ROUNDS} rounds.",
            self.step_us,
            1e6 / self.token_us,
            self.busy.bytes_per_us / 1e3,
            self.tier_us
        );
        println!(
            "\n| tokens in the tier + new ones | way | first token, ms (median / worst) | of computed | token times beside while it waits, us (median / worst) | alone, in the same rounds | of alone (median / worst) | steps beside | the step that has it, ms (median / worst) |"
        );
        println!("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
        for new in NEW {
            let mut all: [Times; 3] = std::array::from_fn(|_| Times::default());
            // Memory that is touched for the first time counts for nobody.
            Way::ALL.into_iter().for_each(|way| self.play(way, new, &mut Times::default()));
            for _ in 0..ROUNDS {
                for (way, times) in Way::ALL.into_iter().zip(&mut all) {
                    self.play(way, new, times);
                }
            }
            let computed = quantile(&mut all[0].first_token, 0.5);
            for (way, mut times) in Way::ALL.into_iter().zip(all) {
                print_row(new, way, computed, &mut times);
            }
        }
    }
}

fn print_row(new: u32, way: Way, computed: f64, times: &mut Times) {
    let of = |times: &mut Vec<f64>| [0.5, 1.0].map(|share| quantile(times, share));
    let (first, with, alone) =
        (of(&mut times.first_token), of(&mut times.with), of(&mut times.alone));
    let steps = times.beside.len();
    let (beside, share) = match steps {
        0 => ("none".to_owned(), String::new()),
        _ => {
            let beside = of(&mut times.beside);
            let share = [0, 1].map(|at| beside[at] / alone[at]);
            let beside = format!("{:.0} / {:.0}", beside[0], beside[1]);
            (beside, format!("{:.3} / {:.3}", share[0], share[1]))
        }
    };
    println!(
        "| {} + {new} | {} | {:.1} / {:.1} | {:.2} | {beside} | {:.0} / {:.0} | {share} | {steps} | {:.1} / {:.1} |",
        tokens(PREFIX),
        way.name(),
        first[0] / 1e3,
        first[1] / 1e3,
        first[0] / computed,
        alone[0],
        alone[1],
        with[0] / 1e3,
        with[1] / 1e3,
    );
}
