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
    text_that_cannot_be_loaded_is_refused_without_loss,
    a_kernel_is_found_by_its_whole_name,
    unloading_waits_for_the_work_of_the_device,
];

pub(crate) const PROCESS: &[Case] = cases![Needs::Process;
    empty_text_and_an_empty_name_are_refused,
    the_null_module_is_refused,
];

pub(crate) const SIMULATED: &[Case] = cases![
    Needs::Simulation("a driver follows the handle of a module");
    an_unloaded_module_is_refused,
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

fn text_that_cannot_be_loaded_is_refused_without_loss(on: &Subject) {
    let bound = on.bind();
    let with = |from: &str, to: &str| kernel::PTX.replace(from, to);
    let newer_device =
        with(".version 7.0", ".version 8.6").replace(".target sm_80", ".target sm_100");
    for (text, code) in [
        ("no PTX at all", ErrorCode::INVALID_IMAGE),
        (&newer_device, ErrorCode::INVALID_PTX),
        (&with(".version 7.0", ""), ErrorCode::INVALID_IMAGE),
        (&with(".target sm_80", ""), ErrorCode::INVALID_PTX),
        ("\x7fELF\x02\x01\x01", ErrorCode::INVALID_IMAGE),
        (&with(".entry", "\0"), ErrorCode::INVALID_IMAGE),
    ] {
        unloadable(&bound, text, code);
    }
    let log = unloadable(
        &bound,
        &with(".version 7.0", ".version 99.0"),
        ErrorCode::UNSUPPORTED_PTX_VERSION,
    );
    assert!(log.contains("99.0"), "{log}");
    let memory = bound.alloc(64);
    bound.memset_d8_async(*memory, 1, 64, 0).unwrap();
    assert_eq!(bound.read(*memory, 64), [1; 64]);
    assert_ne!(*bound.module(), 0);
}

fn a_kernel_is_found_by_its_whole_name(on: &Subject) {
    let bound = on.bind();
    let module = bound.module();
    let find = || bound.module_get_function(*module, kernel::NAME).unwrap();
    assert_ne!(find(), 0);
    assert_eq!(find(), find());
    for name in ["no_such_kernel", "write_place", "write_places\0"] {
        refused(bound.module_get_function(*module, name), ErrorCode::NOT_FOUND);
    }
}

fn empty_text_and_an_empty_name_are_refused(on: &Subject) {
    let bound = on.bind();
    for text in ["", " \n\n"] {
        unloadable(&bound, text, ErrorCode::INVALID_IMAGE);
    }
    refused(bound.module_get_function(*bound.module(), ""), ErrorCode::INVALID_VALUE);
}

fn the_null_module_is_refused(on: &Subject) {
    let bound = on.bind();
    refused(bound.module_unload(0), ErrorCode::INVALID_HANDLE);
    refused(bound.module_get_function(0, kernel::NAME), ErrorCode::INVALID_HANDLE);
}

fn an_unloaded_module_is_refused(on: &Subject) {
    let bound = on.bind();
    let module = bound.module_load_data(kernel::PTX, &mut String::new()).unwrap();
    bound.module_unload(module).unwrap();
    refused(bound.module_unload(module), ErrorCode::INVALID_HANDLE);
    refused(bound.module_get_function(module, kernel::NAME), ErrorCode::INVALID_HANDLE);
}
