//! Which device gets what of the model: layers, or heads of all layers, placed from what a run knows.

use std::fmt;
use std::str::FromStr;

use cuda_driver::{Device, DeviceError};
use kv_place::{
    GpuCapacity, HeadShards, HeadsError, KvReplication, LayerShape, Link, LinkMatrix, ModelShape,
    Placement, PlacementError, Strategy,
};
use serde::Serialize;

use crate::config::{ConfigError, RunConfig};
use crate::shape::KV_COUNT;

/// How the model is divided over several devices.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Division {
    /// Each layer on one device, with the KV blocks of it.
    Layers(Strategy),
    /// Each layer on every device, divided by heads, with the same block ids on each.
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

/// A text that names no way to divide a model.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[error(
    "unknown division {found:?}; expected heads, layers, layers:round-robin, layers:contiguous, layers:free-memory \
     or layers:least-cost"
)]
pub struct UnknownDivision {
    /// The text.
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

/// Why the model was not placed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// It does not fit, or cannot be divided like that.
    #[error("the model cannot be placed on the devices as --place {place} says")]
    Placement {
        /// How it was to be divided.
        place: Division,
        /// Why it cannot be.
        source: PlacementError,
    },
    /// The run cannot be as it was asked for.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A device does not say what it has or reaches.
    #[error("cannot ask device {ordinal} what it has")]
    Device {
        /// The device.
        ordinal: i32,
        /// What the driver said.
        source: DeviceError,
    },
}

cuda_driver::messages::one_line_debug!(PlaceError);

/// How a model was placed, for reports.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct PlaceReport {
    /// How it was to be divided.
    pub place: String,
    /// The placement in figures, line by line: bytes of each device, what is handed over, and how long that takes on
    /// links of the speeds of two H200s (NVLink where devices reach each other, host memory elsewhere).
    pub explanation: Vec<String>,
    /// The placement as text that `kv_place::Placement` is parsed from.
    pub placement: String,
}

/// Device to device over NVLink, as measured on two H200s of one host.
const NVLINK: Link = Link { latency_ns: 5_000, bytes_per_second: 397_000_000_000 };

/// Down to pinned host memory and up again, likewise.
const THROUGH_HOST: Link = Link { latency_ns: 20_000, bytes_per_second: 27_000_000_000 };

/// Of an H100's own memory. A replay has no weights, so nothing depends on it.
const MEMORY_BYTES_PER_SECOND: u64 = 3_000_000_000_000;

/// The heads of each device, if they divide.
///
/// # Errors
///
/// [`HeadsError`] if they do not.
pub fn shards(kv_heads: u32, devices: usize) -> Result<HeadShards, HeadsError> {
    let heads = kv_heads.into();
    HeadShards::new(heads, heads, devices, KvReplication::Refuse)
}

/// Places the model of `config` on `devices`. Only KV is placed: a replay has no weights, and its activations are taken
/// to be as wide as a layer's keys.
///
/// # Errors
///
/// [`PlaceError`], with how much is missing on each device where it does not fit.
pub fn place(config: &RunConfig, devices: &[Device]) -> Result<Placement, PlaceError> {
    config.check()?;
    config.check_devices(devices.len())?;
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
        // What an iteration writes lies beside the pool before it is stored there.
        workspace_bytes: token_bytes.saturating_mul(config.step_tokens.into()),
        ..ModelShape::uniform(layers, layer, config.device_blocks).map_err(refused)?
    };
    let gpus = devices.iter().map(capacity).collect::<Result<Vec<_>, _>>()?;
    let links = links(devices, config.place)?;
    let heads = u64::from(config.shape.kv_heads);
    let placed = match config.place {
        Division::Layers(strategy) => Placement::layers(&model, &gpus, &links, strategy),
        Division::Heads => {
            Placement::sharded(&model, &gpus, &links, heads, heads, KvReplication::Refuse)
        }
    };
    placed.map_err(refused)
}

/// What there is to say of a placement.
#[must_use]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisions_are_read_and_written_alike() {
        for text in
            ["layers", "heads", "layers:round-robin", "layers:free-memory", "layers:least-cost"]
        {
            assert_eq!(text.parse::<Division>().unwrap().to_string(), text);
        }
        assert_eq!("layers:contiguous".parse(), Ok(Division::default()));
        for text in ["", "Heads", "layers:", "layers:even", "heads:2"] {
            let unknown = text.parse::<Division>().unwrap_err();
            assert_eq!(unknown, UnknownDivision { found: text.to_owned() });
        }
    }
}
