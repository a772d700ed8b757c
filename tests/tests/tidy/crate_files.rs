//! Sizes, README files, re-exports.

use super::tree::{Finding, Tree};

const MAX_LINES: usize = 1_000;

pub(crate) fn no_file_is_too_long(tree: &Tree) -> Vec<Finding> {
    let source = |p: &str| [".rs", ".cu", ".py"].iter().any(|e| p.ends_with(e));
    tree.all()
        .filter(|(path, text)| source(path) && text.lines().count() > MAX_LINES)
        .map(|(path, text)| {
            let lines = text.lines().count();
            Finding::new(path, lines, format!("{lines} lines, the limit is {MAX_LINES}: look for the seam and split"))
        })
        .collect()
}

pub(crate) fn every_crate_has_a_readme(tree: &Tree) -> Vec<Finding> {
    tree.crates()
        .into_iter()
        .map(|name| format!("crates/{name}"))
        .filter(|folder| tree.get(&format!("{folder}/README.md")).is_none_or(|t| t.trim().is_empty()))
        .map(|folder| Finding::new(&folder, 0, "no README.md: what the crate is for, and an example"))
        .collect()
}

/// A `lib.rs` is the table of contents of its crate: `pub use x::*` would hide what it exports.
pub(crate) fn lib_files_name_what_they_export(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, text) in tree.rust().filter(|(p, _)| p.ends_with("/src/lib.rs")) {
        for (number, line) in text.code.lines().enumerate() {
            let line = line.trim_start();
            if line.starts_with("pub use") && line.contains("::*") {
                found.push(Finding::new(path, number + 1, "a glob re-export: name the items"));
            }
        }
    }
    found
}

mod tests {
    use super::*;

    #[test]
    fn exactly_the_limit_is_allowed_and_one_more_is_not() {
        let (fits, long) = ("x\n".repeat(MAX_LINES), "x\n".repeat(MAX_LINES + 1));
        let tree = Tree::of(&[("a.rs", &fits), ("b.py", &long), ("c.cu", &long), ("d.md", &long)]);
        let paths: Vec<String> = no_file_is_too_long(&tree).into_iter().map(|f| f.path).collect();
        assert_eq!(paths, ["b.py", "c.cu"]);
    }

    #[test]
    fn a_missing_and_an_empty_readme_are_noticed() {
        let tree = Tree::of(&[
            ("crates/a/src/lib.rs", ""),
            ("crates/b/README.md", " \n"),
            ("crates/c/README.md", "# c\n"),
            ("crates/c/src/README.md", "# not the crate's\n"),
        ]);
        let paths: Vec<String> = every_crate_has_a_readme(&tree).into_iter().map(|f| f.path).collect();
        assert_eq!(paths, ["crates/a", "crates/b"]);
    }

    #[test]
    fn glob_reexports_are_noticed_in_lib_files_only() {
        let glob = "pub use self::plan::*;\n";
        let tree = Tree::of(&[("crates/a/src/lib.rs", glob), ("crates/a/src/b.rs", glob)]);
        assert_eq!(lib_files_name_what_they_export(&tree).len(), 1);
        let named = Tree::of(&[("crates/a/src/lib.rs", "use a::*;\npub use self::plan::Plan; // not plan::*\n")]);
        assert!(lib_files_name_what_they_export(&named).is_empty());
    }
}
