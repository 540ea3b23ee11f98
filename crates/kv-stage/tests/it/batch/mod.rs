//! Batches at addresses that stay.

mod graphs;
mod limits;
mod model;
mod paths;
#[cfg(all(feature = "sabotage", debug_assertions))]
mod ptx;
mod refusals;
mod replay;
mod steps;
