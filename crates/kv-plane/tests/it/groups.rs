//! Caches of models whose layers are not all of one kind. Bytes are verified by the replay of traces, in
//! `kv-replay`.

use crate::prelude::*;

const WINDOW: GroupId = GroupId(1);
const STATE: GroupId = GroupId(2);
const WINDOW_BLOCKS: u32 = 12;
const STATES: u32 = 6;

/// Blocks of four tokens: full attention, a window of six tokens, and a state.
fn hybrid() -> KvCacheOptions {
    let mut options = options(shape(2, 32, 4), 32, 0);
    let window = GroupKind::Window { tokens: 6, sinks: 0 };
    let state = GroupKind::State { checkpoint_tokens: 16, drafts: 0 };
    options.groups.push(group(window, shape(3, 16, 4), WINDOW_BLOCKS, 0));
    options.groups.push(group(state, shape(1, 64, 1), STATES, 0));
    options
}

fn machine(devices: u32) -> (SimDriver, Vec<Stream>) {
    let sim = sim(SimConfig { devices, ..SimConfig::default() });
    let devices = open(&sim, devices);
    let streams = streams(&devices);
    (sim, streams)
}

/// A cache on such a machine.
fn cache(devices: u32, options: KvCacheOptions) -> (SimDriver, Vec<Stream>, KvCache) {
    let (sim, streams) = machine(devices);
    let cache = KvCache::new(&streams, options).unwrap();
    (sim, streams, cache)
}

/// The whole prompt of `tokens` tokens, computed.
fn computed(cache: &mut KvCache, tokens: u32) -> Sequence {
    computed_of(cache, 0..tokens)
}

fn computed_of(cache: &mut KvCache, ids: std::ops::Range<u32>) -> Sequence {
    let mut sequence = admitted(cache, Request::new(ids.collect()), 8);
    one_step(cache, &mut [&mut sequence]);
    while sequence.to_compute() > 0 {
        let chunk = sequence.to_compute().min(8) as u32;
        cache.reserve(&mut sequence, chunk).unwrap().given().unwrap();
        one_step(cache, &mut [&mut sequence]);
    }
    sequence
}

/// Entries of a block table as the device has them.
fn numbers(entries: &[TableEntry]) -> Vec<i32> {
    entries.iter().map(|entry| entry.get()).collect()
}

#[test]
fn entries_without_a_block_name_memory_that_nobody_owns() {
    let (_sim, streams, mut cache) = cache(1, hybrid());
    let sequence = computed(&mut cache, 30);
    for (group, null) in [(WINDOW, WINDOW_BLOCKS as i32), (STATE, STATES as i32)] {
        let ids = cache.manager().block_ids(group, &sequence).to_vec();
        let table = cache.parts()[0].batch().tables[usize::from(group.0)].block_table;
        let staged = read_words(&streams[0], table);
        let (own, padding) = staged.split_at(ids.len());
        for (&staged, &id) in own.iter().zip(&ids) {
            let id = id.get();
            assert_eq!(staged, if id < 0 { null } else { id }, "{group:?}: {own:?} of {ids:?}");
            assert!(id < null, "nobody is given it");
        }
        assert!(padding.iter().all(|&id| id == null), "{group:?}");
        let held = &cache.parts()[0].groups()[usize::from(group.0)];
        assert_eq!(held.ready_blocks(), null as u64 + 1, "it has memory");
    }
    let window = cache.manager().block_ids(WINDOW, &sequence);
    let there = |entry: &TableEntry| entry.block().is_some();
    assert!(!window[..5].iter().any(there), "blocks behind the window have left: {window:?}");
    assert!(there(&window[6]) && there(&window[7]));
    drop(sequence);
    cache.close().unwrap();
}

#[test]
fn bytes_by_way_are_those_of_each_groups_blocks() {
    let (_sim, _, mut cache) = cache(1, hybrid());
    drop(computed(&mut cache, 30));
    // Only states are gone on from: behind the checkpoints of 16 and of 28 tokens.
    let copied = cache.manager().stats().copied_on_write;
    assert_eq!(copied, 2);
    let state = shape(1, 64, 1).block_bytes();
    assert_eq!(cache.stats().ways.copy_on_write, copied * state);
    assert_ne!(state, cache.options().groups[0].shape.block_bytes());
    cache.close().unwrap();
}

#[test]
fn the_block_that_nobody_owns_stays_whatever_the_budget() {
    let mut options = hybrid();
    options.groups.truncate(1);
    options.groups[0].kind = GroupKind::Window { tokens: 6, sinks: 0 };
    let (_sim, _, mut cache) = cache(1, options);
    drop(computed(&mut cache, 30));
    cache.set_budget(GroupId(0), Tier::Primary, 0).unwrap();
    for _ in 0..3 {
        one_step(&mut cache, &mut []);
    }
    assert_eq!(cache.parts()[0].ready_blocks(), 33);
    cache.set_budget(GroupId(0), Tier::Primary, 32).unwrap();
    drop(computed(&mut cache, 30));
    cache.close().unwrap();
}

#[test]
fn host_memory_of_every_group_follows_its_own_budget() {
    let (sim, streams) = machine(1);
    let mut options = hybrid();
    options.groups.iter_mut().for_each(|of| of.host_blocks = 16);
    let block_bytes = options.groups.iter().map(|of| of.shape.block_bytes()).max().unwrap();
    options.pinning = HostPinning { threads: 0, slab_bytes_max: 2 * block_bytes };
    let mut cache = KvCache::new(&streams, options).unwrap();
    let blocks = |cache: &KvCache, group| cache.manager().pool(group).unwrap().stats();
    for group in [GroupId(0), WINDOW, STATE] {
        streams[0].device().free_retired().unwrap();
        let before = sim.pinned_bytes();
        cache.set_budget(group, Tier::Secondary, 2).unwrap();
        assert_eq!(blocks(&cache, group).secondary.blocks, 2, "{group:?}");
        // Steps give it back.
        let is_less = (0..32).any(|_| {
            one_step(&mut cache, &mut []);
            streams[0].device().free_retired().unwrap();
            sim.pinned_bytes() < before
        });
        assert!(is_less, "{group:?}: {before}");
        cache.set_budget(group, Tier::Secondary, 16).unwrap();
        one_step(&mut cache, &mut []);
        assert_eq!(blocks(&cache, group).secondary.blocks, 16, "{group:?}");
        assert_eq!(sim.pinned_bytes(), before, "{group:?}");
    }
    // Device memory of further groups stays, and is handed out as the budget says.
    cache.set_budget(WINDOW, Tier::Primary, 4).unwrap();
    one_step(&mut cache, &mut []);
    assert_eq!(blocks(&cache, WINDOW).primary.blocks, 4);
    assert_eq!(blocks(&cache, GroupId(0)).secondary.blocks, 16);
    for tier in [Tier::Primary, Tier::Secondary] {
        let none = cache.set_budget(GroupId(3), tier, 1).unwrap_err();
        assert!(matches!(none, BudgetError::NoGroup { group: GroupId(3) }), "{none:?}");
        cache.set_budget(WINDOW, tier, 17).unwrap_err();
    }
    cache.close().unwrap();
}

#[test]
fn groups_that_cannot_be_are_refused_by_name() {
    let (_sim, streams) = machine(2);
    let refused =
        |options: KvCacheOptions, devices: usize| match KvCache::new(&streams[..devices], options)
            .unwrap_err()
        {
            BuildError::Options(error) => error.to_string(),
            error => error.to_string(),
        };
    assert_eq!(refused(hybrid(), 2), "group 2 has 1 layers, too few to divide over 2 devices");
    let with = |change: fn(&mut GroupOptions)| {
        let mut options = hybrid();
        change(&mut options.groups[1]);
        options
    };
    assert_eq!(
        refused(with(|group| group.device_blocks = 0), 1),
        "the option device_blocks of group 1 is 0"
    );
    let most = with(|group| group.device_blocks = u32::MAX);
    assert!(matches!(
        KvCache::new(&streams[..1], most).unwrap_err(),
        BuildError::Options(OptionsError::TooManyBlocks { group: WINDOW, .. })
    ));
    let narrow = with(|group| group.blocks_per_sequence_max = 0);
    assert_eq!(refused(narrow, 1), "the option blocks_per_sequence_max of group 1 is 0");
    let mut placed = hybrid();
    placed.groups[2].kind = GroupKind::State { checkpoint_tokens: 6, drafts: 0 };
    assert_eq!(refused(placed.clone(), 1), "no manager can have these options");
    // A worker of its own has no manager that would see it.
    let BuildError::Manager(error) = KvWorker::new(&streams[..1], placed, ALONE).unwrap_err()
    else {
        panic!("it was refused otherwise")
    };
    assert_eq!(error.to_string(), "6 tokens of group 2 are not a multiple of 4");
}

/// The memory of a block of a group.
fn block(cache: &KvCache, group: GroupId, id: usize) -> DeviceSpan {
    let part = &cache.parts()[0].groups()[usize::from(group.0)];
    part.paged().block_span(id as u64).unwrap().unwrap()
}

#[test]
fn a_sequence_of_several_groups_moves_to_another_cache_byte_by_byte() {
    const GROUPS: [GroupId; 3] = [GroupId(0), WINDOW, STATE];
    let (_sim, streams) = machine(1);
    let stream = &streams[0];
    let mut there = KvCache::new(&streams, hybrid()).unwrap();
    let mut here = KvCache::new(&streams, hybrid()).unwrap();
    // Of 30 tokens, the last is not computed in the other process, as if it had been sampled.
    let mut sequence = computed(&mut there, 29);
    let last = there.manager().last_plan().step;
    there.commit(&mut sequence, last, &[29]).unwrap();
    let export = there.export(sequence).unwrap();
    assert_eq!(export.tokens(), 29);
    // The bytes of each block are its own.
    let byte = |group: GroupId, place: usize| 16 * (group.0 as u8 + 1) + place as u8;
    for group in GROUPS {
        for &(place, id) in export.blocks(group) {
            stream.fill(block(&there, group, id.index()), byte(group, place)).unwrap();
        }
    }
    let mut request = Request::new((0..30).collect());
    let (answer, adoption) = here.adopt(&mut request, 29, export.formats()).unwrap();
    let (Answer::Admitted(mut sequence), Some(adoption)) = (answer, adoption) else {
        panic!("it is not admitted")
    };
    // The plan that says what is evicted comes first.
    one_step(&mut here, &mut []);
    for group in GROUPS {
        let blocks: Vec<_> = adoption.blocks(group).collect();
        let places = |blocks: &[(usize, BlockId)]| {
            blocks.iter().map(|&(place, _)| place).collect::<Vec<_>>()
        };
        assert_eq!(places(&blocks), places(export.blocks(group)), "{group:?}");
        for (&(_, to), &(_, from)) in blocks.iter().zip(export.blocks(group)) {
            let (to, from) = (block(&here, group, to.index()), block(&there, group, from.index()));
            stream.copy_on_device(to, from).unwrap();
        }
    }
    stream.synchronize().unwrap();
    drop(export);
    let all = adoption.block_count();
    assert_eq!(here.adopted(&mut sequence, adoption, all).unwrap(), 29);
    here.reserve(&mut sequence, 1).unwrap().given().unwrap();
    one_step(&mut here, &mut [&mut sequence]);
    // What a kernel reads through the staged tables: all tokens, the window of token 29, and the state.
    for (group, places) in GROUPS.into_iter().zip([0..8, 6..8, 0..1]) {
        let table = here.parts()[0].batch().tables[usize::from(group.0)].block_table;
        let ids = read_words(stream, table);
        for place in places {
            let words = read_words(stream, block(&here, group, ids[place] as usize));
            let expected = i32::from_le_bytes([byte(group, place); 4]);
            assert!(words.iter().all(|&word| word == expected), "{group:?}, place {place}");
        }
    }
    drop(sequence);
    here.close().unwrap();
    there.close().unwrap();
}

/// A tier that brings blocks of the first group at once, and others by a few bytes whenever it works.
#[derive(Debug, Default)]
struct Uneven {
    records: HashMap<(GroupId, BlockHash), Vec<u8>>,
    held: Vec<(BlockSink, usize)>,
}

impl LowerTier for Uneven {
    fn store(&mut self, blocks: Vec<BlockSource>) {
        for block in blocks {
            let key = (block.group(), block.name());
            self.records.insert(key, block.record().unwrap());
            block.done();
        }
    }

    fn load(&mut self, blocks: Vec<BlockSink>) {
        self.held.extend(blocks.into_iter().map(|block| (block, 0)));
    }

    fn forget(&mut self, _: &[(GroupId, BlockHash)]) {}
    fn clear(&mut self) {}

    fn poll(&mut self, _: &mut Vec<(GroupId, BlockHash)>) {
        for (mut block, at) in std::mem::take(&mut self.held) {
            let record = &self.records[&(block.group(), block.name())];
            let bytes = if block.group() == GroupId(0) { record.len() } else { 20 };
            let end = record.len().min(at + bytes);
            block.write_at(at, &record[at..end]).unwrap();
            match end == record.len() {
                true => block.done().unwrap(),
                false => self.held.push((block, end)),
            }
        }
    }
}

/// The same groups, of layers for two devices, over such a tier.
fn hybrid_over_tier() -> KvCacheOptions {
    let mut tiers = LowerTiers::new(b"a hybrid model");
    // Longer than any machine takes.
    let wait_max = std::time::Duration::from_secs(60);
    tiers.rules = LowerOptions { wait_max, ..LowerOptions::default() };
    tiers.push(|| Box::new(Uneven::default()));
    let mut options = KvCacheOptions { tiers, ..hybrid() };
    options.groups[0].host_blocks = 16;
    let shapes = [shape(3, 16, 4), shape(2, 64, 1)];
    for (group, shape) in options.groups[1..].iter_mut().zip(shapes) {
        (group.shape, group.host_blocks) = (shape, 8);
    }
    options
}

/// The byte that a layer of a block is full of: of a state, behind so many tokens, otherwise at a place.
fn byte_of(group: GroupId, at: usize, layer: u32) -> u8 {
    (64 * group.0 as usize + at) as u8 ^ (layer as u8 + 1).wrapping_mul(37)
}

/// The places of a group's blocks that a sequence has, with what they are filled by.
fn filled(sequence: &Sequence, group: GroupId, end: u64) -> Vec<(usize, usize)> {
    let has = |place: &usize| sequence.block(group, *place).is_some();
    let places = (0..sequence.block_count(group)).filter(has);
    places.map(|place| (place, if group == STATE { end as usize } else { place })).collect()
}

/// The memory of a layer of a block on the device that has the layer, and that device's stream.
fn layer_span(cache: &KvCache, group: GroupId, id: usize, layer: u32) -> (Stream, DeviceSpan) {
    let of = |part: &kv_plane::Part| part.groups()[usize::from(group.0)].layers().to_vec();
    let part = cache.parts().iter().find(|part| of(part).contains(&layer)).unwrap();
    let held = &part.groups()[usize::from(group.0)];
    let at = of(part).iter().position(|one| *one == layer).unwrap() as u64;
    let bytes = held.shape().block_bytes() / u64::from(held.shape().layers());
    let whole = held.paged().block_span(id as u64).unwrap().unwrap();
    (part.compute().clone(), whole.slice(at * bytes, bytes).unwrap())
}

/// A step of a sequence, or of none, in which all layers of what it has are written; 0 tokens reserve nothing.
fn filled_step(cache: &mut KvCache, sequence: Option<&mut Sequence>) {
    let step = cache.begin_step().unwrap();
    let Some(sequence) = sequence else {
        if cache.manager().has_decided() {
            cache.stage(&step, &mut []).unwrap();
        }
        cache.finish_step(step).unwrap();
        return cache.drain().unwrap();
    };
    if sequence.next() == 0 {
        cache.reserve(sequence, sequence.to_compute().min(8) as u32).unwrap().given().unwrap();
    }
    cache.stage(&step, &mut [&mut *sequence]).unwrap();
    for (group, options) in (0..).map(GroupId).zip(cache.options().groups.clone()) {
        for (place, at) in filled(sequence, group, sequence.resolved()) {
            let id = sequence.block(group, place).unwrap().index();
            for layer in 0..options.shape.layers() {
                let (stream, span) = layer_span(cache, group, id, layer);
                stream.fill(span, byte_of(group, at, layer)).unwrap();
            }
        }
    }
    cache.finish_step(step).unwrap();
    cache.drain().unwrap();
}

/// Has all content leave the device and the host, with what other prompts leave there.
fn push_out(cache: &mut KvCache) {
    for turn in 1..=8 {
        drop(computed_of(cache, 1000 * turn..1000 * turn + 60));
        // What finds no room in host memory is stored when it leaves the device.
        (0..20).for_each(|_| filled_step(cache, None));
    }
}

/// A request for 30 tokens that is admitted while its prefix is loaded.
fn entered(cache: &mut KvCache) -> Sequence {
    let mut request = Request::new((0..30).collect());
    request.by_layers = true;
    let mut queue = VecDeque::from([request]);
    for _ in 0..200 {
        match one_answer(cache.admit(&mut queue, 8).unwrap()) {
            Answer::Admitted(sequence) => return sequence,
            Answer::Waiting(Waiting::Load { .. }) => filled_step(cache, None),
            answer => panic!("{answer:?}"),
        }
    }
    panic!("its load does not end: {:?}", cache.manager().lower_stats());
}

#[test]
fn layers_of_every_group_are_read_as_they_come() {
    for devices in [1, 2] {
        let (sim, _streams, mut cache) = cache(devices, hybrid_over_tier());
        cache.wait_for_host().unwrap();
        let step = cache.begin_step().unwrap();
        let mut sequence = admitted(&mut cache, Request::new((0..30).collect()), 8);
        cache.finish_step(step).unwrap();
        while sequence.to_compute() > 0 {
            filled_step(&mut cache, Some(&mut sequence));
        }
        drop(sequence);
        push_out(&mut cache);
        let mut sequence = entered(&mut cache);
        assert_eq!(sequence.cached_tokens(), 28);
        assert!(sequence.loads().is_some(), "it was admitted before its loads had ended");
        let step = cache.begin_step().unwrap();
        cache.stage(&step, &mut [&mut sequence]).unwrap();
        assert!(cache.loads_layers());
        let places = [0..7, 5..7, 0..1];
        for (group, places) in (0..).map(GroupId).zip(places) {
            let layers = cache.options().groups[usize::from(group.0)].shape.layers();
            for layer in 0..layers {
                cache.wait_for_layer(group, layer).unwrap();
                for place in places.clone() {
                    let id = sequence.block(group, place).unwrap().index();
                    let (stream, span) = layer_span(&cache, group, id, layer);
                    let mut found = vec![0; span.bytes() as usize];
                    stream.download(&mut found, span).unwrap();
                    let expected = byte_of(group, if group == STATE { 28 } else { place }, layer);
                    let right = found.iter().all(|byte| *byte == expected);
                    assert!(right, "{group:?}, layer {layer}, place {place}: {:?}", &found[..4]);
                }
            }
        }
        let number = step.number();
        cache.finish_step(step).unwrap();
        cache.drain().unwrap();
        assert_eq!(cache.commit(&mut sequence, number, &[7]).unwrap(), Committed::Taken);
        let stats = cache.manager().lower_stats();
        assert_eq!((stats.entered, stats.redone, stats.faults), (1, 0, [0; 7]), "{stats:?}");
        drop(sequence);
        cache.close().unwrap();
        assert_eq!(sim.findings(), []);
    }
}

#[test]
fn a_step_that_does_not_wait_for_the_layers_of_a_further_group_has_failed() {
    let (_sim, _, mut cache) = cache(1, hybrid_over_tier());
    let refused = cache.wait_for_layer(GroupId(3), 0).unwrap_err();
    assert_eq!(refused.to_string(), "layer 0 of group 3 is waited for, which has 0");
    let refused = cache.wait_for_layer(WINDOW, 3).unwrap_err();
    assert_eq!(refused.to_string(), "layer 3 of group 1 is waited for, which has 3");
    cache.wait_for_host().unwrap();
    drop(computed(&mut cache, 30));
    push_out(&mut cache);
    let mut sequence = entered(&mut cache);
    let step = cache.begin_step().unwrap();
    let number = step.number();
    cache.stage(&step, &mut [&mut sequence]).unwrap();
    (0..2).for_each(|layer| cache.wait_for_layer(GroupId(0), layer).unwrap());
    (0..2).for_each(|layer| cache.wait_for_layer(STATE, layer).unwrap());
    cache.finish_step(step).unwrap();
    cache.drain().unwrap();
    // What was loaded is right, but a state that has gone on cannot go back to where the step began.
    assert_eq!(cache.commit(&mut sequence, number, &[7]).unwrap(), Committed::Redo { from: 0 });
    drop(sequence);
    cache.close().unwrap();
}

/// What the last step says of states: the one that the sequence begins with, and the row of those that it leaves.
fn states(cache: &KvCache, stream: &Stream) -> (i32, Vec<i32>) {
    let table = cache.parts()[0].batch().tables[usize::from(STATE.0)];
    let width = 1 + DRAFTS as usize;
    (
        read_words(stream, table.state_in.unwrap())[0],
        read_words(stream, table.block_table)[..width].to_vec(),
    )
}

const DRAFTS: u32 = 3;

#[test]
fn a_step_begins_with_the_state_behind_the_drafts_that_the_sampler_has_accepted() {
    let mut options = hybrid();
    options.groups[2].kind = GroupKind::State { checkpoint_tokens: 64, drafts: DRAFTS };
    let (_sim, streams, mut cache) = cache(1, options);
    let mut sequence = computed(&mut cache, 30);
    let last = cache.manager().last_plan().step;
    cache.commit(&mut sequence, last, &[30]).unwrap();
    // A token and two drafts: three states.
    cache.reserve(&mut sequence, 3).unwrap().given().unwrap();
    let first = one_step(&mut cache, &mut [&mut sequence]);
    let row = numbers(cache.manager().block_ids(STATE, &sequence));
    let null = STATES as i32;
    assert_eq!(states(&cache, &streams[0]), (row[0], vec![row[0], row[1], row[2], null]));
    // The sampler accepts one draft, which nobody on the host knows yet.
    let accepted = cache.parts()[0].batch().accepted;
    let at = sequence.row().unwrap().index() as u64 * 4;
    streams[0].upload(accepted.slice(at, 4).unwrap(), &2_u32.to_le_bytes()).unwrap();
    cache.reserve(&mut sequence, 4).unwrap().given().unwrap();
    let second = one_step(&mut cache, &mut [&mut sequence]);
    let row = numbers(cache.manager().block_ids(STATE, &sequence));
    assert_eq!(states(&cache, &streams[0]), (row[1], row.clone()));
    cache.commit(&mut sequence, first, &[31, 32]).unwrap();
    // Now all three are accepted, and both sides know it.
    cache.commit(&mut sequence, second, &[33, 34, 35, 36]).unwrap();
    cache.reserve(&mut sequence, 1).unwrap().given().unwrap();
    one_step(&mut cache, &mut [&mut sequence]);
    assert_eq!(states(&cache, &streams[0]), (row[3], vec![row[0], null, null, null]));
    drop(sequence);
    cache.close().unwrap();
}

/// A cache with a draft model.
fn drafting() -> KvCacheOptions {
    let mut options = hybrid();
    options.groups.truncate(2);
    let group = &mut options.groups[1];
    (group.kind, group.draft_model, group.device_blocks) = (GroupKind::Full, true, 16);
    options
}

#[test]
fn drafts_of_more_tokens_than_a_step_has_are_refused_and_the_step_goes_on() {
    let options = KvCacheOptions { step_tokens_max: 16, ..drafting() };
    let (_sim, _, mut cache) = cache(1, options);
    let mut one = computed(&mut cache, 10);
    let last = cache.manager().last_plan().step;
    let mut other = computed_of(&mut cache, 100..110);
    let committed = [(&mut one, last), (&mut other, cache.manager().last_plan().step)];
    for (sequence, last) in committed {
        cache.commit(sequence, last, &[7]).unwrap();
        cache.reserve(sequence, 1).unwrap().given().unwrap();
        cache.reserve_draft(sequence, 10).unwrap().given().unwrap();
    }
    let step = cache.begin_step().unwrap();
    let refused = cache.stage(&step, &mut [&mut one, &mut other]).unwrap_err();
    let StepError::Batch(BatchError::Tokens { tokens, max }) = refused else { panic!("{refused}") };
    assert_eq!((tokens, max), (20, 16));
    // Nothing was staged: one alone has room.
    cache.stage(&step, &mut [&mut one]).unwrap();
    cache.finish_step(step).unwrap();
    one_step(&mut cache, &mut [&mut other]);
    drop((one, other));
    cache.close().unwrap();
}

#[test]
fn a_draft_model_has_a_batch_that_begins_at_its_own_end() {
    const DRAFT: GroupId = GroupId(1);
    let options = drafting();
    let (_sim, streams, mut cache) = cache(1, options);
    let mut sequence = computed(&mut cache, 10);
    let mut last = cache.manager().last_plan().step;
    for (start, tokens, id) in [(0, 6, 10), (6, 7, 11)] {
        cache.commit(&mut sequence, last, &[id]).unwrap();
        cache.reserve(&mut sequence, 1).unwrap().given().unwrap();
        cache.reserve_draft(&mut sequence, tokens).unwrap().given().unwrap();
        last = one_step(&mut cache, &mut [&mut sequence]);
        let part = &cache.parts()[0];
        let drafts = part.draft_batch().unwrap();
        let end = start + u64::from(tokens);
        assert_eq!(u64::from(part.draft_lengths()[0].most), end);
        assert_eq!(read_words(&streams[0], drafts.lengths)[..2], [end as i32, 0]);
        let ids = cache.manager().block_ids(DRAFT, &sequence);
        let slot =
            |token: u64| ids[token as usize / 4].block().unwrap().slot(4, token as u32 % 4).get();
        let words = |span: DeviceSpan| {
            let words = read_words(&streams[0], span);
            words.chunks_exact(2).map(|two| i64::from(two[0])).collect::<Vec<_>>()
        };
        let count = tokens as usize;
        assert_eq!(
            words(drafts.positions)[..count],
            (start as i64..end as i64).collect::<Vec<_>>()
        );
        assert_eq!(
            words(drafts.tables[0].slots)[..count],
            (start..end).map(slot).collect::<Vec<_>>()
        );
        assert_eq!(read_words(&streams[0], drafts.tables[0].slots)[2 * count..][..2], [-1, -1]);
        let end = end.min(sequence.resolved());
        cache.commit_draft(&mut sequence, last, end).unwrap();
        assert_eq!(sequence.draft_end(), end);
    }
    let too_many = cache.options().step_tokens_max + 1;
    cache.commit(&mut sequence, last, &[12]).unwrap();
    cache.reserve(&mut sequence, 1).unwrap().given().unwrap();
    assert!(!matches!(cache.reserve_draft(&mut sequence, too_many), Ok(Room::Given(()))));
    drop(sequence);
    cache.close().unwrap();
}
