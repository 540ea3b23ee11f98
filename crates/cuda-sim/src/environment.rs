//! Settings from environment variables, for machines whose program does not choose them. With such
//! a variable, an unchanged test suite runs under another setting.

use std::env;

use crate::{Pace, RaceCheck, SimConfigError};

/// An environment variable, with the values it may have.
pub(crate) struct Variable<T: 'static> {
    name: &'static str,
    words: &'static [(&'static str, T)],
}

pub(crate) const PACE: Variable<Pace> = Variable {
    name: "CUDA_SIM_PACE",
    words: &[
        ("slowest", Pace::Slowest),
        ("fastest", Pace::Fastest),
        ("random", Pace::Random),
        ("one-behind", Pace::OneBehind),
    ],
};

pub(crate) const RACES: Variable<RaceCheck> = Variable {
    name: "CUDA_SIM_RACES",
    words: &[("off", RaceCheck::Off), ("report", RaceCheck::Report), ("abort", RaceCheck::Abort)],
};

/// Refuses an environment in which a variable of this crate has an unknown value.
pub(crate) fn check() -> Result<(), SimConfigError> {
    PACE.read()?;
    RACES.read()?;
    Ok(())
}

impl<T: Copy + Default> Variable<T> {
    /// The value that the variable chooses, or the default if the variable is not set or unknown. A
    /// default configuration cannot fail; [`check`] refuses the unknown value when a machine is
    /// built.
    pub(crate) fn value(&self) -> T {
        self.read().unwrap_or_default()
    }

    fn read(&self) -> Result<T, SimConfigError> {
        let Some(text) = env::var_os(self.name) else { return Ok(T::default()) };
        let text = text.to_string_lossy();
        let found = self.words.iter().find(|(word, _)| *word == text);
        found.map(|&(_, value)| value).ok_or_else(|| SimConfigError::Environment {
            variable: self.name,
            found: text.into_owned(),
            known: self.words.iter().map(|(word, _)| *word).collect(),
        })
    }
}
