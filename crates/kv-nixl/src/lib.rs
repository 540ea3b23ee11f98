//! One-sided reads of another host's KV cache by NVIDIA NIXL.
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod agent;
mod beside;
mod descriptor;
mod device;
mod error;
mod landing;
mod library;
mod memory;
mod piece;
mod reader;
mod readers;
mod transfer;

pub use device::{NixlDeviceMemory, NixlDeviceTransfer};
pub use error::{NixlError, Status};
pub use library::Library;
pub use memory::NixlMemory;
pub use transfer::NixlTransfer;
