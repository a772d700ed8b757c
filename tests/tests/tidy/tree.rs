//! The files of a repository, in memory.

use super::rust_text::RustText;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// One thing that breaks a rule. `line` counts from 1; 0 means the file or folder as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) path: String,
    pub(crate) line: usize,
    pub(crate) what: String,
}

impl Finding {
    pub(crate) fn new(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self { path: path.to_string(), line, what: what.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}

/// Paths relative to the root, with `/`, and the text of every file that is UTF-8.
pub(crate) struct Tree {
    files: BTreeMap<String, String>,
}

impl Tree {
    /// Reads everything under `root` except build output, run folders and git's own.
    pub(crate) fn read(root: &Path) -> std::io::Result<Self> {
        let mut files = BTreeMap::new();
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(root.join(&folder))? {
                let entry = entry?;
                let name = entry.file_name().to_string_lossy().into_owned();
                let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
                let kind = entry.file_type()?;
                if kind.is_dir() && !is_output(&path) {
                    folders.push(path);
                } else if kind.is_file() && !is_output(&path) {
                    // What is not UTF-8 (golden data, pictures) has no lines to check.
                    if let Ok(text) = String::from_utf8(std::fs::read(entry.path())?) {
                        files.insert(path, text);
                    }
                }
            }
        }
        Ok(Self { files })
    }

    #[cfg(test)]
    pub(crate) fn of(files: &[(&str, &str)]) -> Self {
        Self { files: files.iter().map(|(p, t)| (p.to_string(), t.to_string())).collect() }
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().map(|(p, t)| (p.as_str(), t.as_str()))
    }

    pub(crate) fn get(&self, path: &str) -> Option<&str> {
        self.files.get(path).map(String::as_str)
    }

    pub(crate) fn with_ending<'a>(&'a self, ending: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.all().filter(move |(path, _)| path.ends_with(ending))
    }

    pub(crate) fn rust(&self) -> impl Iterator<Item = (&str, RustText)> {
        self.with_ending(".rs").map(|(path, text)| (path, RustText::new(text)))
    }

    /// Names of the folders under `crates/`, in order.
    pub(crate) fn crates(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.all().filter_map(|(p, _)| crate_of(p)).collect();
        names.dedup();
        names
    }

    pub(crate) fn has_folder(&self, path: &str) -> bool {
        let prefix = format!("{path}/");
        self.files.range(prefix.clone()..).next().is_some_and(|(p, _)| p.starts_with(&prefix))
    }
}

fn is_output(path: &str) -> bool {
    [".git", "runs", ".gpu"].contains(&path) || path == "target" || path.starts_with("target-")
}

/// `device` for `crates/device/src/lib.rs`.
pub(crate) fn crate_of(path: &str) -> Option<&str> {
    let (name, _) = path.strip_prefix("crates/")?.split_once('/')?;
    Some(name)
}

/// The line, from 1, of a byte offset.
pub(crate) fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes()[..offset].iter().filter(|b| **b == b'\n').count() + 1
}

mod tests {
    use super::*;

    #[test]
    fn crates_are_listed_once_and_files_beside_them_are_not_crates() {
        let tree = Tree::of(&[("crates/a/x", ""), ("crates/a/y", ""), ("crates/b/z", ""), ("crates/notes", "")]);
        assert_eq!(tree.crates(), ["a", "b"]);
        assert!(tree.has_folder("crates/a") && !tree.has_folder("crates/note"));
    }

    #[test]
    fn lines_count_from_one() {
        assert_eq!([0, 1, 2, 3].map(|at| line_of("a\nb\nc", at)), [1, 1, 2, 2]);
    }
}
