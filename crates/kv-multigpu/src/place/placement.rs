//! A model placed on a number of GPUs.

use super::problem::{Need, Problem, blocks_that_fit, check_needs};
use super::{
    GpuCapacity, HeadShards, KvReplication, LinkMatrix, ModelShape, PlacementError, Strategy,
    strategy,
};

/// Number of ring reductions of a layer under tensor parallelism: after attention and after the
/// feed-forward part.
pub(crate) const REDUCTIONS_PER_LAYER: u64 = 2;

/// A model placed on a number of GPUs. A placement always fits.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Placement {
    /// # Invariants
    /// Model, GPUs and links have passed their checks, and the part on each GPU fits there.
    pub(crate) model: ModelShape,
    pub(crate) gpus: Vec<GpuCapacity>,
    pub(crate) links: LinkMatrix,
    pub(crate) kind: PlacementKind,
}

/// How a placement divides the model.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum PlacementKind {
    /// Each layer is on one GPU.
    Layers {
        /// The strategy that assigned the layers; `None` if the caller assigned them.
        strategy: Option<Strategy>,
        /// The index of each layer's GPU.
        gpu_of_layer: Vec<usize>,
    },
    /// Each layer is on every GPU, divided by heads.
    Sharded {
        /// The heads of each GPU.
        shards: HeadShards,
    },
}

impl Placement {
    /// Assigns the layers of `model` to `gpus` by `strategy`.
    ///
    /// # Errors
    /// [`PlacementError::DoesNotFit`] with the missing bytes of each GPU. For
    /// [`Strategy::LeastCost`] that is the smallest shortage of all such assignments. Other
    /// variants for invalid inputs.
    pub fn layers(
        model: &ModelShape,
        gpus: &[GpuCapacity],
        links: &LinkMatrix,
        strategy: Strategy,
    ) -> Result<Self, PlacementError> {
        let problem = Problem::new(model, gpus, links)?;
        let gpu_of_layer = strategy::assign(&problem, strategy)?;
        Self::assigned(&problem, Some(strategy), gpu_of_layer)
    }

    /// Uses the caller's assignment: for each layer the index of its GPU.
    ///
    /// # Errors
    /// As [`layers`](Placement::layers), and [`PlacementError::Assignment`].
    pub fn with_assignment(
        model: &ModelShape,
        gpus: &[GpuCapacity],
        links: &LinkMatrix,
        gpu_of_layer: Vec<usize>,
    ) -> Result<Self, PlacementError> {
        Self::assigned(&Problem::new(model, gpus, links)?, None, gpu_of_layer)
    }

    pub(crate) fn assigned(
        problem: &Problem<'_>,
        strategy: Option<Strategy>,
        gpu_of_layer: Vec<usize>,
    ) -> Result<Self, PlacementError> {
        let (layers, gpus) = (problem.layers(), problem.gpus.len());
        let wrong = gpu_of_layer.iter().position(|&gpu| gpu >= gpus);
        if gpu_of_layer.len() != layers || wrong.is_some() {
            let layer = wrong.unwrap_or(gpu_of_layer.len().min(layers));
            return Err(PlacementError::Assignment { layer, gpus });
        }
        Self::that_fits(problem, PlacementKind::Layers { strategy, gpu_of_layer })
    }

    /// Divides every layer of `model` by heads, evenly over all of `gpus`.
    ///
    /// Weights are divided evenly and rounded up. Each GPU holds the KV of its heads. Block ids are
    /// the same on every GPU.
    ///
    /// # Errors
    /// [`PlacementError::QueryHeads`] and [`PlacementError::KvHeads`] if the heads do not divide evenly,
    /// [`PlacementError::HeadBytes`] if a KV block does not; [`PlacementError::DoesNotFit`]. Other variants for invalid inputs.
    pub fn sharded(
        model: &ModelShape,
        gpus: &[GpuCapacity],
        links: &LinkMatrix,
        query_heads: u64,
        kv_heads: u64,
        replication: KvReplication,
    ) -> Result<Self, PlacementError> {
        let problem = Problem::new(model, gpus, links)?;
        let shards = HeadShards::new(query_heads, kv_heads, gpus.len(), replication)?;
        for (layer, shape) in model.layers.iter().enumerate() {
            let kv_block_bytes = shape.kv_block_bytes;
            if !kv_block_bytes.is_multiple_of(kv_heads) {
                return Err(PlacementError::HeadBytes { layer, kv_block_bytes, kv_heads });
            }
        }
        Self::that_fits(&problem, PlacementKind::Sharded { shards })
    }

    fn that_fits(problem: &Problem<'_>, kind: PlacementKind) -> Result<Self, PlacementError> {
        let (gpus, links) = (problem.gpus.to_vec(), problem.links.clone());
        let placement = Self { model: problem.model.clone(), gpus, links, kind };
        let needs = (0..placement.gpus.len()).map(|gpu| placement.need(gpu));
        check_needs(needs, &placement.gpus, placement.model.kv_blocks)?;
        Ok(placement)
    }

    /// The placed model.
    #[must_use]
    pub fn model(&self) -> &ModelShape {
        &self.model
    }

    /// The GPUs. Every GPU index of a placement refers to this list.
    #[must_use]
    pub fn gpus(&self) -> &[GpuCapacity] {
        &self.gpus
    }

    /// How the model is divided.
    #[must_use]
    pub fn kind(&self) -> &PlacementKind {
        &self.kind
    }

    /// The GPU of a layer; `None` if the layer is divided by heads or does not exist.
    pub(crate) fn gpu_of_layer(&self, layer: usize) -> Option<usize> {
        match &self.kind {
            PlacementKind::Layers { gpu_of_layer, .. } => gpu_of_layer.get(layer).copied(),
            PlacementKind::Sharded { .. } => None,
        }
    }

    /// The layers of which GPU `gpu` holds the whole, or its heads.
    pub fn layers_on(&self, gpu: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.model.layers.len()).filter(move |&layer| match &self.kind {
            PlacementKind::Layers { gpu_of_layer, .. } => gpu_of_layer[layer] == gpu,
            PlacementKind::Sharded { .. } => gpu < self.gpus.len(),
        })
    }

    /// The heads of each GPU, if the layers are divided by heads.
    #[must_use]
    pub fn shards(&self) -> Option<&HeadShards> {
        match &self.kind {
            PlacementKind::Layers { .. } => None,
            PlacementKind::Sharded { shards } => Some(shards),
        }
    }

    /// Bytes of one KV block in layer `layer` that GPU `gpu` holds; 0 if it holds nothing.
    #[must_use]
    pub fn kv_block_bytes(&self, layer: usize, gpu: usize) -> u64 {
        let Some(shape) = self.model.layers.get(layer) else { return 0 };
        match &self.kind {
            PlacementKind::Layers { gpu_of_layer, .. } if gpu_of_layer[layer] == gpu => {
                shape.kv_block_bytes
            }
            PlacementKind::Sharded { shards } if gpu < self.gpus.len() => {
                shape.kv_block_bytes / shards.kv_heads() * shards.kv_heads_each()
            }
            _ => 0,
        }
    }

    /// Bytes of the weights of layer `layer` that GPU `gpu` holds.
    pub(crate) fn weight_bytes(&self, layer: usize, gpu: usize) -> u64 {
        let weight_bytes = self.model.layers[layer].weight_bytes;
        match &self.kind {
            PlacementKind::Layers { gpu_of_layer, .. } if gpu_of_layer[layer] == gpu => {
                weight_bytes
            }
            PlacementKind::Layers { .. } => 0,
            PlacementKind::Sharded { .. } => weight_bytes.div_ceil(self.gpus.len() as u64),
        }
    }

    pub(crate) fn need(&self, gpu: usize) -> Need {
        let mut need = Need { fixed_bytes: 0, block_bytes: 0 };
        for layer in self.layers_on(gpu) {
            need.fixed_bytes += self.weight_bytes(layer, gpu);
            need.block_bytes += self.kv_block_bytes(layer, gpu);
        }
        if self.layers_on(gpu).next().is_some() {
            need.fixed_bytes += self.model.workspace_bytes;
        }
        need
    }

    /// The largest number of KV blocks with which this placement still fits; `u64::MAX` if blocks
    /// take no memory.
    #[must_use]
    pub fn kv_blocks_max(&self) -> u64 {
        let needs = (0..self.gpus.len()).map(|gpu| self.need(gpu));
        // The placement fits, so there is a number.
        blocks_that_fit(needs, &self.gpus).unwrap_or(0)
    }
}
