//! Skipped tokens are neither read nor written, while others read what they share.

use cuda_driver::{DeviceBuffer, Stream};
use kv_kernels::{
    Direction, KvShape, KvShapeOptions, PagedKv, PagedLayout, Slot,
    chunks::{Chunk, ChunkMapping, ChunkTransfer, LaunchLimits},
    verify::ChecksumArgs,
};

use super::on::{On, noise};

const BLOCKS: u64 = 8;
const SHARED: u64 = 4;

/// Readers on a stream of their own sum the blocks of a shared prefix again and again, while tokens
/// after it are stored with the prefix skipped: whether they all summed the same, and the end too.
pub(crate) fn readers_see_no_change(on: &On, rounds: u64) -> bool {
    let options = KvShapeOptions { layers: 4, kv_count: 2, row_bytes: 2048, block_tokens: 16 };
    let shape = KvShape::new(options).unwrap();
    let pages = on.upload(&noise(BLOCKS * shape.block_bytes()));
    let layout = PagedLayout::block_major(&shape);
    let paged = PagedKv::new(&on.stream, shape, layout, pages.span(), BLOCKS).unwrap();
    let reader = Stream::new(&on.device).unwrap();
    let table = on.upload(&[5i32, 1, 6, 2]);
    let lens = on.upload(&[SHARED as u32 * 16 - 9]);
    let sums = on.memory((rounds + 1) * SHARED * 8);
    let sum = |stream: &Stream, round: u64| {
        let checksums = sums.span().slice(round * SHARED * 8, SHARED * 8).unwrap();
        let args = ChecksumArgs {
            block_table: table.span(),
            table_stride: SHARED,
            seq_lens: lens.span(),
            sequences: 1,
            checksums,
            num_blocks: BLOCKS,
        };
        on.kernels.paged_checksum(stream, &paged, args).unwrap();
    };

    // The retrieve begins at a chunk's boundary, and so names the shared blocks too; 7 tokens of the
    // last of them are not shared any more.
    let slots: Vec<_> = [5u32, 1, 6, 2, 0, 7]
        .iter()
        .flat_map(|block| (0..16).map(move |token| Slot::from(block * 16 + token)))
        .collect();
    let skip = SHARED * 16 - 9;
    let device_slots = on.upload(&slots);
    let chunk = on.upload(&noise(slots.len() as u64 * shape.token_bytes() + 8)[8..]);
    sum(&on.stream, 0);
    on.stream.synchronize().unwrap();
    for round in 1..=rounds {
        sum(&reader, round);
        store(on, &paged, (&chunk, &device_slots, &slots), skip);
    }
    reader.synchronize().unwrap();
    sum(&on.stream, rounds);
    let sums: Vec<u64> = bytemuck::pod_collect_to_vec(&on.read(sums.span()));
    sums.chunks(SHARED as usize).all(|round| round == &sums[..SHARED as usize])
}

fn store(
    on: &On,
    paged: &PagedKv,
    (chunk, device_slots, slots): (&DeviceBuffer, &DeviceBuffer, &[Slot]),
    skip: u64,
) {
    let chunk = Chunk {
        memory: chunk.span().into(),
        mapping: ChunkMapping::Slots { slots: device_slots.span().into(), host: Some(slots) },
        tokens: slots.len() as u64,
        skip_prefix_n_tokens: skip,
    };
    let transfer = ChunkTransfer {
        chunks: &[chunk],
        layers: 0..paged.shape().layers(),
        direction: Direction::ChunkToPaged,
        num_blocks: BLOCKS,
        limits: LaunchLimits::default(),
        report: None,
    };
    on.kernels.transfer_chunks(&on.stream, paged, &transfer).unwrap();
}

#[cfg(test)]
mod on_sim {
    use cuda_driver::DeviceSpan;
    use kv_kernels::references;

    use super::super::chunk_cases::{Case, cases};
    use super::*;

    #[test]
    fn readers_of_a_shared_prefix_see_it_unchanged() {
        let on = On::sim(references());
        assert!(readers_see_no_change(&on, 40));
        on.assert_clean();
    }

    #[test]
    fn readers_of_a_shared_prefix_see_it_unchanged_by_the_ptx() {
        assert!(readers_see_no_change(&On::sim(&[]), 1));
    }

    /// With the skip ignored the readers notice: the tests above see the bug that they are for.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    #[test]
    fn readers_notice_when_the_skip_is_ignored() {
        let on = On::sim(references());
        let sim = on.sim.as_ref().unwrap();
        sim.set_race_check(cuda_sim::RaceCheck::Report);
        on.kernels.sabotage_ignore_skip(true);
        assert!(!readers_see_no_change(&on, 40));
        assert!(!sim.races().is_empty(), "nothing orders the readers and the store over them");
    }

    /// The simulated device knows which bytes were ever written, and finds every read of one that
    /// was not. So memory that starts as never written watches both.
    fn written(on: &On, memory: DeviceSpan) -> Vec<bool> {
        let sim = on.sim.as_ref().unwrap();
        on.stream.synchronize().unwrap();
        (0..memory.bytes()).map(|at| sim.is_initialised(0, memory.address() + at, 1)).collect()
    }

    /// Stores and gathers again in memory that nobody wrote before; both directions must touch the
    /// rows of tokens that move, and no other byte.
    fn watch(on: &On, case: &Case) {
        let tensors: Vec<_> = case.unwritten_tensors(on);
        let paged = case.paged(on, &tensors);
        for chunk in &case.chunks {
            // Of the chunk only the rows that move are written, so that no other can be read.
            let stored = on.memory(case.chunk_bytes(chunk).max(1) + 2 * case.margin());
            let rows = case.moved_rows(chunk);
            for row in &rows {
                let span = stored.span().slice(case.margin() + row.start, row.end - row.start);
                on.stream.fill(span.unwrap(), 7).unwrap();
            }
            let gathered = on.memory(stored.bytes());
            case.move_alone(on, (&paged, chunk), &stored, Direction::ChunkToPaged);
            case.move_alone(on, (&paged, chunk), &gathered, Direction::PagedToChunk);
            let mut expected = vec![false; stored.bytes() as usize];
            for row in rows {
                let start = (case.margin() + row.start) as usize;
                expected[start..start + (row.end - row.start) as usize].fill(true);
            }
            assert!(written(on, gathered.span()) == expected, "chunk: {}", case.name);
        }
        let expected = case.written_pages();
        for (tensor, expected) in tensors.iter().zip(expected) {
            assert!(written(on, tensor.span()) == expected, "pages: {}", case.name);
        }
        on.assert_clean();
    }

    #[test]
    fn nothing_but_the_rows_that_move_is_read_or_written() {
        for case in cases().iter().step_by(5) {
            watch(&On::sim(references()), case);
            watch(&On::sim(&[]), case);
        }
    }

    /// With the skip ignored the watch notices.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    #[test]
    fn the_watch_notices_when_the_skip_is_ignored() {
        let skipping = |case: &&Case| case.chunks.iter().any(|c| c.skip > 0 && c.skip < c.tokens);
        let cases = cases();
        let case = cases.iter().find(skipping).unwrap();
        for references in [references(), &[]] {
            let on = On::sim(references);
            on.kernels.sabotage_ignore_skip(true);
            let watched = std::panic::AssertUnwindSafe(|| watch(&on, case));
            assert!(std::panic::catch_unwind(watched).is_err());
        }
    }
}
