//! Offsets beyond 32 bits: 16 GiB of reserved addresses of which the last page alone is mapped, so that
//! an offset cut to 32 bits, signed or not, meets a hole.

use cuda_driver::{AccessDesc, AddressRange, PhysicalMemory};
use kv_kernels::{
    Append, BlockCopy, BlockPairs, KvShape, PagedKv, PagedLayout,
    verify::{BlockSums, block_sum},
};

use super::block_copy::Side;
use super::lays::{lays, shape};
use super::on::{On, Outputs, block, noise, pair};

const BYTES: u64 = 16 << 30;
const TOKENS: u32 = 16;
const ROW: u64 = 2048;

/// Blocks over the whole range; the last ones are there.
fn far(on: &On, range: &AddressRange, shape: KvShape) -> PagedKv {
    let span = range.span(0, BYTES).unwrap();
    let blocks = BYTES / shape.block_bytes();
    let layout = PagedLayout::block_major(&shape);
    PagedKv::new(&on.stream, shape, layout, span, blocks).unwrap()
}

pub(crate) fn outputs(on: &On) -> Outputs {
    let range = AddressRange::reserve(&on.device, BYTES).unwrap();
    let page = PhysicalMemory::granularity(&on.device).unwrap();
    let memory = PhysicalMemory::create(&on.device, page).unwrap();
    range.map(BYTES - page, &memory).unwrap();
    let access = AccessDesc { device: on.device.ordinal() };
    range.set_access(BYTES - page, page, &[access]).unwrap();
    on.stream.fill(range.span(BYTES - page, page).unwrap(), 0).unwrap();

    let wide = shape(1, 1, ROW, TOKENS);
    let pages = far(on, &range, wide);
    let last = (pages.blocks() - 1) as i32;
    let near = Side::new(on, wide, &lays(&wide, 2).swap_remove(0), 2, (false, 0));

    // Tokens to the last block, and a block to the last but one and back.
    let rows = on.upload(&noise(wide.block_bytes()));
    let slots: Vec<_> = (0..TOKENS).rev().map(|t| block(last).slot(TOKENS, t)).collect();
    let device_slots = on.upload(&slots);
    let append = Append {
        keys: rows.span().into(),
        values: None,
        layer_stride_bytes: 0,
        token_stride_bytes: ROW,
        first_layer: 0,
        layers: 1,
        slot_mapping: device_slots.span().into(),
        host_slots: Some(&slots),
        tokens: TOKENS.into(),
        num_blocks: pages.blocks(),
        report: None,
    };
    on.kernels.append(&on.stream, &pages, append).unwrap();
    for (from, to, source, destination) in [
        (near.blocks(), (&pages).into(), 0, last - 1),
        ((&pages).into(), near.blocks(), last - 1, 1),
        ((&pages).into(), (&pages).into(), last, last - 1),
        ((&pages).into(), near.blocks(), last - 1, 0),
    ] {
        let pairs = [pair(source, destination)];
        let device_pairs = on.upload(&pairs);
        let copy = BlockCopy {
            from,
            to,
            pairs: device_pairs.span().into(),
            count: 1,
            host_pairs: Some(BlockPairs::new(&pairs).unwrap()),
            from_blocks: from.count(),
            to_blocks: to.count(),
            report: None,
            multiprocessors: None,
        };
        on.kernels.copy_blocks(&on.stream, copy).unwrap();
    }
    let mut outputs =
        vec![("copied".to_owned(), near.read(on)), ("sum".to_owned(), sum(on, &pages))];
    let tail = range.span(BYTES - page, page).unwrap();
    outputs.push(("the mapped page".to_owned(), on.read(tail)));
    // The handles of the pages only named the addresses; the range frees them when nothing is mapped.
    range.unmap(BYTES - page, page).unwrap();
    outputs
}

/// The sum of the last block, which is that of its bytes.
fn sum(on: &On, pages: &PagedKv) -> Vec<u8> {
    let last = pages.blocks() - 1;
    let (ids, sums) = (on.upload(&[block(last)]), on.memory(8));
    let args = BlockSums {
        blocks: pages.into(),
        ids: ids.span().into(),
        count: 1,
        host_ids: Some(&[block(last)]),
        num_blocks: pages.blocks(),
        sums: sums.span(),
        report: None,
    };
    on.kernels.sum_blocks(&on.stream, args).unwrap();
    let sum = on.read(sums.span());
    assert_eq!(sum, block_sum(&on.read(pages.block_span(last).unwrap().unwrap())).to_le_bytes());
    sum
}

#[cfg(test)]
mod on_sim {
    use kv_kernels::references;

    use kv_kernels::layout::{LayoutOptions, RowPart, Tensors};
    use kv_kernels::{
        DeviceReport,
        error::{KernelError, OutOfRange},
    };

    use super::super::on::compare;
    use super::*;

    /// Blocks of 2^30 vectors, of which a launch counts one. None of the pairs names any, so that no
    /// byte is copied.
    #[test]
    fn more_vectors_than_a_launch_counts_take_several() {
        let on = On::sim(references());
        let block = shape(1, 1, 1 << 30, 16);
        let range = AddressRange::reserve(&on.device, 4 * block.block_bytes()).unwrap();
        let layout = PagedLayout::block_major(&block);
        let pages = [0, 2].map(|first: u64| {
            let bytes = block.block_bytes();
            let span = range.span(first * bytes, 2 * bytes).unwrap();
            PagedKv::new(&on.stream, block, layout, span, 2).unwrap()
        });
        let pairs = on.upload(&[[-1, 0]; 5]);
        let report = DeviceReport::new(&on.stream).unwrap();
        let copy = BlockCopy {
            from: (&pages[0]).into(),
            to: (&pages[1]).into(),
            pairs: pairs.span().into(),
            count: 5,
            host_pairs: None,
            from_blocks: 2,
            to_blocks: 2,
            report: Some(&report),
            multiprocessors: None,
        };
        let before = on.launches();
        on.kernels.copy_blocks(&on.stream, copy).unwrap();
        assert_eq!(on.launches() - before, 5);
        assert_eq!(report.take(&on.stream), Ok(Some(OutOfRange { count: 5, first: 0 })));

        // A block of more vectors than a launch counts is refused.
        let block = shape(1, 1, (1 << 27) + 1, 17);
        let layout = PagedLayout::block_major(&block);
        let pages = [0, 1].map(|first: u64| {
            let span = range.span(first * block.block_bytes(), block.block_bytes()).unwrap();
            PagedKv::new(&on.stream, block, layout, span, 1).unwrap()
        });
        let copy = BlockCopy {
            from: (&pages[0]).into(),
            to: (&pages[1]).into(),
            from_blocks: 1,
            to_blocks: 1,
            ..copy
        };
        let too_many =
            KernelError::TooMany { what: "vectors of a unit", count: block.block_bytes() };
        assert_eq!(on.kernels.copy_blocks(&on.stream, copy), Err(too_many));
    }

    /// A block of 48 GiB in two parts, each of which a launch could count.
    #[test]
    fn a_sum_of_more_vectors_than_the_kernel_numbers_is_refused() {
        let on = On::sim(references());
        let part_bytes = 3 << 29;
        let block = shape(1, 1, 2 * part_bytes, 16);
        let part = |number: u64| RowPart {
            segment_bytes: part_bytes,
            segments: 1,
            segment_stride_bytes: part_bytes,
            token_stride_bytes: part_bytes,
            offset_bytes: number * 16 * part_bytes,
        };
        let options = LayoutOptions {
            tensors: Tensors::One,
            layer_stride_bytes: block.block_bytes(),
            kv_stride_bytes: block.block_bytes(),
            block_stride_bytes: block.block_bytes(),
            parts: &[part(0), part(1)],
        };
        let layout = PagedLayout::new(&block, options).unwrap();
        let range = AddressRange::reserve(&on.device, block.block_bytes()).unwrap();
        let span = range.span(0, block.block_bytes()).unwrap();
        let pages = PagedKv::new(&on.stream, block, layout, span, 1).unwrap();
        let (ids, sums) = (on.upload(&[0i32]), on.memory(8));
        let args = BlockSums {
            blocks: (&pages).into(),
            ids: ids.span().into(),
            count: 1,
            host_ids: None,
            num_blocks: 1,
            sums: sums.span(),
            report: None,
        };
        let before = on.launches();
        let too_many = KernelError::TooMany { what: "vectors of a block", count: 3 << 30 };
        assert_eq!(on.kernels.sum_blocks(&on.stream, args), Err(too_many));
        assert_eq!(on.launches(), before);
    }

    #[test]
    fn the_ptx_gives_what_the_reference_gives_where_offsets_take_more_than_32_bits() {
        compare(&On::sim(references()), &On::sim(&[]), outputs);
    }
}
