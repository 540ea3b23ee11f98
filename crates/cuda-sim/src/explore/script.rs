//! The decisions of a schedule as a short text that it replays from.

use std::fmt;
use std::str::FromStr;

use crate::SimConfigError;

/// The decisions of one schedule, in order, such as `0.2.1`; `-` when there were none.
///
/// It belongs to the program and the configuration that it was recorded with.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub struct Script(pub(crate) Vec<u32>);

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((first, rest)) = self.0.split_first() else { return f.write_str("-") };
        write!(f, "{first}")?;
        rest.iter().try_for_each(|choice| write!(f, ".{choice}"))
    }
}

impl FromStr for Script {
    type Err = SimConfigError;

    fn from_str(text: &str) -> Result<Self, SimConfigError> {
        if text == "-" {
            return Ok(Self::default());
        }
        let number =
            |part: &str| part.parse().map_err(|_| SimConfigError::Script { part: part.to_owned() });
        Ok(Self(text.split('.').map(number).collect::<Result<_, _>>()?))
    }
}
