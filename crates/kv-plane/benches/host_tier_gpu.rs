//! When the host tier of a cache can be used that is pinned in the background, and what steps notice of it.
//!
//! `cargo bench -p kv-plane --bench host_tier_gpu`, on a machine with a GPU. The tier has `KV_HOST_GIB` GiB (4 by
//! default), in blocks of 2 MiB. Times count from the call that builds the cache: until it returns, until a
//! first step has run on the device, until the first host blocks are usable, until the first blocks that were
//! evicted are in host memory, and until all of it is usable. Each step evicts 8 blocks. In the end the oldest
//! that are left in host memory come back, and their bytes are looked at. The first row is apart: a
//! virtual machine may get its memory by the first access. With `--sim` it runs on the simulated device,
//! where times mean nothing.

#![allow(clippy::print_stdout, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]

mod common;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use common::{BLOCK_TOKENS, Rig, chain, quantile};
use kv_plane::{GroupId, HostPinning, KvCache, KvCacheOptions, Request, Sequence};
use kv_pool::{BlockHash, Tier};

/// Blocks of each request.
const BLOCKS: u64 = 8;
/// Requests whose blocks fit on the device.
const RESIDENT: u32 = 16;

fn main() -> ExitCode {
    common::run(|rig| {
        let gib = std::env::var("KV_HOST_GIB").ok().map_or(4, |gib| gib.parse().unwrap());
        let bytes: u64 = rig.either(gib << 30, 16 << 20);
        println!(
            "\n| {} MiB of host memory | returned, ms | first step | first host blocks | first offload | all | closed in | steps meanwhile | a step, us (p50 / p99 / worst) | the same afterwards |",
            bytes >> 20
        );
        println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
        let small = HostPinning { slab_bytes_max: 128 << 20, ..HostPinning::BACKGROUND };
        for (name, pinning) in [
            ("slabs of 512 MiB, for the first time", HostPinning::BACKGROUND),
            ("slabs of 512 MiB", HostPinning::BACKGROUND),
            ("slabs of 512 MiB", HostPinning::BACKGROUND),
            ("slabs of 512 MiB", HostPinning::BACKGROUND),
            ("slabs of 128 MiB", small),
        ] {
            measure(rig, name, bytes, pinning);
        }
    })
}

fn measure(rig: &Rig, name: &str, bytes: u64, pinning: HostPinning) {
    let shape = common::shape(rig.either(32, 1), 2048);
    let host_blocks = bytes / shape.block_bytes();
    let device_blocks = RESIDENT * BLOCKS as u32 + 1;
    let options =
        KvCacheOptions { pinning, ..common::options(shape, device_blocks, host_blocks as u32) };
    let begun = Instant::now();
    let mut cache = rig.cache(options);
    let returned = begun.elapsed();
    let mut numbers = 1..;
    let mut serve_next = |cache: &mut KvCache| serve(cache, numbers.next().unwrap());
    serve_next(&mut cache);
    cache.drain().unwrap();
    let first_step = begun.elapsed();
    let (mut first_blocks, mut first_offload, mut meanwhile) = (None, None, Vec::new());
    let [first_offload, all] = loop {
        meanwhile.push(serve_next(&mut cache));
        if cache.stats().host_blocks > 0 {
            first_blocks.get_or_insert(begun.elapsed());
        }
        if first_offload.is_none() && cache.manager().stats().offloaded_blocks > 0 {
            cache.drain().unwrap();
            first_offload = Some(begun.elapsed());
        }
        if cache.stats().host_blocks >= host_blocks
            && let Some(first_offload) = first_offload
        {
            break [first_offload, begun.elapsed()];
        }
    };
    let afterwards = (0..256).map(|_| serve_next(&mut cache)).collect();
    check(&mut cache);
    let closing = Instant::now();
    cache.close().unwrap();
    let closed = ms(closing.elapsed());
    let count = meanwhile.len();
    let [meanwhile, afterwards] = [meanwhile, afterwards].map(|mut times: Vec<f64>| {
        let [p50, p99, worst] = [0.5, 0.99, 1.0].map(|share| quantile(&mut times, share));
        format!("{p50:.0} / {p99:.0} / {worst:.0}")
    });
    let [returned, first_step, first_blocks, first_offload, all] =
        [returned, first_step, first_blocks.unwrap(), first_offload, all].map(ms);
    println!(
        "| {name} | {returned:.1} | {first_step:.1} | {first_blocks:.1} | {first_offload:.1} | {all:.0} | {closed:.0} | {count} | {meanwhile} | {afterwards} |"
    );
}

/// The byte that fills the blocks of a request.
fn byte_of(number: u32) -> u8 {
    (number % 251) as u8
}

/// A step of a request of new content, which the device writes: its microseconds, with the wait for the device.
fn serve(cache: &mut KvCache, number: u32) -> f64 {
    let begun = Instant::now();
    let tokens = BLOCKS * u64::from(BLOCK_TOKENS);
    let request = Request::named(tokens + 1, chain(number, BLOCKS));
    let sequence = common::compute(cache, request, |cache, sequence| {
        let compute = cache.parts()[0].compute();
        let fill = |block| compute.fill(block, byte_of(number)).unwrap();
        common::blocks(cache, sequence).into_iter().for_each(fill);
    });
    let spent = begun.elapsed();
    drop(sequence);
    spent.as_secs_f64() * 1e6
}

/// Brings the oldest content that is in host memory back, and looks at its bytes.
fn check(cache: &mut KvCache) {
    let is_in_host = |names: &[BlockHash]| {
        let found = cache.manager().pool(GroupId(0)).unwrap().match_prefix(names);
        found.len() == names.len() && found.locations().all(|at| at.tier == Tier::Secondary)
    };
    let mut all = (1..).map(|number| (number, chain(number, BLOCKS)));
    let (number, names) = all.find(|(_, names)| is_in_host(names)).unwrap();
    let before = cache.manager().stats().onboarded_blocks;
    let tokens = BLOCKS * u64::from(BLOCK_TOKENS);
    let look = |cache: &KvCache, sequence: &Sequence| {
        let mut bytes = vec![0; cache.options().groups[0].shape.block_bytes() as usize];
        for &block in &common::blocks(cache, sequence)[..BLOCKS as usize] {
            cache.parts()[0].compute().download(&mut bytes, block).unwrap();
            assert!(bytes.iter().all(|&byte| byte == byte_of(number)), "wrong bytes of {number}");
        }
    };
    drop(common::compute(cache, Request::named(tokens + 1, names), look));
    assert_eq!(cache.manager().stats().onboarded_blocks - before, BLOCKS);
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
