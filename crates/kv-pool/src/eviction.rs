//! Which block goes next: empty ones, then least recently released first in the lowest priority.

use crate::blocks::{BlockPhase, Blocks, Kind};
use crate::list::List;
use crate::{Priority, RecordId, Tier};

/// The class of blocks without content, which leave before all others.
pub(crate) const EMPTY: usize = 0;
const CLASSES: usize = Priority::COUNT + 1;

/// The unreferenced blocks of one tier, in the order in which they will be handed out.
///
/// One list a class, and a bit for each list that is not empty, so every operation takes the same
/// time however many blocks or priorities there are. Blocks leave in the order of their classes: [`EMPTY`], then one
/// for each priority of content. The class that a block was inserted with is the caller's to remember: it names the
/// list, whatever the block's priority is by now.
#[derive(Debug)]
pub(crate) struct EvictionQueues {
    lists: Box<[List; CLASSES]>,
    occupied: u128,
    len: usize,
    empty: usize,
}

impl EvictionQueues {
    pub(crate) fn new() -> Self {
        Self { lists: Box::new([List::EMPTY; CLASSES]), occupied: 0, len: 0, empty: 0 }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Blocks without content.
    #[inline]
    pub(crate) fn empty(&self) -> usize {
        self.empty
    }

    /// Inserts a block that will be handed out after all others of its class.
    #[inline]
    pub(crate) fn push_back(&mut self, blocks: &mut Blocks, block: RecordId, class: usize) {
        let Some(list) = self.lists.get_mut(class) else { return };
        list.push_back(blocks, block);
        self.added(class, 1);
    }

    /// Inserts a block that will be handed out before all others of its class.
    #[inline]
    pub(crate) fn push_front(&mut self, blocks: &mut Blocks, block: RecordId, class: usize) {
        let Some(list) = self.lists.get_mut(class) else { return };
        list.push_front(blocks, block);
        self.added(class, 1);
    }

    /// Takes out a block that was inserted with `class`.
    #[inline]
    pub(crate) fn remove(&mut self, blocks: &mut Blocks, block: RecordId, class: usize) {
        let Some(list) = self.lists.get_mut(class) else { return };
        list.remove(blocks, block);
        self.left(class, 1);
    }

    /// Finds and takes out the next block, in one step.
    #[inline]
    pub(crate) fn pop(&mut self, blocks: &mut Blocks) -> Option<RecordId> {
        self.pop_class(blocks, self.lowest())
    }

    /// The same, of blocks with content.
    #[inline]
    pub(crate) fn pop_cached(&mut self, blocks: &mut Blocks) -> Option<RecordId> {
        self.pop_class(blocks, self.lowest_cached())
    }

    /// Takes out the first block of a class, if there is one.
    #[inline]
    pub(crate) fn pop_class(&mut self, blocks: &mut Blocks, class: usize) -> Option<RecordId> {
        let block = self.lists.get_mut(class)?.pop_front(blocks)?;
        self.left(class, 1);
        Some(block)
    }

    /// The class and the block that [`pop`](Self::pop) would take.
    #[inline]
    pub(crate) fn first(&self) -> Option<(usize, RecordId)> {
        let lowest = self.lowest();
        Some((lowest, self.lists.get(lowest)?.front()?))
    }

    /// The class of the block that [`pop_cached`](Self::pop_cached) would take.
    #[inline]
    pub(crate) fn first_cached(&self) -> Option<usize> {
        Some(self.lowest_cached()).filter(|&lowest| lowest < CLASSES)
    }

    /// Takes out up to `count` of the next blocks without content, up to the first of which `take` does
    /// not say what lay behind it; how many.
    #[inline]
    pub(crate) fn pop_run_empty(
        &mut self,
        blocks: &mut Blocks,
        count: usize,
        take: impl FnMut(&mut Blocks, RecordId) -> Option<u32>,
    ) -> usize {
        let taken = self.lists[EMPTY].pop_run_front(blocks, count, take);
        self.left(EMPTY, taken);
        taken
    }

    /// Releases claimed blocks of a tier without content, as [`push_front`](Self::push_front) one
    /// after the other, up to the first that there is more to; how many.
    #[inline]
    pub(crate) fn push_run_empty(
        &mut self,
        blocks: &mut Blocks,
        run: impl Iterator<Item = RecordId>,
        tier: Tier,
    ) -> usize {
        let count = self.lists[EMPTY]
            .push_run_front(blocks, run, |blocks, id, front| blocks.release_empty(id, tier, front));
        self.added(EMPTY, count);
        count
    }

    /// Releases blocks with content as far as they are of one kind and have no other reference, as
    /// [`push_back`](Self::push_back) one after the other; how many.
    #[inline]
    pub(crate) fn push_run_cached(
        &mut self,
        blocks: &mut Blocks,
        run: impl Iterator<Item = RecordId>,
        kind: Kind,
        stamp: u32,
    ) -> usize {
        let class = kind.class();
        let Some(list) = self.lists.get_mut(class) else { return 0 };
        let count = list.push_run_back(blocks, run, |blocks, id, back| {
            blocks.rest_last(id, kind, (BlockPhase::Queued, stamp), back)
        });
        self.added(class, count);
        count
    }

    /// Takes the first blocks of a list of released ones with content over, as far as they are of one kind and wait
    /// for epochs up to `completed`; how many.
    #[inline]
    pub(crate) fn take_run_cached(
        &mut self,
        blocks: &mut Blocks,
        from: &mut List,
        kind: Kind,
        (completed, stamp): (u64, u32),
    ) -> usize {
        let class = kind.class();
        let Some(list) = self.lists.get_mut(class) else { return 0 };
        let count = list.take_run(blocks, from, |blocks, id, back| {
            blocks.queue_last(id, kind, (completed, stamp), back)
        });
        self.added(class, count);
        count
    }

    /// Takes note of `count` blocks in a row that have left the list of `class` already.
    #[inline]
    pub(crate) fn unlinked(
        &mut self,
        blocks: &mut Blocks,
        class: usize,
        before: u32,
        after: u32,
        count: usize,
    ) {
        let Some(list) = self.lists.get_mut(class) else { return };
        list.close(blocks, before, after);
        self.left(class, count);
    }

    /// The next blocks with content, as far as they are of one class.
    pub(crate) fn next_cached<'a>(
        &'a self,
        blocks: &'a Blocks,
    ) -> impl Iterator<Item = RecordId> + 'a {
        let list = self.lists.get(self.lowest_cached());
        list.into_iter().flat_map(|list| list.iter(blocks))
    }

    /// Every block with the class that it is queued by, in the order of [`pop`](Self::pop).
    pub(crate) fn iter<'a>(
        &'a self,
        blocks: &'a Blocks,
    ) -> impl Iterator<Item = (RecordId, usize)> + 'a {
        let lists = self.lists.iter().enumerate();
        lists.flat_map(move |(class, list)| list.iter(blocks).map(move |block| (block, class)))
    }

    #[inline]
    fn lowest(&self) -> usize {
        self.occupied.trailing_zeros() as usize
    }

    #[inline]
    fn lowest_cached(&self) -> usize {
        (self.occupied & !(1 << EMPTY)).trailing_zeros() as usize
    }

    #[inline]
    fn added(&mut self, class: usize, count: usize) {
        self.occupied |= u128::from(count > 0) << class;
        self.len += count;
        self.empty += if class == EMPTY { count } else { 0 };
    }

    #[inline]
    fn left(&mut self, class: usize, count: usize) {
        if self.lists[class].is_empty() {
            self.occupied &= !(1 << class);
        }
        self.len -= count;
        self.empty -= if class == EMPTY { count } else { 0 };
    }
}
