//! Released is not free, enqueued is not done, and memory in use is kept.

use crate::prelude::*;

#[test]
fn a_released_block_is_not_handed_out_before_its_step_completes() {
    for devices in [1, 2] {
        let (machine, mut engine) = Machine::on(devices, 8, 8);
        let mut first = engine.admit(&Prompt::new(1, 23)).unwrap();
        machine.hold(&engine);
        engine.run(&mut [&mut first]).unwrap();
        drop(first);
        let assert_refused = |engine: &mut Engine| {
            let refused = engine.admit(&Prompt::new(2, 23)).unwrap_err();
            let Refused::NoRoom(missing) = refused else { panic!("{refused}") };
            let ClaimError::Exhausted { requested, claimable, retiring } = missing.reason else {
                panic!("{missing}")
            };
            assert_eq!((requested, claimable, retiring), (6, 2, 6));
        };
        assert_refused(&mut engine);
        // Neither an open step nor a dropped one makes it otherwise.
        let step = engine.begin().unwrap();
        assert_refused(&mut engine);
        drop(step);
        assert_refused(&mut engine);
        // The content is still there to be found, though.
        let again = engine.admit(&Prompt::new(1, 23)).unwrap();
        assert_eq!(again.sequence.cached_tokens(), 20);
        machine.let_go(&engine);
        engine.end(again);
        engine.serve(&Prompt::new(2, 23));
        machine.close(engine);
    }
}

#[test]
fn an_open_step_keeps_what_was_released_in_it() {
    let (_machine, mut engine) = Machine::one(8, 0);
    let live = engine.computed(&Prompt::new(1, 32));
    let step = engine.begin().unwrap();
    drop(live);
    engine.drain().unwrap();
    assert!(engine.admit(&Prompt::new(2, 32)).unwrap_err().is_retryable());
    drop(step);
    engine.drain().unwrap();
    engine.serve(&Prompt::new(2, 32));
    engine.close();
}

#[test]
fn the_device_is_at_most_the_depth_behind() {
    let (_machine, mut engine) = Machine::one(8, 0);
    let mut live = engine.admit(&Prompt::new(1, 9)).unwrap();
    assert_eq!(engine.cache.manager().completed_step(), 0);
    for number in 1..10 {
        let step = engine.begin().unwrap();
        assert_eq!(step.number(), number);
        assert!(engine.cache.manager().completed_step() + 2 >= number);
        engine.enqueue(step, &mut [&mut live]).unwrap();
    }
    assert!(engine.cache.manager().completed_step() < 9);
    engine.drain().unwrap();
    assert_eq!((engine.cache.manager().completed_step(), engine.decided().steps), (9, 9));
    drop(live);
    engine.close();
}

/// Makes a cache drop content to host memory, with the copies decided, or enqueued and not run.
fn with_copies_pending(engine: &mut Engine, enqueued: bool) {
    engine.serve(&Prompt::new(1, 32));
    let mut live = engine.admit(&Prompt::new(2, 32)).unwrap();
    let offloaded = engine.decided().offloaded_blocks;
    assert!(offloaded > 0);
    if enqueued {
        // No event is recorded after the step.
        let step = engine.begin().unwrap();
        engine.cache.stage(&step, &mut [&mut live.sequence]).unwrap();
    }
    let sent: u64 =
        engine.cache.stats().transports.by_name().iter().map(|(_, carried)| carried.blocks).sum();
    let parts = engine.cache.parts().len() as u64;
    assert_eq!(if enqueued { offloaded * parts } else { 0 }, sent);
    drop(live);
}

#[test]
fn a_cache_dropped_under_its_copies_leaves_their_memory() {
    for choice in TransportChoice::ALL {
        for devices in [1, 2] {
            let (machine, mut engine) =
                Machine::with_engine(1, devices, by(choice, options(small(), 8, 8)));
            engine.serve(&Prompt::new(1, 32));
            // The devices run only what the host waits for, and no work waits for the copies.
            machine.sim.set_pace(Pace::Slowest);
            let step = engine.begin().unwrap();
            drop(engine.admit(&Prompt::new(2, 32)).unwrap());
            engine.cache.finish_step(step).unwrap();
            engine.cache.parts().iter().for_each(|part| part.compute().synchronize().unwrap());
            drop(engine);
            machine.sim.run_all();
            assert_eq!(machine.sim.findings(), [], "{choice}");
            assert!(machine.sim.check_leaks().mappings > 0, "{choice} on {devices}");
        }
    }
}

#[test]
fn a_cache_dropped_with_copies_decided_only_leaves_nothing() {
    let (machine, mut engine) = Machine::on(2, 8, 8);
    with_copies_pending(&mut engine, false);
    machine.sim.run_all();
    drop(engine);
    machine.assert_clean();
}

#[test]
fn a_cache_closed_with_copies_pending_waits_for_them() {
    for choice in TransportChoice::ALL {
        for enqueued in [false, true] {
            let (machine, mut engine) =
                Machine::with_engine(1, 2, by(choice, options(small(), 8, 8)));
            with_copies_pending(&mut engine, enqueued);
            machine.close(engine);
        }
    }
}

#[test]
fn a_cache_dropped_at_rest_leaves_nothing() {
    let (machine, mut engine) = Machine::on(2, 8, 8);
    for seed in 0..4 {
        engine.serve(&Prompt::new(seed, 20));
    }
    machine.sim.run_all();
    drop(engine);
    // And one that never had a step.
    let mut engine = machine.rig.engine(8, 8);
    let live = engine.admit(&Prompt::new(1, 20)).unwrap();
    drop((engine, live));
    machine.assert_clean();
}

/// A cache whose last step runs, with an event after it or with none because that was refused.
fn with_work_running(machine: &Machine, recorded: bool) -> Engine {
    machine.sim.set_pace(Pace::Slowest);
    let mut engine = machine.rig.engine(8, 8);
    let mut live = engine.computed(&Prompt::new(1, 20));
    engine.drain().unwrap();
    let before = machine.calls("cuEventRecord");
    engine.run(&mut [&mut live]).unwrap();
    engine.drain().unwrap();
    if !recorded {
        // The last of a step's calls: after all its work.
        let of_a_step = machine.calls("cuEventRecord") - before;
        machine.sim.fail_nth("cuEventRecord", of_a_step, ErrorCode::UNKNOWN);
    }
    assert_eq!(engine.run(&mut [&mut live]).is_ok(), recorded);
    engine
}

#[test]
fn a_cache_dropped_with_work_running_leaves_its_memory() {
    for recorded in [true, false] {
        let machine = Machine::new(1, 1, small());
        drop(with_work_running(&machine, recorded));
        machine.sim.run_all();
        assert_eq!(machine.sim.findings(), []);
        assert!(machine.sim.check_leaks().mappings > 0);
    }
}

#[test]
fn a_cache_closed_with_work_running_waits_for_it() {
    for recorded in [true, false] {
        for devices in [1, 2] {
            let machine = Machine::new(1, devices, small());
            with_work_running(&machine, recorded).try_close().unwrap();
            machine.sim.run_all();
            machine.assert_clean();
        }
    }
}

#[test]
fn a_cache_is_not_closed_under_an_open_step() {
    let (_machine, mut engine) = Machine::one(8, 8);
    let live = engine.computed(&Prompt::new(1, 20));
    let step = engine.begin().unwrap();
    let errors = engine.try_close().unwrap_err();
    assert!(matches!(errors[..], [CloseError::StepOpen]), "{errors:?}");
    drop((step, live));
}

#[test]
fn a_closed_cache_has_given_everything_back_at_once() {
    let machine = Machine::new(1, 2, small());
    let before = [0, 1].map(|device| machine.sim.device_used_bytes(device));
    let mut cache = machine.rig.cache(options(small(), 8, 8));
    assert!(machine.sim.pinned_bytes() > 0);
    let sequence = admit_to(&mut cache, 20).unwrap();
    cache.close().unwrap();
    // The devices live on, and no call allocates on them.
    assert_eq!(machine.sim.pinned_bytes(), 0);
    assert_eq!([0, 1].map(|device| machine.sim.device_used_bytes(device)), before);
    drop(sequence);
    machine.assert_clean();
}

#[test]
fn copies_decided_after_a_device_was_sent_the_others_are_sent_to_it_too() {
    let machine = Machine::new(1, 2, small());
    let each = by(TransportChoice::EachBlock, options(small(), 16, 32));
    let mut engine = machine.rig.engine_with(each);
    let prompts = [1, 2, 3, 4].map(|seed| Prompt::new(seed, 29));
    prompts[..2].iter().for_each(|prompt| assert_eq!(engine.serve(prompt).0, 0));
    // The first device is sent what the third prompt evicts, and the second refuses it.
    let mut third = engine.admit(&prompts[2]).unwrap();
    let evicted = engine.decided().offloaded_blocks;
    assert!(evicted > 0);
    machine.sim.fail_nth("cuMemcpyDtoHAsync", evicted + 1, ErrorCode::UNKNOWN);
    assert!(engine.run(&mut [&mut third]).is_err());
    drop(third);
    // More of the same direction is decided, and sent with the rest.
    let fourth = engine.admit(&prompts[3]).unwrap();
    assert!(engine.decided().offloaded_blocks > evicted);
    engine.end(fourth);
    prompts[..2].iter().for_each(|prompt| assert_eq!(engine.serve(prompt).0, 28));
    machine.close(engine);
}

#[test]
fn copies_that_take_host_blocks_wait_for_those_that_read_them_in_one_call() {
    for choice in TransportChoice::ALL {
        let (machine, mut engine) = Machine::with_engine(1, 1, by(choice, options(small(), 16, 8)));
        for seed in [1, 2, 3] {
            engine.serve(&Prompt::new(seed, 29));
        }
        // The first prompt comes back, and its host blocks are free.
        let mut first = engine.admit(&Prompt::new(1, 29)).unwrap();
        assert!(first.sequence.onboarded_blocks() > 0, "{choice}");
        // Others take them before anything was staged.
        let before = engine.decided().offloaded_blocks;
        let mut other = engine.admit(&Prompt::new(4, 29)).unwrap();
        assert!(engine.decided().offloaded_blocks > before, "{choice}");
        engine.run(&mut [&mut first, &mut other]).unwrap();
        drop((first, other));
        engine.drain().unwrap();
        assert_eq!(engine.corrupt, 0, "{choice}");
        machine.close(engine);
    }
}

#[test]
fn a_cache_is_not_closed_under_copies_that_no_step_waits_for() {
    let machine = Machine::new(1, 1, small());
    machine.sim.set_pace(Pace::Slowest);
    let each = by(TransportChoice::EachBlock, options(small(), 8, 8));
    let mut engine = machine.rig.engine_with(each);
    engine.serve(&Prompt::new(1, 30));
    let mut live = engine.admit(&Prompt::new(2, 30)).unwrap();
    machine.sim.fail_nth("cuStreamWaitEvent", 1, ErrorCode::UNKNOWN);
    let step = engine.begin().unwrap();
    assert!(engine.cache.stage(&step, &mut [&mut live.sequence]).is_err());
    drop((live, step));
    engine.try_close().unwrap();
    machine.sim.run_all();
    machine.assert_clean();
}
