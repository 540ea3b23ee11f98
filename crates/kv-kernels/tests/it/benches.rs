//! The benchmarks for a GPU, run on the simulated device: each holds every way to all of its bytes, after
//! its timings, and finds them wrong while the way has done nothing (`benches/ways/mod.rs`).

#[path = "../../benches/kernels_gpu.rs"]
mod kernels_gpu;
#[path = "../../benches/operations_gpu.rs"]
mod operations_gpu;
#[path = "../../benches/transport_gpu/main.rs"]
mod transport_gpu;

use std::panic::{AssertUnwindSafe, catch_unwind};

#[test]
fn kernels_gpu_holds_every_way_to_its_bytes() {
    let ways = kernels_gpu::Ways::on_sim().unwrap();
    kernels_gpu::measure(&ways);
    assert_eq!(ways.count(), 11);
}

#[test]
fn operations_gpu_holds_every_way_to_its_bytes() {
    let parts = [("copies", 11), ("host_copies", 5), ("sums_and_appends", 5)];
    for (part, count) in parts {
        let ways = operations_gpu::Ways::on_sim().unwrap();
        operations_gpu::measure(&ways, &[part.to_owned()]);
        assert_eq!(ways.count(), count, "{part}");
    }
}

#[test]
fn transport_gpu_holds_every_way_to_its_bytes() {
    for (part, count) in [("device", 42), ("blocks", 126)] {
        let ways = transport_gpu::Ways::on_sim().unwrap();
        transport_gpu::measure(&ways, &[part.to_owned()]);
        assert_eq!(ways.count(), count, "{part}");
    }
}

/// What all of them rest on: the bytes of a way are looked at after it, and on the simulated device
/// before it.
#[test]
fn a_way_that_does_nothing_is_found() {
    let ways = kernels_gpu::Ways::on_sim().unwrap();
    let says = |before: bool, after: bool| {
        let done = std::cell::Cell::new(false);
        let look = || if done.get() { after } else { before };
        let way = || ways.timed("a way", || done.set(true), |run| run(), look);
        let panic = catch_unwind(AssertUnwindSafe(way)).err();
        panic.map(|panic| panic.downcast_ref::<String>().unwrap().clone())
    };
    assert_eq!(says(false, true), None);
    assert_eq!(says(false, false).unwrap(), "a way: wrong bytes");
    assert_eq!(says(true, true).unwrap(), "a way: right bytes of a way that did nothing");
}
