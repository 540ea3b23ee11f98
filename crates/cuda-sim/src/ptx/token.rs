//! Splits PTX text into tokens with line numbers.

use super::{LoadError, Loaded};

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token<'a> {
    /// A name, an opcode with its modifiers, or a directive with its leading dot.
    Word(&'a str),
    /// A number literal, without its sign.
    Number(&'a str),
    /// Text between quotes.
    Text,
    Sign(char),
}

fn is_word_start(c: char) -> bool {
    c.is_ascii_alphabetic() || matches!(c, '_' | '$' | '%' | '.')
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '.' | '%')
}

/// Length of the word at the start of `text`. `::` belongs to a word, a single `:` does not.
fn word_bytes(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        if is_word(byte as char) {
            at += 1;
        } else if byte == b':' && bytes.get(at + 1) == Some(&b':') {
            at += 2;
        } else {
            break;
        }
    }
    at
}

/// All tokens of `text`, each with its line, counted from 1.
pub(super) fn tokens(text: &str) -> Loaded<Vec<(Token<'_>, u32)>> {
    let mut found = Vec::new();
    let (mut rest, mut line) = (text, 1);
    while let Some(c) = rest.chars().next() {
        let taken = if c.is_whitespace() {
            c.len_utf8()
        } else if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map(|end| end + 2).ok_or_else(|| unended(line, "comment"))?
        } else if c == '"' {
            found.push((Token::Text, line));
            rest[1..].find('"').map(|end| end + 2).ok_or_else(|| unended(line, "text"))?
        } else if c.is_ascii_digit() {
            let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '.'));
            let (number, _) = rest.split_at(end.unwrap_or(rest.len()));
            found.push((Token::Number(number), line));
            number.len()
        } else if is_word_start(c) {
            let (word, _) = rest.split_at(word_bytes(rest));
            found.push((Token::Word(word), line));
            word.len()
        } else if c.is_ascii() {
            found.push((Token::Sign(c), line));
            1
        } else {
            return Err(LoadError::new(line, format!("unexpected character '{c}'")));
        };
        let (skipped, remaining) = rest.split_at(taken);
        line += skipped.matches('\n').count() as u32;
        rest = remaining;
    }
    Ok(found)
}

#[cold]
fn unended(line: u32, what: &str) -> LoadError {
    LoadError::new(line, format!("a {what} that never ends"))
}
