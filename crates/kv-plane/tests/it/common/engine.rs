//! A small engine. It computes tokens by writing a pattern that follows from the token, and attends
//! by reading all KV of all sequences through the block table. The sums that it reads are compared
//! with those that the host computes without holding the bytes.
//!
//! The engine knows which ids come out of a step before the step runs, and commits them when they are asked
//! for: before the next tokens are reserved, or a step later ([`Engine::decode_ahead`]).

#[path = "prompt.rs"]
mod prompt;
#[path = "tensors.rs"]
pub(crate) mod tensors;
#[path = "workspace.rs"]
mod workspace;

use std::collections::VecDeque;
use std::error::Error;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cuda_driver::{Device, DeviceBuffer, Stream};
use kv_kernels::{Direction, KvShape, KvShapeOptions, Transfer, link::HostLinkOptions};
use kv_plane::manager::{
    AdmitError, ChangeError, ManagerStats, Missing, ReserveError as Refusal, Reserved,
    SequenceError,
};
use kv_plane::{
    Admission, Answer, CloseErrors, Committed, DemandError, GroupId, GroupKind, GroupOptions,
    HostPinning, KvCache, KvCacheOptions, NoRoom, OpenStep, Request, ReserveError, ResumeError,
    Room, Sequence, Tokens, TransportChoice, TransportRules, Waiting,
};
use kv_pool::{
    BlockHash, ClaimError, PoolView,
    clock::ManualClock,
    tenants::{TenantError, TenantId},
};

pub(crate) use prompt::Prompt;
pub(crate) use workspace::Check;
use workspace::{Fill, Workspace, attend, compute, pairs};

pub(crate) type Failure = Box<dyn Error>;

/// Why a request was not admitted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    #[error(transparent)]
    NoRoom(#[from] Missing),
    #[error("all rows are in use")]
    NoRow,
    #[error(transparent)]
    Never(#[from] AdmitError),
    #[error(transparent)]
    Memory(#[from] DemandError),
}

impl Refused {
    /// Whether waiting can help.
    pub(crate) fn is_retryable(&self) -> bool {
        match self {
            Self::NoRoom(missing) => match &missing.reason {
                ClaimError::Tenant(TenantError::HeldMax { requested, held_max, .. }) => {
                    requested <= held_max
                }
                ClaimError::Tenant(error) => matches!(error, TenantError::KeptForOthers { .. }),
                _ => true,
            },
            Self::NoRow => true,
            Self::Never(_) | Self::Memory(_) => false,
        }
    }
}

/// A request that runs.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) sequence: Sequence,
    /// All tokens so far, of which the last may not have been committed yet.
    pub(crate) prompt: Prompt,
    /// Tokens behind these that the next step tries, or the step whose ids are to come.
    drafts: Vec<u32>,
    /// Whether the next step is staged before the ids of the last one are committed.
    ahead: bool,
    /// Whether a step has been run since admission.
    started: bool,
    /// What became of the loads that it was admitted with, if that is not known to it.
    load: Option<Arc<Load>>,
}

/// What became of loads: known once, after steps that have read them.
pub(crate) type Load = OnceLock<bool>;

impl Live {
    pub(crate) fn new(sequence: Sequence, prompt: &Prompt) -> Self {
        let (prompt, load) = (prompt.clone(), sequence.loads().map(|_| Arc::default()));
        Self { sequence, prompt, drafts: Vec::new(), ahead: false, started: false, load }
    }

    /// Takes in that its loads have ended.
    fn note_load(&mut self, right: bool) {
        if let Some(load) = self.load.take_if(|_| !right || self.sequence.loads().is_none()) {
            load.set(right).unwrap();
        }
    }

    /// Tokens without KV: what is left to compute, and drafts.
    fn left(&self) -> u64 {
        (self.prompt.len() + self.drafts.len() as u64).saturating_sub(self.sequence.upper())
    }

    /// The next `count` tokens that the sequence does not know yet, with the names of what they fill.
    fn names(&self, count: u64, block_tokens: u64) -> Vec<BlockHash> {
        let known = self.sequence.known();
        let [first, end] = [known, known + count].map(|tokens| (tokens / block_tokens) as usize);
        self.prompt.hashes(block_tokens)[first..end].to_vec()
    }
}

#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) cache: KvCache,
    workspaces: Vec<Workspace>,
    checks: VecDeque<Check>,
    /// Steps whose work was enqueued.
    enqueued: usize,
    /// The last of them has failed.
    failed: bool,
    /// Tokens of a sequence that a step computes at most.
    pub(crate) chunk: u64,
    pub(crate) verified: u64,
    pub(crate) corrupt: u64,
    /// Sequences that were set back because a step had failed.
    pub(crate) redone: u64,
    /// Goes on while a request waits.
    pub(crate) clock: Option<ManualClock>,
    /// Admits requests before their loads have ended, and waits for each layer.
    pub(crate) by_layers: bool,
    /// The cache's memory, if it has none of its own.
    _tensors: Vec<DeviceBuffer>,
}

/// A new stream for each of `devices`, which may name a device twice.
pub(crate) fn streams(devices: &[Device]) -> Vec<Stream> {
    devices.iter().map(|device| Stream::new(device).unwrap()).collect()
}

/// Admits a prompt of `tokens` tokens that nobody else has to a cache without an engine.
pub(crate) fn admit_to(cache: &mut KvCache, tokens: u64) -> Result<Sequence, Refused> {
    let seed = cache.manager().stats().prompt_tokens as u32;
    let mut request = Request::new(Prompt::new(seed, tokens).tokens);
    (request.waits, request.hit_max) = (false, 0);
    match one_answer(cache.admit(&mut VecDeque::from([request]), u64::MAX)?) {
        Answer::Admitted(sequence) => Ok(sequence),
        answer => Err(refused(answer)),
    }
}

/// Admits a request, for which there is room.
pub(crate) fn admitted(cache: &mut KvCache, request: Request, budget: u64) -> Sequence {
    let mut admission = cache.admit(&mut VecDeque::from([request]), budget).unwrap();
    let Some((_, sequence)) = admission.admitted.pop() else { panic!("{admission:?}") };
    sequence
}

/// One step of a cache without an engine, to its end; its number.
pub(crate) fn one_step(cache: &mut KvCache, batch: &mut [&mut Sequence]) -> u64 {
    let step = cache.begin_step().unwrap();
    cache.stage(&step, batch).unwrap();
    let number = step.number();
    cache.finish_step(step).unwrap();
    cache.drain().unwrap();
    number
}

/// Has the next step compute the token that came out of the last one.
pub(crate) fn decode(cache: &mut KvCache, sequence: &mut Sequence) {
    if let Some(step) = sequence.awaits() {
        cache.commit(sequence, step, &[7]).unwrap();
    }
    cache.reserve(sequence, 1).unwrap().given().unwrap();
}

pub(crate) fn shape(layers: u32, row_bytes: u64, block_tokens: u32) -> KvShape {
    KvShape::new(KvShapeOptions { layers, kv_count: 2, row_bytes, block_tokens }).unwrap()
}

/// Options that fit the engine, for a cache of `device_blocks` and `host_blocks`.
pub(crate) fn options(shape: KvShape, device_blocks: u32, host_blocks: u32) -> KvCacheOptions {
    let (sequences_max, blocks_per_sequence_max) = (8, 16);
    let entries = u64::from(sequences_max * blocks_per_sequence_max);
    let tokens_max = entries * u64::from(shape.block_tokens());
    KvCacheOptions {
        // Many machines have one GPU.
        parts_share_devices: true,
        pinning: HostPinning::AT_ONCE,
        sequences_max,
        step_tokens_max: tokens_max as u32,
        // A key and a slot for each token, and a pair of ids for each entry of the block table.
        step_arrays: vec![tokens_max * 8, tokens_max * 8, entries * 8],
        ..KvCacheOptions::of(vec![group(GroupKind::Full, shape, device_blocks, host_blocks)])
    }
}

/// The same with another first group.
pub(crate) fn with_first(
    mut options: KvCacheOptions,
    change: impl FnOnce(&mut GroupOptions),
) -> KvCacheOptions {
    change(&mut options.groups[0]);
    options
}

/// A group beside that of such [`options`].
pub(crate) fn group(
    kind: GroupKind,
    shape: KvShape,
    device_blocks: u32,
    host_blocks: u32,
) -> GroupOptions {
    GroupOptions {
        kind,
        host_blocks,
        blocks_per_sequence_max: 16,
        ..GroupOptions::new(shape, device_blocks)
    }
}

/// The same options with blocks travelling one way, two hops by a ring of a few blocks.
pub(crate) fn by(choice: TransportChoice, options: KvCacheOptions) -> KvCacheOptions {
    let ring_buffer_bytes = 3 * options.groups[0].shape.block_bytes();
    let link = HostLinkOptions { ring_buffers: 2, ring_buffer_bytes, ..HostLinkOptions::default() };
    let transport = TransportRules { choice, link, ..TransportRules::default() };
    KvCacheOptions { transport, ..options }
}

impl Engine {
    pub(crate) fn new(streams: &[Stream], options: KvCacheOptions) -> Self {
        Self::with(KvCache::new(streams, options).unwrap())
    }

    /// An engine on a cache that was made in another way.
    pub(crate) fn with(cache: KvCache) -> Self {
        Self::over(cache, Vec::new())
    }

    /// An engine on a cache that lies in tensors of the engine's.
    pub(crate) fn over(cache: KvCache, tensors: Vec<DeviceBuffer>) -> Self {
        let workspaces = cache.parts().iter().map(|part| Workspace::new(part, &cache)).collect();
        Self {
            cache,
            workspaces,
            checks: VecDeque::new(),
            enqueued: 0,
            failed: false,
            chunk: u64::MAX,
            verified: 0,
            corrupt: 0,
            redone: 0,
            clock: None,
            by_layers: false,
            _tensors: tensors,
        }
    }

    pub(crate) fn block_tokens(&self) -> u64 {
        u64::from(self.cache.options().groups[0].shape.block_tokens())
    }

    /// The blocks of the first group.
    pub(crate) fn pool(&self) -> PoolView {
        self.cache.manager().pool(GroupId(0)).unwrap()
    }

    /// What the manager has decided so far.
    pub(crate) fn decided(&self) -> ManagerStats {
        self.cache.manager().stats()
    }

    /// The request of a prompt, which computes what is not cached though another computes it too.
    pub(crate) fn request(&self, prompt: &Prompt) -> Request {
        let mut request = Request::named(prompt.len(), prompt.hashes(self.block_tokens()));
        request.waits = false;
        request
    }

    pub(crate) fn admit(&mut self, prompt: &Prompt) -> Result<Live, Refused> {
        self.admit_request(prompt, self.request(prompt))
    }

    /// Admits a prompt of which nothing may be found.
    pub(crate) fn admit_unseen(&mut self, prompt: &Prompt) -> Result<Live, Refused> {
        let mut request = self.request(prompt);
        request.hit_max = 0;
        self.admit_request(prompt, request)
    }

    /// Admits a prompt of a tenant.
    pub(crate) fn admit_as(&mut self, prompt: &Prompt, tenant: TenantId) -> Result<Live, Refused> {
        let mut request = self.request(prompt);
        request.tenant = tenant;
        self.admit_request(prompt, request)
    }

    pub(crate) fn admit_request(
        &mut self,
        prompt: &Prompt,
        request: Request,
    ) -> Result<Live, Refused> {
        match one_answer(self.cache.admit(&mut VecDeque::from([request]), u64::MAX)?) {
            Answer::Admitted(sequence) => Ok(Live::new(sequence, prompt)),
            answer => Err(refused(answer)),
        }
    }

    /// Admits a prompt, after the loads of its prefix from below the host; how many steps it waited.
    pub(crate) fn admit_loaded(&mut self, prompt: &Prompt) -> Result<(Live, u64), Failure> {
        let mut request = self.request(prompt);
        (request.waits, request.by_layers) = (true, self.by_layers);
        let mut queue = VecDeque::from([request]);
        for waited in 0.. {
            match one_answer(self.cache.admit(&mut queue, u64::MAX)?) {
                Answer::Admitted(sequence) => return Ok((Live::new(sequence, prompt), waited)),
                Answer::Waiting(_) => self.idle()?,
                answer => return Err(refused(answer).into()),
            }
        }
        unreachable!("it waits until a deadline at most")
    }

    /// Admits a prompt, and enqueues a step of it alone.
    pub(crate) fn computed(&mut self, prompt: &Prompt) -> Live {
        let mut live = self.admit(prompt).unwrap();
        self.run(&mut [&mut live]).unwrap();
        live
    }

    /// Computes a prompt alone, and lets it go when it is at rest; the tokens of it that were cached, and the
    /// blocks that came back from host memory.
    pub(crate) fn serve(&mut self, prompt: &Prompt) -> (u64, usize) {
        let live = self.computed(prompt);
        let found = (live.sequence.cached_tokens(), live.sequence.onboarded_blocks());
        drop(live);
        self.drain().unwrap();
        found
    }

    /// One step more of a request, which then leaves and is at rest.
    pub(crate) fn end(&mut self, mut live: Live) {
        self.run(&mut [&mut live]).unwrap();
        drop(live);
        self.drain().unwrap();
    }

    /// One step of all of these requests.
    pub(crate) fn run_all(&mut self, lives: &mut [Live]) {
        self.run(&mut lives.iter_mut().collect::<Vec<_>>()).unwrap();
    }

    /// A step of nobody, which nobody waits for.
    pub(crate) fn empty_step(&mut self) {
        let step = self.cache.begin_step().unwrap();
        self.cache.finish_step(step).unwrap();
    }

    /// A step without a batch, in which copies and transfers go on.
    pub(crate) fn idle(&mut self) -> Result<(), Failure> {
        if let Some(clock) = &self.clock {
            clock.advance(Duration::from_millis(2));
        }
        let step = self.begin()?;
        self.cache.finish_step(step)?;
        self.drain()
    }

    /// Admits prompts in one batch, all of which fit.
    pub(crate) fn admit_batch(&mut self, prompts: &[Prompt]) -> Result<Vec<Live>, Refused> {
        match self.admit_fitting(prompts)? {
            (lives, None) => Ok(lives),
            (_, Some(refused)) => Err(refused),
        }
    }

    /// Admits as many prompts in one batch as fit, and says why not the next.
    pub(crate) fn admit_fitting(
        &mut self,
        prompts: &[Prompt],
    ) -> Result<(Vec<Live>, Option<Refused>), Refused> {
        let request = |prompt| (prompt, self.request(prompt));
        let mut queue: VecDeque<(&Prompt, Request)> = prompts.iter().map(request).collect();
        let mut admission = self.cache.admit(&mut queue, u64::MAX)?;
        let admitted = std::mem::take(&mut admission.admitted).into_iter();
        let live = |((prompt, _), sequence)| Live::new(sequence, prompt);
        let lives: Vec<_> = admitted.map(live).collect();
        let all = lives.len() == prompts.len();
        Ok((lives, (!all).then(|| refused(one_answer(admission)))))
    }

    /// Appends tokens that the next step computes. The first is the id that came out of the last step.
    pub(crate) fn extend(&mut self, live: &mut Live, seed: u32, count: u64) -> Result<(), Failure> {
        live.prompt = live.prompt.then(seed, count);
        self.tell(live, 0)
    }

    /// Has the next step try `count` tokens behind those that are known.
    pub(crate) fn draft(&mut self, live: &mut Live, seed: u32, count: u64) -> Result<(), Failure> {
        self.go_on(live)?;
        live.drafts = Prompt::new(seed ^ 0xD4AF, count).tokens;
        Ok(())
    }

    /// Accepts the first `count` tokens that the last step tried, and an id behind them.
    pub(crate) fn accept(
        &mut self,
        live: &mut Live,
        count: usize,
        seed: u32,
    ) -> Result<(), Failure> {
        // Those that a step has tried, whose outcome is open.
        let tried = (live.sequence.upper() - live.sequence.resolved()) as usize;
        let accepted = count.min(live.drafts.len()).min(tried);
        live.prompt.tokens.extend(live.drafts.drain(..accepted));
        live.prompt = live.prompt.then(seed, 1);
        self.tell(live, accepted as u64)
    }

    /// Decides the id that comes out of the last step, and has the next step computed before it is committed.
    pub(crate) fn decode_ahead(&mut self, live: &mut Live, seed: u32) -> Result<(), Failure> {
        self.tell(live, 0)?;
        let certain = live.sequence.resolved() == live.sequence.upper();
        live.ahead = live.left() == 0 && live.sequence.awaits().is_some() && certain;
        live.prompt = live.prompt.then(seed, 1);
        if live.ahead { Ok(()) } else { self.tell(live, 0) }
    }

    /// Takes in the ids that are to come, of which the last step's is ignored.
    pub(crate) fn settle(&mut self, live: &mut Live) -> Result<(), Failure> {
        self.tell(live, 0)?;
        self.commit(live, 0)
    }

    /// Cuts a request to its first tokens.
    pub(crate) fn truncate(&mut self, live: &mut Live, tokens: u64) -> Result<(), Failure> {
        self.tell(live, 0)?;
        if let Err(error) = self.cache.truncate(&mut live.sequence, tokens) {
            let ChangeError::Sequence(SequenceError::Redo { .. }) = error else {
                return Err(error.into());
            };
            self.set_back(live)?;
            self.cache.truncate(&mut live.sequence, tokens)?;
        }
        live.prompt.tokens.truncate(tokens as usize);
        live.drafts.clear();
        Ok(())
    }

    /// A twin that goes on by itself.
    pub(crate) fn fork(&mut self, live: &mut Live) -> Result<Live, Failure> {
        self.settle(live)?;
        let twin = match self.cache.fork(&mut live.sequence) {
            Err(ChangeError::Sequence(SequenceError::Redo { .. })) => {
                self.set_back(live)?;
                self.cache.fork(&mut live.sequence)?
            }
            forked => forked?,
        };
        live.drafts.clear();
        Ok(Live { started: live.started, ..Live::new(twin, &live.prompt) })
    }

    pub(crate) fn suspend(&mut self, live: &mut Live) -> Result<(), Failure> {
        self.settle(live)?;
        live.drafts.clear();
        match self.cache.suspend(&mut live.sequence) {
            Err(kv_plane::manager::SuspendError::Sequence(SequenceError::Redo { .. })) => {
                self.set_back(live)?;
                Ok(self.cache.suspend(&mut live.sequence)?)
            }
            suspended => Ok(suspended?),
        }
    }

    /// Brings a suspended request back; where its KV ends.
    pub(crate) fn resume(&mut self, live: &mut Live) -> Result<Room<u64>, ResumeError> {
        let end = self.cache.resume(&mut live.sequence)?;
        if let Room::Given(_) = end {
            self.tell(live, 0).unwrap();
        }
        Ok(end)
    }

    /// Has the sequence know all tokens of its request: those that came out of steps by commits, of which the
    /// first has `accepted` drafts, and the others as the engine's own.
    fn tell(&mut self, live: &mut Live, accepted: u64) -> Result<(), Failure> {
        live.ahead = false;
        let mut accepted = accepted;
        loop {
            let count = live.prompt.len() - live.sequence.known();
            if count == 0 {
                return Ok(());
            }
            if live.sequence.awaits().is_some() {
                self.commit(live, count.min(1 + accepted))?;
                accepted = 0;
                continue;
            }
            let names = live.names(count, self.block_tokens());
            let tokens = Tokens::Named { count, names: &names };
            match self.cache.extend(&mut live.sequence, tokens) {
                Err(ChangeError::Sequence(SequenceError::Redo { .. })) => self.set_back(live)?,
                extended => extended?,
            }
        }
    }

    /// Takes in the ids of the first step whose ids are to come.
    fn commit(&mut self, live: &mut Live, count: u64) -> Result<(), Failure> {
        let Some(step) = live.sequence.awaits() else { return Ok(()) };
        let names = live.names(count, self.block_tokens());
        let tokens = Tokens::Named { count, names: &names };
        match self.cache.commit(&mut live.sequence, step, tokens)? {
            Committed::Taken => {
                live.note_load(true);
                live.drafts.clear();
            }
            Committed::Redo { .. } => self.set_back(live)?,
            Committed::Stale => panic!("ids of step {step} were to come, and are stale"),
        }
        Ok(())
    }

    /// A step has failed that computed some of the request: it is computed again, with the same tokens.
    fn set_back(&mut self, live: &mut Live) -> Result<(), Failure> {
        assert_eq!(live.sequence.awaits(), None, "ids of a void step are to come");
        self.redone += 1;
        live.note_load(false);
        live.drafts.clear();
        self.tell(live, 0)
    }

    /// Has a request know all its tokens, and at least one that it has no KV of: the id that came out of the
    /// last step.
    fn go_on(&mut self, live: &mut Live) -> Result<(), Failure> {
        self.tell(live, 0)?;
        if live.sequence.awaits().is_some() || live.left() == 0 {
            self.extend(live, 0xDEC0 ^ live.prompt.len() as u32, 1)?;
        }
        Ok(())
    }

    /// Reserves what the next step computes of a request: all that is left or a chunk of it. With nothing
    /// left it decodes one token more.
    pub(crate) fn reserve(&mut self, live: &mut Live) -> Result<Room<Reserved>, ReserveError> {
        loop {
            if !live.ahead {
                self.go_on(live).unwrap();
            }
            let tokens = live.left().min(self.chunk) as u32;
            match self.cache.reserve(&mut live.sequence, tokens) {
                Err(ReserveError::Refused(Refusal::Sequence(SequenceError::Redo { .. }))) => {
                    self.set_back(live).unwrap();
                }
                reserved => return reserved,
            }
        }
    }

    /// Begins a step, and checks what the completed ones have read.
    pub(crate) fn begin(&mut self) -> Result<OpenStep, Failure> {
        let step = self.cache.begin_step()?;
        self.check_completed();
        Ok(step)
    }

    /// One step: computes what is new of `lives`, or a token more, and reads all of them. The step is dropped
    /// where something is refused, as an early return does.
    ///
    /// After a step that has failed, what it has spoilt is given up between the steps: its blocks are free at
    /// once then.
    pub(crate) fn run(&mut self, lives: &mut [&mut Live]) -> Result<(), Failure> {
        if self.failed {
            self.drain()?;
            for live in lives.iter_mut() {
                live.ahead = false;
                let looked = self.cache.reserve(&mut live.sequence, 0);
                if let Err(ReserveError::Refused(Refusal::Sequence(_))) = looked {
                    self.set_back(live)?;
                }
            }
        }
        let step = self.begin()?;
        self.enqueue(step, lives)
    }

    /// As [`run`](Self::run), in a step that was begun before.
    pub(crate) fn enqueue(
        &mut self,
        step: OpenStep,
        lives: &mut [&mut Live],
    ) -> Result<(), Failure> {
        for live in lives.iter_mut() {
            self.reserve(live)?.given()?;
        }
        self.enqueue_as_reserved(step, lives)
    }

    /// The same with what was reserved before.
    pub(crate) fn enqueue_as_reserved(
        &mut self,
        step: OpenStep,
        lives: &mut [&mut Live],
    ) -> Result<(), Failure> {
        let check = self.enqueue_reserved(&step, lives)?;
        self.cache.finish_step(step)?;
        self.failed = false;
        self.checks.push_back(check);
        Ok(())
    }

    /// Enqueues the work of a step that never ends: what it would have been checked by.
    pub(crate) fn enqueue_without_end(
        &mut self,
        step: &OpenStep,
        lives: &mut [&mut Live],
    ) -> Result<Check, Failure> {
        for live in lives.iter_mut() {
            self.reserve(live)?.given()?;
        }
        self.enqueue_reserved(step, lives)
    }

    /// The same with what was reserved before.
    pub(crate) fn enqueue_reserved(
        &mut self,
        step: &OpenStep,
        lives: &mut [&mut Live],
    ) -> Result<Check, Failure> {
        self.failed = true;
        let fills: Vec<Fill> = lives.iter().map(|live| Fill::new(&self.cache, live)).collect();
        let keys: Vec<u64> = fills.iter().flat_map(|fill| fill.keys.iter().copied()).collect();
        let slots: Vec<_> = fills.iter().flat_map(|fill| fill.slots.iter().copied()).collect();
        let width = self.cache.options().groups[0].blocks_per_sequence_max as usize;
        let pairs = pairs(lives, width);
        let ids: Vec<_> = pairs.iter().flat_map(|of| [of.source, of.destination]).collect();
        let mut sequences: Vec<_> = lives.iter_mut().map(|live| &mut live.sequence).collect();
        self.cache.stage_with(step, &mut sequences, &mut |_, step| {
            step.array(KEYS, &keys)?;
            step.array(SLOTS, &slots)?;
            step.array(PAIRS, &ids)
        })?;
        // Steps in flight are no more than the depth, and this one.
        let ring = self.enqueued % (self.cache.options().overlap_depth as usize + 1);
        self.enqueued += 1;
        if self.by_layers {
            (0..self.cache.options().groups[0].shape.layers())
                .try_for_each(|at| self.cache.wait_for_layer(GroupId(0), at))?;
        }
        for (part, workspace) in self.cache.parts().iter().zip(&self.workspaces) {
            compute(part, workspace, &fills)?;
            attend(part, workspace, (lives.len(), width), &pairs, ring)?;
        }
        for live in lives.iter_mut() {
            (live.started, live.ahead) = (true, false);
        }
        let keys = fills.into_iter().map(|fill| fill.read).collect();
        let loads = lives.iter().map(|live| live.load.clone()).collect();
        Ok(Check { number: step.number(), ring, width, keys, loads })
    }

    /// Reads what a request has in the places of the tokens that its next step computes, by a kernel in a step
    /// that writes nothing and is dropped: how many bytes are not zero.
    pub(crate) fn count_written(&mut self, live: &mut Live) -> usize {
        let step = self.begin().unwrap();
        self.reserve(live).unwrap().given().unwrap();
        let (start, tokens) = (live.sequence.upper(), u64::from(live.sequence.next()));
        let mut slots = Vec::new();
        self.cache
            .manager()
            .slot_mapping(GroupId(0), &live.sequence, start..start + tokens, &mut slots)
            .unwrap();
        let send = &mut |_, step: &mut kv_stage::BatchStep<'_>| step.array(SLOTS, &slots);
        self.cache.stage_with(&step, &mut [&mut live.sequence], send).unwrap();
        let mut written = 0;
        for (part, workspace) in self.cache.parts().iter().zip(&self.workspaces) {
            let chunk =
                workspace.chunk.span().slice(0, tokens * part.shape().token_bytes()).unwrap();
            part.compute().fill(chunk, 0xFF).unwrap();
            let transfer = Transfer {
                chunk,
                slot_mapping: part.batch().arrays[SLOTS].slice(0, tokens * 8).unwrap(),
                host_slots: &slots,
                tokens,
                skip_prefix_n_tokens: 0,
                direction: Direction::PagedToChunk,
                num_blocks: part.ready_blocks(),
            };
            part.kernels().multi_layer_transfer(part.compute(), part.paged(), transfer).unwrap();
            let mut bytes = vec![0; chunk.bytes() as usize];
            part.compute().download(&mut bytes, chunk).unwrap();
            written += bytes.into_iter().filter(|&byte| byte != 0).count();
        }
        self.failed = true;
        written
    }

    /// Waits for all steps, and checks what they have read.
    pub(crate) fn drain(&mut self) -> Result<(), Failure> {
        self.cache.drain()?;
        self.check_completed();
        Ok(())
    }

    /// At least one block was read, and every block was right.
    pub(crate) fn assert_intact(&mut self) {
        self.drain().unwrap();
        assert!(self.verified > 0, "nothing was read");
        assert_eq!(self.corrupt, 0, "of {} blocks read", self.verified);
        self.pool().check_integrity().unwrap();
    }

    /// Closes the cache, and checks every sum.
    pub(crate) fn close(mut self) {
        self.assert_intact();
        self.try_close().unwrap();
    }

    pub(crate) fn try_close(self) -> Result<(), CloseErrors> {
        self.cache.close()
    }

    fn check_completed(&mut self) {
        while let Some(check) = self.checks.front() {
            if check.number > self.cache.manager().completed_step() || !check.is_decided() {
                break;
            }
            let check = self.checks.pop_front().unwrap();
            for workspace in &self.workspaces {
                let (verified, corrupt) = workspace.check(&check);
                self.verified += verified;
                self.corrupt += corrupt;
            }
        }
    }
}

/// What came of the only request of a call, or of the first that was not admitted.
pub(crate) fn one_answer<R>(admission: Admission<R>) -> Answer {
    let Admission { mut admitted, mut refused, mut waiting, no_room } = admission;
    if let Some((_, sequence)) = admitted.pop() {
        return Answer::Admitted(sequence);
    }
    if let Some((_, error)) = refused.pop() {
        return Answer::Refused(error);
    }
    match (waiting.pop(), no_room) {
        (Some((_, Waiting::Bound(missing))), _)
        | (None, Some((_, NoRoom::Blocks(missing) | NoRoom::Bound(missing)))) => {
            Answer::NoRoom(missing)
        }
        (Some((_, waiting)), _) => Answer::Waiting(waiting),
        (None, Some((_, NoRoom::Row))) => Answer::NoRow,
        (None, None) => panic!("a request without an answer"),
    }
}

/// Why an answer is none that admits.
fn refused(answer: Answer) -> Refused {
    match answer {
        Answer::NoRoom(missing) => Refused::NoRoom(missing),
        Answer::NoRow => Refused::NoRow,
        Answer::Refused(error) => Refused::Never(error),
        Answer::Admitted(_) | Answer::Waiting(_) => panic!("{answer:?}"),
    }
}

/// The engine's arrays in a step.
const KEYS: usize = 0;
const SLOTS: usize = 1;
const PAIRS: usize = 2;
