//! Pages of the table that are to be written, and the stores that wait for that.

use std::collections::{HashMap, VecDeque};

/// Pages of the table that are not as they should be in the file. A page is written by one operation at a time, so that
/// an older one never comes later.
#[derive(Debug)]
pub(crate) struct Table<S> {
    pages: HashMap<u64, Page<S>>,
    /// Pages that are to be written and are not being written.
    next: VecDeque<u64>,
}

#[derive(Debug)]
struct Page<S> {
    dirty: bool,
    writing: bool,
    /// Stores whose entries the next write has.
    waiting: Vec<S>,
    /// Stores whose entries the open write has.
    written: Vec<S>,
}

impl<S> Default for Table<S> {
    fn default() -> Self {
        Self { pages: HashMap::new(), next: VecDeque::new() }
    }
}

impl<S> Table<S> {
    /// Has a page written, and a store wait for it.
    pub(crate) fn touch(&mut self, number: u64, store: Option<S>) {
        let page = self.pages.entry(number).or_insert_with(|| Page {
            dirty: false,
            writing: false,
            waiting: Vec::new(),
            written: Vec::new(),
        });
        page.waiting.extend(store);
        if !page.dirty {
            page.dirty = true;
            if !page.writing {
                self.next.push_back(number);
            }
        }
    }

    /// The next page to write. Its write has begun with this call.
    pub(crate) fn begin(&mut self) -> Option<u64> {
        let number = self.next.pop_front()?;
        let page = self.pages.get_mut(&number)?;
        (page.dirty, page.writing) = (false, true);
        page.written.append(&mut page.waiting);
        Some(number)
    }

    /// Notes that the write of a page has ended; the stores that waited for it.
    pub(crate) fn end(&mut self, number: u64) -> Vec<S> {
        let Some(page) = self.pages.get_mut(&number) else { return Vec::new() };
        let stores = std::mem::take(&mut page.written);
        page.writing = false;
        if page.dirty {
            self.next.push_back(number);
        } else {
            self.pages.remove(&number);
        }
        stores
    }

    /// Gives up the stores that wait for a write which has not begun. Their pages are to be written all the same.
    pub(crate) fn give_up(&mut self) -> Vec<S> {
        self.pages.values_mut().flat_map(|page| page.waiting.drain(..)).collect()
    }

    /// Stores that wait.
    pub(crate) fn stores_mut(&mut self) -> impl Iterator<Item = &mut S> {
        self.pages.values_mut().flat_map(|page| page.waiting.iter_mut().chain(&mut page.written))
    }

    /// Whether every page is as it should be.
    pub(crate) fn is_clean(&self) -> bool {
        self.pages.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_written_by_one_operation_at_a_time_and_stores_wait_for_the_one_that_has_them() {
        let mut table = Table::default();
        table.touch(3, Some('a'));
        table.touch(3, Some('b'));
        assert_eq!((table.begin(), table.begin()), (Some(3), None));
        table.touch(3, Some('c'));
        assert_eq!(table.begin(), None, "it is being written");
        assert_eq!(table.end(3), ['a', 'b']);
        assert_eq!(table.begin(), Some(3));
        assert_eq!((table.end(3), table.is_clean()), (vec!['c'], true));
    }

    #[test]
    fn pages_whose_stores_are_given_up_are_written_all_the_same() {
        let mut table = Table::default();
        table.touch(1, Some('a'));
        assert_eq!(table.begin(), Some(1));
        table.touch(1, Some('b'));
        table.touch(2, Some('c'));
        let mut gone = table.give_up();
        gone.sort_unstable();
        assert_eq!((gone, table.begin(), table.begin()), (vec!['b', 'c'], Some(2), None));
        assert_eq!((table.end(1), table.end(2)), (vec!['a'], vec![]));
        assert_eq!((table.begin(), table.end(1), table.is_clean()), (Some(1), vec![], true));
    }
}
