//! Checks of contents: patterns that only one token can have, checksums through a block table, and sums
//! of blocks. The host computes each without the bytes.

pub use crate::block_sum::{BlockSums, block_sum};
pub use crate::checksum::ChecksumArgs;
pub use crate::fill::FillPattern;
pub use crate::pattern::{BAD_BLOCK, Expected, token_word, word_share};
