//! Speed of evicted blocks on their way to host memory and back, by every way, beside plain copies.
//!
//! `cargo bench -p kv-plane --bench offload_gpu`, on a machine with a GPU. A request fills the device. Another
//! one evicts all its blocks ("out"); then the first comes back and evicts the other's ("both"). At last the
//! first comes back to blocks that hold nothing ("back"). Times are on the host's clock, from the admission
//! until the compute stream could begin, with the pool's work, the staging of the step and all calls. Medians
//! of 9 rounds, in which the ways take turns. With `--sim` it runs on the simulated device, where times mean
//! nothing and calls are the same.
//!
//! The plain copies move as many bytes, between two buffers on each side, on a stream for each direction. Their
//! time is from the first call until both streams are idle.

#![allow(clippy::print_stdout, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]

mod common;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use common::{BLOCK_TOKENS, Plain, Rig, admit, chain, quantile};
use kv_kernels::{
    KvKernels, KvShape,
    link::{MeasureOptions, TransportProfile},
};
use kv_plane::{KvCache, KvCacheOptions, Request, TransportChoice, TransportRules, TransportStats};
use kv_pool::BlockHash;

/// Name, layers, bytes of a row, MiB that a request has at most.
const SHAPES: [(&str, u32, u64, u64); 6] = [
    ("8B: 32 layers, 1,024 wide", 32, 2048, 128),
    ("the same, eight times as many", 32, 2048, 1024),
    ("70B at TP8: 80 layers, 128 wide", 80, 256, 128),
    ("8 layers, 256 wide", 8, 512, 128),
    ("2 layers, 256 wide", 2, 512, 128),
    ("2 layers, 64 wide", 2, 128, 128),
];
const BLOCKS_MAX: u64 = 1024;
const ROUNDS: usize = 9;

fn main() -> ExitCode {
    common::run(compare)
}

fn compare(rig: &Rig) {
    let kernels = Arc::new(KvKernels::load(&rig.device).unwrap());
    let measured = (!rig.simulated)
        .then(|| TransportProfile::measure(&kernels, &MeasureOptions::default()).unwrap());
    for &(name, layers, row_bytes, mib) in rig.either(&SHAPES[..], &SHAPES[4..]) {
        let shape = common::shape(layers, row_bytes);
        let blocks = ((mib << 20) / shape.block_bytes()).min(BLOCKS_MAX);
        println!("\n{name}: {blocks} blocks of {} KiB", shape.block_bytes() >> 10);
        println!(
            "| way | out | back | both, GB/s | of plain: out | back | both | calls, out | host, out, us | went by |"
        );
        println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |");
        let bytes = blocks * shape.block_bytes();
        let pieces =
            |piece| Pieces { plain: Plain::new(rig, bytes), piece, rates: Rates::default() };
        let mut plain = [bytes, shape.block_bytes()].map(pieces);
        let mut caches = TransportChoice::ALL
            .map(|choice| Bench::new(rig, shape, blocks, choice, measured.as_ref()));
        for _ in 0..ROUNDS {
            plain.iter_mut().for_each(Pieces::round);
            caches.iter_mut().for_each(|bench| bench.round(rig));
        }
        let [whole, each] = plain.map(|plain| plain.rates.gb_per_s(bytes));
        print_rates("plain, one copy each way", whole, whole);
        println!(" | | |");
        print_rates("plain, a copy for each block", each, whole);
        println!(" | | |");
        caches.into_iter().for_each(|bench| bench.report(whole));
    }
}

/// Seconds of the way out, of the way back, and of both at once.
#[derive(Default)]
struct Rates([Vec<f64>; 3]);

impl Rates {
    fn add(&mut self, seconds: [f64; 3]) {
        self.0.iter_mut().zip(seconds).for_each(|(all, seconds)| all.push(seconds));
    }

    fn gb_per_s(mut self, bytes: u64) -> [f64; 3] {
        let moved = [bytes, bytes, 2 * bytes];
        std::array::from_fn(|at| moved[at] as f64 / quantile(&mut self.0[at], 0.5) / 1e9)
    }
}

fn print_rates(name: &str, rates: [f64; 3], plain: [f64; 3]) {
    let [out, back, both] = rates;
    let [of_out, of_back, of_both] = std::array::from_fn(|at| rates[at] / plain[at]);
    print!(
        "| {name} | {out:.1} | {back:.1} | {both:.1} | {of_out:.3} | {of_back:.3} | {of_both:.3} | "
    );
}

/// Copies in pieces of equal length.
struct Pieces {
    plain: Plain,
    piece: u64,
    rates: Rates,
}

impl Pieces {
    fn round(&mut self) {
        let Self { plain, piece, rates } = self;
        rates.add([[true, false], [false, true], [true, true]].map(|ways| {
            let begun = Instant::now();
            for at in (0..plain.pages[0].bytes()).step_by(*piece as usize) {
                plain.copy(ways, at, *piece);
            }
            plain.streams.iter().for_each(|stream| stream.synchronize().unwrap());
            begun.elapsed().as_secs_f64()
        }));
    }
}

/// A cache that one request fills.
struct Bench {
    cache: KvCache,
    choice: TransportChoice,
    blocks: u64,
    first: Vec<BlockHash>,
    /// Other content so far.
    others: u32,
    rates: Rates,
    /// Seconds of the host's part of the way out, and its calls.
    host: Vec<f64>,
    calls: u64,
}

impl Bench {
    fn new(
        rig: &Rig,
        shape: KvShape,
        blocks: u64,
        choice: TransportChoice,
        measured: Option<&TransportProfile>,
    ) -> Self {
        let profiles = measured.cloned().into_iter().collect();
        let cache = rig.cache(KvCacheOptions {
            transport: TransportRules { choice, profiles, ..TransportRules::default() },
            ..common::options(shape, blocks as u32 + 1, 4 * blocks as u32)
        });
        let (rates, host) = (Rates::default(), Vec::new());
        let first = chain(0, blocks);
        let mut bench = Self { cache, choice, blocks, first, others: 0, rates, host, calls: 0 };
        let first = bench.first.clone();
        bench.serve(&first, [0, 0]);
        bench
    }

    /// Admits a prompt and brings it to the point where its step could begin, which takes so many blocks out
    /// and back: seconds until the device is there, and until the host was.
    fn serve(&mut self, hashes: &[BlockHash], moved: [u64; 2]) -> (f64, f64) {
        let before = self.cache.manager().stats();
        let step = self.cache.begin_step().unwrap();
        let tokens = self.blocks * u64::from(BLOCK_TOKENS) + 1;
        let request = Request::named(tokens, hashes.to_vec());
        let begun = Instant::now();
        let mut sequence = admit(&mut self.cache, request);
        self.cache.stage(&step, &mut [&mut sequence]).unwrap();
        let host = begun.elapsed().as_secs_f64();
        self.cache.parts()[0].compute().synchronize().unwrap();
        let all = begun.elapsed().as_secs_f64();
        self.cache.finish_step(step).unwrap();
        drop(sequence);
        self.cache.drain().unwrap();
        let after = self.cache.manager().stats();
        let out = after.offloaded_blocks - before.offloaded_blocks;
        assert_eq!([out, after.onboarded_blocks - before.onboarded_blocks], moved);
        (all, host)
    }

    fn round(&mut self, rig: &Rig) {
        let (blocks, first) = (self.blocks, self.first.clone());
        // New content each time, so that no block is found.
        self.others += 2;
        let [other, last] = [1, 0].map(|less| chain(self.others - less, blocks));
        let calls = rig.calls();
        let (out, host) = self.serve(&other, [blocks, 0]);
        self.calls = rig.calls() - calls;
        self.host.push(host);
        let (both, _) = self.serve(&first, [blocks; 2]);
        self.serve(&last, [blocks, 0]);
        self.cache.forget(&last);
        let (back, _) = self.serve(&first, [0, blocks]);
        self.cache.forget(&other);
        self.rates.add([out, back, both]);
    }

    fn report(mut self, plain: [f64; 3]) {
        let ways = went_by(&self.cache.stats().transports);
        let bytes = self.blocks * self.cache.options().groups[0].shape.block_bytes();
        print_rates(&self.choice.to_string(), self.rates.gb_per_s(bytes), plain);
        println!("{} | {:.0} | {ways} |", self.calls, quantile(&mut self.host, 0.5) * 1e6);
        self.cache.close().unwrap();
    }
}

fn went_by(stats: &TransportStats) -> String {
    let ways = stats.by_name().into_iter().filter(|(_, carried)| carried.blocks > 0);
    let ways: Vec<_> = ways
        .map(|(name, carried)| {
            format!("{name}, {:.1} blocks a batch", carried.blocks as f64 / carried.batches as f64)
        })
        .collect();
    ways.join("; ")
}
