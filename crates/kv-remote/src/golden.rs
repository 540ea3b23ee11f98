//! The bytes that nodes of one version say to each other: they change with `VERSION` in `channel.rs` alone.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_pool::{BlockHash, GroupId};
use kv_tier::RecordKey;

use crate::address::{Address, Stream};
use crate::auth::{Role, Tags, Transcript};
use crate::channel::{Channel, Facts};
use crate::entry::Entry;
use crate::members::score;
use crate::message::{Change, Changes, Cursor, Found, LeaseId, Located, Reply, Request, Span};
use crate::{Key, Refusal};

/// Bytes as text: as many lines as there are.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.chars().map(|of| of.to_digit(16).unwrap() as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn block(number: u16) -> RecordKey {
    let name = 0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10_u128.wrapping_mul(number.into());
    let (format, group) = (0xf0e1_d2c3_b4a5_9687, GroupId(number));
    RecordKey { format, group, name: BlockHash::from_u128(name) }
}

fn span(address: u64) -> Span {
    Span { address, bytes: 0x1234 }
}

const REQUESTS: &[&str] = &[
    "01dc050000020000008796a5b4c3d2e1f00100100f0e0d0c0b0a0908070605040302018796a5b4c3d2e1f00200201e1c\
     1a18161412100e0c0a08060402",
    "02887766554433221102000000400000000000000034120000000000000001000034120000",
    "038877665544332211",
    "048796a5b4c3d2e1f00300302d2a2724211e1b1815120f0c09060361207265636f7264",
    "05010000008796a5b4c3d2e1f00400403c3834302c2824201c1814100c0804",
    "068796a5b4c3d2e1f0",
    "0711100f0e0d0c0b0a0700000000000000018796a5b4c3d2e1f0",
    "08",
    "098877665544332211",
];

const REPLIES: &[&str] = &[
    "01080000000000000002000000800000000000000034120000050000000000000000ffeeddccbbaa\
     99000000000000000000020000341200000600000000000000000000000000000008000000697473\
     2068656164",
    "01000000000000000000000000",
    "02736f6d65206279746573",
    "03",
    "040900000000000000020000000000000001000000010500504b46413c37322d28231e19140f0a05",
    "06612064657363726970746f72",
    "0500",
    "0501",
    "0502",
    "0503",
    "0504",
];

fn requests() -> Vec<Request> {
    let lease = LeaseId(0x1122_3344_5566_7788);
    let from = Cursor { log: 0x0a0b_0c0d_0e0f_1011, read: 7 };
    let format = block(0).format;
    vec![
        Request::Find { lease: Duration::from_millis(1500), blocks: vec![block(1), block(2)] },
        Request::Read { lease, spans: vec![span(64), span(1 << 40)] },
        Request::End { lease },
        Request::Put { key: block(3), record: b"a record".to_vec() },
        Request::Forget { blocks: vec![block(4)] },
        Request::Clear { format },
        Request::Changes { from, hosted: true, format },
        Request::Describe,
        Request::Release { lease },
    ]
}

fn replies() -> Vec<Reply> {
    let head: Arc<[u8]> = b"its head".as_slice().into();
    let slot = Located { span: span(128), generation: 5, sum: 0x99aa_bbcc_ddee_ff00, head: None };
    let hosted = Located { span: span(1 << 41), generation: 6, sum: 0, head: Some(head) };
    let RecordKey { group, name, .. } = block(5);
    let next = Cursor { log: 9, read: 2 };
    let mut replies = vec![
        Reply::Found(Found { lease: Some(LeaseId(8)), blocks: vec![slot, hosted] }),
        Reply::Found(Found::default()),
        Reply::Bytes(b"some bytes".to_vec()),
        Reply::Done,
        Reply::Changes(Changes { next, changes: vec![Change { is_there: true, group, name }] }),
        Reply::Described(b"a descriptor".to_vec()),
    ];
    replies.extend(Refusal::ALL.map(Reply::Refused));
    replies
}

#[test]
fn messages_have_the_bytes_that_they_had() {
    let found: Vec<_> = requests().iter().map(|of| hex(&of.body())).collect();
    assert_eq!(found, REQUESTS);
    for (text, request) in REQUESTS.iter().zip(requests()) {
        assert_eq!(Request::parse(&bytes(text)), Ok(request));
    }
    let found: Vec<_> = replies().iter().map(|of| hex(&of.body())).collect();
    assert_eq!(found, REPLIES);
    for (text, reply) in REPLIES.iter().zip(replies()) {
        assert_eq!(Reply::parse(&bytes(text)), Ok(reply));
    }
}

#[test]
fn an_entry_has_the_bytes_that_it_had() {
    const ENTRY: &str = "4b5652454d4f543290877e756c635a51483f362d241b12098796a5b4c3d2e1f00900000008000000\
        0b00000000000000e3c76782107464cf850fccb6bcdd14b9";
    let entry = Entry::of(block(9), 11, b"a record");
    assert_eq!(hex(&entry.bytes()), ENTRY);
    let slot = [bytes(ENTRY), b"a record".to_vec()].concat();
    let located = Located { span: span(0), generation: 11, sum: 0, head: None };
    assert_eq!(located.record(&slot, block(9)).unwrap(), b"a record".as_slice());
}

/// What is said with these nonces, which are random elsewhere.
fn said<'a>(facts: &'a [u8; 16], client: &'a [u8; 32], server: &'a [u8; 32]) -> Transcript<'a> {
    Transcript { version: 4, client, server, name: "node-a", facts }
}

fn key() -> Key {
    Key::new(b"a key of more than 16 bytes").unwrap()
}

#[test]
fn proofs_and_tags_have_the_bytes_that_they_had() {
    const PROOFS: [&str; 2] = [
        "8c34926b163f6a0c1a03e259870c0723e7c36df5205955394d80ad988476c751",
        "864d7e8f77175ddba88c425f745fde6931e1396ef3a93c618df00fe2a262743a",
    ];
    const TAGS: [&str; 4] = [
        "1c29adec4b65482dc9a10ce134663e24",
        "79a644e93d1d0e96f97e4c5486843742",
        "517d23e2dc906c3bd8c93c98fed8509b",
        "50a7002545a6a2afc849581c89fb8761",
    ];
    let (facts, client, server) = ([7; 16], [1; 32], [2; 32]);
    let said = said(&facts, &client, &server);
    let roles = [Role::Client, Role::Server];
    let proofs = roles.map(|role| hex(&said.prove(&key(), role)));
    assert_eq!(proofs, PROOFS);
    let tags = roles.map(|role| {
        let mut tags = said.tags(&key(), role);
        [hex(&tags.next(b"")), hex(&tags.next(b"a body"))]
    });
    assert_eq!(tags.concat(), TAGS);
}

/// Takes a frame from its bytes: its length, its body and its tag.
fn take(stream: &mut UnixStream, tags: &mut Tags) -> Vec<u8> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut frame = vec![0; u32::from_le_bytes(length) as usize + 16];
    stream.read_exact(&mut frame).unwrap();
    let (body, tag) = frame.split_at(frame.len() - 16);
    assert_eq!(tag, tags.next(body));
    body.to_vec()
}

/// A client that knows nothing but the bytes of the protocol is let in, and understood.
#[test]
fn a_connection_begins_with_the_bytes_that_it_began_with() {
    let deadline = Instant::now() + Duration::from_secs(60);
    let (mut client, server) = UnixStream::pair().unwrap();
    client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let served = std::thread::spawn(move || {
        let facts = Facts { memory_bytes: 1 << 30, slot_bytes: 0x1240 };
        let stream = Stream::Unix(server);
        let accepted =
            Channel::accept(stream, ("node-a", facts), &key(), 1 << 20, deadline, || true);
        let mut channel = accepted.unwrap();
        let asked = channel.receive(deadline).unwrap().to_vec();
        channel.send(&asked.repeat(2), deadline).unwrap();
    });
    let nonce = [1; 32];
    client.write_all(&[b"KVRM\x04\x00".as_slice(), &nonce].concat()).unwrap();
    let mut welcome = [0; 6 + 32 + 16 + 1 + 6 + 32];
    client.read_exact(&mut welcome).unwrap();
    let (head, rest) = welcome.split_at(6);
    let (theirs, rest) = rest.split_first_chunk::<32>().unwrap();
    let (facts, rest) = rest.split_first_chunk::<16>().unwrap();
    assert_eq!((head, rest[0], &rest[1..7]), (b"KVRM\x04\x00".as_slice(), 6, b"node-a".as_slice()));
    assert_eq!(hex(facts), "00000040000000004012000000000000");
    let said = said(facts, &nonce, theirs);
    assert_eq!(rest[7..], said.prove(&key(), Role::Server));
    client.write_all(&said.prove(&key(), Role::Client)).unwrap();
    let (mut sends, mut receives) =
        (said.tags(&key(), Role::Client), said.tags(&key(), Role::Server));
    assert_eq!(take(&mut client, &mut receives), b"");
    let body = b"a body";
    let frame: [&[u8]; 3] = [&6_u32.to_le_bytes(), body, &sends.next(body)];
    client.write_all(&frame.concat()).unwrap();
    assert_eq!(take(&mut client, &mut receives), b"a bodya body");
    served.join().unwrap();
}

/// A server that knows nothing but the bytes of the protocol is believed, and understood.
#[test]
fn a_call_begins_with_the_bytes_that_it_began_with() {
    let deadline = Instant::now() + Duration::from_secs(60);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("node");
    let listener = UnixListener::bind(&path).unwrap();
    let called = std::thread::spawn(move || {
        let address = Address::Unix(path);
        let connected = Channel::connect(&address, "node-a", &key(), 1 << 20, deadline);
        let (mut channel, facts) = connected.unwrap();
        assert_eq!(facts, Facts { memory_bytes: 1 << 30, slot_bytes: 0x1240 });
        channel.send(b"a body", deadline).unwrap();
        assert_eq!(channel.receive(deadline).unwrap(), b"an answer");
    });
    let (mut client, _) = listener.accept().unwrap();
    client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut hello = [0; 6 + 32];
    client.read_exact(&mut hello).unwrap();
    let (head, nonce) = hello.split_first_chunk::<6>().unwrap();
    assert_eq!(head, b"KVRM\x04\x00");
    let (facts, server) = (bytes("00000040000000004012000000000000"), [2; 32]);
    let (facts, nonce) = (facts.first_chunk().unwrap(), nonce.first_chunk().unwrap());
    let said = said(facts, nonce, &server);
    let proof = said.prove(&key(), Role::Server);
    let welcome: [&[u8]; 5] = [b"KVRM\x04\x00", &server, facts, b"\x06node-a", &proof];
    client.write_all(&welcome.concat()).unwrap();
    let mut proof = [0; 32];
    client.read_exact(&mut proof).unwrap();
    assert_eq!(proof, said.prove(&key(), Role::Client));
    let (mut sends, mut receives) =
        (said.tags(&key(), Role::Server), said.tags(&key(), Role::Client));
    let mut send = |body: &[u8]| {
        let length = (body.len() as u32).to_le_bytes();
        client.write_all(&[length.as_slice(), body, &sends.next(body)].concat()).unwrap();
    };
    send(b"");
    send(b"an answer");
    assert_eq!(take(&mut client, &mut receives), b"a body");
    called.join().unwrap();
}

/// All hosts have to agree on where a block is kept, and on how addresses are written in lists of members.
#[test]
fn members_are_chosen_and_written_as_they_were() {
    let scores = [("node-a", 1), ("node-a", 2), ("", 1)].map(|(name, of)| {
        let RecordKey { group, name: block, .. } = block(of);
        score(name, (group, block))
    });
    assert_eq!(scores, [12225948336024000824, 12306914929409133932, 13163626092696682667]);
    for text in ["unix:/run/kv.sock", "tcp:10.0.0.7:7001", "tcp:[::1]:7001"] {
        assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
    }
}
