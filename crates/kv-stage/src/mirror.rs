//! The contents of the tables in device memory, as far as they are certain.

use crate::edits::Edit;
use crate::{BlockTable, Row};

/// Number of entries of a word.
const WORD_ENTRIES: usize = 4;
/// Minimum number of entries of a row, so that short rows keep their place as they grow.
const STRIDE_MIN: usize = 16;
/// A row that is this many times longer than needed gets a new place.
const STRIDE_SLACK: usize = 4;
/// Bytes sent for each word: the word and its index.
const WORD_COST_BYTES: usize = 20;
const NOWHERE: u32 = u32::MAX;

/// The rows of one table on the device, contiguous, one every `stride` entries.
#[derive(Debug)]
pub(crate) struct TableView {
    /// The table's id.
    table: u64,
    /// Offset of the rows in the stager's memory, in bytes.
    offset: u64,
    /// Number of entries of a row.
    stride: usize,
    /// # Invariants
    /// The row of the table at each position.
    rows: Vec<Row>,
    /// # Invariants
    /// For each row of the table its position, or `NOWHERE`; empty if a row occurs twice.
    positions: Vec<u32>,
    /// Number of the first edit of the table that the rows do not include.
    seen: u64,
}

/// The changes of a view.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Positions whose whole row changed, ascending.
    positions: Vec<usize>,
    /// The changed words, each once, counted from the view's start. A word may extend over several
    /// rows.
    pub(crate) words: Vec<u32>,
}

impl TableView {
    /// An empty view, to be [`reset`](TableView::reset).
    pub(crate) fn empty() -> Self {
        Self { table: 0, offset: 0, stride: 0, rows: Vec::new(), positions: Vec::new(), seen: 0 }
    }

    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// Whether the view holds rows of `table` that start at `offset` and are `width` wide.
    pub(crate) fn is_of(&self, table: &BlockTable, offset: u64, width: usize) -> bool {
        self.table == table.id() && self.offset == offset && self.stride_fits(table, width)
    }

    /// The stride for rows of `width`: this view's if it is suitable, so that rows keep their
    /// places.
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

    /// Marks the view to be sent completely.
    pub(crate) fn reset(&mut self, table: &BlockTable, offset: u64, stride: usize, rows: &[Row]) {
        self.table = table.id();
        self.offset = offset;
        self.stride = stride;
        self.seen = table.edits().seal();
        self.rows.clear();
        self.rows.extend_from_slice(rows);
        self.positions.clear();
        self.positions.resize(table.rows(), NOWHERE);
        for (position, row) in (0..).zip(rows) {
            if std::mem::replace(&mut self.positions[row.index()], position) != NOWHERE {
                self.positions.clear();
                return;
            }
        }
    }

    /// Updates the view to the present `rows`, and returns the changes. Returns `None` if they are
    /// unknown or too many; the view must then be reset.
    pub(crate) fn advance(
        &mut self,
        table: &BlockTable,
        rows: &[Row],
        changes: &mut Changes,
    ) -> Option<()> {
        changes.positions.clear();
        changes.words.clear();
        let edits = table.edits().since(self.seen)?;
        if self.positions.is_empty() {
            return None;
        }
        self.change_rows(rows, &mut changes.positions)?;
        let Changes { positions, words } = changes;
        let words_max = rows.len() * self.stride * size_of::<i32>() / (2 * WORD_COST_BYTES);
        let mut note = |position: usize, from: usize, to: usize| {
            let first = position * self.stride;
            for word in (first + from) / WORD_ENTRIES..(first + to).div_ceil(WORD_ENTRIES) {
                words.push(u32::try_from(word).ok()?);
            }
            (words.len() <= words_max).then_some(())
        };
        for &position in positions.iter() {
            note(position, 0, self.stride)?;
        }
        for Edit { row, from, to } in edits {
            let position = self.positions[row.index()];
            let to = to.min(self.stride);
            if from < to
                && position != NOWHERE
                && positions.binary_search(&(position as usize)).is_err()
            {
                note(position as usize, from, to)?;
            }
        }
        changes.words.sort_unstable();
        changes.words.dedup();
        self.seen = table.edits().seal();
        Some(())
    }

    /// Assigns `rows` to the positions, and lists the positions whose row changed.
    fn change_rows(&mut self, rows: &[Row], changed: &mut Vec<usize>) -> Option<()> {
        if self.rows == rows {
            return Some(());
        }
        let kept = rows.len().min(self.rows.len());
        changed.extend((0..kept).filter(|&position| self.rows[position] != rows[position]));
        for &position in changed.iter() {
            self.positions[self.rows[position].index()] = NOWHERE;
        }
        for row in &self.rows[kept..] {
            self.positions[row.index()] = NOWHERE;
        }
        changed.extend(kept..rows.len());
        self.rows.truncate(kept);
        for &position in changed.iter() {
            let row = rows[position];
            match self.rows.get_mut(position) {
                Some(old) => *old = row,
                None => self.rows.push(row),
            }
            let place = &mut self.positions[row.index()];
            if std::mem::replace(place, u32::try_from(position).ok()?) != NOWHERE {
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

/// Copies the first columns of `row`, as many as fit in `to`.
pub(crate) fn copy_row(table: &BlockTable, row: Row, to: &mut [i32]) {
    match table.row(row).ok().and_then(|source| source.get(..to.len())) {
        Some(source) => to.copy_from_slice(source),
        None => to.fill(-1),
    }
}

/// Copies word `word` of the view of `rows`; entries beyond the view's end are -1.
pub(crate) fn copy_word(
    table: &BlockTable,
    rows: &[Row],
    stride: usize,
    word: u32,
    to: &mut [i32],
) {
    let first = word as usize * WORD_ENTRIES;
    let (mut position, mut column) = (first / stride, first % stride);
    let mut rest = to;
    while !rest.is_empty() {
        // Up to the end of the row. A word may extend over several rows.
        let count = rest.len().min(stride - column);
        let (now, later) = rest.split_at_mut(count);
        let source = rows.get(position).and_then(|row| table.row(*row).ok());
        match source.and_then(|source| source.get(column..column + count)) {
            Some(source) => now.copy_from_slice(source),
            None => now.fill(-1),
        }
        (position, column, rest) = (position + 1, 0, later);
    }
}
