//! Changes single lines of the committed PTX: each change must lead to other contents or to a finding.

use super::model::{Contents, Model, Sends, pool, read, recurrent, small, wide};
use super::steps::write_sampled;
use crate::prelude::*;

const PTX: &str = include_str!("../../../ptx/batch.compute_80.ptx");

/// Whether some steps with a kernel from `ptx` are as the model says, without a finding.
fn is_right(ptx: &str) -> bool {
    let machine = Machine::new(4);
    machine.sim.set_race_check(cuda_sim::RaceCheck::Off);
    // A wrong jump may never end.
    machine.sim.limit_instructions(1 << 14, 1 << 24);
    [(small(), 14), (wide(), 20), (recurrent(), 14)].into_iter().all(|(options, steps)| {
        let pool = pool(&machine.device, &options, 2);
        let batch = DeviceBatch::sabotage_with_ptx(&pool, options, ptx);
        batch.is_ok_and(|batch| is_as_the_model(&machine, batch, steps))
    })
}

fn is_as_the_model(machine: &Machine, batch: DeviceBatch, steps: usize) -> bool {
    let mut model = Model::over(batch, 21);
    for _ in 0..steps {
        let expected = model.step(&machine.stream, Sends::All);
        let ended = machine.stream.synchronize();
        if ended.is_err() || !machine.sim.findings().is_empty() {
            return false;
        }
        if model.contents(&machine.stream) != expected {
            return false;
        }
        write_sampled(machine, &mut model, &expected);
        // Gathered again, the step is the same.
        let sampled = model.contents(&machine.stream).accepted;
        model.batch.gather(&machine.stream).unwrap();
        if machine.stream.synchronize().is_err() || !machine.sim.findings().is_empty() {
            return false;
        }
        let again = Contents { accepted: sampled, ..expected };
        if model.contents(&machine.stream) != again {
            return false;
        }
    }
    // Two steps that differ in their numbers only.
    let mut batch = model.batch;
    let mut length = 0;
    for (resolved, upper) in [(0, 0), (1, 3)] {
        let mut step = batch.step_wait(&machine.stream).unwrap();
        step.row(Row::new(0), resolved, upper, 3).unwrap();
        let buffers = step.submit().unwrap().buffers;
        length = read::<i32>(&machine.stream, buffers.lengths)[0];
        machine.stream.upload(buffers.accepted.slice(0, 4).unwrap(), &[2, 0, 0, 0]).unwrap();
    }
    length == 5
}

/// How many lines `change` applies to, and those of them whose change is not noticed.
fn unnoticed(change: impl Fn(&str) -> Option<String>) -> (usize, Vec<String>) {
    let lines: Vec<&str> = PTX.lines().collect();
    let (mut tried, mut unnoticed) = (0, Vec::new());
    for (number, line) in lines.iter().enumerate() {
        let Some(changed) = change(line) else { continue };
        tried += 1;
        let wrong =
            [&lines[..number], &[changed.as_str()], &lines[number + 1..]].concat().join("\n");
        if is_right(&wrong) {
            unnoticed.push(format!("{}: {} -> {}", number + 1, line.trim(), changed.trim()));
        }
    }
    (tried, unnoticed)
}

#[test]
fn the_kernel_itself_is_right() {
    assert!(is_right(PTX));
}

#[test]
fn an_access_to_the_neighbouring_word_is_noticed() {
    let shifted = |line: &str| {
        let line = line.trim_start();
        let accesses = ["ld.global", "st.global", "ld.shared", "st.shared"];
        let accesses = accesses.iter().any(|access| line.starts_with(access));
        let (before, after) = line.split_once(']').filter(|_| accesses)?;
        Some(match before.rsplit_once('+') {
            Some((base, offset)) => format!("{base}+{}]{after}", offset.parse::<i64>().ok()? + 16),
            None => format!("{before}+16]{after}"),
        })
    };
    let (tried, unnoticed) = unnoticed(shifted);
    assert!(tried > 20 && unnoticed.is_empty(), "{tried}, {unnoticed:#?}");
}

#[test]
fn a_store_or_a_barrier_that_is_missing_is_noticed() {
    let removed = |line: &str| {
        let stores = ["st.global", "st.shared", "bar.sync", "barrier.sync"];
        stores.iter().any(|store| line.trim_start().starts_with(store)).then(String::new)
    };
    let (tried, unnoticed) = unnoticed(removed);
    // The one is the number of live columns: without it, every column is filled in every step.
    assert!(tried > 12 && unnoticed.len() <= 1, "{tried}, {unnoticed:#?}");
}

#[test]
fn a_minimum_a_maximum_or_a_choice_that_is_another_is_noticed() {
    let other = |line: &str| {
        let pairs = [("min.u", "max.u"), ("max.u", "min.u")];
        let swapped = pairs.iter().find(|(from, _)| line.trim_start().starts_with(from));
        if let Some((from, to)) = swapped {
            return Some(line.replacen(from, to, 1));
        }
        let (head, rest) = line.split_once("selp.")?;
        let (kind, operands) = rest.split_once(char::is_whitespace)?;
        let parts: Vec<&str> = operands.trim().trim_end_matches(';').split(", ").collect();
        let [to, first, second, which] = parts[..] else { return None };
        Some(format!("{head}selp.{kind} {to}, {second}, {first}, {which};"))
    };
    let (tried, unnoticed) = unnoticed(other);
    assert!(tried > 3 && unnoticed.is_empty(), "{tried}, {unnoticed:#?}");
}
