//! Pinned memory that is for one stream, and launches on another, which its owner does not know of.

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cuda_driver::{CopyError, PinnedBuffer, PinnedSpan, Stream};
    use kv_kernels::{
        Append, BlockCopy, Direction, HostBlocks, KernelError, KernelSource,
        chunks::{Chunk, ChunkMapping, ChunkMemory, ChunkTransfer, LaunchLimits},
        error::PagedKvError,
        references,
        verify::BlockSums,
    };

    use super::super::block_copy::Side;
    use super::super::lays::{lays, shape};
    use super::super::on::On;

    type Answers = Vec<(&'static str, Result<(), KernelError>)>;

    /// Launches that read rows, each with one of its sources in `source` and the others in
    /// `device`.
    fn row_launches(
        on: &On,
        pages: &Side,
        (source, device): (PinnedSpan<'_>, KernelSource<'_>),
    ) -> Answers {
        let Side::Device(paged, _) = pages else { unreachable!() };
        let (kernels, stream) = (&on.kernels, &on.stream);
        let pinned = |bytes| KernelSource::from(source.slice(0, bytes).unwrap());
        let append = Append {
            keys: device,
            values: Some(device),
            layer_stride_bytes: 64,
            token_stride_bytes: 64,
            first_layer: 0,
            layers: 1,
            slot_mapping: device,
            host_slots: None,
            tokens: 1,
            num_blocks: 2,
            report: None,
        };
        let appends = |append| kernels.append(stream, paged, append);
        vec![
            ("keys", appends(Append { keys: pinned(64), ..append })),
            ("values", appends(Append { values: Some(pinned(64)), ..append })),
            ("slots", appends(Append { slot_mapping: pinned(8), ..append })),
        ]
    }

    /// Launches on blocks, whose pairs or ids are in `source`.
    fn block_launches(on: &On, sides: [&Side; 2], source: PinnedSpan<'_>) -> Answers {
        let [pages, others] = sides;
        let Side::Device(paged, _) = pages else { unreachable!() };
        let (kernels, stream) = (&on.kernels, &on.stream);
        let out = on.memory(1 << 12);
        let pinned = |bytes| KernelSource::from(source.slice(0, bytes).unwrap());
        let copy = BlockCopy {
            from: pages.blocks(),
            to: others.blocks(),
            pairs: pinned(8),
            count: 1,
            host_pairs: None,
            from_blocks: 2,
            to_blocks: 2,
            report: None,
            multiprocessors: None,
        };
        let sums = BlockSums {
            blocks: pages.blocks(),
            ids: pinned(4),
            count: 1,
            host_ids: None,
            num_blocks: 2,
            sums: out.span().slice(0, 8).unwrap(),
            report: None,
        };
        let chunks = |mapping| {
            let memory = out.span().slice(0, 4 * 4 * 64).unwrap().into();
            let chunk = Chunk { memory, mapping, tokens: 4, skip_prefix_n_tokens: 0 };
            let transfer = ChunkTransfer {
                chunks: &[chunk],
                layers: 0..2,
                direction: Direction::ChunkToPaged,
                num_blocks: 2,
                limits: LaunchLimits::default(),
                report: None,
            };
            kernels.transfer_chunks(stream, paged, &transfer)
        };
        vec![
            ("pairs", kernels.copy_blocks(stream, copy)),
            ("ids", kernels.sum_blocks(stream, sums)),
            ("chunk", chunks(ChunkMapping::Slots { slots: pinned(32), host: None })),
            ("chunk", chunks(ChunkMapping::Blocks { ids: pinned(4), host: None })),
        ]
    }

    /// Every launch that reads pinned memory.
    fn launches(
        on: &On,
        sides: [&Side; 2],
        (source, device): (PinnedSpan<'_>, KernelSource<'_>),
    ) -> Answers {
        let mut answers = row_launches(on, sides[0], (source, device));
        answers.extend(block_launches(on, sides, source));
        answers
    }

    #[test]
    fn pinned_memory_for_another_stream_is_refused_by_every_launch() {
        let on = On::sim(references());
        let other = Stream::new(&on.device).unwrap();
        let shape = shape(2, 2, 64, 4);
        let side = || Side::new(&on, shape, &lays(&shape, 2).swap_remove(0), 2, (false, 0));
        let sides = [&side(), &side()];
        let (pinned, device) = (on.pin(&[0u8; 1024]), on.memory(1024));
        on.stream.fill(device.span(), 0).unwrap();
        let span = |stream| pinned.span_for(stream, 0, 1024).unwrap();
        let before = on.launches();
        let error = CopyError::OtherStream { reader: other.raw(), stream: on.stream.raw() };
        for (operand, answer) in launches(&on, sides, (span(&other), device.span().into())) {
            assert_eq!(answer, Err(KernelError::Memory(error)), "{operand}");
        }
        assert_eq!(on.launches(), before, "a refused launch was enqueued");
        let own = launches(&on, sides, (span(&on.stream), device.span().into()));
        assert!(own.iter().all(|(_, answer)| answer.is_ok()), "{own:?}");
        on.stream.synchronize().unwrap();
        on.assert_clean();
    }
    #[test]
    fn chunks_and_host_blocks_of_another_driver_are_refused() {
        // Two machines of one seed give out the same numbers, so that an address of the other would fit.
        let (on, other) = (On::sim(references()), On::sim(references()));
        let shape = shape(2, 2, 64, 4);
        let lay = lays(&shape, 2).swap_remove(0);
        let side = Side::new(&on, shape, &lay, 2, (false, 0));
        let Side::Device(paged, _) = &side else { unreachable!() };
        let (slots, bytes) = (on.upload(&[0i64, 1, 2, 3]), 4 * 4 * 64);
        let [own, theirs] = [&on, &other].map(|on| Arc::new(on.pin(&[0u8; 4096])));
        let move_chunk = |buffer: &PinnedBuffer, direction| {
            let memory = ChunkMemory::Pinned { buffer, offset: 64, bytes };
            let mapping = ChunkMapping::Slots { slots: slots.span().into(), host: None };
            let chunk = Chunk { memory, mapping, tokens: 4, skip_prefix_n_tokens: 0 };
            let transfer = ChunkTransfer {
                chunks: &[chunk],
                layers: 0..2,
                direction,
                num_blocks: 2,
                limits: LaunchLimits::default(),
                report: None,
            };
            on.kernels.transfer_chunks(&on.stream, paged, &transfer)
        };
        let blocks = |buffer: &Arc<PinnedBuffer>| {
            let of = (Arc::clone(buffer), 0);
            HostBlocks::new(&on.stream, shape, lay.layout, of, 2).map(drop)
        };
        let refused = CopyError::OtherDriver { stream: on.stream.raw() };
        let before = on.launches();
        for direction in [Direction::ChunkToPaged, Direction::PagedToChunk] {
            assert_eq!(move_chunk(&theirs, direction), Err(KernelError::Memory(refused)));
        }
        assert_eq!(on.launches(), before, "a refused launch was enqueued");
        assert_eq!(blocks(&theirs), Err(PagedKvError::Memory(refused)));
        move_chunk(&own, Direction::ChunkToPaged).unwrap();
        blocks(&own).unwrap();
        on.stream.synchronize().unwrap();
        on.assert_clean();
    }
}
