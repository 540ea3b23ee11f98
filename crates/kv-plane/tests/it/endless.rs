//! Memory and queries of a cache do not grow with its steps, with the device always a step behind.
//!
//! The device is as late as is legal: it runs only the work that the host waits for, and a query
//! advances nothing. So the work of the latest step has never completed when the step is finished.

use kv_testkit::alloc;

use crate::prelude::*;

/// A cache whose devices are late, and the requests that come and go in it.
struct Machine {
    sim: SimDriver,
    cache: KvCache,
    lives: Vec<Sequence>,
}

impl Machine {
    fn new(devices: u32, overlap_depth: u32) -> Self {
        let config = SimConfig { devices, granularity: 4 << 10, ..SimConfig::default() };
        let sim = sim(config);
        sim.set_pace(Pace::Slowest);
        let devices = open(&sim, devices);
        let options = KvCacheOptions { overlap_depth, ..options(shape(2, 8, 4), 24, 24) };
        Self { sim, cache: KvCache::new(&streams(&devices), options).unwrap(), lives: Vec::new() }
    }

    fn queries(&self) -> u64 {
        self.sim.calls().get("cuEventQuery").copied().unwrap_or(0)
    }

    /// Admits one of a few prompts of three full blocks and a bit, if there is room.
    fn admit(&mut self, seed: u32) -> Option<Sequence> {
        let mut request = Request::new(Prompt::new(seed, 15).tokens);
        request.tokens_max = 64;
        let mut queue = VecDeque::from([request]);
        match one_answer(self.cache.admit(&mut queue, u64::MAX).unwrap()) {
            Answer::Admitted(sequence) => Some(sequence),
            Answer::NoRoom(_) | Answer::Waiting(_) => None,
            other => panic!("{other:?}"),
        }
    }

    /// One step, in some of which requests come, grow and go; the queries inside its `finish_step`.
    fn step(&mut self, number: u64) -> u64 {
        let step = self.cache.begin_step().unwrap();
        if number.is_multiple_of(16) {
            if self.lives.len() > 1 {
                drop(self.lives.remove(0));
            }
            let admitted = self.admit((number / 16 % 5) as u32);
            self.lives.extend(admitted);
        }
        let mut batch: Vec<&mut Sequence> = Vec::new();
        for live in &mut self.lives {
            if live.known() > 28 {
                self.cache.truncate(live, 18).unwrap();
                self.cache.extend(live, &[7]).unwrap();
            }
            if live.next() == 0 {
                decode(&mut self.cache, live);
            }
            batch.push(live);
        }
        self.cache.stage(&step, &mut batch).unwrap();
        let before = self.queries();
        self.cache.finish_step(step).unwrap();
        self.queries() - before
    }

    /// A step that computes a prompt, which leaves then.
    fn compute(&mut self, seed: u32) {
        let step = self.cache.begin_step().unwrap();
        let mut sequence = self.admit(seed).unwrap();
        self.cache.stage(&step, &mut [&mut sequence]).unwrap();
        self.cache.finish_step(step).unwrap();
    }

    /// A step that is dropped, for which blocks go to host memory and come back.
    fn dropped(&mut self, number: u64) {
        let step = self.cache.begin_step().unwrap();
        if let Some(mut sequence) = self.admit((number % 9) as u32) {
            self.cache.stage(&step, &mut [&mut sequence]).unwrap();
        }
        drop(step);
    }

    fn close(self) {
        let Self { sim, cache, lives } = self;
        drop(lives);
        let stats = cache.manager().stats();
        assert!(stats.onboarded_blocks > 0 && stats.offloaded_blocks > 0, "{stats:?}");
        cache.close().unwrap();
        assert_eq!(sim.findings(), []);
    }
}

#[test]
fn the_queries_of_a_step_do_not_grow_with_the_steps_before() {
    for (devices, depth) in [(1, 1), (2, 1), (1, 2)] {
        let mut machine = Machine::new(devices, depth);
        let most = |machine: &mut Machine, steps: std::ops::Range<u64>| {
            steps.map(|number| machine.step(number)).max().unwrap()
        };
        let early = most(&mut machine, 0..1000);
        let late = most(&mut machine, 1000..8000);
        assert!(late <= early, "{early} queries in a step at first, {late} later");
        machine.close();
    }
}

#[test]
fn a_hundred_thousand_steps_keep_no_more_than_a_thousand() {
    let mut machine = Machine::new(1, 1);
    let mut most = Vec::new();
    let mut queries = Vec::new();
    for thousand in 0..100 {
        let before = machine.queries();
        let mut bytes = 0;
        for number in 0..1000 {
            machine.step(thousand * 1000 + number);
            bytes = bytes.max(alloc::bytes());
        }
        queries.push(machine.queries() - before);
        most.push(bytes);
    }
    // A list that doubles when it is full has done so by then.
    let (early, late) = (most[10..20].iter().max(), most[90..].iter().max());
    assert!(late.unwrap() - early.unwrap() < 4096, "bytes: {most:?}");
    let (early, late) = (queries[10..20].iter().max(), queries[90..].iter().max());
    assert!(late <= early, "queries: {queries:?}");
    machine.close();
}

#[test]
fn dropped_steps_keep_no_more_than_a_few() {
    let mut machine = Machine::new(1, 1);
    let events = |machine: &Machine| {
        let calls = machine.sim.calls();
        let count = |name: &str| calls.get(name).copied().unwrap_or(0);
        count("cuEventCreate") - count("cuEventDestroy")
    };
    // Content that goes and comes.
    (0..9).for_each(|seed| machine.compute(seed));
    let (mut most, mut created) = (Vec::new(), Vec::new());
    for hundred in 0..20 {
        (0..100).for_each(|number| machine.dropped(hundred * 100 + number));
        most.push(events(&machine));
        created.push(machine.sim.calls()["cuEventCreate"]);
    }
    assert!(most[19] <= most[1], "events: {most:?}");
    // Theirs are recorded again.
    assert_eq!(created[19], created[1], "events made: {created:?}");
    machine.step(0);
    machine.close();
}

#[test]
fn two_parts_on_one_device_share_the_fences_that_are_used_again() {
    let sim = sim(SimConfig { granularity: 4 << 10, ..SimConfig::default() });
    let device = device(&sim);
    let two = streams(&[device.clone(), device]);
    let mut cache = KvCache::new(&two, options(shape(2, 8, 4), 24, 0)).unwrap();
    let mut created = Vec::new();
    for number in 0..100 {
        let step = cache.begin_step().unwrap();
        cache.stage(&step, &mut []).unwrap();
        cache.finish_step(step).unwrap();
        if number % 50 == 49 {
            created.push(sim.calls()["cuEventCreate"]);
        }
    }
    assert_eq!(created[0], created[1], "a step makes events though others are done with theirs");
    cache.close().unwrap();
    assert_eq!(sim.findings(), []);
}
