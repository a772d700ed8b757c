//! Patterns to files to one stream of tokens.

use crate::folders::Folder;
use data::{Corpus, DataError, Part, Source, Tokenizer, resolve};
use std::{error::Error as _, path::Path};

fn load(base: &Path, patterns: &[&str]) -> Result<Corpus, DataError> {
    let patterns: Vec<String> = patterns.iter().map(|&p| p.to_owned()).collect();
    Corpus::load(&Source { base, patterns: &patterns, tokenizer: Tokenizer::Bytes, split: "1,0".parse().unwrap() })
}

#[test]
fn files_folders_and_globs_start_at_the_base_and_come_sorted_each_once() {
    let folder = Folder::new("sorted")
        .file("cfg/run.toml", "")
        .file("text/b.txt", "b")
        .file("text/a.txt", "a")
        .file("text/deep/er/c.txt", "c")
        .file("text/deep/d.md", "d")
        .file("other.txt", "o");
    let all = ["other.txt", "text/a.txt", "text/b.txt", "text/deep/d.md", "text/deep/er/c.txt"];
    assert_eq!(folder.resolve("cfg", &["../text", "../other.txt", "../cfg/../text/a.txt"]), all);
    assert_eq!(folder.resolve("cfg", &["../text/*.txt"]), ["text/a.txt", "text/b.txt"]);
    assert_eq!(folder.resolve("cfg", &["../text/**/*.txt"]), ["text/a.txt", "text/b.txt", "text/deep/er/c.txt"]);
    assert_eq!(folder.resolve("", &["t*/d?ep/[cd].md"]), ["text/deep/d.md"]);
    let absolute = folder.path().join("text/b.txt");
    assert_eq!(folder.resolve("cfg", &[absolute.to_str().unwrap()]), ["text/b.txt"]);
}

#[test]
fn build_output_runs_and_hidden_folders_are_never_read() {
    let folder = Folder::new("excluded")
        .file("w/src/a.rs", "a")
        .file("w/target/debug/build/b.rs", "b")
        .file("w/target-cuda/c.rs", "c")
        .file("w/runs/1/d.rs", "d")
        .file("w/mine/metrics.jsonl", "{}")
        .file("w/mine/e.rs", "e")
        .file("w/.git/f.rs", "f")
        .file("w/.g.rs", "g")
        .file("w/targets/h.rs", "h");
    let left = ["w/src/a.rs", "w/targets/h.rs"];
    assert_eq!(folder.resolve("", &["w"]), left);
    assert_eq!(folder.resolve("", &["w/**/*.rs"]), left);
    assert_eq!(folder.resolve("", &["*/*/*.rs"]), left);
    let error = resolve(folder.path(), &["w/*/d*/**/b.rs"]).unwrap_err().to_string();
    assert!(error.contains("'w/*/d*/**/b.rs', matches no file") && error.contains("(6 left out"), "{error}");
}

#[test]
fn what_is_written_out_is_taken_also_below_an_excluded_name() {
    let folder = Folder::new("written_out").file("target/.x/a.txt", "a").file("odd/b[1].txt", "b");
    assert_eq!(folder.resolve("", &["target/.x/a.txt"]), ["target/.x/a.txt"]);
    assert_eq!(folder.resolve("", &["target/.x/*.txt"]), ["target/.x/a.txt"]);
    assert_eq!(folder.resolve("", &["odd/b[1].txt"]), ["odd/b[1].txt"]);
}

#[cfg(unix)]
#[test]
fn a_linked_folder_that_leads_back_does_not_make_the_search_endless() {
    let folder = Folder::new("linked").file("a/b/x.txt", "x");
    std::os::unix::fs::symlink(folder.path().join("a"), folder.path().join("a/b/up")).unwrap();
    std::os::unix::fs::symlink(folder.path().join("a/b/x.txt"), folder.path().join("a/y.txt")).unwrap();
    assert_eq!(folder.resolve("", &["a"]), ["a/b/x.txt", "a/y.txt"]);
}

#[test]
fn each_bad_pattern_is_named_with_its_place_in_the_list() {
    let folder = Folder::new("bad_patterns").file("a.txt", "a").file("empty/.keep", "");
    let error = |patterns: &[&str]| resolve(folder.path(), patterns).unwrap_err();

    assert!(matches!(error(&[]), DataError::NoPatterns));
    let missing = error(&["a.txt", "b.txt"]);
    assert!(matches!(&missing, DataError::NotFound { position: 2, pattern, .. } if pattern == "b.txt"), "{missing}");
    assert!(missing.to_string().contains(folder.path().join("b.txt").to_str().unwrap()), "{missing}");
    // A weight in a list is not a file name in disguise: it is told where it stands.
    let weight = error(&["a.txt", "0.7", "a.txt"]);
    assert!(matches!(&weight, DataError::NotFound { position: 2, pattern, .. } if pattern == "0.7"), "{weight}");
    let unmatched = error(&["a.txt", "a.txt", "nowhere/*.txt"]);
    assert!(matches!(&unmatched, DataError::NoMatch { position: 3, pattern, .. } if pattern == "nowhere/*.txt"));
    assert!(matches!(error(&["empty"]), DataError::NoMatch { position: 1, excluded: 1, .. }));
    let glob = error(&["a***.txt"]);
    assert!(matches!(&glob, DataError::BadGlob { position: 1, .. }), "{glob}");
    assert!(glob.source().is_some());
    let base = resolve(&folder.path().join("gone"), &["a.txt"]).unwrap_err();
    assert!(matches!(&base, DataError::Read { path, .. } if path.ends_with("gone")), "{base}");
}

#[test]
fn the_stream_is_the_files_one_after_the_other() {
    let folder = Folder::new("stream").file("b.txt", "wörld").file("a.txt", "hello ").file("c.txt", "");
    let corpus = load(folder.path(), &["b.txt", "*.txt"]).unwrap();
    let names: Vec<_> = corpus.files().iter().map(|p| p.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, ["a.txt", "b.txt", "c.txt"]);
    assert_eq!(corpus.tokens(), 12);
    let windows = corpus.windows(Part::Train, 11).unwrap();
    let ids: Vec<i32> = windows.window(data::SampleId(0)).unwrap().collect();
    assert_eq!(Tokenizer::Bytes.decode(&ids), "hello wörld");
}

#[test]
fn a_file_that_is_no_text_is_named_with_the_offset_of_its_first_bad_byte() {
    let folder = Folder::new("no_text").file("a.txt", "fine").file("b.bin", b"ab\xC3\xA4\xFFz").file("c.txt", b"x\xE5");
    let error = load(folder.path(), &["."]).unwrap_err();
    assert!(matches!(&error, DataError::NotUtf8 { path, offset: 4, byte: 0xFF } if path.ends_with("b.bin")), "{error}");
    assert!(error.to_string().contains("offset 4 (0xff)"), "{error}");
    // Cut in the middle of a character: the offset is that of its beginning.
    let cut = load(folder.path(), &["c.txt"]).unwrap_err();
    assert!(matches!(cut, DataError::NotUtf8 { offset: 1, byte: 0xE5, .. }), "{cut}");
}
