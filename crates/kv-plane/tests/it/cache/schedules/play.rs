//! An engine that calls a cache in every order that it allows.

use std::collections::HashSet;

use super::Counts;
use super::run::{Facts, Run};
use super::transfer::Arrival;
use super::workers::{Hands, Seen};
use crate::prelude::*;

/// Calls that a running cache makes, which may fail in passing.
const CALLS: [&str; 10] = [
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyDtoDAsync",
    "cuMemcpyBatchAsync",
    "cuMemsetD8Async",
    "cuLaunchKernel",
    "cuEventRecord",
    "cuEventCreate",
    "cuStreamWaitEvent",
    "cuMemMap",
];

/// A request that is not admitted yet.
#[derive(Clone, Debug)]
pub(super) struct Wish {
    pub(super) facts: Facts,
    pub(super) ids: Vec<u32>,
}

/// How often the engine does what engines seldom do, in percent.
#[derive(Debug)]
pub(super) struct Habits {
    pub(super) fails: u64,
    pub(super) drops: u64,
    pub(super) drafts: u64,
    pub(super) lags: u64,
    pub(super) resets: u64,
}

#[derive(Debug)]
pub(super) struct Play<H: Hands> {
    pub(super) cache: KvCache<H::Workers>,
    pub(super) hands: H,
    /// Worker processes, or 0.
    pub(super) crew: u16,
    pub(super) clock: ManualClock,
    pub(super) random: Random,
    pub(super) habits: Habits,
    pub(super) groups: Vec<GroupOptions>,
    pub(super) tenants: Vec<TenantId>,
    pub(super) generation: u64,
    pub(super) runs: Vec<Run>,
    pub(super) queue: VecDeque<(Wish, Request)>,
    pub(super) arrivals: Vec<Arrival>,
    /// Ids of sequences before, with whose they were.
    pub(super) history: Vec<(Facts, Vec<u32>)>,
    /// The keys of all tokens that steps have computed.
    pub(super) computed: HashSet<u64>,
    pub(super) next_number: u64,
    /// Steps that were staged with work, for the buffers that it is read by.
    pub(super) staged: usize,
    /// The last step in which a worker fails.
    pub(super) failing: u64,
    /// Driver calls are made to fail.
    pub(super) has_failures: bool,
    /// What was read and cannot be judged before it is known what became of loads, if anybody asks for that.
    pub(super) undecided: Vec<Seen>,
    pub(super) seen: Counts,
}

impl<H: Hands> Play<H> {
    pub(super) fn new(
        cache: KvCache<H::Workers>,
        hands: H,
        clock: ManualClock,
        mut random: Random,
    ) -> Self {
        let mut often = |most| if random.chance(50) { 0 } else { random.from(1, most) };
        let habits = Habits {
            fails: often(12),
            drops: often(12),
            drafts: often(70),
            lags: often(60),
            resets: often(4),
        };
        let groups = cache.options().groups.clone();
        let mut play = Self {
            cache,
            hands,
            crew: 0,
            clock,
            random,
            habits,
            groups,
            tenants: vec![TenantId::NOBODY],
            generation: 0,
            runs: Vec::new(),
            queue: VecDeque::new(),
            arrivals: Vec::new(),
            history: Vec::new(),
            computed: HashSet::new(),
            next_number: 1,
            staged: 0,
            failing: 0,
            has_failures: false,
            undecided: Vec::new(),
            seen: Counts::new(),
        };
        for key in 0..play.random.index(3) as u64 {
            let tenant = play.cache.add_tenant_with_key(&key.to_le_bytes()).unwrap();
            play.tenants.push(tenant);
            if play.random.chance(40) {
                play.bound(tenant);
            }
        }
        play
    }

    pub(super) fn saw(&mut self, what: &'static str) {
        self.saw_many(1, what);
    }

    pub(super) fn saw_if(&mut self, holds: bool, what: &'static str) {
        self.saw_many(u64::from(holds), what);
    }

    pub(super) fn saw_many(&mut self, count: u64, what: &'static str) {
        if count > 0 {
            *self.seen.entry(what).or_default() += count;
        }
    }

    /// Sets bounds of a tenant, on the device or in host memory.
    pub(super) fn bound(&mut self, tenant: TenantId) {
        let device = u64::from(self.cache.options().groups[0].device_blocks);
        let (tier, most) = match self.random.chance(70) {
            true => (Tier::Primary, device),
            false => (Tier::Secondary, self.cache.options().groups[0].host_blocks.into()),
        };
        let mut quota = TenantQuota::NONE;
        match self.random.index(3) {
            0 => quota.held_max = self.random.from(1, device),
            1 => quota.cached_max = self.random.from(0, device),
            _ => quota.reserved = self.random.from(0, most / 3),
        }
        // What others have reserved may leave too little.
        let set = self.cache.set_quota(GroupId(0), tenant, tier, quota);
        self.saw_if(set.is_ok(), "a quota");
    }

    /// The most drafts of a step.
    pub(super) fn drafts_max(&self) -> u64 {
        let max = self.groups.iter().filter_map(|group| match group.kind {
            GroupKind::State { drafts, .. } => Some(u64::from(drafts)),
            _ => None,
        });
        max.min().unwrap_or(3)
    }

    pub(super) fn has_draft_model(&self) -> bool {
        self.groups.iter().any(|group| group.draft_model)
    }

    /// An error that no rule of the cache explains: a driver call was made to fail.
    #[track_caller]
    pub(super) fn trouble(&mut self, error: impl Into<Failure>) {
        let error = error.into();
        assert!(self.has_failures, "{error}");
        assert!(!error.to_string().contains('\n'), "{error}");
        self.saw("a driver call that failed");
    }

    /// Takes in the end of a call that could not be made for what the sequence is.
    #[track_caller]
    pub(super) fn refused(&mut self, at: usize, error: SequenceError) {
        let run = &mut self.runs[at];
        match error {
            SequenceError::Redo { from } => {
                assert_eq!(from, run.sequence.resolved());
                run.note_load(false);
                run.cut();
                self.saw("a redo");
            }
            SequenceError::Lost { .. } => {
                assert!(self.crew > 0, "no worker was lost");
                self.runs.remove(at);
                self.saw("a lost sequence");
            }
            SequenceError::Arriving => assert!(run.arriving),
            SequenceError::Loading { ticket } => {
                assert_eq!(run.sequence.loads(), Some(ticket));
                self.saw("a call that waits for a load to end");
            }
            SequenceError::Suspended => assert!(run.sequence.is_suspended()),
            other => panic!("{other:?}"),
        }
    }

    /// Judges what was read in steps that are complete.
    pub(super) fn judge(&mut self) {
        for seen in self.hands.seen(&self.cache) {
            self.saw_many(seen.compared, "a block that was compared");
            self.undecided.push(seen);
        }
        self.undecided.retain(|seen| {
            let rows = || seen.work.rows.iter().zip(&seen.wrong);
            let mut loads = rows().filter_map(|(row, _)| row.load.as_ref());
            let decided = loads.all(|load| load.get().is_some());
            for (row, wrong) in rows() {
                // What was loaded wrong is void.
                let counts = row.load.as_ref().is_none_or(|load| load.get() == Some(&true));
                if let Some(wrong) = wrong.as_ref().filter(|_| counts) {
                    panic!("step {}: {wrong}", seen.step);
                }
            }
            !decided
        });
    }

    /// Plays so many turns, and ends everything.
    pub(super) fn through(mut self, turns: u32, sim: Option<&SimDriver>) -> Counts {
        let sim = sim.filter(|_| self.random.chance(40));
        self.has_failures = sim.is_some();
        for turn in 0..turns {
            if let Some(sim) = sim.filter(|_| self.random.chance(15)) {
                let call = self.random.pick(&CALLS);
                let code = match call {
                    "cuMemMap" => ErrorCode::OUT_OF_MEMORY,
                    call => refusal(call),
                };
                sim.fail_nth(call, self.random.from(1, 8), code);
            }
            self.turn();
            self.clock.advance(Duration::from_millis(self.random.from(0, 4)));
            if turn % 8 == 0 {
                self.check_pools();
            }
        }
        self.end()
    }

    fn check_pools(&self) {
        for (at, _) in self.groups.iter().enumerate() {
            let pool = self.cache.manager().pool(kv_plane::GroupId(at as u16)).unwrap();
            pool.check_integrity().unwrap();
        }
    }

    /// One step, with what an engine does before and behind it.
    fn turn(&mut self) {
        for _ in 0..self.random.index(3) {
            self.change();
        }
        self.commit_some();
        self.go_on();
        let inside = self.random.chance(50);
        if !inside {
            self.admit();
        }
        match self.cache.begin_step() {
            Ok(step) => {
                self.judge();
                if inside {
                    self.admit();
                }
                self.step(step);
            }
            Err(error) => self.trouble(error),
        }
        self.runs.iter().for_each(Run::check);
        if self.random.chance(10) {
            self.drain();
        }
    }

    pub(super) fn drain(&mut self) {
        match self.cache.drain() {
            Ok(()) => self.judge(),
            Err(error) => self.trouble(error),
        }
    }

    /// A step for nobody, in which copies and transfers go on.
    pub(super) fn idle(&mut self) {
        self.clock.advance(Duration::from_millis(5));
        match self.cache.begin_step() {
            Ok(step) => drop(self.finish(step)),
            Err(error) => self.trouble(error),
        }
        self.drain();
    }

    pub(super) fn finish(&mut self, step: OpenStep) -> bool {
        let finished = self.cache.finish_step(step);
        let is_done = finished.is_ok();
        if let Err(error) = finished {
            self.trouble(error);
        }
        is_done
    }

    /// Ends everything: nothing is in use behind it, and nothing is left.
    fn end(mut self) -> Counts {
        self.end_transfers();
        self.queue.clear();
        self.runs.clear();
        let mut patience = 400;
        loop {
            // A call that was to fail and was not made yet fails now.
            self.idle();
            patience -= 1;
            let stats = self.cache.manager().lower_stats();
            if stats.open_tickets == 0 && patience < 380 {
                break;
            }
            assert!(patience > 0, "tickets do not end: {stats:?}");
            std::thread::yield_now();
        }
        let manager = self.cache.manager();
        let decided = manager.stats();
        let loaded = manager.lower_stats().loaded_blocks.iter().sum();
        assert_eq!(manager.free_rows(), self.cache.options().sequences_max as usize);
        for (at, group) in self.groups.iter().enumerate() {
            let pool = manager.pool(kv_plane::GroupId(at as u16)).unwrap();
            pool.check_integrity().unwrap();
            let stats = pool.stats();
            for tier in [stats.primary, stats.secondary] {
                assert_eq!((tier.pinned, tier.claimed), (0, 0), "group {at}: {group:?}: {stats:?}");
            }
        }
        self.saw_many(decided.offloaded_blocks, "an offloaded block");
        self.saw_many(decided.onboarded_blocks, "a hit in host memory");
        self.saw_many(decided.copied_on_write, "a copy on write");
        self.saw_many(loaded, "a block loaded from below");
        let Self { hands, cache, seen, .. } = self;
        hands.close(cache).unwrap();
        seen
    }
}
