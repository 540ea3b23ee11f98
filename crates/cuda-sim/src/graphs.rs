//! Graphs of kernels: launches that are prepared once and enqueued many times.

use cuda_driver::{ErrorCode, KernelArgs, LaunchConfig};

use crate::races::KnownPoint;
use crate::state::{Answer, Machine};
use crate::streams::Point;
use crate::work::{Launch, Work};

/// Launches in the order of their nodes. They run in this order.
#[derive(Clone, Debug)]
pub(crate) struct Graph {
    pub(crate) device: u32,
    nodes: Vec<Launch>,
    /// The last node of the last launch of an instantiated graph, with its known point for the race
    /// check.
    launched: Option<(Point, Option<KnownPoint>)>,
}

impl Graph {
    /// Forgets the known point of the last launch.
    pub(crate) fn forget_known(&mut self) {
        if let Some((_, known)) = &mut self.launched {
            *known = None;
        }
    }
}

impl Machine {
    pub(crate) fn graph_create(&mut self) -> Answer<u64> {
        let device = self.current()?;
        let handle = self.new_handle();
        self.graphs.insert(handle, Graph { device, nodes: Vec::new(), launched: None });
        Ok(handle)
    }

    pub(crate) fn graph_destroy(&mut self, graph: u64) -> Answer<()> {
        let graph = self.graphs.remove(&graph).ok_or(ErrorCode::INVALID_VALUE)?;
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
        if !self.graphs.contains_key(&graph) {
            return Err(ErrorCode::INVALID_VALUE);
        }
        let launch = self.prepare(device, function, config, args)?;
        let node = self.new_handle();
        if let Some(graph) = self.graphs.get_mut(&graph) {
            graph.nodes.push(launch);
        }
        Ok(node)
    }

    pub(crate) fn graph_instantiate(&mut self, graph: u64) -> Answer<u64> {
        self.current()?;
        let graph = self.graphs.get(&graph).ok_or(ErrorCode::INVALID_VALUE)?.clone();
        let handle = self.new_handle();
        self.graph_execs.insert(handle, graph);
        Ok(handle)
    }

    pub(crate) fn graph_exec_destroy(&mut self, exec: u64) -> Answer<()> {
        let exec = self.graph_execs.remove(&exec).ok_or(ErrorCode::INVALID_VALUE)?;
        self.health(exec.device)
    }

    pub(crate) fn graph_launch(&mut self, exec_handle: u64, stream: u64) -> Answer<()> {
        let (stream, device) = self.stream(stream)?;
        let exec = self.graph_execs.get(&exec_handle).ok_or(ErrorCode::INVALID_VALUE)?;
        if exec.device != device {
            return Err(ErrorCode::INVALID_VALUE);
        }
        let (nodes, launched) = (exec.nodes.clone(), exec.launched.clone());
        // Two launches of one graph never overlap, even in different streams.
        if let Some((point, known)) = launched.filter(|(point, _)| point.stream != stream) {
            self.enqueue(stream, "cuGraphLaunch", Work::Wait(point));
            known.inspect(|known| self.races.follows(stream, known));
        }
        let mut last = None;
        for launch in nodes {
            let work = Work::Launch(Box::new(launch));
            last = Some(self.enqueue(stream, "cuGraphLaunch", work));
        }
        if let Some((point, exec)) = last.zip(self.graph_execs.get_mut(&exec_handle)) {
            exec.launched = Some((point, self.races.known(stream, point.sequence)));
        }
        Ok(())
    }
}
