//! Trials and nodes in processes of their own: this program again, told by variables what it is.

pub(crate) mod host_tier;

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use kv_nixl::{Library, NixlMemory};
use kv_pool::clock::SystemClock;
use kv_remote::{
    Address, HostMemory, Member, Memory, Node, NodeOptions, Peer, Server, ServerOptions,
};
use kv_tier::HostShare;
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::alone;
use super::common::{RECORD_BYTES, far, key};

const TRIAL: &str = "KV_NIXL_TRIAL";
const NODE: &str = "KV_NIXL_NODE";
const READER: &str = "KV_NIXL_READER";
/// Time after which a trial counts as hanging.
const LIMIT: Duration = Duration::from_secs(60);

/// Does what the variables say; false if they say nothing.
pub(crate) fn run_as_told(scenarios: &[super::Scenario]) -> bool {
    if let Some(slots) = std::env::var_os(NODE) {
        serve(slots.to_str().unwrap());
        return true;
    }
    if let Ok(address) = std::env::var(READER) {
        let address = address.parse().unwrap();
        super::read_for_ever(&Member { name: "a".to_owned(), address });
        return true;
    }
    let Some(name) = std::env::var_os(TRIAL) else { return false };
    let (_, run, _) = scenarios.iter().find(|(of, ..)| **of == *name).unwrap();
    run();
    true
}

/// Runs a trial by itself, with UCX over `way`.
pub(crate) fn run_alone(name: &str, way: &str) -> Result<(), String> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    // Over TCP alone, reads are emulated, or there are none.
    command.env(TRIAL, name).env("KV_NIXL_EMULATED", if way == "tcp" { "1" } else { "0" });
    alone::run_alone(&mut command, name, way, LIMIT)
}

/// The name of nodes with a host tier.
pub(crate) const HOST_TIER: &str = "host-tier";

fn node_over(
    name: &str,
    record_bytes: u64,
    (memory, host): (Arc<dyn Memory>, Option<Arc<HostShare>>),
) -> Server {
    let clock = Arc::new(SystemClock::new());
    let mut options = NodeOptions::new(name, record_bytes);
    options.host_bytes = host.as_ref().map_or(0, |host| host.bytes());
    options.host_lent_max = Some(u64::MAX);
    let node = Node::new(&options, memory, clock).unwrap();
    host.into_iter().for_each(|host| node.share(host).unwrap());
    let options = ServerOptions::new("tcp:127.0.0.1:0".parse().unwrap(), key());
    Server::start(Arc::new(node), options).unwrap()
}

fn host_memory(slots: u64, record_bytes: u64) -> Arc<HostMemory> {
    let slot_bytes = (64 + record_bytes).next_multiple_of(64);
    Arc::new(HostMemory::new(slots * slot_bytes).unwrap())
}

/// A node's process: says where it listens, and answers questions about its counts until it is told no more.
fn serve(said: &str) {
    let [name, slots, record_bytes] = said.splitn(3, ' ').collect::<Vec<_>>().try_into().unwrap();
    let record_bytes = record_bytes.parse().unwrap();
    let memory = host_memory(slots.parse().unwrap(), record_bytes);
    let library = Library::open().unwrap();
    let mut tier = (name == HOST_TIER).then(host_tier::Tier::new);
    let server = match &tier {
        Some(host_tier::Tier { share, .. }) => {
            let memory = NixlMemory::new(&library, memory).unwrap();
            // Once is enough.
            (0..2).for_each(|_| memory.register_host_tier(share).unwrap());
            node_over(name, record_bytes, (Arc::new(memory), Some(Arc::clone(share))))
        }
        None => {
            let memory = NixlMemory::new(&library, memory).unwrap();
            node_over(name, record_bytes, (Arc::new(memory), None))
        }
    };
    println!("{}", server.address());
    for line in std::io::stdin().lines() {
        server.node().end_overdue();
        let stats = server.node().stats();
        match line.unwrap().as_str() {
            "read_bytes" => println!("{}", stats.read_bytes),
            "leases" => println!("{}", stats.leases.open),
            "hosted" => println!("{}", stats.hosted),
            "evict" => {
                let tier = tier.as_mut().unwrap();
                (200..280).step_by(8).for_each(|first| tier.compute(first));
                println!("done");
            }
            other => panic!("{other}"),
        }
    }
}

/// A node of this process of which NIXL knows the own memory, and nothing of the host tier that it shares.
pub(crate) fn half_registered() -> Server {
    let (tier, record_bytes) = (host_tier::Tier::new(), host_tier::BLOCK_BYTES as u64);
    let memory = NixlMemory::new(&Library::open().unwrap(), host_memory(4, record_bytes)).unwrap();
    node_over(HOST_TIER, record_bytes, (Arc::new(memory), Some(tier.share)))
}

/// A node in another process, which goes with its scope.
pub(crate) struct NodeProcess {
    child: Child,
    pipes: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
    member: Member,
}

impl NodeProcess {
    pub(crate) fn start(name: &str, slots: u64) -> Self {
        Self::start_with(name, slots, RECORD_BYTES)
    }

    /// A node for records of so many bytes.
    pub(crate) fn start_with(name: &str, slots: u64, record_bytes: u64) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(NODE, format!("{name} {slots} {record_bytes}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let address: Address = line.trim().parse().unwrap();
        let member = Member { name: name.to_owned(), address };
        Self { child, pipes: Mutex::new((stdin, stdout)), member }
    }

    pub(crate) fn connect(&self) -> Peer {
        Peer::connect(&self.member, &key(), far()).unwrap()
    }

    /// A count of the node.
    pub(crate) fn ask(&self, count: &str) -> String {
        let mut pipes = self.pipes.lock();
        writeln!(pipes.0, "{count}").unwrap();
        let mut line = String::new();
        pipes.1.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Another process that reads for ever; returned once it does.
    pub(crate) fn reader(&self) -> Child {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(READER, self.member.address.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "reading");
        child
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Stops it, and waits until it has.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        let (_, status) = waitpid(pid, WaitOptions::UNTRACED).unwrap().unwrap();
        assert!(status.stopped(), "{status:?}");
    }

    pub(crate) fn go_on(&self) {
        self.signal(Signal::CONT);
    }
}

impl Drop for NodeProcess {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// A node that says of its memory what it is told to.
pub(crate) struct Liar {
    server: Server,
    memory: Arc<Said>,
}

#[derive(Debug)]
struct Said {
    memory: Arc<HostMemory>,
    said: Mutex<Vec<u8>>,
}

impl Memory for Said {
    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    fn read(&self, address: u64, into: &mut [u8]) -> bool {
        self.memory.read(address, into)
    }

    fn write(&self, address: u64, from: &[u8]) -> bool {
        self.memory.write(address, from)
    }

    fn descriptor(&self) -> Option<Vec<u8>> {
        Some(self.said.lock().clone())
    }
}

impl Liar {
    pub(crate) fn start(slots: u64) -> Self {
        let memory =
            Arc::new(Said { memory: host_memory(slots, RECORD_BYTES), said: Mutex::default() });
        let server =
            node_over("liar", RECORD_BYTES, (Arc::clone(&memory) as Arc<dyn Memory>, None));
        Self { server, memory }
    }

    pub(crate) fn say(&self, descriptor: Vec<u8>) {
        *self.memory.said.lock() = descriptor;
    }

    pub(crate) fn connect(&self) -> Peer {
        let member = Member { name: "liar".to_owned(), address: self.server.address().clone() };
        Peer::connect(&member, &key(), far()).unwrap()
    }
}
