//! Files that are whole or not there, whoever else writes them.

use std::{fs, io, path::Path, process, thread};

/// Written beside and then renamed: other processes see all of it or nothing.
pub(super) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().expect("BUG: a path in a folder");
    fs::create_dir_all(folder)?;
    let thread = format!("{:?}", thread::current().id());
    let beside = path.with_extension(format!("{}-{}", process::id(), thread.replace(['(', ')'], "")));
    fs::write(&beside, bytes)?;
    fs::rename(&beside, path)
}
