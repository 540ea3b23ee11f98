//! What a fence proves: nothing before its work is over, nothing by a refused call, and nothing of other work.

use std::sync::Arc;
use std::thread;

use cuda_driver::{Device, DeviceBuffer, DeviceError, ErrorCode, Event, Fence, FencePool, Stream};
use cuda_sim::{SimConfig, SimDriver};

type Make = fn(&Stream) -> Fence;

const WITH_EVENT: Make = |stream| Fence::record(stream).unwrap();
/// Both kinds, with the call that asks each and the call that waits for it.
const KINDS: [(Make, &str, &str); 2] = [
    (WITH_EVENT, "cuEventQuery", "cuEventSynchronize"),
    (Fence::without_event, "cuStreamQuery", "cuStreamSynchronize"),
];

fn machine() -> (SimDriver, Device) {
    let sim = SimDriver::new(SimConfig { devices: 2, ..SimConfig::default() }).unwrap();
    let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
    (sim, device)
}

fn calls(sim: &SimDriver, name: &str) -> u64 {
    sim.calls().get(name).copied().unwrap_or(0)
}

/// A stream whose work does not end before it is released.
fn busy(sim: &SimDriver, device: &Device) -> (Stream, DeviceBuffer) {
    let (stream, memory) = (Stream::new(device).unwrap(), DeviceBuffer::alloc(device, 64).unwrap());
    sim.hold(stream.raw());
    stream.fill(memory.span(), 1).unwrap();
    (stream, memory)
}

#[test]
fn a_fence_is_over_when_its_work_is_and_asks_no_more_then() {
    for (make, query, wait) in KINDS {
        let (sim, device) = machine();
        let (stream, memory) = busy(&sim, &device);
        let fence = make(&stream);
        let clone = fence.clone();
        assert_eq!((fence.is_complete(), fence.is_at_rest()), (Ok(false), Ok(false)), "{query}");
        assert!(!fence.is_known_complete());
        sim.release_hold(stream.raw());
        fence.wait().unwrap();
        let asked = (calls(&sim, query), calls(&sim, wait));
        // Later work is not the fence's.
        sim.hold(stream.raw());
        stream.fill(memory.span(), 2).unwrap();
        assert!(clone.is_known_complete() && clone == fence && clone != make(&stream));
        assert_eq!((clone.is_complete(), clone.is_at_rest()), (Ok(true), Ok(true)), "{query}");
        clone.wait_for_rest().unwrap();
        assert_eq!((calls(&sim, query), calls(&sim, wait)), asked);
        sim.release_hold(stream.raw());
        stream.synchronize().unwrap();
    }
}

#[test]
fn a_refused_call_proves_nothing() {
    for (make, query, wait) in KINDS {
        let (sim, device) = machine();
        let (stream, _memory) = busy(&sim, &device);
        for code in [ErrorCode::UNKNOWN, ErrorCode::INVALID_HANDLE] {
            for answer in [Fence::is_complete, Fence::is_at_rest] {
                let fence = make(&stream);
                sim.fail_nth(query, 1, code);
                assert!(answer(&fence).is_err(), "{query} {code}");
                assert_eq!(answer(&fence), Ok(false), "{query} {code}");
            }
            let fence = make(&stream);
            for waited in [Fence::wait, Fence::wait_for_rest] {
                sim.fail_nth(wait, 1, code);
                assert!(waited(&fence).is_err() && !fence.is_known_complete(), "{wait} {code}");
            }
            let all = [WITH_EVENT(&Stream::new(&device).unwrap()), fence.clone()];
            all[0].wait().unwrap();
            sim.fail_nth(query, 1, code);
            assert!(Fence::are_at_rest(&all).is_err(), "{query} {code}");
            assert_eq!(Fence::are_at_rest(&all), Ok(false), "{query} {code}");
        }
        sim.release_hold(stream.raw());
        make(&stream).wait().unwrap();
    }
}

/// Work behind the fence's own, which does not end before `gate` is released.
fn more_work(stream: &Stream, gate: &Stream, memory: &DeviceBuffer) {
    stream.wait_for(gate, &Event::new(gate.device()).unwrap()).unwrap();
    stream.fill(memory.span(), 2).unwrap();
}

#[test]
fn a_fence_without_an_event_ends_with_its_work_on_a_stream_that_always_has_more() {
    for refused in [None, Some("cuEventCreate"), Some("cuEventRecord"), Some("cuEventQuery")] {
        let (sim, device) = machine();
        let (stream, memory) = busy(&sim, &device);
        let (gate, later) = busy(&sim, &device);
        let fences = [(); 3].map(|()| Fence::without_event(&stream));
        if let Some(call) = refused {
            sim.fail_nth(call, 1, ErrorCode::UNKNOWN);
            assert_eq!(fences[0].is_complete(), Ok(false), "{call} is asked for again next time");
        }
        for fence in &fences {
            assert_eq!(fence.is_complete(), Ok(false), "{refused:?}");
        }
        more_work(&stream, &gate, &later);
        sim.release_hold(stream.raw());
        sim.run_all();
        let asked = calls(&sim, "cuStreamQuery");
        assert_eq!(fences[0].is_complete(), Ok(true), "{refused:?}");
        fences[1].wait().unwrap();
        let other = Stream::new(&device).unwrap();
        fences[2].hold_back(&other).unwrap();
        other.fill(memory.span(), 3).unwrap();
        sim.run_all();
        // A stream that captures must not be asked.
        assert_eq!(calls(&sim, "cuStreamQuery"), asked);
        assert_eq!((other.is_idle(), stream.is_idle()), (Ok(true), Ok(false)), "{refused:?}");
        sim.release_hold(gate.raw());
        stream.synchronize().unwrap();
    }
}

#[test]
fn a_fence_known_to_be_complete_holds_back_no_stream() {
    for (make, query, _) in KINDS {
        let (sim, device) = machine();
        let stream = Stream::new(&device).unwrap();
        let fence = make(&stream);
        fence.wait().unwrap();
        let (gate, memory) = busy(&sim, &device);
        more_work(&stream, &gate, &memory);
        let made = ["cuEventCreate", "cuStreamWaitEvent"].map(|call| calls(&sim, call));
        let other = Stream::new(&device).unwrap();
        fence.hold_back(&other).unwrap();
        let (_, stranger) = machine();
        let refused = fence.hold_back(&Stream::new(&stranger).unwrap()).unwrap_err();
        assert!(
            matches!(refused, DeviceError::Driver(error) if error.code == ErrorCode::INVALID_HANDLE),
            "{query}: {refused}"
        );
        assert_eq!(["cuEventCreate", "cuStreamWaitEvent"].map(|call| calls(&sim, call)), made);
        sim.release_hold(gate.raw());
        stream.synchronize().unwrap();
    }
}

#[test]
fn on_a_lost_device_memory_is_at_rest_and_the_result_of_the_work_is_its_error() {
    for (make, _, wait) in KINDS {
        let (sim, device) = machine();
        let (stream, _memory) = busy(&sim, &device);
        let fence = make(&stream);
        sim.fail_nth(wait, 1, ErrorCode::ILLEGAL_ADDRESS);
        assert_eq!(fence.wait_for_rest(), Ok(()), "the wait meets the loss");
        assert_eq!(
            (fence.is_at_rest(), Fence::are_at_rest(std::slice::from_ref(&fence))),
            (Ok(true), Ok(true))
        );
        let is_lost = |answer| matches!(answer, Err(DeviceError::Poisoned { .. }));
        assert!(is_lost(fence.is_complete().map(drop)) && is_lost(fence.wait()));
        assert!(!fence.is_known_complete());
        // The loss of a device says nothing about the work of another.
        let other = Device::open(device.driver().clone(), 1).unwrap();
        let (far, _memory) = busy(&sim, &other);
        assert_eq!(make(&far).is_at_rest(), Ok(false));
        for stream in [stream, far] {
            sim.release_hold(stream.raw());
        }
    }
}

#[test]
fn a_stream_is_held_back_by_a_fence_with_and_without_an_event() {
    for (make, query, _) in KINDS {
        let (sim, device) = machine();
        let (stream, memory) = busy(&sim, &device);
        let other = Stream::new(&device).unwrap();
        make(&stream).hold_back(&other).unwrap();
        other.fill(memory.span(), 3).unwrap();
        assert_eq!(other.is_idle(), Ok(false), "{query}");
        // A stream of another driver waits for nothing of this one, and is told so.
        let (_, stranger) = machine();
        let stranger = Stream::new(&stranger).unwrap();
        let Err(DeviceError::Driver(refused)) = make(&stream).hold_back(&stranger) else {
            panic!("{query}")
        };
        assert_eq!(refused.code, ErrorCode::INVALID_HANDLE, "{query}");
        sim.release_hold(stream.raw());
        other.synchronize().unwrap();
    }
}

#[test]
fn an_event_is_recorded_again_only_when_nobody_has_its_fence() {
    let (sim, device) = machine();
    let (stream, _memory) = busy(&sim, &device);
    let mut pool = FencePool::default();
    pool.prepare(&device, 2).unwrap();
    pool.prepare(&device, 1).unwrap();
    assert_eq!(calls(&sim, "cuEventCreate"), 2);
    let idle = Stream::new(&device).unwrap();
    let first = pool.record(&stream).unwrap();
    let again = pool.record(&idle).unwrap();
    again.wait().unwrap();
    assert_eq!((first.is_complete(), again.is_complete()), (Ok(false), Ok(true)));
    // Both are held, one of them by a clone on another thread.
    let held = again.clone();
    drop(again);
    let third = pool.record(&idle).unwrap();
    assert_eq!(calls(&sim, "cuEventCreate"), 3);
    let asked = thread::spawn(move || held.is_complete());
    assert_eq!(asked.join().unwrap(), Ok(true));
    // A fence is new, whatever the event's last one was.
    let last = pool.record(&stream).unwrap();
    assert_eq!((calls(&sim, "cuEventCreate"), last.is_known_complete()), (3, false));
    assert_eq!(last.is_complete(), Ok(false));
    third.wait().unwrap();
    // Alone, a fence gives its event to the next one; with another handle it does not.
    drop(first);
    let lone = Fence::record(&idle).unwrap();
    let kept = lone.clone();
    let renewed = lone.renew(&stream).unwrap();
    assert_eq!(calls(&sim, "cuEventCreate"), 5);
    kept.wait().unwrap();
    assert_eq!((kept.is_complete(), renewed.is_complete()), (Ok(true), Ok(false)));
    let renewed = renewed.renew(&idle).unwrap();
    assert_eq!(calls(&sim, "cuEventCreate"), 5);
    renewed.wait().unwrap();
    sim.release_hold(stream.raw());
    last.wait().unwrap();
}

#[test]
fn an_event_is_recorded_again_only_on_its_own_device() {
    let (sim, device) = machine();
    let other = Device::open(device.driver().clone(), 1).unwrap();
    // Another instance of the same device, on the same context: the first one's event serves both.
    let twin = Device::open(device.driver().clone(), 0).unwrap();
    let mut pool = FencePool::default();
    for (events, device) in [(1, &device), (2, &other), (2, &twin), (2, &device), (2, &other)] {
        let stream = Stream::new(device).unwrap();
        let fence = pool.record(&stream).unwrap();
        assert!(fence.device().shares_context(device));
        assert_eq!(calls(&sim, "cuEventCreate"), events);
    }
    let fence = Fence::record(&Stream::new(&device).unwrap()).unwrap();
    let renewed = fence.renew(&Stream::new(&other).unwrap()).unwrap();
    assert_eq!(renewed.device(), &other);
    // Without an event there is none to record.
    let stream = Stream::new(&device).unwrap();
    let renewed = Fence::without_event(&stream).renew(&stream).unwrap();
    assert_eq!((renewed.wait(), calls(&sim, "cuEventSynchronize")), (Ok(()), 1));
}

#[test]
fn a_fence_that_cannot_be_recorded_is_none_and_costs_no_event() {
    let (sim, device) = machine();
    let stream = Stream::new(&device).unwrap();
    let mut pool = FencePool::default();
    pool.prepare(&device, 1).unwrap();
    sim.fail_nth("cuEventRecord", 1, ErrorCode::UNKNOWN);
    assert!(pool.record(&stream).is_err());
    let fence = pool.record(&stream).unwrap();
    assert_eq!((fence.wait(), calls(&sim, "cuEventCreate")), (Ok(()), 1));
    sim.fail_nth("cuEventCreate", 1, ErrorCode::OUT_OF_MEMORY);
    assert!(pool.prepare(&device, 1).is_err());
    drop(fence);
    pool.prepare(&device, 1).unwrap();
    assert_eq!(calls(&sim, "cuEventCreate"), 2, "one was refused");
}
