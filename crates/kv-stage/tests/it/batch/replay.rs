//! Graphs captured over a batch, replayed for many steps: each replay reads its step.

use cuda_driver::{CapturedGraph, Device, DeviceBuffer, DeviceError, DeviceSpan, Stream};
use kv_stage::BatchOptions;
use kv_testkit::machine::CopyKernel;

use super::model::{Contents, Model, Sends, read};

/// What the graphs hold beside the reading kernels.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Gathers {
    /// The gather too: a step sends its inputs only.
    InTheGraph,
    /// Nothing: the step has gathered.
    BeforeTheGraph,
}

/// Steps that are enqueued before the first of them is looked at.
const AHEAD: usize = 4;

pub(crate) struct Replay<'a> {
    pub(crate) model: Model,
    kernel: &'a CopyKernel,
    stream: Stream,
    /// Of the program, which waits for it.
    side: Stream,
    options: BatchOptions,
    gathers: Gathers,
    /// By the number of sequences that they were captured for.
    graphs: Vec<(u32, CapturedGraph)>,
    /// What the last graph has read.
    snapshot: DeviceBuffer,
    /// The snapshots of the last steps, and the counts that were sampled after each.
    log: Vec<(DeviceBuffer, DeviceBuffer)>,
}

impl<'a> Replay<'a> {
    /// Captures a graph for each of some numbers of sequences.
    pub(crate) fn new(
        device: &Device,
        kernel: &'a CopyKernel,
        options: &BatchOptions,
        gathers: Gathers,
        seed: u64,
    ) -> Self {
        let model = Model::new(device, options.clone(), AHEAD, seed);
        let stream = Stream::new(device).unwrap();
        let parts = parts(&model, options.sequences_max);
        let bytes = parts.iter().map(|part| part.bytes().next_multiple_of(16)).sum::<u64>();
        let alloc = |bytes| DeviceBuffer::alloc(device, bytes).unwrap();
        let log = || (alloc(bytes), alloc(u64::from(options.rows) * 4));
        let mut replay = Self {
            model,
            kernel,
            side: Stream::new(device).unwrap(),
            gathers,
            graphs: Vec::new(),
            snapshot: alloc(bytes),
            log: std::iter::repeat_with(log).take(AHEAD).collect(),
            options: options.clone(),
            stream,
        };
        let most = options.sequences_max;
        for size in [1, most.div_ceil(4), most.div_ceil(2), most] {
            let graph = replay.capture(size);
            replay.graphs.push((size, graph));
        }
        replay
    }

    /// A graph that reads the batch of `size` sequences.
    fn capture(&self, size: u32) -> CapturedGraph {
        let capture = || {
            if self.gathers == Gathers::InTheGraph {
                self.model.batch.gather(&self.stream)?;
            }
            let mut offset = 0;
            for part in parts(&self.model, size) {
                let to = self.snapshot.span().slice(offset, part.bytes()).unwrap();
                self.copy(to, part)?;
                offset += part.bytes().next_multiple_of(16);
            }
            Ok::<_, DeviceError>(())
        };
        self.stream.capture(capture).unwrap()
    }

    fn copy(&self, to: DeviceSpan, from: DeviceSpan) -> Result<(), DeviceError> {
        // SAFETY: both are device memory.
        unsafe { self.kernel.launch(&self.stream, to, from.address()) }
    }

    /// Runs `steps` steps, a few ahead of the device, and compares what each replay has read.
    pub(crate) fn run(&mut self, steps: usize) {
        let sends = match self.gathers {
            Gathers::InTheGraph => Sends::Inputs,
            Gathers::BeforeTheGraph => Sends::All,
        };
        for first in (0..steps).step_by(AHEAD) {
            let mut staged = Vec::new();
            for number in 0..AHEAD {
                let expected = self.model.step(&self.stream, sends);
                let sequences = expected.rows.iter().filter(|&&row| row >= 0).count() as u32;
                let fits = |(size, _): &&(u32, CapturedGraph)| *size >= sequences;
                let (size, graph) = self.graphs.iter().find(fits).unwrap();
                // SAFETY: the kernels and all memory live until the end of the replay, which has waited.
                unsafe { graph.launch(&self.stream) }.unwrap();
                let (log, counts) = &self.log[number];
                self.stream.copy_on_device(log.span(), self.snapshot.span()).unwrap();
                // The sampler, a kernel of the engine's.
                let sampled = self.model.sample(&expected);
                self.side.upload(counts.span(), bytemuck::cast_slice(&sampled)).unwrap();
                self.copy(self.model.batch.buffers().accepted, counts.span()).unwrap();
                staged.push((*size, expected));
            }
            for (number, (size, expected)) in staged.iter().enumerate() {
                let found = self.logged(number, *size);
                let expected = front(&self.options, expected, *size);
                assert_eq!(found, expected, "step {}, a graph for {size}", first + number);
            }
        }
    }

    /// What the replay of one of the last steps has read.
    fn logged(&self, number: usize, size: u32) -> Vec<Vec<u8>> {
        let bytes: Vec<u8> = read(&self.stream, self.log[number].0.span());
        let mut offset = 0;
        let part = |part: DeviceSpan| {
            let found = bytes[offset..][..part.bytes() as usize].to_vec();
            offset += (part.bytes() as usize).next_multiple_of(16);
            found
        };
        parts(&self.model, size).into_iter().map(part).collect()
    }
}

/// What a graph for `size` sequences reads: the front of the buffers, and the tokens of all of them.
fn parts(model: &Model, size: u32) -> Vec<DeviceSpan> {
    let buffers = model.batch.buffers();
    let tables = &model.batch.options().tables;
    let size = u64::from(size);
    let front = |span: DeviceSpan, bytes| span.slice(0, bytes).unwrap();
    let mut parts = vec![
        front(buffers.lengths, size * 4),
        front(buffers.query_starts, (size + 1) * 4),
        front(buffers.rows, size * 4),
        buffers.positions,
    ];
    for (table, options) in buffers.tables.iter().zip(tables) {
        parts.push(front(table.block_table, size * u64::from(options.width) * 4));
        parts.push(table.slots);
        parts.extend(table.state_in.map(|inputs| front(inputs, size * 4)));
    }
    parts.extend(&buffers.arrays);
    parts
}

/// The same of the expected contents.
fn front(options: &BatchOptions, contents: &Contents, size: u32) -> Vec<Vec<u8>> {
    fn bytes<T: bytemuck::NoUninit>(values: &[T]) -> Vec<u8> {
        bytemuck::cast_slice(values).to_vec()
    }
    let size = size as usize;
    let mut parts = vec![
        bytes(&contents.lengths[..size]),
        bytes(&contents.query_starts[..=size]),
        bytes(&contents.rows[..size]),
        bytes(&contents.positions),
    ];
    for ((dense, slots, inputs), table) in contents.tables.iter().zip(&options.tables) {
        parts.push(bytes(&dense[..size * table.width as usize]));
        parts.push(bytes(slots));
        if table.is_state {
            parts.push(bytes(&inputs[..size]));
        }
    }
    parts.extend(contents.arrays.iter().cloned());
    parts
}
