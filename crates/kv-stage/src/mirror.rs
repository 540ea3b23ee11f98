//! What the device's memory holds of the tables, as far as that is certain.

use crate::BlockTable;
use crate::edits::Edit;

/// Entries of a word.
const WORD_ENTRIES: usize = 4;
/// Entries of a row at least, so that short rows need no new place with every few blocks.
const STRIDE_MIN: usize = 16;
/// A row that is so many times longer than needed finds a new place.
const STRIDE_SLACK: usize = 4;
/// What travels with a word: itself and its index.
const WORD_COST_BYTES: usize = 20;
const NOWHERE: u32 = u32::MAX;

/// Rows of one table on the device, dense, one `stride` after another.
#[derive(Debug)]
pub(crate) struct View {
    /// Which table.
    table: u64,
    /// Where the rows lie in the stager's memory, in bytes.
    offset: u64,
    /// Entries of a row.
    stride: usize,
    /// # Invariants
    /// The slot whose row each row is.
    slots: Vec<usize>,
    /// # Invariants
    /// For each slot of the table its row, or `NOWHERE`; empty when a slot is there twice.
    rows: Vec<u32>,
    /// Number of the first edit of the table that the rows do not have.
    seen: u64,
}

/// What changed in a view.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Rows that changed as a whole, ascending.
    rows: Vec<usize>,
    /// The words that changed, each once, counted from the view's start. A word may lie across rows.
    pub(crate) words: Vec<u32>,
}

impl View {
    /// A view of nothing, to be [`reset`](View::reset).
    pub(crate) fn empty() -> Self {
        Self { table: 0, offset: 0, stride: 0, slots: Vec::new(), rows: Vec::new(), seen: 0 }
    }

    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// Whether rows of `table` that start at `offset` and are `width` wide lie here.
    pub(crate) fn is_of(&self, table: &BlockTable, offset: u64, width: usize) -> bool {
        self.table == table.id() && self.offset == offset && self.stride_fits(table, width)
    }

    /// The stride for rows of `width`: this view's, if it will do, so that rows keep their places.
    pub(crate) fn stride_for(&self, table: &BlockTable, width: usize) -> usize {
        if self.table == table.id() && self.stride_fits(table, width) {
            return self.stride;
        }
        let longest = table.max_blocks();
        width
            .checked_next_power_of_two()
            .map_or(longest, |width| width.max(STRIDE_MIN))
            .min(longest)
    }

    /// Says that the view is to be sent in full.
    pub(crate) fn reset(
        &mut self,
        table: &BlockTable,
        offset: u64,
        stride: usize,
        slots: &[usize],
    ) {
        self.table = table.id();
        self.offset = offset;
        self.stride = stride;
        self.seen = table.edits().seal();
        self.slots.clear();
        self.slots.extend_from_slice(slots);
        self.rows.clear();
        self.rows.resize(table.slots(), NOWHERE);
        for (row, slot) in (0..).zip(slots) {
            if std::mem::replace(&mut self.rows[*slot], row) != NOWHERE {
                self.rows.clear();
                return;
            }
        }
    }

    /// Turns the view into one of the rows of `slots` as they are now, and tells what changes by
    /// that; or nothing, if that is not known or is too much. The view then has to be reset.
    pub(crate) fn advance(
        &mut self,
        table: &BlockTable,
        slots: &[usize],
        changes: &mut Changes,
    ) -> Option<()> {
        changes.rows.clear();
        changes.words.clear();
        let edits = table.edits().since(self.seen)?;
        if self.rows.is_empty() {
            return None;
        }
        self.change_rows(slots, &mut changes.rows)?;
        let Changes { rows, words } = changes;
        let words_max = slots.len() * self.stride * size_of::<i32>() / (2 * WORD_COST_BYTES);
        let mut note = |row: usize, from: usize, to: usize| {
            let first = row * self.stride;
            for word in (first + from) / WORD_ENTRIES..(first + to).div_ceil(WORD_ENTRIES) {
                words.push(u32::try_from(word).ok()?);
            }
            (words.len() <= words_max).then_some(())
        };
        for &row in rows.iter() {
            note(row, 0, self.stride)?;
        }
        for Edit { slot, from, to } in edits {
            let row = self.rows[slot];
            let to = to.min(self.stride);
            if from < to && row != NOWHERE && rows.binary_search(&(row as usize)).is_err() {
                note(row as usize, from, to)?;
            }
        }
        changes.words.sort_unstable();
        changes.words.dedup();
        self.seen = table.edits().seal();
        Some(())
    }

    /// Gives the rows their new slots and lists those that had another one.
    fn change_rows(&mut self, slots: &[usize], changed: &mut Vec<usize>) -> Option<()> {
        if self.slots == slots {
            return Some(());
        }
        let kept = slots.len().min(self.slots.len());
        changed.extend((0..kept).filter(|&row| self.slots[row] != slots[row]));
        for &row in changed.iter() {
            self.rows[self.slots[row]] = NOWHERE;
        }
        for &slot in &self.slots[kept..] {
            self.rows[slot] = NOWHERE;
        }
        changed.extend(kept..slots.len());
        self.slots.truncate(kept);
        for &row in changed.iter() {
            let slot = slots[row];
            match self.slots.get_mut(row) {
                Some(old) => *old = slot,
                None => self.slots.push(slot),
            }
            if std::mem::replace(&mut self.rows[slot], u32::try_from(row).ok()?) != NOWHERE {
                return None;
            }
        }
        Some(())
    }

    fn stride_fits(&self, table: &BlockTable, width: usize) -> bool {
        let wide = width.max(STRIDE_MIN).saturating_mul(STRIDE_SLACK);
        width <= self.stride
            && self.stride <= wide.max(STRIDE_MIN)
            && self.stride <= table.max_blocks()
    }
}

/// Copies the first columns of the row of `slot`, as many as `row` has.
pub(crate) fn copy_row(table: &BlockTable, slot: usize, row: &mut [i32]) {
    match table.row(slot).ok().and_then(|source| source.get(..row.len())) {
        Some(source) => row.copy_from_slice(source),
        None => row.fill(-1),
    }
}

/// Copies word `word` of the view whose rows are those of `slots`; beyond its end it is -1.
pub(crate) fn copy_word(
    table: &BlockTable,
    slots: &[usize],
    stride: usize,
    word: u32,
    to: &mut [i32],
) {
    let first = word as usize * WORD_ENTRIES;
    let (mut row, mut column) = (first / stride, first % stride);
    let mut rest = to;
    while !rest.is_empty() {
        // Up to the end of the row, of which a word may see several.
        let count = rest.len().min(stride - column);
        let (now, later) = rest.split_at_mut(count);
        let source = slots.get(row).and_then(|slot| table.row(*slot).ok());
        match source.and_then(|source| source.get(column..column + count)) {
            Some(source) => now.copy_from_slice(source),
            None => now.fill(-1),
        }
        (row, column, rest) = (row + 1, 0, later);
    }
}
