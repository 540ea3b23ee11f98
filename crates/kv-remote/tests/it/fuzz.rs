//! The readers of messages and of frames, fed with noise and with changed messages of their own.

use crate::common::{block, pair, random};
use crate::prelude::*;
use kv_remote::message::{Change, Request};

fn list<T>(state: &mut u64, mut entry: impl FnMut(&mut u64) -> T) -> Vec<T> {
    (0..random(state) % 6).map(|_| entry(state)).collect()
}

fn span(state: &mut u64) -> Span {
    Span { address: random(state), bytes: random(state) as u32 }
}

fn request(state: &mut u64) -> Request {
    let any_block = |state: &mut u64| RecordKey { format: random(state), ..block(random(state)) };
    match random(state) % 9 {
        0 => {
            let lease = Duration::from_millis(random(state) & 0xffff_ffff);
            Request::Find { lease, blocks: list(state, any_block) }
        }
        1 => Request::Read { lease: LeaseId(random(state)), spans: list(state, span) },
        2 => Request::End { lease: LeaseId(random(state)) },
        3 => {
            let key = any_block(state);
            Request::Put { key, record: list(state, |state| random(state) as u8) }
        }
        4 => Request::Forget { blocks: list(state, any_block) },
        5 => Request::Clear { format: random(state) },
        6 => Request::Describe,
        7 => Request::Release { lease: LeaseId(random(state)) },
        _ => Request::Changes {
            from: Cursor { log: random(state), read: random(state) },
            hosted: random(state).is_multiple_of(2),
            format: random(state),
        },
    }
}

fn reply(state: &mut u64) -> Reply {
    match random(state) % 6 {
        0 => {
            let located = |state: &mut u64| {
                let (span, generation) = (span(state), random(state));
                let head: Vec<u8> = list(state, |state| random(state) as u8);
                let head = (!head.is_empty()).then(|| head.into());
                Located { span, generation, sum: random(state), head }
            };
            let blocks = list(state, located);
            let lease = (!blocks.is_empty()).then(|| LeaseId(random(state) | 1));
            Reply::Found(Found { lease, blocks })
        }
        1 => Reply::Bytes(list(state, |state| random(state) as u8)),
        2 => Reply::Done,
        3 => {
            let change = |state: &mut u64| {
                let (group, name) = pair(random(state));
                Change { is_there: random(state).is_multiple_of(2), group, name }
            };
            let next = Cursor { log: random(state), read: random(state) };
            Reply::Changes(Changes { next, changes: list(state, change) })
        }
        4 => Reply::Described(list(state, |state| random(state) as u8)),
        _ => Reply::Refused(Refusal::ALL[(random(state) % Refusal::ALL.len() as u64) as usize]),
    }
}

/// Changes bytes as a bad network or a bad peer does.
fn change(state: &mut u64, bytes: &mut Vec<u8>) {
    for _ in 0..1 + random(state) % 4 {
        let len = bytes.len().max(1) as u64;
        let (at, to) = ((random(state) % len) as usize, (random(state) % len) as usize);
        match (random(state) % 6, bytes.get_mut(at)) {
            (0, Some(byte)) => *byte ^= 1 << (random(state) % 8),
            (1, Some(byte)) => *byte = random(state) as u8,
            (2, Some(_)) => bytes.truncate(at),
            (3, Some(_)) => {
                bytes[at.min(to)..at.max(to)].fill([0, 0xff][(random(state) % 2) as usize]);
            }
            (4, Some(_)) => bytes.copy_within(at.min(to)..at.max(to), 0),
            _ => bytes.push(random(state) as u8),
        }
    }
}

#[test]
fn every_message_is_read_as_it_was_written_and_noise_is_refused_or_says_itself() {
    let (rounds, seed) = (number_of("KV_REMOTE_FUZZ", 20_000), number_of("KV_REMOTE_SEED", 1));
    let end = Instant::now() + Duration::from_secs(number_of("KV_REMOTE_FUZZ_SECONDS", 0));
    let mut state = seed;
    let (mut done, mut read) = (0_u64, 0_u64);
    while done < rounds || Instant::now() < end {
        done += 1;
        let (request, reply) = (request(&mut state), reply(&mut state));
        assert_eq!(Request::parse(&request.body()), Ok(request.clone()));
        assert_eq!(Reply::parse(&reply.body()), Ok(reply.clone()));
        let mut bytes = match random(&mut state) % 3 {
            0 => request.body(),
            1 => reply.body(),
            _ => (0..random(&mut state) % 80).map(|_| random(&mut state) as u8).collect(),
        };
        change(&mut state, &mut bytes);
        // What is taken for a message is written with the same bytes: nothing is passed over.
        if let Ok(found) = Request::parse(&bytes) {
            assert_eq!(found.body(), bytes);
            read += 1;
        }
        if let Ok(found) = Reply::parse(&bytes) {
            assert_eq!(found.body(), bytes);
            read += 1;
        }
    }
    println!("{done} rounds, {read} read as messages");
    assert!(read > 0, "some changes make another message");
}

#[test]
fn a_server_that_is_fed_with_noise_goes_on() {
    let rounds = number_of("KV_REMOTE_NOISE", 60);
    let (server, member) = serve("a", 8);
    let Address::Tcp(port) = member.address else { panic!("{member:?}") };
    let mut state = number_of("KV_REMOTE_SEED", 1);
    let mut peer = Peer::connect(&member, &key(), far()).unwrap();
    peer.put(block(1), record(1), far()).unwrap();
    for _ in 0..rounds {
        let mut noise = b"KVRM\x04\x00".to_vec();
        noise.extend((0..random(&mut state) % 200).map(|_| random(&mut state) as u8));
        if random(&mut state).is_multiple_of(2) {
            change(&mut state, &mut noise);
        }
        let mut stream = TcpStream::connect(port).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(&noise).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        // It says its welcome at most, and ends the connection.
        let mut answer = Vec::new();
        drop(stream.read_to_end(&mut answer));
        assert!(answer.len() <= 6 + 32 + 16 + 1 + 64 + 32);
    }
    until("all noise is counted", || {
        let stats = server.stats();
        let kept_out = stats.wrong_key + stats.wrong_version + stats.foreign + stats.unfinished;
        kept_out == rounds && stats.let_in == 1
    });
    let found = peer.find_and_pin(&[block(1)], Duration::from_secs(1), far()).unwrap();
    assert_eq!(found.blocks.len(), 1);
}
