//! Nodes of a run: processes on this machine that keep blocks for each other, as a tier below the host memory of each.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cuda_driver::Device;
use kv_plane::KvCache;
use kv_plane::manager::{CacheEvent, EventReader};
use kv_pool::clock::SystemClock;
use kv_remote::{
    Address, HostMemory, Key, Member, Memory, Miss, Node, NodeError, NodeOptions, RemoteOptions,
    RemoteTier, RemoteWatch, Server, ServerOptions, SocketTransfer, Transfer,
};
use serde::{Deserialize, Serialize};

use crate::command_line::by_names;
use crate::report::{LatencyReport, grouped};

/// How long a reader of a node may take. Short, so that a process that was stopped wakes behind it.
pub const LEASE: Duration = Duration::from_millis(200);

/// How long a node that did not answer is left alone: shorter than the shortest runs.
const RETRY_AFTER: Duration = Duration::from_millis(200);

pub const NODES_MAX: u16 = 64;

/// How long a node waits for the others to be there.
const START_MAX: Duration = Duration::from_secs(60);

/// How long a node that has died stays listed by etcd, and how often nodes read the list.
#[cfg(feature = "etcd")]
const ETCD_LEASE: Duration = Duration::from_secs(2);
#[cfg(feature = "etcd")]
const ETCD_EVERY: Duration = Duration::from_millis(100);

/// How often a node reads what has happened in its host memory.
const EVENTS_EVERY: Duration = Duration::from_millis(1);

/// The thread that tells a node what comes to the host tier of its cache and goes.
#[derive(Debug)]
struct Hosts {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Hosts {
    fn follow(mut events: EventReader, node: Arc<Node>) -> std::io::Result<Self> {
        let ends = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&ends);
        let thread = std::thread::Builder::new().name("node-events".to_owned());
        let thread = thread.spawn(move || {
            let mut read = Vec::new();
            while !ended.load(Ordering::Relaxed) {
                read.clear();
                // What is lost, the next read makes up for.
                if events.read(&mut read).is_ok_and(|count| count == 0) {
                    std::thread::park_timeout(EVENTS_EVERY);
                }
                node.note_changes(read.iter().filter_map(CacheEvent::in_host));
            }
        })?;
        Ok(Self { ends, thread: Some(thread) })
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It ends within one read.
            drop(thread.join());
        }
    }
}

/// Which node of a run a process is.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    pub index: u16,
    pub nodes: u16,
    /// The folder of all nodes' sockets.
    pub folder: PathBuf,
    pub key: Key,
    /// Bytes that this node keeps for all.
    pub bytes: u64,
    pub transfer: NodeTransfer,
    /// Whether this node's connections, in both directions, go through the process that has started it.
    pub walled: bool,
    /// Of all nodes, the first so many compute prompts for the others; 0 if all do the same.
    pub prefill: u16,
    /// How long a prompt is offered to the node that goes on with it, and waited for there.
    pub handover: Duration,
    /// URLs of the etcd by which nodes find each other. Without any, all nodes are members from the beginning to the end.
    pub etcd: Vec<String>,
    /// The server and the tier, once the run has begun.
    served: Arc<OnceLock<Served>>,
    /// What tells the others of this node's host memory.
    hosts: Arc<OnceLock<Hosts>>,
}

#[derive(Debug)]
struct Served {
    server: Server,
    memory: NodeMemory,
    watch: Option<RemoteWatch>,
    #[cfg(feature = "etcd")]
    membership: Option<kv_remote::etcd::Membership>,
}

/// How the bytes of other nodes' blocks come.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeTransfer {
    /// Over the connections.
    #[default]
    Sockets,
    /// By NIXL, from the other node's memory.
    Nixl,
    /// By NIXL, from the memory of the other node's device to that of this one's: prompts that are handed over.
    NixlDevice,
}

#[derive(Clone, Debug)]
pub(crate) enum NodeMemory {
    Host(Arc<dyn Memory>),
    #[cfg(feature = "nixl")]
    Nixl(Arc<kv_nixl::NixlMemory>),
    #[cfg(feature = "nixl")]
    Device(Arc<kv_nixl::NixlDeviceMemory>),
}

impl NodeMemory {
    fn memory(&self) -> Arc<dyn Memory> {
        match self {
            Self::Host(memory) => Arc::clone(memory),
            #[cfg(feature = "nixl")]
            Self::Nixl(memory) => Arc::clone(memory) as Arc<dyn Memory>,
            #[cfg(feature = "nixl")]
            Self::Device(memory) => Arc::clone(memory) as Arc<dyn Memory>,
        }
    }
}

impl NodeTransfer {
    const NAMES: [(Self, &'static str); 3] =
        [(Self::Sockets, "sockets"), (Self::Nixl, "nixl"), (Self::NixlDevice, "nixl-device")];

    pub fn check(self) -> Result<(), NodeStartError> {
        match self {
            Self::Sockets => Ok(()),
            #[cfg(feature = "nixl")]
            Self::Nixl | Self::NixlDevice => Ok(kv_nixl::Library::open().map(drop)?),
            #[cfg(not(feature = "nixl"))]
            Self::Nixl | Self::NixlDevice => Err(NodeStartError::WithoutNixl),
        }
    }

    /// A node's memory of so many bytes; on this device, if it is read there.
    #[cfg_attr(not(feature = "nixl"), expect(unused_variables))]
    fn memory(self, bytes: u64, device: Option<&Device>) -> Result<NodeMemory, NodeStartError> {
        match self {
            Self::Sockets => Ok(NodeMemory::Host(Arc::new(HostMemory::new(bytes)?))),
            #[cfg(feature = "nixl")]
            Self::Nixl => {
                let memory = Arc::new(HostMemory::new(bytes)?);
                let memory = kv_nixl::NixlMemory::new(&kv_nixl::Library::open()?, memory)?;
                Ok(NodeMemory::Nixl(Arc::new(memory)))
            }
            #[cfg(feature = "nixl")]
            Self::NixlDevice => {
                let device = device.ok_or(NodeStartError::NoDevice)?;
                let library = kv_nixl::Library::open()?;
                let memory = kv_nixl::NixlDeviceMemory::new(&library, device, bytes)?;
                Ok(NodeMemory::Device(Arc::new(memory)))
            }
            #[cfg(not(feature = "nixl"))]
            Self::Nixl | Self::NixlDevice => Err(NodeStartError::WithoutNixl),
        }
    }

    pub(crate) fn open(self) -> Result<Box<dyn Transfer>, NodeStartError> {
        match self {
            Self::Sockets => Ok(Box::new(SocketTransfer)),
            #[cfg(feature = "nixl")]
            Self::Nixl => Ok(Box::new(kv_nixl::NixlTransfer::new(kv_nixl::Library::open()?))),
            Self::NixlDevice => Err(NodeStartError::NoDevice),
            #[cfg(not(feature = "nixl"))]
            Self::Nixl => Err(NodeStartError::WithoutNixl),
        }
    }

    /// Has a tier read its members so.
    fn set(self, options: &mut RemoteOptions) -> Result<(), NodeStartError> {
        match self {
            Self::Sockets => Ok(()),
            #[cfg(feature = "nixl")]
            Self::Nixl => {
                let library = kv_nixl::Library::open()?;
                options
                    .set_transfer(move |_| Box::new(kv_nixl::NixlTransfer::new(library.clone())));
                Ok(())
            }
            Self::NixlDevice => Err(NodeStartError::NoDevice),
            #[cfg(not(feature = "nixl"))]
            Self::Nixl => {
                let _ = options;
                Err(NodeStartError::WithoutNixl)
            }
        }
    }
}

by_names!(NodeTransfer, "transfer");

#[derive(Debug, thiserror::Error)]
pub enum NodeStartError {
    #[error("the node cannot be made")]
    Node(#[from] NodeError),
    #[error("the node cannot be served")]
    Serve(#[from] std::io::Error),
    #[error("node {node} is not there after {waited_s} s")]
    Missing { node: u16, waited_s: u64 },
    #[cfg(feature = "nixl")]
    #[error("blocks of other nodes cannot be read by NIXL")]
    Nixl(#[from] kv_nixl::NixlError),
    #[error(
        "nixl-device moves prompts from GPU to GPU: it needs --prefill-nodes, and --device cuda:N"
    )]
    NoDevice,
    #[error("this program was built without the feature nixl")]
    WithoutNixl,
    #[cfg(feature = "etcd")]
    #[error("etcd does not list node {node} after {waited_s} s")]
    Unlisted { node: u16, waited_s: u64, source: Option<Box<kv_remote::etcd::EtcdError>> },
    #[error("this program was built without the feature etcd")]
    WithoutEtcd,
    #[error("the node of this configuration runs already")]
    Again,
}

impl NodeConfig {
    pub fn new(index: u16, nodes: u16, folder: &Path, key: Key, bytes: u64) -> Self {
        Self {
            index,
            nodes,
            folder: folder.to_owned(),
            key,
            bytes,
            transfer: NodeTransfer::Sockets,
            walled: false,
            prefill: 0,
            handover: Duration::from_secs(10),
            etcd: Vec::new(),
            served: Arc::default(),
            hosts: Arc::default(),
        }
    }

    fn name(index: u16) -> String {
        format!("node-{index}")
    }

    fn socket(&self, index: u16) -> PathBuf {
        self.folder.join(format!("{index}.sock"))
    }

    /// Where a walled node listens.
    pub fn own_socket(folder: &Path, index: u16) -> PathBuf {
        folder.join(format!("{index}.own.sock"))
    }

    /// Where a walled node finds another one.
    pub fn socket_through_wall(folder: &Path, index: u16, other: u16) -> PathBuf {
        folder.join(format!("{index}-{other}.sock"))
    }

    pub(crate) fn member(&self, index: u16) -> Member {
        let path = match self.walled && index != self.index {
            true => Self::socket_through_wall(&self.folder, self.index, index),
            false => self.socket(index),
        };
        Member { name: Self::name(index), address: Address::Unix(path) }
    }

    pub fn is_prefill(&self) -> bool {
        self.index < self.prefill
    }

    /// Which of how many requests of the trace are this node's: of those that compute prompts, and of those that go on, each
    /// has one in turn.
    pub fn turn(&self) -> (usize, usize) {
        let (index, prefill, nodes) = (self.index, self.prefill, self.nodes);
        let (index, of) = match (prefill, self.is_prefill()) {
            (0, _) => (index, nodes),
            (_, true) => (index, prefill),
            (_, false) => (index - prefill, nodes.saturating_sub(prefill)),
        };
        (index.into(), usize::from(of).max(1))
    }

    /// Serves records of so many bytes at most under leases of so long at most, and waits for the other nodes.
    fn listen(
        &self,
        (record_bytes, bytes, host_bytes): (u64, u64, u64),
        lease_max: Option<Duration>,
        device: Option<&Device>,
    ) -> Result<(Server, NodeMemory), NodeStartError> {
        let mut options = NodeOptions::new(&Self::name(self.index), record_bytes);
        options.host_bytes = host_bytes;
        if let Some(lease_max) = lease_max {
            options.lease_max = lease_max;
        }
        let memory = self.transfer.memory(bytes, device)?;
        let node = Node::new(&options, memory.memory(), Arc::new(SystemClock::new()))?;
        let address = Address::Unix(match self.walled {
            true => Self::own_socket(&self.folder, self.index),
            false => self.socket(self.index),
        });
        let server = Server::start(Arc::new(node), ServerOptions::new(address, self.key.clone()))?;
        let since = Instant::now();
        for node in 0..self.nodes {
            while !self.socket(node).exists() {
                if since.elapsed() > START_MAX {
                    return Err(NodeStartError::Missing { node, waited_s: START_MAX.as_secs() });
                }
                std::thread::park_timeout(Duration::from_millis(1));
            }
        }
        Ok((server, memory))
    }

    /// Serves a node for sequences that are handed over, over memory of `device` if that is what is read.
    pub(crate) fn serve(
        &self,
        record_bytes: u64,
        lease_max: Duration,
        device: &Device,
    ) -> Result<(Arc<Node>, NodeMemory), NodeStartError> {
        // Nobody keeps anything at a node that goes on with prompts.
        let bytes = if self.is_prefill() { self.bytes } else { 2 * record_bytes };
        let sizes = (record_bytes, bytes, 0);
        let (server, memory) = self.listen(sizes, Some(lease_max), Some(device))?;
        let node = Arc::clone(server.node());
        let served = Served {
            server,
            memory: memory.clone(),
            watch: None,
            #[cfg(feature = "etcd")]
            membership: None,
        };
        self.served.set(served).map_err(|_| NodeStartError::Again)?;
        Ok((node, memory))
    }

    /// Serves records of so many bytes at most, and later a host tier of so many bytes at most; waits for the other nodes, and returns
    /// the tier over all.
    pub(crate) fn start(
        &self,
        record_bytes: u64,
        host_bytes: u64,
    ) -> Result<RemoteTier, NodeStartError> {
        let (server, memory) = self.listen((record_bytes, self.bytes, host_bytes), None, None)?;
        let members = (0..self.nodes).map(|index| self.member(index));
        let members = if self.etcd.is_empty() { members.collect() } else { Vec::new() };
        let mut options = RemoteOptions::new(members, self.key.clone());
        options.lease = LEASE;
        options.own = Some(Self::name(self.index));
        options.retry_after = RETRY_AFTER;
        self.transfer.set(&mut options)?;
        let tier = RemoteTier::new(options)?;
        let served = Served {
            server,
            memory,
            watch: Some(tier.watch()),
            #[cfg(feature = "etcd")]
            membership: self.join(tier.watch())?,
        };
        #[cfg(not(feature = "etcd"))]
        if !self.etcd.is_empty() {
            return Err(NodeStartError::WithoutEtcd);
        }
        self.served.set(served).map_err(|_| NodeStartError::Again)?;
        Ok(tier)
    }

    /// Serves the host tier of a cache, too, and tells the other nodes what comes there and goes, if this node keeps blocks.
    pub(crate) fn share(&self, cache: &mut KvCache) -> Result<(), NodeStartError> {
        let Some(Served { server, memory, watch: Some(_), .. }) = self.served.get() else {
            return Ok(());
        };
        let Some(events) = cache.manager().events() else { return Ok(()) };
        let host = cache.share_host();
        server.node().share(Arc::clone(&host))?;
        match memory {
            #[cfg(feature = "nixl")]
            NodeMemory::Nixl(memory) => memory.register_host_tier(&host)?,
            #[cfg(feature = "nixl")]
            NodeMemory::Device(_) => {}
            NodeMemory::Host(_) => {}
        }
        let hosts = Hosts::follow(events, Arc::clone(server.node()))?;
        self.hosts.set(hosts).map_err(|_| NodeStartError::Again)
    }

    /// Has the tier follow the members that etcd lists, and waits until all are there or had the time to be.
    #[cfg(feature = "etcd")]
    fn join(
        &self,
        watch: RemoteWatch,
    ) -> Result<Option<kv_remote::etcd::Membership>, NodeStartError> {
        if self.etcd.is_empty() {
            return Ok(None);
        }
        // The folder is this run's alone, so that its name is, too.
        let run = self.folder.file_name().unwrap_or_default().to_string_lossy();
        let mut options =
            kv_remote::etcd::EtcdOptions::new(self.etcd.clone(), &format!("/kv-replay/{run}/"));
        (options.lease, options.every) = (ETCD_LEASE, ETCD_EVERY);
        // Walls are not for what others are told: each finds the node where all do.
        let own = Member {
            name: Self::name(self.index),
            address: Address::Unix(self.socket(self.index)),
        };
        let takes = watch.clone();
        let take = move |members: &[Member]| takes.set_members(members).is_ok();
        let membership = kv_remote::etcd::Membership::join(options, own, take)?;
        let since = Instant::now();
        while watch.members().len() < usize::from(self.nodes) {
            let is_listed = membership.stats().is_listed;
            // One that has died before it was listed is not waited for.
            if is_listed && since.elapsed() > 3 * ETCD_LEASE {
                break;
            }
            if !is_listed && since.elapsed() > START_MAX {
                let source = membership.stats().last_error.map(Box::new);
                let waited_s = START_MAX.as_secs();
                return Err(NodeStartError::Unlisted { node: self.index, waited_s, source });
            }
            std::thread::park_timeout(Duration::from_millis(1));
        }
        Ok(Some(membership))
    }

    /// What came of the tier; none if it was not started.
    pub(crate) fn report(&self, block_tokens: u32) -> Option<NodeReport> {
        let served = self.served.get()?;
        let stats = served.watch.as_ref()?.stats();
        let own = Self::name(self.index);
        let from_others = stats.loaded.iter().filter(|(name, _)| **name != own);
        let remote_hits = from_others.map(|(_, count)| *count).sum();
        let misses = Miss::ALL.into_iter().map(|miss| (miss.name(), stats.missed_as(miss)));
        #[cfg(feature = "etcd")]
        let member_changes = served.membership.as_ref().map(|of| of.stats().changes);
        #[cfg(not(feature = "etcd"))]
        let member_changes = None;
        Some(NodeReport {
            member_changes,
            remote_hits,
            remote_hosted: served.server.node().stats().hosted,
            remote_saved_tokens: remote_hits * u64::from(block_tokens),
            remote_blocks_read: stats.read,
            remote_blocks_stored: stats.stored,
            remote_misses_stale: stats.missed_as(Miss::Stale) + stats.missed_as(Miss::Torn),
            remote_misses: misses.filter(|(_, count)| *count > 0).collect(),
            remote_hedged: stats.hedged,
            remote_downs: stats.downs,
        })
    }

    /// Leases of this node's blocks, once all that are open have ended or a time has passed that is much longer than a lease.
    pub fn leases(&self) -> LeaseReport {
        let Some(Served { server, .. }) = self.served.get() else { return LeaseReport::default() };
        let since = Instant::now();
        loop {
            let leases = server.node().stats().leases;
            if leases.open == 0 || since.elapsed() > 50 * LEASE {
                return LeaseReport {
                    granted: leases.granted,
                    returned: leases.returned,
                    cancelled: leases.cancelled,
                    expired: leases.expired,
                    open: leases.open,
                };
            }
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }
}

impl PartialEq for NodeConfig {
    fn eq(&self, other: &Self) -> bool {
        let of = |config: &Self| (config.index, config.nodes, config.folder.clone(), config.bytes);
        of(self) == of(other)
    }
}

impl Eq for NodeConfig {}

/// What came of the blocks that nodes keep for each other.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct NodeReport {
    /// Lists of members by etcd that were another one than before; none without etcd.
    pub member_changes: Option<u64>,
    /// Blocks that came from another node and were right.
    pub remote_hits: u64,
    /// Blocks that other nodes have found in this node's host memory, used or not.
    pub remote_hosted: u64,
    /// Tokens of the blocks that came from another node, which were not computed here.
    pub remote_saved_tokens: u64,
    /// Blocks whose bytes were read from any node, used or not.
    pub remote_blocks_read: u64,
    /// Blocks that at least one node keeps for this one.
    pub remote_blocks_stored: u64,
    /// Blocks that were written anew before they were read, or came torn.
    pub remote_misses_stale: u64,
    /// Nodes that did not give a block, by reason.
    pub remote_misses: BTreeMap<&'static str, u64>,
    /// Loads for which a second node was asked while the first had not answered.
    pub remote_hedged: u64,
    /// Calls after which a node was down.
    pub remote_downs: u64,
}

impl NodeReport {
    pub(crate) fn line(&self) -> String {
        format!(
            "{} blocks from other nodes: {} tokens not computed; {} read, {} stored, {} stale",
            grouped(self.remote_hits),
            grouped(self.remote_saved_tokens),
            grouped(self.remote_blocks_read),
            grouped(self.remote_blocks_stored),
            grouped(self.remote_misses_stale),
        )
    }
}

/// What came of the sequences that nodes hand over to others.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HandoverReport {
    /// Prompts that came from another node, or that another node has taken.
    pub handed_over: u64,
    /// Their blocks, the partly full ones included; of a node that computes prompts, those that were offered.
    pub handover_blocks: u64,
    /// Bytes of these blocks.
    pub handover_bytes: u64,
    /// Prompts that nobody has taken in time, or that there was no room for.
    pub handover_failed: u64,
    /// Prompts that were not wanted any more; of a node that goes on with them, whose requests were cancelled, or that were cached
    /// there, before they had come.
    pub handover_cancelled: u64,
    /// Prompts that did not come, and were computed where they go on.
    pub handover_recomputed: u64,
    /// Blocks that came and were not right by their sums, and those behind them: they were computed where they go on.
    pub handover_blocks_wrong: u64,
    /// Layers of blocks (by `nixl-device`, blocks) that were in place before the last of their prompt had come, of a node that goes
    /// on with them.
    pub handover_early_parts: u64,
    /// Milliseconds from when a request was known to when its prompt had come, of a node that goes on with them.
    pub handover_ms: Option<LatencyReport>,
}

impl HandoverReport {
    pub(crate) fn line(&self) -> String {
        format!(
            "{} prompts handed over: {} blocks, {} bytes, {} parts early, {} wrong; {} failed, {} cancelled, {} computed where they go on",
            grouped(self.handed_over),
            grouped(self.handover_blocks),
            grouped(self.handover_bytes),
            grouped(self.handover_early_parts),
            grouped(self.handover_blocks_wrong),
            grouped(self.handover_failed),
            grouped(self.handover_cancelled),
            grouped(self.handover_recomputed),
        )
    }
}

/// Leases of one node's blocks.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct LeaseReport {
    pub granted: u64,
    /// Ended by their readers.
    pub returned: u64,
    /// Ended because their reader was gone.
    pub cancelled: u64,
    /// Ended by time.
    pub expired: u64,
    pub open: u64,
}
