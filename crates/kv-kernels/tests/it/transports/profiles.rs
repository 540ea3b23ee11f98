//! Measuring a profile, and what it then decides.

use kv_kernels::link::{
    HostDirection, HostLink, HostLinkOptions, Load, MeasureOptions, Transport, TransportProfile,
};

use super::machine::Machine;

fn measured(machine: &Machine) -> TransportProfile {
    let options = MeasureOptions { bytes: 4 << 20, rounds: 1, ..MeasureOptions::default() };
    TransportProfile::measure(&machine.kernels, &options).unwrap()
}

#[test]
fn a_measured_profile_has_the_costs_of_the_machine() {
    let machine = Machine::new(1);
    let before = machine.sim.device_used_bytes(0);
    let profile = measured(&machine);
    assert!(profile.is_of(machine.device.info(), None));
    assert_eq!(TransportProfile::parse(&profile.to_string()), Ok(profile.clone()));
    // The simulated H100's link, and what its copy engine takes for each copy.
    for (direction, costs, rate, setup) in [
        (HostDirection::ToHost, &profile.to_host, 55.2, 2_050),
        (HostDirection::ToPages, &profile.to_pages, 55.1, 2_550),
    ] {
        let seen = costs.copy_bytes_per_s as f64 / 1e9;
        assert!((seen / rate - 1.0).abs() < 0.02, "{direction:?}: {seen} GB/s");
        assert!(
            costs.copy_setup_ns.abs_diff(setup) < 400,
            "{direction:?}: {}",
            costs.copy_setup_ns
        );
        assert!(costs.handover_ns > 0 && costs.direct_setup_ns > 0);
        assert_eq!(costs.direct.points().len(), 3);
        assert_eq!(costs.walk.points().len(), 3);
        let walk = costs.walk.points()[1].1;
        assert!(walk > 4 * costs.copy_bytes_per_s, "{walk}");
        assert!(costs.fragments.points().len() >= 4);
    }
    machine.device.free_retired().unwrap();
    assert_eq!(machine.sim.device_used_bytes(0), before, "everything is given back");
    machine.assert_clean();
}

#[test]
fn a_driver_without_batches_has_no_rates_of_fragments() {
    let machine = Machine::new(2);
    machine.sim.fail_nth("cuMemcpyBatchAsync", 1, cuda_driver::ErrorCode::NOT_SUPPORTED);
    let profile = measured(&machine);
    assert_eq!(profile.to_host.fragments.points(), []);
    let blocks = Load {
        bytes: 1 << 30,
        fragment_bytes: 2 << 20,
        window_bytes: 2 << 20,
        ring_buffer_bytes: 0,
        ring_buffers: 0,
    };
    assert_eq!(profile.choose(HostDirection::ToHost, blocks), Transport::DirectKernel);
}

#[test]
fn a_device_that_nobody_measured_is_assumed_to_be_like_its_attributes() {
    let machine = Machine::new(3);
    let profile = TransportProfile::assumed(&machine.device, 8).unwrap();
    let long = Load {
        bytes: 256 << 20,
        fragment_bytes: 2048,
        window_bytes: 256 << 20,
        ring_buffer_bytes: 12 << 20,
        ring_buffers: 3,
    };
    for direction in [HostDirection::ToHost, HostDirection::ToPages] {
        assert_eq!(profile.choose(direction, long), Transport::TwoHop);
        let short = Load { bytes: 64 << 10, ..long };
        assert_eq!(profile.choose(direction, short), Transport::DirectKernel);
    }
    let options = HostLinkOptions::default();
    let link = HostLink::new(machine.kernels.clone(), options).unwrap();
    assert_eq!(*link.profile(), profile);
}
