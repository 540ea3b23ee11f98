//! Loads by layers: requests are admitted while their prefix is loaded, and the engine waits layer by layer.

use kv_plane::tier::{BlockFault, header_bytes};

use crate::prelude::*;

/// A cache of 12 blocks on the device and 10 in host memory, over a tier.
fn over(make: impl Fn() -> Box<dyn LowerTier> + Send + Sync + 'static) -> KvCacheOptions {
    let mut tiers = LowerTiers::new(b"a model");
    // Long enough for any machine: only a tier that does not answer is late.
    let wait_max = Duration::from_secs(60);
    tiers.rules = LowerOptions { wait_max, stores_open_max: 4, ..LowerOptions::default() };
    tiers.push(make);
    // Requests wait as long as it takes.
    let pool = PoolRules { clock: Some(Arc::new(ManualClock::new())), ..PoolRules::default() };
    KvCacheOptions { tiers, pool, ..options(small(), 12, 10) }
}

fn memory(faults: FaultRules) -> MemoryTier {
    let (records_max, load_pieces) = (200, 7);
    let options = MemoryTierOptions { records_max, load_pieces, faults, ..Default::default() };
    MemoryTier::new(options)
}

/// Computes a prompt, and has it stored.
fn compute(engine: &mut Engine, prompt: &Prompt) {
    let (mut live, _) = engine.admit_loaded(prompt).unwrap();
    engine.run(&mut [&mut live]).unwrap();
    engine.run(&mut [&mut live]).unwrap();
    engine.settle(&mut live).unwrap();
    engine.drain().unwrap();
    drop(live);
    end_stores(engine);
}

/// Waits until all that is to be stored is stored.
fn end_stores(engine: &mut Engine) {
    while engine.cache.manager().has_decided() {
        engine.idle().unwrap();
    }
}

/// Serves eight prompts in turn, of which the caches hold three, and checks all that is read.
fn serve(engine: &mut Engine, rounds: u32) -> LowerStats {
    engine.by_layers = true;
    for _ in 0..rounds {
        for seed in 0..8 {
            compute(engine, &Prompt::new(seed, 4 * 4 + 2));
        }
    }
    engine.assert_intact();
    engine.cache.manager().lower_stats()
}

fn play(choice: TransportChoice, devices: u32, faults: FaultRules) -> LowerStats {
    let (machine, mut engine) =
        Machine::with_engine(7, devices, by(choice, over(move || Box::new(memory(faults)))));
    let stats = serve(&mut engine, 4);
    machine.close(engine);
    stats
}

#[test]
fn layers_come_by_every_way_and_on_two_devices() {
    for choice in TransportChoice::ALL {
        for devices in [1, 2] {
            let stats = play(choice, devices, FaultRules::default());
            assert!(stats.entered > 10, "{choice} on {devices}: {stats:?}");
            assert_eq!((stats.faults, stats.redone), ([0; 7], 0), "{choice} on {devices}");
        }
    }
}

#[test]
fn no_fault_of_a_layer_reaches_a_sequence() {
    let (mut entered, mut redone) = (0, 0);
    for seed in 1..=20 {
        let rules = FaultRules { late_polls_max: 9, ..FaultRules::all(seed) };
        let stats = play(TransportChoice::Quickest, 1 + (seed % 2) as u32, rules);
        (entered, redone) = (entered + stats.entered, redone + stats.redone);
    }
    assert!(entered > 100 && redone > 10, "{redone} of {entered}");
}

#[test]
fn a_tier_in_a_thread_of_its_own_brings_layers() {
    let machine = Machine::new(7, 1, small());
    let options = over(|| Box::new(Background::new(memory(FaultRules::default())).unwrap()));
    let mut engine = machine.rig.engine_with(options);
    let stats = serve(&mut engine, 4);
    assert_eq!(stats.redone, 0, "{stats:?}");
    machine.close(engine);
}

/// A tier that delivers when it is told to.
#[derive(Clone, Debug, Default)]
struct Stubborn {
    records: Arc<Mutex<HashMap<BlockHash, Vec<u8>>>>,
    held: Arc<Mutex<Vec<BlockSink>>>,
}

impl LowerTier for Stubborn {
    fn store(&mut self, blocks: Vec<BlockSource>) {
        for block in blocks {
            self.records.lock().unwrap().insert(block.name(), block.record().unwrap());
            block.done();
        }
    }

    fn load(&mut self, blocks: Vec<BlockSink>) {
        self.held.lock().unwrap().extend(blocks);
    }

    fn forget(&mut self, _: &[(GroupId, BlockHash)]) {}
    fn clear(&mut self) {}
    fn poll(&mut self, _: &mut Vec<(GroupId, BlockHash)>) {}
}

/// Layers of the model.
const LAYERS: u32 = 4;

/// Bytes of a layer of a block.
fn layer_bytes() -> usize {
    (small().block_bytes() / u64::from(LAYERS)) as usize
}

impl Stubborn {
    /// Delivers the rest of all records up to a layer, from the bytes on that were delivered before.
    fn deliver(&self, from: u32, to: u32) {
        let at = |layer: u32| match layer {
            0 => 0,
            layer => header_bytes(LAYERS as usize) + layer as usize * layer_bytes(),
        };
        let records = self.records.lock().unwrap();
        for block in self.held.lock().unwrap().iter_mut() {
            let record = &records[&block.name()];
            block.write_at(at(from), &record[at(from)..at(to)]).unwrap();
        }
    }

    fn end(&self) {
        self.held.lock().unwrap().drain(..).for_each(|block| block.done().unwrap());
    }
}

/// A request that was admitted while its first three blocks are loaded, and what they hold.
struct Entered {
    machine: Machine,
    engine: Engine,
    tier: Stubborn,
    prompt: Prompt,
    sequence: Sequence,
}

impl Entered {
    fn new(devices: u32, wait_max: Duration) -> Self {
        let machine = Machine::new(7, devices, small());
        let tier = Stubborn::default();
        let mut options = over({
            let tier = tier.clone();
            move || Box::new(tier.clone())
        });
        options.tiers.rules.wait_max = wait_max;
        options.groups[0].host_blocks = 30;
        let mut engine = machine.rig.engine_with(options);
        let prompt = Prompt::new(1, 3 * 4 + 2);
        compute(&mut engine, &prompt);
        // Everything leaves the device and the host, but for some room there.
        for seed in 2..9 {
            let mut other = engine.admit_unseen(&Prompt::new(seed, 10 * 4)).unwrap();
            engine.run(&mut [&mut other]).unwrap();
            drop(other);
            engine.idle().unwrap();
        }
        end_stores(&mut engine);
        let mut request = Request::named(prompt.len(), prompt.hashes(4));
        request.by_layers = true;
        let mut queue = VecDeque::from([request]);
        let sequence = loop {
            match one_answer(engine.cache.admit(&mut queue, u64::MAX).unwrap()) {
                Answer::Admitted(sequence) => break sequence,
                Answer::Waiting(Waiting::Load { .. }) => engine.idle().unwrap(),
                answer => panic!("{answer:?}"),
            }
        };
        assert_eq!(sequence.cached_tokens(), 12);
        assert!(sequence.loads().is_some());
        Self { machine, engine, tier, prompt, sequence }
    }

    fn stage(&mut self) -> OpenStep {
        let step = self.engine.begin().unwrap();
        self.engine.cache.stage(&step, &mut [&mut self.sequence]).unwrap();
        assert!(self.engine.cache.loads_layers());
        step
    }

    fn wait(&mut self, layers: std::ops::Range<u32>) {
        for layer in layers {
            self.engine.cache.wait_for_layer(GroupId(0), layer).unwrap();
        }
    }

    /// Checks a layer of the loaded blocks on its device, as the compute stream finds it.
    fn check_layer(&self, layer: u32) {
        for (index, name) in self.prompt.hashes(4).into_iter().take(3).enumerate() {
            let block = self.sequence.block(GroupId(0), index).unwrap().index() as u64;
            let parts = self.engine.cache.parts();
            let part = parts.iter().find(|part| part.layers().contains(&layer)).unwrap();
            let at = part.layers().iter().position(|&of| of == layer).unwrap();
            let whole = part.paged().block_span(block).unwrap().unwrap();
            let span = whole.slice((at * layer_bytes()) as u64, layer_bytes() as u64).unwrap();
            let mut found = vec![0; layer_bytes()];
            part.compute().download(&mut found, span).unwrap();
            let record = self.tier.records.lock().unwrap()[&name].clone();
            let from = header_bytes(LAYERS as usize) + layer as usize * layer_bytes();
            assert_eq!(found, record[from..from + layer_bytes()], "layer {layer} of block {index}");
        }
    }

    fn block(&self, index: usize) -> DeviceSpan {
        let block = self.sequence.block(GroupId(0), index).unwrap().index() as u64;
        self.engine.cache.parts()[0].paged().block_span(block).unwrap().unwrap()
    }

    /// Overwrites a loaded block on the first device.
    fn fill(&self, index: usize, byte: u8) {
        let compute = self.engine.cache.parts()[0].compute();
        compute.fill(self.block(index), byte).unwrap();
        compute.synchronize().unwrap();
    }

    /// A loaded block on the first device, as the compute stream finds it.
    fn read(&self, index: usize) -> Vec<u8> {
        let span = self.block(index);
        let mut found = vec![0; span.bytes() as usize];
        self.engine.cache.parts()[0].compute().download(&mut found, span).unwrap();
        found
    }

    /// Has the sequence computed from where it is; the last block of its prompt has no KV yet.
    fn commit(&mut self) -> Committed {
        let step = self.sequence.awaits().unwrap();
        let nothing = Tokens::Named { count: 1, names: &[] };
        self.engine.cache.commit(&mut self.sequence, step, nothing).unwrap()
    }

    /// Lets stores end that began when the load had left its room in host memory.
    fn idle(&mut self) {
        (0..8).for_each(|_| self.engine.idle().unwrap());
    }

    fn close(self) {
        let Self { machine, mut engine, tier, sequence, .. } = self;
        drop((sequence, tier));
        engine.drain().unwrap();
        engine.pool().check_integrity().unwrap();
        engine.try_close().unwrap();
        machine.assert_clean();
    }
}

#[test]
fn a_layer_is_read_before_the_next_one_has_come() {
    for devices in [1, 2] {
        let mut entered = Entered::new(devices, Duration::from_secs(60));
        let step = entered.stage();
        for layer in 0..LAYERS {
            entered.tier.deliver(layer, layer + 1);
            entered.wait(layer..layer + 1);
            entered.check_layer(layer);
            let loading = entered.engine.cache.commit(
                &mut entered.sequence,
                step.number(),
                Tokens::Named { count: 1, names: &[] },
            );
            let refused = loading.unwrap_err();
            let CommitError::Sequence(SequenceError::Loading { .. }) = refused else {
                panic!("{refused:?}");
            };
        }
        entered.tier.end();
        entered.engine.cache.finish_step(step).unwrap();
        assert!(!entered.engine.cache.loads_layers());
        // The step is complete before anybody asks what became of the loads.
        entered.engine.drain().unwrap();
        assert_eq!(entered.commit(), Committed::Taken);
        (0..LAYERS).for_each(|layer| entered.check_layer(layer));
        entered.idle();
        let stats = entered.engine.cache.manager().lower_stats();
        assert_eq!((stats.entered, stats.redone, stats.open_tickets), (1, 0, 0), "{stats:?}");
        entered.close();
    }
}

#[test]
fn a_load_that_does_not_come_is_late_and_sets_back_who_reads_it() {
    let mut entered = Entered::new(1, Duration::from_millis(20));
    let step = entered.stage();
    entered.tier.deliver(0, 1);
    // Nothing more comes; no call hangs.
    entered.wait(0..LAYERS);
    entered.engine.cache.finish_step(step).unwrap();
    assert_eq!(entered.commit(), Committed::Redo { from: 0 });
    let mut late = entered.tier.held.lock().unwrap().pop().unwrap();
    assert_eq!(late.write_at(0, &[1; 8]), Err(BlockFault::Fenced), "it was given up");
    drop(late);
    entered.idle();
    let stats = entered.engine.cache.manager().lower_stats();
    assert_eq!((stats.redone, stats.faults[BlockFault::Late.index()]), (1, 3), "{stats:?}");
    assert_eq!((stats.open_tickets, stats.names[0] >= 3), (0, true), "what is late is there");
    entered.close();
}

#[test]
fn a_step_whose_layers_were_not_waited_for_has_failed() {
    let mut entered = Entered::new(1, Duration::from_secs(60));
    let step = entered.stage();
    entered.tier.deliver(0, LAYERS);
    entered.tier.end();
    entered.wait(1..LAYERS);
    // Nobody has waited for layer 0.
    entered.engine.cache.finish_step(step).unwrap();
    entered.engine.drain().unwrap();
    assert_eq!(entered.engine.decided().failed_steps, 1);
    // What was loaded is right, and is not computed again.
    assert_eq!(entered.commit(), Committed::Redo { from: 12 });
    (0..LAYERS).for_each(|layer| entered.check_layer(layer));
    entered.close();
}

#[test]
fn a_step_that_was_dropped_has_its_loads_all_the_same() {
    let mut entered = Entered::new(2, Duration::from_secs(60));
    let step = entered.stage();
    entered.tier.deliver(0, LAYERS);
    entered.tier.end();
    drop(step);
    entered.engine.drain().unwrap();
    assert_eq!(entered.commit(), Committed::Redo { from: 12 });
    (0..LAYERS).for_each(|layer| entered.check_layer(layer));
    entered.close();
}

#[test]
fn what_has_not_come_right_of_a_load_is_not_copied_to_its_readers_blocks() {
    for is_late in [false, true] {
        let wait_max = Duration::from_millis(if is_late { 20 } else { 60_000 });
        let mut entered = Entered::new(1, wait_max);
        let step = entered.stage();
        let mark = |index: usize| entered.fill(index, 0xEE);
        (0..3).for_each(mark);
        entered.tier.deliver(0, 1);
        entered.wait(0..1);
        entered.check_layer(0);
        // Nothing more comes of one block, or of any; host memory has content of others there.
        let failed = match is_late {
            true => None,
            false => {
                let block = entered.tier.held.lock().unwrap().remove(0);
                let failed = block.name();
                block.failed(BlockFault::Failed);
                entered.tier.deliver(1, LAYERS);
                Some(failed)
            }
        };
        entered.wait(1..LAYERS);
        let names = entered.prompt.hashes(4).into_iter().take(3).enumerate();
        for (index, _) in names.filter(|(_, name)| failed.is_none_or(|failed| failed == *name)) {
            let rest = entered.read(index).split_off(layer_bytes());
            assert!(rest.iter().all(|&byte| byte == 0xEE || is_late && byte == 0), "block {index}");
        }
        if !is_late {
            entered.tier.end();
        }
        entered.engine.cache.finish_step(step).unwrap();
        entered.engine.drain().unwrap();
        assert!(matches!(entered.commit(), Committed::Redo { .. }));
        drop(entered.tier.held.lock().unwrap().drain(..).collect::<Vec<_>>());
        entered.idle();
        entered.close();
    }
}
