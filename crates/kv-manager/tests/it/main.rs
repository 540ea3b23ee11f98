//! The tests of the deciding half: no device, no threads but where a test says so.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod admission;
mod budgets;
mod bytes;
mod common;
mod corners;
mod decode;
mod drafts;
mod events;
mod group_tiers;
mod groups;
mod hazards;
mod host_share;
mod layers;
mod life;
mod loads;
mod model;
mod pace;
mod pins;
mod prelude;
mod records;
mod refusals;
mod reuse;
mod shared;
mod sizes;
mod slots;
mod stats;
mod survivors;
mod tiers;
mod transfer;
mod worth;

// No size that a test passes makes anything allocate without a look.
kv_testkit::allocator!(1 << 30);
