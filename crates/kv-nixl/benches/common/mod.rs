//! A node in a process of its own, and medians.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_pool::{BlockHash, GroupId};
use kv_remote::{Key, Member, Node, Peer, Server, ServerOptions};
use kv_tier::RecordKey;

/// The variable that says what the node is to have.
pub(crate) const NODE: &str = "KV_NIXL_BENCH_NODE";
pub(crate) const LEASE: Duration = Duration::from_secs(10);

pub(crate) fn far() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

pub(crate) fn block(number: u64) -> RecordKey {
    let name = BlockHash::from_u128(u128::from(number) + 1);
    RecordKey { format: 7, group: GroupId(0), name }
}

fn key() -> Key {
    Key::new(b"a key of more than 16 bytes").unwrap()
}

/// The median time of `KV_NIXL_BENCH_ROUNDS` rounds, or of so many, behind two that are not counted.
pub(crate) fn timed(rounds: usize, mut run: impl FnMut()) -> Duration {
    let said = std::env::var("KV_NIXL_BENCH_ROUNDS");
    let rounds = said.map_or(rounds, |said| said.parse().unwrap());
    run();
    run();
    let mut times: Vec<_> = (0..rounds)
        .map(|_| {
            let began = Instant::now();
            run();
            began.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

/// Says where a node listens, until its process is told no more.
pub(crate) fn serve(node: Arc<Node>) {
    let options = ServerOptions::new("tcp:127.0.0.1:0".parse().unwrap(), key());
    let server = Server::start(node, options).unwrap();
    println!("{}", server.address());
    drop(std::io::stdin().lines().last());
}

/// A node's process, this program again, and a connection to it.
pub(crate) fn node(of: &str) -> (Child, Peer) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env(NODE, of)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let member = Member { name: "a".to_owned(), address: line.trim().parse().unwrap() };
    (child, Peer::connect(&member, &key(), far()).unwrap())
}

/// Tells a node's process no more, and waits for its end.
pub(crate) fn end(mut child: Child) {
    drop(child.stdin.take());
    child.wait().unwrap();
}
