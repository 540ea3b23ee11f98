//! Checked launches of the kernels that move and read the paged KV of an LLM engine.
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod chunks;
pub mod error;
pub mod layout;
pub mod link;
pub mod raw;
pub mod verify;

mod adopt;
mod append;
mod block_copy;
mod block_sum;
mod block_units;
mod blocks;
mod busy;
mod checksum;
mod class;
mod divider;
mod fill;
mod format;
mod gather;
mod kernels;
mod launch;
mod launcher;
mod lazy;
mod operand;
mod paged_kv;
mod paged_layout;
mod pairs;
mod pattern;
mod places;
mod references;
mod report;
mod shape;
mod source;
mod stored;
mod transfer;
mod walk;

use kernels::entry;

pub use append::Append;
pub use block_copy::BlockCopy;
pub use blocks::{Blocks, HostBlocks};
pub use error::KernelError;
pub use format::KvFormat;
pub use gather::GatherRows;
pub use kernels::KvKernels;
pub use kv_pool::{BlockId, Slot, TableEntry};
pub use paged_kv::PagedKv;
pub use paged_layout::PagedLayout;
pub use pairs::{BlockPair, BlockPairs};
pub use references::references;
pub use report::DeviceReport;
pub use shape::{KvShape, KvShapeOptions};
pub use source::KernelSource;
pub use transfer::{Direction, Transfer};
