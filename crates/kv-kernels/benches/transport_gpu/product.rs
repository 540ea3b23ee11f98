//! What a matrix product loses beside transfers: bf16, by the cuBLAS that the environment names.

use std::ffi::c_void;

use cuda_driver::{DeviceBuffer, Event, Stream, StreamPriority};
use kv_kernels::{
    Direction,
    link::{HostArrival, HostLinkOptions, HostReady, Transport},
};

use super::{BOTH, Bench, End, TIMINGS, mix};

/// The part of cuBLAS that multiplies bf16 matrices.
struct Cublas {
    library: libloading::Library,
    handle: *mut c_void,
}

/// `cublasGemmEx`: handle, operations, m, n, k, alpha, A with type and stride, B, beta, C, the type to
/// compute in, the algorithm.
type GemmEx = unsafe extern "C" fn(
    *mut c_void,
    i32,
    i32,
    i32,
    i32,
    i32,
    *const f32,
    u64,
    i32,
    i32,
    u64,
    i32,
    i32,
    *const f32,
    u64,
    i32,
    i32,
    i32,
    i32,
) -> i32;

/// A product of `m` x `k` and `k` x `n`, so many times.
#[derive(Clone, Copy)]
struct Product {
    m: i32,
    n: i32,
    k: i32,
    times: u32,
}

#[allow(clippy::multiple_unsafe_ops_per_block, reason = "each is one call of one library")]
impl Cublas {
    fn load(stream: &Stream) -> Result<Self, String> {
        let path = std::env::var("KV_CUBLAS").map_err(|_| "KV_CUBLAS names no library")?;
        // SAFETY: the library named is NVIDIA's, whose initialisers may run at any time.
        let library = unsafe { libloading::Library::new(path) }.map_err(|e| e.to_string())?;
        let mut handle = std::ptr::null_mut();
        type Create = unsafe extern "C" fn(*mut *mut c_void) -> i32;
        type SetStream = unsafe extern "C" fn(*mut c_void, u64) -> i32;
        // SAFETY: the signatures are those of cublas_api.h; the context is current on this thread, the
        // stream is alive as long as the bench.
        unsafe {
            let create = library.get::<Create>(b"cublasCreate_v2").map_err(|e| e.to_string())?;
            assert_eq!(create(&mut handle), 0, "cublasCreate");
            let set = library.get::<SetStream>(b"cublasSetStream_v2").map_err(|e| e.to_string())?;
            assert_eq!(set(handle, stream.raw()), 0, "cublasSetStream");
        }
        Ok(Self { library, handle })
    }

    fn run(&self, product: Product, memory: &DeviceBuffer) {
        const BF16: i32 = 14;
        const COMPUTE_32F: i32 = 68;
        let Product { m, n, k, times } = product;
        let third = memory.bytes() / 3;
        let [a, b, c] = [0, 1, 2].map(|part| memory.address() + part * third);
        let (one, zero) = (1.0, 0.0);
        // SAFETY: the signature is that of cublas_api.h; each matrix fits in a third of the memory.
        unsafe {
            let gemm = self.library.get::<GemmEx>(b"cublasGemmEx").unwrap();
            for _ in 0..times {
                let status = gemm(
                    self.handle,
                    0,
                    0,
                    m,
                    n,
                    k,
                    &one,
                    a,
                    BF16,
                    m,
                    b,
                    BF16,
                    k,
                    &zero,
                    c,
                    BF16,
                    m,
                    COMPUTE_32F,
                    -1,
                );
                assert_eq!(status, 0, "cublasGemmEx");
            }
        }
    }
}

impl Bench<'_> {
    #[allow(clippy::too_many_lines, reason = "one table")]
    pub(super) fn products(&self) {
        const SIDE: u64 = 8192;
        let stream = Stream::new(&self.device).unwrap();
        let cublas = self.device.run(|_| Ok(Cublas::load(&stream))).unwrap();
        let cublas = match cublas {
            Ok(cublas) => cublas,
            Err(reason) => {
                println!("no product was measured: {reason}\n");
                return;
            }
        };
        let memory = DeviceBuffer::alloc(&self.device, 3 * 2 * SIDE * SIDE).unwrap();
        let words: Vec<u64> =
            (0..memory.bytes() / 8).map(|i| mix(i) & 0x3FFF_3FFF_3FFF_3FFF).collect();
        self.stream.upload(memory.span(), bytemuck::cast_slice(&words)).unwrap();
        println!(
            "bf16 products beside transfers of 512 tokens of the 8B shape without end, of the greatest priority \
             where nothing else stands: what the product loses, down / up, and GB/s of the transfers \
             meanwhile; medians of {TIMINGS}\n"
        );
        println!(
            "| beside | 8,192 x 8,192 x 8,192 | 4,096 x 4,096 x 4,096 | 8,192 x 256 x 8,192 |"
        );
        println!("|---|---|---|---|");
        let scene = self.scene(&self.shapes()[0], self.ways.either(512, 128));
        let [least, greatest] = [StreamPriority::Least, StreamPriority::Greatest]
            .map(|priority| Stream::with_priority(&self.device, priority).unwrap());
        let usual = HostLinkOptions::default();
        let [few, fewer] =
            [4, 2].map(|multiprocessors| HostLinkOptions { multiprocessors, ..usual });
        let beside = [
            ("memcpy", None, &least, usual),
            ("two hops", Some(Transport::TwoHop), &greatest, usual),
            ("two hops, 4 multiprocessors", Some(Transport::TwoHop), &greatest, few),
            ("two hops, 2 multiprocessors", Some(Transport::TwoHop), &greatest, fewer),
            ("two hops, least priority", Some(Transport::TwoHop), &least, usual),
            ("direct kernel", Some(Transport::DirectKernel), &greatest, usual),
        ];
        for (name, transport, transfers, options) in beside {
            let mut last: Option<HostArrival> = None;
            let mut link = self.link(transport, options);
            let cells =
                [(8192, 8192, 12), (4096, 4096, 40), (8192, 256, 150)].map(|(m, n, times)| {
                    let product = Product { m, n, k: m, times };
                    let loss = BOTH.map(|direction| {
                        let mut transfer = || match transport {
                            None => self.memcpy_on(transfers, scene.bytes, direction),
                            Some(_) => {
                                let transfer = [self.host_transfer(&scene, direction, None)];
                                let now = HostReady::Now;
                                // The next one follows it; the last is waited for with its stream.
                                let arrival = link.start_chunks(transfers, now, &transfer).unwrap();
                                last = Some(arrival);
                            }
                        };
                        let sides = (&cublas, &stream, transfers, &memory);
                        self.prepare(&scene, End::Host, direction);
                        if transport.is_none() {
                            // A plain copy goes between the host and the chunk.
                            let chunk = self.chunk.span().slice(0, scene.bytes).unwrap();
                            match direction {
                                Direction::PagedToChunk => {
                                    self.stream.upload(chunk, self.right(scene.bytes)).unwrap();
                                }
                                Direction::ChunkToPaged => self.stream.fill(chunk, 0).unwrap(),
                            }
                            self.stream.synchronize().unwrap();
                        }
                        self.ways.timed(
                            &format!("beside a product, {name}, {direction:?}"),
                            &mut transfer,
                            |run| self.loss(sides, product, scene.bytes, &mut || run()),
                            || match (transport, direction) {
                                (None, Direction::ChunkToPaged) => {
                                    let chunk = self.chunk.span().slice(0, scene.bytes).unwrap();
                                    self.read(chunk) == self.right(scene.bytes)
                                }
                                _ => self.is_right(&scene, End::Host, direction),
                            },
                        )
                    });
                    let [(down, x), (up, y)] = loss;
                    let rate = |rate: Option<f64>| rate.map_or("-".into(), |r| format!("{r:.0}"));
                    format!("{down:.1} / {up:.1} %, {} / {}", rate(x), rate(y))
                });
            if let Some(arrival) = last {
                arrival.fence().wait().unwrap();
            }
            println!("| {name} | {} |", cells.join(" | "));
        }
        println!();
    }

    fn memcpy_on(&self, stream: &Stream, bytes: u64, direction: Direction) {
        let chunk = self.chunk.span().slice(0, bytes).unwrap();
        match direction {
            Direction::PagedToChunk => stream.copy_to_host(&self.host, 0, chunk).unwrap(),
            Direction::ChunkToPaged => stream.copy_to_device(chunk, &self.host, 0).unwrap(),
        }
    }

    /// What a product loses beside transfers that go on for longer than it, in percent, and the
    /// transfers' GB/s meanwhile, where two of them ended.
    fn loss(
        &self,
        (cublas, stream, transfers, memory): (&Cublas, &Stream, &Stream, &DeviceBuffer),
        product: Product,
        bytes: u64,
        transfer: &mut impl FnMut(),
    ) -> (f64, Option<f64>) {
        let timer = || Event::with_timing(&self.device).unwrap();
        let timed = |events: &[Event; 2]| {
            events[0].record(stream).unwrap();
            let run = |_: &dyn cuda_driver::Driver| {
                cublas.run(product, memory);
                Ok(())
            };
            self.device.run(run).unwrap();
            events[1].record(stream).unwrap();
        };
        let seconds = |events: &[Event; 2]| {
            events[1].synchronize().unwrap();
            f64::from(events[1].elapsed_ms_since(&events[0]).unwrap()) / 1e3
        };
        transfer();
        self.device.run(|driver| driver.ctx_synchronize()).unwrap();
        let of_product = [timer(), timer()];
        timed(&of_product);
        let first = seconds(&of_product);
        // As many as cover the product, were it slowed to a half and transfers not at all.
        let count = (first * 2.0 * 55e9 / bytes as f64) as usize + 3;
        let ends: Vec<Event> = (0..count).map(|_| timer()).collect();
        let mut rates = Vec::new();
        let loss = self.ways.median(|| {
            timed(&of_product);
            let before = seconds(&of_product);
            transfer();
            timed(&of_product);
            for end in &ends {
                transfer();
                end.record(transfers).unwrap();
            }
            let beside = seconds(&of_product);
            self.device.run(|driver| driver.ctx_synchronize()).unwrap();
            // Transfers that ended while the product ran.
            let since =
                |end: &Event| f64::from(end.elapsed_ms_since(&of_product[0]).unwrap()) / 1e3;
            let within: Vec<f64> =
                ends.iter().map(since).filter(|&end| end > 0.0 && end < beside).collect();
            if let [first, .., last] = within[..] {
                rates.push((within.len() - 1) as f64 * bytes as f64 / (last - first) / 1e9);
            }
            timed(&of_product);
            let alone = (before + seconds(&of_product)) / 2.0;
            (1.0 - alone / beside) * 100.0
        });
        rates.sort_by(f64::total_cmp);
        (loss, rates.get(rates.len() / 2).copied())
    }
}
