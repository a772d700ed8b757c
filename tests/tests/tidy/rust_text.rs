//! A Rust source file with its comments and literals set apart, so that a rule about code is not fooled by a word
//! in a sentence, and a rule about comments not by code.

use super::tree::line_of;

/// Both texts have the bytes of the source where they apply and blanks elsewhere, so offsets and lines agree.
pub(crate) struct RustText {
    /// Code only: comments, lifetimes and the contents of literals are blank.
    pub(crate) code: String,
    /// Comments only, markers included.
    pub(crate) comments: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Code,
    Comment,
    Literal,
}

impl RustText {
    pub(crate) fn new(source: &str) -> Self {
        let kinds = classify(source.as_bytes());
        let only = |kind: Kind| {
            let keep = |(byte, k): (&u8, &Kind)| if *k == kind || *byte == b'\n' { *byte } else { b' ' };
            let bytes: Vec<u8> = source.as_bytes().iter().zip(&kinds).map(keep).collect();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        Self { code: only(Kind::Code), comments: only(Kind::Comment) }
    }

    /// Identifiers and keywords of the code with their offsets.
    pub(crate) fn words(&self) -> impl Iterator<Item = (usize, &str)> {
        words(&self.code)
    }

    /// Lines, from 1, where `word` stands in the code as a whole word.
    pub(crate) fn lines_with(&self, word: &str) -> Vec<usize> {
        self.words().filter(|(_, w)| *w == word).map(|(at, _)| line_of(&self.code, at)).collect()
    }
}

pub(crate) fn words(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let start = from + text[from..].find(is_word)?;
        let len = text[start..].find(|c| !is_word(c)).unwrap_or(text.len() - start);
        from = start + len;
        Some((start, &text[start..from]))
    })
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn is_word_byte(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b == b'_' || b >= 0x80
}

fn classify(s: &[u8]) -> Vec<Kind> {
    let mut kinds = vec![Kind::Code; s.len()];
    let mut at = 0;
    while at < s.len() {
        let after_word = at > 0 && is_word_byte(s[at - 1]);
        let (kind, end) = match s[at] {
            b'/' if s[at..].starts_with(b"//") => (Kind::Comment, find(s, at, b"\n")),
            b'/' if s[at..].starts_with(b"/*") => (Kind::Comment, block_comment_end(s, at)),
            b'"' => (Kind::Literal, string_end(s, at + 1)),
            b'r' if !after_word || raw_prefix(s, at) => match raw_string_end(s, at) {
                Some(end) => (Kind::Literal, end),
                None => (Kind::Code, at + 1),
            },
            b'\'' => (Kind::Literal, quote_end(s, at)),
            _ => (Kind::Code, at + 1),
        };
        let end = end.min(s.len());
        kinds[at..end].fill(kind);
        at = end;
    }
    kinds
}

fn find(s: &[u8], from: usize, what: &[u8]) -> usize {
    s[from..].windows(what.len()).position(|w| w == what).map_or(s.len(), |n| from + n)
}

fn block_comment_end(s: &[u8], start: usize) -> usize {
    let (mut depth, mut at) = (0, start);
    while at < s.len() {
        if s[at..].starts_with(b"/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if s[at..].starts_with(b"*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    s.len()
}

fn string_end(s: &[u8], mut at: usize) -> usize {
    while at < s.len() {
        match s[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    s.len()
}

/// `br"` and `cr"`: the `r` belongs to a raw literal although a letter precedes it.
fn raw_prefix(s: &[u8], at: usize) -> bool {
    matches!(s[at - 1], b'b' | b'c') && (at < 2 || !is_word_byte(s[at - 2]))
}

fn raw_string_end(s: &[u8], at: usize) -> Option<usize> {
    let hashes = s[at + 1..].iter().take_while(|b| **b == b'#').count();
    let open = at + 1 + hashes;
    if s.get(open) != Some(&b'"') {
        return None; // `r#type` is an identifier
    }
    let close: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
    Some(find(s, open + 1, &close) + close.len())
}

/// The end of a character literal or a lifetime.
fn quote_end(s: &[u8], at: usize) -> usize {
    if s.get(at + 1) == Some(&b'\\') {
        return find(s, (at + 3).min(s.len()), b"'") + 1;
    }
    let char_len = match s.get(at + 1) {
        Some(0xF0..) => 4,
        Some(0xE0..) => 3,
        Some(0xC0..) => 2,
        _ => 1,
    };
    if s.get(at + 1 + char_len) == Some(&b'\'') {
        return at + 2 + char_len;
    }
    at + 1 + s[at + 1..].iter().take_while(|b| is_word_byte(**b)).count()
}

mod tests {
    use super::*;

    fn code_words(source: &str) -> Vec<String> {
        RustText::new(source).words().map(|(_, w)| w.to_string()).collect()
    }

    #[test]
    fn comments_and_literals_are_not_code() {
        let source = r##"let a = "unsafe"; // static
            /* outer /* inner */ still */ let b = r#"quote " inside"#; let c = br"x"; let d = "\"unsafe";"##;
        assert_eq!(code_words(source), ["let", "a", "let", "b", "let", "c", "b", "let", "d"]);
    }

    #[test]
    fn lifetimes_and_characters_are_told_apart() {
        assert_eq!(
            code_words("fn f(x: &'static str, y: &'a u8) { let c = 'c'; let q = '\\''; let e = 'é'; g }"),
            ["fn", "f", "x", "str", "y", "u8", "let", "c", "let", "q", "let", "e", "g"]
        );
    }

    #[test]
    fn raw_identifiers_stay_code() {
        assert_eq!(code_words("let r#type = 1; for r in a {}"), ["let", "r", "type", "1", "for", "r", "in", "a"]);
    }

    #[test]
    fn lines_and_comments_keep_their_place() {
        let text = RustText::new("// see notes.md\n\"a\nb\"\nunsafe {}\n");
        assert_eq!(text.lines_with("unsafe"), [4]);
        assert_eq!(text.comments.lines().next(), Some("// see notes.md"));
        assert_eq!(text.comments.lines().nth(3).map(str::trim), Some(""));
    }

    #[test]
    fn an_unfinished_literal_ends_with_the_file() {
        assert_eq!(code_words("let a = \"never closed"), ["let", "a"]);
        assert_eq!(code_words("let a = '\\"), ["let", "a"]);
    }
}
