//! Every size and count that a caller can pass, with 0, 1, an ordinary value, the most there is, and values whose
//! products overflow: each is taken or refused with a typed error, in bounded memory.

use crate::common::machine;
use crate::common::moving::pair;
use cuda_driver::host_pages::HostPages;
use cuda_driver::{Device, DeviceBuffer, Stream};
use kv_multigpu::DeviceUuid;
use kv_multigpu::moves::{
    BlockGrid, BlockMemory, BlockMove, BlockPairs, HandOver, Held, MoveError, MoveOrder, Mover,
    MoverConfig, Route,
};
use kv_multigpu::place::{
    GpuCapacity, HeadShards, KvReplication, LayerShape, Link, LinkMatrix, ModelShape, Placement,
    PlacementError, Strategy,
};
use kv_multigpu::threads::{DeviceThread, DeviceThreadOptions, SpawnThreadError};
use kv_multigpu::topology::{Sources, Topology};

const BYTES: [u64; 8] = [0, 1, 16, 64, 1 << 40, 1 << 63, u64::MAX - 1, u64::MAX];
const COUNTS: [usize; 8] = [0, 1, 3, 4096, 4097, 1 << 40, usize::MAX / 8 + 1, usize::MAX];
const IDS: [u32; 5] = [0, 1, 4, u32::MAX - 1, u32::MAX];

fn devices() -> [Device; 2] {
    let (_, registry) = machine(2, true);
    [0, 1].map(|ordinal| registry.device(ordinal).unwrap())
}

/// Ordinary, and so small that many of it are made quickly.
const CONFIG: MoverConfig = MoverConfig {
    prefer: Route::Push,
    chunk_bytes: 64,
    chunks: 2,
    table_pairs: 4,
    tables: 2,
    kernel_blocks: 1,
};

#[test]
fn movers_of_any_configuration_are_made_or_refused() {
    let all = devices();
    let mut configs = Vec::new();
    for prefer in [Route::Push, Route::Pull, Route::Host] {
        let config = MoverConfig { prefer, ..CONFIG };
        configs.extend(BYTES.map(|chunk_bytes| MoverConfig { chunk_bytes, ..config }));
        configs.extend(COUNTS.map(|chunks| MoverConfig { chunks, ..config }));
        configs.extend(COUNTS.map(|table_pairs| MoverConfig { table_pairs, ..config }));
        let pairs = [1 << 24, (1 << 24) + 1];
        configs.extend(pairs.map(|table_pairs| MoverConfig { table_pairs, tables: 0, ..config }));
        configs.extend(COUNTS.map(|tables| MoverConfig { tables, ..config }));
        configs.extend(IDS.map(|kernel_blocks| MoverConfig { kernel_blocks, ..config }));
    }
    let (mut made, mut refused) = (0, 0);
    for config in configs {
        match Mover::new(&all[0], &all[1], config) {
            Ok(_) => made += 1,
            Err(
                MoveError::Zero { .. }
                | MoveError::TooMany { .. }
                | MoveError::Memory { .. }
                | MoveError::Device(_),
            ) => refused += 1,
            Err(error) => panic!("{config:?}: {error}"),
        }
    }
    assert!(made > 30 && refused > 50, "{made} {refused}");
    let of = |config| Mover::new(&all[0], &all[1], config).unwrap_err();
    assert_eq!(
        of(MoverConfig { table_pairs: usize::MAX, ..CONFIG }),
        MoveError::TooMany { what: "pairs of a table", count: u64::MAX, most: 1 << 24 }
    );
    assert_eq!(
        of(MoverConfig { tables: usize::MAX, ..CONFIG }),
        MoveError::TooMany { what: "tables", count: u64::MAX, most: 4096 }
    );
}

/// Chunk by chunk, pinning would go on until the system ends the process.
#[test]
fn movers_that_would_pin_more_than_the_host_has_are_refused_before_they_pin() {
    let Some(host_bytes) = HostPages::host_bytes() else { return };
    let all = devices();
    let through_host = MoverConfig { prefer: Route::Host, ..CONFIG };
    let table_bytes = 8 * (2 * 1024 + CONFIG.table_pairs as u64);
    let tables_bytes = CONFIG.tables as u64 * table_bytes;
    let half = host_bytes.div_ceil(2);
    for (config, bytes) in [
        (
            MoverConfig { chunk_bytes: 1 << 40, chunks: 4096, ..through_host },
            (4096 << 40) + tables_bytes,
        ),
        (MoverConfig { chunk_bytes: half, chunks: 2, tables: 0, ..through_host }, 2 * half),
        // Neither chunks nor tables alone are too much.
        (
            MoverConfig { chunk_bytes: host_bytes - 64, chunks: 1, ..through_host },
            host_bytes - 64 + tables_bytes,
        ),
    ] {
        if bytes > host_bytes {
            let refused = Mover::new(&all[0], &all[1], config).unwrap_err();
            assert_eq!(refused, MoveError::Memory { bytes, host_bytes }, "{config:?}");
        }
    }
    // The other ways have no chunks.
    let without = MoverConfig { chunk_bytes: 1 << 40, chunks: 4096, ..CONFIG };
    assert!(Mover::new(&all[0], &all[1], without).is_ok());
    let tables = MoverConfig { table_pairs: 1 << 24, tables: 4096, ..CONFIG };
    let bytes = 4096 * 8 * (2 * 1024 + (1 << 24));
    if bytes > host_bytes {
        let refused = Mover::new(&all[0], &all[1], tables).unwrap_err();
        assert_eq!(refused, MoveError::Memory { bytes, host_bytes });
    }
}

#[test]
fn boundaries_of_any_size_are_made_or_refused() {
    let all = devices();
    let (producer, consumer) = (Stream::new(&all[0]).unwrap(), Stream::new(&all[1]).unwrap());
    for bytes in BYTES {
        for count in COUNTS {
            // 4,096 buffers are made once.
            if count == 4096 && bytes != 16 {
                continue;
            }
            let mover = Mover::new(&all[0], &all[1], MoverConfig { tables: 0, ..CONFIG }).unwrap();
            let Ok(mut boundary) = HandOver::new(mover, bytes, count) else {
                assert!(bytes == 0 || bytes > 64 || count == 0 || count > 4096);
                continue;
            };
            for send in BYTES {
                let outgoing = boundary.room(&producer).unwrap();
                match boundary.send(outgoing, send, &producer, &consumer) {
                    Ok(incoming) => boundary.done(incoming, &consumer).unwrap(),
                    Err(failed) => {
                        assert!(send > bytes && matches!(failed.error, MoveError::OutOfBounds(_)));
                        boundary.give_back(failed.outgoing).unwrap();
                    }
                }
            }
            consumer.synchronize().unwrap();
        }
    }
}

#[test]
fn blocks_of_any_shape_are_moved_or_refused() {
    let all = devices();
    let mut mover = Mover::new(&all[0], &all[1], CONFIG).unwrap();
    let (after, on) = (Stream::new(&all[0]).unwrap(), Stream::new(&all[1]).unwrap());
    let order = MoveOrder { after: &after, on: &on };
    let ends = all.each_ref().map(|device| DeviceBuffer::alloc(device, 256).unwrap());
    let memory = |end: usize, planes: usize, grid| {
        BlockMemory::new(&all[end], vec![ends[end].span(); planes], grid, ())
    };
    let mut grids = Vec::new();
    for blocks in IDS {
        for block_stride in BYTES {
            for row_stride in [0, 16, u64::MAX] {
                grids.push(BlockGrid { blocks, block_stride, row_stride });
            }
        }
    }
    let mut taken: Vec<BlockGrid> = Vec::new();
    for grid in grids {
        for planes in [0, 1, 1024, 1025, 1 << 16] {
            let made = memory(0, planes, grid).is_ok();
            assert!(!made || (1..=1024).contains(&planes), "{grid:?}");
            assert!(!made || grid.block_stride > 0, "{grid:?} names one byte many times");
            if made && planes == 1 {
                taken.push(grid);
            }
        }
    }
    assert!(taken.len() > 10, "{taken:?}");
    let (mut moved, mut refused) = (0, 0);
    for grid in taken {
        for rows in IDS {
            for row_bytes in BYTES {
                for (source_offset, destination_offset) in
                    [(0, 0), (0, u64::MAX), (u64::MAX, 0), (1 << 63, 1 << 63)]
                {
                    for id in [0, 1, 4, i32::MAX as u32] {
                        let pairs = [pair(id, id)];
                        let pairs = BlockPairs::new(&pairs).unwrap();
                        let what =
                            BlockMove { pairs, rows, row_bytes, source_offset, destination_offset };
                        let [source, target] = [0, 1].map(|end| memory(end, 1, grid).unwrap());
                        match mover.move_blocks(source, target, &what, order) {
                            Ok(done) => {
                                moved += 1;
                                drop(done.finish());
                            }
                            Err(failed) => {
                                refused += 1;
                                failed.held.try_finish().unwrap();
                            }
                        }
                    }
                }
            }
        }
    }
    assert!(moved > 10 && refused > 1000, "{moved} {refused}");
    for bytes in BYTES.into_iter().filter(|&bytes| bytes <= 256) {
        let held =
            |end: usize, bytes| Held::new(&all[end], ends[end].span().slice(0, bytes).unwrap(), ());
        assert!(mover.move_tensor(held(0, bytes), held(1, bytes), order).is_ok());
        assert!(mover.move_tensor(held(0, bytes), held(1, bytes ^ 1), order).is_err());
    }
    mover.settle().unwrap();
}

#[test]
fn whole_blocks_of_any_length_are_moved_or_refused() {
    let all = devices();
    let mut mover = Mover::new(&all[0], &all[1], CONFIG).unwrap();
    let (after, on) = (Stream::new(&all[0]).unwrap(), Stream::new(&all[1]).unwrap());
    let order = MoveOrder { after: &after, on: &on };
    let ends = all.each_ref().map(|device| DeviceBuffer::alloc(device, 256).unwrap());
    let grid = BlockGrid { blocks: 4, block_stride: 64, row_stride: 64 };
    for block_bytes in BYTES {
        let pairs = [pair(0, 3)];
        let what = BlockMove::whole(BlockPairs::new(&pairs).unwrap(), block_bytes);
        let [source, target] = [0, 1]
            .map(|end| BlockMemory::new(&all[end], vec![ends[end].span()], grid, ()).unwrap());
        let target = target.mapped_for(&[i32::MIN, -1, 0, 1, i32::MAX]);
        let moved = mover.move_blocks(source, target, &what, order);
        let done = moved.map(|done| drop(done.finish())).map_err(|failed| {
            let why = failed.error.to_string();
            failed.held.try_finish().unwrap();
            why
        });
        assert_eq!(done.is_ok(), block_bytes <= 64, "{block_bytes} of 64 bytes: {done:?}");
    }
    mover.settle().unwrap();
}

#[test]
fn threads_of_any_queue_are_started_or_refused() {
    let all = devices();
    for tasks_max in COUNTS {
        let options = DeviceThreadOptions { tasks_max, ..DeviceThreadOptions::default() };
        match DeviceThread::spawn(&all[0], options) {
            Ok(thread) => {
                assert_eq!(thread.submit(|_| 1).unwrap().wait(), Ok(1));
                thread.close().unwrap();
            }
            Err(error) => {
                assert!(matches!(error, SpawnThreadError::NoTasks { tasks_max: 0 }), "{error}");
                assert_eq!(tasks_max, 0);
            }
        }
    }
    for (name, is_one) in [("", true), ("a", true), ("a\0b", false), (&"long".repeat(1000), true)] {
        let options = DeviceThreadOptions { name: Some(name.to_owned()), tasks_max: 1 };
        let spawned = DeviceThread::spawn(&all[0], options);
        assert_eq!(spawned.is_ok(), is_one, "{name}");
        spawned.iter().for_each(|thread| thread.close().unwrap());
    }
}

#[test]
fn ordinals_of_any_size_name_a_device_or_none() {
    let (_, registry) = machine(2, true);
    for ordinal in [i32::MIN, -1, 0, 1, 2, i32::MAX] {
        let is_one = (0..2).contains(&ordinal);
        assert_eq!(registry.device(ordinal).is_ok(), is_one);
        assert_eq!(registry.entry(ordinal).is_ok(), is_one);
        assert_eq!(registry.probe(ordinal).is_ok(), is_one);
        assert_eq!(registry.drain(ordinal).is_ok(), is_one);
        assert_eq!(registry.resume(ordinal).is_ok(), is_one);
        assert_eq!(registry.close(ordinal).is_ok(), is_one);
        assert_eq!(registry.reopen(ordinal).is_ok(), is_one);
    }
    for digits in [0, 1, 31, 32, 33, 1 << 16] {
        let text = format!("GPU-{}", "0".repeat(digits));
        assert!(text.parse::<DeviceUuid>().is_err());
    }
}

#[test]
fn heads_of_any_number_are_shared_out_or_refused() {
    let counts = [0, 1, 8, 64, 1 << 40, u64::MAX / 2, u64::MAX];
    let mut made_any = 0;
    for query_heads in counts {
        for kv_heads in counts {
            for gpus in COUNTS {
                for replication in [KvReplication::Refuse, KvReplication::Allow] {
                    let made = HeadShards::new(query_heads, kv_heads, gpus, replication);
                    let Ok(made) = made else { continue };
                    for gpu in [0, gpus - 1, gpus, usize::MAX] {
                        let (query, kv) = (made.query_heads_of(gpu), made.kv_heads_of(gpu));
                        assert!(query.end <= query_heads && kv.end <= kv_heads);
                        assert_eq!((query.is_empty(), kv.is_empty()), (gpu >= gpus, gpu >= gpus));
                    }
                    made_any += 1;
                }
            }
        }
    }
    assert!(made_any > 20, "{made_any}");
}

#[test]
fn links_and_places_of_any_size_are_told() {
    let all = devices();
    let topology = Topology::discover(&all, &Sources::default()).unwrap();
    for free_bytes in BYTES {
        assert_eq!(topology.capacities(|_| free_bytes)[1].free_bytes, free_bytes);
    }
    for at in COUNTS {
        assert_eq!(topology.pair(at, 0).is_some(), at == 1);
    }
    let none = Topology::discover(&[], &Sources::default()).unwrap();
    assert!(none.estimated_links().is_err());
}

#[test]
fn models_and_machines_of_any_size_are_placed_or_refused() {
    let layer = LayerShape { weight_bytes: 1, kv_block_bytes: 8, output_token_bytes: 1 };
    let link = Link { latency_ns: 1, bytes_per_second: 1 };
    for count in COUNTS {
        let model = ModelShape::uniform(count, layer, 1);
        assert_eq!(model.is_ok(), (1..=512).contains(&count));
        if let Err(error) = model {
            assert_eq!(error, PlacementError::Layers { layers: count, most: 512 });
        }
        assert_eq!(LinkMatrix::uniform(count, link).is_ok(), (1..=64).contains(&count));
        let links = LinkMatrix::uniform(2, link).unwrap();
        let found = [links.link(count, 0), links.link(0, count)].map(|link| link.is_some());
        assert_eq!(found, [count == 1; 2]);
    }
    let (mut placed, mut refused) = (0, 0);
    let few = [0, 1, 1 << 20, 1 << 62, u64::MAX];
    for size in few {
        for [weight_bytes, kv_block_bytes, output_token_bytes] in
            [[size, 8, 1], [1, size, 1], [1, 8, size], [size, size, size]]
        {
            let layer = LayerShape { weight_bytes, kv_block_bytes, output_token_bytes };
            for kv_blocks in few {
                for step_tokens in few {
                    for workspace_bytes in [0, u64::MAX] {
                        let layers = vec![layer; 3];
                        let model = ModelShape { layers, kv_blocks, workspace_bytes, step_tokens };
                        for free_bytes in [0, 1 << 40, u64::MAX] {
                            for speed in [0, 1, u64::MAX] {
                                match place(&model, free_bytes, speed) {
                                    0 => refused += 1,
                                    count => placed += count,
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    assert!(placed > 100 && refused > 1000, "{placed} {refused}");
}

/// Places a model with every strategy on two GPUs, and reads all figures of each placement. Returns
/// how many fit.
fn place(model: &ModelShape, free_bytes: u64, speed: u64) -> usize {
    let gpus =
        [1, 2].map(|i| GpuCapacity { uuid: [i; 16], free_bytes, memory_bytes_per_second: speed });
    let link = Link { latency_ns: u64::MAX, bytes_per_second: speed };
    let links = LinkMatrix::uniform(2, link).unwrap();
    let mut placed: Vec<_> = Strategy::ALL
        .into_iter()
        .map(|strategy| Placement::layers(model, &gpus, &links, strategy))
        .collect();
    for assignment in [vec![], vec![0, 1, 0], vec![usize::MAX; 3]] {
        placed.push(Placement::with_assignment(model, &gpus, &links, assignment));
    }
    for heads in [0, 2, u64::MAX] {
        let allow = KvReplication::Allow;
        placed.push(Placement::sharded(model, &gpus, &links, heads, heads, allow));
    }
    let fit: Vec<_> = placed.into_iter().flatten().collect();
    for placement in &fit {
        assert!(!placement.explain().to_string().is_empty());
        let _ =
            (placement.step_time(), placement.kv_blocks_max(), placement.link_bytes_per_token());
        for at in [0, 1, 2, usize::MAX] {
            let _ = (placement.load(at), placement.layers_on(at).count());
            let _ = placement.kv_block_bytes(at, at);
        }
        assert_eq!(placement.to_string().parse::<Placement>().as_ref(), Ok(placement));
    }
    fit.len()
}

#[test]
fn texts_with_any_numbers_are_placements_or_refused() {
    let layer = LayerShape { weight_bytes: 11, kv_block_bytes: 8, output_token_bytes: 13 };
    let model = ModelShape::uniform(3, layer, 17).unwrap();
    let gpus = [1, 2].map(|i| GpuCapacity {
        uuid: [i; 16],
        free_bytes: 1 << 30,
        memory_bytes_per_second: 19,
    });
    let links = LinkMatrix::uniform(2, Link { latency_ns: 23, bytes_per_second: 29 }).unwrap();
    let text = Placement::layers(&model, &gpus, &links, Strategy::LeastCost).unwrap().to_string();
    let words: Vec<_> = text.split_inclusive([' ', '\n']).collect();
    let mut refused = 0;
    for (at, word) in words.iter().enumerate() {
        if !word.trim().bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        for number in ["0", "1", "18446744073709551615", "18446744073709551616", "", "-1"] {
            let mut words: Vec<_> = words.iter().map(|&word| word.to_owned()).collect();
            words[at] = format!("{number}{}", &word[word.trim().len()..]);
            refused += usize::from(words.concat().parse::<Placement>().is_err());
        }
    }
    assert!(refused > 20, "{refused}");
}
