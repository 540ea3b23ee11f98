//! Copies of blocks: every pair of layouts, device and host, whole rows and parts of them.

use std::sync::Arc;

use cuda_driver::{DeviceBuffer, PinnedBuffer};
use kv_kernels::{
    BlockCopy, BlockPair, BlockPairs, Blocks, DeviceReport, HostBlocks, KvShape, PagedKv,
    error::OutOfRange, layout::Tensors,
};

use super::lays::{LAYS, Lay, lays, places, shape};
use super::on::{On, Outputs, Random, noise, pair};

const FROM_BLOCKS: u64 = 5;
const TO_BLOCKS: u64 = 6;

/// Blocks in device memory or in pinned memory.
pub(crate) enum Side {
    Device(PagedKv, DeviceBuffer),
    Host(HostBlocks, Arc<PinnedBuffer>),
}

impl Side {
    /// Blocks that hold noise, `shift` bytes after an aligned address.
    pub(crate) fn new(
        on: &On,
        shape: KvShape,
        lay: &Lay,
        blocks: u64,
        (host, shift): (bool, u64),
    ) -> Self {
        let bytes = noise(lay.bytes + shift);
        if host {
            let buffer = Arc::new(on.pin(&bytes));
            let of = (Arc::clone(&buffer), shift);
            let blocks = HostBlocks::new(&on.stream, shape, lay.layout, of, blocks).unwrap();
            return Self::Host(blocks, buffer);
        }
        let buffer = on.upload(&bytes);
        let tensor =
            |n| buffer.span().slice(shift + n * lay.tensor_bytes, lay.tensor_bytes).unwrap();
        let tensors: Vec<_> = (0..lay.bytes / lay.tensor_bytes).map(tensor).collect();
        let paged = PagedKv::over(&on.stream, shape, lay.layout, &tensors, blocks).unwrap();
        Self::Device(paged, buffer)
    }

    pub(crate) fn blocks(&self) -> Blocks<'_> {
        match self {
            Self::Device(paged, _) => paged.into(),
            Self::Host(blocks, _) => blocks.into(),
        }
    }

    pub(crate) fn read(&self, on: &On) -> Vec<u8> {
        match self {
            Self::Device(_, buffer) => on.read(buffer.span()),
            Self::Host(_, buffer) => on.read_pinned(buffer),
        }
    }
}

/// Each destination once, sources as they come.
pub(crate) fn pairs(count: u64) -> Vec<BlockPair> {
    let mut random = Random(count);
    let mut targets: Vec<_> = (0..TO_BLOCKS).collect();
    random.shuffle(&mut targets);
    let pair = |destination| pair(random.below(FROM_BLOCKS), destination);
    targets.into_iter().take(count as usize).map(pair).collect()
}

/// What is copied in a run of the list.
struct Case {
    name: String,
    shapes: [KvShape; 2],
    lays: [Lay; 2],
    hosts: [bool; 2],
    shift: u64,
    pairs: Vec<BlockPair>,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let shapes = [
        shape(1, 1, 8, 1),
        shape(1, 1, 7, 3),
        shape(2, 2, 132, 4),
        shape(3, 2, 24, 5),
        shape(2, 1, 1152, 3),
        shape(1, 2, 2048, 7),
    ];
    for (number, shape) in (0..).zip(shapes) {
        for from in 0..LAYS {
            for to in 0..LAYS {
                let lays = [
                    lays(&shape, FROM_BLOCKS).swap_remove(from),
                    lays(&shape, TO_BLOCKS).swap_remove(to),
                ];
                let host = (number + from + to) % 3;
                let is_one = |lay: &Lay| lay.layout.tensors() == Tensors::One;
                let hosts = [host == 1 && is_one(&lays[0]), host == 2 && is_one(&lays[1])];
                let [a, b] = [lays[0].name, lays[1].name];
                cases.push(Case {
                    name: format!("{shape:?}, {a} to {b}, hosts {hosts:?}"),
                    shapes: [shape, shape],
                    lays,
                    hosts,
                    shift: [0, 8, 16, 4, 1][(from + 2 * to) % 5],
                    pairs: pairs([4, 2][(from + to / 2) % 2]),
                });
            }
        }
    }
    cases
}

impl Case {
    fn run(&self, on: &On) -> [Vec<u8>; 2] {
        let [from, to] = [0, 1].map(|side| {
            let blocks = [FROM_BLOCKS, TO_BLOCKS][side];
            let place = (self.hosts[side], self.shift * side as u64);
            Side::new(on, self.shapes[side], &self.lays[side], blocks, place)
        });
        let device_pairs = on.upload(&self.pairs);
        let copy = BlockCopy {
            from: from.blocks(),
            to: to.blocks(),
            pairs: device_pairs.span().into(),
            count: self.pairs.len() as u64,
            host_pairs: Some(BlockPairs::new(&self.pairs).unwrap()),
            from_blocks: FROM_BLOCKS,
            to_blocks: TO_BLOCKS,
            report: None,
            multiprocessors: None,
        };
        on.kernels.copy_blocks(&on.stream, copy).unwrap();
        [from.read(on), to.read(on)]
    }

    /// The formula, byte by byte.
    fn oracle(&self) -> [Vec<u8>; 2] {
        let from = noise(self.lays[0].bytes);
        let shift = self.shift as usize;
        let mut to = noise(self.lays[1].bytes + self.shift);
        for pair in &self.pairs {
            let bytes = 0..self.shapes[0].row_bytes();
            for mut place in places(&self.shapes[0], pair.source.index() as u64, bytes) {
                let source = from[(self.lays[0].at)(place) as usize];
                place.block = pair.destination.index() as u64;
                to[(self.lays[1].at)(place) as usize + shift] = source;
            }
        }
        [from, to]
    }
}

pub(crate) fn outputs(on: &On) -> Outputs {
    let mut outputs = Outputs::new();
    for case in cases() {
        let [from, to] = case.run(on);
        outputs.push((format!("source: {}", case.name), from));
        outputs.push((format!("destination: {}", case.name), to));
    }
    outputs.push(("pairs that are not there".into(), unknown_pairs(on, [0, 1])));
    outputs
}

/// Pairs that only the device sees to be out of range are passed over and reported.
fn unknown_pairs(on: &On, which: [usize; 2]) -> Vec<u8> {
    let shape = shape(2, 2, 64, 16);
    let [from, to] = which.map(|lay| {
        let lay = lays(&shape, 4).into_iter().nth(lay).unwrap();
        Side::new(on, shape, &lay, 4, (false, 0))
    });
    let seen = [[0, 0], [4, 1], [1, -1], [i32::MIN, i32::MAX], [2, 3]];
    let device_pairs = on.upload(&seen);
    let report = DeviceReport::new(&on.stream).unwrap();
    let copy = BlockCopy {
        from: from.blocks(),
        to: to.blocks(),
        pairs: device_pairs.span().into(),
        count: 5,
        host_pairs: None,
        from_blocks: 4,
        // Block 3 is not ready.
        to_blocks: 3,
        report: Some(&report),
        multiprocessors: Some(1),
    };
    on.kernels.copy_blocks(&on.stream, copy).unwrap();
    assert_eq!(report.take(&on.stream), Ok(Some(OutOfRange { count: 4, first: 1 })));
    to.read(on)
}

#[cfg(test)]
mod on_sim {
    use kv_kernels::{
        KernelError, PagedLayout,
        error::{Operand, OperandError, Side as Named},
        references,
    };

    use super::super::lays::Place;
    use super::super::on::{block, compare};
    use super::*;

    #[test]
    fn the_ptx_gives_what_the_reference_gives() {
        compare(&On::sim(references()), &On::sim(&[]), outputs);
    }

    #[test]
    fn every_byte_is_where_the_formula_says() {
        let on = On::sim(references());
        for case in cases() {
            assert!(case.run(&on) == case.oracle(), "{}", case.name);
        }
        on.assert_clean();
    }

    /// What the check of pairs is for: without the host's copy a block that two pairs write is not
    /// refused, and the device is found to write it twice in no order.
    #[test]
    fn a_destination_that_is_there_twice_is_a_race_where_nobody_checks() {
        let right = Right { on: On::sim(&[]), ..Right::new() };
        // Two tiles, so that no block of threads does both.
        let shape = shape(2, 2, 2048, 16);
        let on = &right.on;
        let side = || Side::new(on, shape, &lays(&shape, 6).swap_remove(0), 6, (false, 0));
        let (from, to) = (side(), side());
        for (ids, races) in [([pair(0, 3), pair(1, 2)], false), ([pair(0, 3), pair(1, 3)], true)] {
            let pairs = on.upload(&ids);
            let copy = BlockCopy {
                from: from.blocks(),
                to: to.blocks(),
                pairs: pairs.span().into(),
                host_pairs: None,
                ..right.copy()
            };
            on.kernels.copy_blocks(&on.stream, copy).unwrap();
            on.stream.synchronize().unwrap();
            let found = !on.sim.as_ref().unwrap().findings().is_empty();
            assert_eq!(found, races, "{ids:?}");
        }
    }

    #[test]
    fn a_pair_that_is_passed_over_is_told_of_once() {
        let on = On::sim(references());
        for from in 0..LAYS {
            for to in 0..LAYS {
                unknown_pairs(&on, [from, to]);
            }
        }
        on.assert_clean();
    }

    /// Blocks of a peer are described on a stream of the device that runs the kernel.
    #[test]
    fn blocks_go_to_a_peer_and_come_back() {
        for references in [references(), &[]] {
            let on = On::sim(references);
            let driver = on.device.driver().clone();
            let peer = cuda_driver::Device::open(driver, 1).unwrap();
            on.device.enable_access_to(&peer).unwrap();
            let shape = shape(2, 2, 24, 4);
            let (here, there) = (lays(&shape, 4).swap_remove(1), lays(&shape, 4).swap_remove(3));
            let local = Side::new(&on, shape, &here, 4, (false, 0));
            let memory = DeviceBuffer::alloc(&peer, there.bytes).unwrap();
            on.stream.fill(memory.span(), 0).unwrap();
            let remote = PagedKv::new(&on.stream, shape, there.layout, memory.span(), 4).unwrap();
            let before = local.read(&on);
            for (from, to, ids) in [
                (local.blocks(), (&remote).into(), [pair(0, 3), pair(2, 1)]),
                ((&remote).into(), local.blocks(), [pair(3, 1), pair(1, 3)]),
            ] {
                let pairs = on.upload(&ids);
                let copy = BlockCopy {
                    from,
                    to,
                    pairs: pairs.span().into(),
                    count: 2,
                    host_pairs: Some(BlockPairs::new(&ids).unwrap()),
                    from_blocks: 4,
                    to_blocks: 4,
                    report: None,
                    multiprocessors: None,
                };
                on.kernels.copy_blocks(&on.stream, copy).unwrap();
            }
            let mut expected = before.clone();
            for (from, to) in [(0, 1), (2, 3)] {
                for place in places(&shape, from, 0..24) {
                    let to = Place { block: to, ..place };
                    expected[(here.at)(to) as usize] = before[(here.at)(place) as usize];
                }
            }
            assert!(local.read(&on) == expected);
            on.assert_clean();
        }
    }

    /// Two memories of 6 blocks, 5 of which are ready in the destination, and a copy between them
    /// that lacks its pairs.
    struct Right {
        on: On,
        from: Side,
        to: Side,
        pairs: DeviceBuffer,
    }

    impl Right {
        fn new() -> Self {
            let on = On::sim(references());
            let shape = shape(2, 2, 64, 4);
            let side = || Side::new(&on, shape, &lays(&shape, 6).swap_remove(0), 6, (false, 0));
            let (from, to, pairs) = (side(), side(), on.memory(16));
            Self { on, from, to, pairs }
        }

        fn copy(&self) -> BlockCopy<'_> {
            BlockCopy {
                from: self.from.blocks(),
                to: self.to.blocks(),
                pairs: self.pairs.span().into(),
                count: 2,
                host_pairs: Some(BlockPairs::new(&[]).unwrap()),
                from_blocks: 6,
                to_blocks: 5,
                report: None,
                multiprocessors: None,
            }
        }

        fn refused(&self, copy: BlockCopy<'_>) -> KernelError {
            let before = self.on.launches();
            let error = self.on.kernels.copy_blocks(&self.on.stream, copy).unwrap_err();
            assert_eq!(self.on.launches(), before, "launched in spite of: {error}");
            error
        }
    }

    #[test]
    fn wrong_pairs_are_errors_with_their_numbers_and_nothing_is_launched() {
        let right = Right::new();
        let (on, good) = (&right.on, right.copy());
        let refused = |copy: BlockCopy<'_>| right.refused(copy);
        assert_eq!(refused(good), KernelError::BlockCount { count: 2, given: 0 });
        let with = |pairs: &[BlockPair]| {
            refused(BlockCopy { host_pairs: Some(BlockPairs::new(pairs).unwrap()), ..good })
        };
        assert_eq!(
            with(&[pair(0, 0), pair(6, 1)]),
            KernelError::BlockOutOfRange {
                place: 1,
                side: Named::Source,
                block: block(6),
                blocks: 6
            }
        );
        assert_eq!(
            with(&[pair(0, 5), pair(5, 1)]),
            KernelError::BlockOutOfRange {
                place: 0,
                side: Named::Destination,
                block: block(5),
                blocks: 5
            }
        );
        assert_eq!(
            BlockPairs::new(&[pair(0, 3), pair(1, 3)]),
            Err(KernelError::PairTwice { block: block(3), first: 0, second: 1 })
        );
        // Within one memory a block may not be read by one pair and written by another.
        let within = BlockCopy { to: right.from.blocks(), ..good };
        let chain = [pair(0, 1), pair(1, 2)];
        assert_eq!(
            refused(BlockCopy { host_pairs: Some(BlockPairs::new(&chain).unwrap()), ..within }),
            KernelError::SourceWritten { reader: 1, writer: 0, block: block(1) }
        );
        let itself = [pair(0, 1), pair(2, 2)];
        assert_eq!(
            refused(BlockCopy { host_pairs: Some(BlockPairs::new(&itself).unwrap()), ..within }),
            KernelError::SourceWritten { reader: 1, writer: 1, block: block(2) }
        );
        let fine = [pair(0, 1), pair(0, 2)];
        on.stream.upload(right.pairs.span(), bytemuck::cast_slice(&fine)).unwrap();
        on.kernels
            .copy_blocks(
                &on.stream,
                BlockCopy { host_pairs: Some(BlockPairs::new(&fine).unwrap()), ..within },
            )
            .unwrap();
        on.assert_clean();
    }

    #[test]
    fn wrong_memories_are_errors_with_their_numbers_and_nothing_is_launched() {
        let right = Right::new();
        let (on, good) = (&right.on, right.copy());
        let refused = |copy: BlockCopy<'_>| right.refused(copy);
        assert_eq!(
            refused(BlockCopy { to_blocks: 7, ..good }),
            KernelError::Blocks { num_blocks: 7, capacity: 6 }
        );
        let pairs = right.pairs.span().slice(0, 12).unwrap().into();
        assert_eq!(
            refused(BlockCopy { pairs, ..good }),
            OperandError::TooShort { operand: Operand::BlockPairs, needed_bytes: 16, bytes: 12 }
                .into()
        );
        let other = shape(2, 2, 64, 5);
        let tokens = Side::new(on, other, &lays(&other, 6).swap_remove(0), 6, (false, 0));
        assert_eq!(
            refused(BlockCopy { to: tokens.blocks(), ..good }),
            KernelError::Shapes {
                what: "tokens of a block",
                source_count: 4,
                destination_count: 5
            }
        );
        // The same bytes under another layout overlap, whatever the ids.
        let Side::Device(_, memory) = &right.from else { unreachable!() };
        let layout = PagedLayout::layer_major(&shape(2, 2, 64, 4), 5).unwrap();
        let half = memory.span().slice(1024, 5 * 1024).unwrap();
        let half = PagedKv::new(&on.stream, shape(2, 2, 64, 4), layout, half, 5).unwrap();
        assert!(matches!(
            refused(BlockCopy { to: (&half).into(), ..good }),
            KernelError::Operand(OperandError::Overlap {
                written: Operand::Pages,
                read: Operand::Pages,
                bytes: 5120,
                ..
            })
        ));
        on.kernels
            .copy_blocks(
                &on.stream,
                BlockCopy { count: 0, host_pairs: Some(BlockPairs::new(&[]).unwrap()), ..good },
            )
            .unwrap();
        on.assert_clean();
    }
}
