//! Which files a pattern stands for.

use crate::error::DataError;
use glob::{MatchOptions, Pattern};
use std::{
    collections::BTreeSet,
    fs,
    path::{Component, Path, PathBuf},
};

/// A folder that holds this file is the output of a run: a model must not be trained on its own losses.
const RUN_FILE: &str = "metrics.jsonl";

/// `*` stays within a folder; only `**` goes deeper.
const MATCH: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };

/// The files that patterns stand for: sorted by path, each once.
///
/// A pattern is a file, a folder (all files below it) or a glob (`*`, `?`, `[..]`, and `**` for folders of any depth);
/// a relative one starts at `base`. Below the part that is written out, these are never read: folders named `target`,
/// `target-*` or `runs`, folders with a `metrics.jsonl` (a run's own output), whatever starts with a dot, and linked
/// folders. A path that is written out in full is taken as it is.
///
/// # Errors
/// [`DataError::NoPatterns`]; [`DataError::BadGlob`], [`DataError::NotFound`] and [`DataError::NoMatch`] name the
/// pattern; [`DataError::Read`] names the folder that cannot be listed.
pub fn resolve<S: AsRef<str>>(base: &Path, patterns: &[S]) -> Result<Vec<PathBuf>, DataError> {
    if patterns.is_empty() {
        return Err(DataError::NoPatterns);
    }
    let base = fs::canonicalize(base).map_err(|source| DataError::Read { path: base.to_owned(), source })?;
    // Sorted: the order of files must not depend on the order in which a file system lists them.
    let mut found = BTreeSet::new();
    for (i, pattern) in patterns.iter().enumerate() {
        resolve_one(&base, i + 1, pattern.as_ref(), &mut found)?;
    }
    Ok(found.into_iter().collect())
}

fn resolve_one(base: &Path, position: usize, pattern: &str, found: &mut BTreeSet<PathBuf>) -> Result<(), DataError> {
    let path = normalised(&base.join(pattern));
    // What exists under the written name wins, so that a file named `a[1].txt` can be given.
    let (root, glob) = if path.is_dir() {
        (path, None)
    } else if path.exists() {
        found.insert(path);
        return Ok(());
    } else if !pattern.contains(['*', '?', '[']) {
        return Err(DataError::NotFound { position, pattern: pattern.to_owned(), path });
    } else {
        let (root, rest) = written_out(&path);
        let glob = Pattern::new(&rest).map_err(|source| DataError::BadGlob {
            position,
            pattern: pattern.to_owned(),
            source,
        })?;
        (root, Some(glob))
    };
    let mut walk = Walk { root: root.clone(), glob, matched: 0, excluded: 0 };
    walk.run(found)?;
    if walk.matched == 0 {
        return Err(DataError::NoMatch { position, pattern: pattern.to_owned(), root, excluded: walk.excluded });
    }
    Ok(())
}

/// A search below one folder.
struct Walk {
    root: PathBuf,
    /// Relative to `root`; none: every file.
    glob: Option<Pattern>,
    matched: usize,
    excluded: usize,
}

impl Walk {
    fn run(&mut self, found: &mut BTreeSet<PathBuf>) -> Result<(), DataError> {
        if !self.root.is_dir() {
            return Ok(());
        }
        let mut folders = vec![self.root.clone()];
        while let Some(folder) = folders.pop() {
            let unreadable = |source| DataError::Read { path: folder.clone(), source };
            for entry in fs::read_dir(&folder).map_err(unreadable)? {
                let entry = entry.map_err(unreadable)?;
                let path = entry.path();
                let linked = entry.file_type().map_err(unreadable)?.is_symlink();
                if path.is_dir() {
                    // A linked folder may lead back to one above it.
                    if linked || is_excluded(&path) {
                        self.excluded += 1;
                    } else {
                        folders.push(path);
                    }
                } else if is_hidden(&path) {
                    self.excluded += 1;
                } else if self.matches(&path) {
                    self.matched += 1;
                    found.insert(path);
                }
            }
        }
        Ok(())
    }

    fn matches(&self, path: &Path) -> bool {
        // Only regular files: a read of a named pipe would wait for ever.
        path.is_file()
            && self.glob.as_ref().is_none_or(|glob| {
                path.strip_prefix(&self.root).is_ok_and(|relative| glob.matches_path_with(relative, MATCH))
            })
    }
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

fn is_excluded(folder: &Path) -> bool {
    let named = folder
        .file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name == "target" || name.starts_with("target-") || name == "runs");
    named || is_hidden(folder) || folder.join(RUN_FILE).exists()
}

/// The folders before the first wildcard, and the glob from there on.
fn written_out(path: &Path) -> (PathBuf, String) {
    let mut root = PathBuf::new();
    let mut rest: Vec<String> = Vec::new();
    for component in path.components() {
        let name = component.as_os_str().to_string_lossy();
        if rest.is_empty() && !name.contains(['*', '?', '[']) {
            root.push(component);
        } else {
            rest.push(name.into_owned());
        }
    }
    (root, rest.join("/"))
}

/// Without `.` and `..`, so that a file reached in two ways is one file, and sorts in one place.
fn normalised(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                out.pop();
            }
            other => out.push(other),
        }
    }
    out
}
