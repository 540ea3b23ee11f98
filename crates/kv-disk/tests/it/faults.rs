//! Every fault of a disk at every position of small programs, and at random in long ones: no wrong byte, nothing that
//! was forgotten, no slot lost.

use crate::prelude::*;
use kv_pool::clock::ManualClock;

const SLOTS: u64 = 6;

/// Blocks that are copied to be written, and blocks that a disk reads and writes where they are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Blocks {
    Copied,
    Lent,
}

use Blocks::{Copied, Lent};

impl Blocks {
    fn bytes(self) -> usize {
        [BLOCK_BYTES, PAGED_BYTES][self as usize]
    }
}

fn place(is_new: bool, blocks: Blocks) -> Place {
    let slot_bytes = Geometry::slot_bytes_for([RECORD_BYTES, PAGED_RECORD_BYTES][blocks as usize]);
    let geometry = Geometry { slots: SLOTS, slot_bytes };
    let found_bytes = geometry.bytes();
    Place { geometry, stripe: 0, stripes: 1, set: 11, file: 12, found_bytes, is_new }
}

fn rules(punches: bool) -> SlotRules {
    let clock = Arc::new(ManualClock::new());
    SlotRules { read_depth: 2, write_depth: 2, punches, clock, ..SlotRules::new(b"a model") }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Store(&'static [u64]),
    /// A block of the second group.
    StoreTwin(u64),
    Load(&'static [u64]),
    Forget(u64),
    Clear,
    /// All that is open ends first.
    Settle,
    /// The process ends and begins anew, with what is open as it may be.
    Restart,
}

use Step::{Clear, Forget, Load, Restart, Settle, Store, StoreTwin};

const PROGRAMS: &[&[Step]] = &[
    &[
        Store(&[1, 2]),
        Settle,
        Load(&[1, 2]),
        Settle,
        Forget(1),
        Load(&[1, 2]),
        Store(&[3]),
        Settle,
        Restart,
    ],
    &[
        Store(&[1, 2, 3, 4, 5, 6]),
        Settle,
        Store(&[7, 8, 9]),
        Settle,
        Load(&[6, 7, 8]),
        Restart,
        Store(&[1]),
        Settle,
    ],
    &[Store(&[1, 2]), Settle, Clear, Store(&[3]), Settle, Restart, Load(&[1, 2, 3]), Settle],
    &[
        Store(&[1]),
        Store(&[2]),
        Forget(1),
        Settle,
        Store(&[1]),
        StoreTwin(1),
        Settle,
        Forget(2),
        Settle,
        Restart,
    ],
    &[
        Store(&[1, 2, 3]),
        Restart,
        Store(&[1, 2, 3, 4]),
        Settle,
        Load(&[1]),
        Forget(1),
        Store(&[5]),
        Restart,
    ],
];

/// A disk's lives: the bytes stay, and each life has its faults.
struct Lives {
    image: Image,
    plans: Vec<FaultPlan>,
    crash: Crash,
    punches: bool,
    blocks: Blocks,
    life: usize,
    operations: Vec<u64>,
    counter: Arc<std::sync::atomic::AtomicU64>,
    tier: Option<Arc<Mutex<SlotFile>>>,
    worker: Option<Worker>,
    /// What may be loaded in the next life, and what must not.
    has: BTreeSet<(u16, u64)>,
    gone: BTreeSet<(u16, u64)>,
}

impl Lives {
    fn new(blocks: Blocks, plans: Vec<FaultPlan>, crash: Crash, punches: bool) -> Self {
        let mut lives = Self {
            image: Image::new(place(true, blocks).geometry.bytes() as usize),
            blocks,
            plans,
            crash,
            punches,
            life: 0,
            operations: Vec::new(),
            counter: Arc::default(),
            tier: None,
            worker: None,
            has: BTreeSet::new(),
            gone: BTreeSet::new(),
        };
        lives.begin();
        lives
    }

    fn worker(&mut self) -> &mut Worker {
        self.worker.as_mut().unwrap()
    }

    fn is_idle(&self) -> bool {
        self.tier.as_ref().unwrap().lock().unwrap().is_idle()
    }

    fn is_off(&self) -> bool {
        self.tier.as_ref().unwrap().lock().unwrap().off().is_some()
    }

    /// Opens the file; a life whose disk fails at that ends at once, and the next one begins.
    fn begin(&mut self) {
        let new = self.image.bytes()[..8192].iter().all(|byte| *byte == 0);
        for _ in 0..3 {
            let plan = self.plans.get(self.life).cloned().unwrap_or_default();
            let file = MemoryFile::new(&self.image, plan, self.crash);
            self.counter = file.operations();
            match SlotFile::open(Box::new(file), &place(new, self.blocks), &rules(self.punches)) {
                Ok(tier) => {
                    let tier = Arc::new(Mutex::new(tier));
                    let mut worker = Worker::new(Seen(Arc::clone(&tier)), self.blocks.bytes());
                    let found = worker.survivors(&tier);
                    if self.plans.iter().all(|plan| plan.at.is_empty() && plan.percent == 0) {
                        let lost = &self.has - &found;
                        assert!(lost.is_empty(), "complete, and lost with the process: {lost:?}");
                    }
                    worker.gone = self.gone.clone();
                    worker.has = &found & &self.has;
                    (self.tier, self.worker) = (Some(tier), Some(worker));
                    return;
                }
                Err(error) => {
                    let typed = matches!(
                        error,
                        OpenError::System { .. }
                            | OpenError::Heading { .. }
                            | OpenError::Hostile { .. }
                    );
                    assert!(typed, "{error}");
                    self.operations.push(self.counter.load(Ordering::Relaxed));
                    self.life += 1;
                }
            }
        }
        // The headings are gone, both: their disk has lied twice. Somebody makes the file anew.
        self.image.change(|bytes| bytes.fill(0));
        self.plans.clear();
        self.has.clear();
        self.begin();
    }

    /// Ends the life.
    fn end(&mut self) {
        let worker = self.worker.take().unwrap();
        self.has = worker.has.clone();
        self.gone = worker.gone.clone();
        drop(worker);
        let tier = Arc::into_inner(self.tier.take().unwrap()).unwrap();
        drop(tier.into_inner().unwrap());
        self.operations.push(self.counter.load(Ordering::Relaxed));
        self.life += 1;
    }

    /// Lets everything end, up to a table that is as it should be.
    fn settle(&mut self) {
        self.worker().settle();
        for _ in 0..200 {
            self.worker().poll();
            if self.is_idle() {
                return;
            }
        }
        panic!("it does not come to rest: {:?}", self.tier);
    }

    fn step(&mut self, step: Step) {
        match step {
            Store(names) => self.worker().store(0, names),
            StoreTwin(name) => self.worker().store(1, &[name]),
            Load(names) => self.worker().load(0, names),
            Forget(name) => self.worker().forget(0, &[name]),
            Clear => self.worker().clear(),
            Settle => self.settle(),
            Restart => {
                self.end();
                self.begin();
            }
        }
        if !matches!(step, Restart) {
            self.worker().poll();
        }
    }

    /// What the tier has said that it has and does not give, once all has ended; and no slot is lost.
    fn check(&mut self) -> BTreeSet<(u16, u64)> {
        self.settle();
        let has = self.worker().has.clone();
        let lost = has.into_iter().filter(|&(group, name)| !self.worker().loads(group, name));
        let lost = lost.collect::<Vec<_>>().into_iter().collect();
        self.settle();
        for name in 1..10 {
            for group in 0..2 {
                // The worker compares the bytes, and what must be gone.
                self.worker().loads(group, name);
            }
        }
        self.settle();
        let tier = self.tier.as_ref().unwrap().lock().unwrap();
        assert_eq!(tier.claimable_slots(), SLOTS, "a slot is lost");
        let stats = tier.stats();
        assert_eq!(tier.off().is_some(), stats.off == 1);
        lost
    }
}

fn run(
    blocks: Blocks,
    program: &[Step],
    plans: Vec<FaultPlan>,
    crash: Crash,
    punches: bool,
    lies: bool,
) -> (Vec<u64>, usize) {
    let mut lives = Lives::new(blocks, plans, crash, punches);
    for &step in program {
        if matches!(step, Restart) && lives.is_off() && lives.is_idle() {
            // One fault has turned it off: what it could not be told then, it is told with what is forgotten next.
            lives.step(Forget(10));
            lives.settle();
        }
        if matches!(step, Restart) && (lies || !lives.is_idle()) {
            // What a disk has not written, or says so and has not, may be there again.
            lives.worker().gone.clear();
        }
        lives.step(step);
    }
    let lost = lives.check().len();
    let last = lives.counter.load(Ordering::Relaxed);
    lives.operations.push(last);
    (lives.operations, lost)
}

#[test]
fn every_fault_at_every_position_of_small_programs_gives_no_wrong_byte_and_loses_no_slot() {
    let mut runs = 0;
    for program in PROGRAMS {
        for (crash, punches, blocks) in [
            (Crash::Nothing, false, Copied),
            (Crash::All, false, Copied),
            (Crash::Sectors, true, Copied),
            (Crash::Nothing, true, Copied),
            (Crash::Nothing, true, Lent),
            (Crash::Sectors, false, Lent),
        ] {
            let (operations, lost) = run(blocks, program, Vec::new(), crash, punches, false);
            assert_eq!(lost, 0, "without faults");
            for (life, &count) in operations.iter().enumerate() {
                for position in 0..count {
                    for fault in DiskFault::ALL {
                        let mut plans = vec![FaultPlan::default(); life + 1];
                        plans[life] = FaultPlan {
                            at: vec![(position, fault)],
                            reorders: position.is_multiple_of(2),
                            seed: position,
                            ..FaultPlan::default()
                        };
                        let (_, lost) = run(blocks, program, plans, crash, punches, fault.lies());
                        let honest = matches!(
                            fault,
                            DiskFault::Fails
                                | DiskFault::FailsHalfway
                                | DiskFault::Short
                                | DiskFault::Late
                                | DiskFault::Memory
                        );
                        // What is read in vain is given up; nothing else is.
                        assert!(
                            !honest || lost <= 1,
                            "{lost} lost by {fault:?} at {position} of life {life}"
                        );
                        runs += 1;
                    }
                }
            }
        }
    }
    assert!(runs > 1_000, "{runs}");
    println!("{runs} runs");
}

#[test]
fn random_programs_on_random_disks_give_no_wrong_byte() {
    let (seeds, first) = (number_of("KV_DISK_SEEDS", 200), number_of("KV_DISK_SEED", 0));
    let mut loaded = 0;
    for seed in first..first + seeds {
        loaded += random_run(seed);
    }
    println!("{seeds} seeds, {loaded} blocks loaded");
    assert!(loaded > seeds, "{loaded} blocks came in {seeds} runs");
}

fn random_run(seed: u64) -> u64 {
    let mut state = seed;
    let mut pick = |below: u64| random(&mut state) % below;
    let crash = [Crash::Nothing, Crash::All, Crash::Sectors][pick(3) as usize];
    let percent = [0, 1, 5, 20][pick(4) as usize];
    let plans = (0..12)
        .map(|life| FaultPlan {
            percent,
            reorders: pick(2) == 0,
            seed: seed.wrapping_mul(31) + life,
            ..FaultPlan::default()
        })
        .collect();
    let mut lives = Lives::new([Copied, Lent][pick(2) as usize], plans, crash, pick(3) == 0);
    let mut loaded = 0;
    for _ in 0..60 {
        let names: Vec<u64> =
            (0..1 + pick(4)).map(|_| 1 + pick(9)).collect::<BTreeSet<_>>().into_iter().collect();
        let group = u16::from(pick(5) == 0);
        match pick(20) {
            0..7 => lives.worker().store(group, &names),
            7..14 => lives.worker().load(group, &names),
            14..16 => lives.worker().forget(group, &names),
            16 if pick(4) == 0 => lives.worker().clear(),
            17 => lives.settle(),
            18 if pick(3) == 0 => {
                if percent > 0 || !lives.is_idle() {
                    // A lie, or a page that was not written yet, may bring back what was forgotten.
                    lives.worker().gone.clear();
                }
                loaded += lives.worker().loaded;
                lives.end();
                lives.begin();
            }
            _ => {}
        }
        for _ in 0..pick(4) {
            lives.worker().poll();
        }
    }
    let lost = lives.check();
    assert!(percent > 0 || lost.is_empty(), "seed {seed} lost {lost:?}");
    loaded + lives.worker().loaded
}

#[test]
fn a_disk_that_is_full_or_read_only_ends_stores_and_not_loads() {
    for (fault, blocks) in
        [(DiskFault::Full, Copied), (DiskFault::ReadOnly, Copied), (DiskFault::Full, Lent)]
    {
        let plan = FaultPlan { at: vec![(4, fault)], ..FaultPlan::default() };
        let mut lives = Lives::new(blocks, vec![plan], Crash::Nothing, false);
        // Two headings, a slot and its page.
        lives.step(Store(&[1]));
        lives.step(Settle);
        lives.step(Store(&[2, 3]));
        lives.settle();
        assert!(lives.worker().loads(0, 1), "{fault:?}");
        assert!(!lives.worker().loads(0, 2));
        lives.step(Store(&[4]));
        lives.settle();
        assert_eq!(lives.worker().has, BTreeSet::from([(0, 1)]));
        let tier = lives.tier.as_ref().unwrap().lock().unwrap();
        assert!(tier.off().is_some() && tier.stats().off == 1);
        assert_eq!(tier.claimable_slots(), SLOTS);
    }
}

#[test]
fn what_is_forgotten_while_its_page_cannot_be_read_does_not_come_back_with_the_page() {
    // The heading is read and written twice, before the table is read.
    let plan = FaultPlan { at: vec![(3, DiskFault::Fails)], ..FaultPlan::default() };
    let plans = vec![FaultPlan::default(), plan];
    let mut lives = Lives::new(Copied, plans, Crash::Nothing, false);
    for step in [Store(&[1, 2, 3, 4, 5, 6]), Settle, Restart] {
        lives.step(step);
    }
    assert!(lives.worker().has.is_empty(), "{:?}", lives.worker().has);
    for step in [Forget(1), Settle, Restart] {
        lives.step(step);
    }
    assert!(!lives.worker().loads(0, 1));
}

/// Ways to forget block 1, and no other.
const FORGETS: [&[Step]; 3] = [&[Forget(1)], &[Forget(1), Settle, Forget(9)], &[Clear]];

#[test]
fn what_is_forgotten_while_a_file_is_off_is_not_found_when_it_is_opened_again() {
    let plans: [(Off, Vec<(u64, DiskFault)>); 4] = [
        // The slot of block 2, and, of each, the page of the table that it was to be in.
        (Off::Full, vec![(6, DiskFault::Full)]),
        (Off::ReadOnly, vec![(6, DiskFault::ReadOnly)]),
        (Off::Full, vec![(6, DiskFault::Full), (7, DiskFault::Full)]),
        (Off::Failing, (6..15).map(|position| (position, DiskFault::Fails)).collect()),
    ];
    for (off, at) in plans {
        for forgets in FORGETS {
            let at = at.clone();
            let plan = FaultPlan { at, ..FaultPlan::default() };
            let mut lives = Lives::new(Copied, vec![plan], Crash::Nothing, false);
            lives.step(Store(&[1, 3]));
            lives.settle();
            let operations = lives.counter.load(Ordering::Relaxed);
            assert_eq!(operations, 6, "two headings, two slots, their page twice");
            for name in 2..9 {
                lives.worker().store(0, &[name]);
                lives.settle();
            }
            assert_eq!(lives.tier.as_ref().unwrap().lock().unwrap().off(), Some(off));
            forgets.iter().for_each(|step| lives.step(*step));
            lives.settle();
            // Whoever is told so ends a life with its last attempt.
            lives.step(Forget(10));
            lives.settle();
            lives.end();
            lives.begin();
            let found = lives.worker().has.clone();
            let kept = !matches!(forgets[0], Clear);
            assert!(!lives.worker().loads(0, 1), "{off:?} {forgets:?}");
            assert_eq!(lives.worker().loads(0, 3), kept, "{off:?} {forgets:?}: {found:?}");
        }
    }
}

#[test]
fn a_disk_that_always_fails_is_off_and_says_what_it_has_lost() {
    let at = (4..100).map(|position| (position, DiskFault::Fails)).collect();
    let mut lives =
        Lives::new(Copied, vec![FaultPlan { at, ..FaultPlan::default() }], Crash::Nothing, false);
    lives.step(Store(&[1]));
    lives.step(Settle);
    assert_eq!(lives.worker().has.len(), 1);
    for name in 2..8 {
        lives.worker().store(0, &[name]);
        lives.settle();
    }
    for name in 2..8 {
        lives.worker().store(0, &[name]);
        lives.settle();
    }
    assert!(lives.tier.as_ref().unwrap().lock().unwrap().off() == Some(kv_disk::Off::Failing));
    assert!(lives.worker().has.is_empty(), "it was told");
    assert!(!lives.worker().loads(0, 1));
}

/// A life in which the fifth operation, which is the first behind the headings, ends late.
fn with_late(blocks: Blocks, position: u64) -> Lives {
    let plan = FaultPlan { at: vec![(position, DiskFault::Late)], ..FaultPlan::default() };
    Lives::new(blocks, vec![plan], Crash::Nothing, false)
}

#[test]
fn what_is_forgotten_while_it_is_written_is_not_stored() {
    for (step, blocks) in [(Forget(1), Copied), (Clear, Copied), (Forget(1), Lent), (Clear, Lent)] {
        // The slot, or its page of the table.
        for position in [2, 3] {
            let mut lives = with_late(blocks, position);
            lives.step(Store(&[1]));
            assert!(!lives.is_idle(), "{position}: it is being written");
            lives.step(step);
            lives.settle();
            assert_eq!(lives.worker().has, BTreeSet::new(), "{step:?} at {position}");
            assert!(!lives.worker().loads(0, 1), "{step:?} at {position}");
            let tier = lives.tier.as_ref().unwrap().lock().unwrap();
            assert_eq!(tier.stats().unstored_as(kv_disk::Unstored::Forgotten), 1);
        }
    }
}

#[test]
fn what_is_forgotten_while_it_waits_to_be_stored_is_not_stored_and_the_others_are() {
    // Two stores at a time, whose slots are written late.
    let at = vec![(2, DiskFault::Late), (3, DiskFault::Late)];
    let plan = FaultPlan { at, ..FaultPlan::default() };
    for (step, stored) in [(Forget(3), vec![1, 2, 4]), (Clear, vec![])] {
        let mut lives = Lives::new(Copied, vec![plan.clone()], Crash::Nothing, false);
        (1..=4).for_each(|name| lives.worker().store(0, &[name]));
        lives.worker().poll();
        lives.step(step);
        lives.settle();
        let has: Vec<u64> = lives.worker().has.iter().map(|(_, name)| *name).collect();
        assert_eq!(has, stored, "{step:?}");
        let found: Vec<_> = (1..=4).filter(|&name| lives.worker().loads(0, name)).collect();
        assert_eq!(found, stored, "{step:?}");
        let tier = lives.tier.as_ref().unwrap().lock().unwrap();
        let forgotten = tier.stats().unstored_as(kv_disk::Unstored::Forgotten);
        assert_eq!(forgotten, 4 - stored.len() as u64, "{step:?}");
    }
}

#[test]
fn a_record_that_is_spoilt_is_told_to_be_gone_and_does_not_come_back() {
    let mut lives = Lives::new(Copied, Vec::new(), Crash::Nothing, false);
    lives.step(Store(&[1, 2]));
    lives.settle();
    let block = crate::common::bytes_of(0, 1, BLOCK_BYTES);
    lives.image.change(|bytes| {
        let at = bytes.windows(block.len()).position(|of| of == block).unwrap();
        bytes[at..][..block.len()].fill(0xaa);
    });
    assert!(!lives.worker().loads(0, 1));
    lives.settle();
    assert_eq!(lives.worker().has, BTreeSet::from([(0, 2)]), "it was told");
    // Nor is it found in the table.
    lives.end();
    lives.begin();
    let stats = lives.tier.as_ref().unwrap().lock().unwrap().stats();
    assert_eq!(stats.survivors, 1);
    assert!(lives.worker().loads(0, 2));
}

#[test]
fn the_room_of_what_is_forgotten_is_given_back() {
    let [one, two] = [1, 2].map(|name| crate::common::bytes_of(0, name, BLOCK_BYTES));
    for (step, stays) in [(Forget(1), true), (Clear, false)] {
        let mut lives = Lives::new(Copied, Vec::new(), Crash::Nothing, true);
        lives.step(Store(&[1, 2]));
        lives.settle();
        let is_there = |lives: &Lives, block: &[u8]| {
            lives.image.bytes().windows(block.len()).any(|of| of == block)
        };
        assert!(is_there(&lives, &one) && is_there(&lives, &two));
        lives.step(step);
        lives.settle();
        assert_eq!((is_there(&lives, &one), is_there(&lives, &two)), (false, stays), "{step:?}");
    }
}

#[test]
fn failures_that_others_come_between_do_not_turn_a_file_off() {
    // Each slot fails to be written, and each page of the table is written.
    let at = (1..40).map(|position| (2 * position, DiskFault::Fails)).collect();
    let plan = FaultPlan { at, ..FaultPlan::default() };
    let mut lives = Lives::new(Copied, vec![plan], Crash::Nothing, false);
    for _ in 0..30 {
        lives.worker().store(0, &[1]);
        lives.settle();
    }
    let tier = lives.tier.as_ref().unwrap().lock().unwrap();
    let failed = tier.stats().unstored_as(kv_disk::Unstored::Failed);
    assert_eq!((failed, tier.off()), (30, None));
}

/// A new file over memory, and the worker of its tier.
fn opened(whole: &Place, plan: FaultPlan, rules: &SlotRules) -> (Worker, Arc<Mutex<SlotFile>>) {
    let image = Image::new(whole.geometry.bytes() as usize);
    let file = MemoryFile::new(&image, plan, Crash::Nothing);
    let tier = Arc::new(Mutex::new(SlotFile::open(Box::new(file), whole, rules).unwrap()));
    (Worker::new(Seen(Arc::clone(&tier)), BLOCK_BYTES), tier)
}

#[test]
fn a_store_waits_for_the_slot_that_another_has() {
    let mut whole = place(true, Copied);
    whole.geometry.slots = 1;
    whole.found_bytes = whole.geometry.bytes();
    let plan = FaultPlan { at: vec![(2, DiskFault::Late)], ..FaultPlan::default() };
    let (mut worker, tier) = opened(&whole, plan, &rules(false));
    worker.store(0, &[1]);
    worker.keep(0, &[2]);
    assert_eq!(tier.lock().unwrap().stats().stored, 2);
    assert!(worker.loads(0, 2) && !worker.loads(0, 1));
}

#[test]
fn a_file_whose_heading_cannot_be_written_is_not_opened() {
    let whole = place(true, Copied);
    for fault in [DiskFault::Fails, DiskFault::Full] {
        let image = Image::new(whole.geometry.bytes() as usize);
        let plan = FaultPlan { at: vec![(0, fault), (1, fault)], ..FaultPlan::default() };
        let file = MemoryFile::new(&image, plan, Crash::Nothing);
        let refused = SlotFile::open(Box::new(file), &whole, &rules(false));
        assert!(matches!(refused, Err(OpenError::System { .. })), "{fault:?}");
    }
}

#[test]
fn no_more_is_written_and_read_in_a_time_than_may_be() {
    let (clock, whole) = (Arc::new(ManualClock::new()), place(true, Copied));
    let (write_bytes_per_second, read_bytes_per_second) = (Some(10), Some(10));
    let rules = SlotRules {
        clock: Arc::clone(&clock) as _,
        write_bytes_per_second,
        read_bytes_per_second,
        ..rules(false)
    };
    let (mut worker, tier) = opened(&whole, FaultPlan::default(), &rules);
    let in_turn = |worker: &mut Worker, done: fn(&SlotFile) -> u64| {
        for count in 1..=3 {
            (0..20).for_each(|_| _ = worker.poll());
            assert_eq!(done(&tier.lock().unwrap()), count, "one at a time");
            clock.advance(std::time::Duration::from_secs(10_000));
        }
    };
    worker.store(0, &[1, 2, 3]);
    in_turn(&mut worker, |file| file.stats().stored);
    worker.load(0, &[1, 2, 3]);
    in_turn(&mut worker, |file| file.stats().loaded);
    assert_eq!(worker.poll(), 0);
}

#[test]
fn what_is_forgotten_while_it_is_read_is_not_loaded() {
    for (step, blocks) in [(Forget(1), Copied), (Clear, Copied), (Forget(1), Lent), (Clear, Lent)] {
        let mut lives = with_late(blocks, 4);
        lives.step(Store(&[1]));
        lives.settle();
        lives.step(Load(&[1]));
        assert!(!lives.is_idle(), "it is being read");
        lives.step(step);
        lives.settle();
        assert_eq!((lives.worker().loaded, lives.worker().missed.len()), (0, 1), "{step:?}");
        let tier = lives.tier.as_ref().unwrap().lock().unwrap();
        assert_eq!(tier.stats().missed_as(kv_disk::Miss::Forgotten), 1);
    }
}

#[test]
fn a_clear_holds_when_either_heading_is_spoilt_later() {
    for page in 0..2 {
        let mut lives = Lives::new(Copied, Vec::new(), Crash::Nothing, false);
        lives.step(Store(&[1]));
        lives.settle();
        lives.step(Clear);
        lives.settle();
        lives.end();
        lives.image.change(|bytes| bytes[page * 4096..][..4096].fill(0xaa));
        lives.begin();
        assert!(!lives.worker().loads(0, 1), "with heading {page} spoilt");
    }
}

#[test]
fn a_short_read_is_a_miss_and_counted_as_one() {
    for blocks in [Copied, Lent] {
        let plan = FaultPlan { at: vec![(4, DiskFault::Short)], ..FaultPlan::default() };
        let mut lives = Lives::new(blocks, vec![plan], Crash::Nothing, false);
        lives.step(Store(&[1]));
        lives.settle();
        assert!(!lives.worker().loads(0, 1));
        let tier = lives.tier.as_ref().unwrap().lock().unwrap();
        assert_eq!(tier.stats().missed_as(kv_disk::Miss::Short), 1, "{blocks:?}");
    }
}

#[test]
fn a_store_has_not_ended_before_its_entry_is_in_the_table() {
    let mut lives = with_late(Copied, 3);
    lives.step(Store(&[1]));
    assert_eq!(lives.worker().has, BTreeSet::new(), "its page of the table is being written");
    lives.settle();
    assert_eq!(lives.worker().has, BTreeSet::from([(0, 1)]));
}

#[test]
fn a_store_whose_slot_was_not_written_whole_has_failed() {
    for fault in [DiskFault::Fails, DiskFault::FailsHalfway, DiskFault::Short] {
        let plan = FaultPlan { at: vec![(2, fault)], ..FaultPlan::default() };
        let blocks = if fault == DiskFault::Short { Lent } else { Copied };
        let mut lives = Lives::new(blocks, vec![plan], Crash::Nothing, false);
        lives.step(Store(&[1]));
        lives.settle();
        assert_eq!(lives.worker().has, BTreeSet::new(), "{fault:?}");
        let tier = lives.tier.as_ref().unwrap().lock().unwrap();
        assert_eq!(tier.stats().unstored_as(kv_disk::Unstored::Failed), 1, "{fault:?}");
        assert_eq!(tier.stats().stored, 0, "{fault:?}");
    }
}

#[test]
fn a_block_that_is_stored_again_is_found_until_its_new_record_is() {
    // The slot of the second record, or its page of the table.
    for (position, fault, stored) in [
        (4, DiskFault::Fails, 1),
        (5, DiskFault::Fails, 1),
        (4, DiskFault::Late, 2),
        (5, DiskFault::Late, 2),
    ] {
        let plan = FaultPlan { at: vec![(position, fault)], ..FaultPlan::default() };
        let mut lives = Lives::new(Copied, vec![plan], Crash::Nothing, false);
        lives.step(Store(&[1]));
        lives.settle();
        lives.step(Store(&[1]));
        assert!(!lives.is_idle() || fault == DiskFault::Fails, "{position}");
        // What a process that is killed now leaves.
        let image = Image::of(lives.image.bytes());
        let file = MemoryFile::new(&image, FaultPlan::default(), Crash::Nothing);
        let killed = SlotFile::open(Box::new(file), &place(false, Copied), &rules(false)).unwrap();
        assert_eq!(killed.stats().survivors, 1, "{position} {fault:?}");
        lives.settle();
        assert!(lives.worker().loads(0, 1), "{position} {fault:?}");
        let tier = lives.tier.as_ref().unwrap().lock().unwrap();
        assert_eq!((tier.stats().stored, tier.stats().used_slots), (stored, 1), "{fault:?}");
        drop(tier);
        lives.end();
        lives.begin();
        assert!(lives.worker().loads(0, 1), "{position} {fault:?}: with its process");
    }
}

#[test]
fn nothing_of_before_a_clear_is_found_when_the_file_is_opened_again() {
    let mut lives = Lives::new(Copied, Vec::new(), Crash::Nothing, false);
    lives.step(Store(&[1, 2]));
    lives.settle();
    let before = lives.image.bytes();
    lives.step(Clear);
    lives.settle();
    lives.end();
    // The table as it was: the entries of before are told by their epoch.
    lives
        .image
        .change(|bytes| bytes[2 * 4096..3 * 4096].copy_from_slice(&before[2 * 4096..][..4096]));
    lives.begin();
    let tier = lives.tier.as_ref().unwrap().lock().unwrap();
    assert_eq!(tier.stats().survivors, 0);
}
