//! Processes with a device each, and blocks there whose bytes say whose they are.

use kv_pool::BlockId;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use cuda_driver::{CudaDriver, Device, DeviceBuffer, DeviceSpan, Stream};
use kv_kernels::verify::{BlockSums, block_sum};
use kv_kernels::{KvKernels, KvShape, KvShapeOptions, PagedKv, PagedLayout};
use kv_nixl::{Library, NixlDeviceMemory, NixlDeviceTransfer};
use kv_pool::GroupId;
use kv_pool::clock::SystemClock;
use kv_remote::handover::{GroupSheet, HandoverId, Offer, Part, Sheet, Verdict};
use kv_remote::{Address, Member, Memory, Node, NodeOptions, Peer, Server, ServerOptions};
use kv_tier::{GroupFormat, GroupKind};
use parking_lot::Mutex;

use super::common::{block, far, key, random};
use super::{SECOND, alone};

/// Bytes of a block: 4 layers of keys and values, 16 tokens of 2 KiB.
pub(crate) const BLOCK_BYTES: u64 = 256 << 10;
/// Blocks of a pool, unless a trial says how many.
const BLOCKS: u64 = 40;
/// Time after which a trial counts as hanging.
const LIMIT: Duration = Duration::from_secs(240);
/// Sequences that are offered at a time.
const OFFERS: usize = 8;

const ROLE: &str = "KV_NIXL_GPU_ROLE";

pub(crate) fn open(ordinal: i32) -> Result<Device, String> {
    let driver = CudaDriver::load().map_err(|error| error.to_string())?;
    Device::open(Arc::new(driver), ordinal).map_err(|error| format!("{error}: {error:?}"))
}

/// The last device.
pub(crate) fn last() -> Device {
    let first = open(0).unwrap();
    let count = first.run(|driver| driver.device_get_count()).unwrap();
    if count < 2 { first } else { open(count - 1).unwrap() }
}

/// What a block holds.
pub(crate) fn content(number: u64, place: u64) -> Vec<u8> {
    let mut state = number << 20 | place;
    (0..BLOCK_BYTES / 8).flat_map(|_| random(&mut state).to_le_bytes()).collect()
}

/// Blocks of a sequence, 1 to 20.
pub(crate) fn blocks_of(number: u64) -> u64 {
    let mut state = number;
    1 + random(&mut state) % 20
}

/// What is said of a sequence.
pub(crate) fn sheet(number: u64) -> Sheet {
    let blocks = blocks_of(number);
    let format = GroupFormat { kind: GroupKind::Full, block_tokens: 16, draft_model: false };
    let places = (0..blocks as u32).collect();
    Sheet {
        tokens: blocks * 16 - 5,
        draft_tokens: 0,
        ids: Vec::new(),
        shards: 1,
        readers: 1,
        chunk_places: 1,
        content: 0,
        // A block is handed over whole, so that its sum is that of the block of either side.
        groups: vec![GroupSheet { format, layers: 1, part_bytes: BLOCK_BYTES as u32, places }],
    }
}

/// KV blocks of a device.
pub(crate) struct Pool {
    kernels: KvKernels,
    stream: Stream,
    pages: DeviceBuffer,
    paged: PagedKv,
    ids: DeviceBuffer,
    sums: DeviceBuffer,
    blocks: u64,
}

impl Pool {
    pub(crate) fn new(device: &Device) -> Self {
        Self::with(device, BLOCKS)
    }

    pub(crate) fn with(device: &Device, blocks: u64) -> Self {
        let stream = Stream::new(device).unwrap();
        let options = KvShapeOptions { layers: 4, kv_count: 2, row_bytes: 2048, block_tokens: 16 };
        let shape = KvShape::new(options).unwrap();
        assert_eq!(shape.block_bytes(), BLOCK_BYTES);
        let pages = DeviceBuffer::alloc(device, blocks * BLOCK_BYTES).unwrap();
        let layout = PagedLayout::block_major(&shape);
        let paged = PagedKv::new(&stream, shape, layout, pages.span(), blocks).unwrap();
        let room = |bytes| DeviceBuffer::alloc(device, blocks * bytes).unwrap();
        let kernels = KvKernels::load(device).unwrap();
        Self { kernels, stream, pages, paged, ids: room(4), sums: room(8), blocks }
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(crate) fn keep_busy(&self, time: Duration) {
        self.kernels.keep_busy(&self.stream, time).unwrap();
    }

    pub(crate) fn block(&self, at: u64) -> DeviceSpan {
        self.pages.span().slice(at * BLOCK_BYTES, BLOCK_BYTES).unwrap()
    }

    pub(crate) fn download(&self, at: u64) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK_BYTES as usize];
        self.stream.download(&mut bytes, self.block(at)).unwrap();
        bytes
    }

    /// The sums of the first blocks, once all that is enqueued is done.
    pub(crate) fn sums(&self, count: usize) -> Vec<u64> {
        self.sums_of(&(0..count as u32).filter_map(BlockId::new).collect::<Vec<_>>())
    }

    pub(crate) fn sums_of(&self, ids: &[BlockId]) -> Vec<u64> {
        let count = ids.len() as u64;
        let on_device = self.ids.span().slice(0, count * 4).unwrap();
        let bytes: Vec<u8> = ids.iter().flat_map(|id| (id.index() as u32).to_le_bytes()).collect();
        self.stream.upload(on_device, &bytes).unwrap();
        let sums = self.sums.span().slice(0, count * 8).unwrap();
        let args = BlockSums {
            blocks: (&self.paged).into(),
            ids: on_device.into(),
            count,
            host_ids: Some(ids),
            num_blocks: self.blocks,
            sums,
            report: None,
        };
        self.kernels.sum_blocks(&self.stream, args).unwrap();
        let mut bytes = vec![0; ids.len() * 8];
        self.stream.download(&mut bytes, sums).unwrap();
        bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
    }
}

/// What a process is.
#[derive(Clone)]
pub(crate) enum Role {
    Trial(String),
    /// A node whose device has written so many records.
    Node {
        records: u64,
    },
    /// One that reads all of a node's records for ever.
    Reader {
        of: Address,
    },
    /// One that computes so many sequences and offers them.
    Prefill {
        sequences: u64,
    },
}

impl Role {
    fn say(&self) -> String {
        match self {
            Self::Trial(name) => format!("trial {name}"),
            Self::Node { records } => format!("node {records}"),
            Self::Reader { of } => format!("reader {of}"),
            Self::Prefill { sequences } => format!("prefill {sequences}"),
        }
    }

    pub(crate) fn of_this_process() -> Option<Self> {
        let said = std::env::var(ROLE).ok()?;
        let (kind, rest) = said.split_once(' ').unwrap();
        Some(match kind {
            "trial" => Self::Trial(rest.to_owned()),
            "node" => Self::Node { records: rest.parse().unwrap() },
            "reader" => Self::Reader { of: rest.parse().unwrap() },
            "prefill" => Self::Prefill { sequences: rest.parse().unwrap() },
            _ => panic!("{said}"),
        })
    }

    pub(crate) fn play(self, trials: &[(&str, fn())]) {
        match self {
            Self::Trial(name) => trials.iter().find(|(of, _)| *of == name).unwrap().1(),
            Self::Node { records } => serve(records),
            Self::Reader { of } => read_for_ever(of),
            Self::Prefill { sequences } => prefill(sequences),
        }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(ROLE, self.say());
        command
    }
}

/// Runs a trial by itself.
pub(crate) fn run_alone(name: &str) -> Result<(), String> {
    let ways = std::env::var("KV_NIXL_GPU_TLS");
    let ways = ways.unwrap_or_else(|_| "tcp,cma,cuda_copy,cuda_ipc".to_owned());
    alone::run_alone(&mut Role::Trial(name.to_owned()).command(), name, &ways, LIMIT)
}

/// A node on a device of this process.
fn node(device: &Device, slots: u64) -> (Arc<NixlDeviceMemory>, Arc<Node>, Server) {
    // One host does not pin all slots at a time.
    let bytes = 2 * slots * (BLOCK_BYTES + 64);
    let memory = NixlDeviceMemory::new(&Library::open().unwrap(), device, bytes).unwrap();
    let memory = Arc::new(memory);
    let shared = Arc::clone(&memory) as Arc<dyn Memory>;
    let options = NodeOptions::new("a", BLOCK_BYTES);
    let node = Arc::new(Node::new(&options, shared, Arc::new(SystemClock::new())).unwrap());
    let options = ServerOptions::new("tcp:127.0.0.1:0".parse().unwrap(), key());
    let server = Server::start(Arc::clone(&node), options).unwrap();
    (memory, node, server)
}

fn serve(records: u64) {
    let device = open(0).unwrap();
    let pool = Pool::new(&device);
    let (memory, node, server) = node(&device, records + 40);
    for number in 0..records {
        let bytes = content(number, 0);
        pool.stream().upload(pool.block(0), &bytes).unwrap();
        let room = node.reserve(&[(block(number), BLOCK_BYTES as u32)]).unwrap();
        let to = memory.span(room.spans().next().unwrap()).unwrap();
        pool.stream().copy_on_device(to, pool.block(0)).unwrap();
        let sums = pool.sums(1);
        assert_eq!(sums, [block_sum(&bytes)]);
        room.keep(&sums).unwrap();
    }
    println!("{}", server.address());
    answer(&node, None);
}

fn answer(node: &Node, done: Option<&Mutex<Option<String>>>) {
    for line in std::io::stdin().lines() {
        node.end_overdue();
        match line.unwrap().as_str() {
            "read_bytes" => println!("{}", node.stats().read_bytes),
            "leases" => println!("{}", node.stats().leases.open),
            "done" => loop {
                if let Some(done) = done.unwrap().lock().take() {
                    println!("{done}");
                    break;
                }
                std::thread::park_timeout(Duration::from_millis(1));
            },
            other => panic!("{other}"),
        }
    }
}

fn read_for_ever(of: Address) {
    let member = Member { name: "a".to_owned(), address: of };
    let mut peer = Peer::connect(&member, &key(), far()).unwrap();
    let pool = Pool::new(&last());
    let mut transfer = NixlDeviceTransfer::new(Library::open().unwrap(), pool.stream());
    let wanted: Vec<_> = (0..40).map(block).collect();
    for turn in 0_u64.. {
        let found = peer.find_and_pin(&wanted, 10 * SECOND, far()).unwrap();
        let mut each = |place, span| {
            pool.stream().copy_on_device(pool.block(place as u64), span).unwrap();
        };
        transfer.read_each(&mut peer, &found, far(), &mut each).unwrap();
        if turn == 3 {
            println!("reading");
        }
        peer.end(found.lease.unwrap(), far()).unwrap();
    }
}

/// Computes sequences block by block, and offers each as it comes to be.
fn prefill(sequences: u64) {
    let device = open(0).unwrap();
    let pool = Pool::new(&device);
    let (memory, node, server) = node(&device, 400);
    println!("{}", server.address());
    let done = Mutex::new(None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut open, mut counts) = (Vec::<Offer>::new(), [0; 3]);
            let mut hear = |open: &mut Vec<Offer>| {
                open.retain_mut(|offer| {
                    let at = match offer.verdict() {
                        Verdict::Waiting => return true,
                        Verdict::Taken => 0,
                        Verdict::Cancelled => 1,
                        _ => 2,
                    };
                    counts[at] += 1;
                    false
                });
                counts
            };
            for number in 0..sequences {
                while open.len() >= OFFERS {
                    hear(&mut open);
                    std::thread::park_timeout(Duration::from_micros(20));
                }
                let id = HandoverId(number.into());
                let mut offer = Offer::new(&node, id, sheet(number), 60 * SECOND).unwrap();
                let places: Vec<u32> = (0..blocks_of(number) as u32).collect();
                for some in places.chunks(6) {
                    give(&pool, &memory, &mut offer, number, some);
                }
                open.push(offer);
            }
            while !open.is_empty() {
                hear(&mut open);
                std::thread::park_timeout(Duration::from_micros(20));
            }
            let [taken, cancelled, other] = hear(&mut open);
            *done.lock() = Some(format!("{taken} {cancelled} {other}"));
        });
        answer(&node, Some(&done));
    });
}

/// Computes some blocks of a sequence, and gives them without the host.
fn give(pool: &Pool, memory: &NixlDeviceMemory, offer: &mut Offer, number: u64, places: &[u32]) {
    let part = |&place: &u32| Part { group: GroupId(0), place, layer: 0, shard: 0 };
    let room = offer.reserve(&places.iter().map(part).collect::<Vec<_>>()).unwrap();
    for ((at, span), &place) in (0..).zip(room.spans()).zip(places) {
        pool.stream().upload(pool.block(at), &content(number, place.into())).unwrap();
        pool.stream().copy_on_device(memory.span(span).unwrap(), pool.block(at)).unwrap();
    }
    // Behind the copies, which are done when the sums are known.
    let sums = pool.sums(places.len());
    offer.give_written(room, &sums).unwrap();
}

/// Another process, which goes with its scope.
pub(crate) struct Process {
    child: Child,
    pipes: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
    said: String,
    address: Option<Address>,
}

impl Process {
    /// Starts one, and waits until it says that it is ready.
    pub(crate) fn start(role: &Role) -> Self {
        let command = &mut role.command();
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut said = String::new();
        stdout.read_line(&mut said).unwrap();
        let said = said.trim().to_owned();
        assert!(!said.is_empty(), "{} has ended", role.say());
        let address = said.parse().ok();
        Self { child, pipes: Mutex::new((stdin, stdout)), said, address }
    }

    pub(crate) fn address(&self) -> &Address {
        self.address.as_ref().unwrap_or_else(|| panic!("{} is no address", self.said))
    }

    pub(crate) fn connect(&self) -> Peer {
        let member = Member { name: "a".to_owned(), address: self.address().clone() };
        Peer::connect(&member, &key(), far()).unwrap()
    }

    pub(crate) fn ask(&self, what: &str) -> String {
        let mut pipes = self.pipes.lock();
        writeln!(pipes.0, "{what}").unwrap();
        let mut line = String::new();
        pipes.1.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
