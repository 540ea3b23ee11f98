//! A process that stores is killed at any moment, and the next one opens its folder.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use crate::prelude::*;

const FOLDER: &str = "KV_DISK_CHILD_FOLDER";
const SLOTS: u64 = 12;
const BLOCKS: [usize; 2] = [BLOCK_BYTES, PAGED_BYTES];

fn blocks_of(seed: u64) -> usize {
    (seed / 2 % 2) as usize
}

fn options(folder: &Path, seed: u64) -> DiskOptions {
    // Blocks that are copied, and blocks that the disk reads and writes where they are.
    let (slot_bytes, record_bytes) =
        [(8192, RECORD_BYTES), (12_288, PAGED_RECORD_BYTES)][blocks_of(seed)];
    let bytes = SLOTS * slot_bytes + 3 * 4096;
    let folder = folder.join(blocks_of(seed).to_string());
    let mut options = DiskOptions::new(folder, bytes, record_bytes, b"a model");
    options.reserve_bytes = 0;
    // On a busy machine the kernel holds a killed process's files for a while.
    options.lock_wait = Duration::from_secs(60);
    options.backend = [BackendChoice::Best, BackendChoice::Threads][(seed % 2) as usize];
    options.rules.punches = seed.is_multiple_of(5);
    options
}

fn open(folder: &Path, seed: u64) -> DiskTier {
    DiskTier::open(&options(folder, seed)).unwrap()
}

/// Not a test of its own: with a folder in its environment, this is the process that is killed. It stores and forgets
/// for good, and says what it has been told.
#[test]
fn child() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let seed = number_of("KV_DISK_CHILD_SEED", 0);
    let mut worker = Worker::new(open(Path::new(&folder), seed), BLOCKS[blocks_of(seed)]);
    let mut state = seed;
    let mut out = std::io::stdout().lock();
    let mut told: BTreeSet<(u16, u64)> = BTreeSet::new();
    writeln!(out, "\n: ready").unwrap();
    loop {
        let names: BTreeSet<u64> =
            (0..1 + random(&mut state) % 3).map(|_| random(&mut state) % 30).collect();
        let names: Vec<u64> = names.into_iter().collect();
        // What may change is said before, and what has ended after.
        for name in &names {
            writeln!(out, ": may {name}").unwrap();
        }
        out.flush().unwrap();
        if random(&mut state).is_multiple_of(5) {
            worker.forget(0, &names);
        } else {
            worker.store(0, &names);
        }
        worker.settle();
        // What has made room first: the process may be killed between two words.
        for (_, name) in told.difference(&worker.has) {
            writeln!(out, ": not {name}").unwrap();
        }
        for (_, name) in worker.has.difference(&told) {
            writeln!(out, ": has {name}").unwrap();
        }
        told = worker.has.clone();
        for name in &names {
            let verb = if told.contains(&(0, *name)) { "has" } else { "not" };
            writeln!(out, ": {verb} {name}").unwrap();
        }
        out.flush().unwrap();
    }
}

/// What a child has told before it was killed.
#[derive(Default)]
struct Told {
    /// Blocks that were complete.
    has: BTreeSet<u64>,
    /// Blocks of an operation that was open.
    may: BTreeSet<u64>,
}

impl Told {
    fn take(&mut self, line: &str) {
        let mut words = line.split_whitespace().skip(1);
        let (verb, name) = (words.next(), words.next().and_then(|name| name.parse::<u64>().ok()));
        let Some(name) = name else { return };
        match verb {
            Some("may") => drop(self.may.insert(name)),
            Some("has") => {
                self.may.remove(&name);
                self.has.insert(name);
            }
            Some("not") => {
                self.may.remove(&name);
                self.has.remove(&name);
            }
            _ => {}
        }
    }
}

/// Starts a child, and kills it at a random word of its, or a random moment behind.
fn kill_one(folder: &Path, seed: u64) -> Told {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["kills::child", "--exact", "--nocapture", "--test-threads", "1"])
        .env(FOLDER, folder)
        .env("KV_DISK_CHILD_SEED", seed.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let (mut told, mut state, mut heard) = (Told::default(), seed ^ 0xdead, 0);
    let until = random(&mut state) % 60;
    while heard < until {
        let Some(line) = lines.next() else { panic!("the child ended by itself, seed {seed}") };
        let line = line.unwrap();
        if line.starts_with(':') {
            heard += 1;
            told.take(&line);
        }
    }
    for _ in 0..random(&mut state) % 20_000 {
        std::hint::spin_loop();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // What it has said up to then counts, but for a word that was cut off.
    let rest: Vec<String> = lines.map_while(Result::ok).collect();
    rest.iter().filter(|line| line.starts_with(':')).for_each(|line| told.take(line));
    told
}

#[test]
fn a_killed_process_loses_no_block_that_was_complete_and_leaves_no_wrong_byte() {
    let (kills, first) = (number_of("KV_DISK_KILLS", 20), number_of("KV_DISK_SEED", 0));
    let folder = tempfile::tempdir().unwrap();
    let (mut loaded, mut complete) = (0, 0);
    for seed in first..first + kills {
        let Told { has, may } = kill_one(folder.path(), seed);
        let tier = Arc::new(Mutex::new(open(folder.path(), seed)));
        let mut worker = Worker::new(Seen(Arc::clone(&tier)), BLOCKS[blocks_of(seed)]);
        let found = worker.survivors(&tier);
        // A store in the middle of it may have taken the place of one that was complete: one for each.
        let sure: Vec<u64> = has.iter().copied().filter(|name| !may.contains(name)).collect();
        let mut lost = 0;
        for name in &sure {
            // The worker compares the bytes.
            lost += usize::from(!worker.loads(0, *name));
        }
        assert!(lost <= may.len(), "seed {seed}: {lost} lost of {sure:?}, with {may:?} open");
        complete += sure.len();
        for (group, name) in found {
            loaded += u64::from(worker.loads(group, name));
        }
        // Every slot can be used again.
        worker.forget(0, &(0..30).collect::<Vec<_>>());
        let names: Vec<u64> = (0..SLOTS).collect();
        worker.store(0, &names);
        worker.settle();
        worker.poll();
        assert_eq!(worker.has.len() as u64, SLOTS, "seed {seed}: a slot is lost");
    }
    println!("{kills} kills, {complete} complete blocks, {loaded} loaded");
    assert!(loaded > kills, "{loaded} blocks came after {kills} kills");
}
