//! A link's copies give the bytes that the pairs foretell, by every transport.

use std::sync::Arc;

use cuda_driver::DeviceBuffer;
use kv_kernels::{
    BlockCopy, BlockPair, BlockPairs, Blocks, HostBlocks, KvKernels, KvShape, KvShapeOptions,
    PagedKv, PagedLayout,
    link::{HostLink, HostLinkOptions, Transport, TransportProfile},
};

use super::on::{On, noise, pair};

/// A link over a ring so small that every case goes through it in several pieces.
pub(crate) fn link(on: &On, transport: Transport, ring_buffer_bytes: u64) -> HostLink {
    let kernels = Arc::new(KvKernels::load(&on.device).unwrap());
    let options =
        HostLinkOptions { ring_buffers: 3, ring_buffer_bytes, ..HostLinkOptions::default() };
    let link = HostLink::new(kernels, options).unwrap();
    let profile = TransportProfile { forced: Some(transport), ..link.profile().clone() };
    link.with_profile(profile)
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
                    let tier = Tier::new(on, row_bytes);
                    let used = copy(on, &mut link, &tier, (list, to_host));
                    assert_eq!(used, transport);
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
    (list, to_host): (&[(i32, i32)], bool),
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
    let used = link.copy_blocks(&on.stream, copy).unwrap();
    assert!(on.read(tier.pages.span()) == pages, "pages {used} {list:?}");
    assert!(on.read_pinned(tier.host.buffer()) == host, "host {used} {list:?}");
    used
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_kernels::references;

    #[test]
    fn blocks_copied_by_links_are_those_of_the_pairs() {
        check_blocks(&On::sim(references()));
    }
}
