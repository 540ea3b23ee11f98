//! A layer: `activation[i] = activation[i] * 3 + weight[i]`, in words of 32 bits.

use cuda_driver::reference::{DeviceMemory, KernelReference, ReferenceError, ReferenceFn};
use cuda_driver::{
    Device, DeviceError, DeviceSpan, Kernel, KernelArgs, LaunchConfig, Module, Stream,
};

const PTX: &str = "
.version 7.0
.target sm_80
.address_size 64

.visible .entry layer(
    .param .u64 activation,
    .param .u64 weight,
    .param .u32 count
)
{
    .reg .pred %p<2>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<8>;

    ld.param.u64 %rd1, [activation];
    ld.param.u64 %rd2, [weight];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mul.wide.u32 %rd5, %r5, 4;
    add.u64 %rd6, %rd3, %rd5;
    add.u64 %rd7, %rd4, %rd5;
    ld.global.u32 %r6, [%rd6];
    ld.global.u32 %r7, [%rd7];
    mad.lo.u32 %r8, %r6, 3, %r7;
    st.global.u32 [%rd6], %r8;
DONE:
    ret;
}
";

const THREADS: u32 = 128;

pub(crate) const REFERENCE: KernelReference =
    KernelReference { name: "layer", run: reference as ReferenceFn };

fn reference(
    memory: &mut dyn DeviceMemory,
    _: &LaunchConfig,
    args: &KernelArgs,
) -> Result<(), ReferenceError> {
    let activation: u64 = args.get(0).ok_or(ReferenceError::Argument { index: 0 })?;
    let weight: u64 = args.get(1).ok_or(ReferenceError::Argument { index: 1 })?;
    let count: u32 = args.get(2).ok_or(ReferenceError::Argument { index: 2 })?;
    for place in (0..u64::from(count)).map(|i| 4 * i) {
        let a = word(&memory.load(activation + place, 4)?);
        let w = word(&memory.load(weight + place, 4)?);
        let sum = a.wrapping_mul(3).wrapping_add(w);
        memory.store(activation + place, &sum.to_le_bytes())?;
    }
    Ok(())
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().unwrap())
}

/// The kernel, compiled for one device.
pub(crate) fn load(device: &Device) -> Kernel {
    Module::load(device, PTX).unwrap().kernel("layer").unwrap()
}

/// Enqueues one layer.
pub(crate) fn launch(
    kernel: &Kernel,
    stream: &Stream,
    activation: DeviceSpan,
    weight: DeviceSpan,
) -> Result<(), DeviceError> {
    let count = (activation.bytes() / 4) as u32;
    assert!(weight.bytes() >= activation.bytes());
    let args = KernelArgs::new().arg(activation.address()).arg(weight.address()).arg(count);
    let config = LaunchConfig::linear(count.div_ceil(THREADS), THREADS);
    // SAFETY: the parameters of the entry above, in order; no host memory is named.
    unsafe { kernel.launch(stream, &config, &args) }
}

/// Makes the device write where nothing is: the planted illegal access.
pub(crate) fn write_nowhere(kernel: &Kernel, stream: &Stream) -> Result<(), DeviceError> {
    let args = KernelArgs::new().arg(0x1000u64).arg(0x1000u64).arg(1u32);
    // SAFETY: the parameters of the entry above, in order; the addresses are of no memory of the host.
    unsafe { kernel.launch(stream, &LaunchConfig::linear(1, 1), &args) }
}
