//! State that belongs to nobody: statics, thread-locals, the environment; and code that was left for later.

use super::rust_text::{RustText, words};
use super::tree::{Finding, Tree, line_of};

/// What a `static` may be made of. A list of what is allowed also catches a type that hides its lock.
const PLAIN: &[&str] = &[
    "bool", "char", "str", "u8", "u16", "u32", "u64", "u128", "usize", "i8", "i16", "i32", "i64", "i128", "isize",
    "f32", "f64", "fn", "Option",
];

/// Where environment variables are read or set, and why there.
const ENVIRONMENT: &[(&str, &str)] = &[
    ("crates/pgroups/src/world", "World::from_env turns a launcher's variables into a World, once"),
    ("crates/trainer/src/main.rs", "the binary hands the environment to the library"),
    ("crates/device/src/cuda/prepare.rs", "some variables must be set before the driver loads"),
    ("tests/", "test helpers that run themselves again"),
];

pub(crate) fn statics_are_plain_data(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, text) in tree.rust() {
        for (at, _) in text.words().filter(|(_, w)| *w == "static") {
            if let Some(why) = static_offence(&text.code[at + "static".len()..]) {
                found.push(Finding::new(path, line_of(&text.code, at), why));
            }
        }
    }
    found
}

/// `rest` is the code behind the word `static`.
fn static_offence(rest: &str) -> Option<String> {
    let (mut depth, mut end) = (0i32, rest.len());
    for (at, c) in rest.char_indices() {
        match c {
            '[' | '(' | '{' | '<' => depth += 1,
            ']' | ')' | '}' => depth -= 1,
            '>' if !rest[..at].ends_with('-') => depth -= 1,
            '=' | ';' if depth == 0 => {
                end = at;
                break;
            }
            _ => {}
        }
    }
    let item = &rest[..end];
    if item.trim_start().starts_with("mut ") {
        return Some("`static mut`: hand the state down instead".into());
    }
    let (_, ty) = item.split_once(':')?;
    let is_number = |w: &str| w.starts_with(|c: char| c.is_ascii_digit());
    let odd = words(ty).map(|(_, w)| w).find(|w| !PLAIN.contains(w) && !is_number(w))?;
    Some(format!("a `static` with `{odd}` in its type: hand the state down; for constant data use `const`"))
}

pub(crate) fn nothing_is_thread_local(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, text) in tree.rust() {
        for word in ["thread_local", "lazy_static", "once_cell"] {
            let what = format!("`{word}`: no state is ambient, pass it down");
            found.extend(text.lines_with(word).into_iter().map(|line| Finding::new(path, line, what.clone())));
        }
    }
    found
}

pub(crate) fn environment_is_read_in_few_places(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, text) in tree.rust() {
        let helper = path.ends_with("/build.rs") || path.contains("/tests/") || path.contains("/benches/");
        if helper || ENVIRONMENT.iter().any(|(place, _)| path.starts_with(place)) {
            continue;
        }
        let what = "the environment: it is read in main and World::from_env only; take the value as a parameter";
        found.extend(environment_uses(&text).into_iter().map(|line| Finding::new(path, line, what)));
    }
    found
}

fn environment_uses(text: &RustText) -> Vec<usize> {
    const VERBS: &[&str] = &["var", "var_os", "vars", "vars_os", "set_var", "remove_var"];
    let words: Vec<(usize, &str)> = text.words().collect();
    let mut lines = Vec::new();
    for (n, (at, word)) in words.iter().enumerate().filter(|(_, (_, w))| *w == "env") {
        let rest = &text.code[at + word.len()..];
        let through_path = rest.trim_start().starts_with("::")
            && match rest.trim_start()[2..].trim_start().strip_prefix('{') {
                Some(list) => {
                    super::rust_text::words(list.split('}').next().unwrap_or(list)).any(|(_, w)| VERBS.contains(&w))
                }
                None => words.get(n + 1).is_some_and(|(_, w)| VERBS.contains(w)),
            };
        // Another name for the module would hide its uses.
        let renamed = words.get(n + 1).is_some_and(|(_, w)| *w == "as");
        if through_path || renamed {
            lines.push(line_of(&text.code, *at));
        }
    }
    lines
}

/// Spelled in pieces, so that these files pass their own check.
const LEFT_OVERS: &[&str] = &[concat!("to", "do"), concat!("unimpl", "emented"), concat!("db", "g")];
const MARKERS: &[&str] = &[concat!("FIX", "ME"), concat!("XX", "X"), concat!("TO", "DO")];

/// What keeps a test out of `cargo test` must be brought by a step of the continuous integration, which the reason names.
fn names_a_step(tree: &Tree, line: &str) -> bool {
    let step = line.split_once("`.ci/run ").and_then(|(_, rest)| rest.split_once('`')).map(|(step, _)| step);
    let steps = tree.get(".ci/run").unwrap_or_default();
    step.is_some_and(|step| steps.contains(&format!("\nstep_{step}()")))
}

pub(crate) fn nothing_is_left_over(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, text) in tree.rust() {
        for (at, word) in text.words() {
            let is_macro = LEFT_OVERS.contains(&word) && text.code[at + word.len()..].starts_with('!');
            let is_ignored = word == "ignore"
                && text.code[..at].trim_end().ends_with("#[")
                && !names_a_step(
                    tree,
                    tree.get(path).and_then(|source| source[at..].lines().next()).unwrap_or_default(),
                );
            if is_macro || is_ignored {
                found.push(Finding::new(path, line_of(&text.code, at), format!("`{word}` was left over")));
            }
        }
        let marks = words(&text.comments).filter(|(_, w)| MARKERS.contains(w));
        found.extend(marks.map(|(at, w)| {
            Finding::new(path, line_of(&text.comments, at), format!("a `{w}`: do it, or leave it out"))
        }));
    }
    found
}

mod tests {
    use super::*;

    fn lines(rule: fn(&Tree) -> Vec<Finding>, path: &str, source: &str) -> Vec<usize> {
        rule(&Tree::of(&[(path, source)])).into_iter().map(|f| f.line).collect()
    }

    #[test]
    fn statics_that_can_change_are_noticed() {
        for offender in [
            "static mut N: u32 = 0;",
            "pub static N: AtomicUsize = AtomicUsize::new(0);",
            "static M: std::sync::Mutex<u8> = Mutex::new(0);",
            "static L: LazyLock<Vec<u8>> = LazyLock::new(Vec::new);",
            "static O: OnceLock<u8> = OnceLock::new();",
            "static R: [RwLock<u8>; 2] = [RwLock::new(0), RwLock::new(1)];",
            "static C: Registry = Registry::new();",
            "fn f() { static INSIDE: Cell<u8> = Cell::new(0); }",
        ] {
            assert_eq!(lines(statics_are_plain_data, "a.rs", offender), [1], "{offender}");
        }
    }

    #[test]
    fn plain_statics_and_lifetimes_are_allowed() {
        let source = "static A: [&'static str; 3] = [\"Mutex\"; 3];\nstatic F: Option<fn(u8) -> u8> = None;\n\
                      fn f<T: Send + 'static>(t: T) {}\n// static M: Mutex<u8>\nstatic N: &[(u8, f32)] = &[];\n";
        assert_eq!(lines(statics_are_plain_data, "a.rs", source), [] as [usize; 0]);
    }

    #[test]
    fn thread_locals_of_every_spelling_are_noticed() {
        let source =
            "thread_local! { }\nloom::thread_local! { }\n#[thread_local]\nlazy_static! { }\nuse once_cell::sync;\n";
        let mut found = lines(nothing_is_thread_local, "a.rs", source);
        found.sort();
        assert_eq!(found, [1, 2, 3, 4, 5]);
        assert!(lines(nothing_is_thread_local, "a.rs", "// no thread_local here\n").is_empty());
    }

    #[test]
    fn the_environment_is_noticed_however_it_is_reached() {
        let source = "use std::env;\nuse std::env::{self, var_os};\nenv::var(\"A\");\nstd :: env :: set_var(\"A\");\n\
                      use std::env as e;\nenv!(\"CARGO\");\nenv::temp_dir();\nenv::args();\nlet env = 1; var(env);\n";
        let found = lines(environment_is_read_in_few_places, "crates/ddp/src/lib.rs", source);
        assert_eq!(found, [2, 3, 4, 5]);
    }

    #[test]
    fn the_environment_may_be_read_in_main_world_and_test_helpers() {
        for path in [
            "crates/trainer/src/main.rs",
            "crates/pgroups/src/world.rs",
            "crates/pgroups/src/world/env.rs",
            "crates/device/tests/api.rs",
            "tests/src/rerun.rs",
        ] {
            assert!(lines(environment_is_read_in_few_places, path, "std::env::var(\"A\");").is_empty(), "{path}");
        }
        assert_eq!(lines(environment_is_read_in_few_places, "crates/trainer/src/run.rs", "env::vars();"), [1]);
    }

    #[test]
    fn left_overs_are_noticed_but_words_are_not() {
        let source = format!(
            "{}!()\n{}!(x)\n#[ignore]\n// {} later\nlet ignore = 1;\n",
            LEFT_OVERS[0], LEFT_OVERS[2], MARKERS[0]
        );
        assert_eq!(lines(nothing_is_left_over, "a.rs", &source), [1, 2, 3, 4]);
        let source = "#[ignore = \"needs X, which `.ci/run x` brings\"]\n#[ignore = \"`.ci/run y`\"]\n#[ignore]\n";
        let tree = Tree::of(&[("a.rs", source), (".ci/run", "#!\nstep_x() { true; }\n")]);
        assert_eq!(nothing_is_left_over(&tree).iter().map(|f| f.line).collect::<Vec<_>>(), [2, 3]);
    }
}
