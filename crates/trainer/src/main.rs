//! The `trainer` command.
#![forbid(unsafe_code)]

use std::{
    io::{IsTerminal, stderr},
    process::ExitCode,
};

use clap::Parser;
use tracing_subscriber::{EnvFilter, fmt::format::FmtSpan};
use trainer::{Cli, Command, Outcome, StopSource, TrainError};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    // Spans are told when they end, with the time that they took.
    let lines = tracing_subscriber::fmt().with_span_events(FmtSpan::CLOSE);
    lines.with_env_filter(filter).with_writer(stderr).with_ansi(stderr().is_terminal()).init();
    // Only training asks whether it shall end; any other command ends as a process does.
    let stop = match &cli.command {
        Command::Train(_) => StopSource::signals().map_err(|source| TrainError::Signals { source }),
        _ => Ok(StopSource::Never),
    };
    match stop.and_then(|stop| trainer::run(&cli, stop)) {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        // As a shell tells of a process that the signal ended: whoever waits sees that training did not finish.
        Ok(Outcome::Stopped(signal)) => ExitCode::from(signal.exit_code()),
        Ok(Outcome::Found) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {:#}", anyhow::Error::new(error));
            ExitCode::from(cli.error_code())
        }
    }
}
