//! What each command does.

use std::io::{self, Write};

use crate::{
    Cli, Clock, Command, Config, Detail, DeviceKind, Doctor, DoctorArgs, GroupsArgs, InitArgs, PlanArgs, RunEnd,
    RunOptions, Signal, StopSource, TrainArgs, TrainError, VerifyArgs,
    train::{default_run_dir, dry_run, plan_run, planned_detail, train, write_initial_weights},
    verify::{verify_file, verify_run},
    whole_file::write_whole,
    write_timeline,
};

/// How a command ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It has done what it was asked for.
    Done,
    /// Training was asked to end before its last step, and has.
    Stopped(Signal),
    /// What was to be verified has findings, which were printed.
    Found,
}

/// Runs a command and prints its result to standard output. `stop` may end training early.
///
/// # Errors
/// Whatever keeps it from its result.
pub fn run(cli: &Cli, stop: StopSource) -> Result<Outcome, TrainError> {
    match &cli.command {
        Command::Train(args) => return run_train(args, stop),
        Command::Groups(args) => print(&groups_text(args)?)?,
        Command::Plan(args) => run_plan(args)?,
        Command::Init(args) => run_init(args)?,
        Command::Verify(args) => return run_verify(args),
        Command::Doctor(args) => run_doctor(args)?,
    }
    Ok(Outcome::Done)
}

fn run_train(args: &TrainArgs, stop: StopSource) -> Result<Outcome, TrainError> {
    check_launcher()?;
    let config = args.config.load()?;
    if config.device.kind == DeviceKind::Cuda {
        // Before CUDA is called the first time. Starts the program again where its environment lacks something.
        device::cuda::prepare_for(config.ranks().world_size()).map_err(|source| TrainError::Prepare { source })?;
    }
    let dir = args.run_dir.clone().unwrap_or_else(|| default_run_dir(&args.config.config));
    let detail = if args.verbose { Detail::Full } else { Detail::Brief };
    let options = RunOptions { dir, lines: Box::new(io::stdout()), stop, timeline: args.timeline(), detail };
    let trained = match train(&config, options) {
        // What it has is worth as much as before.
        Err(TrainError::Unwritten { trained, source }) => {
            print(&trained.to_string())?;
            return Err(*source);
        }
        trained => trained?,
    };
    print(&trained.to_string())?;
    Ok(match trained.end {
        RunEnd::Finished => Outcome::Done,
        RunEnd::Stopped(signal) => Outcome::Stopped(signal),
    })
}

/// A process among several must not train as if it were alone.
fn check_launcher() -> Result<(), TrainError> {
    match pgroups::World::from_process_env() {
        Ok(world) if world.world_size > 1 => Err(TrainError::SeveralProcesses { world_size: world.world_size }),
        // Read first: without it nobody launched this process.
        Ok(_) | Err(pgroups::PlanError::VariableMissing { variable: "WORLD_SIZE", .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn run_plan(args: &PlanArgs) -> Result<(), TrainError> {
    let config = args.config.load()?;
    let (plan, trace, names) = dry_run(&config)?;
    print(&plan.to_string())?;
    if args.verbose {
        print(&planned_detail(&config, &plan)?)?;
    }
    let Some(path) = &args.timeline else { return Ok(()) };
    write_timeline(path, &trace, Clock::Steps, &names)?;
    print(&format!("timeline: {}\n", path.display()))
}

fn run_init(args: &InitArgs) -> Result<(), TrainError> {
    let [weights, config] = write_initial_weights(&args.config.load()?, &args.out)?;
    print(&format!("weights: {}\nconfig: {}\n", weights.display(), config.display()))
}

fn run_verify(args: &VerifyArgs) -> Result<Outcome, TrainError> {
    let verified = match (&args.read, &args.config) {
        (Some(path), _) => verify_file(path, args)?,
        (None, Some(path)) => verify_run(&Config::load(path, &args.set)?, args)?,
        (None, None) => unreachable!("BUG: the command line has one of them"),
    };
    print(&verified.text)?;
    for (path, text) in &verified.files {
        write_whole(path, text.as_bytes())?;
    }
    Ok(if verified.is_clean { Outcome::Done } else { Outcome::Found })
}

fn run_doctor(args: &DoctorArgs) -> Result<(), TrainError> {
    let mut doctor = Doctor::inspect();
    if let Some(path) = &args.config {
        let config = Config::load(path, &args.set)?;
        doctor.hold_against(&config, &plan_run(&config)?);
    }
    print(&doctor.to_string())
}

/// The group lists of a layout, as one JSON object or a line per key.
fn groups_text(args: &GroupsArgs) -> Result<String, TrainError> {
    let report = pgroups::groups_report(&args.layout()?)?;
    if !args.json {
        return Ok(report.to_string());
    }
    let ranks = |group: &Vec<pgroups::GlobalRank>| group.iter().map(|rank| rank.0).collect::<Vec<u32>>();
    let lists = report.iter().map(|(key, groups)| {
        let groups: Vec<Vec<u32>> = groups.iter().map(ranks).collect();
        (key.to_string(), serde_json::Value::from(groups))
    });
    let object: serde_json::Map<String, serde_json::Value> = lists.collect();
    Ok(format!("{}\n", serde_json::Value::Object(object)))
}

fn print(text: &str) -> Result<(), TrainError> {
    let written = io::stdout().lock().write_all(text.as_bytes());
    written.map_err(|source| TrainError::Print { source })
}
