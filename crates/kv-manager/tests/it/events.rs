//! Events: what is told of cached content, when, and what a reader that lags is told.

use crate::prelude::*;

fn watched(device: u64, host: u64, events_max: usize) -> Manager {
    made(ManagerOptions { events_max, ..options(device, host) })
}

fn read(reader: &mut EventReader) -> Vec<CacheEvent> {
    let mut events = Vec::new();
    let count = reader.read(&mut events).unwrap();
    assert_eq!(count, events.len());
    events
}

/// A reader that has read what there is.
fn reader(manager: &Manager) -> EventReader {
    let mut reader = manager.events().unwrap();
    assert_eq!(read(&mut reader)[0], CacheEvent::Cleared);
    reader
}

/// A manager that is watched, and a reader of its events.
fn read_from_start(device: u64, host: u64, events_max: usize) -> (Manager, EventReader) {
    let manager = watched(device, host, events_max);
    let reader = reader(&manager);
    (manager, reader)
}

fn stored(event: &CacheEvent) -> &StoredBlocks {
    match event {
        CacheEvent::Stored(stored) => stored,
        other => panic!("{other:?}"),
    }
}

fn names(ids: Range<u32>) -> Vec<BlockHash> {
    common::names(ids)
}

#[test]
fn a_manager_keeps_no_events_unless_it_is_asked() {
    assert!(watched(8, 0, 0).events().is_none());
}

#[test]
fn a_prompt_is_one_event_when_its_step_is_complete_on_all_workers() {
    let options = ManagerOptions { workers: 2, events_max: 64, ..options(8, 0) };
    let mut manager = made(options);
    let mut reader = reader(&manager);
    let mut sequence = admit(&mut manager, 0..10);
    staged(&mut manager, &mut [&mut sequence]);
    assert_eq!(read(&mut reader), []);
    let completion =
        |worker| Completion { worker: WorkerId(worker), step: 1, outcome: Outcome::Done };
    manager.complete(completion(0)).unwrap();
    assert_eq!(read(&mut reader), [], "the other worker has not written its share");
    // A reader that begins now waits for it as well.
    let mut late = self::reader(&manager);
    manager.complete(completion(1)).unwrap();
    let events = read(&mut reader);
    assert_eq!(events.len(), 1);
    let told = stored(&events[0]);
    assert_eq!((told.group, told.tier, told.block_tokens), (GroupId(0), Tier::Primary, 4));
    assert_eq!((&told.names, told.parent), (&names(0..8), None));
    assert_eq!(told.token_ids, (0..8).collect::<Vec<_>>());
    assert_eq!(told.content, None);
    assert_eq!(read(&mut late), events);
    assert_eq!(read(&mut reader), []);
}

#[test]
fn decoded_blocks_follow_their_parent() {
    let (mut manager, mut reader) = read_from_start(8, 0, 64);
    let mut sequence = computed(&mut manager, 0..6);
    for id in 6..9 {
        let at = manager.completed_step();
        manager.commit(&mut sequence, at, &[id]).unwrap();
        go_on(&mut manager, &mut sequence, 1);
    }
    let events = read(&mut reader);
    assert_eq!(events.len(), 1, "both blocks are one event: {events:?}");
    assert_eq!(stored(&events[0]).names, names(0..8));
    let mut other = admit(&mut manager, (0..4).chain(20..30));
    step(&mut manager, &mut [&mut other]);
    let events = read(&mut reader);
    let told = stored(&events[0]);
    assert_eq!((told.parent, told.names.len()), (Some(names(0..4)[0]), 2));
    assert_eq!((told.first_token, told.kind), (Some(4), GroupKind::Full));
    assert_eq!(told.token_ids, (20..28).collect::<Vec<_>>());
}

#[test]
fn what_was_read_before_stays_as_it_was() {
    let (mut manager, mut reader) = read_from_start(8, 0, 64);
    let mut all = Vec::new();
    let mut sequence = computed(&mut manager, 0..8);
    reader.read(&mut all).unwrap();
    let published = all.clone();
    manager.commit(&mut sequence, 1, &[8]).unwrap();
    manager.extend(&mut sequence, &[9, 10, 11]).unwrap();
    go_on(&mut manager, &mut sequence, 4);
    assert_eq!(reader.read(&mut all).unwrap(), 1, "the next block is an event of its own");
    assert_eq!(all[..published.len()], published);
}

#[test]
fn what_a_failed_step_has_named_is_never_told() {
    for reads_before in [false, true] {
        let (mut manager, mut reader) = read_from_start(8, 0, 64);
        let mut sequence = admit(&mut manager, 0..8);
        staged(&mut manager, &mut [&mut sequence]);
        if reads_before {
            assert_eq!(read(&mut reader), []);
        }
        complete(&mut manager, 1, Outcome::Failed);
        assert_eq!(read(&mut reader), []);
        drop(sequence);
        assert_eq!(read(&mut reader), []);
    }
}

#[test]
fn content_moves_between_tiers_under_its_name() {
    let (mut manager, mut reader) = read_from_start(2, 4, 64);
    drop(computed(&mut manager, 0..8));
    read(&mut reader);
    drop(computed(&mut manager, 100..108));
    let mut moved = HashSet::new();
    for event in read(&mut reader) {
        if let CacheEvent::Moved { from, to } = event {
            assert_eq!((from, to.tier), (Tier::Primary, Tier::Secondary));
            assert_eq!(to.token_ids.len(), 4 * to.names.len());
            moved.extend(to.names);
        }
    }
    assert_eq!(moved, names(0..8).into_iter().collect());
    // What has no room there either is removed.
    for first in [200, 300, 400] {
        drop(computed(&mut manager, first..first + 8));
    }
    let removed: HashSet<_> = read(&mut reader)
        .into_iter()
        .filter_map(|event| match event {
            CacheEvent::Removed { tier: Tier::Secondary, names, .. } => Some(names),
            _ => None,
        })
        .flatten()
        .collect();
    assert!(removed.is_superset(&moved), "{removed:?} of {moved:?}");
}

#[test]
fn a_reader_that_lags_is_told_and_begins_anew() {
    let (mut manager, mut reader) = read_from_start(16, 0, 4);
    drop(computed(&mut manager, 0..32));
    let mut events = Vec::new();
    let lost = reader.read(&mut events).unwrap_err();
    assert_eq!((lost.events, events.len()), (4, 0));
    let events = read(&mut reader);
    assert_eq!(events[0], CacheEvent::Cleared);
    assert_eq!(stored(&events[1]).names, names(0..32), "in one event, from the first on");
    assert_eq!(stored(&events[1]).token_ids, (0..32).collect::<Vec<_>>());
    assert_eq!(manager.forget(&names(0..32)[7..]), 1);
    let removed = CacheEvent::Removed {
        group: GroupId(0),
        tier: Tier::Primary,
        names: names(0..32).split_off(7),
    };
    assert_eq!(read(&mut reader), [removed]);
}

#[test]
fn a_repair_tells_every_branch_behind_its_parent() {
    let mut manager = watched(64, 0, 4);
    for branch in 1..5 {
        drop(computed(&mut manager, (0..8).chain(branch * 100..branch * 100 + 8)));
    }
    let mut reader = manager.events().unwrap();
    let mut known = HashSet::new();
    for event in &read(&mut reader)[1..] {
        let told = stored(event);
        assert!(told.parent.is_none_or(|parent| known.contains(&parent)), "{told:?}");
        known.extend(told.names.iter().copied());
    }
    assert_eq!(known.len(), 2 + 4 * 2);
}

#[test]
fn a_repair_tells_what_is_being_computed_behind_its_parents() {
    let mut manager = watched(8, 0, 64);
    // The end of a prefix is evicted first, so the blocks of the next one are in another order than their numbers.
    drop(computed(&mut manager, 0..32));
    let mut sequence = admit(&mut manager, 100..132);
    staged(&mut manager, &mut [&mut sequence]);
    assert!(
        sequence.block(GroupId(0), 0) > sequence.block(GroupId(0), 7),
        "{:?}",
        manager.block_ids(GroupId(0), &sequence)
    );
    let mut reader = reader(&manager);
    done(&mut manager, 2);
    let events = read(&mut reader);
    assert_eq!(events.len(), 1, "{events:?}");
    assert_eq!(stored(&events[0]).names, names(100..132));
}

#[test]
fn a_reset_clears_without_a_loss_however_much_was_cached() {
    let (mut manager, mut reader) = read_from_start(32, 0, 4);
    for first in 0..4 {
        drop(computed(&mut manager, first * 100..first * 100 + 4));
    }
    assert_eq!(read(&mut reader).len(), 4);
    // Far more is forgotten than there is room for in the log.
    drop(computed(&mut manager, 1000..1008));
    read(&mut reader);
    for first in 4..8 {
        drop(computed(&mut manager, first * 100..first * 100 + 4));
    }
    manager.reset();
    assert_eq!(read(&mut reader), [CacheEvent::Cleared]);
    drop(computed(&mut manager, 0..4));
    let events = read(&mut reader);
    assert_eq!(stored(&events[0]).token_ids, [0, 1, 2, 3]);
    assert_ne!(stored(&events[0]).names, names(0..4), "in the new generation");
}

#[test]
fn routers_know_content_by_one_name_before_and_after_a_reset() {
    let (mut manager, mut reader) = read_from_start(16, 0, 64);
    // Names of its own, and names that the engine gives.
    let given = [1, 2].map(|name| BlockHash::from_u128((name << 64) | name)).to_vec();
    let mut tell = |manager: &mut Manager| {
        drop(computed(manager, 0..9));
        let mut request = [Request::named(9, given.clone())];
        let mut named = admitted(manager.ask_all(&mut request, u64::MAX).pop().unwrap());
        step(manager, &mut [&mut named]);
        read(&mut reader)
    };
    let before = tell(&mut manager);
    manager.reset();
    let after = tell(&mut manager);
    assert_eq!(after[0], CacheEvent::Cleared);
    assert_eq!((before.len(), after.len()), (2, 3));
    for (before, after) in before.iter().zip(&after[1..]) {
        let [before, after] = [before, after].map(|event| &stored(event).names);
        assert!(before.iter().all(|name| !after.contains(name)));
        let known =
            |names: &[BlockHash]| names.iter().map(|&name| vllm::block_hash(name)).collect();
        let [before, after]: [Vec<_>; 2] = [known(before), known(after)];
        assert_eq!(before, after);
    }
}

#[test]
fn a_lost_worker_clears() {
    let (mut manager, mut reader) = read_from_start(8, 0, 64);
    let sequence = computed(&mut manager, 0..8);
    read(&mut reader);
    manager.lose_worker(WorkerId(0)).unwrap();
    assert_eq!(read(&mut reader), [CacheEvent::Cleared]);
    drop(sequence);
    assert_eq!(read(&mut reader), [], "it is lost, and names nothing");
}

#[test]
fn a_twin_that_takes_a_name_over_is_told_with_its_ids() {
    let (mut manager, mut reader) = read_from_start(8, 0, 64);
    // Both compute the same blocks in one step; one bears the names.
    let [mut first, mut twin] = twins(&mut manager, 0..9);
    step(&mut manager, &mut [&mut first, &mut twin]);
    assert_eq!(stored(&read(&mut reader)[0]).names, names(0..8));
    manager.commit(&mut twin, 1, &[9]).unwrap();
    go_on(&mut manager, &mut twin, 1);
    drop(first);
    // What it has named is evicted.
    drop(computed(&mut manager, 100..119));
    let events = read(&mut reader);
    let CacheEvent::Removed { names: gone, .. } = &events[0] else { panic!("{events:?}") };
    assert_eq!(gone.len(), 2);
    drop(twin);
    let events = read(&mut reader);
    assert_eq!((&stored(&events[0]).names, stored(&events[0]).parent), (&names(0..8), None));
    assert_eq!(stored(&events[0]).token_ids, (0..8).collect::<Vec<_>>());
}

#[test]
fn the_content_and_an_engines_own_names_are_told() {
    let (mut manager, mut reader) = read_from_start(16, 0, 64);
    let mut request = Request::new((0..5).collect());
    request.content = Content { adapter: b"style".to_vec(), ..Content::default() };
    let mut sequence = admitted(ask(&mut manager, request));
    step(&mut manager, &mut [&mut sequence]);
    let events = read(&mut reader);
    let content = stored(&events[0]).content.clone().unwrap();
    assert_eq!(content.adapter, b"style");
    let own = vec![BlockHash::from_u128(7), BlockHash::from_u128(8)];
    let request = Request::named(9, own.clone());
    let mut sequence = admitted(ask(&mut manager, request));
    step(&mut manager, &mut [&mut sequence]);
    let events = read(&mut reader);
    assert_eq!((&stored(&events[0]).names, stored(&events[0]).token_ids.len()), (&own, 0));
    let none: Tokens<'_> = Tokens::Named { count: 1, names: &[] };
    manager.commit(&mut sequence, 2, none).unwrap();
    assert_eq!(read(&mut reader), []);
}

#[test]
fn a_reader_on_another_thread_sees_every_name_with_its_ids() {
    let mut manager = watched(64, 16, 1 << 16);
    let mut reader = manager.events().unwrap();
    let ended = std::sync::atomic::AtomicBool::new(false);
    let mirror = std::thread::scope(|scope| {
        let mirror = scope.spawn(|| {
            let mut mirror: HashSet<(BlockHash, Tier)> = HashSet::new();
            let mut last = false;
            loop {
                for event in read(&mut reader) {
                    match event {
                        CacheEvent::Stored(told) => {
                            assert_eq!(told.token_ids.len(), 4 * told.names.len(), "{told:?}");
                            mirror.extend(told.names.iter().map(|&name| (name, told.tier)));
                        }
                        CacheEvent::Moved { from, to } => {
                            assert_eq!(to.token_ids.len(), 4 * to.names.len());
                            for name in to.names {
                                assert!(mirror.remove(&(name, from)));
                                mirror.insert((name, to.tier));
                            }
                        }
                        CacheEvent::Removed { tier, names, .. } => {
                            names.iter().for_each(|&name| assert!(mirror.remove(&(name, tier))));
                        }
                        CacheEvent::Cleared => mirror.clear(),
                        other => panic!("{other:?}"),
                    }
                }
                if last {
                    return mirror;
                }
                last = ended.load(std::sync::atomic::Ordering::Acquire);
            }
        });
        for first in 0..400 {
            drop(computed(&mut manager, first * 10..first * 10 + 40));
        }
        ended.store(true, std::sync::atomic::Ordering::Release);
        mirror.join().unwrap()
    });
    let blocks = manager.first_pool().snapshot().blocks;
    let there = blocks.iter().filter_map(|view| Some((view.hash?, view.location.tier)));
    assert_eq!(mirror, there.collect());
    done(&mut manager, 0);
}

/// A router's tree: what is stored behind a parent that it does not know is dropped, as NVIDIA Dynamo and llm-d do.
#[derive(Default)]
struct Router {
    known: HashSet<(BlockHash, Tier)>,
    dropped: usize,
}

impl Router {
    fn take(&mut self, reader: &mut EventReader) {
        for event in read(reader) {
            match event {
                CacheEvent::Stored(stored) => self.store(&stored),
                CacheEvent::Moved { from, to } => {
                    self.store(&to);
                    to.names.iter().for_each(|&name| _ = self.known.remove(&(name, from)));
                }
                CacheEvent::Removed { tier, names, .. } => {
                    names.iter().for_each(|&name| _ = self.known.remove(&(name, tier)));
                }
                CacheEvent::Cleared => self.known.clear(),
                other => panic!("{other:?}"),
            }
        }
    }

    fn store(&mut self, stored: &StoredBlocks) {
        if stored.parent.is_none_or(|parent| self.knows(parent)) {
            self.known.extend(stored.names.iter().map(|&name| (name, stored.tier)));
        } else {
            self.dropped += stored.names.len();
        }
    }

    fn knows(&self, name: BlockHash) -> bool {
        Tier::ALL.iter().any(|&tier| self.known.contains(&(name, tier)))
    }

    /// Blocks of these ids that it takes for cached.
    fn score(&self, ids: Range<u32>) -> usize {
        names(ids).into_iter().take_while(|&name| self.knows(name)).count()
    }
}

fn found(manager: &mut Manager, ids: Range<u32>) -> usize {
    let mut request = Request::new(ids.chain([u32::MAX]).collect());
    request.waits = false;
    admitted(ask(manager, request)).cached_tokens() as usize / 4
}

/// Decodes these ids, of which `at` has sampled the first.
fn decode(manager: &mut Manager, sequence: &mut Sequence, at: u64, ids: Range<u32>) -> u64 {
    ids.fold(at, |at, id| {
        manager.commit(sequence, at, &[id]).unwrap();
        manager.reserve(sequence, 1).unwrap().given().unwrap();
        step(manager, &mut [sequence]).step
    })
}

/// A short prompt decodes what a longer one has cached, whose names go then. What is decoded behind them has no parent, and
/// a lookup does not find it, before the short one's first blocks take the names over.
#[test]
fn h40_what_follows_a_name_that_has_gone_is_told_when_a_twin_takes_that_over() {
    let (mut manager, mut reader) = read_from_start(32, 0, 4096);
    let mut router = Router::default();
    let mut short = admit(&mut manager, 0..9);
    let at = step(&mut manager, &mut [&mut short]).step;
    let long = computed(&mut manager, 0..17);
    drop(long);
    let at = decode(&mut manager, &mut short, at, 9..17);
    router.take(&mut reader);
    assert_eq!(router.score(0..16), 4);
    let free = manager.first_pool().claimable() as u32;
    drop(admit(&mut manager, 1000..1000 + 4 * free));
    decode(&mut manager, &mut short, at, 17..30);
    router.take(&mut reader);
    assert_eq!((router.score(0..28), found(&mut manager, 0..28)), (2, 2));
    drop(short);
    step(&mut manager, &mut []);
    router.take(&mut reader);
    assert_eq!((router.score(0..28), found(&mut manager, 0..28)), (7, 7));
    assert_eq!(router.dropped, 0, "blocks were told of behind a parent that is cached nowhere");
}

#[test]
fn h40_what_follows_a_name_that_goes_is_found_no_more() {
    let (mut manager, mut reader) = read_from_start(16, 0, 64);
    let mut router = Router::default();
    let sequence = computed(&mut manager, 0..17);
    router.take(&mut reader);
    assert_eq!(router.score(0..16), 4);
    assert_eq!(manager.forget(&names(0..4)), 1);
    let removed = |names| CacheEvent::Removed { group: GroupId(0), tier: Tier::Primary, names };
    let mut late = manager.events().unwrap();
    assert_eq!(read(&mut late), [CacheEvent::Cleared], "nothing of it is found");
    assert_eq!(read(&mut reader), [removed(names(0..16))]);
    assert_eq!(found(&mut manager, 0..16), 0);
    // Another one computes the first block again.
    drop(sequence);
    drop(computed(&mut manager, 0..5));
    for reader in [&mut reader, &mut late] {
        let events = read(reader);
        assert_eq!(events.len(), 1, "{events:?}");
        assert_eq!(stored(&events[0]).names, names(0..16));
        assert_eq!(stored(&events[0]).token_ids, (0..16).collect::<Vec<_>>());
    }
    assert_eq!(found(&mut manager, 0..16), 4);
}

/// A block has one name for all who have the salt. What comes before it has one with the salt, and one without it for those who
/// declare it shared.
#[test]
fn h40_what_an_engine_names_is_told_behind_what_comes_before_it_with_and_without_the_salt() {
    for shared_first in [true, false] {
        let (mut manager, mut reader) = read_from_start(16, 0, 64);
        let engines: Vec<_> = [7, 8, 9].map(BlockHash::from_u128).into();
        let request = |manager: &mut Manager, blocks: usize, shared_tokens: u64| {
            let mut request = Request::named(4 * blocks as u64 + 1, engines[..blocks].to_vec());
            request.content =
                Content { salt: b"own".to_vec(), shared_tokens, ..Content::default() };
            admitted(ask(manager, request))
        };
        let [shared, own] = if shared_first { [4, 0] } else { [0, 4] };
        let mut sequence = request(&mut manager, 2, shared);
        step(&mut manager, &mut [&mut sequence]);
        drop(sequence);
        let told = stored(&read(&mut reader)[0]).names.clone();
        assert_eq!(manager.forget(&told[..1]), 1);
        assert!(
            matches!(&read(&mut reader)[..], [CacheEvent::Removed { names, .. }] if *names == told)
        );
        // The first block comes back under the other name.
        let mut sequence = request(&mut manager, 1, own);
        step(&mut manager, &mut [&mut sequence]);
        drop(sequence);
        // Two events, since it is said of each block what was declared of it.
        let events = read(&mut reader);
        assert_eq!(events.len(), 2, "{events:?}");
        let [first, next] = [0, 1].map(|at| stored(&events[at]));
        assert_ne!(first.names, told[..1]);
        assert_eq!((&next.names[..], next.parent), (&told[1..], Some(first.names[0])));
        let late = read(&mut manager.events().unwrap());
        assert_eq!(late[1..], events);
        assert_eq!(request(&mut manager, 3, own).cached_tokens(), 8);
        assert_eq!(request(&mut manager, 3, shared).cached_tokens(), 0);
    }
}

/// A block moves while the one of its two predecessors comes back that it was named behind: that one is told of first.
#[test]
fn h40_what_moves_is_told_behind_what_has_come_back_meanwhile() {
    let (mut manager, mut reader) = read_from_start(6, 4, 64);
    let engines: Vec<_> = [7, 8].map(BlockHash::from_u128).into();
    let compute = |manager: &mut Manager, blocks: usize, shared_tokens: u64| {
        let mut request = Request::named(4 * blocks as u64 + 1, engines[..blocks].to_vec());
        request.content = Content { salt: b"own".to_vec(), shared_tokens, ..Content::default() };
        let mut sequence = admitted(ask(manager, request));
        step(manager, &mut [&mut sequence]);
        drop(sequence);
        step(manager, &mut []);
    };
    compute(&mut manager, 2, 0);
    let told = stored(&read(&mut reader)[0]).names.clone();
    assert_eq!(manager.forget(&told[..1]), 1);
    compute(&mut manager, 1, 4);
    // The second block is found all the time, behind the other name.
    let events = read(&mut reader);
    assert_eq!(events.len(), 2, "{events:?}");
    let mut known: HashSet<_> = [told[1], stored(&events[1]).names[0]].into();
    // No block is left, so what it claims takes the one behind it to host memory.
    let other = computed(&mut manager, 100..112);
    read(&mut reader);
    compute(&mut manager, 1, 0);
    drop(other);
    let mut moved = 0;
    for event in read(&mut reader) {
        let to = match &event {
            CacheEvent::Stored(to) | CacheEvent::Moved { to, .. } => to,
            other => panic!("{other:?}"),
        };
        moved += usize::from(matches!(event, CacheEvent::Moved { .. }));
        assert!(to.parent.is_none_or(|parent| known.contains(&parent)), "{event:?}");
        known.extend(&to.names);
    }
    assert!(moved == 1 && told.iter().all(|name| known.contains(name)));
}
