//! Driver calls that fail: of building and closing, of a lost device, and of the table's changes. Those of
//! requests and steps are in `late`.

use crate::prelude::*;

pub(crate) fn differences(
    before: &BTreeMap<&'static str, u64>,
    after: BTreeMap<&'static str, u64>,
) -> Vec<(&'static str, u64)> {
    let made = |(name, count)| (name, count - before.get(name).copied().unwrap_or(0));
    after.into_iter().map(made).filter(|(_, count)| *count > 0).collect()
}

#[test]
fn a_lost_device_is_told_and_cleaned_up() {
    for call in ["cuLaunchKernel", "cuMemcpyHtoDAsync", "cuEventRecord", "cuMemMap"] {
        for devices in [1, 2] {
            let (machine, mut engine) = Machine::on(devices, 16, 8);
            let mut live = engine.computed(&Prompt::new(1, 9));
            machine.sim.fail_nth(call, 1, ErrorCode::ILLEGAL_ADDRESS);
            let mut first: Option<Failure> = None;
            for step in 0..4 {
                let outcome =
                    engine.extend(&mut live, step, 8).and_then(|()| engine.run(&mut [&mut live]));
                first = first.or(outcome.err());
            }
            let first = first.unwrap();
            let told = cuda_driver::messages::Chain(&*first).to_string();
            assert!(told.contains(call), "{call}: {told}");
            // Every later step names the cause.
            let cause = machine.rig.devices.iter().find_map(|device| device.poison()).unwrap();
            assert_eq!((cause.call, cause.code), (call, ErrorCode::ILLEGAL_ADDRESS));
            assert!(engine.run(&mut [&mut live]).is_err());
            drop(live);
            engine.try_close().unwrap();
            drop(machine.rig);
            let leaks = machine.sim.check_leaks();
            assert_eq!((leaks.mappings, leaks.reservations, leaks.physical_handles), (0, 0, 0));
        }
    }
}

#[test]
fn every_call_of_building_a_cache_fails_once() {
    let build = |machine: &Machine| {
        let streams = machine.rig.streams();
        let before = machine.sim.calls();
        let built = KvCache::new(&streams, options(small(), 8, 8));
        (built, differences(&before, machine.sim.calls()))
    };
    let healthy = Machine::new(1, 2, small());
    let (built, calls) = build(&healthy);
    built.unwrap().close().unwrap();
    healthy.assert_clean();
    for (call, count) in calls {
        for nth in 1..=count {
            let machine = Machine::new(1, 2, small());
            let streams = machine.rig.streams();
            machine.sim.fail_nth(call, nth, refusal(call));
            // Some facts about a device are only a matter of speed.
            let failed = match KvCache::new(&streams, options(small(), 8, 8)) {
                Ok(cache) => cache.close().is_ok(),
                Err(error) => !error.to_string().is_empty(),
            };
            assert!(failed, "{call} {nth}");
            drop(streams);
            machine.assert_clean();
        }
    }
}

#[test]
fn every_call_of_closing_fails_the_first_time_and_the_last() {
    let prepare = || {
        let machine = Machine::new(1, 2, small());
        // Without a kernel to compile, which takes longer than the rest.
        let by_engine = TransportChoice::Only(Transport::CopyEngine);
        let mut engine = machine.rig.engine_with(by(by_engine, options(small(), 8, 8)));
        let live = engine.computed(&Prompt::new(1, 20));
        drop(live);
        (machine, engine)
    };
    let (machine, engine) = prepare();
    let before = machine.sim.calls();
    engine.try_close().unwrap();
    let calls = differences(&before, machine.sim.calls());
    for (call, count) in calls {
        for nth in [1, count] {
            let (machine, engine) = prepare();
            machine.sim.fail_nth(call, nth, refusal(call));
            let told = engine.try_close().is_err();
            drop(machine.rig);
            machine.sim.run_all();
            // An event that the driver would not destroy ends with its context.
            let lost = |finding: &Finding| finding.kind == FindingKind::LostObjects;
            assert!(machine.sim.findings().iter().all(lost), "{call} {nth}");
            let leaks = machine.sim.check_leaks();
            assert!(leaks.is_clean() || told || is_small(&leaks), "{call} {nth}: {leaks}");
        }
    }
}

/// Only a handle whose destruction the driver refused is left.
fn is_small(leaks: &cuda_sim::LeakReport) -> bool {
    let memory = leaks.mappings + leaks.reservations + leaks.physical_handles;
    memory + leaks.pinned_regions + leaks.allocations == 0
}

#[test]
fn a_table_whose_changes_were_refused_for_long_arrives_whole() {
    for devices in [1, 2] {
        let (machine, mut engine) = Machine::on(devices, 48, 0);
        let mut keeps = engine.computed(&Prompt::new(1, 9));
        let options = engine.cache.options();
        let entries = options.sequences_max * options.groups[0].blocks_per_sequence_max;
        // More changes than can wait to be sent, which are twice the table's entries.
        let mut changed = 0;
        let mut seed = 2;
        while changed < 3 * entries as usize {
            let mut live = engine.admit(&Prompt::new(seed, 60)).unwrap();
            machine.sim.fail_nth("cuMemcpyHtoDAsync", u64::from(devices), ErrorCode::UNKNOWN);
            assert!(engine.run(&mut [&mut live]).is_err());
            changed += engine.cache.manager().last_plan().edit_ids.len();
            seed += 1;
        }
        let mut last = engine.admit(&Prompt::new(seed, 30)).unwrap();
        engine.run(&mut [&mut keeps, &mut last]).unwrap();
        drop((keeps, last));
        machine.close(engine);
    }
}

#[test]
fn a_step_whose_batch_was_refused_has_failed_though_it_is_finished() {
    let (machine, mut engine) = Machine::one(16, 0);
    let before = engine.computed(&Prompt::new(2, 5));
    let mut live = engine.admit(&Prompt::new(1, 9)).unwrap();
    let step = engine.begin().unwrap();
    machine.sim.fail_nth("cuMemcpyHtoDAsync", 1, ErrorCode::UNKNOWN);
    let staged = engine.cache.stage(&step, &mut [&mut live.sequence]);
    assert!(staged.is_err());
    engine.cache.finish_step(step).unwrap();
    engine.drain().unwrap();
    assert_eq!(engine.cache.manager().stats().failed_steps, 1);
    drop((before, live));
    machine.close(engine);
}
