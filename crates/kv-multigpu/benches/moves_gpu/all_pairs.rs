//! Every ordered pair of devices at once, beside plain copies at once and beside one pair alone.

use kv_kernels::BlockId;
use std::time::Instant;

use cuda_driver::{Device, DeviceBuffer, DeviceSpan, Event, Stream};
use kv_multigpu::moves::{
    BlockGrid, BlockMemory, BlockMove, BlockPair, BlockPairs, Held, MoveOrder, Mover, MoverConfig,
    Route,
};

use super::{BLOCK, Idle, KIB, MIB, is_simulated, size};

/// How the bytes go.
#[derive(Clone, Copy, Debug)]
enum How {
    PlainOnSource,
    PlainOnDestination,
    Tensor,
    Pushed,
    Pulled,
}

const ALL: [(How, &str); 5] = [
    (How::PlainOnSource, "plain copy, source's stream"),
    (How::PlainOnDestination, "plain copy, destination's stream"),
    (How::Tensor, "`move_tensor`"),
    (How::Pushed, "blocks of 16 KiB, pushed"),
    (How::Pulled, "blocks of 16 KiB, pulled"),
];

/// One ordered pair.
struct Way {
    from: usize,
    to: usize,
    after: Stream,
    on: Stream,
    source: DeviceBuffer,
    destination: DeviceBuffer,
    push: Mover,
    pull: Mover,
    start: Event,
    end: Event,
}

impl Way {
    fn new(devices: &[Device], from: usize, to: usize, bytes: u64) -> Self {
        let (near, far) = (&devices[from], &devices[to]);
        let mover = |prefer| {
            let kernel_blocks = if is_simulated(near) { 1 } else { 64 };
            let config =
                MoverConfig { prefer, tables: 20, kernel_blocks, ..MoverConfig::default() };
            Mover::new(near, far, config).unwrap()
        };
        let way = Self {
            from,
            to,
            after: Stream::new(near).unwrap(),
            on: Stream::new(far).unwrap(),
            source: DeviceBuffer::alloc(near, bytes).unwrap(),
            destination: DeviceBuffer::alloc(far, bytes).unwrap(),
            push: mover(Route::Push),
            pull: mover(Route::Pull),
            start: Event::with_timing(far).unwrap(),
            end: Event::with_timing(far).unwrap(),
        };
        way.after.upload(way.source.span(), bytemuck::cast_slice(&way.data())).unwrap();
        way
    }

    /// What this pair alone moves.
    fn data(&self) -> Vec<u64> {
        let seed = ((self.from * 16 + self.to) as u64) << 40;
        let words = 0..self.source.bytes() / 8;
        words.map(|i| (seed | i).wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect()
    }

    fn go(&mut self, how: How, pairs: &[BlockPair]) {
        let (near, far) = (self.push.from().clone(), self.push.to().clone());
        let order = MoveOrder { after: &self.after, on: &self.on };
        let (source, destination) = (self.source.span(), self.destination.span());
        match how {
            How::PlainOnSource | How::PlainOnDestination => {
                let stream = if matches!(how, How::PlainOnSource) { &self.after } else { &self.on };
                stream.copy_between((&far, destination), (&near, source)).unwrap();
            }
            How::Tensor => {
                let (source, destination) =
                    (Held::new(&near, source, ()), Held::new(&far, destination, ()));
                drop(self.push.move_tensor(source, destination, order).unwrap());
            }
            How::Pushed | How::Pulled => {
                let mover =
                    if matches!(how, How::Pushed) { &mut self.push } else { &mut self.pull };
                let memory = |device: &Device, span: DeviceSpan| {
                    let blocks = (span.bytes() / BLOCK) as u32;
                    let grid = BlockGrid { blocks, block_stride: BLOCK, row_stride: 0 };
                    BlockMemory::new(device, vec![span], grid, ()).unwrap()
                };
                let what = BlockMove::whole(BlockPairs::new(pairs).unwrap(), BLOCK);
                let (source, destination) = (memory(&near, source), memory(&far, destination));
                drop(mover.move_blocks(source, destination, &what, order).unwrap());
            }
        }
    }

    /// The stream on which the bytes' arrival is in order.
    fn ending(&self, how: How) -> &Stream {
        if matches!(how, How::PlainOnSource) { &self.after } else { &self.on }
    }

    /// Whether every byte is right, blocks where `pairs` took them; the destination is cleared.
    fn arrived(&self, how: How, pairs: &[BlockPair]) -> bool {
        let data = self.data();
        let mut seen = vec![0_u64; data.len()];
        let bytes = bytemuck::cast_slice_mut(&mut seen);
        self.on.download(bytes, self.destination.span()).unwrap();
        self.on.fill(self.destination.span(), 0).unwrap();
        if !matches!(how, How::Pushed | How::Pulled) {
            return seen == data;
        }
        let words = BLOCK as usize / 8;
        let block = |id: BlockId| id.index() * words..(id.index() + 1) * words;
        pairs.iter().all(|pair| seen[block(pair.destination)] == data[block(pair.source)])
    }
}

/// What a round of one way of moving took.
struct Taken {
    /// Of all pairs together, by the host's clock.
    all: f64,
    /// Of each pair, by events on its destination's stream.
    each: Vec<f64>,
}

/// Moves `times` on each of `ways`, all of it enqueued before the first is waited for.
fn round(ways: &mut [&mut Way], how: Option<How>, times: usize, pairs: &[BlockPair]) -> Taken {
    for way in ways.iter() {
        way.after.synchronize().unwrap();
        way.on.synchronize().unwrap();
    }
    let start = Instant::now();
    for way in ways.iter() {
        way.start.record(&way.on).unwrap();
    }
    for _ in 0..times {
        if let Some(how) = how {
            ways.iter_mut().for_each(|way| way.go(how, pairs));
        }
    }
    for way in ways.iter() {
        // On the destination's stream, whose events keep the time.
        if let Some(how @ How::PlainOnSource) = how {
            let copied = Event::new(way.after.device()).unwrap();
            way.on.wait_for(way.ending(how), &copied).unwrap();
        }
        way.end.record(&way.on).unwrap();
    }
    ways.iter().for_each(|way| way.end.synchronize().unwrap());
    let all = start.elapsed().as_secs_f64();
    let of = |way: &&mut Way| f64::from(way.end.elapsed_ms_since(&way.start).unwrap()) / 1e3;
    Taken { all, each: ways.iter().map(of).collect() }
}

/// The round in the middle by the time of all.
fn median(mut rounds: Vec<Taken>) -> Taken {
    rounds.sort_by(|a, b| a.all.total_cmp(&b.all));
    let middle = rounds.len() / 2;
    rounds.swap_remove(middle)
}

pub(crate) fn measure(devices: &[Device], idle: &Idle) {
    let simulated = is_simulated(&devices[0]);
    let sizes = if simulated { vec![64 * KIB] } else { vec![32 * MIB, 128 * MIB] };
    for bytes in sizes {
        measure_size(devices, bytes, if simulated { 1 } else { 5 }, idle);
    }
}

fn measure_size(devices: &[Device], bytes: u64, rounds: usize, idle: &Idle) {
    let count = devices.len();
    let ends = (0..count * count).map(|i| (i / count, i % count)).filter(|(from, to)| from != to);
    let mut ways: Vec<Way> = ends.map(|(from, to)| Way::new(devices, from, to, bytes)).collect();
    ways.iter().for_each(|way| way.on.fill(way.destination.span(), 0).unwrap());
    let blocks = (bytes / BLOCK) as u32;
    // Every block, of which no two neighbours are neighbours on the other side.
    let of =
        |i: u32, step: u64| BlockId::new((u64::from(i) * step % u64::from(blocks)) as u32).unwrap();
    let pairs: Vec<_> = (0..blocks)
        .map(|i| BlockPair { source: of(i, 40_503), destination: of(i, 30_011) })
        .collect();
    println!("## All {} pairs of {count} GPUs at once, {} each\n", ways.len(), size(bytes));
    println!(
        "| way | one pair alone | each of all: least | median | most | out of a GPU | into a GPU | all |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    let times = if rounds == 1 { 1 } else { ((2048 * MIB) / bytes).clamp(4, 16) as usize };
    let gb = |seconds: f64| (bytes * times as u64) as f64 / seconds / 1e9;
    for (how, name) in ALL {
        // Cleared by the look at the way before.
        let go = if idle.is_next() { None } else { Some(how) };
        let mut alone = Vec::new();
        let mut at_once = Vec::new();
        for _ in 0..rounds + 1 {
            alone.push(round(&mut [&mut ways[0]], go, times, &pairs));
            at_once.push(round(&mut ways.iter_mut().collect::<Vec<_>>(), go, times, &pairs));
        }
        // The first makes what is made once.
        if rounds > 1 {
            alone.swap_remove(0);
            at_once.swap_remove(0);
        }
        let (alone, at_once) = (median(alone), median(at_once));
        let wrong: Vec<_> = ways.iter().filter(|way| !way.arrived(how, &pairs)).collect();
        let wrong: Vec<_> = wrong.into_iter().map(|way| (way.from, way.to)).collect();
        assert!(wrong.is_empty(), "{name} brought other bytes, from and to {wrong:?}");
        let mut each: Vec<f64> = at_once.each.iter().map(|&seconds| gb(seconds)).collect();
        each.sort_by(f64::total_cmp);
        // All GPUs send and receive the same.
        let one_gpu = gb(at_once.all) * (count - 1) as f64;
        println!(
            "| {name} | {:.1} GB/s | {:.1} | {:.1} | {:.1} | {one_gpu:.1} | {one_gpu:.1} | {:.1} |",
            gb(alone.each[0]),
            each[0],
            each[each.len() / 2],
            each[each.len() - 1],
            one_gpu * count as f64,
        );
    }
    println!();
}
