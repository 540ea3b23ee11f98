//! The kernel of `kv-kernels`, as a stager wants it.

use std::sync::Arc;

use cuda_driver::{Device, Stream};
use kv_kernels::{KernelError, KvKernels, ScatterWords};
use kv_stage::{Scatter, ScatterError, ScatterKernel, StagingPool, StepStager, StepStagerOptions};

#[derive(Debug)]
pub(crate) struct Kernels(pub(crate) KvKernels);

impl Kernels {
    pub(crate) fn load(device: &Device) -> Arc<Self> {
        Arc::new(Self(KvKernels::load(device).unwrap()))
    }
}

impl ScatterKernel for Kernels {
    fn scatter(&self, stream: &Stream, scatter: &Scatter<'_>) -> Result<(), ScatterError> {
        let words = ScatterWords {
            out: scatter.out(),
            source: scatter.source(),
            data_offset: scatter.data_offset(),
            index_offset: scatter.index_offset(),
            count: scatter.count(),
        };
        self.0.scatter_words(stream, words).map_err(|error| match error {
            KernelError::Device(error) => error.into(),
            _ => ScatterError::Refused,
        })
    }
}

/// A stager that sends changes only, on the device of `pool`.
pub(crate) fn stager(pool: &StagingPool, device_bytes: u64, kernel: &Arc<Kernels>) -> StepStager {
    let options = StepStagerOptions { device_bytes };
    StepStager::with_scatter(pool.device(), pool, options, kernel.clone()).unwrap()
}
