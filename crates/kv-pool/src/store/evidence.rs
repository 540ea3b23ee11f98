//! A rule that stores what has come back before: by kinds of content, learned while serving.
//!
//! Content is divided into kinds: how often it was found, how often the block before it was, and how deep it lies in
//! its chain. A shared head, a conversation and a tail that is used once are of different kinds. Of each kind the
//! policy counts how much has left the tier above, and after how many others it was asked for again, whether it was
//! stored or refused. Names that have left are remembered for this, as ghosts, some 8 times as many as the tier has
//! blocks, or a sample of them.
//!
//! The fewer kinds are stored, the longer what is stored stays. So a kind is worth storing or not depending on the
//! others. Now and then the policy sorts the kinds by what came back of them, and takes so many of the first
//! that the hits, less the [cost](StoreRules::cost) of the stores, are most. Until as much has left as the tier has
//! blocks, most kinds are stored: nothing is known of them, and there is room.

use super::{Candidate, StoreKind, StorePolicy};
use crate::ConfigError;
use crate::policy::{check_blocks, table};
use crate::{BlockHash, Tier};

/// What a [`StoreByEvidence`] decides by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoreRules {
    /// Blocks of the tier.
    pub blocks: u64,
    /// What a store costs, as a part of what it saves when stored content is used once: 0 for stores that cost
    /// nothing, 1 or more where storing never pays. See [`costs`](Self::costs).
    pub cost: f64,
    /// Blocks stored in a second at most, by the pool's clock, and at most so many at once: a share of the link.
    /// `None` for no limit.
    pub blocks_per_second_max: Option<u32>,
}

impl StoreRules {
    /// For a tier of so many blocks, where one in fifty that is stored has to come back.
    #[must_use]
    pub const fn new(blocks: u64) -> Self {
        Self { blocks, cost: 0.02, blocks_per_second_max: None }
    }

    /// The same with the cost that follows from the seconds that the link takes to store a block and to load
    /// it, and that computing it again takes. Numbers that are not finite or are negative count as 0.
    #[must_use]
    pub fn costs(self, store_s: f64, load_s: f64, compute_s: f64) -> Self {
        let [store, load, compute] =
            [store_s, load_s, compute_s].map(|s| if s.is_finite() { s.max(0.0) } else { 0.0 });
        let saved = compute - load;
        let cost = if saved > 0.0 { (store / saved).min(1.0) } else { 1.0 };
        Self { cost, ..self }
    }
}

/// Stores kinds of content that have come back.
///
/// What others follow that are cached is stored in any case: they cannot be found without it.
#[derive(Debug)]
pub struct StoreByEvidence {
    rules: StoreRules,
    /// Content that has left the tier above, and how much of it was stored.
    left: u64,
    stored: u64,
    /// Parts that have passed in which it did.
    part: u64,
    kinds: Box<[Kind; KINDS]>,
    ghosts: Ghosts,
    /// When the kinds are next chosen, and their counts next halved.
    choose_at: u64,
    halve_at: u64,
    credit: Credit,
}

/// What is known of a kind of content.
#[derive(Clone, Copy, Debug)]
struct Kind {
    /// Content that has left, by the part in which it did: this part's place is [`StoreByEvidence::part`], modulo
    /// [`PARTS`].
    left: [u32; PARTS],
    /// The same, in earlier parts.
    earlier: u32,
    /// Of all that, content that was asked for again, by how much had left meanwhile: in parts of [`SPAN`].
    back: [u32; PARTS],
    stores: bool,
}

/// Classes of how often a block was found: 0, 1, 2 or 3, more. The same of the block before it.
const FOUND: usize = 4;
const PARENT: usize = 4;
/// Classes of depth: 0, up to 3, up to 15, up to 63, more.
const DEPTH: usize = 5;
const KINDS: usize = FOUND * PARENT * DEPTH;

/// Times the blocks of the tier that ghosts are remembered for: content stays so long if an eighth is stored.
const SPAN: u64 = 8;
const PARTS: usize = 32;
/// Parts in which as much leaves as the tier has blocks.
const PARTS_OF_TIER: usize = PARTS / SPAN as usize;
/// How much is taken to come back in each part before any was seen, and how much that counts beside what is seen.
const EXPECTED: f64 = 0.125 / PARTS_OF_TIER as f64;
const UNSEEN: f64 = 0.125;
/// How much of the room of content that comes back more often is taken by other content: 1 in a tier that evicts what is
/// oldest, 0 in one whose policy always knows which is which. A good policy knows it for the most part.
const CROWDING: f64 = 0.5;

impl StoreByEvidence {
    /// A policy that knows nothing yet, and stores everything until it does.
    ///
    /// # Errors
    /// [`ConfigError`] if there are too many blocks, or no memory for the tables.
    pub fn new(rules: StoreRules) -> Result<Self, ConfigError> {
        let StoreRules { blocks, cost, blocks_per_second_max } = rules;
        let rules = StoreRules { cost: if cost >= 0.0 { cost.min(1.0) } else { 0.0 }, ..rules };
        check_blocks(blocks)?;
        let kind = Kind { left: [0; PARTS], earlier: 0, back: [0; PARTS], stores: true };
        Ok(Self {
            ghosts: Ghosts::new(blocks)?,
            kinds: Box::new([kind; KINDS]),
            left: 0,
            stored: 0,
            part: 0,
            choose_at: period(blocks),
            halve_at: SPAN * blocks.max(PERIOD_MIN),
            credit: Credit::new(blocks_per_second_max),
            rules,
        })
    }

    /// Decides anew which kinds are stored.
    fn choose(&mut self) {
        let mut order: [u8; KINDS] = std::array::from_fn(|kind| kind as u8);
        let kinds = &mut self.kinds;
        let curves: Vec<Curve> = kinds.iter().map(|kind| Curve::new(kind, self.part)).collect();
        let curve = |kind: &u8| &curves[usize::from(*kind)];
        let rate = |kind: &u8| curve(kind).comes_back(PARTS_OF_TIER as f64);
        // A stable order of what is equal.
        order.sort_by(|one, other| rate(other).total_cmp(&rate(one)).then(one.cmp(other)));
        let all = curves.iter().map(|kind| kind.left).sum::<f64>().max(1.0);
        let (mut stored, mut best, mut count) = (0.0, 0.0, 0);
        for taken in 1..=KINDS {
            stored += curve(&order[taken - 1]).left;
            let (mut before, mut value) = (0.0, 0.0);
            for kind in order[..taken].iter().map(curve) {
                before += kind.left;
                let room = before + CROWDING * (stored - before);
                let stays = PARTS_OF_TIER as f64 * all / room.max(1.0);
                value += kind.left * (kind.comes_back(stays) - self.rules.cost);
            }
            if value > best {
                (best, count) = (value, taken);
            }
        }
        for (place, &kind) in order.iter().enumerate() {
            // A kind of which nothing has left yet is tried.
            let is_new = curves[usize::from(kind)].left == 0.0 && self.rules.cost < 1.0;
            kinds[usize::from(kind)].stores = place < count || is_new;
        }
    }

    fn halve(&mut self) {
        for kind in self.kinds.iter_mut() {
            kind.left.iter_mut().for_each(|left| *left /= 2);
            kind.earlier /= 2;
            kind.back.iter_mut().for_each(|back| *back /= 2);
        }
    }
}

impl Kind {
    /// So many parts have passed, of which `new` are new.
    fn pass(&mut self, part: u64, new: u64) {
        for passed in 0..new.min(PARTS as u64) {
            let place = &mut self.left[((part - passed) % PARTS as u64) as usize];
            self.earlier = self.earlier.saturating_add(std::mem::take(place));
        }
    }
}

/// How much of a kind comes back, by how much has left meanwhile.
struct Curve {
    /// How much has left.
    left: f64,
    /// What comes back in each part, of all.
    back: [f64; PARTS],
}

impl Curve {
    /// What left a short time ago says nothing of what comes back after a long one, so each part counts what left before
    /// it alone, as in the estimate of Kaplan and Meier. What is not known yet is taken to be worth a store.
    fn new(kind: &Kind, part: u64) -> Self {
        let mut left = f64::from(kind.earlier);
        let mut back = [0.0; PARTS];
        for age in (0..PARTS).rev() {
            back[age] = (f64::from(kind.back[age]) + UNSEEN) / (left + UNSEEN / EXPECTED);
            let place = (part + PARTS as u64 - age as u64) % PARTS as u64;
            left += f64::from(kind.left[place as usize]);
        }
        Self { left, back }
    }

    /// How much of it comes back within so many parts, between 0 and about 1.
    fn comes_back(&self, parts: f64) -> f64 {
        let whole = (parts as usize).min(PARTS);
        let next = self.back.get(whole).copied().unwrap_or(0.0);
        self.back[..whole].iter().sum::<f64>() + next * (parts - whole as f64).clamp(0.0, 1.0)
    }
}

impl StorePolicy for StoreByEvidence {
    fn name(&self) -> &'static str {
        StoreKind::Evidence.name()
    }

    fn stores(&mut self, _: Tier, content: &Candidate) -> bool {
        self.left += 1;
        let part = self.left * PARTS_OF_TIER as u64 / self.rules.blocks.max(1);
        let new = part - self.part;
        if new > 0 {
            self.kinds.iter_mut().for_each(|kind| kind.pass(part, new));
            self.part = part;
        }
        if self.left >= self.choose_at {
            self.choose();
            self.choose_at = self.left + period(self.rules.blocks);
        }
        if self.left >= self.halve_at {
            self.halve();
            self.halve_at = self.left + SPAN * self.rules.blocks.max(PERIOD_MIN) / 2;
        }
        let number = kind_of(content);
        let kind = &mut self.kinds[number];
        let left = &mut kind.left[(self.part % PARTS as u64) as usize];
        *left = left.saturating_add(1);
        let wanted = content.followed || kind.stores;
        let stores = wanted && self.credit.take(content.now_ms);
        self.stored += u64::from(stores);
        let (left, stored) = (self.left as u32, self.stored as u32);
        let kind = number as u8;
        self.ghosts.push(content.name, Ghost { left, stored, kind, refused: !stores, ..NONE });
        stores
    }

    fn used(&mut self, name: BlockHash) -> u32 {
        let Some(ghost) = self.ghosts.take(name) else { return 0 };
        let since = u64::from((self.left as u32).wrapping_sub(ghost.left));
        let part = since * PARTS_OF_TIER as u64 / self.rules.blocks.max(1);
        let kind = &mut self.kinds[usize::from(ghost.kind)];
        let Some(back) = kind.back.get_mut(part as usize) else { return 0 };
        *back = back.saturating_add(self.ghosts.sample);
        // Had it been stored, others have its place when so many were stored after it.
        let after = u64::from((self.stored as u32).wrapping_sub(ghost.stored));
        if ghost.refused && after < self.rules.blocks { self.ghosts.sample } else { 0 }
    }
}

/// After how much that has left the kinds are chosen again.
const PERIOD_MIN: u64 = 64;

fn period(blocks: u64) -> u64 {
    (blocks / 8).max(PERIOD_MIN)
}

fn kind_of(content: &Candidate) -> usize {
    // The bits of a number: 0, 1, then one more with each doubling.
    let class = |count: u32, classes: usize| {
        ((u32::BITS - count.leading_zeros()) as usize).min(classes - 1)
    };
    let found = class(content.found, FOUND);
    let parent = class(content.parent_found, PARENT);
    let depth = class(content.depth, 2 * DEPTH - 1).div_ceil(2);
    (found * PARENT + parent) * DEPTH + depth
}

/// A name that has left the tier above.
#[derive(Clone, Copy, Debug)]
struct Ghost {
    /// Bits of the name. Taking one name for another spoils a count, and nothing else.
    tag: u32,
    /// How much had left then, and was stored of it, modulo 2^32.
    left: u32,
    stored: u32,
    kind: u8,
    refused: bool,
    taken: bool,
}

const NONE: Ghost = Ghost { tag: 0, left: 0, stored: 0, kind: 0, refused: false, taken: false };

/// Ghosts of one set of names, in which the oldest makes room.
const WAYS: usize = 8;

#[derive(Debug)]
struct Ghosts {
    sets: Vec<[Ghost; WAYS]>,
    /// Of so many names one is remembered, chosen by its bits.
    sample: u32,
}

/// Ghosts of the smallest tables: below, every name is remembered.
const GHOSTS_MIN: u64 = 1 << 16;

impl Ghosts {
    fn new(blocks: u64) -> Result<Self, ConfigError> {
        let wanted = SPAN * blocks;
        let most = GHOSTS_MIN.max(2 * blocks);
        let sample = wanted.div_ceil(most).max(1).next_power_of_two();
        let sets = (wanted / sample).div_ceil(WAYS as u64 / 2).max(1).next_power_of_two();
        Ok(Self { sets: table(sets as usize, [NONE; WAYS], blocks)?, sample: sample as u32 })
    }

    /// The set and the tag of a name that is remembered.
    fn place(&self, name: BlockHash) -> Option<(usize, u32)> {
        let bits = name.mixed();
        if (bits as u32) & (self.sample - 1) != 0 {
            return None;
        }
        // The high bits are the best ones.
        let sets = self.sets.len() as u64;
        let set = ((u128::from(bits) * u128::from(sets)) >> 64) as usize;
        Some((set, (bits >> 8) as u32))
    }

    fn push(&mut self, name: BlockHash, new: Ghost) {
        let Some((set, tag)) = self.place(name) else { return };
        let ghosts = &mut self.sets[set];
        let same = ghosts.iter().position(|ghost| ghost.taken && ghost.tag == tag);
        let age =
            |ghost: &Ghost| if ghost.taken { new.left.wrapping_sub(ghost.left) } else { u32::MAX };
        let oldest = || (0..WAYS).max_by_key(|&way| age(&ghosts[way]));
        let Some(way) = same.or_else(oldest) else { return };
        ghosts[way] = Ghost { tag, taken: true, ..new };
    }

    fn take(&mut self, name: BlockHash) -> Option<Ghost> {
        let (set, tag) = self.place(name)?;
        let ghosts = &mut self.sets[set];
        let ghost = ghosts.iter_mut().find(|ghost| ghost.taken && ghost.tag == tag)?;
        ghost.taken = false;
        Some(*ghost)
    }
}

/// Stores that the link's share has room for.
#[derive(Debug)]
struct Credit {
    per_second: Option<u32>,
    /// Thousandths of a block.
    left: u64,
    at_ms: u64,
}

impl Credit {
    fn new(per_second: Option<u32>) -> Self {
        Self { per_second, left: u64::from(per_second.unwrap_or(0)) * 1000, at_ms: 0 }
    }

    /// Takes a block's, if it is there.
    fn take(&mut self, now_ms: u64) -> bool {
        let Some(per_second) = self.per_second.map(u64::from) else { return true };
        let passed = now_ms.saturating_sub(self.at_ms);
        self.at_ms = self.at_ms.max(now_ms);
        // A second's at most is saved up.
        let earned = passed.saturating_mul(per_second);
        self.left = self.left.saturating_add(earned).min(per_second * 1000);
        let Some(left) = self.left.checked_sub(1000) else { return false };
        self.left = left;
        true
    }
}
