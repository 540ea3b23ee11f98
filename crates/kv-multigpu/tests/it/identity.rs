//! CUDA's ordinals beside the machine's own list of devices, on the simulated device (H17).

use std::collections::HashMap;
use std::sync::Arc;

use cuda_driver::Driver;
use cuda_sim::{SimConfig, SimDriver};
use kv_multigpu::{
    DeviceKind, DeviceRegistry, DeviceState, DeviceUuid, RegistryError,
    topology::{DeviceDirectory, DeviceListing},
};

/// A list that knows some devices.
#[derive(Debug)]
struct Listed(HashMap<[u8; 16], DeviceListing>);

impl DeviceDirectory for Listed {
    fn find(&self, uuid: [u8; 16]) -> Option<DeviceListing> {
        self.0.get(&uuid).copied()
    }
}

#[test]
fn indices_are_found_by_uuid_whatever_the_ordinals() {
    let (sim, _) = crate::common::machine(8, true);
    let uuids: Vec<_> = (0..8).map(|i| sim.device_get_info(i).unwrap().uuid).collect();
    // As with CUDA_VISIBLE_DEVICES=7,6,5,4,3,2,1,0, of which the list does not know the last.
    let place = |i: u32| DeviceListing { nvml_index: 7 - i, kind: DeviceKind::Gpu };
    let known = uuids.iter().take(7).zip(0..).map(|(&uuid, i)| (uuid, place(i)));
    let directory = Arc::new(Listed(known.collect()));
    let registry =
        DeviceRegistry::with_directory(Arc::new(sim.clone()) as Arc<dyn Driver>, directory)
            .unwrap();
    let report = registry.report().unwrap();
    let indices: Vec<_> = report.iter().map(|entry| entry.nvml_index).collect();
    assert_eq!(
        indices,
        [7, 6, 5, 4, 3, 2, 1].map(Some).into_iter().chain([None]).collect::<Vec<_>>()
    );
    for (entry, ordinal) in report.iter().zip(0..) {
        let info = sim.device_get_info(ordinal).unwrap();
        assert_eq!(entry.ordinal, ordinal);
        assert_eq!(entry.uuid, DeviceUuid { is_mig: false, bytes: info.uuid });
        assert_eq!(entry.uuid.to_string().parse(), Ok(entry.uuid));
        assert_eq!((&entry.name, &entry.pci_bus_id), (&info.name, &info.pci_bus_id));
        assert_eq!((entry.state, entry.kind), (DeviceState::Unopened, DeviceKind::Gpu));
    }
    assert!(!sim.calls().contains_key("cuDevicePrimaryCtxRetain"), "a report opens nothing");
}

#[test]
fn a_part_is_named_as_such_by_the_list_or_by_its_name() {
    let uuid = SimDriver::new(SimConfig::default()).unwrap().device_get_info(0).unwrap().uuid;
    let listed = Listed([(uuid, DeviceListing { nvml_index: 3, kind: DeviceKind::Mig })].into());
    let entry = |config: SimConfig, directory: Listed| {
        let sim = Arc::new(SimDriver::new(config).unwrap());
        DeviceRegistry::with_directory(sim, Arc::new(directory)).unwrap().entry(0).unwrap()
    };
    let by_list = entry(SimConfig::default(), listed);
    assert_eq!((by_list.kind, by_list.nvml_index), (DeviceKind::Mig, Some(3)));
    assert!(by_list.uuid.to_string().starts_with("MIG-"));
    let name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb".to_owned();
    let config = SimConfig { name, ..SimConfig::default() };
    let by_name = entry(config, Listed(HashMap::new()));
    assert_eq!((by_name.kind, by_name.nvml_index), (DeviceKind::Mig, None));
    assert!(by_name.uuid.is_mig);
    let config = SimConfig { name: "NVIDIA MIGHTY 9000".to_owned(), ..SimConfig::default() };
    assert_eq!(entry(config, Listed(HashMap::new())).kind, DeviceKind::Gpu);
}

#[test]
fn uuids_are_spelt_and_read_as_nvml_does() {
    const BYTES: [u8; 16] = [0xf0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255];
    let digits = "f0010203-0405-0607-0809-0a0b0c0d0eff";
    for is_mig in [false, true] {
        let text = format!("{}-{digits}", if is_mig { "MIG" } else { "GPU" });
        let uuid = DeviceUuid { is_mig, bytes: BYTES };
        assert_eq!((uuid.to_string(), text.parse()), (text, Ok(uuid)));
    }
    let upper = format!("GPU-{}", digits.to_uppercase());
    assert_eq!(upper.parse(), Ok(DeviceUuid { is_mig: false, bytes: BYTES }));
    for text in [
        "",
        "GPU-",
        "TPU-f0010203-0405-0607-0809-0a0b0c0d0eff",
        "GPU-f0010203-0405-0607-0809-0a0b0c0d0ef",
        "GPU-f0010203-0405-0607-0809-0a0b0c0d0eff-",
        "GPU-f001020304-05-0607-0809-0a0b0c0d0eff",
        "GPU-f0010203-0405-0607-0809-0a0b0c0d0e+f",
        "GPU-f0010203-0405-0607-0809-0a0b0c0d0eöf",
    ] {
        assert_eq!(text.parse::<DeviceUuid>(), Err(RegistryError::Uuid { text: text.to_owned() }));
    }
}

#[test]
fn a_driver_that_tells_nothing_is_the_registrys_error() {
    let (sim, registry) = crate::common::machine(1, true);
    sim.fail_nth("cuDeviceGetName", 1, cuda_driver::ErrorCode::NOT_INITIALIZED);
    assert!(matches!(registry.report().unwrap_err(), RegistryError::Driver(_)));
    assert_eq!(registry.report().unwrap().len(), 1);
}

#[cfg(feature = "nvml")]
#[test]
fn without_nvml_or_with_it_a_report_is_complete() {
    let (sim, _) = crate::common::machine(2, true);
    let directory = Arc::new(kv_multigpu::topology::Nvml::load());
    let registry = DeviceRegistry::with_directory(Arc::new(sim), directory).unwrap();
    let report = registry.report().unwrap();
    // NVML knows no simulated device.
    assert_eq!(report.iter().map(|entry| entry.nvml_index).collect::<Vec<_>>(), [None, None]);
    let links = kv_multigpu::topology::Nvml::load();
    assert_eq!(kv_multigpu::topology::LinkSource::link(&links, [0xAB; 16], [0xCD; 16]), None);
}
