//! A tier of files under the host memory of a KV cache.
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod class;
mod error;
mod folder;
/// Programs of this repository measure disks by it. It may change with any version.
#[doc(hidden)]
pub mod io;
mod layout;
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
pub use io::Backend;
pub use layout::HeadingFault;
pub use options::{BackendChoice, DiskOptions, Keep, Mismatch, SlotRules};
pub use seal::Keys;
pub use stats::{DiskStats, Miss, Off, Unstored};
pub use tier::{DiskTier, DiskWatch, FileReport};

/// What the tests and benchmarks of this crate take apart. It may change with any version.
#[doc(hidden)]
pub mod parts {
    pub use crate::io::memory::{Crash, DiskFault, FaultPlan, Image, MemoryFile};
    pub use crate::layout::{ENTRIES_A_PAGE, ENTRY_BYTES, Entry, EntryFault, Geometry, Heading};
    pub use crate::slot_file::{Place, SlotFile};
}
