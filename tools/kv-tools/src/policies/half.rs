//! The part of a trace that counts, so that a policy can be judged on requests that it was not
//! tuned on.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// The requests whose lookups are counted.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Half {
    /// All requests.
    #[default]
    Both,
    /// The first half of the requests, rounded down.
    First,
    /// The second half. The first half is served before, so that the cache is warm.
    Second,
}

/// A text that does not name a half.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[error("half {value:?} is not first, second or both")]
pub struct HalfError {
    /// The text.
    pub value: String,
}

cuda_driver::messages::one_line_debug!(HalfError);

impl Half {
    /// The indices of the counted requests, out of so many.
    #[must_use]
    pub fn requests(self, of: usize) -> Range<usize> {
        match self {
            Self::Both => 0..of,
            Self::First => 0..of / 2,
            Self::Second => of / 2..of,
        }
    }
}

impl fmt::Display for Half {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Both => "both",
            Self::First => "first",
            Self::Second => "second",
        })
    }
}

impl FromStr for Half {
    type Err = HalfError;

    fn from_str(text: &str) -> Result<Self, HalfError> {
        [Self::Both, Self::First, Self::Second]
            .into_iter()
            .find(|half| half.to_string() == text)
            .ok_or_else(|| HalfError { value: text.to_owned() })
    }
}
