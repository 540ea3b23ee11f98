//! A placement in figures: bytes of each GPU, activations handed over, and the time of a step.

use std::fmt;
use std::time::Duration;

use super::placement::REDUCTIONS_PER_LAYER;
use super::{Placement, PlacementKind};

/// The bytes that a placement puts on one GPU.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct GpuLoad {
    /// Number of layers of which it holds the whole, or its heads.
    pub layers: usize,
    /// Bytes of weights.
    pub weight_bytes: u64,
    /// Bytes of KV blocks.
    pub kv_bytes: u64,
    /// Bytes of workspace; 0 if the GPU has no layer.
    pub workspace_bytes: u64,
    /// Bytes that it could hold.
    pub free_bytes: u64,
}

impl GpuLoad {
    /// All bytes on it.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.weight_bytes.saturating_add(self.kv_bytes).saturating_add(self.workspace_bytes)
    }

    /// Bytes that stay free; 0 of figures that do not fit.
    #[must_use]
    pub fn left_bytes(&self) -> u64 {
        self.free_bytes.saturating_sub(self.used_bytes())
    }
}

/// A crossing: activations are handed over from one GPU to another.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Crossing {
    /// The layer whose output is handed over.
    pub layer: usize,
    /// Index of its GPU.
    pub from: usize,
    /// Index of the next layer's GPU.
    pub to: usize,
    /// Bytes handed over in one step.
    pub bytes: u64,
    /// Predicted time for that.
    pub time: Duration,
}

/// The predicted time of one step.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct StepTime {
    /// Time to read the weights.
    pub weights: Duration,
    /// Time to hand over or reduce activations.
    pub activations: Duration,
}

impl StepTime {
    /// The sum of both.
    pub(crate) fn total(&self) -> Duration {
        self.weights.saturating_add(self.activations)
    }
}

fn duration(nanos: u128) -> Duration {
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

impl Placement {
    /// The bytes on GPU `gpu`; `None` if the GPU does not exist.
    #[must_use]
    pub fn load(&self, gpu: usize) -> Option<GpuLoad> {
        let free_bytes = self.gpus.get(gpu)?.free_bytes;
        let need = self.need(gpu);
        let layers = self.layers_on(gpu).count();
        let workspace_bytes = if layers == 0 { 0 } else { self.model.workspace_bytes };
        Some(GpuLoad {
            layers,
            weight_bytes: need.fixed_bytes - workspace_bytes,
            kv_bytes: need.block_bytes * self.model.kv_blocks,
            workspace_bytes,
            free_bytes,
        })
    }

    /// All crossings, in the order of the layers. There are none if layers are divided by heads.
    pub fn crossings(&self) -> impl Iterator<Item = Crossing> + '_ {
        (1..self.model.layers.len()).filter_map(|next| {
            let layer = next - 1;
            let (from, to) = (self.gpu_of_layer(layer)?, self.gpu_of_layer(next)?);
            let bytes = self.model.output_bytes(layer);
            let time = duration(self.links.transfer_nanos(from, to, bytes));
            (from != to).then_some(Crossing { layer, from, to, bytes, time })
        })
    }

    /// Bytes that one token's activations send over links, on all GPUs together; `u64::MAX` if there are more.
    #[must_use]
    pub fn link_bytes_per_token(&self) -> u64 {
        let outputs = |layer: usize| self.model.layers[layer].output_token_bytes;
        match &self.kind {
            PlacementKind::Layers { .. } => self.crossings().map(|c| outputs(c.layer)).sum(),
            // In a ring, each GPU except one forwards every byte, twice: to sum and to distribute.
            PlacementKind::Sharded { .. } => {
                let hops = 2 * (self.gpus.len() as u64 - 1) * REDUCTIONS_PER_LAYER;
                let layers = (0..self.model.layers.len()).map(|l| outputs(l).saturating_mul(hops));
                layers.fold(0, u64::saturating_add)
            }
        }
    }

    /// The predicted time of one step.
    #[must_use]
    pub fn step_time(&self) -> StepTime {
        let weights = (0..self.gpus.len()).map(|gpu| {
            let read = |layer| self.gpus[gpu].read_nanos(self.weight_bytes(layer, gpu));
            self.layers_on(gpu).map(read).sum::<u128>()
        });
        let (weights, activations) = match &self.kind {
            PlacementKind::Layers { .. } => {
                let nanos = |c: Crossing| self.links.transfer_nanos(c.from, c.to, c.bytes);
                (weights.sum(), self.crossings().map(nanos).sum())
            }
            // All GPUs read at the same time; the slowest decides.
            PlacementKind::Sharded { .. } => (weights.max().unwrap_or(0), self.reduction_nanos()),
        };
        StepTime { weights: duration(weights), activations: duration(activations) }
    }

    /// Time of all reductions of a step. Each is a ring over the GPUs in their order: `2 * (n - 1)`
    /// rounds, in each of which every GPU sends one `n`th of the bytes to the next.
    fn reduction_nanos(&self) -> u128 {
        let gpus = self.gpus.len();
        if gpus == 1 {
            return 0;
        }
        let round = |bytes: u64| {
            let part = bytes.div_ceil(gpus as u64);
            let hops = (0..gpus).map(|g| self.links.transfer_nanos(g, (g + 1) % gpus, part));
            hops.max().unwrap_or(0)
        };
        let rounds = 2 * (gpus as u128 - 1) * u128::from(REDUCTIONS_PER_LAYER);
        (0..self.model.layers.len())
            .map(|layer| rounds * round(self.model.output_bytes(layer)))
            .sum()
    }

    /// The placement as a table: `Display` prints one line per GPU, and the sums.
    #[must_use]
    pub fn explain(&self) -> impl fmt::Display + '_ {
        Explanation(self)
    }
}

/// A placement as a table for people.
struct Explanation<'a>(&'a Placement);

impl fmt::Display for Explanation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let placement = self.0;
        let (layers, blocks) = (placement.model.layers.len(), placement.model.kv_blocks);
        let gpus = placement.gpus.len();
        let how = match &placement.kind {
            PlacementKind::Layers { strategy, .. } => {
                strategy.map_or("as assigned", super::Strategy::name)
            }
            PlacementKind::Sharded { .. } => "divided by heads",
        };
        writeln!(f, "{layers} layers and {blocks} KV blocks on {gpus} GPUs, {how}")?;
        for gpu in 0..gpus {
            let Some(load) = placement.load(gpu) else { continue };
            let on: Vec<_> = placement.layers_on(gpu).collect();
            write!(f, "GPU {gpu}: layers {}", LayerRuns(&on))?;
            if let Some(shards) = placement.shards() {
                let (query, kv) = (shards.query_heads_of(gpu), shards.kv_heads_of(gpu));
                write!(f, ", heads {}..{} over KV heads ", query.start, query.end)?;
                write!(f, "{}..{}", kv.start, kv.end)?;
            }
            writeln!(
                f,
                "; weights {}, KV {}, workspace {}, left {} of {}",
                Size(load.weight_bytes),
                Size(load.kv_bytes),
                Size(load.workspace_bytes),
                Size(load.left_bytes()),
                Size(load.free_bytes),
            )?;
        }
        let time = placement.step_time();
        let crossings = match placement.kind {
            PlacementKind::Layers { .. } => placement.crossings().count() as u64,
            PlacementKind::Sharded { .. } => layers as u64 * REDUCTIONS_PER_LAYER,
        };
        let verb = if placement.shards().is_some() { "reductions" } else { "crossings" };
        let bytes = placement.link_bytes_per_token();
        writeln!(f, "a token: {crossings} {verb}, {bytes} bytes over links")?;
        let (total, tokens) = (time.total(), placement.model.step_tokens);
        writeln!(
            f,
            "a step of {tokens} tokens: {total:?} predicted, {:?} of it for activations",
            time.activations
        )?;
        write!(f, "KV blocks that would fit: {}", placement.kv_blocks_max())
    }
}

/// Numbers as runs: `0-3, 8`.
struct LayerRuns<'a>(&'a [usize]);

impl fmt::Display for LayerRuns<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (i, run) in self.0.chunk_by(|a, b| a + 1 == *b).enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            match run {
                [only] => write!(f, "{comma}{only}")?,
                _ => write!(f, "{comma}{}-{}", run[0], run[run.len() - 1])?,
            }
        }
        Ok(())
    }
}

/// Bytes in MiB, with one decimal.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} MiB", self.0 as f64 / f64::from(1 << 20))
    }
}
