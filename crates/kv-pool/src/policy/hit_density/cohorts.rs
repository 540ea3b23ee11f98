//! Blocks that were used together, as one thing that grows older.
//!
//! The blocks of one request that are of one kind have the same age and are found again together.
//! They form a cohort: it is counted, moved from one class of age to the next and compared as a
//! whole. Cohorts lie in a ring in the order of their making and are overwritten in that order,
//! long after their last block was evicted if the ring is large enough: until then the cohort tells
//! when content that comes back was last used.

use super::super::PolicyError;
use super::super::error::table;
use super::ages::{AGES, age_class, age_from};
use super::buckets::{BUCKETS, Ranking, bucket_of};
use super::kind::Kind;
use super::rates::Rates;

/// No cohort, or no block.
pub(super) const NONE: u32 = u32::MAX;

/// Places of the ring that are looked at for a new cohort before it is merged with a newer one.
const TRIES: usize = 8;

/// Cohorts that one call may move on to the next class of age.
const MOVES_MAX: usize = 128;

/// Blocks that were used together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cohort {
    /// Counts cohorts from 1; 0 in places that were never used.
    number: u32,
    pub(super) kind: Kind,
    /// The class of age that it has been counted in.
    age: u8,
    /// Whether it has blocks of several requests, for want of places.
    mixed: bool,
    /// Whether it is in the bucket of its kind and age: it has a block that may be evicted.
    in_bucket: bool,
    /// Lookups so far when its blocks were used.
    used_at: u64,
    /// Blocks that were not used since, cached or remembered.
    pub(super) alive: u32,
    /// Cached blocks that name this cohort; while there are any, its place is not reused.
    pub(super) members: u32,
    /// Blocks that may be evicted, the next one at the front: ends of a list whose links lie with
    /// the blocks.
    pub(super) front: u32,
    pub(super) back: u32,
    /// Neighbours in the bucket, by place.
    older: u32,
    newer: u32,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    oldest: u32,
    newest: u32,
}

/// All cohorts, by number and by bucket.
#[derive(Debug)]
pub(super) struct Cohorts {
    ring: Vec<Cohort>,
    /// The number of the next cohort.
    next: u32,
    /// For each class of age, the first cohort that has not come to it yet.
    walkers: [u32; AGES],
    /// The class whose walker goes first, in turn.
    first_walker: usize,
    buckets: Box<[Bucket]>,
    ranking: Box<Ranking>,
    /// Places with members.
    in_use: usize,
    pub(super) rates: Box<Rates>,
}

impl Cohorts {
    /// A ring of at least `len` cohorts, for a policy of `blocks` blocks.
    pub(super) fn new(len: usize, blocks: u64) -> Result<Self, PolicyError> {
        let unused = Cohort {
            number: 0,
            kind: Kind::LEFT,
            age: 0,
            mixed: false,
            in_bucket: false,
            used_at: 0,
            alive: 0,
            members: 0,
            front: NONE,
            back: NONE,
            older: NONE,
            newer: NONE,
        };
        let rates = Box::new(Rates::new());
        let none = Bucket { oldest: NONE, newest: NONE };
        Ok(Self {
            // A power of two, so that numbers and places go round together.
            ring: table(len.next_power_of_two(), unused, blocks)?,
            next: 1,
            walkers: [1; AGES],
            first_walker: 1,
            buckets: table(BUCKETS, none, blocks)?.into_boxed_slice(),
            ranking: Box::new(Ranking::new(&rates)),
            in_use: 0,
            rates,
        })
    }

    /// The place of the cohort of that number, if it has not been overwritten.
    pub(super) fn place_of(&self, number: u32) -> Option<u32> {
        let place = number & self.mask();
        (number != 0 && self.ring[place as usize].number == number).then_some(place)
    }

    pub(super) fn number(&self, place: u32) -> u32 {
        self.ring[place as usize].number
    }

    pub(super) fn at(&mut self, place: u32) -> &mut Cohort {
        &mut self.ring[place as usize]
    }

    /// Makes a cohort without blocks; its place. If the next places of the ring are all in use, the
    /// place of the cohort in the last of them, which takes blocks of another request besides.
    pub(super) fn open(&mut self, kind: Kind, used_at: u64) -> u32 {
        let mut place = 0;
        for _ in 0..TRIES {
            let number = self.next;
            self.next = match number.wrapping_add(1) {
                0 => 1,
                next => next,
            };
            place = number & self.mask();
            // Walkers come by no more when the ring has gone round.
            self.catch_up(place, used_at);
            let cohort = &mut self.ring[place as usize];
            if cohort.members == 0 {
                let alive = 0;
                let (front, back) = (NONE, NONE);
                let fresh = Cohort {
                    number,
                    kind,
                    age: 0,
                    mixed: false,
                    used_at,
                    alive,
                    front,
                    back,
                    ..*cohort
                };
                *cohort = fresh;
                return place;
            }
        }
        self.mix(place);
        place
    }

    /// Whether half of the places have blocks: from then on requests share cohorts.
    pub(super) fn is_crowded(&self) -> bool {
        self.in_use > self.ring.len() / 2
    }

    /// How long ago a cohort's blocks were used, in lookups.
    pub(super) fn age_at(&self, place: u32, now: u64) -> u64 {
        now.saturating_sub(self.ring[place as usize].used_at)
    }

    /// Notes that the cohort has blocks of several requests.
    pub(super) fn mix(&mut self, place: u32) {
        self.ring[place as usize].mixed = true;
    }

    /// One of its blocks was found: counts it, at the cohort's age.
    pub(super) fn found(&mut self, place: u32, now: u64) {
        self.catch_up(place, now);
        let cohort = &mut self.ring[place as usize];
        cohort.alive = cohort.alive.saturating_sub(1);
        self.rates.found(cohort.kind, usize::from(cohort.age));
    }

    /// A block more was last used with it.
    pub(super) fn joined(&mut self, place: u32) {
        let cohort = &mut self.ring[place as usize];
        self.in_use += usize::from(cohort.members == 0);
        cohort.members += 1;
        cohort.alive += 1;
        self.rates.reached(cohort.kind, usize::from(cohort.age), 1);
    }

    /// A cached block names it no more. `is_alive` says whether the block is remembered.
    pub(super) fn parted(&mut self, place: u32, is_alive: bool) {
        let cohort = &mut self.ring[place as usize];
        self.in_use -= usize::from(cohort.members == 1);
        cohort.members = cohort.members.saturating_sub(1);
        cohort.alive = cohort.alive.saturating_sub(u32::from(!is_alive));
    }

    /// A request found some of its blocks and left the others, if there are any.
    pub(super) fn left(&mut self, number: u32, now: u64) {
        let Some(place) = self.place_of(number) else { return };
        self.catch_up(place, now);
        let cohort = self.ring[place as usize];
        if cohort.alive == 0 || cohort.mixed || !cohort.kind.can_be_left() {
            return;
        }
        self.leave_bucket(place);
        self.ring[place as usize].kind = Kind::LEFT;
        self.rates.reached(Kind::LEFT, usize::from(cohort.age), cohort.alive);
        self.update_bucket(place);
    }

    /// The request that used the cohort's blocks has added so many others. The cohort's kind now.
    pub(super) fn added(&mut self, number: u32, added: u32) -> Option<Kind> {
        let place = self.place_of(number)?;
        let Cohort { kind, alive, age, mixed, .. } = self.ring[place as usize];
        let known = kind.with_added(added);
        if known != kind && !mixed {
            self.leave_bucket(place);
            self.ring[place as usize].kind = known;
            self.rates.moved(kind, known, usize::from(age), alive);
            self.update_bucket(place);
        }
        Some(self.ring[place as usize].kind)
    }

    /// Puts the cohort into its bucket or takes it out, as it has blocks that may be evicted or not.
    pub(super) fn update_bucket(&mut self, place: u32) {
        let cohort = &self.ring[place as usize];
        match (cohort.front != NONE, cohort.in_bucket) {
            (true, false) => self.enter_bucket(place),
            (false, true) => self.leave_bucket(place),
            _ => {}
        }
    }

    /// The place of a cohort with blocks that may be evicted, of which none are worth less.
    ///
    /// In one bucket older and newer ones are worth about the same. If they become worth more with
    /// the age, the newest are worth least.
    pub(super) fn lowest(&self) -> Option<u32> {
        let bucket = self.ranking.lowest()?;
        let Bucket { oldest, newest } = self.buckets[bucket];
        Some(if self.ranking.is_rising(bucket) { newest } else { oldest })
    }

    /// Moves cohorts on to the class of their age. Whether all have come there: one call moves a bounded number.
    pub(super) fn advance(&mut self, now: u64) -> bool {
        let mut moves = 0;
        for step in 0..AGES - 1 {
            let age = 1 + (self.first_walker - 1 + step) % (AGES - 1);
            // What has been overwritten is not walked over.
            let behind = self.next.wrapping_sub(self.walkers[age]);
            if behind as usize > self.ring.len() {
                self.walkers[age] = self.next.wrapping_sub(self.ring.len() as u32);
            }
            while self.walkers[age] != self.next {
                if let Some(place) = self.place_of(self.walkers[age]) {
                    let used_at = self.ring[place as usize].used_at;
                    if now.saturating_sub(used_at) < age_from(age) {
                        break;
                    }
                    self.catch_up(place, now);
                }
                self.walkers[age] = self.walkers[age].wrapping_add(1);
                moves += 1;
                if moves >= MOVES_MAX {
                    self.first_walker = age;
                    return false;
                }
            }
        }
        true
    }

    /// Learns from what was counted.
    pub(super) fn renew(&mut self) {
        self.rates.renew();
        self.ranking.renew(&self.rates);
    }

    /// Counts the cohort in the classes of age that it has come to, and moves it to its bucket.
    fn catch_up(&mut self, place: u32, now: u64) {
        let Cohort { age, used_at, alive, in_bucket, kind, .. } = self.ring[place as usize];
        let reached = age_class(now.saturating_sub(used_at));
        if reached <= usize::from(age) {
            return;
        }
        for age in usize::from(age) + 1..=reached {
            self.rates.reached(kind, age, alive);
        }
        if in_bucket {
            self.leave_bucket(place);
        }
        self.ring[place as usize].age = reached as u8;
        if in_bucket {
            self.enter_bucket(place);
        }
    }

    fn enter_bucket(&mut self, place: u32) {
        let cohort = &self.ring[place as usize];
        let number = bucket_of(cohort.kind, usize::from(cohort.age));
        let bucket = &mut self.buckets[number];
        let older = std::mem::replace(&mut bucket.newest, place);
        match older {
            NONE => bucket.oldest = place,
            _ => self.ring[older as usize].newer = place,
        }
        let cohort = &mut self.ring[place as usize];
        (cohort.older, cohort.newer, cohort.in_bucket) = (older, NONE, true);
        self.ranking.set_occupied(number, true);
    }

    fn leave_bucket(&mut self, place: u32) {
        let Cohort { kind, age, in_bucket, older, newer, .. } = self.ring[place as usize];
        if !in_bucket {
            return;
        }
        let number = bucket_of(kind, usize::from(age));
        let bucket = &mut self.buckets[number];
        match older {
            NONE => bucket.oldest = newer,
            _ => self.ring[older as usize].newer = newer,
        }
        match newer {
            NONE => bucket.newest = older,
            _ => self.ring[newer as usize].older = older,
        }
        let is_empty = bucket.oldest == NONE;
        self.ring[place as usize].in_bucket = false;
        self.ranking.set_occupied(number, !is_empty);
    }

    fn mask(&self) -> u32 {
        self.ring.len() as u32 - 1
    }
}
