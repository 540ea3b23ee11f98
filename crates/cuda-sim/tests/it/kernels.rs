//! Kernels through the driver's calls: run from PTX or by a reference, and refused launches.

use crate::common::{download, seeded, sync};
use cuda_driver::{Driver, ErrorCode, KernelArgs, LaunchConfig};
use cuda_sim::{FindingKind, SimDriver};

/// `count(to, value)`: thread i of the grid writes `value` + i.
const COUNT: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry count(.param .u64 to, .param .u32 value)
.maxntid 64, 1, 1
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<6>;
    ld.param.u64 %rd0, [to];
    ld.param.u32 %r0, [value];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.s32 %r4, %r1, %r2, %r3;
    add.s32 %r5, %r4, %r0;
    mul.wide.u32 %rd1, %r4, 4;
    add.s64 %rd2, %rd0, %rd1;
    st.global.u32 [%rd2], %r5;
    ret;
}
";

fn count(sim: &SimDriver) -> u64 {
    let module = sim.module_load_data(COUNT, &mut String::new()).unwrap();
    // SAFETY: the module was loaded just now.
    unsafe { sim.module_get_function(module, "count") }.unwrap()
}

fn launch_as(
    sim: &SimDriver,
    function: u64,
    (blocks, threads): (u32, u32),
    args: &KernelArgs,
) -> Result<(), ErrorCode> {
    let config = LaunchConfig::linear(blocks, threads);
    // SAFETY: the simulated device checks the arguments and every access.
    unsafe { sim.launch_kernel(function, &config, args, 0) }.map_err(|error| error.code)
}

#[test]
fn a_kernel_without_a_reference_runs_from_its_ptx() {
    let sim = seeded(0);
    let to = sim.mem_alloc(4 * 96).unwrap();
    let args = KernelArgs::new().arg(to).arg(1000u32);
    launch_as(&sim, count(&sim), (3, 32), &args).unwrap();
    let found = download(&sim, to, 4 * 96, 0).unwrap();
    let expected: Vec<u8> = (1000..1096u32).flat_map(u32::to_le_bytes).collect();
    assert_eq!(found, expected);
    assert_eq!(sim.instructions(), 96 * 11);
    assert!(sim.findings().is_empty(), "{:?}", sim.findings());
}

#[test]
fn launches_that_the_kernel_does_not_allow_are_refused() {
    let sim = seeded(0);
    let function = count(&sim);
    let right = KernelArgs::new().arg(0u64).arg(0u32);
    for (threads, args, words) in [
        (65, right, "65 threads in a block, but .maxntid allows 64"),
        (64, KernelArgs::new().arg(0u64), "1 arguments for 2 parameters"),
        (
            64,
            KernelArgs::new().arg(0u64).arg(0u64),
            "argument 1 has 8 bytes, but its parameter has 4",
        ),
    ] {
        assert_eq!(launch_as(&sim, function, (1, threads), &args), Err(ErrorCode::INVALID_VALUE));
        let finding = sim.findings().pop().unwrap();
        assert_eq!((finding.kind, finding.detail.as_str()), (FindingKind::InvalidLaunch, words));
    }
    sync(&sim, 0).unwrap();
}
