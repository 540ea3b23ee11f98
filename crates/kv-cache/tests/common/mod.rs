//! An engine in small, which checks every byte that it reads, and what any device must do with it.

#![allow(dead_code, reason = "each test binary uses its share")]

pub(crate) mod engine;
pub(crate) mod place;
pub(crate) mod scenarios;
