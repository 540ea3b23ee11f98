//! What tiers have had since before their workers began.

use crate::common::below::blocks_of;
use crate::prelude::*;

fn rig() -> Rig {
    Rig::with(ManagerOptions { workers: 2, lower: lower(), ..options(8, 8) })
}

/// Names of the blocks of these tokens, by a manager that forgets them again.
fn names(ids: Range<u32>) -> Vec<BlockHash> {
    rig().store(ids)
}

fn told(worker: u16, names: &[BlockHash]) -> Survivors {
    Survivors { worker: WorkerId(worker), tier: Tier::Third, blocks: blocks_of(names) }
}

fn stored(events: &[CacheEvent]) -> Vec<StoredBlocks> {
    let of = |event: &CacheEvent| match event {
        CacheEvent::Stored(of) => Some(of.clone()),
        _ => None,
    };
    events.iter().filter_map(of).collect()
}

#[test]
fn a_survivor_is_found_when_all_workers_have_told_of_it_and_loaded_like_any_block() {
    let names = names(0..12);
    let mut rig = rig();
    rig.manager.take_survivors(&told(0, &names)).unwrap();
    assert!(!rig.is_stored(names[0]), "the other worker has not told");
    rig.manager.take_survivors(&told(1, &names[..2])).unwrap();
    assert_eq!([0, 1, 2].map(|at| rig.is_stored(names[at])), [true, true, false]);
    let plan = rig.step(&mut []);
    assert_eq!(
        plan.forgets,
        [Forget::Block(Tier::Third, GroupId(0), names[2])],
        "one worker has it"
    );
    let mut wanted = request(0..14);
    let load = rig.load(&mut wanted);
    assert_eq!(load.blocks.iter().map(|(name, _)| *name).collect::<Vec<_>>(), names[..2]);
    rig.settle_all();
    assert_eq!(admitted(rig.again(&mut wanted)).cached_tokens(), 8);
}

#[test]
fn survivors_are_told_once_of_tiers_and_groups_that_there_are() {
    let names = names(0..12);
    let mut rig = rig();
    rig.manager.take_survivors(&told(0, &names)).unwrap();
    let again = rig.manager.take_survivors(&told(0, &names)).unwrap_err();
    assert!(matches!(again, CompletionError::Again { .. }), "{again}");
    let other = Survivors { tier: Tier::Fourth, ..told(1, &names) };
    assert!(matches!(rig.manager.take_survivors(&other), Err(CompletionError::NoTier { .. })));
    let nobody = told(9, &names);
    assert!(matches!(rig.manager.take_survivors(&nobody), Err(CompletionError::NoWorker { .. })));
    // Told twice in one breath, and of a group that there is not.
    let mut more = told(1, &[names[0], names[0]]);
    more.blocks.push((GroupId(5), names[1]));
    rig.manager.take_survivors(&more).unwrap();
    assert_eq!([0, 1].map(|at| rig.is_stored(names[at])), [true, false]);
}

#[test]
fn a_reset_forgets_what_was_told_before_it() {
    let names = names(0..12);
    let mut rig = rig();
    rig.manager.take_survivors(&told(0, &names)).unwrap();
    rig.manager.reset();
    rig.manager.take_survivors(&told(1, &names)).unwrap();
    assert!(names.iter().all(|&name| !rig.is_stored(name)));
}

#[test]
fn nothing_that_is_told_after_a_reset_is_found() {
    let names = names(0..12);
    let mut rig = rig();
    rig.manager.reset();
    rig.manager.take_survivors(&told(0, &names)).unwrap();
    rig.manager.take_survivors(&told(1, &names)).unwrap();
    // The next plan empties the tier.
    assert_eq!(rig.step(&mut []).forgets[0], Forget::All(Tier::Third));
    assert!(names.iter().all(|&name| !rig.is_stored(name)));
}

#[test]
fn what_a_tier_gains_is_found_and_loaded_like_any_block_and_may_be_missing() {
    let names = names(0..12);
    let mut rig = rig();
    let gained = |worker, tier, names: &[BlockHash]| Gained {
        worker: WorkerId(worker),
        tier,
        blocks: blocks_of(names),
    };
    rig.manager.take_gained(&gained(0, Tier::Third, &names[..2])).unwrap();
    let mut more = gained(1, Tier::Third, &names[1..3]);
    more.blocks.push((GroupId(5), names[0]));
    rig.manager.take_gained(&more).unwrap();
    assert!(names.iter().all(|&name| rig.is_stored(name)));
    let other = rig.manager.take_gained(&gained(0, Tier::Fourth, &names));
    assert!(matches!(other, Err(CompletionError::NoTier { .. })));
    let nobody = rig.manager.take_gained(&gained(9, Tier::Third, &names));
    assert!(matches!(nobody, Err(CompletionError::NoWorker { .. })));
    let mut wanted = request(0..14);
    let load = rig.load(&mut wanted);
    assert_eq!(load.blocks.iter().map(|(name, _)| *name).collect::<Vec<_>>(), names);
    // One worker does not have the last one.
    let settled = |worker, wrong| Settled { worker: WorkerId(worker), ticket: load.ticket, wrong };
    rig.manager.settle(&settled(0, vec![])).unwrap();
    rig.manager.settle(&settled(1, vec![(2, BlockFault::Missing)])).unwrap();
    assert!(!rig.is_stored(names[2]));
    assert_eq!(admitted(rig.again(&mut wanted)).cached_tokens(), 8);
}

#[test]
fn readers_of_events_are_told_of_survivors_and_of_their_place_when_they_are_loaded() {
    let all = names(0..12);
    let rules = ManagerOptions { workers: 2, lower: lower(), events_max: 64, ..options(8, 8) };
    let mut rig = Rig::with(rules);
    let mut reader = rig.manager.events().unwrap();
    let mut events = Vec::new();
    reader.read(&mut events).unwrap();
    assert_eq!(std::mem::take(&mut events), [CacheEvent::Cleared]);
    rig.manager.take_survivors(&told(0, &all)).unwrap();
    reader.read(&mut events).unwrap();
    assert_eq!(events, [], "the other worker has not told");
    rig.manager.take_survivors(&told(1, &all[..2])).unwrap();
    reader.read(&mut events).unwrap();
    let found = stored(&events);
    let mut told_of: Vec<_> = found.iter().flat_map(|of| of.names.clone()).collect();
    told_of.sort_unstable();
    let mut expected = all[..2].to_vec();
    expected.sort_unstable();
    assert_eq!((found.len(), events.len(), told_of), (2, 2, expected));
    assert!(found.iter().all(|of| of.tier == Tier::Third && !of.is_placed()));
    // Routers that keep trees would take each for the beginning of a prefix.
    let (mut bytes, mut none) = (Vec::new(), Vec::new());
    vllm::encode(&events, 0.0, None, &mut bytes);
    vllm::encode(&[], 0.0, None, &mut none);
    assert_eq!(bytes, none);
    // A reader that comes later is told the same.
    let mut late = Vec::new();
    rig.manager.events().unwrap().read(&mut late).unwrap();
    assert_eq!(stored(&late).len(), 2);
    // What is loaded is told with its place, what is gone with its name.
    let mut wanted = request(0..14);
    rig.load(&mut wanted);
    rig.settle_all();
    events.clear();
    reader.read(&mut events).unwrap();
    let [loaded] = &stored(&events)[..] else { panic!("{events:?}") };
    let place = (loaded.tier, loaded.names.as_slice(), loaded.parent, loaded.first_token);
    assert_eq!(place, (Tier::Secondary, &all[..2], None, Some(0)));
    assert!(loaded.is_placed());
    let blocks = blocks_of(&all[..1]);
    rig.manager.dropped(&Dropped { worker: WorkerId(1), tier: Tier::Third, blocks }).unwrap();
    events.clear();
    reader.read(&mut events).unwrap();
    let names = all[..1].to_vec();
    assert_eq!(events, [CacheEvent::Removed { group: GroupId(0), tier: Tier::Third, names }]);
}

#[test]
fn readers_of_events_are_told_of_what_a_tier_gains_once() {
    let mut all = names(0..12);
    all.sort_unstable();
    let mut rig = Rig::with(ManagerOptions { events_max: 64, lower: lower(), ..options(8, 8) });
    let mut reader = rig.manager.events().unwrap();
    let gained = |names: &[BlockHash]| Gained {
        worker: WorkerId(0),
        tier: Tier::Third,
        blocks: blocks_of(names),
    };
    let mut events = Vec::new();
    rig.manager.take_gained(&gained(&all[..2])).unwrap();
    rig.manager.take_gained(&gained(&all)).unwrap();
    reader.read(&mut events).unwrap();
    let mut told: Vec<_> = stored(&events).into_iter().flat_map(|stored| stored.names).collect();
    told.sort_unstable();
    assert_eq!(told, all, "each of them once");
    assert!(all.iter().all(|&name| rig.is_stored(name)));
    events.clear();
    let blocks = blocks_of(&all);
    rig.manager.dropped(&Dropped { worker: WorkerId(0), tier: Tier::Third, blocks }).unwrap();
    reader.read(&mut events).unwrap();
    let group = GroupId(0);
    assert_eq!(events, [CacheEvent::Removed { group, tier: Tier::Third, names: all }]);
}

/// What an engine has named with a salt follows a name with the salt, or without it for those who declare that shared.
#[test]
fn what_is_loaded_of_survivors_is_told_as_who_asks_for_it_knows_it() {
    let rules = ManagerOptions { lower: lower(), events_max: 64, ..options(16, 8) };
    let engines = [7, 8].map(BlockHash::from_u128);
    let asked = |blocks: usize, shared_tokens: u64| {
        let mut request = Request::named(4 * blocks as u64 + 1, engines[..blocks].to_vec());
        request.content = Content { salt: b"own".to_vec(), shared_tokens, ..Content::default() };
        request
    };
    let read = |reader: &mut EventReader| {
        let mut events = Vec::new();
        reader.read(&mut events).unwrap();
        events
    };
    let compute = |rig: &mut Rig, blocks, shared_tokens| {
        let mut sequence = admitted(rig.again(&mut asked(blocks, shared_tokens)));
        rig.step(&mut [&mut sequence]);
        sequence.cached_tokens()
    };
    let mut before = Rig::with(rules.clone());
    let mut reader = before.manager.events().unwrap();
    compute(&mut before, 2, 0);
    let all = stored(&read(&mut reader)).remove(0).names;
    let mut rig = Rig::with(rules);
    let mut reader = rig.manager.events().unwrap();
    rig.manager.take_survivors(&told(0, &all)).unwrap();
    assert_eq!(stored(&read(&mut reader)).len(), 2);
    let mut wanted = asked(2, 0);
    wanted.tokens_max = 9;
    rig.load(&mut wanted);
    rig.settle_all();
    let [loaded] = &stored(&read(&mut reader))[..] else { panic!() };
    assert_eq!((&loaded.names, loaded.first_token), (&all, Some(0)));
    assert_eq!(loaded.content.as_ref().map(|content| &content.salt[..]), Some(&b"own"[..]));
    // A reader that comes later is told the same of both tiers.
    let late = stored(&read(&mut rig.manager.events().unwrap()));
    let tiers: Vec<_> = late.iter().map(|of| (of.tier, of.names.len(), of.first_token)).collect();
    assert_eq!(tiers, [(Tier::Secondary, 2, Some(0)), (Tier::Third, 2, Some(0))]);
    assert_eq!(rig.manager.forget(&all[..1]), 1);
    assert_eq!(stored(&read(&mut reader)), []);
    // The first block comes back under the name without the salt.
    assert_eq!(compute(&mut rig, 1, 4), 0);
    let back = stored(&read(&mut reader));
    let found = rig.again(&mut asked(2, 4));
    assert_eq!(admitted(found).cached_tokens(), 8, "a lookup finds both");
    let names: Vec<_> = back.iter().flat_map(|stored| stored.names.clone()).collect();
    assert!(names.contains(&all[1]) && !names.contains(&all[0]), "{back:?}");
}

/// A tier that has had blocks.
#[derive(Debug)]
struct Old(Vec<(GroupId, BlockHash)>);

impl LowerTier for Old {
    fn store(&mut self, _: Vec<BlockSource>) {}
    fn load(&mut self, _: Vec<BlockSink>) {}
    fn forget(&mut self, _: &[(GroupId, BlockHash)]) {}
    fn clear(&mut self) {}
    fn poll(&mut self, _: &mut Vec<(GroupId, BlockHash)>) {}
    fn survivors(&mut self, found: &mut Vec<(GroupId, BlockHash)>) {
        found.append(&mut self.0);
    }
}

#[test]
fn a_worker_tells_what_its_tiers_have_had_also_in_threads() {
    let names = names(0..12);
    let old = || Old(blocks_of(&names));
    let tiers: Vec<Box<dyn LowerTier>> =
        vec![Box::new(old()), Box::new(kv_tier::Background::new(old()).unwrap())];
    let mut transfers = TierTransfers::new(tiers, 7);
    let [third, fourth] = transfers.survivors(WorkerId(1)).try_into().unwrap();
    assert_eq!(third, told(1, &names));
    assert_eq!(fourth, Survivors { tier: Tier::Fourth, ..told(1, &names) });
}
