//! Slabs of pinned memory: pinned on call and in the background, refused, given back and dropped.

use std::collections::BTreeSet;
use std::sync::Condvar;

use cuda_driver::CloseError;
use cuda_driver::host_pages::{HostMemory, HostPagesOptions, MemoryNode};

use crate::prelude::*;

const PAGE: u64 = 4096;

/// `slabs` slabs of two blocks of 2,048 bytes.
fn options(slabs: u64, threads: usize) -> SlabsOptions {
    SlabsOptions { slab_bytes_max: PAGE, threads, ..SlabsOptions::new(2048, 2 * slabs) }
}

fn slabs(machine: &Machine, slabs: u64, threads: usize) -> PinnedSlabs {
    PinnedSlabs::new(&machine.device, &options(slabs, threads)).unwrap()
}

/// Polls until `slabs` slabs are usable.
fn wait_for(made: &mut PinnedSlabs, slabs: usize) {
    while made.poll().unwrap() < slabs {
        std::thread::yield_now();
    }
    assert_eq!(made.slabs().len(), slabs);
}

/// Frees what was dropped until no more than `bytes` bytes are pinned.
fn free_until(machine: &Machine, bytes: u64) {
    while machine.sim.pinned_bytes() > bytes {
        machine.device.free_retired().unwrap();
        std::thread::yield_now();
    }
    assert_eq!(machine.sim.pinned_bytes(), bytes);
}

/// Sends other bytes through every slab: each is memory of its own, of its whole length.
fn use_all(machine: &Machine, slabs: &[Arc<PinnedBuffer>]) {
    let targets: Vec<_> = slabs.iter().map(|slab| machine.memory(slab.bytes())).collect();
    for (number, (slab, target)) in (0..).zip(slabs.iter().zip(&targets)) {
        let bytes = pattern(number, slab.bytes() as usize);
        machine.stream.upload(target.span(), &bytes).unwrap();
        machine.stream.copy_to_host(slab, 0, target.span()).unwrap();
    }
    machine.stream.synchronize().unwrap();
    for (number, slab) in (0..).zip(slabs) {
        let mut bytes = vec![0; slab.bytes() as usize];
        slab.read_at(0, &mut bytes).unwrap();
        assert_eq!(bytes, pattern(number, bytes.len()), "slab {number}");
    }
    let addresses: BTreeSet<_> = slabs.iter().map(|slab| slab.host_address()).collect();
    assert_eq!(addresses.len(), slabs.len());
}

/// Stops the threads that make a certain call of the driver.
#[derive(Clone, Default)]
struct Gate {
    state: Arc<(Mutex<Passed>, Condvar)>,
}

/// The number of calls made, and of those let through; none while the gate is open.
type Passed = (u64, Option<u64>);

impl Gate {
    /// A machine whose calls of `cuMemHostRegister` stop, each until it is let through.
    fn shut() -> (Self, Machine) {
        let gate = Self::default();
        gate.let_through(Some(0));
        let sim = SimDriver::new(SimConfig { devices: 2, ..SimConfig::default() }).unwrap();
        let at = gate.clone();
        let counting = CountingDriver::watched(Arc::new(sim.clone()), move |call| {
            if call == "cuMemHostRegister" {
                at.pass();
            }
        });
        let mut machine = Machine::on(sim);
        machine.device = Device::open(Arc::new(counting), 0).unwrap();
        machine.stream = Stream::new(&machine.device).unwrap();
        (gate, machine)
    }

    fn pass(&self) {
        let (state, changed) = &*self.state;
        let mut state = state.lock().unwrap();
        let own = state.0;
        state.0 += 1;
        changed.notify_all();
        while state.1.is_some_and(|end| own >= end) {
            state = changed.wait(state).unwrap();
        }
    }

    /// Lets the first `calls` calls through, or all.
    fn let_through(&self, calls: Option<u64>) {
        let (state, changed) = &*self.state;
        state.lock().unwrap().1 = calls;
        changed.notify_all();
    }

    fn calls(&self) -> u64 {
        self.state.0.lock().unwrap().0
    }

    /// Waits until `calls` calls have been made.
    fn wait_for(&self, calls: u64) {
        let (state, changed) = &*self.state;
        let mut state = state.lock().unwrap();
        while state.0 < calls {
            state = changed.wait(state).unwrap();
        }
    }
}

#[test]
fn without_threads_each_call_pins_a_slab() {
    let machine = Machine::new(1);
    let mut made = slabs(&machine, 3, 0);
    assert_eq!((made.blocks_per_slab(), made.slabs_wanted()), (2, 3));
    for slabs in 0..3 {
        assert_eq!(made.poll(), Ok(slabs), "a poll pins nothing");
        assert_eq!(
            (made.slabs().len() as u64, machine.sim.pinned_bytes()),
            (slabs as u64, slabs as u64 * PAGE)
        );
        assert_eq!(made.pin_next(), Ok(true));
        assert_eq!(made.slabs().len(), slabs + 1);
    }
    assert_eq!((made.pin_next(), made.poll(), made.pin_all()), (Ok(false), Ok(3), Ok(3)));
    use_all(&machine, made.slabs());
    assert_eq!(made.memory().ordinary_bytes, 3 * PAGE);
    made.close().unwrap();
    assert_eq!(machine.sim.pinned_bytes(), 0);
    assert!(machine.sim.findings().is_empty(), "{:?}", machine.sim.findings());
}

#[test]
fn slabs_are_equal_and_have_room_for_all_blocks() {
    let machine = Machine::new(2);
    for (block_bytes, blocks, slab_bytes_max, per_slab, count) in [
        (100, 0, 1000, 10, 0),
        (100, 1, 1000, 1, 1),
        (100, 10, 1000, 10, 1),
        (100, 11, 1000, 6, 2),
        (100, 25, 1099, 9, 3),
        (100, 3, 0, 1, 3),
        (5000, 2, 4096, 1, 2),
        (1 << 20, 70, u64::MAX, 70, 1),
    ] {
        let options =
            SlabsOptions { slab_bytes_max, threads: 0, ..SlabsOptions::new(block_bytes, blocks) };
        let mut made = PinnedSlabs::new(&machine.device, &options).unwrap();
        assert_eq!((made.blocks_per_slab(), made.slabs_wanted()), (per_slab, count), "{options:?}");
        assert_eq!(made.pin_all(), Ok(count));
        for slab in made.slabs() {
            assert_eq!(slab.bytes(), per_slab * block_bytes, "{options:?}");
        }
        use_all(&machine, made.slabs());
        made.close().unwrap();
        assert_eq!(machine.sim.pinned_bytes(), 0);
    }
}

#[test]
fn threads_pin_everything_in_the_memory_that_was_asked_for() {
    let pages = |huge, node| HostMemory::Pages(HostPagesOptions { huge, node });
    for memory in [
        SlabsOptions::new(1, 1).memory,
        pages(false, MemoryNode::Any),
        pages(true, MemoryNode::Number(900)),
        HostMemory::Driver(HostAllocFlags::CACHED),
    ] {
        for threads in [1, 2, 16, SlabsOptions::THREADS_MAX] {
            let machine = Machine::new(3);
            // Slabs of several pieces, the last of which is short.
            let options = SlabsOptions {
                slab_bytes_max: 35 << 20,
                memory,
                threads,
                ..SlabsOptions::new(5 << 20, 14)
            };
            let mut made = PinnedSlabs::new(&machine.device, &options).unwrap();
            wait_for(&mut made, 2);
            let (got, pinned) = (made.memory(), machine.sim.pinned_bytes());
            let huge = got.huge_bytes + got.advised_bytes;
            assert_eq!(got.driver_bytes + huge + got.ordinary_bytes, pinned);
            let (registered, allocated) =
                (machine.calls("cuMemHostRegister"), machine.calls("cuMemHostAlloc"));
            match memory {
                HostMemory::Pages(options) => {
                    assert_eq!((registered, allocated, got.driver_bytes), (2, 0, 0));
                    assert!(options.huge || huge == 0, "{got:?}");
                }
                _ => assert_eq!((registered, allocated, got.driver_bytes), (0, 2, pinned)),
            }
            for slab in made.slabs() {
                let mut ends = [1; 2];
                slab.read_at(0, &mut ends[..1]).unwrap();
                slab.read_at(slab.bytes() - 1, &mut ends[1..]).unwrap();
                assert_eq!(ends, [0; 2]);
            }
            made.close().unwrap();
            assert_eq!(machine.sim.pinned_bytes(), 0);
        }
    }
}

#[test]
fn one_slab_is_registered_at_a_time_in_order() {
    for threads in [1, 4] {
        let (gate, machine) = Gate::shut();
        let mut made = slabs(&machine, 5, threads);
        for registered in 0..5 {
            gate.wait_for(registered + 1);
            assert_eq!(made.poll(), Ok(registered as usize));
            assert_eq!(machine.sim.pinned_bytes(), registered * PAGE);
            assert_eq!(made.pin_next(), Ok(false), "{threads} threads have the rest");
            assert_eq!(gate.calls(), registered + 1);
            gate.let_through(Some(registered + 1));
            wait_for(&mut made, registered as usize + 1);
        }
        use_all(&machine, made.slabs());
    }
}

#[test]
fn a_refused_slab_ends_the_growth_and_is_reported_once() {
    for call in ["cuMemHostRegister", "cuMemHostGetDevicePointer"] {
        for nth in 1..=4 {
            let machine = Machine::new(nth);
            let mut made = slabs(&machine, 4, 0);
            machine.sim.fail_nth(call, nth, ErrorCode::OUT_OF_MEMORY);
            let refused = made.pin_all().unwrap_err();
            assert!(refused.is_out_of_memory(), "{call}: {refused:?}");
            let usable = nth as usize - 1;
            assert_eq!(
                (made.poll(), made.pin_next(), made.pin_all()),
                (Ok(usable), Ok(false), Ok(usable))
            );
            assert_eq!(machine.sim.pinned_bytes(), usable as u64 * PAGE);
            use_all(&machine, made.slabs());
            // Another try.
            made.resize(8).unwrap();
            assert_eq!(made.pin_all(), Ok(4));
            use_all(&machine, made.slabs());
            made.close().unwrap();
            assert_eq!(machine.sim.pinned_bytes(), 0);
        }
    }
}

#[test]
fn a_refusal_in_the_background_leaves_the_slabs_before_it_and_no_others() {
    for threads in [1, 3, 8] {
        for nth in 1..=6 {
            for call in ["cuMemHostRegister", "cuMemHostGetDevicePointer"] {
                let machine = Machine::new(nth);
                machine.sim.fail_nth(call, nth, ErrorCode::OUT_OF_MEMORY);
                let mut made = slabs(&machine, 6, threads);
                let refused = loop {
                    if let Err(refused) = made.poll() {
                        break refused;
                    }
                    std::thread::yield_now();
                };
                assert!(refused.is_out_of_memory());
                let usable = made.pin_all().unwrap();
                assert_eq!(usable as u64, nth - 1);
                free_until(&machine, usable as u64 * PAGE);
                use_all(&machine, made.slabs());
                made.resize(12).unwrap();
                wait_for(&mut made, 6);
                use_all(&machine, made.slabs());
                made.close().unwrap();
                assert_eq!(machine.sim.pinned_bytes(), 0);
            }
        }
    }
}

#[test]
fn memory_that_runs_out_leaves_what_there_is() {
    for threads in [0, 4] {
        let config = SimConfig { devices: 2, pinned_bytes: 5 * PAGE, ..SimConfig::default() };
        let machine = Machine::on(SimDriver::new(config).unwrap());
        let mut made = slabs(&machine, 7, threads);
        while made.pin_all().is_ok() {}
        let usable = made.pin_all().unwrap();
        assert_eq!(usable, 5);
        use_all(&machine, made.slabs());
    }
}

#[test]
fn dropping_it_waits_for_no_thread_and_leaves_nothing() {
    for threads in [1, 4] {
        let (gate, machine) = Gate::shut();
        let made = slabs(&machine, 6, threads);
        gate.wait_for(1);
        // A thread is inside the driver, and stays there while this is dropped.
        drop(made);
        gate.let_through(None);
        let Machine { sim, mut device, stream, .. } = machine;
        drop(stream);
        // Each thread has the device until it ends.
        loop {
            match device.close() {
                Ok(_) => break,
                Err(CloseError::InUse { device: same, .. }) => device = same,
                Err(error) => panic!("{error}"),
            }
            std::thread::yield_now();
        }
        assert_eq!(sim.pinned_bytes(), 0);
        assert_eq!(sim.calls()["cuMemHostRegister"], 1, "no slab was pinned after that");
        assert!(sim.findings().is_empty(), "{:?}", sim.findings());
    }
}

#[test]
fn dropping_it_at_any_moment_leaves_nothing() {
    for round in 0..60 {
        let machine = Machine::new(round);
        let mut made = slabs(&machine, 24, 4);
        let until = (round % 24) as usize;
        while made.poll().unwrap() < until {
            std::thread::yield_now();
        }
        let held = made.slabs().first().cloned();
        match round % 2 {
            0 => drop(made),
            _ => made.close().unwrap(),
        }
        use_all(&machine, held.as_slice());
        let Machine { sim, mut device, stream, .. } = machine;
        drop((stream, held));
        while let Err(CloseError::InUse { device: same, alive }) = device.close() {
            assert!(round % 2 == 0, "{alive} after close");
            device = same;
            std::thread::yield_now();
        }
        assert!(sim.check_leaks().is_clean(), "{}", sim.check_leaks());
    }
}

#[test]
fn fewer_blocks_stop_the_pinning_and_more_resume_it() {
    for threads in [1, 3] {
        let (gate, machine) = Gate::shut();
        let mut made = slabs(&machine, 6, threads);
        gate.let_through(Some(2));
        wait_for(&mut made, 2);
        gate.wait_for(3);
        // What is beyond two slabs is given up, the one inside the driver too.
        made.resize(3).unwrap();
        assert_eq!(made.slabs_wanted(), 2);
        gate.let_through(None);
        assert_eq!(made.pin_all(), Ok(2));
        free_until(&machine, 2 * PAGE);
        made.resize(10).unwrap();
        wait_for(&mut made, 5);
        use_all(&machine, made.slabs());
        made.close().unwrap();
        assert_eq!(machine.sim.pinned_bytes(), 0);
    }
}

#[test]
fn slabs_are_given_back_from_the_end_when_nobody_holds_them() {
    for threads in [0, 2] {
        let machine = Machine::new(7);
        let mut made = slabs(&machine, 5, threads);
        assert_eq!((made.pin_all(), made.give_back()), (Ok(5), 0));
        let third = Arc::clone(&made.slabs()[2]);
        // Work that is enqueued still uses the memory afterwards.
        let target = machine.memory(PAGE);
        machine.stream.upload(target.span(), &pattern(9, PAGE as usize)).unwrap();
        machine.stream.copy_to_host(&made.slabs()[4], 0, target.span()).unwrap();
        made.resize(1).unwrap();
        assert_eq!((made.poll(), made.give_back(), made.slabs().len()), (Ok(5), 2, 3));
        if threads == 0 {
            assert_eq!(machine.sim.pinned_bytes(), 5 * PAGE);
        }
        free_until(&machine, 3 * PAGE);
        drop(third);
        assert_eq!((made.give_back(), made.give_back()), (2, 0));
        // And back, in new memory.
        made.resize(8).unwrap();
        assert_eq!(made.pin_all(), Ok(4));
        use_all(&machine, made.slabs());
        made.resize(0).unwrap();
        assert_eq!((made.give_back(), made.slabs().len()), (4, 0));
        made.close().unwrap();
        assert_eq!(machine.sim.pinned_bytes(), 0);
        assert!(machine.sim.findings().is_empty(), "{:?}", machine.sim.findings());
    }
}

#[test]
fn a_driver_that_registers_nothing_allocates_slabs() {
    let machine = Machine::new(8);
    for nth in 1..=2 {
        machine.sim.fail_nth("cuMemHostRegister", nth, ErrorCode::NOT_SUPPORTED);
    }
    let mut made = slabs(&machine, 2, 0);
    assert_eq!(made.pin_all(), Ok(2));
    assert_eq!(made.memory().driver_bytes, 2 * PAGE);
    use_all(&machine, made.slabs());
}

#[test]
fn a_lost_device_refuses_slabs_and_lets_go_of_them() {
    for threads in [0, 2] {
        let machine = Machine::new(9);
        let mut made = slabs(&machine, 2, threads);
        assert_eq!(made.pin_all(), Ok(2));
        let target = machine.memory(PAGE);
        machine.sim.lose_device(0, 0, ErrorCode::ILLEGAL_ADDRESS);
        let _ = machine.stream.copy_to_host(&made.slabs()[0], 0, target.span());
        machine.stream.synchronize().unwrap_err();
        made.resize(8).unwrap();
        let refused = loop {
            match made.pin_all() {
                Err(refused) => break refused,
                Ok(usable) => assert_eq!(usable, 2),
            }
        };
        assert!(!refused.is_out_of_memory(), "{refused}");
        assert_eq!(made.pin_all(), Ok(2));
        made.close().unwrap();
    }
}

#[test]
fn memory_that_the_system_does_not_have_is_refused_before_any_is_pinned() {
    let machine = Machine::new(10);
    let large = |blocks| SlabsOptions {
        slab_bytes_max: u64::MAX,
        threads: 2,
        ..SlabsOptions::new(1 << 30, blocks)
    };
    let refused = PinnedSlabs::new(&machine.device, &large(1 << 20)).map(drop);
    assert!(
        matches!(refused, Err(StagingError::SlabMemory { bytes, .. }) if bytes == 1 << 50),
        "{refused:?}"
    );
    let mut made = PinnedSlabs::new(&machine.device, &large(0)).unwrap();
    let refused = made.resize(1 << 20);
    assert!(matches!(refused, Err(StagingError::SlabMemory { .. })), "{refused:?}");
    assert_eq!((made.slabs_wanted(), made.pin_all()), (0, Ok(0)));
    assert_eq!(machine.calls("cuMemHostRegister"), 0);
}
