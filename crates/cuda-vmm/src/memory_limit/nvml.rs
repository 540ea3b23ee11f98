//! Figures from NVML, which knows which processes hold a device's memory. Optional.

use std::fmt;

use cuda_driver::{Device, DeviceError};
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;

use crate::memory_limit::{DriverProbe, MemoryFigures, MemoryProbe};

/// Asks the driver, like [`DriverProbe`], and NVML for the memory of other processes.
///
/// NVML only adds an explanation: the free bytes come from the driver. The probe returns the same
/// as [`DriverProbe`] where the library is missing, or does not know the device or its processes.
/// That happens in some containers and on MIG instances.
pub struct NvmlProbe {
    nvml: Option<Nvml>,
}

impl NvmlProbe {
    /// Loads NVML if the machine has it.
    #[must_use]
    pub fn load() -> Self {
        let nvml = Nvml::init()
            .inspect_err(|error| tracing::info!(%error, "NVML not found: memory of other processes is unknown"))
            .ok();
        Self { nvml }
    }

    /// Whether NVML was found.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.nvml.is_some()
    }

    /// Bytes that other processes hold of the device with this UUID, if NVML knows.
    fn others_bytes(&self, uuid: [u8; 16]) -> Option<u64> {
        let device = self.nvml.as_ref()?.device_by_uuid(nvml_uuid(uuid)).ok()?;
        let processes = device.running_compute_processes().ok()?;
        let own = std::process::id();
        let used = |memory| match memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        // One process of unknown size makes the sum unknown.
        let others = processes.into_iter().filter(|process| process.pid != own);
        others.map(|process| used(process.used_gpu_memory)).sum()
    }
}

impl fmt::Debug for NvmlProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvmlProbe").field("loaded", &self.is_loaded()).finish()
    }
}

impl MemoryProbe for NvmlProbe {
    fn figures(&self, device: &Device) -> Result<MemoryFigures, DeviceError> {
        let figures = DriverProbe.figures(device)?;
        Ok(MemoryFigures { others_bytes: self.others_bytes(device.info().uuid), ..figures })
    }
}

/// NVML's spelling of a UUID.
fn nvml_uuid(uuid: [u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (index, byte) in uuid.into_iter().enumerate() {
        if matches!(index, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cuda_sim::{SimConfig, SimDriver};

    use super::*;

    #[test]
    fn uuids_are_spelt_as_nvml_does() {
        let uuid = [0xf0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255];
        assert_eq!(nvml_uuid(uuid), "GPU-f0010203-0405-0607-0809-0a0b0c0d0eff");
    }

    #[test]
    fn a_device_that_nvml_does_not_know_is_told_by_the_driver_alone() {
        let device = Device::open(Arc::new(SimDriver::new(SimConfig::default()).unwrap()), 0);
        let device = device.unwrap();
        for probe in [NvmlProbe { nvml: None }, NvmlProbe::load()] {
            let figures = probe.figures(&device).unwrap();
            assert_eq!(figures, DriverProbe.figures(&device).unwrap());
        }
    }
}
