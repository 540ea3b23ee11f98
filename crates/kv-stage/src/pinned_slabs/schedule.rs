//! Which part of which slab is made next, and by whom. Without threads, memory and driver.

use std::collections::VecDeque;
use std::sync::Arc;

use cuda_driver::guard;
use cuda_driver::host_pages::PinError;

/// The slabs that are being made, and those that the owner has not taken yet. `P` is the memory of a
/// slab that is not pinned, `S` a pinned slab.
#[derive(Debug)]
pub(super) struct Schedule<P, S> {
    /// Parts of a slab that are populated one by one.
    pieces: u64,
    /// Slabs wanted.
    target: usize,
    /// Slabs that the owner has. Those that follow are in `pinned`, and those after them in `making`.
    taken: usize,
    pinned: VecDeque<S>,
    making: VecDeque<Making<P>>,
    /// A slab is being pinned, or was just now: see [`rested`](Schedule::rested).
    pinning: bool,
    /// A slab was refused since the target was set: no slab is opened.
    refused: bool,
    serial_next: u64,
}

/// A slab that is being populated, and pinned after that.
#[derive(Debug)]
struct Making<P> {
    /// Tells it from a slab of the same number that was given up before.
    serial: u64,
    /// Taken out to be pinned.
    memory: Option<Arc<P>>,
    /// Pieces handed out, and those that have ended.
    begun: u64,
    ended: u64,
    refused: Option<PinError>,
}

/// What a thread does next.
#[derive(Debug)]
pub(super) enum Job<P> {
    /// Populate one piece of a slab. Then drop `memory` and call [`ended`](Schedule::ended).
    Populate { serial: u64, piece: u64, memory: Arc<P> },
    /// Pin a slab whose pieces have all ended, `refused` if one was not populated. Then call
    /// [`settle`](Schedule::settle), and later [`rested`](Schedule::rested).
    Pin { serial: u64, memory: Arc<P>, refused: Option<PinError> },
}

/// What a call takes out of the schedule, to be dropped without the lock: unmapping takes time.
#[derive(Debug)]
#[must_use]
pub(super) struct Unwanted<P, S> {
    _memory: Vec<Arc<P>>,
    _slabs: Vec<S>,
}

impl<P, S> Schedule<P, S> {
    pub(super) fn new(pieces: u64) -> Self {
        Self {
            pieces,
            target: 0,
            taken: 0,
            pinned: VecDeque::new(),
            making: VecDeque::new(),
            pinning: false,
            refused: false,
            serial_next: 0,
        }
    }

    /// Sets the number of slabs wanted, and gives up those beyond that the owner has not taken. A slab
    /// that was refused is tried again.
    pub(super) fn resize(&mut self, target: usize) -> Unwanted<P, S> {
        self.target = target;
        self.refused = false;
        self.cut(target)
    }

    /// Whether no slab is being made, and none is to be opened.
    pub(super) fn is_over(&self) -> bool {
        self.making.is_empty() && !self.opens()
    }

    fn opens(&self) -> bool {
        !self.refused && self.taken + self.pinned.len() + self.making.len() < self.target
    }

    /// The next job: to pin the oldest slab, once it is whole and no other is being pinned; otherwise a
    /// piece of the oldest slab that has one. If none has one, the next slab is opened.
    ///
    /// # Errors
    /// Those of `open`. No slab is opened then until the next [`resize`](Schedule::resize).
    pub(super) fn next(
        &mut self,
        open: impl FnOnce() -> Result<P, PinError>,
    ) -> Result<Option<Job<P>>, PinError> {
        let pieces = self.pieces;
        if guard!("stage.one-slab-at-a-time", !self.pinning, else true)
            && let Some(oldest) = self.making.front_mut()
            && guard!("stage.slabs-are-whole", oldest.ended == pieces, else oldest.begun == pieces)
            && let Some(memory) = oldest.memory.take()
        {
            self.pinning = true;
            let Making { serial, refused, .. } = *oldest;
            return Ok(Some(Job::Pin { serial, memory, refused }));
        }
        if !self.making.iter().any(|making| making.begun < pieces) {
            if !self.opens() {
                return Ok(None);
            }
            let memory = open().inspect_err(|_| self.refused = true)?;
            self.making.push_back(Making {
                serial: self.serial_next,
                memory: Some(Arc::new(memory)),
                begun: 0,
                ended: 0,
                refused: None,
            });
            self.serial_next += 1;
        }
        let open = self.making.iter_mut().find(|making| making.begun < pieces);
        Ok(open.and_then(|making| {
            let memory = making.memory.clone()?;
            making.begun += 1;
            Some(Job::Populate { serial: making.serial, piece: making.begun - 1, memory })
        }))
    }

    /// Notes that a piece was populated, or refused.
    pub(super) fn ended(&mut self, serial: u64, populated: Result<(), PinError>) {
        // Otherwise the slab was given up meanwhile.
        if let Some(making) = self.making.iter_mut().find(|making| making.serial == serial) {
            making.ended += 1;
            making.refused = making.refused.or(populated.err());
        }
    }

    /// Notes that a slab was pinned, or refused. A refusal gives up this slab and those after it.
    ///
    /// Returns whether the slab is the owner's to take, or the error; nothing for a slab that was given
    /// up before.
    pub(super) fn settle(
        &mut self,
        serial: u64,
        pinned: Result<S, PinError>,
    ) -> (Option<Result<(), PinError>>, Unwanted<P, S>) {
        let mut unwanted = Unwanted { _memory: Vec::new(), _slabs: Vec::new() };
        // Slabs are pinned in order, one at a time.
        if self.making.front().is_none_or(|oldest| oldest.serial != serial) {
            unwanted._slabs.extend(pinned.ok());
            return (None, unwanted);
        }
        match pinned {
            Ok(pinned) => {
                self.making.pop_front();
                self.pinned.push_back(pinned);
                (Some(Ok(())), unwanted)
            }
            Err(error) => {
                self.refused = true;
                let end = self.taken + self.pinned.len();
                (Some(Err(error)), self.cut(guard!("stage.refusals-cut", end, else usize::MAX)))
            }
        }
    }

    /// Notes that the next slab can be pinned.
    pub(super) fn rested(&mut self) {
        self.pinning = false;
    }

    /// Gives up the slabs from number `end` on, except those that the owner has taken.
    pub(super) fn cut(&mut self, end: usize) -> Unwanted<P, S> {
        let end = end.saturating_sub(self.taken);
        let slabs: Vec<S> = self.pinned.drain(end.min(self.pinned.len())..).collect();
        let kept = end.saturating_sub(self.pinned.len()).min(self.making.len());
        let making = self.making.drain(kept..);
        Unwanted { _memory: making.filter_map(|one| one.memory).collect(), _slabs: slabs }
    }

    /// The pinned slabs that follow those that the owner has: they are its own from now on.
    pub(super) fn take_pinned(&mut self) -> impl Iterator<Item = S> {
        self.taken += self.pinned.len();
        self.pinned.drain(..)
    }

    /// Notes that the owner has given up its last slab, which is beyond the target.
    pub(super) fn give_back(&mut self) {
        // None follows it: the target was set, and slabs beyond it were given up.
        debug_assert!(self.taken > self.target && self.pinned.is_empty() && self.making.is_empty());
        self.taken -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    const REFUSED: PinError = PinError::Unsupported;

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
        Job(Job<Rc<u64>>),
        Rest,
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
            let mut schedule = Schedule::new(pieces);
            drop(schedule.resize(target));
            Self {
                dice,
                schedule,
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
                        Ok(job) => job.map_or(Held::Nothing, Held::Job),
                        Err(_) => {
                            (self.refusals, self.refused_last) = (self.refusals + 1, true);
                            Held::Nothing
                        }
                    }
                }
                Held::Job(Job::Populate { serial, piece, memory }) => {
                    assert!(piece < self.pieces);
                    self.ended[**memory as usize] += 1;
                    drop(memory);
                    let populated = if refuse { Err(PinError::Unsupported) } else { Ok(()) };
                    self.schedule.ended(serial, populated);
                    Held::Nothing
                }
                Held::Job(Job::Pin { serial, memory, refused }) => {
                    let memory =
                        Arc::into_inner(memory).expect("every piece has dropped its clone");
                    assert_eq!(self.ended[*memory as usize], self.pieces, "each piece ends once");
                    let refuse = refuse || refused.is_some();
                    let pinned = if refuse { Err(REFUSED) } else { Ok(memory) };
                    let (settled, unwanted) = self.schedule.settle(serial, pinned);
                    drop(unwanted);
                    let refusal = settled.and_then(Result::err);
                    self.refusals += u64::from(refusal.is_some());
                    self.refused_last |= refusal.is_some();
                    Held::Rest
                }
                Held::Rest => {
                    self.schedule.rested();
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

        /// Calls of all threads, each until there is nothing for it to do.
        fn end_all(&mut self) {
            let mut left: Vec<usize> = (0..self.threads.len()).collect();
            while !left.is_empty() {
                let place = self.dice.below(left.len() as u64) as usize;
                let idle = matches!(self.threads[left[place]], Held::Nothing);
                self.thread(left[place], 0);
                self.check();
                if idle && matches!(self.threads[left[place]], Held::Nothing) {
                    left.swap_remove(place);
                }
            }
        }

        fn take(&mut self) {
            self.owned.extend(self.schedule.take_pinned());
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
            let pinning = |held: &&Held| matches!(held, Held::Job(Job::Pin { .. }) | Held::Rest);
            let pinning = self.threads.iter().filter(pinning).count();
            assert_eq!(usize::from(self.schedule.pinning), pinning, "one at a time");
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
            // Threads that end when there is nothing to do leave nothing undone.
            run.end_all();
            assert!(run.schedule.is_over(), "seed {seed}");
            run.take();
            assert!(run.owned.len() >= run.target || run.refused_last, "seed {seed}");
            refusals += run.refusals;
            // And with another try, all slabs are made.
            drop(run.schedule.resize(run.target));
            run.end_all();
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
    fn all_threads_populate_the_oldest_slab_first_and_one_pins_it() {
        let mut schedule = Schedule::<(), ()>::new(3);
        drop(schedule.resize(2));
        let mut next = || schedule.next(|| Ok(())).unwrap();
        for wanted in [(0, 0), (0, 1), (0, 2), (1, 0)] {
            let Some(Job::Populate { serial, piece, .. }) = next() else { panic!("{wanted:?}") };
            assert_eq!((serial, piece), wanted);
        }
        (0..3).for_each(|_| schedule.ended(0, Ok(())));
        let Ok(Some(Job::Pin { serial: 0, .. })) = schedule.next(|| Ok(())) else { panic!() };
        let Ok(Some(Job::Populate { serial: 1, .. })) = schedule.next(|| Ok(())) else { panic!() };
    }

    #[test]
    fn a_slab_of_which_a_piece_was_refused_is_refused_with_the_first_reason() {
        let mut schedule = Schedule::<(), ()>::new(3);
        drop(schedule.resize(1));
        for _ in 0..3 {
            assert!(matches!(schedule.next(|| Ok(())), Ok(Some(Job::Populate { .. }))));
        }
        let reasons = [PinError::Unsupported, PinError::Refused { bytes: 1, errno: 12 }];
        schedule.ended(0, Ok(()));
        reasons.iter().for_each(|reason| schedule.ended(0, Err(*reason)));
        let Ok(Some(Job::Pin { refused, .. })) = schedule.next(|| Ok(())) else { panic!() };
        assert_eq!(refused, Some(PinError::Unsupported));
    }
}
