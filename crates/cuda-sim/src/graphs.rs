//! Graphs of kernels: launches that are prepared once and enqueued many times.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::thread::ThreadId;

use cuda_driver::guard;
use cuda_driver::{ErrorCode, KernelArgs, LaunchConfig};

use crate::races::KnownPoint;
use crate::state::{Answer, Machine};
use crate::streams::{DefaultOrder, Point, Stream, is_legacy};
use crate::work::{Launch, Work};

/// Launches in the order of their nodes. They run in this order.
#[derive(Clone, Debug)]
struct Graph {
    device: u32,
    nodes: Vec<Launch>,
    /// The last node of the last launch of an instantiated graph, with its known point for the race
    /// check.
    launched: Option<(Point, Option<KnownPoint>)>,
}

/// All graphs, and those that were instantiated.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    graphs: BTreeMap<u64, Graph>,
    execs: BTreeMap<u64, Graph>,
}

impl Graphs {
    pub(crate) fn count(&self) -> usize {
        self.graphs.len() + self.execs.len()
    }

    /// Removes all graphs of a device whose context ends.
    pub(crate) fn end_device(&mut self, device: u32) {
        self.graphs.retain(|_, graph| graph.device != device);
        self.execs.retain(|_, exec| exec.device != device);
    }

    /// Forgets the known points of the last launches.
    pub(crate) fn forget_known(&mut self) {
        for (_, known) in self.execs.values_mut().filter_map(|exec| exec.launched.as_mut()) {
            *known = None;
        }
    }

    fn insert(&mut self, handle: u64, device: u32, nodes: Vec<Launch>) {
        self.graphs.insert(handle, Graph { device, nodes, launched: None });
    }
}

/// A legacy default stream was used while a stream that it waits for is captured
/// (`CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`).
const CAPTURE_IMPLICIT: ErrorCode = ErrorCode(906);

/// The launches of a stream that is captured, in the mode `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`.
#[derive(Debug)]
pub(crate) struct Capture {
    /// The thread that began the capture.
    thread: ThreadId,
    nodes: Vec<Launch>,
    /// Whether a call that cannot be made during the capture was made.
    is_invalid: Cell<bool>,
}

impl Capture {
    pub(crate) fn take(&mut self, launch: Launch) {
        self.nodes.push(launch);
    }

    /// Answers a call that cannot be captured, which ends the capture without a graph.
    pub(crate) fn invalidate(&self) -> ErrorCode {
        guard!("sim.capture-invalid", self.is_invalid.set(true));
        ErrorCode::STREAM_CAPTURE_UNSUPPORTED
    }
}

impl Machine {
    pub(crate) fn stream_begin_capture(&mut self, stream: u64) -> Answer<()> {
        let (key, _) = self.stream_or_capture(stream)?;
        if is_legacy(stream) {
            return Err(ErrorCode::STREAM_CAPTURE_UNSUPPORTED);
        }
        let thread = std::thread::current().id();
        let capture = Capture { thread, nodes: Vec::new(), is_invalid: Cell::new(false) };
        self.streams.begin_capture(key, capture)
    }

    fn captures(&self, of: impl Fn(&Stream, &Capture) -> bool) -> impl Iterator<Item = &Capture> {
        let captures = self.streams.captured();
        captures.filter(move |(stream, capture)| of(stream, capture)).map(|(_, capture)| capture)
    }

    /// Refuses a call that may wait for other work, of a thread that captures. All its captures end
    /// without a graph.
    pub(crate) fn may_wait(&self) -> Answer<()> {
        let thread = std::thread::current().id();
        let of_thread = |capture: &Capture| capture.thread == thread;
        let own =
            self.captures(|_, capture| guard!("sim.capture-waits", of_thread(capture), else false));
        own.map(Capture::invalidate).last().map_or(Ok(()), Err)
    }

    /// Refuses a wait for all work of a device of which a stream is captured, whatever thread captures it.
    pub(crate) fn may_wait_for_device(&self, device: u32) -> Answer<()> {
        self.may_wait()?;
        let of_device = self.captures(|stream, _| stream.device() == device);
        of_device.map(Capture::invalidate).last().map_or(Ok(()), Err)
    }

    /// Refuses a use of the legacy default stream of a device while a stream that it is ordered with is
    /// captured.
    pub(crate) fn may_use_legacy(&self, device: u32) -> Answer<()> {
        let ordered =
            |stream: &Stream| stream.device() == device && stream.order() == DefaultOrder::Blocking;
        let ended = self.captures(|stream, _| ordered(stream)).map(Capture::invalidate).last();
        ended.map_or(Ok(()), |_| Err(CAPTURE_IMPLICIT))
    }

    pub(crate) fn stream_end_capture(&mut self, stream: u64) -> Answer<u64> {
        let (stream, device) = self.stream_or_capture(stream)?;
        let captured = self.streams.end_capture(stream);
        let Capture { nodes, is_invalid, .. } = captured.ok_or(ErrorCode::ILLEGAL_STATE)?;
        if is_invalid.get() {
            return Err(ErrorCode::STREAM_CAPTURE_INVALIDATED);
        }
        let handle = self.new_handle();
        self.graphs.insert(handle, device, nodes);
        Ok(handle)
    }

    pub(crate) fn graph_create(&mut self) -> Answer<u64> {
        let device = self.current()?;
        let handle = self.new_handle();
        self.graphs.insert(handle, device, Vec::new());
        Ok(handle)
    }

    pub(crate) fn graph_destroy(&mut self, graph: u64) -> Answer<()> {
        let graph = self.graphs.graphs.remove(&graph).ok_or(ErrorCode::INVALID_VALUE)?;
        self.health(graph.device)
    }

    pub(crate) fn graph_add_kernel_node(
        &mut self,
        graph: u64,
        function: u64,
        config: &LaunchConfig,
        args: &KernelArgs,
    ) -> Answer<u64> {
        let device = self.current()?;
        if !self.graphs.graphs.contains_key(&graph) {
            return Err(ErrorCode::INVALID_VALUE);
        }
        let launch = self.prepare(device, function, config, args)?;
        let node = self.new_handle();
        if let Some(graph) = self.graphs.graphs.get_mut(&graph) {
            graph.nodes.push(launch);
        }
        Ok(node)
    }

    pub(crate) fn graph_instantiate(&mut self, graph: u64) -> Answer<u64> {
        self.may_wait()?;
        self.current()?;
        let graph = self.graphs.graphs.get(&graph).ok_or(ErrorCode::INVALID_VALUE)?.clone();
        let handle = self.new_handle();
        self.graphs.execs.insert(handle, graph);
        Ok(handle)
    }

    pub(crate) fn graph_exec_destroy(&mut self, exec: u64) -> Answer<()> {
        self.may_wait()?;
        let exec = self.graphs.execs.remove(&exec).ok_or(ErrorCode::INVALID_VALUE)?;
        self.health(exec.device)
    }

    pub(crate) fn graph_launch(&mut self, exec_handle: u64, stream: u64) -> Answer<()> {
        let (stream, device) = self.stream(stream)?;
        let exec = self.graphs.execs.get(&exec_handle).ok_or(ErrorCode::INVALID_VALUE)?;
        if exec.device != device {
            return Err(ErrorCode::INVALID_VALUE);
        }
        let (nodes, launched) = (exec.nodes.clone(), exec.launched.clone());
        // Two launches of one graph never overlap, even in different streams.
        if let Some((point, known)) = launched.filter(|(point, _)| point.stream != stream) {
            guard!(
                "sim.graph-alone",
                self.enqueue(stream, "cuGraphLaunch", Work::Wait(point)),
                else point
            );
            guard!(
                "sim.graph-ordered",
                known.inspect(|known| self.races.follows(stream, known)),
                else None
            );
        }
        let mut last = None;
        for launch in nodes {
            let work = Work::Launch(Box::new(launch));
            last = Some(self.enqueue(stream, "cuGraphLaunch", work));
        }
        if let Some((point, exec)) = last.zip(self.graphs.execs.get_mut(&exec_handle)) {
            exec.launched = Some((point, self.races.known(stream, point.sequence)));
        }
        Ok(())
    }
}
