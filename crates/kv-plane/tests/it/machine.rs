//! Simulated machines that run the kernels.

use std::sync::Arc;

use cuda_driver::{Device, Driver, ErrorCode, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::KvShape;

use crate::common::engine::{Engine, shape};
use crate::common::place::Place;
use crate::common::scenarios::Rig;

/// Pages of the simulated devices, in bytes.
pub(crate) const PAGE: u64 = 4 << 10;

/// Blocks of 1 KiB: four on a page.
pub(crate) fn small() -> KvShape {
    shape(4, 32, 4)
}

pub(crate) struct Machine {
    pub(crate) sim: SimDriver,
    pub(crate) rig: Rig,
}

impl Machine {
    /// A machine on which `devices` share the layers.
    pub(crate) fn new(seed: u64, devices: u32, shape: KvShape) -> Self {
        Self::with(SimConfig { seed, devices, ..config() }, shape)
    }

    pub(crate) fn with(config: SimConfig, shape: KvShape) -> Self {
        let sim = sim(config);
        let rig = rig(&(Arc::new(sim.clone()) as Arc<dyn Driver>), sim.config().devices, shape);
        Self { sim, rig }
    }

    /// A machine of one device, and an engine with so many blocks there and in host memory.
    pub(crate) fn one(device_blocks: u32, host_blocks: u32) -> (Self, Engine) {
        let machine = Self::new(1, 1, small());
        let engine = machine.rig.engine(device_blocks, host_blocks);
        (machine, engine)
    }

    /// Closes an engine whose every read was right, and leaves nothing.
    #[track_caller]
    pub(crate) fn close(self, engine: Engine) {
        engine.close();
        self.assert_clean();
    }

    /// Nothing is left once these streams are gone.
    #[track_caller]
    pub(crate) fn left(self, streams: Vec<Stream>) {
        drop(streams);
        self.assert_clean();
    }

    pub(crate) fn calls(&self, name: &str) -> u64 {
        kv_testkit::machine::calls(&self.sim, name)
    }

    /// Holds the work of an engine still.
    pub(crate) fn hold(&self, engine: &Engine) {
        engine.cache.parts().iter().for_each(|part| self.sim.hold(part.compute().raw()));
    }

    /// Lets it go on.
    pub(crate) fn let_go(&self, engine: &Engine) {
        engine.cache.parts().iter().for_each(|part| self.sim.release_hold(part.compute().raw()));
    }

    /// The device has no finding and no leaked object.
    #[track_caller]
    pub(crate) fn assert_clean(self) {
        let Self { sim, rig } = self;
        drop(rig);
        assert!(sim.findings().is_empty(), "{:?}", sim.findings());
        let leaks = sim.check_leaks();
        assert!(leaks.is_clean(), "{leaks}");
    }
}

pub(crate) fn config() -> SimConfig {
    SimConfig { granularity: PAGE, ..SimConfig::default() }
}

pub(crate) fn sim(config: SimConfig) -> SimDriver {
    let sim = SimDriver::new(config).unwrap();
    sim.register_kernels(&kv_plane::references());
    sim
}

/// The first device of a machine.
pub(crate) fn device(sim: &SimDriver) -> Device {
    kv_testkit::machine::device(sim, 0)
}

/// The first devices of a machine.
pub(crate) fn open(sim: &SimDriver, count: u32) -> Vec<Device> {
    let driver = Arc::new(sim.clone());
    (0..count as i32).map(|ordinal| Device::open(driver.clone(), ordinal).unwrap()).collect()
}

pub(crate) fn rig(driver: &Arc<dyn Driver>, devices: u32, shape: KvShape) -> Rig {
    let open = |ordinal| Device::open(Arc::clone(driver), ordinal).unwrap();
    let devices = (0..devices as i32).map(open).collect();
    Rig { devices, shape, place: Place::Even, tensors: None }
}

/// The codes with which a sweep without leaks refuses a call. A call that ends an object is refused
/// with the code that says that it did nothing. After another code the object is given up, and
/// leaks.
pub(crate) fn refusal(call: &str) -> ErrorCode {
    let ends = ["Destroy", "Free", "Release", "Unload"].iter().any(|end| call.contains(end));
    if ends { ErrorCode::OUT_OF_MEMORY } else { ErrorCode::UNKNOWN }
}
