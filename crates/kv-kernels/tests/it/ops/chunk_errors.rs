//! Wrong quantities of chunk transfers are typed errors with their numbers, and nothing is enqueued.

#[cfg(test)]
mod on_sim {
    use cuda_driver::{DeviceBuffer, DeviceSpan, PinnedBuffer};
    use kv_kernels::{
        DeviceReport, Direction, KernelError, KvFormat, KvShape, PagedKv, PagedLayout, Slot,
        TableEntry,
        chunks::{Chunk, ChunkMapping, ChunkMemory, ChunkTransfer, LaunchLimits},
        error::{Operand, OperandError, OutOfRange, PagedKvError},
        layout::LayoutError,
        references,
    };

    use super::super::lays::shape;
    use super::super::on::{self, On, entries, noise};

    const TOKEN_BYTES: u64 = 4 * 16;

    /// Pages of four blocks of four tokens, in two layers of two tensors each.
    struct Bench {
        on: On,
        paged: PagedKv,
        pages: DeviceBuffer,
        scratch: DeviceBuffer,
        pinned: PinnedBuffer,
    }

    impl Bench {
        fn new() -> Self {
            let on = On::sim(references());
            let shape = Self::shape();
            let pages = on.upload(&noise(4 * shape.block_bytes()));
            let layout = PagedLayout::block_major(&shape);
            let paged = PagedKv::new(&on.stream, shape, layout, pages.span(), 4).unwrap();
            let (scratch, pinned) = (on.memory(1 << 16), on.pin(&[0u8; 4096]));
            Self { on, paged, pages, scratch, pinned }
        }

        fn shape() -> KvShape {
            shape(2, 2, 16, 4)
        }

        fn span(&self, offset: u64, bytes: u64) -> DeviceSpan {
            self.scratch.span().slice(offset, bytes).unwrap()
        }

        fn by_slots(&self, host: &[i64]) -> Chunk<'static> {
            let host: &[Slot] = on::slots(host).leak();
            let tokens = host.len() as u64;
            Chunk {
                memory: self.span(0, tokens * TOKEN_BYTES).into(),
                mapping: ChunkMapping::Slots {
                    slots: self.span(32768, tokens * 8).into(),
                    host: Some(host),
                },
                tokens,
                skip_prefix_n_tokens: 0,
            }
        }

        fn by_blocks(&self, tokens: u64, host: &[i32]) -> Chunk<'static> {
            let host: &[TableEntry] = entries(host).leak();
            Chunk {
                memory: self.span(8192, tokens * TOKEN_BYTES).into(),
                mapping: ChunkMapping::Blocks {
                    ids: self.span(49152, host.len() as u64 * 4).into(),
                    host: Some(host),
                },
                tokens,
                skip_prefix_n_tokens: 0,
            }
        }

        fn transfer<'a>(&self, chunks: &'a [Chunk<'a>]) -> ChunkTransfer<'a> {
            ChunkTransfer {
                chunks,
                layers: 0..2,
                direction: Direction::ChunkToPaged,
                num_blocks: 4,
                limits: LaunchLimits::default(),
                report: None,
            }
        }

        #[track_caller]
        fn refused_call(&self, transfer: &ChunkTransfer<'_>) -> KernelError {
            let kernels = &self.on.kernels;
            let error =
                kernels.transfer_chunks(&self.on.stream, &self.paged, transfer).unwrap_err();
            assert_eq!(self.on.launches(), 0, "launched in spite of: {error}");
            error
        }

        #[track_caller]
        fn refused(&self, chunk: Chunk<'_>) -> KernelError {
            self.refused_call(&self.transfer(&[chunk]))
        }
    }

    /// Two rows would race for the bytes of one slot.
    #[test]
    fn a_slot_is_stored_to_once() {
        let bench = Bench::new();
        let good = bench.by_slots(&[0, 5, 9]);
        let other =
            Chunk { memory: bench.span(16384, 2 * TOKEN_BYTES).into(), ..bench.by_slots(&[7, 5]) };
        let (first_chunk, first_token) = (0, 1);
        assert_eq!(
            bench.refused_call(&bench.transfer(&[good, other])),
            KernelError::StoredTwice {
                slot: Slot::from(5),
                chunk: 1,
                token: 1,
                first_chunk,
                first_token
            }
        );
        let (first_chunk, first_token) = (0, 0);
        assert_eq!(
            bench.refused(bench.by_blocks(12, &[3, -1, 3])),
            KernelError::StoredTwice {
                slot: Slot::from(12),
                chunk: 0,
                token: 8,
                first_chunk,
                first_token
            }
        );
        // Two may come from one slot.
        let both = [good, other];
        let back = ChunkTransfer { direction: Direction::PagedToChunk, ..bench.transfer(&both) };
        bench.on.kernels.transfer_chunks(&bench.on.stream, &bench.paged, &back).unwrap();
        bench.on.stream.synchronize().unwrap();
        assert_eq!(bench.on.launches(), 1);
    }

    #[test]
    fn counts_of_tokens_skips_and_memory() {
        let bench = Bench::new();
        let good = bench.by_slots(&[0, 5, 9]);
        assert_eq!(
            bench.refused(Chunk { skip_prefix_n_tokens: 4, ..good }),
            KernelError::Skip { skip_prefix_n_tokens: 4, tokens: 3 }
        );
        let wrong = Chunk { memory: bench.span(0, 3 * TOKEN_BYTES + 1).into(), ..good };
        let (tokens, token_bytes) = (3, TOKEN_BYTES);
        assert_eq!(
            bench.refused(wrong),
            KernelError::ChunkTokens { bytes: 3 * TOKEN_BYTES + 1, tokens, token_bytes }
        );
        let most = i32::MAX as u64;
        let many = Chunk { tokens: most + 1, ..good };
        assert_eq!(bench.refused(many), KernelError::TooManyTokens { tokens: most + 1, most });
        let pinned = |offset, bytes| ChunkMemory::Pinned { buffer: &bench.pinned, offset, bytes };
        let operand = Operand::Chunk;
        assert_eq!(
            bench.refused(Chunk { memory: pinned(4000, 192), ..good }),
            OperandError::TooShort { operand, needed_bytes: 4192, bytes: 4096 }.into()
        );
        assert_eq!(
            bench.refused(Chunk { memory: pinned(u64::MAX, 192), ..good }),
            OperandError::Overflow { operand, rows: u64::MAX, row_bytes: 192 }.into()
        );
        // One layer of a chunk of two.
        let chunks = [good];
        let one_layer = ChunkTransfer { layers: 1..2, ..bench.transfer(&chunks) };
        assert_eq!(
            bench.refused_call(&one_layer),
            KernelError::ChunkTokens { bytes: 192, tokens, token_bytes: 32 }
        );
    }

    #[test]
    fn mappings() {
        let bench = Bench::new();
        let good = bench.by_slots(&[0, 5, 9]);
        let slots = |slots: DeviceSpan, host| {
            bench.refused(Chunk {
                mapping: ChunkMapping::Slots { slots: slots.into(), host },
                ..good
            })
        };
        let (operand, at) = (Operand::SlotMapping, bench.span(32768, 0).address());
        assert_eq!(
            slots(bench.span(32768, 23), None),
            OperandError::TooShort { operand, needed_bytes: 24, bytes: 23 }.into()
        );
        assert_eq!(
            slots(bench.span(32772, 24), None),
            OperandError::Misaligned { operand, address: at + 4, alignment: 8 }.into()
        );
        let span = bench.span(32768, 24);
        let (few, far) = ([1, 2].map(Slot::from), on::slots(&[1, -1, 16]));
        assert_eq!(slots(span, Some(&few)), KernelError::SlotCount { slots: 2, tokens: 3 });
        assert_eq!(
            slots(span, Some(&far)),
            KernelError::SlotOutOfRange { token: 2, slot: Slot::from(16), slots: 16 }
        );

        let good = bench.by_blocks(10, &[0, 3, 1]);
        let ids = |ids: DeviceSpan, host| {
            bench.refused(Chunk { mapping: ChunkMapping::Blocks { ids: ids.into(), host }, ..good })
        };
        let (operand, at) = (Operand::BlockIds, bench.span(49152, 0).address());
        assert_eq!(
            ids(bench.span(49152, 11), None),
            OperandError::TooShort { operand, needed_bytes: 12, bytes: 11 }.into()
        );
        assert_eq!(
            ids(bench.span(49154, 12), None),
            OperandError::Misaligned { operand, address: at + 2, alignment: 4 }.into()
        );
        let span = bench.span(49152, 12);
        let (few, far) = ([1, 2].map(TableEntry::from), entries(&[1, -1, 4]));
        assert_eq!(ids(span, Some(&few)), KernelError::IdCount { ids: 2, blocks: 3 });
        assert_eq!(
            ids(span, Some(&far)),
            KernelError::IdOutOfRange { entry: 2, block: TableEntry::from(4), blocks: 4 }
        );
        let mixed = [bench.by_slots(&[0]), good];
        assert_eq!(bench.refused_call(&bench.transfer(&mixed)), KernelError::MixedMappings);
    }

    /// Rounding down would write over tokens that others share.
    #[test]
    fn a_skip_that_is_no_whole_number_of_blocks_is_refused_where_blocks_move() {
        let bench = Bench::new();
        let good = bench.by_blocks(10, &[0, 3, 1]);
        for skip in [1, 3, 5, 9] {
            assert_eq!(
                bench.refused(Chunk { skip_prefix_n_tokens: skip, ..good }),
                KernelError::SkipBlocks { skip_prefix_n_tokens: skip, block_tokens: 4 }
            );
        }
        // All tokens, though the last block is not whole: nothing is left to move.
        let all = Chunk { skip_prefix_n_tokens: 10, ..good };
        let Bench { on, paged, .. } = &bench;
        on.kernels.transfer_chunks(&on.stream, paged, &bench.transfer(&[all])).unwrap();
        assert_eq!(on.launches(), 0);
        // Ids of skipped blocks are not looked at.
        let skipped = Chunk { skip_prefix_n_tokens: 4, ..bench.by_blocks(10, &[99, 3, 1]) };
        on.kernels.transfer_chunks(&on.stream, paged, &bench.transfer(&[skipped])).unwrap();
        assert_eq!(on.launches(), 1);
    }

    #[test]
    fn layers_blocks_and_limits() {
        let bench = Bench::new();
        let chunks = [bench.by_slots(&[0, 5, 9])];
        let good = bench.transfer(&chunks);
        #[allow(clippy::reversed_empty_ranges, reason = "what is to be refused")]
        for (start, end) in [(0, 3), (2, 1)] {
            assert_eq!(
                bench.refused_call(&ChunkTransfer { layers: start..end, ..good.clone() }),
                KernelError::Layers { start, end, layers: 2 }
            );
        }
        assert_eq!(
            bench.refused_call(&ChunkTransfer { num_blocks: 5, ..good.clone() }),
            KernelError::Blocks { num_blocks: 5, capacity: 4 }
        );
        for threads in [1, 33, 1056, u32::MAX] {
            let limits = LaunchLimits { blocks: 0, threads };
            assert_eq!(
                bench.refused_call(&ChunkTransfer { limits, ..good.clone() }),
                KernelError::Threads { threads, most: 1024 }
            );
        }
    }

    #[test]
    fn overlaps() {
        let bench = Bench::new();
        let good = bench.by_slots(&[0, 5, 9]);
        let both = [Direction::ChunkToPaged, Direction::PagedToChunk];
        let overlap = |error| match error {
            KernelError::Operand(OperandError::Overlap { written, read, bytes, .. }) => {
                (written, read, bytes)
            }
            other => panic!("{other}"),
        };
        let on_pages = |offset, bytes| bench.pages.span().slice(offset, bytes).unwrap();
        let end = 4 * Bench::shape().block_bytes() - 192;
        for direction in both {
            let chunks = [Chunk { memory: on_pages(end, 192).into(), ..good }];
            let call = ChunkTransfer { direction, ..bench.transfer(&chunks) };
            let (written, read) = match direction {
                Direction::ChunkToPaged => (Operand::Pages, Operand::Chunk),
                Direction::PagedToChunk => (Operand::Chunk, Operand::Pages),
            };
            assert_eq!(overlap(bench.refused_call(&call)), (written, read, 192));
        }
        // The mapping in memory that is written.
        let (pages, chunk) = (on_pages(0, 24), bench.span(8, 24));
        for (direction, slots, written) in
            [(both[0], pages, Operand::Pages), (both[1], chunk, Operand::Chunk)]
        {
            let mapping = ChunkMapping::Slots { slots: slots.into(), host: None };
            let chunks = [Chunk { mapping, ..good }];
            let call = ChunkTransfer { direction, ..bench.transfer(&chunks) };
            assert_eq!(overlap(bench.refused_call(&call)), (written, Operand::SlotMapping, 24));
        }
        // Two chunks that are written, and share a byte.
        let beside = Chunk { memory: bench.span(191, 192).into(), ..good };
        let chunks = [beside, good];
        let call = ChunkTransfer { direction: Direction::PagedToChunk, ..bench.transfer(&chunks) };
        assert_eq!(overlap(bench.refused_call(&call)), (Operand::Chunk, Operand::Chunk, 1));
        // Where they are only read, they may.
        let Bench { on, paged, .. } = &bench;
        let other = Chunk { mapping: bench.by_slots(&[1, 2, 3]).mapping, ..beside };
        let chunks = [other, good];
        on.kernels.transfer_chunks(&on.stream, paged, &bench.transfer(&chunks)).unwrap();
    }

    /// Chunks that are written and share bytes, whatever lies between them in the order of addresses.
    #[test]
    fn no_chunk_hides_the_overlap_of_two_others() {
        let bench = Bench::new();
        let long = bench.by_slots(&[0, 5, 9]);
        let empty = |offset| Chunk { memory: bench.span(offset, 0).into(), ..bench.by_slots(&[]) };
        let beside = Chunk { memory: bench.span(64, 192).into(), ..long };
        for at in [0, 1, 32, 64, 65, 191, 192, 255, 256] {
            for chunks in [[long, empty(at), beside], [empty(at), beside, long]] {
                let direction = Direction::PagedToChunk;
                let call = ChunkTransfer { direction, ..bench.transfer(&chunks) };
                let error = bench.refused_call(&call);
                let KernelError::Operand(OperandError::Overlap { written, read, bytes, .. }) =
                    error
                else {
                    panic!("an empty chunk at {at}: {error}")
                };
                assert_eq!((written, read, bytes), (Operand::Chunk, Operand::Chunk, 128));
            }
        }
        // Empty ones themselves share nothing.
        let Bench { on, paged, .. } = &bench;
        let chunks = [long, empty(0), empty(64), empty(64)];
        let call = ChunkTransfer { direction: Direction::PagedToChunk, ..bench.transfer(&chunks) };
        on.kernels.transfer_chunks(&on.stream, paged, &call).unwrap();
    }

    /// A chunk that is written where another chunk's mapping is read.
    #[test]
    fn no_chunk_is_written_over_the_mapping_of_another() {
        let bench = Bench::new();
        let good = bench.by_slots(&[0, 5, 9]);
        let other = bench.by_slots(&[1, 2, 3]);
        let mapping = bench.span(100, 0).address().next_multiple_of(8) - bench.span(0, 0).address();
        let slots = ChunkMapping::Slots { slots: bench.span(mapping, 24).into(), host: None };
        let other = Chunk { memory: bench.span(8192, 192).into(), mapping: slots, ..other };
        for chunks in [[good, other], [other, good]] {
            let direction = Direction::PagedToChunk;
            let call = ChunkTransfer { direction, ..bench.transfer(&chunks) };
            let error = bench.refused_call(&call);
            let KernelError::Operand(OperandError::Overlap { written, read, bytes, .. }) = error
            else {
                panic!("{error}")
            };
            assert_eq!((written, read, bytes), (Operand::Chunk, Operand::SlotMapping, 24));
        }
    }

    /// Seventeen chunks are two launches.
    #[test]
    fn more_chunks_than_a_launch_describes_go_in_several() {
        let bench = Bench::new();
        let Bench { on, paged, .. } = &bench;
        let slots: Vec<_> = (0..16).map(Slot::from).chain([Slot::NONE]).collect();
        let device = on.upload(&slots);
        let data = on.upload(&noise(17 * TOKEN_BYTES));
        let chunks: Vec<Chunk<'_>> = (0..17)
            .map(|n| Chunk {
                memory: data.span().slice(n * TOKEN_BYTES, TOKEN_BYTES).unwrap().into(),
                mapping: ChunkMapping::Slots {
                    slots: device.span().slice(n * 8, 8).unwrap().into(),
                    host: Some(&slots[n as usize..=n as usize]),
                },
                tokens: 1,
                skip_prefix_n_tokens: 0,
            })
            .collect();
        on.kernels.transfer_chunks(&on.stream, paged, &bench.transfer(&chunks)).unwrap();
        assert_eq!(on.launches(), 2);
        let (pages, data) = (on.read(bench.pages.span()), on.read(data.span()));
        for slot in 0..16usize {
            for plane in 0..4 {
                let at = slot / 4 * 256 + plane * 64 + slot % 4 * 16;
                // Layers outside in the pages, keys and values outside in the chunk.
                let from = slot * 64 + (plane % 2 * 2 + plane / 2) * 16;
                assert_eq!(pages[at..at + 16], data[from..from + 16]);
            }
        }
    }

    /// What only the device can see is passed over, and told.
    #[test]
    fn slots_and_blocks_that_only_the_device_sees_are_reported() {
        for references in [references(), &[]] {
            let on = On::sim(references);
            let shape = Bench::shape();
            let pages = on.upload(&noise(4 * shape.block_bytes()));
            let layout = PagedLayout::block_major(&shape);
            let paged = PagedKv::new(&on.stream, shape, layout, pages.span(), 4).unwrap();
            let report = DeviceReport::new(&on.stream).unwrap();
            let slots = on.upload(&[99i64, 3, -1, 8, i64::MAX, 7]);
            let ids = on.upload(&[4i32, -1, 2, 1]);
            let data = on.upload(&noise(16 * TOKEN_BYTES));
            let by_slots = ChunkMapping::Slots { slots: slots.span().into(), host: None };
            let by_blocks = ChunkMapping::Blocks { ids: ids.span().into(), host: None };
            // 4 planes each: slots 8 and the largest; blocks 4 (skipped) and 2, 4 tokens each.
            for (mapping, tokens, skip, out_of_range) in [
                (by_slots, 6, 1, OutOfRange { count: 8, first: 3 }),
                (by_blocks, 16, 4, OutOfRange { count: 16, first: 2 }),
            ] {
                let memory = data.span().slice(0, tokens * TOKEN_BYTES).unwrap().into();
                let chunk = Chunk { memory, mapping, tokens, skip_prefix_n_tokens: skip };
                let transfer = ChunkTransfer {
                    chunks: &[chunk],
                    layers: 0..2,
                    direction: Direction::ChunkToPaged,
                    num_blocks: 2,
                    limits: LaunchLimits::default(),
                    report: Some(&report),
                };
                on.kernels.transfer_chunks(&on.stream, &paged, &transfer).unwrap();
                assert_eq!(report.take(&on.stream), Ok(Some(out_of_range)));
            }
            let after = on.read(pages.span());
            assert!(after[2 * 256..] == noise(4 * 256)[2 * 256..], "a block not ready was written");
            on.assert_clean();
        }
    }

    #[test]
    fn tensors_of_a_layout() {
        let on = On::sim(references());
        let shape = Bench::shape();
        let options = kv_kernels::layout::FormatOptions {
            layers: 2,
            heads: 1,
            head_bytes: 16,
            element_bytes: 1,
            block_tokens: 4,
            blocks: 4,
            block_padding_bytes: 0,
        };
        let layout = KvFormat::FlashInferNhd.layout(&options).unwrap();
        let memory = on.memory(2048);
        let span = |offset, bytes| memory.span().slice(offset, bytes).unwrap();
        let over = |tensors: &[DeviceSpan], blocks| {
            PagedKv::over(&on.stream, shape, layout, tensors, blocks).map(|_| ())
        };
        assert_eq!(over(&[span(0, 512), span(512, 512)], 4), Ok(()));
        assert_eq!(over(&[span(0, 512)], 4), Err(PagedKvError::Tensors { given: 1, needed: 2 }));
        let operand = Operand::Pages;
        let short = OperandError::TooShort { operand, needed_bytes: 512, bytes: 511 };
        assert_eq!(over(&[span(0, 512), span(512, 511)], 4), Err(short.into()));
        assert_eq!(
            over(&[span(600, 512), span(89, 512)], 4),
            Err(PagedKvError::TensorsOverlap { first: 1, second: 0, extent_bytes: 512 })
        );
        let size = LayoutError::Size { block_bytes: 256, blocks: 1 << 60 };
        assert_eq!(layout.extent_bytes(&shape, 1 << 60), Err(size));
    }
}
