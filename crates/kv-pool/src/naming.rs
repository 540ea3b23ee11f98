//! What is said of content when it is given a name.

use crate::{BlockHash, Priority, Retention};

/// What is said of content when it is given a name.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Naming {
    /// The name of the content before, which must be cached if this is to be found by prefix.
    /// A block is never evicted before those that name it here, as long as there is another choice.
    pub parent: Option<BlockHash>,
    /// What the content is worth when nobody uses it.
    pub retention: Retention,
}

impl Naming {
    /// Content that follows `parent`.
    #[must_use]
    pub fn after(parent: BlockHash) -> Self {
        Self { parent: Some(parent), ..Self::default() }
    }
}

impl From<Priority> for Naming {
    fn from(priority: Priority) -> Self {
        Retention::from(priority).into()
    }
}

impl From<Retention> for Naming {
    fn from(retention: Retention) -> Self {
        Self { retention, ..Self::default() }
    }
}
