//! The cache on the simulated device: contents, order, errors and clean-up.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[path = "../common/mod.rs"]
mod common;

mod adopted;
mod ahead;
mod budgets;
mod contents;
mod distrust;
#[path = "../../../kv-manager/tests/it/common/ends.rs"]
mod ends;
mod events;
mod faults;
mod granules;
mod growth;
mod handles;
mod late;
mod layers;
mod lent_host;
mod machine;
mod order;
mod overlap;
mod pinned;
mod placement;
mod policies;
mod ptx;
mod refusals;
mod schedules;
mod sites;
mod tenants;
mod tiers;
mod transports;
mod unchanged;
mod unequal;
mod unrecorded;
#[path = "../../../cuda-driver/tests/common/watch.rs"]
mod watch;
