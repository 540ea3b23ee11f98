//! A decode step that adds a token to each of 64 sequences: the cost on the step's own thread.

use std::time::{Duration, Instant};

use cuda_driver::Device;
use cuda_vmm::pages::{PagePool, PagePoolOptions};
use cuda_vmm::sequences::{Layout, Sequence, SequenceSpace, SpaceOptions};
use cuda_vmm::{Worker, WorkerOptions};

use crate::raw::Raw;
use crate::{TOKEN_BYTES, micros, percentile};

const SEQUENCES: u64 = 64;
const STEPS: u64 = 1_024;
/// Time between steps. A fast decode step of such a model takes several times as long.
const PACE: Duration = Duration::from_millis(2);

pub(crate) fn measure(device: &Device) {
    println!(
        "A step that adds a token to each of {SEQUENCES} sequences, {STEPS} steps, one every {PACE:?}; in us\n"
    );
    println!("| pages come into use | how | p50 | p99 | worst | stalls |");
    println!("| --- | --- | ---: | ---: | ---: | ---: |");
    for (text, staggered) in [("4 at each step", true), ("64 at every 16th step", false)] {
        let (mut demand, pages) = on_demand(device, staggered);
        row(text, "mapped on demand, as vAttention does", &mut demand, 0);
        let (mut ahead, stalls) = ahead(device, staggered, pages);
        row(text, "mapped ahead", &mut ahead, stalls);
    }
    println!();
}

fn row(text: &str, how: &str, times: &mut [Duration], stalls: u64) {
    let [p50, p99, worst] = [50, 99, 100].map(|percent| micros(percentile(times, percent)));
    println!("| {text} | {how} | {p50:.2} | {p99:.2} | {worst:.2} | {stalls} |");
}

/// Number of tokens of a sequence before the first step.
fn start(sequence: u64, staggered: bool, page_tokens: u64) -> u64 {
    if staggered { sequence % page_tokens } else { 0 }
}

/// Pages are created beforehand and mapped one by one on the step's thread when a token needs them.
/// Also returns their number.
fn on_demand(device: &Device, staggered: bool) -> (Vec<Duration>, u64) {
    let page_bytes = page_bytes(device);
    let page_tokens = page_bytes / TOKEN_BYTES;
    let rows = (STEPS + page_tokens).div_ceil(page_tokens);
    let mut raw = Raw::reserve(device, SEQUENCES * rows, page_bytes);
    raw.create_to(SEQUENCES * rows);
    let mut mapped = vec![0; SEQUENCES as usize];
    let mut times = Vec::new();
    for step in 1..=STEPS {
        let begin = Instant::now();
        for sequence in 0..SEQUENCES {
            let tokens = start(sequence, staggered, page_tokens) + step;
            let wanted = tokens.div_ceil(page_tokens);
            let mapped = &mut mapped[sequence as usize];
            if wanted > *mapped {
                let first = sequence * rows;
                raw.map(first + *mapped..first + wanted);
                *mapped = wanted;
            }
        }
        times.push(begin.elapsed());
        rest_of_step(begin);
    }
    (times, SEQUENCES * rows)
}

/// The worker's thread maps; the step compares and stores. Also returns the number of stalls.
fn ahead(device: &Device, staggered: bool, capacity_pages: u64) -> (Vec<Duration>, u64) {
    let options = PagePoolOptions { page_bytes: None, capacity_pages };
    let pages = PagePool::new(device, options).unwrap();
    let page_tokens = pages.page_bytes() / TOKEN_BYTES;
    let worker = Worker::spawn(WorkerOptions::default()).unwrap();
    let options = SpaceOptions {
        sequences: SEQUENCES,
        planes: 1,
        token_bytes: TOKEN_BYTES,
        tokens_max: STEPS + page_tokens,
        layout: Layout::TokenMajor,
        look_ahead_tokens: 16,
        ..SpaceOptions::default()
    };
    let space = SequenceSpace::new(&pages, &worker, options).unwrap();
    let mut sequences: Vec<Sequence> = (0..SEQUENCES)
        .map(|index| {
            let mut sequence = space.admit(page_tokens).unwrap();
            sequence.extend_blocking(start(index, staggered, page_tokens)).unwrap();
            sequence
        })
        .collect();
    // The first rows belong to admission. Only the steps are measured.
    while sequences.iter().any(|sequence| sequence.ready_tokens() < page_tokens) {
        std::hint::spin_loop();
    }
    let stalls = space.stats().stalls;
    let mut times = Vec::new();
    for step in 1..=STEPS {
        let begin = Instant::now();
        let batch = sequences.iter_mut().enumerate().map(|(index, sequence)| {
            (sequence, start(index as u64, staggered, page_tokens) + step)
        });
        let extended = space.extend(batch);
        times.push(begin.elapsed());
        if extended.is_err() {
            // Counted as a stall. The next step needs these tokens too.
            for (index, sequence) in sequences.iter_mut().enumerate() {
                let tokens = start(index as u64, staggered, page_tokens) + step;
                sequence.extend_blocking(tokens).unwrap();
            }
        }
        rest_of_step(begin);
    }
    let stalls = space.stats().stalls - stalls;
    sequences.into_iter().for_each(|sequence| sequence.finish(&[]));
    assert!(space.close(&[]).unwrap().wait().unwrap().is_clean());
    worker.close();
    (times, stalls)
}

/// Spins for the time that the model would run, because an engine keeps its core busy.
fn rest_of_step(begin: Instant) {
    while begin.elapsed() < PACE {
        std::hint::spin_loop();
    }
}

fn page_bytes(device: &Device) -> u64 {
    let options = PagePoolOptions { page_bytes: None, capacity_pages: 0 };
    PagePool::new(device, options).unwrap().page_bytes()
}
