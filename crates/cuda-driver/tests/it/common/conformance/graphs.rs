//! Graphs of kernels.

use cuda_driver::{ErrorCode, KernelArgs, LaunchConfig};

use super::bound::{Bound, Owned};
use super::{Case, Needs, Subject, cases, refused};
use crate::common::kernel;

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    a_graph_is_created_and_destroyed,
    a_graph_without_nodes_is_launched,
    a_graph_runs_its_kernel,
    a_graph_is_launched_again,
    arguments_are_taken_when_the_node_is_added,
    an_instance_outlives_its_graph,
    nodes_added_later_are_not_in_an_instance,
    a_graph_runs_in_its_stream,
    an_instance_may_be_destroyed_behind_a_launch,
    geometry_over_the_limits_is_not_launched,
    captured_launches_run_in_their_order_when_launched,
    a_stream_that_was_captured_is_used_again,
    a_capture_with_a_call_that_waits_has_no_graph,
    only_a_stream_of_its_own_is_captured_and_once,
];

pub(crate) const SIMULATED: &[Case] = cases![
    Needs::Simulation("a driver follows the handle of a graph");
    a_graph_that_is_gone_is_refused,
    a_function_that_is_gone_is_not_added,
];

const PLACES: u32 = 100;

/// A graph of the test kernel, which writes 100 places of `memory` from `value` on.
fn graph<'b>(bound: &'b Bound<'_>, module: u64, memory: u64, value: u32) -> Owned<'b> {
    let graph = bound.graph();
    let function = bound.module_get_function(module, kernel::NAME).unwrap();
    let args = KernelArgs::new().arg(memory).arg(value).arg(PLACES);
    bound.graph_add_kernel_node(*graph, function, &LaunchConfig::linear(1, 128), &args).unwrap();
    graph
}

fn holds(bound: &Bound<'_>, memory: u64, value: u32) -> bool {
    bound.read(memory, 4 * PLACES as usize) == kernel::written(value, PLACES)
}

fn a_graph_is_created_and_destroyed(on: &Subject) {
    let bound = on.bind();
    let graph = bound.graph_create().unwrap();
    assert_ne!(graph, 0);
    assert_eq!(bound.graph_destroy(graph), Ok(()));
}

fn a_graph_without_nodes_is_launched(on: &Subject) {
    let bound = on.bind();
    let (graph, stream) = (bound.graph(), bound.stream());
    let exec = bound.instance(*graph);
    assert_eq!(bound.graph_launch(*exec, *stream), Ok(()));
    bound.stream_synchronize(*stream).unwrap();
}

fn a_graph_runs_its_kernel(on: &Subject) {
    let bound = on.bind();
    let (module, memory, stream) = (bound.module(), bound.alloc(4096), bound.stream());
    let graph = graph(&bound, *module, *memory, 7);
    let exec = bound.instance(*graph);
    bound.graph_launch(*exec, *stream).unwrap();
    bound.stream_synchronize(*stream).unwrap();
    assert!(holds(&bound, *memory, 7));
}

fn a_graph_is_launched_again(on: &Subject) {
    let bound = on.bind();
    let (module, memory, stream) = (bound.module(), bound.alloc(4096), bound.stream());
    let graph = graph(&bound, *module, *memory, 7);
    let exec = bound.instance(*graph);
    for _ in 0..3 {
        bound.memset_d8_async(*memory, 0, 4096, *stream).unwrap();
        bound.graph_launch(*exec, *stream).unwrap();
        bound.stream_synchronize(*stream).unwrap();
        assert!(holds(&bound, *memory, 7));
    }
}

fn arguments_are_taken_when_the_node_is_added(on: &Subject) {
    let bound = on.bind();
    let (module, memory) = (bound.module(), bound.alloc(4096));
    let graph = bound.graph();
    let function = bound.module_get_function(*module, kernel::NAME).unwrap();
    let config = LaunchConfig::linear(1, 128);
    {
        let args = KernelArgs::new().arg(*memory).arg(9u32).arg(PLACES);
        bound.graph_add_kernel_node(*graph, function, &config, &args).unwrap();
    }
    let exec = bound.instance(*graph);
    bound.graph_launch(*exec, 0).unwrap();
    assert!(holds(&bound, *memory, 9));
}

fn an_instance_outlives_its_graph(on: &Subject) {
    let bound = on.bind();
    let (module, memory) = (bound.module(), bound.alloc(4096));
    let graph = graph(&bound, *module, *memory, 11);
    let exec = bound.instance(*graph);
    drop(graph);
    bound.graph_launch(*exec, 0).unwrap();
    assert!(holds(&bound, *memory, 11));
}

fn nodes_added_later_are_not_in_an_instance(on: &Subject) {
    let bound = on.bind();
    let (module, memory) = (bound.module(), bound.alloc(4096));
    bound.memset_d8_async(*memory, 0, 4096, 0).unwrap();
    let graph = bound.graph();
    let exec = bound.instance(*graph);
    let function = bound.module_get_function(*module, kernel::NAME).unwrap();
    let args = KernelArgs::new().arg(*memory).arg(3u32).arg(PLACES);
    bound.graph_add_kernel_node(*graph, function, &LaunchConfig::linear(1, 128), &args).unwrap();
    bound.graph_launch(*exec, 0).unwrap();
    assert_eq!(bound.read(*memory, 4096), [0; 4096]);
}

fn a_graph_runs_in_its_stream(on: &Subject) {
    let bound = on.bind();
    let (module, memory) = (bound.module(), bound.alloc(4096));
    let (stream, other) = (bound.stream(), bound.stream());
    bound.memset_d8_async(*memory, 0, 4096, *stream).unwrap();
    bound.stream_synchronize(*stream).unwrap();
    let graph = graph(&bound, *module, *memory, 5);
    let exec = bound.instance(*graph);
    let host = bound.pinned(4096);
    let stall = bound.stall(*stream);
    bound.graph_launch(*exec, *stream).unwrap();
    bound.memcpy_dtoh_async(*host, *memory, 4096, *other).unwrap();
    bound.stream_synchronize(*other).unwrap();
    assert_eq!(bound.stream_query(*stream), Ok(false));
    stall.release();
    bound.stream_synchronize(*stream).unwrap();
    assert!(holds(&bound, *memory, 5));
}

fn an_instance_may_be_destroyed_behind_a_launch(on: &Subject) {
    let bound = on.bind();
    let (module, memory, stream) = (bound.module(), bound.alloc(4096), bound.stream());
    let graph = graph(&bound, *module, *memory, 13);
    let exec = bound.instance(*graph);
    let stall = bound.stall(*stream);
    bound.graph_launch(*exec, *stream).unwrap();
    drop(exec);
    stall.release();
    bound.stream_synchronize(*stream).unwrap();
    assert!(holds(&bound, *memory, 13));
}

/// Refused at one step or another.
fn geometry_over_the_limits_is_not_launched(on: &Subject) {
    let bound = on.bind();
    let (module, memory, graph) = (bound.module(), bound.alloc(4096), bound.graph());
    let function = bound.module_get_function(*module, kernel::NAME).unwrap();
    let args = KernelArgs::new().arg(*memory).arg(3u32).arg(PLACES);
    let config = LaunchConfig::linear(1, 1025);
    let Ok(_) = bound.graph_add_kernel_node(*graph, function, &config, &args) else { return };
    let Ok(exec) = bound.graph_instantiate(*graph) else { return };
    let launched = bound.graph_launch(exec, 0);
    bound.graph_exec_destroy(exec).unwrap();
    refused(launched, ErrorCode::INVALID_VALUE);
}

/// Launches the test kernel in a stream.
fn launch(bound: &Bound<'_>, module: u64, (memory, value, places): (u64, u32, u32), stream: u64) {
    let function = bound.module_get_function(module, kernel::NAME).unwrap();
    let args = KernelArgs::new().arg(memory).arg(value).arg(places);
    bound.launch_kernel(function, &LaunchConfig::linear(1, 128), &args, stream).unwrap();
}

fn captured_launches_run_in_their_order_when_launched(on: &Subject) {
    let bound = on.bind();
    let (module, memory, stream) = (bound.module(), bound.alloc(4096), bound.stream());
    bound.memset_d8_async(*memory, 0, 4096, *stream).unwrap();
    bound.stream_synchronize(*stream).unwrap();
    bound.stream_begin_capture(*stream).unwrap();
    for value in 0..8 {
        launch(&bound, *module, (*memory, value, PLACES), *stream);
    }
    launch(&bound, *module, (*memory, 1000, 10), *stream);
    let graph = bound.stream_end_capture(*stream).unwrap();
    assert_eq!(bound.read(*memory, 4096), [0; 4096], "a launch that was captured has run");
    let exec = bound.instance(graph);
    bound.graph_destroy(graph).unwrap();
    for _ in 0..3 {
        bound.memset_d8_async(*memory, 0, 4096, *stream).unwrap();
        bound.graph_launch(*exec, *stream).unwrap();
        bound.stream_synchronize(*stream).unwrap();
        let mut expected = kernel::written(7, PLACES);
        expected[..40].copy_from_slice(&kernel::written(1000, 10));
        assert_eq!(bound.read(*memory, 4 * PLACES as usize), expected);
    }
}

fn a_stream_that_was_captured_is_used_again(on: &Subject) {
    let bound = on.bind();
    let (module, memory, stream) = (bound.module(), bound.alloc(4096), bound.stream());
    for value in 0..3 {
        bound.stream_begin_capture(*stream).unwrap();
        launch(&bound, *module, (*memory, 99, PLACES), *stream);
        let graph = bound.stream_end_capture(*stream).unwrap();
        bound.graph_destroy(graph).unwrap();
        launch(&bound, *module, (*memory, value, PLACES), *stream);
        bound.stream_synchronize(*stream).unwrap();
        assert!(holds(&bound, *memory, value));
    }
}

fn a_capture_with_a_call_that_waits_has_no_graph(on: &Subject) {
    let bound = on.bind();
    let (module, memory, stream) = (bound.module(), bound.alloc(4096), bound.stream());
    for waits in [true, false] {
        bound.stream_begin_capture(*stream).unwrap();
        launch(&bound, *module, (*memory, 99, PLACES), *stream);
        if waits {
            let waited = bound.stream_synchronize(*stream);
            refused(waited, ErrorCode::STREAM_CAPTURE_UNSUPPORTED);
        } else {
            refused(bound.stream_query(*stream), ErrorCode::STREAM_CAPTURE_UNSUPPORTED);
        }
        refused(bound.stream_end_capture(*stream), ErrorCode::STREAM_CAPTURE_INVALIDATED);
    }
    launch(&bound, *module, (*memory, 5, PLACES), *stream);
    bound.stream_synchronize(*stream).unwrap();
    assert!(holds(&bound, *memory, 5));
}

fn only_a_stream_of_its_own_is_captured_and_once(on: &Subject) {
    let bound = on.bind();
    let stream = bound.stream();
    refused(bound.stream_begin_capture(0), ErrorCode::STREAM_CAPTURE_UNSUPPORTED);
    refused(bound.stream_end_capture(*stream), ErrorCode::ILLEGAL_STATE);
    bound.stream_begin_capture(*stream).unwrap();
    refused(bound.stream_begin_capture(*stream), ErrorCode::ILLEGAL_STATE);
    let graph = bound.stream_end_capture(*stream).unwrap();
    bound.graph_destroy(graph).unwrap();
}

fn a_graph_that_is_gone_is_refused(on: &Subject) {
    let bound = on.bind();
    let (module, memory) = (bound.module(), bound.alloc(4096));
    let gone = bound.graph_create().unwrap();
    bound.graph_destroy(gone).unwrap();
    let function = bound.module_get_function(*module, kernel::NAME).unwrap();
    let args = KernelArgs::new().arg(*memory).arg(3u32).arg(PLACES);
    let config = LaunchConfig::linear(1, 128);
    refused(bound.graph_destroy(gone), ErrorCode::INVALID_VALUE);
    refused(bound.graph_instantiate(gone), ErrorCode::INVALID_VALUE);
    let added = bound.graph_add_kernel_node(gone, function, &config, &args);
    refused(added, ErrorCode::INVALID_VALUE);
    let graph = bound.graph();
    let exec = bound.graph_instantiate(*graph).unwrap();
    bound.graph_exec_destroy(exec).unwrap();
    refused(bound.graph_launch(exec, 0), ErrorCode::INVALID_VALUE);
    refused(bound.graph_exec_destroy(exec), ErrorCode::INVALID_VALUE);
}

fn a_function_that_is_gone_is_not_added(on: &Subject) {
    let bound = on.bind();
    let (module, graph) = (bound.module(), bound.graph());
    let function = bound.module_get_function(*module, kernel::NAME).unwrap();
    drop(module);
    let args = KernelArgs::new().arg(0u64).arg(3u32).arg(PLACES);
    let added = bound.graph_add_kernel_node(*graph, function, &LaunchConfig::linear(1, 128), &args);
    refused(added, ErrorCode::INVALID_HANDLE);
}
