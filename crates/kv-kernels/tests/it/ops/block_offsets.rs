//! Offset tables: the kernel, over rows and over packed rows, against the formula.

use cuda_driver::DeviceBuffer;
use kv_kernels::{DeviceReport, error::OutOfRange, tables::BlockOffsets};

use super::on::{On, Outputs, Random, noise};

/// One table and what is gathered from it.
#[derive(Debug)]
struct Case {
    pools: u32,
    source_rows: u32,
    out_rows: u32,
    rows: u32,
    width: u32,
    index: Vec<u32>,
    live: Option<Vec<u32>>,
    table: Vec<i32>,
    scales: Vec<i32>,
    offsets: Vec<i32>,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (pools, source_rows, out_rows, rows, width) in [
        (1, 1, 1, 1, 1),
        (1, 3, 4, 2, 7),
        (2, 5, 6, 6, 8),
        (3, 9, 11, 10, 33),
        (2, 4, 70, 64, 130),
        (1, 2, 3, 3, 4097),
    ] {
        for ragged in [false, true] {
            let mut random = Random(u64::from(rows * width));
            let entries = pools * source_rows * 2 * width;
            let id = |random: &mut Random| match random.below(5) {
                0 => -1,
                1 => -2,
                _ => random.below(1 << 31) as i32,
            };
            let table = (0..entries).map(|_| id(&mut random)).collect();
            let index =
                (0..rows).map(|_| random.below(u64::from(source_rows)) as u32).collect::<Vec<_>>();
            let live = ragged.then(|| {
                (0..rows).map(|row| [0, 1, width, width + 9, width / 2][row as usize % 5]).collect()
            });
            let scales = (0..pools as i32).map(|pool| [2, -3, 1 << 20][pool as usize % 3]);
            let offsets = (0..pools as i32).map(|pool| [1, 0, i32::MAX][pool as usize % 3]);
            let (scales, offsets) = (scales.collect(), offsets.collect());
            cases.push(Case {
                pools,
                source_rows,
                out_rows,
                rows,
                width,
                index,
                live,
                table,
                scales,
                offsets,
            });
        }
    }
    cases
}

impl Case {
    fn out_bytes(&self) -> u64 {
        u64::from(self.pools * self.out_rows * 2 * self.width) * 4
    }

    /// The formula, value by value, over what the output held before.
    fn oracle(&self, out: &mut [i32]) {
        let [pools, source_rows, out_rows, width] =
            [self.pools, self.source_rows, self.out_rows, self.width].map(|n| n as usize);
        for p in 0..pools {
            for s in 0..self.rows as usize {
                let live = self.live.as_ref().map_or(width, |live| width.min(live[s] as usize));
                for b in 0..live {
                    let row = p * source_rows + self.index[s] as usize;
                    let v = self.table[row * 2 * width + b];
                    let key = i64::from(self.scales[p]) * i64::from(v);
                    let value = key + i64::from(self.offsets[p]);
                    let at = (p * out_rows + s) * 2 * width + b;
                    out[at] = if v == -1 { -1 } else { key as i32 };
                    out[at + width] = if v == -1 { -1 } else { value as i32 };
                }
            }
        }
    }

    /// The kernel, which reads all from pinned memory, or all from the device.
    fn by_kernel(&self, on: &On, pinned: bool) -> DeviceBuffer {
        let out = on.upload(&noise(self.out_bytes()));
        let all = [&self.table, &self.scales, &self.offsets];
        let (host, device) = (all.map(|v| on.pin(v)), all.map(|v| on.upload(v)));
        let (index, index_device) = (on.pin(&self.index), on.upload(&self.index));
        let live = self.live.clone().unwrap_or_else(|| vec![0; self.rows as usize]);
        let (live, live_device) = (on.pin(&live), on.upload(&live));
        let source = |n: usize| match pinned {
            true => host[n].span(0, host[n].bytes()).unwrap().into(),
            false => device[n].span().into(),
        };
        let row_index = match pinned {
            true => index.span(0, index.bytes()).unwrap().into(),
            false => index_device.span().into(),
        };
        let live = match pinned {
            true => live.span(0, live.bytes()).unwrap().into(),
            false => live_device.span().into(),
        };
        let gather = BlockOffsets {
            source: source(0),
            pool_stride: u64::from(self.source_rows * 2 * self.width),
            row_stride: u64::from(2 * self.width),
            row_index: Some(row_index),
            host_index: pinned.then_some(&self.index),
            live: self.live.is_some().then_some(live),
            scales: source(1),
            offsets: source(2),
            out: out.span(),
            out_rows: self.out_rows,
            pools: self.pools,
            rows: self.rows,
            width: self.width,
            report: None,
        };
        on.kernels.gather_block_offsets(&on.stream, gather).unwrap();
        on.stream.synchronize().unwrap();
        out
    }

    /// Live columns of all rows one after another, from the device.
    fn by_packing(&self, on: &On) -> DeviceBuffer {
        let out = on.upload(&noise(self.out_bytes()));
        let live = |row: usize| self.live.as_ref().map_or(self.width, |l| self.width.min(l[row]));
        let live: Vec<u32> = (0..self.rows as usize).map(live).collect();
        let starts: Vec<u32> = live
            .iter()
            .scan(0, |next, columns| Some(std::mem::replace(next, *next + columns)))
            .collect();
        let mut packed = Vec::new();
        for pool in 0..self.pools {
            for (index, columns) in self.index.iter().zip(&live) {
                let at = ((pool * self.source_rows + index) * 2 * self.width) as usize;
                packed.extend_from_slice(&self.table[at..at + *columns as usize]);
            }
        }
        // No memory is empty.
        packed.resize(packed.len().max(1), 0);
        let (source, starts, lens) = (on.upload(&packed), on.upload(&starts), on.upload(&live));
        let (scales, offsets) = (on.upload(&self.scales), on.upload(&self.offsets));
        let gather = BlockOffsets {
            source: source.span().into(),
            pool_stride: live.iter().map(|columns| u64::from(*columns)).sum(),
            row_stride: 1,
            row_index: Some(starts.span().into()),
            host_index: None,
            live: Some(lens.span().into()),
            scales: scales.span().into(),
            offsets: offsets.span().into(),
            out: out.span(),
            out_rows: self.out_rows,
            pools: self.pools,
            rows: self.rows,
            width: self.width,
            report: None,
        };
        on.kernels.gather_block_offsets(&on.stream, gather).unwrap();
        on.stream.synchronize().unwrap();
        out
    }
}

pub(crate) fn outputs(on: &On) -> Outputs {
    let mut outputs = Outputs::new();
    for case in cases() {
        let name = |how: &str| {
            let Case { pools, out_rows, rows, width, .. } = case;
            let ragged = if case.live.is_some() { ", ragged" } else { "" };
            format!("{how}: {pools} pools, {rows} of {out_rows} rows of {width}{ragged}")
        };
        for pinned in [true, false] {
            let out = case.by_kernel(on, pinned);
            outputs.push((name("kernel"), on.read(out.span())));
        }
        outputs.push((name("packed"), on.read(case.by_packing(on).span())));
    }
    outputs.push(("rows that are not there".into(), unknown_rows(on)));
    outputs
}

/// Rows that only the device sees not to be in the source become -1 and are reported.
fn unknown_rows(on: &On) -> Vec<u8> {
    let report = DeviceReport::new(&on.stream).unwrap();
    let table = on.upload(&[5i32; 2 * 2 * 3]);
    let index = on.upload(&[1u32, 2, 0, u32::MAX]);
    let (scales, offsets) = (on.upload(&[1i32]), on.upload(&[1i32]));
    let out = on.upload(&[7i32; 5 * 2 * 3]);
    let gather = BlockOffsets {
        source: table.span().into(),
        pool_stride: 12,
        row_stride: 6,
        row_index: Some(index.span().into()),
        host_index: None,
        live: None,
        scales: scales.span().into(),
        offsets: offsets.span().into(),
        out: out.span(),
        out_rows: 5,
        pools: 1,
        rows: 4,
        width: 3,
        report: Some(&report),
    };
    on.kernels.gather_block_offsets(&on.stream, gather).unwrap();
    assert_eq!(report.take(&on.stream), Ok(Some(OutOfRange { count: 2, first: 1 })));
    assert_eq!(report.take(&on.stream), Ok(None));
    let bytes = on.read(out.span());
    let rows: Vec<i32> = bytemuck::pod_collect_to_vec(&bytes);
    let expected: [&[i32]; 5] =
        [&[5, 5, 5, 6, 6, 6], &[-1; 6], &[5, 5, 5, 6, 6, 6], &[-1; 6], &[7; 6]];
    assert_eq!(rows, expected.concat());
    bytes
}

#[cfg(test)]
mod on_sim {
    use cuda_driver::PinnedBuffer;
    use kv_kernels::{
        KernelError,
        error::{Operand, OperandError},
        references,
    };

    use super::super::on::compare;
    use super::*;

    #[test]
    fn the_ptx_gives_what_the_reference_gives() {
        compare(&On::sim(references()), &On::sim(&[]), outputs);
    }

    #[test]
    fn every_way_gives_what_the_formula_says() {
        let on = On::sim(references());
        for case in cases() {
            let before = noise(case.out_bytes());
            let mut expected: Vec<i32> = bytemuck::pod_collect_to_vec(&before);
            case.oracle(&mut expected);
            let expected: &[u8] = bytemuck::cast_slice(&expected);
            for pinned in [false, true] {
                assert!(on.read(case.by_kernel(&on, pinned).span()) == expected, "{case:?}");
            }
            assert!(on.read(case.by_packing(&on).span()) == expected, "packed: {case:?}");
        }
    }

    /// Arguments that are right, over memory of its own.
    struct Right {
        on: On,
        scratch: DeviceBuffer,
        host: PinnedBuffer,
    }

    impl Right {
        fn new() -> Self {
            let on = On::sim(references());
            let (scratch, host) = (on.memory(4096), on.pin(&[0u8; 64]));
            Self { on, scratch, host }
        }

        fn gather(&self) -> BlockOffsets<'_> {
            let span = |at, bytes| self.scratch.span().slice(at, bytes).unwrap();
            BlockOffsets {
                source: span(0, 2 * 3 * 2 * 5 * 4).into(),
                pool_stride: 30,
                row_stride: 10,
                row_index: Some(span(512, 8).into()),
                host_index: Some(&[2, 0]),
                live: None,
                scales: self.host.span(0, 8).unwrap().into(),
                offsets: self.host.span(8, 8).unwrap().into(),
                out: span(1024, 2 * 4 * 2 * 5 * 4),
                out_rows: 4,
                pools: 2,
                rows: 2,
                width: 5,
                report: None,
            }
        }

        fn refused(&self, gather: BlockOffsets<'_>) -> KernelError {
            let before = self.on.launches();
            let error = self.on.kernels.gather_block_offsets(&self.on.stream, gather).unwrap_err();
            assert_eq!(self.on.launches(), before, "launched in spite of: {error}");
            error
        }
    }

    #[test]
    fn wrong_quantities_are_errors_with_their_numbers_and_nothing_is_launched() {
        let right = Right::new();
        let good = right.gather();
        right.on.kernels.gather_block_offsets(&right.on.stream, good).unwrap();
        let span = |at, bytes| right.scratch.span().slice(at, bytes).unwrap();
        let short = |operand, needed_bytes, bytes| {
            KernelError::from(OperandError::TooShort { operand, needed_bytes, bytes })
        };
        assert_eq!(
            right.refused(BlockOffsets { rows: 5, ..good }),
            KernelError::Rows { rows: 5, capacity: 4 }
        );
        assert_eq!(
            right.refused(BlockOffsets { host_index: Some(&[1]), ..good }),
            KernelError::IndexCount { rows: 2, given: 1 }
        );
        assert_eq!(
            right.refused(BlockOffsets { host_index: Some(&[1, 3]), ..good }),
            KernelError::RowOutOfRange { row: 1, source_row: 3, pool_stride: 30, row_stride: 10 }
        );
        // Without an index, row 3 of 4 would come from row 3 of 3.
        assert_eq!(
            right.refused(BlockOffsets { row_index: None, host_index: None, rows: 4, ..good }),
            KernelError::RowOutOfRange { row: 3, source_row: 3, pool_stride: 30, row_stride: 10 }
        );
        let out = span(1024, 316);
        assert_eq!(right.refused(BlockOffsets { out, ..good }), short(Operand::Out, 320, 316));
        let source = span(0, 236).into();
        assert_eq!(right.refused(BlockOffsets { source, ..good }), short(Operand::Table, 240, 236));
        let live = Some(span(600, 4).into());
        assert_eq!(right.refused(BlockOffsets { live, ..good }), short(Operand::SeqLens, 8, 4));
        let scales = right.host.span(0, 4).unwrap().into();
        assert_eq!(right.refused(BlockOffsets { scales, ..good }), short(Operand::Scales, 8, 4));
        let offsets = span(602, 8).into();
        assert!(matches!(
            right.refused(BlockOffsets { offsets, ..good }),
            KernelError::Operand(OperandError::Misaligned {
                operand: Operand::Offsets,
                alignment: 4,
                ..
            })
        ));
        let out = span(236, 320);
        assert!(matches!(
            right.refused(BlockOffsets { out, ..good }),
            KernelError::Operand(OperandError::Overlap {
                written: Operand::Out,
                read: Operand::RowIndex | Operand::Table,
                ..
            })
        ));
        let wide = BlockOffsets { pool_stride: u64::MAX / 2, ..good };
        assert!(matches!(
            right.refused(wide),
            KernelError::Operand(OperandError::Overflow { operand: Operand::Table, .. })
        ));
        let strided = BlockOffsets { row_stride: (1 << 32) + 1, ..good };
        assert!(matches!(
            right.refused(strided),
            KernelError::Operand(OperandError::Overflow { operand: Operand::Table, .. })
        ));
        right.on.assert_clean();
    }

    #[test]
    fn nothing_is_launched_for_nothing() {
        let right = Right::new();
        let good = right.gather();
        for empty in [
            BlockOffsets { rows: 0, host_index: Some(&[]), ..good },
            BlockOffsets { pools: 0, ..good },
            BlockOffsets { width: 0, ..good },
        ] {
            right.on.kernels.gather_block_offsets(&right.on.stream, empty).unwrap();
        }
        assert_eq!(right.on.launches(), 0);
    }
}
