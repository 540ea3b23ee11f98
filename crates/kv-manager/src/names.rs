//! Names of a sequence's blocks: what its content depends on, and how far it is known.

use std::sync::Arc;

use kv_pool::{BlockHash, BlockHasher, ExtraKey};
use smallvec::SmallVec;

use crate::TokensError;

/// Token ids, or names for an engine that names blocks itself.
#[derive(Clone, Copy, Debug)]
pub enum Tokens<'a> {
    /// The ids. The manager names the blocks.
    Ids(&'a [u32]),
    /// So many tokens, and the names of all blocks that they fill, in order. The names chain everything
    /// that decides the content: ids, adapter, images.
    Named {
        /// Tokens.
        count: u64,
        /// A name for each block that becomes full.
        names: &'a [BlockHash],
    },
}

impl Tokens<'_> {
    /// The number of tokens.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            Self::Ids(ids) => ids.len() as u64,
            Self::Named { count, .. } => *count,
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a> From<&'a [u32]> for Tokens<'a> {
    fn from(ids: &'a [u32]) -> Self {
        Self::Ids(ids)
    }
}

impl<'a, const N: usize> From<&'a [u32; N]> for Tokens<'a> {
    fn from(ids: &'a [u32; N]) -> Self {
        Self::Ids(ids)
    }
}

impl<'a> From<&'a Vec<u32>> for Tokens<'a> {
    fn from(ids: &'a Vec<u32>) -> Self {
        Self::Ids(ids)
    }
}

/// What a sequence's content depends on beside its token ids.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Content {
    /// The adapter (LoRA) that computes the KV. Empty for none.
    pub adapter: Vec<u8>,
    /// What stands behind placeholder tokens: the position of the first of them, and what tells the
    /// content from other content, such as a hash of an image. In ascending order.
    pub inputs: Vec<(u64, Vec<u8>)>,
    /// Keeps the content apart from that of others. Empty for the tenant's own salt, or none without a
    /// tenant.
    pub salt: Vec<u8>,
    /// The first tokens that are shared with all who declare them shared too, such as a system prompt.
    /// The salt enters at the first block that is not wholly inside.
    pub shared_tokens: u64,
}

impl Content {
    /// Whether names depend on token ids alone.
    fn is_plain(&self) -> bool {
        self.adapter.is_empty() && self.inputs.is_empty() && self.salt.is_empty()
    }

    /// The first block that the salt enters.
    fn salted_from(&self, block_tokens: u32) -> u64 {
        self.shared_tokens / u64::from(block_tokens)
    }
}

/// How names are made: shared by all sequences of a manager.
#[derive(Clone, Debug)]
pub(crate) struct Namer {
    pub(crate) hasher: BlockHasher,
    /// Tokens of the smallest block of any group.
    pub(crate) block_tokens: u32,
    pub(crate) generation: u64,
}

impl Namer {
    /// What sets the names of a generation apart: the names of the same content with other upper 64 bits.
    ///
    /// The lower 64 bits are what [routers](crate::vllm::block_hash) know. They stay those of the content, since routers
    /// take equal content for equally named wherever it is, also where weights were updated at another time.
    fn mask(&self, generation: u64) -> u128 {
        match generation {
            0 => 0,
            generation => {
                let salted = self.hasher.salted(&generation.to_le_bytes()).to_u128();
                (salted >> 64).max(1) << 64
            }
        }
    }
}

/// What is known of a sequence: the ids, or how many, and the names of its full blocks.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    ids: Option<Vec<u32>>,
    tokens: u64,
    names: Vec<BlockHash>,
    generation: u64,
    content: Option<Arc<Content>>,
    /// What the caller's names are mixed with, for its unsalted blocks and for the others; `None` for ids.
    masks: Option<Box<[u128; 2]>>,
}

impl Known {
    /// What is known of a prompt. `content` has its salt.
    pub(crate) fn new(
        namer: &Namer,
        tokens: Tokens<'_>,
        content: Content,
    ) -> Result<Self, TokensError> {
        if !content.inputs.is_sorted_by_key(|(at, _)| *at) {
            return Err(TokensError::InputsUnordered);
        }
        let mask = |salt: &[u8]| mask_of(salt, namer.generation, namer);
        let named = matches!(tokens, Tokens::Named { .. });
        let mut known = Self {
            ids: (!named).then(Vec::new),
            tokens: 0,
            names: Vec::new(),
            masks: named.then(|| Box::new([mask(&[]), mask(&content.salt)])),
            content: (!content.is_plain()).then(|| Arc::new(content)),
            generation: namer.generation,
        };
        known.push(namer, tokens)?;
        Ok(known)
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The names of the full blocks. In a later generation they mean nothing.
    pub(crate) fn names(&self) -> &[BlockHash] {
        &self.names
    }

    pub(crate) fn ids(&self) -> Option<&[u32]> {
        self.ids.as_deref()
    }

    pub(crate) fn content(&self) -> Option<&Arc<Content>> {
        self.content.as_ref()
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Makes room for so many tokens in all, so that none of them allocates.
    pub(crate) fn reserve(&mut self, namer: &Namer, tokens: u64) {
        let more = usize::try_from(tokens.saturating_sub(self.tokens)).unwrap_or(usize::MAX);
        let blocks = usize::try_from(tokens / u64::from(namer.block_tokens)).unwrap_or(usize::MAX);
        // A hint: what cannot be reserved now is asked for when it is needed.
        if let Some(ids) = &mut self.ids {
            let _ = ids.try_reserve(more);
        }
        let _ = self.names.try_reserve(blocks.saturating_sub(self.names.len()));
    }

    /// Whether `tokens` can follow.
    pub(crate) fn check(&self, namer: &Namer, tokens: &Tokens<'_>) -> Result<(), TokensError> {
        let Tokens::Named { count, names } = tokens else {
            return if self.ids.is_some() { Ok(()) } else { Err(TokensError::NamesExpected) };
        };
        if self.ids.is_some() {
            return Err(TokensError::IdsExpected);
        }
        let full = self.tokens.saturating_add(*count) / u64::from(namer.block_tokens);
        let blocks = full - self.names.len() as u64;
        match names.len() as u64 == blocks {
            true => Ok(()),
            false => Err(TokensError::Names { names: names.len(), blocks }),
        }
    }

    /// Adds tokens, and names the blocks that become full.
    pub(crate) fn push(&mut self, namer: &Namer, tokens: Tokens<'_>) -> Result<(), TokensError> {
        self.check(namer, &tokens)?;
        self.tokens += tokens.len();
        match tokens {
            Tokens::Ids(more) => {
                if let Some(ids) = &mut self.ids {
                    match more {
                        [id] => ids.push(*id),
                        more => ids.extend_from_slice(more),
                    }
                }
                self.name_full(namer);
            }
            Tokens::Named { names: more, .. } => {
                self.names.reserve(more.len());
                let content = self.content.as_ref();
                let salted_from =
                    content.map_or(0, |content| content.salted_from(namer.block_tokens));
                let masks = self.masks.as_deref().copied().unwrap_or_default();
                for name in more {
                    let salted = self.names.len() as u64 >= salted_from;
                    let mask = masks[usize::from(salted)];
                    self.names.push(BlockHash::from_u128(name.to_u128() ^ mask));
                }
            }
        }
        Ok(())
    }

    /// Forgets all but the first tokens.
    pub(crate) fn truncate(&mut self, namer: &Namer, tokens: u64) {
        self.tokens = self.tokens.min(tokens);
        if let Some(ids) = &mut self.ids {
            ids.truncate(self.tokens as usize);
        }
        self.names.truncate((self.tokens / u64::from(namer.block_tokens)) as usize);
    }

    fn name_full(&mut self, namer: &Namer) {
        let Some(ids) = &self.ids else { return };
        let block = namer.block_tokens as usize;
        // Most commits fill no block. Then the names, which nothing else has touched, are not read.
        if ids.len() < (self.names.len() + 1) * block {
            return;
        }
        self.names.reserve((ids.len() / block).saturating_sub(self.names.len()));
        let mask = namer.mask(self.generation);
        let masked = |name: BlockHash| BlockHash::from_u128(name.to_u128() ^ mask);
        let mut parent = self.names.last().copied().map_or(BlockHash::ROOT, masked);
        for tokens in ids.chunks_exact(block).skip(self.names.len()) {
            #[cfg(test)]
            crate::work::looks(1);
            let index = self.names.len() as u64;
            parent = match &self.content {
                None => namer.hasher.chain(parent, tokens),
                Some(content) => content.chain(namer, parent, tokens, index),
            };
            self.names.push(masked(parent));
        }
    }
}

impl Content {
    /// The name of block `index`, which depends on those of these keys that enter there.
    fn chain(&self, namer: &Namer, parent: BlockHash, tokens: &[u32], index: u64) -> BlockHash {
        let first = index * u64::from(namer.block_tokens);
        let mut keys: SmallVec<[ExtraKey<'_>; 4]> = SmallVec::new();
        if index == 0 && !self.adapter.is_empty() {
            keys.push(ExtraKey::Adapter(&self.adapter));
        }
        if index == self.salted_from(namer.block_tokens) && !self.salt.is_empty() {
            keys.push(ExtraKey::TenantSalt(&self.salt));
        }
        let from = self.inputs.partition_point(|(at, _)| *at < first);
        for (at, content) in &self.inputs[from..] {
            let offset = at - first;
            if offset >= u64::from(namer.block_tokens) {
                break;
            }
            keys.push(ExtraKey::Modality { offset: offset as u32, content });
        }
        namer.hasher.chain_with(parent, tokens, &keys)
    }
}

impl Known {
    /// The same tokens, with the names of the present generation.
    pub(crate) fn renamed(&self, namer: &Namer) -> Self {
        let content = self.content.as_deref().cloned().unwrap_or_default();
        let [plain, salted] =
            [mask_of(&[], self.generation, namer), mask_of(&content.salt, self.generation, namer)];
        let salted_from = content.salted_from(namer.block_tokens);
        let unmasked = self.names.iter().zip(0_u64..).map(|(name, at)| {
            let mask = if at >= salted_from { salted } else { plain };
            BlockHash::from_u128(name.to_u128() ^ mask)
        });
        let names: Vec<_> = unmasked.collect();
        let tokens = match &self.ids {
            Some(ids) => Tokens::Ids(ids),
            None => Tokens::Named { count: self.tokens, names: &names },
        };
        // They were taken before.
        Self::new(namer, tokens, content).unwrap_or_else(|_| self.clone())
    }
}

/// What an engine's names are mixed with in a generation, where content has this salt.
fn mask_of(salt: &[u8], generation: u64, namer: &Namer) -> u128 {
    let salt = if salt.is_empty() { 0 } else { namer.hasher.salted(salt).to_u128() };
    salt ^ namer.mask(generation)
}
