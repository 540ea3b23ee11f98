//! The decisions of a schedule as a short text that it replays from.

use std::fmt;
use std::str::FromStr;

/// The decisions of one schedule, in order, such as `0.2.1`; `-` when there were none.
///
/// It belongs to the program and the configuration that it was recorded with.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub struct Script(pub(crate) Vec<u32>);

impl Script {
    /// Number of decisions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there was nothing to decide.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((first, rest)) = self.0.split_first() else { return f.write_str("-") };
        write!(f, "{first}")?;
        rest.iter().try_for_each(|choice| write!(f, ".{choice}"))
    }
}

/// A text that is no script.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[error("{part:?} is not a decision of a schedule")]
pub struct ScriptError {
    /// The part that is not a number.
    pub part: String,
}

cuda_driver::messages::one_line_debug!(ScriptError);

impl FromStr for Script {
    type Err = ScriptError;

    fn from_str(text: &str) -> Result<Self, ScriptError> {
        if text == "-" {
            return Ok(Self::default());
        }
        let number = |part: &str| part.parse().map_err(|_| ScriptError { part: part.to_owned() });
        Ok(Self(text.split('.').map(number).collect::<Result<_, _>>()?))
    }
}
