//! What each command does.

use std::io::{self, Write};

use crate::{
    Cli, Command, ConfigArgs, Doctor, GroupsArgs, TrainArgs, TrainError,
    train::{default_run_dir, plan_run, train},
};

/// Runs a command and prints its result to standard output.
///
/// # Errors
/// Whatever keeps it from its result.
pub fn run(cli: &Cli) -> Result<(), TrainError> {
    match &cli.command {
        Command::Train(args) => run_train(args),
        Command::Groups(args) => print(&groups_text(args)?),
        Command::Plan(args) => run_plan(&args.config),
        Command::Doctor(_) => print(&Doctor::inspect().to_string()),
    }
}

fn run_train(args: &TrainArgs) -> Result<(), TrainError> {
    let config = args.config.load()?;
    let dir = args.run_dir.clone().unwrap_or_else(|| default_run_dir(&args.config.config));
    let trained = train(&config, &dir, Box::new(io::stdout()))?;
    print(&trained.to_string())
}

fn run_plan(args: &ConfigArgs) -> Result<(), TrainError> {
    print(&plan_run(&args.load()?)?.to_string())
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
