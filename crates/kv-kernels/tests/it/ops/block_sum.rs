//! Sums of blocks: the same in every layout, on the device and on the host.

use cuda_driver::DeviceBuffer;
use kv_kernels::{
    BlockId, DeviceReport, KvShape, PagedKv, PagedLayout,
    error::OutOfRange,
    layout::{RowPart, Tensors},
    verify::{BAD_BLOCK, BlockSums, ChecksumArgs, block_sum},
};

use super::block_copy::Side;
use super::lays::{LAYS, Lay, in_one_tensor, lays, places, shape};
use super::on::{On, Outputs, block, noise};

const BLOCKS: u64 = 4;
const IDS: [u16; 5] = [3, 0, 0, 2, 1];

fn shapes() -> [KvShape; 7] {
    [
        shape(1, 1, 8, 1),
        shape(1, 2, 7, 3),
        shape(2, 2, 132, 4),
        shape(3, 2, 24, 5),
        shape(2, 1, 1152, 3),
        shape(2, 2, 64, 16),
        shape(1, 2, 2048, 7),
    ]
}

/// The blocks of a layout, without gaps.
fn dense(shape: &KvShape, lay: &Lay, bytes: &[u8]) -> Vec<Vec<u8>> {
    let row = 0..shape.row_bytes();
    let block = |block| {
        places(shape, block, row.clone()).map(|place| bytes[(lay.at)(place) as usize]).collect()
    };
    (0..BLOCKS).map(block).collect()
}

fn sums(on: &On, side: &Side, ids: &[BlockId]) -> Vec<u64> {
    let (device_ids, sums) = (on.upload(ids), on.upload(&vec![7u64; ids.len() + 1]));
    let args = BlockSums {
        blocks: side.blocks(),
        ids: device_ids.span().into(),
        count: ids.len() as u64,
        host_ids: Some(ids),
        num_blocks: BLOCKS,
        sums: sums.span(),
        report: None,
    };
    on.kernels.sum_blocks(&on.stream, args).unwrap();
    let sums: Vec<u64> = bytemuck::pod_collect_to_vec(&on.read(sums.span()));
    assert_eq!(sums[ids.len()], 7, "a sum too many was written");
    sums[..ids.len()].to_vec()
}

pub(crate) fn outputs(on: &On) -> Outputs {
    let mut outputs = Outputs::new();
    for shape in shapes() {
        for (number, lay) in (0..).zip(lays(&shape, BLOCKS)) {
            let shift = [0u64, 8, 16, 4, 1][number % 5];
            let ones = if lay.layout.tensors() == Tensors::One { 2 } else { 1 };
            for &host in &[false, true][..ones] {
                let side = Side::new(on, shape, &lay, BLOCKS, (host, shift));
                let got = sums(on, &side, &IDS.map(BlockId::from));
                let bytes = &noise(lay.bytes + shift)[shift as usize..];
                let blocks = dense(&shape, &lay, bytes);
                let expected = IDS.map(|id| block_sum(&blocks[id as usize]));
                let name = format!("{shape:?}, {}, host {host}", lay.name);
                assert_eq!(got, expected, "{name}");
                outputs.push((name, bytemuck::cast_slice(&got).to_vec()));
            }
        }
    }
    outputs.push(("ids that are not there".into(), unknown_ids(on, 1)));
    outputs
}

/// A block, and every way in which a transfer of it can go wrong.
fn damages(shape: &KvShape, block: &[u8]) -> Vec<(String, Vec<u8>)> {
    let (row, plane) = (shape.row_bytes() as usize, shape.block_plane_bytes() as usize);
    let (layer, half) = (2 * plane, block.len() / 2);
    let mut damages = vec![("nothing".to_owned(), block.to_vec())];
    let mut with = |name: String, damage: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = block.to_vec();
        damage(&mut bytes);
        damages.push((name, bytes));
    };
    // Two tokens (in all planes), planes, layers, or heads of a row in each other's places.
    for a in 0..4 {
        for b in a + 1..4 {
            with(format!("tokens {a} and {b}"), &|bytes| {
                (0..4).for_each(|of| swap(bytes, of * plane + a * row, of * plane + b * row, row));
            });
            with(format!("rows {a} and {b}"), &|bytes| swap(bytes, a * row, b * row, row));
            with(format!("planes {a} and {b}"), &|bytes| swap(bytes, a * plane, b * plane, plane));
            with(format!("heads {a} and {b}"), &|bytes| {
                (0..16).for_each(|of| swap(bytes, of * row + a * 16, of * row + b * 16, 16));
            });
        }
    }
    with("layers".into(), &|bytes| swap(bytes, 0, layer, layer));
    // Halves that did not come: zeros, other bytes, or the other half again.
    for at in [0, half] {
        with(format!("zeros from {at}"), &|bytes| bytes[at..at + half].fill(0));
        with(format!("0xEE from {at}"), &|bytes| bytes[at..at + half].fill(0xEE));
        with(format!("a half twice, {at}"), &|bytes| bytes.copy_within(at..at + half, half - at));
    }
    // Bits lost in two words, in all words, and in all elements of 16 bits.
    for bit in 0..64 {
        let clear =
            move |bytes: &mut [u8], word: usize| bytes[8 * word + bit / 8] &= !(1 << (bit % 8));
        let set = move |bytes: &mut [u8], word: usize| bytes[8 * word + bit / 8] |= 1 << (bit % 8);
        for (one, other) in [(0, 1), (0, 2), (5, 77), (8, 16), (30, 31)] {
            with(format!("no bit {bit} in words {one} and {other}"), &|bytes| {
                clear(bytes, one);
                clear(bytes, other);
            });
            with(format!("bit {bit} in words {one} and {other}"), &|bytes| {
                set(bytes, one);
                set(bytes, other);
            });
        }
        with(format!("no bit {bit}"), &|bytes| (0..bytes.len() / 8).for_each(|w| clear(bytes, w)));
        with(format!("bit {bit}"), &|bytes| (0..bytes.len() / 8).for_each(|w| set(bytes, w)));
    }
    // Bytes that came too early or too late, by a vector, a row, a plane; and one row everywhere.
    for by in [8, 16, row, plane, layer] {
        with(format!("on by {by}"), &|bytes| bytes.rotate_right(by));
        with(format!("back by {by}"), &|bytes| bytes.rotate_left(by));
        with(format!("zeros and then {by} less"), &|bytes| {
            bytes.copy_within(..2 * half - by, by);
            bytes[..by].fill(0);
        });
    }
    for of in 0..16 {
        with(format!("row {of} everywhere"), &|bytes| {
            (0..16).for_each(|to| bytes.copy_within(of * row..(of + 1) * row, to * row));
        });
        with(format!("no row {of}"), &|bytes| bytes[of * row..(of + 1) * row].fill(0));
    }
    damages
}

fn swap(bytes: &mut [u8], a: usize, b: usize, length: usize) {
    (0..length).for_each(|at| bytes.swap(a + at, b + at));
}

/// Sums whole blocks, damaged in every way, by the host, by `sum_blocks` and by `paged_checksum`: no two that have other
/// bytes have one sum.
pub(crate) fn damage_is_seen(on: &On) {
    let shape = shape(2, 2, 64, 4);
    let words = (shape.block_bytes() / 8) as usize;
    let of_words = |word: fn(u64) -> u64| -> Vec<u8> {
        let words: Vec<u64> = (0..words as u64).map(word).collect();
        bytemuck::cast_slice(&words).to_vec()
    };
    let contents = [
        ("noise", noise(shape.block_bytes())),
        ("a slope", of_words(|n| 0x0123_4567_89AB_CDEF + 3 * n)),
        // A key of each token and a number of each place, as far as both grow evenly.
        (
            "two slopes",
            of_words(|n| 0x1E37_79B9_7F4A_7C15 * (n / 8 % 4) + (n / 32 * 8 + n % 8) * 5),
        ),
        ("the same row", of_words(|n| 0x3F80_BF80_0001_8000 + n % 8)),
        ("one word", of_words(|_| u64::MAX)),
        ("zeros", of_words(|_| 0)),
    ];
    for (content, block) in contents {
        let mut blocks = damages(&shape, &block);
        let mut seen = std::collections::HashSet::new();
        blocks.retain(|(_, bytes)| seen.insert(bytes.clone()));
        let count = blocks.len() as u64;
        assert!(content != "noise" || count > 600, "only {count} damages");
        let bytes: Vec<u8> = blocks.iter().flat_map(|(_, bytes)| bytes).copied().collect();
        let pages = on.upload(&bytes);
        let layout = PagedLayout::block_major(&shape);
        let paged = PagedKv::new(&on.stream, shape, layout, pages.span(), count).unwrap();
        let ids: Vec<_> = (0..count).map(super::on::block).collect();
        let (ids_on_device, by_block) = (on.upload(&ids), on.memory(8 * count));
        let args = BlockSums {
            blocks: (&paged).into(),
            ids: ids_on_device.span().into(),
            count,
            host_ids: Some(&ids),
            num_blocks: count,
            sums: by_block.span(),
            report: None,
        };
        on.kernels.sum_blocks(&on.stream, args).unwrap();
        let (lens, by_table) = (on.upload(&[count as u32 * 4]), on.memory(8 * count));
        let args = ChecksumArgs {
            block_table: ids_on_device.span(),
            table_stride: count,
            seq_lens: lens.span(),
            sequences: 1,
            checksums: by_table.span(),
            num_blocks: count,
        };
        on.kernels.paged_checksum(&on.stream, &paged, args).unwrap();
        let [by_block, by_table] = [by_block, by_table]
            .map(|sums| bytemuck::pod_collect_to_vec::<u8, u64>(&on.read(sums.span())));
        let on_host: Vec<u64> = blocks.iter().map(|(_, bytes)| block_sum(bytes)).collect();
        assert!(by_block == on_host, "{content}: the device's sums are not the host's");
        for (way, sums) in [("sum_blocks", by_block), ("paged_checksum", by_table)] {
            let mut found: Vec<(u64, &str)> =
                sums.into_iter().zip(blocks.iter().map(|(name, _)| name.as_str())).collect();
            found.sort_unstable();
            for two in found.windows(2) {
                let [(a, first), (b, second)] = [two[0], two[1]];
                assert_ne!(a, b, "{way} of {content}: {first:?} and {second:?}");
            }
            assert!(found.iter().all(|(sum, _)| *sum != 0), "{way} of {content} is 0");
        }
    }
    on.assert_clean();
}

/// Ids that only the device sees to be out of range.
fn unknown_ids(on: &On, lay: usize) -> Vec<u8> {
    let shape = shape(2, 2, 64, 16);
    let side = Side::new(on, shape, &lays(&shape, BLOCKS).swap_remove(lay), BLOCKS, (false, 0));
    let ids = on.upload(&[0i32, 3, -1, i32::MAX]);
    let sums: DeviceBuffer = on.memory(4 * 8);
    let report = DeviceReport::new(&on.stream).unwrap();
    let args = BlockSums {
        blocks: side.blocks(),
        ids: ids.span().into(),
        count: 4,
        host_ids: None,
        num_blocks: 3,
        sums: sums.span(),
        report: Some(&report),
    };
    on.kernels.sum_blocks(&on.stream, args).unwrap();
    assert_eq!(report.take(&on.stream), Ok(Some(OutOfRange { count: 3, first: 1 })));
    let bytes = on.read(sums.span());
    let sums: Vec<u64> = bytemuck::pod_collect_to_vec(&bytes);
    assert_eq!(sums[1..], [BAD_BLOCK; 3]);
    bytes
}

#[cfg(test)]
mod on_sim {
    use kv_kernels::{
        error::{KernelError, Operand, OperandError, Side as Named},
        references,
        verify::word_share,
    };

    use super::super::on::compare;
    use super::*;

    #[test]
    fn an_id_that_is_passed_over_is_told_of_once() {
        let on = On::sim(references());
        (0..LAYS).for_each(|lay| drop(unknown_ids(&on, lay)));
        on.assert_clean();
    }

    #[test]
    fn no_damage_to_a_block_leaves_its_sums_as_they_are() {
        damage_is_seen(&On::sim(references()));
        damage_is_seen(&On::sim(&[]));
    }

    #[test]
    fn the_ptx_gives_what_the_reference_gives() {
        compare(&On::sim(references()), &On::sim(&[]), outputs);
    }

    #[test]
    fn parts_that_lie_apart_are_read_in_vectors_that_divide_their_places() {
        let on = On::sim(&[]);
        let pieces = RowPart {
            segment_bytes: 16,
            segments: 2,
            segment_stride_bytes: 24,
            token_stride_bytes: 48,
            offset_bytes: 0,
        };
        let behind = RowPart { segments: 1, token_stride_bytes: 32, offset_bytes: 8, ..pieces };
        for part in [pieces, behind] {
            let shape = shape(1, 2, 16 * u64::from(part.segments), 4);
            let of_plane = 4 * part.token_stride_bytes;
            let lay = Lay {
                name: "parts apart",
                layout: in_one_tensor(&shape, of_plane, &[part]),
                bytes: BLOCKS * 2 * of_plane,
                tensor_bytes: BLOCKS * 2 * of_plane,
                at: Box::new(move |p| {
                    let (segment, inside) = (p.byte / 16, p.byte % 16);
                    let row =
                        (2 * p.block + p.plane) * of_plane + p.token * part.token_stride_bytes;
                    row + part.offset_bytes + segment * part.segment_stride_bytes + inside
                }),
            };
            let side = Side::new(&on, shape, &lay, BLOCKS, (false, 0));
            let blocks = dense(&shape, &lay, &noise(lay.bytes));
            let expected = IDS.map(|id| block_sum(&blocks[id as usize]));
            assert_eq!(sums(&on, &side, &IDS.map(BlockId::from)), expected, "{part:?}");
        }
        on.assert_clean();
    }

    #[test]
    fn a_block_in_pieces_is_read_in_order_and_sums_to_the_same() {
        let on = On::sim(references());
        for shape in shapes() {
            for lay in lays(&shape, BLOCKS) {
                if lay.layout.tensors() != Tensors::One {
                    continue;
                }
                let side = Side::new(&on, shape, &lay, BLOCKS, (true, 8));
                let Side::Host(host, buffer) = &side else { unreachable!() };
                let blocks = dense(&shape, &lay, &on.read_pinned(buffer)[8..]);
                let mut read = vec![0; shape.block_bytes() as usize];
                for (block, expected) in (0..).zip(&blocks) {
                    host.read_block(block, &mut read).unwrap();
                    assert!(read == *expected, "block {block}, {}", lay.name);
                }
                let device = sums(&on, &side, &IDS.map(BlockId::from));
                assert_eq!(device, IDS.map(|id| block_sum(&blocks[id as usize])));
                assert!(host.read_block(BLOCKS, &mut read).is_err());
                assert!(host.read_block(0, &mut read[1..]).is_err());
            }
        }
    }

    #[test]
    fn a_sum_shows_every_byte_that_changes_or_moves() {
        assert_eq!(block_sum(&[]), 0);
        let two_words = word_share(1, 0).wrapping_add(word_share(2, 1));
        assert_eq!(block_sum(&[1, 0, 0, 0, 0, 0, 0, 0, 2]), two_words);
        let mut block = noise(64 + 3);
        let sum = block_sum(&block);
        for byte in 0..block.len() {
            for bit in 0..8 {
                block[byte] ^= 1 << bit;
                assert_ne!(block_sum(&block), sum, "bit {bit} of byte {byte}");
                block[byte] ^= 1 << bit;
            }
        }
        for byte in 8..block.len() {
            block.swap(byte, byte - 8);
            assert!(block[byte] == block[byte - 8] || block_sum(&block) != sum);
            block.swap(byte, byte - 8);
        }
    }

    #[test]
    fn wrong_quantities_are_errors_with_their_numbers_and_nothing_is_launched() {
        let on = On::sim(references());
        let shape = shape(2, 2, 64, 4);
        let side = Side::new(&on, shape, &lays(&shape, BLOCKS).swap_remove(0), BLOCKS, (false, 0));
        let scratch = on.memory(64);
        let span = |at, bytes| scratch.span().slice(at, bytes).unwrap();
        let good = BlockSums {
            blocks: side.blocks(),
            ids: span(0, 8).into(),
            count: 2,
            host_ids: Some(&[0, 3].map(BlockId::from)),
            num_blocks: 4,
            sums: span(8, 16),
            report: None,
        };
        let refused = |sums: BlockSums<'_>| on.kernels.sum_blocks(&on.stream, sums).unwrap_err();
        let count = KernelError::BlockCount { count: 2, given: 1 };
        assert_eq!(refused(BlockSums { host_ids: Some(&[BlockId::from(0)]), ..good }), count);
        let range = KernelError::BlockOutOfRange {
            place: 1,
            side: Named::Source,
            block: block(3),
            blocks: 3,
        };
        assert_eq!(refused(BlockSums { num_blocks: 3, ..good }), range);
        let operand = Operand::Checksums;
        let short = OperandError::TooShort { operand, needed_bytes: 16, bytes: 15 };
        assert_eq!(refused(BlockSums { sums: span(8, 15), ..good }), short.into());
        let operand = Operand::BlockIds;
        let short = OperandError::TooShort { operand, needed_bytes: 8, bytes: 4 };
        assert_eq!(refused(BlockSums { ids: span(0, 4).into(), ..good }), short.into());
        let (written, read) = (Operand::Checksums, Operand::BlockIds);
        let overlap =
            OperandError::Overlap { written, read, address: span(0, 1).address(), bytes: 8 };
        assert_eq!(refused(BlockSums { sums: span(0, 16), ..good }), overlap.into());
        on.kernels
            .sum_blocks(&on.stream, BlockSums { count: 0, host_ids: Some(&[]), ..good })
            .unwrap();
        assert_eq!(on.launches(), 0);
    }
}
