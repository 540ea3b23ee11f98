//! Exact simulation of eviction policies on a trace, one request at a time.
//!
//! A cache of a fixed number of blocks serves the requests in order of arrival, each of them whole before the next.
//! Every hash id of a request is one lookup, which hits if the block is cached. Nothing is sampled or estimated, so
//! the figures can be compared from one version to the next, and with those of other programs, to the last digit.
//!
//! | name | policy |
//! | --- | --- |
//! | `lru` | least recently used, as a prefix cache sees it: only the leading run of cached blocks hits, and a request's blocks are released from its tail, so that tails are evicted before heads |
//! | `belady` | Belady's optimum: evicts the block whose next lookup is furthest away; no policy that must admit each block does better |
//! | `slru` | segmented LRU with a fifth of the capacity protected |
//! | `s3fifo` | S3-FIFO, with a small queue of a tenth of the capacity |
//! | `arc` | adaptive replacement cache |
//! | `lru_block` | least recently used, block by block: any cached block hits |
//!
//! All but `lru` look at the blocks one by one, as the literature does, and let a block hit even if one before it is
//! missing.
//!
//! # Examples
//!
//! ```
//! use kv_replay::generate::{GenerateOptions, generate};
//! use kv_replay::policies::{hit_rates, parse_capacities};
//!
//! let trace = generate(&GenerateOptions { requests: 200, seed: 7 })?;
//! let report = hit_rates(&trace, &parse_capacities("100,1000")?);
//! println!("{}", report.table());
//! assert!(report.capacities[0].hit_rate("belady") >= report.capacities[0].hit_rate("lru"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod arc;
mod belady;
mod capacity;
mod lookups;
mod lru;
mod queues;
mod report;
mod s3fifo;
mod slru;

use std::path::Path;

pub use capacity::{CAPACITY_MAX_BLOCKS, Capacity, CapacityError, parse_capacities};
pub use lookups::{Block, Lookups, RequestBlocks};
pub use report::{CapacityReport, PolicyHits, PolicyReport, hit_rates};

use crate::json_file::{WriteError, check_writable, write_json};
use crate::trace::{Trace, TraceError};

/// A cache that decides by some rule which block to evict.
pub trait Policy {
    /// Serves one request: looks up its blocks in order and caches those that the policy admits.
    ///
    /// Returns how many of the lookups hit. Requests come in the order of the trace, each of them once.
    fn serve(&mut self, request: &RequestBlocks<'_>) -> u64;
}

/// A policy that can be simulated.
#[derive(Clone, Copy, Debug)]
pub struct PolicyEntry {
    /// Its name in reports.
    pub name: &'static str,
    /// Makes an empty cache of the given capacity, for a simulation of the given lookups.
    pub build: for<'a> fn(&'a Lookups<'_>, Capacity) -> Box<dyn Policy + 'a>,
}

/// The policies that are simulated, in the order of reports.
pub const POLICIES: &[PolicyEntry] = &[
    PolicyEntry {
        name: "lru",
        build: |lookups, capacity| Box::new(lru::PrefixLru::new(lookups, capacity)),
    },
    PolicyEntry {
        name: "belady",
        build: |lookups, capacity| Box::new(belady::Belady::new(lookups, capacity)),
    },
    PolicyEntry {
        name: "slru",
        build: |lookups, capacity| block_by_block(slru::Slru::new(lookups, capacity)),
    },
    PolicyEntry {
        name: "s3fifo",
        build: |lookups, capacity| block_by_block(s3fifo::S3Fifo::new(lookups, capacity)),
    },
    PolicyEntry {
        name: "arc",
        build: |lookups, capacity| block_by_block(arc::Arc::new(lookups, capacity)),
    },
    PolicyEntry {
        name: "lru_block",
        build: |lookups, capacity| block_by_block(lru::BlockLru::new(lookups, capacity)),
    },
];

/// Why the policies were not compared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoliciesError {
    /// The capacities are no list of capacities.
    #[error(transparent)]
    Capacities(#[from] CapacityError),
    /// The trace could not be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The report could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// What `kv-replay policies` does: simulates every policy on the trace in the file `trace` with each of the
/// `capacities`, a list as for [`parse_capacities`]. Returns the table, and writes the report to the file `json` if
/// one is named.
///
/// # Errors
///
/// [`PoliciesError`]; no report is written then.
pub fn run(trace: &Path, capacities: &str, json: Option<&Path>) -> Result<String, PoliciesError> {
    let capacities = parse_capacities(capacities)?;
    if let Some(path) = json {
        check_writable(path)?;
    }
    let report = hit_rates(&Trace::read(trace)?, &capacities);
    if let Some(path) = json {
        write_json(path, &report)?;
    }
    Ok(report.table())
}

/// A policy that treats each block by itself.
trait BlockPolicy {
    /// Looks up `block` and caches it; whether it hit.
    fn access(&mut self, block: Block) -> bool;
}

struct BlockByBlock<P>(P);

impl<P: BlockPolicy> Policy for BlockByBlock<P> {
    fn serve(&mut self, request: &RequestBlocks<'_>) -> u64 {
        request.blocks.iter().map(|&block| u64::from(self.0.access(block))).sum()
    }
}

fn block_by_block<'a>(policy: impl BlockPolicy + 'a) -> Box<dyn Policy + 'a> {
    Box::new(BlockByBlock(policy))
}
