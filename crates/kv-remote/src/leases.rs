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
    /// Of the host tier, that all of them pin.
    host_bytes: u64,
    counts: LeaseCounts,
}

/// A lease of slots, of blocks of the host tier, or of both.
#[derive(Debug)]
pub(crate) struct Lease {
    reader: ReaderId,
    deadline: Duration,
    loans: Vec<LoanId>,
    /// The slots that it pins, in order.
    slots: Vec<u64>,
    hosts: Vec<HostLoan>,
}

/// What is lent to a reader, before it has a lease of it. To be [given back](Lent::give_back) or granted.
#[derive(Debug, Default)]
pub(crate) struct Lent {
    pub(crate) loans: Vec<Loan>,
    pub(crate) hosts: Vec<HostLoan>,
}

impl Lent {
    pub(crate) fn give_back(self, pool: &BlockPool) {
        self.loans.iter().for_each(|loan| drop(pool.end_loan(loan.id)));
    }
}

impl Lease {
    /// Whether it pins all slots of a range.
    pub(crate) fn covers_slots(&self, mut slots: std::ops::RangeInclusive<u64>) -> bool {
        slots.all(|slot| self.slots.binary_search(&slot).is_ok())
    }

    /// Whether it pins all blocks of the host tier in a range of their addresses.
    pub(crate) fn covers_host(&self, addresses: &Range<u64>) -> bool {
        let (mut next, end) = (addresses.start, addresses.end);
        loop {
            // Blocks side by side may be of several loans.
            let covered = self.hosts.iter().find_map(|host| host.covered(next));
            match covered {
                Some(covered) if covered >= end => return true,
                Some(covered) => next = covered,
                None => return false,
            }
        }
    }

    /// Gives back what it pins.
    fn give_back(self, pool: &BlockPool) {
        // The loans are open as long as the lease is, and the host's end with it.
        self.loans.into_iter().for_each(|loan| drop(pool.end_loan(loan)));
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
        Lent { loans, hosts }: Lent,
    ) -> Option<LeaseId> {
        let number = loans.first().map(|loan| loan.id.number());
        let number = number.or_else(|| hosts.first().map(HostLoan::number))?;
        let blocks = loans.iter().flat_map(|loan| &loan.blocks);
        let mut slots: Vec<_> = blocks.map(|at| at.id.index() as u64).collect();
        slots.sort_unstable();
        let loans = loans.into_iter().map(|loan| loan.id).collect();
        self.host_bytes += hosts.iter().map(HostLoan::bytes).sum::<u64>();
        self.open.insert(number, Lease { reader, deadline, loans, slots, hosts });
        self.by_deadline.insert((deadline, number));
        self.counts.granted += 1;
        Some(LeaseId(number))
    }

    /// Bytes of the host tier that open leases pin, each as often as it is pinned.
    pub(crate) fn host_bytes(&self) -> u64 {
        self.host_bytes
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

    fn take(&mut self, number: u64, pool: &BlockPool) -> bool {
        let Some(lease) = self.open.remove(&number) else { return false };
        self.by_deadline.remove(&(lease.deadline, number));
        self.host_bytes -= lease.hosts.iter().map(HostLoan::bytes).sum::<u64>();
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
