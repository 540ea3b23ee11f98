//! What layouts are made of, and what an engine says of its tensors.

pub use crate::adopt::TensorView;
pub use crate::format::{FormatOptions, TensorAxis};
pub use crate::paged_layout::{LayoutError, LayoutOptions, RowPart, Strides, Tensors};
