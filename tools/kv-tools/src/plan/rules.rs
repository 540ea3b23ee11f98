//! What all choices of a plan have in common: the model, the link, and how an engine schedules.

use cuda_sim::Profile;
use kv_pool::store::StoreKind;

use kv_replay::config::ModelCost;
use kv_replay::trace::Request;

/// What all choices of a plan have in common.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Rules {
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Most requests of one GPU at once.
    pub max_batch: u32,
    /// Most tokens of one iteration.
    pub step_tokens: u32,
    /// What the model's computation costs.
    pub model: ModelCost,
    /// What of the evicted blocks is stored in host memory.
    pub store: StoreKind,
    /// The link between a GPU and host memory.
    pub profile: Profile,
    /// Bytes a second that files are read and written with, each way; 0 for no time.
    pub disk_bytes_per_s: u64,
    /// How often a GPU's copies go over its link: 1, or less where several links carry parts of a block side by side.
    pub links: u32,
    /// Arrivals come so much faster than in the trace.
    pub speed: f64,
    /// Which GPU gets a request.
    pub router: super::Router,
}

impl Default for Rules {
    /// Those of a run.
    fn default() -> Self {
        let run = kv_replay::config::RunConfig::default();
        Self {
            block_tokens: run.block_tokens,
            block_bytes: 0,
            max_batch: run.max_batch,
            step_tokens: run.step_tokens,
            model: ModelCost::default(),
            store: run.store,
            profile: Profile::default(),
            disk_bytes_per_s: 0,
            links: 1,
            speed: 1.0,
            router: super::Router::Prefix,
        }
    }
}

impl Rules {
    pub(super) fn arrival_ns(&self, request: &Request) -> u64 {
        // A cast stays within the type.
        (request.timestamp_ms as f64 * 1e6 / self.speed) as u64
    }

    fn bytes(&self, blocks: u64) -> u64 {
        blocks.saturating_mul(self.block_bytes) / u64::from(self.links.max(1))
    }

    pub(super) fn load_ns(&self, blocks: u64) -> u64 {
        nanos(self.profile.htod.time(self.bytes(blocks)))
    }

    pub(super) fn disk_ns(&self, blocks: u64) -> u64 {
        // All parts of a block are in the same files.
        let bytes = u128::from(blocks) * u128::from(self.block_bytes) * 1_000_000_000;
        let rate = u128::from(self.disk_bytes_per_s);
        u64::try_from(bytes.checked_div(rate).unwrap_or(0)).unwrap_or(u64::MAX)
    }

    pub(super) fn store_ns(&self, blocks: u64) -> u64 {
        nanos(self.profile.dtoh.time(self.bytes(blocks)))
    }
}

fn nanos(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
