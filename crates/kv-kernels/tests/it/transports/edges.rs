//! The waits that order a transfer: bytes are right whatever order streams advance in.

use cuda_driver::{ErrorCode, Fence, Stream};
use kv_kernels::{
    Direction,
    link::{HostLink, HostReady, Transport},
};

use super::machine::{BOTH, Case, Machine, Scene};

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
    let scenes = BOTH.map(|direction| Scene::new(machine, &Case::plain(direction)));
    for (scene, stream) in scenes.iter().zip(&streams) {
        assert_eq!(scene.run(link, stream), Ok(Transport::TwoHop));
    }
    scenes.iter().zip(&streams).all(|(scene, stream)| scene.is_done(stream))
}

/// The stream writes the chunk before the transfer reads it.
fn written_late(machine: &Machine, link: &mut HostLink) -> bool {
    let mut scene = Scene::new(machine, &Case::plain(Direction::ChunkToPaged));
    let kept = machine.upload(&scene.host_after);
    scene.host.write_at(0, &vec![0xEE; scene.host_after.len()]).unwrap();
    machine.stream.copy_to_host(&scene.host, 0, kept.span()).unwrap();
    scene.run(link, &machine.stream).unwrap();
    scene.is_done(&machine.stream)
}

/// Who waits for the stream reads the chunk.
fn read_behind_the_stream(machine: &Machine, link: &mut HostLink) -> bool {
    let scene = Scene::new(machine, &Case::plain(Direction::PagedToChunk));
    scene.run(link, &machine.stream).unwrap();
    scene.is_done(&machine.stream)
}

/// Who waits for the arrival reads the chunk.
fn read_behind_the_arrival(machine: &Machine, link: &mut HostLink) -> bool {
    let scene = Scene::new(machine, &Case::plain(Direction::PagedToChunk));
    let transfer = [scene.transfer(None)];
    let arrival = link.start_chunks(&machine.stream, HostReady::Now, &transfer).unwrap();
    arrival.fence().wait().unwrap();
    let mut host = vec![0; scene.host_after.len()];
    scene.host.read_at(0, &mut host).unwrap();
    host == scene.host_after
}

/// Another stream writes the chunk that is to be read, and reads the chunk that is to be written: the
/// transfers are told of events.
fn ready_by_events(machine: &Machine, link: &mut HostLink) -> bool {
    let other = Stream::new(&machine.device).unwrap();
    let mut up = Scene::new(machine, &Case::plain(Direction::ChunkToPaged));
    let kept = machine.upload(&up.host_after);
    up.host.write_at(0, &vec![0xEE; up.host_after.len()]).unwrap();
    other.copy_to_host(&up.host, 0, kept.span()).unwrap();
    let fence = Fence::record(&other).unwrap();
    let transfer = [up.transfer(None)];
    let ready = HostReady::After(&fence);
    let arrival = link.start_chunks(&machine.stream, ready, &transfer).unwrap();
    arrival.fence().wait().unwrap();
    let is_up = up.is_done(&machine.stream);

    let down = Scene::new(machine, &Case::plain(Direction::PagedToChunk));
    let mut before = vec![0; down.host_after.len()];
    down.host.read_at(0, &mut before).unwrap();
    let seen = machine.upload(&vec![0_u8; before.len()]);
    other.copy_to_device(seen.span(), &down.host, 0).unwrap();
    let fence = Fence::record(&other).unwrap();
    let transfer = [down.transfer(None)];
    let ready = HostReady::After(&fence);
    let arrival = link.start_chunks(&machine.stream, ready, &transfer).unwrap();
    let mut read = vec![0; before.len()];
    other.download(&mut read, seen.span()).unwrap();
    arrival.fence().wait().unwrap();
    is_up && read == before && down.is_done(&machine.stream)
}

/// A transfer of one stream ends early, after it has enqueued work over a slot; the next, of another
/// stream, uses the slot.
fn after_a_refusal(machine: &Machine, link: &mut HostLink) -> bool {
    let streams = [Stream::new(&machine.device).unwrap(), Stream::new(&machine.device).unwrap()];
    let first = Scene::new(machine, &Case::plain(Direction::ChunkToPaged));
    let second = Scene::new(machine, &Case::plain(Direction::PagedToChunk));
    // The first record is of the fork, the second of the slot that has been filled.
    machine.sim.fail_nth("cuEventRecord", 2, ErrorCode::OUT_OF_MEMORY);
    assert!(first.run(link, &streams[0]).is_err());
    assert_eq!(second.run(link, &streams[1]), Ok(Transport::TwoHop));
    second.is_done(&streams[1])
}

/// A transfer of one stream is under way when one of another is refused; a third, of yet another, uses
/// the slots that the first still has.
fn refused_beside_another(machine: &Machine, link: &mut HostLink) -> bool {
    let streams = [0, 1, 2].map(|_| Stream::new(&machine.device).unwrap());
    let [first, third] = [0, 1].map(|_| Scene::new(machine, &Case::plain(Direction::ChunkToPaged)));
    let second = Scene::new(machine, &Case::plain(Direction::PagedToChunk));
    assert_eq!(first.run(link, &streams[0]), Ok(Transport::TwoHop));
    machine.sim.fail_nth("cuLaunchKernel", 1, ErrorCode::OUT_OF_MEMORY);
    assert!(second.run(link, &streams[1]).is_err());
    assert_eq!(third.run(link, &streams[2]), Ok(Transport::TwoHop));
    let is_done = third.is_done(&streams[2]);
    is_done && first.is_done(&streams[0])
}

const SCENARIOS: [Scenario; 7] = [
    two_streams,
    written_late,
    read_behind_the_stream,
    read_behind_the_arrival,
    ready_by_events,
    after_a_refusal,
    refused_beside_another,
];

#[test]
fn with_every_wait_bytes_are_right() {
    for (index, scenario) in SCENARIOS.into_iter().enumerate() {
        assert_eq!(wrong_seeds(scenario), 0, "scenario {index}");
    }
}

/// Without a ring it is the stream itself that waits.
#[test]
fn a_transfer_within_the_stream_waits_for_the_event_named_too() {
    for transport in [Transport::DirectKernel, Transport::CopyEngine] {
        for seed in 0..SEEDS {
            let machine = Machine::new(seed);
            let mut link = machine.link(transport);
            assert!(ready_by_events(&machine, &mut link), "{transport}, seed {seed}");
            machine.assert_clean();
        }
    }
}
