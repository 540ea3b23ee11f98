//! Does the same random things to the pool and to the reference, and compares all that can be seen.

use kv_pool::{
    BlockHash, BlockPin, BlockPool, ClaimError, ClaimedBlock, Epoch, Location, Offload, Onboard,
    OnboardError, Onboarded, PoolConfig, Priority, Registration, Tier,
};

use crate::reference::{Level, Model, Now};

const CONTENTS: u64 = 24;
const PRIORITIES: [u8; 8] = [0, 5, 29, 30, 35, 35, 80, 100];

struct Random(u64);

impl Random {
    /// SplitMix64: any seed will do.
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (value ^ (value >> 31)) % bound
    }

    fn pick<T>(&mut self, from: &mut Vec<T>) -> Option<T> {
        let bound = from.len() as u64;
        (bound > 0).then(|| from.swap_remove(self.below(bound) as usize))
    }
}

/// The outcomes that a run must have met, each with how often.
#[derive(Debug, Default)]
pub struct Seen {
    exhausted: u64,
    moved: u64,
    copied: u64,
    refused: u64,
    gave_way: u64,
    second_copy: u64,
    removed_on_its_way: u64,
    pinned_while_retiring: u64,
}

impl Seen {
    fn all(&mut self) -> [&mut u64; 8] {
        [
            &mut self.exhausted,
            &mut self.moved,
            &mut self.copied,
            &mut self.refused,
            &mut self.gave_way,
            &mut self.second_copy,
            &mut self.removed_on_its_way,
            &mut self.pinned_while_retiring,
        ]
    }

    pub fn add(&mut self, other: &Seen) {
        self.exhausted += other.exhausted;
        self.moved += other.moved;
        self.copied += other.copied;
        self.refused += other.refused;
        self.gave_way += other.gave_way;
        self.second_copy += other.second_copy;
        self.removed_on_its_way += other.removed_on_its_way;
        self.pinned_while_retiring += other.pinned_while_retiring;
    }

    pub fn everything(&mut self) -> bool {
        self.all().iter().all(|count| **count > 0)
    }
}

struct Held {
    block: ClaimedBlock,
    id: usize,
    moving: Option<usize>,
}

struct Coming {
    onboard: Onboard,
    source: usize,
    target: usize,
}

pub struct Driver {
    random: Random,
    pool: BlockPool,
    model: Model,
    capacity: u64,
    held: Vec<Held>,
    pins: Vec<(BlockPin, usize)>,
    /// Each with the block that moves and the one that has its slot.
    offloads: Vec<(Offload, usize, usize)>,
    coming: Vec<Coming>,
    epochs: Vec<Epoch>,
    seen: Seen,
    steps: u64,
}

fn name(content: u32) -> BlockHash {
    BlockHash::chain(BlockHash::ROOT, &[content])
}

impl Driver {
    pub fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let primary_blocks = 1 + random.below(12);
        let config = PoolConfig {
            primary_blocks,
            primary_ready: random.below(primary_blocks + 1),
            secondary_blocks: random.below(8),
            further_blocks: [0; 2],
            offload_min_priority: Priority::new([0, 30, 30, 80][random.below(4) as usize]).unwrap(),
        };
        Self {
            pool: BlockPool::new(&config).unwrap(),
            model: Model::new(&config),
            random,
            capacity: primary_blocks,
            held: Vec::new(),
            pins: Vec::new(),
            offloads: Vec::new(),
            coming: Vec::new(),
            epochs: Vec::new(),
            seen: Seen::default(),
            steps: 0,
        }
    }

    pub fn step(&mut self) {
        match self.random.below(100) {
            0..14 => self.claim(),
            14..22 => self.take_offload(),
            22..30 => self.end_offload(),
            30..42 => self.register(),
            42..46 => self.drop_claimed(),
            46..66 => self.release(),
            66..67 => self.clone_pin(),
            67..71 => self.match_prefix(),
            71..74 => self.find_and_pin(),
            74..82 => self.begin_onboard(),
            82..88 => self.end_onboard(),
            88..90 => self.remove(),
            90..93 => self.begin_epoch(),
            93..99 => self.complete_epoch(),
            _ => self.add_slots(),
        }
        self.compare();
    }

    /// Gives everything back; then every slot must be unused.
    pub fn finish(mut self) -> Seen {
        while !self.coming.is_empty() {
            self.end_onboard();
        }
        while !self.offloads.is_empty() {
            self.end_offload();
        }
        while !self.held.is_empty() {
            self.drop_claimed();
        }
        while !self.pins.is_empty() {
            self.release();
        }
        while !self.epochs.is_empty() {
            self.complete_epoch();
        }
        self.compare();
        self.pool.check_integrity().unwrap();
        let stats = self.pool.stats();
        for tier in [stats.primary, stats.secondary] {
            assert_eq!(tier.claimable(), tier.slots, "{stats:?}");
        }
        self.seen
    }

    fn compare(&mut self) {
        self.steps += 1;
        assert_eq!(self.pool.stats(), self.model.stats());
        assert_eq!(self.pool.claimable(), self.model.claimable());
        assert_eq!(self.pool.empty() as u64, self.model.stats().primary.empty);
        for (pin, id) in &self.pins {
            self.same_place(pin, *id);
        }
        if self.steps.is_multiple_of(32) {
            self.pool.check_integrity().unwrap();
        }
    }

    fn same_place(&self, pin: &BlockPin, id: usize) {
        let block = &self.model.blocks[id];
        let tier = match block.level {
            Level::Primary => Tier::Primary,
            Level::Secondary => Tier::Secondary,
        };
        let Location { tier: real, slot } = pin.location();
        assert_eq!((pin.block().index(), real, slot.index()), (id, tier, block.slot));
        assert_eq!(pin.hash(), block.content.map(name));
    }

    fn content(&mut self) -> u32 {
        self.random.below(CONTENTS) as u32
    }

    fn claim(&mut self) {
        let count = [0, 1, 1, 1, 2, 3, 5, 50][self.random.below(8) as usize];
        let (claimable, retiring) = (self.model.claimable(), self.model.retiring());
        match (self.pool.claim(count), self.model.claim(count)) {
            (Ok(blocks), Some(expected)) => {
                assert_eq!(blocks.len(), expected.len());
                for (block, claimed) in blocks.into_iter().zip(expected) {
                    let seen = (block.block().index(), block.slot().index(), block.evicted());
                    assert_eq!(seen, (claimed.block, claimed.slot, claimed.evicted));
                    self.held.push(Held { block, id: claimed.block, moving: claimed.moving });
                }
            }
            (Err(error), None) => {
                self.seen.exhausted += 1;
                assert_eq!(error, ClaimError::Exhausted { requested: count, claimable, retiring });
            }
            (real, expected) => panic!("{real:?}, but {expected:?} was expected"),
        }
    }

    fn take_offload(&mut self) {
        let Some(mut held) = self.random.pick(&mut self.held) else { return };
        match (held.block.take_offload(), held.moving.take()) {
            (Some(offload), Some(moving)) => {
                assert_eq!(offload.from(), held.block.slot());
                assert_eq!(offload.to().index(), self.model.blocks[moving].slot);
                self.offloads.push((offload, moving, held.id));
            }
            (None, None) => {}
            (real, expected) => panic!("{real:?}, but {expected:?} was expected"),
        }
        self.held.push(held);
    }

    fn end_offload(&mut self) {
        let Some((offload, moving, holder)) = self.random.pick(&mut self.offloads) else { return };
        if self.random.below(5) == 0 {
            drop(offload);
            self.model.abort_offload(moving, holder);
        } else {
            if let Now::Moving(Some(content)) = self.model.blocks[moving].now {
                self.seen.second_copy += u64::from(self.model.find(content).is_some());
            }
            offload.commit();
            self.model.commit_offload(moving, holder);
        }
    }

    fn register(&mut self) {
        let Some(Held { block, id, moving }) = self.random.pick(&mut self.held) else { return };
        let content = self.content();
        let priority = PRIORITIES[self.random.below(PRIORITIES.len() as u64) as usize];
        if let Some(moving) = moving {
            self.model.abort_offload(moving, id);
        }
        let known = self.model.find(content).is_some();
        let expected = self.model.register(id, content, priority);
        match (block.register(name(content), Priority::new(priority).unwrap()), expected) {
            (Registration::New(pin), None) => {
                self.seen.gave_way += u64::from(known);
                self.pins.push((pin, id));
            }
            (Registration::Duplicate { existing, own }, Some(expected)) => {
                assert_eq!(own.block().index(), id);
                self.pins.push((existing, expected));
                self.held.push(Held { block: own, id, moving: None });
            }
            (real, expected) => panic!("{real:?}, but {expected:?} was expected"),
        }
    }

    fn drop_claimed(&mut self) {
        let Some(Held { block, id, moving }) = self.random.pick(&mut self.held) else { return };
        drop(block);
        if let Some(moving) = moving {
            self.model.abort_offload(moving, id);
        }
        self.model.release_claimed(id);
    }

    fn release(&mut self) {
        let mut pins = Vec::new();
        for _ in 0..=self.random.below(4) {
            pins.extend(self.random.pick(&mut self.pins));
        }
        let (pins, ids): (Vec<_>, Vec<_>) = pins.into_iter().unzip();
        if pins.len() == 1 {
            drop(pins);
        } else {
            self.pool.release(pins);
        }
        for &id in ids.iter().rev() {
            self.model.unpin(id);
        }
    }

    fn clone_pin(&mut self) {
        let Some((pin, id)) = self.random.pick(&mut self.pins) else { return };
        self.model.pin(id);
        self.pins.push((pin.clone(), id));
        self.pins.push((pin, id));
    }

    fn match_prefix(&mut self) {
        let (first, len) = (self.content(), self.random.below(5) as u32);
        let contents: Vec<u32> = (first..first + len).collect();
        let pins = self.pool.match_prefix(&contents.iter().copied().map(name).collect::<Vec<_>>());
        let expected: Vec<usize> =
            contents.iter().map_while(|&content| self.model.find(content)).collect();
        assert_eq!(pins.len(), expected.len());
        self.model.counters.lookups += u64::from(len);
        self.model.counters.hits += expected.len() as u64;
        for (pin, id) in pins.into_iter().zip(expected) {
            self.found(pin, id);
        }
    }

    fn found(&mut self, pin: BlockPin, id: usize) {
        let retiring = matches!(self.model.blocks[id].now, Now::Released { .. });
        self.seen.pinned_while_retiring += u64::from(retiring);
        self.model.pin(id);
        self.same_place(&pin, id);
        self.pins.push((pin, id));
    }

    fn find_and_pin(&mut self) {
        let content = self.content();
        let (tier, level) = [(Tier::Primary, Level::Primary), (Tier::Secondary, Level::Secondary)]
            [self.random.below(2) as usize];
        let expected = self.model.find(content).filter(|&id| self.model.blocks[id].level == level);
        match (self.pool.find_and_pin(name(content), tier), expected) {
            (Some(pin), Some(id)) => self.found(pin, id),
            (None, None) => {}
            (real, expected) => panic!("{real:?}, but {expected:?} was expected"),
        }
    }

    /// Pins the first content of the secondary tier, if there is any.
    fn find_secondary(&mut self) {
        let secondary = self.model.blocks.iter().filter(|block| block.level == Level::Secondary);
        let Some(content) = secondary.filter_map(|block| block.content).next() else { return };
        let found = self.model.find(content).unwrap();
        let pin = self.pool.find_and_pin(name(content), Tier::Secondary).unwrap();
        self.found(pin, found);
    }

    fn begin_onboard(&mut self) {
        if !self.pins.iter().any(|(pin, _)| pin.location().tier == Tier::Secondary) {
            self.find_secondary();
        }
        let secondary = |(pin, _): &(BlockPin, usize)| pin.location().tier == Tier::Secondary;
        // Mostly what can be onboarded, now and then anything.
        let at = self.pins.iter().position(secondary).filter(|_| self.random.below(8) > 0);
        let pin = match at {
            Some(at) => Some(self.pins.swap_remove(at)),
            None => self.random.pick(&mut self.pins),
        };
        let Some((pin, source)) = pin else { return };
        let clean = self.held.iter().position(|held| held.moving.is_none());
        let target = match clean.filter(|_| self.random.below(8) > 0) {
            Some(at) => Some(self.held.swap_remove(at)),
            None => self.random.pick(&mut self.held),
        };
        let Some(Held { block, id, moving }) = target else {
            self.pins.push((pin, source));
            return;
        };
        let location = pin.location();
        let expected = match (self.model.blocks[source].level, moving) {
            (Level::Primary, _) => Some(OnboardError::SameTier { location }),
            (Level::Secondary, Some(_)) => Some(OnboardError::TargetNotEmpty),
            (Level::Secondary, None) if self.model.blocks[id].copying => {
                Some(OnboardError::TargetNotEmpty)
            }
            (Level::Secondary, None) => None,
        };
        match (self.pool.begin_onboard(pin, block), expected) {
            (Ok(onboard), None) => {
                assert_eq!(onboard.from().index(), self.model.blocks[source].slot);
                assert_eq!(onboard.to().index(), self.model.blocks[id].slot);
                self.coming.push(Coming { onboard, source, target: id });
            }
            (Err(refused), Some(expected)) => {
                self.seen.refused += 1;
                assert_eq!(refused.reason, expected);
                self.pins.push((refused.pin, source));
                self.held.push(Held { block: refused.target, id, moving });
            }
            (real, expected) => panic!("{real:?}, but {expected:?} was expected"),
        }
    }

    fn end_onboard(&mut self) {
        let Some(coming) = self.random.pick(&mut self.coming) else { return };
        let Coming { onboard, source, target } = coming;
        if self.random.below(5) == 0 {
            drop(onboard);
            self.model.unpin(source);
            self.model.release_claimed(target);
            return;
        }
        match (onboard.commit(), self.model.onboard(source, target)) {
            (Onboarded::Moved(pin), true) => {
                self.seen.moved += 1;
                self.pins.push((pin, source));
            }
            (Onboarded::Copied { copy, source: pin }, false) => {
                self.seen.copied += 1;
                self.pins.push((pin, source));
                self.held.push(Held { block: copy, id: target, moving: None });
            }
            (real, moved) => panic!("{real:?}, but moved was expected to be {moved}"),
        }
    }

    fn remove(&mut self) {
        let content = self.content();
        let moving = |now| now == Now::Moving(Some(content));
        let on_its_way = self.model.blocks.iter().any(|block| moving(block.now));
        self.seen.removed_on_its_way += u64::from(on_its_way);
        assert_eq!(self.pool.remove(name(content)), self.model.remove(content));
    }

    fn begin_epoch(&mut self) {
        let epoch = self.pool.begin_epoch();
        self.model.begun += 1;
        assert_eq!(epoch.number(), self.model.begun);
        self.epochs.push(epoch);
    }

    /// In any order: an epoch may be completed after a later one.
    fn complete_epoch(&mut self) {
        let Some(epoch) = self.random.pick(&mut self.epochs) else { return };
        self.pool.complete_epoch(epoch).unwrap();
        self.model.complete(epoch.number());
    }

    fn add_slots(&mut self) {
        let upto = self.random.below(self.capacity + 2);
        let added = self.pool.add_primary_slots(upto);
        assert_eq!(added.is_ok(), upto <= self.capacity);
        if added.is_ok() {
            self.model.add(upto as usize);
        }
    }
}
