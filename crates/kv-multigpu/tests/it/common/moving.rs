//! What must hold of moves between any two devices, simulated or not.

use cuda_driver::{Device, DeviceBuffer, DeviceSpan, Stream};
use kv_kernels::BlockId;
use kv_multigpu::moves::{
    BlockGrid, BlockMemory, BlockMove, BlockPair, BlockPairs, HandOver, Held, MoveOrder, Mover,
    MoverConfig, Route,
};

/// Two devices, and a mover from the first to the second.
pub(crate) type Scenario = fn(&Device, &Device, MoverConfig);

pub(crate) const ALL: &[(&str, Scenario)] = &[
    ("tensors_of_every_size_arrive", tensors_of_every_size_arrive),
    ("blocks_arrive_and_nothing_else_changes", blocks_arrive_and_nothing_else_changes),
    ("parts_of_blocks_arrive_at_their_rows", parts_of_blocks_arrive_at_their_rows),
    ("many_moves_share_tables_and_chunks", many_moves_share_tables_and_chunks),
    ("activations_go_to_and_fro", activations_go_to_and_fro),
];

pub(crate) use kv_testkit::pattern;

pub(crate) fn contents(stream: &Stream, span: DeviceSpan) -> Vec<u8> {
    let mut seen = vec![0; span.bytes() as usize];
    stream.download(&mut seen, span).unwrap();
    seen
}

/// A buffer with `data` in it.
pub(crate) fn buffer(stream: &Stream, data: &[u8]) -> DeviceBuffer {
    let buffer = DeviceBuffer::alloc(stream.device(), data.len().max(1) as u64).unwrap();
    stream.upload(buffer.span().slice(0, data.len() as u64).unwrap(), data).unwrap();
    buffer
}

pub(crate) struct Pair {
    pub(crate) after: Stream,
    pub(crate) on: Stream,
    pub(crate) mover: Mover,
}

impl Pair {
    pub(crate) fn new(from: &Device, to: &Device, config: MoverConfig) -> Self {
        Self {
            after: Stream::new(from).unwrap(),
            on: Stream::new(to).unwrap(),
            mover: Mover::new(from, to, config).unwrap(),
        }
    }
}

fn tensors_of_every_size_arrive(from: &Device, to: &Device, config: MoverConfig) {
    let Pair { after, on, mut mover } = Pair::new(from, to, config);
    let chunk = config.chunk_bytes as usize;
    let ring = chunk * config.chunks;
    let sizes = [0, 1, 2, 15, 16, 17, 4095, 65_537, chunk - 1, chunk, chunk + 1, 2 * ring + 13];
    for (seed, bytes) in sizes.into_iter().enumerate() {
        let data = pattern(seed as u64, bytes);
        let (near, far) = (buffer(&after, &data), buffer(&on, &vec![0xA5; bytes + 32]));
        // Not at the start of the destination, so that a byte too many on either side is seen.
        let source = near.span().slice(0, bytes as u64).unwrap();
        let destination = far.span().slice(16, bytes as u64).unwrap();
        let order = MoveOrder { after: &after, on: &on };
        let source = Held::new(from, source, near);
        let destination = Held::new(to, destination, far);
        let mut moved = mover.move_tensor(source, destination, order).unwrap();
        let far = moved.take_destination().unwrap();
        let seen = contents(&on, far.span());
        let (before, rest) = seen.split_at(16);
        assert!(rest[..bytes] == data, "{bytes} bytes");
        assert!(before.iter().chain(&rest[bytes..]).all(|&byte| byte == 0xA5), "{bytes} bytes");
        let (near, none) = moved.try_finish().map_err(|_| "the reader came after it").unwrap();
        assert!(none.is_none());
        let near = near.unwrap();
        assert!(contents(&after, near.span().slice(0, bytes as u64).unwrap()) == data);
    }
    assert_eq!(mover.sweep(), 0);
}

/// The planes of a memory of blocks, each filled with its own pattern.
pub(crate) struct Planes {
    pub(crate) buffers: Vec<DeviceBuffer>,
    pub(crate) data: Vec<Vec<u8>>,
    pub(crate) grid: BlockGrid,
}

impl Planes {
    pub(crate) fn new(stream: &Stream, planes: usize, grid: BlockGrid, seed: u64) -> Self {
        let bytes = (u64::from(grid.blocks) * grid.block_stride) as usize;
        let data: Vec<_> = (0..planes).map(|p| pattern(seed + p as u64, bytes)).collect();
        Self { buffers: data.iter().map(|data| buffer(stream, data)).collect(), data, grid }
    }

    pub(crate) fn memory(self, device: &Device) -> (BlockMemory<Vec<DeviceBuffer>>, Vec<Vec<u8>>) {
        let spans = self.buffers.iter().map(DeviceBuffer::span).collect();
        (BlockMemory::new(device, spans, self.grid, self.buffers).unwrap(), self.data)
    }
}

/// What `what` makes of `to`.
pub(crate) fn expected(
    (from, source): (&[Vec<u8>], BlockGrid),
    (to, destination): (&mut [Vec<u8>], BlockGrid),
    what: &BlockMove<'_>,
) {
    for (from, to) in from.iter().zip(to) {
        for pair in what.pairs.as_slice() {
            for row in 0..u64::from(what.rows) {
                let place = |grid: BlockGrid, id: BlockId, offset| {
                    let start =
                        id.index() as u64 * grid.block_stride + offset + row * grid.row_stride;
                    start as usize..(start + what.row_bytes) as usize
                };
                let read = place(source, pair.source, what.source_offset);
                to[place(destination, pair.destination, what.destination_offset)]
                    .copy_from_slice(&from[read]);
            }
        }
    }
}

/// Moves, and compares every byte of the destination.
fn check_blocks(pair: &mut Pair, sides: [BlockGrid; 2], planes: usize, what: &BlockMove<'_>) {
    let (from, to) = (pair.mover.from().clone(), pair.mover.to().clone());
    let (source, near) = Planes::new(&pair.after, planes, sides[0], 100).memory(&from);
    let (destination, mut far) = Planes::new(&pair.on, planes, sides[1], 200).memory(&to);
    let order = MoveOrder { after: &pair.after, on: &pair.on };
    let mut moved = pair.mover.move_blocks(source, destination, what, order).unwrap();
    expected((&near, sides[0]), (&mut far, sides[1]), what);
    for (plane, (buffer, data)) in moved.take_destination().unwrap().iter().zip(far).enumerate() {
        assert!(contents(&pair.on, buffer.span()) == data, "plane {plane} of {what:?}");
    }
    let Ok((Some(source), None)) = moved.try_finish() else { panic!("the reader came after it") };
    for (buffer, data) in source.iter().zip(near) {
        assert!(contents(&pair.after, buffer.span()) == data, "the source changed");
    }
}

/// Pairs that go neither up nor down: block `i` of `count` to a place of its own.
pub(crate) fn scattered(count: u32, blocks: u32) -> Vec<BlockPair> {
    let coprime = |step: &u32| {
        let (mut a, mut b) = (blocks, *step);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a == 1
    };
    let step = (blocks * 5 / 8..blocks).find(coprime).unwrap_or(1);
    let of = |i: u32| ((u64::from(i) * u64::from(step)) % u64::from(blocks)) as u32;
    (0..count).map(|i| pair(of(i + 1), i % blocks)).collect()
}

fn blocks_arrive_and_nothing_else_changes(from: &Device, to: &Device, config: MoverConfig) {
    let mut pair = Pair::new(from, to, config);
    for (block_bytes, blocks, count, planes) in
        [(4096, 13, 9, 2), (1024, 40, 40, 1), (48, 7, 5, 3), (33, 7, 4, 2), (1, 5, 3, 1)]
    {
        let near = BlockGrid { blocks, block_stride: block_bytes, row_stride: 0 };
        let far = BlockGrid { blocks: blocks + 3, block_stride: block_bytes + 16, row_stride: 0 };
        let pairs = scattered(count, blocks);
        check_blocks(
            &mut pair,
            [near, far],
            planes,
            &BlockMove::whole(BlockPairs::new(&pairs).unwrap(), block_bytes),
        );
    }
    let grid = BlockGrid { blocks: 4, block_stride: 64, row_stride: 0 };
    check_blocks(&mut pair, [grid, grid], 1, &BlockMove::whole(BlockPairs::new(&[]).unwrap(), 64));
}

fn parts_of_blocks_arrive_at_their_rows(from: &Device, to: &Device, config: MoverConfig) {
    let mut pair = Pair::new(from, to, config);
    for unit in [16, 8, 1] {
        // A block of 4 tokens: 8 heads of a token on the one side, 3 on the other; heads 5 and 6
        // become heads 1 and 2.
        let near = BlockGrid { blocks: 6, block_stride: 4 * 8 * unit, row_stride: 8 * unit };
        let far = BlockGrid { blocks: 9, block_stride: 4 * 3 * unit, row_stride: 3 * unit };
        let pairs = scattered(6, 6);
        let what = BlockMove {
            pairs: BlockPairs::new(&pairs).unwrap(),
            rows: 4,
            row_bytes: 2 * unit,
            source_offset: 5 * unit,
            destination_offset: unit,
        };
        check_blocks(&mut pair, [near, far], 2, &what);
    }
}

fn many_moves_share_tables_and_chunks(from: &Device, to: &Device, config: MoverConfig) {
    let config = MoverConfig { table_pairs: 8, tables: 3, ..config };
    let mut pair = Pair::new(from, to, config);
    let grid = BlockGrid { blocks: 24, block_stride: 64, row_stride: 0 };
    let pairs = scattered(24, 24);
    let what = BlockMove::whole(BlockPairs::new(&pairs).unwrap(), 64);
    for _ in 0..4 {
        // Takes all tables; the comparison waits for it.
        check_blocks(&mut pair, [grid, grid], 2, &what);
    }
    let (source, near) = Planes::new(&pair.after, 1, grid, 1).memory(from);
    let (destination, _) = Planes::new(&pair.on, 1, grid, 2).memory(to);
    let order = MoveOrder { after: &pair.after, on: &pair.on };
    let moved = pair.mover.move_blocks(source, destination, &what, order).unwrap();
    drop(moved);
    pair.mover.settle().unwrap();
    assert_eq!((pair.mover.sweep(), near.len()), (0, 1));
}

/// Forty-eight layers that lie on the two devices in turn: each adds to what the other handed over.
fn activations_go_to_and_fro(from: &Device, to: &Device, config: MoverConfig) {
    const BYTES: u64 = 8192;
    // Less and less; in turn what a kernel may copy, and what it may not.
    let sent = |layer: u64| BYTES - layer / 2 * 256 - layer % 2;
    let [there, back] = [(from, to), (to, from)].map(|(from, to)| {
        let mover = Mover::new(from, to, MoverConfig { tables: 0, ..config }).unwrap();
        HandOver::new(mover, BYTES, 2).unwrap()
    });
    let mut ways = [there, back];
    let streams = [Stream::new(from).unwrap(), Stream::new(to).unwrap()];
    for pass in 0..3_u64 {
        let data = pattern(pass, BYTES as usize);
        let mut outgoing = ways[0].room(&streams[0]).unwrap();
        streams[0].upload(outgoing.span(), &data).unwrap();
        for layer in 0..48 {
            let (near, far) = (layer % 2, (layer + 1) % 2);
            let bytes = sent(layer as u64);
            let incoming = ways[near].send(outgoing, bytes, &streams[near], &streams[far]).unwrap();
            outgoing = ways[far].room(&streams[far]).unwrap();
            // The layer: its first byte becomes the layer's number.
            let activations = incoming.span();
            assert_eq!(activations.bytes(), bytes);
            streams[far]
                .copy_on_device(outgoing.span().slice(0, bytes).unwrap(), activations)
                .unwrap();
            streams[far].fill(outgoing.span().slice(0, 1).unwrap(), layer as u8).unwrap();
            ways[near].done(incoming, &streams[far]).unwrap();
        }
        let mut result = data;
        result[0] = 47;
        let kept = sent(47) as usize;
        let last = outgoing.span().slice(0, kept as u64).unwrap();
        assert!(contents(&streams[0], last) == result[..kept], "pass {pass}");
        ways[0].give_back(outgoing).unwrap();
    }
}

/// How much goes each way where all pairs move at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// How often everything is moved: again and again to the same place.
    pub(crate) rounds: usize,
    pub(crate) tensor_bytes: usize,
    pub(crate) planes: usize,
    pub(crate) blocks: u32,
    pub(crate) block_bytes: u64,
}

pub(crate) const SMALL: Load =
    Load { rounds: 2, tensor_bytes: 20_001, planes: 2, blocks: 4, block_bytes: 48 };

/// One way between two devices, and what it is to bring.
struct Way {
    ends: [usize; 2],
    pair: Pair,
    tensors: [DeviceBuffer; 2],
    tensor_data: Vec<u8>,
    blocks: [Planes; 2],
}

impl Way {
    fn new(devices: &[Device], ends: [usize; 2], config: MoverConfig, load: &Load) -> Self {
        let [from, to] = ends.map(|end| &devices[end]);
        let pair = Pair::new(from, to, config);
        let seed = (ends[0] * 100 + ends[1]) as u64;
        let tensor_data = pattern(seed, load.tensor_bytes);
        let tensors = [
            buffer(&pair.after, &tensor_data),
            DeviceBuffer::alloc(to, load.tensor_bytes as u64).unwrap(),
        ];
        let (blocks, block_stride) = (load.blocks, load.block_bytes);
        let grid = BlockGrid { blocks, block_stride, row_stride: 0 };
        let planes = |stream, seed| Planes::new(stream, load.planes, grid, seed);
        let blocks = [planes(&pair.after, seed), planes(&pair.on, seed + 50)];
        Self { ends, pair, tensors, tensor_data, blocks }
    }

    /// Enqueues one move of the tensor and one of all blocks but one.
    fn go(&mut self, pairs: &[BlockPair]) {
        let order = MoveOrder { after: &self.pair.after, on: &self.pair.on };
        let mover = &mut self.pair.mover;
        let (from, to) = (mover.from().clone(), mover.to().clone());
        // The way keeps everything until all moves are over.
        let [source, target] =
            [0, 1].map(|end| Held::new([&from, &to][end], self.tensors[end].span(), ()));
        drop(mover.move_tensor(source, target, order).unwrap());
        let [source, target] = [0, 1].map(|end| {
            let planes = &self.blocks[end];
            let spans = planes.buffers.iter().map(DeviceBuffer::span).collect();
            BlockMemory::new([&from, &to][end], spans, planes.grid, ()).unwrap()
        });
        let what =
            BlockMove::whole(BlockPairs::new(pairs).unwrap(), self.blocks[0].grid.block_stride);
        drop(mover.move_blocks(source, target, &what, order).unwrap());
    }

    fn check(&mut self, pairs: &[BlockPair]) {
        let on = &self.pair.on;
        assert!(contents(on, self.tensors[1].span()) == self.tensor_data, "{:?}", self.ends);
        let [near, far] = &mut self.blocks;
        let what = BlockMove::whole(BlockPairs::new(pairs).unwrap(), near.grid.block_stride);
        expected((&near.data, near.grid), (&mut far.data, far.grid), &what);
        for (plane, (buffer, data)) in far.buffers.iter().zip(&far.data).enumerate() {
            assert!(contents(on, buffer.span()) == *data, "plane {plane} of {:?}", self.ends);
        }
        self.pair.mover.settle().unwrap();
    }
}

/// Every ordered pair of devices moves a tensor and scattered blocks; all of it is enqueued on all ways
/// before anything is looked at. The ways, and which they took.
pub(crate) fn all_pairs_at_once(
    devices: &[Device],
    config: MoverConfig,
    load: &Load,
) -> Vec<([usize; 2], Route)> {
    let count = devices.len();
    let ends = (0..count * count).map(|i| [i / count, i % count]).filter(|[from, to]| from != to);
    let mut ways: Vec<_> = ends.map(|ends| Way::new(devices, ends, config, load)).collect();
    let pairs = scattered(load.blocks - 1, load.blocks);
    for _ in 0..load.rounds {
        ways.iter_mut().for_each(|way| way.go(&pairs));
    }
    ways.iter_mut().for_each(|way| way.check(&pairs));
    assert_eq!(ways.len(), count * (count - 1));
    ways.iter().map(|way| (way.ends, way.pair.mover.route())).collect()
}

pub(crate) fn pair(source: u32, destination: u32) -> BlockPair {
    let [source, destination] = [source, destination].map(|id| BlockId::new(id).unwrap());
    BlockPair { source, destination }
}
