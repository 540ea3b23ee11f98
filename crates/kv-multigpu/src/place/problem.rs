//! A model and a machine with prefix sums, so that the cost of a run of layers is one subtraction.

use super::shape::check_machine;
use super::{GpuCapacity, LinkMatrix, ModelShape, PlacementError, Shortage};

pub(crate) struct Problem<'a> {
    pub(crate) model: &'a ModelShape,
    pub(crate) gpus: &'a [GpuCapacity],
    pub(crate) links: &'a LinkMatrix,
    /// Bytes of the layers before each layer, and of all layers.
    bytes_before: Vec<u64>,
    /// The same for the time to read their weights, for each GPU.
    nanos_before: Vec<Vec<u128>>,
}

impl<'a> Problem<'a> {
    pub(crate) fn new(
        model: &'a ModelShape,
        gpus: &'a [GpuCapacity],
        links: &'a LinkMatrix,
    ) -> Result<Self, PlacementError> {
        model.check()?;
        check_machine(gpus, links)?;
        let bytes_before = sums((0..model.layers.len()).map(|layer| model.layer_bytes(layer)));
        let nanos_before = gpus
            .iter()
            .map(|gpu| sums(model.layers.iter().map(|layer| gpu.read_nanos(layer.weight_bytes))))
            .collect();
        Ok(Self { model, gpus, links, bytes_before, nanos_before })
    }

    pub(crate) fn layers(&self) -> usize {
        self.model.layers.len()
    }

    /// Bytes of a GPU with the layers `from..to`; 0 for an empty run.
    pub(crate) fn run_bytes(&self, from: usize, to: usize) -> u64 {
        if from == to {
            return 0;
        }
        self.bytes_before[to] - self.bytes_before[from] + self.model.workspace_bytes
    }

    /// Time that GPU `gpu` takes for the layers `from..to` in one step.
    pub(crate) fn run_nanos(&self, gpu: usize, from: usize, to: usize) -> u128 {
        self.nanos_before[gpu][to] - self.nanos_before[gpu][from]
    }

    /// Time to hand the output of layer `layer` from one GPU to another.
    pub(crate) fn crossing_nanos(&self, from: usize, to: usize, layer: usize) -> u128 {
        self.links.transfer_nanos(from, to, self.model.output_bytes(layer))
    }
}

/// The needs of one GPU: a fixed part, and a part for each KV block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    pub(crate) fixed_bytes: u64,
    pub(crate) block_bytes: u64,
}

/// The largest number of KV blocks with which every need is met; `None` if even 0 blocks are too
/// many.
pub(crate) fn blocks_that_fit(
    needs: impl Iterator<Item = Need>,
    gpus: &[GpuCapacity],
) -> Option<u64> {
    let mut most = u64::MAX;
    for (need, gpu) in needs.zip(gpus) {
        let left = gpu.free_bytes.checked_sub(need.fixed_bytes)?;
        most = most.min(left.checked_div(need.block_bytes).unwrap_or(u64::MAX));
    }
    Some(most)
}

/// Refuses needs that a GPU cannot meet with `kv_blocks` blocks.
pub(crate) fn check_needs(
    needs: impl Iterator<Item = Need> + Clone,
    gpus: &[GpuCapacity],
    kv_blocks: u64,
) -> Result<(), PlacementError> {
    let short: Vec<_> = needs
        .clone()
        .zip(gpus)
        .enumerate()
        .map(|(gpu, (need, capacity))| Shortage {
            gpu,
            needed_bytes: need.fixed_bytes.saturating_add(need.block_bytes * kv_blocks),
            free_bytes: capacity.free_bytes,
        })
        .filter(|short| short.missing_bytes() > 0)
        .collect();
    if short.is_empty() {
        return Ok(());
    }
    Err(PlacementError::DoesNotFit { short, kv_blocks_fit: blocks_that_fit(needs, gpus) })
}

/// The sums before each item, and of all items.
fn sums<T: Copy + Default + std::ops::Add<Output = T>>(items: impl Iterator<Item = T>) -> Vec<T> {
    let mut total = T::default();
    let mut sums = vec![total];
    for item in items {
        total = total + item;
        sums.push(total);
    }
    sums
}
