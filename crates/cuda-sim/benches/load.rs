//! Time of one load of a kernel reference: the inner step of every verified replay.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program that prints its result")]

use std::hint::black_box;
use std::time::Instant;

use cuda_driver::reference::{KernelReference, ReferenceError};
use cuda_driver::{AccessDesc, AllocationProp, Driver, KernelArgs, LaunchConfig};
use cuda_sim::{SimConfig, SimDriver};

const PAGE: u64 = 2 << 20;
const PAGES: u64 = 256;
const LOADS: u64 = 4_000_000;
const BLOCK_BYTES: u64 = 4096;

const LOAD: &[KernelReference] = &[KernelReference {
    name: "load",
    run: |memory, _, args| {
        let base = args.get::<u64>(0).ok_or(ReferenceError::Argument { index: 0 })?;
        for page in 0..PAGES {
            // The first access of a page fills it, which must not be measured.
            black_box(memory.load(base + page * PAGE, 1)?.len());
        }
        let mut state = 1u64;
        let start = Instant::now();
        for _ in 0..LOADS {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let block = (state >> 33) % (PAGES * PAGE / BLOCK_BYTES);
            black_box(memory.load(base + block * BLOCK_BYTES, BLOCK_BYTES)?.len());
        }
        let each = start.elapsed().as_nanos() as f64 / LOADS as f64;
        println!("load of {BLOCK_BYTES} bytes at random in {PAGES} pages: {each:.1} ns");
        Ok(())
    },
}];

fn main() {
    let sim = SimDriver::new(SimConfig::default()).unwrap();
    sim.register_kernels(LOAD);
    let context = sim.device_primary_ctx_retain(0).unwrap();
    // SAFETY: the context was retained above.
    unsafe { sim.ctx_set_current(context) }.unwrap();
    let base = sim.mem_address_reserve(PAGES * PAGE, 0, 0).unwrap();
    for page in 0..PAGES {
        let handle = sim.mem_create(PAGE, AllocationProp::on(0)).unwrap();
        // SAFETY: the handle was created above.
        unsafe { sim.mem_map(base + page * PAGE, PAGE, 0, handle) }.unwrap();
    }
    sim.mem_set_access(base, PAGES * PAGE, &[AccessDesc { device: 0 }]).unwrap();
    let ptx = ".version 8.0\n.target sm_80\n.visible .entry load(.param .u64 base) { ret; }";
    let module = sim.module_load_data(ptx, &mut String::new()).unwrap();
    // SAFETY: the module was loaded above.
    let function = unsafe { sim.module_get_function(module, "load") }.unwrap();
    for argument in [base, sim.mem_alloc(PAGES * PAGE).unwrap()] {
        let args = KernelArgs::new().arg(argument);
        // SAFETY: the argument is the one that the reference takes, and names device memory.
        unsafe { sim.launch_kernel(function, &LaunchConfig::linear(1, 32), &args, 0) }.unwrap();
        sim.ctx_synchronize().unwrap();
    }
}
