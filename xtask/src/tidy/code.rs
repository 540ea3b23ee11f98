//! Rust sources without their comments and literals, for rules that concern code.

/// The text with comments and literals replaced by spaces, line by line with the same length.
pub(super) fn blank_out(text: &str) -> String {
    blanked(text, |_| true)
}

/// The text with comments replaced by spaces, and literals kept.
pub(super) fn without_comments(text: &str) -> String {
    blanked(text, |blank| blank.starts_with('/'))
}

/// The text with those comments and literals replaced by spaces that `is_blank` selects.
fn blanked(text: &str, is_blank: fn(&str) -> bool) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = length_of_blank(rest);
        if length == 0 {
            code.push(first);
            rest = &rest[first.len_utf8()..];
        } else {
            let (blank, after) = rest.split_at(length);
            if is_blank(blank) {
                code.extend(blank.chars().map(|c| if c == '\n' { c } else { ' ' }));
            } else {
                code.push_str(blank);
            }
            rest = after;
        }
    }
    code
}

/// Number of bytes of the comment or literal at the start of `rest`; 0 if it starts with code.
fn length_of_blank(rest: &str) -> usize {
    if rest.starts_with("//") {
        rest.find('\n').unwrap_or(rest.len())
    } else if rest.starts_with("/*") {
        length_of_block_comment(rest)
    } else if rest.starts_with('"') {
        length_of_quoted(rest, '"')
    } else if rest.starts_with('r') {
        length_of_raw_string(rest)
    } else if rest.starts_with('\'') {
        length_of_character(rest)
    } else {
        0
    }
}

fn length_of_block_comment(rest: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < rest.len() {
        let tail = &rest.as_bytes()[at..];
        if tail.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if tail.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// Length of a literal in `quote`s, with escapes.
fn length_of_quoted(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        if !escaped && c == quote {
            return at + 1;
        }
        escaped = !escaped && c == '\\';
    }
    rest.len()
}

/// Length of `r"…"` or `r#"…"#` with any number of hashes, also after a `b` or `c`; 0 for any other
/// `r`.
fn length_of_raw_string(rest: &str) -> usize {
    let hashes = rest[1..].bytes().take_while(|&byte| byte == b'#').count();
    let start = 1 + hashes;
    if !rest[start..].starts_with('"') {
        return 0;
    }
    let end = format!("\"{}", "#".repeat(hashes));
    rest[start + 1..].find(&end).map_or(rest.len(), |at| start + 1 + at + end.len())
}

/// Length of a character literal; 0 for a lifetime.
fn length_of_character(rest: &str) -> usize {
    let mut inside = rest.chars().skip(1);
    match (inside.next(), inside.next()) {
        (Some('\\'), _) => length_of_quoted(rest, '\''),
        (Some(c), Some('\'')) => 2 + c.len_utf8(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked_out_in_place() {
        let text = "let a = \"x // y\"; // b\nlet c = 'd'; /* e\nf */ g";
        assert_eq!(blank_out(text), "let a =         ;     \nlet c =    ;     \n     g");
        assert_eq!(without_comments(text), "let a = \"x // y\";     \nlet c = 'd';     \n     g");
    }
}
