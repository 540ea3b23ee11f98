//! Records that are encrypted with keys of the host program.
#![cfg(feature = "seal")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use common::{BLOCK_BYTES, RECORD_BYTES, Seen, Worker, bytes_of, hash};
use kv_disk::{DiskOptions, DiskTier, DiskWatch, Keys, Miss, Unstored};
use kv_manager::GroupId;
use kv_manager::tiers::BlockFault;
use kv_pool::BlockHash;

/// Names 1 and 2 have a key each, and all others none.
#[derive(Debug)]
struct Tenants(Mutex<BTreeMap<u64, [u8; 32]>>);

impl Keys for Tenants {
    fn key_of(&self, _: GroupId, name: BlockHash) -> Option<u64> {
        [1, 2].into_iter().find(|&tenant| hash(tenant) == name)
    }

    fn key(&self, number: u64) -> Option<[u8; 32]> {
        self.0.lock().unwrap().get(&number).copied()
    }
}

fn tenants() -> Arc<Tenants> {
    Arc::new(Tenants(Mutex::new(BTreeMap::from([(1, [1; 32]), (2, [2; 32])]))))
}

struct Opened {
    worker: Worker,
    tier: Arc<Mutex<DiskTier>>,
    watch: DiskWatch,
}

fn open(folder: &Path, keys: &Arc<Tenants>) -> Opened {
    let mut options = DiskOptions::new(folder, 0, RECORD_BYTES, b"a model");
    options.bytes = 20 * 8192 + 3 * 4096;
    options.reserve_bytes = 0;
    options.rules.keys = Some(keys.clone());
    let tier = DiskTier::open(&options).unwrap();
    let watch = tier.watch();
    let tier = Arc::new(Mutex::new(tier));
    let worker = Worker::new(Seen(Arc::clone(&tier)), BLOCK_BYTES);
    let found = worker.survivors(&tier);
    let mut worker = worker;
    worker.has = found;
    Opened { worker, tier, watch }
}

/// Whether the files of a folder have a part of a block as it is.
fn shows(folder: &Path, name: u64) -> bool {
    let part = &bytes_of(0, name, BLOCK_BYTES)[1000..1064];
    fs::read_dir(folder).unwrap().any(|file| {
        let bytes = fs::read(file.unwrap().path()).unwrap();
        bytes.windows(part.len()).any(|window| window == part)
    })
}

#[test]
fn a_block_with_a_key_is_not_in_the_file_as_it_is_and_comes_back_right() {
    let folder = tempfile::tempdir().unwrap();
    let keys = tenants();
    let mut one = open(folder.path(), &keys);
    one.worker.store(0, &[1, 2, 3]);
    one.worker.settle();
    // The worker compares the bytes.
    assert!((1..=3).all(|name| one.worker.loads(0, name)));
    drop(one);
    assert_eq!([1, 2, 3].map(|name| shows(folder.path(), name)), [false, false, true]);
    let mut two = open(folder.path(), &keys);
    assert_eq!(two.worker.has, BTreeSet::from([(0, 1), (0, 2), (0, 3)]));
    assert!((1..=3).all(|name| two.worker.loads(0, name)));
}

#[test]
fn without_its_key_a_block_is_a_miss_and_others_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let keys = tenants();
    let mut opened = open(folder.path(), &keys);
    opened.worker.store(0, &[1, 2, 3]);
    opened.worker.settle();
    keys.0.lock().unwrap().remove(&1);
    // Another key is no better than none.
    keys.0.lock().unwrap().insert(2, [7; 32]);
    assert_eq!([1, 2, 3].map(|name| opened.worker.loads(0, name)), [false, false, true]);
    assert_eq!(opened.worker.missed, [BlockFault::Missing; 2]);
    assert_eq!(opened.watch.stats().missed_as(Miss::NoKey), 2);
    // Nor is a block stored whose key is gone.
    opened.worker.forget(0, &[1]);
    opened.worker.store(0, &[1]);
    opened.worker.settle();
    assert_eq!(opened.watch.stats().unstored_as(Unstored::Refused), 1);
    assert!(!opened.worker.has.contains(&(0, 1)));
}

#[test]
fn the_blocks_of_a_key_are_forgotten_together_and_told() {
    let folder = tempfile::tempdir().unwrap();
    let keys = tenants();
    let mut opened = open(folder.path(), &keys);
    opened.worker.store(0, &[1, 2, 3]);
    opened.worker.store(1, &[1]);
    opened.worker.settle();
    opened.tier.lock().unwrap().forget_key(1);
    opened.worker.settle();
    let left = BTreeSet::from([(0, 2), (0, 3)]);
    // A thread of the file's own does it: what is loaded behind it has waited for it.
    assert!(!opened.worker.loads(0, 1) && !opened.worker.loads(1, 1));
    assert_eq!(opened.worker.has, left, "those of both groups have gone, and no others");
    assert!(left.iter().all(|&(group, name)| opened.worker.loads(group, name)));
    drop(opened);
    let again = open(folder.path(), &keys);
    assert_eq!(again.worker.has, left);
}
