//! Lists of devices and their names, from the driver or from NVML.

pub use crate::identity::{DeviceDirectory, DeviceListing};
#[cfg(feature = "nvml")]
#[cfg_attr(docsrs, doc(cfg(feature = "nvml")))]
pub use crate::nvml::NvmlDirectory;
