//! Which part of which slab is made next, and by whom. Without threads, memory and driver.

use std::collections::VecDeque;
use std::sync::Arc;

use cuda_driver::host_pages::{HostPagesError, PinError};

/// The slabs that are being made, and those that the owner has not taken yet. `P` is the memory of a
/// slab that is not pinned, `S` a pinned slab.
#[derive(Debug)]
pub(super) struct Schedule<P, S> {
    /// Parts of a slab that are populated one by one.
    pieces: u64,
    /// Slabs wanted.
    target: usize,
    /// # Invariants
    /// The owner has slabs `0..taken`. Each of `taken..opened` is listed once, in `making` or in
    /// `pinned`. No other slab is listed.
    taken: usize,
    opened: usize,
    /// In order, oldest first.
    making: VecDeque<Making<P>>,
    pinned: Vec<(usize, S)>,
    /// A slab was refused since the target was set: no slab is opened.
    refused: bool,
    serial_next: u64,
}

/// A slab that is being populated, and pinned after that.
#[derive(Debug)]
struct Making<P> {
    /// Tells it from a slab of the same number that was given up before.
    serial: u64,
    slab: usize,
    /// Taken out to be pinned.
    memory: Option<Arc<P>>,
    /// Pieces handed out, and those populated.
    begun: u64,
    ended: u64,
    refused: Option<HostPagesError>,
}

/// One piece of a slab to populate. The caller then drops `memory` and calls
/// [`ended`](Schedule::ended).
#[derive(Debug)]
pub(super) struct Piece<P> {
    pub(super) serial: u64,
    pub(super) piece: u64,
    pub(super) memory: Arc<P>,
}

/// A slab whose pieces have all ended, to be pinned. The caller then calls
/// [`settle`](Schedule::settle).
#[derive(Debug)]
pub(super) struct Whole<P> {
    pub(super) serial: u64,
    pub(super) memory: Arc<P>,
    /// A piece that was not populated.
    pub(super) refused: Option<HostPagesError>,
}

/// What a call takes out of the schedule, to be dropped without the lock: unmapping takes time.
#[derive(Debug)]
#[must_use]
pub(super) struct Unwanted<P, S> {
    _memory: Vec<Arc<P>>,
    _slabs: Vec<S>,
}

impl<P, S> Schedule<P, S> {
    pub(super) fn new(pieces: u64, target: usize) -> Self {
        Self {
            pieces,
            target,
            taken: 0,
            opened: 0,
            making: VecDeque::new(),
            pinned: Vec::new(),
            refused: false,
            serial_next: 0,
        }
    }

    /// Sets the number of slabs wanted, and gives up those beyond that the owner has not taken.
    /// Slabs that were refused are tried again.
    pub(super) fn resize(&mut self, target: usize) -> Unwanted<P, S> {
        self.target = target;
        self.refused = false;
        self.cut(target)
    }

    /// Whether no slab is being made, and none is to be opened.
    pub(super) fn is_over(&self) -> bool {
        self.making.is_empty() && (self.refused || self.opened >= self.target)
    }

    /// The next piece to populate, of the oldest slab that has one. If none has one, the next slab
    /// is opened.
    ///
    /// # Errors
    /// Those of `open`. No slab is opened then until the next [`resize`](Schedule::resize).
    pub(super) fn next(
        &mut self,
        open: impl FnOnce() -> Result<P, PinError>,
    ) -> Result<Option<Piece<P>>, PinError> {
        let pieces = self.pieces;
        if !self.making.iter().any(|making| making.begun < pieces) {
            if self.refused || self.opened >= self.target {
                return Ok(None);
            }
            let memory = open().inspect_err(|_| self.refused = true)?;
            self.making.push_back(Making {
                serial: self.serial_next,
                slab: self.opened,
                memory: Some(Arc::new(memory)),
                begun: 0,
                ended: 0,
                refused: None,
            });
            self.serial_next += 1;
            self.opened += 1;
        }
        let open = self.making.iter_mut().find(|making| making.begun < pieces);
        Ok(open.and_then(|making| {
            let memory = making.memory.clone()?;
            making.begun += 1;
            Some(Piece { serial: making.serial, piece: making.begun - 1, memory })
        }))
    }

    /// Notes that a piece was populated, or refused; returns the slab if it was the last piece.
    pub(super) fn ended(
        &mut self,
        serial: u64,
        populated: Result<(), HostPagesError>,
    ) -> Option<Whole<P>> {
        let pieces = self.pieces;
        // Otherwise the slab was given up meanwhile.
        let making = self.making.iter_mut().find(|making| making.serial == serial)?;
        making.ended += 1;
        making.refused = making.refused.or(populated.err());
        if making.ended < pieces {
            return None;
        }
        let memory = making.memory.take()?;
        Some(Whole { serial, memory, refused: making.refused })
    }

    /// Notes that a slab was pinned, or refused. A refusal gives up this slab and those after it.
    ///
    /// Returns the error, unless the slab was given up before.
    pub(super) fn settle(
        &mut self,
        serial: u64,
        pinned: Result<S, PinError>,
    ) -> (Option<PinError>, Unwanted<P, S>) {
        let mut unwanted = Unwanted { _memory: Vec::new(), _slabs: Vec::new() };
        let Some(place) = self.making.iter().position(|making| making.serial == serial) else {
            unwanted._slabs.extend(pinned.ok());
            return (None, unwanted);
        };
        match pinned {
            Ok(pinned) => {
                let slab = self.making.remove(place).map(|making| making.slab);
                self.pinned.extend(slab.map(|slab| (slab, pinned)));
                (None, unwanted)
            }
            Err(error) => {
                self.refused = true;
                let unwanted = self.cut(self.making[place].slab);
                (Some(error), unwanted)
            }
        }
    }

    /// Gives up the slabs from number `end` on, except those that the owner has taken.
    pub(super) fn cut(&mut self, end: usize) -> Unwanted<P, S> {
        let end = end.max(self.taken);
        self.opened = self.opened.min(end);
        let gone = self.making.iter().position(|making| making.slab >= end);
        let making = self.making.split_off(gone.unwrap_or(self.making.len()));
        let pinned = self.pinned.extract_if(.., |(slab, _)| *slab >= end);
        let slabs = pinned.map(|(_, pinned)| pinned).collect();
        Unwanted {
            _memory: making.into_iter().filter_map(|one| one.memory).collect(),
            _slabs: slabs,
        }
    }

    /// The pinned slabs that follow those that the owner has: they are its own from now on.
    pub(super) fn take_leading(&mut self) -> impl Iterator<Item = S> {
        std::iter::from_fn(|| {
            let place = self.pinned.iter().position(|(slab, _)| *slab == self.taken)?;
            self.taken += 1;
            Some(self.pinned.swap_remove(place).1)
        })
    }

    /// Whether [`take_leading`](Schedule::take_leading) has a slab to return.
    pub(super) fn has_leading(&self) -> bool {
        self.pinned.iter().any(|(slab, _)| *slab == self.taken)
    }

    /// Notes that the owner has given up its last slab, which is beyond the target.
    pub(super) fn give_back(&mut self) {
        // Nothing is listed: the target was set, and slabs beyond it were given up.
        debug_assert!(self.taken > self.target && self.opened == self.taken);
        self.taken -= 1;
        self.opened = self.taken;
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    const REFUSED: PinError = PinError::Pages(HostPagesError::Unsupported);

    /// Numbers from a seed (SplitMix64).
    struct Dice(u64);

    impl Dice {
        fn below(&mut self, end: u64) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z ^ (z >> 31)) % end
        }
    }

    /// What a thread holds between two calls.
    enum Held {
        Nothing,
        Piece(Piece<Rc<u64>>),
        Whole(Whole<Rc<u64>>),
    }

    /// Threads, of which each call is one event, and an owner.
    struct Run {
        dice: Dice,
        schedule: Schedule<Rc<u64>, Rc<u64>>,
        pieces: u64,
        threads: Vec<Held>,
        /// The slabs that the owner has, each with the number of its opening.
        owned: Vec<Rc<u64>>,
        target: usize,
        /// The number of slabs opened, and a handle of the memory of each.
        opened: Vec<std::rc::Weak<u64>>,
        /// Pieces ended of each.
        ended: Vec<u64>,
        refusals: u64,
        refused_last: bool,
    }

    impl Run {
        fn new(seed: u64) -> Self {
            let mut dice = Dice(seed);
            let (pieces, target) = (1 + dice.below(4), dice.below(6) as usize);
            let threads = (0..=dice.below(4)).map(|_| Held::Nothing).collect();
            Self {
                dice,
                schedule: Schedule::new(pieces, target),
                pieces,
                threads,
                owned: Vec::new(),
                target,
                opened: Vec::new(),
                ended: Vec::new(),
                refusals: 0,
                refused_last: false,
            }
        }

        /// One call of one thread; `refuses` one time in that many, never for 0.
        fn thread(&mut self, number: usize, refuses: u64) {
            let refuse = refuses > 0 && self.dice.below(refuses) == 0;
            let held = std::mem::replace(&mut self.threads[number], Held::Nothing);
            self.threads[number] = match held {
                Held::Nothing => {
                    let opened = &mut self.opened;
                    let memory = Rc::new(opened.len() as u64);
                    let next = self.schedule.next(|| {
                        if refuse {
                            return Err(REFUSED);
                        }
                        opened.push(Rc::downgrade(&memory));
                        Ok(memory)
                    });
                    self.ended.resize(self.opened.len(), 0);
                    match next {
                        Ok(piece) => piece.map_or(Held::Nothing, Held::Piece),
                        Err(_) => {
                            (self.refusals, self.refused_last) = (self.refusals + 1, true);
                            Held::Nothing
                        }
                    }
                }
                Held::Piece(Piece { serial, piece, memory }) => {
                    assert!(piece < self.pieces);
                    self.ended[**memory as usize] += 1;
                    drop(memory);
                    let populated = if refuse { Err(HostPagesError::Unsupported) } else { Ok(()) };
                    self.schedule.ended(serial, populated).map_or(Held::Nothing, Held::Whole)
                }
                Held::Whole(Whole { serial, memory, refused }) => {
                    let memory =
                        Arc::into_inner(memory).expect("every piece has dropped its clone");
                    assert_eq!(self.ended[*memory as usize], self.pieces, "each piece ends once");
                    let refuse = refuse || refused.is_some();
                    let pinned = if refuse { Err(REFUSED) } else { Ok(memory) };
                    let (refusal, unwanted) = self.schedule.settle(serial, pinned);
                    drop(unwanted);
                    self.refusals += u64::from(refusal.is_some());
                    self.refused_last |= refusal.is_some();
                    Held::Nothing
                }
            };
        }

        /// One call of the owner.
        fn owner(&mut self) {
            match self.dice.below(4) {
                0 => {
                    self.target = self.dice.below(8) as usize;
                    drop(self.schedule.resize(self.target));
                    self.refused_last = false;
                }
                1 if self.owned.len() > self.target => {
                    self.schedule.give_back();
                    self.owned.pop();
                }
                _ => self.take(),
            }
        }

        fn take(&mut self) {
            let has = self.schedule.has_leading();
            let before = self.owned.len();
            self.owned.extend(self.schedule.take_leading());
            assert_eq!(self.owned.len() > before, has);
            // A slab is opened after those before it, whenever it is opened again.
            assert!(self.owned.is_sorted_by(|one, other| one < other), "{:?}", self.owned);
        }

        /// No memory is left but the owner's, the threads' and what the schedule lists.
        fn check(&self) {
            let live = self.opened.iter().filter(|memory| memory.strong_count() > 0).count();
            let listed = self.schedule.making.len() + self.schedule.pinned.len();
            let held = self.threads.iter().filter(|held| !matches!(held, Held::Nothing)).count();
            assert!(live <= self.owned.len() + listed + held, "{live} slabs live");
            assert_eq!(self.schedule.taken, self.owned.len());
            assert_eq!(self.schedule.opened, self.owned.len() + listed);
        }
    }

    #[test]
    fn every_slab_is_made_once_and_taken_in_order_whatever_threads_and_owner_do() {
        let (mut refusals, mut reached) = (0, 0);
        for seed in 0..20_000 {
            let mut run = Run::new(seed);
            let refuses = [0, 4, 15][run.dice.below(3) as usize];
            for _ in 0..run.dice.below(120) {
                let threads = run.threads.len() as u64;
                match run.dice.below(threads + 1) as usize {
                    number if number < run.threads.len() => run.thread(number, refuses),
                    _ => run.owner(),
                }
                run.check();
            }
            // Everything that was begun ends.
            for number in (0..run.threads.len()).cycle().take(200) {
                run.thread(number, 0);
                run.check();
            }
            assert!(run.schedule.is_over(), "seed {seed}");
            run.take();
            assert!(
                run.owned.len() == run.target || run.owned.len() > run.target || run.refused_last
            );
            refusals += run.refusals;
            // And with another try, all slabs are made.
            drop(run.schedule.resize(run.target));
            while !run.schedule.is_over() {
                run.thread(0, 0);
            }
            run.take();
            while run.owned.len() > run.target {
                run.schedule.give_back();
                run.owned.pop();
            }
            assert_eq!(run.owned.len(), run.target, "seed {seed}");
            let live = run.opened.iter().filter(|memory| memory.strong_count() > 0).count();
            assert_eq!(live, run.target, "seed {seed}: memory was left");
            reached += run.target;
        }
        assert!(refusals > 10_000 && reached > 20_000, "{refusals} refusals, {reached} slabs");
    }

    #[test]
    fn all_threads_populate_the_oldest_slab_first() {
        let mut schedule = Schedule::<(), ()>::new(3, 2);
        let mut next =
            || schedule.next(|| Ok(())).unwrap().map(|piece| (piece.serial, piece.piece));
        let pieces: Vec<_> = std::iter::from_fn(&mut next).collect();
        assert_eq!(pieces, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]);
    }
}
