//! Rows of tables, by number.

use kv_stage::Row;

pub(crate) fn row_at(index: usize) -> Row {
    Row::new(u32::try_from(index).unwrap())
}

pub(crate) fn rows_at(indices: &[usize]) -> Vec<Row> {
    indices.iter().copied().map(row_at).collect()
}
