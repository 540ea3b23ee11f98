//! Names of a sequence's blocks: what its content depends on, and how far it is known.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kv_pool::tenants::{TenantError, TenantId};
use kv_pool::{BlockHash, BlockHasher, ExtraKey, guard};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::{ManagerOptions, TokensError};

/// Token ids, or names for an engine that names blocks itself.
#[derive(Clone, Copy, Debug)]
pub enum Tokens<'a> {
    /// The ids, each of which stands for itself. The manager names the blocks.
    Ids(&'a [u32]),
    /// The ids, some of which are placeholders: a picture, say, that comes in a later turn. Ids that stand for something
    /// else are given with it at every call that takes ids, or other content of the same ids is found under their names.
    With {
        /// The ids.
        ids: &'a [u32],
        /// What stands behind placeholders, as in [`Content::inputs`], with positions counted from the first of these ids.
        inputs: &'a [(u64, Vec<u8>)],
    },
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
            Self::Ids(ids) | Self::With { ids, .. } => ids.len() as u64,
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
    /// content from other content, such as a hash of an image. In ascending order. What stands behind ids that come later is
    /// given [with them](Tokens::With).
    pub inputs: Vec<(u64, Vec<u8>)>,
    /// Keeps the content apart from that of others. Empty for the [tenant's own](crate::Manager::add_tenant), which no salt
    /// that is given here is like, or none without a tenant. Events tell of the tenant's own as a salt.
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

    /// Its salt as names have it. That of a tenant is of a kind of its own, so no salt that a request gives is the same.
    fn salt(&self, is_tenants: bool) -> Option<ExtraKey<'_>> {
        let is_apart = guard!("manager.tenants-salts-are-apart", is_tenants, else false);
        let kind = if is_apart { ExtraKey::Other } else { ExtraKey::TenantSalt };
        (!self.salt.is_empty()).then(|| kind(&self.salt))
    }

    /// The first block that the salt enters.
    fn salted_from(&self, block_tokens: u32) -> u64 {
        self.shared_tokens / u64::from(block_tokens)
    }
}

/// How content is named: shared by all sequences of a manager.
#[derive(Debug)]
pub(crate) struct Namer {
    /// Tells it from those of other managers.
    mark: u64,
    hasher: BlockHasher,
    /// Tokens of the smallest block of any group.
    block_tokens: u32,
    generation: u64,
    /// Ids that stand for something else.
    placeholders: Vec<RangeInclusive<u32>>,
    /// The tenants by number, with their own salts.
    tenants: Vec<(TenantId, Box<[u8]>)>,
    /// Only prompts that are being computed now, since every request that may wait looks at all of them.
    prompts: Arc<Mutex<BTreeMap<u64, Frontier>>>,
    /// How many there have been.
    prompts_begun: u64,
}

/// The position and the name of the next block of a prompt that has no KV yet.
pub(crate) type Frontier = (usize, BlockHash);

/// One prompt's frontier, until the prompt is computed or dropped.
#[derive(Debug)]
pub(crate) struct FrontierLease {
    prompts: Arc<Mutex<BTreeMap<u64, Frontier>>>,
    number: u64,
}

impl Drop for FrontierLease {
    fn drop(&mut self) {
        guard!("manager.the-dropped-keep-nobody-waiting", {
            self.prompts.lock().remove(&self.number);
        });
    }
}

impl Namer {
    pub(crate) fn new(options: &ManagerOptions) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            // A number alone: nothing else is read or written by its order.
            mark: NEXT.fetch_add(1, Ordering::Relaxed),
            hasher: options.hasher,
            block_tokens: options.unit(),
            generation: 0,
            placeholders: options.placeholder_ids.clone(),
            tenants: vec![(TenantId::NOBODY, Box::default())],
            prompts: Arc::default(),
            prompts_begun: 0,
        }
    }

    /// Tokens that a name is for: those of the smallest block of any group.
    pub(crate) fn unit(&self) -> u64 {
        self.block_tokens.into()
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Has the names of the same content be others from now on; their generation.
    pub(crate) fn begin_generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    pub(crate) fn set_placeholders(&mut self, ids: Vec<RangeInclusive<u32>>) {
        self.placeholders = ids;
    }

    /// Whether ids of any value can follow without what they stand for.
    pub(crate) fn takes_any_id(&self) -> bool {
        self.placeholders.is_empty()
    }

    /// Adds a tenant. Without a key, its salt is drawn at random.
    pub(crate) fn add_tenant(&mut self, tenant: TenantId, key: Option<&[u8]>) {
        // A number would be another's in another manager, with whom files and other hosts may be shared.
        let random = RandomState::new();
        let drawn = || [0, 1].map(|part: u8| random.hash_one(part).to_le_bytes()).concat();
        let salt = match key {
            Some(key) => [&[1], key].concat(),
            None => guard!(
                "manager.tenants-salts-are-drawn",
                [&[0], &drawn()[..]].concat(),
                else self.tenants.len().to_le_bytes().to_vec()
            ),
        };
        self.tenants.push((tenant, salt.into()));
    }

    /// The content of a request of a tenant, and whether its salt is the tenant's own.
    pub(crate) fn salted(
        &self,
        tenant: TenantId,
        content: &Content,
    ) -> Result<(Content, bool), TenantError> {
        let of = self.tenants.get(usize::from(tenant.number()));
        let (_, own) = of.filter(|of| of.0 == tenant).ok_or(TenantError::Foreign { tenant })?;
        let (mut content, by_tenant) = (content.clone(), content.salt.is_empty());
        if by_tenant {
            guard!("manager.tenants-have-salts", content.salt = own.to_vec());
        }
        Ok((content, by_tenant))
    }

    /// The names that content of a sequence has still: none of an earlier generation.
    pub(crate) fn current<'a>(&self, known: &'a Known) -> &'a [BlockHash] {
        if known.generation == self.generation { &known.names } else { &[] }
    }

    /// Notes a prompt that is computed from this token on, for requests that could wait for its next block, if one is full.
    pub(crate) fn enter(&mut self, known: &Known, token: u64) -> Option<FrontierLease> {
        let at = (token / self.unit()) as usize;
        let name = *known.names.get(at)?;
        let (prompts, number) = (Arc::clone(&self.prompts), self.prompts_begun);
        self.prompts_begun += 1;
        prompts.lock().insert(number, (at, name));
        Some(FrontierLease { prompts, number })
    }

    /// The same of a prompt of so many tokens that was noted before.
    pub(crate) fn advance(
        &self,
        lease: FrontierLease,
        known: &Known,
        prompt: u64,
        token: u64,
    ) -> Option<FrontierLease> {
        let at = (token / self.unit()) as usize;
        let is_full = at < (prompt / self.unit()) as usize;
        let name = *self.current(known).get(at).filter(|_| is_full)?;
        lease.prompts.lock().insert(lease.number, (at, name));
        Some(lease)
    }

    /// Tokens before the block that is computed next of a prompt which begins with these names, if there is one.
    pub(crate) fn computing(&self, names: &[BlockHash]) -> Option<u64> {
        let prompts = self.prompts.lock();
        #[cfg(test)]
        crate::proportion::looks(prompts.len());
        let mut here = prompts.values().filter(|(at, name)| names.get(*at) == Some(name));
        here.next().map(|&(at, _)| at as u64 * self.unit())
    }

    /// Checks what is said of a prompt of these ids, none for one that has names.
    pub(crate) fn check_prompt(&self, ids: &[u32], content: &Content) -> Result<(), TokensError> {
        if !content.inputs.is_sorted_by_key(|(at, _)| *at) {
            return Err(TokensError::InputsUnordered);
        }
        self.check_inputs(0, ids, &content.inputs)
    }

    /// Checks that something is said of each run of placeholders in `ids`, which follow `known` tokens: that one of the
    /// inputs begins with it. A run does not go on with what was said before of others, which may have been cut.
    fn check_inputs(
        &self,
        known: u64,
        ids: &[u32],
        inputs: &[(u64, Vec<u8>)],
    ) -> Result<(), TokensError> {
        if self.placeholders.is_empty() {
            return Ok(());
        }
        let mut runs = false;
        for (&id, at) in ids.iter().zip(0_u64..) {
            let stands = self.placeholders.iter().any(|range| range.contains(&id));
            let begins = stands && !std::mem::replace(&mut runs, stands);
            runs = stands;
            if begins && inputs.binary_search_by_key(&at, |(at, _)| *at).is_err() {
                return Err(TokensError::Placeholder { id, at: known + at });
            }
        }
        Ok(())
    }

    /// What sets the names of a generation apart: the names of the same content with other upper 64 bits.
    ///
    /// The lower 64 bits are what [routers](crate::vllm::block_hash) know. They stay those of the content, since routers
    /// take equal content for equally named wherever it is, also where weights were updated at another time.
    fn mask(&self, generation: u64) -> u128 {
        match generation {
            0 => 0,
            generation => {
                let salted = self.hasher.salted(&generation.to_le_bytes()).to_u128();
                guard!("manager.names-have-a-generation", (salted >> 64).max(1) << 64, else 0)
            }
        }
    }
}

/// What is known of a sequence: the ids, or how many, and the names of its full blocks.
///
/// A decode step adds an id to the first fields; the others say how a block is named.
#[derive(Clone, Debug)]
#[repr(C)]
pub(crate) struct Known {
    /// With so many tokens, the next block is full.
    full_at: u64,
    tokens: u64,
    ids: Option<Vec<u32>>,
    names: Vec<BlockHash>,
    /// Whose names they are, of blocks of how many tokens.
    namer: (u64, u32),
    generation: u64,
    content: Option<Arc<Content>>,
    /// Its salt is the tenant's own, which is of another kind than those that requests have.
    salted_by_tenant: bool,
    /// Those of its inputs that came with ids behind the prompt: they go with these.
    later: Vec<(u64, Vec<u8>)>,
    /// What the caller's names are mixed with, for its unsalted blocks and for the others; `None` for ids, and for
    /// nothing.
    masks: Option<Box<[u128; 2]>>,
}

impl Known {
    /// What an id that follows is added to.
    pub(crate) const HEAD_BYTES: usize = std::mem::offset_of!(Self, names);

    /// What is known of a prompt of these ids, which were [looked at](Namer::check_prompt). `content` has its salt, which is
    /// the tenant's own or one that was given.
    pub(crate) fn of_ids(
        namer: &Namer,
        ids: Vec<u32>,
        content: Content,
        salted_by_tenant: bool,
    ) -> Self {
        let mut known = Self::empty(namer, content, salted_by_tenant);
        (known.tokens, known.ids) = (ids.len() as u64, Some(ids));
        known.name_full(namer);
        known
    }

    /// The same of a prompt of `count` tokens whose blocks have these names, which are taken.
    pub(crate) fn of_names(
        namer: &Namer,
        (count, names): (u64, &mut Vec<BlockHash>),
        content: Content,
        salted_by_tenant: bool,
    ) -> Result<Self, TokensError> {
        let mask = |salt| mask_of(salt, namer.generation, namer);
        let masks = [mask(None), mask(content.salt(salted_by_tenant))];
        let salted_from = content.salted_from(namer.block_tokens);
        let mut known = Self::empty(namer, content, salted_by_tenant);
        known.check_names(namer, count, names)?;
        (known.tokens, known.names) = (count, std::mem::take(names));
        if masks != [0; 2] {
            for (name, at) in known.names.iter_mut().zip(0..) {
                let mask = masks[usize::from(at >= salted_from)];
                *name = BlockHash::from_u128(name.to_u128() ^ mask);
            }
            known.masks = Some(Box::new(masks));
        }
        Ok(known)
    }

    fn empty(namer: &Namer, content: Content, salted_by_tenant: bool) -> Self {
        Self {
            full_at: namer.block_tokens.into(),
            tokens: 0,
            ids: None,
            names: Vec::new(),
            namer: (namer.mark, namer.block_tokens),
            generation: namer.generation,
            content: (!content.is_plain()).then(|| Arc::new(content)),
            salted_by_tenant,
            later: Vec::new(),
            masks: None,
        }
    }

    #[inline]
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

    /// The ids of block `index` of so many tokens; none if they are not known.
    pub(crate) fn ids_of(&self, index: usize, block_tokens: u32) -> &[u32] {
        let (ids, len) = (self.ids().unwrap_or_default(), block_tokens as usize);
        ids.get(index * len..(index + 1) * len).unwrap_or_default()
    }

    pub(crate) fn content(&self) -> Option<&Arc<Content>> {
        self.content.as_ref()
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// The other name that comes before a block of `block_tokens` tokens in some requests, if `before` does in this one: the
    /// same with the salt, or without it. An engine that names blocks itself gives the block one name for all who have the
    /// salt, whether they declare what comes before it [shared](Content::shared_tokens) or not.
    pub(crate) fn other_before(
        &self,
        (index, block_tokens): (usize, u32),
        before: Option<BlockHash>,
    ) -> Option<BlockHash> {
        let [plain, salted] = **self.masks.as_ref()?;
        let (unit, before) = (u64::from(self.namer.1), before?.to_u128());
        let last = (index as u64 + 1) * u64::from(block_tokens) / unit;
        let is_salted = last > self.content.as_ref()?.shared_tokens / unit;
        (is_salted && plain != salted).then(|| BlockHash::from_u128(before ^ plain ^ salted))
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

    /// Names that there is room for.
    pub(crate) fn names_room(&self) -> usize {
        self.names.capacity()
    }

    /// Whether `tokens` can follow.
    pub(crate) fn check(&self, namer: &Namer, tokens: &Tokens<'_>) -> Result<(), TokensError> {
        let (ids, inputs): (_, &[_]) = match *tokens {
            Tokens::Ids(ids) => (ids, &[]),
            Tokens::With { ids, inputs } => (ids, inputs),
            Tokens::Named { count, names } => return self.check_names(namer, count, names),
        };
        if self.ids.is_none() {
            return Err(TokensError::NamesExpected);
        }
        if !inputs.is_sorted_by_key(|(at, _)| *at) {
            return Err(TokensError::InputsUnordered);
        }
        let tokens = ids.len() as u64;
        if let Some(&(at, _)) = inputs.last().filter(|(at, _)| *at >= tokens) {
            return Err(TokensError::InputOutside { at, tokens });
        }
        let checked = namer.check_inputs(self.tokens, ids, inputs);
        guard!("manager.placeholders-come-with-inputs", checked, else Ok(()))
    }

    fn check_names(
        &self,
        namer: &Namer,
        count: u64,
        names: &[BlockHash],
    ) -> Result<(), TokensError> {
        if self.ids.is_some() {
            return Err(TokensError::IdsExpected);
        }
        let full = self.tokens.saturating_add(count) / u64::from(namer.block_tokens);
        let blocks = full - self.names.len() as u64;
        if names.len() as u64 == blocks {
            Ok(())
        } else {
            Err(TokensError::Names { names: names.len(), blocks })
        }
    }

    /// Adds an id, to ids, and names the block that becomes full.
    #[inline]
    pub(crate) fn push(&mut self, namer: &Namer, id: u32) {
        if let Some(ids) = &mut self.ids {
            ids.push(id);
            self.tokens += 1;
            self.name_full(namer);
        }
    }

    /// Adds tokens that were [checked](Self::check), and names the blocks that become full.
    pub(crate) fn add(&mut self, namer: &Namer, tokens: Tokens<'_>) {
        let before = self.tokens;
        self.tokens += tokens.len();
        match tokens {
            Tokens::Ids(more) | Tokens::With { ids: more, .. } => {
                if let Tokens::With { inputs, .. } = tokens {
                    guard!("manager.later-inputs-are-named", self.add_inputs(before, inputs));
                }
                if let Some(ids) = &mut self.ids {
                    ids.extend_from_slice(more);
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
    }

    /// Notes what stands behind ids that follow `known` tokens.
    fn add_inputs(&mut self, known: u64, inputs: &[(u64, Vec<u8>)]) {
        for (at, input) in inputs {
            let input = (known + at, input.clone());
            let content = Arc::make_mut(self.content.get_or_insert_default());
            if !content.inputs.contains(&input) {
                let behind = content.inputs.partition_point(|(at, _)| *at <= input.0);
                content.inputs.insert(behind, input.clone());
                self.later.push(input);
            }
        }
    }

    /// Forgets all but the first tokens.
    pub(crate) fn truncate(&mut self, namer: &Namer, tokens: u64) {
        self.tokens = self.tokens.min(tokens);
        if let Some(ids) = &mut self.ids {
            ids.truncate(self.tokens as usize);
        }
        self.names.truncate((self.tokens / u64::from(namer.block_tokens)) as usize);
        self.full_at = (self.names.len() as u64 + 1) * u64::from(namer.block_tokens);
        // Other ids may come in the place of those that inputs came with.
        let kept = self.later.partition_point(|(at, _)| *at < self.tokens);
        let gone = self.later.split_off(kept);
        if let Some(content) = self.content.as_mut().filter(|_| !gone.is_empty()) {
            let inputs = &mut Arc::make_mut(content).inputs;
            guard!(
                "manager.inputs-go-with-their-ids",
                inputs.retain(|input| !gone.contains(input))
            );
        }
    }

    /// Names the blocks that have become full.
    #[inline]
    fn name_full(&mut self, namer: &Namer) {
        // Most commits fill no block.
        if self.tokens >= self.full_at {
            self.name_more(namer);
        }
    }

    #[inline(never)]
    fn name_more(&mut self, namer: &Namer) {
        let Some(ids) = &self.ids else { return };
        let block = namer.block_tokens as usize;
        self.names.reserve((ids.len() / block).saturating_sub(self.names.len()));
        let mask = namer.mask(self.generation);
        let masked = |name: BlockHash| BlockHash::from_u128(name.to_u128() ^ mask);
        let mut parent = self.names.last().copied().map_or(BlockHash::ROOT, masked);
        for tokens in ids.chunks_exact(block).skip(self.names.len()) {
            #[cfg(test)]
            crate::proportion::looks(1);
            let index = self.names.len() as u64;
            parent = match &self.content {
                None => namer.hasher.chain(parent, tokens),
                Some(content) => {
                    content.chain(namer, self.salted_by_tenant, (parent, index), tokens)
                }
            };
            self.names.push(masked(parent));
        }
        self.full_at = (self.names.len() as u64 + 1) * u64::from(namer.block_tokens);
    }
}

impl Content {
    /// The name of block `index`, which depends on those of these keys that enter there.
    fn chain(
        &self,
        namer: &Namer,
        salted_by_tenant: bool,
        (parent, index): (BlockHash, u64),
        tokens: &[u32],
    ) -> BlockHash {
        let first = index * u64::from(namer.block_tokens);
        let mut keys: SmallVec<[ExtraKey<'_>; 4]> = SmallVec::new();
        if index == 0 && !self.adapter.is_empty() {
            keys.push(ExtraKey::Adapter(&self.adapter));
        }
        if index == self.salted_from(namer.block_tokens) {
            keys.extend(self.salt(salted_by_tenant));
        }
        let from = self.inputs.partition_point(|(at, _)| *at < first);
        for (at, content) in &self.inputs[from..] {
            let offset = at - first;
            if offset >= u64::from(namer.block_tokens) {
                break;
            }
            keys.push(ExtraKey::Modality { offset: offset as u32, content });
        }
        let keys = guard!("manager.names-have-keys", &keys[..], else &[]);
        namer.hasher.chain_with(parent, tokens, keys)
    }
}

impl Known {
    /// Whether a manager has made these names.
    pub(crate) fn is_of(&self, namer: &Namer) -> bool {
        self.namer.0 == namer.mark
    }

    /// Whether the content is what it was, with a salt that is the tenant's own or was given.
    pub(crate) fn has(&self, content: &Content, salted_by_tenant: bool) -> bool {
        let same = self.content.as_deref().map_or(content.is_plain(), |own| own == content);
        same && (content.salt.is_empty() || self.salted_by_tenant == salted_by_tenant)
    }

    /// The names as they were given.
    fn unmasked(&self) -> impl Iterator<Item = BlockHash> + '_ {
        let [plain, salted] = self.masks.as_deref().copied().unwrap_or_default();
        let before = self.content.as_deref();
        let salted_from = before.map_or(0, |content| content.salted_from(self.namer.1));
        self.names.iter().zip(0_u64..).map(move |(name, at)| {
            let mask = if at >= salted_from { salted } else { plain };
            BlockHash::from_u128(name.to_u128() ^ mask)
        })
    }

    /// A number for all that the KV of the first tokens depends on beside the model.
    pub(crate) fn fingerprint(&self, tokens: u64) -> u128 {
        let mut bytes = tokens.to_le_bytes().to_vec();
        let mut add = |part: &[u8]| {
            bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
            bytes.extend_from_slice(part);
        };
        let count = usize::try_from(tokens).unwrap_or(usize::MAX);
        match self.ids() {
            Some(ids) => {
                add(&ids.iter().take(count).flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>())
            }
            None => {
                let blocks = count / (self.namer.1 as usize).max(1);
                let names = self.unmasked().take(blocks);
                add(&names.flat_map(|name| name.to_u128().to_le_bytes()).collect::<Vec<_>>());
            }
        }
        if let Some(content) = self.content() {
            add(&content.adapter);
            for (at, input) in content.inputs.iter().take_while(|(at, _)| *at < tokens) {
                add(&at.to_le_bytes());
                add(input);
            }
        }
        BlockHash::salted(&bytes).to_u128()
    }

    /// The same tokens, with the names that this content has in a manager's present generation.
    pub(crate) fn renamed(
        &self,
        namer: &Namer,
        content: Content,
        salted_by_tenant: bool,
    ) -> Result<Self, TokensError> {
        if !self.is_of(namer) || !self.has(&content, salted_by_tenant) {
            // Else they were taken before, perhaps when fewer ids stood for something else.
            namer.check_prompt(self.ids().unwrap_or_default(), &content)?;
        }
        match &self.ids {
            Some(ids) => Ok(Self::of_ids(namer, ids.clone(), content, salted_by_tenant)),
            None => {
                let names = (self.tokens, &mut self.unmasked().collect());
                Self::of_names(namer, names, content, salted_by_tenant)
            }
        }
    }
}

/// What an engine's names are mixed with in a generation, where content has this salt.
fn mask_of(salt: Option<ExtraKey<'_>>, generation: u64, namer: &Namer) -> u128 {
    let salt = salt.map_or(BlockHash::ROOT, |salt| match salt {
        ExtraKey::TenantSalt(given) => namer.hasher.salted(given),
        own => namer.hasher.chain_with(BlockHash::ROOT, &[], &[own]),
    });
    salt.to_u128() ^ namer.mask(generation)
}
