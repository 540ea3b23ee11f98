//! Tests of records, handles and memory that is lent, by a worker with one tier.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;
mod lent;
mod records;
