//! The sampler: a thread that turns hidden states into token ids.
//!
//! It works while the engine puts the next step together. So the engine stages a step before it knows what came out of
//! the last one.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use anyhow::Context as _;

use crate::model::Model;
use crate::sampling::Sampling;

/// A sequence whose next token is wanted.
#[derive(Debug)]
pub(super) struct Wanted {
    /// The engine's number of the sequence.
    pub(super) sequence: u64,
    /// The hidden states of its last token, and of the drafts behind it.
    pub(super) hidden: Vec<f32>,
    /// The drafts.
    pub(super) drafts: Vec<u32>,
    /// The position of the token that follows the first of the hidden states.
    pub(super) position: u64,
    pub(super) sampling: Sampling,
}

/// What came out of a step for one sequence.
#[derive(Debug)]
pub(super) struct Sampled {
    /// The engine's number of the sequence.
    pub(super) sequence: u64,
    /// The drafts that are right, and the token behind them.
    pub(super) ids: Vec<u32>,
    /// Drafts that were tried.
    pub(super) drafts: usize,
    /// Where the first of `ids` stands.
    pub(super) position: u64,
    /// The logits that each was chosen by.
    pub(super) logits: Vec<Vec<f32>>,
}

type Outcome = anyhow::Result<Vec<Sampled>>;

/// The thread, and the ways to it and back.
#[derive(Debug)]
pub(super) struct Sampler {
    wanted: Option<Sender<Vec<Wanted>>>,
    sampled: Receiver<Outcome>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// `believes` takes every draft for right, which is wrong.
    pub(super) fn new(model: Arc<Model>, believes: bool) -> anyhow::Result<Self> {
        let (wanted, inbox) = channel::<Vec<Wanted>>();
        let (outbox, sampled) = channel();
        let work = move || {
            for step in inbox {
                let one = |wanted| sample(&model, wanted, believes);
                if outbox.send(step.into_iter().map(one).collect()).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("sampler".to_owned()).spawn(work)?;
        Ok(Self { wanted: Some(wanted), sampled, thread: Some(thread) })
    }

    /// Has the ids of a step chosen.
    pub(super) fn begin(&self, step: Vec<Wanted>) -> anyhow::Result<()> {
        let wanted = self.wanted.as_ref().context("the sampler was closed")?;
        wanted.send(step).ok().context("the sampler has stopped")
    }

    /// The ids of the step that was begun first.
    ///
    /// # Ordering
    /// Waits for them.
    pub(super) fn end(&self) -> Outcome {
        self.sampled.recv().context("the sampler has stopped")?
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        // Its loop ends with the channel.
        self.wanted = None;
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// A draft is right if it is the token that would have been chosen. The first wrong one is replaced by that token, and ends
/// the step's output.
fn sample(model: &Model, wanted: Wanted, believes: bool) -> anyhow::Result<Sampled> {
    let Wanted { sequence, hidden, drafts, position, sampling } = wanted;
    let all = model.logits(&hidden)?;
    let (mut ids, mut logits) = (Vec::new(), Vec::new());
    for (index, row) in all.chunks_exact(all.len() / (drafts.len() + 1)).enumerate() {
        let id = sampling.choose(row, position + index as u64);
        ids.push(id);
        logits.push(row.to_vec());
        if !believes && drafts.get(index) != Some(&id) {
            break;
        }
    }
    Ok(Sampled { sequence, ids, drafts: drafts.len(), position, logits })
}
