//! The line behind an answer: what was reused, and how long things took.

use std::fmt;
use std::time::Duration;

use crate::engine::Reuse;

/// What an answer has cost.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the answer.
    pub answer_tokens: usize,
    /// Where the prompt's KV came from.
    pub reuse: Reuse,
    /// From the question to the first token.
    pub first_token: Duration,
    /// From the first token to the last.
    pub rest: Duration,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { prompt_tokens, answer_tokens, reuse, first_token, rest } = self;
        write!(f, "[{prompt_tokens} prompt tokens, {} of them reused", reuse.tokens())?;
        let tiers = [
            (reuse.device_tokens, "the device"),
            (reuse.host_tokens, "host memory"),
            (reuse.below_tokens, "below"),
        ];
        let from = tiers.iter().filter(|(tokens, _)| *tokens > 0);
        for (place, (tokens, tier)) in from.enumerate() {
            write!(f, "{} {tokens} from {tier}", if place == 0 { ":" } else { "," })?;
        }
        write!(f, "; first token after {:.0} ms", first_token.as_secs_f64() * 1e3)?;
        if *answer_tokens > 1 && !rest.is_zero() {
            write!(f, ", {:.1} tokens/s", (answer_tokens - 1) as f64 / rest.as_secs_f64())?;
        }
        write!(f, "]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_names_the_tiers_that_gave_something() {
        let reuse = Reuse { device_tokens: 32, host_tokens: 16, below_tokens: 0 };
        let cost = Cost {
            prompt_tokens: 60,
            answer_tokens: 11,
            reuse,
            first_token: Duration::from_millis(20),
            rest: Duration::from_millis(500),
        };
        assert_eq!(
            cost.to_string(),
            "[60 prompt tokens, 48 of them reused: 32 from the device, 16 from host memory; \
             first token after 20 ms, 20.0 tokens/s]"
        );
    }
}
