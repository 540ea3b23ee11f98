//! Copies of blocks between 16 and 8 bits: number formats, scales, and what a conversion takes.

pub use crate::floats::{NarrowFormat, WideFormat};
pub use crate::quantize::{Conversion, ConversionKind, ScalePer};
