//! Sizes and counts at their ends: what they make is there, or refused with a typed error.

use std::fs::File;

use crate::prelude::*;
use kv_disk::io::{Buffer, FileIo, RingFile, ThreadFile};

const NUMBERS: [u64; 8] = [0, 1, 4095, 4096, 1 << 20, 1 << 31, 1 << 62, u64::MAX];

#[test]
fn geometries_of_any_numbers_are_valid_or_refused() {
    for bytes in NUMBERS {
        for record in NUMBERS {
            let slot_bytes = Geometry::slot_bytes_for(record);
            if let Some(geometry) = Geometry::within(bytes, slot_bytes) {
                assert!(geometry.is_valid() && geometry.bytes() <= bytes);
                // Less than two slots are wasted, of a file of fewer than the most.
                let wasted = bytes - geometry.bytes();
                assert!(
                    geometry.slots == kv_pool::BLOCKS_MAX || wasted < 2 * slot_bytes + 4096,
                    "{bytes} {record}"
                );
                assert_eq!(geometry.slot(geometry.slots), geometry.bytes());
                assert!(geometry.table_page(geometry.table_pages()) <= geometry.slot(0));
            }
            assert!(Geometry::within(bytes, record).is_none_or(|geometry| geometry.is_valid()));
        }
    }
}

#[test]
fn tiers_of_any_numbers_are_opened_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    for bytes in NUMBERS {
        for record in NUMBERS {
            let mut options = DiskOptions::new(folder.path(), bytes, record, b"a model");
            options.reserve_bytes = 0;
            if bytes <= 1 << 20 {
                drop(DiskTier::open(&options).map(|mut tier| tier.forget_key(bytes)));
                let _ = std::fs::remove_file(folder.path().join("kv-disk-000.slots"));
            } else {
                options.reserve_bytes = u64::MAX;
                let refused = DiskTier::open(&options).unwrap_err();
                let typed =
                    matches!(refused, OpenError::NoRoom { .. } | OpenError::TooSmall { .. });
                assert!(typed, "{refused}");
            }
        }
    }
}

#[test]
fn slot_files_of_any_numbers_are_opened_or_refused() {
    for slots in NUMBERS {
        for slot_bytes in NUMBERS {
            for depth in [0, 1, u32::MAX] {
                let geometry = Geometry { slots, slot_bytes };
                // What is too large for this test's memory is left to the file system's room.
                if geometry.is_valid() && (slots > 1 << 16 || slot_bytes > 1 << 20) {
                    continue;
                }
                let place = Place {
                    geometry,
                    stripe: 0,
                    stripes: 1,
                    set: 1,
                    file: 1,
                    found_bytes: slots,
                    is_new: true,
                };
                let file = MemoryFile::new(&Image::new(16384), FaultPlan::default(), Crash::All);
                let rules = SlotRules { read_depth: depth, ..SlotRules::new(b"") };
                match SlotFile::open(Box::new(file), &place, &rules) {
                    Ok(mut file) => file.forget_key(slots),
                    Err(error) => {
                        let typed =
                            matches!(error, OpenError::Depth { .. } | OpenError::TooSmall { .. });
                        assert!(typed, "{error}");
                    }
                }
            }
        }
    }
}

#[test]
fn buffers_threads_and_rings_of_any_size_are_made_or_refused() {
    for bytes in [0, 1, 4096, 1 << 20] {
        assert!(Buffer::new(bytes).len() >= bytes);
        assert_eq!(Image::new(bytes).bytes().len(), bytes);
    }
    let folder = tempfile::tempdir().unwrap();
    let file = || File::create(folder.path().join("file")).unwrap();
    for depth in [0, 1, 100, u32::MAX] {
        if let Ok(ring) = RingFile::new(file(), depth) {
            assert_eq!(ring.open(), 0);
        }
    }
    for threads in [0, 1, 40, usize::MAX] {
        assert_eq!(ThreadFile::new(file(), threads).unwrap().open(), 0);
    }
}
