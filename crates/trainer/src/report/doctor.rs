//! What this machine and this build have, and what is missing.

use device::cuda::{self, CudaError};

use crate::{
    config::{Config, DeviceKind},
    train::{Placement, RunPlan},
};
use std::{
    env::consts,
    fmt, fs,
    io::{IsTerminal, stderr},
    thread,
};

/// Something a run may want.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What it is.
    pub what: &'static str,
    /// What there is of it; `Err`: it is missing, and what that means.
    pub state: Result<String, String>,
}

/// A look at the machine and the build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doctor {
    /// One after the other.
    pub findings: Vec<Finding>,
}

impl Doctor {
    /// Looks.
    pub fn inspect() -> Doctor {
        let mut findings = vec![found("machine", format!("{} on {}", consts::OS, consts::ARCH))];
        findings.push(match cores() {
            Some(cores) => found("cores", format!("{cores} for this process; [device] threads defaults to that")),
            None => missing("cores", "the system does not tell; set [device] threads"),
        });
        findings.push(match memory() {
            Some(MemoryKib { total, available }) => {
                found("memory", format!("{:.1} GiB free of {:.1} GiB", gib(available), gib(total)))
            }
            None => missing("memory", "the system does not tell; `trainer plan` says what a run needs"),
        });
        findings.extend(container_limit());
        findings.extend(process_limits());
        findings.push(vector_units());
        findings.push(if cfg!(debug_assertions) {
            missing("optimised build", "this one is for debugging and slow; use cargo run --release")
        } else {
            found("optimised build", "yes".to_owned())
        });
        findings.extend(build());
        findings.push(if stderr().is_terminal() {
            found("terminal", "progress is a bar".to_owned())
        } else {
            missing("terminal", "progress is lines")
        });
        Doctor { findings }
    }

    /// Adds what a run of `config` would meet here.
    pub fn hold_against(&mut self, config: &Config, plan: &RunPlan) {
        let placement = Placement::of(config);
        let on_cards = config.device.kind == DeviceKind::Cuda;
        let placed = if on_cards { cards_compute(&placement, cuda::count_cards()) } else { threads_fit(&placement) };
        let has_cards = on_cards && placed.state.is_ok();
        self.findings.push(placed);
        self.findings.push(memory_fits(plan.bytes(), memory()));
        self.findings.extend(plan.hint.as_ref().map(|hint| missing("fast products", hint)));
        if has_cards {
            self.findings.push(algorithms(config.device.measure_products, plan.products.len()));
        }
        self.findings.push(match config.data.random_tokens {
            Some(tokens) => found("text", format!("{tokens} random tokens in its place")),
            None => match data::resolve(&config.data.base, &config.data.path) {
                Ok(files) => found("text", format!("{} files", files.len())),
                Err(error) => missing("text", &error.to_string()),
            },
        });
    }
}

fn found(what: &'static str, state: String) -> Finding {
    Finding { what, state: Ok(state) }
}

fn missing(what: &'static str, means: &str) -> Finding {
    Finding { what, state: Err(means.to_owned()) }
}

fn cores() -> Option<usize> {
    thread::available_parallelism().ok().map(usize::from)
}

fn memory() -> Option<MemoryKib> {
    available_memory(&fs::read_to_string("/proc/meminfo").ok()?)
}

/// What this build can do and what it cannot, a line each.
fn build() -> Vec<Finding> {
    let drivers =
        [DeviceKind::Cpu, DeviceKind::Sim, DeviceKind::Dry, DeviceKind::Cuda].map(|kind| kind.to_string()).join(", ");
    vec![
        found("drivers", drivers),
        match cuda::count_cards() {
            Ok(0) => missing("cuda driver", "it finds no card; device.kind = \"cuda\" cannot run here"),
            Ok(count) => found("cuda driver", format!("{count} card{}", if count == 1 { "" } else { "s" })),
            Err(error) => missing("cuda driver", &format!("{error}; device.kind = \"cuda\" cannot run here")),
        },
        found("local transport", "ranks are threads of this process".to_owned()),
        match cuda::find_nccl() {
            Ok(version) => found("nccl transport", version),
            Err(error) => missing("nccl transport", &format!("{error}; ranks on cards cannot meet")),
        },
        match cuda::find_cudnn() {
            Ok(version) => found("cudnn", version),
            Err(error) => {
                missing("cudnn", &format!("{error}; attention of bf16 on cards is by kernels of this program"))
            }
        },
        missing("mpi transport", "this version has none; a run stays on this machine"),
        missing("optional features", "mpi is not in this version, so none can be switched on"),
    ]
}

/// Cards for a configuration that wants some.
fn cards_compute(placement: &Placement, cards: Result<u32, CudaError>) -> Finding {
    let what = "cards";
    let why = match cards {
        Ok(0) => "this host has no card".to_owned(),
        Ok(cards) => return found(what, format!("{placement}: {cards} to compute")),
        Err(error) => error.to_string(),
    };
    missing(what, &format!("this configuration cannot run here, set device.kind = \"cpu\": {why}"))
}

/// Threads that compute against cores that they get.
fn threads_fit(placement: &Placement) -> Finding {
    let what = "threads";
    match placement.cores {
        _ if placement.device != DeviceKind::Cpu => found(what, format!("{placement}: one thing at a time")),
        Some(cores) if placement.workers > cores => {
            missing(what, &format!("{placement}: they take turns, and a run is slower than with threads = {cores}"))
        }
        Some(cores) if placement.workers < cores => {
            found(what, format!("{placement}: {} of them idle", cores - placement.workers))
        }
        _ => found(what, placement.to_string()),
    }
}

/// How algorithms for `shapes` shapes of products are chosen.
fn algorithms(measured: bool, shapes: usize) -> Finding {
    let what = "products";
    if measured {
        return found(what, format!("{shapes} shapes, whose algorithms are measured on a card once and kept"));
    }
    missing(
        what,
        &format!("{shapes} shapes by the library's first algorithm; [device] measure_products finds the fastest"),
    )
}

fn memory_fits(planned: usize, memory: Option<MemoryKib>) -> Finding {
    let planned = planned as u64 / 1024;
    match memory {
        Some(MemoryKib { available, .. }) if planned > available => {
            let text = format!("the run plans {:.2} GiB, {:.2} GiB are free", gib(planned), gib(available));
            missing("memory for the run", &text)
        }
        _ => found("memory for the run", format!("{:.2} GiB planned", gib(planned))),
    }
}

/// What a container may use, if it is less than the machine has.
fn container_limit() -> Option<Finding> {
    let bytes: u64 = fs::read_to_string("/sys/fs/cgroup/memory.max").ok()?.trim().parse().ok()?;
    Some(found("memory of the container", format!("{:.1} GiB at most", gib(bytes / 1024))))
}

/// Limits of the process (RLIMIT) that a run can meet.
fn process_limits() -> Vec<Finding> {
    let Ok(text) = fs::read_to_string("/proc/self/limits") else {
        return vec![missing("process limits", "the system does not tell")];
    };
    let wanted = [
        ("address space limit", "Max address space"),
        ("thread limit", "Max processes"),
        ("open file limit", "Max open files"),
        ("locked memory limit", "Max locked memory"),
    ];
    let finding = |(what, name): (&'static str, &str)| soft_limit(&text, name).map(|limit| found(what, limit));
    wanted.into_iter().filter_map(finding).collect()
}

/// The soft limit of a row of `/proc/self/limits`, with its unit.
fn soft_limit(limits: &str, name: &str) -> Option<String> {
    let mut words = limits.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace();
    let soft = words.next()?;
    let unit = words.nth(1).unwrap_or("");
    Some(if soft == "unlimited" { "none".to_owned() } else { format!("{soft} {unit}").trim().to_owned() })
}

impl fmt::Display for Doctor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.findings.iter().map(|finding| finding.what.len()).max().unwrap_or(0);
        for Finding { what, state } in &self.findings {
            match state {
                Ok(state) => writeln!(f, "there    {what:width$}  {state}")?,
                Err(means) => writeln!(f, "missing  {what:width$}  {means}")?,
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MemoryKib {
    total: u64,
    available: u64,
}

fn available_memory(meminfo: &str) -> Option<MemoryKib> {
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    Some(MemoryKib { total: field("MemTotal")?, available: field("MemAvailable")? })
}

fn gib(kib: u64) -> f64 {
    kib as f64 / f64::from(1 << 20)
}

#[cfg(target_arch = "x86_64")]
fn vector_units() -> Finding {
    let units = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
    ];
    let there: Vec<&str> = units.iter().filter(|(_, there)| *there).map(|(name, _)| *name).collect();
    let state = match there.is_empty() {
        true => Err("no avx2, fma or avx512f: products are slow".to_owned()),
        false => Ok(there.join(", ")),
    };
    Finding { what: "vector units", state }
}

#[cfg(not(target_arch = "x86_64"))]
fn vector_units() -> Finding {
    Finding { what: "vector units", state: Ok(format!("those of {}", consts::ARCH)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_the_fields_that_mean_it() {
        let text = "MemTotal:       16384256 kB\nMemFree:          123456 kB\nMemAvailable:    8192128 kB\n";
        assert_eq!(available_memory(text), Some(MemoryKib { total: 16_384_256, available: 8_192_128 }));
        assert_eq!(available_memory("MemTotal: 5 kB\n"), None);
        assert_eq!(available_memory("MemTotal: many kB\nMemAvailable: 5 kB\n"), None);
    }

    #[test]
    fn limits_are_read_from_the_rows_that_mean_them() {
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
                    Max processes             63480                63480                processes \n\
                    Max address space         unlimited            unlimited            bytes     \n\
                    Max locked memory         8388608              unlimited            bytes     \n";
        let limits = ["Max processes", "Max address space", "Max locked memory", "Max open files"];
        let limits = limits.map(|name| soft_limit(text, name));
        assert_eq!(limits, [Some("63480 processes".into()), Some("none".into()), Some("8388608 bytes".into()), None]);
    }

    #[test]
    fn more_threads_than_cores_and_more_memory_than_there_is_are_missing() {
        let placement =
            |workers| Placement { ranks: 2, axes: "dp=2".into(), device: DeviceKind::Cpu, workers, cores: Some(4) };
        assert!(threads_fit(&placement(6)).state.unwrap_err().contains("threads = 4"));
        assert!(threads_fit(&placement(3)).state.unwrap().ends_with("1 of them idle"));
        assert_eq!(threads_fit(&placement(4)).state.unwrap(), "2 ranks (dp=2) on cpu, 4 worker threads on 4 cores");
        let memory = Some(MemoryKib { total: 4 << 20, available: 1 << 20 });
        assert!(memory_fits(2 << 30, memory).state.unwrap_err().contains("plans 2.00 GiB, 1.00 GiB are free"));
        assert!(memory_fits(1 << 29, memory).state.is_ok());
        assert!(memory_fits(1 << 40, None).state.is_ok());
    }

    #[test]
    fn a_configuration_for_cards_cannot_run_where_there_is_none_and_is_told_what_can() {
        let placement =
            Placement { ranks: 1, axes: String::new(), device: DeviceKind::Cuda, workers: 0, cores: Some(4) };
        let no_driver = CudaError::Missing { library: "libcuda", what_for: "the NVIDIA driver" };
        for (cards, why) in [(Ok(0), "this host has no card"), (Err(no_driver), "there is no libcuda here")] {
            let Finding { what, state } = cards_compute(&placement, cards);
            let means = state.unwrap_err();
            let told = format!("this configuration cannot run here, set device.kind = \"cpu\": {why}");
            assert!(what == "cards" && means.starts_with(&told), "{means}");
        }
        assert_eq!(cards_compute(&placement, Ok(2)).state.unwrap(), "1 rank on cuda: 2 to compute");
    }

    #[test]
    fn what_is_said_of_a_configuration_for_cards_is_what_its_run_would_meet() {
        let text = "[model]\nlayers = 1\ndim = 64\nseq_len = 8\n[train]\nsteps = 1\nglobal_batch = 1\n\
                    [data]\nrandom_tokens = 1000\n[device]\nkind = \"cuda\"\n";
        let config = Config::parse(text, "a.toml".as_ref(), "/".as_ref(), &[""; 0]).unwrap();
        let mut doctor = Doctor { findings: Vec::new() };
        doctor.hold_against(&config, &crate::train::plan_run(&config).unwrap());
        let of = |what| doctor.findings.iter().find(|finding| finding.what == what);
        let has_cards = cuda::count_cards().is_ok_and(|cards| cards > 0);
        assert_eq!(of("cards").map(|cards| cards.state.is_ok()), Some(has_cards), "{doctor}");
        assert_eq!(of("products").is_some(), has_cards, "{doctor}");
        assert_eq!(of("threads"), None, "{doctor}");
    }

    #[test]
    fn every_finding_is_a_line_that_says_there_or_missing() {
        let doctor = Doctor::inspect();
        let text = doctor.to_string();
        assert_eq!(text.lines().count(), doctor.findings.len());
        for (line, finding) in text.lines().zip(&doctor.findings) {
            let word = if finding.state.is_ok() { "there " } else { "missing " };
            assert!(line.starts_with(word) && line.contains(finding.what), "{line}");
        }
        assert!(text.contains("cuda driver"));
    }
}
