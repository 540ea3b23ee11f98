//! Host memory that is pinned in the background, used as it comes, and given back by a budget.

use std::sync::Condvar;

use cuda_driver::CloseError;

use crate::prelude::*;

/// Blocks of a slab.
const PER_SLAB: u64 = 4;

/// Eight device blocks and `host_blocks` host blocks, in slabs of four.
fn background(host_blocks: u32, threads: u32) -> KvCacheOptions {
    let pinning = HostPinning { threads, slab_bytes_max: PER_SLAB * small().block_bytes() };
    KvCacheOptions { pinning, ..options(small(), 8, host_blocks) }
}

/// Holds back registrations, but for the first few.
#[derive(Clone, Default)]
struct Gate {
    /// Registrations begun, and those let through.
    state: Arc<(Mutex<(u64, u64)>, Condvar)>,
}

impl Gate {
    /// A machine on which none of a cache's threads ends a registration.
    fn shut() -> (Self, Machine) {
        let gate = Self::default();
        let sim = sim(config());
        let at = gate.clone();
        let counting = CountingDriver::watched(Arc::new(sim.clone()), move |call| {
            // Staging buffers are registered by the thread that makes the cache.
            let pins = std::thread::current().name() == Some("kv-stage-pin");
            if call == "cuMemHostRegister" && pins {
                at.pass();
            }
        });
        let rig = rig(&(Arc::new(counting) as Arc<dyn Driver>), 1, small());
        (gate, Machine { sim, rig })
    }

    fn pass(&self) {
        let (state, changed) = &*self.state;
        let mut state = state.lock().unwrap();
        let own = state.0;
        state.0 += 1;
        while own >= state.1 {
            state = changed.wait(state).unwrap();
        }
    }

    fn let_through(&self, count: u64) {
        let (state, changed) = &*self.state;
        state.lock().unwrap().1 = count;
        changed.notify_all();
    }
}

/// Serves four full blocks and a bit; how many of the tokens were cached.
fn serve(engine: &mut Engine, seed: u32) -> u64 {
    engine.serve(&Prompt::new(seed, 17)).0
}

/// Runs steps until `blocks` host blocks are usable.
fn wait_for(engine: &mut Engine, blocks: u64) {
    while engine.cache.stats().host_blocks < blocks {
        engine.empty_step();
        std::thread::yield_now();
    }
    assert_eq!(engine.cache.stats().host_blocks, blocks);
}

/// Serves prompts that nobody has asked for, and then the latest ones again; blocks that came back from the
/// host.
fn offload_and_onboard(engine: &mut Engine, first: u32) -> u64 {
    let before = engine.decided().onboarded_blocks;
    (first..first + 10).for_each(|seed| assert_eq!(serve(engine, seed), 0));
    for seed in (first..first + 10).rev() {
        serve(engine, seed);
    }
    engine.decided().onboarded_blocks - before
}

/// Runs steps until no more than `bytes` bytes are pinned.
fn give_back_until(machine: &Machine, engine: &mut Engine, bytes: u64) {
    // A thread frees some; how soon is its own affair, so that only a thread that never does ends this early.
    let hung = Instant::now() + Duration::from_secs(20);
    while machine.sim.pinned_bytes() > bytes && Instant::now() < hung {
        serve(engine, 7);
        machine.rig.devices[0].free_retired().unwrap();
        std::thread::yield_now();
    }
    assert_eq!(machine.sim.pinned_bytes(), bytes);
}

fn cached_on_host(engine: &Engine) -> u64 {
    engine.pool().stats().secondary.cached
}

#[test]
fn steps_use_host_blocks_as_they_are_pinned() {
    for choice in [TransportChoice::Quickest, TransportChoice::EachBlock] {
        let (gate, machine) = Gate::shut();
        let mut engine = machine.rig.engine_with(by(choice, background(32, 2)));
        assert_eq!(engine.cache.stats().host_blocks, 0, "the cache is there before the memory");
        // Nothing can be offloaded yet, and nothing waits for that.
        assert_eq!(offload_and_onboard(&mut engine, 0), 0);
        assert_eq!(engine.decided().offloaded_blocks, 0);
        for slabs in [1, 3] {
            gate.let_through(slabs);
            wait_for(&mut engine, slabs * PER_SLAB);
            // What leaves the device goes where there is memory, and comes back.
            assert!(offload_and_onboard(&mut engine, 100 * slabs as u32) > 0, "{choice}");
            assert_eq!(cached_on_host(&engine), slabs * PER_SLAB, "{choice}");
        }
        gate.let_through(u64::MAX);
        wait_for(&mut engine, 32);
        assert!(offload_and_onboard(&mut engine, 1000) > 0);
        engine.assert_intact();
        machine.close(engine);
    }
}

#[test]
fn devices_pin_their_own_memory_and_use_what_all_have() {
    for threads in [0, 1, 4] {
        let (machine, mut engine) = Machine::with_engine(1, 2, background(30, threads));
        wait_for(&mut engine, 30);
        assert!(offload_and_onboard(&mut engine, 0) > 0);
        engine.assert_intact();
        machine.close(engine);
    }
}

#[test]
fn a_refusal_leaves_the_host_blocks_before_it_and_is_told_once() {
    for nth in 1..=4 {
        let (gate, machine) = Gate::shut();
        let mut engine = machine.rig.engine_with(background(16, 3));
        machine.sim.fail_nth("cuMemHostRegister", nth, ErrorCode::OUT_OF_MEMORY);
        gate.let_through(u64::MAX);
        let refused = loop {
            engine.empty_step();
            if let Some(refused) = engine.cache.take_host_refusal() {
                break refused;
            }
            std::thread::yield_now();
        };
        assert!(refused.is_out_of_memory());
        assert_eq!(engine.cache.take_host_refusal(), None);
        let usable = (nth - 1) * PER_SLAB;
        wait_for(&mut engine, usable);
        offload_and_onboard(&mut engine, 0);
        assert_eq!(cached_on_host(&engine), usable);
        // Another try.
        engine.cache.set_budget(GroupId(0), Tier::Secondary, 16).unwrap();
        assert_eq!(engine.cache.wait_for_host(), Ok(16));
        assert!(offload_and_onboard(&mut engine, 500) > 0);
        engine.assert_intact();
        machine.close(engine);
    }
}

#[test]
fn a_cache_that_goes_while_its_host_memory_is_pinned_leaves_nothing() {
    for closes in [true, false] {
        let (gate, machine) = Gate::shut();
        let mut engine = machine.rig.engine_with(background(64, 2));
        gate.let_through(3);
        wait_for(&mut engine, 3 * PER_SLAB);
        serve(&mut engine, 1);
        let open = gate.clone();
        let opener = std::thread::spawn(move || open.let_through(u64::MAX));
        match closes {
            true => engine.close(),
            false => drop(engine),
        }
        opener.join().unwrap();
        let Machine { sim, rig } = machine;
        for mut device in rig.devices {
            while let Err(CloseError::InUse { device: same, alive }) = device.close() {
                assert!(!closes, "{alive} after the cache was closed");
                device = same;
                std::thread::yield_now();
            }
        }
        assert!(sim.findings().is_empty(), "{:?}", sim.findings());
        assert!(sim.check_leaks().is_clean(), "{}", sim.check_leaks());
    }
}

#[test]
fn host_memory_beyond_a_budget_goes_when_nothing_uses_it_and_comes_back() {
    for choice in [TransportChoice::Quickest, TransportChoice::EachBlock] {
        for threads in [0, 2] {
            let (machine, mut engine) =
                Machine::with_engine(2, 1, by(choice, background(32, threads)));
            wait_for(&mut engine, 32);
            let all = machine.sim.pinned_bytes();
            (0..11).for_each(|seed| assert_eq!(serve(&mut engine, seed), 0));
            assert_eq!(cached_on_host(&engine), 32);
            let budgeted = engine.cache.set_budget(GroupId(0), Tier::Secondary, 10).unwrap();
            assert_eq!((budgeted.in_use, engine.cache.stats().host_blocks), (0, 10));
            // Steps give back all slabs without a block below the budget.
            let slab_bytes = PER_SLAB * small().block_bytes();
            give_back_until(&machine, &mut engine, all - 5 * slab_bytes);
            assert!(offload_and_onboard(&mut engine, 100) > 0, "{choice}");
            assert_eq!(cached_on_host(&engine), 10);
            engine.cache.set_budget(GroupId(0), Tier::Secondary, 32).unwrap();
            wait_for(&mut engine, 32);
            assert!(offload_and_onboard(&mut engine, 200) > 0, "{choice}");
            assert_eq!(machine.sim.pinned_bytes(), all);
            let more = engine.cache.set_budget(GroupId(0), Tier::Secondary, 33);
            assert!(more.is_err(), "{more:?}");
            engine.cache.set_budget(GroupId(0), Tier::Secondary, 0).unwrap();
            serve(&mut engine, 300);
            assert_eq!(offload_and_onboard(&mut engine, 400), 0);
            engine.assert_intact();
            machine.close(engine);
        }
    }
}

#[test]
fn host_blocks_in_use_keep_their_memory_beyond_a_budget() {
    for choice in [TransportChoice::Quickest, TransportChoice::EachBlock] {
        let (machine, mut engine) = Machine::with_engine(3, 1, by(choice, background(32, 1)));
        wait_for(&mut engine, 32);
        let all = machine.sim.pinned_bytes();
        // The blocks of the prompts before take the first slabs.
        for seed in 0..5 {
            serve(&mut engine, seed);
        }
        let mut live = engine.computed(&Prompt::new(50, 17));
        engine.suspend(&mut live).unwrap();
        let budgeted = engine.cache.set_budget(GroupId(0), Tier::Secondary, 1).unwrap();
        assert!(budgeted.in_use > 0, "{budgeted:?}");
        engine.idle().unwrap();
        for seed in 20..25 {
            serve(&mut engine, seed);
        }
        engine.resume(&mut live).unwrap().given().unwrap();
        engine.end(live);
        // One slab is left then.
        let left = all - 7 * PER_SLAB * small().block_bytes();
        give_back_until(&machine, &mut engine, left);
        machine.close(engine);
    }
}

/// A plan that copies one block.
fn plan(step: u64, from: (Tier, usize), to: (Tier, usize)) -> StepPlan {
    let [from, to] =
        [from, to].map(|(tier, id)| Location { tier, id: BlockId::new(id as u32).unwrap() });
    let tokens = small().block_tokens();
    let copy = BlockCopy { group: GroupId(0), from, to, tokens, written_by: 0 };
    StepPlan { step, after: step - 1, copies: vec![copy], ..StepPlan::default() }
}

#[test]
fn a_plan_of_another_process_waits_for_the_host_memory_that_it_names() {
    for refused in [false, true] {
        let (gate, machine) = Gate::shut();
        let mut told = Told::new(machine, background(16, 1));
        told.worker.grow_to(8).unwrap();
        let paged = told.worker.parts()[0].paged();
        let [first, second] = [0, 1].map(|block| paged.block_span(block).unwrap().unwrap());
        told.streams[0].fill(first, 9).unwrap();
        told.streams[0].fill(second, 0).unwrap();
        told.streams[0].synchronize().unwrap();
        assert_eq!((told.worker.host_blocks(GroupId(0)), told.worker.poll_host()), (0, Ok(0)));
        if refused {
            told.machine.sim.fail_nth("cuMemHostRegister", 3, ErrorCode::OUT_OF_MEMORY);
        }
        let open = gate.clone();
        let opener = std::thread::spawn(move || open.let_through(u64::MAX));
        let out = plan(1, (Tier::Primary, 0), (Tier::Secondary, 13));
        let carried = told.carry_out(&out);
        opener.join().unwrap();
        if refused {
            // Nothing was carried out, which the worker's process tells from a step that has failed.
            let Err(StepError::Plan(error)) = carried else { panic!("{carried:?}") };
            let tier = Tier::Secondary;
            assert_eq!(error, PlanError::Block { step: 1, tier, id: BlockId::from(13), blocks: 8 });
            told.worker.finish(Outcome::Failed).unwrap();
            assert_eq!(told.worker.wait().unwrap(), None);
        } else {
            carried.unwrap();
            told.worker.finish(Outcome::Done).unwrap();
            let back = plan(2, (Tier::Secondary, 13), (Tier::Primary, 1));
            told.finish(&back);
            while told.worker.wait().unwrap().is_some() {}
            assert!(read(&told.streams[0], second).iter().all(|&byte| byte == 9));
        }
        told.close();
    }
}
