//! Public functions with 0, 1 and the largest numbers: taken or refused, without a panic. The device is simulated, so its bytes come over
//! the connection.
//!
//! Without NIXL's library the trial is listed as ignored; with `KV_REQUIRE_NIXL=1` it fails.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[path = "../../kv-remote/tests/common/mod.rs"]
mod common;

use std::sync::Arc;

use common::{block, far, key, record};
use cuda_driver::{Device, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_nixl::{Library, NixlDeviceMemory, NixlDeviceTransfer};
use kv_remote::Peer;
use kv_remote::message::{Found, LeaseId, Located, Span};
use libtest_mimic::{Arguments, Trial};

fn main() {
    let required = std::env::var_os("KV_REQUIRE_NIXL").is_some_and(|value| value == "1");
    let trial = Trial::test("numbers_of_devices", || {
        numbers_of_devices();
        Ok(())
    });
    let trial = trial.with_ignored_flag(Library::open().is_err() && !required);
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit();
}

fn numbers_of_devices() {
    let driver = Arc::new(SimDriver::new(SimConfig::default()).unwrap());
    let device = Device::open(driver, 0).unwrap();
    let stream = Stream::new(&device).unwrap();
    let library = Library::open().unwrap();
    for bytes in [0, u64::MAX] {
        assert!(NixlDeviceMemory::new(&library, &device, bytes).is_err(), "{bytes}");
    }
    let (_server, member) = common::serve("a", 4);
    let mut transfer = NixlDeviceTransfer::new(library, &stream);
    for address in [0, 1, u64::MAX] {
        for bytes in [0, 1, u32::MAX] {
            let mut peer = Peer::connect(&member, &key(), far()).unwrap();
            let located = Located { span: Span { address, bytes }, generation: address, sum: 0 };
            for lease in [None, Some(LeaseId(address))] {
                let found = Found { lease, blocks: vec![located; 3] };
                let read = transfer.read_each(&mut peer, &found, far(), &mut |_, _| {});
                assert_eq!(read.is_ok(), lease.is_none(), "{address}, {bytes}: {read:?}");
            }
        }
    }
    // What is there comes, each to its place.
    let mut peer = Peer::connect(&member, &key(), far()).unwrap();
    for number in 1..4 {
        peer.put(block(number), record(number), far()).unwrap();
    }
    let wanted: Vec<_> = (1..4).map(block).collect();
    let found = peer.find_and_pin(&wanted, std::time::Duration::from_secs(10), far()).unwrap();
    let mut came = Vec::new();
    let mut each = |place: usize, span: cuda_driver::DeviceSpan| {
        let mut bytes = vec![0; span.bytes() as usize];
        stream.download(&mut bytes, span).unwrap();
        came.push((place as u64 + 1, bytes));
    };
    transfer.read_each(&mut peer, &found, far(), &mut each).unwrap();
    assert_eq!(came, (1..4).map(|number| (number, record(number))).collect::<Vec<_>>());
    assert_eq!(transfer.late(), 0);
}
