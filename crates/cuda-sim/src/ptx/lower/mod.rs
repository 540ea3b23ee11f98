//! Lowers a parsed kernel to steps: resolves names, chooses functions, and refuses what cannot run.

mod arithmetic;
mod control;
mod memory;
mod modifiers;
mod moves;
mod names;

use std::collections::HashMap;

use self::modifiers::Modifiers;
use self::names::{Meaning, Names, count_registers};
use super::op::{Op, Program, PtxStep, Register, special};
use super::syntax::{Entry, Instruction, Operand, Statement, Variable, VariableSpace};
use super::types::Type;
use super::{LoadError, Loaded};

/// Maximum number of registers of a kernel, constants included.
const REGISTERS_MAX: u32 = 1 << 16;

/// Maximum shared or local memory that a kernel may declare, in bytes.
const DECLARED_BYTES_MAX: u64 = 1 << 20;

/// Addresses of a module's own variables, by name.
pub(super) type ModuleVariables = HashMap<String, u64>;

/// A kernel during its conversion to a [`Program`].
struct Lowering {
    names: Names,
    program: Program,
    /// Steps that branch to a label.
    branches: Vec<(usize, usize)>,
    /// Opcodes of the warp-wide instructions.
    exchanges: Vec<String>,
    /// Start of shared arrays whose size is set at launch: the end of the declared ones.
    dynamic_start: u64,
}

/// Converts one kernel of a module to its program.
pub(super) fn lower(
    entry: &Entry,
    module: &[Variable],
    addresses: &ModuleVariables,
) -> Loaded<Program> {
    if count_registers(&entry.body) > REGISTERS_MAX {
        return Err(LoadError::new(entry.line, "too many registers"));
    }
    let mut lowering = Lowering {
        names: Names::new(&entry.body),
        program: empty_program(entry),
        branches: Vec::new(),
        exchanges: Vec::new(),
        dynamic_start: 0,
    };
    for (name, &address) in addresses {
        lowering.names.declare(entry.line, name, Meaning::Address(address))?;
    }
    lowering.dynamic_start = dynamic_start(&entry.body, module);
    for variable in module.iter().filter(|v| v.space == VariableSpace::Shared) {
        lowering.variable(variable)?;
    }
    lowering.names.open_scope();
    lowering.parameters(entry)?;
    lowering.block(&entry.body)?;
    lowering.emit(entry.line, None, Op::Exit)?;
    lowering.finish(entry.line)
}

fn empty_program(entry: &Entry) -> Program {
    Program {
        name: entry.name.clone(),
        steps: Vec::new(),
        lines: Vec::new(),
        registers: 0,
        constants: Vec::new(),
        parameters: Vec::new(),
        parameter_bytes: 0,
        shared_bytes: 0,
        local_bytes: 0,
        threads_max: entry.threads_max,
        threads_required: entry.threads_required,
        conversions: Vec::new(),
        warp_ops: Vec::new(),
    }
}

impl Lowering {
    fn parameters(&mut self, entry: &Entry) -> Loaded<()> {
        for parameter in &entry.parameters {
            let start = self.program.parameter_bytes.next_multiple_of(parameter.align.max(1));
            let address = Meaning::Address(start.into());
            self.names.declare(entry.line, &parameter.name, address)?;
            self.program.parameters.push((start, parameter.bytes));
            let end = start.checked_add(parameter.bytes).filter(|&end| end <= 1 << 15);
            let end = end.ok_or_else(|| LoadError::new(entry.line, "too many parameters"))?;
            self.program.parameter_bytes = end;
        }
        Ok(())
    }

    fn variable(&mut self, variable: &Variable) -> Loaded<()> {
        let used = match variable.space {
            VariableSpace::Shared => &mut self.program.shared_bytes,
            VariableSpace::Local => &mut self.program.local_bytes,
            VariableSpace::Global | VariableSpace::Const => {
                let message = format!("'{}' is declared inside a kernel", variable.name);
                return Err(LoadError::new(variable.line, message));
            }
        };
        let Some(bytes) = variable.bytes else {
            if variable.space != VariableSpace::Shared {
                let message = format!("'{}' has no size", variable.name);
                return Err(LoadError::new(variable.line, message));
            }
            let address = Meaning::Address(self.dynamic_start);
            return self.names.declare(variable.line, &variable.name, address);
        };
        let start = u64::from(*used).next_multiple_of(variable.align.max(1).into());
        let end = start.checked_add(bytes).filter(|&end| end <= DECLARED_BYTES_MAX);
        let end = end.ok_or_else(|| {
            LoadError::new(variable.line, format!("'{}' is too large", variable.name))
        })?;
        *used = end as u32;
        self.names.declare(variable.line, &variable.name, Meaning::Address(start))
    }

    fn block(&mut self, body: &[Statement]) -> Loaded<()> {
        for statement in body {
            if let Statement::Label(name, line) = statement {
                let label = self.names.new_label();
                self.names.declare(*line, name, Meaning::Label(label))?;
            }
        }
        for statement in body {
            match statement {
                Statement::Label(name, line) => {
                    let at = self.program.steps.len() as u32;
                    if let Meaning::Label(label) = self.names.resolve(*line, name)? {
                        self.names.labels[label] = Some(at);
                    }
                }
                Statement::Registers { line, of, name, count } => {
                    self.names.declare_registers(*line, *of, name, *count)?;
                }
                Statement::Variable(variable) => self.variable(variable)?,
                Statement::Block(body) => {
                    self.names.open_scope();
                    self.block(body)?;
                    self.names.close_scope();
                }
                Statement::Instruction(instruction) => self.instruction(instruction)?,
            }
        }
        Ok(())
    }

    fn instruction(&mut self, instruction: &Instruction) -> Loaded<()> {
        let line = instruction.line;
        let (name, mut modifiers) = Modifiers::of(&instruction.opcode, line);
        let mut site = Lowerer { lowering: self, instruction, line };
        if !(site.moves(name, &mut modifiers)?
            || site.arithmetic(name, &mut modifiers)?
            || site.memory(name, &mut modifiers)?
            || site.control(name, &mut modifiers)?)
        {
            return Err(modifiers.unsupported());
        }
        Ok(())
    }

    fn emit(&mut self, line: u32, guard: Option<&(String, bool)>, op: Op) -> Loaded<()> {
        let (guard, inverted) = match guard {
            Some((name, inverted)) => (self.names.predicate(line, name)?, *inverted),
            None => (special::TRUE, false),
        };
        self.program.steps.push(PtxStep { guard, inverted: inverted.into(), op });
        self.program.lines.push(line);
        Ok(())
    }

    fn finish(mut self, line: u32) -> Loaded<Program> {
        for (step, label) in self.branches {
            let target = self.names.labels[label];
            let target =
                target.ok_or_else(|| LoadError::new(line, "a label without a position"))?;
            self.program.steps[step].op = Op::Branch { target };
        }
        let (registers, constants) = self.names.finish();
        if registers > REGISTERS_MAX {
            return Err(LoadError::new(line, "too many registers"));
        }
        let declared = u64::from(self.program.shared_bytes).max(self.dynamic_start);
        self.program.shared_bytes = declared.min(DECLARED_BYTES_MAX) as u32;
        self.program.registers = registers;
        self.program.constants = constants;
        Ok(self.program)
    }
}

/// Start of dynamic shared memory: the end of all declared shared memory.
fn dynamic_start(body: &[Statement], module: &[Variable]) -> u64 {
    let (mut end, mut align, mut found) = (0, 1, false);
    let module: Vec<_> = module.iter().cloned().map(Statement::Variable).collect();
    measure_shared(&module, &mut end, &mut align, &mut found);
    measure_shared(body, &mut end, &mut align, &mut found);
    if found { end.next_multiple_of(align.into()) } else { 0 }
}

/// Advances `end` over the declared shared memory, and raises `align` to the alignment of dynamic
/// memory.
fn measure_shared(body: &[Statement], end: &mut u64, align: &mut u32, dynamic: &mut bool) {
    for statement in body {
        match statement {
            Statement::Variable(variable) if variable.space == VariableSpace::Shared => {
                match variable.bytes {
                    Some(bytes) => {
                        let start = end.next_multiple_of(variable.align.max(1).into());
                        *end = start.saturating_add(bytes).min(DECLARED_BYTES_MAX);
                    }
                    None => {
                        *align = variable.align.max(*align);
                        *dynamic = true;
                    }
                }
            }
            Statement::Block(body) => measure_shared(body, end, align, dynamic),
            _ => {}
        }
    }
}

struct Lowerer<'a> {
    lowering: &'a mut Lowering,
    instruction: &'a Instruction,
    line: u32,
}

impl<'a> Lowerer<'a> {
    fn error(&self, message: impl Into<String>) -> LoadError {
        LoadError::new(self.line, message)
    }

    fn operand(&self, index: usize) -> Loaded<&'a Operand> {
        self.instruction.operands.get(index).ok_or_else(|| self.error("too few operands"))
    }

    /// Refuses more operands than `count`.
    fn operands(&self, count: usize) -> Loaded<()> {
        match self.instruction.operands.len() {
            found if found == count => Ok(()),
            found => Err(self.error(format!("{found} operands where {count} are expected"))),
        }
    }

    fn source(&mut self, index: usize, ty: Type) -> Loaded<Register> {
        let operand = self.operand(index)?;
        if let Operand::Not(name) = operand {
            let a = self.lowering.names.predicate(self.line, name)?;
            let op = Op::Unary { f: |a| a & 1 ^ 1, d: special::SCRATCH, a };
            self.lowering.emit(self.line, None, op)?;
            return Ok(special::SCRATCH);
        }
        self.lowering.names.source(self.line, operand, ty)
    }

    fn target(&self, index: usize, ty: Type) -> Loaded<Register> {
        self.lowering.names.target(self.line, self.operand(index)?, ty)
    }

    /// The two destinations of operand `index`, the second of which may be missing.
    fn targets(&self, index: usize, first: Type, second: Type) -> Loaded<(Register, Register)> {
        match self.operand(index)? {
            Operand::Pair(a, b) => {
                let name = |name: &str| Operand::Name(name.to_owned(), 0);
                let names = &self.lowering.names;
                Ok((
                    names.target(self.line, &name(a), first)?,
                    names.target(self.line, &name(b), second)?,
                ))
            }
            _ => Ok((self.target(index, first)?, special::SINK)),
        }
    }

    fn constant(&mut self, value: u64) -> Register {
        self.lowering.names.constant(value)
    }

    /// Adds a step with the instruction's guard.
    fn emit(&mut self, op: Op) -> Loaded<bool> {
        self.lowering.emit(self.line, self.instruction.guard.as_ref(), op)?;
        Ok(true)
    }
}
