//! The rules for what to store by name, for whoever chooses one in a configuration.

use std::fmt;
use std::str::FromStr;

use super::{StoreByEvidence, StorePolicy, StoreRules};
use crate::ConfigError;

/// A rule for what to store below.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum StoreKind {
    /// Everything is stored.
    All,
    /// [`StoreByEvidence`].
    #[default]
    Evidence,
}

impl StoreKind {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::All, Self::Evidence];

    /// Its name in configurations and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Evidence => "evidence",
        }
    }

    /// Makes the policy for a tier; `None` where everything is stored, for which a pool needs none.
    ///
    /// # Errors
    /// [`ConfigError`] if there are too many blocks, or no memory for the tables.
    pub fn make(self, rules: StoreRules) -> Result<Option<Box<dyn StorePolicy>>, ConfigError> {
        match self {
            Self::All => Ok(None),
            Self::Evidence => Ok(Some(Box::new(StoreByEvidence::new(rules)?))),
        }
    }
}

impl fmt::Display for StoreKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for StoreKind {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let kind = Self::ALL.into_iter().find(|kind| kind.name() == text);
        kind.ok_or_else(|| ConfigError::UnknownStore { found: text.to_owned() })
    }
}
