//! The modifiers of an opcode, taken one by one so that none is overlooked.

use super::super::error::{LoadError, Loaded};
use super::super::types::Type;

/// What is left of an opcode's modifiers.
pub(super) struct Modifiers<'a> {
    opcode: &'a str,
    line: u32,
    left: Vec<&'a str>,
}

impl<'a> Modifiers<'a> {
    /// The modifiers of `opcode`, and its name.
    pub(super) fn of(opcode: &'a str, line: u32) -> (&'a str, Self) {
        let mut parts = opcode.split('.');
        let name = parts.next().unwrap_or_default();
        (name, Self { opcode, line, left: parts.collect() })
    }

    /// Takes `wanted` if it is there.
    pub(super) fn take(&mut self, wanted: &str) -> bool {
        let found = self.left.iter().position(|part| *part == wanted);
        found.map(|at| self.left.remove(at)).is_some()
    }

    /// Whether `wanted` is there.
    pub(super) fn has(&self, wanted: &str) -> bool {
        self.left.contains(&wanted)
    }

    /// Takes the first of `choices` that is there.
    pub(super) fn take_any(&mut self, choices: &[&str]) -> Option<&'a str> {
        let found = self.left.iter().position(|part| choices.contains(part))?;
        Some(self.left.remove(found))
    }

    /// Takes all of `choices`, which change nothing here.
    pub(super) fn skip(&mut self, choices: &[&str]) {
        self.left.retain(|part| !choices.contains(part));
    }

    /// Takes all modifiers that begin so.
    pub(super) fn skip_prefixed(&mut self, prefix: &str) {
        self.left.retain(|part| !part.starts_with(prefix));
    }

    /// Takes the first type.
    pub(super) fn take_type(&mut self) -> Loaded<Type> {
        let found = self.left.iter().position(|part| Type::named(part).is_some());
        let found = found.and_then(|at| Type::named(self.left.remove(at)));
        found.ok_or_else(|| self.unsupported())
    }

    /// Refuses what was not taken.
    pub(super) fn finish(&self) -> Loaded<()> {
        if self.left.is_empty() { Ok(()) } else { Err(self.unsupported()) }
    }

    #[cold]
    pub(super) fn unsupported(&self) -> LoadError {
        LoadError::new(self.line, format!("unsupported instruction '{}'", self.opcode))
    }
}
