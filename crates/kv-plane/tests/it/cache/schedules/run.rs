//! One sequence: what its cache has of it, and what it should have.

use std::ops::Range;

use crate::prelude::*;

/// What decides the KV of a sequence beside its ids, and who may read it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    /// Which tenant it is of; 0 for none.
    pub(super) tenant: usize,
    /// Its first tokens that others may read, in whole blocks of every group.
    pub(super) shared: u64,
}

impl Facts {
    /// The value of a token behind one with the value `before`.
    fn value(before: u64, id: u32, generation: u64) -> u64 {
        mix(mix(before) ^ u64::from(id) ^ generation << 40)
    }

    /// The values of the first `count` of some ids.
    pub(super) fn values(ids: &[u32], count: usize, generation: u64) -> Vec<u64> {
        let value = |before: &mut u64, &id: &u32| {
            *before = Self::value(*before, id, generation);
            Some(*before)
        };
        ids[..count].iter().scan(0, value).collect()
    }

    /// The key of the bytes that a token has, at its position.
    pub(super) fn key(&self, at: u64, value: u64) -> u64 {
        let salt = if at < self.shared { 0 } else { self.tenant as u64 };
        mix(value ^ salt << 56)
    }
}

/// The key of a state behind a token with this key.
pub(super) fn state_key(key: u64) -> u64 {
    mix(key ^ 0x57A7E)
}

/// The id that the model samples behind a token of this value.
fn sampled(value: u64) -> u32 {
    1000 + (mix(value ^ 0x5a) % 50) as u32
}

/// Ids that came out of a step and are to be committed.
#[derive(Clone, Debug)]
pub(super) struct Output {
    pub(super) step: u64,
    pub(super) ids: Vec<u32>,
}

#[derive(Debug)]
pub(super) struct Run {
    pub(super) number: u64,
    pub(super) sequence: Sequence,
    pub(super) facts: Facts,
    /// All ids, those that are to be committed included.
    pub(super) ids: Vec<u32>,
    /// The values of the tokens that have KV behind all steps that were staged.
    pub(super) values: Vec<u64>,
    pub(super) outputs: VecDeque<Output>,
    /// Ids that came out of steps from before a cut.
    pub(super) stale: Vec<Output>,
    /// Steps in which a draft model has computed tokens, and those.
    pub(super) drafted: VecDeque<(u64, Range<u64>)>,
    /// What becomes of the loads that it was admitted with.
    pub(super) load: Option<Arc<Load>>,
    /// A transfer fills its blocks.
    pub(super) arriving: bool,
}

/// What a step computes of a sequence. Nothing has happened yet.
#[derive(Debug)]
pub(super) struct Computed {
    pub(super) start: u64,
    /// Behind its known and sampled tokens: drafts begin here.
    pub(super) sure: u64,
    /// Behind the tokens that are right.
    pub(super) right: u64,
    pub(super) end: u64,
    ids: Vec<u32>,
    /// The values of the tokens that are right, from the first one on.
    pub(super) values: Vec<u64>,
    output: Option<Vec<u32>>,
    pub(super) drafted: Range<u64>,
}

impl Run {
    pub(super) fn new(number: u64, sequence: Sequence, facts: Facts, ids: Vec<u32>) -> Self {
        let load = sequence.loads().map(|_| Arc::default());
        Self {
            number,
            sequence,
            facts,
            ids,
            values: Vec::new(),
            outputs: VecDeque::new(),
            stale: Vec::new(),
            drafted: VecDeque::new(),
            load,
            arriving: false,
        }
    }

    /// Tokens of decided ids that have no KV.
    pub(super) fn left(&self) -> u64 {
        (self.ids.len() - self.values.len()) as u64
    }

    pub(super) fn last_value(&self) -> u64 {
        self.values.last().copied().unwrap_or(0)
    }

    /// Adds the values of known tokens up to `end`, which others have computed.
    pub(super) fn fill(&mut self, end: u64, generation: u64) {
        for at in self.values.len()..end as usize {
            self.values.push(Facts::value(self.last_value(), self.ids[at], generation));
        }
    }

    /// The key of a token that has KV.
    pub(super) fn key(&self, at: u64) -> u64 {
        self.facts.key(at, self.values[at as usize])
    }

    /// What the next step computes as it is reserved: whether drafts are right is decided here.
    pub(super) fn computed(&self, generation: u64, random: &mut Random) -> Computed {
        let (start, before) = (self.values.len() as u64, self.ids.len());
        let end = start + u64::from(self.sequence.next());
        let (mut ids, mut values) = (self.ids.clone(), self.values.clone());
        for at in start as usize..end as usize {
            if at >= ids.len() {
                if !random.chance(60) {
                    break;
                }
                ids.push(sampled(values[at - 1]));
            }
            let last = values.last().copied().unwrap_or(0);
            values.push(Facts::value(last, ids[at], generation));
        }
        let output = (values.len() == ids.len()).then(|| {
            ids.push(sampled(values[values.len() - 1]));
            ids[before..].to_vec()
        });
        let drafted = self.sequence.draft_end();
        let drafted = drafted..drafted + self.sequence.next_draft();
        let (sure, right) = (end.min(before as u64), values.len() as u64);
        Computed { start, sure, right, end, ids, values, output, drafted }
    }

    /// Takes in that it was staged so in a step.
    pub(super) fn staged(&mut self, step: u64, computed: Computed) {
        let Computed { right, ids, values, output, drafted, .. } = computed;
        (self.ids, self.values) = (ids, values);
        self.outputs.extend(output.map(|ids| Output { step, ids }));
        let drafted = drafted.start..drafted.end.min(right);
        if !drafted.is_empty() {
            self.drafted.push_back((step, drafted));
        }
    }

    /// Takes in that its cache has cut it, to known tokens and to such with KV.
    pub(super) fn cut(&mut self) {
        let (known, resolved) = (self.sequence.known(), self.sequence.resolved());
        assert!(known <= self.ids.len() as u64, "{known} of {} ids are known", self.ids.len());
        let there = self.values.len() as u64;
        assert!(resolved <= there, "KV up to {resolved} of {there} tokens was never computed");
        self.ids.truncate(known as usize);
        self.values.truncate(resolved as usize);
        self.stale.extend(self.outputs.drain(..));
        self.drafted.clear();
    }

    /// Takes in what is known of its loads by now, after a call that it had no objection to.
    pub(super) fn note_load(&mut self, right: bool) {
        if let Some(load) = self.load.take_if(|_| !right || self.sequence.loads().is_none()) {
            load.set(right).unwrap();
        }
    }

    pub(super) fn check(&self) {
        let (sequence, number) = (&self.sequence, self.number);
        let known = sequence.known() as usize;
        assert!(known <= self.ids.len(), "sequence {number}");
        assert_eq!(sequence.ids(), Some(&self.ids[..known]), "sequence {number}");
        let to_come: usize = self.outputs.iter().map(|output| output.ids.len()).sum();
        assert_eq!(known + to_come, self.ids.len(), "sequence {number}");
        assert!(sequence.resolved() <= self.values.len() as u64, "sequence {number}");
        assert!(sequence.draft_end() <= sequence.resolved(), "sequence {number}");
    }
}
