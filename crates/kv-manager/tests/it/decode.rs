//! Decode steps of many sequences in one call: the same as call by call.

use std::collections::VecDeque;

use crate::common::{group, options, with_groups};
use kv_manager::{
    Committed, Completion, GroupId, Manager, ManagerOptions, Outcome, Request, Room, Sequence,
    WorkerId,
};
use kv_testkit::Random;
use kv_tier::GroupKind;

/// What an engine does, and sees of it.
struct Engine {
    manager: Manager,
    random: Random,
    running: Vec<Sequence>,
    seen: Vec<String>,
    /// Sequences that went through [`Manager::decode`].
    decoded: usize,
}

impl Engine {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let host = random.below(2) * 16;
        let options = options(12 + random.below(48), host);
        let options = match random.below(4) {
            0 => with_groups(options, [group(GroupKind::Window { tokens: 8, sinks: 0 }, 64)]),
            1 => with_groups(
                options,
                [group(GroupKind::State { checkpoint_tokens: 16, drafts: 2 }, 24)],
            ),
            _ => options,
        };
        let options = ManagerOptions { steps_in_flight_max: 4, ..options };
        let manager = Manager::new(options).unwrap();
        Self { manager, random, running: Vec::new(), seen: Vec::new(), decoded: 0 }
    }

    fn see(&mut self, what: impl std::fmt::Debug) {
        self.seen.push(format!("{what:?}"));
    }

    fn admit(&mut self) {
        let tokens = 1 + self.random.below(14) as u32;
        // Few ids, so that prompts have prefixes in common.
        let first = self.random.below(3) as u32;
        let ids = (0..tokens).map(|at| first * 100 + at / 9).collect();
        let mut queue = VecDeque::from([Request::new(ids)]);
        let admitted = self.manager.admit(&mut queue, 64).admitted;
        self.running.extend(admitted.into_iter().map(|(_, sequence)| sequence));
        self.seen.push(format!("{:?}", self.running.last()));
    }

    /// What an engine does between steps.
    fn change(&mut self) {
        let count = self.running.len() as u64;
        if count == 0 || !self.random.once_in(5) {
            return;
        }
        let at = self.random.below(count) as usize;
        let sequence = &mut self.running[at];
        match self.random.below(6) {
            0 => drop(self.running.remove(at)),
            1 => {
                let tokens = self.random.below(sequence.known() + 1);
                let answer = self.manager.truncate(sequence, tokens);
                self.see(answer);
            }
            2 => {
                let answer = self.manager.suspend(sequence);
                self.see(answer);
            }
            3 => {
                let answer = self.manager.extend(sequence, &[7, 8]);
                self.see(answer);
            }
            4 => self.manager.reset(),
            _ => {
                let answer = self.manager.fork(sequence);
                self.see(&answer);
                self.running.extend(answer);
            }
        }
    }

    /// Takes the ids of `step`, and reserves the next tokens, for all sequences in their order.
    fn go_on(&mut self, step: u64, in_one_call: bool) {
        let Self { manager, random, running, seen, .. } = self;
        let ids: Vec<u32> = running.iter().map(|_| random.below(4) as u32).collect();
        let tokens: Vec<u32> = running.iter().map(|_| 1 + u32::from(random.once_in(9))).collect();
        let mut all: Vec<&mut Sequence> = running.iter_mut().collect();
        let mut at = 0;
        while at < all.len() {
            // Those that want drafts, too, go call by call.
            let alike = tokens[at..].iter().take_while(|tokens| **tokens == 1).count();
            if in_one_call && alike > 0 {
                let done = manager.decode(&mut all[at..at + alike], step, &ids[at..]);
                seen.extend(
                    (0..done).map(|_| format!("{:?}, given", Ok::<_, ()>(Committed::Taken))),
                );
                self.decoded += done;
                at += done;
                if done == alike {
                    continue;
                }
            }
            let sequence = &mut all[at];
            if sequence.is_suspended() {
                seen.push(format!("{:?}", manager.resume(sequence)));
            }
            let committed = match sequence.awaits() {
                Some(awaited) if awaited <= step => {
                    Some(manager.commit(sequence, awaited, &ids[at..=at]))
                }
                _ => None,
            };
            let wanted = match sequence.to_compute() {
                0 | 1 => tokens[at],
                more => more as u32,
            };
            let reserved = match manager.reserve(sequence, wanted) {
                Ok(Room::Given(_)) => "given".to_owned(),
                other => format!("{other:?}"),
            };
            seen.push(match committed {
                Some(committed) => format!("{committed:?}, {reserved}"),
                None => reserved,
            });
            at += 1;
        }
        let view = |sequence: &&mut Sequence| {
            let blocks = sequence.block_count(GroupId(0));
            format!("{sequence:?} {blocks} {:?} {:?}", sequence.awaits(), sequence.ids())
        };
        seen.extend(all.iter().map(view));
    }

    fn step(&mut self, in_one_call: bool, lag: u64) {
        let step = self.manager.begin_step().unwrap();
        let number = step.number();
        if self.running.len() < 9 && self.random.once_in(2) {
            self.admit();
        }
        self.change();
        self.go_on(number.saturating_sub(1 + lag), in_one_call);
        let mut batch: Vec<&mut Sequence> = self.running.iter_mut().collect();
        batch.retain(|sequence| sequence.next() > 0);
        let staged = self.manager.stage(&step, &mut batch).map(|plan| format!("{plan:?}"));
        self.see(staged);
        self.manager.finish_step(step).unwrap();
        let failed = self.random.once_in(40);
        let outcome = if failed { Outcome::Failed } else { Outcome::Done };
        let completion =
            Completion { worker: WorkerId(0), step: number - lag.min(number - 1), outcome };
        let completed = self.manager.complete(completion);
        self.see(completed);
    }

    fn run(seed: u64, in_one_call: bool) -> Self {
        let mut engine = Self::new(seed);
        let lag = engine.random.below(4);
        for _ in 0..60 {
            engine.step(in_one_call, lag);
            let stats = engine.manager.stats();
            engine.see(stats);
        }
        let pool = engine.manager.pool(GroupId(0)).unwrap();
        pool.check_integrity().unwrap();
        engine.see(pool.snapshot());
        engine
    }
}

#[test]
fn sequences_that_decode_in_one_call_are_as_those_that_go_call_by_call() {
    let mut decoded = 0;
    for seed in 0..400 {
        let (one, each) = (Engine::run(seed, true), Engine::run(seed, false));
        for (at, (one, each)) in one.seen.iter().zip(&each.seen).enumerate() {
            assert_eq!(one, each, "seed {seed}, line {at}");
        }
        assert_eq!(one.seen.len(), each.seen.len(), "seed {seed}");
        decoded += one.decoded;
    }
    assert!(decoded > 10_000, "{decoded}");
}
