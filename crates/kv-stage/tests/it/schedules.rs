//! Host buffers rewritten while the device may still read them, under all orders and many at random.
//!
//! The unprotected variants reproduce defects of other systems. That they are found shows that the
//! search would find a hole in the protected ones. `KV_SCHEDULES` is the number of random schedules
//! of each protected program (2,000 by default), from seed `KV_SEED` (0) on. At most four times as
//! many orders of a small program are tried. `cargo xtask simulate` runs 100,000, which covers all
//! orders.

#![allow(clippy::print_stdout, reason = "a long campaign tells its counts")]

use cuda_sim::{Exploration, ExploreLimits, FailedSchedule, explore, explore_random, replay};

use crate::prelude::*;

const BYTES: u64 = 16;
/// Maximum number of random schedules until a race must be found.
const FOUND_WITHIN: u64 = 100;
/// Maximum number of orders of a small program, for each random schedule of a larger one.
const ORDERS_PER_SCHEDULE: u64 = 4;
/// Number of searches by random schedules. Each must find the race.
const SEARCHES: u64 = 50;

/// The reader of the host memory.
#[derive(Clone, Copy, Debug)]
enum Reader {
    /// A copy, which the driver knows.
    Copy,
    /// A kernel with the address as argument, which the driver does not know.
    Kernel,
}

const READERS: [Reader; 2] = [Reader::Copy, Reader::Kernel];

type Outcome = Result<(), String>;
type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

/// A destination for each step, and its expected contents.
struct Steps {
    targets: Vec<DeviceBuffer>,
}

impl Steps {
    fn new(machine: &Machine, steps: usize) -> Self {
        Self { targets: (0..steps).map(|_| machine.memory(BYTES)).collect() }
    }

    fn spans(&self) -> impl Iterator<Item = (u64, DeviceSpan)> {
        (0..).zip(self.targets.iter().map(DeviceBuffer::span))
    }

    fn check(&self, machine: &Machine) -> Fallible<()> {
        for (step, target) in self.spans() {
            let arrived = machine.read(target);
            if arrived != pattern(step, BYTES as usize) {
                let of = (0..self.targets.len() as u64)
                    .find(|&other| arrived == pattern(other, BYTES as usize));
                let what = of.map_or("other bytes".to_owned(), |of| format!("those of step {of}"));
                return Err(format!("step {step}: {what} arrived").into());
            }
        }
        Ok(())
    }
}

fn read(machine: &Machine, reader: Reader, to: DeviceSpan, host: &PinnedBuffer) -> Fallible<()> {
    match reader {
        Reader::Copy => machine.stream.copy_to_device(to, host, 0)?,
        Reader::Kernel => machine.launch_copy(&machine.stream, to, host.device_address())?,
    }
    Ok(())
}

fn write(sim: &SimDriver, host: &mut PinnedBuffer, step: u64) -> Fallible<()> {
    sim.host_step(&format!("writes step {step}"));
    Ok(host.write_at(0, &pattern(step, BYTES as usize))?)
}

/// One persistent host buffer, rewritten by every step.
fn persistent(sim: &SimDriver, reader: Reader, steps: usize) -> Fallible<()> {
    let machine = Machine::on(sim.clone());
    let steps = Steps::new(&machine, steps);
    let mut host = PinnedBuffer::alloc(&machine.device, BYTES, HostAllocFlags::CACHED)?;
    for (step, target) in steps.spans() {
        write(sim, &mut host, step)?;
        read(&machine, reader, target, &host)?;
    }
    steps.check(&machine)
}

/// When a caching allocator records the event that it waits for before it reuses a buffer.
#[derive(Clone, Copy, Debug)]
enum Recorded {
    /// After the reader, of either kind.
    AfterReader,
    /// Before the reader: late readers are not covered.
    BeforeReader,
    /// Only after copies, because it does not learn of kernels.
    AfterCopies,
}

/// Buffers of a caching allocator, each fresh for its step, and reused when its event has completed.
fn cached(sim: &SimDriver, reader: Reader, recorded: Recorded, steps: usize) -> Fallible<()> {
    let machine = Machine::on(sim.clone());
    let steps = Steps::new(&machine, steps);
    let mut cache: Vec<(PinnedBuffer, Event)> = Vec::new();
    for (step, target) in steps.spans() {
        let mut reused = None;
        for index in 0..cache.len() {
            if cache[index].1.is_complete()? {
                reused = Some(cache.remove(index));
                break;
            }
        }
        let (mut host, event) = match reused {
            Some(reused) => reused,
            None => (
                PinnedBuffer::alloc(&machine.device, BYTES, HostAllocFlags::CACHED)?,
                Event::new(&machine.device)?,
            ),
        };
        write(sim, &mut host, step)?;
        if matches!(recorded, Recorded::BeforeReader) {
            event.record(&machine.stream)?;
        }
        read(&machine, reader, target, &host)?;
        let covered = match recorded {
            Recorded::AfterReader => true,
            Recorded::BeforeReader => false,
            Recorded::AfterCopies => matches!(reader, Reader::Copy),
        };
        if covered {
            event.record(&machine.stream)?;
        }
        cache.push((host, event));
    }
    steps.check(&machine)
}

/// A staging pool of `buffers`, whose buffers are read on one stream or on two.
#[derive(Clone, Copy, Debug)]
struct Staged {
    reader: Reader,
    buffers: usize,
    steps: usize,
    /// Whether a second stream copies the buffer too.
    two_streams: bool,
}

fn staged(sim: &SimDriver, variant: Staged, prepare: impl Fn(&StagingPool)) -> Fallible<()> {
    let machine = Machine::on(sim.clone());
    let other = Stream::new(&machine.device)?;
    let steps = Steps::new(&machine, variant.steps);
    let others = Steps::new(&machine, if variant.two_streams { variant.steps } else { 0 });
    let pool = machine.pool(BYTES, variant.buffers);
    prepare(&pool);
    for (step, target) in steps.spans() {
        let mut buffer = pool.acquire_wait()?;
        sim.host_step(&format!("writes step {step}"));
        buffer.write_at(0, &pattern(step, BYTES as usize))?;
        buffer.submit(&machine.stream, |view: &SubmittedView<'_>| -> Result<(), CopyError> {
            match variant.reader {
                Reader::Copy => view.copy_to_device(target, 0)?,
                Reader::Kernel => machine.launch_copy(view.stream(), target, view.address())?,
            }
            if let Some(second) = others.targets.get(step as usize) {
                view.copy_to_device_on(&other, second.span(), 0)?;
            }
            Ok(())
        })?;
    }
    other.synchronize()?;
    steps.check(&machine)?;
    others.check(&machine)?;
    pool.close()?;
    Ok(())
}

fn text(outcome: Fallible<()>) -> Outcome {
    outcome.map_err(|error| error.to_string())
}

fn config() -> SimConfig {
    SimConfig::default()
}

/// A device that does not report races, so that the bytes must show the defect.
fn unchecked() -> SimConfig {
    SimConfig { races: RaceCheck::Off, ..config() }
}

/// A number from an environment variable.
fn number(variable: &str, otherwise: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable}={text} is no number")),
        Err(_) => otherwise,
    }
}

/// Asserts that random schedules find a failure soon, for every seed, and that all orders do too;
/// and that a device with the race check reports the missing order even in the fastest order, where
/// the bytes are right.
fn assert_found(name: &str, program: impl Fn(&SimDriver) -> Outcome) {
    let mut most = 0;
    for search in 0..SEARCHES {
        let seeds = search * FOUND_WITHIN..(search + 1) * FOUND_WITHIN;
        let found = explore_random(&unchecked(), seeds, &program).unwrap();
        let failure = found.failure.unwrap_or_else(|| panic!("{name}: not found, {search}"));
        assert_replays(&failure, &program);
        most = most.max(failure.number);
    }
    let systematic = explore(&unchecked(), ExploreLimits::default(), &program).unwrap();
    let systematic = systematic.failure.unwrap_or_else(|| panic!("{name}: not found"));
    assert_replays(&systematic, &program);
    let checked = SimConfig { races: RaceCheck::Report, ..config() };
    let harmless = SimDriver::new(SimConfig { pace: Pace::Fastest, ..checked }).unwrap();
    let outcome = program(&harmless);
    assert!(!harmless.races().is_empty(), "{name}: {outcome:?}");
    println!(
        "{name}: found by schedule {most} of random ones at the latest ({SEARCHES} searches), \
         by schedule {} in order",
        systematic.number
    );
}

fn assert_replays(failure: &FailedSchedule, program: impl Fn(&SimDriver) -> Outcome) {
    let again = replay(&unchecked(), &failure.script, program).unwrap();
    assert_eq!(again.outcome, Err(failure.reason.clone()));
    assert!(failure.reason.contains("arrived"), "{failure}");
    assert!(failure.schedule.iter().any(|line| line.contains("writes step")), "{failure}");
}

#[test]
fn one_buffer_for_all_steps_is_found_whoever_reads_it() {
    for reader in READERS {
        assert_found(&format!("one persistent buffer, {reader:?}"), |sim| {
            text(persistent(sim, reader, 2))
        });
    }
}

#[test]
fn reuse_under_a_kernel_that_the_allocator_does_not_know_is_found() {
    assert_found("events after copies only, Kernel", |sim| {
        text(cached(sim, Reader::Kernel, Recorded::AfterCopies, 2))
    });
}

#[test]
fn an_event_before_the_reader_is_found() {
    for reader in READERS {
        assert_found(&format!("event before the reader, {reader:?}"), |sim| {
            text(cached(sim, reader, Recorded::BeforeReader, 2))
        });
    }
}

#[test]
fn a_cache_that_records_after_its_readers_passes_all_orders() {
    for (reader, recorded) in [
        (Reader::Copy, Recorded::AfterCopies),
        (Reader::Copy, Recorded::AfterReader),
        (Reader::Kernel, Recorded::AfterReader),
    ] {
        assert_all_pass(&format!("cache, {reader:?}, {recorded:?}"), |sim| {
            text(cached(sim, reader, recorded, 3))
        });
    }
}

/// The variants that are small enough for all their orders.
fn small() -> Vec<Staged> {
    let shapes = [(1, 2, false), (2, 3, false), (1, 2, true)];
    let variants = shapes.map(|(buffers, steps, two_streams)| {
        READERS.map(|reader| Staged { reader, buffers, steps, two_streams })
    });
    variants.concat()
}

/// A batch of one sequence whose drafts are accepted by a sampler, of the last count each time; a kernel
/// logs slots and length. Each step has another block at the sequence's end.
fn batches(
    sim: &SimDriver,
    buffers: usize,
    steps: usize,
    prepare: impl Fn(&StagingPool),
) -> Fallible<()> {
    sim.register_kernels(kv_stage::references());
    let machine = Machine::on(sim.clone());
    let table =
        BatchTable { width: 64, block_tokens: 1, null_block: BlockId::from(0), is_state: false };
    let options = BatchOptions {
        rows: 1,
        sequences_max: 1,
        tokens_max: 2,
        tables: vec![table],
        arrays: vec![],
    };
    let pool = machine.pool(options.buffer_bytes(), buffers);
    prepare(&pool);
    let mut batch = DeviceBatch::new(&pool, options)?;
    let logs: Vec<[DeviceBuffer; 2]> =
        (0..steps).map(|_| [machine.memory(16), machine.memory(4)]).collect();
    let counts = machine.memory(4);
    machine.stream.upload(counts.span(), &1_u32.to_ne_bytes())?;
    let block = |number: usize| number as i32 * 10 + 3;
    for (number, [slots, length]) in logs.iter().enumerate() {
        sim.host_step(&format!("writes step {number}"));
        let first = number as u32;
        batch.edit(0, Row::new(0), first, &entries(&[block(number), block(number) + 1]))?;
        let mut step = batch.step_wait(&machine.stream)?;
        // One of two tokens stands in each step.
        let (least, most) = (number.min(1) as u64, 2 * number as u64);
        step.row(Row::new(0), least, most, 2)?;
        let buffers = step.submit()?.buffers;
        let copies = [(slots, buffers.tables[0].slots), (length, buffers.lengths)];
        for (log, from) in copies {
            machine.launch_copy(&machine.stream, log.span(), from.address())?;
        }
        machine.launch_copy(&machine.stream, buffers.accepted, counts.span().address())?;
    }
    for (number, [slots, length]) in logs.iter().enumerate() {
        let found: Vec<i64> = bytemuck::pod_collect_to_vec(&machine.read(slots.span()));
        let length = machine.read(length.span());
        let right = [block(number), block(number) + 1].map(i64::from);
        if found != right || length != (number as i32 + 2).to_ne_bytes() {
            return Err(format!("step {number}: {found:?} and length {length:?} arrived").into());
        }
    }
    pool.close()?;
    Ok(())
}

fn schedules() -> u64 {
    number("KV_SCHEDULES", 2_000)
}

/// Asserts that a small program passes all its orders, or the maximum number.
fn assert_all_pass(name: &str, program: impl Fn(&SimDriver) -> Outcome) {
    let schedules_max = schedules().saturating_mul(ORDERS_PER_SCHEDULE);
    let limits = ExploreLimits { schedules_max, ..ExploreLimits::default() };
    let found = explore(&config(), limits, program).unwrap();
    found.assert_passed();
    let Exploration { explored, complete, .. } = found;
    assert!(complete || explored == schedules_max);
    assert!(explored > 100, "{name}: {explored} orders only");
    println!("{name}: {explored} orders pass{}", if complete { ", which are all" } else { "" });
}

/// Asserts that a program passes random orders.
fn assert_random_pass(name: &str, program: impl Fn(&SimDriver) -> Outcome) {
    let first = number("KV_SEED", 0);
    let seeds = first..first.saturating_add(schedules());
    let found = explore_random(&config(), seeds.clone(), program).unwrap();
    found.assert_passed();
    assert_eq!(found.explored, seeds.end - seeds.start);
    let Exploration { explored, choices_most, .. } = found;
    println!("{name}: {explored} random schedules pass, up to {choices_most} decisions each");
}

#[test]
fn the_staging_pool_passes_all_orders() {
    for variant in small() {
        assert_all_pass(&format!("{variant:?}"), |sim| text(staged(sim, variant, |_| {})));
    }
}

#[test]
fn a_batch_passes_all_orders() {
    assert_all_pass("batches, 2 buffers, 3 steps", |sim| text(batches(sim, 2, 3, |_| {})));
}

#[test]
fn a_batch_passes_random_orders() {
    assert_random_pass("batches, 3 buffers, 8 steps", |sim| text(batches(sim, 3, 8, |_| {})));
}

#[test]
fn the_staging_pool_passes_random_orders() {
    for reader in READERS {
        for two_streams in [false, true] {
            let variant = Staged { reader, buffers: 3, steps: 8, two_streams };
            assert_random_pass(&format!("{variant:?}"), |sim| text(staged(sim, variant, |_| {})));
        }
    }
}

/// Stages three steps on a device that is lost after that many operations, and releases everything.
fn staged_until_lost(sim: &SimDriver, operations: u64) -> Fallible<()> {
    const LOST: ErrorCode = ErrorCode::ECC_UNCORRECTABLE;
    let machine = Machine::on(sim.clone());
    let steps = Steps::new(&machine, 3);
    let pool = machine.pool(BYTES, 2);
    sim.lose_device(0, operations, LOST);
    let mut outcome = Ok(());
    for (step, target) in steps.spans() {
        outcome = stage_one(&machine, &pool, step, target);
        if outcome.is_err() {
            break;
        }
    }
    let settled = machine.stream.synchronize().map_err(Box::from);
    let error = outcome.and(settled).err().ok_or("the device was not lost")?;
    if machine.device.poison().map(|first| first.code) != Some(LOST) {
        return Err(error);
    }
    pool.close()?;
    drop(steps);
    drop(machine);
    match sim.check_leaks() {
        clean if clean.is_clean() => Ok(()),
        leaks => Err(leaks.to_string().into()),
    }
}

fn stage_one(machine: &Machine, pool: &StagingPool, step: u64, target: DeviceSpan) -> Fallible<()> {
    let mut buffer = pool.acquire_wait()?;
    buffer.write_at(0, &pattern(step, BYTES as usize))?;
    buffer.submit(&machine.stream, |view| view.copy_to_device(target, 0))?;
    Ok(())
}

#[test]
fn a_device_lost_at_any_point_of_any_order_leaves_nothing_behind() {
    // Three steps are three copies and three events.
    for operations in 0..=6 {
        let found = explore(&config(), ExploreLimits::default(), |sim| {
            text(staged_until_lost(sim, operations))
        })
        .unwrap();
        found.assert_passed();
        assert!(found.complete);
        println!("lost after {operations} operations: all {} orders pass", found.explored);
    }
}

/// Disables the pool's own protection: the tests above must see the defect.
#[cfg(all(feature = "sabotage", debug_assertions))]
#[test]
fn the_staging_pool_without_its_events_is_found() {
    for variant in small() {
        assert_found(&format!("sabotaged, {variant:?}"), |sim| {
            text(staged(sim, variant, StagingPool::sabotage_reuse_before_event))
        });
    }
}

#[cfg(all(feature = "sabotage", debug_assertions))]
#[test]
fn a_batch_without_the_pools_events_is_found() {
    assert_found("sabotaged, batches", |sim| {
        text(batches(sim, 1, 3, StagingPool::sabotage_reuse_before_event))
    });
}
