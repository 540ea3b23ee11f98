//! NVIDIA Dynamo's router: its decoder, its indexes of the device and of the tiers below, its scheduler and its cost
//! function, from crates.io. Nothing here decides anything; it puts their parts together as Dynamo does.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use dynamo_kv_router::config::KvRouterConfig;
use dynamo_kv_router::indexer::{
    LowerTierIndexers, LowerTierQueryOptions, ThreadPoolIndexer, TieredMatchDetails,
    query_lower_tiers_with_options,
};
use dynamo_kv_router::protocols::{
    BlockHashOptions, KvCacheEventData, WorkerConfigLike, WorkerWithDpRank,
    compute_block_hash_for_seq, compute_seq_hash_for_block,
};
use dynamo_kv_router::scheduling::overlap::{
    OverlapSignals, cache_hit_estimates_from_tiered_matches,
    tier_overlap_blocks_from_tiered_matches,
};
use dynamo_kv_router::scheduling::{ScheduleMode, ScheduleRequest};
use dynamo_kv_router::selector::DefaultWorkerSelector;
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};
use dynamo_kv_router::{
    ActiveSequencesMultiWorker, ConcurrentRadixTreeCompressed, LocalScheduler,
    NoopSequencePublisher, WorkerType,
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::instance::BLOCK_TOKENS;
use crate::prompt::Prompt;

/// What the scheduler knows of an instance.
#[derive(Clone, Debug, PartialEq)]
pub struct Worker {
    rank: u32,
    blocks: u64,
}

impl WorkerConfigLike for Worker {
    fn data_parallel_start_rank(&self) -> u32 {
        self.rank
    }

    fn data_parallel_size(&self) -> u32 {
        1
    }

    fn max_num_batched_tokens(&self) -> Option<u64> {
        None
    }

    fn total_kv_blocks(&self) -> Option<u64> {
        Some(self.blocks)
    }
}

/// Where a request goes, and what the router expects to be cached there.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    pub instance: usize,
    /// Blocks of its prefix on the device, and those that follow in tiers below it.
    pub device_blocks: u64,
    pub lower_blocks: u64,
}

type Scheduler = LocalScheduler<NoopSequencePublisher, Worker, DefaultWorkerSelector>;

pub struct Router {
    config: KvRouterConfig,
    index: Index,
    scheduler: Scheduler,
    /// Ends the scheduler's tasks.
    cancel: CancellationToken,
    _workers: watch::Sender<HashMap<u64, Worker>>,
    instances: usize,
}

/// What the router has heard.
struct Index {
    /// One for each instance.
    normalizers: Vec<ZmqEventNormalizer>,
    device: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
    lower: LowerTierIndexers,
    events: u64,
    refused: u64,
}

impl Index {
    fn new(instances: usize) -> Self {
        Self {
            normalizers: (0..instances).map(|_| ZmqEventNormalizer::new(BLOCK_TOKENS)).collect(),
            device: ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), 1, BLOCK_TOKENS),
            lower: LowerTierIndexers::new(1, BLOCK_TOKENS),
            events: 0,
            refused: 0,
        }
    }
}

fn rank_of(instance: usize) -> u32 {
    instance as u32
}

fn worker_of(instance: usize) -> WorkerWithDpRank {
    WorkerWithDpRank::new(100 + instance as u64, rank_of(instance))
}

impl Router {
    /// A router of instances with so many device blocks, whose ties are decided by `seed`.
    pub fn new(instances: usize, blocks: u64, seed: u64) -> anyhow::Result<Self> {
        let config = KvRouterConfig::default();
        let workers: HashMap<_, _> = (0..instances)
            .map(|of| (worker_of(of).worker_id, Worker { rank: rank_of(of), blocks }))
            .collect();
        let ranks = workers.iter().map(|(&id, worker)| (id, (worker.rank, 1))).collect();
        let kind = WorkerType::Aggregated.default_selector_label();
        let slots = ActiveSequencesMultiWorker::new_without_expiry(
            NoopSequencePublisher,
            BLOCK_TOKENS as usize,
            ranks,
            false,
            0,
            kind,
        );
        let (send, receive) = watch::channel(workers);
        let cancel = CancellationToken::new();
        let scheduler = Scheduler::new(
            Arc::new(slots),
            receive,
            config.policy_profile(None)?,
            BLOCK_TOKENS,
            DefaultWorkerSelector::new_seeded(Some(config.clone()), kind, seed),
            None,
            None,
            None,
            None,
            Duration::from_secs(60),
            config.router_track_prefill_tokens,
            cancel.clone(),
            kind,
            true,
        );
        Ok(Self {
            config,
            index: Index::new(instances),
            scheduler,
            cancel,
            _workers: send,
            instances,
        })
    }

    /// Takes in a batch of an instance.
    pub async fn take(
        &mut self,
        instance: usize,
        number: u64,
        payload: &[u8],
    ) -> anyhow::Result<()> {
        let Index { normalizers, device, lower, events, refused } = &mut self.index;
        let batch = decode_event_batch(payload).context("the router does not read a batch")?;
        for raw in batch.events {
            *events += 1;
            let event = normalizers[instance]
                .preprocess_with_reason(raw, worker_of(instance))
                .map_err(|reason| anyhow!("the router filters an event: {}", reason.as_label()))?;
            let event =
                normalizers[instance].normalize_preprocessed(event, number, worker_of(instance));
            let event = event.and_then(|event| event.into_router_event());
            let event = event.context("an event is not that of an instance")?;
            let near = event.targets_primary().is_ok_and(|near| near);
            if matches!(event.event.data, KvCacheEventData::Cleared) {
                device.apply_event_and_wait(event.clone()).await?;
                for tier in lower.all() {
                    tier.apply_event_and_wait(event.clone()).await?;
                }
            } else if near {
                // Content on the device may follow content in host memory, which a tree of the device has no place for.
                *refused += u64::from(device.apply_event_and_wait(event).await.is_err());
            } else {
                lower.get_or_create(event.storage_tier).apply_event_and_wait(event).await?;
            }
        }
        Ok(())
    }

    /// Chooses the instance of a prompt.
    pub async fn route(&self, prompt: &Prompt) -> anyhow::Result<Route> {
        let index = &self.index;
        let options = BlockHashOptions {
            lora_name: prompt.scope.adapter,
            cache_namespace: prompt.scope.salt,
            ..BlockHashOptions::default()
        };
        let hashes = compute_block_hash_for_seq(&prompt.ids, BLOCK_TOKENS, options);
        let device = index.device.backend().find_match_details_impl(&hashes, false);
        let options = LowerTierQueryOptions::default();
        let lower_tier = query_lower_tiers_with_options(&index.lower, &hashes, &device, options);
        let matches = TieredMatchDetails { device, lower_tier };
        let hits = cache_hit_estimates_from_tiered_matches(&self.config, BLOCK_TOKENS, &matches);
        let tiers = tier_overlap_blocks_from_tiered_matches(&matches);
        let overlap = OverlapSignals {
            tier_overlap_blocks: tiers.clone(),
            effective_overlap_blocks: hits.effective_overlap_blocks,
            effective_cached_tokens: hits.cached_tokens,
        };
        let request = ScheduleRequest {
            mode: ScheduleMode::Tracked { request_id: prompt.number.to_string() },
            token_seq: Some(compute_seq_hash_for_block(&hashes)),
            block_hashes: None,
            isl_tokens: prompt.ids.len(),
            lora_name: prompt.scope.adapter.map(str::to_owned),
            expected_output_tokens: None,
            affinity_target: None,
            pinned_worker: None,
            allowed_worker_ids: None,
            routing_constraints: Default::default(),
            router_config_override: None,
            priority_jump: 0.0,
            strict_priority: 0,
            policy_class: None,
            session_context: None,
            overlap,
            kv_transfer_candidates: None,
            retain_kv_transfer_chain: false,
            shared_cache_hits: None,
        };
        let chosen = self.scheduler.schedule_request(request).await?.best_worker;
        let instance = (0..self.instances).find(|&of| worker_of(of) == chosen);
        let blocks = |of: Option<&usize>| of.copied().unwrap_or(0) as u64;
        Ok(Route {
            instance: instance.context("an instance that is not there")?,
            device_blocks: blocks(tiers.device.get(&chosen)),
            lower_blocks: blocks(tiers.host_pinned.get(&chosen)) + blocks(tiers.disk.get(&chosen)),
        })
    }

    /// A prompt is computed.
    pub async fn computed(&self, number: usize) -> anyhow::Result<()> {
        Ok(self.scheduler.mark_prefill_completed(&number.to_string()).await?)
    }

    /// A request's answer has ended.
    pub async fn ended(&self, number: usize) -> anyhow::Result<()> {
        Ok(self.scheduler.free(&number.to_string()).await?)
    }

    /// Forgets all that was heard, as a router that is started anew. What runs where it still knows.
    pub fn forget(&mut self) {
        let Index { events, refused, .. } = self.index;
        self.index = Index { events, refused, ..Index::new(self.instances) };
    }

    /// Events that were heard, and those of them that the index of the device has refused.
    pub fn events(&self) -> [u64; 2] {
        [self.index.events, self.index.refused]
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}
