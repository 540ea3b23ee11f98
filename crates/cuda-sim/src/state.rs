//! The whole state of the simulated machine, behind one lock.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::thread::ThreadId;

use cuda_driver::ErrorCode;
use cuda_driver::reference::KernelReference;

use crate::contexts::SimDevice;
use crate::explore::Choices;
use crate::faults::Faults;
use crate::findings::{Finding, FindingKind, Findings};
use crate::graphs::Graph;
use crate::kernels::{Function, Module};
use crate::memory::{Memory, Viewer, describe};
use crate::ptx::Limits;
use crate::races::Races;
use crate::random::Random;
use crate::scheduler::Pace;
use crate::streams::{Event, Stream};
use crate::time::Clock;
use crate::{LeakReport, SimConfig};

/// The result of a call inside the simulated driver.
pub(crate) type Answer<T> = Result<T, ErrorCode>;

/// The machine. It works on one call at a time.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) config: SimConfig,
    pub(crate) random: Random,
    pub(crate) faults: Faults,
    pub(crate) findings: Findings,
    pub(crate) races: Races,
    pub(crate) memory: Memory,
    pub(crate) devices: Vec<SimDevice>,
    /// Live context handles, and their devices.
    pub(crate) contexts: HashMap<u64, u32>,
    /// Current context of each thread. A thread without a current context has no entry.
    pub(crate) current: HashMap<ThreadId, u64>,
    /// Streams, by handle. A destroyed stream stays until its work has run.
    pub(crate) streams: BTreeMap<u64, Stream>,
    /// Streams that may be captured, so that a call need not look at all streams.
    pub(crate) captured: BTreeSet<u64>,
    pub(crate) events: BTreeMap<u64, Event>,
    pub(crate) modules: BTreeMap<u64, Module>,
    pub(crate) functions: BTreeMap<u64, Function>,
    pub(crate) graphs: BTreeMap<u64, Graph>,
    pub(crate) graph_execs: BTreeMap<u64, Graph>,
    pub(crate) references: BTreeMap<&'static str, KernelReference>,
    /// Whether kernels run from their PTX even where a reference is registered.
    pub(crate) prefer_ptx: bool,
    pub(crate) limits: Limits,
    /// Instructions that kernels have run from their PTX, of all threads.
    pub(crate) instructions: u64,
    /// Bytes that the last copy to pageable memory fetched.
    pub(crate) fetched: Option<Box<[u8]>>,
    /// How far the devices advance on their own.
    pub(crate) pace: Pace,
    /// At the slow paces: `ticks` at the last query, and the number of queries in a row that found
    /// the same value.
    pub(crate) polled: (u64, u64),
    /// In an exploration, makes the decisions in place of `random`.
    pub(crate) choices: Option<Box<Choices>>,
    /// `enqueued` and `ticks` at the last point where the device could advance.
    pub(crate) interleaved_at: (u64, u64),
    pub(crate) enqueued: u64,
    /// Number of the last numbered call. Calls that enqueue are numbered, and calls in which the
    /// host accesses memory.
    sequences: u64,
    /// Operations run so far.
    pub(crate) ticks: u64,
    /// The virtual time of the host and of each device.
    pub(crate) clock: Clock,
    handles: u64,
}

impl Machine {
    pub(crate) fn new(config: SimConfig) -> Self {
        Self {
            random: Random::new(config.seed),
            faults: Faults::default(),
            findings: Findings::default(),
            races: Races::new(config.races, config.granularity),
            memory: Memory::new(&config),
            devices: (0..config.devices).map(|_| SimDevice::default()).collect(),
            contexts: HashMap::new(),
            current: HashMap::new(),
            streams: BTreeMap::new(),
            captured: BTreeSet::new(),
            events: BTreeMap::new(),
            modules: BTreeMap::new(),
            functions: BTreeMap::new(),
            graphs: BTreeMap::new(),
            graph_execs: BTreeMap::new(),
            references: BTreeMap::new(),
            prefer_ptx: false,
            limits: Limits::default(),
            instructions: 0,
            fetched: None,
            pace: config.pace,
            polled: (0, 0),
            choices: None,
            interleaved_at: (0, 0),
            enqueued: 0,
            sequences: 0,
            ticks: 0,
            clock: Clock::new(config.profile.clone(), config.devices),
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
        Viewer::device(device, self.devices[device as usize].peers)
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
            streams: self.streams.values().filter(|stream| stream.is_users()).count(),
            events: self.events.len(),
            modules: self.modules.len(),
            graphs: self.graphs.len() + self.graph_execs.len(),
        }
    }
}
