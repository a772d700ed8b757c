//! docs/errors.md: every message that a bad configuration can lead to, with the settings that lead there. The page is
//! what this test writes; set UPDATE_DOCS to write it anew.

use super::*;
use std::{collections::BTreeSet, fmt::Write};

/// A heading of the page with its cases, each the settings that are put over the small configuration.
pub(super) struct Chapter {
    title: &'static str,
    about: &'static str,
    pub(super) cases: &'static [&'static [&'static str]],
}

pub(super) const CHAPTERS: &[Chapter] = &[
    Chapter {
        title: "Names and values",
        about: "A setting that does not exist, or a value of another kind.",
        cases: &[
            &["train.seed"],
            &["optimiser.lr=1e-3"],
            &["optimizer.learning_rate=1e-3"],
            &["train.lr=1e-3"],
            &["train.batch=4"],
            &["device.workers=4"],
            &["optimizer.momentum=0.9"],
            &["data.path=[]"],
            &["train.steps=1.5"],
            &["model=3"],
            &["model.tied=yes"],
            &["model.arch=gtp2"],
            &["graph.order=best"],
            &["train.steps=0"],
            &["train.seed=99999999999999999999"],
            &["optimizer.lr=0"],
            &["optimizer.weight_decay=-0.1"],
            &["optimizer.beta1=1"],
        ],
    },
    Chapter {
        title: "Settings that do not fit each other",
        about: "Each is valid by itself.",
        cases: &[
            &["model.heads=3"],
            &["model.arch=llama", "model.heads=4", "model.kv_heads=3"],
            &["model.arch=llama", "model.dim=60", "model.heads=4"],
            &["model.arch=llama", "model.dim=63", "model.heads=3"],
            &["model.kv_heads=1"],
            &["model.vocab=255"],
            &["model.vocab_rows=200"],
            &["data.random_tokens=1000000"],
            &["data.random_tokens=1000000", "data.tokenizer=bytes"],
            &["train.global_batch=12", "train.micro_batch=4", "layout.dp=2"],
            &["model.seq_len=500000000"],
            &["optimizer.min_lr=1"],
            &["data.split=0.9"],
            &["data.split=0.9,x"],
            &["data.split=0,0"],
            &["data.split=1,0", "train.eval_interval=5"],
            &["layout.dp=2", "layout.order=tp-pp"],
            &["layout.order=tp-dpp-dp"],
            &["layout.order=tp-tp"],
            &["layout.tp=70000", "layout.pp=70000"],
            &["layout.tp=4"],
            &["layout.tp=2", "layout.sequence_parallel=true", "model.seq_len=33", "train.micro_batch=1"],
            &["layout.gtp=4", "gtp.alignment=0", "model.ffn_dim=130"],
        ],
    },
    Chapter {
        title: "Settings without effect",
        about: "Refused, so that nobody believes in them.",
        cases: &[
            &["optimizer.schedule=constant", "optimizer.min_lr=1e-5"],
            &["optimizer.decay_steps=5"],
            &["model.rope_base=500000"],
            &["train.eval_samples=100"],
            &["ddp.overlap_param_gather=true"],
            &["ddp.dispatch=aligned"],
            &["ddp.dispatch=aligned", "ddp.overlap_param_gather=false"],
            &["graph.gates=in-graph"],
            &["graph.order=accesses"],
            &["gtp.look_ahead=2"],
            &["layout.sequence_parallel=true"],
        ],
    },
    Chapter {
        title: "What this version cannot do",
        about: "Settings that a later version will have.",
        cases: &[&["layout.pp=2"], &["precision.grad=bf16"]],
    },
];

/// The settings as they would be given: sections other than the small configuration's, and files, by name.
fn report_of(settings: &[&str]) -> Report {
    // `--set` cannot put a value in the place of a section.
    match settings {
        ["model=3"] => report(&SMALL.replace("[model]\nlayers = 2\ndim = 128\nseq_len = 32\n", "model = 3\n"), &[]),
        settings => report(SMALL, settings),
    }
}

/// What each kind of violation is called here. One table for both: a kind without a name does not compile, and one
/// with a name must be shown.
macro_rules! kinds {
    ($($rule:pat => $name:literal),* $(,)?) => {
        const KINDS: &[&str] = &[$($name),*];

        pub(super) fn kind(rule: &Rule) -> &'static str {
            match rule {
                $($rule => $name),*
            }
        }
    };
}

kinds! {
    Rule::OverrideForm => "OverrideForm",
    Rule::UnknownSection { .. } => "UnknownSection",
    Rule::UnknownKey { .. } => "UnknownKey",
    Rule::Required { .. } => "Required",
    Rule::Type { .. } => "Type",
    Rule::OneOf { .. } => "OneOf",
    Rule::Range { range: Range::Whole(..) } => "Range::Whole",
    Rule::Range { range: Range::Above(_) } => "Range::Above",
    Rule::Range { range: Range::AtLeast(_) } => "Range::AtLeast",
    Rule::Range { range: Range::Below(..) } => "Range::Below",
    Rule::HeadsDivideDim => "HeadsDivideDim",
    Rule::EvenHeads { .. } => "EvenHeads",
    Rule::KvHeadsDivideHeads => "KvHeadsDivideHeads",
    Rule::Gpt2HasNoGroups => "Gpt2HasNoGroups",
    Rule::VocabHoldsTokens { .. } => "VocabHoldsTokens",
    Rule::Layout { .. } => "Layout",
    Rule::Split { .. } => "Split",
    Rule::BatchMultiple { .. } => "BatchMultiple",
    Rule::BatchTokens { .. } => "BatchTokens",
    Rule::MinLrBelowLr => "MinLrBelowLr",
    Rule::EvalSplit => "EvalSplit",
    Rule::NoEffect { because: NoEffect::ConstantSchedule } => "NoEffect::ConstantSchedule",
    Rule::NoEffect { because: NoEffect::DecaySteps } => "NoEffect::DecaySteps",
    Rule::NoEffect { because: NoEffect::LearnedPositions } => "NoEffect::LearnedPositions",
    Rule::NoEffect { because: NoEffect::NeverEvaluated } => "NoEffect::NeverEvaluated",
    Rule::NoEffect { because: NoEffect::NothingGathered } => "NoEffect::NothingGathered",
    Rule::NoEffect { because: NoEffect::NothingDispatched } => "NoEffect::NothingDispatched",
    Rule::Share { .. } => "Share",
    Rule::SplitsTokens => "SplitsTokens",
    Rule::NoEffect { because: NoEffect::NoGates } => "NoEffect::NoGates",
    Rule::NoEffect { because: NoEffect::NoGraphs } => "NoEffect::NoGraphs",
    Rule::NoEffect { because: NoEffect::RandomTokens } => "NoEffect::RandomTokens",
    Rule::NoEffect { because: NoEffect::NoShards } => "NoEffect::NoShards",
    Rule::NoEffect { because: NoEffect::NoTensorGroup } => "NoEffect::NoTensorGroup",
    Rule::NotYet { what: NotYet::Axis } => "NotYet::Axis",
    Rule::NotYet { what: NotYet::Bf16 } => "NotYet::Bf16",
}

fn write_case(page: &mut String, settings: &[&str], message: &str) {
    let settings: Vec<String> = settings.iter().map(|setting| format!("`{setting}`")).collect();
    write!(page, "\n{}\n\n```text\n{}\n```\n", settings.join(", "), message.trim_end()).unwrap();
}

/// Errors behind the settings: the file itself, and the text.
fn write_files(page: &mut String) {
    let dir = std::env::temp_dir().join(format!("trainer-errors-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("short.txt"), "too little").unwrap();
    fs::write(dir.join("long.txt"), "enough to train on ".repeat(40)).unwrap();
    fs::write(dir.join("latin1.txt"), b"caf\xe9").unwrap();
    let shown = |error: TrainError| {
        let text = format!("{:#}", anyhow::Error::new(error));
        text.replace(&*fs::canonicalize(&dir).unwrap().to_string_lossy(), "FOLDER")
            .replace(&*dir.to_string_lossy(), "FOLDER")
    };
    page.push_str("\n## The file\n\nIt is not there, or it is no TOML.\n");
    let error = Config::load::<&str>(&dir.join("missing.toml"), &[]).unwrap_err();
    write_case(page, &["trainer train missing.toml"], &shown(error));
    write_case(page, &["arch = gpt2"], &shown(parse("[model]\narch = gpt2\n", &[]).unwrap_err()));

    page.push_str("\n## The text\n\nIt is read before anything is made.\n");
    let cases: [&[&str]; 9] = [
        &["data.path=nothing.txt"],
        &["data.path=*.md"],
        &["data.path=a[.txt"],
        &["data.path=latin1.txt"],
        &["data.path=short.txt"],
        &["data.path=long.txt", "train.global_batch=64"],
        &["data.path=long.txt", "train.eval_interval=5", "data.split=0.99,0.01"],
        &["data.path=long.txt", "device.kind=dry"],
        &["data.path=long.txt", "train.steps=1"],
    ];
    for settings in cases {
        let config = Config::parse(SMALL, Path::new("run.toml"), &dir, settings).unwrap();
        let mut options = crate::RunOptions::new(dir.join("run"));
        let mut settings = settings.to_vec();
        if config.train.steps == 1 {
            options.timeline = Some(crate::TimelineConfig { path: dir.join("t.json"), steps: 2..=3 });
            settings.push("--timeline t.json");
        }
        let error = crate::train(&config, options).unwrap_err();
        write_case(page, &settings, &shown(error));
    }
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn every_configuration_error_is_shown_in_the_docs() {
    let mut page = String::from(
        "# What a bad configuration says\n\n\
         Everything that is wrong is told in one report, before anything is started: the settings with their values, the\n\
         rule, and the nearest settings that keep it, each of which is enough for that rule. What is proposed for a setting\n\
         that is wrong by itself was tried: where nothing would be taken, nothing is proposed. Below is every message, with\n\
         what leads to it when it is put over this configuration. The page is written by a test.\n",
    );
    write!(page, "\n```toml\n{}\n```\n", SMALL.trim()).unwrap();
    let mut seen = BTreeSet::new();
    for Chapter { title, about, cases } in CHAPTERS {
        write!(page, "\n## {title}\n\n{about}\n").unwrap();
        for settings in *cases {
            let report = report_of(settings);
            seen.extend(report.violations.iter().map(|violation| kind(&violation.rule)));
            write_case(&mut page, settings, &report.to_string());
        }
    }
    write_files(&mut page);
    let kinds: BTreeSet<_> = KINDS.iter().copied().collect();
    assert_eq!(kinds.len(), KINDS.len(), "two kinds of one name");
    let unseen: Vec<_> = kinds.difference(&seen).collect();
    assert_eq!(seen, kinds, "no case shows {unseen:?}");

    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let there = fs::read_to_string(&path).unwrap_or_default();
    let differs = there.lines().zip(page.lines()).find(|(there, page)| there != page);
    assert!(there == page, "docs/errors.md is not what the code says (UPDATE_DOCS=1 writes it): {differs:?}");
}
