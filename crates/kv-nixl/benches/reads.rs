//! What a block from another process costs: found, pinned, read, checked and given back, beside a plain transfer of the
//! same bytes by NIXL and beside the same over the connection.
//!
//! `cargo bench -p kv-nixl --bench reads`, with `KV_NIXL_LIBRARY` as of the tests. `UCX_TLS` says which way; without it, `tcp` and
//! `tcp,cma` are measured one after the other. Figures are medians of `KV_NIXL_BENCH_ROUNDS` rounds (15).

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement ends by panicking")]

mod common;

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use common::{LEASE, NODE, block, far};
use kv_nixl::{Library, NixlMemory, NixlTransfer};
use kv_pool::clock::SystemClock;
use kv_remote::{HostMemory, Joined, Node, NodeOptions, Peer, SocketTransfer, Transfer};

/// Bytes of a record, and blocks of a request.
const SHAPES: [(u64, u64); 5] =
    [(64 << 10, 1), (64 << 10, 64), (256 << 10, 32), (1 << 20, 32), (4 << 20, 8)];

/// Bytes that are read as one, as of a reader.
const PIECE_MAX: u64 = 512 << 10;

/// Bytes that are read at a time for the plain transfer, unless one span has more.
const PLAIN_BYTES: u64 = 8 << 20;

fn main() {
    if let Ok(bytes) = std::env::var(NODE) {
        serve(bytes.parse().unwrap());
        return;
    }
    if std::env::var_os("UCX_TLS").is_some() {
        measure();
        return;
    }
    for way in ["tcp", "tcp,cma"] {
        let status = Command::new(std::env::current_exe().unwrap())
            .env("UCX_TLS", way)
            .env("UCX_LOG_FILE", "stderr")
            .env("UCX_MODULES", "^ib")
            .status();
        assert!(status.unwrap().success());
    }
}

fn serve(record_bytes: u64) {
    let memory = Arc::new(HostMemory::new(record_bytes * 80 + (1 << 20)).unwrap());
    let memory = NixlMemory::new(&Library::open().unwrap(), memory).unwrap();
    let options = NodeOptions::new("a", record_bytes);
    let node = Node::new(&options, Arc::new(memory), Arc::new(SystemClock::new())).unwrap();
    for number in 0..64 {
        let record: Vec<u8> = (0..record_bytes).map(|at| (at * 31 + number) as u8).collect();
        node.put(block(number), &record).unwrap();
    }
    common::serve(Arc::new(node));
}

fn timed(run: impl FnMut()) -> Duration {
    common::timed(15, run)
}

fn measure() {
    println!("UCX_TLS={}", std::env::var("UCX_TLS").unwrap_or_default());
    println!(
        "{:>8} {:>6} {:>12} {:>12} {:>12} {:>6} {:>12} {:>10} {:>10}",
        "bytes",
        "blocks",
        "read GB/s",
        "copied GB/s",
        "plain GB/s",
        "ratio",
        "socket GB/s",
        "us/block",
        "us/request"
    );
    for (bytes, count) in SHAPES {
        let (child, mut peer) = common::node(&bytes.to_string());
        let wanted: Vec<_> = (0..count).map(block).collect();
        let (mut nixl, mut socket) =
            (NixlTransfer::new(Library::open().unwrap()).emulated(), SocketTransfer);
        let mut into = vec![0_u8; (bytes * count) as usize];
        let mut whole = |peer: &mut Peer, transfer: &mut dyn Transfer, copies: bool| {
            let found = peer.find_and_pin(&wanted, LEASE, far()).unwrap();
            assert_eq!(found.blocks.len() as u64, count);
            peer.read_each(transfer, &found, &wanted, far(), |at, record| {
                let (record, at) = (record.unwrap(), at * bytes as usize);
                if copies {
                    into[at..at + record.len()].copy_from_slice(record);
                }
            })
            .unwrap();
            peer.release(found.lease.unwrap(), far()).unwrap();
        };
        let read = timed(|| whole(&mut peer, &mut nixl, false));
        let copied = timed(|| whole(&mut peer, &mut nixl, true));
        let over_socket = timed(|| whole(&mut peer, &mut socket, true));
        let found = peer.find_and_pin(&wanted, LEASE, far()).unwrap();
        let (lease, joined) = (found.lease.unwrap(), Joined::of(&found, PIECE_MAX));
        let longest = joined.spans().iter().map(|span| u64::from(span.bytes)).max().unwrap();
        let at_a_time = (PLAIN_BYTES / longest).max(1) as usize;
        let plain = timed(|| {
            let mut read = 0;
            let mut each = |_, span: &[u8]| read += span.len() as u64;
            // So few at a time that no second thread makes the calls.
            for spans in joined.spans().chunks(at_a_time) {
                nixl.read(&mut peer, lease, spans, far(), &mut each).unwrap();
            }
            assert!(read >= bytes * count);
        });
        let asked = timed(|| {
            let found = peer.find_and_pin(&wanted, LEASE, far()).unwrap();
            peer.release(found.lease.unwrap(), far()).unwrap();
        });
        let rate = |time: Duration| (bytes * count) as f64 / time.as_secs_f64() / 1e9;
        println!(
            "{bytes:>8} {count:>6} {:>12.2} {:>12.2} {:>12.2} {:>6.2} {:>12.2} {:>10.1} {:>10.1}",
            rate(read),
            rate(copied),
            rate(plain),
            rate(read) / rate(plain),
            rate(over_socket),
            read.as_secs_f64() * 1e6 / count as f64,
            asked.as_secs_f64() * 1e6,
        );
        common::end(child);
    }
}
