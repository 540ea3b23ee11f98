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
#[path = "../common/memory.rs"]
mod memory;
mod ops;

use explore::{Bound, explore};
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

fn all_of(count: usize, pools: &[(u64, u64)], bound: Bound) {
    let mut orders = 0;
    let mut programs = 0;
    for &(primary, secondary) in pools {
        for ops in choices(count) {
            orders += explore(&format!("{ops:?} on {primary}+{secondary}"), bound, {
                let ops = ops.clone();
                move || ops::run(&ops, primary, secondary)
            });
            programs += 1;
        }
    }
    println!("{programs} programs of {count} operations, {orders} orders, {bound:?}");
}

#[test]
fn every_pair_of_operations() {
    let pools: &[_] = if deep() { &[(1, 1), (2, 1), (1, 2)] } else { &[(1, 1), (2, 1)] };
    all_of(2, pools, if deep() { Bound::Preemptions(5) } else { Bound::Preemptions(3) });
}

#[test]
fn every_triple_of_operations() {
    let pools: &[_] = if deep() { &[(1, 1), (2, 1), (1, 2)] } else { &[(1, 1)] };
    all_of(3, pools, if deep() { Bound::Preemptions(3) } else { Bound::Preemptions(2) });
}
