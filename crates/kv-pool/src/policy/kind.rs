//! The policies of this crate by name, for whoever chooses one in a configuration.

use std::fmt;
use std::str::FromStr;

use super::{EvictionPolicy, HitDensity, PolicyError, PriorityLru};

/// One of the policies of this crate.
///
/// # Examples
///
/// ```
/// use kv_pool::policy::PolicyKind;
/// use kv_pool::{BlockPool, PoolConfig, Tier};
///
/// let kind: PolicyKind = "hit_density".parse()?;
/// let config = PoolConfig::primary_only(64);
/// let pool = BlockPool::builder(&config).policy(Tier::Primary, kind.make(64)?).build()?;
/// assert_eq!(pool.claimable(), 64);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum PolicyKind {
    /// [`PriorityLru`]: what a pool does that is given no policy, and then without a policy's tables.
    Lru,
    /// [`HitDensity`]: learns what suits the traffic, so that nobody need choose.
    #[default]
    HitDensity,
}

/// A text that names no policy.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("unknown policy {found:?}; expected lru or hit_density")]
pub struct UnknownPolicy {
    /// The text.
    pub found: String,
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

    /// Makes the policy for a pool of `blocks` blocks in all tiers.
    ///
    /// # Errors
    ///
    /// [`PolicyError`] if there are too many blocks, or no memory for the tables.
    pub fn make(self, blocks: u64) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        match self {
            Self::Lru => Ok(Box::new(PriorityLru::new(blocks)?)),
            Self::HitDensity => Ok(Box::new(HitDensity::new(blocks)?)),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        let kind = Self::ALL.into_iter().find(|kind| kind.name() == text);
        kind.ok_or_else(|| UnknownPolicy { found: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_made_under_its_name_and_read_back() {
        for kind in PolicyKind::ALL {
            assert_eq!(kind.make(4).unwrap().name(), kind.name());
            assert_eq!(kind.to_string().parse(), Ok(kind));
            assert!(kind.make(u64::MAX).is_err());
        }
        let unknown = "LRU".parse::<PolicyKind>().unwrap_err();
        assert_eq!(unknown.to_string(), "unknown policy \"LRU\"; expected lru or hit_density");
    }
}
