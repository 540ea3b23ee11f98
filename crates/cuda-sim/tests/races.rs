//! Planted races: each is found in the first run, on the first schedule, and its report says what to mend.

use cuda_driver::Driver;
use cuda_sim::{MissingEdge, SimConfig, SimDriver};

#[test]
fn two_fills() {
    let sim = SimDriver::new(SimConfig::default()).unwrap();
    let context = sim.device_primary_ctx_retain(0).unwrap();
    unsafe { sim.ctx_set_current(context) }.unwrap();
    let (a, b) = (sim.stream_create(false).unwrap(), sim.stream_create(false).unwrap());
    let memory = sim.mem_alloc(4096).unwrap();
    unsafe { sim.memset_d8_async(memory, 1, 4096, a) }.unwrap();
    let event = sim.event_create(false).unwrap();
    unsafe { sim.event_record(event, a) }.unwrap();
    unsafe { sim.memset_d8_async(memory + 100, 2, 4, b) }.unwrap();
    sim.ctx_synchronize().unwrap();
    let races = sim.races();
    println!("{}", races[0].render(true));
    println!("{}", races[0].to_json());
    assert_eq!(races.len(), 1);
    assert!(
        matches!(races[0].missing, MissingEdge::StreamWait { record_on, wait_on, .. } if (record_on, wait_on) == (a, b))
    );
}
