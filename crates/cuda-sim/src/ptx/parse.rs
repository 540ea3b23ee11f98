//! Parses a module: directives, declarations and kernels.

use super::syntax::{Entry, Parameter, Syntax, Variable, VariableSpace};
use super::token::{Token, tokens};
use super::types::Type;
use super::{LoadError, Loaded};

/// Parses the text of a module. The caller has checked the header.
pub(super) fn parse(text: &str) -> Loaded<Syntax> {
    let mut parser = Parser { tokens: tokens(text)?, at: 0, depth: 0 };
    parser.module()
}

/// The tokens, and the read position.
pub(super) struct Parser<'a> {
    tokens: Vec<(Token<'a>, u32)>,
    at: usize,
    /// Number of open braces before the next token.
    depth: u32,
}

/// Maximum depth of nested braces.
const DEPTH_MAX: u32 = 64;

impl<'a> Parser<'a> {
    pub(super) fn peek(&self) -> Option<&Token<'a>> {
        self.tokens.get(self.at).map(|(token, _)| token)
    }

    /// Line of the next token, or of the last one.
    pub(super) fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |&(_, line)| line)
    }

    pub(super) fn next(&mut self) -> Loaded<Token<'a>> {
        let token = self.tokens.get(self.at).map(|(token, _)| token.clone());
        let token = token.ok_or_else(|| self.error("the text ends too early"))?;
        self.at += 1;
        Ok(token)
    }

    pub(super) fn error(&self, message: impl Into<String>) -> LoadError {
        LoadError::new(self.line(), message)
    }

    /// An error at the token read last.
    fn error_before(&self, message: impl Into<String>) -> LoadError {
        let line = self.tokens.get(self.at.saturating_sub(1)).map_or(1, |&(_, line)| line);
        LoadError::new(line, message)
    }

    /// Skips `sign` if it is the next token.
    pub(super) fn take(&mut self, sign: char) -> bool {
        let found = self.peek() == Some(&Token::Sign(sign));
        self.at += usize::from(found);
        found
    }

    pub(super) fn expect(&mut self, sign: char) -> Loaded<()> {
        if self.take(sign) { Ok(()) } else { Err(self.error(format!("expected '{sign}'"))) }
    }

    /// Parses the contents of braces. The caller has read the opening brace.
    pub(super) fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Loaded<T>) -> Loaded<T> {
        if self.depth == DEPTH_MAX {
            return Err(self.error("braces are nested too deeply"));
        }
        self.depth += 1;
        let parsed = parse(self)?;
        self.depth -= 1;
        Ok(parsed)
    }

    pub(super) fn word(&mut self) -> Loaded<&'a str> {
        match self.next()? {
            Token::Word(word) => Ok(word),
            _ => Err(self.error_before("expected a name")),
        }
    }

    /// Skips the word if it is the next token.
    pub(super) fn take_word(&mut self, wanted: &str) -> bool {
        let found = self.peek() == Some(&Token::Word(wanted));
        self.at += usize::from(found);
        found
    }

    /// A count. It is never negative.
    pub(super) fn count(&mut self) -> Loaded<u32> {
        match self.next()? {
            Token::Number(number) => integer(number).and_then(|value| value.try_into().ok()),
            _ => None,
        }
        .ok_or_else(|| self.error_before("expected a number"))
    }

    /// Skips the rest of the line of the token read last.
    pub(super) fn skip_line(&mut self) {
        let line = self.tokens.get(self.at.saturating_sub(1)).map_or(0, |&(_, line)| line);
        while self.tokens.get(self.at).is_some_and(|&(_, other)| other == line) {
            self.at += 1;
        }
    }

    /// Skips the next pair of braces and everything inside.
    fn skip_braces(&mut self) -> Loaded<()> {
        self.expect('{')?;
        let mut depth = 1;
        while depth > 0 {
            match self.next()? {
                Token::Sign('{') => depth += 1,
                Token::Sign('}') => depth -= 1,
                _ => {}
            }
        }
        Ok(())
    }

    fn module(&mut self) -> Loaded<Syntax> {
        let mut syntax = Syntax::default();
        while self.peek().is_some() {
            let line = self.line();
            match self.word()? {
                ".visible" | ".extern" | ".weak" | ".common" => {}
                ".version" | ".address_size" => {
                    self.next()?;
                }
                ".target" => {
                    self.word()?;
                    while self.take(',') {
                        self.word()?;
                    }
                }
                ".file" | ".loc" => self.skip_line(),
                ".pragma" => {
                    self.next()?;
                    self.expect(';')?;
                }
                ".section" => {
                    self.word()?;
                    self.skip_braces()?;
                }
                ".entry" => syntax.entries.push(self.entry(line)?),
                ".func" => self.skip_function()?,
                ".alias" => {
                    return Err(LoadError::new(line, "unsupported directive '.alias'"));
                }
                other => match variable_space(other) {
                    Some(space) => syntax.variables.extend(self.variables(space)?),
                    None => {
                        return Err(LoadError::new(
                            line,
                            format!("unsupported directive '{other}'"),
                        ));
                    }
                },
            }
        }
        Ok(syntax)
    }

    /// Functions are skipped, because calls to them are refused.
    fn skip_function(&mut self) -> Loaded<()> {
        while !matches!(self.peek(), Some(Token::Sign('{' | ';')) | None) {
            self.at += 1;
        }
        if self.take(';') { Ok(()) } else { self.skip_braces() }
    }

    fn entry(&mut self, line: u32) -> Loaded<Entry> {
        let name = self.word()?.to_owned();
        let mut entry = Entry { line, name, ..Entry::default() };
        if self.take('(') && !self.take(')') {
            loop {
                entry.parameters.push(self.parameter()?);
                if !self.take(',') {
                    break;
                }
            }
            self.expect(')')?;
        }
        while self.peek() != Some(&Token::Sign('{')) {
            let line = self.line();
            match self.word()? {
                ".maxntid" => {
                    let size = self.size()?;
                    let threads = size.iter().fold(1u64, |all, &n| all.saturating_mul(n.into()));
                    entry.threads_max = Some(threads);
                }
                ".reqntid" => entry.threads_required = Some(self.size()?),
                ".minnctapersm" | ".maxnctapersm" | ".maxnreg" => {
                    self.count()?;
                }
                ".pragma" => {
                    self.next()?;
                    self.expect(';')?;
                }
                ".noreturn" => {}
                other => {
                    return Err(LoadError::new(line, format!("unsupported directive '{other}'")));
                }
            }
        }
        self.expect('{')?;
        entry.body = self.statements()?;
        Ok(entry)
    }

    fn size(&mut self) -> Loaded<[u32; 3]> {
        let mut size = [self.count()?, 1, 1];
        for extent in &mut size[1..] {
            if !self.take(',') {
                break;
            }
            *extent = self.count()?;
        }
        Ok(size)
    }

    fn parameter(&mut self) -> Loaded<Parameter> {
        let line = self.line();
        if !self.take_word(".param") {
            return Err(self.error("expected '.param'"));
        }
        let (of, align) = self.type_with_attributes()?;
        let name = self.word()?.to_owned();
        let count = if self.take('[') {
            let count = self.count()?;
            self.expect(']')?;
            count
        } else {
            1
        };
        let bytes = of.bytes().checked_mul(count);
        let bytes = bytes.ok_or_else(|| LoadError::new(line, "a parameter that is too large"))?;
        Ok(Parameter { name, align, bytes })
    }

    /// A type, surrounded by alignment and pointer attributes.
    fn type_with_attributes(&mut self) -> Loaded<(Type, u32)> {
        let (mut of, mut align, mut is_pointer) = (None, None, false);
        while let Some(Token::Word(word)) = self.peek() {
            let Some(name) = word.strip_prefix('.') else { break };
            match name {
                "align" => {
                    self.at += 1;
                    let value = self.count()?;
                    if !value.is_power_of_two() {
                        return Err(self.error_before("an alignment that is no power of two"));
                    }
                    // An alignment after a pointer attribute is that of the pointer's target.
                    if !is_pointer {
                        align = Some(value);
                    }
                    continue;
                }
                "ptr" => is_pointer = true,
                "global" | "const" | "shared" | "local" if is_pointer => {}
                _ => {
                    of = Some(
                        Type::named(name)
                            .ok_or_else(|| self.error(format!("unsupported type '{word}'")))?,
                    )
                }
            }
            self.at += 1;
        }
        let of = of.ok_or_else(|| self.error("expected a type"))?;
        Ok((of, align.unwrap_or(of.bytes())))
    }

    /// The variables of a declaration in `space`, up to its semicolon.
    pub(super) fn variables(&mut self, space: VariableSpace) -> Loaded<Vec<Variable>> {
        let (of, align) = self.type_with_attributes()?;
        let mut found = Vec::new();
        loop {
            let line = self.line();
            let name = self.word()?.to_owned();
            let mut elements = Some(1u64);
            while self.take('[') {
                if self.take(']') {
                    elements = None;
                } else {
                    let count = u64::from(self.count()?);
                    elements = elements.and_then(|elements| elements.checked_mul(count));
                    self.expect(']')?;
                }
            }
            let mut initial = Vec::new();
            if self.take('=') {
                self.initial(of, &mut initial)?;
            }
            let bytes = elements.and_then(|elements| elements.checked_mul(of.bytes().into()));
            if bytes.is_some_and(|bytes| (initial.len() as u64) > bytes) {
                return Err(LoadError::new(line, format!("too many values for '{name}'")));
            }
            found.push(Variable { line, space, name, align, bytes, initial });
            if !self.take(',') {
                break;
            }
        }
        self.expect(';')?;
        Ok(found)
    }

    fn initial(&mut self, of: Type, into: &mut Vec<u8>) -> Loaded<()> {
        if self.take('{') {
            loop {
                self.nested(|parser| parser.initial(of, into))?;
                if !self.take(',') {
                    return self.expect('}');
                }
            }
        }
        let line = self.line();
        let value = self.immediate()?.bits(of);
        let value = value.ok_or_else(|| LoadError::new(line, "an unsupported initial value"))?;
        into.extend_from_slice(&value.to_le_bytes()[..of.bytes() as usize]);
        Ok(())
    }
}

pub(super) fn variable_space(directive: &str) -> Option<VariableSpace> {
    Some(match directive {
        ".global" => VariableSpace::Global,
        ".const" => VariableSpace::Const,
        ".shared" => VariableSpace::Shared,
        ".local" => VariableSpace::Local,
        _ => return None,
    })
}

/// Parses an integer literal without its sign.
pub(super) fn integer(text: &str) -> Option<u64> {
    let text = text.strip_suffix('U').unwrap_or(text);
    let (digits, radix) = match text.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&text[2..], 16),
        [b'0', b'b' | b'B', ..] => (&text[2..], 2),
        [b'0', _, ..] => (&text[1..], 8),
        _ => (text, 10),
    };
    u64::from_str_radix(digits, radix).ok()
}
