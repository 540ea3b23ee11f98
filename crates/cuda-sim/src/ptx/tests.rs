//! Whole kernels on bare memory: control flow, barriers, exchanges, refusals and findings.

use cuda_driver::reference::DeviceMemory;
use cuda_driver::{KernelArgs, LaunchConfig};

use super::{Limits, ObservationKind, Outcome, load, run};
use crate::SimConfig;
use crate::memory::{Memory, View, Viewer};

const HEADER: &str = ".version 8.0\n.target sm_80\n.address_size 64\n";

/// A kernel `k(to, from)`. In each thread, `%to` and `%from` are addresses of 8-byte elements.
fn kernel(body: &str) -> String {
    format!(
        "{HEADER}.visible .entry k(.param .u64 to, .param .u64 from)\n{{\n\
         .reg .b64 %to, %from, %n, %d, %e;\n.reg .b32 %r<8>, %t;\n.reg .pred %p, %q;\n\
         .shared .align 16 .b8 room[1024];\n\
         ld.param.u64 %to, [to];\nld.param.u64 %from, [from];\nmov.u32 %t, %tid.x;\n\
         mul.wide.u32 %n, %t, 8;\nadd.s64 %to, %to, %n;\nadd.s64 %from, %from, %n;\n{body}\n\
         st.global.u64 [%to], %d;\nret;\n}}\n"
    )
}

/// Runs a kernel with `threads` threads over elements that count from 100. Returns the elements
/// afterwards, and the outcome.
fn run_with(text: &str, threads: u32, limits: Limits) -> (Vec<u64>, Outcome) {
    let code = load(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let mut memory = Memory::new(&SimConfig::default());
    let bytes = u64::from(threads) * 8;
    let (to, from) = (memory.allocate(0, bytes).unwrap(), memory.allocate(0, bytes).unwrap());
    let data: Vec<u8> =
        (0..u64::from(threads)).flat_map(|element| (100 + element).to_le_bytes()).collect();
    let mut view = View::new(&mut memory, Viewer::ANY);
    view.store(from, &data).unwrap();
    let args = KernelArgs::new().arg(to).arg(from);
    let config = LaunchConfig::linear(1, threads);
    let mut variables = code.variables;
    let outcome = run(&code.programs[0], &config, &args, view, &mut variables, &limits);
    let view = View::new(&mut memory, Viewer::ANY);
    let left = view.load(to, bytes).unwrap();
    let left = left.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap())).collect();
    (left, outcome)
}

/// The elements after a kernel without mistakes.
#[track_caller]
fn results(body: &str, threads: u32) -> Vec<u64> {
    let (left, outcome) = run_with(&kernel(body), threads, Limits::default());
    assert!(outcome.end.is_none() && outcome.seen.is_empty(), "{outcome:?}");
    left
}

/// The mistake that ended a kernel: kind, line and message.
#[track_caller]
fn end(body: &str, threads: u32) -> (ObservationKind, String, String) {
    let limits = Limits { thread_steps: 1 << 16, ..Limits::default() };
    let text = kernel(body);
    let (_, outcome) = run_with(&text, threads, limits);
    let end = outcome.end.unwrap_or_else(|| panic!("{:?}", outcome.seen));
    let line = text.lines().nth(end.site.line as usize - 1).unwrap_or_default();
    (end.kind, line.to_owned(), end.detail)
}

/// The mistakes that did not end a kernel: kind, thread and message of each.
#[track_caller]
fn seen(body: &str, threads: u32) -> Vec<(ObservationKind, u32, String)> {
    let (_, outcome) = run_with(&kernel(body), threads, Limits::default());
    assert!(outcome.end.is_none(), "{outcome:?}");
    outcome.seen.into_iter().map(|o| (o.kind, o.site.thread[0], o.detail)).collect()
}

#[test]
fn what_is_not_understood_is_refused_with_its_line() {
    for (body, message) in [
        ("xyz.u32 %t, %t;", "unsupported instruction 'xyz.u32'"),
        ("add.u32.fast %t, %t, 1;", "unsupported instruction 'add.u32.fast'"),
        ("add.f16 %t, %t, %t;", "unsupported instruction 'add.f16'"),
        ("add.rz.f32 %t, %t, %t;", "unsupported instruction 'add.rz.f32'"),
        ("add.ftz.f32 %t, %t, %t;", "unsupported instruction 'add.ftz.f32'"),
        ("div.f32 %t, %t, %t;", "unsupported instruction 'div.f32'"),
        ("div.full.f32 %t, %t, %t;", "unsupported instruction 'div.full.f32'"),
        ("fma.f32 %t, %t, %t, %t;", "unsupported instruction 'fma.f32'"),
        ("rcp.f32 %t, %t;", "unsupported instruction 'rcp.f32'"),
        ("min.rn.f32 %t, %t, %t;", "unsupported instruction 'min.rn.f32'"),
        ("neg.rn.f32 %t, %t;", "unsupported instruction 'neg.rn.f32'"),
        ("cvt.f32.u32 %t, %t;", "unsupported instruction 'cvt.f32.u32'"),
        ("cvt.f32.f64 %t, %n;", "unsupported instruction 'cvt.f32.f64'"),
        ("cvt.rn.f64.f32 %n, %t;", "unsupported instruction 'cvt.rn.f64.f32'"),
        ("cvt.rni.f64.f32 %n, %t;", "unsupported instruction 'cvt.rni.f64.f32'"),
        ("cvt.rn.u32.u64 %t, %n;", "unsupported instruction 'cvt.rn.u32.u64'"),
        ("red.global.add.f32 [%to], %t;", "unsupported instruction 'red.global.add.f32'"),
        ("wmma.load.a %t;", "unsupported instruction 'wmma.load.a'"),
        ("call foo;", "unsupported instruction 'call'"),
        ("shfl.down.b32 %t, %t, 1, 31;", "unsupported instruction 'shfl.down.b32'"),
        ("add.u32 %t, %t;", "2 operands where 3 are expected"),
        ("add.u32 %t, %n, 1;", "register '%n' does not fit the instruction"),
        ("mov.u32 %t, %missing;", "unknown name '%missing'"),
        ("mov.u32 %tid.x, 1;", "'%tid.x' cannot be written"),
        ("bra nowhere;", "unknown name 'nowhere'"),
        ("bra room;", "'room' is not a label"),
        ("here: here: ret;", "'here' is declared twice"),
        ("ld.global.v2.u64 %n, [%to];", "the vector and the access have different lengths"),
        ("mov.u32 %t, 0xZZ;", "unreadable number '0xZZ'"),
        (".maxreg 3;", "unsupported directive '.maxreg'"),
        ("cp.async.ca.shared.global [room], [%to], 5;", "a copy of 5 bytes"),
        ("cp.async.bulk.commit_group;", "unsupported instruction 'cp.async.bulk.commit_group'"),
        (
            "cp.async.bulk.global.shared::cta.bulk_group [%to], [room], 16;",
            "unsupported instruction 'cp.async.bulk.global.shared::cta.bulk_group'",
        ),
        (
            "mbarrier.init.shared::cta.b64 [room], 1;",
            "unsupported instruction 'mbarrier.init.shared::cta.b64'",
        ),
        (
            "fence.mbarrier_init.release.cluster;",
            "unsupported instruction 'fence.mbarrier_init.release.cluster'",
        ),
    ] {
        let text = kernel(&format!("mov.u32 %t, 1;\n{body}"));
        let error = load(&text).unwrap_err();
        let line = text.lines().position(|line| line == body).unwrap() + 1;
        assert_eq!(error.to_string(), format!("ptx line {line}; fatal: {message}"));
    }
    assert_eq!(load(".version 8.0\n.bogus 3").unwrap_err().line, 2);
    assert_eq!(load(&format!("{HEADER}.entry k(.param .u64 a\n)")).unwrap_err().line, 5);
    let deep = format!("{HEADER}.entry k() {{ {} ", "{".repeat(100_000));
    assert!(load(&deep).unwrap_err().message.contains("nested"));
}

#[test]
fn threads_diverge_and_meet_again() {
    // The Collatz steps of each element: each thread runs a different number of iterations.
    let body = "ld.global.u64 %n, [%from];\nmov.u64 %d, 0;\n\
        again: setp.eq.u64 %p, %n, 1;\n@%p bra done;\nadd.u64 %d, %d, 1;\n\
        and.b64 %e, %n, 1;\nsetp.ne.u64 %q, %e, 0;\n\
        @!%q shr.u64 %n, %n, 1;\n@%q mad.lo.u64 %n, %n, 3, 1;\nbra.uni again;\ndone:";
    let steps = |mut n: u64| {
        let mut steps = 0;
        while n != 1 {
            n = if n & 1 == 0 { n / 2 } else { 3 * n + 1 };
            steps += 1;
        }
        steps
    };
    let expected: Vec<u64> = (100..170).map(steps).collect();
    assert_eq!(results(body, 70), expected);
}

#[test]
fn a_barrier_orders_what_threads_exchange() {
    let exchange = |barrier: &str| {
        format!(
            "ld.global.u64 %d, [%from];\nmov.u64 %e, room;\nadd.s64 %n, %e, %n;\n\
             st.shared.u64 [%n], %d;\n{barrier}\nxor.b32 %r0, %t, 65;\n\
             mul.wide.u32 %n, %r0, 8;\nadd.s64 %n, %e, %n;\nld.shared.u64 %d, [%n];"
        )
    };
    let expected: Vec<u64> = (0..128u64).map(|thread| 100 + (thread ^ 65)).collect();
    assert_eq!(results(&exchange("bar.sync 0;"), 128), expected);
    assert_eq!(results(&exchange("barrier.sync.aligned 3, 128;"), 128), expected);

    // A warp barrier does not order accesses of two warps.
    for barrier in ["", "bar.warp.sync -1;"] {
        let seen = seen(&exchange(barrier), 128);
        let kinds: Vec<_> = seen.iter().map(|(kind, ..)| *kind).collect();
        assert!(kinds.contains(&ObservationKind::Conflict), "{barrier}: {seen:?}");
    }
}

#[test]
fn barriers_that_never_complete_are_found() {
    let (kind, line, detail) = end("setp.lt.u32 %p, %t, 40;\n@%p bar.sync 0;\nmov.u64 %d, 0;", 64);
    assert_eq!((kind, line.as_str()), (ObservationKind::Barrier, "@%p bar.sync 0;"));
    assert!(detail.contains("40 of 64 threads"), "{detail}");
    assert!(detail.contains("thread (40, 0, 0) has ended"), "{detail}");

    let body = "setp.lt.u32 %p, %t, 8;\n@%p bra one;\nbar.sync 0;\nbra two;\none: bar.sync 0;\ntwo: mov.u64 %d, 0;";
    let (kind, _, detail) = end(body, 32);
    assert_eq!(kind, ObservationKind::Barrier);
    assert!(detail.contains("is reached by 24 of the 32 threads of a warp"), "{detail}");

    let (kind, _, detail) = end("mov.u32 %r0, 3;\nbar.warp.sync %r0;\nmov.u64 %d, 0;", 32);
    assert_eq!(kind, ObservationKind::Barrier);
    assert!(detail.contains("lane 2 is not in the mask 0x3"), "{detail}");
}

#[test]
fn a_warp_reduces_by_exchanges() {
    let mut body = String::from("ld.global.u64 %d, [%from];\ncvt.u32.u64 %r0, %d;\n");
    for apart in [16, 8, 4, 2, 1] {
        body +=
            &format!("shfl.sync.bfly.b32 %r1|%p, %r0, {apart}, 31, -1;\nadd.u32 %r0, %r0, %r1;\n");
    }
    body += "cvt.u64.u32 %d, %r0;";
    let sums = [(100..132).sum::<u64>(), (132..164).sum::<u64>()];
    let expected: Vec<u64> = (0..64).map(|thread| sums[thread / 32]).collect();
    assert_eq!(results(&body, 64), expected);

    let body = "mov.u32 %r0, %laneid;\nsetp.lt.u32 %p, %r0, 5;\n\
        vote.sync.ballot.b32 %r1, %p, -1;\nvote.sync.any.pred %q, %p, -1;\n\
        selp.b32 %r2, 256, 0, %q;\nadd.u32 %r1, %r1, %r2;\ncvt.u64.u32 %d, %r1;";
    assert_eq!(results(body, 32), vec![31 + 256; 32]);

    let body = "mov.u32 %r0, %laneid;\nredux.sync.add.u32 %r1, %r0, -1;\n\
        and.b32 %r0, %r0, 3;\nmatch.any.sync.b32 %r2, %r0, -1;\n\
        mov.b64 %d, {%r1, %r2};";
    let expected: Vec<u64> =
        (0..32u64).map(|lane| (0x1111_1111 << (lane & 3)) << 32 | (31 * 16)).collect();
    assert_eq!(results(body, 32), expected);

    // Segments of eight lanes: a lane at the end of one keeps its own value.
    let body = "mov.u32 %r0, %laneid;\nshfl.sync.down.b32 %r1|%p, %r0, 1, 0x181f, -1;\n\
        selp.b32 %r2, 0, 100, %p;\nadd.u32 %r1, %r1, %r2;\ncvt.u64.u32 %d, %r1;";
    let expected: Vec<u64> =
        (0..32).map(|lane| if lane % 8 == 7 { lane + 100 } else { lane + 1 }).collect();
    assert_eq!(results(body, 32), expected);
}

#[test]
fn carries_pass_from_one_word_to_the_next() {
    // The square of a 64-bit number from its halves; the result is the upper 64 bits.
    let body = "ld.global.u64 %d, [%from];\nmul.lo.u64 %d, %d, 0x9E3779B97F4A7C15;\n\
        mov.b64 {%r0, %r1}, %d;\nmul.lo.u32 %r2, %r0, %r0;\nmul.hi.u32 %r3, %r0, %r0;\n\
        mad.lo.cc.u32 %r3, %r0, %r1, %r3;\nmadc.hi.u32 %r4, %r0, %r1, 0;\n\
        mad.lo.cc.u32 %r3, %r1, %r0, %r3;\nmadc.hi.cc.u32 %r4, %r1, %r0, %r4;\n\
        addc.u32 %r5, 0, 0;\nmad.lo.cc.u32 %r4, %r1, %r1, %r4;\n\
        madc.hi.u32 %r5, %r1, %r1, %r5;\nmov.b64 %d, {%r4, %r5};";
    let square = |number: u64| {
        let number = u128::from(number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        ((number * number) >> 64) as u64
    };
    assert_eq!(results(body, 64), (100..164).map(square).collect::<Vec<u64>>());
}

#[test]
fn atomics_add_up_and_do_not_conflict() {
    let body = "setp.eq.u32 %p, %t, 0;\nmov.u32 %r0, 0;\nmov.u64 %e, room;\n\
        @%p st.shared.u32 [room+8], %r0;\nbar.sync 0;\n\
        atom.shared.add.u32 %r1, [%e+8], 3;\nred.shared.max.u32 [%e+8], 1;\nbar.sync 0;\n\
        ld.shared.u32 %r1, [room+8];\ncvt.u64.u32 %d, %r1;";
    assert_eq!(results(body, 100), vec![300; 100]);
}

#[test]
fn asynchronous_copies_happen_when_they_are_waited_for() {
    let copy = |wait: &str| {
        format!(
            "mov.u64 %e, room;\nadd.s64 %e, %e, %n;\n\
             cp.async.ca.shared.global [%e], [%from], 8;\ncp.async.commit_group;\n{wait}\n\
             ld.shared.u64 %d, [%e];"
        )
    };
    let expected: Vec<u64> = (100..164).collect();
    assert_eq!(results(&copy("cp.async.wait_group 0;"), 64), expected);
    assert_eq!(results(&copy("cp.async.wait_all;"), 64), expected);
    for wait in ["", "cp.async.wait_group 1;"] {
        let seen = seen(&copy(wait), 64);
        assert_eq!(seen[0].0, ObservationKind::Uninitialised, "{seen:?}");
    }
}

#[test]
fn bad_accesses_are_found_with_thread_and_line() {
    let (kind, line, detail) = end("ld.global.u64 %d, [%from+8];", 16);
    assert_eq!((kind, line.as_str()), (ObservationKind::Illegal, "ld.global.u64 %d, [%from+8];"));
    assert!(detail.contains("8 bytes past the end of"), "{detail}");
    let (kind, ..) = end("ld.global.u64 %d, [%from+4];", 16);
    assert_eq!(kind, ObservationKind::Misaligned);
    let (kind, _, detail) = end("ld.shared.u64 %d, [room+1024];", 16);
    assert_eq!(kind, ObservationKind::Illegal);
    assert!(detail.contains("8 bytes past the end of its 1024 bytes"), "{detail}");
    let (kind, ..) = end("trap;", 1);
    assert_eq!(kind, ObservationKind::Trap);
    let (kind, ..) = end("for: bra for;", 2);
    assert_eq!(kind, ObservationKind::Endless);

    let seen_here = seen("ld.shared.u64 %d, [room];", 1);
    assert_eq!(seen_here[0].0, ObservationKind::Uninitialised);
    let seen_here = seen("ld.param.u64 %e, [to];\nst.global.u64 [%e], %n;\nmov.u64 %d, 1;", 16);
    assert_eq!((seen_here[0].0, seen_here[0].1), (ObservationKind::Conflict, 1));
    let words = "that thread (0, 0, 0) of block (0, 0, 0) wrote";
    assert!(seen_here[0].2.contains(words), "{seen_here:?}");
}

#[test]
fn generic_addresses_reach_every_space() {
    let body = ".local .align 8 .b8 own[16];\n.reg .b64 %l, %s;\n\
        mov.u64 %s, room;\nadd.s64 %s, %s, %n;\ncvta.shared.u64 %s, %s;\n\
        mov.u64 %l, own;\ncvta.local.u64 %l, %l;\nld.u64 %d, [%from];\n\
        st.u64 [%l+8], %d;\nld.u64 %e, [%l+8];\nst.u64 [%s], %e;\ncvta.to.shared.u64 %s, %s;\n\
        ld.shared.u64 %d, [%s];\nisspacep.shared %p, %l;\n@%p mov.u64 %d, 0;\n\
        isspacep.local %p, %l;\n@!%p mov.u64 %d, 0;";
    assert_eq!(results(body, 40), (100..140).collect::<Vec<u64>>());
}

#[test]
fn a_module_has_variables_and_kernels_have_dynamic_shared_memory() {
    let text = format!(
        "{HEADER}.const .align 4 .u32 table[4] = {{7, 8, 0x9, -1}};\n.global .u32 count;\n\
         .extern .shared .align 16 .b8 dynamic[];\n\
         .entry k(.param .u64 to, .param .u64 from) {{\n.reg .b64 %a, %b;\n.reg .b32 %r<4>;\n\
         .shared .b8 one;\nld.param.u64 %a, [to];\nld.const.u32 %r0, [table+4];\n\
         atom.global.add.u32 %r1, [count], 5;\nld.const.u32 %r2, [table+12];\n\
         mov.u64 %b, dynamic;\ncvt.u32.u64 %r3, %b;\nadd.u32 %r0, %r0, %r1;\n\
         {{ .reg .b32 %r0; mov.u32 %r0, 1; }}\nadd.u32 %r0, %r0, %r3;\n\
         st.global.v2.u32 [%a], {{%r0, %r2}};\n}}"
    );
    let (left, outcome) = run_with(&text, 1, Limits::default());
    assert!(outcome.end.is_none() && outcome.seen.is_empty(), "{outcome:?}");
    assert_eq!(left, [0xFFFF_FFFF_0000_0000 | (8 + 16)]);
}

#[test]
fn damaged_text_is_refused_with_a_line_of_it() {
    let text = include_str!("../../tests/fixtures/barriers.compute_80.ptx");
    load(text).unwrap();
    let words: Vec<&str> = text.split_inclusive([' ', '\n', '\t', ',']).collect();
    let lines = text.lines().count() as u32;
    let mut refused = 0;
    for at in (0..words.len()).step_by(11) {
        for instead in ["", "{", "[", "-", "%rd1", ".b8", "99999999999", "add.u64 ", "@", "<9>;"] {
            let damaged = [&words[..at], &[instead], &words[at + 1..]].concat().concat();
            if let Err(error) = load(&damaged) {
                assert!((1..=lines).contains(&error.line), "{error}");
                refused += 1;
            }
        }
    }
    assert!(refused > words.len() / 11, "{refused} of {} words", words.len());
}
