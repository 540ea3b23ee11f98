//! The kernel of `kv-kernels`, as a stager wants it.

use std::sync::Arc;

use cuda_driver::{Device, PinnedSpan, Stream};
use kv_kernels::{KernelError, KvKernels, ScatterPackets, ScatterWords};
use kv_stage::{
    PreparedScatter, Scatter, ScatterError, ScatterKernel, ScatterPacket, StagingPool, StepStager,
    StepStagerOptions,
};

const _: () = assert!(
    ScatterPacket::WORDS_MAX == ScatterPackets::WORDS_MAX
        && ScatterPacket::INDEX_OFFSET == ScatterPackets::INDEX_OFFSET
        && ScatterPacket::COUNT_OFFSET == ScatterPackets::COUNT_OFFSET
);

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
        self.0.scatter_words(stream, words).map_err(refused)
    }

    fn prepare(
        &self,
        packet: &ScatterPacket<'_>,
    ) -> Result<Option<Box<dyn PreparedScatter>>, ScatterError> {
        let ready = self.0.scatter_packets(packet.out(), packet.source(), packet.words_max());
        Ok(Some(Box::new(Packets(ready.map_err(refused)?))))
    }
}

#[derive(Debug)]
struct Packets(ScatterPackets);

impl PreparedScatter for Packets {
    fn launch(&self, stream: &Stream, source: PinnedSpan<'_>) -> Result<(), ScatterError> {
        self.0.launch(stream, source).map_err(refused)
    }
}

fn refused(error: KernelError) -> ScatterError {
    match error {
        KernelError::Device(error) => error.into(),
        KernelError::Reader(error) => error.into(),
        _ => ScatterError::Refused,
    }
}

/// A stager that sends changes only, on the device of `pool`.
pub(crate) fn stager(pool: &StagingPool, device_bytes: u64, kernel: &Arc<Kernels>) -> StepStager {
    let options = StepStagerOptions { device_bytes };
    StepStager::with_scatter(pool.device(), pool, options, kernel.clone()).unwrap()
}
