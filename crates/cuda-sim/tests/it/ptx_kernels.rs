//! What PTX is refused, and instructions of several threads or of several state spaces. For each single
//! instruction see `ptx_semantics` and the table of `cuda-driver`'s conformance suite.

use crate::common::seeded;
use crate::ptx_order::{kernel, launch, launch_text};
use cuda_driver::{Driver, ErrorCode};
use cuda_sim::{FindingKind, SimConfig};

const HEADER: &str = ".version 8.0\n.target sm_80\n.address_size 64\n";

/// A body in whose threads `%at` and `%from` are addresses of elements of 8 bytes. The elements at `%from`
/// count from 100, and `%d` is stored at `%at`.
fn elements(body: &str) -> String {
    format!(
        ".reg .b64 %at, %from, %n, %d, %e;\nmul.wide.u32 %n, %t, 8;\nadd.s64 %at, %to, %n;\n\
         add.s64 %from, %at, 4096;\ncvt.u64.u32 %d, %t;\nadd.u64 %d, %d, 100;\n\
         st.global.u64 [%from], %d;\n{body}\nst.global.u64 [%at], %d;"
    )
}

/// The elements at `%at` after a kernel without mistakes.
#[track_caller]
fn results(body: &str, threads: u32) -> Vec<u64> {
    let (findings, answer, left) = launch(&elements(body), 1, threads);
    assert_eq!((findings, answer), (vec![], None), "{body}");
    let left = left[..8 * threads as usize].chunks_exact(8);
    left.map(|element| u64::from_le_bytes(element.try_into().unwrap())).collect()
}

/// What the log says of PTX that is refused.
#[track_caller]
fn refused(text: &str) -> String {
    let mut log = String::new();
    let loaded = seeded(0).module_load_data(text, &mut log);
    assert_eq!(loaded.unwrap_err().code, ErrorCode::INVALID_PTX, "{text}");
    log
}

#[test]
fn what_is_not_understood_is_refused_with_its_line() {
    for instruction in [
        "xyz.u32 %t, %t;",
        "add.u32.fast %t, %t, 1;",
        "add.f16 %t, %t, %t;",
        "add.rz.f32 %t, %t, %t;",
        "add.ftz.f32 %t, %t, %t;",
        "div.f32 %t, %t, %t;",
        "div.full.f32 %t, %t, %t;",
        "fma.f32 %t, %t, %t, %t;",
        "rcp.f32 %t, %t;",
        "min.rn.f32 %t, %t, %t;",
        "neg.rn.f32 %t, %t;",
        "cvt.f32.u32 %t, %t;",
        "cvt.f32.f64 %t, %to;",
        "cvt.rn.f64.f32 %to, %t;",
        "cvt.rni.f64.f32 %to, %t;",
        "cvt.rn.u32.u64 %t, %to;",
        "red.global.add.f32 [%to], %t;",
        "wmma.load.a %t;",
        "call foo;",
        "shfl.down.b32 %t, %t, 1, 31;",
        "cp.async.ca.shared.global [room], [%to], 8;",
        "cp.async.commit_group;",
        "cvt.rn.f16x2.e4m3x2 %t, %t;",
        "max.bf16x2 %t, %t, %t;",
        "cp.async.bulk.global.shared::cta.bulk_group [%to], [room], 16;",
        "mbarrier.init.shared::cta.b64 [room], 1;",
        "fence.mbarrier_init.release.cluster;",
    ] {
        let opcode = instruction.split([' ', ';']).next().unwrap();
        assert_refused(instruction, &format!("unsupported instruction '{opcode}'"));
    }
    for (body, message) in [
        ("add.u32 %t, %t;", "2 operands where 3 are expected"),
        ("add.u32 %t, %to, 1;", "register '%to' does not fit the instruction"),
        ("mov.u32 %t, %missing;", "unknown name '%missing'"),
        ("mov.u32 %tid.x, 1;", "'%tid.x' cannot be written"),
        ("bra nowhere;", "unknown name 'nowhere'"),
        ("bra room;", "'room' is not a label"),
        ("here: here: ret;", "'here' is declared twice"),
        ("ld.global.v2.u64 %to, [%to];", "the vector and the access have different lengths"),
        ("mov.u32 %t, 0xZZ;", "unreadable number '0xZZ'"),
        (".maxreg 3;", "unsupported directive '.maxreg'"),
    ] {
        assert_refused(body, message);
    }
    for (text, line) in [
        (format!("{HEADER}.bogus 3"), 4),
        (format!("{HEADER}.entry k(.param .u64 a\n)"), 5),
        (format!("{HEADER}\n/* b"), 5),
        (format!("{HEADER}\n\"b"), 5),
        (format!("{HEADER}\n\né"), 6),
    ] {
        let log = refused(&text);
        assert!(log.starts_with(&format!("ptx line {line}; ")), "{text}: {log}");
    }
    let deep = format!("{HEADER}.entry k() {{ {} ", "{".repeat(100_000));
    assert!(refused(&deep).contains("nested"));
}

/// Checks what a kernel is refused for, and with which line.
#[track_caller]
fn assert_refused(body: &str, message: &str) {
    let text = kernel(&format!("mov.u32 %t, 1;\n{body}"));
    let line = text.lines().position(|line| line == body).unwrap() + 1;
    assert_eq!(refused(&text), format!("ptx line {line}; fatal: {message}"));
}

#[test]
fn damaged_text_is_refused_with_a_line_of_it() {
    let text = include_str!("../fixtures/barriers.compute_80.ptx");
    let sim = seeded(0);
    sim.module_load_data(text, &mut String::new()).unwrap();
    let words: Vec<&str> = text.split_inclusive([' ', '\n', '\t', ',']).collect();
    let lines = text.lines().count();
    let mut refused = 0;
    for at in (0..words.len()).step_by(11) {
        for instead in ["", "{", "[", "-", "%rd1", ".b8", "99999999999", "add.u64 ", "@", "<9>;"] {
            let damaged = [&words[..at], &[instead], &words[at + 1..]].concat().concat();
            let mut log = String::new();
            if sim.module_load_data(&damaged, &mut log).is_err() {
                refused += 1;
                let Some(told) = log.strip_prefix("ptx line ") else { continue };
                let line: usize = told.split_once(';').unwrap().0.parse().unwrap();
                assert!((1..=lines).contains(&line), "{log}");
            }
        }
    }
    assert!(refused > words.len() / 11, "{refused} of {} words", words.len());
}

#[test]
fn a_header_says_where_the_text_runs() {
    for (compute_capability, head, expected) in [
        ((9, 0), ".version 8.0\n.target sm_90a, debug", Ok(())),
        ((8, 0), "// .target sm_99\n.version 8.0 /* .version 99.0 */ .target sm_80", Ok(())),
        ((8, 9), ".version 8.0\n.target sm_90", Err(ErrorCode::INVALID_PTX)),
        ((9, 0), ".version 9.0\n.target sm_90", Err(ErrorCode::UNSUPPORTED_PTX_VERSION)),
    ] {
        let config = SimConfig { compute_capability, ..SimConfig::default() };
        let sim = crate::common::machine(config);
        let loaded = sim.module_load_data(head, &mut String::new());
        assert_eq!(loaded.map(drop).map_err(|error| error.code), expected, "{head}");
    }
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
    assert_eq!(results(&body, 64), (0..64).map(|at| sums[at / 32]).collect::<Vec<u64>>());

    let body = "setp.lt.u32 %p, %l, 5;\nvote.sync.ballot.b32 %r1, %p, -1;\n\
        vote.sync.any.pred %q, %p, -1;\nselp.b32 %r2, 256, 0, %q;\nadd.u32 %r1, %r1, %r2;\n\
        cvt.u64.u32 %d, %r1;";
    assert_eq!(results(body, 32), vec![31 + 256; 32]);

    let body = "redux.sync.add.u32 %r1, %l, -1;\nand.b32 %r0, %l, 3;\n\
        match.any.sync.b32 %r2, %r0, -1;\nmov.b64 %d, {%r1, %r2};";
    let expected: Vec<u64> =
        (0..32u64).map(|lane| (0x1111_1111 << (lane & 3)) << 32 | (31 * 16)).collect();
    assert_eq!(results(body, 32), expected);

    // Segments of eight lanes: a lane at the end of one keeps its own value.
    let body = "shfl.sync.down.b32 %r1|%p, %l, 1, 0x181f, -1;\nselp.b32 %r2, 0, 100, %p;\n\
        add.u32 %r1, %r1, %r2;\ncvt.u64.u32 %d, %r1;";
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
fn a_trap_and_what_is_past_the_end_of_shared_memory_lose_the_device() {
    let (findings, code, _) = launch("trap;", 1, 1);
    assert_eq!(
        (findings[0].kind, code),
        (FindingKind::KernelFailed, Some(ErrorCode::LAUNCH_FAILED))
    );
    // 64 bytes of dynamic shared memory come behind the room.
    let (findings, code, _) = launch("ld.shared.u32 %r0, [room+4160];", 1, 16);
    assert_eq!(code, Some(ErrorCode::ILLEGAL_ADDRESS));
    assert!(
        findings[0].detail.contains("4 bytes past the end of its 4160 bytes"),
        "{}",
        findings[0]
    );
}

#[test]
fn generic_addresses_reach_every_space() {
    let body = ".local .align 8 .b8 own[16];\n.reg .b64 %o, %where;\n\
        mov.u64 %where, room;\nadd.s64 %where, %where, %n;\ncvta.shared.u64 %where, %where;\n\
        mov.u64 %o, own;\ncvta.local.u64 %o, %o;\nld.u64 %d, [%from];\n\
        st.u64 [%o+8], %d;\nld.u64 %e, [%o+8];\nst.u64 [%where], %e;\ncvta.to.shared.u64 %where, %where;\n\
        ld.shared.u64 %d, [%where];\nisspacep.shared %p, %o;\n@%p mov.u64 %d, 0;\n\
        isspacep.local %p, %o;\n@!%p mov.u64 %d, 0;";
    assert_eq!(results(body, 40), (100..140).collect::<Vec<u64>>());
}

#[test]
fn a_module_has_variables_and_kernels_have_dynamic_shared_memory() {
    let text = format!(
        "{HEADER}.const .align 4 .u32 table[4] = {{7, 8, 0x9, -1}};\n.global .u32 count;\n\
         .extern .shared .align 16 .b8 dynamic[];\n\
         .entry k(.param .u64 to) {{\n.reg .b64 %a, %b;\n.reg .b32 %r<4>;\n\
         .shared .b8 one;\nld.param.u64 %a, [to];\nld.const.u32 %r0, [table+4];\n\
         atom.global.add.u32 %r1, [count], 5;\nld.const.u32 %r2, [table+12];\n\
         mov.u64 %b, dynamic;\ncvt.u32.u64 %r3, %b;\nadd.u32 %r0, %r0, %r1;\n\
         {{ .reg .b32 %r0; mov.u32 %r0, 1; }}\nadd.u32 %r0, %r0, %r3;\n\
         st.global.v2.u32 [%a], {{%r0, %r2}};\n}}"
    );
    let (findings, code, left) = launch_text(&text, 1, 1);
    assert_eq!((findings, code), (vec![], None));
    assert_eq!(left[..8], (0xFFFF_FFFF_0000_0000u64 | (8 + 16)).to_le_bytes());
}
