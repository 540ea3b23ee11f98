//! Every way of a transfer of blocks, and that of chunks, over blocks that begin further apart than they are
//! long: each byte of both memories is where plain arithmetic on the host puts it, and every gap is left alone.

use cuda_driver::DeviceBuffer;
use kv_kernels::{
    BlockCopy, BlockId, BlockPair, BlockPairs, Direction, KvShape, PagedKv, PagedLayout, Slot,
    Transfer,
    layout::{LayoutOptions, Tensors},
    link::Transport,
};

use super::block_copy::Side;
use super::host_link::link;
use super::lays::{Lay, Place, lays_of_heads, places, shape, whole_rows};
use super::on::{On, noise, pair};

const BLOCKS: u64 = 20;
/// Bytes before what is transferred in pinned memory.
const MARGIN: u64 = 16;

/// Who makes a transfer.
#[derive(Clone, Copy, Debug)]
enum Way {
    Kernel,
    Link(Transport),
}

fn ways() -> impl Iterator<Item = Way> {
    std::iter::once(Way::Kernel).chain(Transport::ALL.map(Way::Link))
}

/// Shapes of one plane, of K and V, of two layers, and of both.
fn shapes() -> impl Iterator<Item = KvShape> + Clone {
    let planes = [(1, 1), (1, 2), (2, 1), (2, 2)];
    let rows = [(24, 4), (132, 3), (6, 5), (1024, 2)];
    planes.into_iter().flat_map(move |(layers, kv_count)| {
        rows.map(|(row_bytes, block_tokens)| shape(layers, kv_count, row_bytes, block_tokens))
    })
}

/// Whole rows in layouts whose blocks lie one behind the other, or have room behind them.
fn strided(shape: &KvShape) -> Vec<Lay> {
    let of_plane = shape.block_plane_bytes();
    let mut lays = lays_of_heads(shape, BLOCKS, 1);
    lays.retain(|lay| lay.layout.has_whole_rows() && lay.name != "heads-first");
    for padding in [2, 16, 256] {
        // `[block][plane]`, and then padding.
        let stride = shape.block_bytes() + padding;
        lays.push(spread(shape, Tensors::One, (of_plane, stride), BLOCKS * stride));
        // `[plane][block]`, and padding behind each block.
        let stride = of_plane + padding;
        let bytes = BLOCKS * stride * shape.planes();
        lays.push(spread(shape, Tensors::One, (BLOCKS * stride, stride), bytes));
        lays.push(spread(shape, Tensors::PerPlane, (BLOCKS * stride, stride), bytes));
    }
    // A stride that is a whole number of blocks, as of a tensor of which another group has every second one.
    let stride = 2 * shape.block_bytes();
    lays.push(spread(shape, Tensors::One, (of_plane, stride), BLOCKS * stride));
    lays
}

fn spread(shape: &KvShape, tensors: Tensors, (plane, block): (u64, u64), bytes: u64) -> Lay {
    let row = shape.row_bytes();
    let is_one = tensors == Tensors::One;
    let options = LayoutOptions {
        tensors,
        layer_stride_bytes: if is_one { plane * u64::from(shape.kv_count()) } else { 0 },
        kv_stride_bytes: if is_one { plane } else { 0 },
        block_stride_bytes: block,
        parts: &[whole_rows(shape)],
    };
    Lay {
        name: "room behind blocks",
        layout: PagedLayout::new(shape, options).unwrap(),
        bytes,
        tensor_bytes: if is_one { bytes } else { bytes / shape.planes() },
        at: Box::new(move |p: Place| p.plane * plane + p.block * block + p.token * row + p.byte),
    }
}

/// Pages, with the arithmetic of their bytes.
struct Pages<'a> {
    side: Side,
    shape: KvShape,
    lay: &'a Lay,
}

impl<'a> Pages<'a> {
    fn new(on: &On, shape: KvShape, lay: &'a Lay) -> Self {
        Self { side: Side::new(on, shape, lay, BLOCKS, (false, 0)), shape, lay }
    }

    fn paged(&self) -> &PagedKv {
        match &self.side {
            Side::Device(paged, _) => paged,
            Side::Host(..) => panic!("pages lie on the device"),
        }
    }
}

/// Runs every way over every layout, of blocks by their ids, and of chunks by their slots.
pub(crate) fn check(on: &On) {
    let seen = check_shapes(on, shapes());
    assert!(seen > 1100, "only {seen} transfers");
}

fn check_shapes(on: &On, shapes: impl Iterator<Item = KvShape> + Clone) -> u64 {
    let mut seen = 0;
    for way in ways() {
        let mut forced = match way {
            Way::Kernel => None,
            Way::Link(by) => Some(link(on, by, 10_000)),
        };
        for shape in shapes.clone() {
            for lay in strided(&shape) {
                let pages = Pages::new(on, shape, &lay);
                for to_host in [true, false] {
                    let what = format!("{way:?}, to host {to_host}, {shape:?}, {:?}", lay.layout);
                    blocks(on, (way, forced.as_mut()), &pages, to_host, &what);
                    if forced.is_none() {
                        chunk(on, &pages, to_host, &what);
                    }
                    seen += 1;
                }
            }
        }
    }
    on.assert_clean();
    seen
}

/// How a way is gone: with the link whose transport it names.
type Made<'a> = (Way, Option<&'a mut kv_kernels::link::HostLink>);

fn blocks(on: &On, (way, link): Made<'_>, pages: &Pages<'_>, to_host: bool, what: &str) {
    let shape = &pages.shape;
    let (row, of_plane, of_block) =
        (shape.row_bytes(), shape.block_plane_bytes(), shape.block_bytes());
    // Scattered ids, and a run on the host that begins with its second block.
    let list: Vec<BlockPair> = (0..11)
        .map(|i| {
            let (in_pages, on_host) = ((i * 7 + 3) % 20, if i < 4 { 2 * i } else { i + 5 });
            match to_host {
                true => pair(in_pages, on_host),
                false => pair(on_host, in_pages),
            }
        })
        .collect();
    let packed = Lay {
        name: "packed",
        layout: PagedLayout::block_major(shape),
        bytes: BLOCKS * of_block,
        tensor_bytes: BLOCKS * of_block,
        at: Box::new(move |p: Place| {
            p.block * of_block + p.plane * of_plane + p.token * row + p.byte
        }),
    };
    let host = Side::new(on, *shape, &packed, BLOCKS, (true, MARGIN));
    let (mut pages_after, mut host_after) = (pages.side.read(on), host.read(on));
    for pair in &list {
        let (in_pages, on_host) = match to_host {
            true => (pair.source, pair.destination),
            false => (pair.destination, pair.source),
        };
        for place in places(shape, 0, 0..row) {
            let page = &mut pages_after[(pages.lay.at)(at_block(place, in_pages)) as usize];
            let kept = &mut host_after[(MARGIN + (packed.at)(at_block(place, on_host))) as usize];
            if to_host { *kept = *page } else { *page = *kept }
        }
    }
    let table = on.upload(&list);
    let (from, to) = match to_host {
        true => (pages.side.blocks(), host.blocks()),
        false => (host.blocks(), pages.side.blocks()),
    };
    let copy = BlockCopy {
        from,
        to,
        pairs: table.span().into(),
        count: list.len() as u64,
        host_pairs: Some(BlockPairs::new(&list).unwrap()),
        from_blocks: BLOCKS,
        to_blocks: BLOCKS,
        report: None,
        multiprocessors: None,
    };
    let used = match (way, link) {
        (Way::Link(_), Some(link)) => Some(link.copy_blocks(&on.stream, copy).unwrap()),
        _ => {
            on.kernels.copy_blocks(&on.stream, copy).unwrap();
            None
        }
    };
    if let (Some(used), Way::Link(by)) = (used, way)
        && pages.lay.name != "gaps"
    {
        assert_eq!(used, by, "{what}");
    }
    assert!(pages.side.read(on) == pages_after, "pages: {what}");
    assert!(host.read(on) == host_after, "host blocks: {what}");
}

fn at_block(place: Place, block: BlockId) -> Place {
    Place { block: block.index() as u64, ..place }
}

fn chunk(on: &On, pages: &Pages<'_>, to_host: bool, what: &str) {
    let shape = &pages.shape;
    let (row, tokens_of_block) = (shape.row_bytes(), u64::from(shape.block_tokens()));
    // Whole blocks out of order, half a block, and a token that is left out.
    let scattered = (0..6).flat_map(|i| (0..tokens_of_block).map(move |t| (i * 7 % 20, t)));
    let slots: Vec<_> = scattered
        .map(|(block, token)| Slot::from((block * tokens_of_block + token) as u32))
        .chain([Slot::NONE, Slot::from((19 * tokens_of_block) as u32)])
        .collect();
    let tokens = slots.len() as u64;
    let bytes = noise(MARGIN + tokens * shape.token_bytes());
    let (mut pages_after, mut chunk_after) = (pages.side.read(on), bytes.clone());
    let kv_count = u64::from(shape.kv_count());
    let places = (0..).zip(&slots).filter_map(|(n, slot)| Some((n, slot.place()?)));
    for (n, slot) in places {
        for plane in 0..shape.planes() {
            let (layer, kv) = (plane / kv_count, plane % kv_count);
            let of_chunk = (kv * u64::from(shape.layers()) + layer) * tokens + n;
            let (block, token) = (slot / tokens_of_block, slot % tokens_of_block);
            for byte in 0..row {
                let at = (pages.lay.at)(Place { plane, block, token, byte });
                let page = &mut pages_after[at as usize];
                let kept = &mut chunk_after[(MARGIN + of_chunk * row + byte) as usize];
                if to_host { *kept = *page } else { *page = *kept }
            }
        }
    }
    let direction = if to_host { Direction::PagedToChunk } else { Direction::ChunkToPaged };
    let mapping: DeviceBuffer = on.upload(&slots);
    let chunk = on.upload(&bytes);
    let transfer = Transfer {
        chunk: chunk.span().slice(MARGIN, chunk.bytes() - MARGIN).unwrap(),
        slot_mapping: mapping.span(),
        host_slots: &slots,
        tokens,
        skip_prefix_n_tokens: 0,
        direction,
        num_blocks: BLOCKS,
    };
    on.kernels.multi_layer_transfer(&on.stream, pages.paged(), transfer).unwrap();
    assert!(pages.side.read(on) == pages_after, "pages of a chunk: {what}");
    assert!(on.read(chunk.span()) == chunk_after, "chunk: {what}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_kernels::references;

    #[test]
    fn every_way_keeps_to_the_strides_of_blocks() {
        check(&On::sim(references()));
    }

    #[test]
    fn the_kernels_of_every_way_keep_to_the_strides_of_blocks() {
        let on = On::sim(&[]);
        assert!(check_shapes(&on, shapes().take(1)) > 60);
    }
}
