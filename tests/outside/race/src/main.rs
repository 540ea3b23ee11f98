//! A race of two streams, and its fix.

use cuda_sim::{SimConfig, SimDriver, cuda_driver::Driver};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let sim = SimDriver::new(SimConfig::default())?;
    let context = sim.device_primary_ctx_retain(0)?;
    unsafe { sim.ctx_set_current(context) }?;
    let (compute, copies) = (sim.stream_create(false)?, sim.stream_create(false)?);
    let (block, elsewhere) = (sim.mem_alloc(4096)?, sim.mem_alloc(4096)?);
    unsafe { sim.memset_d8_async(block, 1, 4096, compute) }?;
    if std::env::args().any(|arg| arg == "--mended") {
        let written = sim.event_create(false)?;
        unsafe { sim.event_record(written, compute) }?;
        unsafe { sim.stream_wait_event(copies, written) }?;
    }
    unsafe { sim.memcpy_dtod_async(elsewhere, block, 4096, copies) }?;
    sim.ctx_synchronize()?;
    sim.races().iter().for_each(|race| println!("{race}\n{}", race.to_json()));
    Ok(())
}
