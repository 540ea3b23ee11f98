//! Moves between two GPUs beside plain copies of the same bytes, all in one run; then between all GPUs at once.
//!
//! `cargo bench -p kv-multigpu --bench moves_gpu`; `KV_PARTS=blocks,all_pairs` runs some of `ranges`, `blocks`,
//! `host`, `layers` and `all_pairs`. Times are by events on the destination's stream around
//! several operations, medians of the rounds, the calls included; the ways of a row take turns.
//! After its rounds each way moves once more, into cleared memory, and every byte that it brings is compared.
//! `KV_DEVICE=sim` runs it on two simulated devices, with little memory, to see that it runs: of kernels that
//! reach the other device the times mean nothing then.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]
#![allow(clippy::unwrap_used, reason = "a measurement that fails says where, and ends")]

mod all_pairs;

use kv_kernels::BlockId;
use std::cell::Cell;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use cuda_driver::{
    CudaDriver, Device, DeviceBuffer, DeviceSpan, Driver, Event, HostAllocFlags, PinnedBuffer,
    Stream,
};
use cuda_sim::{Profile, SimConfig, SimDriver};
use kv_multigpu::DeviceRegistry;
use kv_multigpu::moves::{
    BlockGrid, BlockMemory, BlockMove, BlockPair, BlockPairs, HandOver, Held, MoveOrder, Mover,
    MoverConfig, Route,
};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const BLOCK: u64 = 16 * KIB;

fn main() -> ExitCode {
    match open(simulated()) {
        Ok(devices) => {
            let names: Vec<_> = devices.iter().map(|device| &device.info().name[..]).collect();
            println!("{}\n", names.join(", "));
            run(&devices, &Idle::none());
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("nothing was measured: {reason}");
            ExitCode::FAILURE
        }
    }
}

/// Runs all parts that are wanted. Panics when a way brought other bytes than it should.
pub(crate) fn run(devices: &[Device], idle: &Idle) {
    if ["ranges", "blocks", "host", "layers"].into_iter().any(is_wanted) {
        Bench::new([devices[0].clone(), devices[1].clone()], idle).all();
    }
    if is_wanted("all_pairs") {
        all_pairs::measure(devices, idle);
    }
}

/// A way that is made to do nothing, by its number in the order of the run: to see that this is noticed.
pub(crate) struct Idle {
    way: Option<usize>,
    seen: Cell<usize>,
}

impl Idle {
    pub(crate) fn none() -> Self {
        Self { way: None, seen: Cell::new(0) }
    }

    #[allow(dead_code, reason = "for the test that includes this program")]
    pub(crate) fn way(number: usize) -> Self {
        Self { way: Some(number), seen: Cell::new(0) }
    }

    /// Ways seen so far.
    #[allow(dead_code, reason = "for the test that includes this program")]
    pub(crate) fn seen(&self) -> usize {
        self.seen.get()
    }

    /// Counts the next way; whether it is to do nothing.
    fn is_next(&self) -> bool {
        let number = self.seen.replace(self.seen.get() + 1);
        self.way == Some(number)
    }
}

fn simulated() -> bool {
    std::env::var_os("KV_DEVICE").is_some_and(|name| name == "sim")
}

/// Whether these are simulated devices: they get little to do.
fn is_simulated(device: &Device) -> bool {
    device.virtual_now().is_some()
}

/// Whether a part is to run: all of them, or those that `KV_PARTS` names.
fn is_wanted(part: &str) -> bool {
    std::env::var("KV_PARTS").map_or(true, |parts| parts.split(',').any(|it| it == part))
}

pub(crate) fn open(simulated: bool) -> Result<Vec<Device>, String> {
    let driver: Arc<dyn Driver> = if simulated {
        let profile = Profile::built_in("h200").ok_or("no built-in profile")?;
        let config = SimConfig { devices: 2, profile, ..SimConfig::default() };
        Arc::new(SimDriver::new(config).map_err(|error| error.to_string())?)
    } else {
        Arc::new(CudaDriver::load().map_err(|error| error.to_string())?)
    };
    let registry = DeviceRegistry::new(driver).map_err(|error| error.to_string())?;
    let open = |ordinal| registry.device(ordinal).map_err(|error| error.to_string());
    // Two at least.
    (0..registry.count().max(2)).map(open).collect()
}

/// What is done once, or again and again.
type Work<'a> = Box<dyn FnMut() + 'a>;

/// A way of moving, tried beside others.
struct Way<'a> {
    go: Work<'a>,
    brings: Bytes<'a>,
}

/// What a way brings each time.
#[derive(Clone, Copy)]
enum Bytes<'a> {
    /// So many from the start of the source to the start of the destination.
    First(u64),
    /// Blocks of each of so many planes.
    Blocks(u64, &'a [BlockPair]),
}

fn way<'a>(brings: Bytes<'a>, go: impl FnMut() + 'a) -> Way<'a> {
    Way { go: Box::new(go), brings }
}

struct Bench<'a> {
    near: Device,
    far: Device,
    after: Stream,
    on: Stream,
    source: DeviceBuffer,
    /// What the source holds.
    data: Vec<u8>,
    destination: DeviceBuffer,
    rounds: usize,
    idle: &'a Idle,
}

impl<'i> Bench<'i> {
    fn new([near, far]: [Device; 2], idle: &'i Idle) -> Self {
        let bytes = if is_simulated(&near) { 256 * KIB } else { 1024 * MIB };
        let (after, on) = (Stream::new(&near).unwrap(), Stream::new(&far).unwrap());
        let source = DeviceBuffer::alloc(&near, bytes).unwrap();
        let destination = DeviceBuffer::alloc(&far, bytes).unwrap();
        let data: Vec<u8> =
            (0..bytes / 8).flat_map(|i| (i * 0x9E37_79B9 + 1).to_le_bytes()).collect();
        after.upload(source.span(), &data).unwrap();
        let rounds = if is_simulated(&near) { 1 } else { 7 };
        Self { near, far, after, on, source, data, destination, rounds, idle }
    }

    fn all(&self) {
        let before = is_wanted("host").then(|| self.plain_ways_through_the_host());
        if is_wanted("ranges") {
            self.tensors();
        }
        if is_wanted("blocks") {
            self.blocks();
        }
        if let Some(before) = before {
            self.through_the_host(before);
        }
        if is_wanted("layers") {
            self.hand_over();
            self.calls();
        }
    }

    /// Those that fit; all of the memory where none does.
    fn sizes(&self, sizes: &[u64]) -> Vec<u64> {
        let all = self.source.bytes();
        let fit: Vec<_> = sizes.iter().copied().filter(|&bytes| bytes <= all).collect();
        if fit.is_empty() { vec![all] } else { fit }
    }

    /// Those of planes and blocks that fit.
    fn cases(&self, cases: &[(u64, u64)]) -> Vec<(u64, u64)> {
        let all = self.source.bytes();
        let fits = |&(planes, count): &(u64, u64)| planes * count * BLOCK <= all;
        let fit: Vec<_> = cases.iter().copied().filter(fits).collect();
        if fit.is_empty() { vec![(2, all / BLOCK / 2)] } else { fit }
    }

    fn spans(&self, bytes: u64) -> (DeviceSpan, DeviceSpan) {
        let of = |buffer: &DeviceBuffer| buffer.span().slice(0, bytes).unwrap();
        (of(&self.source), of(&self.destination))
    }

    /// Median seconds of one operation of each way: `times` of them between two events, in turns. Then each
    /// way goes once more, and what it brings is compared.
    fn seconds(&self, times: u64, mut ways: Vec<Way<'_>>) -> Vec<f64> {
        for way in &mut ways {
            if self.idle.is_next() {
                way.go = Box::new(|| ());
            }
        }
        let (start, end) =
            (Event::with_timing(&self.far).unwrap(), Event::with_timing(&self.far).unwrap());
        let mut seen = vec![Vec::new(); ways.len()];
        for round in 0..=self.rounds {
            for (way, seen) in ways.iter_mut().zip(&mut seen) {
                self.come_to_rest();
                start.record(&self.on).unwrap();
                (0..times).for_each(|_| (way.go)());
                end.record(&self.on).unwrap();
                end.synchronize().unwrap();
                if round > 0 || self.rounds == 1 {
                    let ms = f64::from(end.elapsed_ms_since(&start).unwrap());
                    seen.push(ms / 1e3 / times as f64);
                }
            }
        }
        for (number, way) in ways.iter_mut().enumerate() {
            self.come_to_rest();
            self.on.fill(self.destination.span(), 0).unwrap();
            self.on.synchronize().unwrap();
            (way.go)();
            self.come_to_rest();
            assert!(self.arrived(way.brings), "way {number} of this row brought other bytes");
        }
        let median = |mut times: Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        seen.into_iter().map(median).collect()
    }

    fn come_to_rest(&self) {
        self.after.synchronize().unwrap();
        self.on.synchronize().unwrap();
    }

    /// Whether the destination holds every byte that a way brings.
    fn arrived(&self, brings: Bytes<'_>) -> bool {
        let is_there = |to: u64, from: u64, bytes: u64| {
            let mut seen = vec![0; bytes as usize];
            let part = self.destination.span().slice(to, bytes).unwrap();
            self.on.download(&mut seen, part).unwrap();
            seen == self.data[from as usize..(from + bytes) as usize]
        };
        match brings {
            Bytes::First(bytes) => is_there(0, 0, bytes),
            Bytes::Blocks(planes, pairs) => (0..planes).all(|plane| {
                let at = |id: BlockId| {
                    plane * (self.source.bytes() / planes) + id.index() as u64 * BLOCK
                };
                pairs.iter().all(|pair| is_there(at(pair.destination), at(pair.source), BLOCK))
            }),
        }
    }

    fn order(&self) -> MoveOrder<'_> {
        MoveOrder { after: &self.after, on: &self.on }
    }

    fn move_once(&self, mover: &mut Mover, bytes: u64) {
        let (source, destination) = self.spans(bytes);
        let source = Held::new(&self.near, source, ());
        let destination = Held::new(&self.far, destination, ());
        drop(mover.move_tensor(source, destination, self.order()).unwrap());
    }

    fn peer_copy(&self, on: &Stream, bytes: u64) {
        let (source, destination) = self.spans(bytes);
        on.copy_between((&self.far, destination), (&self.near, source)).unwrap();
    }

    /// Before any mover has enabled access: the driver's own way, and the two plain copies.
    fn plain_ways_through_the_host(&self) -> Vec<(u64, f64, f64)> {
        let host = PinnedBuffer::alloc(
            &self.near,
            self.source.bytes().min(256 * MIB),
            HostAllocFlags::CACHED,
        );
        let (host, down) = (host.unwrap(), Event::new(&self.near).unwrap());
        let mut rows = Vec::new();
        for bytes in self.sizes(&[MIB, 16 * MIB, 64 * MIB, 256 * MIB]) {
            let (source, destination) = self.spans(bytes);
            let ways = vec![
                way(Bytes::First(bytes), || self.peer_copy(&self.on, bytes)),
                way(Bytes::First(bytes), || {
                    let up = Event::new(&self.far).unwrap();
                    up.record(&self.on).unwrap();
                    self.after.wait(&up).unwrap();
                    self.after.copy_to_host(&host, 0, source).unwrap();
                    down.record(&self.after).unwrap();
                    self.on.wait(&down).unwrap();
                    self.on.copy_to_device(destination, &host, 0).unwrap();
                }),
            ];
            let seconds = self.seconds(4, ways);
            rows.push((bytes, seconds[0], seconds[1]));
        }
        rows
    }

    fn tensors(&self) {
        let mut mover = Mover::new(&self.near, &self.far, MoverConfig::default()).unwrap();
        println!("## Ranges, {:?}\n", mover.route());
        println!(
            "| bytes | plain copy, source's stream | destination's stream | move | of the quicker | move, calls |"
        );
        println!("| --- | --- | --- | --- | --- | --- |");
        let sizes = [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB];
        for bytes in self.sizes(&sizes) {
            let times = (256 * MIB / bytes).clamp(4, 64);
            let ways = vec![
                way(Bytes::First(bytes), || {
                    // On the other stream, joined to the timed one at both ends as a caller would.
                    let (room, done) =
                        (Event::new(&self.far).unwrap(), Event::new(&self.near).unwrap());
                    room.record(&self.on).unwrap();
                    self.after.wait(&room).unwrap();
                    self.peer_copy(&self.after, bytes);
                    done.record(&self.after).unwrap();
                    self.on.wait(&done).unwrap();
                }),
                way(Bytes::First(bytes), || self.peer_copy(&self.on, bytes)),
                way(Bytes::First(bytes), || self.move_once(&mut mover, bytes)),
            ];
            let seconds = self.seconds(times, ways);
            let calls = Instant::now();
            (0..times).for_each(|_| self.move_once(&mut mover, bytes));
            let calls = calls.elapsed().as_secs_f64() / times as f64;
            let quicker = seconds[0].min(seconds[1]);
            println!(
                "| {} | {} | {} | {} | {:.3} | {:.1} µs |",
                size(bytes),
                rate(bytes, seconds[0]),
                rate(bytes, seconds[1]),
                rate(bytes, seconds[2]),
                quicker / seconds[2],
                calls * 1e6
            );
        }
        println!();
    }

    fn memory(&self, device: &Device, buffer: &DeviceBuffer, planes: u64) -> BlockMemory<()> {
        let bytes = buffer.bytes() / planes;
        let planes = (0..planes).map(|plane| buffer.span().slice(plane * bytes, bytes).unwrap());
        let grid = BlockGrid { blocks: (bytes / BLOCK) as u32, block_stride: BLOCK, row_stride: 0 };
        BlockMemory::new(device, planes.collect(), grid, ()).unwrap()
    }

    fn move_blocks(&self, mover: &mut Mover, planes: u64, pairs: &[BlockPair]) {
        let source = self.memory(&self.near, &self.source, planes);
        let destination = self.memory(&self.far, &self.destination, planes);
        let what = BlockMove::whole(BlockPairs::new(pairs).unwrap(), BLOCK);
        drop(mover.move_blocks(source, destination, &what, self.order()).unwrap());
        // Tables come free as their launches complete; a program has as many as it has moves under
        // way, and here the rounds wait.
        while mover.sweep() > 8 {}
    }

    /// Pairs of which no two neighbours are neighbours on the other side.
    fn pairs(&self, planes: u64, count: u64) -> Vec<BlockPair> {
        let blocks = self.source.bytes() / planes / BLOCK;
        let of = |i: u64, step: u64| BlockId::new((i * step % blocks) as u32).unwrap();
        (0..count.min(blocks))
            .map(|i| BlockPair { source: of(i, 40_503), destination: of(i, 30_011) })
            .collect()
    }

    fn blocks(&self) {
        println!("## Scattered blocks of 16 KiB\n");
        println!(
            "| planes x blocks | bytes | one plain copy | loop of plain copies | pushed by 64 | 132 | 264 | pulled by 32 | 64 | 132 | 264 | calls of a push | of a pull |"
        );
        println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
        let config = |(prefer, kernel_blocks)| MoverConfig {
            prefer,
            // Simulated threads take their time.
            kernel_blocks: if is_simulated(&self.near) { 1 } else { kernel_blocks },
            tables: 64,
            ..MoverConfig::default()
        };
        let (push, pull) = (Route::Push, Route::Pull);
        let grids = [
            (push, 64),
            (push, 132),
            (push, 264),
            (pull, 32),
            (pull, 64),
            (pull, 132),
            (pull, 264),
        ];
        let mover = |way| Mover::new(&self.near, &self.far, config(way)).unwrap();
        let mut movers: Vec<_> = grids.map(mover).into_iter().collect();
        let cases =
            [(1, 1), (1, 64), (1, 256), (1, 1024), (1, 2048), (1, 16_384), (16, 2048), (64, 256)];
        for (planes, count) in self.cases(&cases) {
            let pairs = self.pairs(planes, count);
            let bytes = pairs.len() as u64 * planes * BLOCK;
            let loop_pairs = &pairs[..pairs.len().min(2048)];
            let mut ways = vec![
                way(Bytes::First(bytes), || self.peer_copy(&self.on, bytes)),
                way(Bytes::Blocks(1, loop_pairs), || self.loop_of_copies(loop_pairs)),
            ];
            for mover in &mut movers {
                let brings = Bytes::Blocks(planes, &pairs);
                ways.push(way(brings, || self.move_blocks(mover, planes, &pairs)));
            }
            let seconds = self.seconds(4, ways);
            print!("| {planes} x {} | {} |", pairs.len(), size(bytes));
            print!(" {} |", rate(bytes, seconds[0]));
            print!(" {} |", rate(loop_pairs.len() as u64 * BLOCK, seconds[1]));
            seconds[2..].iter().for_each(|&seconds| print!(" {} |", rate(bytes, seconds)));
            for mover in [0, 5] {
                let calls = self.calls_of(&mut movers[mover], planes, &pairs);
                print!(" {:.1} µs |", calls * 1e6);
            }
            println!();
        }
        println!();
    }

    /// Seconds that the calls of one move of blocks take.
    fn calls_of(&self, mover: &mut Mover, planes: u64, pairs: &[BlockPair]) -> f64 {
        self.on.synchronize().unwrap();
        mover.sweep();
        let start = Instant::now();
        (0..8).for_each(|_| self.move_blocks(mover, planes, pairs));
        let calls = start.elapsed().as_secs_f64() / 8.0;
        self.on.synchronize().unwrap();
        calls
    }

    fn loop_of_copies(&self, pairs: &[BlockPair]) {
        for pair in pairs {
            let source =
                self.source.span().slice(pair.source.index() as u64 * BLOCK, BLOCK).unwrap();
            let to = self
                .destination
                .span()
                .slice(pair.destination.index() as u64 * BLOCK, BLOCK)
                .unwrap();
            self.on.copy_between((&self.far, to), (&self.near, source)).unwrap();
        }
    }

    fn through_the_host(&self, plain: Vec<(u64, f64, f64)>) {
        println!("## Through the host, access off\n");
        println!(
            "| bytes | down, then up | driver's own | 4 chunks of 1 MiB | 2 MiB | 4 MiB | 8 MiB | best of plain |"
        );
        println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
        let config = |mib| MoverConfig {
            prefer: Route::Host,
            chunk_bytes: mib * MIB,
            ..MoverConfig::default()
        };
        let mut movers: Vec<_> = [1, 2, 4, 8]
            .map(|mib| Mover::new(&self.near, &self.far, config(mib)).unwrap())
            .into_iter()
            .collect();
        assert!(movers.iter().all(|mover| mover.route() == Route::Host));
        for (bytes, driver, down_and_up) in plain {
            let mut ways = Vec::new();
            for mover in &mut movers {
                ways.push(way(Bytes::First(bytes), || self.move_once(mover, bytes)));
            }
            let seconds = self.seconds(4, ways);
            print!("| {} | {} | {} |", size(bytes), rate(bytes, down_and_up), rate(bytes, driver));
            seconds.iter().for_each(|&seconds| print!(" {} |", rate(bytes, seconds)));
            let best = seconds.iter().copied().fold(f64::INFINITY, f64::min);
            println!(" {:.2} |", down_and_up / best);
        }
        println!();
        for (planes, count) in self.cases(&[(1, 2048), (16, 2048)]) {
            let pairs = self.pairs(planes, count);
            let bytes = pairs.len() as u64 * planes * BLOCK;
            let mover = &mut movers[2];
            let brings = Bytes::Blocks(planes, &pairs);
            let ways = vec![way(brings, || self.move_blocks(mover, planes, &pairs))];
            let seconds = self.seconds(2, ways);
            println!(
                "{planes} x {} scattered blocks, chunks of 4 MiB: {}",
                pairs.len(),
                rate(bytes, seconds[0])
            );
        }
        println!();
    }

    fn hand_over(&self) {
        println!("## Activations to and fro, 48 layers on the two GPUs in turn\n");
        println!("| bytes | a layer | of it calls |\n| --- | --- | --- |");
        let way = |from: &Device, to: &Device| {
            let mover = Mover::new(from, to, MoverConfig::default()).unwrap();
            HandOver::new(mover, 4 * MIB, 2).unwrap()
        };
        let mut ways = [way(&self.near, &self.far), way(&self.far, &self.near)];
        for bytes in self.sizes(&[16 * KIB, 64 * KIB, MIB, 4 * MIB]) {
            let (mut times, mut calls) = (Vec::new(), Vec::new());
            for _ in 0..=self.rounds {
                let start = Instant::now();
                calls.push(self.pass(&mut ways, bytes) / 48.0);
                self.after.synchronize().unwrap();
                self.on.synchronize().unwrap();
                times.push(start.elapsed().as_secs_f64() / 48.0);
            }
            let streams = [&self.after, &self.on];
            for (near, boundary) in ways.iter_mut().enumerate() {
                self.check_boundary(boundary, bytes, [streams[near], streams[1 - near]]);
            }
            times.sort_by(f64::total_cmp);
            calls.sort_by(f64::total_cmp);
            let middle = times.len() / 2;
            println!(
                "| {} | {:.1} µs | {:.1} µs |",
                size(bytes),
                times[middle] * 1e6,
                calls[middle] * 1e6
            );
        }
    }

    /// Hands other bytes over each time, and compares all of them.
    fn check_boundary(
        &self,
        boundary: &mut HandOver,
        bytes: u64,
        [producer, consumer]: [&Stream; 2],
    ) {
        let is_idle = self.idle.is_next();
        // Twice through each buffer.
        for turn in 0..4 {
            let data = &self.data[turn * 8..][..bytes as usize - 64];
            let outgoing = boundary.room(producer).unwrap();
            let part = outgoing.span().slice(0, data.len() as u64).unwrap();
            producer.upload(part, data).unwrap();
            // One that does nothing hands over what it handed over before.
            let sent = if is_idle { 0 } else { data.len() as u64 };
            let incoming = boundary.send(outgoing, sent, producer, consumer).unwrap();
            let mut seen = vec![0; incoming.span().bytes() as usize];
            consumer.download(&mut seen, incoming.span()).unwrap();
            boundary.done(incoming, consumer).unwrap();
            assert!(seen == data, "a boundary of {bytes} bytes brought other bytes");
        }
    }

    /// What a hand-over is made of, on this thread, which has no context current.
    fn calls(&self) {
        let (near, far) = (Event::new(&self.near).unwrap(), Event::new(&self.far).unwrap());
        let rows: [(&str, Work<'_>); 5] = [
            ("bind a context, and take it back", Box::new(|| self.far.run(|_| Ok(())).unwrap())),
            ("record an event", Box::new(|| far.record(&self.on).unwrap())),
            (
                "wait for it on the other device's stream",
                Box::new(|| self.after.wait(&far).unwrap()),
            ),
            (
                "both for the other direction, `wait_for`",
                Box::new(|| self.on.wait_for(&self.after, &near).unwrap()),
            ),
            ("copy 16 KiB between the devices", Box::new(|| self.peer_copy(&self.on, 16 * KIB))),
        ];
        println!(
            "\n| call | unbound | on a thread with the destination's context |\n| --- | --- | --- |"
        );
        for (name, mut call) in rows {
            let mut micros = || {
                self.on.synchronize().unwrap();
                let start = Instant::now();
                (0..200).for_each(|_| call());
                let micros = start.elapsed().as_secs_f64() * 1e6 / 200.0;
                self.after.synchronize().unwrap();
                micros
            };
            micros();
            let unbound = micros();
            let bound = self.far.run(|_| Ok(micros())).unwrap();
            println!("| {name} | {unbound:.2} µs | {bound:.2} µs |");
        }
        println!();
    }

    /// Seconds that the calls of one pass take.
    fn pass(&self, ways: &mut [HandOver; 2], bytes: u64) -> f64 {
        let streams = [&self.after, &self.on];
        let start = Instant::now();
        let mut outgoing = ways[0].room(streams[0]).unwrap();
        for layer in 0..48 {
            let (near, far) = (layer % 2, (layer + 1) % 2);
            let incoming = ways[near].send(outgoing, bytes, streams[near], streams[far]).unwrap();
            outgoing = ways[far].room(streams[far]).unwrap();
            ways[near].done(incoming, streams[far]).unwrap();
        }
        ways[0].give_back(outgoing).unwrap();
        start.elapsed().as_secs_f64()
    }
}

fn size(bytes: u64) -> String {
    if bytes < MIB { format!("{} KiB", bytes / KIB) } else { format!("{} MiB", bytes / MIB) }
}

fn rate(bytes: u64, seconds: f64) -> String {
    format!("{:.1} GB/s", bytes as f64 / seconds / 1e9)
}
