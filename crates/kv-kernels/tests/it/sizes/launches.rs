//! Launches over every count.

#![allow(clippy::too_many_lines, reason = "one list of quantities for each family of launches")]

use cuda_driver::{DeviceBuffer, DeviceSpan};
use kv_kernels::{
    Append, BlockCopy, BlockPairs, Blocks, Direction, GatherRows, Slot, Transfer,
    chunks::{Chunk, ChunkMapping, ChunkMemory, ChunkTransfer, LaunchLimits},
    verify::{BlockSums, ChecksumArgs, FillPattern},
};

use super::{BLOCKS, Bench, COUNTS, SMALL, answered};
use crate::ops::on::pair;

/// Memory of a launch: of the device, and addresses with no memory behind them, which are long.
fn spans(memory: &DeviceBuffer) -> [DeviceSpan; 3] {
    [0, 64, memory.bytes()].map(|bytes| memory.span().slice(0, bytes).unwrap())
}

#[test]
fn chunks_and_transfers() {
    let bench = Bench::new();
    let (memory, slots) = (bench.memory(), bench.memory());
    for tokens in COUNTS {
        for skip in [0, 1, tokens, u64::MAX] {
            for num_blocks in [0, 1, BLOCKS, u64::MAX] {
                for chunk in spans(&memory) {
                    let [zero, three, far] = [0, 3, i64::MAX].map(|slot| Slot::new(slot).unwrap());
                    for host_slots in [&[][..], &[zero], &[far], &[Slot::NONE; 16], &[three; 16]] {
                        let transfer = Transfer {
                            chunk,
                            slot_mapping: slots.span(),
                            host_slots,
                            tokens,
                            skip_prefix_n_tokens: skip,
                            direction: Direction::PagedToChunk,
                            num_blocks,
                        };
                        let (kernels, stream) = (&bench.kernels, &bench.stream);
                        answered(kernels.multi_layer_transfer(stream, &bench.paged, transfer));
                    }
                    let by_slots = ChunkMapping::Slots { slots: slots.span().into(), host: None };
                    let by_blocks = ChunkMapping::Blocks { ids: slots.span().into(), host: None };
                    for mapping in [by_slots, by_blocks] {
                        for (blocks, threads) in [(0, 0), (u32::MAX, 32), (1, u32::MAX), (1, 1024)]
                        {
                            for offset in [0, 64, u64::MAX] {
                                let (buffer, bytes) = (&*bench.host, chunk.bytes());
                                let pinned = ChunkMemory::Pinned { buffer, offset, bytes };
                                for memory in [chunk.into(), pinned] {
                                    let chunk = Chunk {
                                        memory,
                                        mapping,
                                        tokens,
                                        skip_prefix_n_tokens: skip,
                                    };
                                    let transfer = ChunkTransfer {
                                        chunks: &[chunk],
                                        layers: 0..(num_blocks as u32),
                                        direction: Direction::ChunkToPaged,
                                        num_blocks,
                                        limits: LaunchLimits { blocks, threads },
                                        report: None,
                                    };
                                    let (kernels, stream) = (&bench.kernels, &bench.stream);
                                    answered(kernels.transfer_chunks(
                                        stream,
                                        &bench.paged,
                                        &transfer,
                                    ));
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    bench.assert_clean();
}

#[test]
fn blocks() {
    let bench = Bench::new();
    let (memory, sums) = (bench.memory(), bench.memory());
    let (kernels, stream) = (&bench.kernels, &bench.stream);
    let pair = [pair(i32::MAX, 0)];
    for count in COUNTS {
        for blocks in [0, 1, BLOCKS, 1 << 40, u64::MAX] {
            for pairs in spans(&memory) {
                for host_pairs in [None, BlockPairs::new(&[]).ok(), BlockPairs::new(&pair).ok()] {
                    let (from, to) = (Blocks::Device(&bench.paged), Blocks::Host(&bench.blocks));
                    let copy = BlockCopy {
                        from,
                        to,
                        pairs: pairs.into(),
                        count,
                        host_pairs,
                        from_blocks: blocks,
                        to_blocks: blocks,
                        report: None,
                        multiprocessors: Some(blocks as u32),
                    };
                    answered(kernels.copy_blocks(stream, copy));
                    let sums = BlockSums {
                        blocks: from,
                        ids: pairs.into(),
                        count,
                        host_ids: None,
                        num_blocks: blocks,
                        sums: sums.span(),
                        report: None,
                    };
                    answered(kernels.sum_blocks(stream, sums));
                }
                for layers in SMALL {
                    for stride in [0, 64, 1 << 40, u64::MAX] {
                        let append = Append {
                            keys: sums.span().into(),
                            values: Some(sums.span().into()),
                            layer_stride_bytes: stride,
                            token_stride_bytes: stride,
                            first_layer: layers,
                            layers,
                            slot_mapping: pairs.into(),
                            host_slots: None,
                            tokens: count,
                            num_blocks: blocks,
                            report: None,
                        };
                        answered(kernels.append(stream, &bench.paged, append));
                    }
                }
            }
        }
    }
    bench.assert_clean();
}

#[test]
fn tables_words_and_patterns() {
    let bench = Bench::new();
    let (memory, out) = (bench.memory(), bench.memory());
    let (kernels, stream) = (&bench.kernels, &bench.stream);
    for stride in COUNTS {
        for rows in SMALL {
            for width in SMALL {
                let gather = GatherRows {
                    out: out.span(),
                    out_stride: stride,
                    table: memory.span(),
                    table_stride: stride,
                    row_index: memory.span(),
                    rows,
                    width,
                    table_rows: rows,
                };
                answered(kernels.gather_rows(stream, gather));
            }
            let checksum = ChecksumArgs {
                block_table: memory.span(),
                table_stride: stride,
                seq_lens: memory.span(),
                sequences: rows,
                checksums: out.span(),
                num_blocks: stride,
            };
            answered(kernels.paged_checksum(stream, &bench.paged, checksum));
        }
        for chunk in spans(&out) {
            let fill = FillPattern { chunk, token_keys: memory.span(), tokens: stride };
            answered(kernels.fill_pattern(stream, bench.paged.shape(), fill));
        }
    }
    bench.assert_clean();
}
