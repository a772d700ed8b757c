//! Commands and their arguments.

use crate::{config::Config, error::TrainError, train::TimelineConfig};
use clap::{ArgGroup, Args, Parser, Subcommand};
use pgroups::{Layout, LayoutConfig};
use std::{
    ops::{Range, RangeInclusive},
    path::PathBuf,
};

/// Trains language models over many ranks.
#[derive(Clone, Debug, PartialEq, Parser)]
#[command(name = "trainer", version, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// A command.
#[derive(Clone, Debug, PartialEq, Subcommand)]
pub enum Command {
    /// Train a model as a configuration says.
    Train(TrainArgs),
    /// Show which ranks form which process groups.
    Groups(GroupsArgs),
    /// Show sizes, memory and batches of a configuration; train nothing.
    Plan(PlanArgs),
    /// Write the weights that a configuration's run begins with; train nothing.
    Init(InitArgs),
    /// Prove that a configuration's steps are free of races, or say what is missing; train nothing.
    Verify(VerifyArgs),
    /// Show what this machine and this build have, and what is missing.
    Doctor(DoctorArgs),
}

impl Cli {
    /// What the process ends with when the command fails. `verify` keeps 1 for findings, as tools that compare do.
    pub fn error_code(&self) -> u8 {
        if matches!(self.command, Command::Verify(_)) { 2 } else { 1 }
    }
}

/// A configuration and what is put over it.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct ConfigArgs {
    /// Configuration file (TOML); relative data paths start at its folder.
    pub config: PathBuf,
    /// Put a setting over the file's; without a value, take the file's away; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
}

impl ConfigArgs {
    /// Reads and checks the configuration.
    ///
    /// # Errors
    /// Those of [`Config::load`].
    pub fn load(&self) -> Result<Config, TrainError> {
        Config::load(&self.config, &self.set)
    }
}

/// `trainer train`
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct TrainArgs {
    /// The configuration.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Folder for metrics.jsonl, TensorBoard events and the loss curve; made if it does not exist.
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Show at the start what `plan --verbose` shows, and at the end what traced steps took of it.
    #[arg(short, long)]
    pub verbose: bool,
    /// Draw some steps as a timeline for ui.perfetto.dev, a row per rank and stream.
    #[arg(long, value_name = "FILE")]
    pub timeline: Option<PathBuf>,
    /// Steps of the timeline, from 1, both ends included; default: 2..3.
    #[arg(long, value_name = "FIRST..LAST", requires = "timeline", value_parser = parse_steps)]
    pub timeline_steps: Option<RangeInclusive<u64>>,
}

impl TrainArgs {
    /// The timeline, if one is asked for.
    pub fn timeline(&self) -> Option<TimelineConfig> {
        let path = self.timeline.clone()?;
        Some(TimelineConfig { path, steps: self.timeline_steps.clone().unwrap_or(TimelineConfig::USUAL_STEPS) })
    }
}

fn parse_steps(text: &str) -> Result<RangeInclusive<u64>, String> {
    let number = |text: &str| text.trim().parse::<u64>().ok().filter(|n| *n > 0);
    let ends = text.split_once("..").and_then(|(first, last)| Some((number(first)?, number(last)?)));
    match ends {
        Some((first, last)) if first <= last => Ok(first..=last),
        _ => Err("steps are written FIRST..LAST, whole numbers from 1, as in 2..3".to_owned()),
    }
}

/// `trainer plan`
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct PlanArgs {
    /// The configuration.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Show when each sharded weight is gathered, where to, and what its gather hides behind; who publishes when.
    #[arg(short, long)]
    pub verbose: bool,
    /// Draw the planned step as a timeline for ui.perfetto.dev: order and sizes, no times.
    #[arg(long, value_name = "FILE")]
    pub timeline: Option<PathBuf>,
}

/// `trainer init`
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct InitArgs {
    /// The configuration.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Folder for model.safetensors and config.json, as the transformers library reads them; made if it does not exist.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
}

/// `trainer verify`
#[derive(Clone, Debug, PartialEq, Eq, Args)]
#[command(group(ArgGroup::new("checked").args(["config", "read"]).required(true)))]
pub struct VerifyArgs {
    /// Configuration file (TOML).
    pub config: Option<PathBuf>,
    /// Put a setting over the file's; without a value, take the file's away; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE", conflicts_with = "read")]
    pub set: Vec<String>,
    /// Check a trace that --trace or --shrunk has written, instead of running steps.
    #[arg(long, value_name = "FILE")]
    pub read: Option<PathBuf>,
    /// What runs the steps: dry computes nothing and takes any size, sim computes; default: dry, or sim with --seeds.
    #[arg(long, value_name = "dry|sim", value_parser = parse_driver, conflicts_with = "read")]
    pub on: Option<VerifyOn>,
    /// Orders in which sim runs them, each from its own seed, from 0; default: 1.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "read")]
    pub seeds: Option<u64>,
    /// Only the order that sim draws from this seed.
    #[arg(long, value_name = "K", conflicts_with_all = ["seeds", "read"])]
    pub seed: Option<u64>,
    /// Take away every wait of this name, to see whether others cover it; may be repeated. A name that does not occur is
    /// told with those that do.
    #[arg(long, value_name = "WAIT", conflicts_with = "read")]
    pub drop: Vec<String>,
    /// Write the trace that was checked.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Write the smallest part of the trace that still has the first finding.
    #[arg(long, value_name = "FILE")]
    pub shrunk: Option<PathBuf>,
    /// Draw the first finding (SVG).
    #[arg(long, value_name = "FILE")]
    pub picture: Option<PathBuf>,
}

impl VerifyArgs {
    /// What runs the steps.
    pub fn on(&self) -> VerifyOn {
        let drawn = self.seeds.is_some() || self.seed.is_some();
        self.on.unwrap_or(if drawn { VerifyOn::Sim } else { VerifyOn::Dry })
    }

    /// Seeds of the orders that sim runs.
    pub fn seeds(&self) -> Range<u64> {
        self.seed.map_or(0..self.seeds.unwrap_or(1), |seed| seed..seed.saturating_add(1))
    }
}

/// What runs the steps that are verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerifyOn {
    /// Nothing is computed.
    Dry,
    /// One operation at a time, in an order drawn from a seed.
    Sim,
}

fn parse_driver(text: &str) -> Result<VerifyOn, String> {
    match text {
        "dry" => Ok(VerifyOn::Dry),
        "sim" => Ok(VerifyOn::Sim),
        _ => Err("steps are verified on dry or on sim".to_owned()),
    }
}

/// `trainer groups`
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct GroupsArgs {
    /// Number of ranks.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub world: u32,
    /// Sizes of axes (tp, gtp, cp, ep, dp, pp), as in tp=2,gtp=2,dp=2; dp is derived if it is left out.
    #[arg(long, value_name = "AXIS=SIZE,...", value_parser = LayoutConfig::parse)]
    pub layout: LayoutConfig,
    /// Axes from the fastest to the slowest; default: tp-gtp-cp-ep-dp-pp.
    #[arg(long, value_name = "AXIS-AXIS-...")]
    pub order: Option<String>,
    /// Print one JSON object: every group key with its rank lists.
    #[arg(long)]
    pub json: bool,
}

impl GroupsArgs {
    /// The layout of the whole world.
    ///
    /// # Errors
    /// [`TrainError::Plan`] with every rule that it breaks.
    pub fn layout(&self) -> Result<Layout, TrainError> {
        let mut config = self.layout.clone();
        config.world_size = Some(self.world);
        if let Some(order) = &self.order {
            config.order.clone_from(order);
        }
        Ok(Layout::new(&config)?)
    }
}

/// `trainer doctor`
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct DoctorArgs {
    /// A configuration to hold against this machine.
    pub config: Option<PathBuf>,
    /// Put a setting over the file's; without a value, take the file's away; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE", requires = "config")]
    pub set: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use pgroups::{Axis, ParamClass};

    fn parse(line: &str) -> Result<Command, String> {
        Cli::try_parse_from(line.split(' ')).map(|cli| cli.command).map_err(|e| e.to_string())
    }

    #[test]
    fn the_definition_has_no_contradictions() {
        Cli::command().debug_assert();
    }

    #[test]
    fn train_takes_a_configuration_overrides_in_order_and_a_run_folder() {
        let line = "trainer train configs/a.toml --set train.steps=3 --run-dir out --set model.arch=gpt2";
        let Command::Train(args) = parse(line).unwrap() else { panic!("not train") };
        assert_eq!(args.config.config, PathBuf::from("configs/a.toml"));
        assert_eq!(args.config.set, ["train.steps=3", "model.arch=gpt2"]);
        assert_eq!(args.run_dir, Some(PathBuf::from("out")));
        assert_eq!(args.timeline(), None);
        assert!(parse("trainer train").unwrap_err().contains("<CONFIG>"));
        assert!(matches!(parse("trainer plan a.toml --set a.b=c"), Ok(Command::Plan(_))));
        assert!(matches!(parse("trainer doctor"), Ok(Command::Doctor(_))));
        let Ok(Command::Verify(verify)) = parse("trainer verify a.toml --on sim --seeds 3 --drop x.y") else {
            panic!("not verify")
        };
        assert_eq!((verify.on(), verify.seeds, verify.drop), (VerifyOn::Sim, Some(3), vec!["x.y".to_owned()]));
        assert!(parse("trainer verify a.toml --on cpu").unwrap_err().contains("on dry or on sim"));
    }

    #[test]
    fn verify_reads_a_trace_or_runs_steps_and_never_both() {
        let verify = |line: &str| match parse(line)? {
            Command::Verify(args) => Ok(args),
            other => Err(format!("{other:?}")),
        };
        let one = verify("trainer verify a.toml --seed 7").unwrap();
        assert_eq!((one.on(), one.seeds()), (VerifyOn::Sim, 7..8));
        assert_eq!(verify("trainer verify a.toml --seeds 3").unwrap().seeds(), 0..3);
        assert_eq!(verify("trainer verify --read t --shrunk s").unwrap().read, Some(PathBuf::from("t")));
        for wrong in ["", "a.toml --read t", "--read t --seed 1", "--read t --drop x", "a.toml --seed 1 --seeds 2"] {
            assert!(verify(format!("trainer verify {wrong}").trim()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_timeline_has_its_usual_steps_or_those_that_are_named() {
        let timeline = |line: &str| match parse(line) {
            Ok(Command::Train(args)) => Ok(args.timeline().map(|t| (t.path, t.steps))),
            Ok(_) => panic!("not train"),
            Err(error) => Err(error),
        };
        let file = PathBuf::from("t.json");
        let usual = timeline("trainer train a.toml --timeline t.json").unwrap();
        assert_eq!(usual, Some((file.clone(), TimelineConfig::USUAL_STEPS)));
        let named = timeline("trainer train a.toml --timeline t.json --timeline-steps 5..9").unwrap();
        assert_eq!(named, Some((file, 5..=9)));
        for wrong in ["0..2", "3..2", "2", "a..b"] {
            let error = timeline(&format!("trainer train a.toml --timeline t.json --timeline-steps {wrong}"));
            assert!(error.unwrap_err().contains("FIRST..LAST"), "{wrong}");
        }
        assert!(timeline("trainer train a.toml --timeline-steps 2..3").unwrap_err().contains("--timeline"));
    }

    #[test]
    fn groups_reads_its_layout_and_says_what_is_wrong_with_one() {
        let line = "trainer groups --world 8 --layout tp=2,gtp=2,dp=2 --order gtp-tp-dp --json";
        let Command::Groups(args) = parse(line).unwrap() else { panic!("not groups") };
        let layout = args.layout().unwrap();
        let size = |axis| layout.size(ParamClass::Dense, &axis);
        assert_eq!((size(Axis::GTP), size(Axis::DP), layout.world_size(), args.json), (2, 2, 8, true));

        let error = parse("trainer groups --world 8 --layout tp=2,gtp=0,dp").unwrap_err();
        assert!(error.contains("--layout") && error.contains("'gtp=0'") && error.contains("'dp'"), "{error}");
        assert!(parse("trainer groups --world 0 --layout tp=1").unwrap_err().contains("--world"));
        let refused = |line: &str| {
            let Ok(Command::Groups(args)) = parse(line) else { panic!("{line} is not read") };
            args.layout().unwrap_err().to_string()
        };
        assert!(refused("trainer groups --world 8 --layout tp=3").contains("8 ranks"));
        let twice = refused("trainer groups --world 8 --layout tp=2 --order tp-tp");
        assert!(twice.contains("'tp' is twice"), "{twice}");
    }
}
