//! Name resolution: registers, variables and labels in their scopes, and constants.

use std::collections::HashMap;

use super::super::op::{Register, special};
use super::super::syntax::{Operand, Statement};
use super::super::types::Type;
use super::super::{LoadError, Loaded};

/// The meaning of a name.
#[derive(Clone, Copy, Debug)]
pub(super) enum Meaning {
    /// A register and its width in bits.
    Register(Register, u32),
    /// A variable's address in its own space.
    Address(u64),
    /// A label, by its number.
    Label(usize),
}

/// Names of a kernel, innermost scope last, and the constants it uses.
pub(super) struct Names {
    scopes: Vec<HashMap<String, Meaning>>,
    next_register: Register,
    first_constant: Register,
    constants: Vec<u64>,
    known: HashMap<u64, Register>,
    /// The step of each label, once known.
    pub(super) labels: Vec<Option<u32>>,
}

impl Names {
    pub(super) fn new(body: &[Statement]) -> Self {
        let first_constant = special::COUNT + count_registers(body);
        let mut names = Self {
            scopes: vec![HashMap::new()],
            next_register: special::COUNT,
            first_constant,
            constants: Vec::new(),
            known: HashMap::new(),
            labels: Vec::new(),
        };
        names.declare_specials();
        names
    }

    fn declare_specials(&mut self) {
        let scope = &mut self.scopes[0];
        let mut declare = |name: String, register: Register, bits: u32| {
            scope.insert(name, Meaning::Register(register, bits));
        };
        for (name, first) in [
            ("%tid", special::TID),
            ("%ntid", special::NTID),
            ("%ctaid", special::CTAID),
            ("%nctaid", special::NCTAID),
        ] {
            for (axis, register) in ["x", "y", "z"].iter().zip(first..) {
                declare(format!("{name}.{axis}"), register, 32);
            }
        }
        for (name, register) in ["eq", "le", "lt", "ge", "gt"].iter().zip(special::LANEMASK..) {
            declare(format!("%lanemask_{name}"), register, 32);
        }
        for (name, register, bits) in [
            ("_", special::SINK, 0),
            ("WARP_SZ", special::WARP_SIZE, 32),
            ("%laneid", special::LANEID, 32),
            ("%warpid", special::WARPID, 32),
            ("%nwarpid", special::NWARPID, 32),
            ("%smid", special::SMID, 32),
            ("%nsmid", special::NSMID, 32),
            ("%gridid", special::GRIDID, 64),
            ("%dynamic_smem_size", special::DYNAMIC_SHARED, 32),
            ("%total_smem_size", special::TOTAL_SHARED, 32),
        ] {
            declare(name.to_owned(), register, bits);
        }
    }

    pub(super) fn open_scope(&mut self) {
        self.scopes.push(HashMap::new());
    }

    pub(super) fn close_scope(&mut self) {
        self.scopes.pop();
    }

    pub(super) fn declare(&mut self, line: u32, name: &str, meaning: Meaning) -> Loaded<()> {
        let before =
            self.scopes.last_mut().and_then(|scope| scope.insert(name.to_owned(), meaning));
        match before {
            None => Ok(()),
            Some(_) => Err(LoadError::new(line, format!("'{name}' is declared twice"))),
        }
    }

    pub(super) fn declare_registers(
        &mut self,
        line: u32,
        of: Type,
        name: &str,
        count: Option<u32>,
    ) -> Loaded<()> {
        let numbered = (0..count.unwrap_or(1)).map(|number| match count {
            Some(_) => format!("{name}{number}"),
            None => name.to_owned(),
        });
        for name in numbered {
            let register = self.next_register;
            self.next_register += 1;
            self.declare(line, &name, Meaning::Register(register, of.bits()))?;
        }
        Ok(())
    }

    pub(super) fn new_label(&mut self) -> usize {
        self.labels.push(None);
        self.labels.len() - 1
    }

    pub(super) fn find(&self, name: &str) -> Option<Meaning> {
        self.scopes.iter().rev().find_map(|scope| scope.get(name)).copied()
    }

    pub(super) fn resolve(&self, line: u32, name: &str) -> Loaded<Meaning> {
        self.find(name).ok_or_else(|| LoadError::new(line, format!("unknown name '{name}'")))
    }

    /// The register that holds `value` in every thread.
    pub(super) fn constant(&mut self, value: u64) -> Register {
        let next = self.first_constant + self.constants.len() as Register;
        *self.known.entry(value).or_insert_with(|| {
            self.constants.push(value);
            next
        })
    }

    /// A register that is read as a value of `bits` bits.
    fn register(
        &self,
        line: u32,
        name: &str,
        fits: impl Fn(u32) -> bool,
    ) -> Loaded<(Register, u32)> {
        match self.resolve(line, name)? {
            Meaning::Register(register, 0) => Ok((register, 0)),
            Meaning::Register(register, bits) if fits(bits) => Ok((register, bits)),
            Meaning::Register(..) => {
                Err(LoadError::new(line, format!("register '{name}' does not fit the instruction")))
            }
            _ => Err(LoadError::new(line, format!("'{name}' is not a register"))),
        }
    }

    /// The register of an operand that is read as a `ty`.
    pub(super) fn source(&mut self, line: u32, operand: &Operand, ty: Type) -> Loaded<Register> {
        self.source_of(line, operand, ty, |bits| bits == ty.bits())
    }

    /// Like [`source`](Self::source), but also accepts a wider register.
    pub(super) fn wide_source(
        &mut self,
        line: u32,
        operand: &Operand,
        ty: Type,
    ) -> Loaded<Register> {
        self.source_of(line, operand, ty, |bits| bits >= ty.bits())
    }

    fn source_of(
        &mut self,
        line: u32,
        operand: &Operand,
        ty: Type,
        fits: impl Fn(u32) -> bool,
    ) -> Loaded<Register> {
        if let Operand::Name(name, offset) = operand {
            if let Meaning::Address(address) = self.resolve(line, name)? {
                return Ok(self.constant(address.wrapping_add_signed(*offset)));
            }
            if *offset == 0 {
                let (register, bits) = self.register(line, name, fits)?;
                if bits == 0 {
                    return Err(LoadError::new(line, "'_' has no value"));
                }
                return Ok(register);
            }
        }
        let value = operand.bits(ty);
        let value = value.ok_or_else(|| LoadError::new(line, "unsupported operand"))?;
        Ok(self.constant(value))
    }

    /// The register of an operand that is written as a `ty`.
    pub(super) fn target(&self, line: u32, operand: &Operand, ty: Type) -> Loaded<Register> {
        self.target_of(line, operand, |bits| bits == ty.bits()).map(|(register, _)| register)
    }

    /// The register of an operand that is written as a `ty` or wider, and its width.
    pub(super) fn wide_target(
        &self,
        line: u32,
        operand: &Operand,
        ty: Type,
    ) -> Loaded<(Register, u32)> {
        let (register, bits) = self.target_of(line, operand, |bits| bits >= ty.bits())?;
        Ok((register, bits.max(ty.bits())))
    }

    fn target_of(
        &self,
        line: u32,
        operand: &Operand,
        fits: impl Fn(u32) -> bool,
    ) -> Loaded<(Register, u32)> {
        let Operand::Name(name, 0) = operand else {
            return Err(LoadError::new(line, "the destination is not a register"));
        };
        let found = self.register(line, name, fits)?;
        let is_own = (special::COUNT..self.first_constant).contains(&found.0);
        if is_own || found.0 == special::SINK {
            Ok(found)
        } else {
            Err(LoadError::new(line, format!("'{name}' cannot be written")))
        }
    }

    pub(super) fn predicate(&self, line: u32, name: &str) -> Loaded<Register> {
        self.register(line, name, |bits| bits == 1).map(|(register, _)| register)
    }

    /// The number of registers including constants, and the constants.
    pub(super) fn finish(self) -> (u32, Vec<u64>) {
        (self.first_constant + self.constants.len() as u32, self.constants)
    }
}

pub(super) fn count_registers(body: &[Statement]) -> u32 {
    body.iter().fold(0u32, |sum, statement| {
        sum.saturating_add(match statement {
            Statement::Registers { count, .. } => count.unwrap_or(1),
            Statement::Block(body) => count_registers(body),
            _ => 0,
        })
    })
}
