//! What this machine and this build have, and what is missing.

use crate::config::DeviceKind;
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
        let found = |what, state: String| Finding { what, state: Ok(state) };
        let missing = |what, means: &str| Finding { what, state: Err(means.to_owned()) };
        let mut findings = vec![found("machine", format!("{} on {}", consts::OS, consts::ARCH))];
        findings.push(match thread::available_parallelism() {
            Ok(cores) => found("cores", format!("{cores} for this process; [device] threads defaults to that")),
            Err(_) => missing("cores", "the system does not tell; set [device] threads"),
        });
        let memory = fs::read_to_string("/proc/meminfo").ok().and_then(|text| available_memory(&text));
        findings.push(match memory {
            Some(MemoryKib { total, available }) => {
                found("memory", format!("{:.1} GiB free of {:.1} GiB", gib(available), gib(total)))
            }
            None => missing("memory", "the system does not tell; `trainer plan` says what a run needs"),
        });
        findings.push(vector_units());
        findings.push(if cfg!(debug_assertions) {
            missing("optimised build", "this one is for debugging and slow; use cargo run --release")
        } else {
            found("optimised build", "yes".to_owned())
        });
        let drivers = [DeviceKind::Cpu, DeviceKind::Sim, DeviceKind::Dry].map(|kind| kind.to_string()).join(", ");
        findings.push(found("drivers", drivers));
        findings.push(missing("cuda driver", "this version has none; runs are on the CPU"));
        findings.push(found("transport", "local: ranks are threads of this process".to_owned()));
        findings.push(missing("nccl and mpi transports", "this version has none; a run stays on this machine"));
        findings.push(if stderr().is_terminal() {
            found("terminal", "progress is a bar".to_owned())
        } else {
            missing("terminal", "progress is lines")
        });
        Doctor { findings }
    }
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

#[derive(Debug, PartialEq, Eq)]
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
