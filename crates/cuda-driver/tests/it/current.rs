//! A context that a thread keeps current: fewer calls, and the same results.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cuda_driver::{CountingDriver, Device, DeviceBuffer, Driver, ErrorCode, Event, Stream};
use cuda_sim::{SimConfig, SimDriver};

struct Machine {
    sim: SimDriver,
    counts: Arc<CountingDriver>,
    devices: [Device; 2],
}

impl Machine {
    fn new() -> Self {
        let sim = SimDriver::new(SimConfig { devices: 2, ..SimConfig::default() }).unwrap();
        let counts = Arc::new(CountingDriver::new(Arc::new(sim.clone())));
        let open = |ordinal| Device::open(counts.clone() as Arc<dyn Driver>, ordinal).unwrap();
        Self { sim, devices: [open(0), open(1)], counts }
    }

    /// Calls of `work` that ask for a context, and that set one.
    fn binds(&self, work: impl FnOnce()) -> (u64, u64) {
        let seen = || {
            let calls = self.counts.calls();
            ["cuCtxGetCurrent", "cuCtxSetCurrent"].map(|name| calls.get(name).copied().unwrap_or(0))
        };
        let before = seen();
        work();
        let after = seen();
        (after[0] - before[0], after[1] - before[1])
    }

    fn current(&self) -> u64 {
        self.sim.ctx_get_current().unwrap()
    }

    /// Uses a device by every kind of handle, and sees that it is the right one.
    fn use_device(&self, ordinal: usize) {
        let device = &self.devices[ordinal];
        let used = self.sim.device_used_bytes(ordinal as u32);
        let buffer = DeviceBuffer::alloc(device, 4096).unwrap();
        assert!(self.sim.device_used_bytes(ordinal as u32) > used, "memory of another device");
        let (stream, event) = (Stream::new(device).unwrap(), Event::new(device).unwrap());
        stream.fill(buffer.span(), 7).unwrap();
        event.record(&stream).unwrap();
        let mut bytes = [0; 4096];
        stream.download(&mut bytes, buffer.span()).unwrap();
        assert_eq!(bytes, [7; 4096]);
        drop((buffer, stream, event));
        device.free_retired().unwrap();
        assert_eq!(self.sim.device_used_bytes(ordinal as u32), used);
    }

    fn assert_clean(self) {
        let Self { sim, counts, devices } = self;
        drop((devices, counts));
        assert_eq!(sim.findings(), []);
        assert!(sim.check_leaks().is_clean(), "{}", sim.check_leaks());
    }
}

#[test]
fn operations_make_no_call_for_a_context_that_is_kept() {
    let machine = Machine::new();
    let [first, _] = &machine.devices;
    let (asked, set) = machine.binds(|| machine.use_device(0));
    assert!(asked >= 8 && set == 2 * asked, "{asked} asked, {set} set");
    let within = first.while_current(|| {
        assert_eq!(machine.current(), first.context());
        machine.binds(|| machine.use_device(0))
    });
    assert_eq!(within.unwrap(), (0, 0));
    assert_eq!(machine.current(), 0, "what was current before");
    // Afterwards everything binds for itself again.
    assert_eq!(machine.binds(|| machine.use_device(0)), (asked, set));
    machine.assert_clean();
}

#[test]
fn another_device_is_bound_within_and_the_first_is_current_after_it() {
    let machine = Machine::new();
    let [first, second] = &machine.devices;
    let alone = machine.binds(|| machine.use_device(1));
    first
        .while_current(|| {
            let (asked, set) = machine.binds(|| machine.use_device(1));
            assert_eq!((asked, set), (0, alone.1));
            assert_eq!(machine.current(), first.context());
            second
                .while_current(|| {
                    assert_eq!(machine.current(), second.context());
                    assert_eq!(machine.binds(|| machine.use_device(1)), (0, 0));
                    machine.use_device(0);
                    assert_eq!(machine.current(), second.context());
                })
                .unwrap();
            assert_eq!(machine.current(), first.context());
            assert_eq!(machine.binds(|| machine.use_device(0)), (0, 0));
        })
        .unwrap();
    assert_eq!(machine.current(), 0);
    machine.assert_clean();
}

#[test]
fn calls_within_an_operation_do_not_mistake_its_context_for_the_kept_one() {
    let machine = Machine::new();
    let [first, second] = &machine.devices;
    first
        .while_current(|| {
            second
                .run(|_| {
                    assert_eq!(machine.current(), second.context());
                    machine.use_device(0);
                    assert_eq!(machine.current(), second.context());
                    Ok(())
                })
                .unwrap();
            assert_eq!(machine.current(), first.context());
        })
        .unwrap();
    machine.assert_clean();
}

#[test]
fn other_threads_bind_for_themselves_and_drops_there_too() {
    let machine = Machine::new();
    let [first, second] = &machine.devices;
    first
        .while_current(|| {
            let stream = Stream::new(first).unwrap();
            std::thread::scope(|scope| {
                let there = scope.spawn(|| {
                    machine.use_device(0);
                    machine.use_device(1);
                    drop(stream);
                    second.while_current(|| machine.use_device(0)).unwrap();
                    machine.current()
                });
                assert_eq!(there.join().unwrap(), 0);
            });
            assert_eq!(machine.current(), first.context());
        })
        .unwrap();
    machine.assert_clean();
}

#[test]
fn two_drivers_of_one_machine_do_not_trust_each_other() {
    let machine = Machine::new();
    let [first, _] = &machine.devices;
    let elsewhere = Device::open(Arc::new(machine.sim.clone()), 1).unwrap();
    first
        .while_current(|| {
            let buffer = elsewhere
                .while_current(|| {
                    assert_eq!(machine.current(), elsewhere.context());
                    machine.use_device(0);
                    assert_eq!(machine.current(), elsewhere.context());
                    DeviceBuffer::alloc(&elsewhere, 64).unwrap()
                })
                .unwrap();
            assert_eq!(machine.current(), first.context());
            machine.use_device(0);
            drop(buffer);
        })
        .unwrap();
    drop(elsewhere);
    machine.assert_clean();
}

#[test]
fn a_panic_leaves_nothing_kept() {
    let machine = Machine::new();
    let [first, _] = &machine.devices;
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _ = first.while_current(|| panic!("in the middle of it"));
    }));
    assert!(panicked.is_err());
    assert_eq!(machine.current(), 0);
    let (asked, set) = machine.binds(|| machine.use_device(0));
    assert!(asked > 0 && set == 2 * asked);
    machine.assert_clean();
}

#[test]
fn a_context_that_cannot_be_bound_or_restored_is_kept_by_nobody() {
    let machine = Machine::new();
    let [first, second] = &machine.devices;
    machine.sim.fail_nth("cuCtxSetCurrent", 1, ErrorCode::UNKNOWN);
    let refused = first.while_current(|| unreachable!("the context is not bound"));
    assert_eq!(refused.unwrap_err().driver_error().code, ErrorCode::UNKNOWN);
    assert_eq!(machine.current(), 0);
    first
        .while_current(|| {
            // The second of an operation's two calls: the first device's context does not come back.
            machine.sim.fail_nth("cuCtxSetCurrent", 2, ErrorCode::UNKNOWN);
            second.memory_info().unwrap();
            assert_eq!(machine.current(), second.context());
            machine.use_device(0);
        })
        .unwrap();
    assert_eq!(machine.current(), 0);
    machine.assert_clean();
}

#[test]
fn what_is_current_on_one_machine_says_nothing_about_another() {
    let (machine, other) = (Machine::new(), Machine::new());
    let [first, _] = &machine.devices;
    // Their contexts may well have equal numbers.
    first
        .while_current(|| {
            other.use_device(0);
            other.use_device(1);
            other.devices[1].while_current(|| machine.use_device(1)).unwrap();
        })
        .unwrap();
    other.assert_clean();
    machine.assert_clean();
}

#[test]
fn what_the_host_program_had_current_is_not_kept_afterwards() {
    let machine = Machine::new();
    let contexts = [0, 1].map(|ordinal| machine.devices[ordinal].context());
    // SAFETY: the devices hold their contexts; none is destroyed while this test runs.
    let set = |context| unsafe { machine.sim.ctx_set_current(context) }.unwrap();
    set(contexts[0]);
    machine.devices[0].while_current(|| machine.use_device(0)).unwrap();
    assert_eq!(machine.current(), contexts[0]);
    // The program goes on to another device, as it may by now.
    set(contexts[1]);
    machine.use_device(0);
    assert_eq!(machine.current(), contexts[1]);
    set(0);
    machine.assert_clean();
}
