//! Refusals name their reason and change nothing.

use cuda_driver::{CopyError, ReaderError};
use cuda_sim::SimConfig;
use kv_cache::{
    AdmitError, BuildError, KvCache, KvCacheOptions, OptionsError, QuotaError, SealError, Sequence,
    SlotError, StepError,
};
use kv_pool::{
    ClaimError, Tier,
    tenants::{TenantError, TenantQuota},
};

use crate::common::engine::{Prompt, options, shape, streams};
use crate::machine::{Machine, config, small};

#[test]
fn requests_that_cannot_be() {
    let machine = Machine::new(1, 1, small());
    let mut engine = machine.rig.engine(12, 0);
    let hashes = Prompt::new(1, 64).hashes(4);
    let refuse = |engine: &mut crate::common::engine::Engine, tokens, hashes| {
        let before = engine.cache.pool().stats();
        let refused = engine.cache.admit(tokens, hashes).unwrap_err();
        assert_eq!(engine.cache.pool().stats(), before);
        assert!(!refused.is_retryable());
        refused
    };
    assert!(matches!(refuse(&mut engine, 0, &[]), AdmitError::NoTokens));
    assert!(matches!(
        refuse(&mut engine, 11, &hashes[..3]),
        AdmitError::TooManyHashes { hashes: 3, full_blocks: 2 }
    ));
    assert!(matches!(
        refuse(&mut engine, 65, &hashes),
        AdmitError::TooLong { blocks: 17, max: 16 }
    ));
    assert!(matches!(refuse(&mut engine, u64::MAX, &[]), AdmitError::TooLong { .. }));
    assert!(matches!(
        refuse(&mut engine, 49, &hashes[..12]),
        AdmitError::NeverFits { blocks: 13, capacity: 12 }
    ));
    let mut live = engine.admit(&Prompt::new(1, 40)).unwrap();
    let refused = engine.cache.extend(&mut live.sequence, 65).unwrap_err();
    assert!(matches!(refused, AdmitError::TooLong { .. }));
    let refused = engine.cache.extend(&mut live.sequence, 49).unwrap_err();
    assert!(matches!(refused, AdmitError::NeverFits { .. }));
    // It never shrinks.
    engine.cache.extend(&mut live.sequence, 1).unwrap();
    assert_eq!((live.sequence.tokens(), live.sequence.block_count()), (40, 10));
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
    assert!(matches!(refused, AdmitError::NoRow { rows: 8 }) && refused.is_retryable());
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
    let (long, other) = (cache.admit(40, &[]).unwrap(), cache.admit(36, &[]).unwrap());
    let row = long.row();
    drop(long);
    let short = cache.admit(5, &[]).unwrap();
    assert_eq!(short.row(), row);
    let step = cache.begin_step().unwrap();
    let staged = cache.stage(&[&other, &short], None, |_, _| Ok(())).unwrap();
    let width = staged[0].width();
    assert!(width >= 9);
    let mut bytes = vec![0; 2 * width * 4];
    streams[0].download(&mut bytes, staged[0].block_table().unwrap()).unwrap();
    let table: Vec<i32> =
        bytes.chunks_exact(4).map(|entry| i32::from_ne_bytes(entry.try_into().unwrap())).collect();
    let blocks = |sequence: &Sequence| -> Vec<i32> {
        (0..width).map(|index| sequence.block(index).map_or(-1, |block| block as i32)).collect()
    };
    assert_eq!(table, [&other, &short].map(blocks).concat());
    let mut bytes = [0; 8];
    streams[0].download(&mut bytes, staged[0].lengths().unwrap()).unwrap();
    assert_eq!(bytes, [36_u32.to_ne_bytes(), 5_u32.to_ne_bytes()].concat()[..]);
    cache.finish_step(step).unwrap();
    drop((other, short));
    cache.close().unwrap();
}

#[test]
fn a_step_reads_the_lengths_it_is_given_and_no_more_than_there_are() {
    let machine = Machine::new(1, 1, small());
    let streams = streams(&machine.rig.devices);
    let mut cache = KvCache::new(&streams, options(small(), 32, 0)).unwrap();
    let (long, short) = (cache.admit(36, &[]).unwrap(), cache.admit(5, &[]).unwrap());
    let step = cache.begin_step().unwrap();
    let both = [&long, &short];
    let staged = cache.stage(&both, Some(&[30, 5]), |_, _| Ok(())).unwrap();
    let mut bytes = [0; 8];
    streams[0].download(&mut bytes, staged[0].lengths().unwrap()).unwrap();
    assert_eq!(bytes, [30_u32.to_ne_bytes(), 5_u32.to_ne_bytes()].concat()[..]);
    let refused = |given: &[u32], cache: &mut KvCache| {
        cache.stage(&both, Some(given), |_, _| Ok(())).unwrap_err().to_string()
    };
    let text = "a step cannot read 6 tokens of sequence 1, which has 5";
    assert_eq!(refused(&[36, 6], &mut cache), text);
    let text = "a step of 2 sequences cannot be staged with 1 lengths";
    assert_eq!(refused(&[36], &mut cache), text);
    cache.finish_step(step).unwrap();
    drop((long, short));
    cache.close().unwrap();
}

#[test]
fn sequences_and_steps_of_another_cache() {
    let machine = Machine::new(1, 1, small());
    let mut engine = machine.rig.engine(32, 0);
    // Other blocks, so that mixing them up would leave the sequence's blocks.
    let options = options(shape(1, 8, 1), 16, 0);
    let mut other = KvCache::new(&streams(&machine.rig.devices), options).unwrap();
    let mut live = engine.admit(&Prompt::new(1, 30)).unwrap();
    let hashes = live.prompt.hashes(4);
    let sequence = &mut live.sequence;
    assert!(matches!(other.extend(sequence, 31), Err(AdmitError::ForeignSequence)));
    assert_eq!(other.seal(sequence, &hashes), Err(SealError::ForeignSequence));
    let slots = other.slot_mapping(sequence, 0..30, &mut Vec::new());
    assert_eq!(slots, Err(SlotError::ForeignSequence));
    assert!(matches!(
        other.stage(&[sequence], None, |_, _| Ok(())),
        Err(StepError::ForeignSequence)
    ));
    // It has lost nothing.
    assert_eq!((sequence.tokens(), sequence.block_count()), (30, 8));

    let step = other.begin_step().unwrap();
    let refused = engine.cache.finish_step(step).unwrap_err();
    let StepError::ForeignStep { step } = refused else { panic!("{refused}") };
    other.finish_step(step).unwrap();
    let step = engine.begin().unwrap();
    assert!(matches!(engine.cache.begin_step(), Err(StepError::StillOpen)));
    engine.enqueue(step, &mut [&mut live]).unwrap();
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
        let AdmitError::NoSpace(ClaimError::Tenant(error)) = &refused else { panic!("{refused}") };
        assert_eq!(*error, TenantError::Foreign { tenant });
        assert!(!refused.is_retryable());
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

#[test]
fn arrays_of_another_step() {
    let machine = Machine::new(1, 1, small());
    let [mut one, mut two] = [1, 2]
        .map(|_| KvCache::new(&streams(&machine.rig.devices), options(small(), 8, 0)).unwrap());
    let stage = |cache: &mut KvCache| {
        let step = cache.begin_step().unwrap();
        let staged = cache.stage(&[], None, |_, step| step.array(&[1_u32, 2])).unwrap().remove(0);
        cache.finish_step(step).unwrap();
        (*staged.extra(), staged)
    };
    let (first, _) = stage(&mut one);
    for (_, staged) in [stage(&mut one), stage(&mut two)] {
        assert!(matches!(staged.span(first), Err(StepError::Part(_))));
        assert_eq!(staged.span(*staged.extra()).unwrap().bytes(), 8);
    }
    one.close().unwrap();
    two.close().unwrap();
    machine.assert_clean();
}

/// What a cache stages is in its memory, which is gone with it.
#[test]
fn spans_of_a_cache_that_was_closed() {
    let machine = Machine::new(1, 1, small());
    let streams = streams(&machine.rig.devices);
    let mut cache = KvCache::new(&streams, options(small(), 8, 0)).unwrap();
    let sequence = cache.admit(9, &[]).unwrap();
    let step = cache.begin_step().unwrap();
    let table = cache.stage(&[&sequence], None, |_, _| Ok(())).unwrap()[0].block_table().unwrap();
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
fn slots_and_seals_beyond_a_sequence() {
    let machine = Machine::new(1, 1, small());
    let mut engine = machine.rig.engine(32, 0);
    let mut live = engine.admit(&Prompt::new(1, 10)).unwrap();
    let mut slots = vec![7];
    for tokens in [0..11, 11..11, u64::MAX - 1..u64::MAX] {
        let (start, end) = (tokens.start, tokens.end);
        let refused = engine.cache.slot_mapping(&live.sequence, tokens, &mut slots);
        assert_eq!(refused, Err(SlotError::OutOfRange { start, end, tokens: 10 }));
    }
    assert_eq!(slots, [7]);
    engine.cache.slot_mapping(&live.sequence, 3..6, &mut slots).unwrap();
    let block = |index| i64::from(live.sequence.block(index).unwrap());
    assert_eq!(slots, [7, block(0) * 4 + 3, block(1) * 4, block(1) * 4 + 1]);
    let hashes = Prompt::new(1, 12).hashes(4);
    let refused = engine.cache.seal(&mut live.sequence, &hashes);
    assert_eq!(refused, Err(SealError::TooManyHashes { hashes: 3, full_blocks: 2 }));
    engine.run(&mut [&mut live]).unwrap();
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
    let step = build(KvCacheOptions { step_array_bytes: u64::MAX, ..good.clone() });
    assert!(matches!(step, BuildError::Options(OptionsError::StepBytes { bytes: u64::MAX })));
    let table = KvCacheOptions { sequences_max: u32::MAX, ..good.clone() };
    let table = build(KvCacheOptions { blocks_per_sequence_max: u32::MAX, ..table });
    assert!(matches!(table, BuildError::Options(OptionsError::StepBytes { .. })));
    // More pinned memory than the machine has.
    let host = build(KvCacheOptions { host_blocks: 4 << 10, ..good });
    assert!(matches!(&host, BuildError::Device(e) if e.is_out_of_memory()), "{host:?}");
    assert!(KvCache::new(&[], options(small(), 8, 8)).is_err());
    machine.assert_clean();
}

#[test]
fn arrays_of_another_step_or_cache() {
    let machine = Machine::new(1, 1, small());
    let built = || KvCache::new(&streams(&machine.rig.devices), options(small(), 8, 0)).unwrap();
    let (mut cache, mut other) = (built(), built());
    let stage = |cache: &mut KvCache| {
        let step = cache.begin_step().unwrap();
        let staged = cache.stage(&[], None, |_, step| step.array(&[7u32])).unwrap().remove(0);
        cache.finish_step(step).unwrap();
        staged
    };
    let (earlier, foreign, own) = (stage(&mut cache), stage(&mut other), stage(&mut cache));
    for array in [earlier.extra(), foreign.extra()] {
        let refused = own.span(*array).unwrap_err();
        assert!(matches!(refused, StepError::Part(_)), "{refused}");
    }
    assert_eq!(own.span(*own.extra()).unwrap().bytes(), 4);
    cache.close().unwrap();
    other.close().unwrap();
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
