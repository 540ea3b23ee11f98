//! Devices that are lost.

use std::sync::Arc;

use cuda_driver::{Device, ErrorCode};
use kv_kernels::link::Transport;

use super::machine::{Machine, Moving};

#[test]
fn a_lost_device_is_an_error_and_everything_is_given_back() {
    let mut lost = 0;
    for transport in Transport::ALL {
        for to_host in [true, false] {
            for operations in 1..12 {
                let machine = Machine::new(operations);
                let mut link = machine.link(transport);
                let moving = Moving::new(&machine, to_host);
                machine.sim.lose_device(0, operations, ErrorCode::ILLEGAL_ADDRESS);
                // The loss may show in the transfer or at the next wait, and never as a panic.
                let outcome = moving.run(&mut link, &machine.stream);
                let waited = machine.stream.synchronize();
                if outcome.is_ok() && waited.is_ok() {
                    // It was not lost yet.
                    assert_eq!(machine.device.poison(), None);
                } else {
                    assert!(moving.run(&mut link, &machine.stream).is_err());
                    assert!(machine.device.poison().is_some());
                    lost += 1;
                }
                let sim = machine.sim.clone();
                drop((moving, link));
                let Machine { device, kernels, stream, counts, .. } = machine;
                drop((Arc::try_unwrap(kernels).unwrap(), stream));
                let _: &Device = &device;
                drop((device, counts));
                let leaks = sim.check_leaks();
                assert_eq!((leaks.streams, leaks.events, leaks.allocations), (0, 0, 0));
            }
        }
    }
    assert!(lost > 20, "only {lost} devices were lost in time");
}
