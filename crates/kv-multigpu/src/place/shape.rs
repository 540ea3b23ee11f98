//! The inputs of a placement: the model's layers, the GPUs, and the links between them.

use super::PlacementError;

/// Maximum number of layers of a model.
pub(crate) const LAYERS_MAX: usize = 512;

/// Maximum number of GPUs of a placement.
pub(crate) const GPUS_MAX: usize = 64;

/// One layer of a model.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct LayerShape {
    /// Bytes of its weights. The embedding counts with the first layer, the head with the last.
    pub weight_bytes: u64,
    /// Bytes of one KV block in this layer, keys and values together; 0 for a layer without KV.
    pub kv_block_bytes: u64,
    /// Bytes that it hands to the next layer for one token.
    pub output_token_bytes: u64,
}

/// A model, with the size of its KV cache and of a step.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct ModelShape {
    /// The layers, in the order in which a token passes through them; at most 512.
    pub layers: Vec<LayerShape>,
    /// Number of KV blocks of the cache. A block has a part in every layer, and its id is the same
    /// on every GPU.
    pub kv_blocks: u64,
    /// Other bytes that each used GPU needs: activations, staging, the library's own memory.
    pub workspace_bytes: u64,
    /// Number of tokens that pass through the layers together in one step.
    pub step_tokens: u64,
}

impl ModelShape {
    /// A model of `layers` equal layers.
    ///
    /// # Errors
    /// [`PlacementError::Layers`] for 0 layers, or more than 512.
    pub fn uniform(
        layers: usize,
        layer: LayerShape,
        kv_blocks: u64,
    ) -> Result<Self, PlacementError> {
        check_layers(layers)?;
        let layers = vec![layer; layers];
        Ok(Self { layers, kv_blocks, workspace_bytes: 0, step_tokens: 1 })
    }

    pub(crate) fn check(&self) -> Result<(), PlacementError> {
        check_layers(self.layers.len())?;
        // One token's crossing in nanoseconds, times all layers, must stay far below `u128::MAX`.
        let most = u128::from(self.workspace_bytes) * GPUS_MAX as u128;
        // The costs of one block and of one token are summed over the layers too.
        let (kv_blocks, step_tokens) = (self.kv_blocks.max(1), self.step_tokens.max(1));
        let total = self.layers.iter().fold(most, |sum, layer| {
            let kv = u128::from(layer.kv_block_bytes) * u128::from(kv_blocks);
            let handed = u128::from(layer.output_token_bytes) * u128::from(step_tokens);
            sum.saturating_add(u128::from(layer.weight_bytes))
                .saturating_add(kv)
                .saturating_add(handed)
        });
        if total > i64::MAX as u128 {
            return Err(PlacementError::TooLarge { bytes: total });
        }
        Ok(())
    }

    /// Bytes that a layer hands to the next in one step. Cannot overflow after `check`.
    pub(crate) fn output_bytes(&self, layer: usize) -> u64 {
        self.layers[layer].output_token_bytes * self.step_tokens
    }

    /// Bytes of weights and KV of one layer. Cannot overflow after `check`.
    pub(crate) fn layer_bytes(&self, layer: usize) -> u64 {
        let layer = &self.layers[layer];
        layer.weight_bytes + layer.kv_block_bytes * self.kv_blocks
    }
}

/// One GPU, as a placement sees it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct GpuCapacity {
    /// The UUID, which identifies the GPU in a placement: ordinals change with
    /// `CUDA_VISIBLE_DEVICES`.
    pub uuid: [u8; 16],
    /// Memory that the placement may fill, in bytes.
    pub free_bytes: u64,
    /// Speed of the GPU's own memory, in bytes per second.
    pub memory_bytes_per_second: u64,
}

impl GpuCapacity {
    /// The time to read `bytes` of the GPU's memory once.
    pub(crate) fn read_nanos(&self, bytes: u64) -> u128 {
        nanos(bytes, self.memory_bytes_per_second)
    }
}

/// The link from one GPU to another.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Link {
    /// Time before the first byte of a transfer arrives, in nanoseconds.
    pub latency_ns: u64,
    /// Speed of a long transfer, in bytes per second.
    pub bytes_per_second: u64,
}

impl Link {
    /// The predicted time of one transfer, in nanoseconds.
    fn transfer_ns(&self, bytes: u64) -> u128 {
        u128::from(self.latency_ns) + nanos(bytes, self.bytes_per_second)
    }
}

/// Time for `bytes` at `per_second`, rounded up.
fn nanos(bytes: u64, per_second: u64) -> u128 {
    (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(per_second.max(1)))
}

/// The links between all pairs of GPUs, in both directions.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct LinkMatrix {
    gpus: usize,
    /// # Invariants
    /// `gpus * gpus` entries, row by row from the sender. The diagonal is not read.
    links: Vec<Link>,
}

impl LinkMatrix {
    /// The links of `gpus` GPUs. `link` is called with each sender and receiver.
    ///
    /// # Errors
    /// [`PlacementError::Gpus`] for 0 GPUs, or more than 64.
    pub fn from_fn(
        gpus: usize,
        link: impl FnMut(usize, usize) -> Link,
    ) -> Result<Self, PlacementError> {
        check_gpus(gpus)?;
        Ok(Self::between(gpus, link))
    }

    /// Like [`from_fn`](LinkMatrix::from_fn), without a bound: a parsed text is checked as a whole.
    pub(crate) fn between(gpus: usize, mut link: impl FnMut(usize, usize) -> Link) -> Self {
        let itself = Link { latency_ns: 0, bytes_per_second: u64::MAX };
        let links = (0..gpus * gpus).map(|i| {
            let (from, to) = (i / gpus, i % gpus);
            if from == to { itself } else { link(from, to) }
        });
        Self { gpus, links: links.collect() }
    }

    /// The same link between all pairs of `gpus` GPUs.
    ///
    /// # Errors
    /// Like [`from_fn`](LinkMatrix::from_fn).
    pub fn uniform(gpus: usize, link: Link) -> Result<Self, PlacementError> {
        Self::from_fn(gpus, |_, _| link)
    }

    /// Number of GPUs of the matrix.
    pub(crate) fn gpus(&self) -> usize {
        self.gpus
    }

    /// The link from one GPU to another; `None` on the diagonal and outside the matrix.
    #[must_use]
    pub fn link(&self, from: usize, to: usize) -> Option<&Link> {
        if from == to || from >= self.gpus || to >= self.gpus {
            return None;
        }
        self.links.get(from * self.gpus + to)
    }

    /// Time to hand `bytes` from one GPU to another; 0 to the same GPU.
    pub(crate) fn transfer_nanos(&self, from: usize, to: usize, bytes: u64) -> u128 {
        self.link(from, to).map_or(0, |link| link.transfer_ns(bytes))
    }
}

fn check_layers(layers: usize) -> Result<(), PlacementError> {
    if layers == 0 || layers > LAYERS_MAX {
        return Err(PlacementError::Layers { layers, most: LAYERS_MAX });
    }
    Ok(())
}

fn check_gpus(gpus: usize) -> Result<(), PlacementError> {
    if gpus == 0 || gpus > GPUS_MAX {
        return Err(PlacementError::Gpus { gpus, most: GPUS_MAX });
    }
    Ok(())
}

/// Refuses GPUs and links for which no placement can be computed.
pub(crate) fn check_machine(
    gpus: &[GpuCapacity],
    links: &LinkMatrix,
) -> Result<(), PlacementError> {
    check_gpus(gpus.len())?;
    if links.gpus() != gpus.len() {
        return Err(PlacementError::LinkMatrix { gpus: gpus.len(), matrix: links.gpus() });
    }
    for (gpu, capacity) in gpus.iter().enumerate() {
        if gpus[..gpu].iter().any(|other| other.uuid == capacity.uuid) {
            return Err(PlacementError::GpuTwice { gpu });
        }
        if capacity.memory_bytes_per_second == 0 {
            return Err(PlacementError::NoSpeed { from: gpu, to: gpu });
        }
        let without = (0..gpus.len())
            .find(|&to| links.link(gpu, to).is_some_and(|link| link.bytes_per_second == 0));
        if let Some(to) = without {
            return Err(PlacementError::NoSpeed { from: gpu, to });
        }
    }
    Ok(())
}
