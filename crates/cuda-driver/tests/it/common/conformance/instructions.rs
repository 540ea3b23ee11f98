//! Results of single PTX instructions, bit by bit, at the edges of their types; and barriers and
//! exchanges with only some threads of a block or a warp.
//!
//! The bits stand in `fixtures/instructions.txt`, one table for every device. All rows that a device
//! answers otherwise are printed, as its table would have them.

#![allow(clippy::print_stdout, reason = "rows that differ are told before the case fails")]

use std::fmt::Write;

use cuda_driver::{DeviceAttribute, KernelArgs, LaunchConfig};

use super::bound::Bound;
use super::{Case, Needs, Subject, cases};

pub(crate) const CASES: &[Case] = cases![Needs::Device;
    instructions_give_the_bits_of_the_table,
    instructions_of_sm_90_give_the_bits_of_the_table,
    a_named_barrier_of_two_warps_begins_anew,
    a_warp_that_is_not_full_counts_as_one_that_is,
    arrivals_complete_a_barrier_that_others_wait_at,
    votes_go_without_lanes_that_have_ended,
    exchanges_go_without_lanes_that_have_ended,
    lanes_meet_at_two_instructions_of_one_kind,
    lanes_vote_at_two_instructions_of_one_kind,
];

/// The rows of the table: under a line with the instruction and a semicolon, lines of its operands
/// (`%a`, `%b` and `%c` of 64 bits, of which `%x`, `%y` and `%z` are the low 32), and what is in `%d`,
/// or `%w`, then.
const TABLE: &str = include_str!("../../../fixtures/instructions.txt");

/// One instruction and its rows.
struct Section {
    body: &'static str,
    rows: Vec<([u64; 3], Option<u64>)>,
}

/// The sections that devices of this kind understand: those above the line `[sm_90]`, or below it.
fn sections(of_sm_90: bool) -> Vec<Section> {
    let (all, sm_90) = TABLE.split_once("\n[sm_90]\n").unwrap();
    let mut found: Vec<Section> = Vec::new();
    let lines = if of_sm_90 { sm_90 } else { all }.lines();
    for line in lines.filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let Some(row) = line.strip_prefix(' ') else {
            found.push(Section { body: line, rows: Vec::new() });
            continue;
        };
        let (operands, result) = row.split_once('=').unwrap();
        let mut values = [0; 3];
        for (value, text) in values.iter_mut().zip(operands.split_whitespace()) {
            *value = u64::from_str_radix(text, 16).unwrap();
        }
        let result = u64::from_str_radix(result.trim(), 16).ok();
        found.last_mut().unwrap().rows.push((values, result));
    }
    found
}

/// A module with a kernel `k0`, `k1` and so on for each section.
fn module(sections: &[Section], target: &str) -> String {
    let mut text = format!(".version 8.0\n.target {target}\n.address_size 64\n");
    for (number, section) in sections.iter().enumerate() {
        let body = section.body;
        let result = if body.contains("%w") { "cvt.u64.u32 %d, %w;" } else { "" };
        write!(
            text,
            ".visible .entry k{number}(.param .u64 to, .param .u64 from, .param .u32 count)\n{{\n\
             .reg .b64 %to, %from, %n, %a, %b, %c, %d;\n.reg .b32 %x, %y, %z, %w, %v, %t, %count;\n\
             .reg .b16 %h, %g, %i;\n.reg .pred %p, %q;\n\
             ld.param.u64 %to, [to];\nld.param.u64 %from, [from];\nld.param.u32 %count, [count];\n\
             cvta.to.global.u64 %to, %to;\ncvta.to.global.u64 %from, %from;\n\
             mov.u32 %t, %tid.x;\nsetp.ge.u32 %p, %t, %count;\n@%p ret;\n\
             mul.wide.u32 %n, %t, 8;\nadd.s64 %to, %to, %n;\n\
             mul.wide.u32 %n, %t, 24;\nadd.s64 %from, %from, %n;\n\
             ld.global.u64 %a, [%from];\nld.global.u64 %b, [%from+8];\n\
             ld.global.u64 %c, [%from+16];\ncvt.u32.u64 %x, %a;\ncvt.u32.u64 %y, %b;\n\
             cvt.u32.u64 %z, %c;\n{body}\n{result}\nst.global.u64 [%to], %d;\nret;\n}}\n"
        )
        .unwrap();
    }
    text
}

/// Runs each section's instruction over its rows, and prints all rows that the device answers
/// otherwise.
fn compare(bound: &Bound<'_>, sections: &[Section], target: &str) {
    let module = bound.module_of(&module(sections, target));
    let mut wrong = 0;
    for (number, section) in sections.iter().enumerate() {
        let count = section.rows.len();
        let operands = section.rows.iter().flat_map(|(values, _)| values);
        let operands: Vec<u8> = operands.flat_map(|value| value.to_le_bytes()).collect();
        let (from, to) = (bound.alloc(count as u64 * 24), bound.alloc(count as u64 * 8));
        bound.write(*from, &operands);
        let function = bound.module_get_function(*module, &format!("k{number}")).unwrap();
        let args = KernelArgs::new().arg(*to).arg(*from).arg(count as u32);
        bound.launch_kernel(function, &LaunchConfig::linear(1, count as u32), &args, 0).unwrap();
        let found = bound.read(*to, count * 8);
        let mut told = false;
        for ((values, expected), found) in section.rows.iter().zip(found.chunks_exact(8)) {
            let found = u64::from_le_bytes(found.try_into().unwrap());
            if Some(found) != *expected {
                if !std::mem::replace(&mut told, true) {
                    println!("{}", section.body);
                }
                let [a, b, c] = values;
                let expected = expected.map_or("nothing".to_owned(), |bits| format!("{bits:x}"));
                println!(" {a:x} {b:x} {c:x} = {found:x}    # where {expected} is expected");
                wrong += 1;
            }
        }
    }
    assert_eq!(wrong, 0, "rows of {} instructions differ", sections.len());
}

fn instructions_give_the_bits_of_the_table(on: &Subject) {
    compare(&on.bind(), &sections(false), "sm_80");
}

fn instructions_of_sm_90_give_the_bits_of_the_table(on: &Subject) {
    let bound = on.bind();
    let major = DeviceAttribute::COMPUTE_CAPABILITY_MAJOR;
    // An older device refuses the module, and the suite asks it for no more.
    if bound.device_get_attribute(bound.device, major).unwrap() >= 9 {
        compare(&bound, &sections(true), "sm_90");
    }
}

/// Runs `body` in one block of `threads` threads, each of which leaves what is in its `%w`.
fn exchange(on: &Subject, body: &str, threads: u32) -> Vec<u32> {
    let bound = on.bind();
    let text = format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n\
         .visible .entry k(.param .u64 to)\n{{\n.reg .b64 %to, %n, %s;\n\
         .reg .b32 %t, %w, %v, %warp;\n.reg .pred %p, %q;\n.shared .align 16 .b8 room[4096];\n\
         ld.param.u64 %to, [to];\ncvta.to.global.u64 %to, %to;\nmov.u32 %t, %tid.x;\n\
         shr.u32 %warp, %t, 5;\nmul.wide.u32 %n, %t, 4;\nadd.s64 %to, %to, %n;\n\
         mov.u64 %s, room;\nadd.s64 %s, %s, %n;\nst.shared.u32 [%s], 0;\nmov.u32 %w, 0;\n\
         bar.sync 0;\n{body}\nst.global.u32 [%to], %w;\nret;\n}}\n"
    );
    let module = bound.module_of(&text);
    let memory = bound.alloc(4 * u64::from(threads));
    bound.memset_d8_async(*memory, 0xee, 4 * u64::from(threads), 0).unwrap();
    let function = bound.module_get_function(*module, "k").unwrap();
    let args = KernelArgs::new().arg(*memory);
    bound.launch_kernel(function, &LaunchConfig::linear(1, threads), &args, 0).unwrap();
    let left = bound.read(*memory, 4 * threads as usize);
    left.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

/// What a thread leaves that ends early.
const ENDED: u32 = 0xeeee_eeee;

fn a_named_barrier_of_two_warps_begins_anew(on: &Subject) {
    // Warps 0 and 1 exchange words thrice at barrier 1; warp 2 never comes to it.
    let round = "st.shared.u32 [%s], %v;\nbar.sync 1, 64;\nxor.b32 %w, %t, 32;\n\
                 mul.wide.u32 %n, %w, 4;\nmov.u64 %to2, room;\nadd.s64 %n, %n, %to2;\n\
                 ld.shared.u32 %v, [%n];\nadd.u32 %v, %v, 1;\nbar.sync 1, 64;\n";
    let body = format!(
        ".reg .b64 %to2;\nsetp.eq.u32 %p, %warp, 2;\n@%p bra $over;\nmov.u32 %v, %t;\n\
         {round}{round}{round}mov.u32 %w, %v;\n$over:"
    );
    let expected = (0..96u32).map(|t| if t < 64 { (t ^ 32) + 3 } else { 0 });
    assert_eq!(exchange(on, &body, 96), expected.collect::<Vec<_>>());
}

fn a_warp_that_is_not_full_counts_as_one_that_is(on: &Subject) {
    let body = "setp.eq.u32 %p, %t, 0;\n@%p st.shared.u32 [room+64], 9;\nbar.sync 3, 64;\n\
                setp.eq.u32 %p, %warp, 1;\n@%p bar.sync 4, 32;\nld.shared.u32 %w, [room+64];";
    assert_eq!(exchange(on, body, 40), [9; 40]);
}

fn arrivals_complete_a_barrier_that_others_wait_at(on: &Subject) {
    let body = "setp.eq.u32 %p, %warp, 0;\n@!%p bra $wait;\nsetp.eq.u32 %q, %t, 0;\n\
                @%q st.shared.u32 [room], 7;\nbar.arrive 1, 64;\nbra.uni $over;\n\
                $wait: bar.sync 1, 64;\nld.shared.u32 %w, [room];\n$over:";
    assert_eq!(exchange(on, body, 64), [[0; 32], [7; 32]].concat());
}

fn votes_go_without_lanes_that_have_ended(on: &Subject) {
    let body = "setp.ge.u32 %p, %t, 20;\n@%p exit;\nsetp.ne.u32 %q, %t, 3;\n\
                vote.sync.ballot.b32 %w, %q, -1;\nsetp.ne.u32 %q, %t, 25;\n\
                vote.sync.all.pred %q, %q, -1;\n@%q or.b32 %w, %w, 0x80000000;";
    assert_eq!(exchange(on, body, 32), [vec![0x800f_fff7; 20], vec![ENDED; 12]].concat());
}

fn exchanges_go_without_lanes_that_have_ended(on: &Subject) {
    let body = "setp.ge.u32 %p, %t, 20;\n@%p exit;\nbar.warp.sync -1;\n\
                shfl.sync.bfly.b32 %w, %t, 1, 31, -1;\nredux.sync.add.u32 %v, %t, -1;\n\
                mad.lo.u32 %w, %v, 256, %w;\nand.b32 %v, %t, 1;\n\
                match.any.sync.b32 %v, %v, -1;\nxor.b32 %w, %w, %v;";
    let expected = (0..32u32).map(|t| match t {
        0..20 => (190 * 256 + (t ^ 1)) ^ (0x55555 << (t & 1)),
        _ => ENDED,
    });
    assert_eq!(exchange(on, body, 32), expected.collect::<Vec<_>>());
}

fn lanes_meet_at_two_instructions_of_one_kind(on: &Subject) {
    let body = "setp.lt.u32 %p, %t, 8;\n@%p bra $low;\nadd.u32 %v, %t, 100;\n\
                st.shared.u32 [%s], %v;\nbar.warp.sync -1;\nbra.uni $both;\n\
                $low: bar.warp.sync -1;\nld.shared.u32 %w, [room+40];\n$both:";
    assert_eq!(exchange(on, body, 32), [vec![110; 8], vec![0; 24]].concat());
}

fn lanes_vote_at_two_instructions_of_one_kind(on: &Subject) {
    let body = "setp.lt.u32 %p, %t, 8;\n@%p bra $low;\nsetp.ne.u32 %q, %t, 9;\n\
                vote.sync.ballot.b32 %w, %q, -1;\nadd.u32 %w, %w, 1;\nbra.uni $both;\n\
                $low: setp.ne.u32 %q, %t, 1;\nvote.sync.ballot.b32 %w, %q, -1;\n$both:";
    assert_eq!(exchange(on, body, 32), [vec![0xffff_fdfd; 8], vec![0xffff_fdfe; 24]].concat());
}
