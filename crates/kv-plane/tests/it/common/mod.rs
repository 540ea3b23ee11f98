//! A small engine that checks every byte it reads, and scenarios for every device.

#![allow(dead_code, reason = "each test binary uses its share")]

pub(crate) mod engine;
pub(crate) mod life;
pub(crate) mod place;
pub(crate) mod random;
pub(crate) mod scenarios;
