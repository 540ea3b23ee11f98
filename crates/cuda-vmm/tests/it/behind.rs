//! A host one and two steps ahead of its device, which runs only work that the host waits for.
//! Covers pools, worker and sequences, with every driver call refused once, over a long run.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Debug;

use crate::common::{DEVICE_PAGES, Machine, PAGE, machine, one_seat, refusals};
use cuda_driver::{DeviceBuffer, DeviceSpan, ErrorCode, Fence, Stream};
use cuda_sim::Pace;
use cuda_vmm::pages::{PagePool, PagePoolOptions};
use cuda_vmm::sequences::{Sequence, SequenceSpace, SpaceOptions};
use cuda_vmm::worker::Health;
use cuda_vmm::{
    CloseReport, ElasticPool, ElasticPoolOptions, EpochGate, GrowError, Lease, MemoryLimit,
    MemoryRules, Worker,
};

/// Four blocks on three pages, then a block that shares its page with the next.
const BLOCK: u64 = PAGE / 8 * 3;
const BLOCKS: u64 = 14;
/// Number of bytes written and read at both ends of each block and each sequence.
const MARK: u64 = 32;
/// Number of marks of a step.
const MARKS: u64 = 2 * (BLOCKS + 4);

/// Number of steps of one generation of requests. The next generation uses another stream. Only the
/// return of memory after its last use orders the two.
const GENERATION: u64 = 7;

/// The work of a step: the fence after it, and the bytes it has read.
struct Step {
    fence: Fence,
    place: u64,
    tags: Vec<u8>,
}

struct Life {
    machine: Machine,
    depth: usize,
    gate: EpochGate,
    limit: MemoryLimit,
    worker: Worker,
    pool: ElasticPool,
    pages: PagePool,
    space: SequenceSpace,
    streams: [Stream; 2],
    reads: Stream,
    results: DeviceBuffer,
    in_flight: VecDeque<Step>,
    spare: Vec<Fence>,
    live: Vec<Sequence>,
    /// The tags that this generation has written to its blocks.
    written: BTreeMap<u64, u8>,
    verified: u64,
    /// The largest number of events queried in one step.
    asked_most: u64,
}

/// Repeats a call that is refused once. The second attempt succeeds.
fn again<T, E: Debug>(mut attempt: impl FnMut() -> Result<T, E>) -> T {
    attempt().or_else(|_| attempt()).unwrap()
}

impl Life {
    fn new(depth: usize) -> Self {
        let machine = machine();
        machine.sim.set_pace(Pace::Slowest);
        let (gate, limit) = (EpochGate::new(), MemoryLimit::new(24 * PAGE));
        let rules = MemoryRules { limit: Some(limit.clone()), admission: None };
        let options = ElasticPoolOptions {
            block_bytes: BLOCK,
            capacity_blocks: BLOCKS,
            page_bytes: None,
            initial_blocks: 0,
        };
        let (worker, device) = (Worker::manual(), &machine.device);
        let mut pool =
            ElasticPool::with_rules(device, options, gate.clone(), rules.clone()).unwrap();
        pool.work_on(&worker);
        let stock = PagePoolOptions { page_bytes: None, capacity_pages: 20 };
        let pages = PagePool::with_rules(device, stock, rules).unwrap();
        let options = SpaceOptions {
            sequences: 4,
            planes: 1,
            token_bytes: PAGE / 2,
            tokens_max: 8,
            parked_pages_max: 6,
            prepared_pages: 1,
            ..SpaceOptions::default()
        };
        let space = SequenceSpace::with_gate(&pages, &worker, options, gate.clone()).unwrap();
        let bytes = MARKS * MARK * (depth as u64 + 2);
        let results = DeviceBuffer::alloc(device, bytes).unwrap();
        let streams = [machine.stream(), machine.stream()];
        let reads = machine.stream();
        Self {
            machine,
            depth,
            gate,
            limit,
            worker,
            pool,
            pages,
            space,
            streams,
            reads,
            results,
            in_flight: VecDeque::new(),
            spare: Vec::new(),
            live: Vec::new(),
            written: BTreeMap::new(),
            verified: 0,
            asked_most: 0,
        }
    }

    fn step(&mut self, number: u64) {
        let asked = self.machine.calls("cuEventQuery");
        while self.in_flight.len() > self.depth {
            self.complete_oldest();
        }
        if number.is_multiple_of(GENERATION) {
            self.end_generation(number);
        }
        let lease = self.gate.lease();
        let spans = self.grow(number);
        self.submit(number, lease, &spans);
        if number.is_multiple_of(GENERATION) {
            // The first step of this generation completes after the last step of earlier
            // generations.
            again(|| self.stream(number).synchronize());
        }
        let _ = self.worker.poll();
        self.asked_most = self.asked_most.max(self.machine.calls("cuEventQuery") - asked);
    }

    /// Waits for the oldest step, and compares the bytes it has read.
    fn complete_oldest(&mut self) {
        let Some(Step { fence, place, tags }) = self.in_flight.pop_front() else { return };
        again(|| fence.wait());
        let bytes = tags.len() as u64 * MARK;
        let span = self.results.span().slice(place * MARKS * MARK, bytes).unwrap();
        let mut seen = vec![0; bytes as usize];
        again(|| self.reads.download(&mut seen, span));
        for (mark, tag) in seen.chunks(MARK as usize).zip(tags) {
            assert!(mark.iter().all(|&byte| byte == tag), "{mark:?} read in the place of {tag}");
            self.verified += 1;
        }
        self.spare.push(fence);
    }

    /// The requests end with their last steps on the device. Their memory is given up in one of
    /// several ways. The steps' leases and fences cover the users.
    fn end_generation(&mut self, number: u64) {
        self.live.drain(..).for_each(|sequence| sequence.finish(&[]));
        self.written.clear();
        match number / GENERATION % 4 {
            0 => _ = self.pool.shrink_to(1, &[]).unwrap(),
            1 => _ = self.pool.shrink_to(3, &[]).unwrap(),
            2 => {
                let _ = self.pool.shrink_to(4, &[]).unwrap();
                let _ = self.pool.shrink_to(2, &[]).unwrap();
                self.limit.set(10 * PAGE);
                let _ = self.limit.reclaim();
            }
            _ => {
                let _ = self.pool.shrink_to(2, &[]).unwrap();
                let _ = self.pool.trim(1);
                let _ = again(|| self.space.trim(4 * PAGE));
                self.limit.set(24 * PAGE);
            }
        }
    }

    /// Grows the memory for a step: blocks, except those left from other generations, and
    /// sequences.
    fn grow(&mut self, number: u64) -> Vec<(Option<u64>, DeviceSpan)> {
        let wanted = 5 + number * 3 % (BLOCKS - 4);
        let _ = self.pool.demand(wanted);
        match self.pool.grow_to(wanted) {
            Ok(ready) => assert!(ready >= wanted),
            Err(GrowError::Quarantined { .. } | GrowError::Device { .. }) => {}
            Err(error) => assert!(error.is_retryable(), "{error}"),
        }
        let blocks = 4..wanted.min(self.pool.ready_blocks());
        let mut spans: Vec<_> =
            blocks.map(|block| (Some(block), self.pool.block_span(block).unwrap())).collect();
        if self.live.len() < 3
            && let Ok(sequence) = self.space.admit(1)
        {
            self.live.push(sequence);
        }
        for (index, sequence) in self.live.iter_mut().enumerate() {
            let tokens = 1 + (number + index as u64) % 7;
            if tokens < sequence.tokens() {
                sequence.shrink_to(tokens, &[]).unwrap();
            }
            if sequence.extend_to(tokens).is_ok() || sequence.extend_blocking(tokens).is_ok() {
                spans.push((None, sequence.plane(0).unwrap().span(0..tokens).unwrap()));
            }
        }
        spans
    }

    fn stream(&self, number: u64) -> &Stream {
        &self.streams[(number / GENERATION % 2) as usize]
    }

    /// Reads both ends of each span, as written by the previous step, and writes new values. A
    /// generation uses a single stream.
    fn submit(&mut self, number: u64, lease: Lease, spans: &[(Option<u64>, DeviceSpan)]) {
        let stream = &self.streams[(number / GENERATION % 2) as usize];
        let place = number % (self.depth as u64 + 2);
        let mut tags = Vec::new();
        for (block, span) in spans {
            let tag = (number * 31 + tags.len() as u64 * 7) as u8;
            let before = block.and_then(|block| self.written.insert(block, tag));
            for offset in [0, span.bytes() - MARK] {
                let mark = span.slice(offset, MARK).unwrap();
                let at = (place * MARKS + tags.len() as u64) * MARK;
                let result = self.results.span().slice(at, MARK).unwrap();
                if before.is_none() {
                    stream.fill(mark, tag).unwrap();
                }
                stream.copy_on_device(result, mark).unwrap();
                stream.fill(mark, tag).unwrap();
                tags.push(before.unwrap_or(tag));
            }
        }
        let mut spare = self.spare.pop();
        let fence = again(|| match spare.take() {
            Some(fence) => fence.renew(stream),
            None => Fence::record(stream),
        });
        lease.submitted(std::slice::from_ref(&fence)).unwrap();
        self.in_flight.push_back(Step { fence, place, tags });
    }

    fn calls(&self) -> BTreeMap<&'static str, u64> {
        self.machine.sim.calls()
    }

    fn live_events(&self) -> u64 {
        self.machine.calls("cuEventCreate") - self.machine.calls("cuEventDestroy")
    }

    /// Closes everything. There was no mistake, and nothing is left except addresses that could not
    /// be freed.
    fn close(mut self) {
        while !self.in_flight.is_empty() {
            self.complete_oldest();
        }
        assert!(self.verified > 0);
        for _ in 0..40 {
            let _ = self.worker.poll();
        }
        assert!(self.worker.health() == Health::Healthy, "{:?}", self.worker.health());
        assert!(self.machine.device.poison().is_none());
        self.live.drain(..).for_each(|sequence| sequence.finish(&[]));
        let Self { machine, worker, pool, pages, space, limit, .. } = self;
        let reports = [pool.close(&[]).wait(), space.close(&[]).unwrap().wait()];
        let check = |report: &CloseReport| {
            assert_eq!(report.leaked_bytes, 0, "{:?}", report.errors);
            report
                .errors
                .iter()
                .all(|error| error.step != cuda_vmm::pages::CloseStep::FreeAddresses)
        };
        let all_freed = reports.iter().all(|report| check(report.as_ref().unwrap()));
        worker.close();
        assert_eq!(pages.stats().in_use, 0);
        drop((pages, self.results, self.streams, self.reads, self.spare, self.gate, reports));
        assert_eq!(limit.stats().used_bytes, 0);
        machine.device.free_retired().unwrap();
        if all_freed {
            machine.assert_clean();
        }
    }
}

/// Enough steps to use each way of giving memory up twice.
const STEPS: u64 = 8 * GENERATION + 3;

/// The crate's own calls. Other calls belong to the test's work.
const CALLS: [&str; 9] = [
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
];

#[test]
fn each_call_fails_at_each_position_with_the_device_behind() {
    for depth in [1, 2] {
        let life = |fault: Option<(&'static str, u64, ErrorCode)>| {
            let mut life = Life::new(depth);
            let before = life.calls();
            if let Some((call, nth, code)) = fault {
                life.machine.sim.fail_nth(call, nth, code);
            }
            (0..STEPS).for_each(|number| life.step(number));
            let after = life.calls();
            life.close();
            after
                .into_iter()
                .map(move |(call, count)| (call, count - before.get(call).copied().unwrap_or(0)))
        };
        let healthy: BTreeMap<_, _> = life(None).collect();
        let mut faults = 0;
        for call in CALLS {
            for nth in 1..=healthy.get(call).copied().unwrap_or(0) {
                let codes = match call {
                    "cuMemCreate" | "cuMemMap" => refusals(call),
                    _ => &refusals(call)[..1],
                };
                for &code in codes {
                    drop(life(Some((call, nth, code))));
                    faults += 1;
                }
            }
        }
        assert!(faults > 300, "{faults} faults: {healthy:?}");
    }
}

#[test]
fn nothing_grows_in_a_hundred_thousand_steps() {
    let mut life = Life::new(2);
    let (mut asked, mut events, mut calls) = (0, 0, 0);
    let sum = |life: &Life| life.calls().values().sum::<u64>();
    for number in 0..100_000 {
        life.step(number);
        if number == 1_000 {
            (asked, events, calls) = (life.asked_most, life.live_events(), sum(&life));
        }
        assert!(number < 1_000 || life.live_events() <= events + 4, "step {number}");
    }
    assert_eq!(life.asked_most, asked, "events queried by one step");
    let (per_step, first) = ((sum(&life) - calls) / 99_000, calls / 1_000);
    assert!(per_step <= first + 1, "{per_step} calls a step, {first} at first");
    assert!(life.pages.stats().live <= 20 && life.limit.stats().used_bytes <= 24 * PAGE);
    life.close();
}

/// Steps of speculative decoding on a device that is one step behind: each step tries a token and
/// rejects it. The first step has given up two of four rows for good. Returns the mapped bytes and
/// the number of events at the end, and the greatest number of events queried in one step.
fn reject_a_draft_in_each_step(steps: u64, polls: bool) -> (u64, usize, u64) {
    let (machine, worker) = (machine(), Worker::manual());
    let space = one_seat(&machine.pages(8), &worker);
    let stream = machine.stream();
    let mut sequence = space.admit(16).unwrap();
    sequence.extend_blocking(16).unwrap();
    let (mut before, mut asked_most): (Option<Fence>, _) = (None, 0);
    for step in 0..steps {
        let asked = machine.calls("cuEventQuery");
        sequence.extend_to(6).unwrap();
        stream.fill(sequence.plane(0).unwrap().span(0..6).unwrap(), step as u8).unwrap();
        let fence = Fence::record(&stream).unwrap();
        machine.sim.hold(stream.raw());
        sequence.shrink_to(5, std::slice::from_ref(&fence)).unwrap();
        // The work of the step before is over and seen to be, that of this one is not.
        while polls && worker.poll() {}
        machine.sim.release_hold(stream.raw());
        if let Some(before) = before.replace(fence) {
            before.wait().unwrap();
        }
        asked_most = asked_most.max(machine.calls("cuEventQuery") - asked);
    }
    drop(before);
    let events = machine.sim.check_leaks().events;
    stream.synchronize().unwrap();
    while worker.poll() {}
    let mapped_bytes = space.stats().mapped_bytes;
    sequence.finish(&[]);
    (mapped_bytes, events, asked_most)
}

#[test]
fn memory_given_up_comes_back_and_its_users_are_forgotten_though_each_step_gives_up_more() {
    assert_eq!(reject_a_draft_in_each_step(3, true).0, 2 * PAGE);
    for polls in [true, false] {
        let (few, many) =
            (reject_a_draft_in_each_step(80, polls), reject_a_draft_in_each_step(800, polls));
        assert!(many.1 <= few.1 + 4, "events after 80 steps and after 800: {few:?}, {many:?}");
        assert!(many.2 <= few.2, "queries of one step: {few:?}, {many:?}");
    }
}

#[test]
fn blocks_at_rest_go_to_others_though_more_are_given_up_in_each_step() {
    let machine = machine();
    let limit = MemoryLimit::new(8 * PAGE);
    let pool = |initial_blocks| {
        let rules = MemoryRules { limit: Some(limit.clone()), admission: None };
        let options = ElasticPoolOptions {
            block_bytes: PAGE,
            capacity_blocks: 8,
            page_bytes: None,
            initial_blocks,
        };
        ElasticPool::with_rules(&machine.device, options, EpochGate::new(), rules).unwrap()
    };
    let (shrinks, grows) = (pool(8), pool(0));
    let streams = [machine.stream(), machine.stream()];
    let mut before: Option<(&Stream, Fence)> = None;
    let mut grown = Vec::new();
    for (left, stream) in (1..8).rev().zip(streams.iter().cycle()) {
        machine.sim.hold(stream.raw());
        stream.fill(shrinks.block_span(left).unwrap(), 1).unwrap();
        let fence = Fence::record(stream).unwrap();
        shrinks.shrink_to(left, std::slice::from_ref(&fence)).unwrap();
        // Of the blocks given up in earlier steps, all but the last are at rest: their work was waited for.
        grown.push(grows.grow_to(grows.ready_blocks() + 1).ok());
        if let Some((stream, fence)) = before.replace((stream, fence)) {
            machine.sim.release_hold(stream.raw());
            fence.wait().unwrap();
        }
    }
    streams.iter().for_each(|stream| machine.sim.release_hold(stream.raw()));
    // Each step but the first two gets the block of the step before the last.
    assert_eq!(grown, [None, None, Some(1), Some(2), Some(3), Some(4), Some(5)]);
    assert!(machine.sim.findings().is_empty(), "{:?}", machine.sim.findings());
}

#[test]
fn the_users_of_parked_blocks_do_not_grow_with_the_steps_though_nobody_looks() {
    let (machine, mut before) = (machine(), None::<Fence>);
    // All blocks on one page, so that a shrink leaves them mapped.
    let pool = machine.pool(PAGE / 1_024, 1_000, 1_000);
    let stream = machine.stream();
    for left in (200..1_000).rev() {
        let fence = Fence::record(&stream).unwrap();
        machine.sim.hold(stream.raw());
        pool.shrink_to(left, std::slice::from_ref(&fence)).unwrap();
        machine.sim.release_hold(stream.raw());
        if let Some(before) = before.replace(fence) {
            before.wait().unwrap();
        }
        let events = machine.sim.check_leaks().events;
        assert!(events < 24, "{events} events with {left} blocks left");
    }
}

/// The events that one look of the worker, an admission and a poll query while the work before one
/// fence runs, for which `count` sequences and as many retirements wait.
fn asked_while_many_wait(count: u64, leased: bool) -> [u64; 3] {
    let (machine, worker) = (machine(), Worker::manual());
    let options = SpaceOptions {
        sequences: count,
        planes: 1,
        token_bytes: PAGE,
        tokens_max: 1,
        ..SpaceOptions::default()
    };
    let (gate, pages) = (EpochGate::new(), machine.pages(DEVICE_PAGES));
    let space = SequenceSpace::with_gate(&pages, &worker, options, gate.clone()).unwrap();
    let addresses = machine.reservation_at(count, gate.clone());
    addresses.map_range(0, pages.take_many(count).unwrap()).unwrap();
    let stream = machine.stream();
    let lease = gate.lease();
    let mut sequences: Vec<_> = (0..count).map(|_| space.admit(1).unwrap()).collect();
    for sequence in &mut sequences {
        sequence.extend_blocking(1).unwrap();
        stream.fill(sequence.plane(0).unwrap().span(0..1).unwrap(), 1).unwrap();
    }
    while worker.poll() {}
    machine.sim.hold(stream.raw());
    let fence = Fence::record(&stream).unwrap();
    lease.submitted(std::slice::from_ref(&fence)).unwrap();
    let fences = if leased { &[] } else { std::slice::from_ref(&fence) };
    sequences.into_iter().for_each(|sequence| sequence.finish(fences));
    for page in 0..count {
        drop(addresses.retire(page..page + 1, fences).unwrap());
    }
    let asked = |act: &dyn Fn() -> bool| {
        let before = machine.calls("cuEventQuery");
        assert!(!act(), "nothing is at rest");
        machine.calls("cuEventQuery") - before
    };
    let all = [
        asked(&|| worker.poll()),
        asked(&|| space.admit(1).is_ok()),
        asked(&|| !addresses.poll_retired().pages.is_empty()),
    ];
    machine.sim.release_hold(stream.raw());
    stream.synchronize().unwrap();
    assert_eq!(addresses.poll_retired().pages.len() as u64, count);
    all
}

#[test]
fn a_look_asks_a_fence_once_however_many_wait_for_it() {
    for leased in [false, true] {
        for count in [1, 30] {
            assert_eq!(asked_while_many_wait(count, leased), [1, 1, 1], "{count} wait, {leased}");
        }
    }
}
