//! The capacity of a cache in blocks: at least one, and small enough that twice the number can be
//! counted.

use serde::{Serialize, Serializer};

/// Maximum capacity in blocks: half a petabyte of KV at half a megabyte per block.
pub const CAPACITY_MAX_BLOCKS: usize = 1 << 30;

/// A capacity in blocks, from 1 to [`CAPACITY_MAX_BLOCKS`].
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Capacity {
    /// # Invariants
    ///
    /// From 1 to [`CAPACITY_MAX_BLOCKS`].
    blocks: usize,
}

/// The reason why a text is not a list of capacities.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CapacityError {
    /// The list is empty.
    #[error("no capacities given, expected a list such as 1000,3000")]
    Empty,
    /// An entry is not a capacity.
    #[error("capacity {value:?} is not a whole number of blocks from 1 to {CAPACITY_MAX_BLOCKS}")]
    Invalid {
        /// The entry.
        value: String,
    },
}

cuda_driver::messages::one_line_debug!(CapacityError);

impl Capacity {
    /// A capacity of `blocks`.
    ///
    /// # Errors
    ///
    /// [`CapacityError::Invalid`] if it is 0 or above [`CAPACITY_MAX_BLOCKS`].
    pub fn new(blocks: usize) -> Result<Self, CapacityError> {
        if (1..=CAPACITY_MAX_BLOCKS).contains(&blocks) {
            Ok(Self { blocks })
        } else {
            Err(CapacityError::Invalid { value: blocks.to_string() })
        }
    }

    /// The capacity in blocks.
    #[must_use]
    pub fn blocks(self) -> usize {
        self.blocks
    }
}

impl Serialize for Capacity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.blocks.serialize(serializer)
    }
}

/// Parses capacities from a list such as `1000,3000`, in the given order. Spaces around an entry
/// are allowed.
///
/// # Errors
///
/// [`CapacityError`], naming the first invalid entry.
pub fn parse_capacities(list: &str) -> Result<Vec<Capacity>, CapacityError> {
    if list.trim().is_empty() {
        return Err(CapacityError::Empty);
    }
    list.split(',')
        .map(|entry| {
            let entry = entry.trim();
            let invalid = || CapacityError::Invalid { value: entry.to_owned() };
            Capacity::new(entry.parse().map_err(|_| invalid())?).map_err(|_| invalid())
        })
        .collect()
}
