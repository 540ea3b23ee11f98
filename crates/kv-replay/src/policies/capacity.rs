//! How many blocks a cache holds: at least one, and few enough that twice as many can be counted.

use serde::{Serialize, Serializer};

/// The largest capacity, in blocks: a petabyte of KV at half a megabyte a block.
pub const CAPACITY_MAX_BLOCKS: usize = 1 << 30;

/// A capacity in blocks, from 1 to [`CAPACITY_MAX_BLOCKS`].
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Capacity {
    /// # Invariants
    ///
    /// From 1 to [`CAPACITY_MAX_BLOCKS`].
    blocks: usize,
}

/// Why a text is no list of capacities.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CapacityError {
    /// There is no capacity in it.
    #[error("no capacities given, expected a list such as 1000,3000")]
    Empty,
    /// One entry is no capacity.
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

/// Reads capacities from a list such as `1000,3000`, in the order given. Spaces around an entry are allowed.
///
/// # Errors
///
/// [`CapacityError`], naming the first entry that is no capacity.
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
