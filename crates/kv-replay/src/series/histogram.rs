//! Durations and ages by size: a histogram with buckets that grow with what they hold.

use serde::{Deserialize, Serialize};

/// Buckets of each doubling: a value is known to within an eighth of it.
const PARTS: u32 = 8;

const BUCKETS: usize = (PARTS * (64 - 3 + 1)) as usize;

/// A histogram of whole numbers, with a fixed number of buckets. Each bucket is at most an eighth as wide as the values in it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Histogram {
    counts: Vec<u64>,
    count: u64,
    sum: u64,
    max: u64,
}

/// A histogram as programs read it.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct HistogramReport {
    pub count: u64,
    /// Their sum; as much as fits.
    pub sum: u64,
    pub max: u64,
    /// A value that half of them do not exceed: the upper end of its bucket. So are the others.
    pub p50: u64,
    pub p99: u64,
    pub p999: u64,
    /// Buckets that hold something, ascending: the largest value of each, and its number of values.
    pub buckets: Vec<(u64, u64)>,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS], count: 0, sum: 0, max: 0 }
    }
}

impl Histogram {
    /// Adds a value `times` times. Counts and sums stay at the largest number that they reach.
    pub fn add(&mut self, value: u64, times: u64) {
        let bucket = &mut self.counts[bucket_of(value)];
        *bucket = bucket.saturating_add(times);
        self.count = self.count.saturating_add(times);
        self.sum = self.sum.saturating_add(value.saturating_mul(times));
        if times > 0 {
            self.max = self.max.max(value);
        }
    }

    pub fn report(&self) -> HistogramReport {
        let &Self { count, sum, max, .. } = self;
        let filled = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        let buckets = filled.map(|(bucket, &count)| (largest_of(bucket), count)).collect();
        let all = HistogramReport { count, sum, max, buckets, ..HistogramReport::default() };
        let [p50, p99, p999] = [500, 990, 999].map(|of| all.quantile(of).unwrap_or(max));
        HistogramReport { p50, p99, p999, ..all }
    }
}

impl HistogramReport {
    /// A value that so many of 1000 do not exceed: the upper end of its bucket; `None` if there are no values.
    pub fn quantile(&self, of_1000: u64) -> Option<u64> {
        let wanted = u128::from(self.count) * u128::from(of_1000);
        let mut below = 0_u128;
        let reached = |&&(_, count): &&(u64, u64)| {
            below += u128::from(count);
            below * 1000 >= wanted
        };
        self.buckets.iter().find(reached).map(|&(to, _)| to.min(self.max))
    }
}

/// Values below [`PARTS`] have a bucket each.
fn bucket_of(value: u64) -> usize {
    let low = u64::from(PARTS);
    if value < low {
        return value as usize;
    }
    let doublings = value.ilog2() - PARTS.ilog2();
    let part = (value >> doublings) - low;
    (u64::from(PARTS * (doublings + 1)) + part) as usize
}

/// The largest value of a bucket.
fn largest_of(bucket: usize) -> u64 {
    let (bucket, parts) = (bucket as u64, u64::from(PARTS));
    let Some(doublings) = (bucket / parts).checked_sub(1) else { return bucket };
    let first = u128::from(parts + bucket % parts) << doublings;
    u64::try_from(first + (1 << doublings) - 1).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::SplitMix64;

    #[test]
    fn every_value_is_in_a_bucket_that_is_narrow_and_follows_the_last() {
        let mut from = 0;
        for bucket in 0..BUCKETS {
            let to = largest_of(bucket);
            assert!(to >= from, "bucket {bucket}");
            assert_eq!((bucket_of(from), bucket_of(to)), (bucket, bucket));
            assert!((to - from) <= from / u64::from(PARTS), "{from} to {to}");
            from = to.wrapping_add(1);
        }
        assert_eq!(from, 0, "the last bucket ends with the last value");
    }

    #[test]
    fn quantiles_are_within_an_eighth_above_the_exact_ones() {
        let mut rng = SplitMix64::new(5);
        let mut values: Vec<u64> =
            (0..5000).map(|_| rng.next_u64() >> (rng.next_u64() % 60)).collect();
        let mut histogram = Histogram::default();
        values.iter().for_each(|&value| histogram.add(value, 1));
        values.sort_unstable();
        let report = histogram.report();
        for (found, of_1000) in [(report.p50, 500), (report.p99, 990), (report.p999, 999)] {
            let exact = values[(values.len() * of_1000).div_ceil(1000) - 1];
            assert!(found >= exact && found - exact <= exact / 8, "{found} for {exact}");
        }
        assert_eq!(HistogramReport::default().quantile(500), None);
        assert_eq!((report.count, report.max), (5000, values[4999]));
        assert_eq!(report.buckets.iter().map(|(_, count)| count).sum::<u64>(), 5000);
    }
}
