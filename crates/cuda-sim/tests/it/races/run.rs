//! The calls of a test program: raw driver calls, each of which returns its actor and place.
//!
//! A program asks its run whether each edge of order is enabled. So one text is both the program
//! with a race and the fixed program.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::panic::Location;

use cuda_driver::{
    AccessDesc, BatchCopy, Driver, HostAccess, HostAllocFlags, HostRegisterFlags, KernelArgs,
    LaunchConfig, PeerCopy,
};
use cuda_sim::{Pace, RaceActor, RaceUse, SimConfig, SimDriver};

use crate::common;

/// Number of threads of each kernel. Each thread uses one word.
pub(crate) const LANES: u64 = 32;

/// Kernels whose body uses `%at`, the address of the thread's word, or `%first`, that of the first
/// word. One has a name that starts like a driver call's.
const KERNELS: [(&str, &str); 10] = [
    ("store_words", "st.global.u32 [%at], %r0;"),
    ("load_words", "ld.global.u32 %r1, [%at];"),
    ("add_words", "atom.global.add.u32 %r1, [%at], 1;"),
    ("idle", ""),
    ("cumulate", "ld.global.u32 %r1, [%first];"),
    ("add_words_of_the_system", "red.sys.global.add.u32 [%first], 1;"),
    ("poll_a_word_of_the_system", "ld.acquire.sys.global.u32 %r1, [%first];"),
    ("set_a_word_of_the_system", "st.release.sys.global.u32 [%first], 1;"),
    ("add_words_of_the_block", "red.cta.global.add.u32 [%first], 1;"),
    ("add_wide", "red.global.add.u64 [%first], 1;"),
];

/// The PTX of one of [`KERNELS`].
fn ptx(name: &str) -> String {
    let (_, body) = KERNELS.iter().find(|(known, _)| *known == name).unwrap();
    format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry {name}(.param .u64 words)\n{{\n\
         .reg .b64 %first, %offset, %at;\n.reg .b32 %r<2>;\nld.param.u64 %first, [words];\n\
         mov.u32 %r0, %tid.x;\nmul.wide.u32 %offset, %r0, 4;\nadd.s64 %at, %first, %offset;\n\
         {body}\nret;\n}}\n"
    )
}

/// A stream of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    pub(crate) handle: u64,
    pub(crate) device: u32,
}

/// Addresses: the first, and the number of bytes.
pub(crate) type Range = (u64, u64);

/// No bytes.
const NONE: Range = (0, 0);

/// The length of memory that a call ends by its address.
const ALL: u64 = 1 << 40;

/// The actor of a call, its place in the program, and what it reads and writes, begins or ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) name: &'static str,
    pub(crate) actor: RaceActor,
    pub(crate) at: &'static Location<'static>,
    read: Range,
    written: Range,
}

impl Call {
    pub(crate) fn reading(self, address: u64, bytes: u64) -> Self {
        Self { read: (address, bytes), ..self }
    }

    pub(crate) fn writing(self, address: u64, bytes: u64) -> Self {
        Self { written: (address, bytes), ..self }
    }

    pub(crate) fn reads(self) -> Side {
        Side { call: self, used: RaceUse::Read, range: self.read }
    }

    pub(crate) fn writes(self) -> Side {
        Side { call: self, used: RaceUse::Write, range: self.written }
    }

    pub(crate) fn uses(self) -> Side {
        Side { call: self, used: RaceUse::Use, range: NONE }
    }

    pub(crate) fn maps(self) -> Side {
        Side { call: self, used: RaceUse::Map, range: self.written }
    }

    pub(crate) fn ends(self) -> Side {
        Side { call: self, used: RaceUse::End, range: self.written }
    }

    /// The call and its place, in the form of reports.
    pub(crate) fn named(self) -> String {
        format!("{} at {}:{}", self.name, self.at.file(), self.at.line())
    }
}

/// One side of an expected race.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Side {
    pub(crate) call: Call,
    pub(crate) used: RaceUse,
    pub(crate) range: Range,
}

/// An edge of order, as reports ask for it and programs offer it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Edge {
    /// An event recorded on the first stream and waited for by the second.
    StreamWait(u64, u64),
    /// The host waits for the stream.
    HostWait(u64),
    /// The host's call comes before the operation of the stream.
    HostFirst(u64),
}

/// The enabled edges of a program.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Edges {
    All,
    None,
    AllBut(usize),
}

/// One run of a program.
pub(crate) struct Run {
    pub(crate) sim: SimDriver,
    edges: Edges,
    pub(crate) asked: Cell<usize>,
    pub(crate) offered: RefCell<Vec<Edge>>,
    contexts: RefCell<BTreeMap<u32, u64>>,
    device: Cell<u32>,
}

impl Run {
    pub(crate) fn new(config: &SimConfig, seed: u64, pace: Pace, edges: Edges) -> Self {
        let sim = SimDriver::new(SimConfig { seed, ..config.clone() }).unwrap();
        sim.register_kernels(common::REFERENCES);
        sim.set_pace(pace);
        let run = Self {
            sim,
            edges,
            asked: Cell::new(0),
            offered: RefCell::default(),
            contexts: RefCell::default(),
            device: Cell::new(0),
        };
        run.use_device(0);
        run
    }

    /// Whether the next edge of the program is enabled.
    pub(crate) fn edge(&self) -> bool {
        let index = self.asked.replace(self.asked.get() + 1);
        match self.edges {
            Edges::All => true,
            Edges::None => false,
            Edges::AllBut(left_out) => index != left_out,
        }
    }

    /// Whether the next edge is enabled. The report must ask for this edge.
    pub(crate) fn mend(&self, edge: Edge) -> bool {
        self.offered.borrow_mut().push(edge);
        self.edge()
    }

    /// Makes `to` wait for the work on `from`, if that edge is enabled.
    pub(crate) fn order(&self, from: Stream, to: Stream) {
        let event = self.on(from, || self.event());
        if self.mend(Edge::StreamWait(from.handle, to.handle)) {
            self.record(event, from);
            self.wait(to, event);
        }
    }

    /// Makes the host wait for a stream, if that edge is enabled.
    pub(crate) fn host_waits(&self, stream: Stream) {
        if self.mend(Edge::HostWait(stream.handle)) {
            self.sync(stream);
        }
    }

    /// Binds the context of `device` from now on.
    pub(crate) fn use_device(&self, device: u32) -> u64 {
        let known = self.contexts.borrow().get(&device).copied();
        let context = known.unwrap_or_else(|| {
            let context = self.sim.device_primary_ctx_retain(device as i32).unwrap();
            self.contexts.borrow_mut().insert(device, context);
            context
        });
        common::set_current(&self.sim, context).unwrap();
        self.device.set(device);
        context
    }

    /// Runs `body` with the context of a stream's device bound, because each device's default
    /// stream is 0.
    fn on<T>(&self, stream: Stream, body: impl FnOnce() -> T) -> T {
        let before = self.device.get();
        self.use_device(stream.device);
        let answer = body();
        self.use_device(before);
        answer
    }

    /// Gives devices 0 and 1 access to each other's memory.
    pub(crate) fn enable_peers(&self) {
        let (first, second) = (self.use_device(0), self.use_device(1));
        // SAFETY: contexts are looked up.
        unsafe { self.sim.ctx_enable_peer_access(first) }.unwrap();
        self.use_device(0);
        // SAFETY: as above.
        unsafe { self.sim.ctx_enable_peer_access(second) }.unwrap();
    }

    pub(crate) fn stream(&self) -> Stream {
        self.new_stream(false)
    }

    /// A stream that is ordered with the default stream of its device.
    pub(crate) fn blocking(&self) -> Stream {
        self.new_stream(true)
    }

    fn new_stream(&self, blocking: bool) -> Stream {
        let handle = self.sim.stream_create(blocking).unwrap();
        Stream { handle, device: self.device.get() }
    }

    /// The default stream of a device.
    pub(crate) fn default_stream(&self, device: u32) -> Stream {
        Stream { handle: 0, device }
    }

    pub(crate) fn destroy(&self, stream: Stream) {
        // SAFETY: handles are looked up.
        unsafe { self.sim.stream_destroy(stream.handle) }.unwrap();
    }

    pub(crate) fn event(&self) -> u64 {
        self.sim.event_create(true).unwrap()
    }

    pub(crate) fn alloc(&self, bytes: u64) -> u64 {
        self.sim.mem_alloc(bytes).unwrap()
    }

    /// Pinned memory that all contexts share.
    pub(crate) fn pinned(&self, bytes: u64) -> u64 {
        common::pinned(&self.sim, bytes)
    }

    /// Pinned memory of only the current context. Freeing it waits.
    pub(crate) fn own_pinned(&self, bytes: u64) -> u64 {
        let flags = HostAllocFlags { portable: false, ..HostAllocFlags::CACHED };
        self.sim.mem_host_alloc(bytes, flags).unwrap()
    }

    /// Registered memory of the program. It is never freed, so it stays valid.
    pub(crate) fn registered(&self, bytes: usize) -> u64 {
        let memory: &'static mut [u8] = Box::leak(vec![0; bytes].into_boxed_slice());
        let address = memory.as_mut_ptr().expose_provenance() as u64;
        self.register(address, bytes as u64);
        address
    }

    /// Registers the memory of [`registered`](Self::registered) again.
    pub(crate) fn register(&self, address: u64, bytes: u64) {
        // SAFETY: the memory lives until the process ends, and nothing else refers to it.
        unsafe { self.sim.mem_host_register(address, bytes, HostRegisterFlags::default()) }
            .unwrap();
    }

    /// A page of memory of the current device, mapped at `addresses`. Returns its handle.
    pub(crate) fn page(&self) -> u64 {
        self.sim.mem_create(common::PAGE, common::prop(self.device.get() as i32)).unwrap()
    }

    pub(crate) fn addresses(&self) -> u64 {
        common::reserve(&self.sim, 1)
    }

    #[track_caller]
    pub(crate) fn map(&self, address: u64, page: u64) -> Call {
        // SAFETY: handles are looked up.
        unsafe { self.sim.mem_map(address, common::PAGE, 0, page) }.unwrap();
        Self::host_call("cuMemMap").writing(address, common::PAGE)
    }

    #[track_caller]
    pub(crate) fn set_access(&self, address: u64, devices: &[i32]) -> Call {
        let access: Vec<_> = devices.iter().map(|&device| AccessDesc { device }).collect();
        self.sim.mem_set_access(address, common::PAGE, &access).unwrap();
        Self::host_call("cuMemSetAccess").writing(address, common::PAGE)
    }

    /// A page of memory with addresses of its own.
    pub(crate) fn mapped_page(&self) -> u64 {
        let address = self.addresses();
        self.map(address, self.page());
        self.set_access(address, &[self.device.get() as i32]);
        address
    }

    #[track_caller]
    pub(crate) fn unmap(&self, address: u64) -> Call {
        self.sim.mem_unmap(address, common::PAGE).unwrap();
        Self::host_call("cuMemUnmap").writing(address, common::PAGE)
    }

    #[track_caller]
    pub(crate) fn free(&self, address: u64) -> Call {
        // SAFETY: addresses are looked up, and the host holds no reference to device memory.
        unsafe { self.sim.mem_free(address) }.unwrap();
        Self::host_call("cuMemFree").writing(address, ALL)
    }

    #[track_caller]
    pub(crate) fn free_host(&self, host: u64) -> Call {
        // SAFETY: addresses are looked up, and no reference to pinned memory is held.
        unsafe { self.sim.mem_free_host(host) }.unwrap();
        Self::host_call("cuMemFreeHost").writing(host, ALL)
    }

    #[track_caller]
    pub(crate) fn unregister(&self, host: u64) -> Call {
        // SAFETY: as for `free_host`.
        unsafe { self.sim.mem_host_unregister(host) }.unwrap();
        Self::host_call("cuMemHostUnregister").writing(host, ALL)
    }

    #[track_caller]
    pub(crate) fn release_context(&self, device: u32) -> Call {
        self.contexts.borrow_mut().remove(&device);
        // SAFETY: ordinals are looked up, and nothing refers to the context's memory.
        unsafe { self.sim.device_primary_ctx_release(device as i32) }.unwrap();
        Self::host_call("cuDevicePrimaryCtxRelease")
    }

    #[track_caller]
    fn call(name: &'static str, stream: Stream) -> Call {
        let Stream { device, handle } = stream;
        let actor = RaceActor::Stream { device, stream: handle };
        Call { name, actor, at: Location::caller(), read: NONE, written: NONE }
    }

    #[track_caller]
    fn host_call(name: &'static str) -> Call {
        let (actor, at) = (RaceActor::Host, Location::caller());
        Call { name, actor, at, read: NONE, written: NONE }
    }

    #[track_caller]
    pub(crate) fn record(&self, event: u64, stream: Stream) -> Call {
        let here = Self::call("cuEventRecord", stream);
        let before = self.device.get();
        self.use_device(stream.device);
        // SAFETY: handles are looked up.
        unsafe { self.sim.event_record(event, stream.handle) }.unwrap();
        self.use_device(before);
        here
    }

    #[track_caller]
    pub(crate) fn wait(&self, stream: Stream, event: u64) -> Call {
        let here = Self::call("cuStreamWaitEvent", stream);
        let before = self.device.get();
        self.use_device(stream.device);
        // SAFETY: handles are looked up.
        unsafe { self.sim.stream_wait_event(stream.handle, event) }.unwrap();
        self.use_device(before);
        here
    }

    pub(crate) fn sync(&self, stream: Stream) {
        self.on(stream, || common::sync(&self.sim, stream.handle)).unwrap();
    }

    pub(crate) fn sync_device(&self, device: u32) {
        self.on(self.default_stream(device), || self.sim.ctx_synchronize()).unwrap();
    }

    pub(crate) fn query(&self, event: u64) -> bool {
        common::query(&self.sim, event).unwrap()
    }

    #[track_caller]
    pub(crate) fn fill(&self, to: u64, bytes: u64, stream: Stream) -> Call {
        self.use_device(stream.device);
        // SAFETY: device addresses, which are looked up.
        unsafe { self.sim.memset_d8_async(to, 1, bytes, stream.handle) }.unwrap();
        Self::call("cuMemsetD8Async", stream).writing(to, bytes)
    }

    #[track_caller]
    pub(crate) fn copy(&self, to: u64, from: u64, bytes: u64, stream: Stream) -> Call {
        self.use_device(stream.device);
        // SAFETY: as for `fill`.
        unsafe { self.sim.memcpy_dtod_async(to, from, bytes, stream.handle) }.unwrap();
        Self::call("cuMemcpyDtoDAsync", stream).reading(from, bytes).writing(to, bytes)
    }

    /// Copies from pinned memory, or from the program's pageable memory.
    #[track_caller]
    pub(crate) fn upload(&self, to: u64, host: u64, bytes: u64, stream: Stream) -> Call {
        self.use_device(stream.device);
        // SAFETY: pinned memory is looked up when the copy runs. Programs pass their own memory,
        // which lives during the call.
        unsafe { self.sim.memcpy_htod_async(to, host, bytes, stream.handle) }.unwrap();
        Self::call("cuMemcpyHtoDAsync", stream).reading(host, bytes).writing(to, bytes)
    }

    /// Copies to pinned memory, or to the caller's pageable memory.
    #[track_caller]
    pub(crate) fn download(&self, host: u64, from: u64, bytes: u64, stream: Stream) -> Call {
        self.use_device(stream.device);
        // SAFETY: pinned memory is looked up when the copy runs. Other memory is written before the
        // call returns.
        unsafe { self.sim.memcpy_dtoh_async(host, from, bytes, stream.handle) }.unwrap();
        Self::call("cuMemcpyDtoHAsync", stream).reading(from, bytes).writing(host, bytes)
    }

    /// Copies to the program's pageable memory, which includes a wait.
    #[track_caller]
    pub(crate) fn download_pageable(&self, from: u64, bytes: usize, stream: Stream) -> Call {
        let mut data = vec![0u8; bytes];
        self.download(data.as_mut_ptr() as u64, from, bytes as u64, stream)
    }

    #[track_caller]
    pub(crate) fn batch(&self, copies: &[(u64, u64, u64)], stream: Stream) -> Call {
        self.use_device(stream.device);
        let copies: Vec<BatchCopy> = copies
            .iter()
            .map(|&(destination, source, bytes)| BatchCopy { destination, source, bytes })
            .collect();
        // SAFETY: device addresses, which are looked up.
        unsafe { self.sim.memcpy_batch_async(&copies, stream.handle) }.unwrap();
        Self::call("cuMemcpyBatchAsync", stream)
    }

    /// Copies between memory of two devices, each named with its address.
    #[track_caller]
    pub(crate) fn peer_copy(
        &self,
        to: (u32, u64),
        from: (u32, u64),
        bytes: u64,
        stream: Stream,
    ) -> Call {
        let destination_context = self.use_device(to.0);
        let source_context = self.use_device(from.0);
        let (destination, source) = (to.1, from.1);
        let copy = PeerCopy { destination, destination_context, source, source_context, bytes };
        self.use_device(stream.device);
        // SAFETY: device addresses, which are looked up.
        unsafe { self.sim.memcpy_peer_async(copy, stream.handle) }.unwrap();
        Self::call("cuMemcpyPeerAsync", stream).reading(from.1, bytes).writing(to.1, bytes)
    }

    /// Kernel `name` on the device of `stream`, with its module.
    pub(crate) fn kernel(&self, name: &str, stream: Stream) -> (u64, u64) {
        self.use_device(stream.device);
        let text = if name == "copy_bytes" { common::PTX.to_owned() } else { ptx(name) };
        let module = self.sim.module_load_data(&text, &mut String::new()).unwrap();
        // SAFETY: the module was loaded just now.
        (unsafe { self.sim.module_get_function(module, name) }.unwrap(), module)
    }

    #[track_caller]
    fn launch_of(&self, function: u64, args: &KernelArgs, stream: Stream) {
        let config = LaunchConfig::linear(1, LANES as u32);
        // SAFETY: the simulated device checks the arguments and every access.
        unsafe { self.sim.launch_kernel(function, &config, args, stream.handle) }.unwrap();
    }

    /// Launches a kernel of a module that the program unloads itself.
    #[track_caller]
    pub(crate) fn launch_loaded(
        &self,
        name: &'static str,
        function: u64,
        word: u64,
        stream: Stream,
    ) -> Call {
        self.launch_of(function, &KernelArgs::new().arg(word), stream);
        let bytes = match name {
            "store_words" | "load_words" | "add_words" => 4 * LANES,
            "add_wide" => 8,
            _ => 4,
        };
        Self::call(name, stream).reading(word, bytes).writing(word, bytes)
    }

    #[track_caller]
    pub(crate) fn unload(&self, module: u64) -> Call {
        // SAFETY: handles are looked up.
        unsafe { self.sim.module_unload(module) }.unwrap();
        Self::host_call("cuModuleUnload")
    }

    /// A kernel run by a reference: it copies bytes.
    #[track_caller]
    pub(crate) fn copy_kernel(&self, to: u64, from: u64, bytes: u64, stream: Stream) -> Call {
        let (function, _) = self.kernel("copy_bytes", stream);
        self.launch_of(function, &KernelArgs::new().arg(to).arg(from).arg(bytes), stream);
        Self::call("copy_bytes", stream).reading(from, bytes).writing(to, bytes)
    }

    /// One of [`KERNELS`], which runs from its PTX.
    #[track_caller]
    pub(crate) fn ptx(&self, name: &'static str, words: u64, stream: Stream) -> Call {
        let (function, _) = self.kernel(name, stream);
        self.launch_loaded(name, function, words, stream)
    }

    /// Launches a graph with one kernel, `store_words`.
    #[track_caller]
    pub(crate) fn store_graph(&self, to: u64, stream: Stream) -> Call {
        let (function, _) = self.kernel("store_words", stream);
        let exec = self.graph(function, to);
        self.launch_graph("store_words", exec, stream).writing(to, 4 * LANES)
    }

    /// Launches a graph whose one kernel is `name`.
    #[track_caller]
    pub(crate) fn launch_graph(&self, name: &'static str, exec: u64, stream: Stream) -> Call {
        // SAFETY: handles are looked up.
        unsafe { self.sim.graph_launch(exec, stream.handle) }.unwrap();
        Self::call(name, stream)
    }

    /// An instantiated graph with one launch of `function`.
    pub(crate) fn graph(&self, function: u64, word: u64) -> u64 {
        let graph = self.sim.graph_create().unwrap();
        let (config, args) = (LaunchConfig::linear(1, LANES as u32), KernelArgs::new().arg(word));
        // SAFETY: handles are looked up.
        unsafe { self.sim.graph_add_kernel_node(graph, function, &config, &args) }.unwrap();
        // SAFETY: as above.
        unsafe { self.sim.graph_instantiate(graph) }.unwrap()
    }

    #[track_caller]
    fn host_access(&self, (address, bytes): (u64, u64), writes: bool) -> Call {
        self.sim.host_access(HostAccess { address, bytes, writes });
        Self::host_call("host access").reading(address, bytes).writing(address, bytes)
    }

    #[track_caller]
    pub(crate) fn host_writes(&self, host: u64, bytes: u64) -> Call {
        self.host_access((host, bytes), true)
    }

    #[track_caller]
    pub(crate) fn host_reads(&self, host: u64, bytes: u64) -> Call {
        self.host_access((host, bytes), false)
    }
}
