//! The bytes of files as this version has always written them: they change with `VERSION` of the layout alone.

use std::sync::{Arc, Mutex};

use kv_manager::{Settled, TierTransfers, WorkerId};
use kv_pool::{BlockHash, BlockId, GroupId, Tier};
use kv_tier::{Direction, HostBlocks, LowerTier, TicketId, Transfer};
use xxhash_rust::xxh3::xxh3_64;

use super::*;
use crate::io::memory::{Crash, FaultPlan, Image, MemoryFile};
use crate::layout::Geometry;

const GEOMETRY: Geometry = Geometry { slots: 3, slot_bytes: 8192 };
const BLOCK_BYTES: usize = 5000;

/// The first bytes of the file. Its heading is 128 long, and zeros are behind it.
const HEADING: &str = "4b564449534b303104000000000001000b0000000000000000000000000000000c00000000000000\
    00000000000000003e9d075cf4296a32563a513f5144bf8503000000000000000020000000000000\
    01000000000000000000000000010000020000000000000000000000000000000000000000000000\
    e52ae247604e1c47";
const ENTRIES: [&str; 2] = [
    "4b56534c4f5430310400000003000000100f0e0d0c0b0a0908070605040302010c00000000000000\
    00000000000000003e9d075cf4296a32563a513f5144bf8501000000000000000500000000000000\
    0000000000000000e013000000000000c339c5c669d9d98a00000000000000005800000000000000\
    ff4c6930e0dc1d01",
    "4b56534c4f5430310400000003000000201e1c1a18161412100e0c0a080604020c00000000000000\
    00000000000000003e9d075cf4296a32563a513f5144bf8501000000000000000600000000000000\
    0100000000000000e013000000000000b29d346b8a18b38900000000000000005800000000000000\
    2edce214dcf817ce",
];
const WHOLE: u64 = 0x46026448d229026f;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.chars().map(|of| of.to_digit(16).unwrap() as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn name(number: u64) -> BlockHash {
    BlockHash::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10 * u128::from(number))
}

fn byte(block: usize, at: usize) -> u8 {
    (block * 131 + at * 7 + at / 251) as u8
}

/// Two blocks of host memory.
#[derive(Debug)]
pub(crate) struct Host(Mutex<Vec<u8>>);

impl Host {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(vec![0; 2 * BLOCK_BYTES]))
    }
}

impl HostBlocks for Host {
    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn section_bytes(&self) -> usize {
        2000
    }

    fn read(&self, block: BlockId, offset: usize, into: &mut [u8]) -> bool {
        let at = block.index() * BLOCK_BYTES + offset;
        into.copy_from_slice(&self.0.lock().unwrap()[at..at + into.len()]);
        true
    }

    fn write(&self, block: BlockId, offset: usize, from: &[u8]) -> bool {
        let at = block.index() * BLOCK_BYTES + offset;
        self.0.lock().unwrap()[at..at + from.len()].copy_from_slice(from);
        true
    }
}

fn file(image: &Image, is_new: bool) -> SlotFile {
    let io = MemoryFile::new(image, FaultPlan::default(), Crash::Nothing);
    let (set, file, found_bytes) = (11, 12, GEOMETRY.bytes());
    let place = Place { geometry: GEOMETRY, stripe: 0, stripes: 1, set, file, found_bytes, is_new };
    let mut file = SlotFile::open(Box::new(io), &place, &SlotRules::new(b"a model")).unwrap();
    // It is random within the life of a process.
    file.next_generation = 5;
    file
}

/// Moves both blocks between memory and a file.
fn transfer(file: SlotFile, host: &Arc<dyn HostBlocks>, direction: Direction) {
    let mut transfers = TierTransfers::new(vec![Box::new(file)], 7);
    let blocks = vec![(name(1), BlockId::from(0)), (name(2), BlockId::from(1))];
    let (ticket, tier, group) = (TicketId(1), Tier::Third, GroupId(3));
    transfers.begin(&Transfer { ticket, tier, group, direction, blocks }, host).unwrap();
    let (mut settled, mut dropped) = (Vec::new(), Vec::new());
    while settled.is_empty() {
        transfers.poll(WorkerId(0), &mut settled, &mut dropped);
    }
    let [Settled { wrong, .. }] = &settled[..] else { panic!("{settled:?}") };
    assert!(wrong.is_empty() && dropped.is_empty());
}

#[test]
fn a_file_has_the_bytes_that_it_had_and_they_are_read() {
    let image = Image::new(GEOMETRY.bytes() as usize);
    let content: Vec<u8> =
        (0..2 * BLOCK_BYTES).map(|at| byte(at / BLOCK_BYTES, at % BLOCK_BYTES)).collect();
    let host: Arc<dyn HostBlocks> = Arc::new(Host(Mutex::new(content.clone())));
    transfer(file(&image, true), &host, Direction::Store);
    let found = image.bytes();
    assert_eq!(hex(&found[..128]), HEADING);
    assert!(found[128..512].iter().all(|byte| *byte == 0));
    let table = GEOMETRY.table_page(0) as usize;
    let entries = [0, 1].map(|slot| hex(&found[table + slot * ENTRY_BYTES..][..ENTRY_BYTES]));
    assert_eq!(entries, ENTRIES);
    for (slot, text) in (0..).zip(ENTRIES) {
        let entry = Entry::parse(&bytes(text)).unwrap();
        assert_eq!((entry.slot, entry.generation, entry.name), (slot, 5 + slot, name(1 + slot)));
        assert_eq!((entry.to_bytes().to_vec(), entry.group), (bytes(text), GroupId(3)));
    }
    let mut page = bytes(HEADING);
    page.resize(PAGE_BYTES, 0);
    let heading = Heading::parse(&page).unwrap();
    assert_eq!((heading.set, heading.file, heading.geometry), (11, 12, GEOMETRY));
    assert_eq!(heading.to_page().to_vec(), page);
    assert_eq!(xxh3_64(&found), WHOLE);

    let loaded = Arc::new(Host(Mutex::new(vec![0; 2 * BLOCK_BYTES])));
    let host: Arc<dyn HostBlocks> = loaded.clone();
    let mut file = file(&image, false);
    let mut survivors = Vec::new();
    file.survivors(&mut survivors);
    assert_eq!(survivors, [1, 2].map(|number| (GroupId(3), name(number))));
    transfer(file, &host, Direction::Load);
    assert!(*loaded.0.lock().unwrap() == content);
}

#[cfg(feature = "seal")]
mod sealed {
    use super::*;
    use crate::seal::{Binding, open};

    const RECORD: &str = "13bc012b96585c1a2f0359bb747f0f197e270997ae067be9bffddd0a2cfdbd304344395a42c1ff74\
        16b10e1e3cb0372d8d";

    #[derive(Debug)]
    struct One;

    impl Keys for One {
        fn key_of(&self, _: GroupId, _: BlockHash) -> Option<u64> {
            Some(1)
        }

        fn key(&self, number: u64) -> Option<[u8; 32]> {
            (number == 1).then_some([9; 32])
        }
    }

    #[test]
    fn an_encrypted_record_of_before_is_read() {
        let keys: Arc<dyn Keys> = Arc::new(One);
        let of = Binding { group: GroupId(3), name: name(1), model: 5, file: 7, generation: 9 };
        let mut record = bytes(RECORD);
        assert!(open(&keys, 1, of, &mut record));
        assert_eq!(&record[..record.len() - 40], b"some text");
    }
}
