//! Where the model of a run computes, beside the cache that its calls go to.

use std::ops::{Deref, DerefMut};

use kv_kernels::KvShape;
use kv_plane::{CacheStats, InProcess, KvCache, OpenStep, Part, Sequence, Workers};

use super::RunError;
use super::batch::Batch;
use super::groups::Reads;
use super::verify::Reading;
use super::work::DeviceWork;

/// A cache, and the model of the run on the devices of its workers.
pub(crate) trait Compute: DerefMut<Target = KvCache<Self::Workers>> {
    type Workers: Workers;

    /// The shape of each part of the model, in the order of the devices and then of the groups, and what its
    /// readers read.
    fn shapes(&self) -> Vec<(KvShape, Reads)>;

    /// What the further groups' readers read.
    fn further_groups(&self) -> &[Reads];

    /// Device blocks that have memory on every device.
    fn mapped_blocks(&self) -> u64;

    /// What was mapped and moved; `None` if only the manager is here.
    fn moved(&self) -> Option<CacheStats> {
        None
    }

    /// Before a call that waits for devices until no more than so many steps are in flight.
    fn about_to_wait(&mut self, _most: usize) {}

    /// The latest step that counts, if all that was computed has been lost since the last call: sequences
    /// that were admitted before are lost, and later steps were computed for nobody.
    fn take_loss(&mut self) -> Option<u64> {
        None
    }

    /// The cache itself, where its devices are this process's: only such a process hands sequences over.
    fn local(&mut self) -> Result<&mut Local, RunError> {
        Err(RunError::HandoverElsewhere)
    }

    /// Stages `readers`, and has every device write the batch's tokens and then, if `read`, read all of
    /// `readers`, but for rejected drafts.
    fn launch(
        &mut self,
        step: &OpenStep,
        batch: &Batch,
        readers: &mut [&mut Sequence],
        read: bool,
    ) -> Result<(), RunError>;

    /// The checksums that one part has read in a completed step, row by row; entries of a row.
    fn checksums(
        &mut self,
        part: usize,
        reading: &Reading,
        checksums: &mut Vec<u64>,
    ) -> Result<usize, RunError>;
}

/// A cache whose devices are this process's.
#[derive(Debug)]
pub(super) struct Local {
    pub(super) cache: KvCache,
    work: DeviceWork,
    further: Vec<Reads>,
}

impl Local {
    pub(super) fn new(cache: KvCache) -> Result<Self, RunError> {
        let work = DeviceWork::new(cache.parts(), cache.options(), 0)?;
        let further = cache.options().groups[1..].iter().map(Reads::of).collect();
        Ok(Self { cache, work, further })
    }
}

impl Deref for Local {
    type Target = KvCache;

    fn deref(&self) -> &KvCache {
        &self.cache
    }
}

impl DerefMut for Local {
    fn deref_mut(&mut self) -> &mut KvCache {
        &mut self.cache
    }
}

impl Compute for Local {
    type Workers = InProcess;

    fn shapes(&self) -> Vec<(KvShape, Reads)> {
        let reads = || std::iter::once(Reads::All).chain(self.further.iter().copied());
        let groups = |part: &Part| {
            let shapes: Vec<_> = part.groups().iter().map(|group| *group.shape()).collect();
            shapes.into_iter().zip(reads())
        };
        self.cache.parts().iter().flat_map(groups).collect()
    }

    fn further_groups(&self) -> &[Reads] {
        &self.further
    }

    fn mapped_blocks(&self) -> u64 {
        self.cache.parts().iter().map(Part::ready_blocks).min().unwrap_or(0)
    }

    fn moved(&self) -> Option<CacheStats> {
        Some(self.cache.stats())
    }

    fn local(&mut self) -> Result<&mut Local, RunError> {
        Ok(self)
    }

    fn launch(
        &mut self,
        step: &OpenStep,
        batch: &Batch,
        readers: &mut [&mut Sequence],
        read: bool,
    ) -> Result<(), RunError> {
        let Self { cache, work, .. } = self;
        cache
            .stage_with(step, readers, &mut |part, staged| work.add_arrays(part, batch, staged))?;
        work.enqueue(cache.parts(), step.number(), batch, read)
    }

    fn checksums(
        &mut self,
        part: usize,
        reading: &Reading,
        checksums: &mut Vec<u64>,
    ) -> Result<usize, RunError> {
        self.work.arrived(part, reading.step, reading.rows.len(), checksums)
    }
}
