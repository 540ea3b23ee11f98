//! Steps whose work is enqueued and that no fence could be recorded after.

use cuda_driver::ErrorCode;
use cuda_sim::Pace;
use kv_cache::{KvCache, StepError};

use crate::common::engine::{options, shape, streams};
use crate::machine::Machine;

#[test]
fn blocks_of_a_step_without_a_fence_wait_for_the_next_step() {
    let machine = Machine::new(1, 1, shape(1, 32, 4));
    machine.sim.set_pace(Pace::Slowest);
    let streams = streams(&machine.rig.devices);
    let mut cache = KvCache::new(&streams, options(shape(1, 32, 4), 12, 0)).unwrap();
    let sequence = cache.admit(40, &[]).unwrap();
    let step = cache.begin_step().unwrap();
    drop(cache.stage(&[&sequence], |_, _| Ok(())).unwrap());
    // The work of the step, which the device has yet to do.
    streams[0].fill(cache.parts()[0].paged().span().slice(0, 64).unwrap(), 1).unwrap();
    machine.sim.fail_nth("cuEventRecord", 1, ErrorCode::INVALID_VALUE);
    assert!(matches!(cache.finish_step(step), Err(StepError::Device(_))));
    drop(sequence);
    // Nothing is in flight that could be waited for, and yet the blocks are in use.
    cache.drain().unwrap();
    let refused = cache.admit(40, &[]).unwrap_err();
    assert!(refused.is_retryable(), "{refused}");
    let step = cache.begin_step().unwrap();
    assert!(cache.admit(40, &[]).is_err());
    cache.finish_step(step).unwrap();
    cache.drain().unwrap();
    drop(cache.admit(40, &[]).unwrap());
    cache.close().unwrap();
    drop(streams);
    machine.assert_clean();
}
