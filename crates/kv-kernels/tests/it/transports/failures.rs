//! Calls that fail halfway and devices that are lost.

use std::sync::Arc;

use cuda_driver::{CopyError, Device, DeviceBuffer, ErrorCode, Event};
use kv_kernels::{
    Direction, KernelError,
    link::{HostReady, HostTransfer, LayerEvents, Transport, TransportError},
};

use super::machine::{BOTH, Case, Machine, Scene, noise};

/// Calls that transfers make.
const CALLS: [&str; 7] = [
    "cuLaunchKernel",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyBatchAsync",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuStreamSynchronize",
];

/// How a transfer is asked for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Way {
    Strict,
    Started,
}

#[test]
fn a_call_that_fails_leaves_nothing_running_and_the_link_usable() {
    let mut failed = 0;
    for transport in Transport::ALL {
        for direction in BOTH {
            for way in [Way::Strict, Way::Started] {
                for call in CALLS {
                    for nth in 1..6 {
                        failed += usize::from(one_failure((transport, direction, way), call, nth));
                    }
                }
            }
        }
    }
    assert!(failed > 120, "only {failed} transfers failed");
}

/// Whether the transfer failed; it must be whole otherwise.
fn one_failure(
    (transport, direction, way): (Transport, Direction, Way),
    call: &'static str,
    nth: u64,
) -> bool {
    let what = format!("{transport} {direction:?} {way:?}: {call} {nth}");
    let machine = Machine::new(nth);
    let mut link = machine.link(transport);
    let scene = Scene::new(&machine, &Case::plain(direction));
    let again = Scene::new(&machine, &Case::plain(direction));
    let events = LayerEvents::new(&machine.device, 3).unwrap();
    machine.sim.fail_nth(call, nth, ErrorCode::OUT_OF_MEMORY);
    let transfer = scene.transfer(Some(&events));
    let arrival = match way {
        Way::Strict => link.transfer_chunk(&machine.stream, transfer).map(|_| None),
        Way::Started => {
            link.start_chunks(&machine.stream, HostReady::InStream, &[transfer]).map(Some)
        }
    };
    // What was enqueued is ordered before what the stream does next: nothing writes after it. Of a
    // transfer that was started and not refused, that is the arrival's to say.
    let mut before = vec![0; scene.host_after.len()];
    let waited = (0..=nth).map(|_| machine.stream.synchronize()).any(|waited| waited.is_ok());
    assert!(waited, "{what}");
    if let Ok(Some(arrival)) = &arrival {
        assert!((0..=nth).map(|_| arrival.fence().wait()).any(|waited| waited.is_ok()), "{what}");
    }
    scene.host.read_at(0, &mut before).unwrap();
    machine.sim.run_all();
    use_up_faults(&machine);
    let mut after = vec![0; scene.host_after.len()];
    scene.host.read_at(0, &mut after).unwrap();
    assert!(before == after, "{what} left work behind");
    if arrival.is_ok() {
        assert!(scene.is_done(&machine.stream), "{what}");
    } else {
        let answer = again.run(&mut link, &machine.stream);
        let answer = answer.or_else(|_| again.run(&mut link, &machine.stream));
        assert_eq!(answer, Ok(transport));
        assert!(again.is_done(&machine.stream), "{what}");
    }
    arrival.is_err()
}

/// Makes each call until an order to fail that is still open has been met.
fn use_up_faults(machine: &Machine) {
    let memory = DeviceBuffer::alloc(&machine.device, 8).unwrap();
    let event = Event::new(&machine.device).unwrap();
    let mut bytes = [0; 8];
    for _ in 0..6 {
        let _ = machine.stream.upload(memory.span(), &bytes);
        let _ = machine.stream.download(&mut bytes, memory.span());
        let _ = event.record(&machine.stream);
        let _ = machine.stream.wait(&event);
        let _ = machine.stream.synchronize();
    }
}

#[test]
fn a_lost_device_is_an_error_and_everything_is_given_back() {
    let mut lost = 0;
    for transport in Transport::ALL {
        for direction in BOTH {
            for operations in 1..12 {
                let machine = Machine::new(operations);
                let mut link = machine.link(transport);
                let scene = Scene::new(&machine, &Case::plain(direction));
                machine.sim.lose_device(0, operations, ErrorCode::ILLEGAL_ADDRESS);
                // The loss may show in the transfer or at the next wait, and never as a panic.
                let outcome = scene.run(&mut link, &machine.stream);
                let waited = machine.stream.synchronize();
                if outcome.is_ok() && waited.is_ok() {
                    // It was not lost yet.
                    assert_eq!(machine.device.poison(), None);
                } else {
                    assert!(scene.run(&mut link, &machine.stream).is_err());
                    assert!(machine.device.poison().is_some());
                    lost += 1;
                }
                let sim = machine.sim.clone();
                drop((scene, link));
                let Machine { device, kernels, stream, counts, .. } = machine;
                drop((Arc::try_unwrap(kernels).unwrap(), stream));
                let _: &Device = &device;
                drop((device, counts));
                let leaks = sim.check_leaks();
                assert_eq!((leaks.streams, leaks.events, leaks.allocations), (0, 0, 0));
            }
        }
    }
    assert!(lost > 20, "only {lost} devices were lost in time");
}

#[test]
fn chunks_in_pinned_memory_of_another_driver_are_refused_by_every_transport() {
    // Two machines of one seed give out the same numbers, so that an address of the other would fit.
    let (machine, other) = (Machine::new(1), Machine::new(1));
    for (transport, direction) in
        Transport::ALL.into_iter().flat_map(|transport| BOTH.map(|way| (transport, way)))
    {
        let mut link = machine.link(transport);
        let scene = Scene::new(&machine, &Case::plain(direction));
        let theirs = other.pinned(&noise(scene.host.bytes(), 7));
        let transfer = HostTransfer { host: &theirs, ..scene.transfer(None) };
        let (before, stream) = (machine.counts.calls(), &machine.stream);
        let refused = CopyError::OtherDriver { stream: stream.raw() };
        let refused = TransportError::Kernel(KernelError::Memory(refused));
        assert_eq!(
            link.transfer_chunk(stream, transfer),
            Err(refused),
            "{transport} {direction:?}"
        );
        assert_eq!(machine.counts.calls(), before, "{transport}: the driver was asked");
        assert_eq!(scene.run(&mut link, stream), Ok(transport));
        assert!(scene.is_done(stream));
    }
    machine.assert_clean();
}
