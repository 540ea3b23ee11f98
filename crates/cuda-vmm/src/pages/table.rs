//! The book of one reservation: the page at each index, and its state.

use cuda_driver::guard;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::gate::UsersUnknown;
use crate::pages::{MapRefusal, NotMapped, Page, PageId, RetireError};
use crate::rest::Quiescence;

/// The state of one page of a reservation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PageState {
    /// No page is mapped.
    Free,
    /// A physical page is mapped, with access granted.
    Mapped(PageId),
    /// A physical page is mapped that may still be in use, but gets no new users.
    Retiring(PageId),
    /// A physical page is mapped that the driver refused to unmap.
    Quarantined(PageId),
}

/// An entry of the book. A page without an entry is free. The only transitions are free to mapped,
/// mapped to retiring, retiring to free or quarantined, and quarantined to free.
#[derive(Debug)]
enum Occupant {
    Mapped(Page),
    Retiring(Page),
    Quarantined(Page),
}

impl Occupant {
    fn state(&self) -> PageState {
        match self {
            Self::Mapped(page) => PageState::Mapped(page.id()),
            Self::Retiring(page) => PageState::Retiring(page.id()),
            Self::Quarantined(page) => PageState::Quarantined(page.id()),
        }
    }

    /// The reason why no other page can be mapped here.
    fn refusal(&self, index: u64) -> MapRefusal {
        match self {
            Self::Mapped(held) => MapRefusal::Occupied { index, held: held.id() },
            Self::Retiring(_) => MapRefusal::Retiring { index },
            Self::Quarantined(_) => MapRefusal::Quarantined { index },
        }
    }

    fn into_page(self) -> Page {
        match self {
            Self::Mapped(page) | Self::Retiring(page) | Self::Quarantined(page) => page,
        }
    }
}

/// Ranges that were retired together, and their possible users.
#[derive(Debug)]
pub(crate) struct Retirement {
    pub(crate) ranges: Vec<Range<u64>>,
    pub(crate) users: Arc<Quiescence>,
}

impl Retirement {
    pub(crate) fn indices(&self) -> impl Iterator<Item = u64> + '_ {
        self.ranges.iter().cloned().flatten()
    }
}

/// Identifies one retirement of a table.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct Ticket(u64);

/// Number of pages of a reservation by state.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct PageCounts {
    pub(crate) mapped: u64,
    pub(crate) retiring: u64,
    pub(crate) quarantined: u64,
}

/// # Invariants
/// Every page in `retirements` has an occupant in the state `Retiring`, and the reverse, except
/// pages that are being unmapped; `counts` counts the occupants.
#[derive(Debug, Default)]
pub(crate) struct Table {
    occupants: BTreeMap<u64, Occupant>,
    retirements: BTreeMap<Ticket, Arc<Retirement>>,
    next_ticket: u64,
    counts: PageCounts,
}

impl Table {
    pub(crate) fn state(&self, index: u64) -> PageState {
        self.occupants.get(&index).map_or(PageState::Free, Occupant::state)
    }

    pub(crate) fn counts(&self) -> PageCounts {
        self.counts
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.occupants.is_empty()
    }

    /// Whether `page` must still be mapped at `index`: false if it already is.
    pub(crate) fn wants(&self, index: u64, page: PageId) -> Result<bool, MapRefusal> {
        match self.occupants.get(&index) {
            None => Ok(true),
            Some(Occupant::Mapped(held)) if held.id() == page => Ok(false),
            Some(occupant) => Err(occupant.refusal(index)),
        }
    }

    /// Whether all of `range` is free.
    pub(crate) fn check_free(&self, range: Range<u64>) -> Result<(), MapRefusal> {
        match self.occupants.range(range).next() {
            None => Ok(()),
            Some((&index, occupant)) => Err(occupant.refusal(index)),
        }
    }

    /// Free to mapped.
    pub(crate) fn set_mapped(&mut self, index: u64, page: Page) {
        let before = self.occupants.insert(index, Occupant::Mapped(page));
        assert!(before.is_none(), "page {index} was mapped over {before:?}");
        self.counts.mapped += 1;
    }

    /// Free to quarantined, for a page that could not be unmapped after a failed mapping.
    pub(crate) fn set_quarantined(&mut self, index: u64, page: Page) {
        let before = self.occupants.insert(index, Occupant::Quarantined(page));
        assert!(before.is_none(), "page {index} went into quarantine over {before:?}");
        self.counts.quarantined += 1;
    }

    /// Whether all of `range` is mapped.
    pub(crate) fn check_mapped(&self, range: Range<u64>) -> Result<(), NotMapped> {
        let mut occupants = self.occupants.range(range.clone());
        for index in range {
            match occupants.next() {
                Some((&at, Occupant::Mapped(_))) if at == index => {}
                _ => return Err(NotMapped { index }),
            }
        }
        Ok(())
    }

    /// Mapped to retiring, for all of `range` or nothing. `users` is called under the book's lock,
    /// so that no new user finds the pages meanwhile. If it refuses, nothing is retired.
    pub(crate) fn retire(
        &mut self,
        range: Range<u64>,
        users: impl FnOnce() -> Result<Quiescence, UsersUnknown>,
    ) -> Result<Ticket, RetireError> {
        let range = range.start..range.end.max(range.start);
        self.check_mapped(range.clone())?;
        let users = Arc::new(users()?);
        self.set_retiring(range.clone());
        Ok(self.add_retirement(vec![range], users))
    }

    /// Mapped to retiring, for everything that is mapped.
    pub(crate) fn retire_all(&mut self, users: impl FnOnce() -> Quiescence) {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (&index, occupant) in &self.occupants {
            match (occupant, ranges.last_mut()) {
                (Occupant::Mapped(_), Some(last)) if last.end == index => last.end += 1,
                (Occupant::Mapped(_), _) => ranges.push(index..index + 1),
                _ => {}
            }
        }
        for range in &ranges {
            self.set_retiring(range.clone());
        }
        if !ranges.is_empty() {
            self.add_retirement(ranges, Arc::new(users()));
        }
    }

    fn set_retiring(&mut self, range: Range<u64>) {
        range.for_each(|index| self.begin_unmapping(index));
    }

    /// Mapped to retiring, for a page that is retired or about to be unmapped.
    pub(crate) fn begin_unmapping(&mut self, index: u64) {
        let Some(occupant) = self.occupants.remove(&index) else { return };
        let occupant = match occupant {
            Occupant::Mapped(page) => {
                self.counts.mapped -= 1;
                self.counts.retiring += 1;
                Occupant::Retiring(page)
            }
            occupant => occupant,
        };
        self.occupants.insert(index, occupant);
    }

    /// Mapped to retiring, for everything mapped in several ranges.
    pub(crate) fn retire_ranges(&mut self, ranges: Vec<Range<u64>>, users: Arc<Quiescence>) {
        for index in ranges.iter().cloned().flatten() {
            self.begin_unmapping(index);
        }
        self.add_retirement(ranges, users);
    }

    fn add_retirement(&mut self, ranges: Vec<Range<u64>>, users: Arc<Quiescence>) -> Ticket {
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        self.retirements.insert(ticket, Arc::new(Retirement { ranges, users }));
        ticket
    }

    pub(crate) fn retirement(&self, ticket: Ticket) -> Option<Arc<Retirement>> {
        self.retirements.get(&ticket).cloned()
    }

    pub(crate) fn retirements(&self) -> Vec<(Ticket, Arc<Retirement>)> {
        self.retirements.iter().map(|(&ticket, entry)| (ticket, Arc::clone(entry))).collect()
    }

    /// Takes a retirement out to complete it; `None` if another thread has taken it.
    pub(crate) fn claim(&mut self, ticket: Ticket) -> Option<Arc<Retirement>> {
        guard!(
            "vmm.retirement-once",
            self.retirements.remove(&ticket),
            else self.retirements.get(&ticket).cloned()
        )
    }

    /// Retiring or quarantined to free: the page was unmapped.
    pub(crate) fn set_free(&mut self, index: u64) -> Option<Page> {
        let occupant = self.occupants.remove(&index)?;
        match occupant {
            Occupant::Mapped(_) => self.counts.mapped -= 1,
            Occupant::Retiring(_) => self.counts.retiring -= 1,
            Occupant::Quarantined(_) => self.counts.quarantined -= 1,
        }
        Some(occupant.into_page())
    }

    /// Retiring to quarantined: the page could not be unmapped.
    pub(crate) fn set_stuck(&mut self, index: u64) {
        if let Some(page) = self.set_free(index) {
            self.set_quarantined(index, page);
        }
    }

    pub(crate) fn quarantined(&self) -> Vec<u64> {
        let stuck = |occupant: &Occupant| matches!(occupant, Occupant::Quarantined(_));
        self.occupants
            .iter()
            .filter(|(_, occupant)| stuck(occupant))
            .map(|(&index, _)| index)
            .collect()
    }

    /// Empties the book and returns the remaining pages.
    pub(crate) fn take_rest(&mut self) -> Vec<Page> {
        self.retirements.clear();
        self.counts = PageCounts::default();
        std::mem::take(&mut self.occupants).into_values().map(Occupant::into_page).collect()
    }
}
