//! The orders of this crate by name, for whoever chooses one in a configuration.

use std::fmt;
use std::str::FromStr;

use super::{EvictionPolicy, HitDensity};
use crate::ConfigError;

/// One of the orders of this crate.
///
/// # Examples
///
/// ```
/// use kv_pool::policy::PolicyKind;
/// use kv_pool::{BlockPool, PoolConfig, Tier};
///
/// let mut builder = BlockPool::builder(&PoolConfig::primary_only(64));
/// let kind: PolicyKind = "hit_density".parse()?;
/// if let Some(policy) = kind.make(64)? {
///     builder = builder.policy(Tier::Primary, policy);
/// }
/// assert_eq!(builder.build()?.claimable(), 64);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum PolicyKind {
    /// Priority LRU: the lowest priority first, in it the least recently released. The order of a pool that is given no
    /// policy.
    Lru,
    /// Fewest expected hits for the time that a block would stay: learns what suits the traffic, so that nobody need
    /// choose.
    #[default]
    HitDensity,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Lru, Self::HitDensity];

    /// Its name in configurations and reports, which is that of the policy.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::HitDensity => "hit_density",
        }
    }

    /// Makes the policy for a pool of `blocks` blocks in all tiers; `None` for the order of a pool without one.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if there are too many blocks, or no memory for the tables.
    pub fn make(self, blocks: u64) -> Result<Option<Box<dyn EvictionPolicy>>, ConfigError> {
        match self {
            Self::Lru => Ok(None),
            Self::HitDensity => Ok(Some(Box::new(HitDensity::new(blocks)?))),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let kind = Self::ALL.into_iter().find(|kind| kind.name() == text);
        kind.ok_or_else(|| ConfigError::UnknownPolicy { found: text.to_owned() })
    }
}
