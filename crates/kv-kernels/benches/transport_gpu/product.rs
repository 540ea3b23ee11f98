//! What a matrix product loses beside transfers: bf16, by the cuBLAS that the environment names.

use std::ffi::c_void;

use cuda_driver::{DeviceBuffer, Event, Stream};
use kv_kernels::{HostLinkOptions, Transport};

use super::{BOTH, Bench, SHAPES, median, mix};

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

impl Bench {
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
            "bf16 products beside transfers of the 8B shape without end: what the product loses, down / \
             up; medians of 7\n"
        );
        println!(
            "| beside | 8,192 x 8,192 x 8,192 | 4,096 x 4,096 x 4,096 | 8,192 x 256 x 8,192 |"
        );
        println!("|---|---|---|---|");
        let scene = self.scene(&SHAPES[0], 2048);
        for transport in [None, Some(Transport::TwoHop), Some(Transport::DirectKernel)] {
            let mut link = self.link(transport, HostLinkOptions::default());
            let cells =
                [(8192, 8192, 24), (4096, 4096, 160), (8192, 256, 600)].map(|(m, n, times)| {
                    let product = Product { m, n, k: m, times };
                    let loss = BOTH.map(|direction| {
                        let mut transfer = || match transport {
                            None => self.memcpy(scene.bytes, Some(direction), &self.chunk),
                            Some(_) => {
                                let transfer = self.host_transfer(&scene, direction, None);
                                link.transfer_chunk(&self.stream, transfer).unwrap();
                            }
                        };
                        self.loss((&cublas, &stream, &memory), product, &mut transfer)
                    });
                    format!("{:.1} / {:.1} %", loss[0], loss[1])
                });
            let name = transport.map_or("memcpy".into(), |transport| transport.to_string());
            println!("| {name} | {} |", cells.join(" | "));
        }
        println!();
    }

    /// What a product loses beside transfers that go on for longer than it, in percent.
    fn loss(
        &self,
        (cublas, stream, memory): (&Cublas, &Stream, &DeviceBuffer),
        product: Product,
        transfer: &mut impl FnMut(),
    ) -> f64 {
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
        let idle = self.back_to_back(2, &mut *transfer);
        let of_product = [timer(), timer()];
        timed(&of_product);
        let first = seconds(&of_product);
        // As many as cover the product, however much both are slowed.
        let count = (first * 2.0 / idle) as u32 + 2;
        median(|| {
            timed(&of_product);
            let before = seconds(&of_product);
            transfer();
            timed(&of_product);
            for _ in 1..count {
                transfer();
            }
            let beside = seconds(&of_product);
            self.stream.synchronize().unwrap();
            timed(&of_product);
            let alone = (before + seconds(&of_product)) / 2.0;
            (1.0 - alone / beside) * 100.0
        })
    }
}
