//! Every size and count that a caller can pass, at 0, 1, an ordinary value, the maximum, and values
//! whose products overflow. Each is accepted or refused with a typed error, in bounded memory. The
//! allocator provides at most 1 GiB in total, so an unchecked allocation ends the program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use kv_multigpu::place::{
    GpuCapacity, HeadShards, HeadsError, KvReplication, LayerShape, Link, LinkMatrix, ModelShape,
    Placement, PlacementError, Strategy,
};

/// An allocator that provides at most 1 GiB at a time.
struct Bounded;

static LIVE: AtomicUsize = AtomicUsize::new(0);
const MOST: usize = 1 << 30;

// SAFETY: passes its arguments to the system's allocator, which meets the contract; null is a
// refusal.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if LIVE.fetch_add(layout.size(), Relaxed).saturating_add(layout.size()) > MOST {
            LIVE.fetch_sub(layout.size(), Relaxed);
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise is the same here.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static BOUNDED: Bounded = Bounded;

const BYTES: [u64; 8] = [0, 1, 16, 64, 1 << 40, 1 << 63, u64::MAX - 1, u64::MAX];
const COUNTS: [usize; 8] = [0, 1, 3, 4096, 4097, 1 << 40, usize::MAX / 8 + 1, usize::MAX];

#[test]
fn heads_of_any_number_are_shared_out_or_refused() {
    let numbers = [0, 1, 8, 1 << 40, u64::MAX - 1, u64::MAX];
    let (mut made, mut refused) = (0, 0);
    for query_heads in numbers {
        for kv_heads in numbers {
            for gpus in COUNTS {
                for replication in [KvReplication::Refuse, KvReplication::Allow] {
                    match HeadShards::new(query_heads, kv_heads, gpus, replication) {
                        Ok(shards) => {
                            made += 1;
                            for gpu in [0, gpus - 1, gpus, usize::MAX] {
                                let kv = shards.kv_heads_of(gpu);
                                assert_eq!(kv.is_empty(), gpu >= gpus, "{shards:?}");
                                assert!(kv.end <= kv_heads);
                                let query = shards.query_heads_of(gpu);
                                assert_eq!(query.is_empty(), gpu >= gpus, "{shards:?}");
                                assert!(query.end <= query_heads);
                            }
                        }
                        Err(
                            HeadsError::Counts { .. }
                            | HeadsError::QueryHeads { .. }
                            | HeadsError::KvHeads { .. },
                        ) => refused += 1,
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        }
    }
    assert!(made > 10 && refused > 100, "{made} {refused}");
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
    }
    for latency_ns in BYTES {
        for bytes_per_second in BYTES {
            for bytes in BYTES {
                assert!(
                    Link { latency_ns, bytes_per_second }.transfer_ns(bytes) >= latency_ns.into()
                );
            }
        }
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
            let _ = (placement.kv_block_bytes(at, at), placement.gpu_of_layer(at));
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

#[test]
fn matrices_of_any_size_are_made_or_refused() {
    let link = Link { latency_ns: u64::MAX, bytes_per_second: 0 };
    for at in COUNTS {
        assert_eq!(LinkMatrix::from_fn(at, |_, _| link).is_ok(), (1..=64).contains(&at));
        let links = LinkMatrix::uniform(2, link).unwrap();
        assert_eq!(links.link(at, 0).is_some(), at == 1);
        assert_eq!(links.link(0, at).is_some(), at == 1);
    }
}
