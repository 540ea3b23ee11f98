//! What a loop of decode steps that are bound by device memory notices of blocks that travel beside it.
//!
//! `cargo bench -p kv-plane --bench decode_gpu`, on a machine with a GPU. Every step reads all KV of the
//! sequences that run, by the checksum kernel, through the block table of the step's batch. In every other step,
//! or in every one, a further sequence is admitted, is in the batch two steps later, and ends. Alone, all of
//! these sequences are cached on the device. Beside transfers there are so many that each was evicted before it
//! is asked for again: its blocks come back, and as many go to host memory. That is so where the oldest goes first.
//! The policy that a cache has unless told otherwise keeps a part of such a round on the device, so that less comes
//! back: the last line has it. Nothing is computed twice in either. The plain copies move as many bytes,
//! on a stream for each direction, from the start of the step's kernel on, while the cache moves nothing.
//!
//! Times are by events on the compute stream: the kernel's, and from the end of one step's kernel to the end of
//! the next one's. The latter has the staging of the batch, waits for copies, and the host if it is late. The
//! loop runs alone and beside transfers in turn. Every sum that was read is compared with those from before the
//! first transfer. With `--sim` it runs on the simulated device, where times mean nothing.

#![allow(clippy::print_stdout, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]

mod common;

use std::collections::{HashMap, VecDeque};
use std::process::ExitCode;
use std::time::Duration;

pub(crate) use common::Rig;
use common::{BLOCK_TOKENS, Plain, admit, chain, quantile};
use cuda_driver::{DeviceBuffer, Event};
use kv_kernels::{link::Transport, verify::ChecksumArgs};
use kv_plane::{
    Eviction, HostPinning, KvCache, KvCacheOptions, PoolRules, Request, Sequence, TransportChoice,
    TransportRules,
};
use kv_pool::{BlockHash, policy::PolicyKind};

/// What runs: name, layers, bytes of a row, sequences, blocks of each, and blocks of a further sequence.
type Load = (&'static str, u32, u64, u32, u32, u32);

/// 8 GiB are read in about 2 ms, in which 36 blocks of 2 MiB come back at 38 GB/s.
const LOADS: [Load; 3] = [
    ("64 sequences of 1,024 tokens, blocks of 2 MiB", 32, 2048, 64, 64, 36),
    ("256 sequences of 256 tokens, blocks of 2 MiB", 32, 2048, 256, 16, 36),
    ("64 sequences of 16,384 tokens, blocks of 128 KiB", 8, 512, 64, 1024, 576),
];
/// A small one, and as many further blocks as on a card.
const SIMULATED: [Load; 2] = [("simulated", 1, 64, 4, 4, 3), ("simulated, long", 1, 64, 2, 2, 36)];

/// Further sequences, so many that each is evicted before it comes again, and that all stay on the device.
const OTHERS: [usize; 2] = [20, 8];
/// Steps from the admission of a further sequence to the step that has it in its batch.
const AHEAD: usize = 2;
/// Times that each is played with few further sequences, and with many.
const ROUNDS: usize = 2;
/// Rest before each of them: a card that reads all the time comes to its limit of power, and slows down.
const REST: Duration = Duration::from_millis(700);
/// Bytes of noise, of which each block begins at a place of its own.
const NOISE_BYTES: u64 = 64 << 20;

#[allow(dead_code, reason = "tests run it another way")]
fn main() -> ExitCode {
    common::run(|rig| drop(measure(rig)))
}

/// What came back in all of a way's rounds beside transfers, and what would have if all had been evicted before.
#[allow(dead_code, reason = "tests look at it")]
pub(crate) struct Moved {
    pub(crate) way: &'static str,
    pub(crate) blocks: u64,
    pub(crate) most: u64,
}

pub(crate) fn measure(rig: &Rig) -> Vec<Moved> {
    let mut moved = Vec::new();
    for load in rig.either(&LOADS[..], &SIMULATED) {
        println!("\n{}, further sequences of {} blocks", load.0, load.5);
        println!(
            "| beside | each way, GB/s | kernel alone, us (p50 / p99) | beside | of alone | step alone | beside | of alone |"
        );
        println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
        for (way, transport, eviction) in ways() {
            let mut bench = Bench::new(rig, *load, (transport, eviction));
            let [blocks, most] = bench.report(way);
            moved.push(Moved { way, blocks, most });
            bench.cache.close().unwrap();
        }
    }
    moved
}

/// The line whose cache evicts as one does that is told nothing.
pub(crate) const BY_DEFAULT: &str = "auto, default eviction";

/// What is beside the loop, transfers of the cache or plain copies, and what leaves first.
fn ways() -> [(&'static str, Option<TransportRules>, Eviction); 5] {
    let only = |transport| TransportRules {
        choice: TransportChoice::Only(transport),
        ..TransportRules::default()
    };
    [
        ("plain copies", None, PolicyKind::Lru.into()),
        ("auto", Some(TransportRules::default()), PolicyKind::Lru.into()),
        ("kernel", Some(only(Transport::DirectKernel)), PolicyKind::Lru.into()),
        ("two hops", Some(only(Transport::TwoHop)), PolicyKind::Lru.into()),
        (BY_DEFAULT, Some(TransportRules::default()), Eviction::default()),
    ]
}

/// Microseconds of each kernel, and of each step.
#[derive(Default)]
struct Times {
    kernel: Vec<f64>,
    step: Vec<f64>,
    /// Blocks that came back, in all steps.
    moved: u64,
    /// Blocks that would have come back if all had been evicted before.
    most: u64,
}

struct Bench<'a> {
    rig: &'a Rig,
    load: Load,
    /// Whether what is oldest leaves first, so that of a round too long for the device nothing stays there.
    oldest_first: bool,
    cache: KvCache,
    running: Vec<Sequence>,
    names: Vec<Vec<BlockHash>>,
    lengths: DeviceBuffer,
    /// The sums of each step.
    sums: DeviceBuffer,
    /// The sums of each further sequence, and those of the running ones.
    expected: HashMap<Option<usize>, Vec<u64>>,
    /// Where the copies are to be plain ones.
    plain: Option<Plain>,
}

impl<'a> Bench<'a> {
    fn new(
        rig: &'a Rig,
        load: Load,
        (transport, eviction): (Option<TransportRules>, Eviction),
    ) -> Self {
        let (_, layers, row_bytes, sequences, blocks, others) = load;
        let all = u32::try_from(OTHERS[0]).unwrap() * others;
        let device_blocks = sequences * blocks + u32::try_from(OTHERS[1]).unwrap() * others + 16;
        let width = blocks.max(others) + 1;
        let shape = common::shape(layers, row_bytes);
        let plain =
            transport.is_none().then(|| Plain::new(rig, u64::from(others) * shape.block_bytes()));
        let mut options = common::options(shape, device_blocks, all + 64);
        options.groups[0].blocks_per_sequence_max = width;
        let cache = rig.cache(KvCacheOptions {
            transport: transport.unwrap_or_default(),
            pinning: HostPinning::BACKGROUND,
            pool: PoolRules { eviction, ..PoolRules::default() },
            sequences_max: sequences + 2 * AHEAD as u32,
            ..options
        });
        let tokens = |blocks| blocks * BLOCK_TOKENS;
        let mut lengths = vec![tokens(blocks); sequences as usize];
        lengths.push(tokens(others));
        let lengths: Vec<_> = lengths.into_iter().flat_map(u32::to_ne_bytes).collect();
        let of_step = u64::from(sequences + 1) * u64::from(width) * 8;
        let mut bench = Self {
            rig,
            load,
            oldest_first: matches!(eviction, Eviction::Kind(PolicyKind::Lru)),
            cache,
            running: Vec::new(),
            names: (0..OTHERS[0]).map(|n| chain(n as u32, others.into())).collect(),
            lengths: DeviceBuffer::alloc(&rig.device, lengths.len() as u64).unwrap(),
            sums: DeviceBuffer::alloc(&rig.device, bench_steps(rig) as u64 * of_step).unwrap(),
            expected: HashMap::new(),
            plain,
        };
        bench.cache.wait_for_host().unwrap();
        bench.cache.parts()[0].compute().upload(bench.lengths.span(), &lengths).unwrap();
        bench.fill();
        bench
    }

    /// Writes noise into the blocks of all sequences, and notes its sums.
    fn fill(&mut self) {
        let (sequences, blocks) = (self.load.3, self.load.4);
        let bytes = self.cache.options().groups[0].shape.block_bytes();
        let noise = DeviceBuffer::alloc(&self.rig.device, NOISE_BYTES + bytes).unwrap();
        let mut word = 1_u64;
        let mut next = || {
            word = word.wrapping_mul(0xD6E8_FEB8_6659_FD93).wrapping_add(0x9E37_79B9);
            (word ^ word >> 32).to_ne_bytes()
        };
        let words: Vec<u8> = (0..noise.bytes() / 8).flat_map(|_| next()).collect();
        self.cache.parts()[0].compute().upload(noise.span(), &words).unwrap();
        let mut written = 0;
        let mut write = |cache: &KvCache, sequence: &Sequence| {
            for to in common::blocks(cache, sequence) {
                let from = noise.span().slice(written * 4112 % NOISE_BYTES, bytes).unwrap();
                cache.parts()[0].compute().copy_on_device(to, from).unwrap();
                written += 1;
            }
        };
        for number in 0..sequences {
            let tokens = self.tokens() as u32;
            let ids = (0..tokens).map(|at| at + (number << 16) + (1 << 30)).collect();
            let mut request = Request::new(ids);
            request.tokens_max = u64::from(blocks * BLOCK_TOKENS);
            self.running.push(common::compute(&mut self.cache, request, &mut write));
        }
        self.cache.drain().unwrap();
        for number in 0..OTHERS[0] {
            let step = self.cache.begin_step().unwrap();
            let mut other = self.admit_other(number);
            self.stage(&step, Some(&mut other));
            write(&self.cache, &other);
            self.read(0);
            self.cache.finish_step(step).unwrap();
            drop(other);
            self.check(&[Some(number)]);
        }
    }

    /// Tokens of a running sequence before each step, which all write the same place.
    fn tokens(&self) -> u64 {
        u64::from(self.load.4 * BLOCK_TOKENS) - 2
    }

    fn admit_other(&mut self, number: usize) -> Sequence {
        let names = self.names[number].clone();
        let tokens = names.len() as u64 * u64::from(BLOCK_TOKENS) + 1;
        admit(&mut self.cache, Request::named(tokens, names))
    }

    fn stage(&mut self, step: &kv_plane::OpenStep, other: Option<&mut Sequence>) {
        let tokens = self.tokens();
        for sequence in &mut self.running {
            self.cache.truncate(sequence, tokens).unwrap();
            self.cache.extend(sequence, &[7]).unwrap();
            self.cache.reserve(sequence, 1).unwrap().given().unwrap();
        }
        let mut batch: Vec<_> = self.running.iter_mut().chain(other).collect();
        self.cache.stage(step, &mut batch).unwrap();
    }

    /// Reads all KV of the batch.
    fn read(&self, step: usize) {
        let part = &self.cache.parts()[0];
        let of_step = self.sums_of_step() as u64 * 8;
        let args = ChecksumArgs {
            block_table: part.batch().tables[0].block_table,
            table_stride: self.cache.options().groups[0].blocks_per_sequence_max.into(),
            seq_lens: self.lengths.span(),
            sequences: self.load.3 + 1,
            checksums: self.sums.span().slice(step as u64 * of_step, of_step).unwrap(),
            num_blocks: part.ready_blocks(),
        };
        part.kernels().paged_checksum(part.compute(), part.paged(), args).unwrap();
    }

    fn sums_of_step(&self) -> usize {
        (self.load.3 as usize + 1) * self.cache.options().groups[0].blocks_per_sequence_max as usize
    }

    /// Compares the sums of steps, which had these further sequences in their batches.
    fn check(&mut self, steps: &[Option<usize>]) {
        let mut sums = vec![0; steps.len() * self.sums_of_step() * 8];
        let span = self.sums.span().slice(0, sums.len() as u64).unwrap();
        self.cache.parts()[0].compute().download(&mut sums, span).unwrap();
        let width = self.cache.options().groups[0].blocks_per_sequence_max as usize;
        let of_row = |row: &[u8], blocks: u32| -> Vec<u64> {
            let words = row.chunks(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
            words.take(blocks as usize).collect()
        };
        for (of_step, other) in sums.chunks(self.sums_of_step() * 8).zip(steps) {
            let (running, last) = of_step.split_at(of_step.len() - width * 8);
            let running = running.chunks(width * 8).flat_map(|row| of_row(row, self.load.4));
            let other = other.map(|number| (Some(number), of_row(last, self.load.5)));
            for (of, found) in [(None, running.collect())].into_iter().chain(other) {
                let expected = self.expected.entry(of).or_insert_with(|| found.clone());
                assert!(*expected == found, "wrong bytes in {of:?} of {}", self.load.0);
            }
        }
    }

    /// Steps with a further sequence in every `every`th, alone or beside transfers.
    fn play(&mut self, alone: bool, every: usize, times: &mut Times) {
        std::thread::sleep(self.rig.either(REST, Duration::ZERO));
        let stays = alone || self.plain.is_some();
        let others = if stays { OTHERS[1] } else { OTHERS[0] };
        let (steps, warm) = (bench_steps(self.rig), 2 * OTHERS[0] + 8);
        let timing = || Event::with_timing(&self.rig.device).unwrap();
        let events: Vec<_> = (0..steps).map(|_| [timing(), timing()]).collect();
        let mut coming: VecDeque<(usize, usize, Sequence)> = VecDeque::new();
        let (mut staged, mut before) = (Vec::new(), self.cache.manager().stats());
        for number in 0..warm + steps {
            let step = self.cache.begin_step().unwrap();
            if number == warm {
                before = self.cache.manager().stats();
            }
            if number % every == 0 {
                let other = number / every % others;
                coming.push_back((number + AHEAD, other, self.admit_other(other)));
            }
            let arrived = coming.front().is_some_and(|&(at, ..)| at == number);
            let mut here = if arrived { coming.pop_front() } else { None };
            self.stage(&step, here.as_mut().map(|(.., sequence)| sequence));
            let compute = self.cache.parts()[0].compute();
            let place = number.saturating_sub(warm);
            events[place][0].record(compute).unwrap();
            if let Some(plain) = self.plain.as_ref().filter(|_| !alone && number % every == 0) {
                plain.streams.iter().for_each(|of| of.wait(&events[place][0]).unwrap());
                plain.copy([true; 2], 0, plain.pages[0].bytes());
                times.moved += u64::from(number >= warm) * u64::from(self.load.5);
            }
            self.read(place);
            events[place][1].record(compute).unwrap();
            self.cache.finish_step(step).unwrap();
            if number >= warm {
                staged.push(here.as_ref().map(|&(_, other, _)| other));
            }
        }
        drop(coming);
        self.cache.drain().unwrap();
        let after = self.cache.manager().stats();
        let moved = after.onboarded_blocks - before.onboarded_blocks;
        let asked = steps.div_ceil(every) as u64 * u64::from(self.load.5);
        let found = after.cached_tokens - before.cached_tokens;
        assert_eq!(found, asked * u64::from(BLOCK_TOKENS), "tokens that were not computed again");
        let most = if stays { 0 } else { asked };
        if self.oldest_first {
            assert_eq!(moved, most, "blocks that came back");
        }
        let out = after.offloaded_blocks - before.offloaded_blocks;
        assert!(out.abs_diff(moved) <= 2 * u64::from(self.load.5), "{out} out, {moved} back");
        times.moved += moved;
        times.most += most;
        let us = |end: &Event, start| f64::from(end.elapsed_ms_since(start).unwrap()) * 1e3;
        times.kernel.extend(events.iter().map(|[start, end]| us(end, start)));
        times.step.extend(events.windows(2).map(|two| us(&two[1][1], &two[0][1])));
        self.check(&staged);
    }

    /// Prints a line for each number of further sequences; what came back in all, and what would have at most.
    fn report(&mut self, name: &str) -> [u64; 2] {
        let mut blocks = [0; 2];
        for every in [2, 1] {
            let [mut beside, mut alone] = [Times::default(), Times::default()];
            for _ in 0..ROUNDS {
                self.play(true, every, &mut alone);
                self.play(false, every, &mut beside);
            }
            blocks = [blocks[0] + beside.moved, blocks[1] + beside.most];
            let bytes = beside.moved * self.cache.options().groups[0].shape.block_bytes();
            let rate = bytes as f64 / beside.step.iter().sum::<f64>() / 1e3;
            print!("| {name} | {rate:.1} |");
            for (mut alone, mut beside) in
                [(alone.kernel, beside.kernel), (alone.step, beside.step)]
            {
                let [alone, beside] =
                    [&mut alone, &mut beside].map(|all| [0.5, 0.99].map(|at| quantile(all, at)));
                let [p50, p99] = [beside[0] / alone[0], beside[1] / alone[1]];
                print!(" {:.0} / {:.0} |", alone[0], alone[1]);
                print!(" {:.0} / {:.0} | {p50:.3} / {p99:.3} |", beside[0], beside[1]);
            }
            println!();
        }
        blocks
    }
}

/// Steps that are timed without a break.
fn bench_steps(rig: &Rig) -> usize {
    rig.either(192, 24)
}
