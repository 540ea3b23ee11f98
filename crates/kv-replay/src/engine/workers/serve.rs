//! A worker process: the model of the run, on one device.

use std::collections::VecDeque;
use std::error::Error;

use cuda_driver::{Stream, guard};
use kv_plane::KvWorker;
use kv_plane::manager::{Outcome, StepPlan, WorkerId};
use kv_plane::processes::{Connection, Order, Orders, ServeError as OrdersError};
use serde::de::DeserializeOwned;

use super::codec::{self, BatchBytesError};
use super::setup::{Account, Open, Opened, Share};
use crate::device::{
    self, DeviceOpenError, DeviceSpecError, OpenDevices, ProfileReadError, SimSizes,
};
use crate::disk::DiskConfig;
use crate::engine::batch::Batch;
use crate::engine::groups::{self, Reads};
use crate::engine::work::DeviceWork;
use crate::engine::{RunError, WARMUP_ITERATIONS, options};

#[derive(thiserror::Error)]
pub enum ServeError {
    #[error("the manager's process has ordered what cannot be done")]
    Orders(#[from] OrdersError),
    #[error("the run's process said what cannot be read")]
    Setup(#[from] serde_json::Error),
    #[error("the run's process said what cannot be read")]
    Batch(#[from] BatchBytesError),
    #[error(transparent)]
    Spec(#[from] DeviceSpecError),
    #[error(transparent)]
    Profile(#[from] ProfileReadError),
    #[error("cannot open the worker's device")]
    Device(#[from] DeviceOpenError),
    #[error("there is no device for the worker")]
    NoDevice,
    #[error("the worker cannot go on")]
    Run(#[from] RunError),
}

cuda_driver::messages::one_line_debug!(ServeError);

/// Carries out the plans that standard input brings, on one device, and says on standard output what came of them, until
/// there are no more or the manager's process has ended.
pub fn serve() -> Result<(), Box<dyn Error + Send + Sync>> {
    kv_plane::processes::serve(Connection::inherited(), |orders| Ok(attend(orders)?))
}

fn attend(orders: &mut Orders) -> Result<Vec<u8>, ServeError> {
    let Some(open) = told::<Open>(orders)? else { return Ok(Vec::new()) };
    let devices = open_device(&open)?;
    let Some(device) = devices.devices.first() else { return Err(ServeError::NoDevice) };
    let (free_bytes, _) = device.memory_info().map_err(RunError::from)?;
    let opened = Opened {
        name: device.info().name.clone(),
        ordinal: device.ordinal(),
        simulated: devices.sim.is_some(),
        free_bytes,
    };
    orders.answer(&serde_json::to_vec(&opened)?)?;
    let Some(mut share) = told::<Share>(orders)? else { return Ok(Vec::new()) };
    orders.answer(&[])?;
    if let Some(disk) = &mut share.config.disk {
        // All workers have forgotten what is there.
        disk.fresh |= guard!("replay.replaced-files-empty", orders.replaces(), else false);
    }
    let served = device.while_current(|| -> Result<Vec<u8>, ServeError> {
        let mut hands = Hands::new(&share, &devices, (orders.worker(), orders.workers()))?;
        if devices.sim.is_some() {
            orders.wait_on_host();
        }
        orders.begin(&mut hands.worker)?;
        hands.carry_out_all(orders)
    });
    served.map_err(RunError::from)?
}

/// What the run's process tells; `None` if it has ended.
fn told<T: DeserializeOwned>(orders: &mut Orders) -> Result<Option<T>, ServeError> {
    let told = orders.question()?;
    Ok(told.map(|told| serde_json::from_slice(&told)).transpose()?)
}

fn open_device(open: &Open) -> Result<OpenDevices, ServeError> {
    let mut sizes = SimSizes {
        device_bytes: open.device_bytes,
        pinned_bytes: open.pinned_bytes,
        seed: open.seed,
        profile: Default::default(),
    };
    if let Some(name) = &open.profile {
        sizes.profile = device::read_profile(name)?;
    }
    Ok(device::open_one(&open.device.parse()?, open.worker.into(), sizes)?)
}

struct Hands<'a> {
    worker: KvWorker,
    work: DeviceWork,
    devices: &'a OpenDevices,
    reads: Vec<Reads>,
    /// Steps in flight that read, oldest first, each with the tokens of each sequence.
    reading: VecDeque<(u64, Vec<u32>)>,
    block_tokens: u32,
    steps: u64,
    disk: Option<DiskConfig>,
    pinned_warm: Option<u64>,
    sums: Vec<u64>,
}

impl<'a> Hands<'a> {
    fn new(
        share: &Share,
        devices: &'a OpenDevices,
        rank: (WorkerId, u16),
    ) -> Result<Self, ServeError> {
        let WorkerId(id) = rank.0;
        let config = &share.config;
        config.check().map_err(RunError::from)?;
        devices.check_fits(config)?;
        let options = options(config, share.blocks_per_sequence, devices, None, id.into())?;
        let options = groups::sharing(options, share.shared());
        let streams = devices.devices.iter().map(Stream::new).collect::<Result<Vec<_>, _>>();
        let streams = streams.map_err(RunError::from)?;
        let worker = KvWorker::new(&streams, options, rank).map_err(RunError::from)?;
        let work = DeviceWork::new(worker.parts(), worker.options(), id.into())?;
        Ok(Self {
            work,
            devices,
            reads: groups::shapes(config)?.into_iter().map(|(_, reads)| reads).collect(),
            reading: VecDeque::new(),
            block_tokens: config.block_tokens,
            steps: 0,
            disk: config.disk.clone(),
            pinned_warm: None,
            sums: Vec::new(),
            worker,
        })
    }

    fn carry_out_all(mut self, orders: &mut Orders) -> Result<Vec<u8>, ServeError> {
        while let Some(order) = orders.next(&mut self.worker)? {
            match order {
                Order::Step { plan, work } => self.carry_out(plan, work)?,
                Order::Completed { step, result } => self.read(step, result)?,
            }
        }
        self.close()
    }

    fn carry_out(&mut self, plan: &StepPlan, mut body: &[u8]) -> Result<(), ServeError> {
        let (batch, read) = match body {
            // Nobody's batch.
            [] => (Batch::default(), false),
            _ => {
                let read = codec::take::<u64>(&mut body)? == [1];
                (Batch::take(&mut body)?, read)
            }
        };
        let (found, expected) = (batch.further.len() + 1, self.reads.len());
        if found != expected && !batch.launches().is_empty() {
            return Err(BatchBytesError::Groups { found, expected }.into());
        }
        let Self { worker, work, .. } = self;
        let arrays = worker.carry_out(plan, |part, staged| work.add_arrays(part, &batch, staged));
        arrays.map_err(RunError::from)?;
        work.enqueue(worker.parts(), plan.step, &batch, read)?;
        worker.finish(Outcome::Done).map_err(RunError::from)?;
        if read {
            self.reading.push_back((plan.step, batch.lengths));
        }
        self.steps += 1;
        if self.steps == WARMUP_ITERATIONS {
            self.pinned_warm = Some(self.devices.driver.pinned_bytes_allocated());
        }
        Ok(())
    }

    /// What was read in a step that is complete.
    fn read(&mut self, step: u64, result: &mut Vec<u8>) -> Result<(), ServeError> {
        let Some((_, lengths)) = self.reading.pop_front_if(|(read, _)| *read == step) else {
            return Ok(());
        };
        for (group, reads) in self.reads.iter().enumerate() {
            let width = self.work.arrived(group, step, lengths.len(), &mut self.sums)?;
            let mut read = Vec::new();
            for (row, &tokens) in self.sums.chunks_exact(width.max(1)).zip(&lengths) {
                let entries = reads.checksums(tokens.into(), self.block_tokens.into());
                read.extend_from_slice(&row[..entries.min(row.len())]);
            }
            codec::put(result, &read);
        }
        Ok(())
    }

    /// Releases everything; what there is to say at the end.
    fn close(self) -> Result<Vec<u8>, ServeError> {
        let Self { worker, work, devices, disk, pinned_warm, .. } = self;
        let transports = worker.transports().by_name();
        let transports = transports.map(|(_, way)| (way.batches, way.blocks));
        let copied_bytes = worker.copied_bytes();
        // The buffers of the work are in use until the worker is at rest.
        let closed = worker.close();
        drop(work);
        crate::engine::closed(closed)?;
        let findings = devices.sim.as_ref().map(|sim| sim.findings()).unwrap_or_default();
        let pinned = devices.driver.pinned_bytes_allocated();
        let calls = devices.driver.calls().into_iter();
        let account = Account {
            driver_calls: calls.map(|(name, count)| (name.to_owned(), count)).collect(),
            transports,
            copied_bytes,
            pinned_after_warmup: pinned_warm.map(|warm| pinned - warm),
            findings: findings.first().map(|first| (findings.len(), first.to_string())),
            disk: disk.and_then(|disk| disk.report(0)),
        };
        Ok(serde_json::to_vec(&account)?)
    }
}
