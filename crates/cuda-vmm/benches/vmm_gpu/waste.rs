//! The share of resident memory without a token, over a trace of requests. It depends only on page
//! sizes and layouts, so the simulated device gives it, with every size divided by 512.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use cuda_driver::Device;
use cuda_sim::{SimConfig, SimDriver};
use cuda_vmm::Worker;
use cuda_vmm::pages::{PagePool, PagePoolOptions};
use cuda_vmm::sequences::{Layout, Sequence, SequenceSpace, SpaceOptions};

use crate::TOKEN_BYTES;

const SCALE: u64 = 512;
const BATCH: usize = 64;
const REQUESTS: usize = 1_000;
/// 32 layers, K and V.
const PLANES: u64 = 64;
const LOOK_AHEAD: u64 = 16;

struct Request {
    prompt: u64,
    answer: u64,
}

/// Sums of bytes over the steps.
#[derive(Default)]
struct Sums {
    resident: f64,
    /// Unused bytes: waste of live sequences, and parked memory.
    unused: f64,
    used_bytes_max: u64,
    admitted: u64,
    adopted: u64,
}

pub(crate) fn compute(trace: &Path) {
    let requests = read(trace);
    println!(
        "Resident memory over the first {} requests of the trace, {BATCH} at once, look-ahead {LOOK_AHEAD} tokens\n",
        requests.len()
    );
    println!(
        "| layout | page | tokens a growth | unused, all kept | adopted | unused, at most 5 % kept | adopted |"
    );
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: |");
    let layouts =
        [(Layout::TokenMajor, "all layers in a page"), (Layout::PlaneMajor, "per layer, K and V")];
    for (layout, name) in layouts {
        for page_bytes in [2_u64 << 20, 16 << 20, 64 << 20] {
            let packed = if layout == Layout::TokenMajor { 1 } else { PLANES };
            let tokens = page_bytes * packed / TOKEN_BYTES;
            let scaled = page_bytes / SCALE;
            let all = replay(&requests, layout, scaled, u64::MAX);
            let few = replay(&requests, layout, scaled, all.used_bytes_max / 20 / scaled);
            println!(
                "| {name} | {} MiB | {tokens} | {} | {} |",
                page_bytes >> 20,
                all.shares(),
                few.shares(),
            );
        }
    }
    println!();
}

impl Sums {
    /// The unused share, and the share of requests that found memory mapped.
    fn shares(&self) -> String {
        let unused = 100.0 * self.unused / self.resident;
        format!("{unused:.1} % | {:.0} %", 100.0 * self.adopted as f64 / self.admitted as f64)
    }
}

fn read(trace: &Path) -> Vec<Request> {
    let text = fs::read_to_string(trace).unwrap();
    let number = |line: &str, key: &str| -> u64 {
        let (_, rest) = line.split_once(key).unwrap();
        let digits = rest.trim_start_matches(['"', ':', ' ']);
        digits.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
    };
    let request = |line| Request {
        prompt: number(line, "input_length"),
        answer: number(line, "output_length").max(1),
    };
    text.lines().take(REQUESTS).map(request).collect()
}

fn replay(requests: &[Request], layout: Layout, page_bytes: u64, spare_pages_max: u64) -> Sums {
    let longest = requests.iter().map(|request| request.prompt + request.answer).max().unwrap();
    let config =
        SimConfig { device_bytes: 16 << 30, granularity: page_bytes, ..SimConfig::default() };
    let device = Device::open(Arc::new(SimDriver::new(config).unwrap()), 0).unwrap();
    let unlimited = PagePoolOptions { page_bytes: None, capacity_pages: u64::MAX };
    let pages = PagePool::new(&device, unlimited).unwrap();
    let worker = Worker::manual();
    let options = SpaceOptions {
        sequences: BATCH as u64,
        planes: PLANES,
        token_bytes: TOKEN_BYTES / SCALE / PLANES,
        tokens_max: longest,
        layout,
        look_ahead_tokens: LOOK_AHEAD,
        parked_pages_max: spare_pages_max,
        ..SpaceOptions::default()
    };
    let space = SequenceSpace::new(&pages, &worker, options).unwrap();
    let mut waiting = requests.iter();
    let mut live: Vec<(Sequence, u64, u64)> = Vec::new();
    let mut sums = Sums::default();
    loop {
        while live.len() < BATCH {
            let Some(request) = waiting.next() else { break };
            let mut sequence = space.admit(request.prompt).unwrap();
            sequence.extend_blocking(request.prompt).unwrap();
            live.push((sequence, request.prompt, request.prompt + request.answer));
        }
        if live.len() < BATCH {
            // The end of a trace is not a steady state.
            break;
        }
        for (sequence, tokens, _) in &mut live {
            *tokens += 1;
            if sequence.extend_to(*tokens).is_err() {
                sequence.extend_blocking(*tokens).unwrap();
            }
        }
        while worker.poll() {}
        let stats = space.stats();
        sums.resident += (stats.mapped_bytes + stats.parked_bytes) as f64;
        sums.unused += (stats.waste_bytes + stats.parked_bytes) as f64;
        sums.used_bytes_max = sums.used_bytes_max.max(stats.used_bytes);
        for index in (0..live.len()).rev() {
            if live[index].1 >= live[index].2 {
                live.swap_remove(index).0.finish(&[]);
            }
        }
    }
    live.into_iter().for_each(|(sequence, ..)| sequence.finish(&[]));
    let stats = space.stats();
    (sums.admitted, sums.adopted) = (stats.admitted, stats.adopted);
    assert!(space.close(&[]).unwrap().wait().unwrap().is_clean());
    sums
}
