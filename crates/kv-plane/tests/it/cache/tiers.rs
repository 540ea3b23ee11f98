//! Tiers below host memory: every byte that comes back is right, whatever the tier does.

use crate::prelude::*;

/// A cache of 12 blocks on the device and 10 in host memory, over tiers with these faults.
fn over_tiers(faults: &[FaultRules], clock: &ManualClock) -> KvCacheOptions {
    let mut tiers = LowerTiers::new(b"a model");
    let wait_max = Duration::from_millis(50);
    tiers.rules = LowerOptions { wait_max, stores_open_max: 4, ..LowerOptions::default() };
    for &faults in faults {
        let clock = clock.clone();
        tiers.push(move || {
            let clock = Arc::new(clock.clone());
            let records_max = 200;
            let latency = Duration::from_millis(5);
            let load_pieces = 3;
            let options = MemoryTierOptions { records_max, latency, clock, load_pieces, faults };
            Box::new(MemoryTier::new(options))
        });
    }
    let pool = PoolRules { clock: Some(Arc::new(clock.clone())), ..PoolRules::default() };
    KvCacheOptions { tiers, pool, ..options(small(), 12, 10) }
}

/// Serves eight prompts in turn, of which the caches hold three, and checks all that is read.
fn serve(engine: &mut Engine, clock: &ManualClock, rounds: u32) -> LowerStats {
    for round in 0..rounds {
        for seed in 0..8 {
            let prompt = Prompt::new(seed, 4 * 4 + 2);
            clock.advance(Duration::from_millis(1));
            let admitted = engine.admit_loaded(&prompt);
            let (mut live, _) = admitted.unwrap_or_else(|error| panic!("round {round}: {error}"));
            engine.run(&mut [&mut live]).unwrap();
            engine.run(&mut [&mut live]).unwrap();
            engine.drain().unwrap();
            drop(live);
            clock.advance(Duration::from_millis(3));
            engine.idle().unwrap();
            if engine.clock.is_none() {
                // The tier has a thread, which this one would leave behind.
                end_tickets(engine, clock);
            }
        }
    }
    let stats = end_tickets(engine, clock);
    engine.assert_intact();
    assert_eq!((stats.ticket_blocks, stats.quarantined_blocks), (0, 0));
    stats
}

/// Waits until all tickets have ended.
fn end_tickets(engine: &mut Engine, clock: &ManualClock) -> LowerStats {
    let begun = Instant::now();
    loop {
        let stats = engine.cache.manager().lower_stats();
        if stats.open_tickets == 0 {
            return stats;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "tickets do not end: {stats:?}");
        if engine.clock.is_some() {
            clock.advance(Duration::from_millis(5));
        }
        std::thread::yield_now();
        engine.idle().unwrap();
    }
}

/// A machine on which time passes while a request waits.
fn play(choice: TransportChoice, devices: u32, faults: &[FaultRules]) -> LowerStats {
    let machine = Machine::new(7, devices, small());
    let clock = ManualClock::new();
    let mut engine = machine.rig.engine_with(by(choice, over_tiers(faults, &clock)));
    engine.clock = Some(clock.clone());
    let stats = serve(&mut engine, &clock, 4);
    machine.close(engine);
    stats
}

#[test]
fn blocks_come_back_from_below_by_every_way_and_on_two_devices() {
    for choice in TransportChoice::ALL {
        for devices in [1, 2] {
            let stats = play(choice, devices, &[FaultRules::default()]);
            assert!(stats.loaded_blocks[0] > 20, "{choice} on {devices}: {stats:?}");
            assert_eq!((stats.faults, stats.late), ([0; 7], 0), "{choice} on {devices}");
        }
    }
}

#[test]
fn no_fault_of_a_tier_reaches_a_sequence() {
    let mut faults = [0; 7];
    for seed in 1..=20 {
        let rules = FaultRules { late_polls_max: 4, ..FaultRules::all(seed) };
        let stats = play(TransportChoice::Quickest, 1 + (seed % 2) as u32, &[rules]);
        assert!(stats.loaded_blocks[0] > 0, "{stats:?}");
        faults.iter_mut().zip(stats.faults).for_each(|(all, here)| *all += here);
    }
    let [missing, failed, short, checksum, foreign, ..] = faults;
    assert!(missing > 0 && failed > 0 && short > 0 && checksum > 0 && foreign > 0, "{faults:?}");
}

#[test]
fn a_store_begins_when_the_copies_of_its_blocks_are_complete() {
    let machine = Machine::new(7, 1, small());
    // The devices run only what the host waits for.
    machine.sim.set_pace(Pace::Slowest);
    let clock = ManualClock::new();
    let mut options = over_tiers(&[], &clock);
    options.tiers.push(|| Box::new(MemoryTier::new(MemoryTierOptions::default())));
    let mut engine = machine.rig.engine_with(options);
    let prompt = Prompt::new(1, 3 * 4 + 2);
    drop(engine.computed(&prompt));
    let stored = |engine: &Engine| engine.cache.manager().lower_stats().stored_blocks[0];
    engine.drain().unwrap();
    let step = engine.begin().unwrap();
    engine.cache.stage(&step, &mut []).unwrap();
    engine.cache.finish_step(step).unwrap();
    let plan = engine.cache.manager().last_plan();
    assert_eq!((plan.copies.len(), plan.transfers.len()), (3, 1), "{plan:?}");
    let copies = plan.step;
    // One step may be in flight, the one with the copies. The tier stores in the call that begins the store.
    let step = engine.begin().unwrap();
    assert!(engine.cache.manager().completed_step() < copies);
    assert_eq!(stored(&engine), 0, "what is being copied was stored");
    engine.cache.finish_step(step).unwrap();
    end_tickets(&mut engine, &clock);
    assert_eq!(stored(&engine), 3);
    // Everything leaves the device and the host, and comes back as it was.
    for seed in 2..9 {
        let other = engine.computed(&Prompt::new(seed, 10 * 4));
        drop(other);
        engine.idle().unwrap();
        end_tickets(&mut engine, &clock);
    }
    let (live, waited) = engine.admit_loaded(&prompt).unwrap();
    assert!(waited > 0 && live.sequence.cached_tokens() == 12, "{live:?}");
    engine.end(live);
    engine.assert_intact();
    machine.close(engine);
}

#[test]
fn what_one_tier_loses_the_next_one_has() {
    let loses = FaultRules { seed: 3, loses: 60, ..FaultRules::default() };
    let stats = play(TransportChoice::Quickest, 1, &[loses, FaultRules::default()]);
    assert!(stats.loaded_blocks[0] > 0 && stats.loaded_blocks[1] > 0, "{stats:?}");
    assert!(stats.faults[0] > 0, "{stats:?}");
}

#[test]
fn a_tier_in_a_thread_of_its_own_brings_the_same() {
    let machine = Machine::new(7, 1, small());
    let clock = ManualClock::new();
    let mut options = over_tiers(&[], &clock);
    options.tiers.push(|| {
        let tier = MemoryTier::new(MemoryTierOptions::default());
        Box::new(Background::new(tier).unwrap())
    });
    let mut engine = machine.rig.engine_with(options);
    let stats = serve(&mut engine, &clock, 4);
    assert!(stats.loaded_blocks[0] > 20, "{stats:?}");
    machine.close(engine);
}
