//! Unchecked launches of block copies: addresses in place of memory that has an owner.
//!
//! The methods are `unsafe`, and each says what its caller guarantees.

pub use crate::block_copy::{BlockCopyKernels, RawBlockCopy};
pub use crate::block_units::{RawBlockSide, RawBlockUnits};

#[cfg(test)]
mod tests;
