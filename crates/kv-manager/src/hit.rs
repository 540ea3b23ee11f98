//! What of a prefix is cached, decided in one place for all groups.

use std::borrow::Cow;
use std::ops::Range;

use kv_pool::{BlockHash, BlockId, Location, Pinned, Tier, guard};
use kv_tier::GroupKind;
use smallvec::SmallVec;

use crate::group::{Group, Groups, names_of};
use crate::lower::{Key, OpenLoad};

/// What was found of a prefix in a group: pins of all blocks that a token behind it reads.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// The first blocks.
    pub(crate) head: Pinned,
    /// Places behind them of blocks that open loads bring.
    pub(crate) head_loads: usize,
    /// The position of the first block of `tail`: those between are not needed.
    pub(crate) tail_first: usize,
    pub(crate) tail: Pinned,
    /// Places behind the tail of blocks that open loads bring.
    pub(crate) tail_loads: usize,
    /// Places behind the tail of blocks that are not needed either.
    pub(crate) gone: Range<usize>,
}

impl Found {
    pub(crate) fn head(head: Pinned) -> Self {
        Self { tail_first: head.len(), head, ..Self::default() }
    }

    /// The position behind the last block.
    pub(crate) fn end(&self) -> usize {
        self.tail_first + self.tail.len() + self.tail_loads
    }

    /// The places of blocks that open loads bring.
    pub(crate) fn loading(&self) -> impl Iterator<Item = usize> + use<> {
        let head = self.head.len();
        let tail = self.tail_first + self.tail.len();
        (head..head + self.head_loads).chain(tail..tail + self.tail_loads)
    }

    /// The blocks' places, in the order of [`positions`](Self::positions).
    pub(crate) fn locations(&self) -> impl Iterator<Item = Location> + '_ {
        self.head.locations().chain(self.tail.locations())
    }
}

/// How much a group has of a prefix, whether it is pinned or not.
#[derive(Debug, Default)]
pub(crate) struct Extent {
    /// Blocks that do not lie on the device, those that loads bring included.
    pub(crate) far: usize,
    /// The position behind the last block.
    pub(crate) end: usize,
    /// Places behind it of blocks that are not needed.
    pub(crate) gone: usize,
    /// Device blocks that a pin takes from what can be claimed.
    pub(crate) unused: usize,
    /// The device blocks, where groups share memory.
    pub(crate) near: Vec<BlockId>,
    /// Places of blocks that a pin holds.
    pub(crate) pins: [Range<usize>; 2],
}

/// The same of all groups.
pub(crate) type Extents = SmallVec<[Extent; 1]>;

/// What was found in all groups. One group is the rule, and its list is moved about: no room is kept for more.
pub(crate) type Founds = SmallVec<[Found; 1]>;

/// The longest prefix that all groups can serve.
#[derive(Debug, Default)]
pub(crate) struct Hit {
    pub(crate) tokens: u64,
    pub(crate) found: Founds,
    /// The open loads that bring the rest of it.
    pub(crate) load: OpenLoad,
}

impl Groups {
    /// How much of each group was found. It takes nothing more from what can be claimed.
    pub(crate) fn extents(&self, hit: &Hit) -> Extents {
        let extent = |(group, found): (&Group, &Found)| {
            let far = group.far(found) + found.head_loads + found.tail_loads;
            Extent { far, end: found.end(), gone: found.gone.len(), ..Extent::default() }
        };
        self.iter().zip(&hit.found).map(extent).collect()
    }

    /// Finds and pins the longest prefix, of at most `most` tokens, that every group can serve.
    pub(crate) fn hit(&self, names: &[BlockHash], most: u64) -> Hit {
        let reach = self.reach(names, most);
        self.pinned_hit(names, guard!("manager.pins-what-all-serve", reach, else most))
    }

    /// Pins what a sequence needs that goes on behind `most` tokens, which every group can serve.
    pub(crate) fn pinned_hit(&self, names: &[BlockHash], most: u64) -> Hit {
        if let Some(group) = self.alone() {
            let blocks = group.whole_blocks(most).min(names.len() / group.stride);
            let head = group.look(names, 0, blocks, false);
            let (tokens, mut found) = (group.tokens_of(head.len()), Founds::new());
            found.push(Found::head(head));
            return Hit { tokens, found, load: OpenLoad::default() };
        }
        let mut found: SmallVec<[Option<Found>; 1]> = self.iter().map(|_| None).collect();
        let tokens =
            self.agree(most, |index, end| self[index].find(names, end, false, &mut found[index]));
        let trimmed = self.iter().zip(found);
        let trimmed =
            trimmed.map(|(group, found)| group.trimmed(found.unwrap_or_default(), tokens));
        Hit { tokens, found: trimmed.collect(), ..Hit::default() }
    }

    /// The longest prefix, of at most `most` tokens, that every group can serve. A group that lags shortens it, and
    /// then it is judged anew in all: a window needs other blocks, and a state is there behind certain tokens
    /// only (H26).
    ///
    /// Pins nothing: a block that was pinned for a longer prefix could not be claimed until the step is complete,
    /// though nobody has used it.
    pub(crate) fn reach(&self, names: &[BlockHash], most: u64) -> u64 {
        let first = self.cached_first(names, most);
        self.agree(most, |index, end| {
            let end = self.held_end(index, end, &first);
            self[index].reach_cached(names, end, first[index])
        })
    }

    /// The same of what is on the device.
    pub(crate) fn reach_near(&self, names: &[BlockHash], most: u64) -> u64 {
        let first = self.cached_first(names, most);
        self.agree(most, |index, end| {
            let (group, end) = (&self[index], self.held_end(index, end, &first));
            group.reach(names, end, 0, |name| group.is_near(name))
        })
    }

    /// As far as the tenants may hold all of the first blocks together.
    fn held_end(&self, index: usize, end: u64, first: &[usize]) -> u64 {
        let group = &self[index];
        if group.is_chained() { end.min(group.tokens_of(first[index])) } else { end }
    }

    /// The same if what `is_below` says of can be served too, where the first blocks are
    /// [cached](Self::cached_first).
    pub(crate) fn reach_with(
        &self,
        names: &[BlockHash],
        most: u64,
        first: &[usize],
        is_below: impl Fn(Key) -> bool,
    ) -> u64 {
        self.agree(most, |index, end| {
            let group = &self[index];
            let is_there = |name| group.is_cached(name) || is_below((group.id, name));
            group.reach(names, end, first[index], is_there)
        })
    }

    /// The first blocks of a prefix that are cached, in groups that keep all.
    pub(crate) fn cached_first(&self, names: &[BlockHash], most: u64) -> SmallVec<[usize; 4]> {
        let of = |group: &Group| {
            let blocks = group.whole_blocks(most).min(names.len() / group.stride);
            if group.is_chained() {
                group.prefix_len(&names_of(names, group.stride, 0, blocks))
            } else {
                0
            }
        };
        self.iter().map(of).collect()
    }

    /// The largest end, `most` or less, that all groups agree on: `serve` says how far a group can go with an
    /// end, at most.
    pub(crate) fn agree(&self, most: u64, mut serve: impl FnMut(usize, u64) -> u64) -> u64 {
        let mut end = most;
        loop {
            let before = end;
            for index in 0..self.len() {
                let served = serve(index, end);
                end = guard!("manager.hits-are-served-by-all", end.min(served), else end);
            }
            if guard!("manager.shorter-hits-are-judged-anew", end == before, else true) {
                return end;
            }
        }
    }
}

impl Group {
    /// Blocks of these that do not lie on the device.
    pub(crate) fn far(&self, found: &Found) -> usize {
        if self.has_far() {
            found.locations().filter(|at| at.tier != Tier::Primary).count()
        } else {
            0
        }
    }

    /// How many blocks of a prefix are cached, without a pin.
    pub(crate) fn prefix_len(&self, names: &[BlockHash]) -> usize {
        let cached = self.pool.prefix_len(names);
        #[cfg(test)]
        crate::proportion::looks(cached + 1);
        cached
    }

    /// The largest end, `end` or less, for which all blocks are there that a token behind it reads. The `first` are.
    pub(crate) fn reach(
        &self,
        names: &[BlockHash],
        end: u64,
        first: usize,
        is_there: impl Fn(BlockHash) -> bool,
    ) -> u64 {
        self.reach_by(names, end, |blocks| {
            let mut needed = self.needed_names(names, blocks, first);
            let missing = needed.find(|(_, name)| !is_there(*name)).map(|(place, _)| place);
            if missing.is_some() || self.is_chained() {
                return missing;
            }
            let cached = self.needed_names(names, blocks, first);
            let cached = cached.filter(|(_, name)| self.is_cached(*name));
            let (places, names): (Vec<_>, Vec<_>) = cached.unzip();
            places.get(self.pool.prefix_len(&names)).copied()
        })
    }

    /// The same of what is cached, which is asked for at once.
    fn reach_cached(&self, names: &[BlockHash], end: u64, first: usize) -> u64 {
        self.reach_by(names, end, |blocks| {
            let (head, tail) = self.needed(blocks);
            let mut places = (first.min(head)..head).chain(tail..blocks);
            let of = |places: Range<usize>| names_of(names, self.stride, places.start, places.end);
            let needed = match (of(first.min(head)..head), of(tail..blocks)) {
                (one, none) | (none, one) if none.is_empty() => one,
                (head, tail) => Cow::Owned([head, tail].concat()),
            };
            if needed.is_empty() {
                return None;
            }
            let there = guard!(
                "manager.reaches-what-may-be-held",
                self.prefix_len(&needed),
                else needed.iter().take_while(|name| self.is_cached(**name)).count()
            );
            places.nth(there)
        })
    }

    /// The same, if `first_missing` says of so many blocks which place is the first of what a sequence needs behind them that is
    /// not there, or may not be held beside those before it.
    fn reach_by(
        &self,
        names: &[BlockHash],
        end: u64,
        first_missing: impl Fn(usize) -> Option<usize>,
    ) -> u64 {
        let mut blocks = self.whole_blocks(end).min(names.len() / self.stride);
        while let Some(missing) = first_missing(blocks) {
            // Every smaller end behind it needs it too.
            blocks = missing;
            if self.is_chained() {
                break;
            }
        }
        self.tokens_of(blocks)
    }

    /// What a sequence needs that goes on behind so many blocks: so many first ones, and those from this one on.
    fn needed(&self, blocks: usize) -> (usize, usize) {
        let sinks = self.sink_blocks().min(blocks);
        match self.kind {
            GroupKind::Full => (blocks, blocks),
            GroupKind::Window { .. } => {
                let read = self.first_read(self.tokens_of(blocks)).max(sinks).min(blocks);
                (sinks, guard!("manager.windows-are-behind-the-hit", read, else sinks))
            }
            GroupKind::State { .. } => (0, blocks.saturating_sub(1)),
        }
    }

    /// The places of these blocks for a sequence that goes on behind `end` tokens: the first ones, and the last ones.
    pub(crate) fn needed_ranges(&self, end: u64) -> [Range<usize>; 2] {
        let blocks = self.whole_blocks(end);
        let (head, tail) = self.needed(blocks);
        [0..head, tail..blocks]
    }

    /// What is cached of a prefix of `end` tokens, pinned, where loads bring the last so many of the first blocks and
    /// of the last blocks.
    pub(crate) fn found_before_loads(
        &self,
        names: &[BlockHash],
        end: u64,
        [head_loads, tail_loads]: [usize; 2],
    ) -> Found {
        let [head, tail] = self.needed_ranges(end);
        Found {
            head: self.look(names, 0, head.end - head_loads, false),
            head_loads,
            tail_first: tail.start,
            tail: self.look(names, tail.start, tail.end - tail_loads, false),
            tail_loads,
            gone: 0..0,
        }
    }

    /// The name of the block at a place.
    pub(crate) fn name_at(&self, names: &[BlockHash], place: usize) -> BlockHash {
        names[(place + 1) * self.stride - 1]
    }

    /// The places and names of these blocks, but for the `first`.
    pub(crate) fn needed_names<'a>(
        &'a self,
        names: &'a [BlockHash],
        blocks: usize,
        first: usize,
    ) -> impl Iterator<Item = (usize, BlockHash)> + 'a {
        let (head, tail) = self.needed(blocks);
        let places = (first.min(head)..head).chain(tail..blocks);
        places.map(|place| {
            #[cfg(test)]
            crate::proportion::looks(1);
            (place, self.name_at(names, place))
        })
    }

    /// The places of the blocks that a sequence needs that goes on behind `end` tokens, a partly filled one included:
    /// so many sinks, and the places from this one on.
    pub(crate) fn needed_places(&self, end: u64) -> (usize, usize) {
        let sinks = self.sink_blocks().min(self.blocks_for(end));
        (sinks, self.first_read(end).max(sinks))
    }

    /// How much there is of what a sequence needs behind `end` tokens, all of which is there but for what loads
    /// bring: so many of the first blocks, and of the last ones.
    pub(crate) fn extent(
        &self,
        names: &[BlockHash],
        end: u64,
        [head_loads, tail_loads]: [usize; 2],
    ) -> Extent {
        let [head, tail] = self.needed_ranges(end);
        let cached = tail.start..tail.end - tail_loads;
        let extent = self.extent_of(names, head.end - head_loads, cached);
        Extent { far: extent.far + head_loads + tail_loads, end: tail.end, ..extent }
    }

    /// The same of the first blocks up to `head`, and those in `tail`.
    pub(crate) fn extent_of(&self, names: &[BlockHash], head: usize, tail: Range<usize>) -> Extent {
        let pins = [0..head, tail];
        let mut extent = Extent { end: pins[1].end, pins: pins.clone(), ..Extent::default() };
        for places in pins {
            let names = names_of(names, self.stride, places.start, places.end);
            let cost = self.pool.pin_cost(&names);
            extent.unused += cost.unused;
            extent.far += cost.far;
            if self.shares {
                let at = names.iter().filter_map(|&name| self.pool.locate(name));
                let near = at.filter(|(_, at)| at.tier == Tier::Primary);
                extent.near.extend(near.map(|(_, at)| at.id));
            }
        }
        extent
    }

    /// The names of what a pin holds.
    pub(crate) fn pinned_names<'a>(
        &self,
        names: &'a [BlockHash],
        extent: &Extent,
    ) -> [Cow<'a, [BlockHash]>; 2] {
        extent.pins.clone().map(|places| names_of(names, self.stride, places.start, places.end))
    }

    /// Finds and pins what a sequence needs that goes on behind `end` tokens, or less: the end for which it is
    /// there. `found` is what was found for a larger end.
    pub(crate) fn find(
        &self,
        names: &[BlockHash],
        end: u64,
        near: bool,
        found: &mut Option<Found>,
    ) -> u64 {
        let mut blocks = self.whole_blocks(end).min(names.len() / self.stride);
        match self.kind {
            GroupKind::Full => {
                let found =
                    found.get_or_insert_with(|| Found::head(self.look(names, 0, blocks, near)));
                blocks = blocks.min(found.head.len());
            }
            GroupKind::Window { .. } => {
                let found = found.get_or_insert_with(|| {
                    Found::head(self.look(names, 0, self.sink_blocks().min(blocks), near))
                });
                blocks = self.find_window(names, blocks, near, found);
            }
            GroupKind::State { .. } => {
                if found.as_ref().is_none_or(|found| found.end() > blocks) {
                    *found = Some(self.find_state(names, blocks, near));
                }
                blocks = found.as_ref().map_or(0, Found::end).min(blocks);
            }
        }
        self.tokens_of(blocks)
    }

    /// The blocks from `first` up to `end`, up to one that is not there.
    pub(crate) fn look(&self, names: &[BlockHash], first: usize, end: usize, near: bool) -> Pinned {
        if first >= end {
            return Pinned::default();
        }
        let mut found = self.pool.match_prefix(&names_of(names, self.stride, first, end));
        if near {
            let near = found.locations().take_while(|at| at.tier == Tier::Primary).count();
            found.truncate(near);
        }
        found
    }

    /// The largest end, `blocks` or less, before which all blocks of the window and the sinks are there.
    fn find_window(
        &self,
        names: &[BlockHash],
        mut blocks: usize,
        near: bool,
        found: &mut Found,
    ) -> usize {
        loop {
            let (sinks, first) = self.needed(blocks);
            if found.head.len() < sinks {
                blocks = found.head.len();
                continue;
            }
            let there = found.tail_first <= first && blocks <= found.end();
            if first == blocks || there {
                return blocks;
            }
            found.tail = self.look(names, first, blocks, near);
            found.tail_first = first;
            // Every end behind the first that is missing needs it, as long as its window begins before.
            blocks = found.end();
        }
    }

    /// The last checkpoint within the first blocks.
    fn find_state(&self, names: &[BlockHash], mut blocks: usize, near: bool) -> Found {
        let names = names_of(names, self.stride, 0, blocks);
        while let Some((at, tail)) = self.pool.match_last(&names[..blocks]) {
            if !near || tail.locations().all(|at| at.tier == Tier::Primary) {
                return Found { tail_first: at, tail, ..Found::default() };
            }
            blocks = at;
        }
        Found::default()
    }

    /// What is needed of what was found, if a sequence goes on behind `end` tokens.
    pub(crate) fn trimmed(&self, mut found: Found, end: u64) -> Found {
        let blocks = self.whole_blocks(end);
        match self.kind {
            _ if blocks == 0 => return Found::default(),
            GroupKind::Full => {
                found.head.truncate(blocks);
                found.tail_first = found.head.len();
            }
            GroupKind::Window { .. } => {
                let (sinks, first) = self.needed(blocks);
                found.head.truncate(sinks);
                if first == blocks {
                    found.tail = Pinned::default();
                } else {
                    found.tail.truncate(blocks - found.tail_first);
                    let needed = found.tail.split_off(first - found.tail_first);
                    found.tail = needed;
                }
                found.tail_first = first;
            }
            GroupKind::State { .. } => {}
        }
        found
    }
}
