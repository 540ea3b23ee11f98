//! The slab of a pool: what its buffers share.

use crate::prelude::*;

#[test]
fn one_slab_holds_all_buffers_and_none_overlaps_another() {
    let machine = Machine::new(1);
    let pool = machine.pool(1000, 7);
    assert_eq!((machine.calls("cuMemHostRegister"), machine.calls("cuMemHostAlloc")), (1, 0));
    // Whole pages.
    assert_eq!((pool.pinned_bytes(), machine.sim.pinned_bytes()), (2 << 12, 2 << 12));
    let mut buffers: Vec<_> = std::iter::from_fn(|| pool.acquire().ok()).collect();
    assert_eq!((buffers.len(), pool.peak_live()), (7, 7));
    for (number, buffer) in (0..).zip(&mut buffers) {
        buffer.bytes_mut().copy_from_slice(&pattern(number, 1000));
    }
    for (number, buffer) in (0..).zip(buffers) {
        let target = machine.memory(1000);
        let send = |view: &SubmittedView<'_>| view.copy_to_device(target.span(), 0);
        buffer.submit(&machine.stream, send).unwrap();
        assert_eq!(machine.read(target.span()), pattern(number, 1000), "buffer {number}");
    }
    pool.close().unwrap();
    assert_eq!(machine.sim.pinned_bytes(), 0);
}

#[test]
fn memory_that_the_system_does_not_have_is_refused() {
    let machine = Machine::new(9);
    let options = StagingOptions { buffer_bytes: 1 << 50, buffers_max: 1 };
    let refused = StagingPool::new(&machine.device, options).map(drop);
    assert!(
        matches!(refused, Err(StagingError::Memory { bytes, .. }) if bytes == 1 << 50),
        "{refused:?}"
    );
    assert_eq!(machine.sim.pinned_bytes(), 0);
}

#[test]
fn a_copy_stays_inside_its_buffer_though_the_slab_goes_on() {
    let machine = Machine::new(6);
    let pool = machine.pool(256, 4);
    let target = machine.memory(256);
    for (offset, ok) in [(0, true), (1, false), (u64::MAX, false)] {
        let buffer = pool.acquire_wait().unwrap();
        let sent =
            buffer.submit(&machine.stream, |view| view.copy_to_device(target.span(), offset));
        assert_eq!(sent.is_ok(), ok, "offset {offset}");
    }
    let mut buffer = pool.acquire_wait().unwrap();
    assert!(buffer.write_at(250, &[1; 7]).is_err());
    assert!(buffer.write_at(u64::MAX, &[1; 7]).is_err());
    buffer.write_at(250, &[1; 6]).unwrap();
    let whole: Result<(), CopyError> = Ok(());
    assert_eq!(buffer.submit(&machine.stream, |_| whole).map_err(drop), Ok(()));
}
