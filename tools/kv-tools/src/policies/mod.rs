//! Exact simulation of eviction policies on a trace, one request at a time.
//!
//! A cache with a fixed number of blocks serves the requests in order of arrival, one after
//! another. Every hash id of a request is one lookup, which hits if the block is cached. Nothing is
//! sampled or estimated, so the figures can be compared exactly between versions and with other
//! programs.
//!
//! | name | policy |
//! | --- | --- |
//! | `lru` | least recently used, as a prefix cache sees it: only the leading run of cached blocks hits, and a request's blocks are released from its tail, so that tails are evicted before heads |
//! | `belady` | Belady's optimum: evicts the block whose next lookup is furthest away; no policy that must admit each block does better |
//! | `slru` | segmented LRU with a fifth of the capacity protected |
//! | `s3fifo` | S3-FIFO, with a small queue of a tenth of the capacity |
//! | `arc` | adaptive replacement cache |
//! | `hit_density` | evicts what promises the fewest hits for the time that it would stay, learned on the way |
//! | `hit_density_pool` | the same, served as in a pool: a request holds all of its blocks until it is done |
//! | `s3fifo_pool`, `arc_pool` | these two, served as in a pool |
//! | `lru_block` | least recently used, block by block: any cached block hits |
//!
//! In all policies except `lru`, a block can hit even if an earlier one is missing. All except
//! `lru`, `belady` and those served as in a pool serve the blocks one by one, as in the literature: a block
//! may be evicted as soon as the next one is looked up. `hit_density` never evicts a block before
//! those that follow it. LRU and `hit_density` are the implementations of [`kv_pool::policy`], which engines use; the
//! published ones are in [`evict`].
//!
//! With host memory below the device's, the same policies of a [`BlockPool`](kv_pool::BlockPool) with two tiers are
//! simulated: [`TwoTierReport`] has the hits of both and the blocks that travel between them.
//!
//! With [hints](kv_replay::hints), the engine says what it knows of a request's blocks when it is done with them: that
//! their session is over, or that it comes back from a tool call within [`TOOL_CALL_MAX`]. `hit_density` makes use of
//! them, in both ways of serving.
//!
//! A policy that learns can be judged on requests that it was not tuned on: a [`Half`] selects the
//! counted lookups. All requests are served in any case.
//!
//! # Examples
//!
//! ```
//! use kv_replay::generate::{GenerateOptions, generate};
//! use kv_tools::policies::{hit_rates, parse_capacities};
//!
//! let trace = generate(&GenerateOptions { requests: 200, seed: 7 })?;
//! let report = hit_rates(&trace, &parse_capacities("100,1000")?);
//! println!("{}", report.table());
//! assert!(report.capacities[0].hit_rate("belady") >= report.capacities[0].hit_rate("lru"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod belady;
mod capacity;
pub mod evict;
mod half;
mod lookups;
mod lru;
mod pooled;
mod report;
mod two_tiers;
pub mod workloads;

use std::path::{Path, PathBuf};

use serde::Serialize;

pub use capacity::{CAPACITY_MAX_BLOCKS, Capacity, CapacityError, parse_capacities};
pub use half::{Half, HalfError};
pub use lookups::{Lookups, RequestBlocks, TOOL_CALL_MAX, TraceBlock};
pub(crate) use report::hit_rate_of_belady;
pub use report::{CapacityReport, PolicyHits, PolicyReport, hit_rates, hit_rates_of};
pub use two_tiers::TwoTierReport;

use self::evict::Eviction;
use self::pooled::{BlockByBlock, RequestByRequest, Slots};
use self::report::Simulation;
use kv_replay::json_file::{WriteError, check_files, write_json};
use kv_replay::trace::{ReadOptions, TraceError, left_out};

use crate::convert;

/// A cache with a rule for which block to evict.
pub trait Policy {
    /// Serves one request: looks up its blocks in order and caches those that the policy admits.
    ///
    /// Returns the number of hits. Requests come in the order of the trace, each once.
    fn serve(&mut self, request: &RequestBlocks<'_>) -> u64;
}

/// A policy that can be simulated.
#[derive(Clone, Copy, Debug)]
pub struct PolicyEntry {
    /// Its name in reports.
    pub name: &'static str,
    /// Creates an empty cache of the given capacity, for a simulation of the given lookups.
    pub build: for<'a> fn(&'a Lookups<'_>, Capacity) -> Box<dyn Policy + 'a>,
}

/// Our own policy, which reports compare with LRU and Belady's optimum under the name `default_policy`.
pub const DEFAULT_POLICY: &str = "hit_density";

/// The simulated policies, in the order of reports.
pub const POLICIES: &[PolicyEntry] = &[
    PolicyEntry {
        name: "lru",
        build: |lookups, capacity| {
            Box::new(lru::PrefixLru(Slots::new(lookups, capacity, Eviction::Lru)))
        },
    },
    PolicyEntry {
        name: "belady",
        build: |lookups, capacity| Box::new(belady::Belady::new(lookups, capacity)),
    },
    PolicyEntry {
        name: "slru",
        build: |lookups, capacity| {
            Box::new(BlockByBlock(Slots::new(lookups, capacity, Eviction::Slru)))
        },
    },
    PolicyEntry {
        name: "s3fifo",
        build: |lookups, capacity| {
            Box::new(BlockByBlock(Slots::new(lookups, capacity, Eviction::S3Fifo)))
        },
    },
    PolicyEntry {
        name: "arc",
        build: |lookups, capacity| {
            Box::new(BlockByBlock(Slots::new(lookups, capacity, Eviction::Arc)))
        },
    },
    PolicyEntry {
        name: "hit_density",
        build: |lookups, capacity| {
            Box::new(BlockByBlock(
                Slots::new(lookups, capacity, Eviction::HitDensity).tails_first(),
            ))
        },
    },
    PolicyEntry {
        name: "hit_density_pool",
        build: |lookups, capacity| {
            Box::new(RequestByRequest::new(Slots::new(lookups, capacity, Eviction::HitDensity)))
        },
    },
    PolicyEntry {
        name: "s3fifo_pool",
        build: |lookups, capacity| {
            Box::new(RequestByRequest::new(Slots::new(lookups, capacity, Eviction::S3Fifo)))
        },
    },
    PolicyEntry {
        name: "arc_pool",
        build: |lookups, capacity| {
            Box::new(RequestByRequest::new(Slots::new(lookups, capacity, Eviction::Arc)))
        },
    },
    PolicyEntry {
        name: "lru_block",
        build: |lookups, capacity| {
            Box::new(BlockByBlock(Slots::new(lookups, capacity, Eviction::Lru)))
        },
    },
];

/// The reason why the policies were not compared.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PoliciesError {
    /// The list of capacities is invalid.
    #[error(transparent)]
    Capacities(#[from] CapacityError),
    /// The trace was not read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The report was not written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

cuda_driver::messages::one_line_debug!(PoliciesError);

/// What `kv-tools policies` is to do.
#[derive(Clone, Copy, Debug)]
pub struct PoliciesOptions<'a> {
    /// Files with traces, each of which is reported apart.
    pub traces: &'a [PathBuf],
    /// What the traces' files do not say.
    pub reading: &'a ReadOptions,
    /// Cache sizes, a list as for [`parse_capacities`].
    pub capacities: &'a str,
    /// Sizes of host memory below each of the capacities, a list as for [`parse_capacities`]; `None` for no such tier.
    pub host_capacities: Option<&'a str>,
    /// Requests whose lookups count.
    pub half: Half,
    /// Whether to search how much cache our own policy saves, which takes about as long again.
    pub saved: bool,
    /// Whether engines give [hints](kv_replay::hints) about blocks that they are done with.
    pub hints: bool,
    /// File to which the report is written, if any.
    pub json: Option<&'a Path>,
}

/// The reports of several traces. As JSON: `{"traces": [{"trace": "a.jsonl", "report": {…}}]}`; of one
/// trace, its report alone.
#[derive(Serialize)]
struct Reports {
    traces: Vec<TraceReport>,
}

#[derive(Serialize)]
struct TraceReport {
    trace: String,
    report: PolicyReport,
}

/// The command `kv-tools policies`: simulates every policy on each trace with each capacity.
/// Returns the tables, one for each trace, and writes the report if a file is named. `tell` hears how many of how many capacities
/// are done, of all traces together.
///
/// # Errors
///
/// [`PoliciesError`]; no report is written then.
pub fn run(
    options: &PoliciesOptions<'_>,
    mut tell: impl FnMut(usize, usize),
) -> Result<String, PoliciesError> {
    let capacities = parse_capacities(options.capacities)?;
    let host_capacities = options.host_capacities.map(parse_capacities).transpose()?;
    check_files(options.traces.iter().map(PathBuf::as_path), options.json)?;
    let hosts = host_capacities.as_deref().unwrap_or_default();
    let all = options.traces.len() * (capacities.len() + hosts.len());
    let mut done = 0;
    let mut tell = || {
        done += 1;
        tell(done, all);
    };
    let (mut traces, mut told) = (Vec::with_capacity(options.traces.len()), String::new());
    for path in options.traces {
        let trace = convert::read(path, &(*options.reading).into())?;
        if trace.skipped > 0 {
            told.push_str(&format!("{}: {}\n", path.display(), left_out(trace.skipped)));
        }
        let lookups = Lookups::new(&trace);
        let lookups = if options.hints { lookups.hinted() } else { lookups };
        let simulation = Simulation::new(&trace, &lookups, options.half);
        let mut report = simulation.report(&capacities, options.saved, &mut tell);
        for &host in hosts {
            report.two_tiers.extend(simulation.two_tiers(&capacities, host));
            tell();
        }
        traces.push(TraceReport { trace: path.display().to_string(), report });
    }
    if let [TraceReport { report, .. }] = &traces[..] {
        if let Some(path) = options.json {
            write_json(path, report)?;
        }
        return Ok(told + &report.table());
    }
    let table = |one: &TraceReport| format!("{}: {}", one.trace, one.report.table());
    let tables: Vec<_> = traces.iter().map(table).collect();
    if let Some(path) = options.json {
        write_json(path, &Reports { traces })?;
    }
    Ok(told + &tables.join("\n"))
}
