//! Eviction policies by name: those of `kv-pool`, and those of these tools.

use std::fmt;
use std::str::FromStr;

use kv_pool::ConfigError;
use kv_pool::policy::{EvictionPolicy, PolicyKind};

use super::{AdaptiveReplacement, PriorityLru, S3Fifo, Slru};

/// An eviction policy by name.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum Eviction {
    /// [`PriorityLru`], the order of a pool without a policy.
    Lru,
    /// [`Slru`].
    Slru,
    /// [`S3Fifo`].
    S3Fifo,
    /// [`AdaptiveReplacement`].
    Arc,
    /// The policy of `kv-pool` that learns.
    #[default]
    HitDensity,
}

/// A text that names no policy.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("unknown policy {found:?}; expected lru, slru, s3fifo, arc or hit_density")]
pub struct UnknownEviction {
    /// The text.
    pub found: String,
}

impl Eviction {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Lru, Self::Slru, Self::S3Fifo, Self::Arc, Self::HitDensity];

    /// Its name in options and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Slru => "slru",
            Self::S3Fifo => "s3fifo",
            Self::Arc => "arc",
            Self::HitDensity => "hit_density",
        }
    }

    /// Makes the policy for a pool of `blocks` blocks in all tiers.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if there are too many blocks, or no memory for the tables.
    pub fn make(self, blocks: u64) -> Result<Box<dyn EvictionPolicy>, ConfigError> {
        let made: Option<Box<dyn EvictionPolicy>> = match self {
            Self::Lru => PolicyKind::Lru.make(blocks)?,
            Self::Slru => Some(Box::new(Slru::new(blocks)?)),
            Self::S3Fifo => Some(Box::new(S3Fifo::new(blocks)?)),
            Self::Arc => Some(Box::new(AdaptiveReplacement::new(blocks)?)),
            Self::HitDensity => PolicyKind::HitDensity.make(blocks)?,
        };
        match made {
            Some(policy) => Ok(policy),
            None => Ok(Box::new(PriorityLru::new(blocks)?)),
        }
    }
}

impl fmt::Display for Eviction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Eviction {
    type Err = UnknownEviction;

    fn from_str(text: &str) -> Result<Self, UnknownEviction> {
        let kind = Self::ALL.into_iter().find(|kind| kind.name() == text);
        kind.ok_or_else(|| UnknownEviction { found: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_made_under_its_name_and_read_back() {
        for kind in Eviction::ALL {
            assert_eq!(kind.make(4).unwrap().name(), kind.name());
            assert_eq!(kind.to_string().parse(), Ok(kind));
            assert!(kind.make(u64::MAX).is_err());
        }
        let unknown = "LRU".parse::<Eviction>().unwrap_err();
        assert_eq!(
            unknown.to_string(),
            "unknown policy \"LRU\"; expected lru, slru, s3fifo, arc or hit_density"
        );
    }
}
