//! The cache on the simulated device: contents, order, errors and clean-up.

mod adopted;
mod again;
mod ahead;
mod budgets;
mod contents;
mod distrust;
mod faults;
mod granules;
mod growth;
mod handles;
mod late;
mod layers;
mod lent_host;
mod order;
mod overlap;
mod pinned;
mod placement;
mod policies;
mod ptx;
mod refusals;
#[cfg(feature = "processes")]
mod schedules;
mod sites;
mod tenants;
mod tiers;
mod transports;
mod unchanged;
mod unequal;
mod unrecorded;
