//! An engine's own tensors: adopted as what they are, and refused as anything else.

use std::sync::Arc;

use cuda_driver::{DeviceBuffer, DeviceSpan, HostAllocFlags, PinnedBuffer};
use kv_kernels::{
    BlockCopy, BlockPair, BlockPairs, Blocks, Direction, HostBlocks, KvFormat, PagedKv, Slot,
    Transfer,
    error::PagedKvError,
    layout::{FormatOptions, TensorView},
    link::{HostLink, Transport},
    verify::BlockSums,
};

use super::host_link::link;
use super::on::{On, Outputs, block, noise, pair};

const LAYERS: u64 = 2;
const HEADS: u64 = 3;
const TOKENS: u64 = 4;
const BLOCKS: u64 = 5;

/// A format as this file knows it, by the letters of its axes: `l` layers, `k` keys and values, `b` blocks,
/// `t` tokens, `s` slots, `h` heads, `e` elements, `g` groups of elements of 16 bytes and `x` the elements in these.
struct Known {
    format: KvFormat,
    /// The axes that choose the tensor, outermost first.
    chosen: &'static str,
    /// Those of each tensor, of keys and of values.
    axes: [&'static str; 2],
    heads: u64,
    /// Whether a key and a value are one row of the chunk.
    is_fused: bool,
}

fn known(format: KvFormat) -> Known {
    let both = |chosen, axes| (chosen, [axes, axes]);
    let (chosen, axes) = match format {
        KvFormat::PagedAttention => ("lk", ["bhgtx", "bhet"]),
        KvFormat::CrossLayerNhd => both("", "blkthe"),
        KvFormat::FlashAttentionNhd => both("l", "kbthe"),
        KvFormat::FlashInferNhd => both("l", "bkthe"),
        KvFormat::Mla => both("l", "bte"),
        KvFormat::KvListsNhd => both("kl", "she"),
        KvFormat::MlaSlots => both("l", "she"),
        KvFormat::FlashAttentionHnd => both("l", "kbhte"),
        KvFormat::FlashInferHnd => both("l", "bkhte"),
        KvFormat::CrossLayerHnd => both("", "blkhte"),
        KvFormat::KvListsPagedNhd => both("kl", "bthe"),
        KvFormat::FusedHnd | KvFormat::FusedHndSplit => both("l", "bhtke"),
        KvFormat::FusedNhd | KvFormat::FusedNhdSplit => both("l", "bthke"),
        KvFormat::UnifiedHnd => both("l", "bhte"),
        KvFormat::UnifiedNhd | KvFormat::ComponentPlanes => both("l", "bthe"),
        KvFormat::LayerPairsNhd => both("lk", "bthe"),
        KvFormat::IndexerPages => both("l", "bp"),
        other => unreachable!("{other:?} is not known here"),
    };
    let one = matches!(format, KvFormat::Mla | KvFormat::MlaSlots | KvFormat::IndexerPages);
    let is_fused = matches!(format, KvFormat::FusedHnd | KvFormat::FusedNhd);
    Known { format, chosen, axes, heads: if one { 1 } else { HEADS }, is_fused }
}

/// Where an element is, by the axes that it has.
#[derive(Clone, Copy, Debug)]
struct At {
    layer: u64,
    kv: u64,
    block: u64,
    token: u64,
    head: u64,
    element: u64,
}

/// The tensors of an engine, which this file has laid out itself.
struct Engine {
    known: Known,
    options: FormatOptions,
    /// Lengths and strides, in elements, of each axis of a tensor of keys and of one of values.
    axes: [(Vec<u64>, Vec<i64>); 2],
    bytes: u64,
    buffers: Vec<DeviceBuffer>,
}

impl Engine {
    fn new(on: &On, format: KvFormat, (element_bytes, block_padding_bytes): (u64, u64)) -> Self {
        let known = known(format);
        let elements = 16;
        let element_bytes = if format == KvFormat::IndexerPages { 1 } else { element_bytes };
        // A tensor of slots has no gaps behind blocks.
        let block_padding_bytes = if known.axes[0].contains('s') { 0 } else { block_padding_bytes };
        let options = FormatOptions {
            layers: LAYERS as u32,
            heads: known.heads as u32,
            head_bytes: elements * element_bytes,
            element_bytes,
            block_tokens: TOKENS as u32,
            blocks: BLOCKS,
            block_padding_bytes,
        };
        let length = |axis| match axis {
            'l' => LAYERS,
            'k' => 2,
            'b' => BLOCKS,
            't' => TOKENS,
            's' => BLOCKS * TOKENS,
            'h' => known.heads,
            'e' => elements,
            'g' => elements * element_bytes / 16,
            'x' => 16 / element_bytes,
            'p' => TOKENS * (elements + 4),
            other => unreachable!("axis {other}"),
        };
        let mut bytes = [0; 2];
        let mut strided = |kv: usize| {
            let axes = known.axes[kv];
            let shape: Vec<u64> = axes.chars().map(length).collect();
            let mut strides = vec![0; shape.len()];
            let mut inner = 1;
            for (place, axis) in axes.char_indices().rev() {
                let padding = if axis == 'b' { block_padding_bytes / element_bytes } else { 0 };
                strides[place] = (inner + padding) as i64;
                inner = (inner + padding) * shape[place];
            }
            bytes[kv] = inner * element_bytes;
            (shape, strides)
        };
        let axes = [strided(0), strided(1)];
        // A value has as many bytes as a key.
        let [bytes, of_values] = bytes;
        assert_eq!(bytes, of_values);
        let count: u64 = known.chosen.chars().map(length).product();
        let buffers = (0..count).map(|tensor| on.upload(&noise(bytes + 16 * tensor))).collect();
        Self { known, options, axes, bytes, buffers }
    }

    /// Whether a tensor is of keys (0) or of values (1), as far as it is of one of them.
    fn kv_of(&self, tensor: usize) -> usize {
        match self.known.chosen {
            "lk" => tensor % 2,
            "kl" => tensor / LAYERS as usize,
            _ => 0,
        }
    }

    fn views(&self) -> Vec<TensorView<'_>> {
        let view = |(tensor, buffer): (usize, &DeviceBuffer)| {
            let (shape, strides) = &self.axes[self.kv_of(tensor)];
            let element_bytes = self.options.element_bytes;
            TensorView { span: buffer.span(), element_bytes, shape, strides }
        };
        self.buffers.iter().enumerate().map(view).collect()
    }

    fn adopt(&self, on: &On, views: &[TensorView<'_>]) -> Result<PagedKv, PagedKvError> {
        PagedKv::adopt(&on.stream, self.known.format, &self.options, views)
    }

    /// The tensor of an element and its first byte there, from lengths and strides alone.
    fn place(&self, at: At) -> (usize, u64) {
        let At { layer, kv, block, token, head, element } = at;
        let place = |axis| match axis {
            'l' => layer,
            'k' => kv,
            'b' => block,
            't' => token,
            's' => block * TOKENS + token,
            'h' => head,
            'e' => element,
            'g' => element * self.options.element_bytes / 16,
            'x' => element % (16 / self.options.element_bytes),
            // A page has all values of its tokens and then the scales.
            'p' if element < 16 => token * 16 + element,
            'p' => TOKENS * 16 + token * 4 + (element - 16),
            other => unreachable!("axis {other}"),
        };
        let tensor = self
            .known
            .chosen
            .chars()
            .fold(0, |index, axis| index * if axis == 'l' { LAYERS } else { 2 } + place(axis));
        let kv = self.kv_of(tensor as usize);
        let steps = self.known.axes[kv].chars().zip(&self.axes[kv].1);
        let elements: u64 = steps.map(|(axis, stride)| place(axis) * *stride as u64).sum();
        (tensor as usize, elements * self.options.element_bytes)
    }

    /// Every byte of the rows of all slots, in the order of a chunk of all tokens, with its tensor and place.
    fn places(&self) -> Vec<(usize, u64)> {
        let is_indexer = self.known.format == KvFormat::IndexerPages;
        let elements = if is_indexer { 20 } else { 16 };
        let has_kv = self.known.chosen.contains('k') || self.known.axes[0].contains('k');
        let planes_kv = if has_kv && !self.known.is_fused { 2 } else { 1 };
        let fused = if self.known.is_fused { 2 } else { 1 };
        let mut places = Vec::new();
        for plane in 0..planes_kv {
            for layer in 0..LAYERS {
                for slot in 0..BLOCKS * TOKENS {
                    for head in 0..self.known.heads {
                        for in_row in 0..fused {
                            for element in 0..elements {
                                let (block, token) = (slot / TOKENS, slot % TOKENS);
                                let kv = if self.known.is_fused { in_row } else { plane };
                                let at = At { layer, kv, block, token, head, element };
                                let (tensor, first) = self.place(at);
                                let bytes = 0..self.options.element_bytes;
                                places.extend(bytes.map(|byte| (tensor, first + byte)));
                            }
                        }
                    }
                }
            }
        }
        places
    }

    fn contents(&self, on: &On) -> Vec<Vec<u8>> {
        self.buffers.iter().map(|buffer| on.read(buffer.span())).collect()
    }
}

/// Moves all tokens of all slots.
fn move_all(on: &On, paged: &PagedKv, chunk: &DeviceBuffer, direction: Direction) {
    let slots: Vec<_> = (0..(BLOCKS * TOKENS) as u32).map(Slot::from).collect();
    let mapping = on.upload(&slots);
    let transfer = Transfer {
        chunk: chunk.span(),
        slot_mapping: mapping.span(),
        host_slots: &slots,
        tokens: BLOCKS * TOKENS,
        skip_prefix_n_tokens: 0,
        direction,
        num_blocks: BLOCKS,
    };
    on.kernels.multi_layer_transfer(&on.stream, paged, transfer).unwrap();
}

/// Bytes of an element, and of the padding behind blocks.
const KINDS: [(u64, u64); 3] = [(2, 0), (1, 0), (2, 48)];

/// Rows read out of adopted tensors, and adopted tensors after rows were written.
pub(crate) fn outputs(on: &On) -> Outputs {
    let mut outputs = Outputs::new();
    let mut links = Transport::ALL.map(|transport| link(on, transport, 8 << 10));
    for format in KvFormat::ALL {
        for kind in KINDS {
            let engine = Engine::new(on, format, kind);
            let paged = engine.adopt(on, &engine.views()).unwrap();
            let name = format!("{format:?} {kind:?}");
            outputs.extend(check_moves(on, &engine, &paged, &name));
            for link in &mut links {
                outputs.extend(check_blocks((on, link), &engine, &paged, &name));
            }
        }
    }
    outputs
}

/// What is read and written through `paged` lies where the engine's own index formula says.
fn check_moves(on: &On, engine: &Engine, paged: &PagedKv, name: &str) -> Outputs {
    let (places, before) = (engine.places(), engine.contents(on));
    let chunk = on.upload(&vec![0u8; places.len()]);
    assert_eq!(chunk.bytes(), BLOCKS * TOKENS * paged.shape().token_bytes(), "{name}");
    move_all(on, paged, &chunk, Direction::PagedToChunk);
    let expected: Vec<u8> = places.iter().map(|&(t, at)| before[t][at as usize]).collect();
    let read = on.read(chunk.span());
    assert!(read == expected, "rows of {name} were not read from where they lie");

    let rows = noise(places.len() as u64 + 8)[8..].to_vec();
    on.stream.upload(chunk.span(), &rows).unwrap();
    move_all(on, paged, &chunk, Direction::ChunkToPaged);
    let mut expected = before;
    for (&(tensor, at), byte) in places.iter().zip(&rows) {
        expected[tensor][at as usize] = *byte;
    }
    let written = engine.contents(on);
    assert!(written == expected, "rows of {name} were not written to where they lie");
    vec![(format!("{name}: rows"), read), (format!("{name}: tensors"), written.concat())]
}

/// Blocks go to a packed host tier, in the order of rows, and come back as other blocks.
fn check_blocks(
    (on, link): (&On, &mut HostLink),
    engine: &Engine,
    paged: &PagedKv,
    name: &str,
) -> Outputs {
    let forced = link.profile().forced.unwrap();
    let name = format!("{name} by {forced}");
    // Keys and values that lie between each other have no piece longer than a head.
    let is_between =
        matches!(engine.known.format, KvFormat::FusedHndSplit | KvFormat::FusedNhdSplit);
    let expected_transport = if is_between { Transport::DirectKernel } else { forced };
    let (shape, places) = (*paged.shape(), engine.places());
    let buffer = Arc::new(on.pin(&noise(BLOCKS * shape.block_bytes())));
    let packed = paged.layout().packed(&shape);
    let host =
        HostBlocks::new(&on.stream, shape, packed, (Arc::clone(&buffer), 0), BLOCKS).unwrap();
    let row = shape.row_bytes() as usize;
    let (kv_count, before) = (u64::from(shape.kv_count()), engine.contents(on));
    // The bytes of a block, plane by plane.
    let of_block = |block: u64| -> Vec<(usize, u64)> {
        let planes = (0..LAYERS).flat_map(|layer| (0..kv_count).map(move |kv| (layer, kv)));
        let rows = planes.flat_map(|(layer, kv)| {
            let first = ((kv * LAYERS + layer) * BLOCKS + block) * TOKENS;
            places[first as usize * row..(first + TOKENS) as usize * row].to_vec()
        });
        rows.collect()
    };
    let out: Vec<BlockPair> =
        (0..BLOCKS as i32).map(|source| pair(source, BLOCKS as i32 - 1 - source)).collect();
    // Block 0 comes back as block 2, and so on.
    let back: Vec<BlockPair> =
        (0..BLOCKS as i32).map(|source| pair(source, (source + 3) % BLOCKS as i32)).collect();
    let ends = |pair: &BlockPair| (pair.source.index() as u64, pair.destination.index() as u64);
    let mut copy = |from, to, pairs: &[BlockPair]| {
        let device_pairs = on.upload(pairs);
        let copy = BlockCopy {
            from,
            to,
            pairs: device_pairs.span().into(),
            count: BLOCKS,
            host_pairs: Some(BlockPairs::new(pairs).unwrap()),
            from_blocks: BLOCKS,
            to_blocks: BLOCKS,
            report: None,
            multiprocessors: None,
        };
        let used = link.copy_blocks(&on.stream, copy).unwrap();
        assert_eq!(used, expected_transport, "{name}");
        on.stream.synchronize().unwrap();
    };
    copy(paged.into(), (&host).into(), &out);
    for (source, destination) in out.iter().map(ends) {
        let mut dense = vec![0; shape.block_bytes() as usize];
        host.read_block(destination, &mut dense).unwrap();
        let bytes = of_block(source);
        let expected: Vec<u8> = bytes.iter().map(|&(t, at)| before[t][at as usize]).collect();
        assert!(dense == expected, "block {source} of {name} did not arrive");
    }
    copy((&host).into(), paged.into(), &back);
    let mut expected = before.clone();
    for (source, destination) in back.iter().map(ends) {
        let first = of_block(BLOCKS - 1 - source);
        for ((from, at), (to, target)) in first.into_iter().zip(of_block(destination)) {
            expected[to][target as usize] = before[from][at as usize];
        }
    }
    let after = engine.contents(on);
    assert!(after == expected, "blocks of {name} did not come back");
    vec![
        (format!("{name}: blocks"), on.read_pinned(&buffer)),
        (format!("{name}: back"), after.concat()),
    ]
}

mod on_sim {
    use cuda_driver::{Device, Stream};
    use kv_kernels::{
        error::PagedKvError,
        layout::{LayoutError, TensorAxis},
        references,
    };

    use super::*;

    #[test]
    fn adopted_tensors_are_read_and_written_where_the_engine_has_its_rows() {
        let on = On::sim(references());
        assert_eq!(outputs(&on).len(), KvFormat::ALL.len() * KINDS.len() * 8);
        on.assert_clean();
    }

    #[test]
    fn ptx_moves_adopted_tensors_as_the_references_do() {
        let (ptx, references) = (On::sim(&[]), On::sim(references()));
        super::super::on::compare(&references, &ptx, outputs);
    }

    /// A copy of what the engine says of its tensors, to be falsified.
    struct Said {
        shape: Vec<u64>,
        strides: Vec<i64>,
        element_bytes: u64,
        span: DeviceSpan,
    }

    /// Tries one change of what is said of one tensor.
    struct Mutations<'a> {
        on: &'a On,
        engine: &'a Engine,
        tried: u64,
    }

    impl Mutations<'_> {
        /// The answer to a change; one that changes nothing that is told is not tried.
        fn answer(&mut self, tensor: usize, change: impl Fn(&mut Said)) -> Option<PagedKvError> {
            let views = self.engine.views();
            let told = views[tensor];
            let mut said = Said {
                shape: told.shape.to_vec(),
                strides: told.strides.to_vec(),
                element_bytes: told.element_bytes,
                span: told.span,
            };
            change(&mut said);
            // The stride of one place is never gone.
            let steps = |shape: &[u64], strides: &[i64]| -> Vec<(u64, i64)> {
                let step = |(&n, &s): (&u64, &i64)| (n, if n == 1 { 0 } else { s });
                shape.iter().zip(strides).map(step).collect()
            };
            let same = steps(&said.shape, &said.strides) == steps(told.shape, told.strides)
                && (said.shape.len(), said.strides.len()) == (told.shape.len(), told.strides.len())
                && said.element_bytes == told.element_bytes
                && said.span == told.span;
            let mut views = views.clone();
            views[tensor] = TensorView {
                span: said.span,
                element_bytes: said.element_bytes,
                shape: &said.shape,
                strides: &said.strides,
            };
            let answer = self.engine.adopt(self.on, &views);
            if same {
                answer.unwrap();
                return None;
            }
            self.tried += 1;
            let what = format!("{:?}: {views:?}", self.engine.known.format);
            Some(answer.map(drop).expect_err(&what))
        }

        fn assert_stride(&mut self, tensor: usize, change: impl Fn(&mut Said)) {
            let Some(error) = self.answer(tensor, change) else { return };
            let is_of = |t| t == tensor;
            assert!(
                matches!(error, PagedKvError::Stride { tensor, .. } if is_of(tensor)),
                "{error}"
            );
        }

        fn assert_length(&mut self, tensor: usize, change: impl Fn(&mut Said)) {
            let Some(error) = self.answer(tensor, change) else { return };
            let is_of = |t| t == tensor;
            assert!(
                matches!(error, PagedKvError::Length { tensor, .. } if is_of(tensor)),
                "{error}"
            );
        }

        fn of_tensor(&mut self, tensor: usize) {
            let axes = self.engine.views()[tensor].shape.len();
            for i in 0..axes {
                for j in i + 1..axes {
                    self.assert_stride(tensor, |said| said.strides.swap(i, j));
                    self.assert_length(tensor, |said| said.shape.swap(i, j));
                    // A permuted view: equal lengths with other strides, or other lengths.
                    if let Some(error) = self.answer(tensor, |said| {
                        said.shape.swap(i, j);
                        said.strides.swap(i, j);
                    }) {
                        assert!(
                            matches!(
                                error,
                                PagedKvError::Length { .. } | PagedKvError::Stride { .. }
                            ),
                            "{error}"
                        );
                    }
                }
                for by in [-1, 1, 7] {
                    self.assert_stride(tensor, |said| said.strides[i] += by);
                    self.assert_length(tensor, |said| {
                        said.shape[i] = said.shape[i].saturating_add_signed(by)
                    });
                }
                self.assert_stride(tensor, |said| said.strides[i] = -said.strides[i]);
                self.assert_stride(tensor, |said| said.strides[i] *= 2);
                self.assert_stride(tensor, |said| said.strides[i] = 0);
                self.assert_stride(tensor, |said| said.strides[i] = i64::MAX);
                self.assert_length(tensor, |said| said.shape[i] *= 2);
                self.assert_length(tensor, |said| said.shape[i] = 0);
                self.assert_length(tensor, |said| said.shape[i] = u64::MAX);
            }
            self.axes(tensor, |said| {
                said.shape.insert(0, 1);
                said.strides.insert(0, 0);
            });
            self.axes(tensor, |said| {
                said.shape.pop();
                said.strides.pop();
            });
            self.axes(tensor, |said| said.strides.push(1));
            self.axes(tensor, |said| {
                // Two axes as one, the same memory.
                let last = said.shape.pop().unwrap();
                *said.shape.last_mut().unwrap() *= last;
                said.strides.remove(said.strides.len() - 2);
            });
            for element_bytes in [0, 1, 2, 4] {
                if element_bytes == self.engine.options.element_bytes {
                    continue;
                }
                // As many bytes in elements of another length, too.
                for same_bytes in [false, true] {
                    let error = self.answer(tensor, |said| {
                        let given = said.element_bytes;
                        said.element_bytes = element_bytes;
                        if same_bytes && element_bytes > 0 {
                            let last = said.shape.last_mut().unwrap();
                            *last = *last * given / element_bytes;
                        }
                    });
                    let is_of = matches!(error, Some(PagedKvError::Elements { tensor: t, given, .. })
                        if (t, given) == (tensor, element_bytes));
                    assert!(is_of, "{error:?}");
                }
            }
            self.memory(tensor);
        }

        fn axes(&mut self, tensor: usize, change: impl Fn(&mut Said)) {
            let error = self.answer(tensor, change);
            let is_of = matches!(error, Some(PagedKvError::Axes { tensor: t, .. }) if t == tensor);
            assert!(is_of, "{error:?}");
        }

        fn memory(&mut self, tensor: usize) {
            let whole = self.engine.views()[tensor].span;
            let element_bytes = self.engine.options.element_bytes;
            let slice = |offset, bytes| whole.slice(offset, bytes).unwrap();
            let (shape, strides) = &self.engine.axes[self.engine.kv_of(tensor)];
            let steps = shape.iter().zip(strides);
            let last: u64 = steps.map(|(n, stride)| (n - 1) * *stride as u64).sum();
            // Padding behind the last block belongs to nobody and need not be there.
            let needed = (last + 1) * element_bytes;
            self.short(tensor, slice(0, needed - 1), needed);
            self.short(tensor, slice(0, 0), needed);
            let rest = whole.bytes() - needed;
            self.short(tensor, slice(rest + element_bytes, needed - element_bytes), needed);
            if element_bytes > 1 {
                let error = self.answer(tensor, |said| said.span = slice(1, whole.bytes() - 1));
                let is_of = matches!(error, Some(PagedKvError::Misaligned { tensor: t, .. }) if t == tensor);
                assert!(is_of, "{error:?}");
            }
        }

        fn short(&mut self, tensor: usize, span: DeviceSpan, needed: u64) {
            let format = self.engine.known.format;
            let error = self.answer(tensor, |said| said.span = span);
            let given = span.bytes();
            assert_eq!(error, Some(PagedKvError::Short { format, tensor, given, needed }));
        }
    }

    #[test]
    fn h31_a_description_with_one_thing_wrong_is_refused() {
        let on = On::sim(references());
        for format in KvFormat::ALL {
            for kind in KINDS {
                let engine = Engine::new(&on, format, kind);
                let mut mutations = Mutations { on: &on, engine: &engine, tried: 0 };
                for tensor in 0..engine.buffers.len() {
                    mutations.of_tensor(tensor);
                }
                assert!(mutations.tried > 20, "{format:?}: {}", mutations.tried);
                // Nothing that was refused has changed what is right.
                engine.adopt(&on, &engine.views()).unwrap();
            }
        }
        on.assert_clean();
    }

    #[test]
    fn h31_tensors_of_one_format_are_no_tensors_of_another() {
        let on = On::sim(references());
        for format in KvFormat::ALL {
            let engine = Engine::new(&on, format, (2, 0));
            for other in KvFormat::ALL {
                let stated = Engine::new(&on, other, (2, 0));
                let answer =
                    PagedKv::adopt(&on.stream, other, &stated.options, &engine.views()).is_ok();
                let (a, b) = (&engine.known, &stated.known);
                let same = (a.axes, a.heads) == (b.axes, b.heads)
                    && engine.buffers.len() == stated.buffers.len()
                    && engine.options.element_bytes == stated.options.element_bytes;
                assert_eq!(answer, same, "{format:?} as {other:?}");
            }
        }
    }

    #[test]
    fn h31_another_number_of_tensors_or_one_of_them_twice_is_refused() {
        let on = On::sim(references());
        for format in KvFormat::ALL {
            let engine = Engine::new(&on, format, (2, 0));
            let views = engine.views();
            let needed = views.len() as u64;
            let refused =
                |views: &[TensorView<'_>]| engine.adopt(&on, views).map(drop).unwrap_err();
            let count = |given| PagedKvError::AdoptedTensors { format, given, needed };
            assert_eq!(refused(&views[1..]), count(needed - 1));
            assert_eq!(refused(&[&views[..], &views[..1]].concat()), count(needed + 1));
            assert_eq!(refused(&[]), count(0));
            if needed > 1 {
                let mut twice = views.clone();
                twice[1].span = views[0].span;
                let error = refused(&twice);
                let is_of =
                    matches!(error, PagedKvError::TensorsOverlap { first: 0, second: 1, .. });
                assert!(is_of, "{format:?}: {error}");
            }
        }
    }

    /// K and V cut out of one tensor interleave: neither is memory of its own.
    #[test]
    fn h31_planes_that_interleave_are_refused() {
        let on = On::sim(references());
        let whole = Engine::new(&on, KvFormat::FlashInferNhd, (2, 0));
        let pairs = Engine::new(&on, KvFormat::LayerPairsNhd, (2, 0));
        let plane_bytes = TOKENS * HEADS * 16 * 2;
        let shape = [BLOCKS, TOKENS, HEADS, 16];
        let of_whole = &whole.axes[0].1;
        let strides = [of_whole[0], of_whole[2], of_whole[3], 1];
        let options = FormatOptions { block_padding_bytes: plane_bytes, ..pairs.options };
        let mut views = Vec::new();
        for buffer in &whole.buffers {
            for kv in 0..2 {
                let (offset, bytes) = (kv * plane_bytes, buffer.bytes() - kv * plane_bytes);
                let span = buffer.span().slice(offset, bytes).unwrap();
                views.push(TensorView { span, element_bytes: 2, shape: &shape, strides: &strides });
            }
        }
        let error = PagedKv::adopt(&on.stream, KvFormat::LayerPairsNhd, &options, &views);
        let error = error.map(drop).unwrap_err();
        assert!(matches!(error, PagedKvError::TensorsOverlap { .. }), "{error}");
    }

    /// A shift by whole elements is another memory, where there is enough of it.
    #[test]
    fn rows_of_shifted_tensors_lie_behind_the_shift() {
        let on = On::sim(references());
        for format in KvFormat::ALL {
            let mut engine = Engine::new(&on, format, (2, 0));
            for buffer in &mut engine.buffers {
                *buffer = on.upload(&noise(buffer.bytes() + 64));
            }
            let mut views = engine.views();
            for view in &mut views {
                view.span = view.span.slice(6, view.span.bytes() - 6).unwrap();
            }
            let paged = engine.adopt(&on, &views).unwrap();
            let chunk = on.upload(&vec![0u8; engine.places().len()]);
            move_all(&on, &paged, &chunk, Direction::PagedToChunk);
            let tensors = engine.contents(&on);
            let places = engine.places();
            let byte = |&(tensor, at): &(usize, u64)| tensors[tensor][at as usize + 6];
            let expected: Vec<u8> = places.iter().map(byte).collect();
            assert!(on.read(chunk.span()) == expected, "{format:?}");
        }
    }

    #[test]
    fn h31_memory_of_another_device_or_kind_is_refused() {
        let on = On::sim(references());
        let peer = Device::open(Arc::clone(on.device.driver()), 1).unwrap();
        let engine = Engine::new(&on, KvFormat::LayerPairsNhd, (2, 0));
        let far = DeviceBuffer::alloc(&peer, engine.bytes).unwrap();
        let pinned = PinnedBuffer::alloc(&on.device, engine.bytes, HostAllocFlags::CACHED).unwrap();
        let refused = |span: DeviceSpan| {
            let mut views = engine.views();
            views[3].span = span;
            format!("{:?}", engine.adopt(&on, &views).map(drop).unwrap_err())
        };
        let text = refused(far.span());
        assert!(text.contains("tensor 3") && text.contains("memory of device 1"), "{text}");
        // SAFETY: nothing is launched over it: it is refused for what it is.
        let host = unsafe { DeviceSpan::from_raw(pinned.host_address(), engine.bytes) }.unwrap();
        let text = refused(host);
        assert!(text.contains("tensor 3") && text.contains("Host memory"), "{text}");
        // SAFETY: likewise.
        let nothing = unsafe { DeviceSpan::from_raw(0x10, engine.bytes) }.unwrap();
        let text = refused(nothing);
        assert!(text.contains("tensor 3") && text.contains("nothing is allocated"), "{text}");
        let gone = DeviceBuffer::alloc(&on.device, engine.bytes).unwrap().span();
        let text = refused(gone);
        assert!(text.contains("tensor 3") && text.contains("dropped"), "{text}");
        let stream = Stream::new(&peer).unwrap();
        let other =
            PagedKv::adopt(&stream, KvFormat::LayerPairsNhd, &engine.options, &engine.views());
        let text = format!("{:?}", other.map(drop).unwrap_err());
        assert!(text.contains("memory of device 0"), "{text}");
    }

    #[test]
    fn a_refusal_names_the_tensor_the_axis_and_the_numbers() {
        let on = On::sim(references());
        let engine = Engine::new(&on, KvFormat::FlashInferNhd, (2, 0));
        let mut views = engine.views();
        // What an engine has that changed to heads first.
        let (shape, strides) = ([5, 2, 4, 3, 16], [384, 192, 16, 64, 1]);
        views[1].shape = &shape;
        views[1].strides = &strides;
        let format = KvFormat::FlashInferNhd;
        let axis = TensorAxis::Tokens;
        let error =
            PagedKvError::Stride { format, tensor: 1, place: 2, axis, given: 16, needed: 48 };
        assert_eq!(engine.adopt(&on, &views).map(drop), Err(error));
        assert_eq!(
            error.to_string(),
            "tensor 1 cannot be adopted as FlashInferNhd: axis 2 (tokens of a block) has a stride of 16 \
             elements, not 48"
        );
    }

    #[test]
    fn numbers_that_make_no_tensors_are_refused() {
        let on = On::sim(references());
        for format in KvFormat::ALL {
            let engine = Engine::new(&on, format, (2, 0));
            let refused = |options: FormatOptions| {
                let views = engine.views();
                PagedKv::adopt(&on.stream, format, &options, &views).map(drop).unwrap_err()
            };
            let of =
                |quantity, value| PagedKvError::Layout(LayoutError::Format { quantity, value });
            let options = engine.options;
            assert_eq!(
                refused(FormatOptions { element_bytes: 0, ..options }),
                of("element_bytes", 0)
            );
            let (element_bytes, value) = (3, options.head_bytes);
            let error = refused(FormatOptions { element_bytes, ..options });
            let expected = match format {
                KvFormat::IndexerPages | KvFormat::PagedAttention => of("element_bytes", 3),
                _ => of("head_bytes", value),
            };
            assert_eq!(error, expected);
            let padded = refused(FormatOptions { block_padding_bytes: 3, ..options });
            if engine.known.axes[0].contains('s') || options.element_bytes > 1 {
                assert_eq!(padded, of("block_padding_bytes", 3), "{format:?}");
            } else {
                assert!(matches!(padded, PagedKvError::Stride { .. }), "{format:?}: {padded}");
            }
        }
    }

    /// Sums of blocks, for which kernels take the planes apart in another way.
    #[test]
    fn adopted_blocks_have_the_sums_of_their_rows() {
        let on = On::sim(references());
        for format in KvFormat::ALL {
            let engine = Engine::new(&on, format, (2, 48));
            let paged = engine.adopt(&on, &engine.views()).unwrap();
            let ids: Vec<_> = (0..BLOCKS).map(block).collect();
            let (device_ids, sums) = (on.upload(&ids), on.memory(BLOCKS * 8));
            let args = BlockSums {
                blocks: Blocks::Device(&paged),
                ids: device_ids.span().into(),
                count: BLOCKS,
                host_ids: Some(&ids),
                num_blocks: BLOCKS,
                sums: sums.span(),
                report: None,
            };
            on.kernels.sum_blocks(&on.stream, args).unwrap();
            let got: Vec<u64> = bytemuck::pod_collect_to_vec(&on.read(sums.span()));
            let (tensors, places) = (engine.contents(&on), engine.places());
            let (row, kv_count) =
                (paged.shape().row_bytes() as usize, u64::from(paged.shape().kv_count()));
            for (block, got) in (0..BLOCKS).zip(got) {
                let mut bytes = Vec::new();
                for (layer, kv) in (0..LAYERS).flat_map(|l| (0..kv_count).map(move |kv| (l, kv))) {
                    let first = ((kv * LAYERS + layer) * BLOCKS + block) * TOKENS;
                    let rows = first as usize * row..(first + TOKENS) as usize * row;
                    bytes.extend(places[rows].iter().map(|&(t, at)| tensors[t][at as usize]));
                }
                assert_eq!(got, kv_kernels::verify::block_sum(&bytes), "{format:?} block {block}");
            }
        }
    }
}
