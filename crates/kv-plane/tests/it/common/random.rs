//! Random lives of requests: they share prefixes, come alone and in batches, are computed in chunks, decode,
//! try drafts, are cut, forked and suspended, fail and leave, under constant pressure.

use kv_plane::manager::{ChangeError, Missing, ReserveError as Refusal, SuspendError};
use kv_plane::{KvCacheOptions, ReserveError, Room, TransportChoice};

use super::engine::{Engine, Failure, Live, Prompt, by, options};
use super::scenarios::Rig;

/// Plays `operations` random operations on 40 device blocks and 30 host blocks.
pub(crate) fn random_requests(rig: &Rig, seed: u64, operations: u64) {
    play_random(rig, seed, operations, options(rig.shape, 40, 30));
}

/// The same with blocks that travel another way.
pub(crate) fn random_requests_by(rig: &Rig, seed: u64, operations: u64, choice: TransportChoice) {
    play_random(rig, seed, operations, by(choice, options(rig.shape, 40, 30)));
}

fn play_random(rig: &Rig, seed: u64, operations: u64, options: KvCacheOptions) {
    let mut play = Play::new(rig.engine_with(options), seed);
    for operation in 0..operations {
        play.one(operation as u32).unwrap();
        if operation % 64 == 0 {
            play.engine.pool().check_integrity().unwrap();
        }
    }
    let decided = play.engine.decided();
    assert!(decided.offloaded_blocks > 0 && decided.onboarded_blocks > 0, "{decided:?}");
    assert!(decided.copied_on_write > 0 && decided.suspended_blocks > 0, "{decided:?}");
    assert!(decided.failed_steps > 0 && play.engine.redone > 0, "{decided:?}");
    play.close();
}

/// An engine, and the requests that live in it.
pub(crate) struct Play {
    pub(crate) engine: Engine,
    pub(crate) lives: Vec<Live>,
    pub(crate) suspended: Vec<Live>,
    random: Random,
}

impl Play {
    pub(crate) fn new(engine: Engine, seed: u64) -> Self {
        Self { engine, lives: Vec::new(), suspended: Vec::new(), random: Random(seed) }
    }

    pub(crate) fn close(self) {
        let Self { engine, lives, suspended, .. } = self;
        drop((lives, suspended));
        engine.close();
    }

    /// One operation. Its number is the seed of new tokens.
    pub(crate) fn one(&mut self, number: u32) -> Result<(), Failure> {
        let bt = self.engine.block_tokens();
        let own = number + 100;
        match self.random.below(24) {
            0..5 => {
                let count = 1 + self.random.below(3);
                let batch: Vec<_> = (0..count).map(|_| self.prompt(own)).collect();
                let (admitted, refused) = self.engine.admit_fitting(&batch)?;
                self.lives.extend(admitted);
                match refused {
                    Some(error) if !error.is_retryable() => Err(error.into()),
                    _ => Ok(()),
                }
            }
            5 => {
                self.take().into_iter().for_each(drop);
                Ok(())
            }
            6..8 => {
                self.with_one(|engine, live, random| engine.extend(live, own, 1 + random.below(bt)))
            }
            8..10 => {
                self.with_one(|engine, live, random| engine.draft(live, own, 1 + random.below(bt)))
            }
            10 => self.with_one(|engine, live, random| {
                engine.accept(live, random.below(bt) as usize, own)
            }),
            11 => self.with_one(|engine, live, _| engine.decode_ahead(live, own)),
            12 => self.with_one(|engine, live, random| {
                let tokens = 1 + random.below(live.prompt.len());
                engine.truncate(live, tokens)
            }),
            13 => self.fork(),
            14 => self.suspend(),
            15 | 16 => self.resume(),
            17 => {
                self.engine.chunk =
                    [u64::MAX, 1 + self.random.below(2 * bt)][self.random.below(2) as usize];
                Ok(())
            }
            18 => {
                let names = self.prompt(own).hashes(bt);
                self.engine.cache.prefetch(&names)?;
                Ok(())
            }
            19 if self.random.below(3) == 0 => {
                drop(self.engine.begin()?);
                Ok(())
            }
            20 if self.random.below(3) == 0 => {
                // A step that fails after all its work was enqueued.
                let step = self.engine.begin()?;
                self.reserve()?;
                let mut all: Vec<&mut Live> = self.lives.iter_mut().collect();
                self.engine.enqueue_reserved(&step, &mut all)?;
                Ok(())
            }
            _ => self.step(),
        }
    }

    /// One step of all requests that there is room for.
    pub(crate) fn step(&mut self) -> Result<(), Failure> {
        if self.lives.is_empty() {
            return self.engine.drain();
        }
        let step = self.engine.begin()?;
        self.reserve()?;
        let mut all: Vec<&mut Live> = self.lives.iter_mut().collect();
        self.engine.enqueue_as_reserved(step, &mut all)
    }

    /// Reserves for all that run. Those that there is no room for are suspended, or dropped.
    fn reserve(&mut self) -> Result<(), Failure> {
        let mut at = 0;
        while at < self.lives.len() {
            match self.engine.reserve(&mut self.lives[at]) {
                Ok(Room::Given(_)) => at += 1,
                Err(ReserveError::Refused(Refusal::TooLong { .. })) => {
                    drop(self.lives.swap_remove(at));
                }
                Ok(Room::Lacks(_)) => {
                    let mut live = self.lives.swap_remove(at);
                    match self.engine.suspend(&mut live) {
                        Ok(()) => self.suspended.push(live),
                        Err(error) => retryable(error)?,
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn prompt(&mut self, own: u32) -> Prompt {
        let (random, bt) = (&mut self.random, self.engine.block_tokens());
        let mut prompt = Prompt::new(random.below(3) as u32, bt * (1 + random.below(5)));
        if random.below(2) == 0 {
            prompt = prompt.then(10 + random.below(12) as u32, bt * random.below(4));
        }
        prompt.then(own, random.below(2 * bt))
    }

    fn take(&mut self) -> Option<Live> {
        if self.lives.is_empty() {
            return None;
        }
        Some(self.lives.swap_remove(self.random.below(self.lives.len() as u64) as usize))
    }

    fn with_one(
        &mut self,
        change: impl FnOnce(&mut Engine, &mut Live, &mut Random) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let Some(mut live) = self.take() else { return Ok(()) };
        let changed = change(&mut self.engine, &mut live, &mut self.random);
        self.lives.push(live);
        changed
    }

    fn fork(&mut self) -> Result<(), Failure> {
        let Some(mut live) = self.take() else { return Ok(()) };
        let twin = self.engine.fork(&mut live);
        self.lives.push(live);
        match twin {
            Ok(twin) => self.lives.push(twin),
            Err(error) => match error.downcast_ref() {
                Some(ChangeError::NoRow { .. }) => {}
                _ => return Err(error),
            },
        }
        Ok(())
    }

    fn suspend(&mut self) -> Result<(), Failure> {
        let Some(mut live) = self.take() else { return Ok(()) };
        match self.engine.suspend(&mut live) {
            Ok(()) => self.suspended.push(live),
            Err(error) => {
                self.lives.push(live);
                retryable(error)?;
            }
        }
        Ok(())
    }

    fn resume(&mut self) -> Result<(), Failure> {
        let Some(mut live) = self.suspended.pop() else { return Ok(()) };
        match self.engine.resume(&mut live) {
            Ok(Room::Given(_)) => self.lives.push(live),
            Ok(Room::Lacks(_)) => {
                // Room comes back with those that leave.
                if self.lives.is_empty() {
                    self.engine.drain()?;
                }
                if self.suspended.len() < 6 {
                    self.suspended.insert(0, live);
                }
            }
            Err(error) => {
                self.suspended.push(live);
                return Err(error.into());
            }
        }
        Ok(())
    }
}

/// A refusal for lack of room is none here.
fn retryable(error: Failure) -> Result<(), Failure> {
    match error.downcast_ref() {
        Some(SuspendError::NoRoom(Missing { .. })) => Ok(()),
        _ => Err(error),
    }
}

/// A small generator, so that every run is the same.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) % end
    }
}
