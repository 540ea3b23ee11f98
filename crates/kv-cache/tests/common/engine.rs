//! A small engine. It computes tokens by writing a pattern that follows from the token, and attends
//! by reading all KV of all sequences through the block table. The sums that it reads are compared
//! with those that the host computes without holding the bytes.

use std::collections::VecDeque;
use std::error::Error;
use std::sync::Arc;

use cuda_driver::{Device, DeviceBuffer, HostAllocFlags, PinnedBuffer, Stream};
use kv_cache::{
    Admission, AdmitError, CloseError, Growth, KvCache, KvCacheOptions, MemoryRules, OpenStep,
    Part, PoolRules, Request, Sequence, StagedPart, TransportChoice, TransportRules,
};
use kv_kernels::{
    Direction, KvShape, KvShapeOptions, Transfer,
    link::HostLinkOptions,
    verify::{ChecksumArgs, Expected, FillPattern},
};
use kv_pool::{BlockHash, retention::RetentionPolicy, tenants::TenantId};
use kv_stage::PartId;

pub(crate) type Failure = Box<dyn Error>;

/// A prompt: tokens whose KV depends on all tokens before them, as a model's does.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
}

impl Prompt {
    /// `count` tokens that no prompt with another `seed` has.
    pub(crate) fn new(seed: u32, count: u64) -> Self {
        Self { tokens: (0..count as u32).map(|t| seed.wrapping_mul(0x9E37_79B9) ^ t).collect() }
    }

    /// This prompt with `count` tokens of `seed` after it.
    pub(crate) fn then(&self, seed: u32, count: u64) -> Self {
        let mut tokens = self.tokens.clone();
        tokens.extend(Self::new(seed, count).tokens);
        Self { tokens }
    }

    pub(crate) fn len(&self) -> u64 {
        self.tokens.len() as u64
    }

    /// The key of each token's KV.
    pub(crate) fn keys(&self) -> Vec<u64> {
        let chained = |key: &mut u64, token: &u32| {
            *key = (*key ^ u64::from(*token)).wrapping_add(1).wrapping_mul(0xD6E8_FEB8_6659_FD93);
            *key ^= *key >> 29;
            Some(*key)
        };
        self.tokens.iter().scan(0x1234_5678_9ABC_DEF1, chained).collect()
    }

    /// The names of its full blocks.
    pub(crate) fn hashes(&self, block_tokens: u64) -> Vec<BlockHash> {
        let chained = |parent: &mut BlockHash, block: &[u32]| {
            *parent = BlockHash::chain(*parent, block);
            Some(*parent)
        };
        self.tokens.chunks_exact(block_tokens as usize).scan(BlockHash::ROOT, chained).collect()
    }
}

/// A request that runs.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) sequence: Sequence,
    pub(crate) prompt: Prompt,
    /// Tokens whose KV was written or found.
    computed: u64,
    /// Whether a step has been run since admission.
    started: bool,
}

/// The sums of one step, read and expected.
#[derive(Debug)]
struct Check {
    number: u64,
    width: usize,
    /// Keys of each sequence, in the order of the step.
    keys: Vec<Vec<u64>>,
}

/// The buffers of one part.
#[derive(Debug)]
struct Workspace {
    expected: Expected,
    chunk: DeviceBuffer,
    sums: DeviceBuffer,
    /// One for each step that may be in flight.
    results: Vec<PinnedBuffer>,
}

#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) cache: KvCache,
    workspaces: Vec<Workspace>,
    checks: VecDeque<Check>,
    pub(crate) verified: u64,
    pub(crate) corrupt: u64,
}

/// A new stream for each of `devices`, which may name a device twice.
pub(crate) fn streams(devices: &[Device]) -> Vec<Stream> {
    devices.iter().map(|device| Stream::new(device).unwrap()).collect()
}

pub(crate) fn shape(layers: u32, row_bytes: u64, block_tokens: u32) -> KvShape {
    KvShape::new(KvShapeOptions { layers, kv_count: 2, row_bytes, block_tokens }).unwrap()
}

/// Options that fit the engine, for a cache of `device_blocks` and `host_blocks`.
pub(crate) fn options(shape: KvShape, device_blocks: u32, host_blocks: u32) -> KvCacheOptions {
    let (sequences_max, blocks_per_sequence_max) = (8, 16);
    let tokens_max =
        u64::from(sequences_max * blocks_per_sequence_max) * u64::from(shape.block_tokens());
    KvCacheOptions {
        shape,
        placement: None,
        device_blocks,
        growth: Growth::OnDemand,
        host_blocks,
        transport: TransportRules::default(),
        sequences_max,
        blocks_per_sequence_max,
        overlap_depth: 1,
        // A key and a slot for each token.
        step_array_bytes: tokens_max * 16,
        memory: MemoryRules::default(),
        pool: PoolRules::default(),
    }
}

/// The same options with blocks travelling one way, two hops by a ring of a few blocks.
pub(crate) fn by(choice: TransportChoice, options: KvCacheOptions) -> KvCacheOptions {
    let ring_buffer_bytes = 3 * options.shape.block_bytes();
    let link = HostLinkOptions { ring_buffers: 2, ring_buffer_bytes, ..HostLinkOptions::default() };
    let transport = TransportRules { choice, link, ..TransportRules::default() };
    KvCacheOptions { transport, ..options }
}

impl Engine {
    pub(crate) fn new(streams: &[Stream], options: KvCacheOptions) -> Self {
        let cache = KvCache::new(streams, options).unwrap();
        let workspaces = cache.parts().iter().map(|part| Workspace::new(part, &cache)).collect();
        Self { cache, workspaces, checks: VecDeque::new(), verified: 0, corrupt: 0 }
    }

    pub(crate) fn block_tokens(&self) -> u64 {
        u64::from(self.cache.shape().block_tokens())
    }

    pub(crate) fn admit(&mut self, prompt: &Prompt) -> Result<Live, AdmitError> {
        self.admit_named(prompt, &prompt.hashes(self.block_tokens()))
    }

    /// Admits a prompt of which only `hashes` may be found.
    pub(crate) fn admit_named(
        &mut self,
        prompt: &Prompt,
        hashes: &[BlockHash],
    ) -> Result<Live, AdmitError> {
        let sequence = self.cache.admit(prompt.len(), hashes)?;
        let computed = sequence.cached_tokens();
        Ok(Live { sequence, prompt: prompt.clone(), computed, started: false })
    }

    /// Admits prompts in one batch, all of which fit.
    pub(crate) fn admit_batch(&mut self, prompts: &[Prompt]) -> Result<Vec<Live>, AdmitError> {
        match self.admit_fitting(prompts)? {
            (lives, None) => Ok(lives),
            (_, Some(refused)) => Err(refused),
        }
    }

    /// Admits as many prompts in one batch as fit, and says why not the next.
    pub(crate) fn admit_fitting(
        &mut self,
        prompts: &[Prompt],
    ) -> Result<(Vec<Live>, Option<AdmitError>), AdmitError> {
        let named: Vec<_> =
            prompts.iter().map(|prompt| (prompt, prompt.hashes(self.block_tokens()))).collect();
        let requests: Vec<_> =
            named.iter().map(|(prompt, hashes)| Request::new(prompt.len(), hashes)).collect();
        let Admission { admitted, refused } = self.cache.admit_fitting(&requests, u64::MAX)?;
        assert_eq!(refused.is_none(), admitted.len() == prompts.len());
        let live = |(sequence, prompt): (Sequence, &Prompt)| {
            let computed = sequence.cached_tokens();
            Live { sequence, prompt: prompt.clone(), computed, started: false }
        };
        Ok((admitted.into_iter().zip(prompts).map(live).collect(), refused))
    }

    /// Admits a request that says more than its prompt.
    pub(crate) fn admit_as(
        &mut self,
        prompt: &Prompt,
        tenant: TenantId,
        retention: Option<&Arc<RetentionPolicy>>,
    ) -> Result<Live, AdmitError> {
        let hashes = prompt.hashes(self.block_tokens());
        let request = Request { tenant, retention, ..Request::new(prompt.len(), &hashes) };
        let mut admission = self.cache.admit_fitting(&[request], u64::MAX)?;
        let Some(sequence) = admission.admitted.pop() else {
            return Err(admission.refused.unwrap());
        };
        let computed = sequence.cached_tokens();
        Ok(Live { sequence, prompt: prompt.clone(), computed, started: false })
    }

    /// Appends tokens that the next step computes.
    pub(crate) fn extend(
        &mut self,
        live: &mut Live,
        seed: u32,
        count: u64,
    ) -> Result<(), AdmitError> {
        let longer = live.prompt.then(seed, count);
        self.cache.extend(&mut live.sequence, longer.len())?;
        live.prompt = longer;
        Ok(())
    }

    /// Begins a step, and checks what the completed ones have read.
    pub(crate) fn begin(&mut self) -> Result<OpenStep, Failure> {
        let step = self.cache.begin_step()?;
        self.check_completed();
        Ok(step)
    }

    /// One step: computes what is new of `lives`, reads all of them, and makes their full blocks
    /// findable.
    pub(crate) fn run(&mut self, lives: &mut [&mut Live]) -> Result<(), Failure> {
        let step = self.begin()?;
        self.enqueue(step, lives)
    }

    /// As [`run`](Self::run), in a step that was begun before.
    pub(crate) fn enqueue(
        &mut self,
        step: OpenStep,
        lives: &mut [&mut Live],
    ) -> Result<(), Failure> {
        let number = step.number();
        let enqueued = self.enqueue_work(number, lives).and_then(|width| {
            self.seal(lives)?;
            Ok(width)
        });
        // Also if only some of the work could be enqueued: that much runs.
        let finished = self.cache.finish_step(step);
        let width = enqueued?;
        finished?;
        let keys = lives.iter().map(|live| live.prompt.keys()).collect();
        self.checks.push_back(Check { number, width, keys });
        Ok(())
    }

    /// As [`run`](Self::run), with the step dropped where something is refused, as an early return does.
    pub(crate) fn run_or_drop(&mut self, lives: &mut [&mut Live]) -> Result<(), Failure> {
        let step = self.begin()?;
        let number = step.number();
        let width = self.enqueue_work(number, lives)?;
        self.seal(lives)?;
        self.cache.finish_step(step)?;
        let keys = lives.iter().map(|live| live.prompt.keys()).collect();
        self.checks.push_back(Check { number, width, keys });
        Ok(())
    }

    /// Enqueues the work of a step that never ends.
    pub(crate) fn enqueue_without_end(
        &mut self,
        step: &OpenStep,
        lives: &mut [&mut Live],
    ) -> Result<(), Failure> {
        self.enqueue_unsealed(step, lives)?;
        self.seal(lives)
    }

    /// The same with nothing made findable.
    pub(crate) fn enqueue_unsealed(
        &mut self,
        step: &OpenStep,
        lives: &mut [&mut Live],
    ) -> Result<(), Failure> {
        self.enqueue_work(step.number(), lives).map(|_| ())
    }

    fn seal(&mut self, lives: &mut [&mut Live]) -> Result<(), Failure> {
        let block_tokens = self.block_tokens();
        for live in lives.iter_mut() {
            let hashes = live.prompt.hashes(block_tokens);
            self.cache.seal(&mut live.sequence, &hashes)?;
        }
        Ok(())
    }

    /// Enqueues a step's work; how wide its block table is.
    fn enqueue_work(&mut self, number: u64, lives: &mut [&mut Live]) -> Result<usize, Failure> {
        let fills: Vec<Fill> = lives.iter().map(|live| Fill::new(&self.cache, live)).collect();
        let keys: Vec<u64> = fills.iter().flat_map(|fill| fill.keys.iter().copied()).collect();
        let slots: Vec<i64> = fills.iter().flat_map(|fill| fill.slots.iter().copied()).collect();
        let sequences: Vec<&Sequence> = lives.iter().map(|live| &live.sequence).collect();
        let staged = self
            .cache
            .stage(&sequences, None, |_, step| Ok((step.array(&keys)?, step.array(&slots)?)))?;
        let ring = self.ring(number);
        for ((part, workspace), staged) in
            self.cache.parts().iter().zip(&self.workspaces).zip(&staged)
        {
            compute(part, workspace, staged, &fills)?;
            attend(part, workspace, staged, lives.len(), ring)?;
        }
        for live in lives.iter_mut() {
            (live.computed, live.started) = (live.prompt.len(), true);
        }
        Ok(staged[0].width())
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
        self.cache.pool().check_integrity().unwrap();
    }

    /// Closes the cache, and checks every sum.
    pub(crate) fn close(mut self) {
        self.assert_intact();
        self.try_close().unwrap();
    }

    pub(crate) fn try_close(self) -> Result<(), Vec<CloseError>> {
        self.cache.close()
    }

    fn ring(&self, number: u64) -> usize {
        number as usize % (self.cache.options().overlap_depth as usize + 1)
    }

    fn check_completed(&mut self) {
        while let Some(check) = self.checks.front() {
            if check.number > self.cache.completed_step() {
                break;
            }
            let check = self.checks.pop_front().unwrap();
            let ring = self.ring(check.number);
            for workspace in &self.workspaces {
                let (verified, corrupt) = workspace.check(&check, ring);
                self.verified += verified;
                self.corrupt += corrupt;
            }
        }
    }
}

impl Workspace {
    fn new(part: &Part, cache: &KvCache) -> Self {
        let options = cache.options();
        let columns = u64::from(options.blocks_per_sequence_max);
        let tokens = columns * u64::from(options.shape.block_tokens());
        let sums = u64::from(options.sequences_max) * columns * 8;
        let device = part.device();
        Self {
            expected: Expected::new(part.shape()).unwrap(),
            chunk: DeviceBuffer::alloc(device, tokens * part.shape().token_bytes()).unwrap(),
            sums: DeviceBuffer::alloc(device, sums).unwrap(),
            results: (0..=options.overlap_depth)
                .map(|_| PinnedBuffer::alloc(device, sums, HostAllocFlags::CACHED).unwrap())
                .collect(),
        }
    }

    /// Blocks read, and those of them that did not hold what they should.
    fn check(&self, check: &Check, ring: usize) -> (u64, u64) {
        let (mut verified, mut corrupt) = (0, 0);
        for (row, keys) in check.keys.iter().enumerate() {
            for (column, keys) in keys.chunks(self.expected.block_tokens()).enumerate() {
                let mut sum = [0; 8];
                let place = (row * check.width + column) as u64 * 8;
                self.results[ring].read_at(place, &mut sum).unwrap();
                verified += 1;
                let right = self.expected.checksum(keys) == Some(u64::from_ne_bytes(sum));
                corrupt += u64::from(!right);
            }
        }
        (verified, corrupt)
    }
}

/// What a step computes of one sequence.
struct Fill {
    keys: Vec<u64>,
    slots: Vec<i64>,
    /// Of the first tokens, how many are cached. The chunk has junk in their place.
    skip: u64,
}

impl Fill {
    fn new(cache: &KvCache, live: &Live) -> Self {
        // A first step computes a chunk from the start of the prompt, as an engine does that loads
        // whole chunks.
        let start = if live.started { live.computed } else { 0 };
        let skip = live.computed - start;
        let mut keys = live.prompt.keys().split_off(start as usize);
        keys[..skip as usize].fill(0xBAD);
        let mut slots = Vec::new();
        cache.slot_mapping(&live.sequence, start..live.prompt.len(), &mut slots).unwrap();
        Self { keys, slots, skip }
    }
}

type Arrays = (PartId, PartId);

/// Writes what the fills hold into the cache.
fn compute(
    part: &Part,
    workspace: &Workspace,
    staged: &StagedPart<Arrays>,
    fills: &[Fill],
) -> Result<(), Failure> {
    let (keys, slots) = *staged.extra();
    let (keys, slots) = (staged.span(keys)?, staged.span(slots)?);
    let mut offset = 0;
    for fill in fills {
        let tokens = fill.keys.len() as u64;
        let chunk = workspace.chunk.span().slice(0, tokens * part.shape().token_bytes())?;
        let token_keys = keys.slice(offset, tokens * 8)?;
        let slot_mapping = slots.slice(offset, tokens * 8)?;
        offset += tokens * 8;
        let pattern = FillPattern { chunk, token_keys, tokens };
        part.kernels().fill_pattern(part.compute(), part.shape(), pattern)?;
        let transfer = Transfer {
            chunk,
            slot_mapping,
            host_slots: &fill.slots,
            tokens,
            skip_prefix_n_tokens: fill.skip,
            direction: Direction::ChunkToPaged,
            num_blocks: part.ready_blocks(),
        };
        part.kernels().multi_layer_transfer(part.compute(), part.paged(), transfer)?;
    }
    Ok(())
}

/// Reads all sequences of the step and sends the sums to the host.
fn attend(
    part: &Part,
    workspace: &Workspace,
    staged: &StagedPart<Arrays>,
    sequences: usize,
    ring: usize,
) -> Result<(), Failure> {
    let bytes = (sequences * staged.width() * 8) as u64;
    let checksums = workspace.sums.span().slice(0, bytes)?;
    let checksum = ChecksumArgs {
        block_table: staged.block_table()?,
        table_stride: staged.width() as u64,
        seq_lens: staged.lengths()?,
        sequences: sequences as u32,
        checksums,
        num_blocks: part.ready_blocks(),
    };
    part.kernels().paged_checksum(part.compute(), part.paged(), checksum)?;
    part.compute().copy_to_host(&workspace.results[ring], 0, checksums)?;
    Ok(())
}

/// A small generator, so that every run is the same.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) % end
    }
}
