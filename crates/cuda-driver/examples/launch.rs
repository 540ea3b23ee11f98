//! Finds a driver, compiles a kernel from PTX, launches it on a stream, and reads the result.
//!
//! `cargo run -p cuda-driver --example launch` runs on the simulated device; with `-- cuda` on the first GPU.

#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::sync::Arc;

use cuda_driver::{
    Device, DeviceBuffer, Driver, Event, HostAllocFlags, KernelArgs, LaunchConfig, Module,
    PinnedBuffer, Stream,
};
use cuda_sim::{SimConfig, SimDriver};

/// Adds `value` to `count` words at `words`.
const PTX: &str = "
.version 7.0
.target sm_80
.address_size 64
.visible .entry add(.param .u64 words, .param .u32 value, .param .u32 count)
{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [words];
    ld.param.u32 %r1, [value];
    ld.param.u32 %r2, [count];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.s32 %r6, %r3, %r4, %r5;
    setp.ge.u32 %p1, %r6, %r2;
    @%p1 bra done;
    cvta.to.global.u64 %rd1, %rd1;
    mul.wide.u32 %rd2, %r6, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.u32 %r7, [%rd3];
    add.s32 %r7, %r7, %r1;
    st.global.u32 [%rd3], %r7;
done:
    ret;
}
";

const WORDS: u32 = 1000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::open(driver()?, 0)?;
    let stream = Stream::new(&device)?;
    println!("{} through the driver `{}`", device.info().name, device.driver().name());

    let bytes = u64::from(WORDS) * 4;
    let words = DeviceBuffer::alloc(&device, bytes)?;
    let mut host = PinnedBuffer::alloc(&device, bytes, HostAllocFlags::CACHED)?;
    let numbers: Vec<u8> = (0..WORDS).flat_map(u32::to_ne_bytes).collect();
    host.write_at(0, &numbers)?;

    let add = Module::load(&device, PTX)?.kernel("add")?;
    let args = KernelArgs::new().arg(words.address()).arg(7u32).arg(WORDS);
    let grid = LaunchConfig::linear(WORDS.div_ceil(128), 128);
    stream.copy_to_device(words.span(), &host, 0)?;
    // SAFETY: the kernel takes a 64-bit and two 32-bit parameters, and accesses `WORDS` words of `words` alone.
    unsafe { add.launch(&stream, &grid, &args) }?;
    stream.copy_to_host(&host, 0, words.span())?;

    // Nothing above has waited. The event completes after all three.
    let done = Event::new(&device)?;
    done.record(&stream)?;
    done.synchronize()?;
    let mut last = [0; 4];
    host.read_at(bytes - 4, &mut last)?;
    let last = u32::from_ne_bytes(last);
    println!("the last of {WORDS} words is {last}");
    assert_eq!(last, WORDS - 1 + 7);
    Ok(())
}

/// The simulated device, or NVIDIA's driver if the caller asks for it by name.
fn driver() -> Result<Arc<dyn Driver>, Box<dyn std::error::Error>> {
    match std::env::args().nth(1).as_deref() {
        #[cfg(feature = "cuda")]
        Some("cuda") => Ok(cuda_driver::CudaDriver::probe()?),
        _ => Ok(Arc::new(SimDriver::new(SimConfig::default())?)),
    }
}
