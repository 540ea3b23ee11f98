//! What a cached prompt costs the scheduler: its admission and its release, on the simulated device, beside the
//! pool's own list call. No driver call is in what is timed.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program that prints its result")]

mod common;

use std::collections::VecDeque;
use std::hint::black_box;
use std::time::Instant;

use common::{BLOCK_TOKENS, Rig, admit_queued, allocations, chain};
use kv_plane::{GroupId, Request};

const ROUNDS: usize = 400;

/// The least and the median of the microseconds of `work`, and the allocations of the last one.
fn measure(mut work: impl FnMut()) -> (f64, f64, u64) {
    let mut before = allocations();
    let mut samples: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            before = allocations();
            let start = Instant::now();
            work();
            start.elapsed().as_nanos() as f64 / 1e3
        })
        .collect();
    let allocated = allocations() - before;
    samples.sort_by(f64::total_cmp);
    (samples[0], samples[ROUNDS / 2], allocated)
}

kv_testkit::allocator!(i64::MAX);

fn main() {
    let rig = Rig::open(true).unwrap();
    println!(
        "| cached blocks | admit and drop, us (least, median) | allocations | list call of the pool | ratio |"
    );
    println!("| ---: | ---: | ---: | ---: | ---: |");
    for blocks in [16, 256, 1024, 8192_u32] {
        let mut options = common::options(common::shape(1, 64), 2 * blocks + 2, 0);
        options.groups[0].blocks_per_sequence_max = blocks + 1;
        let mut cache = rig.cache(options);
        let hashes = chain(0, blocks.into());
        // One token more, which is left to be computed.
        let tokens = u64::from(blocks * BLOCK_TOKENS) + 1;
        drop(common::compute(&mut cache, Request::named(tokens, hashes.clone()), |_, _| ()));
        cache.drain().unwrap();
        // An engine makes a request once, when it arrives.
        let request = Request::named(tokens, hashes.clone());
        let mut requests = vec![VecDeque::from([request]); ROUNDS];
        let (least, median, allocated) = measure(|| {
            let sequence = admit_queued(&mut cache, &mut requests.pop().unwrap());
            assert_eq!(sequence.cached_tokens(), tokens - 1);
            drop(black_box(sequence));
        });
        let pool = cache.manager().pool(GroupId(0)).unwrap();
        let (own, own_median, _) = measure(|| drop(black_box(pool.match_prefix(&hashes))));
        println!(
            "| {blocks} | {least:.1}, {median:.1} | {allocated} | {own:.1}, {own_median:.1} | {:.2} |",
            least / own
        );
        cache.close().unwrap();
    }
}
