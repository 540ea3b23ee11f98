//! Device and host memory as two tiers of one [`BlockPool`]: how many lookups hit in either, and what travels between them.

use std::fmt::Write as _;
use std::time::Duration;

use kv_pool::clock::ManualClock;

use kv_pool::store::{StoreKind, StoreRules};
use kv_pool::{BlockHash, BlockPool, Claimed, Naming, Pinned, PoolConfig, Tier};
use serde::Serialize;

use super::evict::Eviction;
use super::{Capacity, Lookups, RequestBlocks};

/// The result of one policy with one size of each tier, and one rule for what of that evicted on the device the host
/// tier stores.
///
/// A lookup hits as in a prefix cache: in the leading run of a request's blocks that lie in either tier. A block that
/// hits in host memory is brought back, and leaves it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TwoTierReport {
    /// Name of the policy of both tiers.
    pub policy: &'static str,
    /// Name of the rule for what is stored in host memory.
    pub store: &'static str,
    /// Blocks in device memory.
    pub device_capacity: Capacity,
    /// Blocks in host memory.
    pub host_capacity: Capacity,
    /// Number of counted lookups, each of one block.
    pub block_lookups: u64,
    /// Of these, hits in device memory.
    pub device_hits: u64,
    /// Hits in host memory: blocks that were brought back.
    pub host_hits: u64,
    /// Blocks stored in host memory meanwhile.
    pub blocks_stored: u64,
    /// Evicted blocks that the rule did not store.
    pub blocks_refused: u64,
    /// Share of the counted lookups that hit in either tier, from 0 to 1.
    pub hit_rate: f64,
    /// Blocks stored for each that was brought back; `None` if none was.
    pub stored_per_brought_back: Option<f64>,
}

/// A pool of two tiers that serves one request after another.
struct TwoTiers {
    pool: BlockPool,
    clock: ManualClock,
    now_ms: u64,
    /// The most blocks that a request can have.
    device_blocks: usize,
    names: Vec<BlockHash>,
    counted: Counts,
}

#[derive(Clone, Copy, Default)]
struct Counts {
    lookups: u64,
    device_hits: u64,
    host_hits: u64,
    stored: u64,
    refused: u64,
}

/// The result of `policy` with so many blocks in each tier, of which the requests `counts` says are counted.
pub(super) fn simulate(
    lookups: &Lookups<'_>,
    (policy, store): (Eviction, StoreKind),
    (device, host): (Capacity, Capacity),
    counts: impl Fn(usize) -> bool,
) -> TwoTierReport {
    let mut tiers = TwoTiers::new(lookups, (policy, store), (device, host));
    for (index, request) in lookups.requests().enumerate() {
        tiers.serve(&request, counts(index));
    }
    let Counts { lookups, device_hits, host_hits, stored, refused } = tiers.counted;
    TwoTierReport {
        policy: policy.name(),
        store: store.name(),
        device_capacity: device,
        host_capacity: host,
        block_lookups: lookups,
        device_hits,
        host_hits,
        blocks_stored: stored,
        blocks_refused: refused,
        hit_rate: (device_hits + host_hits) as f64 / lookups.max(1) as f64,
        stored_per_brought_back: (host_hits > 0).then(|| stored as f64 / host_hits as f64),
    }
}

impl TwoTiers {
    fn new(
        lookups: &Lookups<'_>,
        (policy, store): (Eviction, StoreKind),
        (device, host): (Capacity, Capacity),
    ) -> Self {
        // A tier with room for every block of the trace never evicts, so more blocks would change nothing.
        let blocks = |capacity: Capacity| capacity.blocks().min(lookups.distinct().max(1)) as u64;
        let (primary_blocks, secondary_blocks) = (blocks(device), blocks(host));
        let config = PoolConfig { secondary_blocks, ..PoolConfig::primary_only(primary_blocks) };
        let clock = ManualClock::new();
        let make = || policy.make(primary_blocks + secondary_blocks);
        let rules = StoreRules::new(secondary_blocks);
        let made = || Ok::<_, kv_pool::ConfigError>((make()?, make()?, store.make(rules)?));
        let pool = made().map(|(first, second, store)| {
            let builder = BlockPool::builder(&config).clock(clock.clone());
            let builder = builder.policy(Tier::Primary, first).policy(Tier::Secondary, second);
            match store {
                Some(store) => builder.store_policy(store).build(),
                None => builder.build(),
            }
        });
        Self {
            // The trace's own tables, which are in memory already, are larger.
            pool: pool
                .ok()
                .and_then(Result::ok)
                .expect("a pool for no more blocks than twice those of the trace"),
            clock,
            now_ms: 0,
            device_blocks: primary_blocks as usize,
            names: Vec::new(),
            counted: Counts::default(),
        }
    }

    fn serve(&mut self, request: &RequestBlocks<'_>, counts: bool) {
        let arrival_ms = request.request.timestamp_ms;
        self.clock.advance(Duration::from_millis(arrival_ms.saturating_sub(self.now_ms)));
        self.now_ms = self.now_ms.max(arrival_ms);
        self.pool.tick();
        let epoch = self.pool.begin_epoch();
        self.names.clear();
        let mut parent = BlockHash::ROOT;
        // A request larger than device memory loses its own tail.
        for block in request.blocks.iter().take(self.device_blocks) {
            parent = BlockHash::chain(parent, &[block.index() as u32]);
            self.names.push(parent);
        }
        let before = self.pool.counters();
        let found = self.pool.match_prefix(&self.names);
        let hits = found.len();
        let far = found.locations().filter(|at| at.tier != Tier::Primary).count();
        let held = self.bring_back(found);
        let mut claimed = self.claim(self.names.len() - hits);
        let naming = hits
            .checked_sub(1)
            .map_or_else(Naming::default, |last| Naming::after(self.names[last]));
        let written = claimed.register(&self.names[hits..], naming);
        drop(written.expect("a name for each claimed block"));
        drop(claimed);
        drop(held);
        // What a request has read and written is at rest when the next one comes.
        self.pool.complete_epoch(epoch).expect("an epoch that was begun here");
        if counts {
            self.counted.lookups += request.blocks.len() as u64;
            self.counted.device_hits += (hits - far) as u64;
            self.counted.host_hits += far as u64;
            let now = self.pool.counters();
            self.counted.stored += now.offloaded - before.offloaded;
            self.counted.refused += now.refused - before.refused;
        }
    }

    /// Brings the blocks of host memory among the pinned ones to the device. All stay pinned.
    fn bring_back(&self, mut pinned: Pinned) -> Vec<Pinned> {
        let mut held = Vec::new();
        loop {
            let Some(tier) = pinned.locations().next().map(|at| at.tier) else { return held };
            let run = pinned.locations().take_while(|at| at.tier == tier).count();
            let rest = pinned.split_off(run);
            let here = match tier {
                Tier::Primary => pinned,
                _ => {
                    let onboard = self.pool.begin_onboard(pinned, self.claim(run));
                    onboard.map_err(|refused| refused.reason).expect("empty blocks").commit().pinned
                }
            };
            held.push(here);
            pinned = rest;
        }
    }

    /// Claims device blocks, and stores what is evicted for them.
    fn claim(&self, count: usize) -> Claimed {
        let mut claimed =
            self.pool.claim(count).expect("room for a request that device memory could hold alone");
        while let Some(offload) = claimed.take_offload() {
            offload.commit();
        }
        claimed
    }
}

/// The results as a table, one row for each policy and rule with each pair of sizes.
pub(super) fn table(reports: &[TwoTierReport]) -> String {
    let mut text = String::from(
        "device and host memory: share of lookups that hit, blocks stored, not stored and brought back\n\n",
    );
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "{:>10}{:>10}  {:<12}{:<9}{:>8}{:>8}{:>8}{:>12}{:>12}{:>14}{:>9}",
        "device",
        "host",
        "policy",
        "stores",
        "device",
        "host",
        "either",
        "stored",
        "not stored",
        "brought back",
        "stored/"
    );
    for report in reports {
        let share = |hits: u64| hits as f64 / report.block_lookups.max(1) as f64;
        let each = report.stored_per_brought_back;
        let _ = writeln!(
            text,
            "{:>10}{:>10}  {:<12}{:<9}{:>8.4}{:>8.4}{:>8.4}{:>12}{:>12}{:>14}{:>9}",
            report.device_capacity.blocks(),
            report.host_capacity.blocks(),
            report.policy,
            report.store,
            share(report.device_hits),
            share(report.host_hits),
            report.hit_rate,
            report.blocks_stored,
            report.blocks_refused,
            report.host_hits,
            each.map_or("-".to_owned(), |each| format!("{each:.1}")),
        );
    }
    text
}
