//! Token-range retention: which parts of a sequence are worth keeping, and for how long.

use std::num::NonZeroU32;
use std::time::Duration;

use crate::Priority;

/// How much a block is worth keeping, and for how long that holds.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Retention {
    /// The priority that the block is queued with when nobody uses it.
    pub priority: Priority,
    /// How long after its release the block keeps a priority other than
    /// [`Priority::DEFAULT`]; after that it has the default. `None` for as long as it is cached.
    pub duration: Option<Duration>,
}

impl Retention {
    /// This priority, for as long as the block is cached.
    #[must_use]
    pub const fn of(priority: Priority) -> Self {
        Self { priority, duration: None }
    }
}

impl From<Priority> for Retention {
    fn from(priority: Priority) -> Self {
        Self::of(priority)
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
    /// The tokens from `start` up to and without `end`.
    #[must_use]
    pub const fn new(start: u64, end: u64, retention: Retention) -> Self {
        Self { start, end: Some(end), retention }
    }

    /// All tokens from `start` on.
    #[must_use]
    pub const fn from(start: u64, retention: Retention) -> Self {
        Self { start, end: None, retention }
    }

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
/// use std::num::NonZeroU32;
///
/// use kv_pool::{Priority, retention::{Retention, RetentionPolicy, TokenRange}};
///
/// // A system prompt of 128 tokens is kept longest, what is generated is given up first.
/// let high = Retention::of(Priority::MAX);
/// let low = Retention::of(Priority::MIN);
/// let policy = RetentionPolicy::new(vec![TokenRange::new(0, 128, high)], low)?;
///
/// let block_tokens = NonZeroU32::new(64).unwrap();
/// let prompt: Vec<_> = policy.per_block(block_tokens, 200).collect();
/// assert_eq!(prompt, [Some(high), Some(high), None, None]);
/// assert_eq!(policy.decode(), low);
/// # Ok::<(), kv_pool::retention::RetentionError>(())
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
    /// [`RetentionError`] names the range. A negative token cannot be written down.
    pub fn new(mut ranges: Vec<TokenRange>, decode: Retention) -> Result<Self, RetentionError> {
        if let Some(&range) =
            ranges.iter().find(|range| range.end.is_some_and(|e| e <= range.start))
        {
            return Err(RetentionError::Empty { range });
        }
        ranges.sort_by_key(|range| range.start);
        for pair in ranges.windows(2) {
            let &[range, next] = pair else { continue };
            match range.end {
                None => return Err(RetentionError::OpenBeforeAnother { range, next }),
                Some(end) if end > next.start => {
                    return Err(RetentionError::Overlap { range, next });
                }
                Some(_) => {}
            }
        }
        Ok(Self { ranges, decode })
    }

    /// The ranges, in the order of their tokens.
    #[must_use]
    pub fn ranges(&self) -> &[TokenRange] {
        &self.ranges
    }

    /// What blocks are worth that are filled while the sequence generates.
    #[must_use]
    pub fn decode(&self) -> Retention {
        self.decode
    }

    /// What the block is worth whose first token is `token`: that of the range which contains it.
    /// Takes time in proportion to the logarithm of the number of ranges.
    #[must_use]
    pub fn at(&self, token: u64) -> Option<Retention> {
        let after = self.ranges.partition_point(|range| range.start <= token);
        let range = self.ranges[..after].last()?;
        range.contains(token).then_some(range.retention)
    }

    /// What each block of a sequence of `tokens` is worth, from the first block on; the last one
    /// may be partly filled. A block takes the range that contains its first token.
    pub fn per_block(
        &self,
        block_tokens: NonZeroU32,
        tokens: u64,
    ) -> impl Iterator<Item = Option<Retention>> + '_ {
        let width = u64::from(block_tokens.get());
        let mut ranges = self.ranges.as_slice();
        (0..tokens.div_ceil(width)).map(move |block| {
            // Below `tokens`, so it does not overflow.
            let first = block * width;
            while let [range, rest @ ..] = ranges
                && range.end.is_some_and(|end| end <= first)
            {
                ranges = rest;
            }
            ranges.first().filter(|range| range.contains(first)).map(|range| range.retention)
        })
    }
}

/// Why ranges make no policy.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RetentionError {
    /// The range contains no token.
    #[error("the range {} ends before its first token", span(range))]
    Empty {
        /// The range.
        range: TokenRange,
    },
    /// The range is open, and another one follows.
    #[error("the range {} is open, but {} follows", span(range), span(next))]
    OpenBeforeAnother {
        /// The open range.
        range: TokenRange,
        /// The one that follows.
        next: TokenRange,
    },
    /// Two ranges have a token in common.
    #[error("the range {} overlaps {}", span(range), span(next))]
    Overlap {
        /// The range that starts first.
        range: TokenRange,
        /// The other one.
        next: TokenRange,
    },
}

crate::error::one_line_debug!(RetentionError);

fn span(range: &TokenRange) -> String {
    match range.end {
        Some(end) => format!("{}..{end}", range.start),
        None => format!("{}..", range.start),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retention(priority: u8) -> Retention {
        Retention::of(Priority::new(priority).unwrap())
    }

    fn range(start: u64, end: Option<u64>, priority: u8) -> TokenRange {
        TokenRange { start, end, retention: retention(priority) }
    }

    fn policy(ranges: &[TokenRange]) -> Result<RetentionPolicy, RetentionError> {
        RetentionPolicy::new(ranges.to_vec(), Retention::default())
    }

    #[test]
    fn each_block_takes_the_range_of_its_first_token() {
        type Case = (&'static [(u64, Option<u64>, u8)], u32, u64, &'static [Option<u8>]);
        let cases: &[Case] = &[
            (&[(0, Some(64), 80), (64, Some(128), 50)], 64, 256, &[Some(80), Some(50), None, None]),
            (
                &[(0, Some(63), 80), (63, Some(127), 30)],
                32,
                127,
                &[Some(80), Some(80), Some(30), Some(30)],
            ),
            (&[(0, Some(1), 80), (1, Some(2), 5)], 32, 128, &[Some(80), None, None, None]),
            (&[(0, Some(128), 80)], 256, 192, &[Some(80)]),
            (&[(0, Some(64), 80), (129, None, 50)], 64, 256, &[Some(80), None, None, Some(50)]),
            (&[(127, Some(193), 80)], 64, 32, &[None]),
            (&[], 64, 65, &[None, None]),
            (&[(0, None, 7)], 1, 0, &[]),
        ];
        for (ranges, block, tokens, expected) in cases {
            let ranges: Vec<_> = ranges.iter().map(|&(s, e, p)| range(s, e, p)).collect();
            let policy = policy(&ranges).unwrap();
            let block_tokens = NonZeroU32::new(*block).unwrap();
            let blocks: Vec<_> = policy.per_block(block_tokens, *tokens).collect();
            let expected: Vec<_> = expected.iter().map(|block| block.map(retention)).collect();
            assert_eq!(blocks, expected, "{ranges:?}");
            for (index, block) in (0..).zip(blocks) {
                assert_eq!(policy.at(index * u64::from(block_tokens.get())), block, "{ranges:?}");
            }
        }
    }

    #[test]
    fn ranges_may_come_in_any_order_with_gaps_and_touch() {
        let ranges = [range(0, Some(64), 1), range(100, Some(128), 2), range(70, Some(80), 3)];
        let ordered: Vec<_> = policy(&ranges).unwrap().ranges().iter().map(|r| r.start).collect();
        assert_eq!(ordered, [0, 70, 100]);
        assert!(policy(&[range(5, Some(6), 1), range(4, Some(5), 2), range(6, None, 3)]).is_ok());
    }

    #[test]
    fn an_open_range_is_the_last_or_refused() {
        let (open, next) = (range(10, None, 1), range(20, Some(30), 2));
        let error = policy(&[next, open]).unwrap_err();
        assert_eq!(error, RetentionError::OpenBeforeAnother { range: open, next });
        assert_eq!(error.to_string(), "the range 10.. is open, but 20..30 follows");
        assert!(policy(&[open, range(10, None, 2)]).is_err());
        assert!(policy(&[range(0, Some(10), 2), open]).is_ok());
    }

    #[test]
    fn a_range_without_a_token_is_refused() {
        for (start, end) in [(5, 5), (5, 4), (u64::MAX, 0)] {
            let empty = range(start, Some(end), 1);
            let error = policy(&[range(0, Some(1), 1), empty]).unwrap_err();
            assert_eq!(error, RetentionError::Empty { range: empty });
        }
        let error = policy(&[range(5, Some(4), 1)]).unwrap_err();
        assert_eq!(error.to_string(), "the range 5..4 ends before its first token");
    }

    #[test]
    fn ranges_with_a_token_in_common_are_refused() {
        let (first, second) = (range(0, Some(64), 1), range(63, Some(100), 2));
        let error = policy(&[second, first]).unwrap_err();
        assert_eq!(error, RetentionError::Overlap { range: first, next: second });
        assert_eq!(error.to_string(), "the range 0..64 overlaps 63..100");
        assert!(policy(&[first, range(0, Some(64), 2)]).is_err());
        assert!(policy(&[first, range(2, None, 2)]).is_err());
    }

    #[test]
    fn the_largest_sequence_has_as_many_blocks_as_it_needs() {
        let policy = policy(&[range(u64::MAX - 1, None, 9)]).unwrap();
        let block_tokens = NonZeroU32::new(u32::MAX).unwrap();
        let blocks = u64::MAX.div_ceil(u64::from(u32::MAX));
        assert_eq!(policy.per_block(block_tokens, u64::MAX).size_hint().0 as u64, blocks);
        assert_eq!(policy.at(u64::MAX), Some(retention(9)));
        assert_eq!(policy.at(u64::MAX - 2), None);
    }

    #[test]
    fn output_has_a_retention_of_its_own() {
        let decode = Retention { priority: Priority::MIN, duration: Some(Duration::from_secs(3)) };
        let policy = RetentionPolicy::new(Vec::new(), decode).unwrap();
        assert_eq!(policy.decode(), decode);
        assert_eq!(RetentionPolicy::default().decode(), Retention::of(Priority::DEFAULT));
    }
}
