//! Runs a program on a simulated machine.

use cuda_driver::reference::{KernelReference, ReferenceError};
use cuda_driver::site::{self, Entered, Site, enter};
use cuda_driver::{
    AccessDesc, AllocationProp, BatchCopy, Driver, DriverResult, HostAccess, HostAllocFlags,
    KernelArgs, LaunchConfig, PeerCopy,
};
use cuda_sim::{FindingKind, Pace, Race, RaceCheck, SimConfig, SimDriver};

use super::program::{Kind, PAGE_BYTES, Place, Program, Span, Step, UNITS, What, Work};

/// Number of queries of a poll before the host waits instead.
const POLLS: u32 = 4;

const PTX: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry copy_bytes(.param .u64 a, .param .u64 b, .param .u64 n) { ret; }
.visible .entry count(.param .u64 at)
{
.reg .b64 %a;
.reg .b32 %r;
ld.param.u64 %a, [at];
atom.global.add.u32 %r, [%a], 1;
ret;
}
";

/// `copy_bytes(to, from, n)`.
const REFERENCES: &[KernelReference] = &[KernelReference {
    name: "copy_bytes",
    run: |memory, _, args| {
        let word = |index| args.get::<u64>(index).ok_or(ReferenceError::Argument { index });
        let data = memory.load(word(1)?, word(2)?)?.into_owned();
        Ok(memory.store(word(0)?, &data)?)
    },
}];

/// Call sites, all different: a race is reported once for each pair of sites.
#[rustfmt::skip]
#[allow(clippy::redundant_closure, reason = "a function would be called from one place")]
const PLACES: [fn() -> Entered; 128] = [
    || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(),
    || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(),
    || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(),
    || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(),
    || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(),
    || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(),
    || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(),
    || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(),
    || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(),
    || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(),
    || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(),
    || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(),
    || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(),
    || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(),
    || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(),
    || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(), || enter(),
];

/// Maximum number of lines of a program.
pub const LINES_MAX: usize = PLACES.len();

/// The site from which the line of this number makes its calls.
pub fn place_of(line: usize) -> Option<Site> {
    let _place = PLACES[line]();
    site::current()
}

/// The result of a run.
#[derive(Debug)]
pub struct Run {
    pub races: Vec<Race>,
    /// The answers of queries, in order.
    pub answers: Vec<bool>,
    /// Number of lines that were run. The last line is missing if the machine was lost there.
    pub lines: usize,
    /// Whether the machine was lost by an operation that met no memory.
    pub is_lost: bool,
    /// Other findings.
    pub others: Vec<String>,
}

/// A program and its objects.
struct Machine<'p> {
    program: &'p Program,
    sim: SimDriver,
    contexts: Vec<u64>,
    current: usize,
    ended: Vec<bool>,
    streams: Vec<u64>,
    events: Vec<u64>,
    /// The page edges around which the units lie.
    allocs: Vec<(u64, u64)>,
    pinned: Vec<(u64, u64)>,
    reservation: u64,
    handles: Vec<u64>,
    /// Each device's module and its kernels.
    modules: Vec<Option<(u64, u64, u64)>>,
    graphs: Vec<u64>,
    answers: Vec<bool>,
}

/// Runs a program on a machine with this seed and pace. Fails if a call was refused although the
/// machine was not lost.
pub fn run(program: &Program, seed: u64, pace: Pace) -> Result<Run, String> {
    let mut machine =
        Machine::new(program, seed, pace).map_err(|error| format!("setup: {error}"))?;
    let mut lines = 0;
    for line in &program.lines {
        lines += 1;
        let _place = PLACES[line.id]();
        if let Err(error) = machine.step(&line.step) {
            if !error.code.is_sticky() {
                return Err(format!("line {} was refused: {error}", line.id));
            }
            break;
        }
        if program.sweeps {
            machine.sim.sweep_races();
        }
    }
    machine.sim.run_all();
    Ok(machine.finish(lines))
}

impl<'p> Machine<'p> {
    fn new(program: &'p Program, seed: u64, pace: Pace) -> DriverResult<Self> {
        let config = SimConfig {
            devices: program.devices as u32,
            granularity: PAGE_BYTES,
            implicit_waits: program.implicit_waits,
            track_initialised: false,
            races: RaceCheck::Report,
            pace,
            seed,
            ..SimConfig::default()
        };
        let sim = SimDriver::new(config).unwrap();
        sim.register_kernels(REFERENCES);
        let mut machine = Self {
            program,
            sim,
            contexts: Vec::new(),
            current: usize::MAX,
            ended: vec![false; program.devices],
            streams: Vec::new(),
            events: Vec::new(),
            allocs: Vec::new(),
            pinned: Vec::new(),
            reservation: 0,
            handles: Vec::new(),
            modules: Vec::new(),
            graphs: Vec::new(),
            answers: Vec::new(),
        };
        machine.make_contexts()?;
        machine.make_objects()?;
        machine.make_modules()?;
        Ok(machine)
    }

    fn make_contexts(&mut self) -> DriverResult<()> {
        for device in 0..self.program.devices {
            self.contexts.push(self.sim.device_primary_ctx_retain(device as i32)?);
        }
        for device in 0..self.program.devices {
            self.bind(device)?;
            for &peer in self.contexts.iter().filter(|&&peer| peer != self.contexts[device]) {
                // SAFETY: handles are looked up.
                unsafe { self.sim.ctx_enable_peer_access(peer) }?;
            }
        }
        Ok(())
    }

    fn make_objects(&mut self) -> DriverResult<()> {
        let program = self.program;
        self.streams = vec![0; program.streams.len()];
        for (index, stream) in program.streams.iter().enumerate() {
            if stream.is_first {
                self.create(index)?;
            }
        }
        for &device in &program.events {
            self.bind(device)?;
            let event = self.sim.event_create(false)?;
            self.events.push(event);
        }
        for &device in &program.allocs {
            self.bind(device)?;
            let base = self.sim.mem_alloc(3 * PAGE_BYTES)?;
            self.allocs.push((base, (base + PAGE_BYTES).next_multiple_of(PAGE_BYTES)));
        }
        for &(device, is_portable) in &program.pinned {
            self.bind(device)?;
            let flags = HostAllocFlags { portable: is_portable, ..HostAllocFlags::CACHED };
            let base = self.sim.mem_host_alloc(2 * PAGE_BYTES, flags)?;
            self.pinned.push((base, base + PAGE_BYTES));
        }
        if program.pages > 0 {
            self.reservation =
                self.sim.mem_address_reserve(program.pages as u64 * PAGE_BYTES, 0, 0)?;
        }
        for &(device, pages) in &program.handles {
            let prop = AllocationProp::on(device as i32);
            self.handles.push(self.sim.mem_create(pages as u64 * PAGE_BYTES, prop)?);
        }
        Ok(())
    }

    fn make_modules(&mut self) -> DriverResult<()> {
        let program = self.program;
        self.modules = vec![None; program.devices];
        let launches = |step: &Step| match step {
            Step::Enqueue { stream, work: Work::Kernel { .. } | Work::Atomic(_) } => {
                Some(program.streams[*stream].device)
            }
            _ => None,
        };
        let launching = program.lines.iter().filter_map(|line| launches(&line.step));
        let unloaded = program.lines.iter().filter_map(|line| match line.step {
            Step::Unload(device) => Some(device),
            _ => None,
        });
        let graphs = program.graphs.iter().map(|graph| graph.device);
        for device in launching.chain(unloaded).chain(graphs) {
            if self.modules[device].is_none() {
                self.bind(device)?;
                let module = self.sim.module_load_data(PTX, &mut String::new())?;
                // SAFETY: handles are looked up.
                let copy = unsafe { self.sim.module_get_function(module, "copy_bytes") }?;
                // SAFETY: as above.
                let count = unsafe { self.sim.module_get_function(module, "count") }?;
                self.modules[device] = Some((module, copy, count));
            }
        }
        for graph in &program.graphs {
            self.bind(graph.device)?;
            let handle = self.sim.graph_create()?;
            for &(to, from) in &graph.nodes {
                let (config, args) = (LaunchConfig::linear(1, 1), self.copy_args(to, from));
                let copy = self.modules[graph.device].unwrap_or_default().1;
                // SAFETY: handles are looked up, and the arguments are the kernel's.
                unsafe { self.sim.graph_add_kernel_node(handle, copy, &config, &args) }?;
            }
            // SAFETY: handles are looked up.
            let exec = unsafe { self.sim.graph_instantiate(handle) }?;
            self.graphs.push(exec);
        }
        Ok(())
    }

    fn finish(self, lines: usize) -> Run {
        let kinds = [FindingKind::IllegalAccess, FindingKind::KernelFailed];
        let findings = self.sim.findings();
        let others = findings.iter().filter(|finding| {
            !matches!(finding.kind, FindingKind::Race | FindingKind::LostObjects)
                && finding.kind != FindingKind::Conflict
        });
        Run {
            races: self.sim.races(),
            answers: self.answers,
            lines,
            is_lost: findings.iter().any(|finding| kinds.contains(&finding.kind)),
            others: others.map(ToString::to_string).collect(),
        }
    }

    fn bind(&mut self, device: usize) -> DriverResult<()> {
        if self.current != device {
            // SAFETY: handles are looked up.
            unsafe { self.sim.ctx_set_current(self.contexts[device]) }?;
            self.current = device;
        }
        Ok(())
    }

    fn create(&mut self, stream: usize) -> DriverResult<()> {
        let of = self.program.streams[stream];
        self.bind(of.device)?;
        self.streams[stream] = match of.kind {
            Kind::Legacy => 0,
            kind => self.sim.stream_create(kind == Kind::Blocking)?,
        };
        Ok(())
    }

    fn address(&self, span: Span) -> u64 {
        let edge = match span.place {
            Place::Alloc(index) => self.allocs[index].1,
            Place::Pinned(index) => self.pinned[index].1,
            Place::Join(page) => self.page(page + 1),
        };
        edge - u64::from(UNITS / 2) * self.program.unit + u64::from(span.start) * self.program.unit
    }

    fn page(&self, page: usize) -> u64 {
        self.reservation + page as u64 * PAGE_BYTES
    }

    fn bytes(&self, span: Span) -> u64 {
        u64::from(span.units) * self.program.unit
    }

    fn copy_args(&self, to: Span, from: Span) -> KernelArgs {
        KernelArgs::new().arg(self.address(to)).arg(self.address(from)).arg(self.bytes(to))
    }

    fn host_access(&self, at: Span, writes: bool) -> HostAccess {
        HostAccess { address: self.address(at), bytes: self.bytes(at), writes }
    }

    fn step(&mut self, step: &Step) -> DriverResult<()> {
        match *step {
            Step::Enqueue { stream, ref work } => self.enqueue(stream, work),
            Step::Host { at, writes } => {
                self.sim.host_access(self.host_access(at, writes));
                Ok(())
            }
            Step::Synchronize(what) => self.synchronize(what),
            Step::SynchronizeDevice(device) => {
                self.bind(device)?;
                self.sim.ctx_synchronize()
            }
            Step::Query(what) => {
                let answer = self.query(what)?;
                self.answers.push(answer);
                Ok(())
            }
            Step::Poll(what) => {
                for _ in 0..POLLS {
                    if self.query(what)? {
                        return Ok(());
                    }
                }
                self.synchronize(what)
            }
            Step::Create(stream) => self.create(stream),
            // SAFETY: handles are looked up.
            Step::Destroy(stream) => unsafe { self.sim.stream_destroy(self.streams[stream]) },
            Step::Map { page, handle } => {
                let bytes = self.program.handles[handle].1 as u64 * PAGE_BYTES;
                // SAFETY: handles are looked up.
                unsafe { self.sim.mem_map(self.page(page), bytes, 0, self.handles[handle]) }
            }
            Step::SetAccess { page, pages } => {
                let all: Vec<AccessDesc> = (0..self.program.devices)
                    .map(|device| AccessDesc { device: device as i32 })
                    .collect();
                self.sim.mem_set_access(self.page(page), pages as u64 * PAGE_BYTES, &all)
            }
            Step::Unmap { page, pages } => {
                self.sim.mem_unmap(self.page(page), pages as u64 * PAGE_BYTES)
            }
            // SAFETY: the host holds no reference to the memory, here and below.
            Step::Free(index) => unsafe { self.sim.mem_free(self.allocs[index].0) },
            // SAFETY: as above.
            Step::FreeHost(index) => unsafe { self.sim.mem_free_host(self.pinned[index].0) },
            Step::Unload(device) => {
                let (module, ..) = self.modules[device].unwrap_or_default();
                // SAFETY: handles are looked up.
                unsafe { self.sim.module_unload(module) }
            }
            Step::EndContext(device) => {
                // SAFETY: handles are looked up.
                unsafe { self.sim.device_primary_ctx_release(device as i32) }?;
                self.ended[device] = true;
                let other = self.ended.iter().position(|is_ended| !is_ended);
                other.map_or(Ok(()), |other| self.bind(other))
            }
        }
    }

    /// The handle of a queried object. The default stream is the current context's.
    fn handle(&mut self, what: What) -> DriverResult<u64> {
        match what {
            What::Stream(stream) => {
                self.bind(self.program.streams[stream].device)?;
                Ok(self.streams[stream])
            }
            What::Event(event) => Ok(self.events[event]),
        }
    }

    fn synchronize(&mut self, what: What) -> DriverResult<()> {
        let handle = self.handle(what)?;
        match what {
            // SAFETY: handles are looked up, here and below.
            What::Stream(_) => unsafe { self.sim.stream_synchronize(handle) },
            // SAFETY: as above.
            What::Event(_) => unsafe { self.sim.event_synchronize(handle) },
        }
    }

    fn query(&mut self, what: What) -> DriverResult<bool> {
        let handle = self.handle(what)?;
        match what {
            // SAFETY: handles are looked up, here and below.
            What::Stream(_) => unsafe { self.sim.stream_query(handle) },
            // SAFETY: as above.
            What::Event(_) => unsafe { self.sim.event_query(handle) },
        }
    }

    fn copy(&self, to: Span, from: Span, stream: u64) -> DriverResult<()> {
        let (a, b, bytes) = (self.address(to), self.address(from), self.bytes(to));
        let is_pinned = |span: Span| matches!(span.place, Place::Pinned(_));
        if is_pinned(from) && !is_pinned(to) {
            // SAFETY: pinned memory that the host does not access, here and below.
            unsafe { self.sim.memcpy_htod_async(a, b, bytes, stream) }
        } else if is_pinned(to) && !is_pinned(from) {
            // SAFETY: as above.
            unsafe { self.sim.memcpy_dtoh_async(a, b, bytes, stream) }
        } else {
            // SAFETY: as above.
            unsafe { self.sim.memcpy_dtod_async(a, b, bytes, stream) }
        }
    }

    fn peer(&self, device: usize, to: Span, from: Span) -> PeerCopy {
        let context = |span: Span| match span.place {
            Place::Alloc(index) => self.contexts[self.program.allocs[index]],
            Place::Pinned(index) => self.contexts[self.program.pinned[index].0],
            Place::Join(_) => self.contexts[device],
        };
        PeerCopy {
            destination: self.address(to),
            destination_context: context(to),
            source: self.address(from),
            source_context: context(from),
            bytes: self.bytes(to),
        }
    }

    fn enqueue(&mut self, index: usize, work: &Work) -> DriverResult<()> {
        let device = self.program.streams[index].device;
        self.bind(device)?;
        let (sim, stream) = (self.sim.clone(), self.streams[index]);
        let (_, copy, count) = self.modules[device].unwrap_or_default();
        let one = LaunchConfig::linear(1, 1);
        match work {
            // SAFETY: handles are looked up, wrong addresses give errors, pageable memory is used
            // only during the call, and the host holds no reference to pinned memory, here and
            // below.
            Work::Fill(to) => unsafe {
                sim.memset_d8_async(self.address(*to), 7, self.bytes(*to), stream)
            },
            Work::Copy { to, from } => self.copy(*to, *from, stream),
            // SAFETY: as above.
            Work::Peer { to, from } => unsafe {
                sim.memcpy_peer_async(self.peer(device, *to, *from), stream)
            },
            Work::Stage(to) => {
                let data = [9u8; 4 * UNITS as usize];
                let (to, bytes) = (self.address(*to), self.bytes(*to));
                // SAFETY: as above.
                unsafe {
                    sim.memcpy_htod_async(
                        to,
                        data.as_ptr().expose_provenance() as u64,
                        bytes,
                        stream,
                    )
                }
            }
            Work::Fetch(from) => {
                let mut data = [0u8; 4 * UNITS as usize];
                let (from, bytes) = (self.address(*from), self.bytes(*from));
                // SAFETY: as above.
                unsafe {
                    sim.memcpy_dtoh_async(
                        data.as_mut_ptr().expose_provenance() as u64,
                        from,
                        bytes,
                        stream,
                    )
                }
            }
            Work::Batch(copies) => {
                let copies: Vec<BatchCopy> = copies
                    .iter()
                    .map(|&(to, from)| BatchCopy {
                        destination: self.address(to),
                        source: self.address(from),
                        bytes: self.bytes(to),
                    })
                    .collect();
                // SAFETY: as above.
                unsafe { sim.memcpy_batch_async(&copies, stream) }
            }
            // SAFETY: as above.
            Work::Kernel { to, from } => unsafe {
                sim.launch_kernel(copy, &one, &self.copy_args(*to, *from), stream)
            },
            Work::Atomic(at) => {
                let args = KernelArgs::new().arg(self.address(*at));
                // SAFETY: as above.
                unsafe { sim.launch_kernel(count, &one, &args, stream) }
            }
            // SAFETY: as above.
            Work::Graph(graph) => unsafe { sim.graph_launch(self.graphs[*graph], stream) },
            // SAFETY: as above.
            Work::Record(event) => unsafe { sim.event_record(self.events[*event], stream) },
            // SAFETY: as above.
            Work::Wait(event) => unsafe { sim.stream_wait_event(stream, self.events[*event]) },
        }
    }
}
