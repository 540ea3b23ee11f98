//! The modifiers of an opcode. They are taken one by one, so that none is ignored by mistake.

use super::super::types::Type;
use super::super::{LoadError, Loaded};

/// The remaining modifiers of an opcode.
pub(super) struct Modifiers<'a> {
    opcode: &'a str,
    line: u32,
    left: Vec<&'a str>,
}

impl<'a> Modifiers<'a> {
    /// The name of `opcode`, and its modifiers.
    pub(super) fn of(opcode: &'a str, line: u32) -> (&'a str, Self) {
        let mut parts = opcode.split('.');
        let name = parts.next().unwrap_or_default();
        (name, Self { opcode, line, left: parts.collect() })
    }

    /// Takes `wanted` if it is present.
    pub(super) fn take(&mut self, wanted: &str) -> bool {
        let found = self.left.iter().position(|part| *part == wanted);
        found.map(|at| self.left.remove(at)).is_some()
    }

    pub(super) fn has(&self, wanted: &str) -> bool {
        self.left.contains(&wanted)
    }

    /// Takes the first of `choices` that is present.
    pub(super) fn take_any(&mut self, choices: &[&str]) -> Option<&'a str> {
        let found = self.left.iter().position(|part| choices.contains(part))?;
        Some(self.left.remove(found))
    }

    /// Takes all of `choices`. They have no effect here.
    pub(super) fn skip(&mut self, choices: &[&str]) {
        self.left.retain(|part| !choices.contains(part));
    }

    pub(super) fn skip_prefixed(&mut self, prefix: &str) {
        self.left.retain(|part| !part.starts_with(prefix));
    }

    pub(super) fn take_type(&mut self) -> Loaded<Type> {
        let found = self.left.iter().position(|part| Type::named(part).is_some());
        let found = found.and_then(|at| Type::named(self.left.remove(at)));
        found.ok_or_else(|| self.unsupported())
    }

    /// Refuses any remaining modifier.
    pub(super) fn finish(&self) -> Loaded<()> {
        if self.left.is_empty() { Ok(()) } else { Err(self.unsupported()) }
    }

    #[cold]
    pub(super) fn unsupported(&self) -> LoadError {
        LoadError::new(self.line, format!("unsupported instruction '{}'", self.opcode))
    }
}
