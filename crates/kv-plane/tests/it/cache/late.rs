//! Every driver call fails once under an engine that is one or two steps ahead of its devices. The
//! devices run only the work that the host waits for, and a query advances nothing.
//!
//! The step whose call failed is dropped, as an early return drops it, and what it has computed is void. Then
//! the engine goes on, and all content is right; or it closes the cache; or it drops everything at once. In each case no
//! device is lost, every access finds its memory, and nothing leaks.

use super::faults::differences;
use crate::prelude::*;

/// What the engine does after a failure.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Then {
    /// Does the same again.
    GoesOn,
    /// Releases its requests and closes the cache.
    Closes,
    /// Drops everything, under the work that is in flight.
    Drops,
}

/// How the engine and the devices are made.
#[derive(Clone, Copy, Debug)]
struct Setup {
    devices: u32,
    overlap_depth: u32,
    choice: TransportChoice,
    pace: Pace,
}

impl Setup {
    fn machine(&self) -> (Machine, Engine) {
        let machine = Machine::new(1, self.devices, small());
        machine.sim.set_pace(self.pace);
        // The more steps are in flight, the longer released blocks are in use.
        let options = by(self.choice, options(small(), 7 + self.overlap_depth, 8));
        let options = KvCacheOptions { overlap_depth: self.overlap_depth, ..options };
        let engine = machine.rig.engine_with(options);
        (machine, engine)
    }
}

/// An engine, and the failures that it has met.
struct Play {
    engine: Engine,
    lives: Vec<Live>,
    failures: Vec<String>,
    then: Then,
}

impl Play {
    /// Runs `operation`, and repeats it if it fails and the engine goes on. A refusal for lack of
    /// blocks is no failure: steps are run until there are blocks.
    fn once_more<T, E: Into<Failure>>(
        &mut self,
        mut operation: impl FnMut(&mut Engine, &mut Vec<Live>) -> Result<T, E>,
    ) -> Result<T, Failure> {
        let failure = match operation(&mut self.engine, &mut self.lives).map_err(E::into) {
            Ok(done) => return Ok(done),
            Err(failure) => failure,
        };
        self.failures.push(failure.to_string());
        match self.then {
            Then::GoesOn => operation(&mut self.engine, &mut self.lives).map_err(E::into),
            Then::Closes | Then::Drops => Err(failure),
        }
    }

    /// One step of all requests.
    fn step(&mut self) -> Result<(), Failure> {
        self.once_more(|engine, lives| {
            let mut all: Vec<_> = lives.iter_mut().collect();
            match engine.run(&mut all) {
                // Nor is a refusal of a block that a request grows into.
                Err(error) if lacks_room(&error) => {
                    engine.drain()?;
                    engine.run(&mut all)
                }
                done => done,
            }
        })
    }

    /// Requests come, grow and go, two at a time; what they evict goes to the host and comes back.
    fn all(&mut self) -> Result<(), Failure> {
        for seed in [1, 2, 3, 1] {
            if self.lives.len() > 1 {
                drop(self.lives.remove(0));
            }
            let prompt = Prompt::new(seed, 9);
            let mut patience = 4;
            let live = loop {
                // A retryable refusal is no failure.
                let admitted = self.once_more(|engine, _| match engine.admit(&prompt) {
                    Err(error) if error.is_retryable() => Ok(None),
                    admitted => admitted.map(Some),
                })?;
                match admitted {
                    Some(live) => break live,
                    None => self.step()?,
                }
                patience -= 1;
                assert!(patience > 0, "blocks never come back");
            };
            self.lives.push(live);
            self.step()?;
            let last = self.lives.len() - 1;
            self.once_more(|engine, lives| engine.extend(&mut lives[last], 7, 3))?;
            self.step()?;
        }
        Ok(())
    }
}

fn lacks_room(error: &Failure) -> bool {
    error.downcast_ref::<NoRoom>().is_some()
}

/// The possible codes of a refused `call`.
fn codes(call: &str) -> Vec<ErrorCode> {
    match call {
        "cuMemAlloc" | "cuMemHostAlloc" | "cuMemCreate" | "cuModuleLoadDataEx" => {
            vec![ErrorCode::UNKNOWN, ErrorCode::OUT_OF_MEMORY]
        }
        _ => vec![refusal(call)],
    }
}

/// Fails every call of a play once.
fn every_call_fails_once(setup: Setup, then: Then) {
    let (machine, engine) = setup.machine();
    let before = machine.sim.calls();
    let mut play = Play { engine, lives: Vec::new(), failures: Vec::new(), then };
    play.all().unwrap();
    let calls = differences(&before, machine.sim.calls());
    let stats = play.engine.decided();
    assert!(stats.offloaded_blocks > 0 && stats.onboarded_blocks > 0, "{stats:?}");
    drop(play.lives);
    play.engine.close();
    machine.assert_clean();

    let (mut faults, mut told) = (0, 0);
    for (call, count) in calls {
        for (nth, code) in
            (1..=count).flat_map(|nth| codes(call).into_iter().map(move |c| (nth, c)))
        {
            let (machine, engine) = setup.machine();
            machine.sim.fail_nth(call, nth, code);
            let mut play = Play { engine, lives: Vec::new(), failures: Vec::new(), then };
            let ended = play.all();
            let what = format!("{call} {nth} answers {code} in {setup:?}, {then:?}");
            faults += 1;
            told += play.failures.len();
            end(machine, play, ended, call, &what);
        }
    }
    // Few calls may fail without an error for the caller: those that restore a context, or have a
    // substitute.
    assert!(faults > 80 && told * 2 > faults, "{told} of {faults} faults were told");
}

fn end(machine: Machine, play: Play, ended: Result<(), Failure>, call: &str, what: &str) {
    let Play { mut engine, lives, failures, then } = play;
    assert!(failures.len() <= 1, "{what}: {failures:?}");
    if then == Then::GoesOn {
        assert!(ended.is_ok(), "{what}: {ended:?}");
        engine.drain().unwrap();
        assert!(engine.verified > 0);
        assert_eq!(engine.corrupt, 0, "{what}");
        engine.pool().check_integrity().unwrap();
    }
    drop(lives);
    match then {
        Then::GoesOn | Then::Closes => assert!(engine.try_close().is_ok(), "{what}"),
        Then::Drops => drop(engine),
    }
    assert!(machine.rig.devices.iter().all(|device| device.poison().is_none()), "{what}");
    machine.sim.run_all();
    let Machine { sim, rig } = machine;
    // Objects in use when everything was dropped end with their context.
    let dropped = then == Then::Drops || call.starts_with("cuCtx");
    drop(rig);
    let counts = |finding: &Finding| !(dropped && finding.kind == FindingKind::LostObjects);
    let findings: Vec<_> = sim.findings().into_iter().filter(counts).collect();
    assert!(findings.is_empty(), "{what}: {findings:?} after {failures:?}");
    let leaks = sim.check_leaks();
    assert!(leaks.is_clean() || then == Then::Drops, "{what}: {leaks} after {failures:?}");
}

/// By kernels, for blocks as short as these.
const QUICKEST: TransportChoice = TransportChoice::Quickest;
/// Without a kernel to compile, which takes longer than the rest of a run.
const COPY_ENGINE: TransportChoice = TransportChoice::Only(Transport::CopyEngine);

fn late(devices: u32, overlap_depth: u32, choice: TransportChoice) -> Setup {
    Setup { devices, overlap_depth, choice, pace: Pace::Slowest }
}

#[test]
fn an_engine_one_step_ahead_goes_on() {
    every_call_fails_once(late(1, 1, QUICKEST), Then::GoesOn);
}

#[test]
fn an_engine_two_steps_ahead_of_two_devices_goes_on() {
    every_call_fails_once(late(2, 2, COPY_ENGINE), Then::GoesOn);
}

#[test]
fn an_engine_goes_on_whichever_way_blocks_travel_and_on_devices_that_are_never_late() {
    for choice in [TransportChoice::EachBlock, TransportChoice::Only(Transport::TwoHop)] {
        every_call_fails_once(late(1, 1, choice), Then::GoesOn);
    }
    let setup = Setup { pace: Pace::Fastest, ..late(1, 1, COPY_ENGINE) };
    every_call_fails_once(setup, Then::GoesOn);
}

#[test]
fn an_engine_closes_the_cache() {
    every_call_fails_once(late(1, 2, TransportChoice::EachBlock), Then::Closes);
}

#[test]
fn an_engine_drops_everything() {
    // Caches that are dropped under their work, one for each call, leave their memory behind.
    kv_testkit::alloc::allow(7 << 30);
    every_call_fails_once(late(1, 2, COPY_ENGINE), Then::Drops);
}
