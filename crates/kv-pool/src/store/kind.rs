//! The rules for what to store by name, for whoever chooses one in a configuration.

use std::fmt;
use std::str::FromStr;

use super::{StoreByEvidence, StorePolicy, StoreRules};
use crate::policy::PolicyError;

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

/// A text that names no rule for what to store.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("unknown rule {found:?} for what to store; expected evidence or all")]
pub struct UnknownStore {
    /// The text.
    pub found: String,
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
    /// [`PolicyError`] if there are too many blocks, or no memory for the tables.
    pub fn make(self, rules: StoreRules) -> Result<Option<Box<dyn StorePolicy>>, PolicyError> {
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
    type Err = UnknownStore;

    fn from_str(text: &str) -> Result<Self, UnknownStore> {
        let kind = Self::ALL.into_iter().find(|kind| kind.name() == text);
        kind.ok_or_else(|| UnknownStore { found: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_read_back_by_its_name_and_made() {
        for kind in StoreKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
            let made = kind.make(StoreRules::new(4)).unwrap();
            assert_eq!(made.map_or("all", |made| made.name()), kind.name());
        }
        assert!(StoreKind::Evidence.make(StoreRules::new(u64::MAX)).is_err());
        let unknown = "some".parse::<StoreKind>().unwrap_err();
        assert_eq!(
            unknown.to_string(),
            "unknown rule \"some\" for what to store; expected evidence or all"
        );
    }
}
