//! The readers of headings and entries, fed with noise and with changed words of their own.

use std::time::Instant;

use crate::prelude::*;

fn entry(state: &mut u64) -> Entry {
    let mut next = || random(state);
    let key = next().is_multiple_of(2).then(&mut next);
    Entry {
        name: BlockHash::from_u128(u128::from(next()) << 64 | u128::from(next())),
        group: GroupId(next() as u16),
        file: next().into(),
        model: next().into(),
        epoch: next(),
        generation: next(),
        slot: next(),
        length: next(),
        head: if key.is_some() { 0 } else { 1 + next() as u32 / 2 },
        sum: next(),
        key,
    }
}

fn heading(state: &mut u64) -> Heading {
    let mut next = || random(state);
    let geometry = Geometry { slots: 1 + next() % 1000, slot_bytes: 4096 * (1 + next() % 100) };
    let stripes = 1 + next() as u16 % 100;
    Heading {
        set: next().into(),
        file: next().into(),
        stripe: next() as u16 % stripes,
        stripes,
        model: next().into(),
        sealed: next() % 2 == 0,
        geometry,
        epoch: next(),
        ceiling: next(),
        sequence: next(),
    }
}

/// Changes bytes as a bad disk or a bad neighbour does.
fn change(state: &mut u64, bytes: &mut Vec<u8>) {
    for _ in 0..1 + random(state) % 4 {
        let len = bytes.len().max(1) as u64;
        let (at, to) = ((random(state) % len) as usize, (random(state) % len) as usize);
        match (random(state) % 6, bytes.get_mut(at)) {
            (0, Some(byte)) => *byte ^= 1 << (random(state) % 8),
            (1, Some(byte)) => *byte = random(state) as u8,
            (2, Some(_)) => bytes.truncate(at),
            (3, Some(_)) => {
                bytes[at.min(to)..at.max(to)].fill([0, 0xff][(random(state) % 2) as usize])
            }
            (4, Some(_)) => bytes.copy_within(at.min(to)..at.max(to), 0),
            _ => bytes.push(random(state) as u8),
        }
    }
}

#[test]
fn what_is_read_from_changed_bytes_is_what_was_written_or_nothing() {
    let (rounds, seed) = (number_of("KV_DISK_FUZZ", 20_000), number_of("KV_DISK_SEED", 1));
    let until = Instant::now() + Duration::from_secs(number_of("KV_DISK_FUZZ_SECONDS", 0));
    let mut state = seed;
    let (mut done, mut read) = (0_u64, 0_u64);
    while done < rounds || Instant::now() < until {
        done += 1;
        let (entry, heading) = (entry(&mut state), heading(&mut state));
        let (whole_entry, whole_heading) = (entry.to_bytes(), heading.to_page());
        assert_eq!(Entry::parse(&whole_entry), Ok(entry));
        assert_eq!(Heading::parse(&whole_heading), Ok(heading));
        let mut bytes = match random(&mut state) % 3 {
            0 => whole_entry.to_vec(),
            1 => whole_heading.to_vec(),
            _ => (0..ENTRY_BYTES + 8).map(|_| random(&mut state) as u8).collect(),
        };
        change(&mut state, &mut bytes);
        // Whatever is taken for right is what was written, in every word that counts.
        if let Ok(found) = Entry::parse(&bytes) {
            assert_eq!(found, entry);
            read += 1;
        }
        if let Ok(found) = Heading::parse(&bytes) {
            assert_eq!(found, heading);
            read += 1;
        }
        let other: Vec<u8> = (0..200).map(|_| random(&mut state) as u8).collect();
        assert!(Heading::newer(&bytes, &other).is_err() || Heading::parse(&bytes).is_ok());
    }
    println!("{done} rounds, {read} read as what was written");
    assert!(read > 0, "some changes change nothing that counts");
}
