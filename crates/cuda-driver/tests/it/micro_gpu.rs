//! The program that fits a profile to a machine, on simulated machines with known profiles: the fit
//! must recover them.

#[path = "../../benches/micro_gpu/calibrate.rs"]
mod calibrate;
#[path = "../../benches/micro_gpu/kernels.rs"]
mod kernels;
#[allow(dead_code, reason = "the scale of a GPU")]
#[path = "../../benches/micro_gpu/program.rs"]
mod program;
#[path = "../../benches/micro_gpu/rows.rs"]
mod rows;
#[path = "../../benches/micro_gpu/table.rs"]
mod table;

use std::sync::Arc;

use cuda_driver::{DeviceBuffer, KernelArgs, LaunchConfig};
use cuda_sim::{Curve, Profile};

use program::{KIB, Kind, MIB, Program, Scale};
use table::{Measured, machine, near, predict, print};

const SCALE: Scale = Scale { big: 16 * MIB, count: 64, rounds: 1, rounds_of_short: 1 };

/// A machine that is like neither built-in profile in anything that can be fitted.
const OTHER: &str = "
base = h100
htod = 25.2 GB/s
dtoh = 21.4 GB/s
pageable = 5.1 GB/s
htod_setup = 4.1 us
dtoh_setup = 5.3 us
shared_setup = 3.4 us
duplex_percent = 137
dtod = 402 GB/s
dtod_setup = 3.3 us
batch_setup = 0.9 us
peer = 64 KiB: 9 us, 1 MiB: 31 us, 16 MiB: 401 us, 256 MiB: 6.1 ms
kernel_load = 903 GB/s
kernel_store = 611 GB/s
fill = 777 GB/s
kernel_host_load = 19 GB/s
kernel_host_store = 17 GB/s
kernel_overhead = 3.1 us
launch_call = 2.7 us
htod_call = 1.9 us
dtoh_call = 1.5 us
dtod_call = 4.3 us
fill_call = 2.2 us
event_record_call = 0.7 us
query_call = 0.2 us
context_call = 30 ns
other_call = 0.4 us
start_latency = 2 us
kernel_start_latency = 4.4 us
event_wait_latency = 2.9 us
wait_latency = 1.6 us
reserve = 11 us
address_free = 9 us
create = 2 MiB: 5 us, 16 MiB: 7 us, 64 MiB: 13 us
map = 2 MiB: 2.1 us, 16 MiB: 2.4 us, 64 MiB: 3 us
set_access = 2 MiB: 15 us, 16 MiB: 18 us, 64 MiB: 31 us
unmap = 2 MiB: 12 us, 16 MiB: 13 us, 64 MiB: 14 us
release = 2 MiB: 8 us, 16 MiB: 11 us, 64 MiB: 20 us
set_access_many_percent = 71
unmap_many_percent = 64
pinned_alloc = 1 MiB: 300 us, 4 MiB: 600 us, 16 MiB: 4 ms, 256 MiB: 71 ms
pinned_free = 1 MiB: 90 us, 4 MiB: 170 us, 16 MiB: 900 us, 256 MiB: 21 ms
device_alloc = 77 us
device_free = 66 us
module_load = 3 ms
";

/// Fits a profile to a machine of profile `real`, from the H100's on; and the rows measured there.
fn measured(real: &Profile) -> Measured {
    let program = Program::new(Arc::new(machine(real.clone(), 2).unwrap()), SCALE).unwrap();
    program.measure(&Profile::h100(), 2).unwrap()
}

/// A curve of a profile.
type CurveOf = fn(&Profile) -> &Curve;

/// The numbers of a value's text, without its units.
fn numbers(value: &str) -> Vec<f64> {
    let parts = value.split(|c: char| !(c.is_ascii_digit() || c == '.'));
    parts.filter(|part| !part.is_empty()).map(|part| part.parse().unwrap()).collect()
}

/// Holds every number of the fitted profile to that of the machine, within a nanosecond or a part in
/// 500, which is what rounding does to rates from copies as short as these.
fn assert_fits(fitted: &Profile, real: &Profile) {
    assert_eq!(Profile::parse(&fitted.to_string()).as_ref(), Ok(fitted), "as a file");
    let (fitted_text, real_text) = (fitted.to_string(), real.to_string());
    let mut compared = 0;
    for (found, expected) in fitted_text.lines().zip(real_text.lines()) {
        let (key, value) = expected.split_once(" = ").unwrap();
        let is_curve = value.contains(": ");
        if key == "name" || is_curve {
            continue;
        }
        let (found, expected) = (numbers(found), numbers(expected));
        assert_eq!(found.len(), expected.len(), "{key}");
        for (found, expected) in found.iter().zip(&expected) {
            let off = (found - expected).abs();
            assert!(off <= 1.0 + expected / 500.0, "{key}: {found}, where {expected} was true");
        }
        compared += 1;
    }
    assert_eq!(compared, 39, "numbers of a profile");
    let pages = [2 * MIB, 16 * MIB, 64 * MIB];
    let pinned = [MIB, 4 * MIB, 16 * MIB, 256 * MIB];
    let peers = [64 * KIB, MIB, 16 * MIB];
    let curves: [(&str, CurveOf, &[u64]); 8] = [
        ("create", |p| &p.create, &pages),
        ("map", |p| &p.map, &pages),
        ("set_access", |p| &p.set_access, &pages),
        ("unmap", |p| &p.unmap, &pages),
        ("release", |p| &p.release, &pages),
        ("pinned_alloc", |p| &p.pinned_alloc, &pinned),
        ("pinned_free", |p| &p.pinned_free, &pinned),
        ("peer", |p| &p.peer, &peers),
    ];
    for (name, curve, sizes) in curves {
        for &bytes in sizes {
            let [found, expected] = [fitted, real].map(|p| curve(p).at(bytes).as_nanos());
            assert!(found.abs_diff(expected) <= 1, "{name} of {bytes}: {found} beside {expected}");
        }
    }
}

/// Holds every row that the fitted profile predicts to what was measured, within a part in 100.
fn assert_predicts(Measured { fitted, rows }: &Measured) {
    let by_base = predict(&Profile::h100(), 2, SCALE).unwrap();
    let by_fitted = predict(fitted, 2, SCALE).unwrap();
    print(Some(rows), &by_base, Some(&by_fitted));
    assert_eq!(rows.len(), by_fitted.len());
    for (here, there) in rows.iter().zip(&by_fitted) {
        let ratio = there.nanos / here.nanos;
        assert!((ratio - 1.0).abs() < 0.01, "{}: {ratio}", here.what);
    }
    for kind in [Kind::Fitted, Kind::Predicted] {
        let (right, all) = near(rows, &by_fitted, kind);
        assert_eq!(right, all);
        assert!(all >= 25, "{all} rows are {kind:?}");
    }
}

#[test]
fn an_h100_is_fitted_by_its_own_profile() {
    let measured = measured(&Profile::h100());
    assert_fits(&measured.fitted, &Profile::h100());
    assert_predicts(&measured);
}

#[test]
fn another_machine_is_fitted_from_what_it_does_and_not_from_the_base() {
    let real = Profile::parse(OTHER).unwrap();
    let measured = measured(&real);
    assert_fits(&measured.fitted, &real);
    assert_predicts(&measured);
    // The base is far from this machine, which shows that the rows tell profiles apart.
    let by_base = predict(&Profile::h100(), 2, SCALE).unwrap();
    let (right, all) = near(&measured.rows, &by_base, Kind::Predicted);
    assert!(right * 4 < all, "{right} of {all}");
}

#[test]
fn the_kernels_that_are_timed_do_what_their_references_say() {
    const BYTES: usize = 4 << 10;
    let source: Vec<u8> = (0..BYTES).map(|index| (index * 7 % 251) as u8).collect();
    let run = |name: &str, from_ptx: bool| {
        let sim = machine(Profile::h100(), 1).unwrap();
        sim.prefer_ptx(from_ptx);
        let program = Program::new(Arc::new(sim.clone()), SCALE).unwrap();
        let memory = DeviceBuffer::alloc(&program.device, 2 * BYTES as u64).unwrap();
        let [from, to] = [0, BYTES as u64].map(|at| memory.span().slice(at, BYTES as u64).unwrap());
        program.stream.upload(from, &source).unwrap();
        program.stream.fill(to, 9).unwrap();
        // Each thread takes four groups of 16 bytes.
        let groups = BYTES as u64 / 16;
        let args = KernelArgs::new().arg(from.address()).arg(groups).arg(to.address());
        let kernel = program.kernel(name).unwrap();
        // SAFETY: the arguments are those of the kernel, and name device memory alone.
        unsafe { kernel.launch(&program.stream, &LaunchConfig::linear(2, 32), &args) }.unwrap();
        let mut seen = vec![0; BYTES];
        program.stream.download(&mut seen, to).unwrap();
        assert_eq!(sim.findings(), [], "{name}");
        assert_eq!(sim.instructions() > 0, from_ptx, "{name}");
        seen
    };
    for from_ptx in [false, true] {
        assert_eq!(run("read_words", from_ptx), [9; BYTES]);
        assert_eq!(run("copy_words", from_ptx), source);
    }
}
