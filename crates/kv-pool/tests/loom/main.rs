//! Every order in which two or three operations can meet on a pool of two or three blocks.
//!
//! Built for the model checker only: `RUSTFLAGS="--cfg loom" cargo test --release -p kv-pool --test loom`.
//! `cargo xtask model` does that. Without `--cfg loom` this program has no tests.
//!
//! `KV_MODEL_DEEP=1` allows more preemptions and larger pools.

#![allow(clippy::unwrap_used, unreachable_pub, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a campaign says what it has seen")]
#![cfg(loom)]

mod broken;
mod explore;
#[path = "../it/common/memory.rs"]
mod memory;
#[path = "../it/common/one.rs"]
mod one;
mod ops;

use explore::{Bound, explore};
use one::OneClaimed;
use ops::Op;

fn deep() -> bool {
    std::env::var_os("KV_MODEL_DEEP").is_some_and(|value| value == "1")
}

/// Every choice of `count` operations, in which order does not matter.
fn choices(count: usize) -> Vec<Vec<Op>> {
    fn extend(chosen: &[Op], from: usize, count: usize, all: &mut Vec<Vec<Op>>) {
        if chosen.len() == count {
            return all.push(chosen.to_vec());
        }
        for (at, &op) in Op::ALL.iter().enumerate().skip(from) {
            extend(&[chosen, &[op]].concat(), at, count, all);
        }
    }
    let mut all = Vec::new();
    extend(&[], 0, count, &mut all);
    all
}

/// Pools as primary and secondary blocks.
const SMALLEST: (u64, u64) = (1, 1);
const SMALL: [(u64, u64); 2] = [(2, 1), (1, 2)];

fn all_of(count: usize, pool: (u64, u64), bound: Bound) {
    let (primary, secondary) = pool;
    let (mut programs, mut orders) = (0, 0);
    for ops in choices(count) {
        orders += explore(&format!("{ops:?} on {primary}+{secondary}"), bound, {
            let ops = ops.clone();
            move || ops::run(&ops, primary, secondary)
        });
        programs += 1;
    }
    println!(
        "{programs} programs of {count} operations on {primary}+{secondary} blocks: \
         {orders} orders, {bound:?}"
    );
}

#[test]
fn every_pair_of_operations() {
    all_of(2, SMALLEST, Bound::Preemptions(if deep() { 5 } else { 3 }));
    for pool in SMALL {
        all_of(2, pool, Bound::Preemptions(if deep() { 4 } else { 2 }));
    }
}

#[test]
fn every_triple_of_operations() {
    all_of(3, SMALLEST, Bound::Preemptions(if deep() { 2 } else { 1 }));
    if deep() {
        SMALL.iter().for_each(|&pool| all_of(3, pool, Bound::Preemptions(2)));
    }
}

/// A clock that lives as long as its pool.
#[derive(Debug)]
#[expect(dead_code, reason = "only how long it lives is asked")]
struct Probe(std::sync::Arc<()>);

impl kv_pool::clock::Clock for Probe {
    fn now(&self) -> std::time::Duration {
        std::time::Duration::ZERO
    }
}

#[test]
fn a_pool_ends_with_the_last_of_its_handles_and_pins() {
    let orders =
        explore("handles and pins", Bound::Preemptions(if deep() { 5 } else { 3 }), || {
            let alive = std::sync::Arc::new(());
            let config = kv_pool::PoolConfig::primary_only(2);
            let builder = kv_pool::BlockPool::builder(&config).clock(Probe(alive.clone()));
            let pool = builder.build().unwrap();
            assert!(pool.claim_one().unwrap().cache_one(ops::name(1), kv_pool::Naming::default()));
            let pin = ops::find(&pool, 1).unwrap();
            let (again, another) = (pin.clone(), pool.clone());
            let claimed = pool.claim_one().unwrap();
            let threads = [
                loom::thread::spawn(move || drop((pin, another))),
                loom::thread::spawn(move || drop((claimed, again))),
            ];
            drop(pool);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(std::sync::Arc::strong_count(&alive), 1, "the pool is there still");
        });
    println!("{orders} orders of the end of a pool");
}
