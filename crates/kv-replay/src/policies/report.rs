//! Hit rates of all policies at several capacities, as a table for people and as JSON for programs.

use std::fmt::Write as _;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::{Capacity, Half, Lookups, POLICIES};
use crate::trace::Trace;

/// The results of all policies on one trace.
///
/// As JSON: `{"block_lookups": N, "capacities": [{"capacity": 1000, "hit_rate": {"lru": 0.04, …}}]}`.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct PolicyReport {
    /// Number of lookups, each of one block.
    pub block_lookups: u64,
    /// One entry for each capacity, in the given order.
    pub capacities: Vec<CapacityReport>,
}

/// The results of all policies with one capacity.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct CapacityReport {
    /// The capacity.
    pub capacity: Capacity,
    /// Number of lookups, each of one block.
    pub block_lookups: u64,
    /// One entry for each policy, in the order of [`POLICIES`].
    pub hits: Vec<PolicyHits>,
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
    let counted = half.requests(trace.requests.len());
    let block_lookups =
        trace.requests[counted.clone()].iter().map(|request| request.hash_ids.len() as u64).sum();
    let with_capacity = |&capacity| {
        let hits = POLICIES.iter().map(|entry| {
            let mut policy = (entry.build)(&lookups, capacity);
            let hits = lookups.requests().map(|request| policy.serve(&request)).enumerate();
            let hits =
                hits.filter(|(index, _)| counted.contains(index)).map(|(_, hits)| hits).sum();
            PolicyHits { policy: entry.name, hits }
        });
        CapacityReport { capacity, block_lookups, hits: hits.collect() }
    };
    PolicyReport { block_lookups, capacities: capacities.iter().map(with_capacity).collect() }
}

impl PolicyReport {
    /// The hit rates as a table, one row per capacity and one column per policy.
    #[must_use]
    pub fn table(&self) -> String {
        const CAPACITY: &str = "capacity";
        let mut text =
            format!("{} block lookups; hit rate by capacity in blocks\n\n", self.block_lookups);
        let widths: Vec<usize> = POLICIES.iter().map(|entry| entry.name.len().max(6) + 2).collect();
        let first = self.capacities.iter().map(|row| row.capacity.blocks().to_string().len());
        let first = first.max().unwrap_or(0).max(CAPACITY.len());
        // Writing to a string cannot fail.
        let _ = write!(text, "{CAPACITY:>first$}");
        for (entry, width) in POLICIES.iter().zip(&widths) {
            let _ = write!(text, "{:>width$}", entry.name);
        }
        text.push('\n');
        for row in &self.capacities {
            let _ = write!(text, "{:>first$}", row.capacity.blocks());
            for (hits, width) in row.hits.iter().zip(&widths) {
                let _ = write!(text, "{:>width$.4}", row.share(hits));
            }
            text.push('\n');
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

    /// 0 if there were no lookups.
    fn share(&self, hits: &PolicyHits) -> f64 {
        if self.block_lookups == 0 { 0.0 } else { hits.hits as f64 / self.block_lookups as f64 }
    }
}

impl Serialize for CapacityReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(2))?;
        map.serialize_entry("capacity", &self.capacity)?;
        map.serialize_entry("hit_rate", &HitRates(self))?;
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
