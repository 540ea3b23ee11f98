//! The waits that order a transfer: bytes are right whatever order streams advance in.

use cuda_driver::{ErrorCode, Stream};
use kv_kernels::link::{HostLink, Transport};

use super::blocks::write_late;
use super::machine::{Machine, Moving};

const SEEDS: u64 = 24;

/// Whether a way of using a link gives the right bytes.
type Scenario = fn(&Machine, &mut HostLink) -> bool;

fn wrong_seeds(scenario: Scenario) -> usize {
    let is_wrong = |seed: &u64| {
        let machine = Machine::new(*seed);
        let mut link = machine.link(Transport::TwoHop);
        let is_right = scenario(&machine, &mut link);
        if is_right {
            machine.assert_clean();
        }
        !is_right
    };
    (0..SEEDS).filter(is_wrong).count()
}

/// To and fro on two streams that nothing but the ring orders.
fn two_streams(machine: &Machine, link: &mut HostLink) -> bool {
    let streams = [Stream::new(&machine.device).unwrap(), Stream::new(&machine.device).unwrap()];
    let both = [true, false].map(|to_host| Moving::new(machine, to_host));
    for (moving, stream) in both.iter().zip(&streams) {
        assert_eq!(moving.run(link, stream), Ok(Transport::TwoHop));
    }
    both.iter().zip(&streams).all(|(moving, stream)| moving.is_right(stream))
}

/// The stream writes the host's blocks before the transfer reads them.
fn written_late(machine: &Machine, link: &mut HostLink) -> bool {
    let moving = Moving::new(machine, false);
    write_late(machine, moving.scene.host.buffer());
    moving.run(link, &machine.stream).unwrap();
    moving.is_right(&machine.stream)
}

/// Who waits for the stream reads the host's blocks.
fn read_behind_the_stream(machine: &Machine, link: &mut HostLink) -> bool {
    let moving = Moving::new(machine, true);
    moving.run(link, &machine.stream).unwrap();
    moving.is_right(&machine.stream)
}

/// A transfer of one stream ends early, after it has enqueued work over a slot; the next, of another
/// stream, uses the slot.
fn after_a_refusal(machine: &Machine, link: &mut HostLink) -> bool {
    let streams = [Stream::new(&machine.device).unwrap(), Stream::new(&machine.device).unwrap()];
    let [first, second] = [false, true].map(|to_host| Moving::new(machine, to_host));
    // The first record is of the fork, the second of the slot that has been filled.
    machine.sim.fail_nth("cuEventRecord", 2, ErrorCode::OUT_OF_MEMORY);
    assert!(first.run(link, &streams[0]).is_err());
    assert_eq!(second.run(link, &streams[1]), Ok(Transport::TwoHop));
    second.is_right(&streams[1])
}

/// A transfer of one stream is under way when one of another is refused; a third, of yet another, uses
/// the slots that the first still has.
fn refused_beside_another(machine: &Machine, link: &mut HostLink) -> bool {
    let streams = [0, 1, 2].map(|_| Stream::new(&machine.device).unwrap());
    let [first, second, third] = [false, true, false].map(|to_host| Moving::new(machine, to_host));
    assert_eq!(first.run(link, &streams[0]), Ok(Transport::TwoHop));
    machine.sim.fail_nth("cuLaunchKernel", 1, ErrorCode::OUT_OF_MEMORY);
    assert!(second.run(link, &streams[1]).is_err());
    assert_eq!(third.run(link, &streams[2]), Ok(Transport::TwoHop));
    let is_right = third.is_right(&streams[2]);
    is_right && first.is_right(&streams[0])
}

const SCENARIOS: [Scenario; 5] =
    [two_streams, written_late, read_behind_the_stream, after_a_refusal, refused_beside_another];

#[test]
fn with_every_wait_bytes_are_right() {
    for (index, scenario) in SCENARIOS.into_iter().enumerate() {
        assert_eq!(wrong_seeds(scenario), 0, "scenario {index}");
    }
}
