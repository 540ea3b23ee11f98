//! Compares single PTX instructions, over operands at the edges of their types, with the same
//! computation in Rust. The reference is the PTX ISA, section "Instruction Set".

use crate::common::{download, seeded, sync, upload};
use cuda_driver::{Driver, KernelArgs, LaunchConfig};

/// An instruction with the operands `%a`, `%b` and `%c` (64 bits) or `%x`, `%y` and `%z` (their low
/// 32 bits) and the result `%d` or `%w`; and the expected result. A 32-bit result is zero-extended.
type Case = (&'static str, fn(u64, u64, u64) -> u64);

const EDGES: [u64; 14] = [
    0,
    1,
    2,
    31,
    32,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_fffe,
    0xffff_ffff,
    0x1_0000_0000,
    0x0123_4567_89ab_cdef,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_ffff,
];

fn ptx(body: &str) -> String {
    let mut text = String::from(
        ".version 8.0\n.target sm_90\n.address_size 64\n\
         .visible .entry kernel(.param .u64 to, .param .u64 from)\n{\n\
         .reg .b64 %rd<4>;\n.reg .b64 %a, %b, %c, %d;\n.reg .b32 %x, %y, %z, %w, %t;\n\
         .reg .b16 %h, %g;\n.reg .pred %p, %q;\n\
         ld.param.u64 %rd0, [to];\nld.param.u64 %rd1, [from];\n\
         mov.u32 %t, %tid.x;\n\
         mul.wide.u32 %rd2, %t, 8;\nadd.s64 %rd0, %rd0, %rd2;\n\
         mul.wide.u32 %rd3, %t, 24;\nadd.s64 %rd1, %rd1, %rd3;\n\
         ld.global.u64 %a, [%rd1];\nld.global.u64 %b, [%rd1+8];\nld.global.u64 %c, [%rd1+16];\n\
         cvt.u32.u64 %x, %a;\ncvt.u32.u64 %y, %b;\ncvt.u32.u64 %z, %c;\n",
    );
    text.push_str(body);
    if body.contains("%w") {
        text.push_str("\ncvt.u64.u32 %d, %w;");
    }
    text.push_str("\nst.global.u64 [%rd0], %d;\nret;\n}\n");
    text
}

/// Runs every case over all pairs of edge values. The third operand takes every edge value too.
#[track_caller]
fn check(cases: &[Case]) {
    let operands: Vec<[u64; 3]> = (0..EDGES.len() * EDGES.len())
        .map(|at| (at / EDGES.len(), at % EDGES.len()))
        .map(|(a, b)| [EDGES[a], EDGES[b], EDGES[(a + 3 * b) % EDGES.len()]])
        .collect();
    let bytes: Vec<u8> = operands.as_flattened().iter().flat_map(|v| v.to_le_bytes()).collect();
    let count = operands.len();
    let sim = seeded(0);
    let from = sim.mem_alloc(bytes.len() as u64).unwrap();
    upload(&sim, from, &bytes, 0).unwrap();
    for (body, meaning) in cases {
        let to = sim.mem_alloc(count as u64 * 8).unwrap();
        let mut log = String::new();
        let module = sim.module_load_data(&ptx(body), &mut log);
        let module = module.unwrap_or_else(|error| panic!("{body}: {error}: {log}"));
        // SAFETY: the module was loaded just now.
        let function = unsafe { sim.module_get_function(module, "kernel") }.unwrap();
        let args = KernelArgs::new().arg(to).arg(from);
        let config = LaunchConfig::linear(1, count as u32);
        // SAFETY: the arguments match the kernel, and name only device memory.
        unsafe { sim.launch_kernel(function, &config, &args, 0) }.unwrap();
        sync(&sim, 0).unwrap();
        assert_eq!(sim.findings(), [], "{body}");
        let found = download(&sim, to, count * 8, 0).unwrap();
        for (&[a, b, c], found) in operands.iter().zip(found.chunks_exact(8)) {
            let found = u64::from_le_bytes(found.try_into().unwrap());
            let expected = meaning(a, b, c);
            assert_eq!(found, expected, "{body} of {a:#x}, {b:#x}, {c:#x}: {found:#x}");
        }
    }
}

/// The low half of a result, zero-extended.
fn low(value: u32) -> u64 {
    value.into()
}

fn wide(value: i64) -> u64 {
    value as u64
}

#[test]
fn arithmetic_of_32_bits() {
    check(&[
        ("add.s32 %w, %x, %y;", |a, b, _| low((a as u32).wrapping_add(b as u32))),
        ("add.u32 %w, %x, -7;", |a, _, _| low((a as u32).wrapping_sub(7))),
        ("sub.s32 %w, %x, %y;", |a, b, _| low((a as u32).wrapping_sub(b as u32))),
        ("mul.lo.s32 %w, %x, %y;", |a, b, _| low((a as u32).wrapping_mul(b as u32))),
        ("mul.hi.u32 %w, %x, %y;", |a, b, _| ((a & 0xffff_ffff) * (b & 0xffff_ffff)) >> 32),
        ("mul.hi.s32 %w, %x, %y;", |a, b, _| {
            low(((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32)
        }),
        ("mul.wide.u32 %d, %x, %y;", |a, b, _| (a & 0xffff_ffff) * (b & 0xffff_ffff)),
        ("mul.wide.s32 %d, %x, %y;", |a, b, _| wide(i64::from(a as i32) * i64::from(b as i32))),
        ("mad.lo.s32 %w, %x, %y, %z;", |a, b, c| {
            low((a as u32).wrapping_mul(b as u32).wrapping_add(c as u32))
        }),
        ("mad.wide.u32 %d, %x, %y, %c;", |a, b, c| {
            ((a & 0xffff_ffff) * (b & 0xffff_ffff)).wrapping_add(c)
        }),
        ("or.b32 %y, %y, 1;\ndiv.u32 %w, %x, %y;", |a, b, _| low(a as u32 / (b as u32 | 1))),
        ("or.b32 %y, %y, 1;\ndiv.s32 %w, %x, %y;", |a, b, _| {
            low((a as i32).wrapping_div(b as i32 | 1) as u32)
        }),
        ("or.b32 %y, %y, 1;\nrem.u32 %w, %x, %y;", |a, b, _| low(a as u32 % (b as u32 | 1))),
        ("or.b32 %y, %y, 1;\nrem.s32 %w, %x, %y;", |a, b, _| {
            low((a as i32).wrapping_rem(b as i32 | 1) as u32)
        }),
        ("min.u32 %w, %x, %y;", |a, b, _| low((a as u32).min(b as u32))),
        ("max.s32 %w, %x, %y;", |a, b, _| low((a as i32).max(b as i32) as u32)),
        ("neg.s32 %w, %x;", |a, _, _| low((a as u32).wrapping_neg())),
    ]);
}

#[test]
fn arithmetic_of_64_bits() {
    check(&[
        ("add.s64 %d, %a, %b;", |a, b, _| a.wrapping_add(b)),
        ("sub.s64 %d, %a, %b;", |a, b, _| a.wrapping_sub(b)),
        ("mul.lo.s64 %d, %a, %b;", |a, b, _| a.wrapping_mul(b)),
        ("mul.hi.u64 %d, %a, %b;", |a, b, _| ((u128::from(a) * u128::from(b)) >> 64) as u64),
        ("mad.lo.s64 %d, %a, %b, %c;", |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        ("or.b64 %b, %b, 1;\ndiv.u64 %d, %a, %b;", |a, b, _| a / (b | 1)),
        ("or.b64 %b, %b, 1;\ndiv.s64 %d, %a, %b;", |a, b, _| {
            wide((a as i64).wrapping_div(b as i64 | 1))
        }),
        ("or.b64 %b, %b, 1;\nrem.u64 %d, %a, %b;", |a, b, _| a % (b | 1)),
        ("min.u64 %d, %a, %b;", |a, b, _| a.min(b)),
        ("min.s64 %d, %a, %b;", |a, b, _| wide((a as i64).min(b as i64))),
        ("max.u64 %d, %a, %b;", |a, b, _| a.max(b)),
        ("neg.s64 %d, %a;", |a, _, _| a.wrapping_neg()),
    ]);
}

#[test]
fn bits_and_shifts() {
    check(&[
        ("and.b32 %w, %x, %y;", |a, b, _| low((a & b) as u32)),
        ("or.b64 %d, %a, %b;", |a, b, _| a | b),
        ("xor.b64 %d, %a, %b;", |a, b, _| a ^ b),
        ("not.b32 %w, %x;", |a, _, _| low(!(a as u32))),
        ("not.b64 %d, %a;", |a, _, _| !a),
        // A shift by the width or more leaves zero, or copies of the sign.
        ("shl.b32 %w, %x, %y;", |a, b, _| low((a as u32).checked_shl(b as u32).unwrap_or(0))),
        ("shr.u32 %w, %x, %y;", |a, b, _| low((a as u32).checked_shr(b as u32).unwrap_or(0))),
        ("shr.s32 %w, %x, %y;", |a, b, _| low((a as i32 >> (b as u32).min(31)) as u32)),
        ("shl.b64 %d, %a, %y;", |a, b, _| a.checked_shl(b as u32).unwrap_or(0)),
        ("shr.u64 %d, %a, %y;", |a, b, _| a.checked_shr(b as u32).unwrap_or(0)),
        ("shr.s64 %d, %a, %y;", |a, b, _| wide(a as i64 >> (b as u32).min(63))),
    ]);
}

#[test]
fn conversions_and_moves() {
    check(&[
        ("cvt.u64.u32 %d, %x;", |a, _, _| a & 0xffff_ffff),
        ("cvt.s64.s32 %d, %x;", |a, _, _| wide(i64::from(a as i32))),
        ("cvt.u16.u32 %h, %x;\ncvt.u64.u16 %d, %h;", |a, _, _| a & 0xffff),
        ("cvt.u16.u64 %h, %a;\ncvt.s32.s16 %w, %h;", |a, _, _| low(i32::from(a as i16) as u32)),
        ("mov.b64 {%w, %t}, %a;", |a, _, _| a & 0xffff_ffff),
        ("mov.b64 {%t, %w}, %a;", |a, _, _| a >> 32),
        ("mov.b64 %d, {%y, %x};", |a, b, _| a << 32 | b & 0xffff_ffff),
        ("mov.u32 %w, 0x80000001;", |_, _, _| 0x8000_0001),
        ("mov.u64 %d, -3;", |_, _, _| wide(-3)),
    ]);
}

#[test]
fn comparisons_and_choices() {
    check(&[
        ("setp.lt.u64 %p, %a, %b;\nselp.b64 %d, 1, 0, %p;", |a, b, _| (a < b).into()),
        ("setp.lt.s64 %p, %a, %b;\nselp.b64 %d, 1, 0, %p;", |a, b, _| {
            ((a as i64) < b as i64).into()
        }),
        ("setp.le.u64 %p, %a, %b;\nselp.b64 %d, %c, %a, %p;", |a, b, c| if a <= b { c } else { a }),
        ("setp.ge.u32 %p, %x, %y;\nselp.b64 %d, 1, 0, %p;", |a, b, _| {
            (a as u32 >= b as u32).into()
        }),
        ("setp.gt.s32 %p, %x, %y;\nselp.b64 %d, 1, 0, %p;", |a, b, _| (a as i32 > b as i32).into()),
        ("setp.eq.s64 %p, %a, %b;\nselp.b64 %d, 1, 0, %p;", |a, b, _| (a == b).into()),
        ("setp.ne.s32 %p, %x, %y;\nselp.b64 %d, 1, 0, %p;", |a, b, _| {
            (a as u32 != b as u32).into()
        }),
        (
            "setp.lt.u32 %p, %x, %y;\nsetp.eq.s32 %q, %z, 0;\nand.pred %p, %p, %q;\n\
             selp.b64 %d, 1, 0, %p;",
            |a, b, c| ((a as u32) < b as u32 && c as u32 == 0).into(),
        ),
        (
            "setp.lt.u32 %p, %x, %y;\nsetp.eq.s32 %q, %z, 0;\nor.pred %p, %p, %q;\n\
             selp.b64 %d, 1, 0, %p;",
            |a, b, c| ((a as u32) < b as u32 || c as u32 == 0).into(),
        ),
        // A guard, and its negation.
        (
            "setp.lt.u64 %p, %a, %b;\nmov.u64 %d, 5;\n@%p mov.u64 %d, 6;",
            |a, b, _| {
                if a < b { 6 } else { 5 }
            },
        ),
        (
            "setp.lt.u64 %p, %a, %b;\nmov.u64 %d, 5;\n@!%p mov.u64 %d, 6;",
            |a, b, _| {
                if a < b { 5 } else { 6 }
            },
        ),
    ]);
}

#[test]
fn threads_of_a_warp_part_and_meet_again() {
    check(&[
        // Each thread iterates as often as its operand says, at most 40 times.
        (
            "min.u64 %b, %b, 40;\nmov.u64 %d, 0;\n$again:\nsetp.ge.u64 %p, %d, %b;\n\
             @%p bra $over;\nadd.s64 %d, %d, 1;\nbra.uni $again;\n$over:\nadd.s64 %d, %d, %a;",
            |a, b, _| b.min(40).wrapping_add(a),
        ),
        (
            "setp.lt.u64 %p, %a, %b;\n@%p bra $less;\nsetp.eq.s64 %q, %a, %b;\nmov.u64 %d, 1;\n\
             @%q bra $over;\nmov.u64 %d, 2;\nbra $over;\n$less:\nmov.u64 %d, 3;\n$over:",
            |a, b, _| match a.cmp(&b) {
                std::cmp::Ordering::Less => 3,
                std::cmp::Ordering::Equal => 1,
                std::cmp::Ordering::Greater => 2,
            },
        ),
    ]);
}

/// One row of each kind. `cuda-driver/tests/fixtures/instructions.txt` holds all results measured
/// on GPUs.
#[test]
fn nans_and_signed_zeros_are_those_of_the_cards() {
    const NAN: u64 = 0x7fff_ffff;
    let single = |text| (text, (|_, _, _| NAN) as fn(u64, u64, u64) -> u64);
    check(&[
        single("mov.b32 %x, 0x7fc01234;\nadd.f32 %w, %x, 0f3f800000;"),
        single("mov.b32 %x, 0x7fc01234;\nmin.f32 %w, %x, 0fffc05678;"),
        single("mov.b32 %x, 0xffc01234;\nfma.rn.f32 %w, 0f3f800000, 0f3f800000, %x;"),
        single("mov.b32 %x, 0x7f800000;\nsub.f32 %w, %x, %x;"),
        ("mov.b64 %a, 0x7ff8000123456789;\ncvt.rn.f32.f64 %w, %a;", |_, _, _| 0x7fc0_0009),
        single("sqrt.rn.f32 %w, 0fbf800000;"),
        ("mov.b32 %x, 0x7fc01234;\nmin.f32 %w, %x, 0f3f800000;", |_, _, _| 0x3f80_0000),
        ("min.f32 %w, 0f00000000, 0f80000000;", |_, _, _| 0x8000_0000),
        ("min.f32 %w, 0f80000000, 0f00000000;", |_, _, _| 0x8000_0000),
        ("max.f32 %w, 0f80000000, 0f00000000;", |_, _, _| 0),
        ("max.f32 %w, 0f00000000, 0f80000000;", |_, _, _| 0),
        ("mov.b32 %x, 0x7fc01234;\ncvt.rzi.s32.f32 %w, %x;", |_, _, _| 0),
        ("mov.b32 %x, 0x7fc01234;\ncvt.rzi.u64.f32 %d, %x;", |_, _, _| 1 << 63),
        ("mov.b64 %a, 0x7ff8000000001234;\ncvt.rzi.s32.f64 %w, %a;", |_, _, _| 1 << 31),
        ("mov.b64 %a, 0x7ff8000000001234;\ncvt.rzi.s64.f64 %d, %a;", |_, _, _| 1 << 63),
        ("cvt.rn.sat.f32.s32 %w, 7;", |_, _, _| 0x3f80_0000),
        ("mov.b64 %a, 0x7ff0000000001234;\nadd.f64 %d, %a, %a;", |_, _, _| 0x7ff8_0000_0000_1234),
        ("mov.b64 %a, 0x7ff0000000000000;\nsub.f64 %d, %a, %a;", |_, _, _| 0xfff8_0000_0000_0000),
    ]);
}
