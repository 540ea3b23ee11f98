//! KV from TP n to TP m: every head arrives where the new shards have it, byte for byte.

use crate::common::machine;
use crate::common::moving::{buffer, contents, pair, pattern};
use cuda_driver::{Device, DeviceBuffer, Stream};
use kv_multigpu::moves::{
    BlockMemory, BlockOfHeads, BlockPairs, HeadOrder, MoveOrder, Mover, MoverConfig, ReshardPlan,
};
use kv_multigpu::place::{HeadShards, KvReplication, PlacementError};

const HEADS: u64 = 4;
const TOKENS: u32 = 3;
const HEAD_BYTES: u64 = 16;
const BLOCKS: u32 = 5;
const PLANES: usize = 2;

fn shards(gpus: usize) -> HeadShards {
    HeadShards::new(16, HEADS, gpus, KvReplication::Allow).unwrap()
}

/// The bytes of a head of a token of a block, in a plane of the whole model.
fn head(plane: usize, block: u32, token: u32, head: u64) -> Vec<u8> {
    let seed = (plane as u64) << 40 | u64::from(block) << 24 | u64::from(token) << 8 | head;
    pattern(seed + 1, HEAD_BYTES as usize)
}

/// A plane of one shard.
fn plane(shards: &HeadShards, gpu: usize, plane: usize, order: HeadOrder) -> Vec<u8> {
    let heads = shards.kv_heads_of(gpu);
    let mut bytes = Vec::new();
    for block in 0..BLOCKS {
        match order {
            HeadOrder::TokensFirst => (0..TOKENS).for_each(|token| {
                heads.clone().for_each(|h| bytes.extend(head(plane, block, token, h)));
            }),
            HeadOrder::HeadsFirst => heads.clone().for_each(|h| {
                (0..TOKENS).for_each(|token| bytes.extend(head(plane, block, token, h)));
            }),
        }
    }
    bytes
}

fn spans(buffers: &[DeviceBuffer]) -> Vec<cuda_driver::DeviceSpan> {
    buffers.iter().map(DeviceBuffer::span).collect()
}

fn reshard(devices: &[Device], old: usize, new: usize, order: HeadOrder) {
    let (from, to) = (shards(old), shards(new));
    let block = BlockOfHeads { tokens: TOKENS, head_bytes: HEAD_BYTES, order };
    let plan = ReshardPlan::new(&from, &to, block, |old, new| old == new).unwrap();
    let streams: Vec<_> = devices.iter().map(|device| Stream::new(device).unwrap()).collect();
    let sources: Vec<Vec<_>> = (0..old)
        .map(|gpu| {
            (0..PLANES).map(|p| buffer(&streams[gpu], &plane(&from, gpu, p, order))).collect()
        })
        .collect();
    let bytes = plan.new_grid(BLOCKS).block_stride * u64::from(BLOCKS);
    let targets: Vec<Vec<_>> = (0..new)
        .map(|gpu| {
            (0..PLANES).map(|_| DeviceBuffer::alloc(&devices[gpu], bytes).unwrap()).collect()
        })
        .collect();
    let pairs: Vec<_> = (0..BLOCKS).map(|id| pair(id, id)).collect();
    for transfer in plan.transfers() {
        let (near, far) = (&devices[transfer.from()], &devices[transfer.to()]);
        let config = MoverConfig { chunk_bytes: 4096, kernel_blocks: 1, ..MoverConfig::default() };
        let mut mover = Mover::new(near, far, config).unwrap();
        let grids = [plan.old_grid(BLOCKS), plan.new_grid(BLOCKS)];
        let source =
            BlockMemory::new(near, spans(&sources[transfer.from()]), grids[0], ()).unwrap();
        let target = BlockMemory::new(far, spans(&targets[transfer.to()]), grids[1], ()).unwrap();
        let order = MoveOrder { after: &streams[transfer.from()], on: &streams[transfer.to()] };
        let what = transfer.block_move(BlockPairs::new(&pairs).unwrap());
        let moved = mover.move_blocks(source, target, &what, order).map_err(|failed| failed.error);
        moved.unwrap().finish().map_err(|(error, _)| error).unwrap();
    }
    for (gpu, planes) in targets.iter().enumerate() {
        for (p, buffer) in planes.iter().enumerate() {
            let seen = contents(&streams[gpu], buffer.span());
            assert!(
                seen == plane(&to, gpu, p, order),
                "{old} to {new}, GPU {gpu}, plane {p}, {order:?}"
            );
        }
    }
}

#[test]
fn heads_arrive_in_the_new_shards_with_and_without_access() {
    for access in [true, false] {
        let (sim, registry) = machine(8, access);
        sim.prefer_ptx(true);
        let devices: Vec<_> = (0..8).map(|i| registry.device(i).unwrap()).collect();
        for order in [HeadOrder::TokensFirst, HeadOrder::HeadsFirst] {
            // Eight GPUs: each of the four heads on two of them.
            for (old, new) in [(1, 4), (4, 1), (2, 4), (4, 2), (2, 2), (8, 2), (2, 8), (4, 8)] {
                reshard(&devices, old, new, order);
            }
        }
        assert_eq!(sim.findings(), []);
        drop((devices, registry));
        assert!(sim.check_leaks().is_clean());
    }
}

#[test]
fn every_new_head_comes_once_from_a_holder_and_near_if_it_can() {
    let block = BlockOfHeads { tokens: 16, head_bytes: 256, order: HeadOrder::TokensFirst };
    for old in [1, 2, 4, 8, 16] {
        for new in [1, 2, 4, 8, 16] {
            let (from, to) = (shards(old), shards(new));
            let plan = ReshardPlan::new(&from, &to, block, |old, new| old == new).unwrap();
            let mut came = vec![Vec::new(); new];
            for transfer in plan.transfers() {
                for head in transfer.heads() {
                    assert!(from.kv_heads_of(transfer.from()).contains(&head));
                    let near =
                        transfer.to() < old && from.kv_heads_of(transfer.to()).contains(&head);
                    assert!(
                        !near || transfer.from() == transfer.to(),
                        "{old} to {new}: {transfer:?}"
                    );
                    came[transfer.to()].push(head);
                }
                let heads = transfer.heads().end - transfer.heads().start;
                assert_eq!(transfer.block_bytes(), heads * 16 * 256);
            }
            for (gpu, came) in came.into_iter().enumerate() {
                assert_eq!(came, to.kv_heads_of(gpu).collect::<Vec<_>>());
            }
        }
    }
    let other = HeadShards::new(16, 8, 2, KvReplication::Refuse).unwrap();
    let refused = |to, block| ReshardPlan::new(&shards(2), to, block, |_, _| false).unwrap_err();
    assert_eq!(refused(&other, block), PlacementError::OtherHeads { from: 4, to: 8 });
    let huge = BlockOfHeads { head_bytes: u64::MAX, ..block };
    assert!(matches!(refused(&shards(2), huge), PlacementError::Block { kv_heads: 4, .. }));
}
