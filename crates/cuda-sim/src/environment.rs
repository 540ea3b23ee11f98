//! Settings from environment variables, for machines whose program does not choose them. With such
//! a variable, an unchanged test suite runs under another setting.

use std::env;

use crate::{Pace, RaceCheck, SimConfigError};

/// An environment variable, with the values it may have.
pub(crate) struct Variable<T: 'static> {
    name: &'static str,
    words: &'static [(&'static str, T)],
}

/// The initial pace of machines.
pub(crate) const PACE: Variable<Pace> = Variable {
    name: "CUDA_SIM_PACE",
    words: &[
        ("slowest", Pace::Slowest),
        ("fastest", Pace::Fastest),
        ("random", Pace::Random),
        ("one-behind", Pace::OneBehind),
    ],
};

/// How machines handle races.
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
        match env::var_os(self.name) {
            Some(text) => self.value_of(&text.to_string_lossy()),
            None => Ok(T::default()),
        }
    }

    /// Parses `text` as a value of the variable.
    fn value_of(&self, text: &str) -> Result<T, SimConfigError> {
        let found = self.words.iter().find(|(word, _)| *word == text);
        found.map(|&(_, value)| value).ok_or_else(|| SimConfigError::Environment {
            variable: self.name,
            found: text.to_owned(),
            known: self.words.iter().map(|(word, _)| *word).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_one_value_and_another_is_refused_by_name() {
        for (word, pace) in [
            ("slowest", Pace::Slowest),
            ("fastest", Pace::Fastest),
            ("random", Pace::Random),
            ("one-behind", Pace::OneBehind),
        ] {
            assert_eq!(PACE.value_of(word), Ok(pace));
        }
        for (word, check) in
            [("off", RaceCheck::Off), ("report", RaceCheck::Report), ("abort", RaceCheck::Abort)]
        {
            assert_eq!(RACES.value_of(word), Ok(check));
        }
        assert!(RACES.value_of("on").is_err());
        for word in ["", "Slowest", "slowest ", "one_behind", "\u{fffd}"] {
            let text = PACE.value_of(word).unwrap_err().to_string();
            let expected = format!(
                "environment variable CUDA_SIM_PACE={word:?} is none of slowest, fastest, random, \
                 one-behind"
            );
            assert_eq!(text, expected);
        }
    }
}
