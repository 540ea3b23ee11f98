//! Sequences that leave for another cache and come back: here, both are the same one.

use kv_plane::manager::{Adoption, Export, ExportRefused};

use super::play::{Play, Wish};
use super::run::{Facts, Run};
use super::workers::Hands;

use crate::prelude::*;

/// A sequence whose blocks are to be filled with those of another.
#[derive(Debug)]
pub(super) struct Arrival {
    number: u64,
    export: Export,
    adoption: Adoption,
    values: Vec<u64>,
    /// The last step that was staged before.
    behind: u64,
}

impl<H: Hands> Play<H> {
    /// A sequence leaves, and is asked to come at once.
    pub(super) fn depart(&mut self, at: usize) {
        if self.crew > 0 {
            return;
        }
        let run = self.runs.remove(at);
        let export = match self.cache.export(run.sequence) {
            Ok(export) => export,
            Err(refused) => {
                let ExportRefused { reason, sequence } = *refused;
                self.runs.insert(at, Run { sequence, ..run });
                match reason {
                    ChangeError::Sequence(error) => self.refused(at, error),
                    ChangeError::Writing { .. } => {}
                    error => panic!("{error:?}"),
                }
                return;
            }
        };
        assert_eq!(export.tokens(), run.values.len() as u64);
        let Run { facts, mut ids, values, .. } = run;
        if ids.len() == values.len() {
            ids.push(7);
        }
        if values.is_empty() || values != Facts::values(&ids, values.len(), self.generation) {
            // Nobody hands over what other weights have computed.
            return;
        }
        let wish = Wish { facts, ids };
        let mut request = self.request(&wish);
        let answer = self.cache.adopt(&mut request, export.tokens(), export.formats());
        let (answer, adoption) = match answer {
            Ok(answered) => answered,
            Err(error) => return self.trouble(error),
        };
        let Answer::Admitted(sequence) = answer else { return };
        let number = self.next_number;
        let run = Run::new(number, sequence, wish.facts, wish.ids);
        let Some(mut adoption) = adoption else { return self.enter(run, u64::MAX) };
        adoption.set_draft_tokens(export.draft_tokens());
        self.enter(Run { arriving: true, ..run }, u64::MAX);
        let behind = self.cache.manager().last_plan().step;
        self.arrivals.push(Arrival { number, export, adoption, values, behind });
        self.saw("an arrival");
    }

    /// Copies the blocks of a sequence that comes, behind the plan that says what was in their places.
    pub(super) fn end_transfer(&mut self) {
        let latest = self.cache.manager().last_plan().step;
        let Some(at) = self.arrivals.iter().position(|arrival| arrival.behind < latest) else {
            return;
        };
        if let Err(error) = self.cache.drain() {
            return self.trouble(error);
        }
        self.judge();
        let Arrival { number, export, adoption, values, .. } = self.arrivals.swap_remove(at);
        let all = adoption.block_count();
        let right = if self.random.chance(75) { all } else { self.random.index(all + 1) };
        let copied = H::copy(&self.cache, &moves(&export, &adoption, right));
        let right = match copied {
            Ok(()) => right,
            Err(error) => {
                self.trouble(error);
                0
            }
        };
        drop(export);
        let Some(at) = self.runs.iter().position(|run| run.number == number) else { return };
        let run = &mut self.runs[at];
        run.arriving = false;
        match self.cache.adopted(&mut run.sequence, adoption, right) {
            Ok(end) => {
                assert!(end <= values.len() as u64);
                assert_eq!(end, run.sequence.resolved());
                run.values = values[..end as usize].to_vec();
            }
            Err(error @ (SequenceError::Lost { .. } | SequenceError::Redo { .. })) => {
                self.refused(at, error);
            }
            Err(error) => panic!("{error:?}"),
        }
    }

    pub(super) fn end_transfers(&mut self) {
        self.arrivals.clear();
    }
}

/// A block of a group whose bytes are to be those of another.
pub(super) type Move = (GroupId, [u64; 2]);

/// The first `right` blocks of an adoption, each from the block that has its place in the export.
fn moves(export: &Export, adoption: &Adoption, right: usize) -> Vec<Move> {
    let groups = (0..export.formats().len() as u16).map(GroupId);
    let of = |group| adoption.blocks(group).map(move |(place, to)| (group, place, to));
    let wanted = groups.flat_map(of).take(right);
    let from = |(group, place, to): (GroupId, usize, BlockId)| {
        // A draft model has not come as far.
        let (_, from) = export.blocks(group).iter().find(|(there, _)| *there == place)?;
        Some((group, [from.index() as u64, to.index() as u64]))
    };
    wanted.filter_map(from).collect()
}

/// Copies blocks on every device of a cache, and waits until that is done: what was enqueued before a refused copy too, for
/// the blocks are given back then.
pub(super) fn copy(cache: &KvCache, moves: &[Move]) -> Result<(), crate::common::engine::Failure> {
    for part in cache.parts() {
        let copied = moves.iter().try_for_each(|&(group, blocks)| {
            let paged = part.groups()[usize::from(group.0)].paged();
            let [from, to] = blocks.map(|block| paged.block_span(block).unwrap().unwrap());
            part.compute().copy_on_device(to, from)
        });
        part.compute().synchronize()?;
        copied?;
    }
    Ok(())
}
