//! What a run writes only at its end, made sure of before it begins.

use std::{
    fs::{self, OpenOptions},
    path::Path,
};

use super::run::TimelineConfig;
use crate::{TrainError, plot::curve_files};

/// Makes the folders and tries the files, so that no run ends hours later without its picture.
///
/// # Errors
/// [`TrainError::Write`] with the file or folder.
pub(super) fn check_outputs(dir: &Path, timeline: Option<&TimelineConfig>) -> Result<(), TrainError> {
    make_folder(dir)?;
    curve_files(dir).iter().try_for_each(|path| check_writable(path))?;
    let Some(TimelineConfig { path, .. }) = timeline else { return Ok(()) };
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).map_or(Ok(()), make_folder)?;
    check_writable(path)
}

pub(super) fn make_folder(path: &Path) -> Result<(), TrainError> {
    fs::create_dir_all(path).map_err(|source| TrainError::Write { path: path.to_owned(), source })
}

/// Leaves what is there as it is.
fn check_writable(path: &Path) -> Result<(), TrainError> {
    let was_there = path.exists();
    let opened = OpenOptions::new().append(true).create(true).open(path);
    let left = opened.and_then(|_| if was_there { Ok(()) } else { fs::remove_file(path) });
    left.map_err(|source| TrainError::Write { path: path.to_owned(), source })
}
