//! Where the parts of blocks go: placements of every kind, made for the devices of a rig.

use cuda_driver::Device;
use kv_multigpu::place::{
    GpuCapacity, KvReplication, LayerShape, Link, LinkMatrix, ModelShape, Placement, Strategy,
};
use kv_plane::KvCacheOptions;

/// How blocks are divided.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    /// As a cache does that has no placement.
    Even,
    Layers(Strategy),
    /// By so many heads of K, and of V.
    Heads(u64),
}

impl Place {
    /// The placement for a cache with `options`; none for [`Place::Even`].
    pub(crate) fn of(self, options: &KvCacheOptions, devices: &[Device]) -> Option<Placement> {
        let shape = &options.groups[0].shape;
        let layer = LayerShape {
            weight_bytes: 1 << 20,
            kv_block_bytes: shape.block_bytes() / u64::from(shape.layers()),
            output_token_bytes: 8192,
        };
        let kv_blocks = u64::from(options.groups[0].device_blocks);
        let model = ModelShape::uniform(shape.layers() as usize, layer, kv_blocks).unwrap();
        let gpu = |device: &Device| GpuCapacity {
            uuid: device.info().uuid,
            free_bytes: 1 << 40,
            memory_bytes_per_second: 3_000_000_000_000,
        };
        let gpus: Vec<_> = devices.iter().map(gpu).collect();
        let link = Link { latency_ns: 5000, bytes_per_second: 300_000_000_000 };
        let links = LinkMatrix::uniform(gpus.len(), link).unwrap();
        match self {
            Self::Even => None,
            Self::Layers(strategy) => {
                Some(Placement::layers(&model, &gpus, &links, strategy).unwrap())
            }
            Self::Heads(heads) => {
                let refuse = KvReplication::Refuse;
                Some(Placement::sharded(&model, &gpus, &links, heads, heads, refuse).unwrap())
            }
        }
    }
}
