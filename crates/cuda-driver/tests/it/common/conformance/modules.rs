//! Modules and their functions.

use cuda_driver::ErrorCode;

use super::bound::Bound;
use super::{Case, Needs, Subject, cases, refused};
use crate::common::kernel;

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    a_module_is_loaded_and_unloaded,
    a_module_is_loaded_twice,
    a_module_without_kernels_is_loaded,
    a_loaded_module_keeps_what_the_log_held,
    text_that_is_no_ptx_is_refused,
    ptx_that_is_too_new_is_refused,
    ptx_for_a_newer_device_is_refused,
    ptx_without_a_version_is_refused,
    ptx_without_a_target_is_refused,
    an_elf_binary_is_refused,
    ptx_with_a_nul_is_refused,
    a_refusal_says_something,
    a_refusal_is_no_loss,
    a_kernel_is_found_by_its_name,
    a_kernel_is_found_twice,
    a_kernel_that_is_not_there_is_not_found,
    a_prefix_of_a_name_is_not_found,
    a_name_with_a_nul_is_not_found,
    unloading_waits_for_the_work_of_the_device,
];

pub(crate) const PROCESS: &[Case] = cases![Needs::Process;
    empty_text_is_refused,
    blank_text_is_refused,
    an_empty_name_is_refused,
    the_null_module_is_not_unloaded,
    the_null_module_has_no_kernels,
];

pub(crate) const SIMULATED: &[Case] = cases![
    Needs::Simulation("a driver follows the handle of a module");
    a_module_is_unloaded_once,
    an_unloaded_module_has_no_kernels,
];

/// Whatever module the work is of: as good as any wait, for as long as drivers do so.
fn unloading_waits_for_the_work_of_the_device(on: &Subject) {
    // A card fills 8 GiB in milliseconds, and needs to be caught at it.
    let bytes = if on.sim.is_some() { 1 << 12 } else { 1 << 30 };
    let bound = on.bind();
    let (memory, stream) = (bound.alloc(bytes), bound.stream());
    let module = bound.module_load_data(kernel::PTX, &mut String::new()).unwrap();
    for value in 0..8 {
        bound.memset_d8_async(*memory, value, bytes, *stream).unwrap();
    }
    bound.module_unload(module).unwrap();
    assert_eq!(bound.stream_query(*stream), Ok(true));
}

/// Holds PTX to a code, and gives the log.
#[track_caller]
fn unloadable(bound: &Bound<'_>, ptx: &str, code: ErrorCode) -> String {
    let mut log = String::new();
    refused(bound.module_load_data(ptx, &mut log), code);
    log
}

const HEAD: &str = ".version 7.0\n.target sm_80\n.address_size 64\n";

fn a_module_is_loaded_and_unloaded(on: &Subject) {
    let bound = on.bind();
    let module = bound.module_load_data(kernel::PTX, &mut String::new()).unwrap();
    assert_ne!(module, 0);
    assert_eq!(bound.module_unload(module), Ok(()));
}

fn a_module_is_loaded_twice(on: &Subject) {
    let bound = on.bind();
    let modules = [bound.module(), bound.module()];
    assert_ne!(*modules[0], *modules[1]);
    let functions =
        modules.each_ref().map(|module| bound.module_get_function(**module, kernel::NAME).unwrap());
    assert_ne!(functions[0], functions[1]);
}

fn a_module_without_kernels_is_loaded(on: &Subject) {
    let bound = on.bind();
    let module = bound.module_load_data(HEAD, &mut String::new()).unwrap();
    refused(bound.module_get_function(module, kernel::NAME), ErrorCode::NOT_FOUND);
    bound.module_unload(module).unwrap();
}

fn a_loaded_module_keeps_what_the_log_held(on: &Subject) {
    let bound = on.bind();
    let mut log = "before\n".to_owned();
    let module = bound.module_load_data(kernel::PTX, &mut log).unwrap();
    assert!(log.starts_with("before\n"), "{log}");
    bound.module_unload(module).unwrap();
}

fn text_that_is_no_ptx_is_refused(on: &Subject) {
    unloadable(&on.bind(), "no PTX at all", ErrorCode::INVALID_IMAGE);
}

fn ptx_that_is_too_new_is_refused(on: &Subject) {
    let ptx = kernel::PTX.replace(".version 7.0", ".version 99.0");
    unloadable(&on.bind(), &ptx, ErrorCode::UNSUPPORTED_PTX_VERSION);
}

fn ptx_for_a_newer_device_is_refused(on: &Subject) {
    let ptx = kernel::PTX
        .replace(".version 7.0", ".version 8.6")
        .replace(".target sm_80", ".target sm_100");
    unloadable(&on.bind(), &ptx, ErrorCode::INVALID_PTX);
}

fn ptx_without_a_version_is_refused(on: &Subject) {
    let ptx = kernel::PTX.replace(".version 7.0", "");
    unloadable(&on.bind(), &ptx, ErrorCode::INVALID_IMAGE);
}

fn ptx_without_a_target_is_refused(on: &Subject) {
    let ptx = kernel::PTX.replace(".target sm_80", "");
    unloadable(&on.bind(), &ptx, ErrorCode::INVALID_PTX);
}

fn an_elf_binary_is_refused(on: &Subject) {
    unloadable(&on.bind(), "\x7fELF\x02\x01\x01", ErrorCode::INVALID_IMAGE);
}

fn ptx_with_a_nul_is_refused(on: &Subject) {
    unloadable(&on.bind(), &kernel::PTX.replace(".entry", "\0"), ErrorCode::INVALID_IMAGE);
}

fn a_refusal_says_something(on: &Subject) {
    let ptx = kernel::PTX.replace(".version 7.0", ".version 99.0");
    let log = unloadable(&on.bind(), &ptx, ErrorCode::UNSUPPORTED_PTX_VERSION);
    assert!(log.contains("99.0"), "{log}");
}

fn a_refusal_is_no_loss(on: &Subject) {
    let bound = on.bind();
    unloadable(&bound, "no PTX at all", ErrorCode::INVALID_IMAGE);
    let memory = bound.alloc(64);
    bound.memset_d8_async(*memory, 1, 64, 0).unwrap();
    assert_eq!(bound.read(*memory, 64), [1; 64]);
    assert_ne!(*bound.module(), 0);
}

fn a_kernel_is_found_by_its_name(on: &Subject) {
    let bound = on.bind();
    let module = bound.module();
    assert_ne!(bound.module_get_function(*module, kernel::NAME).unwrap(), 0);
}

fn a_kernel_is_found_twice(on: &Subject) {
    let bound = on.bind();
    let module = bound.module();
    let find = || bound.module_get_function(*module, kernel::NAME).unwrap();
    assert_eq!(find(), find());
}

fn a_kernel_that_is_not_there_is_not_found(on: &Subject) {
    let bound = on.bind();
    refused(bound.module_get_function(*bound.module(), "no_such_kernel"), ErrorCode::NOT_FOUND);
}

fn a_prefix_of_a_name_is_not_found(on: &Subject) {
    let bound = on.bind();
    refused(bound.module_get_function(*bound.module(), "write_place"), ErrorCode::NOT_FOUND);
}

fn a_name_with_a_nul_is_not_found(on: &Subject) {
    let bound = on.bind();
    refused(bound.module_get_function(*bound.module(), "write_places\0"), ErrorCode::NOT_FOUND);
}

fn empty_text_is_refused(on: &Subject) {
    unloadable(&on.bind(), "", ErrorCode::INVALID_IMAGE);
}

fn blank_text_is_refused(on: &Subject) {
    unloadable(&on.bind(), " \n\n", ErrorCode::INVALID_IMAGE);
}

fn an_empty_name_is_refused(on: &Subject) {
    let bound = on.bind();
    refused(bound.module_get_function(*bound.module(), ""), ErrorCode::INVALID_VALUE);
}

fn the_null_module_is_not_unloaded(on: &Subject) {
    refused(on.bind().module_unload(0), ErrorCode::INVALID_HANDLE);
}

fn the_null_module_has_no_kernels(on: &Subject) {
    refused(on.bind().module_get_function(0, kernel::NAME), ErrorCode::INVALID_HANDLE);
}

fn a_module_is_unloaded_once(on: &Subject) {
    let bound = on.bind();
    let module = bound.module_load_data(kernel::PTX, &mut String::new()).unwrap();
    bound.module_unload(module).unwrap();
    refused(bound.module_unload(module), ErrorCode::INVALID_HANDLE);
}

fn an_unloaded_module_has_no_kernels(on: &Subject) {
    let bound = on.bind();
    let module = bound.module_load_data(kernel::PTX, &mut String::new()).unwrap();
    bound.module_unload(module).unwrap();
    refused(bound.module_get_function(module, kernel::NAME), ErrorCode::INVALID_HANDLE);
}
