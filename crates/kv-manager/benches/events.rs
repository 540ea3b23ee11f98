//! What events cost a step of 256 decoding sequences, and a reader: nanoseconds an event.
//!
//! `cargo bench -p kv-manager --bench events`

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark prints, and fails by panicking"
)]

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kv_manager::{
    CacheEvent, Completion, Manager, ManagerOptions, Outcome, Request, Sequence, WorkerId,
};
use kv_pool::PoolConfig;

const BLOCK: u32 = 16;
const SEQUENCES: u32 = 256;
const STEPS: u64 = 4096;

/// A manager whose sequences decode one token each a step.
struct Engine {
    manager: Manager,
    running: Vec<Sequence>,
}

impl Engine {
    /// With room for all that the sequences will have and `spare` blocks, and host memory for as much.
    fn new(events_max: usize, evicts: bool) -> Self {
        let own = u64::from(SEQUENCES) * (STEPS / u64::from(BLOCK) + 20);
        let host = if evicts { own } else { 0 };
        let pool = PoolConfig { secondary_blocks: host, ..PoolConfig::primary_only(own) };
        let options = ManagerOptions {
            sequences_max: SEQUENCES,
            events_max,
            ..ManagerOptions::new(BLOCK, pool)
        };
        let mut engine = Self { manager: Manager::new(options).unwrap(), running: Vec::new() };
        let mut left = if evicts { own } else { 0 };
        for number in 1.. {
            if left == 0 {
                break;
            }
            let here = left.min(2048);
            let ids = (0..here as u32 * BLOCK).map(|at| at + (number << 16)).collect();
            engine.admit(vec![Request::new(ids)]);
            engine.running.clear();
            left -= here;
        }
        let prompts = (0..SEQUENCES).map(|number| {
            let ids = (0..64 + number % BLOCK).map(|at| 1 << 30 | (number * 1000 + at)).collect();
            let mut request = Request::new(ids);
            request.tokens_max = STEPS + 256;
            request
        });
        engine.admit(prompts.collect());
        engine
    }

    fn admit(&mut self, requests: Vec<Request>) {
        let step = self.manager.begin_step().unwrap();
        let mut queue = VecDeque::from(requests);
        let admitted = self.manager.admit(&mut queue, u64::MAX).admitted;
        assert!(queue.is_empty());
        self.running.extend(admitted.into_iter().map(|(_, sequence)| sequence));
        let mut batch: Vec<_> = self.running.iter_mut().collect();
        let number = self.manager.stage(&step, &mut batch).unwrap().step;
        self.manager.finish_step(step).unwrap();
        for sequence in &mut self.running {
            self.manager.commit(sequence, number, &[7]).unwrap();
        }
        self.done(number);
    }

    fn done(&mut self, step: u64) {
        let (worker, outcome) = (WorkerId(0), Outcome::Done);
        self.manager.complete(Completion { worker, step, outcome }).unwrap();
    }

    fn step(&mut self) {
        let mut batch: Vec<&mut Sequence> = self.running.iter_mut().collect();
        let step = self.manager.begin_step().unwrap();
        for sequence in &mut batch {
            self.manager.reserve(sequence, 1).unwrap().given().unwrap();
        }
        let number = self.manager.stage(&step, &mut batch).unwrap().step;
        self.manager.finish_step(step).unwrap();
        for sequence in batch {
            self.manager.commit(sequence, number, &[number as u32]).unwrap();
        }
        self.done(number);
    }
}

/// The middle time of a step, the time of all reads, and the events read: a block's each.
fn run(events_max: usize, evicts: bool) -> (Duration, Duration, u64) {
    let mut engine = Engine::new(events_max, evicts);
    let mut reader = engine.manager.events();
    let (mut read, mut reading, mut events) = (Vec::new(), Duration::ZERO, 0);
    if let Some(reader) = &mut reader {
        reader.read(&mut read).unwrap();
    }
    let mut times = Vec::new();
    for _ in 0..STEPS - 64 {
        let start = Instant::now();
        engine.step();
        times.push(start.elapsed());
        if let Some(reader) = &mut reader {
            read.clear();
            let start = Instant::now();
            reader.read(&mut read).unwrap();
            reading += start.elapsed();
            events += read.iter().map(blocks).sum::<u64>();
        }
    }
    // Steps differ in what they do, so the mean without the worst that the machine does.
    times.sort_unstable();
    let most = &times[..times.len() * 99 / 100];
    (most.iter().sum::<Duration>() / most.len() as u32, reading, events)
}

fn blocks(event: &CacheEvent) -> u64 {
    match event {
        CacheEvent::Stored(stored) => stored.names.len() as u64,
        CacheEvent::Removed { names, .. } => names.len() as u64,
        CacheEvent::Moved { to, .. } => to.names.len() as u64,
        _ => 1,
    }
}

fn main() {
    println!(
        "| 256 sequences decode | off, us a step | on, us a step | events a step | ns an event | read, ns an event |"
    );
    println!("| --- | --- | --- | --- | --- | --- |");
    for (evicts, name) in [(false, "pool grown"), (true, "pool full, evicting to the host")] {
        // The least of five: what else the machine does only adds.
        let rounds = 0..5;
        let best = rounds.map(|_| (run(0, evicts), run(1 << 16, evicts)));
        let all: Vec<_> = best.collect();
        let off = all.iter().map(|(off, _)| off.0).min().unwrap();
        let (on, reading, events) = all.iter().map(|(_, on)| *on).min().unwrap();
        let per_step = events as f64 / (STEPS - 64) as f64;
        let cost = (on.as_nanos() as f64 - off.as_nanos() as f64) / per_step;
        let us = |time: Duration| time.as_nanos() as f64 / 1000.0;
        let read = reading.as_nanos() as f64 / events as f64;
        println!(
            "| {name} | {:.2} | {:.2} | {per_step:.1} | {cost:.0} | {read:.0} |",
            us(off),
            us(on)
        );
    }
}
