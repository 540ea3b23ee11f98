//! Handles: dropped steps, and steps and sequences given to another cache.

use kv_plane::manager::StepError as StepRefusal;

use crate::prelude::*;

/// An engine with a request whose work of a step is enqueued on held streams; the step is dropped, as
/// an early return drops it.
fn with_a_step_dropped(machine: &Machine) -> (Engine, Live) {
    let mut engine = machine.rig.engine(8, 8);
    let mut live = engine.computed(&Prompt::new(1, 23));
    engine.drain().unwrap();
    let step = engine.begin().unwrap();
    machine.hold(&engine);
    engine.enqueue_without_end(&step, &mut [&mut live]).unwrap();
    drop(step);
    (engine, live)
}

#[test]
fn memory_under_a_dropped_step_outlives_its_cache() {
    for devices in [1, 2] {
        let machine = Machine::new(1, devices, small());
        let (engine, live) = with_a_step_dropped(&machine);
        let streams: Vec<_> = engine.cache.parts().iter().map(|p| p.compute().raw()).collect();
        drop((live, engine));
        streams.into_iter().for_each(|stream| machine.sim.release_hold(stream));
        machine.sim.run_all();
        assert_eq!(machine.sim.findings(), []);
    }
}

#[test]
fn blocks_of_a_dropped_step_are_not_handed_out_while_its_work_runs() {
    for devices in [1, 2] {
        let machine = Machine::new(1, devices, small());
        let (mut engine, live) = with_a_step_dropped(&machine);
        drop(live);
        let refused = engine.admit(&Prompt::new(2, 23)).unwrap_err();
        assert!(matches!(refused, Refused::NoRoom(_)), "{refused}");
        machine.let_go(&engine);
        // The next step begins when the dropped one is over, of which nothing is to be believed.
        let step = engine.begin().unwrap();
        assert_eq!(engine.cache.manager().completed_step(), 2);
        assert_eq!(engine.decided().failed_steps, 1);
        let mut live = engine.admit(&Prompt::new(2, 23)).unwrap();
        engine.enqueue(step, &mut [&mut live]).unwrap();
        drop(live);
        machine.close(engine);
    }
}

#[test]
fn what_a_dropped_step_has_computed_is_computed_again() {
    for devices in [1, 2] {
        let (machine, mut engine) = Machine::on(devices, 32, 8);
        let mut live = engine.admit(&Prompt::new(1, 23)).unwrap();
        let step = engine.begin().unwrap();
        // Only a part of its work: nothing is written.
        engine.cache.stage(&step, &mut [&mut live.sequence]).unwrap();
        // Others find the blocks that it was to fill.
        let mut other = engine.admit(&Prompt::new(1, 23)).unwrap();
        assert_eq!(other.sequence.cached_tokens(), 20);
        drop(step);
        engine.run(&mut [&mut live, &mut other]).unwrap();
        assert_eq!(engine.redone, 2);
        drop((live, other));
        machine.close(engine);
    }
}

#[test]
fn a_step_given_to_another_cache_counts_as_dropped() {
    let machine = Machine::new(1, 1, small());
    let (mut engine, mut other) = (machine.rig.engine(8, 8), machine.rig.engine(8, 8));
    let mut live = engine.computed(&Prompt::new(1, 23));
    engine.drain().unwrap();
    // Whether the other has a step open itself or not.
    for open in [false, true] {
        let others = open.then(|| other.begin().unwrap());
        let step = engine.begin().unwrap();
        let number = step.number();
        assert!(matches!(
            engine.cache.begin_step(),
            Err(StepError::Step(StepRefusal::StillOpen { .. }))
        ));
        machine.hold(&engine);
        engine.enqueue_without_end(&step, &mut [&mut live]).unwrap();
        let refused = other.cache.finish_step(step).unwrap_err();
        let StepError::Step(StepRefusal::Foreign { step }) = refused else { panic!("{refused}") };
        assert_eq!(step, number);
        drop(others);
        assert!(matches!(engine.admit(&Prompt::new(2, 23)), Err(Refused::NoRoom(_))));
        machine.let_go(&engine);
        engine.drain().unwrap();
    }
    engine.end(live);
    engine.close();
    other.try_close().unwrap();
    machine.assert_clean();
}

#[test]
fn a_dropped_step_gives_back_what_it_held_when_events_are_after_its_work() {
    let (machine, mut engine) = Machine::on(2, 16, 8);
    let mut live = engine.computed(&Prompt::new(1, 23));
    for number in 2..12 {
        let step = engine.begin().unwrap();
        assert_eq!(step.number(), number);
        if number % 2 == 0 {
            engine.enqueue_without_end(&step, &mut [&mut live]).unwrap();
        }
    }
    engine.end(live);
    drop(engine.admit(&Prompt::new(2, 64)).unwrap());
    assert!(engine.decided().copied_on_write > 0);
    // No lease is left without an event, so memory that is at rest is given back.
    drop(engine);
    machine.assert_clean();
}

#[test]
fn steps_without_a_plan_are_none_to_the_devices() {
    let (machine, mut engine) = Machine::one(8, 8);
    let mut live = engine.admit(&Prompt::new(1, 9)).unwrap();
    let mut latest = 0;
    for _ in 1..20 {
        for _ in 0..3 {
            let step = engine.begin().unwrap();
            latest = step.number();
            drop(step);
            assert!(engine.cache.manager().completed_step() < latest);
        }
        engine.run(&mut [&mut live]).unwrap();
        latest += 1;
    }
    engine.drain().unwrap();
    assert_eq!((engine.cache.manager().completed_step(), latest), (76, 76));
    assert_eq!((engine.decided().steps, engine.decided().failed_steps), (19, 0));
    drop(live);
    machine.close(engine);
}
