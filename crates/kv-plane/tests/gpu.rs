//! The scenarios of every device, on a GPU.
//!
//! Without a device every trial is listed as ignored; with `KV_REQUIRE_GPU=1` it fails. Trials with
//! blocks divided over two devices are listed as ignored without a second one.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[path = "it/common/mod.rs"]
mod common;

use std::sync::Arc;

use common::engine::shape;
use common::engine::tensors::Tensors;
use common::place::Place;
use common::random::{random_requests, random_requests_by};
use common::scenarios::{Rig, all};
use cuda_driver::{CudaDriver, Device};
use kv_kernels::{KvFormat, KvShape};
use kv_multigpu::place::Strategy;
use kv_plane::TransportChoice;
use libtest_mimic::{Arguments, Failed, Trial};

/// Devices of the parts of a cache.
type Parts = &'static [i32];

fn main() {
    let required = std::env::var_os("KV_REQUIRE_GPU").is_some_and(|value| value == "1");
    // Blocks of 18 KiB, which no page holds a whole number of, and blocks of one page of 2 MiB.
    let shapes = [("small", shape(9, 128, 8)), ("page", shape(16, 2048, 32))];
    let in_turn = Place::Layers(Strategy::RoundRobin);
    let places: [(&str, Parts, Place); 5] = [
        ("one", &[0], Place::Even),
        ("shared", &[0, 0], Place::Even),
        ("pair", &[0, 1], Place::Even),
        ("pair_in_turn", &[0, 1], in_turn),
        ("pair_by_heads", &[0, 1], Place::Heads(8)),
    ];
    let mut trials = Vec::new();
    for (shape_name, shape) in shapes {
        for (name_of_place, parts, place) in places {
            // One device is what is required; a second is a luxury.
            let may_lack = !required || parts.contains(&1);
            let ignored = may_lack && devices(parts).is_err();
            for (name, scenario) in all() {
                let name = format!("{name_of_place}::{shape_name}::{name}");
                let trial = trial(&name, parts, shape, place, scenario);
                trials.push(trial.with_ignored_flag(ignored));
            }
        }
    }
    let long = |rig: &Rig| (0..4).for_each(|seed| random_requests(rig, seed, 4_000));
    let ignored = devices(&[0]).is_err() && !required;
    trials.push(
        trial("one::small::long", &[0], shapes[0].1, Place::Even, long).with_ignored_flag(ignored),
    );
    for (shape_name, shape) in shapes {
        for choice in TransportChoice::ALL {
            let requests = move |rig: &Rig| random_requests_by(rig, 7, 1_000, choice);
            let name = format!("one::{shape_name}::by_{choice}");
            let trial = trial(&name, &[0], shape, Place::Even, requests);
            trials.push(trial.with_ignored_flag(ignored));
        }
    }
    for format in KvFormat::ALL {
        let tensors = Tensors::new(format);
        let scenarios = move |rig: &Rig| {
            let rig = Rig { devices: rig.devices.clone(), tensors: Some(tensors), ..*rig };
            all().for_each(|(_, scenario)| scenario(&rig));
        };
        let name = format!("one::adopted::{format:?}");
        let trial = trial(&name, &[0], tensors.shape(), Place::Even, scenarios);
        trials.push(trial.with_ignored_flag(ignored));
    }
    let mut arguments = Arguments::from_args();
    // They share a device, and its memory.
    arguments.test_threads.get_or_insert(1);
    // Their primary contexts stay from trial to trial: each would make them anew, which takes longer than most
    // of what it does with them.
    let _kept = if arguments.list { Ok(Vec::new()) } else { devices(&[0, 1]).or(devices(&[0])) };
    libtest_mimic::run(&arguments, trials).exit();
}

fn trial(
    name: &str,
    parts: Parts,
    shape: KvShape,
    place: Place,
    scenario: impl Fn(&Rig) + Send + 'static,
) -> Trial {
    Trial::test(name, move || {
        let devices = devices(parts).map_err(Failed::from)?;
        scenario(&Rig { devices, shape, place, tensors: None });
        Ok(())
    })
}

/// The devices of all parts, each opened once.
fn devices(parts: Parts) -> Result<Vec<Device>, String> {
    let driver = Arc::new(CudaDriver::load().map_err(|error| error.to_string())?);
    let mut devices: Vec<Device> = Vec::new();
    for &ordinal in parts {
        let device = match devices.iter().find(|device| device.ordinal() == ordinal) {
            Some(device) => device.clone(),
            None => Device::open(driver.clone(), ordinal)
                .map_err(|error| format!("{error}: {error:?}"))?,
        };
        devices.push(device);
    }
    Ok(devices)
}
