//! The whole state of the simulated machine, behind one lock.

use cuda_driver::ErrorCode;

use crate::contexts::Contexts;
use crate::events::Events;
use crate::faults::Faults;
use crate::findings::{Finding, FindingKind, Findings};
use crate::graphs::Graphs;
use crate::kernels::Kernels;
use crate::memory::{Memory, Viewer, describe};
use crate::races::Races;
use crate::scheduler::Scheduler;
use crate::streams::Streams;
use crate::time::Clock;
use crate::{LeakReport, SimConfig};

/// The result of a call inside the simulated driver.
pub(crate) type Answer<T> = Result<T, ErrorCode>;

/// The machine. It works on one call at a time. Each part keeps its own state; a call of the driver goes through the
/// parts that it concerns.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) config: SimConfig,
    pub(crate) faults: Faults,
    pub(crate) findings: Findings,
    pub(crate) races: Races,
    pub(crate) memory: Memory,
    pub(crate) contexts: Contexts,
    pub(crate) streams: Streams,
    pub(crate) events: Events,
    pub(crate) kernels: Kernels,
    pub(crate) graphs: Graphs,
    pub(crate) scheduler: Scheduler,
    /// The virtual time of the host and of each device.
    pub(crate) clock: Clock,
    /// Number of the last numbered call. Calls that enqueue are numbered, and calls in which the
    /// host accesses memory.
    sequences: u64,
    handles: u64,
}

impl Machine {
    pub(crate) fn new(config: SimConfig) -> Self {
        Self {
            faults: Faults::default(),
            findings: Findings::default(),
            races: Races::new(config.races, config.granularity),
            memory: Memory::new(&config),
            contexts: Contexts::new(config.devices),
            streams: Streams::new(config.devices),
            events: Events::default(),
            kernels: Kernels::default(),
            graphs: Graphs::default(),
            scheduler: Scheduler::new(&config),
            clock: Clock::new(config.profile.clone(), config.devices),
            sequences: 0,
            handles: 0x1000,
            config,
        }
    }

    /// A new handle. Handles are never reused.
    pub(crate) fn new_handle(&mut self) -> u64 {
        self.handles += 0x10;
        self.handles
    }

    /// The number of the next call, in the order of calls.
    pub(crate) fn next_sequence(&mut self) -> u64 {
        self.sequences += 1;
        self.sequences
    }

    /// Counts a call and applies an ordered failure. A sticky code loses the current device.
    pub(crate) fn enter(&mut self, call: &'static str) -> Answer<()> {
        self.clock.call(call);
        self.before_call(call);
        self.faults.count(call).inspect_err(|&code| {
            if code.is_sticky()
                && let Ok(device) = self.current_device()
            {
                self.poison(device, code);
            }
        })
    }

    pub(crate) fn device(&self, ordinal: i32) -> Answer<u32> {
        u32::try_from(ordinal)
            .ok()
            .filter(|&device| device < self.config.devices)
            .ok_or(ErrorCode::INVALID_DEVICE)
    }

    /// Reports a range that an operation may not use, with the range that it probably meant.
    pub(crate) fn note_range(
        &mut self,
        kind: FindingKind,
        operation: &str,
        at: (u32, u64),
        (address, bytes): (u64, u64),
        reason: &str,
    ) {
        let nearest = self.memory.nearest(address, bytes);
        self.findings.add(Finding {
            device: Some(at.0),
            stream: Some(at.1),
            address: Some(address),
            bytes,
            nearest,
            ..Finding::new(kind, operation, describe(reason, nearest))
        });
    }

    /// What `device` may access.
    pub(crate) fn viewer(&self, device: u32) -> Viewer {
        Viewer::device(device, self.contexts.peers(device))
    }

    pub(crate) fn leaks(&self) -> LeakReport {
        LeakReport {
            allocations: self.memory.allocations.live().len(),
            allocated_bytes: self.memory.allocations.live().iter().map(|a| a.bytes()).sum(),
            pinned_regions: self.memory.host.live().len(),
            pinned_bytes: self.memory.host.live_bytes(),
            reservations: self.memory.virtual_memory.reservations().len(),
            mappings: self.memory.virtual_memory.mapping_count(),
            physical_handles: self.memory.virtual_memory.handle_count(),
            physical_bytes: self.memory.virtual_memory.physical_bytes(),
            streams: self.streams.all().filter(|(_, stream)| stream.is_users()).count(),
            events: self.events.count(),
            modules: self.kernels.modules(),
            graphs: self.graphs.count(),
        }
    }
}
