//! Speed of growth without other work, compared with a bare loop of create, map and set access.

use std::time::{Duration, Instant};

use cuda_driver::Device;
use cuda_vmm::pages::{PagePool, PagePoolOptions};
use cuda_vmm::sequences::{Layout, SequenceSpace, SpaceOptions};
use cuda_vmm::worker::Health;
use cuda_vmm::{ElasticPool, ElasticPoolOptions, Worker, WorkerOptions};

use crate::raw::Raw;
use crate::{TOKEN_BYTES, percentile};

const BYTES: u64 = 4 << 30;
const ROUNDS: usize = 5;

pub(crate) fn measure(device: &Device) {
    let page_sizes = [2 << 20, 16 << 20, 64 << 20];
    println!("Growth by 4 GiB, created and mapped, median of {ROUNDS} interleaved rounds\n");
    println!("| page | how | GiB/s | of the bare loop |");
    println!("| ---: | --- | ---: | ---: |");
    for page_bytes in page_sizes {
        let mut times: [Vec<Duration>; 4] = Default::default();
        for _ in 0..ROUNDS {
            times[0].push(bare(device, page_bytes));
            times[1].push(on_this_thread(device, page_bytes));
            times[2].push(by_the_worker(device, page_bytes));
            times[3].push(elastic(device, page_bytes));
        }
        let rates = times.map(|mut times| 4.0 / percentile(&mut times, 50).as_secs_f64());
        let hows = ["bare loop", "sequence, this thread", "sequence, worker", "elastic pool"];
        for (how, rate) in hows.iter().zip(rates) {
            let of = rate / rates[0];
            println!("| {} MiB | {how} | {rate:.1} | {of:.2} |", page_bytes >> 20);
        }
    }
    println!();
}

fn bare(device: &Device, page_bytes: u64) -> Duration {
    let pages = BYTES / page_bytes;
    let mut raw = Raw::reserve(device, pages, page_bytes);
    let begin = Instant::now();
    for page in 0..pages {
        raw.create_to(page + 1);
        raw.map(page..page + 1);
    }
    begin.elapsed()
}

fn space(device: &Device, page_bytes: u64, worker: &Worker) -> SequenceSpace {
    let options =
        PagePoolOptions { page_bytes: Some(page_bytes), capacity_pages: BYTES / page_bytes };
    let pages = PagePool::new(device, options).unwrap();
    let options = SpaceOptions {
        sequences: 1,
        planes: 1,
        token_bytes: TOKEN_BYTES,
        tokens_max: BYTES / TOKEN_BYTES,
        layout: Layout::TokenMajor,
        ..SpaceOptions::default()
    };
    SequenceSpace::new(&pages, worker, options).unwrap()
}

fn on_this_thread(device: &Device, page_bytes: u64) -> Duration {
    let worker = Worker::manual();
    let space = space(device, page_bytes, &worker);
    let mut sequence = space.admit(0).unwrap();
    let begin = Instant::now();
    sequence.extend_blocking(BYTES / TOKEN_BYTES).unwrap();
    let time = begin.elapsed();
    sequence.finish(&[]);
    assert!(space.close(&[]).unwrap().wait().unwrap().is_clean());
    time
}

fn by_the_worker(device: &Device, page_bytes: u64) -> Duration {
    let worker = Worker::spawn(WorkerOptions::default()).unwrap();
    let space = space(device, page_bytes, &worker);
    let begin = Instant::now();
    let sequence = space.admit(BYTES / TOKEN_BYTES).unwrap();
    // Waits in naps, because a spinning core slows its sibling, on which the worker may run.
    let patience = Duration::from_secs(20);
    while sequence.ready_tokens() < BYTES / TOKEN_BYTES && begin.elapsed() < patience {
        std::thread::sleep(Duration::from_micros(20));
    }
    let time = begin.elapsed();
    assert!(space.health() == Health::Healthy && time < patience, "{:?}", space.health());
    sequence.finish(&[]);
    assert!(space.close(&[]).unwrap().wait().unwrap().is_clean());
    worker.close();
    time
}

fn elastic(device: &Device, page_bytes: u64) -> Duration {
    let options = ElasticPoolOptions {
        block_bytes: 16 * TOKEN_BYTES,
        capacity_blocks: BYTES / (16 * TOKEN_BYTES),
        page_bytes: Some(page_bytes),
        initial_blocks: 0,
    };
    let pool = ElasticPool::new(device, options).unwrap();
    let begin = Instant::now();
    pool.grow_to(pool.capacity_blocks()).unwrap();
    let time = begin.elapsed();
    assert!(pool.close(&[]).wait().unwrap().is_clean());
    time
}
