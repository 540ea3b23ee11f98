//! The leases of a node's readers: each ends once, by its reader, by the reader's end, or by time (H30).

use std::collections::{BTreeSet, HashMap};
use std::mem;
use std::net::{IpAddr, Ipv6Addr};
use std::ops::Range;
use std::time::Duration;

use kv_pool::{BlockId, BlockPool, Loan, LoanId, guard};
use kv_tier::HostLoan;

use crate::message::LeaseId;

/// Who reads: a connection, or a thread of the same process.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ReaderId(pub u64);

/// For whom something is pinned. What one host holds is counted together, however many connections it has, and so is what all offers of
/// this process do.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum PeerHost {
    /// This host, by a Unix socket.
    Local,
    /// An address; of version 6, the network of the host, which may have as many addresses as it likes.
    Net(IpAddr),
    /// The sequences that this process offers.
    Offers,
}

impl PeerHost {
    pub(crate) fn of(address: IpAddr) -> Self {
        // This host has as many addresses of its own as it likes.
        if address.to_canonical().is_loopback() {
            return Self::Local;
        }
        Self::Net(match address.to_canonical() {
            IpAddr::V4(address) => address.into(),
            IpAddr::V6(address) => {
                Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into()
            }
        })
    }
}

/// What a reader may hold yet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Left {
    pub(crate) leases: usize,
    pub(crate) slots: usize,
    pub(crate) host_bytes: u64,
}

/// What the open leases of a host hold.
#[derive(Debug, Default)]
struct Held {
    leases: usize,
    /// How often each slot is pinned.
    slots: HashMap<u64, u32>,
    host_bytes: u64,
}

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
    /// Where the readers of connections are, and which are offers. Others of this process are not listed.
    readers: HashMap<ReaderId, PeerHost>,
    held: HashMap<PeerHost, Held>,
    /// Of the host tier, that all of them pin.
    host_bytes: u64,
    counts: LeaseCounts,
}

/// A lease of slots, of blocks of the host tier, or of both.
#[derive(Debug)]
pub(crate) struct Lease {
    reader: ReaderId,
    host: Option<PeerHost>,
    deadline: Duration,
    loans: Vec<LoanId>,
    /// The slots that it pins, in order.
    slots: Vec<u64>,
    hosts: Vec<HostLoan>,
}

/// What is lent to a reader, before it has a lease of it. What was not [granted](Leases::grant) is given back when it is dropped, also by
/// a panic of the host's memory.
#[derive(Debug)]
pub(crate) struct Lent<'a> {
    pub(crate) pool: &'a BlockPool,
    pub(crate) loans: Vec<Loan>,
    pub(crate) hosts: Vec<HostLoan>,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        let end = || self.loans.iter().for_each(|loan| _ = self.pool.end_loan(loan.id));
        guard!("remote.ends-what-is-not-granted", end());
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
                None => return guard!("remote.reads-the-tier-under-a-lease", false, else true),
            }
        }
    }

    fn host_bytes(&self) -> u64 {
        self.hosts.iter().map(HostLoan::bytes).sum()
    }

    /// Gives back what it pins.
    fn give_back(self, pool: &BlockPool) {
        // The loans are open as long as the lease is, and the host's end with it.
        self.loans.into_iter().for_each(|loan| _ = pool.end_loan(loan));
        guard!("remote.returns-what-is-lent", drop(self.hosts), else mem::forget(self.hosts));
    }
}

impl Leases {
    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    pub(crate) fn counts(&self) -> LeaseCounts {
        LeaseCounts { open: self.open.len() as u64, ..self.counts }
    }

    /// Has what a reader holds counted with what others of its host do.
    pub(crate) fn join(&mut self, reader: ReaderId, host: PeerHost) {
        self.readers.insert(reader, host);
    }

    /// The host of a reader; none for a reader of this process that is no offer.
    pub(crate) fn host(&self, reader: ReaderId) -> Option<PeerHost> {
        self.readers.get(&reader).copied()
    }

    /// Leases, slots, and bytes of the host tier that a host holds.
    pub(crate) fn held(&self, host: PeerHost) -> Left {
        let held = self.held.get(&host);
        let of = |held: &Held| Left {
            leases: held.leases,
            slots: held.slots.len(),
            host_bytes: held.host_bytes,
        };
        held.map_or(Left { leases: 0, slots: 0, host_bytes: 0 }, of)
    }

    /// Whether the host of a reader pins a slot.
    pub(crate) fn pins(&self, reader: ReaderId, slot: BlockId) -> bool {
        let held = self.host(reader).and_then(|host| self.held.get(&host));
        held.is_some_and(|held| held.slots.contains_key(&(slot.index() as u64)))
    }

    /// Slots of loans that the host of a reader does not pin.
    pub(crate) fn more(&self, reader: ReaderId, loans: &[Loan]) -> usize {
        let blocks = loans.iter().flat_map(|loan| &loan.blocks);
        blocks.filter(|at| !self.pins(reader, at.id)).count()
    }

    /// Notes what is lent to a reader until a deadline; none if nothing is.
    pub(crate) fn grant(
        &mut self,
        reader: ReaderId,
        deadline: Duration,
        mut lent: Lent<'_>,
    ) -> Option<LeaseId> {
        let (loans, hosts) = (mem::take(&mut lent.loans), mem::take(&mut lent.hosts));
        let number = loans.first().map(|loan| loan.id.0);
        let number = number.or_else(|| hosts.first().map(HostLoan::number))?;
        let blocks = loans.iter().flat_map(|loan| &loan.blocks);
        let mut slots: Vec<_> = blocks.map(|at| at.id.index() as u64).collect();
        slots.sort_unstable();
        let loans = loans.into_iter().map(|loan| loan.id).collect();
        let host = self.host(reader);
        let lease = Lease { reader, host, deadline, loans, slots, hosts };
        self.host_bytes += lease.host_bytes();
        if let Some(host) = host {
            let held = self.held.entry(host).or_default();
            held.leases += 1;
            lease.slots.iter().for_each(|slot| *held.slots.entry(*slot).or_default() += 1);
            held.host_bytes += lease.host_bytes();
        }
        self.open.insert(number, lease);
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
        let is_in_force = lease.deadline > now;
        guard!("remote.holds-leases-to-their-time", is_in_force, else true).then_some(lease)
    }

    fn take(&mut self, number: u64, pool: &BlockPool) -> bool {
        let Some(lease) = self.open.remove(&number) else { return false };
        self.by_deadline.remove(&(lease.deadline, number));
        self.host_bytes -= lease.host_bytes();
        if let Some(host) = lease.host
            && let Some(held) = self.held.get_mut(&host)
        {
            held.leases -= 1;
            held.host_bytes -= lease.host_bytes();
            for slot in &lease.slots {
                if let Some(count) = held.slots.get_mut(slot) {
                    *count -= 1;
                    if *count == 0 {
                        held.slots.remove(slot);
                    }
                }
            }
            if held.leases == 0 {
                self.held.remove(&host);
            }
        }
        lease.give_back(pool);
        true
    }

    /// Ends a lease of a reader; whether there was one.
    pub(crate) fn end(&mut self, reader: ReaderId, lease: LeaseId, pool: &BlockPool) -> bool {
        let is_of_reader = |of: &Lease| guard!("remote.ends-leases-for-their-reader", of.reader == reader, else true);
        if !self.open.get(&lease.0).is_some_and(is_of_reader) {
            return false;
        }
        self.counts.returned += 1;
        self.take(lease.0, pool)
    }

    /// Ends all leases of a reader that is gone.
    pub(crate) fn end_reader(&mut self, reader: ReaderId, pool: &BlockPool) {
        self.readers.remove(&reader);
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

#[cfg(test)]
mod tests {
    use kv_pool::{BlockHash, Naming, PoolConfig, Tier};

    use super::*;

    #[test]
    fn a_host_pins_a_slot_as_long_as_a_lease_of_its_readers_does() {
        let pool = BlockPool::new(&PoolConfig::primary_only(2)).unwrap();
        let names = [1, 2].map(BlockHash::from_u128);
        drop(pool.claim(2).unwrap().register(&names, Naming::default()).unwrap());
        let (mut leases, host) = (Leases::default(), PeerHost::Local);
        let [one, two] = [ReaderId(1), ReaderId(2)];
        leases.join(one, host);
        leases.join(two, host);
        let lend = |names: &[BlockHash]| pool.lend(names, Tier::Primary).unwrap();
        let grant = |leases: &mut Leases, reader, loans: Vec<Loan>| {
            let lent = Lent { pool: &pool, loans, hosts: Vec::new() };
            leases.grant(reader, Duration::from_secs(1), lent).unwrap()
        };
        let both = lend(&names);
        let [first, second] = [0, 1].map(|at| both.blocks[at].id);
        assert_eq!(leases.more(one, std::slice::from_ref(&both)), 2);
        let of_both = grant(&mut leases, one, vec![both]);
        let again = lend(&names[..1]);
        assert_eq!(leases.more(two, std::slice::from_ref(&again)), 0, "the host pins it");
        let of_first = grant(&mut leases, two, vec![again]);
        let held = |leases: &Leases| {
            let left = leases.held(host);
            (left.leases, left.slots, leases.pins(one, first), leases.pins(two, second))
        };
        assert_eq!(held(&leases), (2, 2, true, true));
        assert!(leases.end(one, of_both, &pool));
        assert_eq!(held(&leases), (1, 1, true, false));
        assert!(leases.end(two, of_first, &pool));
        assert_eq!((held(&leases), leases.held.len()), ((0, 0, false, false), 0));
    }

    #[test]
    fn all_addresses_of_a_network_are_one_host() {
        let of = |text: &str| PeerHost::of(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:2:ffff::9"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_eq!((of("127.0.0.1"), of("::1")), (PeerHost::Local, PeerHost::Local));
    }
}
