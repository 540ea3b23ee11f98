//! The identity of a device: its UUID, and its entry in the machine's own list of devices.

use std::fmt;
use std::str::FromStr;

use crate::RegistryError;

/// The UUID of a GPU or of a part of one, by which CUDA, NVML and the operator's tools mean the same.
///
/// Ordinals are not that: `CUDA_VISIBLE_DEVICES` renumbers and hides devices for CUDA, and not for NVML.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct DeviceUuid {
    /// Whether it names a part of a GPU.
    pub is_mig: bool,
    /// Its 16 bytes.
    pub bytes: [u8; 16],
}

impl fmt::Display for DeviceUuid {
    /// As NVML and `CUDA_VISIBLE_DEVICES` spell it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_mig { "MIG" } else { "GPU" })?;
        for (index, byte) in self.bytes.iter().enumerate() {
            if matches!(index, 0 | 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl FromStr for DeviceUuid {
    type Err = RegistryError;

    fn from_str(text: &str) -> Result<Self, RegistryError> {
        parse(text).ok_or_else(|| RegistryError::Uuid { text: text.to_owned() })
    }
}

fn parse(text: &str) -> Option<DeviceUuid> {
    let (kind, rest) = text.split_once('-')?;
    let is_mig = match kind {
        "GPU" => false,
        "MIG" => true,
        _ => return None,
    };
    let mut bytes = [0; 16];
    let mut at = 0;
    for (part, digits) in rest.split('-').zip([8, 4, 4, 4, 12]) {
        if part.len() != digits || !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        for index in (0..digits).step_by(2) {
            bytes[at] = u8::from_str_radix(&part[index..index + 2], 16).ok()?;
            at += 1;
        }
    }
    (at == 16 && rest.len() == 36).then_some(DeviceUuid { is_mig, bytes })
}

/// Whether a device is a whole GPU.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum DeviceKind {
    /// A GPU.
    Gpu,
    /// A part of one (Multi-Instance GPU). CUDA enumerates one at most, and it has no peers.
    Mig,
}

/// Where the machine's own list has a device.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct DeviceListing {
    /// NVML's index of the GPU; of a part, the index of the GPU that it is a part of.
    pub nvml_index: u32,
    /// Whether it is a whole GPU.
    pub kind: DeviceKind,
}

/// The machine's own list of devices, which CUDA's ordinals are set beside.
///
/// `topology::Nvml` (feature `nvml`) asks NVML. An implementation answers `None` to what it does not know.
pub trait DeviceDirectory: fmt::Debug + Send + Sync {
    /// Where the device with this UUID is, whole or a part.
    fn find(&self, uuid: [u8; 16]) -> Option<DeviceListing>;
}

/// What CUDA's name of a device tells of its kind, where nobody else does: CUDA names a part by its
/// GPU's name and its profile, such as `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.
pub(crate) fn kind_of_name(name: &str) -> DeviceKind {
    let is_part = name.split(' ').any(|word| word == "MIG");
    if is_part { DeviceKind::Mig } else { DeviceKind::Gpu }
}
