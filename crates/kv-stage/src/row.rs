//! The number of a row of a block table. The type distinguishes it from block ids and lengths.

use std::fmt;

/// A row of the block tables of a [`DeviceBatch`](crate::DeviceBatch): the block ids of one sequence, in the order of
/// its tokens.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Row(u32);

impl Row {
    /// Row number `index`, counted from 0.
    #[must_use]
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// The number, counted from 0.
    #[must_use]
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
