//! Simulated machines that run the kernels.

use crate::common::scenarios::Rig;
use crate::prelude::*;

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
        Self::on(1, device_blocks, host_blocks)
    }

    /// The same of so many devices.
    pub(crate) fn on(devices: u32, device_blocks: u32, host_blocks: u32) -> (Self, Engine) {
        Self::with_engine(1, devices, options(small(), device_blocks, host_blocks))
    }

    /// A machine, and an engine with these options on all its devices.
    pub(crate) fn with_engine(seed: u64, devices: u32, options: KvCacheOptions) -> (Self, Engine) {
        let machine = Self::new(seed, devices, small());
        let engine = machine.rig.engine_with(options);
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

/// A worker that is told by plans, on a machine of its own.
pub(crate) struct Told {
    pub(crate) machine: Machine,
    pub(crate) streams: Vec<Stream>,
    pub(crate) worker: KvWorker,
}

impl Told {
    pub(crate) fn new(machine: Machine, options: KvCacheOptions) -> Self {
        let streams = machine.rig.streams();
        let worker = KvWorker::new(&streams, options, ALONE).unwrap();
        Self { machine, streams, worker }
    }

    pub(crate) fn carry_out(&mut self, plan: &StepPlan) -> Result<(), StepError> {
        self.worker.carry_out(plan, |_, _| Ok(()))
    }

    /// Carries a plan out, and says that its step is done.
    #[track_caller]
    pub(crate) fn finish(&mut self, plan: &StepPlan) {
        self.carry_out(plan).unwrap();
        self.worker.finish(Outcome::Done).unwrap();
    }

    /// The same, and waits for the step, which is the oldest in flight.
    #[track_caller]
    pub(crate) fn complete(&mut self, plan: &StepPlan) {
        self.finish(plan);
        assert_eq!(self.worker.wait().unwrap(), Some((plan.step, Outcome::Done)));
    }

    /// Tables without blocks, and these owners of granules.
    pub(crate) fn snapshot(&self, step: u64, granules: &[Option<GroupId>]) -> Snapshot {
        let options = self.worker.options();
        let table = |group: &GroupOptions| {
            let width = group.blocks_per_sequence_max;
            let ids = vec![TableEntry::NONE; (width * options.sequences_max) as usize];
            SnapshotTable { width, ids }
        };
        let tables = options.groups.iter().map(table).collect();
        Snapshot { step, tables, granules: granules.to_vec() }
    }

    /// Closes the worker, which leaves nothing.
    #[track_caller]
    pub(crate) fn close(self) {
        let Self { machine, streams, worker } = self;
        worker.close().unwrap();
        machine.left(streams);
    }
}

/// Block ids or other words of 32 bits, as a device has them.
pub(crate) fn read_words(stream: &Stream, span: DeviceSpan) -> Vec<i32> {
    let bytes = kv_testkit::machine::read(stream, span);
    bytes.chunks_exact(4).map(|word| i32::from_le_bytes(word.try_into().unwrap())).collect()
}
