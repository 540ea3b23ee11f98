//! Two steps are staged while the stream is stalled. Both must arrive as they were written.

use crate::prelude::*;

const BYTES: usize = 4096;

#[derive(Clone, Copy)]
enum Reader {
    Copy,
    Kernel,
}

const READERS: [Reader; 2] = [Reader::Copy, Reader::Kernel];

/// Stages A and B behind a stalled stream; returns the received bytes of each.
fn stage_two(machine: &Machine, pool: &StagingPool, reader: Reader) -> [Vec<u8>; 2] {
    let targets = [machine.memory(BYTES as u64), machine.memory(BYTES as u64)];
    machine.sim.hold(machine.stream.raw());
    for (number, target) in targets.iter().enumerate() {
        let mut buffer = pool.acquire().unwrap();
        buffer.bytes_mut().copy_from_slice(&pattern(number as u64, BYTES));
        let read = |view: &SubmittedView<'_>| match reader {
            Reader::Copy => view.copy_to_device(target.span(), 0),
            Reader::Kernel => {
                Ok(machine.launch_copy(view.stream(), target.span(), view.address())?)
            }
        };
        buffer.submit(&machine.stream, read).unwrap();
    }
    assert_eq!(machine.stream.is_idle(), Ok(false), "the stream did not stand still");
    machine.sim.release_hold(machine.stream.raw());
    targets.map(|target| machine.read(target.span()))
}

#[test]
fn steps_staged_behind_a_stalled_stream_arrive_intact() {
    for reader in READERS {
        for seed in 0..16 {
            let machine = Machine::new(seed);
            let arrived = stage_two(&machine, &machine.pool(BYTES as u64, 2), reader);
            assert_eq!(arrived, [pattern(0, BYTES), pattern(1, BYTES)]);
            assert!(machine.sim.findings().is_empty());
        }
    }
}
