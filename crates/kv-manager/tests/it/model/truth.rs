//! What the KV of a token is, and what a block's cells can hold instead.

use crate::prelude::*;

/// The KV of one token: its value, and who wrote it.
///
/// From the lowest bit on: 40 bits of value, 8 bits of [`Kind`], 8 bits of salt, 8 bits of tenant. A cell
/// that was scrubbed is 0.
pub type Cell = u64;

const VALUE: u64 = (1 << 40) - 1;

/// What a cell holds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// The KV of a token that belongs there.
    Token = 1,
    /// The KV of a draft that was rejected.
    Draft = 2,
    /// What a failed step has left.
    Void = 3,
    /// What was there before anybody wrote, or in memory that is free.
    Garbage = 4,
}

pub fn cell(kind: Kind, tenant: u8, salt: u8, value: u64) -> Cell {
    (value & VALUE) | (kind as u64) << 40 | u64::from(salt) << 48 | u64::from(tenant) << 56
}

pub fn garbage(noise: u64) -> Cell {
    cell(Kind::Garbage, 0, 0, noise)
}

/// Whether a cell holds what a tenant has written for itself.
pub fn is_private_to_others(cell: Cell, tenant: u8, salt: u8) -> bool {
    let written = cell != 0 && (cell >> 40) & 0xff != Kind::Garbage as u64;
    let (its_salt, its_tenant) = ((cell >> 48) as u8, (cell >> 56) as u8);
    written && its_salt != 0 && its_salt != salt && its_tenant != tenant
}

/// Everything that decides the KV of a sequence beside its ids, and who may read it.
#[derive(Clone, Debug)]
pub struct Facts {
    pub block_tokens: u64,
    /// 0 for none.
    pub adapter: u8,
    /// Positions with content other than text, and what that is.
    pub inputs: Vec<(u64, u8)>,
    /// 0 for none.
    pub salt: u8,
    pub shared_tokens: u64,
    /// 0 for none.
    pub tenant: u8,
    /// The engine names the blocks.
    pub named: bool,
}

impl Facts {
    /// The KV of the token at `at`, behind a token whose KV is `before`.
    pub fn value(&self, at: u64, before: u64, id: u32, generation: u64) -> u64 {
        let input = self.inputs.iter().find(|(position, _)| *position == at);
        let input = input.map_or(0, |(_, content)| u64::from(*content) + 1);
        let own = at << 32 | u64::from(id);
        let start = if at == 0 { u64::from(self.adapter) + 1 } else { 0 };
        let keys = generation << 32 | start << 16 | input;
        mix(mix(mix(before) ^ own) ^ keys) & VALUE
    }

    /// Whose salt the name of the block of token `at` has.
    pub fn salt_at(&self, at: u64) -> u8 {
        let salted = at / self.block_tokens >= self.shared_tokens / self.block_tokens;
        if salted { self.salt } else { 0 }
    }

    pub fn cell(&self, kind: Kind, at: u64, value: u64) -> Cell {
        cell(kind, self.tenant, self.salt_at(at), value)
    }

    /// A cell as it is compared with that of a token at `at`, in blocks of `block_tokens` tokens.
    pub fn seen(&self, cell: Cell, at: u64, block_tokens: usize) -> Cell {
        let cell = cell << 8 >> 8;
        let own = u64::from(self.salt) << 48;
        // A block of several parts has its last one's name. If that has a salt, its readers have it too, whether they
        // and the writer declare the parts before it shared or not.
        let parts = block_tokens as u64 > self.block_tokens;
        let salt = cell >> 48 << 48;
        if parts && (salt == own || salt == 0) {
            cell ^ salt ^ u64::from(self.salt_at(at)) << 48
        } else {
            cell
        }
    }

    /// What the engine tells the manager.
    pub fn content(&self, explicit_salt: bool) -> Content {
        Content {
            adapter: if self.adapter == 0 { Vec::new() } else { vec![self.adapter] },
            inputs: self.inputs.iter().map(|&(at, content)| (at, vec![content])).collect(),
            salt: if explicit_salt { vec![b's', self.salt] } else { Vec::new() },
            shared_tokens: self.shared_tokens,
        }
    }

    /// Names of the full blocks of `ids`, by an engine that names blocks itself.
    pub fn names(&self, ids: &[u32]) -> Vec<BlockHash> {
        let adapter = [self.adapter];
        let contents: Vec<_> = self.inputs.iter().map(|&(at, content)| (at, [content])).collect();
        let mut parent = BlockHash::ROOT;
        let mut names = Vec::new();
        for (index, block) in ids.chunks_exact(self.block_tokens as usize).enumerate() {
            let first = index as u64 * self.block_tokens;
            let mut keys = Vec::new();
            if index == 0 && self.adapter != 0 {
                keys.push(ExtraKey::Adapter(&adapter));
            }
            for (at, content) in &contents {
                if (first..first + self.block_tokens).contains(at) {
                    keys.push(ExtraKey::Modality { offset: (at - first) as u32, content });
                }
            }
            parent = BlockHasher::FAST.chain_with(parent, block, &keys);
            names.push(parent);
        }
        names
    }
}

/// The id that the model samples behind a token whose KV is `value`.
pub fn sampled(value: u64) -> u32 {
    1000 + (mix(value ^ 0x5a) % 50) as u32
}

/// A sequence as it is when every step staged so far is carried out and every id taken.
#[derive(Clone, Debug)]
pub struct Ideal {
    pub facts: Rc<Facts>,
    pub ids: Vec<u32>,
    /// The KV of the first tokens.
    pub kv: Vec<u64>,
    /// Positions of inputs that came with ids behind the prompt.
    pub later: Vec<u64>,
}

impl Ideal {
    /// Notes that something else stands behind the id at a position, which came with it.
    pub fn add_input(&mut self, at: u64, content: u8) {
        let mut facts = Facts::clone(&self.facts);
        facts.inputs.push((at, content));
        facts.inputs.sort_by_key(|(at, _)| *at);
        self.facts = Rc::new(facts);
        self.later.push(at);
    }

    /// Adds the KV of known tokens up to `end`, which others have computed.
    pub fn fill(&mut self, end: u64, generation: u64) {
        while (self.kv.len() as u64) < end {
            self.push(generation);
        }
    }

    /// Adds the KV of the next token, whose id is known.
    pub fn push(&mut self, generation: u64) {
        let at = self.kv.len();
        let before = self.kv.last().copied().unwrap_or(0);
        self.kv.push(self.facts.value(at as u64, before, self.ids[at], generation));
    }

    pub fn cut(&mut self, ids: u64, kv: u64) {
        if self.later.iter().any(|&at| at >= ids) {
            let mut facts = Facts::clone(&self.facts);
            facts.inputs.retain(|(at, _)| *at < ids || !self.later.contains(at));
            self.facts = Rc::new(facts);
            self.later.retain(|&at| at < ids);
        }
        self.ids.truncate(ids as usize);
        self.kv.truncate(kv as usize);
    }
}
