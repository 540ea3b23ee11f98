//! The operations beside transfers: the committed PTX, run thread by thread on the simulated device,
//! gives the bytes that the CPU references give, and these are what oracles that know nothing of
//! either foretell. `tests/gpu.rs` runs the same lists on a card.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod ops;
