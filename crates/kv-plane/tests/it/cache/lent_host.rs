//! Host blocks that are lent to readers, while the cache goes on.

use kv_plane::tier::{HostLoan, HostShare, check_record};

use crate::prelude::*;

/// Full blocks of a prompt.
const FULL: usize = 4;

fn prompt(seed: u32) -> Prompt {
    Prompt::new(seed, FULL as u64 * 4 + 1)
}

fn names(seed: u32) -> Vec<(GroupId, BlockHash)> {
    prompt(seed).hashes(4).into_iter().map(|name| (GroupId(0), name)).collect()
}

/// The bytes of each block, by name, as its devices had them.
type Contents = HashMap<BlockHash, Vec<u8>>;

/// Computes a prompt, and keeps what its blocks are.
fn serve(engine: &mut Engine, seed: u32, contents: &mut Contents) {
    let live = engine.computed(&prompt(seed));
    engine.drain().unwrap();
    for (place, (_, name)) in names(seed).into_iter().enumerate() {
        let block = live.sequence.block(GroupId(0), place).unwrap();
        let mut bytes = Vec::new();
        for part in engine.cache.parts() {
            let span = part.paged().block_span(block.index() as u64).unwrap().unwrap();
            let from = bytes.len();
            bytes.resize(from + span.bytes() as usize, 0);
            part.compute().download(&mut bytes[from..], span).unwrap();
        }
        contents.insert(name, bytes);
    }
    drop(live);
    engine.drain().unwrap();
}

fn is_right(share: &HostShare, loan: &HostLoan, contents: &Contents) -> bool {
    loan.blocks().iter().enumerate().all(|(at, of)| {
        let mut bytes = vec![0; of.bytes];
        let read = share.read(of.address, &mut bytes);
        let header = loan.header(at).unwrap();
        let key = RecordKey { format: share.format(), group: of.group, name: of.name };
        read && contents[&of.name] == bytes && check_record(key, &header, &bytes).is_ok()
    })
}

/// Eight device blocks and 32 host blocks, four to a slab.
fn few(threads: u32) -> KvCacheOptions {
    let pinning = HostPinning { threads, slab_bytes_max: 4 * small().block_bytes() };
    KvCacheOptions { pinning, ..options(small(), 8, 32) }
}

#[test]
fn lent_blocks_have_the_bytes_of_their_names_by_every_way_and_on_two_devices() {
    for choice in TransportChoice::ALL {
        for devices in [1, 2] {
            let (machine, mut engine) = Machine::with_engine(5, devices, by(choice, few(0)));
            let (share, mut contents) = (engine.cache.share_host(), Contents::new());
            assert_eq!(share.block_bytes_max() as u64, small().block_bytes());
            let mut lent = 0;
            for seed in 0..12 {
                serve(&mut engine, seed, &mut contents);
                for seed in 0..=seed {
                    let Some(loan) = share.lend(&names(seed)) else { continue };
                    assert!(is_right(&share, &loan, &contents), "{choice}, {devices}, {seed}");
                    lent += loan.blocks().len();
                }
            }
            assert!(lent > 100, "{choice}, {devices}: {lent}");
            engine.assert_intact();
            engine.close();
            drop(share);
            machine.assert_clean();
        }
    }
}

#[test]
fn a_block_is_lent_when_the_device_has_copied_it() {
    let (machine, mut engine) = Machine::with_engine(5, 1, few(0));
    let (share, mut contents) = (engine.cache.share_host(), Contents::new());
    serve(&mut engine, 0, &mut contents);
    // The device runs only what the host waits for.
    machine.sim.set_pace(Pace::Slowest);
    let mut live = engine.admit(&Prompt::new(9, 8 * 4)).unwrap();
    assert!(share.lend(&names(0)).is_none());
    engine.run(&mut [&mut live]).unwrap();
    assert!(share.lend(&names(0)).is_none(), "nobody has waited for the copy");
    drop(live);
    engine.drain().unwrap();
    let loan = share.lend(&names(0)).unwrap();
    assert!(is_right(&share, &loan, &contents));
    drop(loan);
    engine.close();
    drop(share);
    machine.assert_clean();
}

#[test]
fn memory_that_is_lent_stays_beyond_a_budget_and_what_is_pinned_later_is_lent() {
    for threads in [0, 2] {
        let (machine, mut engine) = Machine::with_engine(6, 1, few(threads));
        let (share, mut contents) = (engine.cache.share_host(), Contents::new());
        engine.cache.wait_for_host().unwrap();
        let all = machine.sim.pinned_bytes();
        (0..11).for_each(|seed| serve(&mut engine, seed, &mut contents));
        let seed = (0..11).rev().find(|&seed| share.lend(&names(seed)).is_some()).unwrap();
        let loan = share.lend(&names(seed)).unwrap();
        assert!(is_right(&share, &loan, &contents));
        engine.cache.set_budget(GroupId(0), Tier::Secondary, 0).unwrap();
        (100..110).for_each(|seed| serve(&mut engine, seed, &mut contents));
        assert!(is_right(&share, &loan, &contents), "it is lent, whatever the budget");
        drop(loan);
        assert!(share.lend(&names(seed)).is_none());
        // The engine's own memory is left, and nothing of the tier.
        let hung = Instant::now() + Duration::from_secs(20);
        let tier = 8 * 4 * small().block_bytes();
        while machine.sim.pinned_bytes() > all - tier && Instant::now() < hung {
            serve(&mut engine, 1, &mut contents);
            machine.rig.devices[0].free_retired().unwrap();
            std::thread::yield_now();
        }
        assert_eq!(machine.sim.pinned_bytes(), all - tier);
        assert!(!share.read(0, &mut [0]), "the memory was given back");
        engine.cache.set_budget(GroupId(0), Tier::Secondary, 32).unwrap();
        assert_eq!(engine.cache.wait_for_host(), Ok(32));
        (200..212).for_each(|seed| serve(&mut engine, seed, &mut contents));
        let lent = (200..212).filter_map(|seed| share.lend(&names(seed)));
        let lent = lent.inspect(|loan| assert!(is_right(&share, loan, &contents))).count();
        assert!(lent > 4, "{lent}");
        engine.close();
        drop(share);
        machine.assert_clean();
    }
}

#[test]
fn a_share_outlives_its_cache() {
    let (machine, mut engine) = Machine::with_engine(6, 1, few(1));
    let (share, mut contents) = (engine.cache.share_host(), Contents::new());
    engine.cache.wait_for_host().unwrap();
    (0..6).for_each(|seed| serve(&mut engine, seed, &mut contents));
    let loan = share.lend(&names(0)).unwrap();
    engine.close();
    assert!(is_right(&share, &loan, &contents));
    drop(share);
    drop(loan);
    machine.assert_clean();
}
