//! A run's model on the devices of worker processes.

use std::ops::{Deref, DerefMut};

use cuda_driver::guard;
use kv_kernels::KvShape;
use kv_plane::manager::WorkerId;
use kv_plane::processes::{Processes, WorkerFault};
use kv_plane::{KvCache, OpenStep, Sequence, Workers as _};

use super::codec;
use super::drill::Drills;
use super::setup::Account;
use crate::engine::batch::Batch;
use crate::engine::cache::Compute;
use crate::engine::groups::Reads;
use crate::engine::verify::{Reading, SequenceSums};
use crate::engine::{RunError, closed};
use crate::report::{RestartReport, WorkersReport};

/// A cache over worker processes, and what the run does to them.
#[derive(Debug)]
pub(super) struct Fleet {
    pub(super) cache: KvCache<Processes>,
    pub(super) shapes: Vec<(KvShape, Reads)>,
    pub(super) reads: Vec<Reads>,
    pub(super) drills: Drills,
    /// A drill that went wrong while nothing could be said of it.
    pub(super) failed: Option<RunError>,
    /// Replaced processes whose losses were told.
    pub(super) told: usize,
}

impl Deref for Fleet {
    type Target = KvCache<Processes>;

    fn deref(&self) -> &KvCache<Processes> {
        &self.cache
    }
}

impl DerefMut for Fleet {
    fn deref_mut(&mut self) -> &mut KvCache<Processes> {
        &mut self.cache
    }
}

impl Compute for Fleet {
    type Workers = Processes;

    fn shapes(&self) -> Vec<(KvShape, Reads)> {
        self.shapes.clone()
    }

    fn further_groups(&self) -> &[Reads] {
        self.reads.get(1..).unwrap_or_default()
    }

    fn mapped_blocks(&self) -> u64 {
        self.cache.workers().mapped_blocks()
    }

    fn about_to_wait(&mut self, most: usize) {
        if self.cache.workers().in_flight() > most {
            let gone = self.drills.let_go(&self.cache);
            self.failed = self.failed.take().or(gone.err());
        }
    }

    fn take_loss(&mut self) -> Option<u64> {
        let replaced = self.cache.workers().replaced();
        let new = &replaced[std::mem::replace(&mut self.told, replaced.len())..];
        let loss = new.iter().map(|one| one.completed).min();
        guard!("replay.lost-requests-again", loss, else None)
    }

    fn launch(
        &mut self,
        step: &OpenStep,
        batch: &Batch,
        readers: &mut [&mut Sequence],
        read: bool,
    ) -> Result<(), RunError> {
        if let Some(failed) = self.failed.take() {
            return Err(failed);
        }
        let mut work = Vec::new();
        codec::put(&mut work, &[u64::from(read)]);
        batch.put(&mut work);
        let kills = self.drills.stop(&self.cache, step.number())?;
        self.cache.stage_with(step, readers, &work)?;
        Drills::kill(&self.cache, kills);
        Ok(())
    }

    fn checksums(
        &mut self,
        part: usize,
        reading: &Reading,
        checksums: &mut Vec<u64>,
    ) -> Result<usize, RunError> {
        let (worker, group) = (part / self.reads.len(), part % self.reads.len());
        let worker = WorkerId(worker as u16);
        let block_tokens = self.cache.manager().options().groups[0].block_tokens.into();
        let entries = |row: &SequenceSums| self.reads[group].checksums(row.tokens, block_tokens);
        let (expected, width) = reading
            .rows
            .iter()
            .map(entries)
            .fold((0, 0), |(sum, most), row| (sum + row, row.max(most)));
        let mut said = self.cache.workers().result(worker, reading.step).unwrap_or_default();
        let groups = (0..=group).map(|_| codec::take::<u64>(&mut said));
        let sums = groups.last().and_then(Result::ok).filter(|sums| sums.len() == expected);
        let Some(sums) = sums else {
            let fault = WorkerFault::NotComputed { step: reading.step };
            return Err(RunError::Worker { worker: worker.0, source: Box::new(fault) });
        };
        checksums.clear();
        let mut rest = &sums[..];
        for row in &reading.rows {
            let (here, behind) = rest.split_at(entries(row));
            checksums.extend_from_slice(here);
            checksums.resize(checksums.len() + width - here.len(), 0);
            rest = behind;
        }
        Ok(width)
    }
}

impl Fleet {
    /// Ends all processes in an orderly way; what they have done.
    pub(super) fn close(self) -> Result<(Vec<Account>, WorkersReport), RunError> {
        let workers = self.cache.workers();
        let restarts = workers.replaced().iter().map(|one| RestartReport {
            worker: one.worker.0.into(),
            step: one.staged,
            reason: one.reason.clone(),
        });
        let report = WorkersReport {
            workers: self.cache.manager().options().workers.into(),
            steps_voided: workers.replaced().iter().map(|one| one.voided).sum(),
            restarts: restarts.collect(),
            stops: self.drills.report,
        };
        let accounts = closed(self.cache.close())?;
        let accounts = accounts.iter().map(|said| serde_json::from_slice(said));
        Ok((accounts.collect::<Result<_, _>>().map_err(RunError::Account)?, report))
    }
}

pub(super) fn sum(accounts: Vec<Account>) -> Account {
    let mut all = Account::default();
    for account in accounts {
        for (name, count) in account.driver_calls {
            *all.driver_calls.entry(name).or_default() += count;
        }
        for (way, (batches, blocks)) in all.transports.iter_mut().zip(account.transports) {
            *way = (way.0 + batches, way.1 + blocks);
        }
        all.copied_bytes += account.copied_bytes;
        if let Some(pinned) = account.pinned_after_warmup {
            *all.pinned_after_warmup.get_or_insert(0) += pinned;
        }
        all.findings = all.findings.or(account.findings);
        if let Some(disk) = account.disk {
            all.disk.get_or_insert_default().add(disk);
        }
    }
    all
}
