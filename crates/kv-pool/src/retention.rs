//! Token-range retention: which parts of a sequence are worth keeping, and for how long.

use std::time::Duration;

use crate::{ConfigError, Priority};

/// How much a block is worth keeping, and for how long that holds.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Retention {
    /// The priority that the block is queued with when nobody uses it.
    pub priority: Priority,
    /// How long after its release the block keeps a priority other than
    /// [`Priority::DEFAULT`]; after that it has the default. `None` for as long as it is cached.
    pub duration: Option<Duration>,
}

impl From<Priority> for Retention {
    /// This priority, for as long as the block is cached.
    fn from(priority: Priority) -> Self {
        Self { priority, duration: None }
    }
}

/// Consecutive tokens of a sequence that are worth the same.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct TokenRange {
    /// The first token, counted from the start of the sequence.
    pub start: u64,
    /// The token after the last; `None` up to the end of the sequence, however long it becomes.
    pub end: Option<u64>,
    /// What the blocks are worth.
    pub retention: Retention,
}

impl TokenRange {
    fn contains(&self, token: u64) -> bool {
        self.start <= token && self.end.is_none_or(|end| token < end)
    }
}

/// What each part of one sequence is worth: ranges of its prompt, and the blocks of its output.
///
/// Tokens that no range contains have no retention of their own: their blocks keep what they have.
///
/// # Examples
///
/// ```
/// use kv_pool::{Priority, retention::{Retention, RetentionPolicy, TokenRange}};
///
/// // A system prompt of 128 tokens is kept longest, what is generated is given up first.
/// let high = Retention::from(Priority::MAX);
/// let low = Retention::from(Priority::MIN);
/// let policy = RetentionPolicy::new(vec![TokenRange { start: 0, end: Some(128), retention: high }], low)?;
///
/// let blocks_of_64 = [0, 64, 128, 192].map(|first_token| policy.at(first_token));
/// assert_eq!(blocks_of_64, [Some(high), Some(high), None, None]);
/// assert_eq!(policy.decode(), low);
/// # Ok::<(), kv_pool::ConfigError>(())
/// ```
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct RetentionPolicy {
    /// # Invariants
    /// Ordered by `start`; none is empty; no two have a token in common; only the last is open.
    ranges: Vec<TokenRange>,
    decode: Retention,
}

impl RetentionPolicy {
    /// Orders the ranges, which may come in any order. `decode` is for blocks that are filled
    /// while the sequence generates.
    ///
    /// # Errors
    /// [`ConfigError`] names the range. A negative token cannot be written down.
    pub fn new(mut ranges: Vec<TokenRange>, decode: Retention) -> Result<Self, ConfigError> {
        if let Some(&range) =
            ranges.iter().find(|range| range.end.is_some_and(|e| e <= range.start))
        {
            return Err(ConfigError::EmptyRange { range });
        }
        ranges.sort_by_key(|range| range.start);
        for pair in ranges.windows(2) {
            let &[range, next] = pair else { continue };
            match range.end {
                None => return Err(ConfigError::OpenBeforeAnother { range, next }),
                Some(end) if end > next.start => {
                    return Err(ConfigError::RangesOverlap { range, next });
                }
                Some(_) => {}
            }
        }
        Ok(Self { ranges, decode })
    }

    /// What blocks are worth that are filled while the sequence generates.
    #[must_use]
    pub fn decode(&self) -> Retention {
        self.decode
    }

    /// What the block is worth whose first token is `token`: that of the range which contains it. The last block of a
    /// sequence may be partly filled. Takes time in proportion to the logarithm of the number of ranges.
    #[must_use]
    pub fn at(&self, token: u64) -> Option<Retention> {
        let after = self.ranges.partition_point(|range| range.start <= token);
        let range = self.ranges[..after].last()?;
        range.contains(token).then_some(range.retention)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retention(priority: u8) -> Retention {
        Retention::from(Priority::new(priority).unwrap())
    }

    fn range(start: u64, end: Option<u64>, priority: u8) -> TokenRange {
        TokenRange { start, end, retention: retention(priority) }
    }

    fn policy(ranges: &[TokenRange]) -> Result<RetentionPolicy, ConfigError> {
        RetentionPolicy::new(ranges.to_vec(), Retention::default())
    }

    #[test]
    fn each_block_takes_the_range_of_its_first_token() {
        type Case = (&'static [(u64, Option<u64>, u8)], u64, &'static [Option<u8>]);
        let cases: &[Case] = &[
            (&[(0, Some(64), 80), (64, Some(128), 50)], 64, &[Some(80), Some(50), None, None]),
            (&[(0, Some(63), 80), (63, Some(127), 30)], 32, &[Some(80), Some(80), Some(30)]),
            (&[(0, Some(1), 80), (1, Some(2), 5)], 32, &[Some(80), None, None, None]),
            // In any order, with a gap, and the last one open.
            (&[(129, None, 50), (0, Some(64), 80)], 64, &[Some(80), None, None, Some(50)]),
            (&[(127, Some(193), 80)], 64, &[None]),
            (&[], 64, &[None, None]),
            (&[(u64::MAX - 1, None, 9)], u64::MAX - 2, &[None, None]),
            (&[(u64::MAX - 1, None, 9)], u64::MAX, &[None, Some(9)]),
        ];
        for (ranges, block_tokens, expected) in cases {
            let ranges: Vec<_> = ranges.iter().map(|&(s, e, p)| range(s, e, p)).collect();
            let policy = policy(&ranges).unwrap();
            for (index, block) in (0..).zip(*expected) {
                let worth = policy.at(index * block_tokens);
                assert_eq!(worth, block.map(retention), "{ranges:?}, block {index}");
            }
        }
    }

    #[test]
    fn ranges_that_make_no_policy_are_refused_and_named() {
        let (first, open) = (range(0, Some(64), 1), range(100, None, 2));
        let empty = range(5, Some(5), 3);
        let (inside, after) = (range(63, Some(100), 4), range(120, Some(130), 5));
        let refusals = [
            (
                [first, empty],
                ConfigError::EmptyRange { range: empty },
                "the range 5..5 ends before its first token",
            ),
            (
                [after, open],
                ConfigError::OpenBeforeAnother { range: open, next: after },
                "the range 100.. is open, but 120..130 follows",
            ),
            (
                [inside, first],
                ConfigError::RangesOverlap { range: first, next: inside },
                "the range 0..64 overlaps 63..100",
            ),
        ];
        for (ranges, error, text) in refusals {
            assert_eq!(policy(&ranges), Err(error.clone()));
            assert_eq!(error.to_string(), text);
        }
        // Ranges may touch.
        assert!(policy(&[first, range(64, None, 2)]).is_ok());
        assert!(policy(&[open, range(100, None, 2)]).is_err());
    }
}
