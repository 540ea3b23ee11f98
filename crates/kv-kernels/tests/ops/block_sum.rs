//! Sums of blocks: the same in every layout, on the device and on the host.

use cuda_driver::DeviceBuffer;
use kv_kernels::{
    DeviceReport, KvShape,
    error::OutOfRange,
    layout::Tensors,
    verify::{BAD_BLOCK, BlockSums, block_sum},
};

use super::block_copy::Side;
use super::lays::{LAYS, Lay, lays, places, shape};
use super::on::{On, Outputs, noise};

const BLOCKS: u64 = 4;
const IDS: [i32; 5] = [3, 0, 0, 2, 1];

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

fn sums(on: &On, side: &Side, ids: &[i32]) -> Vec<u64> {
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
                let got = sums(on, &side, &IDS);
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
        error::{BlocksError, Operand, OperandError, Side as Named},
        references,
        verify::weight,
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
    fn the_ptx_gives_what_the_reference_gives() {
        compare(&On::sim(references()), &On::sim(&[]), outputs);
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
                let device = sums(&on, &side, &IDS);
                assert_eq!(device, IDS.map(|id| block_sum(&blocks[id as usize])));
                assert!(host.read_block(BLOCKS, &mut read).is_err());
                assert!(host.read_block(0, &mut read[1..]).is_err());
            }
        }
    }

    #[test]
    fn a_sum_shows_every_byte_that_changes_or_moves() {
        assert_eq!(block_sum(&[]), 0);
        assert_eq!(block_sum(&[1, 0, 0, 0, 0, 0, 0, 0, 2]), weight(0).wrapping_add(2 * weight(1)));
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
            host_ids: Some(&[0, 3]),
            num_blocks: 4,
            sums: span(8, 16),
            report: None,
        };
        let refused = |sums: BlockSums<'_>| on.kernels.sum_blocks(&on.stream, sums).unwrap_err();
        let count = BlocksError::Count { count: 2, given: 1 };
        assert_eq!(refused(BlockSums { host_ids: Some(&[0]), ..good }), count);
        let range =
            BlocksError::BlockOutOfRange { place: 1, side: Named::Source, block: 3, blocks: 3 };
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
