//! Hit rates of all policies at several capacities, as a table for people and as JSON for programs.

use std::fmt::Write as _;
use std::ops::Range;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use kv_pool::store::StoreKind;

use super::evict::Eviction;
use super::two_tiers::{self, TwoTierReport};
use super::{Capacity, DEFAULT_POLICY, Half, Lookups, POLICIES, Policy as _, PolicyEntry};
use kv_replay::trace::Trace;

/// The results of all policies on one trace.
///
/// As JSON: `{"block_lookups": N, "default_policy": "hit_density", "capacities": [{"capacity": 1000,
/// "hit_rate": {"lru": 0.04, …}, "way": 0.3, "cache_saved": 0.25}]}`.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyReport {
    /// Number of lookups, each of one block.
    pub block_lookups: u64,
    /// One entry for each capacity, in the given order.
    pub capacities: Vec<CapacityReport>,
    /// One entry for each pair of sizes and each policy, if that was asked for. As JSON, absent if it was not.
    pub two_tiers: Vec<TwoTierReport>,
}

/// The results of all policies with one capacity.
#[derive(Clone, Debug, PartialEq)]
pub struct CapacityReport {
    /// The capacity.
    pub capacity: Capacity,
    /// Number of lookups, each of one block.
    pub block_lookups: u64,
    /// One entry for each policy, in the order of [`POLICIES`].
    pub hits: Vec<PolicyHits>,
    /// How much smaller than LRU's cache our own policy's may be for LRU's hit rate, as a share;
    /// negative if it must be larger. `None` if that was not asked for.
    pub cache_saved: Option<f64>,
}

/// The result of one policy with one capacity.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PolicyHits {
    /// The policy's name.
    pub policy: &'static str,
    /// Number of lookups that hit.
    pub hits: u64,
}

/// Simulates every policy on `trace` with each of the `capacities`.
#[must_use]
pub fn hit_rates(trace: &Trace, capacities: &[Capacity]) -> PolicyReport {
    hit_rates_of(trace, capacities, Half::Both)
}

/// Like [`hit_rates`], but counts only the lookups of `half`. The earlier requests are served too,
/// so that the cache is warm.
#[must_use]
pub fn hit_rates_of(trace: &Trace, capacities: &[Capacity], half: Half) -> PolicyReport {
    let lookups = Lookups::new(trace);
    Simulation::new(trace, &lookups, half).report(capacities, false, || ())
}

/// Share of the lookups of `trace` that Belady's optimum answers.
pub(crate) fn hit_rate_of_belady(trace: &Trace, capacity: Capacity) -> f64 {
    let lookups = Lookups::new(trace);
    let mut belady = super::belady::Belady::new(&lookups, capacity);
    let hits: u64 = lookups.requests().map(|request| belady.serve(&request)).sum();
    hits as f64 / lookups.blocks().len().max(1) as f64
}

/// The policies on the lookups of one trace.
pub(super) struct Simulation<'a> {
    lookups: &'a Lookups<'a>,
    counted: Range<usize>,
    block_lookups: u64,
}

/// Largest cache that is tried for LRU's hit rate, in LRU's capacities.
const LARGER_MAX: usize = 4;

impl<'a> Simulation<'a> {
    pub(super) fn new(trace: &Trace, lookups: &'a Lookups<'a>, half: Half) -> Self {
        let counted = half.requests(trace.requests.len());
        let requests = &trace.requests[counted.clone()];
        let block_lookups = requests.iter().map(|request| request.hash_ids.len() as u64).sum();
        Self { lookups, counted, block_lookups }
    }

    /// The results with each of the `capacities`, and if `saved` how much cache our own policy saves.
    pub(super) fn report(
        &self,
        capacities: &[Capacity],
        saved: bool,
        mut tell: impl FnMut(),
    ) -> PolicyReport {
        let with_capacity = |&capacity| {
            let hits: Vec<_> = POLICIES
                .iter()
                .map(|entry| PolicyHits { policy: entry.name, hits: self.hits(entry, capacity) })
                .collect();
            let lru = hits.iter().find(|hits| hits.policy == "lru");
            let cache_saved =
                lru.filter(|_| saved).and_then(|lru| self.cache_saved(capacity, lru.hits));
            tell();
            CapacityReport { capacity, block_lookups: self.block_lookups, hits, cache_saved }
        };
        let capacities = capacities.iter().map(with_capacity).collect();
        PolicyReport { block_lookups: self.block_lookups, capacities, two_tiers: Vec::new() }
    }

    /// The results of every policy of a pool and every rule for what it stores, with each of the `capacities` on the
    /// device, above so many in host memory.
    pub(super) fn two_tiers(&self, capacities: &[Capacity], host: Capacity) -> Vec<TwoTierReport> {
        let sizes = capacities.iter().map(|&device| (device, host));
        let rules = || Eviction::ALL.map(|policy| StoreKind::ALL.map(|store| (policy, store)));
        let each = |sizes| rules().into_iter().flatten().map(move |rules| (sizes, rules));
        let run = |(sizes, rules)| {
            two_tiers::simulate(self.lookups, rules, sizes, |index| self.counted.contains(&index))
        };
        sizes.flat_map(each).map(run).collect()
    }

    fn hits(&self, entry: &PolicyEntry, capacity: Capacity) -> u64 {
        let mut policy = (entry.build)(self.lookups, capacity);
        let hits = self.lookups.requests().map(|request| policy.serve(&request)).enumerate();
        hits.filter(|(index, _)| self.counted.contains(index)).map(|(_, hits)| hits).sum()
    }

    /// Searches the least capacity with `wanted` hits, to a hundredth of `capacity`.
    fn cache_saved(&self, capacity: Capacity, wanted: u64) -> Option<f64> {
        let entry = POLICIES.iter().find(|entry| entry.name == DEFAULT_POLICY)?;
        let enough = |blocks| Some(self.hits(entry, Capacity::new(blocks).ok()?) >= wanted);
        let of = capacity.blocks();
        let (mut low, mut high) = (0, of);
        while !enough(high)? {
            low = high;
            high = high.checked_mul(2).filter(|&high| high <= of * LARGER_MAX)?;
        }
        while high - low > (of / 100).max(1) {
            let middle = low.midpoint(high);
            if enough(middle)? {
                high = middle;
            } else {
                low = middle;
            }
        }
        Some(1.0 - high as f64 / of as f64)
    }
}

impl PolicyReport {
    /// The hit rates as a table, one row per capacity and one column per policy.
    #[must_use]
    pub fn table(&self) -> String {
        const CAPACITY: &str = "capacity";
        let mut text = format!(
            "{} block lookups; hit rate by capacity in blocks: the share of the trace's hash ids, part-full ones included\n\n",
            self.block_lookups
        );
        let widths: Vec<usize> = POLICIES.iter().map(|entry| entry.name.len().max(6) + 2).collect();
        let first = self.capacities.iter().map(|row| row.capacity.blocks().to_string().len());
        let first = first.max().unwrap_or(0).max(CAPACITY.len());
        // Writing to a string cannot fail.
        let _ = write!(text, "{CAPACITY:>first$}");
        for (entry, width) in POLICIES.iter().zip(&widths) {
            let _ = write!(text, "{:>width$}", entry.name);
        }
        let has_saved = self.capacities.iter().any(|row| row.cache_saved.is_some());
        text.push_str("    way");
        text.push_str(if has_saved { "  cache saved\n" } else { "\n" });
        for row in &self.capacities {
            let _ = write!(text, "{:>first$}", row.capacity.blocks());
            for (hits, width) in row.hits.iter().zip(&widths) {
                let _ = write!(text, "{:>width$.4}", row.share(hits));
            }
            let percent = |share: Option<f64>| {
                share.map_or("-".to_owned(), |share| format!("{:.0} %", 100.0 * share))
            };
            let _ = write!(text, "{:>7}", percent(row.way()));
            if has_saved {
                let _ = write!(text, "{:>13}", percent(row.cache_saved));
            }
            text.push('\n');
        }
        if !self.two_tiers.is_empty() {
            text.push('\n');
            text.push_str(&two_tiers::table(&self.two_tiers));
        }
        text
    }
}

impl CapacityReport {
    /// The share of lookups that hit under the policy with that name; `None` if it does not exist.
    #[must_use]
    pub fn hit_rate(&self, policy: &str) -> Option<f64> {
        self.hits.iter().find(|hits| hits.policy == policy).map(|hits| self.share(hits))
    }

    /// The share of the way from LRU to Belady's optimum that our own policy goes; `None` if the
    /// two are equal.
    #[must_use]
    pub fn way(&self) -> Option<f64> {
        let lru = self.hit_rate("lru")?;
        let gap = self.hit_rate("belady")? - lru;
        (gap > 0.0).then_some((self.hit_rate(DEFAULT_POLICY)? - lru) / gap)
    }

    /// 0 if there were no lookups.
    fn share(&self, hits: &PolicyHits) -> f64 {
        if self.block_lookups == 0 { 0.0 } else { hits.hits as f64 / self.block_lookups as f64 }
    }
}

impl Serialize for PolicyReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("block_lookups", &self.block_lookups)?;
        map.serialize_entry("default_policy", DEFAULT_POLICY)?;
        map.serialize_entry("capacities", &self.capacities)?;
        if !self.two_tiers.is_empty() {
            map.serialize_entry("two_tiers", &self.two_tiers)?;
        }
        map.end()
    }
}

impl Serialize for CapacityReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(4))?;
        map.serialize_entry("capacity", &self.capacity)?;
        map.serialize_entry("hit_rate", &HitRates(self))?;
        map.serialize_entry("way", &self.way())?;
        map.serialize_entry("cache_saved", &self.cache_saved)?;
        map.end()
    }
}

/// The hit rates by policy, in the order of the report.
struct HitRates<'a>(&'a CapacityReport);

impl Serialize for HitRates<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.hits.iter().map(|hits| (hits.policy, self.0.share(hits))))
    }
}
