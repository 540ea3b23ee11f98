//! Scenarios of a sequence's life: copies of blocks that others hold, suspension, chunks, drafts, failures, and
//! blocks that change their tenant. Many decide copies of several kinds about one block in one step.

use kv_plane::manager::BlockCopy;
use kv_plane::{GroupId, KvCacheOptions};
use kv_pool::{Tier, tenants::TenantId};

use super::engine::{Engine, Live, Prompt, options};
use super::scenarios::{Rig, Scenario};

pub(crate) const ALL: &[(&str, Scenario)] = &[
    (
        "a_fork_copies_the_block_that_both_would_write",
        a_fork_copies_the_block_that_both_would_write,
    ),
    ("a_suspended_fork_copies_what_comes_back", a_suspended_fork_copies_what_comes_back),
    ("a_fork_copies_what_has_just_come_back", a_fork_copies_what_has_just_come_back),
    ("a_fork_is_suspended_behind_its_copy", a_fork_is_suspended_behind_its_copy),
    ("suspended_under_its_work_and_back_at_once", suspended_under_its_work_and_back_at_once),
    ("suspended_and_its_blocks_taken", suspended_and_its_blocks_taken),
    ("suspended_twice_in_one_step", suspended_twice_in_one_step),
    ("prefetched_blocks_are_there", prefetched_blocks_are_there),
    ("tenants_find_their_blocks_empty", tenants_find_their_blocks_empty),
    ("what_comes_back_for_a_tenant_stays", what_comes_back_for_a_tenant_stays),
    ("a_failed_step_is_computed_again", a_failed_step_is_computed_again),
    ("prompts_are_computed_in_chunks", prompts_are_computed_in_chunks),
    ("rejected_drafts_are_written_over", rejected_drafts_are_written_over),
    ("decoding_runs_a_step_ahead", decoding_runs_a_step_ahead),
    ("a_cut_in_a_shared_block_leaves_it", a_cut_in_a_shared_block_leaves_it),
];

/// Copies of the last plan from one tier to another.
fn copies(engine: &Engine, from: Tier, to: Tier) -> Vec<BlockCopy> {
    let copies = engine.cache.manager().last_plan().copies.iter();
    copies.filter(|copy| (copy.from.tier, copy.to.tier) == (from, to)).copied().collect()
}

fn a_fork_copies_the_block_that_both_would_write(rig: &Rig) {
    let mut engine = rig.engine(24, 0);
    let bt = rig.block_tokens();
    let mut first = engine.computed(&Prompt::new(1, 2 * bt + 2));
    let mut twins: Vec<Live> = (0..3).map(|_| engine.fork(&mut first).unwrap()).collect();
    for live in &twins {
        assert_eq!(live.sequence.block(GroupId(0), 2), first.sequence.block(GroupId(0), 2));
    }
    for step in 0..bt as u32 {
        for (twin, live) in (0..).zip(twins.iter_mut().chain([&mut first])) {
            engine.extend(live, 100 * twin + step, 1).unwrap();
        }
        let mut all: Vec<&mut Live> = twins.iter_mut().chain([&mut first]).collect();
        engine.run(&mut all).unwrap();
        // The last one to write it has it alone.
        let copied = copies(&engine, Tier::Primary, Tier::Primary);
        assert_eq!(copied.len(), if step == 0 { 3 } else { 0 });
        assert!(copied.iter().all(|copy| copy.tokens == 2));
    }
    assert_eq!(engine.decided().copied_on_write, 3);
    drop((first, twins));
    engine.close();
}

fn a_suspended_fork_copies_what_comes_back(rig: &Rig) {
    let mut engine = rig.engine(12, 40);
    let bt = rig.block_tokens();
    let mut first = engine.computed(&Prompt::new(1, 3 * bt + 2));
    engine.suspend(&mut first).unwrap();
    engine.drain().unwrap();
    // Others take all blocks, and leave them full.
    engine.serve(&rig.prompt(2, 11));
    assert_eq!(engine.resume(&mut first).unwrap().given().unwrap(), 3 * bt + 2);
    let mut twin = engine.fork(&mut first).unwrap();
    engine.extend(&mut first, 3, 1).unwrap();
    engine.extend(&mut twin, 4, 1).unwrap();
    engine.run(&mut [&mut first, &mut twin]).unwrap();
    // The copy's source has just come back, and what was in its place is on its way out.
    let within = copies(&engine, Tier::Primary, Tier::Primary);
    let [copy] = within[..] else { panic!("{within:?}") };
    let back = copies(&engine, Tier::Secondary, Tier::Primary);
    assert!(back.iter().any(|back| back.to == copy.from), "{back:?}, {copy:?}");
    let out = copies(&engine, Tier::Primary, Tier::Secondary);
    assert!(out.iter().any(|out| out.from == copy.to), "{out:?}, {copy:?}");
    engine.run(&mut [&mut twin, &mut first]).unwrap();
    drop((first, twin));
    engine.drain().unwrap();
    engine.serve(&rig.prompt(2, 11));
    engine.close();
}

/// The same with room for all, so that nothing else orders the two copies.
fn a_fork_copies_what_has_just_come_back(rig: &Rig) {
    let mut engine = rig.engine(24, 16);
    let bt = rig.block_tokens();
    let mut first = engine.computed(&Prompt::new(1, bt + 2));
    engine.suspend(&mut first).unwrap();
    engine.serve(&Prompt::new(2, 3));
    engine.resume(&mut first).unwrap().given().unwrap();
    let mut twin = engine.fork(&mut first).unwrap();
    engine.extend(&mut twin, 4, 1).unwrap();
    engine.extend(&mut first, 3, 1).unwrap();
    engine.run(&mut [&mut twin, &mut first]).unwrap();
    let within = copies(&engine, Tier::Primary, Tier::Primary);
    let [copy] = within[..] else { panic!("{within:?}") };
    let back = copies(&engine, Tier::Secondary, Tier::Primary);
    assert!(back.iter().any(|back| back.to == copy.from), "{back:?}, {copy:?}");
    drop((first, twin));
    engine.close();
}

fn a_fork_is_suspended_behind_its_copy(rig: &Rig) {
    let mut engine = rig.engine(16, 16);
    let bt = rig.block_tokens();
    let mut first = engine.computed(&Prompt::new(1, bt + 2));
    engine.drain().unwrap();
    let mut twin = engine.fork(&mut first).unwrap();
    engine.extend(&mut twin, 2, 1).unwrap();
    engine.reserve(&mut twin).unwrap().given().unwrap();
    // It goes with the block that is copied in the same step.
    engine.suspend(&mut twin).unwrap();
    engine.run(&mut [&mut first]).unwrap();
    let within = copies(&engine, Tier::Primary, Tier::Primary);
    let [copy] = within[..] else { panic!("{within:?}") };
    let out = copies(&engine, Tier::Primary, Tier::Secondary);
    assert!(out.iter().any(|out| out.from == copy.to), "{out:?}, {copy:?}");
    engine.drain().unwrap();
    engine.resume(&mut twin).unwrap().given().unwrap();
    engine.run(&mut [&mut first, &mut twin]).unwrap();
    drop((first, twin));
    engine.close();
}

fn suspended_under_its_work_and_back_at_once(rig: &Rig) {
    for rounds in [1, 3] {
        let mut engine = rig.engine(16, 16);
        let bt = rig.block_tokens();
        let mut live = engine.computed(&Prompt::new(1, 2 * bt + 1));
        for round in 0..rounds {
            // The devices have yet to write what is copied.
            engine.suspend(&mut live).unwrap();
            assert_eq!(engine.resume(&mut live).unwrap().given().unwrap(), 2 * bt + 1 + round);
            engine.run(&mut [&mut live]).unwrap();
            let plan = engine.cache.manager().last_plan();
            assert!(plan.copies.iter().any(|copy| copy.written_by > 0), "{plan:?}");
            assert_eq!(copies(&engine, Tier::Secondary, Tier::Primary).len(), 1);
        }
        drop(live);
        engine.close();
    }
}

fn suspended_and_its_blocks_taken(rig: &Rig) {
    let mut engine = rig.engine(8, 24);
    let bt = rig.block_tokens();
    let mut first = engine.computed(&Prompt::new(1, 6 * bt + 2));
    for seed in 2..5 {
        let end = first.sequence.resolved();
        engine.drain().unwrap();
        engine.suspend(&mut first).unwrap();
        // Its blocks go to another in the same step, whose work overwrites them.
        let other = engine.computed(&Prompt::new(seed, 7 * bt + 1));
        assert!(copies(&engine, Tier::Primary, Tier::Secondary).len() >= 6);
        drop(other);
        engine.drain().unwrap();
        assert_eq!(engine.resume(&mut first).unwrap().given().unwrap(), end);
        engine.run(&mut [&mut first]).unwrap();
    }
    drop(first);
    engine.close();
}

fn suspended_twice_in_one_step(rig: &Rig) {
    let mut engine = rig.engine(12, 24);
    let bt = rig.block_tokens();
    let mut live = engine.computed(&Prompt::new(1, 2 * bt + 1));
    engine.drain().unwrap();
    for _ in 0..3 {
        // Out, back, and out again: each copy reads what the one before it has written.
        engine.suspend(&mut live).unwrap();
        engine.resume(&mut live).unwrap().given().unwrap();
        engine.suspend(&mut live).unwrap();
        let other = engine.computed(&Prompt::new(9, bt + 1));
        assert_eq!(copies(&engine, Tier::Primary, Tier::Secondary).len(), 2);
        drop(other);
        engine.drain().unwrap();
        engine.resume(&mut live).unwrap().given().unwrap();
        engine.run(&mut [&mut live]).unwrap();
        engine.drain().unwrap();
    }
    drop(live);
    engine.close();
}

fn prefetched_blocks_are_there(rig: &Rig) {
    let mut engine = rig.engine(16, 32);
    let bt = rig.block_tokens();
    let wanted = rig.prompt(1, 6);
    engine.serve(&wanted);
    engine.serve(&rig.prompt(2, 15));
    // One block is without content: nothing is brought back that would evict other content.
    assert_eq!(engine.cache.prefetch(&wanted.hashes(bt)).unwrap(), 1);
    engine.cache.forget(&rig.prompt(2, 15).hashes(bt));
    let fetched = 1 + engine.cache.prefetch(&wanted.hashes(bt)).unwrap();
    assert!(fetched > 3, "{fetched}");
    // Another runs meanwhile.
    let mut other = engine.computed(&Prompt::new(3, 3));
    assert_eq!(copies(&engine, Tier::Secondary, Tier::Primary).len(), fetched);
    let mut live = engine.admit(&wanted).unwrap();
    let found = (live.sequence.cached_tokens(), live.sequence.onboarded_blocks());
    assert_eq!(found, (6 * bt, 0));
    engine.run(&mut [&mut other, &mut live]).unwrap();
    drop((live, other));
    engine.close();
}

/// An engine of two tenants, whose blocks are overwritten with zeros between them.
fn with_tenants(rig: &Rig, device_blocks: u32, host_blocks: u32) -> (Engine, [TenantId; 2]) {
    let options = options(rig.shape, device_blocks, host_blocks);
    let mut engine = rig.engine_with(KvCacheOptions { scrubs: true, ..options });
    let tenants = [1, 2].map(|_| engine.cache.add_tenant().unwrap());
    (engine, tenants)
}

fn tenants_find_their_blocks_empty(rig: &Rig) {
    // Without a host tier, and with one to which what was there goes in the same step.
    for host_blocks in [0, 24] {
        let (mut engine, [one, two]) = with_tenants(rig, 8, host_blocks);
        for (seed, tenant) in [(1, one), (2, two), (3, one), (4, two)] {
            let mut live = engine.admit_as(&rig.prompt(seed, 7), tenant).unwrap();
            let scrubbed = engine.decided().scrubbed_blocks;
            assert_eq!(scrubbed, 8 * (u64::from(seed) - 1));
            if scrubbed > 0 {
                assert_eq!(engine.count_written(&mut live), 0, "bytes of another tenant");
            }
            engine.end(live);
        }
        // Its own are as it has left them.
        let live = engine.admit_as(&rig.prompt(4, 7), two).unwrap();
        assert_eq!(live.sequence.cached_tokens(), 7 * rig.block_tokens());
        drop(live);
        engine.close();
    }
}

fn what_comes_back_for_a_tenant_stays(rig: &Rig) {
    let (mut engine, [one, two]) = with_tenants(rig, 8, 32);
    for round in 0..4 {
        for (seed, tenant) in [(1, one), (2, two)] {
            let live = engine.admit_as(&rig.prompt(seed, 7), tenant).unwrap();
            let cached = if round == 0 { 0 } else { 7 * rig.block_tokens() };
            assert_eq!(live.sequence.cached_tokens(), cached);
            engine.end(live);
        }
    }
    assert!(engine.decided().scrubbed_blocks > 20 && engine.decided().onboarded_blocks > 20);
    engine.close();
}

fn a_failed_step_is_computed_again(rig: &Rig) {
    let mut engine = rig.engine(40, 16);
    let bt = rig.block_tokens();
    let mut first = engine.admit(&Prompt::new(1, 2 * bt + 2)).unwrap();
    for round in 0..3 {
        let step = engine.begin().unwrap();
        engine.enqueue_without_end(&step, &mut [&mut first]).unwrap();
        // One that reads what the step computes is set back with it.
        let mut other = engine.admit(&first.prompt.then(7 + round, 1)).unwrap();
        drop(step);
        engine.run(&mut [&mut first, &mut other]).unwrap();
        drop(other);
        engine.extend(&mut first, round, bt).unwrap();
    }
    assert!(engine.redone >= 6, "{}", engine.redone);
    engine.end(first);
    engine.close();
}

fn prompts_are_computed_in_chunks(rig: &Rig) {
    let bt = rig.block_tokens();
    for chunk in [1, bt - 1, bt, bt + 1, 3 * bt] {
        let mut engine = rig.engine(24, 0);
        engine.chunk = chunk;
        let (long, short) = (Prompt::new(1, 3 * bt + 2), Prompt::new(1, 2 * bt + 1));
        let mut lives = vec![engine.admit(&long).unwrap()];
        while lives.iter().any(|live| live.sequence.to_compute() > 0) {
            engine.run(&mut lives.iter_mut().collect::<Vec<_>>()).unwrap();
            if lives.len() == 1 {
                // Finds the full blocks so far.
                lives.push(engine.admit(&short).unwrap());
                let cached = lives[1].sequence.cached_tokens();
                assert_eq!(cached, (chunk.min(long.len()) / bt * bt).min(2 * bt));
            }
        }
        drop(lives);
        engine.close();
    }
}

fn rejected_drafts_are_written_over(rig: &Rig) {
    let mut engine = rig.engine(32, 0);
    let bt = rig.block_tokens();
    let mut lives = [1, 2].map(|seed| engine.admit(&Prompt::new(seed, bt - 1)).unwrap());
    engine.run(&mut lives.each_mut()).unwrap();
    for round in 0..2 * bt {
        for (index, live) in lives.iter_mut().enumerate() {
            let before = live.prompt.len();
            engine.draft(live, round as u32, 3).unwrap();
            assert_eq!(live.prompt.len() - before, u64::from(round == 0));
            assert_eq!(live.sequence.awaits(), None, "request {index}");
        }
        engine.run(&mut lives.each_mut()).unwrap();
        for (index, live) in lives.iter_mut().enumerate() {
            let before = live.sequence.resolved();
            let accepted = (round + index as u64) % 4;
            engine.accept(live, accepted as usize, 50 + round as u32).unwrap();
            assert_eq!(live.sequence.resolved(), before + accepted);
        }
    }
    // What was cached of it holds no rejected token.
    let whole = lives[0].prompt.clone();
    drop(lives);
    engine.drain().unwrap();
    let live = engine.admit(&whole).unwrap();
    assert!(live.sequence.cached_tokens() + 2 * bt > whole.len());
    engine.end(live);
    engine.close();
}

fn decoding_runs_a_step_ahead(rig: &Rig) {
    let mut engine = rig.engine(32, 0);
    let bt = rig.block_tokens();
    let mut lives = [1, 2, 3].map(|seed| engine.admit(&Prompt::new(seed, 3)).unwrap());
    engine.run(&mut lives.each_mut()).unwrap();
    let mut open = 0;
    for step in 0..3 * bt as u32 {
        for live in &mut lives {
            engine.decode_ahead(live, step).unwrap();
            open += u64::from(live.sequence.known() < live.prompt.len());
        }
        engine.run(&mut lives.each_mut()).unwrap();
    }
    assert!(open > 3 * bt, "{open} tokens were computed before they were known");
    drop(lives);
    engine.close();
}

fn a_cut_in_a_shared_block_leaves_it(rig: &Rig) {
    let mut engine = rig.engine(24, 0);
    let bt = rig.block_tokens();
    let prompt = Prompt::new(1, 3 * bt + 1);
    let mut lives = vec![engine.admit(&prompt).unwrap()];
    engine.run(&mut lives.iter_mut().collect::<Vec<_>>()).unwrap();
    lives.push(engine.admit(&prompt).unwrap());
    for (round, tokens) in (0..).zip([3 * bt - 1, 2 * bt + 2, bt, 1]) {
        engine.truncate(&mut lives[0], tokens).unwrap();
        engine.extend(&mut lives[0], 20 + round, bt).unwrap();
        engine.run(&mut lives.iter_mut().collect::<Vec<_>>()).unwrap();
    }
    assert!(engine.decided().copied_on_write >= 3);
    drop(lives);
    engine.close();
}
