//! The computation of a model that is not there: it takes its time on the compute streams.

use std::sync::Arc;
use std::time::Duration;

use cuda_driver::Stream;
use cuda_sim::SimDriver;
use kv_kernels::{KernelError, KvKernels};
use kv_plane::Part;

use super::RunError;
use crate::config::{ModelCost, RunConfig};

/// The longest iteration of a device that is not simulated: nothing ends a kernel before.
const ITERATION_MAX: Duration = Duration::from_secs(60);

#[derive(Debug)]
enum Machine {
    /// A simulated machine, whose clock is told how long it takes.
    Simulated { sim: Arc<SimDriver>, streams: Vec<u64> },
    /// A kernel on the stream of each device.
    Real(Vec<(Stream, KvKernels)>),
}

#[derive(Debug)]
pub(super) struct Model {
    cost: ModelCost,
    machine: Machine,
}

impl Model {
    /// A model that computes on the streams of these parts, of a simulated machine if there is one; `None` if its
    /// computation is free.
    pub(super) fn new(
        config: &RunConfig,
        sim: Option<&Arc<SimDriver>>,
        parts: &[Part],
    ) -> Result<Option<Self>, RunError> {
        let cost = config.model;
        if cost == ModelCost::default() {
            return Ok(None);
        }
        let streams = parts.iter().map(Part::compute);
        let machine = match sim {
            Some(sim) => {
                let streams = streams.map(Stream::raw).collect();
                Machine::Simulated { sim: Arc::clone(sim), streams }
            }
            None => {
                let time = cost.of_iteration(config.step_tokens.into(), true);
                if time > ITERATION_MAX {
                    return Err(RunError::Iteration { time, limit: ITERATION_MAX });
                }
                let loaded = streams.map(|on| {
                    let kernels = KvKernels::load(on.device())?;
                    // So that it is compiled before time begins.
                    kernels.keep_busy(on, Duration::from_nanos(1))?;
                    Ok((on.clone(), kernels))
                });
                Machine::Real(loaded.collect::<Result<_, KernelError>>()?)
            }
        };
        Ok(Some(Self { cost, machine }))
    }

    /// Enqueues an iteration that computes so many prompt tokens, and generates if `generates`.
    pub(super) fn compute(&self, prompt_tokens: u64, generates: bool) -> Result<(), KernelError> {
        let time = self.cost.of_iteration(prompt_tokens, generates);
        match &self.machine {
            Machine::Simulated { sim, streams } => {
                streams.iter().for_each(|&stream| sim.compute(stream, time));
                Ok(())
            }
            Machine::Real(devices) => {
                devices.iter().try_for_each(|(stream, kernels)| kernels.keep_busy(stream, time))
            }
        }
    }
}
