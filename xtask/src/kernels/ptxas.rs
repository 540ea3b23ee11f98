//! The assembler, which converts PTX to a GPU's machine code and reports its cost.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The assembler of the pinned toolchain.
pub(super) struct Assembler {
    /// `ptxas`.
    pub(super) program: PathBuf,
    /// A folder for its input and output.
    pub(super) scratch: PathBuf,
}

/// The cost of one entry point on one GPU.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) registers: u32,
    pub(super) shared_bytes: u32,
    /// Bytes stored to and loaded from memory for lack of registers.
    pub(super) spilled_bytes: u32,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} takes {} registers, {} bytes of shared memory, {} spilled",
            self.name, self.registers, self.shared_bytes, self.spilled_bytes
        )
    }
}

impl Assembler {
    /// Assembles a module for a GPU and returns the cost of its entries.
    pub(super) fn assemble(&self, topic: &str, card: &str, ptx: &str) -> Result<Vec<Entry>> {
        let scratch = &self.scratch;
        fs::create_dir_all(scratch)
            .with_context(|| format!("cannot create {}", scratch.display()))?;
        let input = scratch.join(format!("{topic}.ptx"));
        fs::write(&input, ptx).with_context(|| format!("cannot write {}", input.display()))?;
        let output = Command::new(&self.program)
            .arg(format!("-arch={card}"))
            .args(["-v", "-o"])
            .arg(scratch.join(format!("{topic}.{card}.cubin")))
            .arg(&input)
            .output()
            .with_context(|| format!("cannot run {}", self.program.display()))?;
        let said = String::from_utf8_lossy(&output.stderr);
        // An unknown PTX version crashes it with a signal, which is a failure too.
        ensure!(output.status.success(), "ptxas failed ({}):\n{said}", output.status);
        let entries = entries(&said);
        ensure!(!entries.is_empty(), "ptxas names no entry point:\n{said}");
        Ok(entries)
    }
}

/// The entries in the output of `ptxas -v`.
fn entries(said: &str) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    for line in said.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            entries.push(Entry { name, registers: 0, shared_bytes: 0, spilled_bytes: 0 });
        } else if let Some(entry) = entries.last_mut() {
            entry.spilled_bytes += number_before(line, " bytes spill stores")
                + number_before(line, " bytes spill loads");
            entry.registers += number_before(line, " registers");
            entry.shared_bytes += number_before(line, " bytes smem");
        }
    }
    entries
}

/// The number directly before `words`; 0 if the line does not contain them.
fn number_before(line: &str, words: &str) -> u32 {
    let Some((before, _)) = line.split_once(words) else { return 0 };
    let digits = before.rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    digits.parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_80'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, 128 bytes smem, 456 bytes cmem[0]
ptxas info    : Compiling entry function 'second' for 'sm_80'
ptxas info    : Function properties for second
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, 380 bytes cmem[0]
";

    #[test]
    fn what_the_assembler_says_becomes_entries() {
        let entry = |name: &str, registers, shared_bytes, spilled_bytes| Entry {
            name: name.to_owned(),
            registers,
            shared_bytes,
            spilled_bytes,
        };
        assert_eq!(entries(SAID), [entry("first", 40, 128, 0), entry("second", 255, 0, 20)]);
    }

    #[test]
    fn no_entry_is_made_of_other_text() {
        assert_eq!(entries("ptxas fatal   : Unsupported .version 9.5"), []);
    }
}
