//! Parses the statements of a kernel: declarations, labels and instructions.

use super::parse::{Parser, integer, variable_space};
use super::syntax::{Instruction, Operand, Statement};
use super::token::Token;
use super::types::Type;
use super::{LoadError, Loaded};

/// Maximum number of registers in one declaration.
const REGISTERS_MAX: u32 = 1 << 16;

impl Operand {
    /// The bits of an immediate as a value of type `of`.
    pub(super) fn bits(&self, of: Type) -> Option<u64> {
        Some(match (self, of) {
            (&Self::Integer(value), Type::F32) => (value as i64 as f32).to_bits().into(),
            (&Self::Integer(value), Type::F64) => (value as i64 as f64).to_bits(),
            (&Self::Integer(value), _) => value & super::types::mask(of.bits()),
            (&Self::Single(bits), Type::F64) => f64::from(f32::from_bits(bits)).to_bits(),
            (&Self::Single(bits), _) => bits.into(),
            (&Self::Double(bits), Type::F32) => (f64::from_bits(bits) as f32).to_bits().into(),
            (&Self::Double(bits), _) => bits,
            _ => return None,
        })
    }
}

impl Parser<'_> {
    /// Statements up to and including the closing brace.
    pub(super) fn statements(&mut self) -> Loaded<Vec<Statement>> {
        let mut found = Vec::new();
        loop {
            let line = self.line();
            if self.take('}') {
                return Ok(found);
            }
            if self.take('{') {
                found.push(Statement::Block(self.nested(Self::statements)?));
                continue;
            }
            if self.take(';') {
                continue;
            }
            if self.peek() == Some(&Token::Sign('@')) {
                found.push(Statement::Instruction(self.instruction(line)?));
                continue;
            }
            let Some(&Token::Word(word)) = self.peek() else {
                return Err(self.error("expected a statement"));
            };
            match word {
                ".loc" | ".file" => {
                    self.next()?;
                    self.skip_line();
                }
                ".pragma" => {
                    self.next()?;
                    self.next()?;
                    self.expect(';')?;
                }
                ".reg" => {
                    self.next()?;
                    self.registers(line, &mut found)?;
                }
                _ if variable_space(word).is_some() => {
                    self.next()?;
                    let variables = variable_space(word).map(|space| self.variables(space));
                    let variables = variables.transpose()?.unwrap_or_default();
                    found.extend(variables.into_iter().map(Statement::Variable));
                }
                _ if word.starts_with('.') => {
                    return Err(self.error(format!("unsupported directive '{word}'")));
                }
                _ => found.push(self.label_or_instruction(line)?),
            }
        }
    }

    fn label_or_instruction(&mut self, line: u32) -> Loaded<Statement> {
        let word = self.word()?;
        if self.take(':') {
            return Ok(Statement::Label(word.to_owned(), line));
        }
        self.instruction_after(line, None, word).map(Statement::Instruction)
    }

    fn registers(&mut self, line: u32, found: &mut Vec<Statement>) -> Loaded<()> {
        let word = self.word()?;
        let of = word.strip_prefix('.').and_then(Type::named);
        let of = of.ok_or_else(|| LoadError::new(line, format!("unsupported type '{word}'")))?;
        loop {
            let name = self.word()?.to_owned();
            let count = if self.take('<') {
                let count = self.count()?;
                self.expect('>')?;
                Some(count)
            } else {
                None
            };
            if count.is_some_and(|count| count > REGISTERS_MAX) {
                return Err(LoadError::new(line, "too many registers"));
            }
            found.push(Statement::Registers { line, of, name, count });
            if !self.take(',') {
                return self.expect(';');
            }
        }
    }

    fn instruction(&mut self, line: u32) -> Loaded<Instruction> {
        self.expect('@')?;
        let inverted = self.take('!');
        let guard = (self.word()?.to_owned(), inverted);
        let line = if self.line() > line { self.line() } else { line };
        let opcode = self.word()?;
        self.instruction_after(line, Some(guard), opcode)
    }

    fn instruction_after(
        &mut self,
        line: u32,
        guard: Option<(String, bool)>,
        opcode: &str,
    ) -> Loaded<Instruction> {
        let mut operands = Vec::new();
        if !self.take(';') {
            loop {
                operands.push(self.operand()?);
                if !self.take(',') {
                    break;
                }
            }
            self.expect(';')?;
        }
        Ok(Instruction { line, guard, opcode: opcode.to_owned(), operands })
    }

    fn operand(&mut self) -> Loaded<Operand> {
        if self.take('{') {
            let mut parts = Vec::new();
            loop {
                parts.push(self.nested(Self::operand)?);
                if !self.take(',') {
                    break;
                }
            }
            self.expect('}')?;
            return Ok(Operand::Vector(parts));
        }
        if self.take('[') {
            let base = self.nested(Self::operand)?;
            let (base, offset) = match base {
                Operand::Name(name, offset) => (Operand::Name(name, 0), offset),
                Operand::Integer(value) => (Operand::Integer(value), 0),
                _ => return Err(self.error("unsupported address")),
            };
            // Addresses of a tensor map have coordinates.
            if self.take(',') {
                return Err(self.error("unsupported address"));
            }
            self.expect(']')?;
            return Ok(Operand::Address(Box::new(base), offset));
        }
        if self.take('!') {
            return Ok(Operand::Not(self.word()?.to_owned()));
        }
        if !matches!(self.peek(), Some(Token::Word(_))) {
            return self.immediate();
        }
        let name = self.word()?.to_owned();
        if self.take('|') {
            return Ok(Operand::Pair(name, self.word()?.to_owned()));
        }
        let mut offset = 0i64;
        if self.take('+') || self.peek() == Some(&Token::Sign('-')) {
            offset = self.signed()?;
        }
        Ok(Operand::Name(name, offset))
    }

    fn signed(&mut self) -> Loaded<i64> {
        match self.immediate()? {
            Operand::Integer(value) => Ok(value as i64),
            _ => Err(self.error("expected an integer")),
        }
    }

    pub(super) fn immediate(&mut self) -> Loaded<Operand> {
        let line = self.line();
        let negative = self.take('-');
        let text = match self.next()? {
            Token::Number(text) => text,
            _ => return Err(LoadError::new(line, "expected an operand")),
        };
        let bad = || LoadError::new(line, format!("unreadable number '{text}'"));
        let exact = |prefix: [&str; 2]| prefix.iter().find_map(|p| text.strip_prefix(p));
        if let Some(digits) = exact(["0f", "0F"]) {
            let bits = u32::from_str_radix(digits, 16).map_err(|_| bad())?;
            return Ok(Operand::Single(bits ^ u32::from(negative) << 31));
        }
        if let Some(digits) = exact(["0d", "0D"]) {
            let bits = u64::from_str_radix(digits, 16).map_err(|_| bad())?;
            return Ok(Operand::Double(bits ^ u64::from(negative) << 63));
        }
        if text.contains('.') {
            let value: f64 = text.parse().map_err(|_| bad())?;
            return Ok(Operand::Double(if negative { -value } else { value }.to_bits()));
        }
        let value = integer(text).ok_or_else(bad)?;
        Ok(Operand::Integer(if negative { value.wrapping_neg() } else { value }))
    }
}
