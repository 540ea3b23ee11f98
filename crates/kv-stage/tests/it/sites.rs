//! The call sites and host writes that a driver sees for staging: the line of the program, and the
//! written bytes.

use cuda_driver::HostAccess;
use kv_testkit::{Watch, from_here};

use crate::prelude::*;

const BYTES: u64 = 8192;

struct Machine {
    watch: Watch,
    device: Device,
    stream: Stream,
    pool: StagingPool,
}

impl Machine {
    /// A pool of two buffers, one after the other in one slab.
    fn new() -> Self {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        // A query finds everything enqueued before it complete.
        sim.set_pace(Pace::Fastest);
        let watch = Watch::default();
        let device = Device::open(watch.over(Arc::new(sim)), 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let options = StagingOptions { buffer_bytes: BYTES, buffers_max: 2 };
        let pool = StagingPool::new(&device, options).unwrap();
        Self { watch, device, stream, pool }
    }

    /// The host accesses reported by `work`, all of them writes.
    fn told(&self, work: impl FnOnce()) -> Vec<HostAccess> {
        self.watch.accesses();
        work();
        let told = self.watch.accesses();
        assert!(told.iter().all(|access| access.writes), "{told:?}");
        told
    }
}

#[test]
fn staging_names_the_programs_line() {
    let m = Machine::new();
    let (watch, pool, stream) = (&m.watch, &m.pool, &m.stream);
    let target = DeviceBuffer::alloc(&m.device, BYTES).unwrap();
    let span = target.span();
    let options = StagingOptions { buffer_bytes: BYTES, buffers_max: 1 };
    let (made, through) =
        from_here!(watch, "cuMemHostRegister", StagingPool::new(&m.device, options));
    assert!(through, "the slab is pinned by a line of this crate");
    from_here!(watch, "cuMemHostUnregister", made.unwrap().close()).0.unwrap();
    let mut buffer = pool.acquire().unwrap();
    from_here!(watch, "host", buffer.write_at(0, &[1; 4])).0.unwrap();
    from_here!(watch, "host", buffer.bytes_mut().len());
    from_here!(watch, "host", buffer.range_mut(0, 1)).0.unwrap();
    // The program's closure enqueues the copy, for the line of the submission.
    let copy = |view: &kv_stage::SubmittedView<'_>| view.copy_to_device(span, 0);
    from_here!(watch, "cuMemcpyHtoDAsync", buffer.submit(stream, copy)).0.unwrap();
    pool.acquire().unwrap().submit(stream, copy).unwrap();
    drop(from_here!(watch, "cuEventQuery", pool.acquire_wait()).0.unwrap());
    pool.acquire().unwrap().submit(stream, copy).unwrap();
    from_here!(watch, "cuEventQuery", pool.drain()).0.unwrap();
    pool.acquire().unwrap().submit(stream, copy).unwrap();
    pool.acquire().unwrap().submit(stream, copy).unwrap();
    from_here!(watch, "cuEventQuery", pool.acquire()).0.unwrap();
}

#[test]
fn batches_name_the_programs_line() {
    let m = Machine::new();
    let (watch, stream) = (&m.watch, &m.stream);
    let table =
        BatchTable { width: 4, block_tokens: 4, null_block: BlockId::from(0), is_state: false };
    let options = BatchOptions {
        rows: 2,
        sequences_max: 2,
        tokens_max: 4,
        tables: vec![table],
        arrays: vec![16],
    };
    let staging = StagingOptions { buffer_bytes: options.buffer_bytes(), buffers_max: 2 };
    let pool = StagingPool::new(&m.device, staging).unwrap();
    let (batch, _) = from_here!(watch, "cuMemAlloc", DeviceBatch::new(&pool, options));
    let mut batch = batch.unwrap();
    let mut step = batch.step(stream).unwrap();
    from_here!(watch, "host", step.array(0, &[1u64, 2])).0.unwrap();
    let (submitted, through) = from_here!(watch, "cuGraphLaunch", step.submit().map(drop));
    submitted.unwrap();
    assert!(through, "the launch is enqueued by a line of this crate");
    let step = batch.step(stream).unwrap();
    from_here!(watch, "cuMemcpyHtoDAsync", step.submit_inputs()).0.unwrap();
    from_here!(watch, "cuLaunchKernel", batch.gather(stream)).0.unwrap();
    drop(from_here!(watch, "cuEventQuery", batch.step(stream)).0.unwrap());
    for _ in 0..2 {
        batch.step(stream).unwrap().submit().unwrap();
    }
    drop(from_here!(watch, "cuEventQuery", batch.step_wait(stream)).0.unwrap());
    let other = Stream::new(&m.device).unwrap();
    from_here!(watch, "cuStreamWaitEvent", batch.rebind(&other)).0.unwrap();
}

#[test]
fn buffers_tell_the_bytes_that_are_filled() {
    let m = Machine::new();
    let mut buffer = m.pool.acquire().unwrap();
    let start = buffer.bytes_mut().as_ptr().addr() as u64;
    let access = |offset, bytes| HostAccess { address: start + offset, bytes, writes: true };
    assert_eq!(m.told(|| buffer.bytes_mut().fill(1)), [access(0, BYTES)]);
    assert_eq!(m.told(|| buffer.write_at(100, &[1; 7]).unwrap()), [access(100, 7)]);
    assert_eq!(m.told(|| buffer.range_mut(BYTES - 5, 5).unwrap().fill(0)), [access(BYTES - 5, 5)]);
    assert_eq!(m.told(|| assert!(buffer.write_at(BYTES, &[1]).is_err())), []);
    // The slab's other buffer lies behind the first.
    let mut other = m.pool.acquire().unwrap();
    let told = m.told(|| other.write_at(0, &[1]).unwrap());
    assert_eq!(told[0].address.abs_diff(start), BYTES);
}
