//! New tokens in their slots: one layer and several, fused rows, skipped slots.

use kv_kernels::{Append, DeviceReport, KernelSource, KvShape, Slot, error::OutOfRange};

use super::block_copy::Side;
use super::lays::{LAYS, Lay, Place, lays, shape};
use super::on::{On, Outputs, Random, noise};

const BLOCKS: u64 = 5;

/// What is appended in a run of the list.
struct Case {
    name: String,
    shape: KvShape,
    lay: Lay,
    first_layer: u32,
    layers: u32,
    /// Bytes between the rows of two tokens.
    gap: u64,
    slots: Vec<Slot>,
    pinned: bool,
    shift: u64,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let shapes = [
        shape(1, 1, 8, 1),
        shape(1, 2, 7, 3),
        shape(2, 2, 132, 4),
        shape(3, 2, 24, 5),
        shape(2, 1, 1152, 3),
        shape(4, 2, 64, 16),
        shape(2, 2, 2048, 4),
    ];
    for (number, shape) in (0u64..).zip(shapes) {
        for which in 0..LAYS {
            for layers in [1, shape.layers()] {
                let slot_count = BLOCKS * u64::from(shape.block_tokens());
                let mut slots: Vec<_> = (0..slot_count as u32).map(Slot::from).collect();
                let mut random = Random(number + 7);
                random.shuffle(&mut slots);
                slots.truncate((slot_count as usize * 2 / 3).max(1));
                for slot in &mut slots {
                    if random.below(5) == 0 {
                        *slot = Slot::NONE;
                    }
                }
                let lay = lays(&shape, BLOCKS).swap_remove(which);
                let gap = [0, 16, 4, 5][(number as usize + which) % 4];
                cases.push(Case {
                    name: format!("{shape:?}, {}, {layers} layers, gaps of {gap}", lay.name),
                    shape,
                    lay,
                    first_layer: shape.layers() - layers,
                    layers,
                    gap,
                    slots,
                    pinned: (number + u64::from(layers)) % 2 == 1,
                    shift: [0, 8, 16, 4, 1][which % 5],
                });
            }
        }
    }
    cases
}

impl Case {
    fn token_stride(&self) -> u64 {
        self.shape.row_bytes() + self.gap
    }

    fn layer_stride(&self) -> u64 {
        self.slots.len() as u64 * self.token_stride()
    }

    /// The rows of keys (0) or values (1).
    fn rows(&self, kv: u64) -> Vec<u8> {
        let bytes = self.layer_stride() * u64::from(self.layers) + kv * 16;
        noise(bytes)
    }

    fn run(&self, on: &On) -> Vec<u8> {
        let pages = Side::new(on, self.shape, &self.lay, BLOCKS, (false, self.shift));
        let Side::Device(paged, memory) = &pages else { unreachable!() };
        let rows = [self.rows(0), self.rows(1)];
        let (device, host) =
            (rows.each_ref().map(|rows| on.upload(rows)), rows.each_ref().map(|rows| on.pin(rows)));
        let slots = on.upload(&self.slots);
        let source = |kv: usize| -> KernelSource<'_> {
            match self.pinned {
                true => host[kv].span(0, host[kv].bytes()).unwrap().into(),
                false => device[kv].span().into(),
            }
        };
        let append = Append {
            keys: source(0),
            values: (self.shape.kv_count() == 2).then(|| source(1)),
            layer_stride_bytes: self.layer_stride(),
            token_stride_bytes: self.token_stride(),
            first_layer: self.first_layer,
            layers: self.layers,
            slot_mapping: slots.span().into(),
            host_slots: Some(&self.slots),
            tokens: self.slots.len() as u64,
            num_blocks: BLOCKS,
            report: None,
        };
        on.kernels.append(&on.stream, paged, append).unwrap();
        on.read(memory.span())
    }

    /// The formula, byte by byte.
    fn oracle(&self) -> Vec<u8> {
        let mut pages = noise(self.lay.bytes + self.shift);
        let (kv_count, tokens) =
            (u64::from(self.shape.kv_count()), u64::from(self.shape.block_tokens()));
        for kv in 0..kv_count {
            let rows = self.rows(kv);
            for layer in 0..u64::from(self.layers) {
                for (token, &slot) in (0u64..).zip(&self.slots) {
                    let Some(slot) = slot.place() else { continue };
                    for byte in 0..self.shape.row_bytes() {
                        let from = layer * self.layer_stride() + token * self.token_stride();
                        let plane = (u64::from(self.first_layer) + layer) * kv_count + kv;
                        let (block, token) = (slot / tokens, slot % tokens);
                        let at = (self.lay.at)(Place { plane, block, token, byte }) + self.shift;
                        pages[at as usize] = rows[(from + byte) as usize];
                    }
                }
            }
        }
        pages
    }
}

pub(crate) fn outputs(on: &On) -> Outputs {
    let mut outputs: Outputs =
        cases().iter().map(|case| (case.name.clone(), case.run(on))).collect();
    outputs.push(("slots that are not there".into(), unknown_slots(on, (1, 1))));
    outputs
}

/// Slots that only the device sees to be out of range are passed over and reported.
fn unknown_slots(on: &On, (kv_count, lay): (u32, usize)) -> Vec<u8> {
    let shape = shape(2, kv_count, 64, 4);
    let pages = Side::new(on, shape, &lays(&shape, 4).swap_remove(lay), 4, (false, 0));
    let Side::Device(paged, memory) = &pages else { unreachable!() };
    let slots = on.upload(&[3i64, 12, i64::MAX, i64::MIN, -1, 11]);
    let rows = on.upload(&noise(2 * 6 * 64));
    let report = DeviceReport::new(&on.stream).unwrap();
    let append = Append {
        keys: rows.span().into(),
        values: (kv_count == 2).then(|| rows.span().into()),
        layer_stride_bytes: 6 * 64,
        token_stride_bytes: 64,
        first_layer: 0,
        layers: 2,
        slot_mapping: slots.span().into(),
        host_slots: None,
        tokens: 6,
        num_blocks: 3,
        report: Some(&report),
    };
    on.kernels.append(&on.stream, paged, append).unwrap();
    assert_eq!(report.take(&on.stream), Ok(Some(OutOfRange { count: 2, first: 1 })));
    on.read(memory.span())
}

#[cfg(test)]
mod on_sim {
    use std::sync::atomic::{AtomicU64, Ordering};

    use cuda_driver::reference::{DeviceMemory, KernelReference, ReferenceError};
    use cuda_driver::{AddressRange, KernelArgs, LaunchConfig};
    use kv_kernels::{
        KernelError, PagedKv, PagedLayout,
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
    fn a_slot_that_is_passed_over_is_told_of_once() {
        let on = On::sim(references());
        for kv_count in [1, 2] {
            for lay in 0..LAYS {
                unknown_slots(&on, (kv_count, lay));
            }
        }
        on.assert_clean();
    }

    /// Threads of the launches of `count_threads`.
    static THREADS: AtomicU64 = AtomicU64::new(0);

    /// Counts the threads of a launch, and touches nothing.
    fn count_threads(
        _: &mut dyn DeviceMemory,
        config: &LaunchConfig,
        _: &KernelArgs,
    ) -> Result<(), ReferenceError> {
        let threads = u64::from(config.grid[0]) * u64::from(config.block[0]);
        THREADS.fetch_add(threads, Ordering::Relaxed);
        Ok(())
    }

    /// Rows of one byte, each a vector by itself, in numbers around what one launch counts.
    #[test]
    fn every_token_of_very_many_has_a_thread() {
        let run = count_threads;
        let on = On::sim(&[KernelReference { name: "append_1", run }]);
        let shape = shape(1, 1, 1, 1);
        let pages = on.memory(4);
        let layout = PagedLayout::block_major(&shape);
        let paged = PagedKv::new(&on.stream, shape, layout, pages.span(), 4).unwrap();
        let most = (1u64 << 32) + 1;
        // Addresses without memory: nothing reads them here.
        let range =
            AddressRange::reserve(&on.device, (16 * most).next_multiple_of(2 << 20)).unwrap();
        let half = 1 << 31;
        for tokens in [1, 128, half - 1, half, half + 1, half + 129, most] {
            THREADS.store(0, Ordering::Relaxed);
            let append = Append {
                keys: range.span(8 * most, tokens).unwrap().into(),
                values: None,
                layer_stride_bytes: 0,
                token_stride_bytes: 1,
                first_layer: 0,
                layers: 1,
                slot_mapping: range.span(0, 8 * tokens).unwrap().into(),
                host_slots: None,
                tokens,
                num_blocks: 4,
                report: None,
            };
            on.kernels.append(&on.stream, &paged, append).unwrap();
            on.stream.synchronize().unwrap();
            let threads = THREADS.load(Ordering::Relaxed);
            assert!((tokens..tokens + 3 * 128).contains(&threads), "{threads} for {tokens} tokens");
        }
    }

    #[test]
    fn every_byte_is_where_the_formula_says() {
        let on = On::sim(references());
        for case in cases() {
            assert!(case.run(&on) == case.oracle(), "{}", case.name);
        }
        on.assert_clean();
    }

    #[test]
    fn wrong_quantities_are_errors_with_their_numbers_and_nothing_is_launched() {
        let on = On::sim(references());
        let shape = shape(2, 2, 64, 4);
        let pages = Side::new(&on, shape, &lays(&shape, 4).swap_remove(0), 4, (false, 0));
        let Side::Device(paged, memory) = &pages else { unreachable!() };
        let rows = on.memory(2 * 3 * 64);
        let slots = on.upload(&[0i64, 5, -1]);
        let good = Append {
            keys: rows.span().into(),
            values: Some(rows.span().into()),
            layer_stride_bytes: 3 * 64,
            token_stride_bytes: 64,
            first_layer: 0,
            layers: 2,
            slot_mapping: slots.span().into(),
            host_slots: Some(&[Slot::from(0), Slot::from(5), Slot::NONE]),
            tokens: 3,
            num_blocks: 2,
            report: None,
        };
        let refused = |append: Append<'_>| {
            let before = on.launches();
            let error = on.kernels.append(&on.stream, paged, append).unwrap_err();
            assert_eq!(on.launches(), before, "launched in spite of: {error}");
            error
        };
        let layers = KernelError::AppendLayers { first_layer: 1, layers: 2, of: 2 };
        assert_eq!(refused(Append { first_layer: 1, ..good }), layers);
        let tensors = KernelError::AppendTensors { given: 1, kv_count: 2 };
        assert_eq!(refused(Append { values: None, ..good }), tensors);
        let stride = OperandError::Stride { operand: Operand::Rows, width: 64, stride: 63 };
        assert_eq!(refused(Append { token_stride_bytes: 63, ..good }), stride.into());
        let short =
            OperandError::TooShort { operand: Operand::Rows, needed_bytes: 388, bytes: 384 };
        assert_eq!(refused(Append { layer_stride_bytes: 196, ..good }), short.into());
        assert!(matches!(
            refused(Append { layer_stride_bytes: u64::MAX, ..good }),
            KernelError::Operand(OperandError::Overflow { .. })
        ));
        let count = KernelError::SlotCount { slots: 2, tokens: 3 };
        assert_eq!(refused(Append { host_slots: Some(&[0, 1].map(Slot::from)), ..good }), count);
        let range = KernelError::SlotOutOfRange { token: 1, slot: Slot::from(8), slots: 8 };
        assert_eq!(refused(Append { host_slots: Some(&[0, 8, 1].map(Slot::from)), ..good }), range);
        let (chunk, token, first_chunk, first_token) = (0, 2, 0, 0);
        let slot = Slot::from(7);
        let twice = KernelError::StoredTwice { slot, chunk, token, first_chunk, first_token };
        assert_eq!(refused(Append { host_slots: Some(&[slot, Slot::NONE, slot]), ..good }), twice);
        let blocks = KernelError::Blocks { num_blocks: 5, capacity: 4 };
        assert_eq!(refused(Append { num_blocks: 5, ..good }), blocks);
        assert!(matches!(
            refused(Append { keys: memory.span().into(), ..good }),
            KernelError::Operand(OperandError::Overlap {
                written: Operand::Pages,
                read: Operand::Rows,
                ..
            })
        ));
        assert_eq!(on.launches(), 0);
        let nothing = Append { tokens: 0, host_slots: Some(&[]), ..good };
        on.kernels.append(&on.stream, paged, nothing).unwrap();
        assert_eq!(on.launches(), 0);
    }
}
