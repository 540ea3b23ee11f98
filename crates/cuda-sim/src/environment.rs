//! What a variable of the environment chooses for machines whose program does not choose it, so that a
//! suite of tests runs in another manner unchanged.

use std::env;

use crate::{Pace, RaceCheck, SimConfigError};

/// A variable whose word stands for a value.
pub(crate) struct Variable<T: 'static> {
    name: &'static str,
    words: &'static [(&'static str, T)],
}

/// The pace that machines begin with.
pub(crate) const PACE: Variable<Pace> = Variable {
    name: "CUDA_SIM_PACE",
    words: &[
        ("slowest", Pace::Slowest),
        ("fastest", Pace::Fastest),
        ("random", Pace::Random),
        ("one-behind", Pace::OneBehind),
    ],
};

/// What machines do about races.
pub(crate) const RACES: Variable<RaceCheck> = Variable {
    name: "CUDA_SIM_RACES",
    words: &[("off", RaceCheck::Off), ("report", RaceCheck::Report), ("abort", RaceCheck::Abort)],
};

/// Refuses an environment with a variable of ours whose word is unknown.
pub(crate) fn check() -> Result<(), SimConfigError> {
    PACE.read()?;
    RACES.read()?;
    Ok(())
}

impl<T: Copy + Default> Variable<T> {
    /// The value that the variable chooses, or the default if it is not set or its word is unknown: a
    /// configuration cannot be refused before a machine is built of it, which [`check`] does then.
    pub(crate) fn value(&self) -> T {
        self.read().unwrap_or_default()
    }

    fn read(&self) -> Result<T, SimConfigError> {
        match env::var_os(self.name) {
            Some(text) => self.value_of(&text.to_string_lossy()),
            None => Ok(T::default()),
        }
    }

    /// The value that `text` stands for.
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
                "CUDA_SIM_PACE={word:?} in the environment, where slowest, fastest, random, \
                 one-behind are known"
            );
            assert_eq!(text, expected);
        }
    }
}
