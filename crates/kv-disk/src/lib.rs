//! A tier of files under the host memory of a KV cache.
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod error;
mod folder;
pub mod io;
pub mod layout;
mod limits;
mod options;
mod random;
mod seal;
mod slot_file;
mod slots;
mod stats;
mod table;
mod tier;

pub use error::{Hostility, OpenError};
pub use options::{BackendChoice, DiskOptions, Keep, Mismatch, SlotRules};
pub use seal::{Keys, SEAL_BYTES};
pub use slot_file::{Place, SlotFile};
pub use stats::{DiskStats, Miss, Off, Unstored};
pub use tier::{DiskTier, DiskWatch, FileReport};
