//! Traces of the machine on which something was written.

use super::tree::{Finding, Tree, line_of};

/// Spelled in pieces, so that this file passes its own check.
const MACHINE_PATHS: &[&str] =
    &[concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/tm", "p/"), concat!("/ho", "me/"), concat!("/fa", "rm/")];

/// Hosts that every reader can reach. A new public one is added here; a mirror or a proxy is not.
const PUBLIC_HOSTS: &[&str] = &[
    "arxiv.org",
    "crates.io",
    "doc.rust-lang.org",
    "docs.nvidia.com",
    "docs.rs",
    "github.com",
    "keepachangelog.com",
    "rustup.rs",
    "semver.org",
    "ui.perfetto.dev",
    "www.apache.org",
    "www.w3.org",
];

pub(crate) fn no_path_of_one_machine(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, text) in tree.all() {
        for machine_path in MACHINE_PATHS {
            for (at, _) in text.match_indices(machine_path).filter(|(at, _)| starts_a_path(&text[..*at])) {
                let what = format!("`{machine_path}` exists on one machine only; tests use std::env::temp_dir()");
                found.push(Finding::new(path, line_of(text, at), what));
            }
        }
    }
    found
}

/// Whether a path begins behind `before`, instead of going on.
fn starts_a_path(before: &str) -> bool {
    let goes_on = |c: char| c.is_alphanumeric() || "_-.~/}*$)".contains(c);
    before.ends_with("file://") || !before.ends_with(goes_on)
}

pub(crate) fn hosts_are_public(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, text) in tree.all() {
        for (at, _) in text.match_indices("://") {
            let scheme = text[..at].rsplit(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or("");
            let rest = &text[at + "://".len()..];
            let host = rest.split(|c: char| !(c.is_ascii_alphanumeric() || "-.:@[]".contains(c))).next().unwrap_or("");
            let host = host.trim_end_matches(['.', ':', ')', ']']);
            // `scheme://{placeholder}` and a bare "://" in code name no host.
            let names_host = !host.is_empty() && ["http", "https", "git", "ssh", "ftp"].contains(&scheme);
            if names_host && !PUBLIC_HOSTS.contains(&host) {
                let what = format!("host `{host}` is not in PUBLIC_HOSTS of traces.rs");
                found.push(Finding::new(path, line_of(text, at), what));
            }
        }
        // Where packages come from is the user's setting, not the repository's.
        if path.contains(".cargo/") || path.ends_with("pip.conf") {
            found.push(Finding::new(path, 0, "a registry setting: it belongs to the machine"));
        }
    }
    found
}

mod tests {
    use super::*;

    #[test]
    fn paths_of_a_machine_are_noticed_wherever_they_begin() {
        for template in ["cd {}x\n", "\"{}x\"\n", "see `{}x`\n", "--dir={}x\n", "(file://{}x)\n", "{}x"] {
            for machine_path in MACHINE_PATHS {
                let text = template.replace("{}", machine_path);
                let found = no_path_of_one_machine(&Tree::of(&[("a.md", &text)]));
                assert_eq!(found.len(), 1, "{text}");
            }
        }
    }

    #[test]
    fn paths_that_go_on_are_not_a_machine_s() {
        let tails = ["crates{}x", "../..{}x", "${TARGET}{}x", "~{}x", "https://github.com{}x", "{dir}{}x"];
        for (template, machine_path) in tails.iter().zip(MACHINE_PATHS.iter().cycle()) {
            let (head, tail) = template.rsplit_once("{}").unwrap();
            let text = format!("{head}{machine_path}{tail}");
            assert!(no_path_of_one_machine(&Tree::of(&[("a.md", &text)])).is_empty(), "{text}");
        }
    }

    #[test]
    fn hosts_outside_the_list_are_noticed() {
        let url = |scheme: &str, rest: &str| format!("{scheme}://{rest}");
        for bad in [
            "mirror.example/simple",
            "10.0.0.7:8080/index",
            "localhost:3000",
            "github.com.example/x",
            "user@host.example/x",
        ] {
            let text = url("https", bad);
            assert_eq!(hosts_are_public(&Tree::of(&[("a.toml", &text)])).len(), 1, "{text}");
        }
        for good in [
            url("https", "github.com/a/b"),
            url("registry+https", "github.com/rust-lang/x"),
            url("tcp", "{host}"),
            url("http", "www.w3.org."),
        ] {
            assert!(hosts_are_public(&Tree::of(&[("a.toml", &good)])).is_empty(), "{good}");
        }
    }

    #[test]
    fn registry_settings_are_noticed() {
        assert_eq!(hosts_are_public(&Tree::of(&[(".cargo/config.toml", "")])).len(), 1);
    }
}
