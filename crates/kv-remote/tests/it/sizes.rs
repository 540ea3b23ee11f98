//! Sizes, counts and times at their ends: what they make is there, or refused.

use crate::common::{block, pair};
use crate::prelude::*;
use kv_remote::message::Request;

const NUMBERS: [u64; 8] = [0, 1, 63, 64, 1 << 12, 1 << 31, 1 << 62, u64::MAX];

#[test]
fn memory_of_any_size_is_there_or_refused() {
    for bytes in NUMBERS {
        if bytes < 1 << 20 {
            let memory = HostMemory::new(bytes).unwrap();
            assert_eq!(memory.bytes(), bytes.next_multiple_of(8));
            for at in NUMBERS {
                let there = at.checked_add(8).is_some_and(|end| end <= memory.bytes());
                assert_eq!(memory.read(at, &mut [0; 8]), there);
                assert_eq!(memory.write(at, &[0; 8]), there);
                assert_eq!(memory.read(at, &mut []), at <= memory.bytes());
            }
        } else if bytes >= 1 << 62 {
            assert_eq!(HostMemory::new(bytes).unwrap_err(), NodeError::System { bytes });
        }
    }
}

#[test]
fn nodes_of_any_numbers_are_made_or_refused() {
    for record_bytes in NUMBERS {
        for leases_max in [0, 1, usize::MAX] {
            let mut options = NodeOptions::new("a", record_bytes);
            options.leases_max = leases_max;
            options.lease_max = Duration::MAX;
            let memory = Arc::new(HostMemory::new(1 << 13).unwrap());
            let made = Node::new(&options, memory, Arc::new(SystemClock::new()));
            match made {
                Ok(node) => {
                    assert!(node.slot_bytes() <= 1 << 13);
                    node.put(block(1), &[7]).unwrap();
                    let pinned = node.find_and_pin(ReaderId(u64::MAX), &[block(1)], Duration::MAX);
                    assert_eq!(pinned.is_ok(), leases_max > 0);
                }
                Err(error) => assert!(
                    matches!(error, NodeError::Record { .. } | NodeError::TooSmall { .. }),
                    "{error}"
                ),
            }
        }
    }
    for name in [String::new(), "n".repeat(65)] {
        let memory = Arc::new(HostMemory::new(1 << 13).unwrap());
        let options = NodeOptions::new(&name, 100);
        let refused = Node::new(&options, memory, Arc::new(SystemClock::new())).unwrap_err();
        assert_eq!(refused, NodeError::Name { bytes: name.len(), max: 64 });
    }
}

#[test]
fn servers_of_any_limits_serve_or_refuse_and_end() {
    for connections_max in [0, 1, usize::MAX] {
        for limit in [Duration::ZERO, Duration::from_secs(1), Duration::MAX] {
            let (node, _) = common::manual_node(2);
            let address: Address = "tcp:127.0.0.1:0".parse().unwrap();
            let mut options = ServerOptions::new(address, common::key());
            options.connections_max = connections_max;
            options.handshake_max = limit;
            options.frame_max = limit;
            options.idle_max = limit;
            let server = Server::start(Arc::new(node), options).unwrap();
            let member =
                kv_remote::Member { name: "a".to_owned(), address: server.address().clone() };
            let called = kv_remote::Peer::connect(&member, &common::key(), common::far());
            assert!(called.is_err() || connections_max > 0 && !limit.is_zero());
        }
    }
}

#[test]
fn any_spans_and_lengths_are_read_or_refused() {
    let (node, _) = common::manual_node(2);
    node.put(block(1), &record(1)).unwrap();
    let reader = ReaderId(0);
    let many = vec![block(1); LIST_MAX + 5];
    let found = node.find_and_pin(reader, &many, Duration::ZERO).unwrap();
    assert_eq!(found.blocks.len(), LIST_MAX);
    for address in NUMBERS {
        for bytes in [0, 1, u32::MAX] {
            let spans = vec![Span { address, bytes }; 3];
            let _ = node.read(reader, found.lease.unwrap(), &spans, &mut Vec::new());
            let _ = node.end(ReaderId(address), LeaseId(address));
            let located = Located { span: spans[0], generation: address, sum: 0, head: None };
            assert!(matches!(located.record(&[0; 63], block(1)), Err(Unfit::Short)));
            let two = Found { lease: None, blocks: vec![located; 2] };
            for bytes_max in NUMBERS {
                let joined = Joined::of(&two, bytes_max);
                let of = |span| joined.blocks_of(span).count();
                assert_eq!((0..joined.spans().len()).map(of).sum::<usize>(), 2);
                assert_eq!(of(usize::MAX), 0);
            }
        }
    }
    let node = Arc::new(node);
    for bytes in [0, 1, common::RECORD_BYTES as u32 + 1, u32::MAX] {
        let room = node.reserve(&[(block(2), bytes)]);
        assert_eq!(room.map(drop).is_ok(), bytes == 1);
        for sums in [&[][..], &[1, 2]] {
            let kept = node.reserve(&[(block(2), 1)]).unwrap().keep(sums);
            assert_eq!(kept, Err(Refusal::Length));
        }
    }
    for count in [0, 1, usize::MAX] {
        assert!(replicas(&[], pair(1), count).is_empty());
    }
}

#[test]
fn answers_of_any_numbers_are_read_or_refused() {
    let (_server, member) = common::serve("a", 2);
    for address in NUMBERS {
        for bytes in [0, 1, u32::MAX] {
            let mut peer = Peer::connect(&member, &common::key(), common::far()).unwrap();
            let located =
                Located { span: Span { address, bytes }, generation: address, sum: 0, head: None };
            let found = Found { lease: Some(LeaseId(address)), blocks: vec![located.clone(); 3] };
            let wanted = [block(1), block(2)];
            let (mut said, deadline) = (Vec::new(), common::far());
            let each = |at: usize, read: Result<&[u8], Unfit>| said.push((at, read.is_ok()));
            let read = peer.read_each(&mut SocketTransfer, &found, &wanted, deadline, each);
            assert!(read.is_err() || said.len() == 2, "{read:?}, {said:?}");
            assert!(said.iter().all(|(at, is_right)| *at < 2 && !is_right));
            let read = peer.read(&mut SocketTransfer, &found, &wanted, deadline);
            assert!(read.is_err() || read.is_ok_and(|read| read.len() == 2));
        }
    }
}

#[test]
fn keys_and_messages_of_any_length_are_taken_or_refused() {
    for bytes in [0, 1, 15, 16, 64, 65, 1 << 16] {
        assert_eq!(Key::new(&vec![3; bytes]).is_ok(), bytes >= 16);
        let body = vec![2; bytes];
        // Of a kind with lists, with more bytes than any list says.
        assert!(Request::parse(&body).is_err());
        assert_eq!(Reply::parse(&body).is_ok(), bytes > 0, "bytes, as many as there are");
    }
}

#[test]
fn handovers_of_any_numbers_are_taken_or_refused() {
    let numbers = [0, 1, 3, 1 << 31, u32::MAX];
    let (server, member) = common::serve("a", 40);
    for number in numbers {
        let mut peer = Peer::connect(&member, &common::key(), common::far()).unwrap();
        let id = HandoverId(u128::from(number) << 100);
        assert!(Pull::decline(&mut peer, (id, number), common::far()).is_ok());
    }
    let format = GroupFormat { kind: GroupKind::Full, block_tokens: 1, draft_model: u32::MAX == 0 };
    for (at, number) in (0..).zip(numbers) {
        let group = GroupSheet {
            format,
            layers: number,
            part_bytes: number,
            places: (0..number.min(5)).collect(),
        };
        let sheet = Sheet {
            tokens: number.into(),
            draft_tokens: number.into(),
            ids: Vec::new(),
            shards: number,
            readers: number,
            chunk_places: number,
            content: u128::from(number) << 96,
            groups: vec![group],
        };
        for lasts in [Duration::ZERO, Duration::MAX] {
            let id = HandoverId(at);
            let offer = Offer::new(server.node(), id, sheet.clone(), lasts);
            assert_eq!(offer.is_ok(), number == 1 || number == 3, "{number}");
            let Ok(mut offer) = offer else { continue };
            let group = GroupId(number as u16);
            let part = Part { group, place: number, layer: number, shard: number };
            assert!(offer.give(&[(part, &[])]).is_err());
            assert!(offer.give(&[]).is_ok() || lasts.is_zero());
            assert!(offer.reserve(&[part]).is_err());
            if let Ok(none) = offer.reserve(&[]) {
                assert!(offer.give_written(none, &[number.into()]).is_err());
            }
            let mut peer = Peer::connect(&member, &common::key(), common::far()).unwrap();
            let mut transfer = SocketTransfer;
            let opened =
                Pull::open(&mut peer, &mut transfer, (id, number - 1), lasts, common::far());
            assert!(opened.is_ok() || lasts.is_zero());
            let Ok(Some(mut pull)) = opened else { continue };
            assert!(pull.take_shards(&[number]).is_err());
            let _ = pull.look(&mut peer, &mut transfer, common::far(), |_, _| {});
            let past = std::time::Instant::now();
            assert!(pull.wait(&mut peer, &mut transfer, past, |_, _| {}).is_err());
        }
    }
}
