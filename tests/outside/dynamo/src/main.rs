//! Dynamo's router reads the events of a cache, as vLLM's bytes: after each of 2,000 requests it finds as long a
//! prefix on the device as the cache does.

use dynamo_kv_router::RadixTree;
use dynamo_kv_router::protocols::{
    BlockHashOptions, StorageTier, WorkerWithDpRank, compute_block_hash_for_seq,
};
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};
use kv_manager::{
    Answer, Completion, EventReader, Manager, ManagerOptions, Outcome, Request, WorkerId, vllm,
};
use kv_pool::{BlockHash, PoolConfig, Tier};

const BLOCK: u32 = 4;
const REQUESTS: u64 = 2_000;
const WORKER: WorkerWithDpRank = WorkerWithDpRank { worker_id: 7, dp_rank: 3 };

/// Dynamo's side: bytes in, scores out.
struct Router {
    normalizer: ZmqEventNormalizer,
    device: RadixTree,
    /// Blocks that other tiers were told to have, and not to have.
    host: [usize; 2],
    events: u64,
}

impl Router {
    fn read(&mut self, bytes: &[u8]) {
        let batch = decode_event_batch(bytes).expect("Dynamo reads the batch");
        assert_eq!((batch.ts, batch.data_parallel_rank), (1.0, Some(3)));
        for raw in batch.events {
            self.events += 1;
            let event =
                self.normalizer.normalize(raw, self.events, WORKER).expect("no event is filtered");
            let event = event.into_router_event().expect("an event of a worker");
            if event.storage_tier == StorageTier::HostPinned {
                let removed = matches!(
                    event.event.data,
                    dynamo_kv_router::protocols::KvCacheEventData::Removed(_)
                );
                self.host[usize::from(removed)] += 1;
                continue;
            }
            assert_eq!(event.storage_tier, StorageTier::Device);
            self.device.apply_event(event).expect("the router takes the event");
        }
    }

    fn score(&self, ids: &[u32]) -> u32 {
        let hashes = compute_block_hash_for_seq(ids, BLOCK, BlockHashOptions::default());
        let scores = self.device.find_matches(hashes, false).scores;
        scores.get(&WORKER).copied().unwrap_or(0)
    }
}

fn publish(events: &mut EventReader, router: &mut Router, losses: &mut u64) {
    let mut read = Vec::new();
    while events.read(&mut read).is_err() {
        *losses += 1;
    }
    let mut bytes = Vec::new();
    vllm::encode(&read, 1.0, Some(3), &mut bytes);
    router.read(&bytes);
}

fn names(ids: &[u32], generation: u64) -> Vec<BlockHash> {
    let mut parent = match generation {
        0 => BlockHash::ROOT,
        generation => BlockHash::salted(&generation.to_le_bytes()),
    };
    let chain = ids.chunks_exact(BLOCK as usize).map(|ids| {
        parent = BlockHash::chain(parent, ids);
        parent
    });
    chain.collect()
}

fn main() {
    for host in [0, 64] {
        let pool = PoolConfig { secondary_blocks: host, ..PoolConfig::primary_only(96) };
        let options = ManagerOptions {
            block_tokens: BLOCK,
            pool,
            events_max: 64,
            ..ManagerOptions::default()
        };
        let mut manager = Manager::new(options).expect("a small manager");
        let mut events = manager.events().expect("it keeps events");
        let mut router = Router {
            normalizer: ZmqEventNormalizer::new(BLOCK),
            device: RadixTree::new(),
            host: [0; 2],
            events: 0,
        };
        let (mut random, mut losses, mut hits) = (7_u64, 0, 0_u64);
        for at in 0..REQUESTS {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let (family, turn) = ((random >> 33) as u32 % 12, (random >> 45) as u32 % 5);
            let prompt: Vec<u32> = (0..8 + 8 * turn)
                .map(|token| family * 1_000 + token + if token > 15 { turn } else { 0 })
                .collect();
            let found = manager.pool().match_prefix(&names(&prompt, at / 500));
            let near = found.locations().take_while(|at| at.tier == Tier::Primary).count();
            drop(found);
            assert_eq!(router.score(&prompt), near as u32, "request {at}: {prompt:?}");
            hits += near as u64;
            compute(&mut manager, prompt);
            if at % 500 == 499 {
                manager.reset();
            }
            if host == 0 && at % 100 == 50 {
                // More happens than is kept.
                fill(&mut manager);
            }
            publish(&mut events, &mut router, &mut losses);
        }
        assert!(hits > REQUESTS, "{hits} blocks were found");
        assert!(host > 0 || losses > 0, "no loss was met");
        assert_eq!(router.host.iter().all(|&count| count > 0), host > 0);
        println!(
            "{REQUESTS} requests, {hits} blocks found, {} events read, {losses} losses",
            router.events
        );
    }
}

/// Fills the device with other content.
fn fill(manager: &mut Manager) {
    for family in 0..10_u32 {
        compute(manager, (0..32).map(|token| 1_000_000 + family * 100 + token).collect());
    }
}

/// Computes a prompt, which is cached then.
fn compute(manager: &mut Manager, prompt: Vec<u32>) {
    let step = manager.begin_step().expect("no step is open");
    let answer = manager.admit(&mut [Request::new(prompt)], u64::MAX).pop();
    let Some(Answer::Admitted(mut sequence)) = answer else { panic!("there is room for one") };
    let number = manager.stage(&step, &mut [&mut sequence]).expect("it has tokens").step;
    manager.finish_step(step).expect("its own step");
    let completion = Completion { worker: WorkerId(0), step: number, outcome: Outcome::Done };
    manager.complete(completion).expect("its own worker");
}
