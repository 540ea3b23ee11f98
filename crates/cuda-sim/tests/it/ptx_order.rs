//! What orders the threads of a launch and what does not: barriers of a block, of a part of a block
//! and of a warp, exchanges between lanes, and atomics. Each legal use runs without a finding. Each
//! race is found, and so is each barrier that would hang on a GPU.

use crate::common::{download, fill, seeded, sync};
use cuda_driver::{Driver, ErrorCode, KernelArgs, LaunchConfig};
use cuda_sim::{Finding, FindingKind};

/// Bytes of device memory at `%to`, all written before the launch.
const BYTES: u64 = 8192;

/// A kernel with 4 KiB of shared memory `room`, which is fully written before a barrier and `body`.
///
/// `%t` is the thread, `%w` its warp, `%l` its lane, `%to` device memory. `%p` and `%q` are
/// predicates, `%r<8>`, `%d<8>` and `%h<4>` registers of 32, 64 and 16 bits.
pub fn kernel(body: &str) -> String {
    format!(
        ".version 8.0\n.target sm_90\n.address_size 64\n\
         .visible .entry k(.param .u64 to)\n{{\n\
         .reg .b64 %to, %d<8>, %i64;\n.reg .b32 %r<8>, %t, %w, %l, %i;\n.reg .b16 %h<4>;\n\
         .reg .pred %p, %q, %s;\n.shared .align 16 .b8 room[4096];\n\
         ld.param.u64 %to, [to];\nmov.u32 %t, %tid.x;\nshr.u32 %w, %t, 5;\nand.b32 %l, %t, 31;\n\
         mov.u32 %i, %t;\n$fill:\nmul.wide.u32 %i64, %i, 4;\nmov.u64 %d0, room;\n\
         add.s64 %d0, %d0, %i64;\nsetp.lt.u32 %s, %i, 1024;\n@%s st.shared.u32 [%d0], 0;\n\
         add.u32 %i, %i, %ntid.x;\n@%s bra $fill;\nbar.sync 0;\n{body}\nret;\n}}\n"
    )
}

/// Runs `body` in `blocks` blocks of `threads` threads. Returns the findings, the launch's result,
/// and the memory.
pub fn launch(body: &str, blocks: u32, threads: u32) -> Launched {
    launch_text(&kernel(body), blocks, threads)
}

/// The findings of a launch, its result, and the memory.
pub type Launched = (Vec<Finding>, Option<ErrorCode>, Vec<u8>);

/// The same with the whole text of a module.
pub fn launch_text(text: &str, blocks: u32, threads: u32) -> Launched {
    let sim = seeded(0);
    sim.limit_instructions(1 << 16, 1 << 24);
    let to = sim.mem_alloc(BYTES).unwrap();
    fill(&sim, to, 0, BYTES, 0).unwrap();
    let mut log = String::new();
    let module = sim.module_load_data(text, &mut log);
    let module = module.unwrap_or_else(|error| panic!("{error}: {log}\n{text}"));
    // SAFETY: the module was loaded just now.
    let function = unsafe { sim.module_get_function(module, "k") }.unwrap();
    let args = KernelArgs::new().arg(to);
    let config = LaunchConfig { shared_bytes: 64, ..LaunchConfig::linear(blocks, threads) };
    // SAFETY: the argument is the kernel's, and names device memory.
    unsafe { sim.launch_kernel(function, &config, &args, 0) }.unwrap();
    let answer = sync(&sim, 0).err().map(|error| error.code);
    let left =
        if answer.is_none() { download(&sim, to, BYTES as usize, 0).unwrap() } else { vec![] };
    (sim.findings(), answer, left)
}

/// Runs `body`, which has no mistake, and returns the memory afterwards.
#[track_caller]
pub fn clean(body: &str, blocks: u32, threads: u32) -> Vec<u8> {
    let (findings, answer, left) = launch(body, blocks, threads);
    assert_eq!((findings, answer), (vec![], None), "{body}");
    left
}

/// Runs `body`, which has a race: the race is found, and the launch continues.
#[track_caller]
fn races(body: &str, blocks: u32, threads: u32) {
    let (findings, answer, _) = launch(body, blocks, threads);
    assert!(
        findings.iter().any(|found| found.kind == FindingKind::Conflict),
        "{body}: {findings:?}"
    );
    assert!(findings.iter().all(|found| found.kind == FindingKind::Conflict), "{findings:?}");
    assert_eq!(answer, None, "{body}");
}

/// Runs `body`, which would hang on a GPU: the launch fails with these words.
#[track_caller]
pub fn hangs(body: &str, threads: u32, words: &str) {
    let (findings, answer, _) = launch(body, 1, threads);
    let found = findings.iter().find(|found| found.kind == FindingKind::Barrier);
    let found = found.unwrap_or_else(|| panic!("{body}: {findings:?}"));
    assert!(found.to_string().contains(words), "no {words:?} in {found}");
    assert_eq!(answer, Some(ErrorCode::LAUNCH_FAILED));
}

/// Runs `body`, in which a lane reads from a lane that provides no value: this is found, and the
/// launch continues.
#[track_caller]
fn unread(body: &str, threads: u32, words: &str) {
    let (findings, answer, _) = launch(body, 1, threads);
    let kinds: Vec<FindingKind> = findings.iter().map(|found| found.kind).collect();
    assert_eq!((kinds, answer), (vec![FindingKind::Uninitialised], None), "{body}");
    assert!(findings[0].to_string().contains(words), "no {words:?} in {}", findings[0]);
}

/// The 32-bit words of `%to` after the kernel.
fn words(left: &[u8]) -> Vec<u32> {
    left.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

/// Steps that only thread `thread` runs.
fn by(thread: u32, step: &str) -> String {
    format!("setp.eq.u32 %p, %t, {thread};\n@%p {step}\n")
}

#[test]
fn bytes_of_one_word_have_their_own_writers_and_readers() {
    let steps = |steps: &[(u32, &str)]| -> String {
        steps.iter().map(|&(thread, step)| by(thread, step)).collect()
    };
    // The word's second writer does not hide the byte of the first.
    races(
        &steps(&[
            (0, "st.shared.u8 [room], 1;"),
            (1, "st.shared.u8 [room+1], 1;"),
            (2, "ld.shared.u8 %h0, [room];"),
        ]),
        1,
        32,
    );
    // The word's third reader does not hide the second reader's byte from a writer.
    races(
        &steps(&[
            (0, "ld.shared.u8 %h0, [room];"),
            (1, "ld.shared.u8 %h0, [room+1];"),
            (2, "ld.shared.u8 %h0, [room+2];"),
            (3, "st.shared.u8 [room+1], 1;"),
        ]),
        1,
        32,
    );
    races(
        &steps(&[
            (0, "ld.global.u16 %h0, [%to];"),
            (1, "ld.global.u16 %h0, [%to+2];"),
            (2, "ld.global.u32 %r0, [%to];"),
            (3, "ld.global.u8 %h0, [%to+3];"),
            (0, "st.global.u16 [%to], 1;"),
        ]),
        1,
        32,
    );
    races(
        &steps(&[(0, "st.global.u8 [%to+3], 1;"), (1, "ld.global.v2.u64 {%d0, %d1}, [%to];")]),
        1,
        32,
    );
    // Accesses to a neighbouring byte, or by the same thread, do not conflict.
    clean(
        &steps(&[
            (0, "st.shared.u8 [room], 1;"),
            (1, "st.shared.u8 [room+1], 1;"),
            (2, "st.shared.u16 [room+2], 1;"),
            (0, "ld.shared.u8 %h0, [room];"),
            (1, "ld.shared.u8 %h0, [room+1];"),
            (2, "ld.shared.u16 %h0, [room+2];"),
        ]),
        1,
        32,
    );
}

#[test]
fn a_named_barrier_orders_those_who_took_part_and_no_others() {
    let exchange = |first: &str, second: &str, reader: &str| {
        format!(
            "setp.eq.u32 %q, %t, 0;\n@%q st.shared.u32 [room+64], 7;\n\
             setp.lt.u32 %p, %t, 32;\n@%p bra $one;\n{second}\nbra.uni $both;\n$one: {first}\n$both:\n\
             setp.eq.u32 %q, %t, {reader};\n@%q ld.shared.u32 %r0, [room+64];"
        )
    };
    // Two warps at two different barriers.
    races(&exchange("bar.sync 1, 32;", "bar.sync 2, 32;", "32"), 1, 64);
    races(&exchange("barrier.sync.aligned 1, 32;", "bar.sync 1, 32;", "32"), 1, 64);
    clean(&exchange("bar.sync 1, 32;", "bar.sync 2, 32;", "5"), 1, 64);
    // Both warps at the same barrier.
    clean(&exchange("bar.sync 1, 64;", "bar.sync 1, 64;", "32"), 1, 64);
    // An arriving thread is ordered before a waiting one, but not the reverse.
    clean(&exchange("bar.arrive 1, 64;", "bar.sync 1, 64;", "32"), 1, 64);
    races(&exchange("bar.sync 1, 64;", "bar.arrive 1, 64;", "32"), 1, 64);
    // Two warps have passed more barriers than the third, which waits for them.
    clean(
        "setp.ge.u32 %p, %t, 64;\n@%p bra $last;\nbar.sync 1, 64;\nbar.sync 1, 64;\nbar.sync 1, 64;\n\
         setp.eq.u32 %q, %t, 0;\n@%q st.shared.u32 [room+64], 7;\nbar.arrive 2, 96;\nret;\n\
         $last:\nbar.sync 2, 96;\nld.shared.u32 %r0, [room+64];",
        1,
        96,
    );
    // A write after the arrival is not ordered before the wait.
    races(
        "setp.ge.u32 %p, %t, 32;\n@%p bra $last;\nbar.arrive 1, 64;\n\
         setp.eq.u32 %q, %t, 0;\n@%q st.shared.u32 [room+64], 7;\nret;\n\
         $last:\nbar.sync 1, 64;\nld.shared.u32 %r0, [room+64];",
        1,
        64,
    );
}

#[test]
fn order_passes_from_one_barrier_to_the_next() {
    // From warp 0 to warp 1 by barrier 1, from warp 1 to warp 2 by barrier 2.
    let chain = |link: &str| {
        format!(
            "setp.eq.u32 %q, %t, 0;\n@%q st.shared.u32 [room+64], 7;\n\
             setp.eq.u32 %p, %w, 0;\n@%p bar.arrive 1, 64;\n\
             setp.eq.u32 %p, %w, 1;\n@%p {link};\n@%p bar.arrive 2, 64;\n\
             setp.eq.u32 %p, %w, 2;\n@%p bar.sync 2, 64;\n@%p ld.shared.u32 %r0, [room+64];"
        )
    };
    clean(&chain("bar.sync 1, 64"), 1, 96);
    races(&chain("bar.arrive 1, 64"), 1, 96);
}

#[test]
fn a_barrier_of_some_lanes_orders_those_lanes() {
    let lanes = |reader: u32| {
        format!(
            "setp.eq.u32 %q, %t, 0;\n@%q st.shared.u32 [room+64], 7;\n\
             setp.lt.u32 %p, %t, 2;\n@%p bra $low;\nbar.warp.sync 0xfffffffc;\nbra.uni $both;\n\
             $low: bar.warp.sync 3;\n$both:\n\
             setp.eq.u32 %q, %t, {reader};\n@%q ld.shared.u32 %r0, [room+64];"
        )
    };
    clean(&lanes(1), 1, 32);
    races(&lanes(2), 1, 32);
}

#[test]
fn many_readers_of_a_word_are_all_remembered() {
    // Thread 66 writes after thread 0, which arrived at the barrier where thread 66 waited, and
    // after its neighbour 65. The write is not ordered after thread 33, which read in between.
    let body = |middle: &str| {
        format!(
            "{}setp.eq.u32 %p, %w, 0;\n@%p bar.arrive 1, 64;\n{middle}{}\
             setp.eq.u32 %p, %w, 2;\n@%p bar.sync 1, 64;\n{}",
            by(0, "ld.shared.u32 %r0, [room+64];"),
            by(65, "ld.shared.u32 %r0, [room+64];"),
            by(66, "st.shared.u32 [room+64], 7;")
        )
    };
    clean(&body(""), 1, 96);
    races(&body(&by(33, "ld.shared.u32 %r0, [room+64];")), 1, 96);
    races(&body(&by(33, "ld.shared.u8 %h0, [room+66];")), 1, 96);
}

#[test]
fn atomics_conflict_with_plain_accesses_and_not_with_each_other() {
    let atomic = "atom.shared.add.u32 %r1, [room+64], 1;\n";
    let global = "red.global.add.u32 [%to+8], 1;\n";
    clean(atomic, 1, 64);
    assert_eq!(words(&clean(global, 3, 64))[2], 192);
    clean(&format!("{atomic}bar.sync 0;\nld.shared.u32 %r0, [room+64];"), 1, 64);
    clean("ld.relaxed.gpu.global.u32 %r0, [%to+8];\nst.relaxed.gpu.global.u32 [%to+8], 3;", 2, 64);
    clean("ld.volatile.global.u32 %r0, [%to+8];\nst.volatile.global.u32 [%to+8], 3;", 2, 64);
    races(&format!("{atomic}ld.shared.u32 %r0, [room+64];"), 1, 64);
    races(&format!("{atomic}{}", by(63, "ld.shared.u32 %r0, [room+64];")), 1, 64);
    races(&format!("{}{atomic}", by(0, "ld.shared.u32 %r0, [room+64];")), 1, 64);
    races(&format!("{}{atomic}", by(0, "st.shared.u32 [room+64], 5;")), 1, 64);
    races(&format!("{atomic}{}", by(0, "st.shared.u8 [room+65], 5;")), 1, 64);
    races(&format!("{global}bar.sync 0;\n{}", by(0, "ld.global.u32 %r0, [%to+8];")), 2, 64);
    // A strong load beside a plain store.
    races(
        &format!("{}ld.relaxed.gpu.global.u32 %r0, [%to+8];", by(0, "st.global.u32 [%to+8], 5;")),
        1,
        64,
    );
    clean("ld.relaxed.gpu.global.u32 %r0, [%to+8];\nld.global.u32 %r0, [%to+8];", 2, 64);
}

#[test]
fn atomics_of_two_blocks_conflict_at_the_scope_of_a_block_and_those_of_two_sizes_anywhere() {
    let add = |scope: &str| format!("red{scope}.global.add.u32 [%to+8], 1;\n");
    clean(&add(".cta"), 1, 64);
    clean(&add(".gpu"), 2, 64);
    clean(&format!("{}{}", add(".sys"), add(".gpu")), 2, 64);
    races(&add(".cta"), 2, 64);
    races(&format!("{}{}", by(0, &add(".cta")), by(32, &add(".gpu"))), 2, 64);
    races("st.relaxed.cta.global.u32 [%to+8], 3;", 2, 1);
    clean("st.relaxed.cta.global.u32 [%to+8], 3;", 1, 64);
    // The running block reads what another has written.
    let reads = "ld.relaxed.cta.global.u32 %r0, [%to+8];\n";
    races(&format!("{}{reads}", add(".gpu")), 2, 1);
    races(&format!("{reads}{}", add(".gpu")), 2, 1);
    clean(reads, 2, 64);
    let wide = "red.global.add.u64 [%to+8], 1;\n";
    clean(wide, 2, 64);
    races(&format!("{wide}{}", add(".gpu")), 1, 64);
    races(&format!("{}{wide}", by(0, "red.global.add.u32 [%to+12], 1;")), 1, 64);
    clean(&format!("{}bar.sync 0;\n{wide}", by(0, &add(".gpu"))), 1, 64);
    clean(&format!("{wide}{}", add(".gpu")), 1, 1);
    // A vector is accessed element by element.
    clean(
        "ld.volatile.global.v2.u32 {%r0, %r1}, [%to+8];\nst.volatile.global.u32 [%to+12], 3;",
        2,
        64,
    );
}

#[test]
fn what_a_kernel_writes_it_does_not_load_by_the_other_cache() {
    let load = "ld.global.nc.u32 %r0, [%to+8];\n";
    let store = "st.global.u32 [%to+8], 7;\n";
    clean(load, 2, 64);
    // In any order, by any thread, behind any barrier.
    races(&format!("{store}{load}"), 1, 1);
    races(&format!("{load}{store}"), 1, 1);
    races(&format!("{}bar.sync 0;\n{load}", by(0, store)), 1, 64);
    races(&format!("{load}bar.sync 0;\n{}", by(0, "red.global.add.u32 [%to+8], 1;")), 1, 64);
    races(&format!("{load}bar.sync 0;\n{}", by(0, "st.global.u8 [%to+11], %h0;")), 1, 64);
    clean(&format!("{load}bar.sync 0;\n{}", by(0, "st.global.u8 [%to+12], %h0;")), 1, 64);
    clean(
        &format!("{}ld.global.u32 %r0, [%to+8];", by(0, "ld.global.nc.u32 %r0, [%to+4];")),
        1,
        64,
    );
}

#[test]
fn a_named_barrier_is_complete_when_its_threads_have_come_and_begins_anew() {
    // Two warps arrive, which completes the barrier. The third waits for another 32 threads.
    hangs(
        "setp.lt.u32 %p, %t, 64;\n@%p bra $first;\nbar.sync 1, 64;\nret;\n$first: bar.arrive 1, 64;",
        96,
        "barrier 1, which 32 of 64 threads reached",
    );
    // If the third warp also only arrives, it continues.
    clean(
        "setp.lt.u32 %p, %t, 96;\n@%p bra $first;\nbar.sync 1, 64;\nret;\n$first: bar.arrive 1, 64;",
        1,
        128,
    );
    // Two warps at a barrier of one warp: each warp completes a phase alone.
    clean("bar.sync 3, 32;\nbar.sync 3, 32;", 1, 64);
    // Producer and consumer, three rounds, with one barrier for each direction.
    let left = clean(
        "mov.u32 %r7, 0;\nsetp.lt.u32 %p, %t, 32;\n@!%p bra $consume;\n\
         $produce: setp.eq.u32 %q, %t, 0;\nadd.u32 %r6, %r7, 5;\n@%q st.shared.u32 [room+64], %r6;\n\
         bar.arrive 1, 64;\nbar.sync 2, 64;\nadd.u32 %r7, %r7, 1;\nsetp.lt.u32 %p, %r7, 3;\n\
         @%p bra $produce;\nret;\n\
         $consume: bar.sync 1, 64;\nld.shared.u32 %r6, [room+64];\nmul.wide.u32 %d1, %r7, 4;\n\
         add.s64 %d1, %to, %d1;\nsetp.eq.u32 %q, %t, 32;\n@%q st.global.u32 [%d1], %r6;\n\
         bar.arrive 2, 64;\nadd.u32 %r7, %r7, 1;\nsetp.lt.u32 %p, %r7, 3;\n@%p bra $consume;",
        1,
        64,
    );
    assert_eq!(words(&left)[..4], [5, 6, 7, 0]);
    // A partial warp counts as a full one.
    clean(
        "setp.lt.u32 %p, %t, 32;\n@%p bar.sync 1, 32;\n@!%p bar.sync 2, 32;\nbar.sync 3, 64;",
        1,
        40,
    );
    // The threads of a warp come to an aligned barrier together.
    hangs(
        "setp.lt.u32 %p, %t, 8;\n@%p bra $one;\nbar.sync 0;\nbra $two;\n$one: bar.sync 0;\n$two:",
        32,
        "is reached by 24 of the 32 threads of a warp",
    );
    hangs("bar.warp.sync 3;", 32, "lane 2 is not in the mask 0x3");
    hangs("setp.lt.u32 %p, %t, 40;\n@%p bar.sync 0;", 64, "thread (40, 0, 0) has ended");
    // Two different counts for one barrier. One of the two only arrives.
    let (findings, ..) =
        launch("setp.lt.u32 %p, %t, 32;\n@%p bar.arrive 1, 96;\n@!%p bar.sync 1, 64;", 1, 96);
    assert!(findings.iter().any(|found| found.to_string().contains("different numbers")));
}

#[test]
fn lanes_that_have_ended_take_no_part_in_votes_and_exchanges() {
    let end = "setp.ge.u32 %p, %t, 20;\n@%p exit;\n";
    let store = "mul.wide.u32 %d1, %t, 4;\nadd.s64 %d1, %to, %d1;\nst.global.u32 [%d1], %r1;";
    let body = format!("{end}setp.ne.u32 %q, %t, 3;\nvote.sync.ballot.b32 %r1, %q, -1;\n{store}");
    assert_eq!(words(&clean(&body, 1, 32))[..21], [vec![0xffff7; 20], vec![0]].concat());
    let body = format!(
        "{end}setp.ne.u32 %q, %t, 25;\nvote.sync.all.pred %q, %q, -1;\nselp.u32 %r1, 1, 2, %q;\n{store}"
    );
    assert_eq!(words(&clean(&body, 1, 32))[..20], [1; 20]);
    let body = format!("{end}redux.sync.add.u32 %r1, %t, -1;\n{store}");
    assert_eq!(words(&clean(&body, 1, 32))[..20], [190; 20]);
    let body = format!("{end}and.b32 %r2, %t, 1;\nmatch.any.sync.b32 %r1, %r2, -1;\n{store}");
    assert_eq!(words(&clean(&body, 1, 32))[..2], [0x55555, 0xaaaaa]);
    let body = format!("{end}bar.warp.sync -1;\nxor.b32 %r1, %t, 1;\n{store}");
    assert_eq!(words(&clean(&body, 1, 32))[..2], [1, 0]);
    let body = format!("{end}shfl.sync.bfly.b32 %r1, %t, 1, 31, -1;\n{store}");
    assert_eq!(words(&clean(&body, 1, 32))[..2], [1, 0]);
    // Lanes that have ended provide no value.
    unread(
        &format!("{end}shfl.sync.idx.b32 %r1, %t, 25, 31, -1;\n{store}"),
        32,
        "reads lane 25, which has ended",
    );
}

#[test]
fn a_shuffle_reads_no_lane_outside_its_mask() {
    let shuffle = |from: u32| {
        format!(
            "setp.ge.u32 %p, %t, 16;\n@%p bra $over;\n\
             shfl.sync.idx.b32 %r1, %t, {from}, 31, 0xffff;\n$over:"
        )
    };
    clean(&shuffle(15), 1, 32);
    unread(&shuffle(16), 32, "reads lane 16, which is not in its mask 0xffff");
    unread("shfl.sync.down.b32 %r1, %t, 1, 31, -1;", 20, "reads lane 20, which has no thread");
    // Outside its segment, a lane reads its own value.
    clean("shfl.sync.down.b32 %r1, %t, 1, 0x101f, -1;", 1, 32);
}

#[test]
fn one_kind_of_exchange_meets_wherever_its_lanes_are() {
    let arms = |one: &str, other: &str| {
        format!(
            "setp.lt.u32 %p, %t, 8;\nmov.u32 %r2, %t;\n@%p bra $one;\n\
             mul.wide.u32 %d1, %t, 4;\nmov.u64 %d2, room;\nadd.s64 %d2, %d2, %d1;\n\
             st.shared.u32 [%d2], %t;\n{other}\nbra.uni $both;\n$one:\n{one}\n\
             ld.shared.u32 %r2, [room+40];\n$both:\nmul.wide.u32 %d1, %t, 4;\n\
             add.s64 %d1, %to, %d1;\nst.global.u32 [%d1], %r2;"
        )
    };
    let left = clean(&arms("bar.warp.sync -1;", "bar.warp.sync -1;"), 1, 32);
    assert_eq!(words(&left)[..9], [10, 10, 10, 10, 10, 10, 10, 10, 8]);
    let ballot = "setp.ne.u32 %q, %t, 1;\nvote.sync.ballot.b32 %r2, %q, -1;\nbar.warp.sync -1;";
    let other = "setp.ne.u32 %q, %t, 9;\nvote.sync.ballot.b32 %r2, %q, -1;\nbar.warp.sync -1;";
    assert_eq!(words(&clean(&arms(ballot, other), 1, 32))[8], 0xffff_fdfd);
    // Instructions of two kinds do not meet.
    hangs(&arms("bar.warp.sync -1;", "vote.sync.any.pred %q, %p, -1;"), 32, "waits for ever");
    hangs(
        &arms("bar.warp.sync -1;", "bar.warp.sync 0xffffff00;\nbar.sync 0;"),
        32,
        "waits for ever",
    );
}
