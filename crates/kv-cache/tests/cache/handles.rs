//! Handles: dropped steps, and steps and sequences given to another cache.

use kv_cache::{AdmitError, StepError};

use crate::common::engine::{Engine, Live, Prompt};
use crate::machine::{Machine, small};

fn hold(machine: &Machine, engine: &Engine) {
    engine.cache.parts().iter().for_each(|part| machine.sim.hold(part.compute().raw()));
}

fn let_go(machine: &Machine, engine: &Engine) {
    engine.cache.parts().iter().for_each(|part| machine.sim.release_hold(part.compute().raw()));
}

/// An engine with a request whose work of a step is enqueued on held streams; the step is dropped, as
/// an early return drops it.
fn with_a_step_dropped(machine: &Machine) -> (Engine, Live) {
    let mut engine = machine.rig.engine(8, 8);
    let mut live = engine.admit(&Prompt::new(1, 23)).unwrap();
    engine.run(&mut [&mut live]).unwrap();
    engine.drain().unwrap();
    let step = engine.begin().unwrap();
    hold(machine, &engine);
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
        assert!(refused.is_retryable(), "{refused}");
        // Nor when another step begins, whose beginning waits for nothing.
        let step = engine.begin().unwrap();
        let refused = engine.admit(&Prompt::new(2, 23)).unwrap_err();
        assert!(matches!(refused, AdmitError::NoSpace(_)), "{refused}");
        drop(step);
        let_go(&machine, &engine);
        engine.drain().unwrap();
        let mut live = engine.admit(&Prompt::new(2, 23)).unwrap();
        engine.run(&mut [&mut live]).unwrap();
        drop(live);
        engine.close();
        machine.assert_clean();
    }
}

#[test]
fn a_step_given_to_another_cache_stays_open() {
    let machine = Machine::new(1, 1, small());
    let (mut engine, mut other) = (machine.rig.engine(8, 8), machine.rig.engine(8, 8));
    let mut live = engine.admit(&Prompt::new(1, 23)).unwrap();
    engine.run(&mut [&mut live]).unwrap();
    engine.drain().unwrap();
    // Whether the other has a step open itself or not.
    for open in [false, true] {
        let others = open.then(|| other.begin().unwrap());
        let step = engine.begin().unwrap();
        hold(&machine, &engine);
        engine.enqueue_without_end(&step, &mut [&mut live]).unwrap();
        let refused = other.cache.finish_step(step);
        assert!(refused.is_err());
        assert!(matches!(engine.cache.begin_step(), Err(StepError::StillOpen)));
        let_go(&machine, &engine);
        drop((refused, others));
        engine.drain().unwrap();
    }
    drop(live);
    engine.close();
    other.try_close().unwrap();
    machine.assert_clean();
}

#[test]
fn a_dropped_step_gives_back_what_it_held_when_events_are_after_its_work() {
    let machine = Machine::new(1, 2, small());
    let mut engine = machine.rig.engine(8, 8);
    let mut live = engine.admit(&Prompt::new(1, 23)).unwrap();
    engine.run(&mut [&mut live]).unwrap();
    for _ in 0..10 {
        let step = engine.begin().unwrap();
        assert_eq!(step.number(), 2);
    }
    engine.run(&mut [&mut live]).unwrap();
    drop(live);
    engine.drain().unwrap();
    drop(engine.admit(&Prompt::new(2, 32)).unwrap());
    // No lease is left without an event, so memory that is at rest is given back.
    drop(engine);
    machine.assert_clean();
}

#[test]
fn dropped_steps_count_once_each_and_have_one_number() {
    let machine = Machine::new(1, 1, small());
    let mut engine = machine.rig.engine(8, 8);
    let mut live = engine.admit(&Prompt::new(1, 9)).unwrap();
    for number in 1..20 {
        for _ in 0..3 {
            let step = engine.begin().unwrap();
            assert_eq!(step.number(), number);
            drop(step);
            assert!(engine.cache.completed_step() < number);
        }
        engine.run(&mut [&mut live]).unwrap();
    }
    engine.drain().unwrap();
    assert_eq!(engine.cache.completed_step(), 19);
    drop(live);
    engine.close();
    machine.assert_clean();
}
