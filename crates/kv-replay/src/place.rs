//! Divides the model over the devices: layers, or heads of all layers.

use std::fmt;
use std::str::FromStr;

use cuda_driver::{Device, DeviceError};
use kv_multigpu::place::{
    GpuCapacity, HeadShards, KvReplication, LayerShape, Link, LinkMatrix, ModelShape, Placement,
    PlacementError, Strategy,
};
use serde::Serialize;

use crate::config::{ConfigError, RunConfig};
use crate::shape::KV_COUNT;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Division {
    /// Each layer is on one device, with its KV blocks.
    Layers(Strategy),
    /// Each layer is on every device, divided by heads, with the same block ids on each.
    Heads,
}

impl Default for Division {
    fn default() -> Self {
        Self::Layers(Strategy::Contiguous)
    }
}

impl fmt::Display for Division {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layers(Strategy::Contiguous) => f.write_str("layers"),
            Self::Layers(strategy) => write!(f, "layers:{}", strategy.name()),
            Self::Heads => f.write_str("heads"),
        }
    }
}

#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[error(
    "unknown division {found:?}; expected heads, layers, layers:round-robin, layers:contiguous, layers:free-memory \
     or layers:least-cost"
)]
pub struct UnknownDivision {
    pub found: String,
}

cuda_driver::messages::one_line_debug!(UnknownDivision);

impl FromStr for Division {
    type Err = UnknownDivision;

    fn from_str(text: &str) -> Result<Self, UnknownDivision> {
        let strategy = |name| Strategy::ALL.into_iter().find(|strategy| strategy.name() == name);
        let place = match text {
            "heads" => Some(Self::Heads),
            "layers" => Some(Self::default()),
            _ => text.strip_prefix("layers:").and_then(strategy).map(Self::Layers),
        };
        place.ok_or_else(|| UnknownDivision { found: text.to_owned() })
    }
}

#[derive(thiserror::Error)]
pub enum PlaceError {
    #[error("the model cannot be placed on the devices as --place {place} says")]
    Placement { place: Division, source: PlacementError },
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("cannot query device {ordinal}")]
    Device { ordinal: i32, source: DeviceError },
}

cuda_driver::messages::one_line_debug!(PlaceError);

#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct PlaceReport {
    pub place: String,
    /// The placement in figures, line by line: bytes of each device, activations handed over, and
    /// the time for that on links like those of two H200s (NVLink where devices reach each other,
    /// host memory elsewhere).
    pub explanation: Vec<String>,
    /// The placement in the text form of `kv_multigpu::place::Placement`.
    pub placement: String,
}

/// A link between devices over NVLink, as measured on two H200s of one host.
const NVLINK: Link = Link { latency_ns: 5_000, bytes_per_second: 397_000_000_000 };

/// A link through pinned host memory, as measured on two H200s of one host.
const THROUGH_HOST: Link = Link { latency_ns: 20_000, bytes_per_second: 27_000_000_000 };

/// Speed of an H100's own memory. A replay has no weights, so nothing depends on it.
const MEMORY_BYTES_PER_SECOND: u64 = 3_000_000_000_000;

/// The heads of each device, if they divide evenly.
pub fn shards(kv_heads: u32, devices: usize) -> Result<HeadShards, PlacementError> {
    let heads = kv_heads.into();
    HeadShards::new(heads, heads, devices, KvReplication::Refuse)
}

/// Places the model of `config` on `devices`. Only KV is placed: a replay has no weights, and its
/// activations are assumed to be as wide as a layer's keys.
pub fn place(config: &RunConfig, devices: &[Device]) -> Result<Placement, PlaceError> {
    let gpus = devices.iter().map(capacity).collect::<Result<Vec<_>, _>>()?;
    let links = links(devices, config.place)?;
    place_on(config, &gpus, &links)
}

/// The same, on devices of other processes: between these, activations pass through host memory. `free_bytes`
/// are those of each device, which are told apart by their position only.
pub(crate) fn place_apart(config: &RunConfig, free_bytes: &[u64]) -> Result<Placement, PlaceError> {
    let gpu = |(position, &free_bytes): (usize, &u64)| GpuCapacity {
        uuid: (position as u128).to_be_bytes(),
        free_bytes,
        memory_bytes_per_second: MEMORY_BYTES_PER_SECOND,
    };
    let gpus: Vec<_> = free_bytes.iter().enumerate().map(gpu).collect();
    let links = LinkMatrix::from_fn(gpus.len(), |_, _| THROUGH_HOST)
        .map_err(|source| PlaceError::Placement { place: config.place, source })?;
    place_on(config, &gpus, &links)
}

fn place_on(
    config: &RunConfig,
    gpus: &[GpuCapacity],
    links: &LinkMatrix,
) -> Result<Placement, PlaceError> {
    config.check()?;
    config.check_devices(gpus.len())?;
    let row_bytes = config.shape.row_bytes().map_err(ConfigError::from)?;
    let layer = LayerShape {
        weight_bytes: 0,
        kv_block_bytes: u64::from(config.block_tokens) * KV_COUNT * row_bytes,
        output_token_bytes: row_bytes,
    };
    let layers = config.shape.layers as usize;
    let token_bytes = row_bytes.saturating_mul(KV_COUNT * layers as u64);
    let refused = |source| PlaceError::Placement { place: config.place, source };
    let model = ModelShape {
        step_tokens: config.max_batch.into(),
        // The tokens of an iteration are in a separate buffer before they are stored in the pool.
        workspace_bytes: token_bytes.saturating_mul(config.step_tokens.into()),
        ..ModelShape::uniform(layers, layer, config.device_blocks).map_err(refused)?
    };
    let heads = u64::from(config.shape.kv_heads);
    let placed = match config.place {
        Division::Layers(strategy) => Placement::layers(&model, gpus, links, strategy),
        Division::Heads => {
            Placement::sharded(&model, gpus, links, heads, heads, KvReplication::Refuse)
        }
    };
    placed.map_err(refused)
}

pub fn report(place: Division, placement: &Placement) -> PlaceReport {
    PlaceReport {
        place: place.to_string(),
        explanation: placement.explain().to_string().lines().map(str::to_owned).collect(),
        placement: placement.to_string(),
    }
}

fn capacity(device: &Device) -> Result<GpuCapacity, PlaceError> {
    let refused = |source| PlaceError::Device { ordinal: device.ordinal(), source };
    let (free_bytes, _) = device.memory_info().map_err(refused)?;
    let uuid = device.info().uuid;
    Ok(GpuCapacity { uuid, free_bytes, memory_bytes_per_second: MEMORY_BYTES_PER_SECOND })
}

fn links(devices: &[Device], place: Division) -> Result<LinkMatrix, PlaceError> {
    let mut refused = None;
    let links = LinkMatrix::from_fn(devices.len(), |from, to| {
        match devices[from].can_access(&devices[to]) {
            Ok(true) => NVLINK,
            Ok(false) => THROUGH_HOST,
            Err(source) => {
                refused = Some(PlaceError::Device { ordinal: devices[from].ordinal(), source });
                THROUGH_HOST
            }
        }
    });
    match refused {
        Some(refused) => Err(refused),
        None => links.map_err(|source| PlaceError::Placement { place, source }),
    }
}
