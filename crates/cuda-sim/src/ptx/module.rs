//! A loaded module: its kernels, and the variables that they share.

use std::sync::Arc;

use cuda_driver::{KernelArgs, LaunchConfig};

use super::lower::{ModuleVariables, lower};
use super::op::Program;
use super::parse::parse;
use super::run::MODULE_WINDOW;
use super::syntax::{Variable, VariableSpace};
use super::{LoadError, Loaded};

/// Maximum memory of a module's variables, in bytes.
const VARIABLE_BYTES_MAX: u64 = 64 << 20;

/// The code of a module, and the current values of its variables.
#[derive(Debug)]
pub(crate) struct Code {
    pub(crate) programs: Vec<Arc<Program>>,
    pub(crate) variables: Vec<u8>,
}

/// Loads the text of a module. The caller has checked the header.
pub(crate) fn load(text: &str) -> Loaded<Code> {
    let syntax = parse(text)?;
    let (addresses, variables) = place(&syntax.variables)?;
    let programs = syntax
        .entries
        .iter()
        .map(|entry| lower(entry, &syntax.variables, &addresses).map(Arc::new));
    Ok(Code { programs: programs.collect::<Loaded<_>>()?, variables })
}

/// Addresses of the module's variables, and their initial bytes.
fn place(variables: &[Variable]) -> Loaded<(ModuleVariables, Vec<u8>)> {
    let mut addresses = ModuleVariables::new();
    let mut bytes = Vec::new();
    let shared = |variable: &&Variable| {
        !matches!(variable.space, VariableSpace::Shared | VariableSpace::Local)
    };
    for variable in variables.iter().filter(shared) {
        let refuse = |message: String| LoadError::new(variable.line, message);
        let Some(size) = variable.bytes else {
            return Err(refuse(format!("'{}' is defined in another module", variable.name)));
        };
        let start = (bytes.len() as u64).next_multiple_of(variable.align.max(1).into());
        let end = start.checked_add(size).filter(|&end| end <= VARIABLE_BYTES_MAX);
        let end = end.ok_or_else(|| refuse(format!("'{}' is too large", variable.name)))?;
        bytes.resize(start as usize, 0);
        bytes.extend_from_slice(&variable.initial);
        bytes.resize(end as usize, 0);
        addresses.insert(variable.name.clone(), MODULE_WINDOW + start);
    }
    Ok((addresses, bytes))
}

fn threads_of(config: &LaunchConfig) -> u64 {
    config.block.iter().fold(1u64, |threads, &size| threads.saturating_mul(size.into()))
}

impl Program {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The reason why the kernel cannot be launched with these settings, if any.
    pub(crate) fn check(&self, config: &LaunchConfig, args: &KernelArgs) -> Result<(), String> {
        let threads = threads_of(config);
        if let Some(most) = self.threads_max.filter(|&most| threads > most) {
            return Err(format!("{threads} threads in a block, but .maxntid allows {most}"));
        }
        if let Some(required) = self.threads_required.filter(|&size| size != config.block) {
            return Err(format!("a block of {:?}, but .reqntid is {required:?}", config.block));
        }
        if args.count() != self.parameters.len() {
            return Err(format!(
                "{} arguments for {} parameters",
                args.count(),
                self.parameters.len()
            ));
        }
        for (index, &(_, bytes)) in self.parameters.iter().enumerate() {
            let given = args.bytes(index).map_or(0, <[u8]>::len);
            if given != bytes as usize {
                return Err(format!(
                    "argument {index} has {given} bytes, but its parameter has {bytes}"
                ));
            }
        }
        Ok(())
    }

    /// Registers and local memory of a block, in bytes.
    pub(crate) fn state_bytes(&self, config: &LaunchConfig) -> u64 {
        let thread = 8 * u64::from(self.registers) + u64::from(self.local_bytes);
        thread.saturating_mul(threads_of(config))
    }

    /// Statically declared shared memory, in bytes.
    pub(crate) fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }

    /// The parameter memory, from arguments that passed [`check`](Self::check).
    pub(super) fn parameter_block(&self, args: &KernelArgs) -> Vec<u8> {
        let mut block = vec![0; self.parameter_bytes as usize];
        for (index, &(start, bytes)) in self.parameters.iter().enumerate() {
            let given = args.bytes(index).unwrap_or_default();
            if given.len() == bytes as usize {
                block[start as usize..][..given.len()].copy_from_slice(given);
            }
        }
        block
    }
}
