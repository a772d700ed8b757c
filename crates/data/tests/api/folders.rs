//! A folder per test, made afresh.

use std::{
    fs,
    path::{Path, PathBuf},
};

pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(test: &str) -> Folder {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("data").join(test);
        if path.exists() {
            fs::remove_dir_all(&path).unwrap();
        }
        fs::create_dir_all(&path).unwrap();
        Folder(fs::canonicalize(path).unwrap())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn file(self, path: &str, text: impl AsRef<[u8]>) -> Folder {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    /// Relative paths of what the patterns stand for, seen from `base` below this folder.
    pub(crate) fn resolve(&self, base: &str, patterns: &[&str]) -> Vec<String> {
        let found = data::resolve(&self.0.join(base), patterns).unwrap();
        found.iter().map(|p| p.strip_prefix(&self.0).unwrap().to_str().unwrap().to_owned()).collect()
    }
}
