//! A lost device: an illegal access, and the answers of all later calls.

use cuda_driver::{ErrorCode, HostAllocFlags, KernelArgs, LaunchConfig};

use super::bound::Bound;
use super::{Case, Needs, Subject, cases, refused};
use crate::common::kernel;

pub(crate) const PROCESS: &[Case] = cases![Needs::Process;
    a_kernel_that_writes_nowhere_loses_the_device,
    a_kernel_that_writes_to_null_loses_the_device,
    a_kernel_that_writes_to_reserved_addresses_loses_the_device,
    a_kernel_that_writes_without_access_loses_the_device,
    a_kernel_that_writes_to_unmapped_memory_loses_the_device,
    a_word_written_at_an_odd_address_loses_the_device,
    a_vector_read_at_half_its_width_loses_the_device,
    the_fault_shows_when_a_stream_synchronises,
    the_fault_shows_when_an_event_synchronises,
    the_fault_shows_when_memory_is_freed,
    a_lost_device_makes_and_runs_nothing_and_answers_no_queries,
    a_lost_device_knows_itself_and_still_has_virtual_memory,
    clean_up_on_a_lost_device_answers_the_error,
    virtual_memory_of_a_lost_device_is_given_back,
    virtual_memory_of_a_lost_device_is_released_while_mapped,
    a_lost_context_can_be_released,
];

/// Kernels that access `place` with a width of 4 and of 16 bytes. The simulated device knows no other
/// meaning of them, so it runs what stands here, as a card does.
const ACCESSES: &str = "
.version 7.0
.target sm_80
.address_size 64

.visible .entry store_word(
    .param .u64 place
)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<3>;

    ld.param.u64 %rd1, [place];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, 7;
    st.global.u32 [%rd2], %r1;
    ret;
}

.visible .entry load_pair(
    .param .u64 place
)
{
    .reg .b64 %rd<6>;

    ld.param.u64 %rd1, [place];
    cvta.to.global.u64 %rd2, %rd1;
    ld.global.v2.u64 {%rd3, %rd4}, [%rd2];
    xor.b64 %rd5, %rd3, %rd4;
    st.global.u64 [%rd2], %rd5;
    ret;
}
";

const ILLEGAL: ErrorCode = ErrorCode::ILLEGAL_ADDRESS;

/// Launches the test kernel so that it writes at `address`.
fn write_at(bound: &Bound<'_>, address: u64, stream: u64) {
    let module = bound.module_load_data(kernel::PTX, &mut String::new()).unwrap();
    let function = bound.module_get_function(module, kernel::NAME).unwrap();
    let args = KernelArgs::new().arg(address).arg(1u32).arg(64u32);
    bound.expect_loss();
    bound.launch_kernel(function, &LaunchConfig::linear(1, 64), &args, stream).unwrap();
}

/// Loses the device.
fn lose(bound: &Bound<'_>) {
    write_at(bound, 0x1000, 0);
    refused(bound.ctx_synchronize(), ILLEGAL);
}

fn a_kernel_that_writes_nowhere_loses_the_device(on: &Subject) {
    let bound = on.bind();
    lose(&bound);
    refused(bound.ctx_synchronize(), ILLEGAL);
}

fn a_kernel_that_writes_to_null_loses_the_device(on: &Subject) {
    let bound = on.bind();
    write_at(&bound, 0, 0);
    refused(bound.ctx_synchronize(), ILLEGAL);
}

fn a_kernel_that_writes_to_reserved_addresses_loses_the_device(on: &Subject) {
    let bound = on.bind();
    let range = bound.range(1);
    write_at(&bound, range.base, 0);
    refused(bound.ctx_synchronize(), ILLEGAL);
}

fn a_kernel_that_writes_without_access_loses_the_device(on: &Subject) {
    let bound = on.bind();
    let (range, handle) = (bound.range(1), bound.physical(1));
    range.map(0, 1, *handle).unwrap();
    write_at(&bound, range.base, 0);
    refused(bound.ctx_synchronize(), ILLEGAL);
}

fn a_kernel_that_writes_to_unmapped_memory_loses_the_device(on: &Subject) {
    let bound = on.bind();
    let (range, handle) = (bound.range(1), bound.physical(1));
    range.map_usable(0, 1, *handle);
    bound.write(range.base, &[1; 64]);
    range.unmap(0, 1).unwrap();
    write_at(&bound, range.base, 0);
    refused(bound.ctx_synchronize(), ILLEGAL);
}

/// Runs a kernel of [`ACCESSES`] in the middle of an allocation: first where it may, then `off` bytes
/// further, which loses the device.
fn misaligned(on: &Subject, name: &str, off: u64) {
    let bound = on.bind();
    let memory = bound.alloc(256);
    bound.write(*memory, &[1; 256]);
    let module = bound.module_load_data(ACCESSES, &mut String::new()).unwrap();
    let function = bound.module_get_function(module, name).unwrap();
    let launch = |place: u64| {
        let args = KernelArgs::new().arg(place);
        bound.launch_kernel(function, &LaunchConfig::linear(1, 1), &args, 0).unwrap();
        bound.ctx_synchronize()
    };
    assert_eq!(launch(*memory + 64), Ok(()));
    bound.expect_loss();
    refused(launch(*memory + 64 + off), ErrorCode::MISALIGNED_ADDRESS);
    refused(bound.mem_alloc(64), ErrorCode::MISALIGNED_ADDRESS);
}

fn a_word_written_at_an_odd_address_loses_the_device(on: &Subject) {
    misaligned(on, "store_word", 2);
}

fn a_vector_read_at_half_its_width_loses_the_device(on: &Subject) {
    misaligned(on, "load_pair", 8);
}

fn the_fault_shows_when_a_stream_synchronises(on: &Subject) {
    let bound = on.bind();
    let stream = bound.stream();
    write_at(&bound, 0x1000, *stream);
    refused(bound.stream_synchronize(*stream), ILLEGAL);
    refused(bound.stream_query(*stream), ILLEGAL);
}

fn the_fault_shows_when_an_event_synchronises(on: &Subject) {
    let bound = on.bind();
    let (stream, event) = (bound.stream(), bound.event());
    write_at(&bound, 0x1000, *stream);
    // A device that is quick has run the kernel by now, and refuses the record already.
    if let Err(error) = bound.event_record(*event, *stream) {
        assert_eq!(error.code, ILLEGAL);
    }
    refused(bound.event_synchronize(*event), ILLEGAL);
    refused(bound.event_query(*event), ILLEGAL);
}

fn the_fault_shows_when_memory_is_freed(on: &Subject) {
    let bound = on.bind();
    let memory = bound.mem_alloc(64).unwrap();
    write_at(&bound, 0x1000, 0);
    refused(bound.mem_free(memory), ILLEGAL);
}

fn a_lost_device_makes_and_runs_nothing_and_answers_no_queries(on: &Subject) {
    let bound = on.bind();
    let (memory, host, stream, event) =
        (bound.alloc(64), bound.pinned(64), bound.stream(), bound.event());
    lose(&bound);
    refused(bound.mem_alloc(64), ILLEGAL);
    refused(bound.mem_host_alloc(64, HostAllocFlags::CACHED), ILLEGAL);
    refused(bound.stream_create(false), ILLEGAL);
    refused(bound.event_create(false), ILLEGAL);
    refused(bound.module_load_data(kernel::PTX, &mut String::new()), ILLEGAL);

    refused(bound.memset_d8_async(*memory, 0, 64, *stream), ILLEGAL);
    refused(bound.memcpy_htod_async(*memory, *host, 64, *stream), ILLEGAL);
    refused(bound.memcpy_dtoh_async(*host, *memory, 64, *stream), ILLEGAL);
    refused(bound.memcpy_dtod_async(*memory, *memory, 64, *stream), ILLEGAL);
    refused(bound.event_record(*event, *stream), ILLEGAL);
    refused(bound.stream_wait_event(*stream, *event), ILLEGAL);

    refused(bound.mem_get_info(), ILLEGAL);
    refused(bound.stream_query(*stream), ILLEGAL);
    refused(bound.stream_synchronize(*stream), ILLEGAL);
    refused(bound.stream_get_ctx(*stream), ILLEGAL);
    refused(bound.event_query(*event), ILLEGAL);
    refused(bound.event_synchronize(*event), ILLEGAL);
    refused(bound.mem_host_get_device_pointer(*host), ILLEGAL);
}

fn a_lost_device_knows_itself_and_still_has_virtual_memory(on: &Subject) {
    let bound = on.bind();
    let (info, page) = (bound.device_get_info(0).unwrap(), bound.page());
    let (range, handle) = (bound.range(2), bound.physical(1));
    range.map(1, 1, *bound.physical(1)).unwrap();
    lose(&bound);
    assert_eq!(bound.ctx_get_current(), Ok(bound.context));
    assert_eq!(bound.ctx_get_device(), Ok(0));
    assert_eq!(bound.ctx_set_current(bound.context), Ok(()));
    assert_eq!(bound.device_get_info(0), Ok(info));
    assert!(bound.device_get_count().unwrap() >= 1);
    assert_eq!(bound.page(), page);
    let base = bound.mem_address_reserve(page, 0, 0).unwrap();
    assert_eq!(bound.mem_address_free(base, page), Ok(()));
    let made = bound.mem_create(page, bound.prop()).unwrap();
    assert_eq!(bound.mem_release(made), Ok(()));
    assert_eq!(range.map(0, 1, *handle), Ok(()));
    assert_eq!(range.give_access(1, 1), Ok(()));
}

fn clean_up_on_a_lost_device_answers_the_error(on: &Subject) {
    let bound = on.bind();
    let stream = bound.stream_create(false).unwrap();
    let event = bound.event_create(false).unwrap();
    let memory = bound.mem_alloc(64).unwrap();
    let host = bound.mem_host_alloc(64, HostAllocFlags::CACHED).unwrap();
    let module = bound.module_load_data(kernel::PTX, &mut String::new()).unwrap();
    lose(&bound);
    refused(bound.stream_destroy(stream), ILLEGAL);
    refused(bound.event_destroy(event), ILLEGAL);
    refused(bound.mem_free(memory), ILLEGAL);
    refused(bound.mem_free_host(host), ILLEGAL);
    refused(bound.module_unload(module), ILLEGAL);
}

/// A page of device memory, mapped and usable, and a lost device.
fn lost_with_a_mapping(on: &Subject, check: impl FnOnce(&Bound<'_>, u64, u64, u64)) {
    let bound = on.bind();
    let page = bound.page();
    let base = bound.mem_address_reserve(page, 0, 0).unwrap();
    let handle = bound.mem_create(page, bound.prop()).unwrap();
    bound.mem_map(base, page, 0, handle).unwrap();
    bound.mem_set_access(base, page, &bound.access()).unwrap();
    lose(&bound);
    check(&bound, base, page, handle);
}

fn virtual_memory_of_a_lost_device_is_given_back(on: &Subject) {
    lost_with_a_mapping(on, |bound, base, page, handle| {
        assert_eq!(bound.mem_unmap(base, page), Ok(()));
        assert_eq!(bound.mem_release(handle), Ok(()));
        assert_eq!(bound.mem_address_free(base, page), Ok(()));
    });
}

fn virtual_memory_of_a_lost_device_is_released_while_mapped(on: &Subject) {
    lost_with_a_mapping(on, |bound, base, page, handle| {
        assert_eq!(bound.mem_release(handle), Ok(()));
        assert_eq!(bound.mem_unmap(base, page), Ok(()));
        assert_eq!(bound.mem_address_free(base, page), Ok(()));
    });
}

fn a_lost_context_can_be_released(on: &Subject) {
    let bound = on.bind();
    lose(&bound);
    drop(bound);
    assert_eq!(on.driver.ctx_get_current(), Ok(0));
    refused(on.driver.device_primary_ctx_retain(0), ILLEGAL);
}
