//! The tests of the pool. Those of a model checker's build are programs of their own.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]
#![allow(unreachable_pub, reason = "a test program has no users")]

mod allocations;
mod behaviour;
mod budgets;
mod chains;
mod common;
mod corners;
mod foreign;
mod granules;
mod hints;
mod kinds;
mod model;
mod owners;
mod panics;
mod policies;
mod pool_policies;
mod quotas;
mod release_order;
mod retention;
#[cfg(all(feature = "sabotage", debug_assertions))]
mod sabotage;
mod sizes;
mod stores;
mod threads;
mod tiers;
mod transit;
mod wrong_policies;

kv_testkit::allocator!(1 << 30);
