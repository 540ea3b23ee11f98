//! Workers at the other end of a connection: they decide nothing, and whatever one of them does is an answer.
//!
//! Each is a thread here, with a simulated machine of its own. `kv-replay`'s tests have processes that are killed and stopped.

use std::collections::HashMap;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kv_plane::processes::{Order, Orders};
use kv_plane::tier::BlockFault;

use crate::prelude::*;

type Failed = Box<dyn std::error::Error + Send + Sync>;

/// Longer than anything takes here.
const LONG: Duration = Duration::from_secs(60);

/// What a worker does when it is to carry out a step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Act {
    Works,
    /// Its connection ends in this step.
    Ends(u64),
    /// It says that it cannot go on.
    Refuses(u64),
    /// Its work of the step fails.
    Fails(u64),
    /// It says nothing any more.
    IsSilent(u64),
    /// It says what is no frame.
    Prints(u64),
    /// Its blocks have other numbers of tokens than its manager's.
    Differs,
    /// It takes itself for another one, or for one of another number.
    Ranks(u16, u16),
    /// It has room for other numbers of sequences, and of tokens in a step.
    HasRoomFor(u32, u32),
    /// It has less host memory to pin than its options say.
    LacksHostMemory,
    /// Names come to its tier by others.
    Gains,
    /// Its tier is that of all workers.
    Shares,
    /// Whoever starts it panics.
    Panics,
}

/// What others have stored in a [`Gains`].
const GAINED: u64 = 3;

/// A tier that others store in as well, so many blocks once in all.
#[derive(Debug)]
struct Gains(u64);

impl LowerTier for Gains {
    fn store(&mut self, _: Vec<BlockSource>) {}

    fn load(&mut self, _: Vec<BlockSink>) {}

    fn forget(&mut self, _: &[(GroupId, BlockHash)]) {}

    fn clear(&mut self) {}

    fn poll(&mut self, _: &mut Vec<(GroupId, BlockHash)>) {}

    fn gained(&mut self, found: &mut Vec<(GroupId, BlockHash)>) {
        let names = std::mem::take(&mut self.0);
        found.extend((0..names).map(|of| (GroupId(0), BlockHash::from_u128(of.into()))));
    }
}

/// Records that all workers store in one place, each under the block's group and name alone.
#[derive(Debug, Default)]
struct Shared {
    /// Each with the worker that has stored it.
    records: HashMap<(GroupId, BlockHash), (u16, Vec<u8>)>,
    /// Records that a worker was offered: by whom they were stored, who wanted them, and whether it has taken them.
    offered: Vec<(u16, u16, bool)>,
    formats: Vec<u64>,
}

static SHARED: Mutex<Option<Shared>> = Mutex::new(None);

/// A worker's way there.
#[derive(Debug)]
struct Way(u16);

fn shared<T>(call: impl FnOnce(&mut Shared) -> T) -> T {
    call(SHARED.lock().unwrap().get_or_insert_default())
}

impl LowerTier for Way {
    fn set_format(&mut self, format: u64) {
        shared(|all| all.formats.push(format));
    }

    fn store(&mut self, blocks: Vec<BlockSource>) {
        for block in blocks {
            let (key, record) = ((block.group(), block.name()), block.record().unwrap());
            shared(|all| all.records.insert(key, (self.0, record)));
            block.done();
        }
    }

    fn load(&mut self, blocks: Vec<BlockSink>) {
        for mut block in blocks {
            let found = shared(|all| all.records.get(&(block.group(), block.name())).cloned());
            let Some((of, record)) = found else {
                block.failed(BlockFault::Missing);
                continue;
            };
            let is_taken = block.write_at(0, &record).is_ok() && block.done().is_ok();
            shared(|all| all.offered.push((of, self.0, is_taken)));
        }
    }

    fn forget(&mut self, _: &[(GroupId, BlockHash)]) {}

    fn clear(&mut self) {}

    fn poll(&mut self, _: &mut Vec<(GroupId, BlockHash)>) {}
}

/// Blocks of 4 tokens, of which host memory has a few, over the tier of all workers.
fn over_shared(worker: u16) -> KvCacheOptions {
    let mut tiers = LowerTiers::new(b"model");
    tiers.push(move || Box::new(Way(worker)));
    KvCacheOptions { tiers, ..options(shape(2, 8, 4), 12, 6) }
}

fn config() -> SimConfig {
    SimConfig { granularity: 4 << 10, ..SimConfig::default() }
}

/// Blocks of 4 tokens: 24 on the device and 24 in host memory, over a tier to which so many names come.
fn over(gained: u64) -> KvCacheOptions {
    let mut tiers = LowerTiers::new(b"model");
    tiers.push(move || Box::new(Gains(gained)));
    KvCacheOptions { tiers, ..of_cache() }
}

/// Blocks of 4 tokens: 24 on the device and 24 in host memory.
fn of_cache() -> KvCacheOptions {
    options(shape(2, 8, 4), 24, 24)
}

/// Host memory in slabs of 8 blocks, which a thread pins.
fn in_slabs() -> HostPinning {
    HostPinning { threads: 1, slab_bytes_max: 8 * of_cache().groups[0].shape.block_bytes() }
}

/// What a worker pins, with one slab less.
fn a_slab_too_few() -> Result<u64, Failed> {
    let sim = sim(config());
    let options = KvCacheOptions { pinning: in_slabs(), ..of_cache() };
    let mut kv = KvWorker::new(&[Stream::new(&device(&sim))?], options, ALONE)?;
    kv.wait_for_host()?;
    Ok(sim.pinned_bytes() - 1)
}

fn work(orders: &mut Orders, act: Act, stream: &UnixStream) -> Result<Vec<u8>, Failed> {
    let sim = sim(match act {
        Act::LacksHostMemory => SimConfig { pinned_bytes: a_slab_too_few()?, ..config() },
        _ => config(),
    });
    sim.set_pace(Pace::Slowest);
    let device = device(&sim);
    let told = orders.question()?.unwrap_or_default();
    orders.answer(&[&told[..], &orders.workers().to_le_bytes()].concat())?;
    let mut options = of_cache();
    if act == Act::Differs {
        options.groups[0].shape = shape(2, 8, 8);
    }
    if let Act::HasRoomFor(sequences, tokens) = act {
        (options.sequences_max, options.step_tokens_max) = (sequences, tokens);
    }
    if act == Act::LacksHostMemory {
        options.pinning = in_slabs();
    }
    if act == Act::Gains {
        options = over(GAINED);
    }
    if act == Act::Shares {
        options = over_shared(orders.worker().0);
    }
    let mut rank = (orders.worker(), orders.workers());
    if let Act::Ranks(worker, workers) = act {
        rank = (WorkerId(worker), workers);
    }
    let mut kv = KvWorker::new(&[Stream::new(&device)?], options, rank)?;
    orders.wait_on_host();
    orders.begin(&mut kv)?;
    let mut works = vec![u8::from(orders.replaces())];
    let mut is_silent = false;
    while let Some(order) = orders.next(&mut kv)? {
        let Order::Step { plan, work } = order else {
            let Order::Completed { result, .. } = order else { continue };
            result.extend_from_slice(&works);
            continue;
        };
        works = work.to_vec();
        match act {
            Act::Ends(step) if step == plan.step => return Ok(Vec::new()),
            Act::Refuses(step) if step == plan.step => return Err("no more ink".into()),
            Act::Prints(step) if step == plan.step => {
                (&*stream).write_all(b"hello, this is no frame at all")?;
            }
            Act::IsSilent(step) if step == plan.step => is_silent = true,
            _ => {}
        }
        if is_silent {
            continue;
        }
        kv.carry_out(plan, |_, _| Ok(()))?;
        let fails = act == Act::Fails(plan.step);
        kv.finish(if fails { Outcome::Failed } else { Outcome::Done })?;
    }
    kv.close()?;
    Ok(b"all is well".to_vec())
}

/// Workers of which number 1 first does what `acts` say, one process after the other.
fn start(
    workers: u16,
    timeout: Duration,
    acts: &'static [Act],
    fenced: bool,
) -> Result<(Processes, Receiver<bool>), BuildError> {
    start_with(of_cache(), workers, timeout, acts, fenced)
}

fn start_with(
    options: KvCacheOptions,
    workers: u16,
    timeout: Duration,
    acts: &'static [Act],
    fenced: bool,
) -> Result<(Processes, Receiver<bool>), BuildError> {
    let (ended, ends) = mpsc::channel();
    let mut acts = acts.iter();
    let connect = move |worker| {
        let (here, there) = UnixStream::pair()?;
        let act = match worker {
            WorkerId(1) => acts.next().copied().unwrap_or(Act::Works),
            _ => Act::Works,
        };
        assert_ne!(act, Act::Panics, "on purpose");
        let (own, peer) = (there.try_clone()?, there.try_clone()?);
        let serves = thread::Builder::new().spawn(move || {
            let connection = Connection::socket(there).unwrap();
            serve(connection, |orders| work(orders, act, &own)).is_ok()
        })?;
        let connection = Connection::socket(here)?;
        if !fenced {
            return Ok(connection);
        }
        let ended = ended.clone();
        Ok(connection.ended_by(move || {
            let _ = peer.shutdown(Shutdown::Both);
            let _ = ended.send(serves.join().unwrap());
            Ok(())
        }))
    };
    let mut processes = Processes::start(options, workers, timeout, connect)?;
    for worker in (0..workers).map(WorkerId) {
        let answer = processes.ask(worker, b"anybody there?")?;
        assert_eq!(answer, [&b"anybody there?"[..], &workers.to_le_bytes()].concat());
    }
    Ok((processes, ends))
}

fn cache(workers: u16, acts: &'static [Act]) -> KvCache<Processes> {
    KvCache::start(start(workers, LONG, acts, true).unwrap().0.in_lockstep()).unwrap()
}

/// A sequence of a request that is at most 24 tokens long, if there is room.
fn admit<W: Workers>(kv: &mut KvCache<W>, prompt: Prompt) -> Option<Sequence> {
    let mut request = Request::new(prompt.tokens);
    request.tokens_max = 24;
    let admitted = kv.admit(&mut [request].into(), u64::MAX).unwrap().admitted.pop();
    admitted.map(|(_, sequence)| sequence)
}

/// Requests that share prefixes come and go, and are evicted. What was decided, step by step.
fn play<W: Workers>(kv: &mut KvCache<W>) -> Vec<String> {
    let mut decided = Vec::new();
    let mut lives: Vec<(Sequence, Option<u64>)> = Vec::new();
    for round in 0..40 {
        let step = kv.begin_step().unwrap();
        lives.retain_mut(|(sequence, out)| {
            if let Some(of) = out.take() {
                kv.commit(sequence, of, &[7]).unwrap();
            }
            sequence.known() < 22 && matches!(kv.reserve(sequence, 1), Ok(Room::Given(_)))
        });
        if round % 3 == 0 {
            let sequence = admit(kv, Prompt::new(round / 3 % 5, 17));
            lives.extend(sequence.map(|sequence| (sequence, None)));
        }
        let mut batch: Vec<_> = lives.iter_mut().map(|(sequence, _)| sequence).collect();
        kv.stage(&step, &mut batch).unwrap();
        for (sequence, out) in &mut lives {
            *out = sequence.awaits();
            let ids = kv.manager().block_ids(GroupId(0), sequence);
            decided.push(format!("{round}: {ids:?}"));
        }
        kv.finish_step(step).unwrap();
    }
    drop(lives);
    kv.drain().unwrap();
    decided.push(format!("{:?}", kv.manager().stats()));
    decided
}

#[test]
fn workers_of_other_processes_carry_out_what_this_one_would() {
    let sim = sim(config());
    sim.set_pace(Pace::Slowest);
    let stream = Stream::new(&device(&sim)).unwrap();
    let mut here = KvCache::new(&[stream], of_cache()).unwrap();
    let decided = play(&mut here);
    assert!(here.manager().stats().offloaded_blocks > 0);
    assert!(here.manager().stats().onboarded_blocks > 0);
    here.close().unwrap();
    for workers in [1, 2] {
        let mut there = cache(workers, &[]);
        assert_eq!(play(&mut there), decided, "{workers} workers");
        let said = there.close().unwrap();
        assert!(said.iter().all(|said| said == b"all is well"));
        assert_eq!(said.len(), usize::from(workers));
    }
}

/// A request that is computed until it has so many tokens, and admitted again when it is lost: how often that was.
fn answer(kv: &mut KvCache<Processes>, tokens: u64) -> Result<u32, StepError> {
    let (mut running, mut lost): (Option<Sequence>, _) = (None, 0);
    while running.as_ref().is_none_or(|sequence| sequence.known() < tokens) {
        let step = kv.begin_step()?;
        let number = step.number();
        let again = || admit(kv, Prompt::new(1, 17)).unwrap();
        let mut sequence = running.take().unwrap_or_else(again);
        kv.stage_with(&step, &mut [&mut sequence], &number.to_le_bytes())?;
        kv.finish_step(step)?;
        kv.drain()?;
        match kv.commit(&mut sequence, number, &[7]) {
            Ok(_) => {
                let said = |worker| kv.workers().result(WorkerId(worker), number);
                assert_eq!(said(0), Some(&number.to_le_bytes()[..]));
                assert_eq!(said(1), said(0), "each worker has told of its step");
                assert_eq!(said(2), None);
                kv.reserve(&mut sequence, 1).unwrap().given().unwrap();
                running = Some(sequence);
            }
            Err(CommitError::Sequence(SequenceError::Lost { worker: WorkerId(1) })) => {
                lost += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    Ok(lost)
}

#[test]
fn a_worker_that_fails_in_any_way_is_replaced_and_its_sequences_are_computed_again() {
    for (acts, timeout, reason) in [
        (&[Act::Ends(4)][..], LONG, "the process has ended"),
        (&[Act::Refuses(4)], LONG, "the process cannot go on: no more ink"),
        (&[Act::Fails(4)], LONG, "the process completed step 4 and has not computed it"),
        (&[Act::Prints(4)], LONG, "the process said what cannot be read: a frame begins with"),
        (&[Act::IsSilent(4)], Duration::from_secs(15), "the process was silent for 15 s"),
    ] {
        let (workers, ends) = start(2, timeout, acts, true).unwrap();
        let mut kv = KvCache::start(workers.in_lockstep()).unwrap();
        assert_eq!(answer(&mut kv, 22).unwrap(), 1, "{acts:?}");
        let [replaced] = kv.workers().replaced() else { panic!("{acts:?}") };
        assert_eq!((replaced.worker, replaced.completed), (WorkerId(1), 3));
        assert_eq!((replaced.staged, replaced.voided), (4, 1));
        assert!(replaced.reason.starts_with(reason), "{acts:?}: {}", replaced.reason);
        assert!(ends.try_recv().is_ok(), "{acts:?}: it had ended before another took its place");
        // What it told before counts, and nothing more of it.
        assert_eq!(kv.workers().result(WorkerId(0), 3), None, "it was there long enough");
        play(&mut kv);
        kv.close().unwrap();
    }
}

#[test]
fn a_worker_that_fails_again_and_again_ends_the_cache() {
    static FAILS: [Act; 4] = [Act::Ends(3), Act::Differs, Act::Differs, Act::Differs];
    let mut kv = cache(2, &FAILS[..3]);
    assert_eq!(answer(&mut kv, 22).unwrap(), 1, "others fail before they have begun");
    let mut kv = cache(2, &FAILS);
    let Err(StepError::Worker(failed)) = answer(&mut kv, 22) else { panic!("it goes on") };
    assert_eq!(failed.worker, WorkerId(1));
    assert!(matches!(failed.fault, WorkerFault::Refused { .. }), "{failed:?}");
    // What went wrong once is not forgotten.
    assert!(answer(&mut kv, 22).is_err());
}

#[test]
fn the_others_do_not_go_on_without_a_worker_that_has_no_successor() {
    static FAILS: [Act; 4] = [Act::Ends(3), Act::Differs, Act::Differs, Act::Differs];
    let mut kv = KvCache::start(start(2, LONG, &FAILS, true).unwrap().0).unwrap();
    answer(&mut kv, 22).unwrap_err();
    // An engine that looks at no error asks once more, in whatever order.
    for _ in 0..4 {
        assert!(matches!(kv.begin_step(), Err(StepError::Worker(_))));
        assert!(kv.drain().is_err());
    }
    // Nor in a step that was open meanwhile.
    let mut kv = cache(2, &FAILS);
    let mut sequence = None;
    for number in 1..=3 {
        let step = kv.begin_step().unwrap();
        let again = || admit(&mut kv, Prompt::new(1, 17)).unwrap();
        let sequence = sequence.get_or_insert_with(again);
        kv.stage(&step, &mut [&mut *sequence]).unwrap();
        kv.finish_step(step).unwrap();
        if number < 3 {
            kv.drain().unwrap();
            kv.commit(sequence, number, &[7]).unwrap();
            kv.reserve(sequence, 1).unwrap().given().unwrap();
        }
    }
    let step = kv.begin_step().unwrap();
    assert!(kv.drain().is_err());
    let refused = kv.stage(&step, &mut []).unwrap_err();
    assert!(matches!(refused, StepError::Worker(_)), "{refused}");
}

#[test]
fn the_others_do_not_go_on_without_a_worker_whose_successor_could_not_be_started_for_a_panic() {
    static PANICS: [Act; 2] = [Act::Ends(2), Act::Panics];
    for lockstep in [false, true] {
        let workers = start(2, LONG, &PANICS, true).unwrap().0;
        let workers = if lockstep { workers.in_lockstep() } else { workers };
        let mut kv = KvCache::start(workers).unwrap();
        let caught = catch_unwind(AssertUnwindSafe(|| answer(&mut kv, 22).is_ok()));
        assert!(caught.is_err());
        for _ in 0..3 {
            let refused = kv.begin_step().map(|step| {
                kv.stage(&step, &mut []).unwrap();
                kv.finish_step(step).unwrap();
            });
            assert!(matches!(refused, Err(StepError::Worker(_))), "{refused:?}");
        }
    }
}

#[test]
fn the_blocks_of_a_worker_that_nobody_can_end_stay_locked() {
    let (workers, _) = start(2, Duration::from_secs(2), &[Act::Ends(4)], false).unwrap();
    let mut kv = KvCache::start(workers.in_lockstep()).unwrap();
    let Err(StepError::Worker(failed)) = answer(&mut kv, 22) else { panic!("it goes on") };
    assert!(matches!(failed.fault, WorkerFault::NotFenced { seconds: 2 }), "{failed:?}");
    assert!(
        kv.manager().pool(GroupId(0)).unwrap().stats().primary.retiring > 0,
        "the worker may still write them"
    );
}

#[test]
fn a_worker_with_other_blocks_is_refused_before_it_gets_a_plan() {
    let KvCacheOptions { sequences_max, step_tokens_max, .. } = of_cache();
    for (acts, expected) in [
        (
            &[Act::Differs][..],
            "group 0, tokens of a block: 8 at the worker, 4 at its manager;".to_owned(),
        ),
        (
            &[Act::Ranks(0, 2)],
            "number of the worker: 0 at the worker, 1 at its manager;".to_owned(),
        ),
        (&[Act::Ranks(1, 3)], "number of workers: 3 at the worker, 2 at its manager;".to_owned()),
        (&[Act::Ranks(1, 1)], "worker 1 of 1: give its number, counted from 0,".to_owned()),
        (
            &[Act::HasRoomFor(1, 64)],
            format!("most sequences: 1 at the worker, {sequences_max} at its manager;"),
        ),
    ] {
        let (workers, _) = start(2, LONG, acts, true).unwrap();
        let error = KvCache::start(workers).unwrap_err();
        let said = format!("{error:?}");
        let BuildError::Worker(failed) = error else { panic!("{said}") };
        assert!(matches!(failed.fault, WorkerFault::Unusable { .. }), "{failed:?}");
        assert!(said.contains(&expected), "{said}");
    }
    assert!(step_tokens_max > 1);
}

#[test]
fn a_worker_with_less_host_memory_than_the_options_say_is_used_with_what_it_has() {
    let (workers, _) = start(2, LONG, &[Act::LacksHostMemory], true).unwrap();
    let mut kv = KvCache::start(workers.in_lockstep()).unwrap();
    let blocks = kv.manager().pool(GroupId(0)).unwrap().stats().secondary.blocks;
    assert_eq!(blocks, 16, "two slabs of three");
    play(&mut kv);
    kv.close().unwrap();
}

/// Of more than one, on the word of one.
#[test]
fn what_comes_to_the_tier_of_a_worker_is_found_by_the_manager() {
    let (workers, _) = start_with(over(0), 2, LONG, &[Act::Gains], true).unwrap();
    let mut kv = KvCache::start(workers).unwrap();
    for _ in 0..2 {
        let step = kv.begin_step().unwrap();
        kv.stage(&step, &mut []).unwrap();
        kv.finish_step(step).unwrap();
        kv.drain().unwrap();
    }
    assert_eq!(kv.manager().lower_stats().names, [GAINED, 0]);
    assert!(kv.workers().replaced().is_empty());
    kv.close().unwrap();
}

#[test]
fn a_worker_takes_no_record_that_another_rank_has_stored() {
    let connect = |_| {
        let (here, there) = UnixStream::pair()?;
        let own = there.try_clone()?;
        thread::Builder::new().spawn(move || {
            let connection = Connection::socket(there).unwrap();
            serve(connection, |orders| work(orders, Act::Shares, &own)).unwrap();
        })?;
        Connection::socket(here)
    };
    let mut workers = Processes::start(over_shared(0), 2, LONG, connect).unwrap();
    (0..2).for_each(|worker| drop(workers.ask(WorkerId(worker), b"").unwrap()));
    let mut kv = KvCache::start(workers.in_lockstep()).unwrap();
    play(&mut kv);
    let stats = format!("{:?}", kv.manager().lower_stats());
    kv.close().unwrap();
    let Shared { offered, formats, .. } = SHARED.lock().unwrap().take().unwrap();
    let others: Vec<_> = offered.iter().filter(|(of, to, _)| of != to).collect();
    assert!(!others.is_empty(), "{stats}");
    assert!(others.iter().all(|(.., is_taken)| !is_taken), "each has heads of its own: {others:?}");
    assert!(offered.iter().all(|(of, to, is_taken)| of != to || *is_taken));
    assert!(formats.len() == 2 && formats[0] != formats[1], "{formats:x?}");
}

#[test]
fn memory_follows_the_budget_in_all_workers() {
    let mut kv = cache(2, &[]);
    let all = kv.workers().mapped_blocks();
    assert_eq!(all, 24);
    kv.set_budget(GroupId(0), Tier::Primary, 8).unwrap();
    play(&mut kv);
    assert_eq!(kv.workers().mapped_blocks(), 8, "nothing is used beyond it");
    assert_eq!(kv.manager().pool(GroupId(0)).unwrap().stats().primary.blocks, 8);
    assert!(kv.set_budget(GroupId(0), Tier::Primary, 25).is_err());
    kv.set_budget(GroupId(0), Tier::Primary, 24).unwrap();
    assert_eq!(
        kv.manager().pool(GroupId(0)).unwrap().stats().primary.blocks,
        8,
        "others have no memory yet"
    );
    let step = kv.begin_step().unwrap();
    assert_eq!(kv.manager().pool(GroupId(0)).unwrap().stats().primary.blocks, 24);
    kv.finish_step(step).unwrap();
    kv.close().unwrap();
}

#[test]
fn a_cache_that_is_dropped_leaves_its_workers_to_end() {
    let (ended, ends) = mpsc::channel();
    let connect = move |_| {
        let (here, there) = UnixStream::pair()?;
        let (own, ended) = (there.try_clone()?, ended.clone());
        thread::Builder::new().spawn(move || {
            let connection = Connection::socket(there).unwrap();
            let served = serve(connection, |orders| work(orders, Act::Works, &own));
            ended.send(served.is_ok())
        })?;
        Connection::socket(here)
    };
    let mut workers = Processes::start(of_cache(), 2, LONG, connect).unwrap();
    (0..2).for_each(|worker| drop(workers.ask(WorkerId(worker), b"").unwrap()));
    drop(KvCache::start(workers).unwrap());
    assert_eq!([ends.recv(), ends.recv()], [Ok(true), Ok(true)]);
}

#[test]
fn no_workers_and_no_connection_are_refused() {
    let none = |_| -> std::io::Result<Connection> { Err(std::io::ErrorKind::NotFound.into()) };
    assert!(matches!(
        Processes::start(of_cache(), 0, LONG, none).unwrap_err(),
        BuildError::Options(_)
    ));
    let error = Processes::start(of_cache(), 1, LONG, none).unwrap_err();
    let BuildError::Worker(failed) = error else { panic!("{error:?}") };
    assert!(matches!(failed.fault, WorkerFault::Start(_)), "{failed:?}");
}
