//! One device's share of the layers: keys and values go into the cache, attention comes out.
//!
//! The tokens of a step pass in pieces. While the device attends for one piece, the host computes the queries, keys and
//! values of the next. Each piece travels through a staging buffer, which the host gets back when the device has read it.

use anyhow::Context as _;
use cuda_driver::{DeviceBuffer, Event, HostAllocFlags, PinnedBuffer};
use kv_kernels::{Append, DeviceReport};
use kv_plane::Part;
use kv_stage::{StagingOptions, StagingPool};

use crate::attention::{Attend, Attention, Heads};
use crate::model::Qkv;

/// Tokens of a piece.
pub(super) const PIECE_TOKENS: usize = 32;
/// Staging buffers: one is written while another is read.
const BUFFERS: usize = 2;

/// What a device's layers need beside the cache.
#[derive(Debug)]
pub(super) struct Lane {
    attention: Attention,
    heads: Heads,
    staging: StagingPool,
    slots: Vec<Slot>,
    /// Slots of the mapping that had no block.
    report: DeviceReport,
}

/// The memory of a piece that is on its way.
#[derive(Debug)]
struct Slot {
    /// Queries, keys and values, each of `PIECE_TOKENS` rows.
    input: DeviceBuffer,
    output: DeviceBuffer,
    /// The output, on the host.
    arrived: PinnedBuffer,
    done: Event,
}

/// A piece of a step: tokens that follow each other in the batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// The place of the piece in the step, which has memory of its own.
    pub(super) index: usize,
    /// The first token, counted among those of the step.
    pub(super) first_token: usize,
    /// At most [`PIECE_TOKENS`].
    pub(super) tokens: usize,
}

/// A layer of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerStep<'a> {
    pub(super) part: &'a Part,
    /// The layer, counted among those of the part.
    pub(super) layer: u32,
    /// Sequences of the step.
    pub(super) sequences: u32,
}

impl Lane {
    pub(super) fn new(part: &Part, heads: Heads, step_tokens_max: usize) -> anyhow::Result<Self> {
        let device = part.device();
        let bytes = |floats: usize| (PIECE_TOKENS * floats * 4) as u64;
        let (query, kv) = (bytes(heads.query_floats()), bytes(heads.kv_floats()));
        let options = StagingOptions { buffer_bytes: query + 2 * kv, buffers_max: BUFFERS };
        let slot = || -> anyhow::Result<Slot> {
            Ok(Slot {
                input: DeviceBuffer::alloc(device, query + 2 * kv)?,
                output: DeviceBuffer::alloc(device, query)?,
                arrived: PinnedBuffer::alloc(device, query, HostAllocFlags::default())?,
                done: Event::new(device)?,
            })
        };
        let slots = (0..step_tokens_max.div_ceil(PIECE_TOKENS)).map(|_| slot());
        Ok(Self {
            attention: Attention::load(device, heads)?,
            heads,
            staging: StagingPool::new(device, options)?,
            slots: slots.collect::<anyhow::Result<_>>()?,
            report: DeviceReport::new(part.compute())?,
        })
    }

    /// Sends a piece to the device: its keys and values into the cache, by the step's slot mapping, and then attention
    /// over everything that its tokens may see.
    ///
    /// # Ordering
    /// Does not wait, unless the device is two pieces behind with reading.
    pub(super) fn send(
        &mut self,
        step: LayerStep<'_>,
        piece: Piece,
        qkv: &Qkv,
    ) -> anyhow::Result<()> {
        let LayerStep { part, layer, sequences } = step;
        let stream = part.compute();
        let slot =
            self.slots.get(piece.index).context("a step of more pieces than were planned")?;
        let (query, kv) = (self.heads.query_floats() * 4, self.heads.kv_floats() * 4);
        let tokens = piece.tokens as u64;
        let sizes = [query, kv, kv].map(|row| row as u64 * tokens);
        let starts = [0, sizes[0], sizes[0] + sizes[1]];
        let [queries, keys, values] =
            [0, 1, 2].map(|part| slot.input.span().slice(starts[part], sizes[part]));
        let (queries, keys, values) = (queries?, keys?, values?);
        let mut buffer = self.staging.acquire_wait()?;
        for (start, floats) in starts.into_iter().zip([&qkv.queries, &qkv.keys, &qkv.values]) {
            buffer.write_at(start, bytemuck::cast_slice(floats))?;
        }
        let all = slot.input.span().slice(0, sizes.iter().sum())?;
        buffer.submit(stream, |view| view.copy_to_device(all, 0))?;
        let table = part.batch().tables.first().context("a batch without a block table")?;
        let num_blocks = part.ready_blocks();
        let append = Append {
            keys: keys.into(),
            values: Some(values.into()),
            layer_stride_bytes: 0,
            token_stride_bytes: kv as u64,
            first_layer: layer,
            layers: 1,
            slot_mapping: table.slots.slice(piece.first_token as u64 * 8, tokens * 8)?.into(),
            host_slots: None,
            tokens,
            num_blocks,
            report: Some(&self.report),
        };
        part.kernels().append(stream, part.paged(), append)?;
        let out = slot.output.span().slice(0, sizes[0])?;
        let attend = Attend {
            paged: part.paged(),
            layer,
            num_blocks,
            batch: part.batch(),
            sequences,
            first_token: piece.first_token as u32,
            tokens: piece.tokens as u32,
            queries,
            out,
        };
        self.attention.launch(stream, &attend)?;
        stream.copy_to_host(&slot.arrived, 0, out)?;
        Ok(slot.done.record(stream)?)
    }

    /// What attention has given for a piece, a row for each token.
    ///
    /// # Ordering
    /// Waits for the piece.
    pub(super) fn receive(&self, piece: Piece) -> anyhow::Result<Vec<f32>> {
        let slot = self.slots.get(piece.index).context("a piece that was not sent")?;
        slot.done.synchronize()?;
        let mut rows = vec![0.0_f32; piece.tokens * self.heads.query_floats()];
        slot.arrived.read_at(0, bytemuck::cast_slice_mut(&mut rows))?;
        Ok(rows)
    }

    /// Fails if a token had no slot: the cache and the engine disagree then about who has which block.
    pub(super) fn check(&self, part: &Part) -> anyhow::Result<()> {
        match self.report.take(part.compute())? {
            None => Ok(()),
            Some(bad) => Err(bad.into()),
        }
    }

    /// Stores one row of a piece over other slots of the layer, which no engine does: see [`misuse`](super::misuse).
    pub(super) fn store_over(
        &self,
        step: LayerStep<'_>,
        slots: &[kv_kernels::Slot],
        (qkv, token): (&Qkv, usize),
    ) -> anyhow::Result<()> {
        let LayerStep { part, layer, .. } = step;
        let (stream, kv) = (part.compute(), self.heads.kv_floats());
        let upload = |bytes: &[u8]| -> anyhow::Result<DeviceBuffer> {
            let buffer = DeviceBuffer::alloc(part.device(), bytes.len() as u64)?;
            stream.upload(buffer.span(), bytes)?;
            Ok(buffer)
        };
        let repeated = |rows: &[f32]| rows[token * kv..(token + 1) * kv].repeat(slots.len());
        let keys = upload(bytemuck::cast_slice(&repeated(&qkv.keys)))?;
        let values = upload(bytemuck::cast_slice(&repeated(&qkv.values)))?;
        let mapping = upload(bytemuck::cast_slice(slots))?;
        let append = Append {
            keys: keys.span().into(),
            values: Some(values.span().into()),
            layer_stride_bytes: 0,
            token_stride_bytes: kv as u64 * 4,
            first_layer: layer,
            layers: 1,
            slot_mapping: mapping.span().into(),
            host_slots: Some(slots),
            tokens: slots.len() as u64,
            num_blocks: part.ready_blocks(),
            report: None,
        };
        part.kernels().append(stream, part.paged(), append)?;
        Ok(stream.synchronize()?)
    }

    /// The staging buffers, for runs that take their protection out.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(super) fn staging(&self) -> &StagingPool {
        &self.staging
    }
}
