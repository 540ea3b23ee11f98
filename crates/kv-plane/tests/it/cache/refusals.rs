//! Refusals name their reason and change nothing.

use kv_plane::manager::{ReserveError as Refusal, SlotError, StepError as StepRefusal};

use crate::prelude::*;

#[test]
fn a_row_holds_its_sequence_s_blocks_and_nothing_of_the_one_before() {
    let machine = Machine::new(1, 1, small());
    let streams = machine.rig.streams();
    let mut cache = KvCache::new(&streams, options(small(), 32, 0)).unwrap();
    let [long, mut other] = [40, 36].map(|tokens| admit_to(&mut cache, tokens).unwrap());
    let row = long.row();
    drop(long);
    let mut short = admit_to(&mut cache, 5).unwrap();
    assert_eq!(short.row(), row);
    // Only a chunk of the other: the step reads as many tokens.
    cache.reserve(&mut other, 30).unwrap().given().unwrap();
    let step = cache.begin_step().unwrap();
    cache.stage(&step, &mut [&mut other, &mut short]).unwrap();
    let buffers = cache.parts()[0].batch();
    let width = cache.options().groups[0].blocks_per_sequence_max as usize;
    let table = buffers.tables[0].block_table.slice(0, 2 * width as u64 * 4).unwrap();
    let table = read_words(&streams[0], table);
    let blocks = |sequence: &Sequence| -> Vec<i32> {
        (0..width).map(|index| TableEntry::from(sequence.block(GroupId(0), index)).get()).collect()
    };
    // As many blocks as the step's tokens take, and the null block behind them.
    let staged = |sequence: &Sequence, count: usize| {
        let mut ids = blocks(sequence);
        ids[count..].fill(0);
        ids
    };
    assert_eq!(table, [staged(&other, 8), staged(&short, 2)].concat());
    for sequence in [&other, &short] {
        let ids = &cache.manager().block_ids(GroupId(0), sequence)[..9];
        assert!(ids.iter().map(|id| id.get()).eq(blocks(sequence)[..9].iter().copied()));
    }
    assert_eq!(read_words(&streams[0], buffers.lengths.slice(0, 8).unwrap()), [30, 5]);
    cache.finish_step(step).unwrap();
    drop((other, short));
    cache.close().unwrap();
}

/// A batch that is refused leaves its step as it was.
#[test]
fn batches_that_cannot_be_staged() {
    let (machine, mut engine) = Machine::one(32, 8);
    let mut lives = [1, 2].map(|seed| engine.admit(&Prompt::new(seed, 9)).unwrap());
    engine.run(&mut lives.each_mut()).unwrap();
    let step = engine.begin().unwrap();
    let [first, second] = &mut lives;
    engine.reserve(first).unwrap().given().unwrap();
    let refuse =
        |engine: &mut Engine, batch: &mut [&mut Sequence]| match engine.cache.stage(&step, batch) {
            Err(StepError::Refused(refused)) => refused,
            other => panic!("{other:?}"),
        };
    let refused = refuse(&mut engine, &mut [&mut first.sequence, &mut second.sequence]);
    assert_eq!(refused, StageError::NothingReserved { index: 1 });
    engine.suspend(second).unwrap();
    let refused = refuse(&mut engine, &mut [&mut first.sequence, &mut second.sequence]);
    let reason = SequenceError::Suspended;
    assert_eq!(refused, StageError::Sequence { index: 1, reason });
    engine.resume(second).unwrap().given().unwrap();
    engine.enqueue(step, &mut lives.each_mut()).unwrap();
    let step = engine.begin().unwrap();
    engine.cache.stage(&step, &mut []).unwrap();
    let number = step.number();
    let twice = engine.cache.stage(&step, &mut []).unwrap_err();
    let StepError::Refused(refused) = twice else { panic!("{twice}") };
    assert_eq!(refused, StageError::StagedAlready { step: number });
    engine.cache.finish_step(step).unwrap();
    drop(lives);
    machine.close(engine);
}

#[test]
fn sequences_and_steps_of_another_cache() {
    let (machine, mut engine) = Machine::one(32, 0);
    // Other blocks, so that mixing them up would leave the sequence's blocks.
    let options = options(shape(1, 8, 1), 16, 0);
    let mut other = machine.rig.cache(options);
    let mut live = engine.admit(&Prompt::new(1, 30)).unwrap();
    let sequence = &mut live.sequence;
    let refused = other.reserve(sequence, 1).unwrap_err();
    assert!(matches!(refused, ReserveError::Refused(Refusal::Sequence(SequenceError::Foreign))));
    let foreign = SequenceError::Foreign;
    assert_eq!(other.commit(sequence, 1, &[7]), Err(CommitError::Sequence(foreign)));
    assert_eq!(other.truncate(sequence, 1), Err(ChangeError::Sequence(foreign)));
    assert!(other.fork(sequence).is_err() && other.suspend(sequence).is_err());
    let slots = other.manager().slot_mapping(GroupId(0), sequence, 0..30, &mut Vec::new());
    assert_eq!(slots, Err(SlotError { start: 0, end: 30, tokens: 0 }));
    let step = other.begin_step().unwrap();
    let staged = other.stage(&step, &mut [sequence]);
    let Err(StepError::Refused(refused)) = staged else { panic!("{staged:?}") };
    assert_eq!(refused, StageError::Sequence { index: 0, reason: foreign });
    // It has lost nothing.
    assert_eq!((sequence.next(), sequence.block_count(GroupId(0))), (30, 8));

    let refused = engine.cache.finish_step(step).unwrap_err();
    assert!(matches!(refused, StepError::Step(StepRefusal::Foreign { step: 1 })), "{refused}");
    let step = other.begin_step().unwrap();
    let staged = engine.cache.stage(&step, &mut [&mut live.sequence]);
    assert!(matches!(staged, Err(StepError::Refused(StageError::NotOpen { step: 2 }))));
    other.finish_step(step).unwrap();
    engine.run(&mut [&mut live]).unwrap();
    drop(live);
    other.close().unwrap();
    machine.close(engine);
}

#[test]
fn options_that_no_cache_can_have() {
    let machine =
        Machine::with(SimConfig { devices: 2, pinned_bytes: 1 << 20, ..config() }, small());
    let good = options(small(), 8, 8);
    let build = |options: KvCacheOptions| {
        let built = KvCache::new(&machine.rig.streams(), options);
        built.map(|_| ()).unwrap_err()
    };
    let first = |change: fn(&mut GroupOptions)| build(with_first(good.clone(), change));
    let zero = first(|group| group.device_blocks = 0);
    let BuildError::Options(OptionsError::GroupZero { group, field }) = zero else {
        panic!("{zero:?}")
    };
    assert_eq!((group, field), (GroupId(0), "device_blocks"));
    let none = build(KvCacheOptions { groups: Vec::new(), ..good.clone() });
    assert!(matches!(none, BuildError::Options(OptionsError::Zero { field: "groups" })));
    let devices = first(|group| group.shape = shape(1, 32, 4));
    assert!(matches!(
        devices,
        BuildError::Options(OptionsError::DevicesOverLayers {
            group: GroupId(0),
            devices: 2,
            layers: 1
        })
    ));
    let depth = build(KvCacheOptions { overlap_depth: u32::MAX, ..good.clone() });
    assert!(matches!(depth, BuildError::Options(OptionsError::OverlapDepth { .. })));
    let blocks = first(|group| group.device_blocks = u32::MAX);
    assert!(matches!(blocks, BuildError::Options(OptionsError::TooManyBlocks { .. })));
    let bytes = first(|group| {
        (group.shape, group.device_blocks) = (shape(1 << 16, 1 << 24, 1), i32::MAX as u32 - 8);
    });
    assert!(matches!(bytes, BuildError::Options(OptionsError::Overflow { .. })));
    let step = build(KvCacheOptions { step_arrays: vec![u64::MAX], ..good.clone() });
    assert!(matches!(step, BuildError::Options(OptionsError::StepBytes { bytes: u64::MAX })));
    let table = KvCacheOptions { sequences_max: u32::MAX, ..good.clone() };
    let table = build(with_first(table, |group| group.blocks_per_sequence_max = u32::MAX));
    assert!(matches!(table, BuildError::Options(OptionsError::StepBytes { .. })));
    // More pinned memory than the machine has.
    let host = first(|group| group.host_blocks = 4 << 10);
    assert!(matches!(&host, BuildError::HostMemory(e) if e.is_out_of_memory()), "{host:?}");
    assert!(KvCache::new(&[], options(small(), 8, 8)).is_err());
    machine.assert_clean();
}

#[test]
fn a_cache_has_each_device_once_and_one_driver() {
    let machine = Machine::new(1, 2, small());
    let other = Machine::new(1, 2, small());
    let options = KvCacheOptions { parts_share_devices: false, ..options(small(), 8, 8) };
    let refused = |devices: [&cuda_driver::Device; 2]| {
        let streams = streams(&devices.map(Clone::clone));
        let built = KvCache::new(&streams, options.clone()).map(drop).unwrap_err();
        let BuildError::Options(refused) = built else { panic!("{built}") };
        refused
    };
    let devices = &machine.rig.devices;
    assert_eq!(
        refused([&devices[1], &devices[1]]),
        OptionsError::DeviceTwice { first: 0, second: 1, ordinal: 1 }
    );
    assert_eq!(
        refused([&devices[0], &other.rig.devices[1]]),
        OptionsError::TwoDrivers { position: 1 }
    );
    let built = KvCache::new(&[], options.clone()).map(drop).unwrap_err();
    assert!(matches!(built, BuildError::Options(OptionsError::NoDevices)), "{built}");
    machine.assert_clean();
    other.assert_clean();
}

#[test]
fn refusals_name_their_cause_wherever_they_are_printed() {
    let (machine, mut engine) = Machine::one(2, 0);
    let mut live = engine.computed(&Prompt::new(1, 7));
    let no_room = engine.cache.reserve(&mut live.sequence, 30).unwrap().given().unwrap_err();
    assert!(no_room.to_string().starts_with("too few blocks: group 0: "), "{no_room}");
    assert_eq!(format!("{no_room:?}"), no_room.to_string());
    let step = engine.begin().unwrap();
    let refused = engine.cache.stage(&step, &mut [&mut live.sequence]).unwrap_err();
    assert!(refused.to_string().starts_with("the batch was not staged: sequence 0"), "{refused}");
    assert_eq!(format!("{refused:?}"), refused.to_string());
    drop(step);
    drop(live);
    machine.close(engine);
}
