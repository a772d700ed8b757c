//! What a run writes only at its end, made sure of before it begins.

use std::{
    fs::{self, OpenOptions},
    path::Path,
};

use super::run::TimelineConfig;
use crate::{TrainError, plot::curve_file, whole_file::half_of};

/// Makes the folders and tries the files, so that no run ends hours later without its picture.
///
/// # Errors
/// [`TrainError::Write`] with the file or folder.
pub(super) fn check_outputs(dir: &Path, timeline: Option<&TimelineConfig>) -> Result<(), TrainError> {
    make_folder(dir)?;
    check_writable(&curve_file(dir))?;
    let Some(TimelineConfig { path, .. }) = timeline else { return Ok(()) };
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).map_or(Ok(()), make_folder)?;
    check_writable(path)
}

pub(super) fn make_folder(path: &Path) -> Result<(), TrainError> {
    fs::create_dir_all(path).map_err(|source| TrainError::Write { path: path.to_owned(), source })
}

/// A file and what it is called while it is written.
fn check_writable(path: &Path) -> Result<(), TrainError> {
    try_to_open(path)?;
    if path.exists() && !path.is_file() { Ok(()) } else { try_to_open(&half_of(path)) }
}

/// Leaves what is there as it is.
fn try_to_open(path: &Path) -> Result<(), TrainError> {
    let was_there = path.exists();
    let opened = OpenOptions::new().append(true).create(true).open(path);
    let left = opened.and_then(|_| if was_there { Ok(()) } else { fs::remove_file(path) });
    left.map_err(|source| TrainError::Write { path: path.to_owned(), source })
}
