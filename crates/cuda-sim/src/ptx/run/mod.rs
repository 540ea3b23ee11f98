//! Runs a program: every block of a launch, thread by thread between barriers, every access checked.
//!
//! A thread runs until it ends, waits, or has had its turn. What several threads do in between is
//! not ordered, and is held to that: two accesses to one address conflict unless a barrier lies
//! between them, however this interpreter happened to run them.

mod atomic;
mod barrier;
mod block;
mod conflicts;
mod copies;
mod launch;
mod meeting;
mod observation;
mod shared;
mod spaces;
mod thread;
mod warp;

pub(crate) use launch::{Limits, Outcome, run};
pub(crate) use observation::{ObservationKind, Site};

/// First generic address of shared memory. Nothing else has addresses from here on but local memory
/// and a module's variables.
pub(super) const SHARED_WINDOW: u64 = 2 << 60;

/// First generic address of local memory.
pub(super) const LOCAL_WINDOW: u64 = 4 << 60;

/// First address of a module's own variables.
pub(super) const MODULE_WINDOW: u64 = 6 << 60;

/// Threads of a warp.
const WARP: usize = 32;
