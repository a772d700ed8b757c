//! Files that are whole or not there, whoever else writes them.

use std::{fs, io, path::Path, process, thread};

/// Written beside and then renamed: other processes see all of it or nothing.
pub(super) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().expect("BUG: a path in a folder");
    fs::create_dir_all(folder)?;
    let thread = format!("{:?}", thread::current().id());
    let beside = path.with_extension(format!("{}-{}", process::id(), thread.replace(['(', ')'], "")));
    let written = fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, path));
    if written.is_err() && beside.is_file() {
        // The first error is the one to tell.
        let _ = fs::remove_file(&beside);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_written_leaves_nothing_beside_it() {
        let folder = std::env::temp_dir().join(format!("warpweft-kept-{}", process::id()));
        let path = folder.join("a.kernel");
        // No file can take the place of a folder.
        fs::create_dir_all(&path).unwrap();
        assert!(write(&path, b"half").is_err());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        fs::remove_dir_all(folder).unwrap();
    }
}
