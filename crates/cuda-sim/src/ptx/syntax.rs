//! The syntax tree of a PTX module, before names are resolved.

use super::types::Type;

/// A state space in which a variable is declared.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum VariableSpace {
    Global,
    Const,
    Shared,
    Local,
}

#[derive(Clone, Debug)]
pub(super) struct Variable {
    pub(super) line: u32,
    pub(super) space: VariableSpace,
    pub(super) name: String,
    pub(super) align: u32,
    /// Size in bytes; `None` for an array whose size is set at launch.
    pub(super) bytes: Option<u64>,
    /// Initial bytes, padded with zeros.
    pub(super) initial: Vec<u8>,
}

#[derive(Clone, Debug)]
pub(super) struct Parameter {
    pub(super) name: String,
    pub(super) align: u32,
    pub(super) bytes: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Operand {
    /// A register, a variable or a label, with an offset to its address.
    Name(String, i64),
    /// A predicate register, inverted.
    Not(String),
    /// Two destinations, `a|b`.
    Pair(String, String),
    /// An integer, as 64 bits.
    Integer(u64),
    /// A single, as its bits.
    Single(u32),
    /// A double, as its bits.
    Double(u64),
    /// `{a, b}`
    Vector(Vec<Operand>),
    /// `[a + offset]`
    Address(Box<Operand>, i64),
}

#[derive(Clone, Debug)]
pub(super) struct Instruction {
    pub(super) line: u32,
    /// The guard's register and whether it is inverted.
    pub(super) guard: Option<(String, bool)>,
    /// The opcode with its modifiers.
    pub(super) opcode: String,
    pub(super) operands: Vec<Operand>,
}

#[derive(Clone, Debug)]
pub(super) enum Statement {
    Label(String, u32),
    /// Registers of one type: a name, or a prefix and the number of numbered registers.
    Registers {
        line: u32,
        of: Type,
        name: String,
        count: Option<u32>,
    },
    Variable(Variable),
    Instruction(Instruction),
    Block(Vec<Statement>),
}

#[derive(Clone, Debug, Default)]
pub(super) struct Entry {
    pub(super) line: u32,
    pub(super) name: String,
    pub(super) parameters: Vec<Parameter>,
    pub(super) threads_max: Option<u64>,
    pub(super) threads_required: Option<[u32; 3]>,
    pub(super) body: Vec<Statement>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Syntax {
    pub(super) variables: Vec<Variable>,
    pub(super) entries: Vec<Entry>,
}
