//! Records that are encrypted with keys of the host program.

use crate::common::hash;
use crate::prelude::*;

const GEOMETRY: Geometry = Geometry { slots: 20, slot_bytes: 8192 };

/// Names 1 and 2 have a key each, and all others the one of `others`.
#[derive(Debug)]
struct Tenants {
    keys: Mutex<BTreeMap<u64, [u8; 32]>>,
    others: Mutex<Option<u64>>,
}

impl Keys for Tenants {
    fn key_of(&self, _: GroupId, name: BlockHash) -> Option<u64> {
        [1, 2].into_iter().find(|&tenant| hash(tenant) == name).or(*self.others.lock().unwrap())
    }

    fn key(&self, number: u64) -> Option<[u8; 32]> {
        self.keys.lock().unwrap().get(&number).copied()
    }
}

fn tenants() -> Arc<Tenants> {
    tenants_and(None)
}

fn tenants_and(others: Option<u64>) -> Arc<Tenants> {
    let keys = Mutex::new(BTreeMap::from([(1, [1; 32]), (2, [2; 32])]));
    Arc::new(Tenants { keys, others: Mutex::new(others) })
}

struct Opened {
    worker: Worker,
    tier: Arc<Mutex<DiskTier>>,
    watch: DiskWatch,
}

fn options(folder: &Path, keys: Option<&Arc<Tenants>>) -> DiskOptions {
    let mut options = DiskOptions::new(folder, 0, RECORD_BYTES, b"a model");
    options.bytes = GEOMETRY.bytes();
    options.reserve_bytes = 0;
    options.rules.keys = keys.map(|keys| Arc::clone(keys) as Arc<dyn Keys>);
    options
}

fn open_with(options: &DiskOptions) -> Opened {
    let tier = DiskTier::open(options).unwrap();
    let watch = tier.watch();
    assert_eq!(watch.files()[0].slots, GEOMETRY.slots);
    let tier = Arc::new(Mutex::new(tier));
    let mut worker = Worker::new(Seen(Arc::clone(&tier)), BLOCK_BYTES);
    worker.has = worker.survivors(&tier);
    Opened { worker, tier, watch }
}

fn open(folder: &Path, keys: &Arc<Tenants>) -> Opened {
    open_with(&options(folder, Some(keys)))
}

fn file_in(folder: &Path) -> PathBuf {
    folder.join("kv-disk-000.slots")
}

/// Stores blocks for good.
fn fill(options: &DiskOptions, names: &[u64]) {
    let mut opened = open_with(options);
    opened.worker.keep(0, names);
    assert!(names.iter().all(|&name| opened.worker.loads(0, name)));
}

/// Waits until the tier's threads have done what they were told before: loads wait for that.
fn behind(opened: &mut Opened) {
    assert!(!opened.worker.loads(0, 31), "nobody has stored it");
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
    one.worker.keep(0, &[1, 2, 3]);
    // The worker compares the bytes.
    assert!((1..=3).all(|name| one.worker.loads(0, name)));
    drop(one);
    assert_eq!([1, 2, 3].map(|name| shows(folder.path(), name)), [false, false, true]);
    let mut two = open(folder.path(), &keys);
    assert_eq!(two.worker.has, BTreeSet::from([(0, 1), (0, 2), (0, 3)]));
    assert!((1..=3).all(|name| two.worker.loads(0, name)));
}

#[test]
fn a_file_of_who_has_keys_is_refused_by_who_has_none_and_stays_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let keys = tenants();
    // Somebody has begun without keys.
    fill(&options(folder.path(), None), &[3]);
    fill(&options(folder.path(), Some(&keys)), &[1, 2]);
    let before = fs::read(file_in(folder.path())).unwrap();
    for keep in [Keep::Content, Keep::Nothing] {
        let mut without = options(folder.path(), None);
        without.rules.keep = keep;
        let refused = DiskTier::open(&without).unwrap_err();
        assert!(matches!(refused, OpenError::NoKeys { .. }), "{refused}");
        assert!(
            refused.to_string().contains(file_in(folder.path()).to_str().unwrap()),
            "{refused}"
        );
    }
    assert!(fs::read(file_in(folder.path())).unwrap() == before, "it is as it was");
    let mut with = open(folder.path(), &keys);
    assert_eq!(with.worker.has, BTreeSet::from([(0, 1), (0, 2), (0, 3)]));
    assert!((1..=3).all(|name| with.worker.loads(0, name)));
    drop(with);
    // Who gives its content up says so, and then it is nobody's with keys.
    let mut wiping = options(folder.path(), None);
    wiping.rules.mismatch = Mismatch::Wipe;
    fill(&wiping, &[4]);
    fill(&options(folder.path(), None), &[5]);
}

#[test]
fn without_its_key_a_block_is_a_miss_and_others_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let keys = tenants();
    let mut opened = open(folder.path(), &keys);
    opened.worker.keep(0, &[1, 2, 3]);
    keys.keys.lock().unwrap().remove(&1);
    // Another key is no better than none.
    keys.keys.lock().unwrap().insert(2, [7; 32]);
    assert_eq!([1, 2, 3].map(|name| opened.worker.loads(0, name)), [false, false, true]);
    assert_eq!(opened.worker.missed, [BlockFault::Missing; 2]);
    assert_eq!(opened.watch.stats().missed_as(Miss::NoKey), 2);
    // Nor is a block stored whose key is gone.
    opened.worker.forget(0, &[1]);
    opened.worker.keep(0, &[1]);
    assert_eq!(opened.watch.stats().unstored_as(Unstored::Refused), 1);
    assert!(!opened.worker.has.contains(&(0, 1)));
}

#[test]
fn the_blocks_of_a_key_are_forgotten_together_and_told() {
    let folder = tempfile::tempdir().unwrap();
    let keys = tenants();
    let mut opened = open(folder.path(), &keys);
    opened.worker.store(0, &[1, 2, 3]);
    opened.worker.keep(1, &[1]);
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

/// The encrypted blocks in a file, each with the generation of its record.
fn ciphertexts(folder: &Path) -> Vec<(u64, Vec<u8>)> {
    let bytes = fs::read(file_in(folder)).unwrap();
    let slots = (0..GEOMETRY.slots).map(|slot| &bytes[GEOMETRY.slot(slot) as usize..]);
    let head = 128 + RECORD_BYTES as usize - BLOCK_BYTES;
    let sealed = slots.filter_map(|slot| Some((Entry::parse(slot).ok()?.generation, slot)));
    sealed.map(|(of, slot)| (of, slot[head..head + BLOCK_BYTES].to_vec())).collect()
}

fn difference(a: &[u8], b: &[u8]) -> Vec<u8> {
    a.iter().zip(b).map(|(a, b)| a ^ b).collect()
}

#[test]
fn no_two_texts_are_encrypted_alike_whatever_older_copy_of_the_file_is_written_on() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let keys = tenants_and(Some(1));
    drop(open(one.path(), &keys));
    // The image of a host that is started twice; and a snapshot that is brought back.
    fs::copy(file_in(one.path()), file_in(two.path())).unwrap();
    let snapshot = fs::read(file_in(one.path())).unwrap();
    let mut texts = Vec::new();
    for (folder, name) in [(one.path(), 3), (two.path(), 4), (one.path(), 5)] {
        fill(&options(folder, Some(&keys)), &[name]);
        let sealed = ciphertexts(folder);
        assert_eq!(sealed.len(), 1);
        texts.push((bytes_of(0, name, BLOCK_BYTES), sealed[0].clone()));
        fs::write(file_in(one.path()), &snapshot).unwrap();
    }
    for (at, (plain_a, (one, a))) in texts.iter().enumerate() {
        for (plain_b, (other, b)) in &texts[at + 1..] {
            assert_ne!(one, other, "one number for two writes");
            assert!(difference(a, b) != difference(plain_a, plain_b), "one nonce for two texts");
        }
    }
}

#[test]
fn a_record_that_is_not_encrypted_as_its_block_has_to_be_is_never_given_out() {
    let folder = tempfile::tempdir().unwrap();
    let keys = tenants();
    // Who can write the file can make a record with all of its checksums; and tenant 2 has a key of its own.
    let other = tenants_and(Some(2));
    for (made_with, required) in [
        (None, &tenants_and(Some(1))),
        (Some(&other), &tenants_and(Some(1))),
        (Some(&other), &tenants_and(None)),
    ] {
        let _ = fs::remove_file(file_in(folder.path()));
        fill(&options(folder.path(), made_with), &[3]);
        let mut opened = open(folder.path(), required);
        assert!(opened.worker.has.is_empty(), "it is not even found");
        assert!(!opened.worker.loads(0, 3));
        let discarded = |stats: &DiskStats| stats.discarded == 1;
        assert!(discarded(&counted(&opened.watch, discarded)));
    }
    // Behind the back of a tier that has the file open, too: what its key is to be may change.
    let _ = fs::remove_file(file_in(folder.path()));
    let changed = Arc::new(Changing { inner: keys, required: Mutex::new(None) });
    let mut options = options(folder.path(), None);
    options.rules.keys = Some(changed.clone());
    let mut opened = open_with(&options);
    opened.worker.keep(0, &[3, 4]);
    *changed.required.lock().unwrap() = Some(1);
    assert!(!opened.worker.loads(0, 3));
    assert_eq!(opened.worker.missed, [BlockFault::Missing]);
    let no_key = |stats: &DiskStats| stats.missed_as(Miss::NoKey) == 1 && stats.used_slots == 1;
    assert!(no_key(&counted(&opened.watch, no_key)), "it has gone: {:?}", opened.watch.stats());
}

/// Tenants whose blocks 3 and more come to have another key.
#[derive(Debug)]
struct Changing {
    inner: Arc<Tenants>,
    required: Mutex<Option<u64>>,
}

impl Keys for Changing {
    fn key_of(&self, group: GroupId, name: BlockHash) -> Option<u64> {
        self.inner.key_of(group, name).or(*self.required.lock().unwrap())
    }

    fn key(&self, number: u64) -> Option<[u8; 32]> {
        self.inner.key(number)
    }
}

/// Changes all entries of a file's table and slots, and its headings, as who can write the file does.
fn forge(folder: &Path, entry: impl Fn(&mut Entry), heading: impl Fn(&mut Heading)) {
    let mut bytes = fs::read(file_in(folder)).unwrap();
    let table = GEOMETRY.table_page(0) as usize..GEOMETRY.slot(0) as usize;
    let slots = (0..GEOMETRY.slots).map(|slot| GEOMETRY.slot(slot) as usize);
    for at in table.step_by(128).chain(slots) {
        if let Ok(mut of) = Entry::parse(&bytes[at..]) {
            // The slot of an encrypted record does not say its name.
            let name = of.name;
            entry(&mut of);
            if name == BlockHash::from_u128(0) {
                of.name = name;
            }
            bytes[at..at + 128].copy_from_slice(&of.to_bytes());
        }
    }
    for page in [0, 4096] {
        let mut of = Heading::parse(&bytes[page..]).unwrap();
        heading(&mut of);
        bytes[page..page + 4096].copy_from_slice(&of.to_page());
    }
    fs::write(file_in(folder), &bytes).unwrap();
}

#[test]
fn an_encrypted_record_opens_for_its_block_model_file_and_write_alone() {
    type Forge = (&'static str, u16, u64, fn(&mut Entry), fn(&mut Heading));
    let model = SlotRules::new(b"another model").model;
    let cases: [Forge; 6] = [
        ("nothing", 0, 3, |_| (), |_| ()),
        ("name", 0, 4, |entry| entry.name = hash(4), |_| ()),
        ("group", 1, 3, |entry| entry.group = GroupId(1), |_| ()),
        ("file", 0, 3, |entry| entry.file = 77, |heading| heading.file = 77),
        ("generation", 0, 3, |entry| entry.generation -= 1, |_| ()),
        (
            "model",
            0,
            3,
            |entry| entry.model = SlotRules::new(b"another model").model,
            |heading| heading.model = SlotRules::new(b"another model").model,
        ),
    ];
    for (what, group, name, entry, heading) in cases {
        let folder = tempfile::tempdir().unwrap();
        let keys = tenants_and(Some(1));
        let mut options = options(folder.path(), Some(&keys));
        fill(&options, &[3]);
        forge(folder.path(), entry, heading);
        if what == "model" {
            options.rules.model = model;
        }
        let mut opened = open_with(&options);
        assert_eq!(opened.worker.has, BTreeSet::from([(group, name)]), "{what}: it is believed");
        assert_eq!(opened.worker.loads(group, name), what == "nothing", "{what}");
        let miss = u64::from(what != "nothing");
        let no_key = |stats: &DiskStats| stats.missed_as(Miss::NoKey) == miss;
        assert!(no_key(&counted(&opened.watch, no_key)), "{what}: {:?}", opened.watch.stats());
    }
}

#[test]
fn what_waits_to_be_stored_is_forgotten_with_its_key() {
    let folder = tempfile::tempdir().unwrap();
    let keys = tenants_and(Some(3));
    keys.keys.lock().unwrap().insert(3, [3; 32]);
    let mut options = options(folder.path(), Some(&keys));
    options.rules.write_depth = 1;
    options.rules.write_bytes_per_second = Some(200_000);
    let mut opened = open_with(&options);
    let names: Vec<u64> = (1..=12).collect();
    opened.worker.store(0, &names);
    opened.tier.lock().unwrap().forget_key(3);
    // From here on nobody knows that the blocks had a key.
    keys.keys.lock().unwrap().remove(&3);
    *keys.others.lock().unwrap() = None;
    opened.worker.settle();
    let found: Vec<_> = names.into_iter().filter(|&name| opened.worker.loads(0, name)).collect();
    assert_eq!(found, [1, 2], "blocks of other keys, and no others");
    let stats = opened.watch.stats();
    assert_eq!(stats.unstored_as(Unstored::Forgotten) + stats.forgotten, 10, "{stats:?}");
}

/// A file in memory with keys, of so many slots.
fn over_memory(
    slots: u64,
    punches: bool,
    late: Option<u64>,
    image: &Image,
) -> (Worker, Arc<Mutex<SlotFile>>) {
    let geometry = Geometry { slots, slot_bytes: 8192 };
    image.change(|bytes| bytes.resize(geometry.bytes() as usize, 0));
    let is_new = image.bytes().iter().all(|byte| *byte == 0);
    let found_bytes = geometry.bytes();
    let place = Place { geometry, stripe: 0, stripes: 1, set: 1, file: 2, found_bytes, is_new };
    let keys: Option<Arc<dyn Keys>> = Some(tenants_and(Some(1)));
    let rules = SlotRules { punches, keys, ..SlotRules::new(b"a model") };
    let at = late.map(|position| (position, DiskFault::Late)).into_iter().collect();
    let file = MemoryFile::new(image, FaultPlan { at, ..FaultPlan::default() }, Crash::Nothing);
    let tier = SlotFile::open(Box::new(file), &place, &rules).unwrap();
    let tier = Arc::new(Mutex::new(tier));
    (Worker::new(Seen(Arc::clone(&tier)), BLOCK_BYTES), tier)
}

#[test]
fn what_is_being_written_is_forgotten_with_its_key() {
    // The slot, or its page of the table; or a slot that waits until its room was given back.
    for (slots, punches, late) in [(6, false, 2), (6, false, 3), (1, true, 4)] {
        let (mut worker, tier) = over_memory(slots, punches, Some(late), &Image::new(0));
        if punches {
            worker.keep(0, &[4]);
            worker.forget(0, &[4]);
        }
        worker.store(0, &[3]);
        worker.poll();
        let before = tier.lock().unwrap().stats();
        assert_eq!((before.stored, before.used_slots), (u64::from(punches), 0));
        assert!(!tier.lock().unwrap().is_idle(), "{late}: it is being written");
        tier.lock().unwrap().forget_key(1);
        worker.settle();
        assert_eq!(worker.has, BTreeSet::new(), "{late}");
        assert!(!worker.loads(0, 3), "{late}");
        let stats = tier.lock().unwrap().stats();
        assert_eq!(stats.unstored_as(Unstored::Forgotten), 1, "{late}: {stats:?}");
    }
}

/// Where a file says the name of a block, from which a prompt can be tried.
fn names(bytes: &[u8], name: u64) -> Vec<usize> {
    let name = hash(name).to_u128().to_le_bytes();
    let places = bytes.windows(16).enumerate().filter(|(_, window)| *window == name);
    places.map(|(at, _)| at).collect()
}

#[test]
fn nothing_of_a_key_that_is_forgotten_stays_in_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let keys = tenants_and(Some(1));
    let mut opened = open(folder.path(), &keys);
    let all: Vec<u64> = (3..9).collect();
    opened.worker.keep(0, &all);
    opened.worker.store(0, &[3]);
    opened.worker.forget(0, &[4]);
    opened.worker.settle();
    opened.tier.lock().unwrap().forget_key(1);
    behind(&mut opened);
    drop(opened);
    let bytes = fs::read(file_in(folder.path())).unwrap();
    let left: Vec<_> = all.into_iter().map(|name| (name, names(&bytes, name))).collect();
    assert!(left.iter().all(|(_, places)| places.is_empty()), "{left:?}");
}

#[test]
fn a_name_that_has_a_key_leaves_the_file_with_its_record_whatever_becomes_of_that() {
    type Ends = fn(&Path, DiskOptions);
    let cases: [(&str, Ends, usize); 5] = [
        ("it is found", |_, options| drop(open_with(&options)), 1),
        ("it is cleared", |_, options| open_with(&options).worker.clear(), 0),
        (
            "it is not believed",
            |folder, options| {
                forge(folder, |entry| entry.generation = u64::MAX, |_| ());
                drop(open_with(&options));
            },
            0,
        ),
        (
            "the file begins with nothing",
            |_, mut options| {
                options.rules.keep = Keep::Nothing;
                drop(open_with(&options));
            },
            0,
        ),
        (
            "there is another record of the block",
            |folder, options| {
                forge(folder, |entry| entry.name = hash(3), |_| ());
                drop(open_with(&options));
            },
            1,
        ),
    ];
    for (what, ends, left) in cases {
        let folder = tempfile::tempdir().unwrap();
        let options = options(folder.path(), Some(&tenants_and(Some(1))));
        fill(&options, &[3, 4, 5]);
        ends(folder.path(), options);
        let bytes = fs::read(file_in(folder.path())).unwrap();
        assert_eq!(names(&bytes, 3).len(), left, "{what}");
    }
}

#[test]
fn few_pages_of_a_long_table_are_written_at_a_time() {
    let geometry = Geometry { slots: 200 * 32, slot_bytes: 4096 };
    let found_bytes = geometry.bytes();
    let image = Image::new(found_bytes as usize);
    let open = |is_new| {
        let (stripe, stripes, set, file) = (0, 1, 1, 2);
        let place = Place { geometry, stripe, stripes, set, file, found_bytes, is_new };
        let keys: Option<Arc<dyn Keys>> = Some(tenants());
        let keep = Keep::Nothing;
        let rules = SlotRules { read_depth: 1, write_depth: 1, keep, keys, ..SlotRules::default() };
        let at = (3..400).map(|position| (position, DiskFault::Late)).collect();
        let file = MemoryFile::new(&image, FaultPlan { at, ..FaultPlan::default() }, Crash::All);
        let begun = file.operations();
        (SlotFile::open(Box::new(file), &place, &rules).unwrap(), begun)
    };
    drop(open(true));
    let (mut file, begun) = open(false);
    file.work(Duration::ZERO);
    // The headings are read and written, and 200 pages may have names.
    assert_eq!(begun.load(Ordering::Relaxed), 3 + 66);
    while !file.is_idle() {
        file.work(Duration::from_secs(1));
    }
    assert_eq!(begun.load(Ordering::Relaxed), 3 + 200);
}

/// The lives of one file in memory, whose keys go one by one, and which others copy, bring back and write.
struct Lives {
    image: Image,
    keys: Arc<Tenants>,
    /// Keys that are destroyed.
    destroyed: BTreeSet<u64>,
    /// An older copy.
    copy: Option<Vec<u8>>,
    worker: Option<Worker>,
    tier: Option<Arc<Mutex<SlotFile>>>,
    /// Each nonce that was seen in the file, with the record that it is of.
    nonces: BTreeMap<Vec<u8>, Vec<u8>>,
    state: u64,
    loaded: u64,
}

const LIFE: Geometry = Geometry { slots: 6, slot_bytes: 8192 };

/// The key of a name: every third has none.
fn key_of(name: u64) -> Option<u64> {
    Some(name % 3).filter(|key| *key > 0)
}

#[derive(Debug)]
struct ByName(Arc<Tenants>);

impl Keys for ByName {
    fn key_of(&self, _: GroupId, name: BlockHash) -> Option<u64> {
        (0..12).find(|of| hash(*of) == name).and_then(key_of)
    }

    fn key(&self, number: u64) -> Option<[u8; 32]> {
        self.0.key(number)
    }
}

/// Opens a file in memory, with keys or as who has none.
fn open_life(
    image: &Image,
    keys: Option<&Arc<Tenants>>,
    plan: FaultPlan,
) -> Result<(Worker, Arc<Mutex<SlotFile>>), OpenError> {
    let is_new = image.bytes().iter().all(|byte| *byte == 0);
    let found_bytes = LIFE.bytes();
    let (set, file) = (1, u128::from(plan.seed) + 5);
    let place = Place { geometry: LIFE, stripe: 0, stripes: 1, set, file, found_bytes, is_new };
    let keys = keys.map(|keys| Arc::new(ByName(Arc::clone(keys))) as Arc<dyn Keys>);
    let rules = SlotRules { keys, ..SlotRules::new(b"a model") };
    let memory = MemoryFile::new(image, plan, Crash::Sectors);
    let tier = Arc::new(Mutex::new(SlotFile::open(Box::new(memory), &place, &rules)?));
    let mut worker = Worker::new(Seen(Arc::clone(&tier)), BLOCK_BYTES);
    worker.has = worker.survivors(&tier);
    Ok((worker, tier))
}

impl Lives {
    fn pick(&mut self, below: u64) -> u64 {
        random(&mut self.state) % below
    }

    fn worker(&mut self) -> &mut Worker {
        self.worker.as_mut().unwrap()
    }

    fn begin(&mut self) {
        let (percent, seed) = ([0, 0, 3][self.pick(3) as usize], self.pick(1 << 40));
        let plan = FaultPlan { percent, seed, reorders: true, ..FaultPlan::default() };
        let opened = open_life(&self.image, Some(&self.keys), plan).or_else(|_| {
            // Its disk has failed; the next life's does not, unless the headings are gone.
            open_life(&self.image, Some(&self.keys), FaultPlan::default())
        });
        let (mut worker, tier) = opened.unwrap_or_else(|_| {
            self.image.change(|bytes| bytes.fill(0));
            open_life(&self.image, Some(&self.keys), FaultPlan::default()).unwrap()
        });
        // Of a key that is destroyed, nothing may come from any file.
        let names =
            (0..12).filter(|name| key_of(*name).is_some_and(|key| self.destroyed.contains(&key)));
        worker.gone = names.map(|name| (0, name)).collect();
        (self.worker, self.tier) = (Some(worker), Some(tier));
    }

    fn end(&mut self) {
        self.loaded += self.worker().loaded;
        (self.worker, self.tier) = (None, None);
        let bytes = self.image.bytes();
        for slot in 0..LIFE.slots {
            let slot = &bytes[LIFE.slot(slot) as usize..][..8192];
            let Ok(entry) = Entry::parse(slot) else { continue };
            let end = 128 + entry.length as usize;
            // A slot that was torn has a record of one write and the entry of another.
            if entry.key.is_none() || entry.sum != xxhash_rust::xxh3::xxh3_64(&slot[128..end]) {
                continue;
            }
            let (record, nonce) = (slot[128..end].to_vec(), slot[end - 24..end].to_vec());
            let before = self.nonces.insert(nonce, record.clone());
            assert!(before.is_none_or(|before| before == record), "one nonce for two texts");
        }
    }

    /// Others are at the file, between two lives.
    fn others(&mut self) {
        match self.pick(4) {
            0 => self.copy = Some(self.image.bytes()),
            1 => {
                if let Some(copy) = self.copy.clone() {
                    self.image.change(|bytes| *bytes = copy);
                }
            }
            2 => {
                // A file of the right model, made without keys, with other bytes under names that have one.
                let image = Image::new(LIFE.bytes() as usize);
                let (mut worker, tier) = open_life(&image, None, FaultPlan::default()).unwrap();
                let host = Arc::clone(&worker.host);
                for name in [1, 2, 4, 5] {
                    worker.store_as(0, name, &|at| host.put(at, &[7; BLOCK_BYTES]));
                    worker.settle();
                }
                assert_eq!(worker.has.len(), 4);
                drop((worker, tier));
                self.image.change(|bytes| *bytes = image.bytes());
            }
            _ => {
                // A file of something else.
                let whole = self.image.bytes();
                let at = self.pick(whole.len() as u64) as usize;
                self.image.change(|bytes| {
                    bytes[..8192].fill(0);
                    bytes[at.max(8192)] |= 1;
                });
                let seen = self.image.bytes();
                let refused = open_life(&self.image, Some(&self.keys), FaultPlan::default());
                assert!(matches!(refused, Err(OpenError::Hostile { .. })), "{:?}", refused.err());
                assert!(self.image.bytes() == seen, "it is as it was");
                self.image.change(|bytes| *bytes = whole);
            }
        }
    }

    fn step(&mut self) {
        let names: BTreeSet<u64> = (0..1 + self.pick(3)).map(|_| self.pick(12)).collect();
        let names: Vec<u64> = names.into_iter().collect();
        match self.pick(16) {
            0..6 => self.worker().store(0, &names),
            6..12 => self.worker().load(0, &names),
            12 => self.worker().forget(0, &names),
            13 if self.pick(8) == 0 => self.worker().clear(),
            14 if self.pick(12) == 0 => {
                let key = 1 + self.pick(2);
                self.keys.keys.lock().unwrap().remove(&key);
                self.destroyed.insert(key);
                self.tier.as_ref().unwrap().lock().unwrap().forget_key(key);
                let gone = (0..12).filter(|name| key_of(*name) == Some(key)).map(|name| (0, name));
                self.worker().gone.extend(gone);
            }
            15 if self.pick(3) == 0 => {
                self.end();
                self.others();
                self.begin();
            }
            _ => {}
        }
        for _ in 0..self.pick(4) {
            self.worker().poll();
        }
    }
}

/// Blocks that were loaded, and nonces that were seen.
fn random_lives(seed: u64) -> (u64, u64) {
    let image = Image::new(LIFE.bytes() as usize);
    let (keys, copy, destroyed) = (tenants(), None, BTreeSet::new());
    let (worker, tier, nonces, state) = (None, None, BTreeMap::new(), seed);
    let mut lives = Lives { image, keys, destroyed, copy, worker, tier, nonces, state, loaded: 0 };
    lives.begin();
    for _ in 0..80 {
        lives.step();
    }
    lives.worker().settle();
    for name in 0..12 {
        // The worker compares the bytes, and what must be gone.
        lives.worker().loads(0, name);
    }
    lives.end();
    (lives.loaded, lives.nonces.len() as u64)
}

#[test]
fn random_lives_with_keys_older_copies_and_files_of_strangers() {
    let (seeds, first) = (number_of("KV_DISK_SEEDS", 200), number_of("KV_DISK_SEED", 0));
    let (mut loaded, mut nonces) = (0, 0);
    for seed in first..first + seeds {
        let ran = std::panic::catch_unwind(|| random_lives(seed));
        let Ok((of, seen)) = ran else { panic!("seed {seed}") };
        loaded += of;
        nonces += seen;
    }
    println!("{seeds} seeds, {loaded} blocks loaded, {nonces} nonces");
    assert!(loaded > seeds && nonces > seeds, "{loaded} loaded, {nonces} nonces in {seeds} runs");
}
