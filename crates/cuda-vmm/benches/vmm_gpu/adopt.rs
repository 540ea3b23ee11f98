//! Cost of a finished sequence's memory for the next one: adopted as a whole, or unmapped and
//! mapped again.

use std::time::{Duration, Instant};

use cuda_driver::{Device, Fence, Stream};
use cuda_vmm::Worker;
use cuda_vmm::pages::{PagePool, PagePoolOptions};
use cuda_vmm::sequences::{Layout, SequenceSpace, SpaceOptions};

use crate::raw::Raw;
use crate::{TOKEN_BYTES, micros, percentile};

const PAGES: u64 = 64;
const ROUNDS: usize = 200;

pub(crate) fn measure(device: &Device) {
    let worker = Worker::manual();
    let options = PagePoolOptions { page_bytes: None, capacity_pages: PAGES };
    let pages = PagePool::new(device, options).unwrap();
    let tokens = PAGES * pages.page_bytes() / TOKEN_BYTES;
    let options = SpaceOptions {
        sequences: 2,
        planes: 1,
        token_bytes: TOKEN_BYTES,
        tokens_max: tokens,
        layout: Layout::TokenMajor,
        ..SpaceOptions::default()
    };
    let space = SequenceSpace::new(&pages, &worker, options).unwrap();
    let mut raw = Raw::reserve(device, PAGES, pages.page_bytes());
    raw.create_to(PAGES);
    raw.map(0..PAGES);
    let stream = Stream::new(device).unwrap();
    let mut sequence = space.admit(0).unwrap();
    sequence.extend_blocking(tokens).unwrap();
    let (mut adopted, mut remapped): (Vec<Duration>, Vec<Duration>) = Default::default();
    for _ in 0..ROUNDS {
        let fence = Fence::record(&stream).unwrap();
        fence.wait().unwrap();
        let begin = Instant::now();
        sequence.finish(&[fence]);
        sequence = space.admit(tokens).unwrap();
        sequence.extend_to(tokens).unwrap();
        adopted.push(begin.elapsed());
        let begin = Instant::now();
        raw.unmap(0..PAGES);
        raw.map(0..PAGES);
        remapped.push(begin.elapsed());
    }
    assert_eq!(space.stats().adopted, ROUNDS as u64);
    sequence.finish(&[]);
    assert!(space.close(&[]).unwrap().wait().unwrap().is_clean());
    let [adopted, remapped] = [adopted, remapped].map(|mut times| percentile(&mut times, 50));
    println!(
        "The memory of a finished sequence, {PAGES} pages, for the next: median of {ROUNDS}\n"
    );
    println!("| how | us | of adopting |\n| --- | ---: | ---: |");
    println!("| parked and adopted | {:.2} | 1 |", micros(adopted));
    let ratio = remapped.as_secs_f64() / adopted.as_secs_f64();
    println!("| unmapped and mapped | {:.2} | {ratio:.0} |\n", micros(remapped));
}
