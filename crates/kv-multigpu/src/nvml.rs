//! NVML as the machine's own list of devices. Optional.

use std::fmt;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use crate::identity::{DeviceDirectory, DeviceKind, DeviceListing, DeviceUuid};

/// Finds devices through NVML, if the machine has it.
pub struct NvmlDirectory {
    nvml: Option<Nvml>,
}

impl NvmlDirectory {
    /// Loads NVML if the machine has it. Without NVML nothing is found.
    #[must_use]
    pub fn load() -> Self {
        let nvml = Nvml::init()
            .inspect_err(|error| tracing::info!(%error, "no NVML: its indices are not told"))
            .ok();
        Self { nvml }
    }

    /// Whether NVML was found.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.nvml.is_some()
    }
}

impl DeviceDirectory for NvmlDirectory {
    fn find(&self, bytes: [u8; 16]) -> Option<DeviceListing> {
        let nvml = self.nvml.as_ref()?;
        let whole = || -> Result<DeviceListing, NvmlError> {
            let uuid = DeviceUuid { is_mig: false, bytes }.to_string();
            let nvml_index = nvml.device_by_uuid(uuid)?.index()?;
            Ok(DeviceListing { nvml_index, kind: DeviceKind::Gpu })
        };
        let part = || -> Result<DeviceListing, NvmlError> {
            let uuid = DeviceUuid { is_mig: true, bytes }.to_string();
            let part = nvml.device_by_uuid(uuid)?;
            let nvml_index = part.mig_parent_device()?.index()?;
            Ok(DeviceListing { nvml_index, kind: DeviceKind::Mig })
        };
        whole().or_else(|_| part()).ok()
    }
}

impl fmt::Debug for NvmlDirectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvmlDirectory").field("loaded", &self.is_loaded()).finish()
    }
}
