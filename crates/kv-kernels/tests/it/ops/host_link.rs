//! A link's transfers give what the kernels alone give: every format and width, by every transport, as
//! operations of a stream, layer by layer, in a sequence, and with the host's end in an order of its own.

use std::sync::Arc;

use cuda_driver::{DeviceBuffer, DeviceSpan, HostAllocFlags, PinnedBuffer, Stream};
use kv_kernels::{
    BlockCopy, BlockPair, BlockPairs, Blocks, Direction, HostBlocks, KvKernels, KvShape,
    KvShapeOptions, PagedKv, PagedLayout, Slot,
    link::{HostLink, HostLinkOptions, HostReady, HostTransfer, LayerEvents, Transport},
};

use super::chunk_cases::{BLOCKS, Case, ChunkCase, Mapping, cases};
use super::on::{On, Outputs, noise, pair};

/// How a case's chunks are asked for.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// One call for each.
    Alone,
    /// One call for each, with events for layers.
    Layered,
    /// One call.
    Sequence,
    /// One call that starts them.
    Started,
}

const WAYS: [Way; 4] = [Way::Alone, Way::Layered, Way::Sequence, Way::Started];

/// A link over a ring so small that every case goes through it in several pieces.
pub(crate) fn link(on: &On, transport: Transport, ring_buffer_bytes: u64) -> HostLink {
    let kernels = Arc::new(KvKernels::load(&on.device).unwrap());
    let options =
        HostLinkOptions { ring_buffers: 3, ring_buffer_bytes, ..HostLinkOptions::default() };
    let link = HostLink::new(kernels, options).unwrap();
    let profile = link.profile().clone().forced(transport);
    link.with_profile(profile)
}

/// Runs every case with slots on `on`, and by the kernels alone on `reference`.
pub(crate) fn check_chunks(on: &On, reference: &On) {
    let mut links = Transport::ALL.map(|transport| link(on, transport, 8 << 10));
    let mut seen = 0;
    for mut case in cases() {
        let by_slots = |chunk: &ChunkCase| matches!(chunk.mapping, Mapping::Slots(_));
        if !case.chunks.iter().all(by_slots) {
            continue;
        }
        case.layers = 0..case.shape.layers();
        let expected = case.run(reference);
        for link in &mut links {
            for way in WAYS {
                let found = by_link(on, link, &case, way);
                let forced = link.profile().forced;
                for ((what, expected), (_, found)) in expected.iter().zip(&found) {
                    assert!(expected == found, "{forced:?}, {way:?}: {what}");
                }
                assert_eq!(expected.len(), found.len());
                seen += 1;
            }
        }
    }
    assert!(seen > 800, "only {seen} transfers");
    on.assert_clean();
}

fn by_link(on: &On, link: &mut HostLink, case: &Case, way: Way) -> Outputs {
    let tensors = case.tensors(on);
    let paged = case.paged(on, &tensors);
    let hosts: Vec<PinnedBuffer> =
        case.chunks.iter().map(|chunk| on.pin(&case.chunk_before(chunk))).collect();
    let mappings: Vec<DeviceBuffer> =
        case.chunks.iter().map(|chunk| on.upload(&padded(slots(chunk)))).collect();
    let events = LayerEvents::new(&on.device, case.shape.layers()).unwrap();
    let transfers: Vec<HostTransfer<'_>> = case
        .chunks
        .iter()
        .zip(hosts.iter().zip(&mappings))
        .map(|(chunk, (host, mapping))| HostTransfer {
            paged: &paged,
            host,
            host_offset: case.margin(),
            slot_mapping: mapping.span(),
            host_slots: slots(chunk),
            tokens: chunk.tokens,
            skip_prefix_n_tokens: chunk.skip,
            direction: case.direction,
            num_blocks: BLOCKS,
            layer_events: matches!(way, Way::Layered).then_some(&events),
        })
        .collect();
    match way {
        Way::Alone | Way::Layered => {
            for transfer in &transfers {
                link.transfer_chunk(&on.stream, *transfer).unwrap();
            }
        }
        Way::Sequence => {
            link.transfer_chunks(&on.stream, &transfers).unwrap();
        }
        Way::Started => {
            let arrival = link.start_chunks(&on.stream, HostReady::Now, &transfers).unwrap();
            arrival.fence().wait().unwrap();
        }
    }
    let mut outputs: Outputs = Vec::new();
    for (index, tensor) in tensors.iter().enumerate() {
        outputs.push((format!("tensor {index}: {}", case.name), on.read(tensor.span())));
    }
    for (index, host) in hosts.iter().enumerate() {
        outputs.push((format!("chunk {index}: {}", case.name), on.read_pinned(host)));
    }
    outputs
}

fn slots(chunk: &ChunkCase) -> &[Slot] {
    match &chunk.mapping {
        Mapping::Slots(slots) => slots,
        Mapping::Blocks(_) => panic!("cases are chosen by their slots"),
    }
}

/// A mapping that is never empty.
fn padded(slots: &[Slot]) -> Vec<Slot> {
    slots.iter().copied().chain([Slot::NONE]).collect()
}

/// Blocks in pages and on the host.
struct Tier {
    paged: PagedKv,
    pages: DeviceBuffer,
    host: HostBlocks,
    block_bytes: usize,
}

const TIER: u64 = 40;

impl Tier {
    fn new(on: &On, row_bytes: u64) -> Self {
        let options = KvShapeOptions { layers: 2, kv_count: 2, row_bytes, block_tokens: 4 };
        let shape = KvShape::new(options).unwrap();
        let layout = PagedLayout::block_major(&shape);
        let bytes = TIER * shape.block_bytes();
        let pages = on.upload(&noise(bytes));
        let paged = PagedKv::new(&on.stream, shape, layout, pages.span(), TIER).unwrap();
        let host = Arc::new(on.pin(&noise(bytes + 16)));
        let host = HostBlocks::new(&on.stream, shape, layout, (host, 16), TIER).unwrap();
        Self { paged, pages, host, block_bytes: shape.block_bytes() as usize }
    }
}

/// Copies blocks both ways by every transport; what must come out is told by the pairs alone.
pub(crate) fn check_blocks(on: &On) {
    let scattered: Vec<_> = (0..36).map(|i| (i * 7 % 40, i * 9 % 40)).collect();
    let run: Vec<_> = (0..33).map(|i| (i * 7 % 40, i + 5)).collect();
    let run_of_sources: Vec<_> = (0..33).map(|i| (i + 5, i * 7 % 40)).collect();
    for transport in Transport::ALL {
        for row_bytes in [132, 2048, 6] {
            let mut link = link(on, transport, 100_000);
            for list in [&scattered, &run, &run_of_sources] {
                for to_host in [true, false] {
                    for is_started in [false, true] {
                        let tier = Tier::new(on, row_bytes);
                        let used = copy(on, &mut link, &tier, (list, to_host, is_started));
                        assert_eq!(used, transport);
                    }
                }
            }
        }
    }
    on.assert_clean();
}

fn copy(
    on: &On,
    link: &mut HostLink,
    tier: &Tier,
    (list, to_host, is_started): (&[(i32, i32)], bool, bool),
) -> Transport {
    let pairs: Vec<BlockPair> =
        list.iter().map(|&(source, destination)| pair(source, destination)).collect();
    let table = on.upload(&pairs);
    let mut pages = on.read(tier.pages.span());
    let mut host = on.read_pinned(tier.host.buffer());
    let size = tier.block_bytes;
    for pair in &pairs {
        let (from, to) = (pair.source.index() * size, pair.destination.index() * size);
        if to_host {
            host[16 + to..][..size].copy_from_slice(&pages[from..][..size]);
        } else {
            pages[to..][..size].copy_from_slice(&host[16 + from..][..size]);
        }
    }
    let (device, tier_host) = (Blocks::Device(&tier.paged), Blocks::Host(&tier.host));
    let (from, to) = if to_host { (device, tier_host) } else { (tier_host, device) };
    let copy = BlockCopy {
        from,
        to,
        pairs: table.span().into(),
        count: pairs.len() as u64,
        host_pairs: Some(BlockPairs::new(&pairs).unwrap()),
        from_blocks: TIER,
        to_blocks: TIER,
        report: None,
        multiprocessors: None,
    };
    let used = if is_started {
        let arrival = link.start_blocks(&on.stream, HostReady::Now, copy).unwrap();
        arrival.fence().wait().unwrap();
        arrival.transport()
    } else {
        link.copy_blocks(&on.stream, copy).unwrap()
    };
    assert!(on.read(tier.pages.span()) == pages, "pages {used} {list:?}");
    assert!(on.read_pinned(tier.host.buffer()) == host, "host {used} {list:?}");
    used
}

/// Transfers to the host whose pages are overwritten at once behind them, and transfers to the pages
/// that are fetched while the stream still works, one after the other and both ways at once.
pub(crate) fn check_order(on: &On, (tokens, rounds): (u64, u64)) {
    let options = KvShapeOptions { layers: 4, kv_count: 2, row_bytes: 1024, block_tokens: 16 };
    let shape = KvShape::new(options).unwrap();
    let layout = PagedLayout::block_major(&shape);
    let blocks = tokens.div_ceil(16);
    let bytes = tokens * shape.token_bytes();
    let slots: Vec<_> = (0..tokens as u32).rev().map(Slot::from).collect();
    let mapping = on.upload(&slots);
    let pinned = || PinnedBuffer::alloc(&on.device, bytes, HostAllocFlags::CACHED).unwrap();
    for transport in Transport::ALL {
        let mut link = link(on, transport, bytes / 5);
        let streams = [on.stream.clone(), Stream::new(&on.device).unwrap()];
        // Down on one stream, up on the other.
        let pages = [0, 1].map(|_| on.memory(blocks * shape.block_bytes()));
        let paged: Vec<PagedKv> = pages
            .iter()
            .map(|pages| PagedKv::new(&on.stream, shape, layout, pages.span(), blocks).unwrap())
            .collect();
        let contents: Vec<DeviceBuffer> =
            (0..rounds).map(|r| on.upload(&noise(pages[0].bytes() + r)[r as usize..])).collect();
        let (down, mut up) = (pinned(), pinned());
        for (round, content) in contents.iter().enumerate() {
            let transfer = |which: usize, host| HostTransfer {
                paged: &paged[which],
                host,
                host_offset: 0,
                slot_mapping: mapping.span(),
                host_slots: &slots,
                tokens,
                skip_prefix_n_tokens: 0,
                direction: [Direction::PagedToChunk, Direction::ChunkToPaged][which],
                num_blocks: blocks,
                layer_events: None,
            };
            let right = chunk_of(on, &shape, content.span(), &slots);
            up.write_at(0, &right).unwrap();
            // The stream is busy, then has the pages right, and wipes them behind the transfer.
            streams[0].fill(pages[0].span(), 0xAA).unwrap();
            streams[0].copy_on_device(pages[0].span(), content.span()).unwrap();
            let to_host =
                link.start_chunks(&streams[0], HostReady::Now, &[transfer(0, &down)]).unwrap();
            streams[0].fill(pages[0].span(), 0xBB).unwrap();
            streams[1].fill(pages[1].span(), 0xCC).unwrap();
            let to_pages =
                link.start_chunks(&streams[1], HostReady::Now, &[transfer(1, &up)]).unwrap();
            to_host.fence().wait().unwrap();
            let mut arrived = vec![0; bytes as usize];
            down.read_at(0, &mut arrived).unwrap();
            assert!(arrived == right, "{transport}: round {round} to the host");
            to_pages.fence().hold_back(&streams[0]).unwrap();
            assert!(
                on.read(pages[1].span()) == on.read(content.span()),
                "{transport}: round {round} to the pages"
            );
        }
    }
    on.assert_clean();
}

/// The chunk of pages that lie block by block.
fn chunk_of(on: &On, shape: &KvShape, pages: DeviceSpan, slots: &[Slot]) -> Vec<u8> {
    let pages = on.read(pages);
    let layout = PagedLayout::block_major(shape);
    let (row, tokens) = (shape.row_bytes(), u64::from(shape.block_tokens()));
    let mut chunk = Vec::new();
    for plane in 0..shape.planes() {
        let (kv, layer) = (plane / u64::from(shape.layers()), plane % u64::from(shape.layers()));
        let plane = kv * layout.kv_stride_bytes() + layer * layout.layer_stride_bytes();
        for slot in slots.iter().filter_map(|slot| slot.place()) {
            let (block, token) = (slot / tokens, slot % tokens);
            let at = plane + block * layout.block_stride_bytes() + token * row;
            chunk.extend_from_slice(&pages[at as usize..(at + row) as usize]);
        }
    }
    chunk
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_kernels::references;

    #[test]
    fn links_give_what_kernels_give() {
        let (on, reference) = (On::sim(references()), On::sim(references()));
        check_chunks(&on, &reference);
        check_blocks(&on);
        check_order(&on, (80, 3));
    }
}
