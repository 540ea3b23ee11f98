//! Each driver call of a few steps refused once: the step is sent again, and nothing is lost.

use super::model::{Model, Sends, pool, read, small};
use super::steps::{machine, write_sampled};

use crate::prelude::*;

const STEPS: usize = 6;
/// The calls of a step.
const CALLS: [&str; 3] = ["cuMemcpyHtoDAsync", "cuEventRecord", "cuGraphLaunch"];

/// Runs the steps. Returns how many were refused, and how often each call was made.
fn run(refusal: Option<(&'static str, ErrorCode)>, sends: Sends, seed: u64) -> (usize, [u64; 3]) {
    let machine = machine(2, false);
    machine.sim.set_pace(Pace::OneBehind);
    // One buffer more than usual, since a buffer whose event was refused is not used again.
    let mut model = Model::new(&machine.device, small(), 3, seed);
    let mut made = [0; 3];
    for step in 0..STEPS {
        let before = CALLS.map(|call| machine.calls(call));
        if step == 2
            && let Some((call, code)) = refusal
        {
            machine.sim.fail_nth(call, 1, code);
        }
        let expected = model.step(&machine.stream, sends);
        for (made, (call, before)) in made.iter_mut().zip(CALLS.iter().zip(before)) {
            *made += machine.calls(call) - before;
        }
        if sends == Sends::Inputs {
            model.batch.gather(&machine.stream).unwrap();
        }
        assert_eq!(model.contents(&machine.stream), expected, "{refusal:?}, step {step}");
        write_sampled(&machine, &mut model, &expected);
    }
    assert_eq!(machine.sim.findings(), []);
    (model.refused, made)
}

#[test]
fn a_step_that_was_refused_at_any_call_is_sent_again_whole() {
    for sends in [Sends::All, Sends::Inputs] {
        assert_eq!(run(None, sends, 8).0, 0);
        let calls = if sends == Sends::All { &CALLS[..] } else { &CALLS[..2] };
        for &call in calls {
            for code in [ErrorCode::UNKNOWN, ErrorCode::OUT_OF_MEMORY] {
                // Not every step changes a table.
                for seed in 0..8 {
                    let refused = run(Some((call, code)), sends, seed).0;
                    assert_eq!(refused, 1, "{sends:?}: {call}, {code}");
                }
            }
        }
    }
}

#[test]
fn a_steady_step_is_one_copy_one_launch_and_one_event() {
    let [copies, records, launches] = run(None, Sends::All, 8).1;
    assert_eq!([copies, records, launches], [STEPS as u64; 3]);
    let [copies, records, launches] = run(None, Sends::Inputs, 8).1;
    assert_eq!([copies, records, launches], [STEPS as u64, STEPS as u64, 0]);
}

#[test]
fn a_step_that_was_dropped_leaves_its_changes_to_the_next() {
    let machine = machine(3, false);
    let pool = pool(&machine.device, &small(), 2);
    let mut batch = DeviceBatch::new(&pool, small()).unwrap();
    batch.edit(0, Row::new(4), 0, &[5].map(TableEntry::from)).unwrap();
    drop(batch.step_wait(&machine.stream).unwrap());
    batch.edit(0, Row::new(4), 1, &[6].map(TableEntry::from)).unwrap();
    batch.step_wait(&machine.stream).unwrap().row(Row::new(4), 4, 4, 1).unwrap();
    let mut step = batch.step_wait(&machine.stream).unwrap();
    step.row(Row::new(4), 4, 4, 1).unwrap();
    let table = step.submit().unwrap().buffers.tables[0].block_table;
    assert_eq!(read::<i32>(&machine.stream, table)[..3], [5, 6, 0]);
}
