//! Who may depend on whom, and where unsafe code and the CUDA bindings live.

use super::tree::{Finding, Tree, crate_of};

/// The crates in layers: a crate depends on crates of lower layers only, its tests and examples too. So `gtp` and
/// `ddp` do not know each other, and every crate can be used without those above it.
const LAYERS: &[&[&str]] = &[
    &["device"],
    &["pgroups"],
    &["graphcap"],
    &["gtp", "ddp"],
    &["model", "pipeline", "checkpoint", "data"],
    &["trainer"],
    &["tests"],
];

/// Where unsafe code may stand (a file, or a folder), and why there.
const UNSAFE_HOMES: &[(&str, &str)] = &[
    ("crates/device/src/cpu", "hands out slices of arena memory once their regions are claimed"),
    ("crates/device/src/testing", "unit tests look into memory that only they know"),
    ("crates/device/src/ops/trial", "unit tests run kernels on memory that only they know"),
    ("crates/device/src/cuda", "calls the driver"),
    ("crates/device/benches/launches/plain", "calls the driver as a program without this crate would"),
    ("crates/pgroups/benches/nccl/plain", "calls NCCL as a program without this crate would"),
    ("crates/pgroups/src/nccl", "calls NCCL"),
    ("crates/pgroups/src/mpi", "calls MPI"),
];

fn layer(name: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&name))
}

struct Dependency<'t> {
    line: usize,
    /// The package, also when it is renamed.
    name: &'t str,
    from_workspace: bool,
}

/// The dependencies in a manifest, of all kinds and targets.
fn dependencies(manifest: &str) -> Vec<Dependency<'_>> {
    let mut found: Vec<Dependency<'_>> = Vec::new();
    // In a section `[dependencies.x]` the lines below are x's, not names.
    let (mut in_list, mut in_table) = (false, false);
    for (number, line) in manifest.lines().enumerate() {
        let line = line.split('#').next().unwrap_or("").trim();
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']').trim();
            in_list = section.ends_with("dependencies") && section != "workspace.dependencies";
            let table = section.rsplit_once("dependencies.").filter(|(head, _)| !head.starts_with("workspace."));
            in_table = table.is_some();
            if let Some((_, name)) = table {
                found.push(Dependency { line: number + 1, name, from_workspace: false });
            }
            continue;
        }
        let Some((key, value)) = line.split_once('=') else { continue };
        let (key, value) = (key.trim(), value.trim());
        if in_list {
            let name = key.split('.').next().unwrap_or(key);
            let name = quoted_after(value, "package").unwrap_or(name);
            let from_workspace = key.ends_with(".workspace") || value.replace(' ', "").contains("workspace=true");
            found.push(Dependency { line: number + 1, name, from_workspace });
        } else if in_table && let Some(last) = found.last_mut() {
            match key {
                "workspace" => last.from_workspace = value == "true",
                "package" => last.name = value.trim_matches('"'),
                _ => {}
            }
        }
    }
    found
}

fn quoted_after<'t>(value: &'t str, key: &str) -> Option<&'t str> {
    let rest = value.split_once(key)?.1.trim_start().strip_prefix('=')?;
    rest.trim_start().strip_prefix('"')?.split('"').next()
}

fn manifests(tree: &Tree) -> impl Iterator<Item = (&str, &str, &str)> {
    tree.with_ending("Cargo.toml").filter_map(|(path, text)| {
        let owner = if path == "tests/Cargo.toml" { "tests" } else { crate_of(path)? };
        Some((path, owner, text))
    })
}

pub(crate) fn dependencies_point_down(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, owner, text) in manifests(tree) {
        let Some(own) = layer(owner) else {
            found.push(Finding::new(path, 0, format!("`{owner}` is in no layer: place it in LAYERS of boundaries.rs")));
            continue;
        };
        for d in dependencies(text) {
            if layer(d.name).is_some_and(|other| other >= own) {
                let what = format!("`{owner}` may not depend on `{}`: dependencies point down", d.name);
                found.push(Finding::new(path, d.line, what));
            }
        }
    }
    found
}

/// One version of each dependency, in the root manifest, where a decision page explains it.
pub(crate) fn versions_come_from_the_workspace(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, _, text) in manifests(tree) {
        for d in dependencies(text).into_iter().filter(|d| !d.from_workspace) {
            let what = format!("`{}` is not `workspace = true`: its version belongs in the root manifest", d.name);
            found.push(Finding::new(path, d.line, what));
        }
    }
    found
}

pub(crate) fn cudarc_has_two_homes(tree: &Tree) -> Vec<Finding> {
    let at_home = |path: &str| matches!(crate_of(path), Some("device" | "pgroups"));
    let what = "`cudarc` is named in device and pgroups only";
    let mut found = Vec::new();
    for (path, text) in tree.rust().filter(|(p, _)| !at_home(p)) {
        found.extend(text.lines_with("cudarc").into_iter().map(|line| Finding::new(path, line, what)));
    }
    for (path, _, text) in manifests(tree).filter(|(p, ..)| !at_home(p)) {
        let named = dependencies(text).into_iter().filter(|d| d.name == "cudarc");
        found.extend(named.map(|d| Finding::new(path, d.line, what)));
    }
    found
}

/// Every crate but device and pgroups, and every binary.
pub(crate) fn upper_crates_forbid_unsafe(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, text) in tree.rust() {
        let is_root = crate_of(path).is_some_and(|name| {
            let file = &path["crates/".len() + name.len()..];
            !["device", "pgroups"].contains(&name)
                && (["/src/lib.rs", "/src/main.rs"].contains(&file) || file.starts_with("/src/bin/"))
        });
        let squeezed: String = text.code.split_whitespace().collect();
        if is_root && !squeezed.contains("#![forbid(unsafe_code)]") {
            found.push(Finding::new(path, 1, "no `#![forbid(unsafe_code)]`"));
        }
    }
    found
}

pub(crate) fn unsafe_code_has_an_address(tree: &Tree) -> Vec<Finding> {
    let at_home = |path: &str| {
        UNSAFE_HOMES.iter().any(|(home, _)| {
            path.strip_prefix(home).is_some_and(|rest| rest == ".rs" || rest.starts_with('/') || rest.is_empty())
        })
    };
    let mut found = Vec::new();
    for (path, text) in tree.rust().filter(|(p, _)| !at_home(p)) {
        let what = "unsafe code outside its homes (UNSAFE_HOMES of boundaries.rs)";
        found.extend(text.lines_with("unsafe").into_iter().map(|line| Finding::new(path, line, what)));
    }
    found
}

mod tests {
    use super::*;

    fn names(manifest: &str) -> Vec<(&str, bool)> {
        dependencies(manifest).into_iter().map(|d| (d.name, d.from_workspace)).collect()
    }

    #[test]
    fn dependencies_of_every_kind_and_spelling_are_read() {
        let manifest = "[package]\nname = \"x\"\n[dependencies]\na.workspace = true\nb = { workspace = true }\n\
                        c = \"1\" # one\n[dev-dependencies]\nother = { package = \"gtp\", path = \"../gtp\" }\n\
                        [target.'cfg(loom)'.dependencies]\nloom.workspace = true\n\
                        [build-dependencies.ddp]\nworkspace = true\n[features]\nd = []\n";
        let expected = [("a", true), ("b", true), ("c", false), ("gtp", false), ("loom", true), ("ddp", true)];
        assert_eq!(names(manifest), expected);
    }

    #[test]
    fn the_shared_list_itself_is_no_dependency() {
        assert!(names("[workspace.dependencies]\na = \"1\"\n[workspace.dependencies.b]\nversion = \"1\"\n").is_empty());
    }

    #[test]
    fn upward_and_sideways_dependencies_are_noticed_also_in_tests() {
        for (owner, dependency, allowed) in [
            ("pgroups", "device", true),
            ("device", "pgroups", false),
            ("gtp", "ddp", false),
            ("ddp", "gtp", false),
            ("ddp", "graphcap", true),
            ("graphcap", "ddp", false),
            ("model", "data", false),
            ("trainer", "model", true),
            ("model", "tests", false),
            ("device", "half", true),
        ] {
            for kind in ["dependencies", "dev-dependencies"] {
                let (path, text) =
                    (format!("crates/{owner}/Cargo.toml"), format!("[{kind}]\n{dependency}.workspace = true\n"));
                let found = dependencies_point_down(&Tree::of(&[(&path, &text)]));
                assert_eq!(found.is_empty(), allowed, "{owner} -> {dependency} in [{kind}]: {found:?}");
            }
        }
    }

    #[test]
    fn a_crate_without_a_layer_is_noticed() {
        let found = dependencies_point_down(&Tree::of(&[("crates/misc/Cargo.toml", "[package]\n")]));
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn private_versions_are_noticed() {
        let manifest = "[dependencies]\nhalf = \"2\"\nglob.workspace = true\n";
        let found = versions_come_from_the_workspace(&Tree::of(&[("crates/data/Cargo.toml", manifest)]));
        assert_eq!(found.iter().map(|f| f.line).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn cudarc_is_noticed_outside_its_homes_in_code_and_manifests() {
        let code = "use cudarc::nccl; // cudarc\n";
        let manifest = "[dependencies]\ncudarc.workspace = true\n";
        let tree = Tree::of(&[
            ("crates/device/src/cuda/raw.rs", code),
            ("crates/device/Cargo.toml", manifest),
            ("crates/pgroups/src/nccl.rs", code),
            ("crates/trainer/src/lib.rs", code),
            ("crates/trainer/Cargo.toml", manifest),
            ("crates/ddp/src/lib.rs", "//! Not through cudarc.\n"),
        ]);
        let paths: Vec<String> = cudarc_has_two_homes(&tree).into_iter().map(|f| f.path).collect();
        assert_eq!(paths, ["crates/trainer/src/lib.rs", "crates/trainer/Cargo.toml"]);
    }

    #[test]
    fn a_root_that_does_not_forbid_unsafe_is_noticed() {
        let tree = Tree::of(&[
            ("crates/ddp/src/lib.rs", "// #![forbid(unsafe_code)]\n"),
            ("crates/gtp/src/lib.rs", "//! G.\n#![forbid( unsafe_code )]\n"),
            ("crates/gtp/src/shard.rs", ""),
            ("crates/trainer/src/main.rs", "#![deny(unsafe_code)]\n"),
            ("crates/trainer/src/bin/x.rs", ""),
            ("crates/device/src/lib.rs", ""),
            ("crates/pgroups/src/lib.rs", ""),
        ]);
        let paths: Vec<String> = upper_crates_forbid_unsafe(&tree).into_iter().map(|f| f.path).collect();
        assert_eq!(paths, ["crates/ddp/src/lib.rs", "crates/trainer/src/bin/x.rs", "crates/trainer/src/main.rs"]);
    }

    #[test]
    fn unsafe_code_is_noticed_outside_its_homes_only() {
        let code = "// SAFETY: none\nunsafe impl Send for X {}\n#![deny(unsafe_op_in_unsafe_fn)]\n";
        let tree = Tree::of(&[
            ("crates/device/src/cpu.rs", code),
            ("crates/device/src/cpu/arena.rs", code),
            ("crates/device/src/cpu_time.rs", code),
            ("crates/device/src/stream.rs", code),
            ("crates/pgroups/src/mpi.rs", code),
            ("crates/pgroups/src/local.rs", code),
            ("crates/device/tests/api.rs", code),
        ]);
        let found: Vec<(String, usize)> =
            unsafe_code_has_an_address(&tree).into_iter().map(|f| (f.path, f.line)).collect();
        let expected =
            ["device/src/cpu_time.rs", "device/src/stream.rs", "device/tests/api.rs", "pgroups/src/local.rs"];
        assert_eq!(found, expected.map(|p| (format!("crates/{p}"), 2)));
    }
}
