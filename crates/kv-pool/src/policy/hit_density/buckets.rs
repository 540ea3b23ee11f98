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
    by_rank: [u16; BUCKETS],
    rank_of: [u16; BUCKETS],
    /// Whether blocks of a bucket become worth more as they grow older.
    rising: [bool; BUCKETS],
    /// A bit for each occupied bucket, by rank.
    occupied: [u64; WORDS],
}

impl Ranking {
    pub(super) fn new(rates: &Rates) -> Self {
        let mut by_rank = [0; BUCKETS];
        for (bucket, entry) in (0..).zip(&mut by_rank) {
            *entry = bucket;
        }
        let mut ranking =
            Self { by_rank, rank_of: by_rank, rising: [false; BUCKETS], occupied: [0; WORDS] };
        ranking.renew(rates);
        ranking
    }

    /// Orders the buckets by new densities.
    pub(super) fn renew(&mut self, rates: &Rates) {
        let mut densities = [0.0; BUCKETS];
        for (kind, age) in Kind::all().flat_map(|kind| (0..AGES).map(move |age| (kind, age))) {
            let bucket = bucket_of(kind, age);
            densities[bucket] = rates.density(kind, age);
            let older = rates.density(kind, (age + 1).min(AGES - 1));
            self.rising[bucket] = older > densities[bucket];
        }
        let mut was_occupied = [false; BUCKETS];
        for (bucket, was) in was_occupied.iter_mut().enumerate() {
            *was = self.is_occupied(bucket);
        }
        self.by_rank.sort_unstable_by(|&one, &other| {
            let (one, other) = (usize::from(one), usize::from(other));
            // Of equal ones the older first, as LRU has it.
            densities[one].total_cmp(&densities[other]).then(other.cmp(&one))
        });
        for (rank, &bucket) in (0..).zip(&self.by_rank) {
            self.rank_of[usize::from(bucket)] = rank;
        }
        for (bucket, &was) in was_occupied.iter().enumerate() {
            self.set_occupied(bucket, was);
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
    }

    /// The occupied bucket of the lowest density.
    pub(super) fn lowest(&self) -> Option<usize> {
        let word = self.occupied.iter().position(|&word| word != 0)?;
        let rank = word * 64 + self.occupied[word].trailing_zeros() as usize;
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
