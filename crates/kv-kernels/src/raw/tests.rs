//! What the unchecked launches refuse.

use std::sync::Arc;

use cuda_driver::{Device, DeviceBuffer, Stream};
use cuda_sim::{SimConfig, SimDriver};

use super::*;
use crate::append::RawAppend;
use crate::block_sum::RawBlockSums;
use crate::chunks::LaunchLimits;
use crate::launch::{RawChunk, RawMapping, RawTransfer};
use crate::layout::RowPart;
use crate::{Direction, KernelError, KvKernels, KvShape, KvShapeOptions, PagedKv, PagedLayout};

struct Scene {
    sim: SimDriver,
    stream: Stream,
    kernels: KvKernels,
}

impl Scene {
    fn new() -> Self {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        Self { sim, stream, kernels: KvKernels::load(&device).unwrap() }
    }

    fn assert_nothing_launched(&self) {
        assert_eq!(self.sim.calls().get("cuLaunchKernel"), None);
    }
}

/// What no launch can count is an error of the raw launch, and not a smaller launch.
#[test]
fn a_raw_launch_of_more_than_can_be_counted_is_refused() {
    let scene = Scene::new();
    let most = i32::MAX as u64;
    let units = |planes, tokens, segments, unit_vectors| RawBlockUnits {
        planes,
        tokens,
        segments,
        unit_vectors,
    };
    for units in [
        units(1, most + 1, 1, 1),
        units(2, most / 2 + 1, 1, 1),
        units(1, 1, 1 << 40, 1),
        units(1 << 16, 1 << 16, 1 << 16, 1 << 16),
        units(u64::MAX, 2, 1, 1),
        units(u64::MAX, u64::MAX, u64::MAX, u64::MAX),
    ] {
        let refused = [append(&scene, units), sum(&scene, units), copy(&scene, units)];
        for refused in refused {
            assert!(matches!(refused, Err(KernelError::TooMany { .. })), "{units:?}: {refused:?}");
        }
    }
    scene.assert_nothing_launched();
}

fn append(scene: &Scene, units: RawBlockUnits) -> Result<(), KernelError> {
    let raw = RawAppend {
        pages: RawBlockSide::default(),
        from: bytemuck::Zeroable::zeroed(),
        units,
        slot_mapping: 0,
        block_tokens: 0,
        first_token: u64::MAX,
        first_plane: u32::MAX,
        kv_count: 1,
        report: 0,
        vector_bytes: 1,
    };
    // SAFETY: the simulated device checks every access, and none is launched.
    unsafe { scene.kernels.append_kernels().launch(scene.kernels.launcher(), &scene.stream, &raw) }
}

fn sum(scene: &Scene, units: RawBlockUnits) -> Result<(), KernelError> {
    let row = RowPart {
        segment_bytes: units.unit_vectors,
        segments: u32::try_from(units.segments).unwrap_or(u32::MAX),
        segment_stride_bytes: u64::MAX,
        token_stride_bytes: u64::MAX,
        offset_bytes: u64::MAX,
    };
    let raw = RawBlockSums {
        plane_ptrs: 0,
        planes: units.planes,
        tokens: units.tokens,
        keys: [Some(row), None],
        values: [None; 2],
        block_stride: u64::MAX,
        num_blocks: 0,
        ids: 0,
        count: 1,
        sums: 0,
        report: 0,
        vector_bytes: 1,
        slices: 1,
    };
    // SAFETY: the simulated device checks every access, and none is launched.
    unsafe { scene.kernels.sum_kernels().launch(scene.kernels.launcher(), &scene.stream, &raw) }
}

fn copy(scene: &Scene, units: RawBlockUnits) -> Result<(), KernelError> {
    let raw = RawBlockCopy {
        to: RawBlockSide::default(),
        from: RawBlockSide::default(),
        units,
        pairs: 0,
        items: u64::MAX,
        by_place: None,
        first_pair: 0,
        vector_bytes: 1,
        report: 0,
        grid: u32::MAX,
        threads: u32::MAX,
        batched: false,
    };
    // SAFETY: the simulated device checks every access, and none is launched.
    unsafe { scene.kernels.copies().launch(&scene.stream, &raw) }
}

#[test]
fn chunks() {
    let scene = Scene::new();
    let options = KvShapeOptions { layers: 2, kv_count: 2, row_bytes: 16, block_tokens: 4 };
    let shape = KvShape::new(options).unwrap();
    let pages = DeviceBuffer::alloc(scene.kernels.device(), 4 * shape.block_bytes()).unwrap();
    let layout = PagedLayout::block_major(&shape);
    let paged = PagedKv::new(&scene.stream, shape, layout, pages.span(), 4).unwrap();
    let chunk = |tokens, skip| RawChunk {
        address: 16,
        mapping: RawMapping::Slots(8),
        tokens,
        skip_prefix_n_tokens: skip,
    };
    let call = |chunks: &[RawChunk]| {
        let transfer = RawTransfer {
            paged: &paged,
            chunks,
            layers: 0..2,
            direction: Direction::ChunkToPaged,
            num_blocks: 4,
            limits: LaunchLimits::default(),
            report: None,
        };
        // SAFETY: the simulated device checks every access, and none is launched.
        let called = unsafe {
            scene.kernels.transfers().launch(scene.kernels.launcher(), &scene.stream, &transfer)
        };
        scene.assert_nothing_launched();
        called
    };
    let skips = KernelError::Skip { skip_prefix_n_tokens: 4, tokens: 3 };
    assert_eq!(call(&[chunk(3, 4)]), Err(skips));
    let many = vec![chunk(3, 0); 17];
    assert_eq!(call(&many), Err(KernelError::Chunks { chunks: 17, most: 16 }));
    // Chunks without tokens, and with skipped tokens only.
    assert_eq!(call(&[chunk(0, 0), chunk(3, 3)]), Ok(()));
}
