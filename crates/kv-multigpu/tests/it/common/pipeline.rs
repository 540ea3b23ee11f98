//! A model whose layers go round the devices, run by tasks that wander between threads.
//!
//! Each pass hands its activations over at every layer. Every second pass goes through the devices'
//! threads, the others call the handles from whatever thread the runtime polls them on. Weights are
//! replaced under running passes, and what a pass owned is dropped wherever chance has it.

use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use cuda_driver::{
    Device, DeviceBuffer, DeviceError, Driver, DriverError, ErrorCode, Event, Kernel, PeerCopy,
    Stream,
};
use kv_multigpu::DeviceRegistry;
use kv_multigpu::threads::{DeviceThread, DeviceThreadOptions, Refusal};

use super::kernel;

pub(crate) type Failure = Box<dyn Error + Send + Sync>;

/// How much to run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) layers: usize,
    pub(crate) passes: usize,
    /// Passes under way at once.
    pub(crate) lanes: usize,
    /// Words of an activation.
    pub(crate) words: u32,
    /// Whether to enable peer access between all pairs first.
    pub(crate) peer_access: bool,
    /// What each pass leaks on the device of the last layer, in bytes: planted, to see that it is noticed.
    pub(crate) leak_bytes: u64,
}

/// What a run did.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Times that a task went on in another thread than it had waited in.
    pub(crate) migrations: u64,
    /// Passes whose result was compared; the others were dropped with their work under way.
    pub(crate) compared: u64,
    /// Tasks that found the queue of a device's thread full, and came back.
    pub(crate) refused: u64,
}

#[derive(Default)]
struct Counters {
    migrations: AtomicU64,
    compared: AtomicU64,
    refused: AtomicU64,
}

struct Gpu {
    device: Device,
    kernel: Kernel,
    thread: DeviceThread,
}

struct Model {
    plan: Plan,
    gpus: Vec<Gpu>,
    /// The weights of each layer, on device `layer % gpus`.
    weights: Vec<Mutex<Arc<DeviceBuffer>>>,
    counters: Counters,
}

/// What one pass owns.
struct Pass {
    seed: u32,
    /// On each device: a stream, an event, and an activation.
    places: Vec<(Stream, Event, DeviceBuffer)>,
}

/// Runs the plan on all devices of the registry, and leaves nothing alive on them.
pub(crate) fn run(registry: &DeviceRegistry, plan: Plan) -> Result<Seen, Failure> {
    run_on(registry, &(0..registry.count()).collect::<Vec<_>>(), plan)
}

/// As [`run`], on some of the devices.
pub(crate) fn run_on(
    registry: &DeviceRegistry,
    ordinals: &[i32],
    plan: Plan,
) -> Result<Seen, Failure> {
    let model = Arc::new(Model::new(registry, ordinals, plan)?);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).build()?;
    let outcome = runtime.block_on(async {
        let lanes = (0..plan.lanes).map(|lane| tokio::spawn(run_lane(Arc::clone(&model), lane)));
        let lanes: Vec<_> = lanes.collect();
        let mut outcome = Ok(());
        for lane in lanes {
            outcome = outcome.and(lane.await?);
        }
        outcome
    });
    // Waits for what was left to be dropped in the background.
    drop(runtime);
    for gpu in &model.gpus {
        gpu.thread.close()?;
    }
    outcome?;
    let counters = &model.counters;
    Ok(Seen {
        migrations: counters.migrations.load(Relaxed),
        compared: counters.compared.load(Relaxed),
        refused: counters.refused.load(Relaxed),
    })
}

async fn run_lane(model: Arc<Model>, lane: usize) -> Result<(), Failure> {
    for number in (lane..model.plan.passes).step_by(model.plan.lanes) {
        run_pass(&model, number as u32).await?;
    }
    Ok(())
}

async fn run_pass(model: &Arc<Model>, number: u32) -> Result<(), Failure> {
    let pass = Arc::new(Pass::begin(model, number)?);
    for layer in 0..model.plan.layers {
        let before = std::thread::current().id();
        if number.is_multiple_of(2) {
            on_the_devices_thread(model, &pass, layer).await?;
        } else {
            model.layer(&pass, layer)?;
            tokio::task::yield_now().await;
        }
        let migrated = std::thread::current().id() != before;
        model.counters.migrations.fetch_add(u64::from(migrated), Relaxed);
    }
    // Some are given up with their work still under way.
    if number % 5 != 4 {
        model.compare(&pass)?;
        model.counters.compared.fetch_add(1, Relaxed);
    }
    if model.plan.leak_bytes > 0 {
        let last = &model.gpus[(model.plan.layers - 1) % model.gpus.len()].device;
        last.run(|driver| driver.mem_alloc(model.plan.leak_bytes))?;
    }
    let old = model.replace_weight(number as usize % model.plan.layers)?;
    drop_somewhere(model, number, (pass, old));
    Ok(())
}

async fn on_the_devices_thread(
    model: &Arc<Model>,
    pass: &Arc<Pass>,
    layer: usize,
) -> Result<(), Failure> {
    let gpu = &model.gpus[layer % model.gpus.len()];
    let mut task = {
        let (model, pass) = (Arc::clone(model), Arc::clone(pass));
        move |device: &Device| {
            assert_eq!(device.driver().ctx_get_current(), Ok(device.context()));
            model.layer(&pass, layer)
        }
    };
    loop {
        match gpu.thread.submit(task) {
            Ok(completion) => return Ok(completion.await??),
            Err(refused) if matches!(refused.refusal, Refusal::Full { .. }) => {
                model.counters.refused.fetch_add(1, Relaxed);
                task = refused.task;
                gpu.thread.room().await;
            }
            Err(refused) => return Err(refused.refusal.into()),
        }
    }
}

/// Here, on a thread of the runtime's pool, on a device's thread with that device current, or on a
/// thread that never saw a context.
fn drop_somewhere(model: &Arc<Model>, number: u32, what: impl Send + 'static) {
    match mix(number) % 4 {
        0 => drop(what),
        1 => drop(tokio::task::spawn_blocking(move || drop(what))),
        2 => {
            let thread = &model.gpus[mix(number) as usize / 4 % model.gpus.len()].thread;
            // A full queue drops it here.
            let _ =
                thread.submit(move |_| drop(what)).map(kv_multigpu::threads::Completion::detach);
        }
        _ => drop(std::thread::spawn(move || drop(what)).join()),
    }
}

impl Model {
    fn new(registry: &DeviceRegistry, ordinals: &[i32], plan: Plan) -> Result<Self, Failure> {
        let devices = ordinals.iter().map(|&ordinal| registry.device(ordinal));
        let devices: Vec<Device> = devices.collect::<Result<_, _>>()?;
        if plan.peer_access {
            enable_peers(&devices)?;
        }
        let mut gpus = Vec::new();
        for device in devices {
            let kernel = kernel::load(&device);
            // So short a queue that it is full at times.
            let options = DeviceThreadOptions { tasks_max: 2, ..DeviceThreadOptions::default() };
            gpus.push(Gpu { thread: DeviceThread::spawn(&device, options)?, kernel, device });
        }
        let mut model = Self { plan, gpus, weights: Vec::new(), counters: Counters::default() };
        for layer in 0..plan.layers {
            let weight = model.weight(layer)?;
            model.weights.push(Mutex::new(Arc::new(weight)));
        }
        Ok(model)
    }

    fn weight(&self, layer: usize) -> Result<DeviceBuffer, Failure> {
        let device = &self.gpus[layer % self.gpus.len()].device;
        let buffer = DeviceBuffer::alloc(device, u64::from(self.plan.words) * 4)?;
        let words = (0..self.plan.words).flat_map(|i| weight_word(layer, i).to_le_bytes());
        Stream::new(device)?.upload(buffer.span(), &words.collect::<Vec<u8>>())?;
        Ok(buffer)
    }

    /// Puts new memory with the same weights in place; returns the old, which passes may be using.
    fn replace_weight(&self, layer: usize) -> Result<Arc<DeviceBuffer>, Failure> {
        let new = Arc::new(self.weight(layer)?);
        Ok(std::mem::replace(&mut *self.weights[layer].lock().unwrap(), new))
    }

    /// Enqueues one layer, after handing the activation over from the device of the layer before.
    fn layer(&self, pass: &Pass, layer: usize) -> Result<(), DeviceError> {
        let count = self.gpus.len();
        let here = layer % count;
        let (stream, _, activation) = &pass.places[here];
        if layer > 0 && count > 1 {
            let (source_stream, source_event, source) = &pass.places[(layer - 1) % count];
            source_event.record(source_stream)?;
            stream.wait(source_event)?;
            copy_across(stream, activation, source)?;
        }
        let weight = Arc::clone(&self.weights[layer].lock().unwrap());
        kernel::launch(&self.gpus[here].kernel, stream, activation.span(), weight.span())
    }

    fn compare(&self, pass: &Pass) -> Result<(), Failure> {
        let (stream, _, activation) = &pass.places[(self.plan.layers - 1) % self.gpus.len()];
        let mut seen = vec![0; activation.bytes() as usize];
        stream.download(&mut seen, activation.span())?;
        for (i, word) in (0..).zip(seen.chunks_exact(4)) {
            let mut expected = input_word(pass.seed, i);
            for layer in 0..self.plan.layers {
                expected = expected.wrapping_mul(3).wrapping_add(weight_word(layer, i));
            }
            if word != expected.to_le_bytes() {
                let (seed, place) = (pass.seed, i);
                return Err(format!("pass {seed}: word {place} is {word:?}, not {expected}").into());
            }
        }
        Ok(())
    }
}

impl Pass {
    fn begin(model: &Model, seed: u32) -> Result<Self, Failure> {
        let bytes = u64::from(model.plan.words) * 4;
        let place = |gpu: &Gpu| -> Result<_, DeviceError> {
            let (stream, event) = (Stream::new(&gpu.device)?, Event::new(&gpu.device)?);
            Ok((stream, event, DeviceBuffer::alloc(&gpu.device, bytes)?))
        };
        let places = model.gpus.iter().map(place).collect::<Result<Vec<_>, _>>()?;
        let words = (0..model.plan.words).flat_map(|i| input_word(seed, i).to_le_bytes());
        let (stream, _, activation) = &places[0];
        stream.upload(activation.span(), &words.collect::<Vec<u8>>())?;
        Ok(Self { seed, places })
    }
}

/// Enqueues a copy from one device to the other in `stream`, which is of the destination's.
pub(crate) fn copy_across(
    stream: &Stream,
    destination: &DeviceBuffer,
    source: &DeviceBuffer,
) -> Result<(), DeviceError> {
    let copy = PeerCopy {
        destination: destination.address(),
        destination_context: destination.device().context(),
        source: source.address(),
        source_context: source.device().context(),
        bytes: source.bytes(),
    };
    // SAFETY: live contexts and stream; both ranges are device memory.
    let enqueue = |driver: &dyn Driver| unsafe { driver.memcpy_peer_async(copy, stream.raw()) };
    stream.device().run(enqueue)
}

/// Lets every device access every other one's memory.
pub(crate) fn enable_peers(devices: &[Device]) -> Result<(), Failure> {
    for device in devices {
        for peer in devices.iter().filter(|peer| *peer != device) {
            // SAFETY: both contexts live as long as the devices.
            let enable =
                |driver: &dyn Driver| unsafe { driver.ctx_enable_peer_access(peer.context()) };
            match device.run(enable) {
                Ok(()) => {}
                Err(DeviceError::Driver(DriverError { code, .. }))
                    if code == ErrorCode::PEER_ACCESS_ALREADY_ENABLED => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

fn weight_word(layer: usize, i: u32) -> u32 {
    mix(layer as u32 * 0x1_0001 + i)
}

fn input_word(seed: u32, i: u32) -> u32 {
    mix(seed ^ mix(i))
}

/// Scatters a number (the finaliser of MurmurHash3).
pub(crate) fn mix(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x85eb_ca6b);
    x = (x ^ (x >> 13)).wrapping_mul(0xc2b2_ae35);
    x ^ (x >> 16)
}
