//! The leases of a node's readers: each ends once, by its reader, by the reader's end, or by time (H30).

use std::collections::HashMap;
use std::time::Duration;

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

/// The open leases. Each is a loan of the pool, by the loan's number.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    open: HashMap<u64, Lease>,
    counts: LeaseCounts,
}

#[derive(Debug)]
struct Lease {
    reader: ReaderId,
    deadline: Duration,
    /// The slots that it pins, in order.
    slots: Vec<u64>,
}

impl Leases {
    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    pub(crate) fn counts(&self) -> LeaseCounts {
        LeaseCounts { open: self.open.len() as u64, ..self.counts }
    }

    /// Notes the loan of a reader.
    pub(crate) fn grant(&mut self, reader: ReaderId, loan: &Loan) -> LeaseId {
        let mut slots: Vec<_> = loan.blocks.iter().map(|at| at.id.index() as u64).collect();
        slots.sort_unstable();
        let number = loan.id.number();
        self.open.insert(number, Lease { reader, deadline: loan.deadline, slots });
        self.counts.granted += 1;
        LeaseId(number)
    }

    /// Whether a lease is its reader's, is in force, and pins all slots of a range.
    pub(crate) fn covers(
        &self,
        (reader, lease): (ReaderId, LeaseId),
        mut slots: std::ops::RangeInclusive<u64>,
        now: Duration,
    ) -> Option<bool> {
        let lease = self.open.get(&lease.0).filter(|lease| lease.reader == reader)?;
        let covers = slots.all(|slot| lease.slots.binary_search(&slot).is_ok());
        (lease.deadline > now).then_some(covers)
    }

    /// Ends a lease of a reader; whether there was one.
    pub(crate) fn end(&mut self, reader: ReaderId, lease: LeaseId, pool: &BlockPool) -> bool {
        if self.open.get(&lease.0).is_none_or(|of| of.reader != reader) {
            return false;
        }
        self.open.remove(&lease.0);
        self.counts.returned += 1;
        // The loan is open as long as the lease is.
        drop(pool.end_loan(LoanId::from_number(lease.0)));
        true
    }

    /// Ends all leases of a reader that is gone.
    pub(crate) fn end_reader(&mut self, reader: ReaderId, pool: &BlockPool) {
        let gone = self.open.extract_if(|_, lease| lease.reader == reader);
        for (number, _) in gone {
            self.counts.cancelled += 1;
            drop(pool.end_loan(LoanId::from_number(number)));
        }
    }

    /// Ends the leases whose time has come. Their readers find out by what they have read.
    pub(crate) fn end_overdue(&mut self, pool: &BlockPool) {
        for loan in pool.end_overdue_loans() {
            if self.open.remove(&loan.number()).is_some() {
                self.counts.expired += 1;
            }
        }
    }
}
