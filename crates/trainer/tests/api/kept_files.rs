//! Files that a command leaves are whole, also where the disk is full, and one that was cut is not taken for whole.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use crate::fixture::Folder;

fn trainer(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_trainer")).args(args).output().unwrap()
}

/// The same where no file grows above `blocks` of 512 or 1024 bytes: to the command it is as if the disk were full then.
fn confined(blocks: u32, args: &[&str]) -> Output {
    let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"");
    Command::new("/bin/sh").args(["-c", &script, env!("CARGO_BIN_EXE_trainer")]).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

const TRAIN: &str = "[layout]\ndp = 2\n[train]\nsteps = 3\nglobal_batch = 4\n[optimizer]\nlr = 1e-3\n";

#[test]
fn a_disk_that_gets_full_leaves_no_part_of_a_file_under_its_name() {
    let folder = Folder::with_config(TRAIN);
    let (config, out) = (folder.config(), folder.path().join("weights"));
    let [config, dir] = [&config, &out].map(|path| path.to_str().unwrap());
    let init = confined(16, &["init", config, "--out", dir]);
    assert_eq!(init.status.code(), Some(1), "{}", text(&init.stderr));
    assert!(text(&init.stderr).contains("model.safetensors'"), "{}", text(&init.stderr));
    assert_eq!(names(&out), [""; 0]);
    for (flag, command) in [("--trace", "verify"), ("--timeline", "plan")] {
        let path = out.join("kept");
        let output = confined(16, &[command, config, flag, path.to_str().unwrap()]);
        assert!(!output.status.success(), "{command}");
        assert!(text(&output.stderr).contains("weights/kept'"), "{}", text(&output.stderr));
        assert_eq!(names(&out), [""; 0], "{command}");
    }
}

#[test]
fn a_trace_that_was_cut_between_two_lines_is_not_called_clean() {
    let folder = Folder::with_config(TRAIN);
    let (config, path) = (folder.config(), folder.path().join("a.trace"));
    let [config, trace] = [&config, &path].map(|path| path.to_str().unwrap());
    assert!(trainer(&["verify", config, "--trace", trace]).status.success());
    assert!(trainer(&["verify", "--read", trace]).status.success());
    let whole = fs::read_to_string(&path).unwrap();
    let lines = whole.lines().count();
    for kept in [1, 100, lines - 1] {
        fs::write(&path, whole.split_inclusive('\n').take(kept).collect::<String>()).unwrap();
        let read = trainer(&["verify", "--read", trace]);
        assert_eq!((read.status.code(), text(&read.stdout)), (Some(2), String::new()), "{kept} of {lines} lines");
        let want = format!("a trace ends behind line {kept} and has no last line: the file was cut");
        assert!(text(&read.stderr).contains(&want), "{}", text(&read.stderr));
    }
}

#[test]
fn a_run_whose_timeline_cannot_be_written_tells_its_summary_and_sample_all_the_same() {
    let folder = Folder::with_config(TRAIN);
    let (config, run, timeline) = (folder.config(), folder.path().join("run"), folder.path().join("t.json"));
    let [config, dir, path] = [&config, &run, &timeline].map(|path| path.to_str().unwrap());
    let output = confined(64, &["train", config, "--run-dir", dir, "--timeline", path]);
    let (told, error) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.starts_with("error: cannot write '") && error.contains("t.json'"), "{error}");
    for line in ["3 steps, ", "loss curve: ", "metrics: ", "sample:\n//! "] {
        assert!(told.contains(line), "no '{line}' in\n{told}");
    }
    assert!(!told.contains("timeline: ") && !timeline.exists() && run.join("loss.svg").is_file(), "{told}");
}

#[test]
fn verify_without_anything_names_both_that_it_can_check() {
    let output = trainer(&["verify"]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(error.contains("<CONFIG|--read <FILE>>"), "{error}");
    let both = trainer(&["verify", "a.toml", "--read", "a.trace"]);
    assert!(text(&both.stderr).contains("cannot be used with"), "{}", text(&both.stderr));
}
