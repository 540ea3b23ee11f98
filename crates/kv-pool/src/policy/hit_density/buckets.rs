//! Cohorts by kind and age, and which of these buckets holds what is worth least.

use super::ages::AGES;
use super::kind::{KINDS, Kind};
use super::rates::Rates;

/// How many buckets there are.
pub(super) const BUCKETS: usize = KINDS * AGES;

const WORDS: usize = BUCKETS.div_ceil(64);

/// The bucket of a kind and a class of age.
pub(super) fn bucket_of(kind: Kind, age: usize) -> usize {
    kind.index() * AGES + age
}

/// The order of the buckets by density, and which of them are occupied.
#[derive(Debug)]
pub(super) struct Ranking {
    /// Buckets, those of the lowest density first.
    by_rank: Box<[u16]>,
    rank_of: Box<[u16]>,
    /// Whether blocks of a bucket become worth more as they grow older.
    rising: Box<[bool]>,
    /// A bit for each occupied bucket, by rank.
    occupied: [u64; WORDS],
    /// A bit for each word of `occupied` that is not 0.
    words: u128,
}

const _: () = assert!(WORDS <= 128);

impl Ranking {
    pub(super) fn new(rates: &Rates) -> Self {
        let mut by_rank = vec![0; BUCKETS].into_boxed_slice();
        for (bucket, entry) in (0..).zip(&mut by_rank) {
            *entry = bucket;
        }
        let mut ranking = Self {
            rank_of: by_rank.clone(),
            by_rank,
            rising: vec![false; BUCKETS].into(),
            occupied: [0; WORDS],
            words: 0,
        };
        ranking.renew(rates);
        ranking
    }

    /// Orders the buckets by new densities.
    pub(super) fn renew(&mut self, rates: &Rates) {
        let densities = rates.densities();
        for (kind, age) in Kind::all().flat_map(|kind| (0..AGES).map(move |age| (kind, age))) {
            let bucket = bucket_of(kind, age);
            let older = densities[bucket_of(kind, (age + 1).min(AGES - 1))];
            // Equal densities differ by rounding.
            self.rising[bucket] = older > 1.001 * densities[bucket];
        }
        // By bucket, while ranks change.
        let mut was_occupied = [0_u64; WORDS];
        for bucket in 0..BUCKETS {
            was_occupied[bucket / 64] |= u64::from(self.is_occupied(bucket)) << (bucket % 64);
        }
        self.by_rank.sort_unstable_by(|&one, &other| {
            let (one, other) = (usize::from(one), usize::from(other));
            // Of equal ones the older first, as LRU has it.
            densities[one].total_cmp(&densities[other]).then(other.cmp(&one))
        });
        for (rank, &bucket) in (0..).zip(&*self.by_rank) {
            self.rank_of[usize::from(bucket)] = rank;
        }
        for bucket in 0..BUCKETS {
            self.set_occupied(bucket, was_occupied[bucket / 64] >> (bucket % 64) & 1 == 1);
        }
    }

    pub(super) fn set_occupied(&mut self, bucket: usize, occupied: bool) {
        let rank = usize::from(self.rank_of[bucket]);
        let bit = 1 << (rank % 64);
        if occupied {
            self.occupied[rank / 64] |= bit;
        } else {
            self.occupied[rank / 64] &= !bit;
        }
        let word = 1 << (rank / 64);
        self.words =
            if self.occupied[rank / 64] == 0 { self.words & !word } else { self.words | word };
    }

    /// The occupied bucket of the lowest density.
    pub(super) fn lowest(&self) -> Option<usize> {
        let word = self.words.trailing_zeros() as usize;
        let rank = word * 64 + self.occupied.get(word)?.trailing_zeros() as usize;
        Some(usize::from(self.by_rank[rank]))
    }

    /// Whether blocks of a bucket become worth more as they grow older.
    pub(super) fn is_rising(&self, bucket: usize) -> bool {
        self.rising[bucket]
    }

    fn is_occupied(&self, bucket: usize) -> bool {
        let rank = usize::from(self.rank_of[bucket]);
        self.occupied[rank / 64] >> (rank % 64) & 1 == 1
    }
}
