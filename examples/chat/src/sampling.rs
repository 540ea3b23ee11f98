//! Which token follows: chosen from the logits, by nothing but them, a seed and the place in the sequence.
//!
//! So the choice is the same whenever and wherever the logits were computed.

/// Likeliest tokens among which one is drawn.
const CANDIDATES: usize = 40;

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token. With 1, tokens are drawn as likely as the model says.
    pub temperature: f32,
    /// What draws follow from.
    pub seed: u64,
}

impl Sampling {
    /// Always the likeliest token.
    pub const GREEDY: Self = Self { temperature: 0.0, seed: 0 };

    /// The same for another answer to the same prompt.
    #[must_use]
    pub fn for_answer(self, answer: u32) -> Self {
        Self { seed: self.seed.wrapping_add(u64::from(answer).wrapping_mul(0x9E37_79B9)), ..self }
    }

    /// The token at `position` of a sequence.
    #[must_use]
    pub fn choose(&self, logits: &[f32], position: u64) -> u32 {
        if self.temperature <= 0.0 {
            return likeliest(logits);
        }
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let by_logit =
            |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        let candidates = CANDIDATES.min(order.len());
        if candidates < order.len() {
            order.select_nth_unstable_by(candidates, by_logit);
        }
        order.truncate(candidates);
        order.sort_unstable_by(by_logit);
        let Some(&first) = order.first() else { return 0 };
        let most = logits[first as usize];
        let weight = |id: &u32| f64::from((logits[*id as usize] - most) / self.temperature).exp();
        let total: f64 = order.iter().map(weight).sum();
        let mut left = uniform(self.seed, position) * total;
        for id in &order {
            left -= weight(id);
            if left < 0.0 {
                return *id;
            }
        }
        first
    }
}

/// The first of the largest logits.
fn likeliest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    best as u32
}

/// A number from 0 to 1 that follows from both (SplitMix64).
fn uniform(seed: u64, position: u64) -> f64 {
    let mut bits = seed.wrapping_add(position.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^= bits >> 31;
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_likeliest_token_is_the_first_of_equals() {
        assert_eq!(Sampling::GREEDY.choose(&[0.0, 2.0, 2.0, 1.0], 7), 1);
    }

    #[test]
    fn draws_are_as_likely_as_the_logits_say_and_repeat() {
        let sampling = Sampling { temperature: 1.0, seed: 3 };
        let logits = [0.0, 3.0_f32.ln(), f32::NEG_INFINITY];
        let draws: Vec<u32> = (0..4000).map(|at| sampling.choose(&logits, at)).collect();
        let ones = draws.iter().filter(|&&id| id == 1).count();
        assert!((2900..3100).contains(&ones) && !draws.contains(&2), "{ones}");
        assert!((0..4000).all(|at| sampling.choose(&logits, at) == draws[at as usize]));
        let other = sampling.for_answer(1);
        assert!((0..4000).any(|at| other.choose(&logits, at) != draws[at as usize]));
    }
}
