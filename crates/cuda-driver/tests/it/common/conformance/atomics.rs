//! Additions of many threads, copies over themselves and loads by the other cache: what a card does
//! right, and what it may do wrong.
//!
//! Where nothing orders the accesses, a card may be right by chance. Such a case prints what the card
//! has done, and the simulated device must report it.

#![allow(clippy::print_stdout, reason = "what a card has lost is told, whether or not it is wrong")]

use cuda_driver::{KernelArgs, LaunchConfig};
use cuda_sim::FindingKind;

use super::bound::Bound;
use super::{Case, Needs, Subject, cases};

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    additions_of_many_blocks_are_all_there_at_the_scope_of_the_device,
    additions_of_one_block_are_all_there_at_its_own_scope,
    additions_of_many_blocks_at_the_scope_of_a_block_may_be_lost,
    additions_of_two_widths_may_be_lost,
    a_copy_over_itself_may_read_what_it_has_written,
    a_load_by_the_other_cache_may_miss_what_the_kernel_has_written,
];

pub(crate) const PAIRS: &[Case] = cases![Needs::Pair;
    additions_of_two_devices_are_all_there_at_the_scope_of_the_system,
    additions_of_two_devices_at_the_scope_of_one_may_be_lost,
    additions_of_two_devices_in_memory_of_the_host_may_be_lost,
];

/// Additions of each thread.
const TIMES: u32 = 8;
/// Threads of a block.
const THREADS: u32 = 64;

/// A kernel whose threads do `body` [`TIMES`] times, with `%to` and the number `%t` of a thread.
fn repeated(body: &str) -> String {
    format!(
        "
.version 7.0
.target sm_80
.address_size 64

.visible .entry repeated(
    .param .u64 to
)
{{
    .reg .pred %p, %q;
    .reg .b32 %i, %t, %r;
    .reg .b64 %to;

    ld.param.u64 %to, [to];
    cvta.to.global.u64 %to, %to;
    mov.u32 %t, %tid.x;
    mov.u32 %i, 0;
AGAIN:
    {body}
    add.u32 %i, %i, 1;
    setp.lt.u32 %p, %i, {TIMES};
    @%p bra AGAIN;
    ret;
}}
"
    )
}

fn adding(scope: &str) -> String {
    repeated(&format!("red{scope}.global.add.u32 [%to], 1;"))
}

/// Enqueues the kernel of `ptx` in the default stream of the bound device, which is current.
fn start(bound: &Bound<'_>, module: u64, to: u64, blocks: u32) {
    let function = bound.module_get_function(module, "repeated").unwrap();
    let args = KernelArgs::new().arg(to);
    bound.launch_kernel(function, &LaunchConfig::linear(blocks, THREADS), &args, 0).unwrap();
}

fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// What lies in memory of 8 bytes after `blocks` blocks have run the kernel of `ptx`.
fn run(on: &Subject, ptx: &str, blocks: u32) -> u64 {
    let bound = on.bind();
    let (memory, module) = (bound.alloc(8), bound.module_of(ptx));
    bound.write(*memory, &[0; 8]);
    start(&bound, *module, *memory, blocks);
    bound.ctx_synchronize().unwrap();
    word(&bound.read(*memory, 8))
}

/// Tells how many of the additions are there. There are never more.
fn tell(name: &str, found: u64, of: u64) {
    println!("{name}: {found} of {of} additions are there");
    assert!(found <= of, "{name}: {found} of {of}");
}

/// Holds the simulated device to whether it has found a conflict.
#[track_caller]
fn finds(on: &Subject, kind: FindingKind, found: bool) {
    if let Some(sim) = &on.sim {
        let all = sim.findings();
        assert_eq!(all.iter().any(|finding| finding.kind == kind), found, "{all:?}");
    }
}

fn additions_of_many_blocks_are_all_there_at_the_scope_of_the_device(on: &Subject) {
    const BLOCKS: u32 = 32;
    for scope in ["", ".gpu", ".sys"] {
        let found = run(on, &adding(scope), BLOCKS);
        assert_eq!(found, u64::from(BLOCKS * THREADS * TIMES), "{scope:?}");
    }
    finds(on, FindingKind::Conflict, false);
}

fn additions_of_one_block_are_all_there_at_its_own_scope(on: &Subject) {
    assert_eq!(run(on, &adding(".cta"), 1), u64::from(THREADS * TIMES));
    finds(on, FindingKind::Conflict, false);
}

fn additions_of_many_blocks_at_the_scope_of_a_block_may_be_lost(on: &Subject) {
    const BLOCKS: u32 = 32;
    let found = run(on, &adding(".cta"), BLOCKS);
    tell("scope of a block", found, u64::from(BLOCKS * THREADS * TIMES));
    finds(on, FindingKind::Conflict, true);
}

/// Half of the threads add to the low half of the word that the others add to.
fn additions_of_two_widths_may_be_lost(on: &Subject) {
    const BLOCKS: u32 = 32;
    let body = "setp.lt.u32 %q, %t, 32;
    @%q red.global.add.u32 [%to], 1;
    @!%q red.global.add.u64 [%to], 1;";
    tell("two widths", run(on, &repeated(body), BLOCKS), u64::from(BLOCKS * THREADS * TIMES));
    finds(on, FindingKind::Conflict, true);
}

fn a_copy_over_itself_may_read_what_it_has_written(on: &Subject) {
    const BYTES: usize = 1 << 20;
    const BY: usize = 4096;
    let bound = on.bind();
    let memory = bound.alloc((BYTES + BY) as u64);
    let data: Vec<u8> = (0..BYTES + BY).map(|i| (i / 4096 * 7 + i) as u8).collect();
    for (name, to, from) in [("up", BY, 0), ("down", 0, BY)] {
        bound.write(*memory, &data);
        bound
            .memcpy_dtod_async(*memory + to as u64, *memory + from as u64, BYTES as u64, 0)
            .unwrap();
        let found = bound.read(*memory + to as u64, BYTES);
        let right = &data[from..from + BYTES];
        let wrong = found.iter().zip(right).filter(|(found, right)| found != right).count();
        println!("a copy by {BY} bytes {name}: {wrong} of {BYTES} bytes are wrong");
    }
    finds(on, FindingKind::Conflict, true);
    // Beside itself it is a copy.
    bound.write(*memory, &data);
    bound.memcpy_dtod_async(*memory + BY as u64, *memory, BY as u64, 0).unwrap();
    assert!(bound.read(*memory + BY as u64, BY) == data[..BY]);
}

fn a_load_by_the_other_cache_may_miss_what_the_kernel_has_written(on: &Subject) {
    let body = "ld.global.nc.u32 %r, [%to];
    bar.sync 0;
    setp.eq.u32 %q, %t, 0;
    @%q st.global.u32 [%to], 7;
    bar.sync 0;
    ld.global.nc.u32 %r, [%to];
    @%q st.global.u32 [%to+4], %r;
    bar.sync 0;";
    let found = run(on, &repeated(body), 1) >> 32;
    println!("behind a store of 7 the other cache has {found}");
    assert!(found == 0 || found == 7, "{found}");
    finds(on, FindingKind::Conflict, true);
}

/// Where the additions of two devices go.
#[derive(Clone, Copy)]
enum Place {
    FirstDevice,
    Host,
}

/// What lies in memory after two devices have run the kernel of `ptx` at once.
fn run_on_both(on: &Subject, ptx: &str, blocks: u32, place: Place) -> u64 {
    let second = on.bind_device(1);
    let first = on.bind_device(0);
    let (memory, host) = (first.alloc(8), first.pinned(8));
    first.write(*memory, &[0; 8]);
    first.memcpy_dtoh_async(*host, *memory, 8, 0).unwrap();
    first.ctx_synchronize().unwrap();
    let (to, module) = match place {
        Place::FirstDevice => (*memory, first.module_of(ptx)),
        Place::Host => (*host, first.module_of(ptx)),
    };
    second.make_current();
    second.ctx_enable_peer_access(first.context).unwrap();
    let other = second.module_of(ptx);
    first.make_current();
    start(&first, *module, to, blocks);
    second.make_current();
    start(&second, *other, to, blocks);
    second.ctx_synchronize().unwrap();
    second.ctx_disable_peer_access(first.context).unwrap();
    drop(other);
    first.make_current();
    first.ctx_synchronize().unwrap();
    match place {
        Place::FirstDevice => word(&first.read(*memory, 8)),
        // By way of the device, as what the host reads itself is told of by nobody here.
        Place::Host => {
            first.memcpy_htod_async(*memory, *host, 8, 0).unwrap();
            word(&first.read(*memory, 8))
        }
    }
}

const BLOCKS_OF_EACH: u32 = 64;
const ADDITIONS_OF_BOTH: u64 = 2 * (BLOCKS_OF_EACH * THREADS * TIMES) as u64;

fn additions_of_two_devices_are_all_there_at_the_scope_of_the_system(on: &Subject) {
    let found = run_on_both(on, &adding(".sys"), BLOCKS_OF_EACH, Place::FirstDevice);
    assert_eq!(found, ADDITIONS_OF_BOTH);
}

fn additions_of_two_devices_at_the_scope_of_one_may_be_lost(on: &Subject) {
    let found = run_on_both(on, &adding(".gpu"), BLOCKS_OF_EACH, Place::FirstDevice);
    tell("memory of a device, scope of a device", found, ADDITIONS_OF_BOTH);
    finds(on, FindingKind::Race, true);
}

fn additions_of_two_devices_in_memory_of_the_host_may_be_lost(on: &Subject) {
    for scope in [".gpu", ".sys"] {
        let found = run_on_both(on, &adding(scope), BLOCKS_OF_EACH, Place::Host);
        tell(&format!("memory of the host, scope {scope}"), found, ADDITIONS_OF_BOTH);
        finds(on, FindingKind::Race, true);
    }
}
