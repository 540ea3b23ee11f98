//! Steps with enqueued work and without a recorded fence.

use crate::prelude::*;

/// Stages a step of one sequence, and enqueues work that the device has yet to do.
fn enqueue(cache: &mut KvCache, stream: &Stream, step: &OpenStep, sequence: &mut Sequence) {
    cache.stage(step, &mut [sequence]).unwrap();
    stream.fill(cache.parts()[0].paged().span().slice(0, 64).unwrap(), 1).unwrap();
}

#[test]
fn blocks_of_a_step_without_a_fence_are_in_use_until_it_is_drained() {
    let machine = Machine::new(1, 1, shape(1, 32, 4));
    machine.sim.set_pace(Pace::Slowest);
    let streams = machine.rig.streams();
    let mut cache = KvCache::new(&streams, options(shape(1, 32, 4), 12, 0)).unwrap();
    let mut sequence = admit_to(&mut cache, 40).unwrap();
    let step = cache.begin_step().unwrap();
    enqueue(&mut cache, &streams[0], &step, &mut sequence);
    machine.sim.fail_nth("cuEventRecord", 1, ErrorCode::INVALID_VALUE);
    assert!(matches!(cache.finish_step(step), Err(StepError::Device(_))));
    drop(sequence);
    // No event tells of the work, and yet the blocks are in use.
    assert!(matches!(admit_to(&mut cache, 40), Err(Refused::NoRoom(_))));
    // A drain records what was refused, and waits for it.
    cache.drain().unwrap();
    assert_eq!(machine.sim.run_all(), 0, "work of the step is left");
    drop(admit_to(&mut cache, 40).unwrap());
    cache.close().unwrap();
    machine.left(streams);
}

#[test]
fn a_step_that_is_dropped_while_a_drain_waits_is_waited_for_too() {
    let sim = sim(config());
    sim.set_pace(Pace::Slowest);
    let held: Arc<Mutex<Option<OpenStep>>> = Arc::default();
    let elsewhere = Arc::clone(&held);
    // Its holder drops it just when the host waits for the step before.
    let watched = CountingDriver::watched(Arc::new(sim.clone()), move |call| {
        if call == "cuEventSynchronize" {
            drop(elsewhere.lock().unwrap().take());
        }
    });
    let rig = rig(&(Arc::new(watched) as Arc<dyn Driver>), 1, shape(1, 32, 4));
    let streams = rig.streams();
    let mut cache = KvCache::new(&streams, options(shape(1, 32, 4), 12, 0)).unwrap();
    let mut sequence = admit_to(&mut cache, 40).unwrap();
    let before = cache.begin_step().unwrap();
    cache.stage(&before, &mut []).unwrap();
    cache.finish_step(before).unwrap();
    let step = cache.begin_step().unwrap();
    enqueue(&mut cache, &streams[0], &step, &mut sequence);
    drop(sequence);
    *held.lock().unwrap() = Some(step);
    cache.drain().unwrap();
    assert!(held.lock().unwrap().is_none(), "nothing was waited for");
    assert_eq!(sim.run_all(), 0, "work of the dropped step is left");
    drop(admit_to(&mut cache, 40).unwrap());
    cache.close().unwrap();
    drop((streams, rig));
    assert_eq!(sim.findings(), []);
}
