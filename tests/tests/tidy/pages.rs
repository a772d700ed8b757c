//! Pages that promise something: rows of features, named tests, links, decisions.

use super::rust_text::RustText;
use super::tree::{Finding, Tree, line_of};
use std::collections::{BTreeMap, BTreeSet};

const FEATURES: &str = "docs/features.md";
const ARCHITECTURE: &str = "docs/architecture.md";
const INVARIANTS: usize = 16;
const DECISIONS: &str = "docs/decisions/";

/// Areas of docs/features.md with the number of their rows, 130 in all.
const AREAS: &[(&str, usize)] =
    &[("PG", 17), ("GC", 32), ("GT", 18), ("DP", 20), ("DO", 11), ("PS", 10), ("TR", 12), ("OB", 5), ("TS", 5)];

/// What a row without a test may wait for.
const MILESTONES: &[&str] = &["CUDA", "several GPUs", "pipeline", "checkpoint"];

fn feature_ids() -> impl Iterator<Item = String> {
    AREAS.iter().flat_map(|(area, rows)| (1..=*rows).map(move |n| format!("{area}-{n:02}")))
}

/// A page of all rows with the same entry, for planted repositories.
pub(crate) fn complete_features(entry: &str) -> String {
    feature_ids().map(|id| format!("| {id} | a title | {entry} |\n")).collect()
}

/// Every row stands once, and says a test, a milestone, or "later" with a reason.
pub(crate) fn feature_rows_are_complete(tree: &Tree) -> Vec<Finding> {
    let Some(page) = tree.get(FEATURES) else {
        return vec![Finding::new(FEATURES, 0, "the page is missing")];
    };
    let mut missing: BTreeSet<String> = feature_ids().collect();
    let mut found = Vec::new();
    for (number, line) in page.lines().enumerate() {
        let cells: Vec<&str> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
        let id = cells[0];
        let is_row = id.split_once('-').is_some_and(|(a, n)| {
            a.len() == 2 && a.bytes().all(|b| b.is_ascii_uppercase()) && n.len() == 2 && n.parse::<u8>().is_ok()
        });
        if !line.starts_with('|') || !is_row {
            continue;
        }
        let mut say = |what: String| found.push(Finding::new(FEATURES, number + 1, what));
        if !missing.remove(id) {
            say(format!("{id} stands twice or does not exist"));
        }
        match cells[1..] {
            [title, entry] if !title.is_empty() && entry_is_valid(entry) => {}
            _ => say(format!("{id} needs a title and a named test, `milestone: NAME` or `later: REASON`")),
        }
    }
    found.extend(missing.into_iter().map(|id| Finding::new(FEATURES, 0, format!("{id} is missing"))));
    found
}

fn entry_is_valid(entry: &str) -> bool {
    let says = |head: &str| entry.strip_prefix(head).map(str::trim);
    !named_tests(entry).is_empty()
        || says("milestone:").is_some_and(|name| MILESTONES.contains(&name))
        || says("later:").is_some_and(|reason| reason.len() > 3)
}

/// docs/architecture.md lists each invariant once, with the tests that guard it or the milestones that bring them.
pub(crate) fn invariants_are_guarded(tree: &Tree) -> Vec<Finding> {
    let Some(page) = tree.get(ARCHITECTURE) else {
        return vec![Finding::new(ARCHITECTURE, 0, "the page is missing")];
    };
    let mut missing: BTreeSet<usize> = (1..=INVARIANTS).collect();
    let mut found = Vec::new();
    for (number, line) in page.lines().enumerate().filter(|(_, l)| l.starts_with('|')) {
        let cells: Vec<&str> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
        let Ok(id) = cells[0].parse() else { continue };
        let guard = cells.last().unwrap_or(&"");
        let later =
            guard.strip_prefix("milestone:").is_some_and(|m| m.split(',').all(|m| MILESTONES.contains(&m.trim())));
        if !missing.remove(&id) {
            found.push(Finding::new(
                ARCHITECTURE,
                number + 1,
                format!("invariant {id} stands twice or does not exist"),
            ));
        }
        if !later && named_tests(guard).is_empty() {
            found.push(Finding::new(
                ARCHITECTURE,
                number + 1,
                format!("invariant {id} names no test and no milestone"),
            ));
        }
    }
    found.extend(missing.into_iter().map(|id| Finding::new(ARCHITECTURE, 0, format!("invariant {id} is missing"))));
    found
}

/// A page of all invariants with the same guard, for planted repositories.
pub(crate) fn complete_invariants(guard: &str) -> String {
    (1..=INVARIANTS).map(|id| format!("| {id} | holds | {guard} |\n")).collect()
}

/// Code spans of the form `folder/file.rs::name`, with their offsets.
fn named_tests(page: &str) -> Vec<(usize, &str, &str)> {
    let mut found = Vec::new();
    let mut at = 0;
    for (n, span) in page.split('`').enumerate() {
        if n % 2 == 1
            && let Some((path, name)) = span.split_once(".rs::")
        {
            let path = &span[..path.len() + ".rs".len()];
            if path.contains('/') && !name.is_empty() && !span.contains(char::is_whitespace) {
                found.push((at, path, name.rsplit("::").next().unwrap_or(name)));
            }
        }
        at += span.len() + 1;
    }
    found
}

/// A test that a page names is there: a function of that name, marked as a test or part of a suite under `tests/`.
pub(crate) fn named_tests_exist(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut parsed: BTreeMap<&str, Option<RustText>> = BTreeMap::new();
    for (page, text) in tree.with_ending(".md") {
        for (at, path, name) in named_tests(text) {
            let what = match parsed.entry(path).or_insert_with(|| tree.get(path).map(RustText::new)) {
                None => format!("`{path}` does not exist"),
                Some(source) if has_test(path, source, name) => continue,
                Some(_) => format!("`{path}` has no test `{name}`"),
            };
            found.push(Finding::new(page, line_of(text, at), what));
        }
    }
    found
}

fn has_test(path: &str, source: &RustText, name: &str) -> bool {
    let mut before = "";
    for (at, word) in source.words() {
        if before == "fn" && word == name {
            let head = source.code[..at].trim_end().trim_end_matches("fn").trim_end();
            let marked = head.ends_with(']') && head.rsplit_once("#[").is_some_and(|(_, a)| a.starts_with("test"));
            return marked || path.starts_with("tests/") || path.contains("/tests/") || above_is_test(head);
        }
        before = word;
    }
    false
}

/// `#[test]` may stand above further attributes.
fn above_is_test(head: &str) -> bool {
    head.lines()
        .rev()
        .take_while(|l| l.trim_start().starts_with("#[") || l.trim().is_empty())
        .any(|l| l.trim() == "#[test]")
}

/// Relative links resolve, and a page that a text or a comment names is in the repository.
pub(crate) fn links_and_page_names_resolve(tree: &Tree) -> Vec<Finding> {
    let pages: BTreeSet<&str> = tree.with_ending(".md").map(|(path, _)| base_name(path)).collect();
    let mut found = Vec::new();
    for (path, text) in tree.with_ending(".md") {
        for (at, _) in text.match_indices("](") {
            let target = text[at + 2..].split([')', '#', ' ']).next().unwrap_or("");
            if !target.is_empty() && !target.contains(':') && !resolves(tree, path, target) {
                found.push(Finding::new(path, line_of(text, at), format!("the link `{target}` leads nowhere")));
            }
        }
    }
    let mut check_names = |path: &str, text: &str| {
        for (at, name) in
            page_names(text).filter(|(at, name)| !pages.contains(base_name(name)) && !text[..*at].ends_with("]("))
        {
            found.push(Finding::new(path, line_of(text, at), format!("`{name}` is not a page of this repository")));
        }
    };
    tree.with_ending(".md").chain(tree.with_ending(".toml")).for_each(|(path, text)| check_names(path, text));
    tree.rust().for_each(|(path, text)| check_names(path, &text.comments));
    found
}

fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Words that end in `.md`; globs are not names.
fn page_names(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let is_part = |c: char| c.is_alphanumeric() || "_-./*".contains(c);
    text.match_indices(".md").filter_map(move |(at, ending)| {
        let end = at + ending.len();
        let start =
            text[..at].rfind(|c| !is_part(c)).map_or(0, |n| n + text[n..].chars().next().map_or(1, char::len_utf8));
        let ends = !text[end..].starts_with(|c: char| c.is_alphanumeric() || c == '_');
        let name = &text[start..end];
        (ends && start < at && !name.contains('*')).then_some((start, name))
    })
}

fn resolves(tree: &Tree, page: &str, target: &str) -> bool {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." if parts.pop().is_none() => return false,
            ".." => {}
            name => parts.push(name),
        }
    }
    let path = parts.join("/");
    path.is_empty() || tree.get(&path).is_some() || tree.has_folder(&path)
}

/// A decision is a numbered page with four headings, and every outside dependency is explained in one.
pub(crate) fn decisions_are_whole_and_cover_dependencies(tree: &Tree) -> Vec<Finding> {
    const HEADINGS: &[&str] = &["## Problem", "## Constraints", "## Decision", "## What we gave up"];
    let mut found = Vec::new();
    let mut numbers = BTreeMap::new();
    let decisions: Vec<(&str, &str)> = tree.with_ending(".md").filter(|(p, _)| p.starts_with(DECISIONS)).collect();
    for (path, text) in &decisions {
        let name = base_name(path);
        let number = name.split('-').next().unwrap_or("");
        if number.len() != 4 || number.parse::<u16>().is_err() {
            found.push(Finding::new(path, 0, "the name of a decision begins with four digits and a dash"));
        } else if let Some(other) = numbers.insert(number, *path) {
            found.push(Finding::new(path, 0, format!("the number of {other}")));
        }
        for heading in HEADINGS.iter().filter(|h| !text.lines().any(|l| l.trim_end() == **h)) {
            found.push(Finding::new(path, 0, format!("no heading `{heading}`")));
        }
    }
    let manifest = tree.get("Cargo.toml").unwrap_or("");
    for (line, name) in outside_dependencies(manifest) {
        if !decisions.iter().any(|(_, text)| text.contains(&format!("`{name}`"))) {
            found.push(Finding::new("Cargo.toml", line, format!("no page of {DECISIONS} says why `{name}` is here")));
        }
    }
    found
}

fn outside_dependencies(manifest: &str) -> Vec<(usize, &str)> {
    let mut in_list = false;
    let mut found = Vec::new();
    for (number, line) in manifest.lines().enumerate() {
        if line.starts_with('[') {
            in_list = line.trim() == "[workspace.dependencies]";
        } else if in_list
            && let Some((name, value)) = line.split_once('=')
            && !value.contains("path =")
        {
            found.push((number + 1, name.trim()));
        }
    }
    found
}

mod tests {
    use super::*;

    const TEST: &str = "#[test]\nfn holds() {}\nfn helper() {}\n#[test]\n#[should_panic]\nfn panics() {}\n";

    fn whats(found: Vec<Finding>) -> Vec<String> {
        found.into_iter().map(|f| f.what).collect()
    }

    #[test]
    fn there_are_130_rows() {
        assert_eq!(feature_ids().count(), 130);
    }

    #[test]
    fn entries_are_tests_milestones_or_reasons() {
        for good in [
            "`a/b.rs::c`",
            "see `a/b.rs::c`, `a/b.rs::d`",
            "milestone: pipeline",
            "milestone: several GPUs",
            "later: needs FP8",
        ] {
            assert!(entry_is_valid(good), "{good}");
        }
        for bad in
            ["", "yes", "`b.rs::c`", "`a/b.rs`", "milestone: someday", "milestone:", "later:", "later: no", "done, gtp"]
        {
            assert!(!entry_is_valid(bad), "{bad}");
        }
    }

    #[test]
    fn missing_doubled_and_unknown_rows_are_noticed() {
        let page = complete_features("later: a reason");
        let check = |page: &str| whats(feature_rows_are_complete(&Tree::of(&[(FEATURES, page)])));
        assert!(check(&page).is_empty());
        assert_eq!(check(&page.replace("| GT-18 | a title | later: a reason |\n", "")), ["GT-18 is missing"]);
        assert!(check(&format!("{page}| GT-19 | more | later: a reason |\n"))[0].contains("GT-19"));
        assert!(check(&page.replacen("| a title |", "|  |", 1))[0].contains("PG-01 needs"));
        assert_eq!(feature_rows_are_complete(&Tree::of(&[])).len(), 1);
    }

    #[test]
    fn an_invariant_without_guard_or_twice_is_noticed() {
        let page = complete_invariants("milestone: pipeline, checkpoint");
        let check = |page: &str| whats(invariants_are_guarded(&Tree::of(&[(ARCHITECTURE, page)])));
        assert!(check(&page).is_empty());
        assert!(check(&page.replace("milestone: pipeline, checkpoint", "`a/tests/b.rs::c`")).is_empty());
        assert_eq!(
            check(&page.replacen("pipeline, checkpoint", "pipeline, someday", 1)),
            ["invariant 1 names no test and no milestone"]
        );
        assert_eq!(
            check(&page.replace("| 7 |", "| 8 |")),
            ["invariant 8 stands twice or does not exist", "invariant 7 is missing"]
        );
        assert!(check(&format!("{page}| crate | idea | never |\n")).is_empty());
    }

    #[test]
    fn a_named_test_must_be_a_test() {
        let check = |name: &str| {
            let page = format!("`crates/a/src/lib.rs::{name}`\n");
            whats(named_tests_exist(&Tree::of(&[("docs/x.md", &page), ("crates/a/src/lib.rs", TEST)])))
        };
        assert!(check("holds").is_empty());
        assert!(check("tests::holds").is_empty());
        assert!(check("panics").is_empty());
        assert_eq!(check("helper"), ["`crates/a/src/lib.rs` has no test `helper`"]);
        assert_eq!(check("hold").len(), 1);
    }

    #[test]
    fn a_suite_under_tests_and_a_missing_file_are_told_apart() {
        let page = "`crates/a/tests/api/order.rs::kept` `crates/a/tests/gone.rs::kept` `// fn x`\n";
        let suite = "suite! { fn kept(d: &Device) {} }\n// fn dropped\n";
        let tree = Tree::of(&[("docs/x.md", page), ("crates/a/tests/api/order.rs", suite)]);
        assert_eq!(whats(named_tests_exist(&tree)), ["`crates/a/tests/gone.rs` does not exist"]);
        let tree = Tree::of(&[("docs/x.md", "`a/tests/o.rs::dropped`"), ("a/tests/o.rs", suite)]);
        assert_eq!(named_tests_exist(&tree).len(), 1, "a name in a comment is no test");
    }

    #[test]
    fn links_resolve_from_their_own_page() {
        let page = "[a](../README.md) [b](b.md#part) [c](../crates/) [d](#here) [e](https://docs.rs/x) [f](up.md) [g](../../x)\n";
        let tree =
            Tree::of(&[("docs/a.md", page), ("docs/b.md", ""), ("README.md", ""), ("crates/x", ""), ("up.md", "")]);
        let expected = ["the link `up.md` leads nowhere", "the link `../../x` leads nowhere"];
        assert_eq!(whats(links_and_page_names_resolve(&tree)), expected);
    }

    #[test]
    fn names_of_pages_that_are_not_here_are_noticed_in_comments() {
        let source = format!("//! See plan{ext} 4 and `docs/a{ext}`, docs/*{ext}.\nlet x = \"b{ext}\";\n", ext = ".md");
        let tree = Tree::of(&[("crates/x/src/lib.rs", &source), ("docs/a.md", "")]);
        let expected = format!("`plan{}` is not a page of this repository", ".md");
        assert_eq!(whats(links_and_page_names_resolve(&tree)), [expected]);
    }

    #[test]
    fn decisions_need_their_headings_and_a_number_of_their_own() {
        let whole = "## Problem\n## Constraints\n## Decision\n## What we gave up\n";
        let tree = Tree::of(&[
            ("docs/decisions/0001-a.md", whole),
            ("docs/decisions/0001-b.md", whole),
            ("docs/decisions/12-c.md", whole),
            ("docs/decisions/0002-d.md", "## Problem\n## Constraints\n## Decision\n"),
        ]);
        let expected = [
            "the number of docs/decisions/0001-a.md",
            "no heading `## What we gave up`",
            "the name of a decision begins with four digits and a dash",
        ];
        assert_eq!(whats(decisions_are_whole_and_cover_dependencies(&tree)), expected);
    }

    #[test]
    fn a_dependency_without_a_reason_is_noticed() {
        let manifest = "[workspace.dependencies]\nddp = { path = \"crates/ddp\" }\ntracing = \"0.1\"\n\n\
                        tracing-subscriber = { version = \"0.3\" }\n[profile.dev]\nopt-level = 1\n";
        let page = "## Problem\n## Constraints\n## Decision\n`tracing-subscriber`\n## What we gave up\n";
        let tree = Tree::of(&[("Cargo.toml", manifest), ("docs/decisions/0001-a.md", page)]);
        let found = decisions_are_whole_and_cover_dependencies(&tree);
        assert_eq!(found.iter().map(|f| f.line).collect::<Vec<_>>(), [3]);
    }
}
