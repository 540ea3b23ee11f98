//! What the conversions of `quantize.cu` compute.

use bytemuck::AnyBitPattern;
use cuda_driver::KernelArgs;
use cuda_driver::reference::{DeviceMemory, ReferenceError};

use super::block_copy::{Planes, for_each_unit, known};
use super::{Arguments, at, load_array, report_bad};
use crate::{
    BlockPair,
    convert::{ConversionKind, NarrowFormat, WideFormat},
    raw::{RawBlockSide, RawBlockUnits, RawFormats, RawScales},
};

/// The parameters that all of them have.
struct Parameters {
    to: RawBlockSide,
    from: RawBlockSide,
    pairs: u64,
    /// Vectors, or groups.
    items: u64,
    first_pair: u64,
    scales: RawScales,
    formats: RawFormats,
    report: u64,
    wide: WideFormat,
    narrow: NarrowFormat,
}

impl Parameters {
    /// The parameters, and what tells of the units or groups of a block.
    fn of<const N: usize>(args: &KernelArgs) -> Result<(Self, [u32; N]), ReferenceError>
    where
        [u32; N]: AnyBitPattern,
    {
        let mut args = Arguments::new(args);
        let (to, from, units) = (args.take()?, args.take()?, args.take()?);
        let (pairs, items, first_pair) = (args.take()?, args.take::<u32>()?.into(), args.take()?);
        let scales = args.take()?;
        let [wide, narrow, head_units, _, _, first_unit]: [u32; 6] = args.take()?;
        if head_units == 0 {
            return Err(ReferenceError::Argument { index: 7 });
        }
        let formats = RawFormats { wide, narrow, head_units, first_unit };
        let report = args.take()?;
        let (wide, narrow) = (WideFormat::of(wide), NarrowFormat::of(narrow));
        let all =
            Self { to, from, pairs, items, first_pair, scales, formats, report, wide, narrow };
        Ok((all, units))
    }

    fn scale_at(&self, block: u64, [plane, token, head]: [u64; 3]) -> u64 {
        let RawScales { scales, plane_stride, block_stride, token_stride, head_stride } =
            self.scales;
        let place = at(
            at(at(at(0, plane, plane_stride), block, block_stride), token, token_stride),
            head,
            head_stride,
        );
        at(scales, place, 4)
    }

    /// Pairs, of which those out of range are reported and left out.
    fn pairs(
        &self,
        memory: &mut dyn DeviceMemory,
        count: u64,
    ) -> Result<Vec<[u64; 2]>, ReferenceError> {
        let mut good = Vec::new();
        for (place, pair) in (0..).zip(load_array::<BlockPair>(memory, self.pairs, count)?) {
            match (known(pair.source, &self.from), known(pair.destination, &self.to)) {
                (Some(source), Some(destination)) => good.push([source, destination]),
                _ => report_bad(memory, self.report, 1, self.first_pair + place)?,
            }
        }
        Ok(good)
    }
}

pub(super) fn convert(
    memory: &mut dyn DeviceMemory,
    args: &KernelArgs,
    kind: ConversionKind,
    vector: u64,
) -> Result<(), ReferenceError> {
    let (p, units) = Parameters::of(args)?;
    let units = RawBlockUnits::of_dividers(units);
    let of_block = units.planes * units.tokens * units.segments * units.unit_vectors;
    let count = p.items.checked_div(of_block).unwrap_or(0);
    let (to, from) = (Planes::of(memory, &p.to, &units)?, Planes::of(memory, &p.from, &units)?);
    let elements = units.unit_vectors * vector;
    let quantizes = kind == ConversionKind::Quantize;
    for [source, destination] in p.pairs(memory, count)? {
        let narrow_block = if quantizes { destination } else { source };
        for_each_unit(&units, |plane, token, segment| {
            let unit = [plane, token, segment];
            let head =
                (u64::from(p.formats.first_unit) + segment) / u64::from(p.formats.head_units);
            let scale = p.scale_at(narrow_block, [plane, token, head]);
            let scale = load_array::<f32>(memory, scale, 1)?[0];
            let (source, target) =
                (from.at(&p.from, source, unit), to.at(&p.to, destination, unit));
            if quantizes {
                let codes = load_array::<u16>(memory, source, elements)?;
                let inverse = 1.0 / scale;
                let code = |code| p.narrow.encode(p.wide.decode(code) * inverse);
                memory.store(target, &codes.into_iter().map(code).collect::<Vec<u8>>())?;
            } else {
                let codes = load_array::<u8>(memory, source, elements)?;
                let code = |code| p.wide.encode(p.narrow.decode(code) * scale);
                let codes: Vec<u16> = codes.into_iter().map(code).collect();
                memory.store(target, bytemuck::cast_slice(&codes))?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

pub(super) fn measure(
    memory: &mut dyn DeviceMemory,
    args: &KernelArgs,
    vector: u64,
) -> Result<(), ReferenceError> {
    let (p, described) = Parameters::of(args)?;
    let described: [u32; 18] = described;
    let [planes, token_groups, head_groups, tokens, segments, unit_vectors] =
        [0, 3, 6, 9, 10, 13].map(|at| described[at]);
    let (token_groups, head_groups) = (u64::from(token_groups), u64::from(head_groups));
    let units = RawBlockUnits {
        planes: planes.into(),
        tokens: token_groups * u64::from(tokens),
        segments: head_groups * u64::from(segments),
        unit_vectors: unit_vectors.into(),
    };
    let from = Planes::of(memory, &p.from, &units)?;
    let groups = units.planes * token_groups * head_groups;
    for [source, destination] in p.pairs(memory, p.items.checked_div(groups).unwrap_or(0))? {
        let mut largest = vec![0u32; groups as usize];
        let group_of = |plane: u64, token: u64, segment: u64| {
            let token = token * token_groups / units.tokens;
            let head = segment * head_groups / units.segments;
            (plane * token_groups + token) * head_groups + head
        };
        for_each_unit(&units, |plane, token, segment| {
            let unit = from.at(&p.from, source, [plane, token, segment]);
            let codes = load_array::<u16>(memory, unit, units.unit_vectors * vector)?;
            let most = codes.into_iter().map(|code| p.wide.magnitude_bits(code)).max();
            let held = &mut largest[group_of(plane, token, segment) as usize];
            *held = (*held).max(most.unwrap_or(0));
            Ok(())
        })?;
        for (group, largest) in (0..).zip(largest) {
            let (token, head) = (group / head_groups % token_groups, group % head_groups);
            let plane = group / head_groups / token_groups;
            let place = p.scale_at(destination, [plane, token, head]);
            memory.store(place, &scale_of(largest, p.narrow).to_le_bytes())?;
        }
    }
    Ok(())
}

/// The scale of a group whose largest magnitude has these bits.
fn scale_of(largest: u32, narrow: NarrowFormat) -> f32 {
    match largest {
        0 => 1.0,
        bits => (f32::from_bits(bits) / narrow.largest()).max(f32::MIN_POSITIVE),
    }
}
