//! Checks of the repository that lints cannot make. They read files as text, so they run in a second and also
//! when a crate does not build.
//!
//! A rule is a function from a [`Tree`] to its findings, listed in [`RULES`] under its name. Every rule has a test
//! with a planted offender, and `every_rule_notices_its_offender` fails for a rule that has none.

mod boundaries; // who may depend on whom, where unsafe code and cudarc live
mod crate_files; // sizes, README files, re-exports
mod pages; // features, links, names of tests, decisions
mod rust_text; // a source file with its comments and literals set apart
mod state; // statics, thread-locals, environment variables, left-overs
mod traces; // paths of one machine, hosts that are not public
mod tree; // the files of a repository, in memory

use self::tree::{Finding, Tree};
use std::path::Path;

type Rule = fn(&Tree) -> Vec<Finding>;

const RULES: &[(&str, Rule)] = &[
    ("file-size", crate_files::no_file_is_too_long),
    ("readme", crate_files::every_crate_has_a_readme),
    ("glob-reexport", crate_files::lib_files_name_what_they_export),
    ("static", state::statics_are_plain_data),
    ("thread-local", state::nothing_is_thread_local),
    ("environment", state::environment_is_read_in_few_places),
    ("left-over", state::nothing_is_left_over),
    ("layers", boundaries::dependencies_point_down),
    ("shared-version", boundaries::versions_come_from_the_workspace),
    ("cudarc", boundaries::cudarc_has_two_homes),
    ("forbid-unsafe", boundaries::upper_crates_forbid_unsafe),
    ("unsafe", boundaries::unsafe_code_has_an_address),
    ("machine-path", traces::no_path_of_one_machine),
    ("host", traces::hosts_are_public),
    ("feature-rows", pages::feature_rows_are_complete),
    ("invariants", pages::invariants_are_guarded),
    ("named-test", pages::named_tests_exist),
    ("link", pages::links_and_page_names_resolve),
    ("decision", pages::decisions_are_whole_and_cover_dependencies),
];

/// All findings of all rules under `root`, each marked with its rule.
fn scan(root: &Path) -> Vec<(&'static str, Finding)> {
    let tree = Tree::read(root).expect("the repository can be read");
    RULES.iter().flat_map(|(name, rule)| rule(&tree).into_iter().map(move |f| (*name, f))).collect()
}

mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    fn repository() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
    }

    fn report(findings: &[(&str, Finding)]) -> String {
        findings.iter().map(|(rule, f)| format!("\n  [{rule}] {f}")).collect()
    }

    #[test]
    fn the_repository_is_tidy() {
        let root = repository();
        assert!(root.join("Cargo.toml").is_file(), "{} is not the repository", root.display());
        let findings = scan(&root);
        assert!(findings.is_empty(), "{} findings:{}", findings.len(), report(&findings));
    }

    /// A small repository that keeps every rule.
    fn clean() -> Vec<(&'static str, String)> {
        let decision = "# 0001\n## Problem\n## Constraints\n## Decision\n`half`\n## What we gave up\n";
        let device = "//! Device.\nmod cpu;\n\n#[test]\nfn holds() {}\n";
        let upper = "#![forbid(unsafe_code)]\n//! Upper.\nstatic NAMES: [&str; 2] = [\"a\", \"b\"];\n";
        vec![
            ("Cargo.toml", "[workspace.dependencies]\ndevice = { path = \"crates/device\" }\nhalf = \"2\"\n".into()),
            (
                "crates/device/Cargo.toml",
                "[package]\nname = \"device\"\n[dependencies]\nhalf.workspace = true\n".into(),
            ),
            ("crates/device/README.md", "# device\n[map](../../docs/features.md)\n".into()),
            ("crates/device/src/lib.rs", device.into()),
            ("crates/device/src/cpu.rs", "fn f(p: *const u8) -> u8 { unsafe { *p } }\n".into()),
            ("crates/gtp/Cargo.toml", "[package]\nname = \"gtp\"\n[dependencies]\ndevice.workspace = true\n".into()),
            ("crates/gtp/README.md", "# gtp\n".into()),
            ("crates/gtp/src/lib.rs", upper.into()),
            ("docs/features.md", pages::complete_features("`crates/device/src/lib.rs::holds`")),
            ("docs/architecture.md", pages::complete_invariants("milestone: pipeline")),
            ("docs/decisions/0001-x.md", decision.into()),
        ]
    }

    /// One offence per rule: the file and what is appended to it (a new file if the repository has none of that name).
    fn offenders() -> Vec<(&'static str, &'static str, String)> {
        let gtp = "crates/gtp/src/lib.rs";
        vec![
            ("file-size", "crates/gtp/src/long.rs", "//\n".repeat(1_001)),
            ("readme", "crates/bare/src/lib.rs", "#![forbid(unsafe_code)]\n".into()),
            ("glob-reexport", gtp, "pub use inner::*;\n".into()),
            ("static", gtp, "static N: AtomicU64 = AtomicU64::new(0);\n".into()),
            ("thread-local", gtp, "thread_local! {}\n".into()),
            ("environment", gtp, "fn rank() { std::env::var(\"RANK\"); }\n".into()),
            ("left-over", gtp, concat!("fn later() { to", "do!() }\n").into()),
            ("layers", "crates/gtp/Cargo.toml", "ddp.workspace = true\n".into()),
            ("shared-version", "crates/gtp/Cargo.toml", "rand = \"0.9\"\n".into()),
            ("cudarc", gtp, "use cudarc::driver;\n".into()),
            ("forbid-unsafe", "crates/model/src/lib.rs", "//! Model.\n".into()),
            ("unsafe", gtp, "unsafe fn free() {}\n".into()),
            ("machine-path", "run.sh", concat!("cd /wo", "rk/main\n").into()),
            ("host", "run.sh", concat!("curl https", "://mirror.example/index\n").into()),
            ("feature-rows", "docs/features.md", "| PG-01 | again | later: twice |\n".into()),
            ("invariants", "docs/architecture.md", "| 16 | again | later |\n".into()),
            ("named-test", "docs/guide.md", "`crates/device/src/lib.rs::gone`\n".into()),
            ("link", "docs/guide.md", "[lost](nowhere.md)\n".into()),
            ("decision", "Cargo.toml", "tokio = \"1\"\n".into()),
        ]
    }

    fn plant(name: &str, files: &[(&'static str, String)]) -> PathBuf {
        let root = std::env::temp_dir().join(format!("tidy-{name}-{}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn a_clean_repository_has_no_findings() {
        let root = plant("clean", &clean());
        let findings = scan(&root);
        std::fs::remove_dir_all(root).unwrap();
        assert!(findings.is_empty(), "{}", report(&findings));
    }

    #[test]
    fn every_rule_notices_its_offender() {
        let offenders = offenders();
        let planned: BTreeSet<&str> = offenders.iter().map(|(rule, ..)| *rule).collect();
        let all: BTreeSet<&str> = RULES.iter().map(|(name, _)| *name).collect();
        assert_eq!(planned, all, "a rule without an offender here may be blind");
        for (rule, path, text) in offenders {
            let mut files = clean();
            match files.iter_mut().find(|(p, _)| *p == path) {
                Some((_, old)) => old.push_str(&text),
                None => files.push((path, text)),
            }
            let root = plant(rule, &files);
            let findings = scan(&root);
            std::fs::remove_dir_all(root).unwrap();
            let hit = findings.iter().any(|(r, f)| *r == rule && (f.path == path || path.starts_with(&f.path)));
            assert!(hit, "[{rule}] missed its offender in {path}:{}", report(&findings));
        }
    }

    #[test]
    fn build_output_and_run_folders_are_not_read() {
        let mut files = clean();
        let bad = "unsafe fn free() {}\n";
        files.extend(["target/x.rs", "target-miri/x.rs", "runs/x.rs", ".git/x.rs"].map(|p| (p, bad.to_string())));
        let root = plant("ignored", &files);
        let findings = scan(&root);
        std::fs::remove_dir_all(root).unwrap();
        assert!(findings.is_empty(), "{}", report(&findings));
    }
}
