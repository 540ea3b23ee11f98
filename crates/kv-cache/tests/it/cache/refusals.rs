//! Refusals name their reason and change nothing.

use cuda_driver::{CopyError, ReaderError};
use cuda_sim::SimConfig;
use kv_cache::kv_manager::{
    AdmitError, CommitError, ReserveError as Refusal, SequenceError, StageError,
    StepError as StepRefusal, TokensError, TruncateError,
};
use kv_cache::{
    BuildError, KvCache, KvCacheOptions, OptionsError, QuotaError, Request, ReserveError, Sequence,
    SlotError, StepError,
};
use kv_pool::{
    ClaimError, Slot, TableEntry, Tier,
    tenants::{TenantError, TenantQuota},
};

use crate::common::engine::{Engine, Prompt, Refused, admit_to, options, shape, streams};
use crate::machine::{Machine, config, small};

#[test]
fn requests_that_cannot_be() {
    let machine = Machine::new(1, 1, small());
    let mut engine = machine.rig.engine(12, 0);
    let hashes = Prompt::new(1, 64).hashes(4);
    let refuse = |engine: &mut Engine, tokens, names: usize| {
        let before = engine.cache.pool().stats();
        let request = Request::named(tokens, hashes[..names].to_vec());
        let refused = engine.admit_request(&Prompt::new(1, 1), request).unwrap_err();
        assert_eq!(engine.cache.pool().stats(), before);
        let Refused::Never(error) = refused else { panic!("{refused}") };
        error
    };
    assert_eq!(refuse(&mut engine, 0, 0), AdmitError::NoTokens);
    let names = TokensError::Names { names: 3, blocks: 2 };
    assert_eq!(refuse(&mut engine, 11, 3), AdmitError::Tokens(names));
    assert_eq!(refuse(&mut engine, 65, 16), AdmitError::TooLong { blocks: 17, max: 16 });
    assert!(matches!(refuse(&mut engine, u64::MAX, 0), AdmitError::TooLong { .. }));
    let never = AdmitError::NeverFits { blocks: 13, capacity: 12 };
    assert_eq!(refuse(&mut engine, 49, 12), never);
    let mut live = engine.admit(&Prompt::new(1, 40)).unwrap();
    let reserve = |engine: &mut Engine, sequence: &mut Sequence, tokens| {
        let refused = engine.cache.reserve(sequence, tokens).unwrap_err();
        assert_eq!((sequence.next(), sequence.block_count()), (40, 10), "{refused}");
        refused
    };
    let refused = reserve(&mut engine, &mut live.sequence, 65);
    assert!(matches!(refused, ReserveError::Refused(Refusal::TooLong { blocks: 17, max: 16 })));
    let refused = reserve(&mut engine, &mut live.sequence, 49);
    let ReserveError::Refused(Refusal::NoRoom(missing)) = refused else { panic!("{refused}") };
    assert!(matches!(missing.reason, ClaimError::Exhausted { requested: 3, claimable: 2, .. }));
    engine.run(&mut [&mut live]).unwrap();
    drop(live);
    engine.close();
    machine.assert_clean();
}

#[test]
fn rows_run_out_and_come_back() {
    let machine = Machine::new(1, 1, small());
    let mut engine = machine.rig.engine(32, 0);
    let mut lives: Vec<_> =
        (0..8).map(|seed| engine.admit(&Prompt::new(seed, 3)).unwrap()).collect();
    let refused = engine.admit(&Prompt::new(9, 3)).unwrap_err();
    assert!(matches!(refused, Refused::NoRow));
    let mut all: Vec<_> = lives.iter_mut().collect();
    engine.run(&mut all).unwrap();
    let row = lives.pop().unwrap().sequence.row();
    let live = engine.admit(&Prompt::new(9, 3)).unwrap();
    assert_eq!(live.sequence.row(), row);
    drop((live, lives));
    engine.close();
}

#[test]
fn a_row_holds_its_sequence_s_blocks_and_nothing_of_the_one_before() {
    let machine = Machine::new(1, 1, small());
    let streams = streams(&machine.rig.devices);
    let mut cache = KvCache::new(&streams, options(small(), 32, 0)).unwrap();
    let [long, mut other] = [40, 36].map(|tokens| admit_to(&mut cache, tokens).unwrap());
    let row = long.row();
    drop(long);
    let mut short = admit_to(&mut cache, 5).unwrap();
    assert_eq!(short.row(), row);
    // Only a chunk of the other: the step reads as many tokens.
    cache.reserve(&mut other, 30).unwrap();
    let step = cache.begin_step().unwrap();
    cache.stage(&step, &mut [&mut other, &mut short], |_, _| Ok(())).unwrap();
    let buffers = cache.parts()[0].batch();
    let width = cache.options().blocks_per_sequence_max as usize;
    let mut bytes = vec![0; 2 * width * 4];
    streams[0]
        .download(&mut bytes, buffers.tables[0].block_table.slice(0, 2 * width as u64 * 4).unwrap())
        .unwrap();
    let table: Vec<i32> =
        bytes.chunks_exact(4).map(|entry| i32::from_ne_bytes(entry.try_into().unwrap())).collect();
    let blocks = |sequence: &Sequence| -> Vec<i32> {
        (0..width).map(|index| TableEntry::from(sequence.block(index)).get()).collect()
    };
    // As many blocks as the step's tokens take, and the null block behind them.
    let staged = |sequence: &Sequence, count: usize| {
        let mut ids = blocks(sequence);
        ids[count..].fill(0);
        ids
    };
    assert_eq!(table, [staged(&other, 8), staged(&short, 2)].concat());
    for sequence in [&other, &short] {
        let ids = &cache.manager().block_ids(sequence)[..9];
        assert!(ids.iter().map(|id| id.get()).eq(blocks(sequence)[..9].iter().copied()));
    }
    let mut bytes = [0; 8];
    streams[0].download(&mut bytes, buffers.lengths.slice(0, 8).unwrap()).unwrap();
    assert_eq!(bytes, [30_u32.to_ne_bytes(), 5_u32.to_ne_bytes()].concat()[..]);
    cache.finish_step(step).unwrap();
    drop((other, short));
    cache.close().unwrap();
}

/// A batch that is refused leaves its step as it was.
#[test]
fn batches_that_cannot_be_staged() {
    let machine = Machine::new(1, 1, small());
    let mut engine = machine.rig.engine(32, 8);
    let mut lives = [1, 2].map(|seed| engine.admit(&Prompt::new(seed, 9)).unwrap());
    engine.run(&mut lives.each_mut()).unwrap();
    let step = engine.begin().unwrap();
    let [first, second] = &mut lives;
    engine.reserve(first).unwrap();
    let refuse = |engine: &mut Engine, batch: &mut [&mut Sequence]| match engine.cache.stage(
        &step,
        batch,
        |_, _| Ok(()),
    ) {
        Err(StepError::Refused(refused)) => refused,
        other => panic!("{other:?}"),
    };
    let refused = refuse(&mut engine, &mut [&mut first.sequence, &mut second.sequence]);
    assert_eq!(refused, StageError::NothingReserved { index: 1 });
    engine.suspend(second).unwrap();
    let refused = refuse(&mut engine, &mut [&mut first.sequence, &mut second.sequence]);
    let reason = SequenceError::Suspended;
    assert_eq!(refused, StageError::Sequence { index: 1, reason });
    engine.resume(second).unwrap();
    engine.enqueue(step, &mut lives.each_mut()).unwrap();
    let step = engine.begin().unwrap();
    engine.cache.stage(&step, &mut [], |_, _| Ok(())).unwrap();
    let number = step.number();
    let twice = engine.cache.stage(&step, &mut [], |_, _| Ok(())).unwrap_err();
    let StepError::Refused(refused) = twice else { panic!("{twice}") };
    assert_eq!(refused, StageError::StagedAlready { step: number });
    engine.cache.finish_step(step).unwrap();
    drop(lives);
    engine.close();
    machine.assert_clean();
}

#[test]
fn sequences_and_steps_of_another_cache() {
    let machine = Machine::new(1, 1, small());
    let mut engine = machine.rig.engine(32, 0);
    // Other blocks, so that mixing them up would leave the sequence's blocks.
    let options = options(shape(1, 8, 1), 16, 0);
    let mut other = KvCache::new(&streams(&machine.rig.devices), options).unwrap();
    let mut live = engine.admit(&Prompt::new(1, 30)).unwrap();
    let sequence = &mut live.sequence;
    let refused = other.reserve(sequence, 1).unwrap_err();
    assert!(matches!(refused, ReserveError::Refused(Refusal::Sequence(SequenceError::Foreign))));
    let foreign = SequenceError::Foreign;
    assert_eq!(other.commit(sequence, 1, &[7]), Err(CommitError::Sequence(foreign)));
    assert_eq!(other.truncate(sequence, 1), Err(TruncateError::Sequence(foreign)));
    assert!(other.fork(sequence).is_err() && other.suspend(sequence).is_err());
    let slots = other.slot_mapping(sequence, 0..30, &mut Vec::new());
    assert_eq!(slots, Err(SlotError { start: 0, end: 30, tokens: 0 }));
    let step = other.begin_step().unwrap();
    let staged = other.stage(&step, &mut [sequence], |_, _| Ok(()));
    let Err(StepError::Refused(refused)) = staged else { panic!("{staged:?}") };
    assert_eq!(refused, StageError::Sequence { index: 0, reason: foreign });
    // It has lost nothing.
    assert_eq!((sequence.next(), sequence.block_count()), (30, 8));

    let refused = engine.cache.finish_step(step).unwrap_err();
    assert!(matches!(refused, StepError::Step(StepRefusal::Foreign { step: 1 })), "{refused}");
    let step = other.begin_step().unwrap();
    let staged = engine.cache.stage(&step, &mut [&mut live.sequence], |_, _| Ok(()));
    assert!(matches!(staged, Err(StepError::Refused(StageError::NotOpen { step: 2 }))));
    other.finish_step(step).unwrap();
    engine.run(&mut [&mut live]).unwrap();
    drop(live);
    other.close().unwrap();
    engine.close();
    machine.assert_clean();
}

#[test]
fn tenants_of_another_cache() {
    let machine = Machine::new(1, 1, small());
    let mut engine = machine.rig.engine(32, 0);
    let mut other = machine.rig.engine(16, 0);
    // The same number here and there, and a number that only the other has.
    let own = engine.cache.add_tenant().unwrap();
    let foreign = [1, 2].map(|_| other.cache.add_tenant().unwrap());
    assert_eq!(own.number(), foreign[0].number());
    let quota = TenantQuota { held_max: 2, ..TenantQuota::NONE };
    for tenant in foreign {
        let refused = engine.admit_as(&Prompt::new(1, 30), tenant, None).unwrap_err();
        let Refused::Never(AdmitError::Tenant(error)) = &refused else { panic!("{refused}") };
        assert_eq!(*error, TenantError::Foreign { tenant });
        let Err(QuotaError::Tenant(error)) = engine.cache.set_quota(tenant, Tier::Primary, quota)
        else {
            panic!("another cache's tenant was given a quota")
        };
        assert_eq!(error, TenantError::Foreign { tenant });
        let primary = engine.cache.pool().stats().primary;
        assert_eq!((primary.claimed, primary.pinned, primary.cached), (0, 0, 0));
    }
    // Our tenant has none of the quotas.
    let mut live = engine.admit_as(&Prompt::new(1, 30), own, None).unwrap();
    engine.run(&mut [&mut live]).unwrap();
    drop(live);
    engine.close();
    other.try_close().unwrap();
    machine.assert_clean();
}

/// What a cache stages is in its memory, which is gone with it.
#[test]
fn spans_of_a_cache_that_was_closed() {
    let machine = Machine::new(1, 1, small());
    let streams = streams(&machine.rig.devices);
    let mut cache = KvCache::new(&streams, options(small(), 8, 0)).unwrap();
    let mut sequence = admit_to(&mut cache, 9).unwrap();
    let step = cache.begin_step().unwrap();
    cache.stage(&step, &mut [&mut sequence], |_, _| Ok(())).unwrap();
    let table = cache.parts()[0].batch().tables[0].block_table;
    cache.finish_step(step).unwrap();
    let block = cache.parts()[0].paged().span().slice(0, 64).unwrap();
    streams[0].fill(block, 1).unwrap();
    drop(sequence);
    cache.close().unwrap();
    for span in [table, block] {
        let (address, bytes) = (span.address(), span.bytes());
        let gone = CopyError::Memory(ReaderError::Gone { address, bytes });
        assert_eq!(streams[0].fill(span, 2), Err(gone));
    }
    drop(streams);
    machine.assert_clean();
}

#[test]
fn slots_beyond_a_sequence() {
    let machine = Machine::new(1, 1, small());
    let mut engine = machine.rig.engine(32, 8);
    let mut live = engine.admit(&Prompt::new(1, 10)).unwrap();
    let mut slots = vec![Slot::from(7)];
    // Three blocks have room for two tokens more.
    for tokens in [0..13, 13..13, u64::MAX - 1..u64::MAX] {
        let (start, end) = (tokens.start, tokens.end);
        let refused = engine.cache.slot_mapping(&live.sequence, tokens, &mut slots);
        assert_eq!(refused, Err(SlotError { start, end, tokens: 12 }));
    }
    assert_eq!(slots, [Slot::from(7)]);
    engine.cache.slot_mapping(&live.sequence, 3..6, &mut slots).unwrap();
    let slot = |index, offset| live.sequence.block(index).unwrap().slot(4, offset);
    assert_eq!(slots, [Slot::from(7), slot(0, 3), slot(1, 0), slot(1, 1)]);
    engine.run(&mut [&mut live]).unwrap();
    engine.suspend(&mut live).unwrap();
    let refused = engine.cache.slot_mapping(&live.sequence, 0..1, &mut slots);
    assert_eq!(refused, Err(SlotError { start: 0, end: 1, tokens: 0 }));
    drop(live);
    engine.close();
}

#[test]
fn options_that_no_cache_can_have() {
    let machine =
        Machine::with(SimConfig { devices: 2, pinned_bytes: 1 << 20, ..config() }, small());
    let good = options(small(), 8, 8);
    let build = |options: KvCacheOptions| {
        let built = KvCache::new(&streams(&machine.rig.devices), options);
        built.map(|_| ()).unwrap_err()
    };
    let zero = build(KvCacheOptions { device_blocks: 0, ..good.clone() });
    assert!(matches!(zero, BuildError::Options(OptionsError::Zero { field: "device_blocks" })));
    let devices = build(KvCacheOptions { shape: shape(1, 32, 4), ..good.clone() });
    assert!(matches!(
        devices,
        BuildError::Options(OptionsError::DevicesOverLayers { devices: 2, layers: 1 })
    ));
    let depth = build(KvCacheOptions { overlap_depth: u32::MAX, ..good.clone() });
    assert!(matches!(depth, BuildError::Options(OptionsError::OverlapDepth { .. })));
    let blocks = build(KvCacheOptions { device_blocks: u32::MAX, ..good.clone() });
    assert!(matches!(blocks, BuildError::Options(OptionsError::TooManyBlocks { .. })));
    let bytes = build(KvCacheOptions {
        shape: shape(1 << 16, 1 << 24, 1),
        device_blocks: i32::MAX as u32 - 8,
        ..good.clone()
    });
    assert!(matches!(bytes, BuildError::Options(OptionsError::Overflow { .. })));
    let step = build(KvCacheOptions { step_arrays: vec![u64::MAX], ..good.clone() });
    assert!(matches!(step, BuildError::Options(OptionsError::StepBytes { bytes: u64::MAX })));
    let table = KvCacheOptions { sequences_max: u32::MAX, ..good.clone() };
    let table = build(KvCacheOptions { blocks_per_sequence_max: u32::MAX, ..table });
    assert!(matches!(table, BuildError::Options(OptionsError::StepBytes { .. })));
    // More pinned memory than the machine has.
    let host = build(KvCacheOptions { host_blocks: 4 << 10, ..good });
    assert!(matches!(&host, BuildError::HostMemory(e) if e.is_out_of_memory()), "{host:?}");
    assert!(KvCache::new(&[], options(small(), 8, 8)).is_err());
    machine.assert_clean();
}

/// `?` in `main` prints `Debug`.
#[test]
fn a_refusal_is_one_line_with_its_causes_in_debug_too() {
    let machine =
        Machine::with(SimConfig { devices: 2, pinned_bytes: 1 << 20, ..config() }, small());
    let good = options(small(), 8, 8);
    let line = |options: KvCacheOptions| {
        let built = KvCache::new(&streams(&machine.rig.devices), options);
        format!("{:?}", built.map(drop).unwrap_err())
    };
    assert_eq!(
        line(KvCacheOptions { device_blocks: 0, ..good.clone() }),
        "no cache can have these options: the cache option device_blocks is 0"
    );
    let host = line(KvCacheOptions { host_blocks: 4 << 10, ..good });
    let parts = ["cuMemHostAlloc", "on GPU 0", "CUDA_ERROR_OUT_OF_MEMORY (2)"];
    assert!(parts.iter().all(|part| host.contains(part)) && !host.contains('\n'), "{host}");
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
    let machine = Machine::new(1, 1, small());
    let mut engine = machine.rig.engine(2, 0);
    let mut live = engine.admit(&Prompt::new(1, 7)).unwrap();
    engine.run(&mut [&mut live]).unwrap();
    let no_room = engine.cache.reserve(&mut live.sequence, 30).unwrap_err();
    assert!(no_room.to_string().starts_with("no room was reserved: group 0: "), "{no_room}");
    assert_eq!(format!("{no_room:?}"), no_room.to_string());
    let step = engine.begin().unwrap();
    let refused = engine.cache.stage(&step, &mut [&mut live.sequence], |_, _| Ok(())).unwrap_err();
    assert!(refused.to_string().starts_with("the batch was not staged: sequence 0"), "{refused}");
    assert_eq!(format!("{refused:?}"), refused.to_string());
    drop(step);
    drop(live);
    engine.close();
    machine.assert_clean();
}
