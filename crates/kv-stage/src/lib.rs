//! Host buffers that cannot be overwritten while the device still reads them.
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod batch;
mod buffer;
mod class;
pub mod error;
mod pinned_slabs;
mod pool;
mod retire;
mod slab;

pub use batch::{
    BatchBuffers, BatchLength, BatchOptions, BatchStep, BatchTable, DeviceBatch, RowStates,
    StagedBatch, TableBuffers, references,
};
pub use buffer::{StagingBuffer, SubmittedView};
pub use kv_pool::{BlockId, Row, TableEntry};
pub use pinned_slabs::{PinnedSlabs, SlabsOptions};
pub use pool::{StagingOptions, StagingPool};
pub use slab::SlabMemory;
