//! Every driver call that a transfer makes, failed once, with the device as far behind as is legal and
//! the host none, one and two transfers ahead.

use std::collections::BTreeMap;

use cuda_driver::{CountingDriver, Device, Driver, ErrorCode, Event, Stream};
use cuda_sim::{Pace, SimConfig, SimDriver};
use kv_kernels::{
    KvKernels,
    link::{
        HostLink, HostLinkOptions, MeasureOptions, Transport, TransportError, TransportProfile,
    },
    references,
};

use super::machine::{Machine, Moving};

type Calls = BTreeMap<&'static str, u64>;

/// The calls since `before`, by name.
fn since(machine: &Machine, before: &Calls) -> Calls {
    let calls = machine.sim.calls().into_iter();
    calls
        .map(|(call, count)| (call, count - before.get(call).copied().unwrap_or(0)))
        .filter(|(_, count)| *count > 0)
        .collect()
}

/// What moves in a run.
#[derive(Clone, Copy, Debug)]
struct What {
    transport: Transport,
    to_host: bool,
}

impl What {
    fn all() -> impl Iterator<Item = Self> {
        let both = |transport| [true, false].map(|to_host| Self { transport, to_host });
        Transport::ALL.into_iter().flat_map(both)
    }
}

/// Waits as often as orders to fail that are still open make it fail.
fn patiently(mut wait: impl FnMut() -> bool) {
    assert!((0..12).any(|_| wait()), "never over");
}

/// One transfer behind `ahead` others that nothing has waited for, with faults in it: the calls it made,
/// and its answer.
fn run(
    what: What,
    ahead: usize,
    faults: &[(&'static str, u64)],
) -> (Calls, Result<(), TransportError>) {
    let context = format!("{what:?}, {ahead} ahead, {faults:?}");
    let machine = Machine::new(1);
    let options =
        HostLinkOptions { ring_buffers: 2, ring_buffer_bytes: 2048, ..HostLinkOptions::default() };
    let mut link = machine.link_with(what.transport, options);
    let stream = &machine.stream;
    let earlier: Vec<_> =
        (0..ahead).map(|n| Moving::new(&machine, what.to_host == (n % 2 == 1))).collect();
    let [moving, again] = [0, 1].map(|_| Moving::new(&machine, what.to_host));
    stream.synchronize().unwrap();
    machine.sim.set_pace(Pace::Slowest);
    for moving in &earlier {
        moving.run(&mut link, stream).unwrap();
    }
    let before = machine.sim.calls();
    for &(call, nth) in faults {
        machine.sim.fail_nth(call, nth, ErrorCode::OUT_OF_MEMORY);
    }
    let answer = moving.run(&mut link, stream);
    let made = since(&machine, &before);
    match &answer {
        Ok(_) => {
            patiently(|| stream.synchronize().is_ok());
            assert!(moving.is_right(stream), "{context}: wrong bytes");
        }
        Err(error) => {
            // Where the stream is over, or the device if the stream does not wait, all of it is.
            let unordered = matches!(error, TransportError::Unordered { .. });
            patiently(|| match unordered {
                true => machine.device.synchronize().is_ok(),
                false => stream.synchronize().is_ok(),
            });
            // Orders to fail waits that are still open are used up on a stream without work.
            let idle = Stream::new(&machine.device).unwrap();
            faults.iter().for_each(|_| {
                let _ = idle.synchronize();
            });
            let seen = moving.scene.bytes(stream);
            machine.sim.run_all();
            assert!(moving.scene.bytes(stream) == seen, "{context}: work was left behind");
            patiently(|| again.run(&mut link, stream).is_ok());
            patiently(|| stream.synchronize().is_ok());
            assert!(again.is_right(stream), "{context}: the next transfer is wrong");
        }
    }
    for earlier in &earlier {
        assert!(earlier.is_right(stream), "{context}: an earlier transfer is wrong");
    }
    assert_eq!(machine.device.poison(), None, "{context}");
    machine.assert_clean();
    drop((link, earlier, moving, again));
    let answer = answer.map(drop);
    let sim = machine.sim.clone();
    drop(machine);
    let leaks = sim.check_leaks();
    assert!(leaks.is_clean(), "{context}: {leaks}");
    (made, answer)
}

#[test]
fn every_call_may_fail_once_with_the_device_behind() {
    let mut failed = 0;
    for what in What::all() {
        for ahead in 0..=2 {
            let (calls, answer) = run(what, ahead, &[]);
            assert_eq!(answer, Ok(()), "{what:?}");
            for (call, count) in calls {
                for nth in 1..=count {
                    failed += usize::from(run(what, ahead, &[(call, nth)]).1.is_err());
                }
            }
        }
    }
    assert!(failed > 250, "only {failed} transfers failed");
}

/// What follows a refusal is refused too: the host waits, however often it must ask; and where no wait is
/// granted, the error says so and the next transfer waits.
#[test]
fn a_refusal_after_which_nothing_can_be_ordered_says_so() {
    for what in What::all().filter(|what| what.transport == Transport::TwoHop) {
        for ahead in 0..=2 {
            let nth = run(what, ahead, &[]).0["cuStreamWaitEvent"];
            // The last wait of the transfer, then the record that would join the streams.
            let records = run(what, ahead, &[("cuStreamWaitEvent", nth)]).0["cuEventRecord"];
            for refused in [0, 1, 3, 4, 8, 12] {
                let mut faults = vec![("cuStreamWaitEvent", nth)];
                faults.extend((0..3).map(|n| ("cuEventRecord", records.saturating_sub(2) + n)));
                faults.extend((0..3).map(|n| ("cuStreamWaitEvent", nth + 1 + n)));
                faults.extend((1..=refused).map(|nth| ("cuStreamSynchronize", nth)));
                let answer = run(what, ahead, &faults).1.unwrap_err();
                let unordered = matches!(answer, TransportError::Unordered { .. });
                assert_eq!(
                    unordered,
                    refused >= 4,
                    "{what:?}, {refused} waits refused: {answer:?}"
                );
            }
        }
    }
}

/// After such an error the next transfer of the link, by any way, begins with a wait for the device: what
/// the refused one has enqueued is then over, and writes neither into the ring nor into the host's memory.
#[test]
fn a_link_waits_for_what_nothing_orders_before_it_goes_on() {
    for then in Transport::ALL {
        let machine = Machine::new(1);
        let mut link = machine.link(Transport::TwoHop);
        let [refused, next] = [0, 1].map(|_| Moving::new(&machine, true));
        machine.stream.synchronize().unwrap();
        machine.sim.set_pace(Pace::Slowest);
        // The third record is refused, then those that would order what went before it, and all waits.
        for nth in 3..6 {
            machine.sim.fail_nth("cuEventRecord", nth, ErrorCode::OUT_OF_MEMORY);
        }
        for nth in 1..=8 {
            machine.sim.fail_nth("cuStreamSynchronize", nth, ErrorCode::OUT_OF_MEMORY);
        }
        let error = refused.run(&mut link, &machine.stream).unwrap_err();
        assert!(matches!(error, TransportError::Unordered { .. }), "{error:?}");
        let idle = Stream::new(&machine.device).unwrap();
        (0..8).for_each(|_| {
            let _ = idle.synchronize();
        });
        let event = cuda_driver::Event::new(&machine.device).unwrap();
        (0..3).for_each(|_| {
            let _ = event.record(&idle);
        });
        let waits = || machine.sim.calls().get("cuCtxSynchronize").copied().unwrap_or(0);
        let before = waits();
        let profile = TransportProfile { forced: Some(then), ..link.profile().clone() };
        let mut link = link.with_profile(profile);
        next.run(&mut link, &machine.stream).unwrap();
        assert_eq!(waits(), before + 1, "then {then}");
        machine.stream.synchronize().unwrap();
        assert!(next.is_right(&machine.stream), "then {then}");
        // Once is enough.
        next.run(&mut link, &machine.stream).unwrap();
        assert_eq!(waits(), before + 1, "then {then}");
        machine.stream.synchronize().unwrap();
        machine.assert_clean();
    }
}

/// What is made of a device gives everything back, whichever call of its making fails.
#[test]
fn nothing_leaks_where_a_constructor_fails() {
    type Make = fn(&Device, &SimDriver) -> bool;
    let makes: [Make; 3] = [
        |device, _| KvKernels::load(device).is_ok(),
        |device, _| {
            let Ok(kernels) = KvKernels::load(device) else { return false };
            HostLink::new(kernels.into(), HostLinkOptions::default()).is_ok()
        },
        |device, _| {
            let Ok(kernels) = KvKernels::load(device) else { return false };
            let options = MeasureOptions { bytes: 1 << 20, rounds: 1, ..MeasureOptions::default() };
            TransportProfile::measure(&kernels.into(), &options).is_ok()
        },
    ];
    for (which, make) in makes.into_iter().enumerate() {
        let run = |fault: Option<(&'static str, u64)>| {
            let sim = SimDriver::new(SimConfig::default()).unwrap();
            sim.register_kernels(references());
            sim.set_pace(Pace::Slowest);
            let counts: std::sync::Arc<dyn Driver> =
                std::sync::Arc::new(CountingDriver::new(std::sync::Arc::new(sim.clone())));
            let device = Device::open(counts, 0).unwrap();
            let before = sim.calls();
            if let Some((call, nth)) = fault {
                sim.fail_nth(call, nth, ErrorCode::OUT_OF_MEMORY);
            }
            let is_made = make(&device, &sim);
            let calls = sim.calls();
            let made: Calls = calls
                .into_iter()
                .map(|(call, count)| (call, count - before.get(call).copied().unwrap_or(0)))
                .filter(|(_, count)| *count > 0)
                .collect();
            assert_eq!(device.poison(), None, "{which}, {fault:?}");
            drop(device);
            assert!(sim.findings().is_empty(), "{which}, {fault:?}: {:?}", sim.findings());
            let leaks = sim.check_leaks();
            assert!(leaks.is_clean(), "{which}, {fault:?}: {leaks}");
            (made, is_made)
        };
        let (calls, is_made) = run(None);
        assert!(is_made, "{which}");
        let mut failed = 0;
        // What gives back, and the binding of a context around it, is the driver crate's to get right.
        let gives_back = |call: &str| {
            ["Ctx", "Destroy", "Free", "Unload"].iter().any(|part| call.contains(part))
        };
        for (call, count) in calls.into_iter().filter(|(call, _)| !gives_back(call)) {
            // Of those made very often, some of each.
            for nth in (1..=count).step_by((count as usize / 8).max(1)) {
                failed += usize::from(!run(Some((call, nth))).1);
            }
        }
        assert!(failed > 2, "{which}: {failed}");
    }
}

/// A host one transfer ahead of a device that does nothing until it is waited for: a step makes as many
/// calls after 100,000 as after 100, and no event, stream or memory is added.
#[test]
fn a_long_run_asks_for_no_more_than_a_short_one() {
    for transport in [Transport::CopyEngine, Transport::TwoHop] {
        let machine = Machine::new(3);
        let mut link = machine.link(transport);
        let both = [true, false].map(|to_host| Moving::of(&machine, to_host, &[(5, 9)]));
        let ends = [0, 1].map(|_| Event::new(&machine.device).unwrap());
        machine.sim.set_pace(Pace::Slowest);
        let mut steps = |count: usize| {
            let before = machine.sim.calls();
            for n in 0..count {
                both[n % 2].run(&mut link, &machine.stream).unwrap();
                ends[n % 2].record(&machine.stream).unwrap();
                ends[(n + 1) % 2].synchronize().unwrap();
            }
            since(&machine, &before)
        };
        steps(100);
        let early = steps(100);
        steps(100_000 - 300);
        let late = steps(100);
        assert_eq!(early, late, "{transport}");
        for call in ["cuEventCreate", "cuStreamCreate", "cuMemAlloc", "cuMemHostAlloc"] {
            assert_eq!(late.get(call), None, "{transport}");
        }
        machine.stream.synchronize().unwrap();
        machine.assert_clean();
    }
}
