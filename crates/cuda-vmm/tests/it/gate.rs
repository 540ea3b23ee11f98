//! The gate over a long time: its entries and queries do not accumulate, whoever queries the
//! fences.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::common::{Machine, machine, recorded};
use cuda_driver::Fence;
use cuda_sim::Pace;
use cuda_vmm::EpochGate;

/// Steps of a host that runs ahead of its device, on `streams` streams.
struct Steps<'a> {
    machine: &'a Machine,
    gate: EpochGate,
    depth: usize,
    spare: Vec<Fence>,
    in_flight: VecDeque<Vec<Fence>>,
    streams: Vec<cuda_driver::Stream>,
}

impl<'a> Steps<'a> {
    fn new(machine: &'a Machine, depth: usize, streams: usize) -> Self {
        let streams = (0..streams).map(|_| machine.stream()).collect();
        let (spare, in_flight) = (Vec::new(), VecDeque::new());
        Self { machine, gate: EpochGate::new(), depth, spare, in_flight, streams }
    }

    /// One step. Returns the number of events queried for it.
    fn step(&mut self, waits_by: impl Fn(&Fence)) -> u64 {
        let before = self.machine.calls("cuEventQuery");
        if self.in_flight.len() > self.depth {
            let oldest = self.in_flight.pop_front().unwrap();
            oldest.iter().for_each(waits_by);
            self.spare.extend(oldest);
        }
        let lease = self.gate.lease();
        let fences: Vec<_> = self
            .streams
            .iter()
            .map(|stream| match self.spare.pop() {
                Some(fence) => fence.renew(stream).unwrap(),
                None => recorded(stream),
            })
            .collect();
        lease.submitted(&fences).unwrap();
        self.in_flight.push_back(fences);
        self.machine.calls("cuEventQuery") - before
    }

    fn live_events(&self) -> u64 {
        self.machine.calls("cuEventCreate") - self.machine.calls("cuEventDestroy")
    }
}

#[test]
fn a_step_asks_no_event_and_makes_none_with_the_device_behind() {
    for (depth, streams) in [(1, 1), (2, 1), (1, 4), (2, 4)] {
        let machine = machine();
        machine.sim.set_pace(Pace::Slowest);
        let mut steps = Steps::new(&machine, depth, streams);
        for step in 0..100_000 / (depth * streams) {
            assert_eq!(steps.step(|fence| fence.wait().unwrap()), 0, "step {step}");
        }
        // The events of the steps in flight, once each.
        let most = ((depth + 2) * streams) as u64;
        assert!(machine.calls("cuEventCreate") <= most, "{}", machine.calls("cuEventCreate"));
    }
}

#[test]
fn fences_that_nobody_looks_at_are_asked_a_bounded_number_of_times() {
    const STREAMS: usize = 2;
    let machine = machine();
    machine.sim.set_pace(Pace::Slowest);
    let mut steps = Steps::new(&machine, 2, STREAMS);
    let long = machine.stream();
    machine.sim.hold(long.raw());
    // Work that never ends must not delay the other queries.
    (0..20).for_each(|_| steps.gate.lease().submitted(&[recorded(&long)]).unwrap());
    for step in 0..20_000 {
        // The host waits through the streams, without the fences.
        let asked = steps.step(|_| ());
        assert!(asked <= 2 * STREAMS as u64, "step {step}: {asked}");
        if step % 2 == 0 {
            steps.streams.iter().for_each(|stream| stream.synchronize().unwrap());
        }
        assert!(steps.live_events() < 200, "step {step}: {} events", steps.live_events());
    }
    machine.sim.release_hold(long.raw());
}

#[test]
fn what_the_caller_computes_is_computed_before_its_lease_is_closed() {
    let machine = machine();
    let (gate, stream) = (EpochGate::new(), machine.stream());
    let lease = gate.lease();
    // The caller's closure may use the gate, and may panic.
    let closed = catch_unwind(AssertUnwindSafe(|| {
        let looks = |_| {
            assert_eq!(gate.open_leases(), 1);
            recorded(&stream)
        };
        let fences: Vec<_> = (0..2).map(looks).collect();
        lease.submitted(&fences).unwrap();
        assert_eq!(gate.open_leases(), 0);
        let lease = gate.lease();
        let fences: Vec<Fence> = (0..2).map(|_| panic!("no fence")).collect();
        lease.submitted(&fences).unwrap();
    }));
    assert!(closed.is_err());
    assert_eq!(gate.open_leases(), 0);
}
