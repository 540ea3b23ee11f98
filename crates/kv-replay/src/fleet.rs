//! `run --nodes N`: starts the nodes, spreads the trace over them, kills or stops some, and sums up what they report.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cuda_driver::guard;
use kv_replay::family;
use kv_replay::json_file::{WriteError, write_json};
use kv_replay::nodes::{LeaseReport, NodeConfig, NodeTransfer};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::partition::Wall;

const LOOK: Duration = Duration::from_millis(2);

/// A fault drill of a node, so long after all nodes have begun.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct NodeDrill {
    pub(crate) node: u16,
    pub(crate) at: Duration,
    pub(crate) fault: NodeFault,
}

/// What happens to a node, and for how long.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum NodeFault {
    Kill,
    Stop(Duration),
    /// It is parted from all others.
    Part(Duration),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum FleetError {
    #[error("node {node} of a drill is not one of {nodes}")]
    Drill { node: u16, nodes: u16 },
    #[error("cannot start or watch a node")]
    Start(#[source] io::Error),
    #[error("node {node} ended with {status}, and wrote no report")]
    Ended { node: usize, status: ExitStatus },
    #[error("node {node} was not done after {waited_s} s")]
    Slow { node: usize, waited_s: u64 },
    #[error("the report of node {node} cannot be read")]
    Report { node: usize, source: serde_json::Error },
    #[error("a signal has ended the run; its nodes are gone, and nothing was written")]
    Interrupted { signal: u8 },
    #[error("{leases} leases of nodes are open at the end")]
    Leases { leases: u64 },
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// The signals that ask a program to end.
const SIGNALS: [i32; 3] = [SIGTERM, SIGINT, SIGHUP];

/// Signals to end, which are looked at between waits, so that whatever the run has made goes in order.
pub(crate) struct Interrupts {
    came: [Arc<AtomicBool>; SIGNALS.len()],
    /// Nothing is to be put in order any more: signals end the process by themselves again.
    released: Arc<AtomicBool>,
}

impl Interrupts {
    /// From here on, these signals end the process no longer by themselves.
    pub(crate) fn catch() -> io::Result<Self> {
        let came = <[Arc<AtomicBool>; SIGNALS.len()]>::default();
        let released = Arc::<AtomicBool>::default();
        for (signal, flag) in SIGNALS.into_iter().zip(&came) {
            let caught = || signal_hook::flag::register(signal, Arc::clone(flag)).map(drop);
            guard!("replay.signals-end-in-order", caught()?);
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&released))?;
        }
        Ok(Self { came, released })
    }

    /// From here on, these signals end the process by themselves again, whatever it waits for.
    pub(crate) fn release(self) -> Result<(), FleetError> {
        // Sequentially consistent, as the handler is: it sets the flag and then looks here, so that one of the two is seen.
        self.released.store(true, Ordering::SeqCst);
        self.check()
    }

    fn check(&self) -> Result<(), FleetError> {
        let came = |flag: &Arc<AtomicBool>| flag.load(Ordering::SeqCst);
        match SIGNALS.into_iter().zip(&self.came).find(|(_, flag)| came(flag)) {
            Some((signal, _)) => Err(FleetError::Interrupted { signal: signal as u8 }),
            None => Ok(()),
        }
    }
}

pub(crate) struct Fleet {
    pub(crate) nodes: u16,
    /// Of these, those that compute prompts for the others; 0 if all do the same.
    pub(crate) prefill: u16,
    /// How long these are offered, in milliseconds.
    pub(crate) handover_ms: u32,
    /// The options of each node, which is this program again.
    pub(crate) args: Vec<OsString>,
    pub(crate) drills: Vec<NodeDrill>,
    pub(crate) transfer: NodeTransfer,
    pub(crate) etcd: Vec<String>,
    /// Seconds after which a node counts as hanging.
    pub(crate) timeout_s: u64,
}

/// Figures of the nodes' reports that are summed up.
const SUMS: [&str; 15] = [
    "verified_blocks",
    "corrupt_blocks",
    "remote_hits",
    "remote_hosted",
    "remote_saved_tokens",
    "remote_blocks_read",
    "remote_blocks_stored",
    "remote_misses_stale",
    "remote_hedged",
    "remote_downs",
    "handover_failed",
    "handover_cancelled",
    "handover_recomputed",
    "handover_blocks_wrong",
    "handover_early_parts",
];

/// The same of nodes that do not compute prompts for others: a request is finished where its answer is.
const OF_THOSE_THAT_GO_ON: [&str; 6] =
    ["requests", "finished", "cancelled", "handed_over", "handover_blocks", "handover_bytes"];

#[derive(Debug, Default, Serialize)]
pub(crate) struct FleetReport {
    nodes: u16,
    /// Of these, the first so many compute prompts for the others.
    prefill_nodes: u16,
    killed: Vec<u16>,
    /// Nodes that were stopped, and have gone on.
    stopped: Vec<u16>,
    /// Nodes that were parted from the others for a while.
    parted: Vec<u16>,
    node_transfer: NodeTransfer,
    /// Of the nodes' reports, the sums of [`SUMS`] and [`OF_THOSE_THAT_GO_ON`]; and `prefilled`.
    #[serde(flatten)]
    sums: BTreeMap<&'static str, u64>,
    /// Leases of the nodes that were not killed.
    leases: LeaseReport,
    /// Seconds from the start of the first node to the end of the last.
    wall_s: f64,
    /// The reports of the nodes that were not killed.
    reports: Vec<Value>,
}

struct Running {
    child: Child,
    killed: bool,
    done: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        // One that has ended already is as it should be.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn report_of(folder: &Path, node: usize) -> PathBuf {
    folder.join(format!("{node}.json"))
}

fn leases_of(folder: &Path, node: usize) -> PathBuf {
    folder.join(format!("{node}.leases.json"))
}

fn random_hex() -> io::Result<String> {
    let mut bytes = [0_u8; 32];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

impl Fleet {
    pub(crate) fn check(&self) -> Result<(), FleetError> {
        match self.drills.iter().find(|drill| drill.node >= self.nodes) {
            Some(drill) => Err(FleetError::Drill { node: drill.node, nodes: self.nodes }),
            None => Ok(()),
        }
    }

    pub(crate) fn run(
        &self,
        folder: &Path,
        interrupts: &Interrupts,
    ) -> Result<FleetReport, FleetError> {
        self.check()?;
        let since = Instant::now();
        let key = random_hex().map_err(FleetError::Start)?;
        let walls = self.walls(folder).map_err(FleetError::Start)?;
        let mut nodes = Vec::new();
        for index in 0..usize::from(self.nodes) {
            interrupts.check()?;
            nodes.push(self.start(index as u16, folder, &key).map_err(FleetError::Start)?);
        }
        let mut report = FleetReport {
            nodes: self.nodes,
            prefill_nodes: self.prefill,
            node_transfer: self.transfer,
            ..FleetReport::default()
        };
        self.watch(folder, &mut nodes, &walls, (&mut report, interrupts))?;
        // All have done their part; now each may go, and says first how its leases have ended.
        for node in &mut nodes {
            drop(node.child.stdin.take());
        }
        for (index, node) in nodes.iter_mut().enumerate().filter(|(_, node)| !node.killed) {
            self.wait_for_end(index, node, interrupts)?;
            report.add(folder, index)?;
        }
        report.wall_s = since.elapsed().as_secs_f64();
        Ok(report)
    }

    fn is_parted(&self, node: u16) -> bool {
        let parts = |drill: &NodeDrill| matches!(drill.fault, NodeFault::Part(_));
        self.drills.iter().any(|drill| drill.node == node && parts(drill))
    }

    /// What stands between each node that is to be parted and the others.
    fn walls(&self, folder: &Path) -> io::Result<BTreeMap<u16, Wall>> {
        let parted = (0..self.nodes).filter(|&node| self.is_parted(node));
        let walls = parted.map(|node| {
            let socket = |node: u16| folder.join(format!("{node}.sock"));
            let others = (0..self.nodes).filter(|&other| other != node);
            let out = others
                .map(|other| (NodeConfig::socket_through_wall(folder, node, other), socket(other)));
            let into = (socket(node), NodeConfig::own_socket(folder, node));
            Ok((node, Wall::new(out.chain([into]))?))
        });
        walls.collect()
    }

    fn start(&self, index: u16, folder: &Path, key: &str) -> io::Result<Running> {
        let mut command = Command::new(std::env::current_exe()?);
        family::bind(&mut command).args(&self.args);
        if self.transfer != NodeTransfer::Sockets && std::env::var_os("UCX_MODULES").is_none() {
            // All nodes are on this machine; and a library of this module crashes at the end of a process.
            command.env("UCX_MODULES", "^ib");
        }
        let mut child = command
            .arg("--node")
            .arg(folder)
            .arg("--json")
            .arg(report_of(folder, index.into()))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()?;
        let role = NodeRole {
            key: key.to_owned(),
            index,
            count: self.nodes,
            walled: self.is_parted(index),
            prefill: self.prefill,
            handover_ms: self.handover_ms,
            etcd: self.etcd.clone(),
        };
        if let Some(stdin) = &mut child.stdin {
            writeln!(stdin, "{}", serde_json::to_string(&role)?)?;
        }
        Ok(Running { child, killed: false, done: false })
    }

    /// Waits until all nodes have reported, and does what the drills say meanwhile.
    fn watch(
        &self,
        folder: &Path,
        nodes: &mut [Running],
        walls: &BTreeMap<u16, Wall>,
        (report, interrupts): (&mut FleetReport, &Interrupts),
    ) -> Result<(), FleetError> {
        let mut drills = self.drills.clone();
        let mut to_end: Vec<(NodeDrill, Instant)> = Vec::new();
        let end = |drill: NodeDrill, nodes: &[Running]| {
            if let NodeFault::Stop(_) = drill.fault {
                signal(&nodes[usize::from(drill.node)], Signal::CONT)?;
            }
            walls.get(&drill.node).into_iter().for_each(Wall::open);
            Ok(())
        };
        let (begun, mut all_there) = (Instant::now(), None);
        while nodes.iter().any(|node| !node.done) {
            interrupts.check()?;
            let socket = |node: u16| match self.is_parted(node) {
                true => NodeConfig::own_socket(folder, node),
                false => folder.join(format!("{node}.sock")),
            };
            let sockets = || (0..self.nodes).all(|node| socket(node).exists());
            if all_there.is_none() && sockets() {
                all_there = Some(Instant::now());
            }
            let since = all_there.map_or(Duration::ZERO, |there| there.elapsed());
            let due = |at: Duration| all_there.is_some() && at <= since;
            for drill in drills.extract_if(.., |drill| due(drill.at)) {
                let node = &mut nodes[usize::from(drill.node)];
                if node.done {
                    continue;
                }
                let (told, wait) = match drill.fault {
                    NodeFault::Kill => {
                        node.child.kill().map_err(FleetError::Start)?;
                        (node.killed, node.done) = (true, true);
                        (&mut report.killed, None)
                    }
                    NodeFault::Stop(wait) => {
                        signal(node, Signal::STOP)?;
                        (&mut report.stopped, Some(wait))
                    }
                    NodeFault::Part(wait) => {
                        walls.get(&drill.node).into_iter().for_each(Wall::shut);
                        (&mut report.parted, Some(wait))
                    }
                };
                told.push(drill.node);
                to_end.extend(wait.map(|wait| (drill, Instant::now() + wait)));
            }
            for (drill, _) in to_end.extract_if(.., |(_, until)| *until <= Instant::now()) {
                end(drill, nodes)?;
            }
            for (index, node) in nodes.iter_mut().enumerate().filter(|(_, node)| !node.done) {
                node.done = report_of(folder, index).exists();
                let ended = node.child.try_wait().map_err(FleetError::Start)?;
                if let (false, Some(status)) = (node.done, ended) {
                    // The same signal may have reached the node.
                    interrupts.check()?;
                    return Err(FleetError::Ended { node: index, status });
                }
            }
            if begun.elapsed().as_secs() > self.timeout_s
                && let Some(node) = nodes.iter().position(|node| !node.done)
            {
                return Err(FleetError::Slow { node, waited_s: self.timeout_s });
            }
            std::thread::park_timeout(LOOK);
        }
        to_end.into_iter().try_for_each(|(drill, _)| end(drill, nodes))
    }

    fn wait_for_end(
        &self,
        index: usize,
        node: &mut Running,
        interrupts: &Interrupts,
    ) -> Result<(), FleetError> {
        let begun = Instant::now();
        while node.child.try_wait().map_err(FleetError::Start)?.is_none() {
            interrupts.check()?;
            if begun.elapsed().as_secs() > self.timeout_s {
                return Err(FleetError::Slow { node: index, waited_s: self.timeout_s });
            }
            std::thread::park_timeout(LOOK);
        }
        Ok(())
    }
}

fn signal(node: &Running, signal: Signal) -> Result<(), FleetError> {
    let pid = i32::try_from(node.child.id()).ok().and_then(Pid::from_raw);
    // The process is a child that was not waited for, so its number is its own.
    let sent = pid.map_or(Ok(()), |pid| kill_process(pid, signal));
    sent.map_err(|error| FleetError::Start(error.into()))
}

impl FleetReport {
    fn add(&mut self, folder: &Path, node: usize) -> Result<(), FleetError> {
        let unreadable = |source| FleetError::Report { node, source };
        let read = |path: PathBuf| fs::read(path).map_err(FleetError::Start);
        let report: Value =
            serde_json::from_slice(&read(report_of(folder, node))?).map_err(unreadable)?;
        let leases: LeaseReport =
            serde_json::from_slice(&read(leases_of(folder, node))?).map_err(unreadable)?;
        let of = |name: &str| report.get(name).and_then(Value::as_u64).unwrap_or(0);
        let goes_on = node >= usize::from(self.prefill_nodes);
        // Prompts that other nodes have taken.
        let prefilled = if goes_on { 0 } else { of("handed_over") };
        *self.sums.entry("prefilled").or_default() += prefilled;
        for name in OF_THOSE_THAT_GO_ON {
            *self.sums.entry(name).or_default() += if goes_on { of(name) } else { 0 };
        }
        for name in SUMS {
            *self.sums.entry(name).or_default() += of(name);
        }
        let all = &mut self.leases;
        all.granted += leases.granted;
        all.returned += leases.returned;
        all.cancelled += leases.cancelled;
        all.expired += leases.expired;
        all.open += leases.open;
        self.reports.push(report);
        Ok(())
    }

    pub(crate) fn sum(&self, name: &str) -> u64 {
        self.sums.get(name).copied().unwrap_or(0)
    }

    pub(crate) fn summary(&self) -> String {
        let Self { nodes, killed, stopped, parted, leases, wall_s, .. } = self;
        let (killed, stopped, parted) = (killed.len(), stopped.len(), parted.len());
        let LeaseReport { granted, returned, cancelled, expired, open } = leases;
        let of = |name| self.sum(name);
        format!(
            "{} of {} requests finished on {nodes} nodes in {wall_s:.1} s; {killed} killed, {stopped} stopped, {parted} parted\n\n  \
             remote    {} blocks from other nodes: {} tokens not computed; {} read, {} found in host memory, {} stale, {} hedged, {} downs\n  \
             handover  {} prompts: {} blocks, {} parts early, {} wrong; {} failed, {} cancelled, {} computed where they go on\n  \
             leases    {granted} given: {returned} returned, {cancelled} cancelled, {expired} expired, {open} open\n  \
             verified  {} blocks, {} corrupt\n",
            of("finished"),
            of("requests"),
            of("remote_hits"),
            of("remote_saved_tokens"),
            of("remote_blocks_read"),
            of("remote_hosted"),
            of("remote_misses_stale"),
            of("remote_hedged"),
            of("remote_downs"),
            of("handed_over"),
            of("handover_blocks"),
            of("handover_early_parts"),
            of("handover_blocks_wrong"),
            of("handover_failed"),
            of("handover_cancelled"),
            of("handover_recomputed"),
            of("verified_blocks"),
            of("corrupt_blocks"),
        )
    }

    /// Requests that did not finish, of nodes that were not killed.
    pub(crate) fn unfinished(&self) -> Option<(u64, u64)> {
        let [finished, requests] = ["finished", "requests"].map(|name| self.sum(name));
        (finished + self.sum("cancelled") != requests).then_some((finished, requests))
    }

    pub(crate) fn check_leases(&self) -> Result<(), FleetError> {
        match self.leases.open {
            0 => Ok(()),
            leases => Err(FleetError::Leases { leases }),
        }
    }
}

/// Options of the run that are the fleet's alone, each with its value.
const OF_FLEET: [&str; 8] = [
    "--handover-ms",
    "--prefill-nodes",
    "--decode-nodes",
    "--nodes",
    "--json",
    "--etcd",
    "--drill",
    "--node-timeout",
];

/// The options of each node: those of the run without those of the fleet.
pub(crate) fn args_of_nodes(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut args = args;
    while let Some(arg) = args.next() {
        // A name of a file may be any bytes; that of an option is text.
        let text = arg.to_string_lossy();
        let (name, has_value) = match text.split_once('=') {
            Some((name, _)) => (name, true),
            None => (&*text, false),
        };
        if !OF_FLEET.contains(&name) {
            drop(text);
            kept.push(arg);
        } else if !has_value {
            args.next();
        }
    }
    kept
}

/// A folder for sockets and reports, which goes with the run.
pub(crate) struct NodeFolder(pub(crate) PathBuf);

impl NodeFolder {
    pub(crate) fn new() -> io::Result<Self> {
        let name: String = random_hex()?.chars().take(16).collect();
        let path = std::env::temp_dir().join(format!("kv-replay-{name}"));
        // Others of this host may not connect.
        std::os::unix::fs::DirBuilderExt::mode(&mut fs::DirBuilder::new(), 0o700).create(&path)?;
        Ok(Self(path))
    }
}

impl Drop for NodeFolder {
    fn drop(&mut self) {
        // What is left there is of no use, and of no harm.
        drop(fs::remove_dir_all(&self.0));
    }
}

/// What a node is told first, in a line of its standard input.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct NodeRole {
    pub(crate) key: String,
    pub(crate) index: u16,
    pub(crate) count: u16,
    pub(crate) walled: bool,
    pub(crate) prefill: u16,
    pub(crate) handover_ms: u32,
    pub(crate) etcd: Vec<String>,
}

/// Reads what a node is told first; `None` if that is no such thing.
pub(crate) fn read_role() -> io::Result<Option<NodeRole>> {
    let mut line = String::new();
    io::stdin().read_line(&mut line)?;
    Ok(serde_json::from_str(&line).ok())
}

/// What a node does behind its run: serves the others until it is told to go, and says how its leases have ended.
pub(crate) fn stay(config: &kv_replay::nodes::NodeConfig) -> Result<(), WriteError> {
    // The end of the pipe is the word to go, and so is its failure.
    drop(io::stdin().read_to_end(&mut Vec::new()));
    let path = leases_of(&config.folder, usize::from(config.index));
    write_json(&path, &config.leases())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_the_options_of_the_run_without_those_of_the_fleet() {
        let all = [
            "run",
            "--nodes",
            "3",
            "--seed",
            "7",
            "--json=a",
            "--drill",
            "kill-node=1@2",
            "--drill=stop-node=2@20:300",
            "--node-bytes=1",
        ];
        let kept = args_of_nodes(all.into_iter().map(OsString::from));
        assert_eq!(kept, ["run", "--seed", "7", "--node-bytes=1"]);
    }
}
