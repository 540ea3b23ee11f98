//! Launches: their limits, and that a kernel computes.

use cuda_driver::{ErrorCode, KernelArgs, LaunchConfig};

use super::bound::launch_answers;
use super::{Case, Needs, Subject, cases, refused};
use crate::common::kernel;

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    a_kernel_writes_its_bytes,
    a_kernel_runs_in_its_stream,
    arguments_are_taken_at_the_launch,
    a_kernel_writes_pinned_memory,
    a_kernel_writes_mapped_memory,
    geometry_within_the_limits_is_launched,
    geometry_outside_the_limits_is_refused_without_loss,
];

pub(crate) const PROCESS: &[Case] = cases![Needs::Process;
    the_null_function_is_not_launched,
    unbound_launches_are_refused,
];

pub(crate) const SIMULATED: &[Case] = cases![
    Needs::Simulation("a driver follows the handle of a function");
    a_function_of_an_unloaded_module_is_refused,
];

const INVALID: ErrorCode = ErrorCode::INVALID_VALUE;

fn a_kernel_writes_its_bytes(on: &Subject) {
    let bound = on.bind();
    let (module, memory) = (bound.module(), bound.alloc(4096));
    let function = bound.module_get_function(*module, kernel::NAME).unwrap();
    bound.memset_d8_async(*memory, 0, 4096, 0).unwrap();
    let args = KernelArgs::new().arg(*memory).arg(77u32).arg(1000u32);
    bound.launch_kernel(function, &LaunchConfig::linear(8, 128), &args, 0).unwrap();
    let seen = bound.read(*memory, 4096);
    assert!(seen[..4000] == kernel::written(77, 1000));
    assert!(seen[4000..].iter().all(|&byte| byte == 0));
}

fn a_kernel_runs_in_its_stream(on: &Subject) {
    let bound = on.bind();
    let (module, memory, stream) = (bound.module(), bound.alloc(256), bound.stream());
    let function = bound.module_get_function(*module, kernel::NAME).unwrap();
    let args = KernelArgs::new().arg(*memory).arg(1u32).arg(64u32);
    bound.launch_kernel(function, &LaunchConfig::linear(1, 64), &args, *stream).unwrap();
    let stall = bound.stall(*stream);
    bound.launch_kernel(function, &LaunchConfig::linear(1, 64), &args, *stream).unwrap();
    assert_eq!(bound.stream_query(*stream), Ok(false));
    stall.release();
    assert!(bound.read(*memory, 256) == kernel::written(1, 64));
}

fn arguments_are_taken_at_the_launch(on: &Subject) {
    let bound = on.bind();
    let (module, memory, stream) = (bound.module(), bound.alloc(256), bound.stream());
    let function = bound.module_get_function(*module, kernel::NAME).unwrap();
    let warm = KernelArgs::new().arg(*memory).arg(0u32).arg(64u32);
    bound.launch_kernel(function, &LaunchConfig::linear(1, 64), &warm, *stream).unwrap();
    let stall = bound.stall(*stream);
    let mut args = KernelArgs::new().arg(*memory).arg(5u32).arg(64u32);
    bound.launch_kernel(function, &LaunchConfig::linear(1, 64), &args, *stream).unwrap();
    args = KernelArgs::new().arg(0u64).arg(6u32).arg(0u32);
    stall.release();
    assert_eq!(args.count(), 3);
    assert!(bound.read(*memory, 256) == kernel::written(5, 64));
}

fn a_kernel_writes_pinned_memory(on: &Subject) {
    let bound = on.bind();
    let (module, host, memory) = (bound.module(), bound.pinned(256), bound.alloc(256));
    let function = bound.module_get_function(*module, kernel::NAME).unwrap();
    let args = KernelArgs::new().arg(*host).arg(3u32).arg(64u32);
    bound.launch_kernel(function, &LaunchConfig::linear(1, 64), &args, 0).unwrap();
    bound.memcpy_htod_async(*memory, *host, 256, 0).unwrap();
    assert!(bound.read(*memory, 256) == kernel::written(3, 64));
}

fn a_kernel_writes_mapped_memory(on: &Subject) {
    let bound = on.bind();
    let (module, range, handle) = (bound.module(), bound.range(1), bound.physical(1));
    range.map_usable(0, 1, *handle);
    let function = bound.module_get_function(*module, kernel::NAME).unwrap();
    let args = KernelArgs::new().arg(range.base).arg(3u32).arg(64u32);
    bound.launch_kernel(function, &LaunchConfig::linear(1, 64), &args, 0).unwrap();
    assert!(bound.read(range.base, 256) == kernel::written(3, 64));
}

fn geometry_within_the_limits_is_launched(on: &Subject) {
    let bound = on.bind();
    for (grid, block, shared_bytes) in [
        ([1, 1, 1], [1024, 1, 1], 0),
        ([1, 1, 1], [1, 1, 64], 0),
        ([1, 2, 2], [32, 4, 8], 0),
        ([1, 65_535, 1], [1, 1, 1], 0),
        ([1, 1, 1], [32, 1, 1], 48 << 10),
    ] {
        launch_answers(&bound, LaunchConfig { grid, block, shared_bytes }, None);
    }
}

fn geometry_outside_the_limits_is_refused_without_loss(on: &Subject) {
    let bound = on.bind();
    for (grid, block, shared_bytes) in [
        // None of something.
        ([1, 1, 1], [0, 1, 1], 0),
        ([1, 1, 1], [1, 0, 1], 0),
        ([1, 1, 1], [1, 1, 0], 0),
        ([0, 1, 1], [1, 1, 1], 0),
        ([1, 0, 1], [1, 1, 1], 0),
        ([1, 1, 0], [1, 1, 1], 0),
        // Too many threads in a block, the last together only.
        ([1, 1, 1], [1025, 1, 1], 0),
        ([1, 1, 1], [1, 1025, 1], 0),
        ([1, 1, 1], [1, 1, 65], 0),
        ([1, 1, 1], [32, 33, 1], 0),
        // Too many blocks.
        ([1, 65_536, 1], [1, 1, 1], 0),
        ([1, 1, 65_536], [1, 1, 1], 0),
        ([1 << 31, 1, 1], [1, 1, 1], 0),
        // More shared memory than is given without asking, and than there is.
        ([1, 1, 1], [32, 1, 1], (48 << 10) + 1),
        ([1, 1, 1], [32, 1, 1], 1 << 20),
    ] {
        launch_answers(&bound, LaunchConfig { grid, block, shared_bytes }, Some(INVALID));
        launch_answers(&bound, LaunchConfig::linear(1, 64), None);
    }
}

fn the_null_function_is_not_launched(on: &Subject) {
    let answer = on.bind().launch_kernel(0, &LaunchConfig::linear(1, 1), &KernelArgs::new(), 0);
    refused(answer, ErrorCode::INVALID_HANDLE);
}

fn unbound_launches_are_refused(on: &Subject) {
    let bound = on.bind();
    let (module, memory) = (bound.module(), bound.alloc(256));
    let function = bound.module_get_function(*module, kernel::NAME).unwrap();
    let args = KernelArgs::new().arg(*memory).arg(1u32).arg(64u32);
    bound.ctx_set_current(0).unwrap();
    let answer = bound.launch_kernel(function, &LaunchConfig::linear(1, 64), &args, 0);
    bound.make_current();
    refused(answer, ErrorCode::INVALID_CONTEXT);
}

fn a_function_of_an_unloaded_module_is_refused(on: &Subject) {
    let bound = on.bind();
    let module = bound.module_load_data(kernel::PTX, &mut String::new()).unwrap();
    let function = bound.module_get_function(module, kernel::NAME).unwrap();
    bound.module_unload(module).unwrap();
    let answer = bound.launch_kernel(function, &LaunchConfig::linear(1, 1), &KernelArgs::new(), 0);
    refused(answer, ErrorCode::INVALID_HANDLE);
}
