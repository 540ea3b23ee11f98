//! The members of a tier: each has a place, a thread, and what it is owed when it comes back.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use kv_pool::guard;

use super::holders::MEMBERS_MAX;
use super::link::Order;
use crate::members::{Member, replicas};
use crate::message::Block;

/// Names of members that have left which are remembered.
const DEPARTED_MAX: usize = 1024;

/// Who is there, and who was.
#[derive(Debug, Default)]
pub(super) struct Roster {
    seats: Vec<Option<Seat>>,
    /// Threads of members that have left, each with its place, which is nobody else's before it has ended.
    leaving: Vec<(usize, JoinHandle<()>)>,
    /// Members that have left, and whether there is something that they were not told to forget.
    departed: HashMap<String, bool>,
    /// Names of members that have left were given up: whoever comes may have been one of them.
    owes_strangers: bool,
    current: Arc<Current>,
    /// The tier is gone: nobody joins any more.
    has_ended: bool,
}

#[derive(Debug)]
struct Seat {
    member: Member,
    orders: Sender<Order>,
    /// Set when the member leaves: its thread gives up what it was told and has not begun.
    left: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// The members that there are, each with its place.
#[derive(Debug, Default)]
pub(super) struct Current {
    members: Vec<Member>,
    places: Vec<usize>,
}

impl Current {
    /// The places of the members, those first that want a block most: as many as keep it come first of all.
    pub(super) fn ranked(&self, block: Block) -> impl Iterator<Item = usize> + '_ {
        let ranked = replicas(&self.members, block, usize::MAX);
        ranked.into_iter().filter_map(|at| self.places.get(at).copied())
    }

    /// The places of the members that keep a block.
    pub(super) fn keepers(&self, block: Block, count: usize) -> Vec<usize> {
        let keepers = replicas(&self.members, block, count);
        keepers.into_iter().filter_map(|at| self.places.get(at).copied()).collect()
    }

    pub(super) fn members(&self) -> &[Member] {
        &self.members
    }
}

impl Roster {
    pub(super) fn current(&self) -> Arc<Current> {
        Arc::clone(&self.current)
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Sends an order; it comes back if nobody is at the place.
    pub(super) fn send(&self, place: usize, order: Order) -> Result<(), Order> {
        match self.seats.get(place) {
            Some(Some(seat)) => seat.orders.send(order).map_err(|unsent| unsent.0),
            _ => Err(order),
        }
    }

    /// Has all members leave that are not in the list; those of the list that are not there.
    pub(super) fn leave_but(&mut self, members: &[Member]) -> Vec<Member> {
        for (place, seat) in self.seats.iter_mut().enumerate() {
            let Some(left) = seat.take_if(|seat| !members.contains(&seat.member)) else { continue };
            // Without its sender, the thread ends when it has given up what it was told before.
            left.left.store(true, Ordering::Release);
            self.departed.entry(left.member.name).or_insert(false);
            self.leaving.push((place, left.thread));
        }
        if self.departed.len() > DEPARTED_MAX {
            self.departed.clear();
            self.owes_strangers = true;
        }
        let is_there = |member: &Member| self.seats.iter().flatten().any(|s| s.member == *member);
        let mut new: Vec<Member> = Vec::new();
        for member in members {
            if !is_there(member) && !new.contains(member) {
                new.push(member.clone());
            }
        }
        new
    }

    /// A place that is free, and whether the member is owed that it forgets everything.
    pub(super) fn free_place(&mut self, member: &Member) -> Option<(usize, bool)> {
        self.leaving.retain(|(_, thread)| !thread.is_finished());
        let is_free = |place: &usize| {
            let is_leaving = self.leaving.iter().any(|(of, _)| of == place);
            !is_leaving && self.seats.get(*place).is_none_or(Option::is_none)
        };
        let place = (0..MEMBERS_MAX).find(is_free)?;
        let owes = self.departed.get(&member.name).copied();
        Some((place, owes.unwrap_or(self.owes_strangers)))
    }

    pub(super) fn sit(
        &mut self,
        place: usize,
        member: Member,
        orders: Sender<Order>,
        (left, thread): (Arc<AtomicBool>, JoinHandle<()>),
    ) {
        if self.seats.len() <= place {
            self.seats.resize_with(place + 1, || None);
        }
        // From here on, its thread owes it.
        self.departed.remove(&member.name);
        if let Some(seat) = self.seats.get_mut(place) {
            *seat = Some(Seat { member, orders, left, thread });
        }
    }

    /// To be called when members have come or gone.
    pub(super) fn count_anew(&mut self) {
        let seats = self.seats.iter().enumerate();
        let seated = seats.filter_map(|(place, seat)| Some((seat.as_ref()?.member.clone(), place)));
        let (members, places) = seated.unzip();
        self.current = Arc::new(Current { members, places });
    }

    /// Tells all members what is forgotten. Those that have left are owed it when they come back.
    pub(super) fn tell_all(&mut self, order: impl Fn() -> Order) {
        guard!(
            "remote.owes-those-that-left",
            self.departed.values_mut().for_each(|owed| *owed = true)
        );
        for seat in self.seats.iter().flatten() {
            drop(seat.orders.send(order()));
        }
    }

    /// The thread of a member that has left ends, and there is something that it has not told it to forget. If the member is back
    /// already, it is told now.
    pub(super) fn note_unpaid(&mut self, name: &str) {
        match self.seats.iter().flatten().find(|seat| seat.member.name == name) {
            Some(seat) => drop(seat.orders.send(Order::Clear)),
            None => drop(self.departed.insert(name.to_owned(), true)),
        }
    }

    /// Ends all; the threads, which are to be joined.
    pub(super) fn end(&mut self) -> Vec<JoinHandle<()>> {
        self.has_ended = true;
        let seated = self.seats.drain(..).flatten().map(|seat| {
            seat.left.store(true, Ordering::Release);
            seat.thread
        });
        let leaving = self.leaving.drain(..).map(|(_, thread)| thread);
        let threads = seated.chain(leaving).collect();
        self.count_anew();
        threads
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Address;

    #[test]
    fn a_debt_stays_until_the_member_sits() {
        let member = Member { name: "a".to_owned(), address: Address::Unix("/nowhere".into()) };
        let mut roster = Roster::default();
        roster.departed.insert("a".to_owned(), false);
        assert_eq!(roster.free_place(&member), Some((0, false)));
        roster.tell_all(|| Order::Clear);
        // Its thread was not started; the next time, it is owed as before.
        assert_eq!(roster.free_place(&member), Some((0, true)));
        assert_eq!(roster.free_place(&member), Some((0, true)));
        let (orders, received) = std::sync::mpsc::channel();
        let (left, thread) = (Arc::<AtomicBool>::default(), std::thread::spawn(|| {}));
        roster.sit(0, member.clone(), orders, (Arc::clone(&left), thread));
        assert_eq!(roster.free_place(&member), Some((1, false)), "its thread owes it");
        // And what is forgotten from now on, it is told.
        roster.tell_all(|| Order::Clear);
        assert!(matches!(received.try_recv(), Ok(Order::Clear)));
        // One that leaves was told what came before, and is owed what comes behind.
        assert!(roster.leave_but(&[]).is_empty());
        assert!(left.load(Ordering::Acquire));
        roster.tell_all(|| Order::Clear);
        assert!(received.try_recv().is_err());
        assert_eq!(roster.free_place(&member).map(|(_, owes)| owes), Some(true));
    }

    #[test]
    fn of_more_names_than_are_remembered_every_newcomer_is_owed() {
        let member =
            |at: usize| Member { name: format!("{at}"), address: Address::Unix("/nowhere".into()) };
        let mut roster = Roster::default();
        for at in 0..=DEPARTED_MAX {
            assert_eq!(roster.free_place(&member(at)), Some((0, false)), "{at}");
            let (orders, _) = std::sync::mpsc::channel();
            let thread = std::thread::spawn(|| {});
            roster.sit(0, member(at), orders, (Arc::default(), thread));
            assert!(roster.leave_but(&[]).is_empty());
            while roster.leaving.iter().any(|(_, thread)| !thread.is_finished()) {
                std::thread::yield_now();
            }
        }
        assert!(roster.departed.is_empty());
        assert_eq!(roster.free_place(&member(3)), Some((0, true)));
    }
}
