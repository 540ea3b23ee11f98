//! One sequence: what the manager has, and what it should have.

use super::truth::{Facts, Ideal, sampled};
use crate::prelude::*;

/// Steps that have failed or will.
#[derive(Debug, Default)]
pub struct Failures {
    /// Steps that fail, and the worker, of which the manager was not told.
    pub untold: Vec<(u64, usize)>,
    /// Steps that the manager knows to be void.
    pub told: BTreeSet<u64>,
}

/// What came out of a step for one sequence.
#[derive(Clone, Debug)]
pub struct Output {
    pub step: u64,
    pub ids: Vec<u32>,
    /// The step began with known tokens.
    pub led: bool,
    /// The step is void: whatever comes of it is garbage.
    pub void: bool,
}

#[derive(Debug)]
pub struct Run {
    pub key: u64,
    pub sequence: Sequence,
    pub ideal: Ideal,
    /// The ids that were committed, garbage from void steps among them.
    pub known: Vec<u32>,
    /// Garbage was committed, of which the manager will say so.
    pub tainted: bool,
    /// Ids on their way, in the order of their steps.
    pub outputs: VecDeque<Output>,
    /// Ids on their way that are stale.
    pub stale: Vec<Output>,
    /// Steps that it was in and that may come to be void.
    pub steps: Vec<u64>,
    /// A step that it was in is known to have failed: the next call says so.
    pub must_redo: bool,
    /// A transfer fills its blocks.
    pub arriving: bool,
    /// A worker was lost while it had content there.
    pub lost: bool,
    /// Its blocks as of the last call.
    pub blocks: Vec<BlockId>,
    /// Steps whose ids were committed, and how many ids were known before.
    pub commits: Vec<(u64, u64)>,
    /// Tokens that may come from the cache.
    pub hit_max: u64,
    /// Steps in which the draft model computes tokens, and those.
    pub drafted: Vec<(u64, Range<u64>)>,
    /// The same of steps whose results are stale.
    pub late_drafted: Vec<(u64, Range<u64>)>,
}

/// Everything of a sequence that a failed call leaves as it was.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct View {
    ends: [u64; 4],
    blocks: Vec<BlockId>,
    row: Option<Row>,
    free_rows: usize,
    used: [u64; 4],
}

impl View {
    pub fn row(&self) -> Option<Row> {
        self.row
    }

    /// Checks that nothing has changed but that blocks were released which only a dropped twin had.
    pub fn check_kept(&self, before: &Self) {
        let used = self.used.iter().zip(&before.used);
        assert!(used.into_iter().all(|(now, before)| now <= before), "{self:?} from {before:?}");
        assert_eq!(Self { used: before.used, ..self.clone() }, *before);
    }
}

pub fn blocks_of(sequence: &Sequence) -> Vec<BlockId> {
    (0..sequence.block_count(GroupId(0)))
        .map(|at| sequence.block(GroupId(0), at).unwrap())
        .collect()
}

impl Run {
    pub fn view(&self, manager: &Manager) -> View {
        let sequence = &self.sequence;
        let stats = manager.pool(GroupId(0)).unwrap().stats();
        let used = |tier: kv_pool::stats::TierStats| [tier.pinned, tier.claimed];
        let ([a, b], [c, d]) = (used(stats.primary), used(stats.secondary));
        View {
            ends: [sequence.known(), sequence.resolved(), sequence.upper(), sequence.next().into()],
            blocks: blocks_of(sequence),
            row: sequence.row(),
            free_rows: manager.free_rows(),
            used: [a, b, c, d],
        }
    }

    /// The names of the blocks that become full with `ids`, if the engine names them.
    pub fn names_behind(&self, facts: &Facts, ids: &[u32]) -> Vec<BlockHash> {
        if !facts.named {
            return Vec::new();
        }
        let all: Vec<u32> = self.known.iter().chain(ids).copied().collect();
        let full = self.known.len() as u64 / facts.block_tokens;
        facts.names(&all).split_off(full as usize)
    }

    /// Ids as the manager takes them for this sequence.
    pub fn tokens<'a>(&self, ids: &'a [u32], names: &'a [BlockHash]) -> Tokens<'a> {
        if self.ideal.facts.named {
            Tokens::Named { count: ids.len() as u64, names }
        } else {
            Tokens::Ids(ids)
        }
    }

    /// Takes in that the manager has cut the sequence, and what that makes stale.
    pub fn cut(&mut self) {
        let sequence = &self.sequence;
        let (known, resolved) = (sequence.known(), sequence.resolved());
        assert!(known <= self.known.len() as u64, "{} ids of {}", known, self.known.len());
        self.known.truncate(known as usize);
        self.ideal.cut(known, resolved);
        self.stale.extend(self.outputs.drain(..));
        self.late_drafted.append(&mut self.drafted);
        assert!(resolved <= self.ideal.kv.len() as u64, "KV up to {resolved} was never computed");
        assert_eq!(sequence.upper(), resolved, "nothing is open behind a cut");
        assert_eq!(sequence.next(), 0);
        self.tainted &= self.known != self.ideal.ids;
        let blocks = blocks_of(sequence);
        if !sequence.is_suspended() && blocks.len() <= self.blocks.len() {
            assert_eq!(blocks, self.blocks[..blocks.len()], "a cut leaves the other blocks");
        }
        self.blocks = blocks;
        self.check();
    }

    /// Takes in that the manager has set the sequence back, because a step failed.
    pub fn set_back(&mut self, from: u64, failures: &Failures) {
        assert_eq!(from, self.sequence.resolved());
        self.check_forgotten(failures);
        self.must_redo = false;
        self.steps.retain(|step| !failures.told.contains(step));
        self.cut();
        assert!(
            !self.tainted || !failures.untold.is_empty(),
            "ids of a void step are still known: {:?}",
            self.known
        );
        let known = self.sequence.known();
        assert!(from < known || known == 0, "nothing is left to be computed again");
    }

    /// Checks that ids of void steps were forgotten, with those that follow them, and no others.
    pub fn check_forgotten(&mut self, failures: &Failures) {
        let void = self.commits.iter().filter(|(step, _)| failures.told.contains(step));
        let before = void.map(|&(_, before)| before).min();
        let known = self.known.len() as u64;
        assert_eq!(self.sequence.known(), before.unwrap_or(known).min(known));
        self.forget_commits();
    }

    /// Notes that ids were cut off.
    pub fn forget_commits(&mut self) {
        let known = self.sequence.known();
        self.commits.retain(|&(_, before)| before < known);
    }

    pub fn check(&self) {
        let sequence = &self.sequence;
        let known = sequence.known();
        assert_eq!(known, self.known.len() as u64);
        if let Some(ids) = sequence.ids() {
            assert_eq!(ids, self.known);
            let inputs = self.ideal.facts.inputs.iter();
            assert!(
                inputs.map(|&(at, content)| (at, vec![content])).eq(sequence.inputs().to_vec())
            );
        }
        assert!(sequence.resolved() <= self.ideal.kv.len() as u64);
        if !self.tainted {
            assert_eq!(self.known, self.ideal.ids[..known as usize], "sequence {}", self.key);
        }
        assert!(sequence.draft_end() <= sequence.resolved(), "sequence {}", self.key);
        let ahead = sequence.upper() >= self.ideal.kv.len() as u64;
        assert!(ahead || sequence.is_suspended(), "the upper bound is too low: {sequence:?}");
    }

    /// Notes what the draft model computes of it in a step, of the tokens that are right.
    pub fn note_drafts(&mut self, step: u64, tokens: &Range<u64>) {
        let end = tokens.end.min(self.ideal.kv.len() as u64);
        if tokens.start < end {
            self.drafted.push((step, tokens.start..end));
        }
    }

    /// What the draft model has computed is the sequence's no more.
    pub fn void_drafts(&mut self) {
        self.late_drafted.append(&mut self.drafted);
    }

    /// Whether ids of a step are to come.
    pub fn is_open(&self) -> bool {
        !self.outputs.is_empty()
    }

    /// Tokens of known ids, sampled ones among them, that have no KV.
    pub fn left(&self) -> u64 {
        (self.ideal.ids.len() - self.ideal.kv.len()) as u64
    }

    /// Computes the next `tokens` tokens as a worker does that makes no mistake, some drafts right, and
    /// returns the ids of all of them.
    pub fn compute(
        &mut self,
        batch: &BatchRow,
        step: u64,
        generation: u64,
        random: &mut Random,
    ) -> Vec<u32> {
        let tokens = batch.tokens;
        let led = matches!(batch.start, Start::At(start) if start < self.known.len() as u64);
        let ideal = &mut self.ideal;
        assert!(ideal.kv.len() < ideal.ids.len(), "sequence {}: no id to go on with", self.key);
        let (start, before) = (ideal.kv.len(), ideal.ids.len());
        let mut ids = Vec::new();
        for at in start..start + tokens as usize {
            let here = ideal.kv.len();
            if here == at && at >= ideal.ids.len() {
                // A draft. Whether it is right is decided here.
                let right = sampled(ideal.kv[at - 1]);
                if random.chance(60) {
                    ideal.ids.push(right);
                } else {
                    ids.push(right + 1000);
                    continue;
                }
            }
            match ideal.ids.get(at) {
                Some(&id) if here == at => {
                    ids.push(id);
                    ideal.push(generation);
                }
                _ => ids.push(random.number() as u32),
            }
        }
        if ideal.kv.len() == ideal.ids.len() {
            ideal.ids.push(sampled(ideal.kv[ideal.kv.len() - 1]));
            let ids = ideal.ids[before..].to_vec();
            self.outputs.push_back(Output { step, ids, led, void: false });
        }
        ids
    }
}
