//! Host blocks that are lent to readers in other threads: lent once they are whole, kept as long as they are lent, and told apart
//! afterwards.

use crate::common::below::blocks_of;
use crate::common::ends::Ends;
use crate::common::host::{BYTES, Engine, Host, hash, keys};
use crate::prelude::*;
use kv_tier::check_record;

/// The number that all words of a lent block are.
fn content(share: &HostShare, address: u64) -> Option<u64> {
    let mut bytes = [0; BYTES];
    assert!(share.read(address, &mut bytes));
    let words: Vec<_> =
        bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    words.iter().all(|word| *word == words[0]).then_some(words[0])
}

#[test]
fn a_block_is_lent_once_its_copy_is_complete() {
    let mut engine = Engine::new(8, 8);
    let share = engine.share();
    engine.compute(&[1, 2, 3, 4]);
    assert!(share.lend(&keys(&[1])).is_none(), "it is on the device");
    // Evicts them.
    let names: Vec<u64> = (10..18).collect();
    let mut sequence = engine.admit(&names);
    assert!(share.lend(&keys(&[1])).is_none(), "no plan copies it yet");
    engine.stage(Some((&mut sequence, &names)));
    assert!(share.lend(&keys(&[1])).is_none(), "the plan is not carried out");
    engine.carry_out(Outcome::Done);
    let loan = share.lend(&keys(&[1, 2, 3, 4, 5])).unwrap();
    let lent: Vec<_> = loan.blocks().iter().map(|of| content(&share, of.address)).collect();
    assert_eq!(lent, [Some(1), Some(2), Some(3), Some(4)]);
    for (at, of) in loan.blocks().iter().enumerate() {
        let key = RecordKey { format: share.format(), group: of.group, name: of.name };
        let header = loan.header(at).unwrap();
        let mut bytes = vec![0; of.bytes];
        assert!(share.read(of.address, &mut bytes));
        assert_eq!(check_record(key, &header, &bytes), Ok(()));
        bytes[BYTES - 1] ^= 1;
        assert_eq!(check_record(key, &header, &bytes), Err(BlockFault::Checksum));
        assert_eq!(check_record(key, &header, &bytes[1..]), Err(BlockFault::Short));
        assert_eq!(check_record(key, &header[..70], &bytes), Err(BlockFault::Checksum));
        assert_eq!(check_record(key, &header[..60], &bytes), Err(BlockFault::Short));
        bytes[BYTES - 1] ^= 1;
        for other in [
            RecordKey { group: GroupId(1), ..key },
            RecordKey { name: hash(77), ..key },
            RecordKey { format: key.format + 1, ..key },
        ] {
            assert_eq!(check_record(other, &header, &bytes), Err(BlockFault::Foreign));
        }
    }
}

#[test]
fn what_is_on_its_way_when_the_tier_is_shared_is_waited_for() {
    let mut engine = Engine::new(8, 8);
    engine.compute(&[1, 2, 3, 4]);
    engine.compute(&(10..18).collect::<Vec<_>>());
    // 1 to 4 are in host memory. Two of the others move there by a plan that is in flight, two by the next one.
    let mut first = engine.admit(&[20, 21]);
    engine.stage(Some((&mut first, &[20, 21])));
    let mut second = engine.admit(&[22, 23]);
    let share = engine.share();
    let in_host = |engine: &Engine, names: Range<u64>| -> Vec<u64> {
        let pool = engine.manager.first_pool();
        names.filter(|&name| pool.find_and_pin(hash(name), Tier::Secondary).is_some()).collect()
    };
    let moving = in_host(&engine, 10..18);
    assert_eq!(moving.len(), 4);
    assert!(moving.iter().all(|&name| share.lend(&keys(&[name])).is_none()));
    engine.carry_out(Outcome::Done);
    let lent = |names: &[u64]| -> Vec<u64> {
        names.iter().copied().filter(|&name| share.lend(&keys(&[name])).is_some()).collect()
    };
    assert_eq!(lent(&moving).len(), 2);
    engine.stage(Some((&mut second, &[22, 23])));
    assert_eq!(lent(&moving).len(), 2);
    engine.carry_out(Outcome::Done);
    assert_eq!(lent(&moving), moving);
    assert!(Arc::ptr_eq(&share, &engine.share()), "it is shared once");
}

#[test]
fn a_lent_block_stays_and_another_content_has_another_number() {
    let mut engine = Engine::new(8, 4);
    let share = engine.share();
    engine.compute(&[1, 2, 3, 4]);
    engine.compute(&(10..18).collect::<Vec<_>>());
    let loan = share.lend(&keys(&[1, 2])).unwrap();
    let before = loan.blocks().to_vec();
    let header = loan.header(0).unwrap();
    // Everything that is cached leaves, over and over.
    for turn in 2..20 {
        engine.compute(&(turn * 10..turn * 10 + 8).collect::<Vec<_>>());
        let lent: Vec<_> = loan.blocks().iter().map(|of| content(&share, of.address)).collect();
        assert_eq!(lent, [Some(1), Some(2)], "turn {turn}");
    }
    // A hit of what is lent leaves it where it is.
    engine.compute(&[1, 2]);
    assert_eq!(content(&share, before[0].address), Some(1));
    drop(loan);
    for turn in 20..40 {
        engine.compute(&(turn * 10..turn * 10 + 8).collect::<Vec<_>>());
    }
    assert_ne!(content(&share, before[0].address), Some(1), "it was given to others");
    let name = content(&share, before[0].address).unwrap();
    let other = share.lend(&keys(&[name])).unwrap();
    assert_eq!(other.blocks()[0].address, before[0].address);
    assert_ne!(other.blocks()[0].write, before[0].write);
    // The header is of what it holds now.
    let mut bytes = vec![0; BYTES];
    assert!(share.read(before[0].address, &mut bytes));
    let key = |name| RecordKey { format: share.format(), group: GroupId(0), name };
    let others = other.header(0).unwrap();
    assert_eq!(check_record(key(hash(name)), &others, &bytes), Ok(()));
    assert_eq!(check_record(key(hash(1)), &header, &bytes), Err(BlockFault::Checksum));
    assert_eq!(other.header(1), Err(BlockFault::Missing), "the loan has one block");
}

#[test]
fn what_a_failed_step_has_written_is_not_lent() {
    let mut engine = Engine::new(8, 8);
    let share = engine.share();
    let mut sequence = engine.admit(&[1, 2, 3, 4]);
    engine.stage(Some((&mut sequence, &[1, 2, 3, 4])));
    drop(sequence);
    // They are evicted before it is known.
    let names: Vec<u64> = (10..14).collect();
    let mut more: Vec<Sequence> = Vec::new();
    more.push(engine.admit(&names));
    engine.stage(Some((&mut more[0], &names)));
    engine.carry_out(Outcome::Failed);
    while !engine.flight.is_empty() {
        engine.carry_out(Outcome::Done);
    }
    more.clear();
    engine.compute(&(20..28).collect::<Vec<_>>());
    assert!((1..5).chain(10..14).all(|name| share.lend(&keys(&[name])).is_none()));
}

#[test]
fn nothing_is_lent_once_a_worker_is_lost() {
    for joins in [false, true] {
        let mut engine = Engine::new(8, 8);
        let share = engine.share();
        engine.compute(&[1, 2, 3, 4]);
        // Two steps that nobody carries out, the second of which moves content to host memory.
        let (first, second) = ([10, 11, 12, 13], [20, 21, 22, 23]);
        let mut sequence = engine.admit(&first);
        engine.stage(Some((&mut sequence, &first)));
        drop(sequence);
        let mut sequence = engine.admit(&second);
        engine.stage(Some((&mut sequence, &second)));
        engine.manager.lose_worker(WorkerId(0)).unwrap();
        engine.manager.fence_worker(WorkerId(0)).unwrap();
        if joins {
            engine.manager.join_worker(WorkerId(0)).unwrap();
            engine.flight.clear();
            drop(sequence);
            engine.compute(&[1, 2, 3, 4]);
            engine.compute(&(30..38).collect::<Vec<_>>());
        }
        assert!((1..40).all(|name| share.lend(&keys(&[name])).is_none()), "{joins}");
    }
}

#[test]
fn what_is_not_whole_is_not_kept_from_the_engine() {
    let mut engine = Engine::new(8, 4);
    let share = engine.share();
    engine.compute(&[1, 2]);
    engine.compute(&(10..18).collect::<Vec<_>>());
    // The first ones are in host memory, and the copies of others are on their way.
    let mut sequence = engine.admit(&[20, 21]);
    engine.stage(Some((&mut sequence, &[20, 21])));
    drop(sequence);
    let moving: Vec<u64> = (10..18)
        .filter(|&name| {
            let pool = engine.manager.first_pool();
            pool.find_and_pin(hash(name), Tier::Secondary).is_some()
        })
        .collect();
    assert_eq!(moving.len(), 2);
    let loan = share.lend(&keys(&[1, moving[0], 2])).unwrap();
    assert_eq!(loan.blocks().len(), 1);
    while !engine.flight.is_empty() {
        engine.carry_out(Outcome::Done);
    }
    for turn in 5..20 {
        engine.compute(&(turn * 10..turn * 10 + 8).collect::<Vec<_>>());
    }
    assert!(engine.manager.first_pool().find_and_pin(hash(1), Tier::Secondary).is_some());
    assert!(share.lend(&keys(&[moving[0]])).is_none(), "nobody has borrowed it");
}

#[test]
fn what_was_loaded_from_below_is_lent() {
    let mut rig = Rig::new(8, 8);
    let share = rig.manager.share_host(0, vec![Host::new(8)]).unwrap();
    let names = rig.store_away(0..8);
    let keys = blocks_of(&names);
    assert!(share.lend(&keys).is_none());
    let mut request = common::below::request(0..12);
    let load = rig.load(&mut request);
    assert!(share.lend(&keys).is_none(), "it has not come");
    let place = load.blocks[0].1;
    rig.settle_all();
    let loan = share.lend(&keys).unwrap();
    assert_eq!((loan.blocks().len(), loan.blocks()[0].block), (names.len(), place));
}

#[test]
fn what_comes_to_an_unused_block_from_below_has_a_number() {
    let mut rig = Rig::new(8, 8);
    let share = rig.manager.share_host(0, vec![Host::new(8)]).unwrap();
    let survivors = Survivors { tier: Tier::Third, worker: WorkerId(0), blocks: keys(&[1, 2]) };
    rig.manager.take_survivors(&survivors).unwrap();
    let mut request = Request::named(12, vec![hash(1), hash(2), hash(3)]);
    rig.load(&mut request);
    rig.settle_all();
    let loan = share.lend(&keys(&[1, 2])).unwrap();
    assert!(loan.blocks().iter().all(|of| of.write > 0), "{loan:?}");
}

#[test]
fn addresses_go_through_all_groups_and_runs_too() {
    let window = GroupKind::Window { tokens: 64, sinks: 0 };
    let pool = PoolConfig { secondary_blocks: 3, ..PoolConfig::primary_only(8) };
    let second = GroupOptions { pool, ..group(window, 0) };
    let mut manager = made(with_groups(options(8, 5), [second]));
    let memory: Vec<Arc<dyn HostBlocks>> = vec![Host::new(5), Host::new(3)];
    assert!(manager.share_host(0, memory[..1].to_vec()).is_none());
    let share = manager.share_host(0, memory).unwrap();
    assert_eq!((share.bytes(), share.block_bytes_max()), (8 * BYTES as u64, BYTES));
    let end = share.bytes();
    for (address, bytes, is_there) in [
        (0, 0, true),
        (0, 8 * BYTES, true),
        (end - 1, 1, true),
        (end, 1, false),
        (1, 8 * BYTES, false),
    ] {
        assert_eq!(share.read(address, &mut vec![0; bytes]), is_there, "{address}, {bytes}");
    }
    assert!(!share.read(u64::MAX, &mut [0; 2]));
    // Memory that has grown or shrunk.
    assert!(manager.set_shared_memory(GroupId(1), Host::new(2)));
    assert!(!share.read(7 * BYTES as u64, &mut [0]) && share.read(6 * BYTES as u64, &mut [0]));
    assert!(!manager.set_shared_memory(GroupId(2), Host::new(2)));
}

#[test]
fn a_loan_covers_its_blocks_and_no_others() {
    let mut engine = Engine::new(8, 8);
    let share = engine.share();
    engine.compute(&[1, 2, 3, 4]);
    engine.compute(&(10..18).collect::<Vec<_>>());
    let loan = share.lend(&keys(&[1, 2])).unwrap();
    let first = loan.blocks().iter().map(|of| of.address);
    for address in (0..share.bytes() + 2).chain([u64::MAX]) {
        let block = first.clone().find(|first| (*first..first + BYTES as u64).contains(&address));
        assert_eq!(loan.covered(address), block.map(|first| first + BYTES as u64), "{address}");
    }
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Readers borrow, while the manager evicts at full speed and its worker lags.
#[test]
fn no_reader_sees_other_bytes_than_it_has_borrowed() {
    let blocks: u64 = std::env::var("KV_SHARE_BLOCKS").map_or(20_000, |text| text.parse().unwrap());
    let mut engine = Engine::new(24, 32);
    let share = engine.share();
    let (read, ends) = (AtomicU64::new(0), AtomicBool::new(false));
    let chain = |of: u64| -> Vec<u64> { (0..4).map(|at| 100 + of * 4 + at).collect() };
    std::thread::scope(|scope| {
        for reader in 0..2 {
            let (share, read, ends) = (&share, &read, &ends);
            scope.spawn(move || {
                let _ends_with_this = Ends(ends);
                let mut state = 7 + reader;
                while !ends.load(Ordering::Relaxed) {
                    let names = chain(random(&mut state) % 14);
                    let Some(loan) = share.lend(&keys(&names)) else { continue };
                    for (of, &name) in loan.blocks().iter().zip(&names) {
                        assert_eq!(content(share, of.address), Some(name), "{of:?}");
                        read.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let _ends_with_this = Ends(&ends);
        let mut state = 1;
        while !ends.load(Ordering::Relaxed) {
            if read.load(Ordering::Relaxed) >= blocks {
                ends.store(true, Ordering::Relaxed);
            }
            let names = chain(random(&mut state) % 14);
            let mut sequence = engine.admit(&names);
            engine.stage(Some((&mut sequence, &names)));
            drop(sequence);
            while engine.flight.len() > 1 + (random(&mut state) % 3) as usize {
                engine.carry_out(Outcome::Done);
            }
        }
    });
    while !engine.flight.is_empty() {
        engine.carry_out(Outcome::Done);
    }
    engine.manager.first_pool().check_integrity().unwrap();
}
