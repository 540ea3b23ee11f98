//! Every size and count that this crate takes, at 0, 1, an ordinary number, the maximum, and values
//! whose products overflow. Each is accepted or refused with a typed error, in bounded memory and
//! time.
//!
//! Covered: `StagingOptions` (`buffer_bytes`, `buffers_max`, `overlapped`), `PoolOptions` (`classes`,
//! `slab_bytes`, memory of both origins, each way of pinning), `StagingPool::new`, `with_classes`,
//! `acquire_bytes`, `acquire_bytes_wait`, `StagingBuffer::write_at`, `range_mut`, `SubmittedView::copy_to_device` and
//! `copy_to_device_on`, `BlockTable::new`, `set`, `set_run`, `append`, `truncate`, `clear_row`, `row`, `len`,
//! `Row::new`, `StepStager::new`, `with_scatter` and `buffer_bytes`,
//! `Step::block_rows` and `array`, `Staged::span` of a part that is not there, `BatchOptions::buffer_bytes`,
//! `DeviceBatch::new` (and `sabotage_with_ptx`, which it is made of) and `edit`, `BatchStep::row` and `array`;
//! `SlabsOptions`, `PinnedSlabs::new`, `unstarted` and `resize`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cuda_driver::host_pages::{HostMemory, HostPagesOptions, MemoryNode};
use cuda_driver::{Device, DeviceBuffer, HostAllocFlags, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_stage::{
    BatchOptions, BatchStep, BatchTable, BlockTable, DeviceBatch, PinnedSlabs, Pinning,
    PoolOptions, Row, RowStates, SlabsOptions, StagingOptions, StagingPool, StepStager,
    error::{SlabsError, StagingError},
};

/// Maximum number of bytes that this program's tests may have allocated at once.
const BYTES_MAX: usize = 1 << 30;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

/// An allocator that refuses requests beyond [`BYTES_MAX`], so that an unbounded allocation ends
/// the test instead of exhausting the machine.
struct Bounded;

// SAFETY: every call that is not refused is passed to the system's allocator; a refusal is null.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let before = ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        if before.saturating_add(layout.size()) > BYTES_MAX {
            ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Bounded = Bounded;

const BYTES: [u64; 12] = [
    0,
    1,
    255,
    4096,
    1 << 40,
    1 << 47,
    1 << 62,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 255,
    u64::MAX - 1,
    u64::MAX,
];
const COUNTS: [usize; 9] =
    [0, 1, 3, 1 << 21, 1 << 40, 1 << 56, 1 << 60, isize::MAX as usize, usize::MAX];

struct Machine {
    sim: SimDriver,
    device: Device,
    stream: Stream,
}

impl Machine {
    fn new() -> Self {
        let sim = SimDriver::new(SimConfig { devices: 2, ..SimConfig::default() }).unwrap();
        let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
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
    for buffer_bytes in BYTES {
        for buffers_max in COUNTS {
            let options = StagingOptions { buffer_bytes, buffers_max };
            let made = StagingPool::new(&machine.device, options);
            match made {
                Ok(pool) => {
                    assert!(is_small(buffer_bytes, buffers_max), "{options:?}");
                    pool.close().unwrap();
                }
                Err(error) => assert!(
                    matches!(error, StagingError::Options { .. } | StagingError::Memory { .. }),
                    "{options:?}: {error}"
                ),
            }
        }
    }
    for depth in COUNTS {
        let options = StagingOptions::overlapped(1, depth);
        assert_eq!(options.buffers_max, depth.saturating_add(1));
    }
    machine.assert_clean();
}

#[test]
fn slabs_classes_and_ways_of_pinning_of_any_size_are_served_or_refused() {
    let machine = Machine::new();
    let few = [(1, 1), (4096, 2), (1, 1 << 40), (1 << 40, 1), (u64::MAX, 1), (1, usize::MAX)];
    let ordinary = HostMemory::Pages(HostPagesOptions { huge: false, node: MemoryNode::Any });
    let node = HostPagesOptions { huge: true, node: MemoryNode::Number(u32::MAX) };
    let origins = [HostMemory::Driver(HostAllocFlags::CACHED), HostMemory::Pages(node), ordinary];
    for slab_bytes in BYTES {
        for memory in origins {
            for pinning in [Pinning::AtOnce, Pinning::Background, Pinning::OnCall] {
                for (buffer_bytes, buffers_max) in few {
                    let small = StagingOptions { buffer_bytes: 100, buffers_max: 2 };
                    let classes = vec![small, StagingOptions { buffer_bytes, buffers_max }, small];
                    let options = PoolOptions { classes, slab_bytes, memory, pinning };
                    let made = StagingPool::with_classes(&machine.device, &options);
                    assert_eq!(made.is_ok(), is_small(buffer_bytes, buffers_max), "{options:?}");
                    if let Ok(pool) = made {
                        pool.finish_pinning().unwrap();
                        pool.close().unwrap();
                    }
                }
            }
        }
    }
    let none = StagingPool::with_classes(&machine.device, &PoolOptions::new(Vec::new()));
    assert!(matches!(none, Err(StagingError::Options { .. })));
    // Each class fits, but not all of them together.
    let large = StagingOptions { buffer_bytes: 1 << 61, buffers_max: 1 };
    for classes in [3, 4, 5, 8, 9, 100] {
        let options = PoolOptions::new(vec![large; classes]);
        let made = StagingPool::with_classes(&machine.device, &options).map(drop);
        assert!(made.is_err(), "{classes} classes");
    }
    let many = StagingOptions { buffer_bytes: 1, buffers_max: StagingPool::BUFFERS_MAX };
    let made = StagingPool::with_classes(&machine.device, &PoolOptions::new(vec![many; 2]));
    assert!(matches!(made, Err(StagingError::Options { .. })), "{made:?}");
    machine.assert_clean();
}

#[test]
fn slabs_of_any_size_are_pinned_or_refused() {
    let machine = Machine::new();
    let counts = COUNTS.map(|count| count as u64);
    for block_bytes in BYTES {
        for blocks in counts {
            for slab_bytes_max in [0, 1, 5000, u64::MAX] {
                for threads in [0, 1, SlabsOptions::THREADS_MAX + 1, usize::MAX] {
                    let options = SlabsOptions {
                        slab_bytes_max,
                        threads,
                        ..SlabsOptions::new(block_bytes, blocks)
                    };
                    let small = (1..=SlabsOptions::SLAB_BYTES_MAX).contains(&block_bytes)
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
                    for blocks in counts {
                        match made.resize(blocks) {
                            Ok(()) => assert!(blocks.div_ceil(made.blocks_per_slab()) <= 1 << 15),
                            Err(
                                SlabsError::Options { .. }
                                | SlabsError::Memory { .. }
                                | SlabsError::TooMany { .. },
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
    for bytes in BYTES {
        let fits = bytes <= 4096;
        pool.drain().unwrap();
        assert_eq!(pool.acquire_bytes(bytes).is_ok(), fits, "{bytes}");
        assert_eq!(pool.acquire_bytes_wait(bytes).is_ok(), fits, "{bytes}");
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

#[test]
fn tables_of_any_shape_are_made_or_refused() {
    for rows in COUNTS {
        for max_blocks in COUNTS {
            let made = BlockTable::new(rows, max_blocks);
            let small = rows.saturating_mul(max_blocks).saturating_mul(4) <= 1 << 28;
            assert_eq!(made.is_ok(), small && rows > 0 && max_blocks > 0, "{rows}, {max_blocks}");
        }
    }
    let mut table = BlockTable::new(3, 5).unwrap();
    for row in [0, 1, 2, 3, 1 << 31, u32::MAX].map(Row::new) {
        let known = row.index() < 3;
        assert_eq!(table.row(row).is_ok(), known);
        assert_eq!(table.len(row).is_ok(), known);
        for column in COUNTS {
            assert_eq!(table.set(row, column, 1).is_ok(), known && column < 5);
            assert_eq!(table.truncate(row, column).is_ok(), known);
        }
        for column in COUNTS {
            for count in [0, 1, 5, 6, 1 << 20] {
                let fits = count == 0 || column.saturating_add(count) <= 5;
                let set = table.set_run(row, column, vec![1; count].into_iter());
                assert_eq!(set.is_ok(), known && fits, "{count} from {column}");
            }
        }
        for block in [i32::MIN, -2, -1, 0, 1, i32::MAX] {
            assert_eq!(table.clear_row(row).is_ok(), known);
            assert_eq!(table.append(row, block).is_ok(), known && block >= -1);
        }
    }
}

#[test]
fn stagers_and_steps_of_any_size_are_served_or_refused() {
    let machine = Machine::new();
    let pool =
        StagingPool::new(&machine.device, StagingOptions { buffer_bytes: 4096, buffers_max: 2 })
            .unwrap();
    for device_bytes in BYTES {
        let buffer_bytes = StepStager::buffer_bytes(device_bytes);
        assert!(buffer_bytes >= device_bytes);
        let ordinary = (1..=4096).contains(&device_bytes);
        let copying = StepStager::new(&machine.device, &pool, device_bytes);
        let scattering = StepStager::with_scatter(&machine.device, &pool, device_bytes);
        assert_eq!((copying.is_ok(), scattering.is_ok()), (ordinary, ordinary), "{device_bytes}");
        for stager in [copying, scattering].iter_mut().flatten() {
            steps(stager, &machine.stream);
        }
    }
    pool.close().unwrap();
    machine.assert_clean();
}

/// Parts of any size, in steps of one stager.
fn steps(stager: &mut StepStager, stream: &Stream) {
    let table = BlockTable::new(2, 1 << 16).unwrap();
    let capacity = stager.capacity_bytes();
    for width in COUNTS {
        for rows in [0, 1, 2, 1000] {
            let named = vec![Row::new(1); rows];
            let mut step = stager.begin_wait().unwrap();
            let fits = width <= 1 << 16 && (rows * width * 4) as u64 <= capacity;
            let part = step.block_rows(&table, &named, width);
            assert_eq!(part.is_ok(), fits, "{rows} rows of {width} in {capacity}");
            let staged = step.submit(stream).unwrap();
            if let Ok(part) = part {
                assert!(staged.span(part).unwrap().bytes() >= (rows * width * 4) as u64);
            }
        }
    }
    for bytes in [0, 1, 255, 256, 4096, 4097, 1 << 20] {
        let mut step = stager.begin_wait().unwrap();
        let part = step.array(&vec![7u8; bytes]);
        assert_eq!(part.is_ok(), bytes as u64 <= capacity, "{bytes} of {capacity}");
        // One more does not fit behind it, or it does.
        let _ = step.array(&[1u64; 32]);
        let _ = step.array::<u8>(&[]);
        assert!(step.bytes() <= capacity);
        let staged = step.submit(stream).unwrap();
        let other = stager.begin_wait().unwrap().array(&[0u8; 0]).unwrap();
        assert!(staged.span(other).is_err() && staged.row_entries(other).is_err());
    }
    let mut step = stager.begin_wait().unwrap();
    for row in [2, 1 << 31, u32::MAX].map(Row::new) {
        assert!(step.block_rows(&table, &[Row::new(0), row], 1).is_err());
    }
}

const U32S: [u32; 7] = [0, 1, 3, 1 << 20, i32::MAX as u32, 1 << 31, u32::MAX];

fn batch_options() -> BatchOptions {
    let table = BatchTable { width: 3, block_tokens: 4, null_block: 0, is_state: false };
    BatchOptions { rows: 3, sequences_max: 2, tokens_max: 5, tables: vec![table], arrays: vec![17] }
}

#[test]
fn batches_of_any_size_are_made_or_refused() {
    let machine = Machine::new();
    machine.sim.register_kernels(kv_stage::references());
    let options = StagingOptions { buffer_bytes: 1 << 20, buffers_max: 2 };
    let pool = StagingPool::new(&machine.device, options).unwrap();
    let mut tried = Vec::new();
    for size in U32S {
        let table = batch_options().tables[0];
        let with = |table| BatchOptions { tables: vec![table], ..batch_options() };
        tried.push(BatchOptions { rows: size, ..batch_options() });
        tried.push(BatchOptions { rows: u32::MAX, sequences_max: size, ..batch_options() });
        tried.push(BatchOptions { sequences_max: size, ..batch_options() });
        tried.push(BatchOptions { tokens_max: size, ..batch_options() });
        tried.push(with(BatchTable { width: size, ..table }));
        tried.push(with(BatchTable { block_tokens: size, ..table }));
        tried.push(with(BatchTable { null_block: size as i32, ..table }));
        tried.push(with(BatchTable { width: size, block_tokens: u32::MAX, ..table }));
    }
    tried.extend(BYTES.map(|bytes| BatchOptions { arrays: vec![bytes], ..batch_options() }));
    tried.extend(BYTES.map(|bytes| BatchOptions { arrays: vec![bytes; 3], ..batch_options() }));
    tried.push(BatchOptions { tables: Vec::new(), ..batch_options() });
    let mut made = 0;
    for options in tried {
        let bytes = options.buffer_bytes();
        #[cfg(all(feature = "sabotage", debug_assertions))]
        assert!(DeviceBatch::sabotage_with_ptx(&pool, options.clone(), "").is_err());
        match DeviceBatch::new(&pool, options.clone()) {
            Ok(batch) => {
                made += 1;
                assert!(bytes <= pool.buffer_bytes(), "{options:?}");
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
    machine.sim.register_kernels(kv_stage::references());
    let options = batch_options();
    let staging = StagingOptions { buffer_bytes: options.buffer_bytes(), buffers_max: 1 };
    let pool = StagingPool::new(&machine.device, staging).unwrap();
    let mut batch = DeviceBatch::new(&pool, options).unwrap();
    for table in COUNTS {
        for row in U32S {
            for first in U32S {
                for count in [0, 1, 3, 4, 1 << 20] {
                    let edited = batch.edit(table, Row::new(row), first, &vec![-1; count]);
                    let inside = table == 0 && row < 3 && u64::from(first) + count as u64 <= 3;
                    assert_eq!(edited.is_ok(), inside, "{table} {row} {first} {count}");
                }
            }
        }
    }
    for block in [i32::MIN, -2, -1, 0, i32::MAX] {
        let edited = batch.edit(0, Row::new(0), 0, &[block]);
        assert_eq!(edited.is_ok(), block >= -1, "{block}");
    }
    for resolved in BYTES {
        for upper in BYTES {
            for tokens in U32S {
                for row in U32S {
                    let mut step = batch.step_wait(&machine.stream).unwrap();
                    let added = step.row(Row::new(row), resolved, upper, tokens);
                    let fits = upper.saturating_add(tokens.into()) <= 12 && tokens <= 5;
                    let fits = fits && row < 3 && resolved <= upper;
                    assert_eq!(added.is_ok(), fits, "{row}: {resolved}, {upper}, {tokens}");
                    drop(step);
                    let mut step = batch.step_wait(&machine.stream).unwrap();
                    let states = RowStates { drafts: tokens / 2, input: tokens };
                    let bounds = (resolved, upper);
                    let added = BatchStep::row_with_states(
                        &mut step,
                        Row::new(row),
                        bounds,
                        tokens,
                        states,
                    );
                    assert_eq!(added.is_ok(), fits);
                    let all = RowStates { drafts: tokens.max(1), ..states };
                    assert!(step.row_with_states(Row::new(2), (0, 0), tokens, all).is_err());
                }
            }
        }
    }
    for array in COUNTS {
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
