//! The leases of a node's readers: each ends once, by its reader, by the reader's end, or by time (H30).

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::time::Duration;

use kv_manager::HostLoan;
use kv_pool::BlockPool;
use kv_pool::loan::{Loan, LoanId};

use crate::message::LeaseId;

/// Who reads: a connection, or a thread of the same process.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ReaderId(pub u64);

/// Leases that have ended, by what has ended them, and those that have not.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct LeaseCounts {
    /// Leases that were given.
    pub granted: u64,
    /// Ended by their readers.
    pub returned: u64,
    /// Ended because their reader's connection has ended.
    pub cancelled: u64,
    /// Ended because their time has come.
    pub expired: u64,
    /// Not ended.
    pub open: u64,
}

/// The open leases, each by the number of a loan, which no other one of the process has.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    open: HashMap<u64, Lease>,
    by_deadline: BTreeSet<(Duration, u64)>,
    counts: LeaseCounts,
}

/// A lease of slots, of blocks of the host tier, or of both.
#[derive(Debug)]
pub(crate) struct Lease {
    reader: ReaderId,
    deadline: Duration,
    loan: Option<LoanId>,
    /// The slots that it pins, in order.
    slots: Vec<u64>,
    host: Option<HostLoan>,
}

impl Lease {
    /// Whether it pins all slots of a range.
    pub(crate) fn covers_slots(&self, mut slots: std::ops::RangeInclusive<u64>) -> bool {
        slots.all(|slot| self.slots.binary_search(&slot).is_ok())
    }

    /// Whether it pins all blocks of the host tier in a range of their addresses.
    pub(crate) fn covers_host(&self, addresses: &Range<u64>) -> bool {
        self.host.as_ref().is_some_and(|host| host.covers(addresses))
    }

    /// Gives back what it pins.
    fn give_back(self, pool: &BlockPool) {
        // The loan is open as long as the lease is, and the host's ends with it.
        self.loan.into_iter().for_each(|loan| drop(pool.end_loan(loan)));
    }
}

impl Leases {
    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    pub(crate) fn counts(&self) -> LeaseCounts {
        LeaseCounts { open: self.open.len() as u64, ..self.counts }
    }

    /// Notes what is lent to a reader until a deadline; none if nothing is.
    pub(crate) fn grant(
        &mut self,
        reader: ReaderId,
        deadline: Duration,
        (loan, host): (Option<&Loan>, Option<HostLoan>),
    ) -> Option<LeaseId> {
        let number = loan.map(|loan| loan.id.number());
        let number = number.or_else(|| host.as_ref().map(HostLoan::number))?;
        let blocks = loan.iter().flat_map(|loan| &loan.blocks);
        let mut slots: Vec<_> = blocks.map(|at| at.id.index() as u64).collect();
        slots.sort_unstable();
        let lease = Lease { reader, deadline, loan: loan.map(|loan| loan.id), slots, host };
        self.open.insert(number, lease);
        self.by_deadline.insert((deadline, number));
        self.counts.granted += 1;
        Some(LeaseId(number))
    }

    /// A lease, if it is its reader's and is in force.
    pub(crate) fn get(
        &self,
        (reader, lease): (ReaderId, LeaseId),
        now: Duration,
    ) -> Option<&Lease> {
        let lease = self.open.get(&lease.0).filter(|lease| lease.reader == reader)?;
        (lease.deadline > now).then_some(lease)
    }

    /// Adds blocks of the host tier to a lease of a reader that has none; false if it has ended.
    pub(crate) fn extend(&mut self, (reader, lease): (ReaderId, LeaseId), host: HostLoan) -> bool {
        let lease = self.open.get_mut(&lease.0).filter(|lease| lease.reader == reader);
        let Some(lease) = lease else { return false };
        lease.host = Some(host);
        true
    }

    fn take(&mut self, number: u64, pool: &BlockPool) -> bool {
        let Some(lease) = self.open.remove(&number) else { return false };
        self.by_deadline.remove(&(lease.deadline, number));
        lease.give_back(pool);
        true
    }

    /// Ends a lease of a reader; whether there was one.
    pub(crate) fn end(&mut self, reader: ReaderId, lease: LeaseId, pool: &BlockPool) -> bool {
        if self.open.get(&lease.0).is_none_or(|of| of.reader != reader) {
            return false;
        }
        self.counts.returned += 1;
        self.take(lease.0, pool)
    }

    /// Ends all leases of a reader that is gone.
    pub(crate) fn end_reader(&mut self, reader: ReaderId, pool: &BlockPool) {
        let gone = self.open.iter().filter(|(_, lease)| lease.reader == reader);
        for number in gone.map(|(number, _)| *number).collect::<Vec<_>>() {
            self.counts.cancelled += 1;
            self.take(number, pool);
        }
    }

    /// Ends the leases whose time has come. Their readers find out by what they have read.
    pub(crate) fn end_overdue(&mut self, pool: &BlockPool, now: Duration) {
        while let Some(&(deadline, number)) = self.by_deadline.first()
            && deadline <= now
        {
            self.counts.expired += 1;
            self.take(number, pool);
        }
    }
}
