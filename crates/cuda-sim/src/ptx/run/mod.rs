//! Runs a program: every block of a launch, thread by thread between barriers, every access checked.
//!
//! A thread runs until it ends, waits, or has used up its turn. Between barriers the accesses of
//! several threads are unordered, and are checked as such: two accesses to one address conflict
//! unless a barrier separates them, whatever order this interpreter ran them in.

mod atomic;
mod barrier;
mod block;
mod conflicts;
mod launch;
mod meeting;
mod non_coherent;
mod observation;
mod shared;
mod spaces;
mod thread;
mod warp;

pub(crate) use launch::{Limits, Outcome, run};
pub(crate) use observation::{Trouble, code_of};

/// First generic address of shared memory. Above it lie only local memory and a module's variables.
pub(super) const SHARED_WINDOW: u64 = 2 << 60;

/// First generic address of local memory.
pub(super) const LOCAL_WINDOW: u64 = 4 << 60;

/// First address of a module's own variables.
pub(super) const MODULE_WINDOW: u64 = 6 << 60;

const WARP: usize = 32;
