//! What joins the devices of a machine, by this crate and by `nvidia-smi`, which must say the same.

#![allow(clippy::print_stdout, reason = "a machine is different from the next one")]

use std::process::Command;

use cuda_driver::Device;
use kv_multigpu::topology::{LinkKind, PairLink, PcieDistance, Topology};
use kv_multigpu::{DeviceRegistry, topology::Sources};

/// Prints where every device is and what every pair is joined by.
pub(crate) fn are_told(registry: &DeviceRegistry) {
    let devices: Vec<Device> =
        (0..registry.count()).map(|ordinal| registry.device(ordinal).unwrap()).collect();
    let topology = discover(&devices);
    for gpu in topology.gpus() {
        println!("{gpu:?}");
        assert!(gpu.memory_bytes_per_second.is_some_and(|speed| speed > 100_000_000_000));
    }
    let told = told_by_nvidia_smi(&devices);
    let mut ranks = Vec::new();
    for (from, near) in devices.iter().enumerate() {
        for (to, far) in devices.iter().enumerate().filter(|&(to, _)| to != from) {
            let pair = *topology.pair(from, to).unwrap();
            let theirs = told.as_ref().map(|told| told[from][to].as_str());
            println!(
                "{from} to {to}: {}; nvidia-smi: {}; {pair:?}",
                pair.kind,
                theirs.unwrap_or("not there"),
            );
            assert_eq!(pair.access, near.can_access(far).unwrap());
            if let Some(theirs) = theirs.filter(|_| pair.kind != LinkKind::Unknown) {
                assert!(is_told_alike(&pair, theirs), "{from} to {to}: {pair:?}, {theirs}");
            }
            ranks.extend(pair.rank);
        }
    }
    println!("{} pairs, ranks {ranks:?}", devices.len() * (devices.len() - 1));
}

#[cfg(feature = "nvml")]
fn discover(devices: &[Device]) -> Topology {
    let nvml = kv_multigpu::topology::Nvml::load();
    let sources = Sources { links: Some(&nvml), ..Sources::default() };
    let topology = Topology::discover(devices, &sources).unwrap();
    let count = devices.len();
    let kinds = (0..count * count).filter_map(|i| topology.pair(i / count, i % count));
    for pair in kinds {
        assert_eq!(pair.kind != LinkKind::Unknown, nvml.is_loaded(), "{pair:?}");
    }
    println!("NVML: {}", nvml.is_loaded());
    // Without it, all else is told all the same.
    let alone = Topology::discover(devices, &Sources::default()).unwrap();
    assert_eq!(alone.gpus(), topology.gpus());
    assert!((1..count).all(|i| alone.pair(0, i).unwrap().kind == LinkKind::Unknown));
    topology
}

#[cfg(not(feature = "nvml"))]
fn discover(devices: &[Device]) -> Topology {
    println!("built without NVML");
    Topology::discover(devices, &Sources::default()).unwrap()
}

/// Whether a word of `nvidia-smi topo -m` says the same.
fn is_told_alike(pair: &PairLink, theirs: &str) -> bool {
    match pair.kind {
        LinkKind::NvLink { links, .. } => theirs == format!("NV{links}"),
        // "At most one bridge", "several, but not the host's".
        LinkKind::Pcie(PcieDistance::SameBridge) => matches!(theirs, "PIX" | "PXB"),
        LinkKind::Pcie(PcieDistance::SameHostBridge) => theirs == "PHB",
        LinkKind::Pcie(PcieDistance::SameNode) => theirs == "NODE",
        LinkKind::Pcie(PcieDistance::System) => theirs == "SYS",
        _ => false,
    }
}

/// The matrix of `nvidia-smi topo -m` between `devices`, if the machine has the program.
fn told_by_nvidia_smi(devices: &[Device]) -> Option<Vec<Vec<String>>> {
    let say = |arguments: &[&str]| {
        let output = Command::new("nvidia-smi").args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let matrix = say(&["topo", "-m"])?;
    // It numbers all GPUs of the machine; CUDA those that it sees, in an order of its own.
    let listed = say(&["--query-gpu=index,pci.bus_id", "--format=csv,noheader"])?;
    let place = |device: &Device| {
        let bus = device.info().pci_bus_id.to_lowercase();
        let line = listed.lines().find(|line| line.to_lowercase().trim().ends_with(&bus))?;
        line.split(',').next()?.trim().parse::<usize>().ok()
    };
    let places: Vec<usize> = devices.iter().map(place).collect::<Option<_>>()?;
    let word = |from: usize, to: usize| {
        let row = matrix.lines().find(|line| line.starts_with(&format!("GPU{from}\t")))?;
        row.split_whitespace().nth(1 + to).map(str::to_owned)
    };
    places.iter().map(|&from| places.iter().map(|&to| word(from, to)).collect()).collect()
}
