//! Unchecked launches: addresses in place of memory that has an owner.
//!
//! The methods are `unsafe`, and each says what its caller guarantees.

pub use crate::append::{RawAppend, RawAppendRows};
pub use crate::block_copy::{BlockCopyKernels, RawBlockCopy};
pub use crate::block_sum::RawBlockSums;
pub use crate::block_units::{RawBlockSide, RawBlockUnits};
pub use crate::launch::{CHUNKS_MAX, RawChunk, RawMapping, RawTransfer};
