//! The cost of the model that a run has not.

use std::time::Duration;

/// What a model's computation costs on a device. By default nothing: a run moves KV and computes none.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ModelCost {
    /// Prompt tokens that are computed in a second; 0 if that takes no time.
    pub prefill_tokens_per_s: u64,
    /// Microseconds of an iteration that generates tokens, however many sequences it has.
    pub decode_step_us: u64,
}

impl ModelCost {
    /// The time of an iteration that computes so many prompt tokens, and generates if `generates`: the two add up.
    #[must_use]
    pub fn of_iteration(&self, prompt_tokens: u64, generates: bool) -> Duration {
        let prefill = u128::from(prompt_tokens) * 1_000_000_000
            / u128::from(self.prefill_tokens_per_s.max(1));
        let prefill = if self.prefill_tokens_per_s == 0 { 0 } else { prefill };
        let prefill = Duration::from_nanos(u64::try_from(prefill).unwrap_or(u64::MAX));
        let decode = if generates { self.decode_step_us } else { 0 };
        prefill.saturating_add(Duration::from_micros(decode))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_tokens_and_generation_add_up() {
        let cost = ModelCost { prefill_tokens_per_s: 20_000, decode_step_us: 12_000 };
        let ms = |ms| Duration::from_millis(ms);
        assert_eq!(cost.of_iteration(1000, false), ms(50));
        assert_eq!(cost.of_iteration(1000, true), ms(62));
        assert_eq!(cost.of_iteration(0, true), ms(12));
        assert_eq!(ModelCost::default().of_iteration(u64::MAX, true), ms(0));
        let slow = ModelCost { prefill_tokens_per_s: 1, decode_step_us: u64::MAX };
        assert!(slow.of_iteration(u64::MAX, true) > Duration::from_secs(u64::MAX / 1_000_000));
    }
}
