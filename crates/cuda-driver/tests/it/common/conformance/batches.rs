//! Batches of copies: results and refusals.
//!
//! A driver before CUDA 12.8 lacks the call; each case then requires the error for that, and
//! nothing else.

use cuda_driver::{BatchCopy, ErrorCode};

use super::bound::Bound;
use super::{Case, Needs, Subject, cases, refused};
use crate::common::pattern;

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    a_batch_of_one_direction_keeps_its_bytes,
    a_batch_of_every_direction_keeps_its_bytes,
    a_batch_of_one_byte_keeps_it,
    a_batch_runs_in_stream_order,
    a_batch_reads_pinned_memory_when_it_runs,
    a_large_batch_keeps_its_bytes,
    a_batch_that_cannot_be_made_is_refused,
    copies_before_the_refused_one_of_a_batch_run,
];

pub(crate) const SIMULATED: &[Case] = cases![
    Needs::Simulation("the driver follows such addresses, takes pageable memory, and tells nobody");
    a_batch_over_memory_never_allocated_or_pinned_is_refused,
    a_batch_with_copies_in_conflict_is_reported,
];

const INVALID: ErrorCode = ErrorCode::INVALID_VALUE;

fn copy(destination: u64, source: u64, bytes: u64) -> BatchCopy {
    BatchCopy { destination, source, bytes }
}

/// Runs a case where the driver has the call; where it lacks it, holds it to its answer.
fn with_call(on: &Subject, case: impl FnOnce(&Bound<'_>)) {
    let bound = on.bind();
    let (memory, host, stream) = (bound.alloc(64), bound.pinned(64), bound.stream());
    match bound.memcpy_batch_async(&[copy(*memory, *host, 64)], *stream) {
        Err(error) if error.code == ErrorCode::NOT_SUPPORTED => {
            // CUDA 12.8 brought the call.
            assert!(bound.driver_get_version().unwrap() < 12_080, "{error}");
        }
        answer => {
            assert_eq!(answer, Ok(()));
            bound.stream_synchronize(*stream).unwrap();
            case(&bound);
        }
    }
}

/// Copies of 100 bytes: every second hundred of the source, backwards, to every third.
fn interleaved(to: u64, from: u64, count: u64) -> Vec<BatchCopy> {
    (0..count).map(|i| copy(to + 300 * i, from + 200 * (count - 1 - i), 100)).collect()
}

fn moved(source: &[u8], before: &[u8], count: usize) -> Vec<u8> {
    let mut after = before.to_vec();
    for i in 0..count {
        let from = 200 * (count - 1 - i);
        after[300 * i..][..100].copy_from_slice(&source[from..][..100]);
    }
    after
}

fn a_batch_of_one_direction_keeps_its_bytes(on: &Subject) {
    with_call(on, |bound| {
        let (memory, host, stream) = (bound.alloc(4000), bound.pinned(4000), bound.stream());
        let other = bound.alloc(4000);
        for (to, from) in [(*memory, *host), (*host, *memory), (*memory, *other)] {
            let (source, before) = (pattern(1, 4000), pattern(2, 4000));
            bound.write(from, &source);
            bound.write(to, &before);
            bound.memcpy_batch_async(&interleaved(to, from, 13), *stream).unwrap();
            bound.stream_synchronize(*stream).unwrap();
            assert!(bound.read(to, 4000) == moved(&source, &before, 13));
        }
    });
}

fn a_batch_of_every_direction_keeps_its_bytes(on: &Subject) {
    with_call(on, |bound| {
        let (memory, host, stream) = (bound.alloc(4000), bound.pinned(4000), bound.stream());
        bound.write(*memory, &pattern(7, 4000));
        bound.write(*host, &pattern(8, 4000));
        let copies = [
            copy(*memory, *host, 500),
            copy(*host + 1000, *memory + 1000, 500),
            copy(*memory + 2000, *memory + 3000, 500),
            copy(*host + 2000, *host + 3000, 500),
        ];
        bound.memcpy_batch_async(&copies, *stream).unwrap();
        bound.stream_synchronize(*stream).unwrap();
        let (on_device, on_host) = (pattern(7, 4000), pattern(8, 4000));
        assert!(bound.read(*memory, 500) == on_host[..500]);
        assert!(bound.read(*host + 1000, 500) == on_device[1000..1500]);
        assert!(bound.read(*memory + 2000, 500) == on_device[3000..3500]);
        assert!(bound.read(*host + 2000, 500) == on_host[3000..3500]);
    });
}

fn a_batch_of_one_byte_keeps_it(on: &Subject) {
    with_call(on, |bound| {
        let (memory, host, stream) = (bound.alloc(3), bound.pinned(3), bound.stream());
        bound.write(*host, &[1, 2, 3]);
        bound.write(*memory, &[7, 8, 9]);
        bound.memcpy_batch_async(&[copy(*memory + 1, *host + 2, 1)], *stream).unwrap();
        bound.stream_synchronize(*stream).unwrap();
        assert_eq!(bound.read(*memory, 3), [7, 3, 9]);
    });
}

fn a_batch_runs_in_stream_order(on: &Subject) {
    with_call(on, |bound| {
        let (memory, other, stream) = (bound.alloc(4000), bound.alloc(4000), bound.stream());
        bound.write(*other, &[1; 4000]);
        bound.write(*memory, &[0; 4000]);
        let stall = bound.stall(*stream);
        bound.memset_d8_async(*other, 2, 4000, *stream).unwrap();
        let copies = [copy(*memory, *other, 2000), copy(*memory + 2000, *other + 2000, 2000)];
        bound.memcpy_batch_async(&copies, *stream).unwrap();
        bound.memset_d8_async(*other, 3, 4000, *stream).unwrap();
        stall.release();
        bound.stream_synchronize(*stream).unwrap();
        assert_eq!(bound.read(*memory, 4000), [2; 4000]);
    });
}

fn a_batch_reads_pinned_memory_when_it_runs(on: &Subject) {
    with_call(on, |bound| {
        let (memory, host) = (bound.alloc(64), bound.pinned(64));
        let (stream, writer) = (bound.stream(), bound.stream());
        bound.write(*host, &[1; 64]);
        let stall = bound.stall(*stream);
        bound.memcpy_batch_async(&[copy(*memory, *host, 64)], *stream).unwrap();
        // Another stream changes the source after the call and before the batch.
        bound.memset_d8_async(*host, 2, 64, *writer).unwrap();
        bound.stream_synchronize(*writer).unwrap();
        stall.release();
        bound.stream_synchronize(*stream).unwrap();
        assert_eq!(bound.read(*memory, 64), [2; 64]);
    });
}

fn a_large_batch_keeps_its_bytes(on: &Subject) {
    with_call(on, |bound| {
        let count = 5000;
        let (memory, host, stream) =
            (bound.alloc(300 * count), bound.pinned(200 * count), bound.stream());
        let (source, before) =
            (pattern(9, 200 * count as usize), pattern(10, 300 * count as usize));
        bound.write(*host, &source);
        bound.write(*memory, &before);
        bound.memcpy_batch_async(&interleaved(*memory, *host, count), *stream).unwrap();
        bound.stream_synchronize(*stream).unwrap();
        let after = bound.read(*memory, 300 * count as usize);
        assert!(after == moved(&source, &before, count as usize));
    });
}

fn a_batch_that_cannot_be_made_is_refused(on: &Subject) {
    with_call(on, |bound| {
        let (memory, host, stream) = (bound.alloc(4 << 20), bound.pinned(4096), bound.stream());
        let good = copy(*memory, *host, 64);
        for legacy in [0, 1] {
            refused(bound.memcpy_batch_async(&[good], legacy), INVALID);
        }
        let over_the_end = copy(*memory + (4 << 20) - 64, *host, 65);
        for copies in [
            &[][..],
            &[good, over_the_end],
            &[copy(0, *host, 64)],
            &[copy(*memory, 0, 64)],
            &[copy(*memory, *host, 0)],
            &[good, copy(*memory + 64, *host, 0)],
        ] {
            refused(bound.memcpy_batch_async(copies, *stream), INVALID);
        }
    });
}

fn copies_before_the_refused_one_of_a_batch_run(on: &Subject) {
    with_call(on, |bound| {
        let (memory, host, stream) = (bound.alloc(64), bound.pinned(64), bound.stream());
        bound.write(*host, &[1; 64]);
        bound.write(*memory, &[2; 64]);
        let copies = [
            copy(*memory, *host, 16),
            copy(*memory + 16, *host, 16),
            copy(0, *host, 16),
            copy(*memory + 48, *host, 16),
        ];
        refused(bound.memcpy_batch_async(&copies, *stream), INVALID);
        bound.stream_synchronize(*stream).unwrap();
        let seen = bound.read(*memory, 64);
        assert_eq!((&seen[..32], &seen[32..]), (&[1; 32][..], &[2; 32][..]));
    });
}

fn a_batch_over_memory_never_allocated_or_pinned_is_refused(on: &Subject) {
    with_call(on, |bound| {
        let (memory, host, stream) = (bound.alloc(64), bound.pinned(64), bound.stream());
        let pageable = [0u8; 64];
        let address = pageable.as_ptr().expose_provenance() as u64;
        for (to, from) in [(0x1000, *host), (*memory, 0x1000), (*memory, address)] {
            refused(bound.memcpy_batch_async(&[copy(to, from, 64)], *stream), INVALID);
        }
    });
}

fn a_batch_with_copies_in_conflict_is_reported(on: &Subject) {
    let Some(sim) = &on.sim else { unreachable!("a case of the simulation") };
    with_call(on, |bound| {
        let (memory, host, stream) = (bound.alloc(256), bound.pinned(256), bound.stream());
        let apart = [copy(*memory, *host, 64), copy(*memory + 64, *host, 64)];
        bound.memcpy_batch_async(&apart, *stream).unwrap();
        assert_eq!(sim.findings().len(), 0, "both read the same, neither writes it");
        let meeting = [
            [copy(*memory, *host, 64), copy(*memory + 63, *host, 64)],
            [copy(*memory, *memory + 64, 64), copy(*memory + 127, *host, 64)],
        ];
        for (reported, copies) in (1..).zip(meeting) {
            bound.memcpy_batch_async(&copies, *stream).unwrap();
            assert_eq!(sim.findings().len(), reported);
        }
    });
}
