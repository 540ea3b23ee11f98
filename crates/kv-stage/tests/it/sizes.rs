//! Sizes and counts from 0 to those whose products overflow: each is served or refused with a typed
//! error, in bounded memory and time.

use crate::prelude::*;
use kv_testkit::machine;
use kv_testkit::sweep::{BYTES, COUNTS, WORDS, pairs};

struct Machine {
    sim: SimDriver,
    device: Device,
    stream: Stream,
}

impl Machine {
    fn new() -> Self {
        let sim = machine::sim(2, 0);
        sim.register_kernels(kv_stage::references());
        let device = machine::device(&sim, 0);
        let stream = Stream::new(&device).unwrap();
        Self { sim, device, stream }
    }

    /// Checks that everything was released and that the device has no finding.
    fn assert_clean(self) {
        let Self { sim, device, stream } = self;
        drop(stream);
        device.close().unwrap();
        assert_eq!(sim.findings(), []);
        assert!(sim.check_leaks().is_clean(), "{}", sim.check_leaks());
    }
}

/// Whether the test may create that much: an ordinary size, not one that depends on the machine.
fn is_small(bytes: u64, count: usize) -> bool {
    bytes.checked_mul(count as u64).is_some_and(|all| all <= 1 << 20)
}

#[test]
fn pools_of_any_size_are_made_or_refused() {
    let machine = Machine::new();
    let (made, refused) = pairs(BYTES, COUNTS, |buffer_bytes, buffers_max| {
        let options = StagingOptions { buffer_bytes, buffers_max };
        match StagingPool::new(&machine.device, options) {
            Ok(pool) => {
                let bytes = buffer_bytes.saturating_mul(buffers_max as u64);
                assert!(bytes <= 1 << 24 && buffers_max <= 1 << 20, "{options:?}");
                pool.close().unwrap();
                true
            }
            Err(StagingError::Memory { .. }) => false,
            Err(error) => {
                assert_eq!(error, StagingError::Options { buffer_bytes, buffers_max });
                false
            }
        }
    });
    assert!(made > 0 && refused > 0);
    assert_eq!(StagingOptions::overlapped(1, usize::MAX).buffers_max, usize::MAX);
    machine.assert_clean();
}

#[test]
fn slabs_of_any_size_are_pinned_or_refused() {
    let machine = Machine::new();
    // Thousands of slabs take long.
    let counts = COUNTS.iter().filter(|&&count| count != 4096).map(|&count| count as u64);
    for &block_bytes in BYTES {
        for blocks in counts.clone() {
            for slab_bytes_max in [0, 1, 5000, u64::MAX] {
                for threads in [0, 1, SlabsOptions::THREADS_MAX + 1, usize::MAX] {
                    let options = SlabsOptions {
                        slab_bytes_max,
                        threads,
                        ..SlabsOptions::new(block_bytes, blocks)
                    };
                    let small = (1..=64 << 30).contains(&block_bytes)
                        && is_small(block_bytes, blocks as usize);
                    let unstarted = PinnedSlabs::unstarted(&machine.device, &options);
                    assert!(unstarted.is_err() || unstarted.unwrap().slabs_wanted() == 0);
                    let made = PinnedSlabs::new(&machine.device, &options);
                    // Whether all of that would fit into memory depends on the machine.
                    let Ok(mut made) = made else {
                        assert!(!small || threads > 1, "{options:?}: {made:?}");
                        continue;
                    };
                    if !small {
                        assert!(blocks * block_bytes <= 1 << 40, "{options:?}");
                        continue;
                    }
                    assert_eq!(made.pin_all(), Ok(made.slabs_wanted()), "{options:?}");
                    for blocks in counts.clone() {
                        match made.resize(blocks) {
                            Ok(()) => assert!(blocks.div_ceil(made.blocks_per_slab()) <= 1 << 15),
                            Err(
                                StagingError::SlabOptions { .. }
                                | StagingError::SlabMemory { .. }
                                | StagingError::TooManySlabs { .. },
                            ) => {}
                            Err(error) => panic!("{options:?}: {error}"),
                        }
                    }
                    made.close().unwrap();
                }
            }
        }
    }
    machine.assert_clean();
}

#[test]
fn buffers_are_asked_for_written_and_copied_at_any_size() {
    let machine = Machine::new();
    let options = StagingOptions { buffer_bytes: 4096, buffers_max: 2 };
    let pool = StagingPool::new(&machine.device, options).unwrap();
    let far = Device::open(machine.device.driver().clone(), 1).unwrap();
    let far_stream = Stream::new(&far).unwrap();
    let target = DeviceBuffer::alloc(&machine.device, 8192).unwrap();
    for &bytes in BYTES {
        for length in [0, 1, 4096, 4097] {
            let inside = bytes.checked_add(length as u64).is_some_and(|end| end <= 4096);
            let mut buffer = pool.acquire_wait().unwrap();
            let written = buffer.write_at(bytes, &vec![1; length]);
            assert_eq!(written.is_ok(), inside, "{length} at {bytes}");
            let range = buffer.range_mut(bytes, length as u64).map(|range| range.len());
            assert_eq!(range.ok(), inside.then_some(length), "{length} at {bytes}");
            let span = target.span().slice(0, length as u64).unwrap();
            let copied = buffer.submit(&machine.stream, |view| {
                let on = view.copy_to_device_on(&machine.stream, span, bytes).is_ok();
                view.copy_to_device(span, bytes).map(|()| on)
            });
            assert_eq!(copied.is_ok_and(|on| on), inside, "{length} at {bytes}");
        }
    }
    drop((target, far_stream));
    far.close().unwrap();
    pool.close().unwrap();
    machine.assert_clean();
}

fn batch_options() -> BatchOptions {
    let table =
        BatchTable { width: 3, block_tokens: 4, null_block: BlockId::from(0), is_state: false };
    BatchOptions { rows: 3, sequences_max: 2, tokens_max: 5, tables: vec![table], arrays: vec![17] }
}

#[test]
fn batches_of_any_size_are_made_or_refused() {
    let machine = Machine::new();
    let options = StagingOptions { buffer_bytes: 1 << 20, buffers_max: 2 };
    let pool = StagingPool::new(&machine.device, options).unwrap();
    let mut tried = Vec::new();
    for &size in WORDS {
        let table = batch_options().tables[0];
        let with = |table| BatchOptions { tables: vec![table], ..batch_options() };
        tried.push(BatchOptions { rows: size, ..batch_options() });
        tried.push(BatchOptions { rows: u32::MAX, sequences_max: size, ..batch_options() });
        tried.push(BatchOptions { sequences_max: size, ..batch_options() });
        tried.push(BatchOptions { tokens_max: size, ..batch_options() });
        tried.push(with(BatchTable { width: size, ..table }));
        tried.push(with(BatchTable { block_tokens: size, ..table }));
        if let Some(null_block) = BlockId::new(size) {
            tried.push(with(BatchTable { null_block, ..table }));
        }
        tried.push(with(BatchTable { width: size, block_tokens: u32::MAX, ..table }));
    }
    tried
        .extend(BYTES.iter().map(|&bytes| BatchOptions { arrays: vec![bytes], ..batch_options() }));
    tried.extend(
        BYTES.iter().map(|&bytes| BatchOptions { arrays: vec![bytes; 3], ..batch_options() }),
    );
    tried.push(BatchOptions { tables: Vec::new(), ..batch_options() });
    let mut made = 0;
    for options in tried {
        let bytes = options.buffer_bytes();
        #[cfg(all(feature = "sabotage", debug_assertions))]
        assert!(DeviceBatch::sabotage_with_ptx(&pool, options.clone(), "").is_err());
        match DeviceBatch::new(&pool, options.clone()) {
            Ok(batch) => {
                made += 1;
                assert!(bytes <= pool.acquire().unwrap().bytes(), "{options:?}");
                assert_eq!(batch.options(), &options);
            }
            Err(error) => assert!(
                matches!(
                    error,
                    StagingError::Batch { .. }
                        | StagingError::HostMemory { .. }
                        | StagingError::Device(_)
                ),
                "{options:?}: {error}"
            ),
        }
        machine.device.free_retired().unwrap();
    }
    assert!(made > 10, "{made}");
    pool.close().unwrap();
    machine.assert_clean();
}

#[test]
fn steps_of_a_batch_of_any_size_are_staged_or_refused() {
    let machine = Machine::new();
    let options = batch_options();
    let staging = StagingOptions { buffer_bytes: options.buffer_bytes(), buffers_max: 1 };
    let pool = StagingPool::new(&machine.device, staging).unwrap();
    let mut batch = DeviceBatch::new(&pool, options).unwrap();
    for &table in COUNTS {
        for &row in WORDS {
            for &first in WORDS {
                for count in [0, 1, 3, 4, 1 << 20] {
                    let edited =
                        batch.edit(table, Row::new(row), first, &vec![TableEntry::NONE; count]);
                    let inside = table == 0 && row < 3 && u64::from(first) + count as u64 <= 3;
                    assert_eq!(edited.is_ok(), inside, "{table} {row} {first} {count}");
                }
            }
        }
    }
    for block in [-1, 0, i32::MAX] {
        assert!(batch.edit(0, Row::new(0), 0, &entries(&[block])).is_ok(), "{block}");
    }
    for &row in WORDS {
        for &tokens in WORDS {
            pairs(BYTES, BYTES, |resolved, upper| {
                let fits = upper.saturating_add(tokens.into()) <= 12 && tokens <= 5;
                let fits = fits && row < 3 && resolved <= upper;
                let mut step = batch.step_wait(&machine.stream).unwrap();
                let states = RowStates { drafts: tokens / 2, input: tokens };
                let bounds = (resolved, upper);
                let added = step.row_with_states(Row::new(row), bounds, tokens, states);
                assert_eq!(added.is_ok(), fits, "{row}: {resolved}, {upper}, {tokens}");
                let all = RowStates { drafts: tokens.max(1), ..states };
                assert!(step.row_with_states(Row::new(2), (0, 0), tokens, all).is_err());
                fits
            });
        }
    }
    for &array in COUNTS {
        for bytes in [0, 1, 16, 17, 18, 1 << 20] {
            let mut step = batch.step_wait(&machine.stream).unwrap();
            let added = step.array(array, &vec![7_u8; bytes]);
            assert_eq!(added.is_ok(), array == 0 && bytes <= 17, "{array}: {bytes}");
            step.submit().unwrap();
        }
    }
    drop(batch);
    pool.close().unwrap();
    machine.assert_clean();
}
