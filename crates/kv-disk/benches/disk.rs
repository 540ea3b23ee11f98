//! Rates of a tier of files: writes and reads of blocks at a depth, latency at half load, and the time to open.
//!
//! `cargo bench -p kv-disk --bench disk -- FOLDER [BYTES] [DEPTH] [FILES] [SECONDS]`; `open FOLDER SLOTS` measures the
//! opening of a sparse file with a full table.
//!
//! Beside the tier, the same file is read and written by the same calls without one: what is between the two is the cost of all that
//! the tier does, its checksums among it. Their time alone is measured in memory.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program that reports here")]

use std::collections::VecDeque;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_driver::{Device, HostAllocFlags, PinnedBuffer};
use cuda_sim::{SimConfig, SimDriver};
use kv_disk::io::{Act, FileIo, Io, RingFile};
use kv_disk::parts::{ENTRIES_A_PAGE, Entry, Geometry, Heading};
use kv_disk::{DiskOptions, DiskTier, SlotRules};
use kv_manager::{Settled, TierTransfers, WorkerId};
use kv_pool::{BlockHash, BlockId, GroupId, Tier};
use kv_tier::{
    BlockSink, BlockSource, Direction, HostBlocks, HostPiece, LowerTier, TicketId, Transfer,
    header_bytes,
};

/// Pinned host memory, as a cache has. With `KV_DISK_BENCH_COPIES` set, no block is lent.
#[derive(Debug)]
struct Host {
    slab: Arc<PinnedBuffer>,
    first: u64,
    block_bytes: usize,
    lends: bool,
}

impl Host {
    fn new(blocks: u32, block_bytes: usize) -> Self {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        let device = Device::open(Arc::new(sim), 0).unwrap();
        let bytes = u64::from(blocks) * block_bytes as u64;
        let slab = PinnedBuffer::alloc(&device, bytes + 4096, HostAllocFlags::CACHED).unwrap();
        let first = slab.host_address().next_multiple_of(4096) - slab.host_address();
        let mut state = 1;
        let words: Vec<u8> =
            (0..bytes / 8).flat_map(|_| random(&mut state).to_le_bytes()).collect();
        slab.write_shared(first, &words).unwrap();
        let lends = std::env::var_os("KV_DISK_BENCH_COPIES").is_none();
        Self { slab: Arc::new(slab), first, block_bytes, lends }
    }

    fn at(&self, block: BlockId, offset: usize) -> u64 {
        self.first + (block.index() * self.block_bytes + offset) as u64
    }
}

impl HostBlocks for Host {
    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn read(&self, block: BlockId, offset: usize, into: &mut [u8]) -> bool {
        self.slab.read_at(self.at(block, offset), into).is_ok()
    }

    fn write(&self, block: BlockId, offset: usize, from: &[u8]) -> bool {
        self.slab.write_shared(self.at(block, offset), from).is_ok()
    }

    fn pieces(&self, block: BlockId) -> Vec<HostPiece> {
        let (offset, bytes) = (self.at(block, 0), self.block_bytes);
        let piece = HostPiece { memory: self.slab.clone(), offset, bytes };
        if self.lends { vec![piece] } else { Vec::new() }
    }
}

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

fn name(number: u64) -> BlockHash {
    let mut state = number;
    BlockHash::from_u128(u128::from(random(&mut state)) << 64 | u128::from(random(&mut state)))
}

/// User and system time of this process.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat[stat.rfind(')').unwrap()..].split_whitespace().collect();
    let ticks: u64 = fields[12].parse::<u64>().unwrap() + fields[13].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

struct Bench {
    transfers: TierTransfers,
    host: Arc<dyn HostBlocks>,
    watch: kv_disk::DiskWatch,
    tickets: u64,
    open: VecDeque<(TicketId, BlockId, Instant)>,
    spare: Vec<BlockId>,
    settled: Vec<Settled>,
    wrong: u64,
}

impl Bench {
    fn new(folders: Vec<PathBuf>, bytes: u64, block_bytes: usize, depth: u32) -> Self {
        let record_bytes = (header_bytes(1) + block_bytes) as u64;
        let files = folders.len() as u32;
        let mut options = DiskOptions::new("", bytes, record_bytes, b"bench");
        options.folders = folders;
        options.rules.mismatch = kv_disk::Mismatch::Wipe;
        options.rules.keep = kv_disk::Keep::Nothing;
        let each = depth.div_ceil(files);
        options.rules = SlotRules { read_depth: each, write_depth: each, ..options.rules };
        let tier = DiskTier::open(&options).unwrap();
        let watch = tier.watch();
        let count = depth * 5;
        let host: Arc<dyn HostBlocks> = Arc::new(Host::new(count, block_bytes));
        let transfers = TierTransfers::new(vec![Box::new(tier)], 1);
        let spare = (0..count).filter_map(BlockId::new).collect();
        let (open, settled) = (VecDeque::new(), Vec::new());
        Self { transfers, host, watch, tickets: 0, open, spare, settled, wrong: 0 }
    }

    fn begin(&mut self, direction: Direction, number: u64, from: Instant) {
        let Some(block) = self.spare.pop() else { return };
        self.tickets += 1;
        let ticket = TicketId(self.tickets);
        let transfer = Transfer {
            ticket,
            tier: Tier::Third,
            group: GroupId(0),
            direction,
            blocks: vec![(name(number), block)],
        };
        self.open.push_back((ticket, block, from));
        self.transfers.begin(&transfer, &self.host).unwrap();
    }

    /// Takes in what has ended; how long each took.
    fn poll(&mut self, took: &mut Vec<Duration>) {
        self.transfers.poll(WorkerId(0), &mut self.settled, &mut Vec::new());
        for Settled { ticket, wrong, .. } in self.settled.drain(..) {
            let at = self.open.iter().position(|(open, ..)| *open == ticket).unwrap();
            let (_, block, from) = self.open.remove(at).unwrap();
            self.spare.push(block);
            took.push(from.elapsed());
            self.wrong += wrong.len() as u64;
        }
    }

    /// Keeps so many transfers open for a while; bytes a second, and CPU seconds a GB.
    fn saturate(
        &mut self,
        direction: Direction,
        depth: usize,
        slots: u64,
        time: Duration,
    ) -> (f64, f64) {
        let (began, used, mut took, mut number) = (Instant::now(), cpu(), Vec::new(), 0);
        let mut state = 7;
        while began.elapsed() < time {
            while self.open.len() < depth {
                number += 1;
                let of = match direction {
                    Direction::Store => number,
                    Direction::Load => random(&mut state) % slots,
                };
                self.begin(direction, of % slots, Instant::now());
            }
            let before = took.len();
            self.poll(&mut took);
            if took.len() == before {
                std::thread::sleep(Duration::from_micros(30));
            }
        }
        let elapsed = began.elapsed().as_secs_f64();
        let bytes = took.len() as f64 * self.host.block_bytes() as f64;
        let cpu = (cpu() - used).as_secs_f64();
        while !self.open.is_empty() {
            self.poll(&mut took);
            std::thread::sleep(Duration::from_micros(30));
        }
        (bytes / elapsed, cpu / (bytes / 1e9))
    }

    /// Begins loads at a fixed rate; the 50th and the 99th percentile of their times.
    fn paced(&mut self, bytes_per_second: f64, slots: u64, time: Duration) -> [Duration; 2] {
        let gap = Duration::from_secs_f64(self.host.block_bytes() as f64 / bytes_per_second);
        let (began, mut took, mut due, mut state) = (Instant::now(), Vec::new(), Duration::ZERO, 9);
        while began.elapsed() < time {
            while due <= began.elapsed() && !self.spare.is_empty() {
                // From when it was due, so that a stall counts for all that it delays.
                self.begin(Direction::Load, random(&mut state) % slots, began + due);
                due += gap;
            }
            self.poll(&mut took);
            std::thread::sleep(Duration::from_micros(20));
        }
        while !self.open.is_empty() {
            self.poll(&mut took);
        }
        took.sort_unstable();
        [took.len() / 2, took.len() * 99 / 100].map(|at| took.get(at).copied().unwrap_or_default())
    }
}

/// The same blocks at the same places, read or written without a tier, by a ring for each file; bytes a second. What
/// is in the files is of no use behind it.
fn ring_alone(folder: &Path, files: u64, depth: u32, block: u64, act: Act, time: Duration) -> f64 {
    let slot_bytes = Geometry::slot_bytes_for(block + header_bytes(1) as u64);
    let each = depth.div_ceil(files as u32);
    let run = |at: u64| {
        let path = folder.join(format!("kv-disk-{at:03}.slots"));
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        let file = options.open(path).unwrap();
        let slots = file.metadata().unwrap().len() / slot_bytes;
        let mut io = RingFile::new(file, each).unwrap();
        let mut buffers = io.buffers(each as usize, slot_bytes as usize);
        let (mut state, mut ended, mut moved) = (at + 1, Vec::new(), 0);
        let began = Instant::now();
        while began.elapsed() < time || io.open() > 0 {
            while began.elapsed() < time
                && let Some(buffer) = buffers.pop()
            {
                let offset = random(&mut state) % slots * slot_bytes;
                let (bytes, buffer) = (slot_bytes as usize, Some(buffer));
                io.begin(Io { token: 0, act, offset, bytes, buffer, body: None });
            }
            io.ended(Duration::from_secs(1), &mut ended);
            for one in ended.drain(..) {
                assert_eq!(one.result.unwrap() as u64, slot_bytes);
                moved += block;
                buffers.extend(one.io.buffer);
            }
        }
        moved as f64 / began.elapsed().as_secs_f64()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..files).map(|at| scope.spawn(move || run(at))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    })
}

/// A tier that asks for the checksums of what it is to store, and stores nothing.
#[derive(Debug)]
struct Sums;

impl LowerTier for Sums {
    fn store(&mut self, blocks: Vec<BlockSource>) {
        for block in blocks {
            std::hint::black_box(block.header().unwrap());
        }
    }
    fn load(&mut self, _: Vec<BlockSink>) {}
    fn forget(&mut self, _: &[(GroupId, BlockHash)]) {}
    fn clear(&mut self) {}
    fn poll(&mut self, _: &mut Vec<(GroupId, BlockHash)>) {}
}

/// Bytes a second that one core sums, of blocks that no cache has.
fn sums_alone(block_bytes: usize) -> f64 {
    let count = (256 << 20) / block_bytes as u32;
    let host: Arc<dyn HostBlocks> = Arc::new(Host::new(count, block_bytes));
    let mut transfers = TierTransfers::new(vec![Box::new(Sums)], 1);
    let mut rates: Vec<f64> = Vec::new();
    for round in 1..=5 {
        let blocks = (0..count).map(|at| (name(at.into()), BlockId::new(at).unwrap())).collect();
        let (ticket, tier, group) = (TicketId(round), Tier::Third, GroupId(0));
        let transfer = Transfer { ticket, tier, group, direction: Direction::Store, blocks };
        let began = Instant::now();
        transfers.begin(&transfer, &host).unwrap();
        rates.push(count as f64 * block_bytes as f64 / began.elapsed().as_secs_f64());
    }
    rates.into_iter().fold(0.0, f64::max)
}

fn open_time(folder: &Path, slots: u64) {
    let slot_bytes = Geometry::slot_bytes_for(65_536);
    let geometry = Geometry { slots, slot_bytes };
    std::fs::create_dir_all(folder).unwrap();
    let path = folder.join("kv-disk-000.slots");
    let mut options = DiskOptions::new(folder, geometry.bytes(), 65_536, b"bench");
    options.reserve_bytes = 0;
    assert_eq!(options.slots(), Some(geometry.slots));
    let model = options.rules.model;
    let (set, file) = (1, 2);
    let heading = Heading {
        set,
        file,
        stripe: 0,
        stripes: 1,
        model,
        sealed: false,
        geometry,
        epoch: 1,
        ceiling: 1 << 50,
        sequence: 2,
    };
    let mut bytes = heading.to_page().to_vec();
    bytes.extend(Heading { sequence: 3, ..heading }.to_page());
    for slot in 0..geometry.table_pages() * ENTRIES_A_PAGE {
        if slot >= slots {
            bytes.extend([0; 128]);
            continue;
        }
        let (length, generation) = (65_536, slot + 1);
        let entry = Entry {
            name: name(slot),
            group: GroupId(0),
            file,
            model,
            epoch: 1,
            generation,
            slot,
            length,
            head: header_bytes(1) as u32,
            sum: 1,
            key: None,
        };
        bytes.extend(entry.to_bytes());
    }
    std::fs::write(&path, &bytes).unwrap();
    drop(bytes);
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let sparse = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    sparse.set_len(geometry.bytes()).unwrap();
    drop(sparse);
    for _ in 0..3 {
        let began = Instant::now();
        let tier = DiskTier::open(&options).unwrap();
        let took = began.elapsed();
        let stats = tier.watch().stats();
        println!(
            "open: {} slots of {} bytes, {} survivors, {:.2} s",
            slots,
            slot_bytes,
            stats.survivors,
            took.as_secs_f64()
        );
    }
    std::fs::remove_file(&path).unwrap();
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let number = |at: usize, default: u64| args.get(at).map_or(default, |arg| arg.parse().unwrap());
    if args.first().is_some_and(|arg| arg == "open") {
        let Some(folder) = args.get(1) else { panic!("open FOLDER SLOTS") };
        return open_time(Path::new(folder), number(2, 1 << 20));
    }
    let Some(folder) = args.first() else {
        return println!("no folder was named: nothing is measured");
    };
    let (block, depth) = (number(1, 256 << 10) as usize, number(2, 16) as u32);
    let (files, time) = (number(3, 1), Duration::from_secs(number(4, 3)));
    let bytes = number(5, 1 << 30);
    let folders = (0..files).map(|_| PathBuf::from(folder)).collect();
    let mut bench = Bench::new(folders, bytes, block, depth);
    let slots = bench.watch.stats().slots * 9 / 10;
    // Each slot once, so that no block of the file system is new.
    let mut took = Vec::new();
    for number in 0..slots {
        while bench.open.len() >= depth as usize {
            bench.poll(&mut took);
        }
        bench.begin(Direction::Store, number, Instant::now());
    }
    while !bench.open.is_empty() {
        bench.poll(&mut took);
    }
    // The tier has `depth` at the disk, and as many wait for it. Stores wait for the table, too.
    let open = depth as usize;
    let (write, write_cpu) = bench.saturate(Direction::Store, 4 * open, slots, time);
    let (read, read_cpu) = bench.saturate(Direction::Load, 2 * open, slots, time);
    let [p50, p99] = bench.paced(read / 2.0, slots, time);
    println!(
        "kv-disk {block} depth {depth} files {files} {}: write {:.0} MB/s {write_cpu:.2} cpu-s/GB, \
         read {:.0} MB/s {read_cpu:.2} cpu-s/GB, half load p50 {} us p99 {} us, wrong {}",
        bench.watch.files()[0].backend,
        write / 1e6,
        read / 1e6,
        p50.as_micros(),
        p99.as_micros(),
        bench.wrong,
    );
    drop(bench);
    let alone = [Act::Write, Act::Read]
        .map(|act| ring_alone(Path::new(folder), files, depth, block as u64, act, time) / 1e6);
    println!(
        "without a tier: write {:.0} MB/s, read {:.0} MB/s; sums alone {:.1} GB/s on one core",
        alone[0],
        alone[1],
        sums_alone(block) / 1e9,
    );
}
