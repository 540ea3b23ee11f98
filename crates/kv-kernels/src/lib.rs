//! Checked launches of KV-cache transfer kernels, with committed PTX and a CPU reference for each.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod checksum;
mod error;
mod fill;
mod gather;
mod kernels;
mod layout;
mod operand;
mod paged_kv;
mod pattern;
mod references;
mod shape;
mod transfer;

use kernels::entry;

pub use checksum::ChecksumArgs;
pub use error::{KernelError, Operand, OperandError, PagedKvError};
pub use fill::FillPattern;
pub use gather::GatherRows;
pub use kernels::KvKernels;
pub use layout::{LayoutError, PagedLayout, Strides};
pub use paged_kv::PagedKv;
pub use pattern::{BAD_BLOCK, Expected, plane_word, token_word, weight};
pub use references::references;
pub use shape::{KvShape, KvShapeOptions, ShapeError};
pub use transfer::{Direction, Transfer};
