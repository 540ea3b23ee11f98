//! Devices by name, and a cache for a model on them.

use std::sync::Arc;

use anyhow::{Context as _, bail};
use cuda_driver::{CudaDriver, Device, Driver, Stream};
use cuda_sim::{RaceCheck, SimConfig, SimDriver};
use kv_kernels::{KvShape, KvShapeOptions};
use kv_plane::{KvCache, KvCacheOptions};

use crate::model::ModelConfig;

/// Devices of one driver.
#[derive(Debug)]
pub struct Devices {
    /// The devices.
    pub devices: Vec<Device>,
    /// The driver, if they are simulated: it knows of every mistake.
    pub sim: Option<SimDriver>,
}

impl Devices {
    /// The devices that `--device` names: `sim`, `sim:2`, `cuda:0`, or several of the latter with commas.
    ///
    /// # Errors
    /// Other names, and devices that are not there. A simulated device is never used in place of a missing GPU.
    pub fn named(names: &str) -> anyhow::Result<Self> {
        if let Some(count) = names.strip_prefix("sim") {
            let count = count.strip_prefix(':').map_or(Ok(1), str::parse);
            return Self::simulated(
                count.with_context(|| format!("{names:?} is no number of devices"))?,
            );
        }
        let mut ordinals = Vec::new();
        for name in names.split(',') {
            match name.strip_prefix("cuda:").map(str::parse) {
                Some(Ok(ordinal)) => ordinals.push(ordinal),
                _ => bail!("{name:?} is neither sim, sim:N nor cuda:N"),
            }
        }
        let cuda = CudaDriver::load().context("no GPU can be used here")?;
        let driver: Arc<dyn Driver> = Arc::new(cuda);
        Ok(Self { devices: open(&driver, ordinals)?, sim: None })
    }

    /// Simulated devices.
    ///
    /// # Errors
    /// More devices than there can be.
    pub fn simulated(count: u32) -> anyhow::Result<Self> {
        let races = RaceCheck::Report;
        let sim = SimDriver::new(SimConfig { devices: count, races, ..SimConfig::default() })?;
        sim.register_kernels(kv_kernels::references());
        sim.register_kernels(kv_stage::references());
        sim.register_kernels(crate::attention::references());
        let driver: Arc<dyn Driver> = Arc::new(sim.clone());
        Ok(Self { devices: open(&driver, 0..count as i32)?, sim: Some(sim) })
    }
}

fn open(
    driver: &Arc<dyn Driver>,
    ordinals: impl IntoIterator<Item = i32>,
) -> anyhow::Result<Vec<Device>> {
    let open = |ordinal| {
        let device = Device::open(Arc::clone(driver), ordinal);
        device.with_context(|| format!("device {ordinal} cannot be opened"))
    };
    ordinals.into_iter().map(open).collect()
}

/// Options of a cache for a model: `device_blocks` blocks of `block_tokens` tokens, in 32-bit floats.
///
/// # Errors
/// A model whose rows are not possible.
pub fn options(
    config: &ModelConfig,
    block_tokens: u32,
    device_blocks: u32,
) -> anyhow::Result<KvCacheOptions> {
    let row_bytes = config.heads.kv_floats() as u64 * 4;
    let shape = KvShapeOptions { layers: config.layers, kv_count: 2, row_bytes, block_tokens };
    let mut options = KvCacheOptions::new(KvShape::new(shape)?, device_blocks);
    options.groups[0].blocks_per_sequence_max = config.context_tokens.div_ceil(block_tokens);
    options.sequences_max = 64;
    options.step_tokens_max = 1024;
    options.groups[0].watermark_blocks = 2;
    Ok(options)
}

/// A cache with one stream on each device, over which the layers are split. A device may be named twice.
///
/// # Errors
/// Devices that lack memory.
pub fn cache(devices: &[Device], options: KvCacheOptions) -> anyhow::Result<KvCache> {
    let streams = devices.iter().map(Stream::new).collect::<Result<Vec<_>, _>>()?;
    Ok(KvCache::new(&streams, options)?)
}
