//! Public functions with 0, 1 and the largest numbers: taken or refused, without a panic; and a device that lags. The device is
//! simulated, so its bytes come over the connection.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_driver::{Device, DeviceBuffer, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_nixl::{Library, NixlDeviceMemory, NixlDeviceTransfer};
use kv_remote::message::{Found, LeaseId, Located, Span};
use kv_remote::{Peer, PeerError};

use super::common::{self, block, far, key, record};

pub(crate) const TRIALS: [(&str, fn()); 2] = [
    ("numbers_of_devices", numbers_of_devices),
    ("over_the_connection_a_device_that_lags_costs_no_more_than_the_time", a_device_lags),
];

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
            let located =
                Located { span: Span { address, bytes }, generation: address, sum: 0, head: None };
            for lease in [None, Some(LeaseId(address))] {
                let found = Found { lease, blocks: vec![located.clone(); 3] };
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
    let found = peer.find_and_pin(&wanted, Duration::from_secs(10), far()).unwrap();
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

fn a_device_lags() {
    let sim = SimDriver::new(SimConfig::default()).unwrap();
    let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
    let stream = Stream::new(&device).unwrap();
    let mut transfer = NixlDeviceTransfer::new(Library::open().unwrap(), &stream);
    let (_server, member) = common::serve("a", 4);
    let mut peer = Peer::connect(&member, &key(), far()).unwrap();
    peer.put(block(1), record(1), far()).unwrap();
    let found = peer.find_and_pin(&[block(1)], Duration::from_secs(10), far()).unwrap();
    let used = DeviceBuffer::alloc(&device, 64).unwrap();
    for turn in 0..3 {
        // What has come is used by work that does not begin.
        let mut each = |_, _| stream.fill(used.span(), turn).unwrap();
        transfer.read_each(&mut peer, &found, far(), &mut each).unwrap();
        sim.hold(stream.raw());
        stream.fill(used.span(), turn).unwrap();
        let deadline = Instant::now() + Duration::from_millis(100);
        let late =
            transfer.read_each(&mut peer, &found, deadline, &mut |_, _| panic!("it is used"));
        assert!(matches!(late, Err(PeerError::Late)), "{late:?}");
        assert!(Instant::now() >= deadline);
        sim.release_hold(stream.raw());
        stream.synchronize().unwrap();
    }
    assert!(sim.findings().is_empty(), "{:?}", sim.findings());
}
