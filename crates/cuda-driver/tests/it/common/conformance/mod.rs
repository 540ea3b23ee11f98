//! The conformance suite: the answers of every call of a driver, with one small named case for
//! each.
//!
//! Cases call the [`Driver`] trait itself. Each case releases the objects that it makes, so that
//! none is left for the next case, and [`Bound`] checks at its end that the context is still sound.

#![deny(dead_code)] // A case that no table names.

pub(crate) mod atomics;
pub(crate) mod batches;
pub(crate) mod bound;
pub(crate) mod captures;
pub(crate) mod contexts;
pub(crate) mod copies;
pub(crate) mod devices;
pub(crate) mod events;
pub(crate) mod faults;
pub(crate) mod graphs;
pub(crate) mod instructions;
pub(crate) mod launches;
pub(crate) mod memory;
pub(crate) mod modules;
pub(crate) mod peers;
pub(crate) mod pinned;
pub(crate) mod registered;
pub(crate) mod streams;
pub(crate) mod virtual_memory;

use std::sync::Arc;

use cuda_driver::{Driver, DriverResult, ErrorCode};
use cuda_sim::SimDriver;

/// The driver under test.
pub(crate) struct Subject {
    pub(crate) driver: Arc<dyn Driver>,
    /// The same, where it is the simulated one.
    pub(crate) sim: Option<SimDriver>,
}

/// What a case needs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Needs {
    /// One device.
    Device,
    /// One device, and a process of its own: it loses the device, or passes what a driver might
    /// follow.
    Process,
    /// Two devices that can access each other's memory.
    Pair,
    /// Likewise, and a process of its own.
    PairProcess,
    /// The simulated device, for this reason.
    Simulation(&'static str),
}

/// One thing that must hold of a driver.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) needs: Needs,
    pub(crate) run: fn(&Subject),
}

/// A table of cases with one need, each named like its function.
macro_rules! cases {
    ($needs:expr; $($case:ident),* $(,)?) => {
        &[$($crate::common::conformance::Case {
            name: stringify!($case),
            needs: $needs,
            run: $case,
        }),*]
    };
}
pub(crate) use cases;

/// Every case.
pub(crate) fn all() -> impl Iterator<Item = &'static Case> {
    let tables = [
        devices::CASES,
        contexts::CASES,
        contexts::UNBOUND,
        contexts::PROCESS,
        contexts::SIMULATED,
        streams::CASES,
        streams::PROCESS,
        streams::SIMULATED,
        events::CASES,
        events::PROCESS,
        events::SIMULATED,
        memory::CASES,
        memory::PROCESS,
        pinned::CASES,
        pinned::PROCESS,
        pinned::SIMULATED,
        registered::CASES,
        registered::PROCESS,
        registered::PAIRS,
        registered::PAIR_PROCESS,
        registered::SIMULATED,
        copies::CASES,
        copies::PROCESS,
        copies::SIMULATED,
        batches::CASES,
        batches::SIMULATED,
        virtual_memory::RESERVATIONS,
        virtual_memory::HANDLES,
        virtual_memory::MAPPINGS,
        virtual_memory::PROCESS,
        virtual_memory::SIMULATED,
        modules::CASES,
        modules::PROCESS,
        modules::SIMULATED,
        instructions::CASES,
        launches::CASES,
        launches::PROCESS,
        launches::SIMULATED,
        graphs::CASES,
        graphs::SIMULATED,
        captures::CASES,
        atomics::CASES,
        atomics::PAIRS,
        faults::PROCESS,
        peers::CASES,
        peers::PROCESS,
        peers::SIMULATED,
    ];
    tables.into_iter().flatten()
}

/// Holds a call to the code that it must be refused with.
#[track_caller]
pub(crate) fn refused<T: std::fmt::Debug>(answer: DriverResult<T>, code: ErrorCode) {
    match answer {
        Ok(value) => panic!("{value:?}, where {code:?} was expected"),
        Err(error) => assert_eq!(error.code, code, "{error}, where {code:?} was expected"),
    }
}
