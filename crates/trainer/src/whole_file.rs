//! Files that are there whole, or as they were before.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::TrainError;

/// Writes `bytes` beside `path`, and gives them its name when all of them are there: a disk that gets full leaves no part
/// under that name. What is no file, as a pipe, is written to as it is.
///
/// # Errors
/// [`TrainError::Write`] with `path`.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    // A link stays, and what it points to is replaced.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let is_special = fs::metadata(&target).is_ok_and(|there| !there.is_file());
    let written = if is_special { fs::write(&target, bytes) } else { replace(&target, bytes) };
    written.map_err(|source| TrainError::Write { path: path.to_owned(), source })
}

/// What a file is called while it is being written.
pub(crate) fn half_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    PathBuf::from(name)
}

fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let half = half_of(path);
    let written = fs::write(&half, bytes).and_then(|()| fs::rename(&half, path));
    if written.is_err() && half.is_file() {
        // The first error is the one to tell.
        let _ = fs::remove_file(&half);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("trainer-whole-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn a_file_is_replaced_and_nothing_is_left_beside_it() {
        let dir = folder("replaced");
        let path = dir.join("a.bin");
        for text in ["one", "another"] {
            write_whole(&path, text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn what_cannot_be_written_leaves_the_file_of_before_and_is_named() {
        let dir = folder("kept");
        let path = dir.join("a.bin");
        write_whole(&path, b"before").unwrap();
        fs::create_dir(half_of(&path)).unwrap();
        let error = write_whole(&path, b"after").unwrap_err();
        assert!(matches!(&error, TrainError::Write { path, .. } if path.ends_with("a.bin")), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "before");
        fs::remove_dir_all(dir).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_and_a_device_is_not_replaced() {
        let dir = folder("link");
        let (file, link) = (dir.join("file"), dir.join("link"));
        fs::write(&file, "before").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write_whole(&link, b"after").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "after");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        write_whole(Path::new("/dev/null"), b"gone").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
        fs::remove_dir_all(dir).unwrap();
    }
}
