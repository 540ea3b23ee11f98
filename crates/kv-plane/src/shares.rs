//! Which layers, and which bytes of their rows, lie on which device.

use std::ops::Range;

use kv_kernels::{KvShape, KvShapeOptions, layout::LayoutError};
use kv_multigpu::place::{Placement, PlacementKind};

use crate::{GroupOptions, KvCacheOptions, OptionsError};

/// One device's share of every block.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Share {
    /// Position of the device among the cache's.
    pub(crate) device: usize,
    /// The model's layers, in their order.
    pub(crate) layers: Vec<u32>,
    /// Bytes of each row of K and of V.
    pub(crate) row: Range<u64>,
}

impl Share {
    pub(crate) fn shape(&self, all: &KvShape) -> Result<KvShape, LayoutError> {
        KvShape::new(KvShapeOptions {
            layers: self.layers.len() as u32,
            kv_count: all.kv_count(),
            row_bytes: self.row.end - self.row.start,
            block_tokens: all.block_tokens(),
        })
    }
}

/// The shares of a group of all devices that have layers. `options` have been checked.
pub(crate) fn shares(options: &KvCacheOptions, group: &GroupOptions, devices: usize) -> Vec<Share> {
    let shape = &group.shape;
    let (layers, row_bytes) = (shape.layers(), shape.row_bytes());
    let whole_rows = |device: usize, layers: Vec<u32>| Share { device, layers, row: 0..row_bytes };
    let Some(placement) = &options.placement else {
        let runs = layer_runs(layers, devices).enumerate();
        return runs.map(|(device, run)| whole_rows(device, run.collect())).collect();
    };
    let on = |device: usize| placement.layers_on(device).map(|layer| layer as u32).collect();
    let share = |device: usize| match placement.shards() {
        None => whole_rows(device, on(device)),
        Some(shards) => {
            let (heads, head_bytes) = (shards.kv_heads_of(device), row_bytes / shards.kv_heads());
            let row = heads.start * head_bytes..heads.end * head_bytes;
            Share { device, layers: on(device), row }
        }
    };
    // A placement may leave a device out.
    (0..devices).map(share).filter(|share| !share.layers.is_empty()).collect()
}

/// Checks that a placement is for these blocks and this number of devices.
pub(crate) fn check(
    placement: &Placement,
    options: &KvCacheOptions,
    devices: usize,
) -> Result<(), OptionsError> {
    let shape = &options.first().shape;
    let (placed, layers) = (placement.model().layers.len(), shape.layers());
    if placed != layers as usize {
        return Err(OptionsError::PlacedLayers { placed, layers });
    }
    let placed = placement.gpus().len();
    if placed != devices {
        return Err(OptionsError::PlacedDevices { placed, devices });
    }
    let layer_bytes = shape.block_bytes() / u64::from(layers);
    let differs = |layer: &kv_multigpu::place::LayerShape| layer.kv_block_bytes != layer_bytes;
    if let Some(layer) = placement.model().layers.iter().position(differs) {
        let placed_bytes = placement.model().layers[layer].kv_block_bytes;
        return Err(OptionsError::PlacedBlocks { layer, placed_bytes, layer_bytes });
    }
    if let PlacementKind::Sharded { shards } = placement.kind()
        && !shape.row_bytes().is_multiple_of(shards.kv_heads())
    {
        let (row_bytes, kv_heads) = (shape.row_bytes(), shards.kv_heads());
        return Err(OptionsError::PlacedHeads { row_bytes, kv_heads });
    }
    let (blocks, fit) = (u64::from(options.first().device_blocks), placement.kv_blocks_max());
    if blocks > fit {
        return Err(OptionsError::PlacedTooMany { blocks, fit });
    }
    Ok(())
}

/// Contiguous runs of layers, the first ones longer by one if they don't divide evenly.
fn layer_runs(layers: u32, devices: usize) -> impl Iterator<Item = Range<u32>> {
    let devices = devices as u32;
    let (each, more) = (layers / devices, layers % devices);
    let start = move |device: u32| device * each + device.min(more);
    (0..devices).map(move |device| start(device)..start(device + 1))
}
