//! What is told of devices and links, on simulated machines.

use std::path::Path;
use std::sync::Arc;

use cuda_driver::{Device, DeviceError, DriverError, ErrorCode};
use cuda_sim::{SimConfig, SimDriver};
use kv_multigpu::DeviceRegistry;
use kv_multigpu::topology::{LinkKind, LinkSource, PcieDistance, Sources, Topology};

fn machine(config: SimConfig) -> (SimDriver, Vec<Device>) {
    let count = config.devices as i32;
    let sim = SimDriver::new(config).unwrap();
    let registry = DeviceRegistry::new(Arc::new(sim.clone())).unwrap();
    let devices = (0..count).map(|ordinal| registry.device(ordinal).unwrap()).collect();
    (sim, devices)
}

/// Knows that devices 0 and 1 have links.
#[derive(Debug)]
struct Two;

impl LinkSource for Two {
    fn link(&self, from: [u8; 16], to: [u8; 16]) -> Option<LinkKind> {
        let near = [from, to].iter().all(|uuid| [b'0', b'1'].contains(&uuid[15]));
        near.then_some(LinkKind::NvLink { links: 18, version: Some(4) })
    }
}

#[test]
fn places_and_peers_are_those_of_the_machine() {
    let (_sim, devices) = machine(SimConfig { devices: 8, peer_group: 4, ..SimConfig::default() });
    let nowhere = Sources { sysfs: "/nowhere".into(), links: Some(&Two) };
    let topology = Topology::discover(&devices, &nowhere).unwrap();
    for (i, gpu) in topology.gpus().iter().enumerate() {
        assert_eq!((gpu.ordinal, gpu.uuid), (i as i32, devices[i].info().uuid));
        assert_eq!(gpu.memory_bytes_per_second, Some(3_352_320_000_000));
        assert_eq!((gpu.pcie_ancestors.len(), gpu.numa_node), (0, None), "nobody tells");
        for j in 0..8 {
            let Some(pair) = topology.pair(i, j) else {
                assert_eq!(i, j);
                continue;
            };
            let near = i / 4 == j / 4;
            assert_eq!((pair.access, pair.native_atomics), (near, near));
            assert_eq!(pair.rank, Some(i32::from(!near)));
            let linked = i < 2 && j < 2;
            assert_eq!(pair.kind == LinkKind::Unknown, !linked);
        }
    }
    assert_eq!(topology.pair(8, 0), None);
    let links = topology.estimated_links().unwrap();
    assert_eq!(links.link(0, 1).unwrap().bytes_per_second, 405_000_000_000);
    assert_eq!(links.link(1, 2).unwrap().bytes_per_second, 20_000_000_000);
    assert_eq!(links.link(3, 4).unwrap().bytes_per_second, 25_000_000_000);
}

#[cfg(unix)]
#[test]
fn what_is_above_a_device_is_read_from_the_hosts_list() {
    let root = tempfile::tempdir().unwrap();
    let place = |path: &str, bus: &str, node: &str| {
        let device = root.path().join("devices").join(path).join(bus);
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("numa_node"), node).unwrap();
        let list = root.path().join("bus/pci/devices");
        std::fs::create_dir_all(&list).unwrap();
        std::os::unix::fs::symlink(device, list.join(bus)).unwrap();
    };
    place("pci0000:00/0000:00:01.0", "0000:01:00.0", "0\n");
    place("pci0000:00/0000:00:01.0", "0000:02:00.0", "0\n");
    place("pci0000:00/0000:00:02.0", "0000:03:00.0", "0\n");
    place("pci0000:40/0000:40:01.0", "0000:04:00.0", "0\n");
    place("pci0000:80/0000:80:01.0", "0000:05:00.0", "1\n");
    place("pci0000:c0/0000:c0:01.0", "0000:06:00.0", "-1\n");
    let (_sim, devices) = machine(SimConfig { devices: 7, ..SimConfig::default() });
    let read = |sysfs: &Path| {
        let sources = Sources { sysfs: sysfs.to_owned(), links: None };
        Topology::discover(&devices, &sources).unwrap()
    };
    let topology = read(root.path());
    let ancestors = ["pci0000:00".to_owned(), "0000:00:01.0".to_owned()];
    assert_eq!(topology.gpus()[0].pcie_ancestors, ancestors);
    let nodes: Vec<_> = topology.gpus().iter().map(|gpu| gpu.numa_node).collect();
    assert_eq!(nodes, [Some(0), Some(0), Some(0), Some(0), Some(1), None, None]);
    let others: Vec<_> = (1..7).map(|to| topology.pair(0, to).unwrap()).collect();
    let distances: Vec<_> = others.iter().map(|pair| pair.pcie).collect();
    assert_eq!(
        distances,
        [
            Some(PcieDistance::SameBridge),
            Some(PcieDistance::SameHostBridge),
            Some(PcieDistance::SameNode),
            Some(PcieDistance::System),
            Some(PcieDistance::System),
            None,
        ]
    );
    assert!(others.iter().all(|pair| pair.kind == LinkKind::Unknown), "nobody tells");
}

/// What a driver does not know is left out. That a device is lost is no such thing.
#[test]
fn a_lost_device_is_no_device_of_which_little_is_known() {
    let (sim, devices) = machine(SimConfig::default());
    let discover = || Topology::discover(&devices, &Sources::default());
    sim.fail_nth("cuDeviceGetAttribute", 1, ErrorCode::INVALID_VALUE);
    assert_eq!(discover().unwrap().gpus()[0].memory_bytes_per_second, None);
    let first = DriverError::new("cuLaunchKernel", ErrorCode::ILLEGAL_ADDRESS);
    assert!(devices[0].run(|_| Err::<(), _>(first)).is_err());
    assert_eq!(discover(), Err(DeviceError::Poisoned { first }));
}
