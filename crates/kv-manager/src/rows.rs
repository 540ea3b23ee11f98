//! What sequences share with their manager: the rows of the block table, and what is void.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use kv_pool::BlockHash;
use kv_pool::guard;
use parking_lot::{Mutex, MutexGuard};

use crate::events::{Below, Feed};
use crate::group::{Group, Shape};
use crate::lower::Key;
use crate::options::repeated;
use crate::steps::Era;
use crate::transfers::LOWER;
use crate::{OptionsError, Row};

/// What the sequences of a manager share with it. Its identity is that of the manager.
#[derive(Clone, Debug)]
pub(crate) struct Home {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    free: Mutex<Vec<Row>>,
    shapes: Vec<Shape>,
    void: Mutex<Void>,
    /// What readers of events are told, if any are.
    feed: Option<Mutex<Feed>>,
}

/// What sequences may not name.
#[derive(Debug, Default)]
struct Void {
    /// Sequences below this number are lost.
    void_below: u64,
    /// Sequences of other generations of names are void too.
    generation: u64,
    /// Names that were forgotten, each with the number of the first sequence that came later.
    forgotten: HashMap<BlockHash, u64>,
    /// So many are looked through for those that concern no sequence any more.
    forgotten_max: usize,
}

impl Void {
    fn may_name(&self, era: &Era, name: &BlockHash) -> bool {
        let is_forgotten = self.forgotten.get(name).is_some_and(|&later| era.is_before(later));
        guard!("manager.the-forgotten-is-not-named", !is_forgotten, else true)
    }
}

impl Home {
    pub(crate) fn new(
        rows: u32,
        groups: &[Group],
        feed: Option<Feed>,
    ) -> Result<Self, OptionsError> {
        let mut free = repeated(Row::new(0), rows as usize)?;
        free.iter_mut().zip((0..rows).rev()).for_each(|(row, index)| *row = Row::new(index));
        let (free, void) = (Mutex::new(free), Mutex::default());
        let shapes = groups.iter().map(|group| **group).collect();
        Ok(Self { inner: Arc::new(Inner { free, shapes, void, feed: feed.map(Mutex::new) }) })
    }

    pub(crate) fn lease(&self) -> Option<RowLease> {
        let row = self.inner.free.lock().pop()?;
        Some(RowLease { home: self.clone(), row })
    }

    /// Whether both are of one manager.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    pub(crate) fn free_rows(&self) -> usize {
        self.inner.free.lock().len()
    }

    /// What a block of each group is.
    pub(crate) fn shapes(&self) -> &[Shape] {
        &self.inner.shapes
    }

    /// What readers of events are told, locked; `None` if there are none.
    #[inline]
    pub(crate) fn feed(&self) -> Option<MutexGuard<'_, Feed>> {
        self.inner.feed.as_ref().map(Mutex::lock)
    }

    /// Has readers told of what has become of a block's content in this one of the lower tiers.
    pub(crate) fn note_below(&self, tier: usize, key: Key, now: Below) {
        if let Some(mut feed) = self.feed() {
            feed.note_below(LOWER[tier], key, now);
        }
    }

    /// Lets no sequence below this number, all of which are lost, name anything when it is dropped. What they have named is
    /// forgotten after this call.
    pub(crate) fn void_below(&self, number: u64) {
        self.inner.void.lock().void_below = number;
    }

    /// Lets no sequence of another generation name anything from now on.
    pub(crate) fn enter(&self, generation: u64) {
        self.inner.void.lock().generation = generation;
    }

    /// Lets no sequence before the one with number `next` give these names from now on. There are sequences from number
    /// `oldest` on. What they have named is forgotten after this call.
    pub(crate) fn void_names(&self, names: &[BlockHash], next: u64, oldest: u64) {
        let mut void = self.inner.void.lock();
        if void.forgotten.len() >= void.forgotten_max {
            void.forgotten.retain(|_, later| *later > oldest);
            void.forgotten_max = 2 * (void.forgotten.len() + names.len());
        }
        if oldest < next {
            void.forgotten.extend(names.iter().map(|&name| (name, next)));
        }
    }

    /// Calls `name` with each range of `names` that a sequence with this number, of this era, whose names are of this
    /// generation, may give to its blocks. None of them becomes void meanwhile.
    pub(crate) fn name_valid(
        &self,
        (number, era, generation): (u64, &Era, u64),
        names: &[BlockHash],
        mut name: impl FnMut(Range<usize>),
    ) {
        let void = self.inner.void.lock();
        let is_void = number < void.void_below || generation != void.generation;
        if guard!("manager.the-lost-name-nothing", is_void, else false) {
            return;
        }
        if void.forgotten.is_empty() {
            return name(0..names.len());
        }
        let mut first = 0;
        while first < names.len() {
            let valid = names[first..].iter().take_while(|of| void.may_name(era, of)).count();
            if valid > 0 {
                name(first..first + valid);
            }
            first += valid + 1;
        }
    }
}

/// One row, which is free again when the lease is dropped.
#[derive(Debug)]
pub(crate) struct RowLease {
    home: Home,
    row: Row,
}

impl RowLease {
    pub(crate) fn row(&self) -> Row {
        self.row
    }
}

impl Drop for RowLease {
    fn drop(&mut self) {
        // The vector has room: it once held every row.
        self.home.inner.free.lock().push(self.row);
    }
}
