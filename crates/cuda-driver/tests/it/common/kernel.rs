//! A kernel that writes `value + i` at index `i`: its PTX and its CPU reference.

use cuda_driver::reference::{DeviceMemory, KernelReference, ReferenceError, ReferenceFn};
use cuda_driver::{KernelArgs, LaunchConfig};

pub(crate) const PTX: &str = "
.version 7.0
.target sm_80
.address_size 64

.visible .entry write_places(
    .param .u64 places,
    .param .u32 value,
    .param .u32 count
)
{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<5>;

    ld.param.u64 %rd1, [places];
    ld.param.u32 %r1, [value];
    ld.param.u32 %r2, [count];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r6, %r3, %r4, %r5;
    setp.ge.u32 %p1, %r6, %r2;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r6, 4;
    add.u64 %rd4, %rd2, %rd3;
    add.u32 %r7, %r1, %r6;
    st.global.u32 [%rd4], %r7;
DONE:
    ret;
}
";

pub(crate) const NAME: &str = "write_places";

pub(crate) const REFERENCE: KernelReference =
    KernelReference { name: NAME, run: reference as ReferenceFn };

fn reference(
    memory: &mut dyn DeviceMemory,
    config: &LaunchConfig,
    args: &KernelArgs,
) -> Result<(), ReferenceError> {
    let places: u64 = args.get(0).ok_or(ReferenceError::Argument { index: 0 })?;
    let value: u32 = args.get(1).ok_or(ReferenceError::Argument { index: 1 })?;
    let count: u32 = args.get(2).ok_or(ReferenceError::Argument { index: 2 })?;
    for i in 0..count.min(config.grid[0] * config.block[0]) {
        memory.store(places + 4 * u64::from(i), &value.wrapping_add(i).to_le_bytes())?;
    }
    Ok(())
}

/// What lies at the first `count` places after a launch with `value`.
pub(crate) fn written(value: u32, count: u32) -> Vec<u8> {
    (0..count).flat_map(|i| (value + i).to_le_bytes()).collect()
}
