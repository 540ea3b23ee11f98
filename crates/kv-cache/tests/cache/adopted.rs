//! A cache in tensors that the engine allocated, in formats of several engines.

use cuda_driver::{DeviceBuffer, Stream};
use kv_cache::{KvCache, KvCacheOptions, TransportChoice};
use kv_kernels::{KvFormat, PagedKv, layout::FormatOptions};

use crate::common::engine::{Engine, Live, Prompt, by, options};
use crate::machine::{Machine, small};

const BLOCKS: u64 = 12;

/// The numbers of an engine's tensors: 3 layers, 2 heads of 16 elements of 2 bytes, 8 tokens a block.
const NUMBERS: FormatOptions = FormatOptions {
    layers: 3,
    heads: 2,
    head_bytes: 32,
    element_bytes: 2,
    block_tokens: 8,
    blocks: BLOCKS,
    block_padding_bytes: 0,
};

/// Formats with rows in one piece, which the checksum kernel reads.
const FORMATS: [KvFormat; 5] = [
    KvFormat::CrossLayerNhd,
    KvFormat::FlashAttentionNhd,
    KvFormat::FlashInferNhd,
    KvFormat::KvListsPagedNhd,
    KvFormat::LayerPairsNhd,
];

/// The tensors of an engine, and their description.
fn tensors(stream: &Stream, format: KvFormat) -> (Vec<DeviceBuffer>, PagedKv) {
    let (shape, layout) = (format.shape(&NUMBERS).unwrap(), format.layout(&NUMBERS).unwrap());
    let bytes = layout.extent_bytes(&shape, BLOCKS).unwrap();
    let tensor = |_| DeviceBuffer::alloc(stream.device(), bytes).unwrap();
    let tensors: Vec<_> = (0..layout.tensors().count(&shape)).map(tensor).collect();
    let spans: Vec<_> = tensors.iter().map(DeviceBuffer::span).collect();
    let paged = PagedKv::over(stream, shape, layout, &spans, BLOCKS).unwrap();
    (tensors, paged)
}

/// What an engine does with a cache: shares, evicts, brings back, forks, suspends and resumes.
fn live_on(engine: &mut Engine) {
    let bt = engine.block_tokens();
    let system = Prompt::new(1, 3 * bt);
    let mut first = engine.admit(&system.then(2, 3)).unwrap();
    engine.run(&mut [&mut first]).unwrap();
    // Its last block is shared, and then copied.
    let mut twin = engine.fork(&mut first).unwrap();
    engine.extend(&mut first, 5, 2).unwrap();
    engine.extend(&mut twin, 6, 2).unwrap();
    engine.run(&mut [&mut first, &mut twin]).unwrap();
    engine.drain().unwrap();
    drop(twin);
    engine.suspend(&mut first).unwrap();
    // Others take all blocks meanwhile.
    for seed in [7, 8] {
        let mut other = engine.admit(&Prompt::new(seed, (BLOCKS - 1) * bt)).unwrap();
        engine.run(&mut [&mut other]).unwrap();
        drop(other);
        engine.drain().unwrap();
    }
    engine.resume(&mut first).unwrap();
    engine.run(&mut [&mut first]).unwrap();
    let mut second: Live = engine.admit(&system.then(9, 4)).unwrap();
    assert_eq!(second.sequence.cached_tokens(), 3 * bt);
    engine.run(&mut [&mut first, &mut second]).unwrap();
    engine.assert_intact();
}

#[test]
fn every_format_holds_a_cache() {
    for format in FORMATS {
        for choice in TransportChoice::ALL {
            let machine = Machine::new(1, 1, small());
            let stream = Stream::new(&machine.rig.devices[0]).unwrap();
            let (memory, paged) = tensors(&stream, format);
            let whole = paged.layout().has_whole_blocks(paged.shape());
            let options = by(choice, options(*paged.shape(), BLOCKS as u32, 32));
            let made = KvCache::over(std::slice::from_ref(&stream), vec![paged], options);
            if choice == TransportChoice::EachBlock && !whole {
                let refused = std::error::Error::source(&made.unwrap_err()).unwrap().to_string();
                assert!(refused.contains("several pieces"), "{refused}");
                continue;
            }
            let mut engine = Engine::with(made.unwrap());
            live_on(&mut engine);
            assert!(engine.cache.manager().stats().copied_on_write > 0, "{format:?}");
            assert!(engine.cache.manager().stats().suspended_blocks > 0, "{format:?}");
            engine.close();
            drop((memory, stream));
            machine.assert_clean();
        }
    }
}

#[test]
fn tensors_of_another_shape_size_or_number_are_refused() {
    let machine = Machine::new(1, 2, small());
    let streams = crate::common::engine::streams(&machine.rig.devices);
    let (memory, paged) = tensors(&streams[0], KvFormat::FlashInferNhd);
    let right = options(*paged.shape(), BLOCKS as u32, 0);
    let refused = |streams: &[Stream], paged: Vec<PagedKv>, options: &KvCacheOptions| {
        let error = KvCache::over(streams, paged, options.clone()).unwrap_err();
        std::error::Error::source(&error).unwrap().to_string()
    };
    let other = |format| tensors(&streams[0], format);
    let said = refused(&streams[..1], vec![paged], &options(small(), BLOCKS as u32, 0));
    assert!(said.starts_with("the adopted tensors hold"), "{said}");
    let (_more, paged) = other(KvFormat::FlashInferNhd);
    let many = options(*paged.shape(), BLOCKS as u32 + 1, 0);
    let said = refused(&streams[..1], vec![paged], &many);
    assert_eq!(said, "the adopted tensors have 12 blocks, and the cache 13");
    let said = refused(&streams[..1], vec![], &right);
    assert_eq!(said, "0 adopted descriptions for 1 devices with layers");
    let (_last, paged) = other(KvFormat::FlashInferNhd);
    let said = refused(&streams[1..], vec![paged], &right);
    assert_eq!(said, "adopted description 0 is of another device than the compute stream there");
    drop((memory, streams));
}
