//! Conversions: every pair of formats, every kind of scale, numbers of every kind.

use kv_kernels::{
    BlockPairs, DeviceReport, KvShape,
    convert::{Conversion, NarrowFormat, ScalePer, WideFormat},
    error::OutOfRange,
    layout::Tensors,
};

use super::block_copy::{Side, pairs};
use super::lays::{Lay, lays, lays_of_heads, shape, split_keys};
use super::on::{On, Outputs, Random};

const WIDE: [WideFormat; 2] = [WideFormat::Bf16, WideFormat::F16];
const NARROW: [NarrowFormat; 3] = [NarrowFormat::E4m3, NarrowFormat::E5m2, NarrowFormat::Int8];
const PER: [ScalePer; 6] = [
    ScalePer::Plane,
    ScalePer::Head,
    ScalePer::Block,
    ScalePer::BlockHead,
    ScalePer::Token,
    ScalePer::TokenHead,
];
const WIDE_BLOCKS: u64 = 5;
const NARROW_BLOCKS: u64 = 6;

/// What is converted in a run of the list.
struct Case {
    name: String,
    /// Of the 16-bit side; rows of the other are half as long.
    shapes: [KvShape; 2],
    lays: [Lay; 2],
    wide: WideFormat,
    narrow: NarrowFormat,
    per: ScalePer,
    head_size: u32,
    shift: u64,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // Layers, tensors, heads, elements of a head, tokens: one that is not a multiple of 8 too.
    let shapes = [(1, 1, 1, 8, 1), (2, 2, 2, 12, 5), (2, 1, 1, 576, 3), (1, 2, 4, 64, 16)];
    for (number, (layers, kv_count, heads, head_size, tokens)) in (0usize..).zip(shapes) {
        for (round, per) in PER.into_iter().enumerate() {
            for (which, narrow) in NARROW.into_iter().enumerate() {
                let row = u64::from(heads * head_size);
                let shapes = [2, 1].map(|bytes: u64| shape(layers, kv_count, row * bytes, tokens));
                let wide = WIDE[(number + round + which) % 2];
                let take = |side: usize, blocks| {
                    let which = (number + round + side * (which + 1)) % 5;
                    lays_of_heads(&shapes[side], blocks, heads.into()).swap_remove(which)
                };
                let mut lays = [take(0, WIDE_BLOCKS), take(1, NARROW_BLOCKS)];
                if head_size == 64 && (round + which) % 3 == 0 {
                    // Keys and values apart on one side, and in one piece on the other.
                    let [apart, whole] = [round % 2, 1 - round % 2];
                    let blocks = [WIDE_BLOCKS, NARROW_BLOCKS];
                    let split = split_keys(&shapes[apart], blocks[apart], 2 - apart as u64);
                    lays[apart] = split;
                    lays[whole] = lays_of_heads(&shapes[whole], blocks[whole], heads.into())
                        .swap_remove(which % 3);
                }
                let [a, b] = [lays[0].name, lays[1].name];
                cases.push(Case {
                    name: format!(
                        "{wide:?} and {narrow:?} per {per:?}, {heads} heads of {head_size}, \
                         {tokens} tokens, {a} and {b}"
                    ),
                    shapes,
                    lays,
                    wide,
                    narrow,
                    per,
                    head_size,
                    shift: [0, 8, 2][(round + which) % 3],
                });
            }
        }
    }
    cases
}

impl Case {
    fn scale_count(&self) -> u64 {
        let shape = &self.shapes[1];
        let heads = shape.row_bytes() / u64::from(self.head_size);
        let tokens = u64::from(shape.block_tokens());
        let of_plane = match self.per {
            ScalePer::Plane => 1,
            ScalePer::Head => heads,
            ScalePer::Block => NARROW_BLOCKS,
            ScalePer::BlockHead => NARROW_BLOCKS * heads,
            ScalePer::Token => NARROW_BLOCKS * tokens,
            ScalePer::TokenHead => NARROW_BLOCKS * tokens * heads,
        };
        shape.planes() * of_plane
    }

    /// Scales that make numbers too large, too small and just right.
    fn scales(&self) -> Vec<f32> {
        let mut random = Random(self.scale_count());
        let scale = |_| [0.013, 1.0, 0.5, 3.7e-3, 40.0, 2.5e4][random.below(6) as usize];
        (0..self.scale_count()).map(scale).collect()
    }

    /// Both sides, of which the wide one holds values with every kind of exponent.
    fn sides(&self, on: &On) -> [Side; 2] {
        let [wide, narrow] = [0, 1].map(|side| {
            let blocks = [WIDE_BLOCKS, NARROW_BLOCKS][side];
            let one = self.lays[side].layout.tensors() == Tensors::One;
            let host = one && side == 1 && self.per == ScalePer::Head;
            let shift = self.shift;
            Side::new(on, self.shapes[side], &self.lays[side], blocks, (host, shift))
        });
        let Side::Device(_, memory) = &wide else { unreachable!() };
        on.stream.upload(memory.span(), &self.numbers()).unwrap();
        [wide, narrow]
    }

    /// Codes of the wide format: small and large, NaN, infinities and zeros of either sign.
    fn numbers(&self) -> Vec<u8> {
        let bytes = self.lays[0].bytes + self.shift;
        let mut random = Random(bytes);
        let special = [0u16, 0x8000, 0x7C00, 0xFC00, 0x7F80, 0xFF80, 0x7FC1, 0x7E01, 1, 0x8001];
        let mut code = || match random.below(16) {
            0 => special[random.below(10) as usize],
            1..4 => random.below(1 << 16) as u16,
            _ => {
                let value = (random.below(1 << 20) as f32 / 1e5 - 5.0).powi(3);
                self.wide.encode(value)
            }
        };
        let codes: Vec<u16> = (0..bytes / 2).map(|_| code()).collect();
        bytemuck::cast_slice(&codes).to_vec()
    }

    /// Quantizes with given scales, measures new ones, quantizes with those, and converts back: the
    /// narrow blocks of both, the scales found, and the wide blocks at the end.
    fn run(&self, on: &On) -> [Vec<u8>; 4] {
        let [wide, narrow] = self.sides(on);
        let scales = on.upload(&self.scales());
        let forth = pairs(5);
        let device_forth = on.upload(&forth);
        let conversion = Conversion {
            from: wide.blocks(),
            to: narrow.blocks(),
            wide: self.wide,
            narrow: self.narrow,
            head_size: self.head_size,
            scales: scales.span(),
            per: self.per,
            pairs: device_forth.span().into(),
            count: 5,
            host_pairs: Some(BlockPairs::new(&forth).unwrap()),
            from_blocks: WIDE_BLOCKS,
            to_blocks: NARROW_BLOCKS,
            report: None,
        };
        on.kernels.quantize_blocks(&on.stream, conversion).unwrap();
        let first = narrow.read(on);
        if self.per.is_of_block() {
            on.kernels.measure_scales(&on.stream, conversion).unwrap();
            on.kernels.quantize_blocks(&on.stream, conversion).unwrap();
        }
        let (second, found) = (narrow.read(on), on.read(scales.span()));
        let back = forth[..3].iter().zip([4, 0, 2]);
        let back: Vec<_> = back
            .map(|(pair, destination)| kv_kernels::BlockPair {
                source: pair.destination,
                destination,
            })
            .collect();
        let device_back = on.upload(&back);
        let conversion = Conversion {
            from: narrow.blocks(),
            to: wide.blocks(),
            pairs: device_back.span().into(),
            count: 3,
            host_pairs: Some(BlockPairs::new(&back).unwrap()),
            from_blocks: NARROW_BLOCKS,
            to_blocks: WIDE_BLOCKS,
            ..conversion
        };
        on.kernels.dequantize_blocks(&on.stream, conversion).unwrap();
        [first, second, found, wide.read(on)]
    }
}

pub(crate) fn outputs(on: &On) -> Outputs {
    let mut outputs = Outputs::new();
    for case in cases() {
        for (what, bytes) in
            ["quantized", "quantized by measure", "scales", "and back"].iter().zip(case.run(on))
        {
            outputs.push((format!("{what}: {}", case.name), bytes));
        }
    }
    outputs
        .push(("pairs that are not there".into(), unknown_pairs(on, &cases()[NARROW.len() * 2])));
    outputs.extend(every_code(on));
    outputs
}

/// Every code of every wide format, to and from every narrow one.
fn every_code(on: &On) -> Outputs {
    let (wide_shape, narrow_shape) = (shape(1, 1, 1 << 17, 1), shape(1, 1, 1 << 16, 1));
    let (wide_lay, narrow_lay) =
        (lays(&wide_shape, 1).swap_remove(0), lays(&narrow_shape, 1).swap_remove(0));
    let codes: Vec<u16> = (0..=u16::MAX).collect();
    let pair = [kv_kernels::BlockPair { source: 0, destination: 0 }];
    let device_pair = on.upload(&pair);
    let mut outputs = Outputs::new();
    for wide_format in WIDE {
        for narrow_format in NARROW {
            let wide = Side::new(on, wide_shape, &wide_lay, 1, (false, 0));
            let narrow = Side::new(on, narrow_shape, &narrow_lay, 1, (false, 0));
            let Side::Device(_, memory) = &wide else { unreachable!() };
            on.stream.upload(memory.span(), bytemuck::cast_slice(&codes)).unwrap();
            let scale = 0.75f32;
            let scales = on.upload(&[scale]);
            let conversion = Conversion {
                from: wide.blocks(),
                to: narrow.blocks(),
                wide: wide_format,
                narrow: narrow_format,
                head_size: 1 << 16,
                scales: scales.span(),
                per: ScalePer::Plane,
                pairs: device_pair.span().into(),
                count: 1,
                host_pairs: Some(BlockPairs::new(&pair).unwrap()),
                from_blocks: 1,
                to_blocks: 1,
                report: None,
            };
            on.kernels.quantize_blocks(&on.stream, conversion).unwrap();
            let name = format!("{wide_format:?} and {narrow_format:?}");
            let got = narrow.read(on);
            for (&code, &got) in codes.iter().zip(&got) {
                let expected = narrow_format.encode(wide_format.decode(code) * (1.0 / scale));
                assert_eq!(got, expected, "{name}: {code:#x}");
            }
            let conversion = Conversion { from: narrow.blocks(), to: wide.blocks(), ..conversion };
            on.kernels.dequantize_blocks(&on.stream, conversion).unwrap();
            let back: Vec<u16> = bytemuck::pod_collect_to_vec(&wide.read(on));
            for (&code, &back) in got.iter().zip(&back) {
                let expected = wide_format.encode(narrow_format.decode(code) * scale);
                assert_eq!(back, expected, "{name} back: {code:#x}");
            }
            outputs.push((format!("every code of {name}"), got));
        }
    }
    outputs
}

/// Pairs that only the device sees to be out of range are passed over and reported.
fn unknown_pairs(on: &On, case: &Case) -> Vec<u8> {
    let [wide, narrow] = case.sides(on);
    let scales = on.upload(&case.scales());
    let report = DeviceReport::new(&on.stream).unwrap();
    let pair = |source, destination| kv_kernels::BlockPair { source, destination };
    let seen = on.upload(&[pair(1, 1), pair(5, 0), pair(0, 6), pair(-1, 2)]);
    let conversion = Conversion {
        from: wide.blocks(),
        to: narrow.blocks(),
        wide: case.wide,
        narrow: case.narrow,
        head_size: case.head_size,
        scales: scales.span(),
        per: case.per,
        pairs: seen.span().into(),
        count: 4,
        host_pairs: None,
        from_blocks: WIDE_BLOCKS,
        to_blocks: NARROW_BLOCKS,
        report: Some(&report),
    };
    on.kernels.measure_scales(&on.stream, conversion).unwrap();
    assert_eq!(report.take(&on.stream), Ok(Some(OutOfRange { count: 3, first: 1 })));
    on.kernels.quantize_blocks(&on.stream, conversion).unwrap();
    assert_eq!(report.take(&on.stream), Ok(Some(OutOfRange { count: 3, first: 1 })));
    let mut bytes = narrow.read(on);
    bytes.extend(on.read(scales.span()));
    bytes
}

#[cfg(test)]
mod on_sim {
    use kv_kernels::{
        KernelError, KvShapeOptions, PagedKv, PagedLayout,
        error::{BlocksError, Operand, OperandError, Side as Named},
        layout::{LayoutOptions, RowPart},
        references,
    };

    use super::super::lays::{Place, places};
    use super::super::on::compare;
    use super::super::on::noise;
    use super::*;

    #[test]
    fn a_pair_that_is_passed_over_is_told_of_once() {
        let on = On::sim(references());
        let mut tried = 0;
        for case in cases() {
            let apart = case.lays.iter().any(|lay| !lay.layout.has_like_planes());
            if apart && matches!(case.per, ScalePer::Block | ScalePer::Token) {
                unknown_pairs(&on, &case);
                tried += 1;
            }
        }
        assert!(tried > 1, "{tried}");
        on.assert_clean();
    }

    #[test]
    fn the_ptx_gives_what_the_reference_gives() {
        compare(&On::sim(references()), &On::sim(&[]), outputs);
    }

    /// The variant for newer devices is what those load, and it saves instructions.
    #[test]
    fn a_newer_device_runs_its_own_variant() {
        let instructions = |on: On| {
            let case = cases().swap_remove(0);
            assert_eq!(case.narrow, NarrowFormat::E4m3);
            let outputs = case.run(&on);
            (outputs, on.sim.unwrap().instructions())
        };
        let ((new, few), (old, many)) = (instructions(On::sim(&[])), instructions(On::old_sim()));
        assert!(new == old && few < many, "{few} {many}");
    }

    /// The other variant, which a device of compute capability 8.0 loads and no newer one needs.
    #[test]
    fn the_ptx_of_older_devices_gives_what_the_reference_gives() {
        compare(&On::sim(references()), &On::old_sim(), outputs);
    }

    /// Where the scale of an element lies, written out.
    fn scale_of(case: &Case, place: Place, head: u64) -> usize {
        let shape = &case.shapes[1];
        let heads = shape.row_bytes() / u64::from(case.head_size);
        let slots = NARROW_BLOCKS * u64::from(shape.block_tokens());
        let slot = place.block * u64::from(shape.block_tokens()) + place.token;
        let Place { plane, block, .. } = place;
        (match case.per {
            ScalePer::Plane => plane,
            ScalePer::Head => plane * heads + head,
            ScalePer::Block => plane * NARROW_BLOCKS + block,
            ScalePer::BlockHead => (plane * NARROW_BLOCKS + block) * heads + head,
            ScalePer::Token => plane * slots + slot,
            ScalePer::TokenHead => (plane * slots + slot) * heads + head,
        }) as usize
    }

    #[test]
    fn every_element_is_what_the_formula_says() {
        let on = On::sim(references());
        for case in cases() {
            let [first, second, found, back] = case.run(&on);
            let wide_codes = case.numbers();
            let wide_at = |place: Place| {
                let at = (case.lays[0].at)(Place { byte: place.byte * 2, ..place });
                (at + case.shift) as usize
            };
            let narrow_at = |place: Place| ((case.lays[1].at)(place) + case.shift) as usize;
            let value = |codes: &[u8], at: usize| {
                case.wide.decode(u16::from_le_bytes([codes[at], codes[at + 1]]))
            };
            let elements = 0..case.shapes[1].row_bytes();
            let before = case.scales();
            let after: Vec<f32> = bytemuck::pod_collect_to_vec(&found);
            // The scales measured, then both conversions, then the way back.
            let mut largest = vec![0f32; before.len()];
            let mut expected = [noise(case.lays[1].bytes + case.shift), vec![]];
            expected[1] = expected[0].clone();
            let each = |pair: &kv_kernels::BlockPair| {
                let source = pair.source as u64;
                places(&case.shapes[1], pair.destination as u64, elements.clone())
                    .map(move |to| (Place { block: source, ..to }, to))
            };
            for (from, to) in pairs(5).iter().flat_map(each) {
                let scale = scale_of(&case, to, to.byte / u64::from(case.head_size));
                let magnitude = value(&wide_codes, wide_at(from)).abs();
                let limit = if case.wide == WideFormat::F16 { 65504.0 } else { 3.389_531_4e38 };
                if !magnitude.is_nan() {
                    largest[scale] = largest[scale].max(magnitude.min(limit));
                }
            }
            for (from, to) in pairs(5).iter().flat_map(each) {
                let scale = scale_of(&case, to, to.byte / u64::from(case.head_size));
                let value = value(&wide_codes, wide_at(from));
                let at = narrow_at(to);
                expected[0][at] = case.narrow.encode(value * (1.0 / before[scale]));
                if case.per.is_of_block() {
                    let wanted = match largest[scale] {
                        0.0 => 1.0,
                        most => (most / case.narrow.largest()).max(f32::MIN_POSITIVE),
                    };
                    assert_eq!(after[scale], wanted, "{}", case.name);
                }
                expected[1][at] = case.narrow.encode(value * (1.0 / after[scale]));
            }
            assert!(first == expected[0], "{}", case.name);
            assert!(second == expected[1], "{}", case.name);
            let mut wide = wide_codes.clone();
            for (pair, block) in pairs(5)[..3].iter().zip([4, 0, 2]) {
                for from in places(&case.shapes[1], pair.destination as u64, elements.clone()) {
                    let scale = after[scale_of(&case, from, from.byte / u64::from(case.head_size))];
                    let value = case.narrow.decode(second[narrow_at(from)]) * scale;
                    let at = wide_at(Place { block, ..from });
                    wide[at..at + 2].copy_from_slice(&case.wide.encode(value).to_le_bytes());
                }
            }
            assert!(back == wide, "{}", case.name);
        }
        on.assert_clean();
    }

    /// Where the 16-bit side lies: `[segment, token, kv, layer, block]` strides and an offset.
    #[derive(Clone, Copy, Debug)]
    struct Steps {
        strides: [u64; 5],
        offset: u64,
        address: u64,
    }

    const EVEN: Steps = Steps { strides: [10, 24, 64, 128, 300], offset: 0, address: 0 };

    /// Calls all three conversions with a 16-bit side that lies so, of a shape and blocks.
    fn convert_all(
        on: &On,
        (shape, blocks): (KvShape, u64),
        steps: Steps,
    ) -> [Result<(), BlocksError>; 3] {
        let [segment, token, kv, layer, block] = steps.strides;
        let part = RowPart {
            segment_bytes: 8,
            segments: 2,
            segment_stride_bytes: segment,
            token_stride_bytes: token,
            offset_bytes: steps.offset,
        };
        let options = LayoutOptions {
            tensors: Tensors::One,
            layer_stride_bytes: layer,
            kv_stride_bytes: kv,
            block_stride_bytes: block,
            parts: &[part],
        };
        let layout = PagedLayout::new(&shape, options).unwrap();
        let memory = on.upload(&vec![0_u8; 4096]);
        let span = memory.span().slice(steps.address, 4096 - steps.address).unwrap();
        let wide = PagedKv::new(&on.stream, shape, layout, span, blocks).unwrap();
        let options = KvShapeOptions {
            layers: shape.layers(),
            kv_count: shape.kv_count(),
            row_bytes: 8,
            block_tokens: shape.block_tokens(),
        };
        let narrow_shape = KvShape::new(options).unwrap();
        let layout = PagedLayout::block_major(&narrow_shape);
        let codes = on.upload(&vec![0_u8; 4097]);
        // The 8-bit side may lie anywhere.
        let span = codes.span().slice(1, 4096).unwrap();
        let narrow = PagedKv::new(&on.stream, narrow_shape, layout, span, blocks).unwrap();
        let scales = on.upload(&vec![1_f32; 256]);
        let pairs: Vec<_> = (0..blocks as i32)
            .map(|id| kv_kernels::BlockPair { source: id, destination: id })
            .collect();
        let device_pairs = on.upload(&pairs);
        let down = Conversion {
            from: (&wide).into(),
            to: (&narrow).into(),
            wide: WideFormat::Bf16,
            narrow: NarrowFormat::E4m3,
            head_size: 4,
            scales: scales.span(),
            per: ScalePer::BlockHead,
            pairs: device_pairs.span().into(),
            count: blocks,
            host_pairs: Some(BlockPairs::new(&pairs).unwrap()),
            from_blocks: blocks,
            to_blocks: blocks,
            report: None,
        };
        let up = Conversion { from: (&narrow).into(), to: (&wide).into(), ..down };
        let results = [
            on.kernels.quantize_blocks(&on.stream, down),
            on.kernels.measure_scales(&on.stream, down),
            on.kernels.dequantize_blocks(&on.stream, up),
        ];
        assert_eq!(on.stream.synchronize(), Ok(()), "the device is lost: {steps:?}");
        on.assert_clean();
        results
    }

    /// A 16-bit element at an odd address loses the device: whatever makes one is refused.
    #[test]
    fn a_16_bit_side_with_elements_at_odd_addresses_is_refused() {
        let on = On::sim(&[]);
        let (shape, blocks) = (shape(2, 2, 16, 2), 2);
        assert_eq!(convert_all(&on, (shape, blocks), EVEN), [Ok(()), Ok(()), Ok(())]);
        let launches = on.launches();
        for axis in 0..5 {
            let mut steps = EVEN;
            steps.strides[axis] += 1;
            let bytes = steps.strides[axis];
            let refused = |side| Err(BlocksError::Elements { side, bytes, element_bytes: 2 });
            let [source, destination] = [Named::Source, Named::Destination].map(refused);
            let expected = [source.clone(), source, destination];
            assert_eq!(convert_all(&on, (shape, blocks), steps), expected);
        }
        let results = convert_all(&on, (shape, blocks), Steps { offset: 3, ..EVEN });
        assert!(results.iter().all(|result| matches!(
            result,
            Err(BlocksError::Elements { bytes: 3, element_bytes: 2, .. })
        )));
        for result in convert_all(&on, (shape, blocks), Steps { address: 5, ..EVEN }) {
            let Err(BlocksError::Kernel(KernelError::Operand(OperandError::Misaligned {
                operand: Operand::Pages,
                address,
                alignment: 2,
            }))) = result
            else {
                panic!("{result:?}")
            };
            assert_eq!(address % 2, 1);
        }
        assert_eq!(on.launches(), launches);
    }

    /// A stride along an axis of one place moves nothing, so it may be odd.
    #[test]
    fn an_odd_stride_of_an_axis_with_one_place_is_no_reason_to_refuse() {
        let on = On::sim(&[]);
        for axis in 1..5 {
            let mut steps = EVEN;
            steps.strides[axis] += 1;
            let (layers, kv_count) = (if axis == 3 { 1 } else { 2 }, if axis == 2 { 1 } else { 2 });
            let tokens = if axis == 1 { 1 } else { 2 };
            let blocks = if axis == 4 { 1 } else { 2 };
            let of = (shape(layers, kv_count, 16, tokens), blocks);
            assert_eq!(convert_all(&on, of, steps), [Ok(()), Ok(()), Ok(())], "axis {axis}");
        }
    }

    #[test]
    fn wrong_quantities_are_errors_with_their_numbers_and_nothing_is_launched() {
        let on = On::sim(references());
        let case = cases().remove(NARROW.len() * PER.len() + NARROW.len() * 3);
        assert_eq!((case.per, case.head_size), (ScalePer::BlockHead, 12));
        let [wide, narrow] = case.sides(&on);
        let scales = on.upload(&case.scales());
        let device_pairs = on.upload(&pairs(2));
        let (listed, none) = (pairs(2), Some(BlockPairs::new(&[]).unwrap()));
        let host_pairs = Some(BlockPairs::new(&listed).unwrap());
        let good = Conversion {
            from: wide.blocks(),
            to: narrow.blocks(),
            wide: case.wide,
            narrow: case.narrow,
            head_size: 12,
            scales: scales.span(),
            per: case.per,
            pairs: device_pairs.span().into(),
            count: 2,
            host_pairs,
            from_blocks: WIDE_BLOCKS,
            to_blocks: NARROW_BLOCKS,
            report: None,
        };
        let refused = |conversion: Conversion<'_>| {
            on.kernels.quantize_blocks(&on.stream, conversion).unwrap_err()
        };
        let heads = |head_size| BlocksError::HeadSize { head_size, elements: 24 };
        assert_eq!(refused(Conversion { head_size: 7, ..good }), heads(7));
        assert_eq!(refused(Conversion { head_size: 0, ..good }), heads(0));
        let operand = Operand::Scales;
        let needed_bytes = case.scale_count() * 4;
        let short = scales.span().slice(0, needed_bytes - 4).unwrap();
        let error = OperandError::TooShort { operand, needed_bytes, bytes: needed_bytes - 4 };
        assert_eq!(refused(Conversion { scales: short, ..good }), error.into());
        // The wrong way round: 48 elements of 8 bits are not 12 of 16.
        let (from, to) = (narrow.blocks(), wide.blocks());
        assert_eq!(
            refused(Conversion { from, to, from_blocks: 5, to_blocks: 5, ..good }),
            BlocksError::Shapes {
                what: "elements of a row",
                source_count: 12,
                destination_count: 48
            }
        );
        let odd = shape(2, 2, 7, 5);
        let odd = Side::new(&on, odd, &lays(&odd, 5).swap_remove(0), 5, (false, 0));
        assert_eq!(
            refused(Conversion { from: odd.blocks(), ..good }),
            BlocksError::Elements { side: Named::Source, bytes: 7, element_bytes: 2 }
        );
        // 36 and 12 bytes are 18 and 6 elements: the third head of 8 is a piece of 2 and one of 6.
        let parts = lays(&case.shapes[0], 5).swap_remove(5);
        let parts = Side::new(&on, case.shapes[0], &parts, 5, (false, 0));
        assert_eq!(
            refused(Conversion {
                from: parts.blocks(),
                head_size: 8,
                per: ScalePer::Block,
                ..good
            }),
            heads(8)
        );
        for per in [ScalePer::Plane, ScalePer::Head] {
            assert_eq!(
                on.kernels.measure_scales(&on.stream, Conversion { per, ..good }),
                Err(BlocksError::SharedScales { per })
            );
        }
        assert_eq!(on.launches(), 0);
        let empty = Conversion { count: 0, host_pairs: none, ..good };
        on.kernels.quantize_blocks(&on.stream, empty).unwrap();
        assert_eq!(on.launches(), 0);
    }
}
