//! What a report calls nearest keeps the rule that it is told for, whatever else is set.

use super::{
    errors_page::{CHAPTERS, kind},
    *,
};

/// Settings that others depend on, each with values that are usual, rare and wrong.
const VALUES: &[(&str, &[&str])] = &[
    ("layout.tp", &["2", "3", "4", "8"]),
    ("layout.gtp", &["2", "3", "4"]),
    ("layout.dp", &["2", "3", "5"]),
    ("layout.pp", &["2"]),
    ("layout.order", &["\"tp-dp\"", "\"dp-tp-gtp-cp-ep-pp\"", "\"tp-tp\""]),
    ("layout.sequence_parallel", &["true", "false"]),
    ("model.arch", &["\"llama\""]),
    ("model.heads", &["1", "3", "4", "12"]),
    ("model.kv_heads", &["1", "3", "4"]),
    ("model.dim", &["24", "33", "60"]),
    ("model.ffn_dim", &["7", "33", "96"]),
    ("model.seq_len", &["1", "3", "17", "500000000"]),
    ("model.vocab", &["100", "300"]),
    ("model.vocab_rows", &["100", "256", "301"]),
    ("model.rope_base", &["10000"]),
    ("train.global_batch", &["1", "3", "12", "400000000"]),
    ("train.micro_batch", &["1", "3", "5"]),
    ("train.eval_interval", &["5"]),
    ("train.eval_samples", &["3"]),
    ("optimizer.schedule", &["\"constant\"", "\"linear\"", "\"wsd\"", "\"cos\""]),
    ("optimizer.lr", &["1e-5", "0"]),
    ("optimizer.min_lr", &["0", "1e-4", "1", "-1"]),
    ("optimizer.decay_steps", &["0", "4"]),
    ("optimizer.distributed", &["true", "false", "1"]),
    ("ddp.overlap_param_gather", &["true", "false"]),
    ("ddp.dispatch", &["\"chain\"", "\"aligned\"", "\"with-optimizer\""]),
    ("gtp.look_ahead", &["0", "5"]),
    ("gtp.look_ahead_bytes", &["0", "100"]),
    ("gtp.alignment", &["0", "3", "4294967295"]),
    ("gtp.f32_reduce", &["false"]),
    ("graph.scope", &["\"none\"", "\"layer\"", "\"step\""]),
    ("graph.gates", &["\"before-replay\"", "\"x\""]),
    ("graph.order", &["\"submission\"", "\"x\""]),
    ("precision.param", &["\"bf16\""]),
    ("precision.grad", &["\"bf16\""]),
    ("data.path", &["[]", "\"\"", "3"]),
    ("data.random_tokens", &["1000"]),
    ("data.tokenizer", &["\"bytes\"", "\"words\""]),
    ("data.split", &["\"1,0\"", "\"0.5,0.5\"", "\"a\"", "0.9"]),
];

/// A configuration as its settings, each once.
type Settings = Vec<(String, String)>;

/// The small configuration with others put over it.
fn over_small<'s>(more: impl IntoIterator<Item = (&'s str, &'s str)>) -> Settings {
    let table: toml::Table = SMALL.parse().unwrap();
    let sections = table.iter().map(|(name, section)| (name, section.as_table().unwrap()));
    let small = sections.flat_map(|(name, section)| {
        section.iter().map(move |(key, value)| (format!("{name}.{key}"), value.to_string()))
    });
    more.into_iter().fold(small.collect(), |settings, (key, value)| with(settings, key, Some(value)))
}

fn with(mut settings: Settings, key: &str, value: Option<&str>) -> Settings {
    settings.retain(|(set, _)| set != key);
    settings.extend(value.map(|value| (key.to_owned(), value.to_owned())));
    settings
}

fn violations(settings: &Settings) -> Vec<Violation> {
    let overrides: Vec<String> = settings.iter().map(|(key, value)| format!("{key}={value}")).collect();
    match Config::parse("", Path::new("run.toml"), Path::new("/base"), &overrides) {
        Ok(_) => Vec::new(),
        Err(TrainError::Config(report)) => report.violations,
        Err(error) => panic!("{error}"),
    }
}

/// Settings that follow an advice on `violation`.
fn followed(settings: &Settings, violation: &Violation, advice: &Setting) -> Settings {
    let about = &violation.settings[0].key;
    match (&advice.value, &violation.rule) {
        (SettingValue::Text, _) => {
            let renamed =
                |key: &String| key.replace(&format!("{}.", inner(about)), &format!("{}.", inner(&advice.key)));
            settings.iter().map(|(key, value)| (renamed(key), value.clone())).collect()
        }
        // What was misspelled goes.
        (SettingValue::Toml(value), Rule::UnknownKey { .. }) => {
            with(with(settings.clone(), about, None), &advice.key, Some(value))
        }
        (SettingValue::Toml(value), _) => with(settings.clone(), &advice.key, Some(value)),
        (SettingValue::Absent, _) => with(settings.clone(), &advice.key, None),
    }
}

fn inner(section: &str) -> &str {
    section.trim_matches(['[', ']'])
}

/// Follows every advice on settings, each alone. Gives how many there were.
fn follow_each(settings: &Settings) -> usize {
    let mut count = 0;
    for violation in &violations(settings) {
        for advice in &violation.nearest {
            count += 1;
            let left = violations(&followed(settings, violation, advice));
            // What the new value breaks in its turn is told then.
            let same = |one: &&Violation| {
                kind(&one.rule) == kind(&violation.rule) && one.settings[0].key == violation.settings[0].key
            };
            let refused = |one: &&Violation| violation.rule.is_of_one_setting() && one.names(&advice.key);
            let again = left.iter().find(|one| same(one) || refused(one));
            assert_eq!(again, None, "{settings:?} with '{advice}' for\n{violation}");
        }
    }
    count
}

#[test]
fn every_suggestion_in_the_docs_keeps_the_rule_it_is_told_for() {
    let cases = CHAPTERS.iter().flat_map(|chapter| chapter.cases);
    let pairs = |case: &&[&'static str]| case.iter().map(|set| set.split_once('=')).collect::<Option<Vec<_>>>();
    // A section that is none, and an override that is none, have no settings.
    let cases = cases.filter_map(pairs).filter(|case| case.iter().all(|(key, _)| key.contains('.')));
    let counts: Vec<usize> = cases.map(|case| follow_each(&over_small(case))).collect();
    assert!(counts.len() > 40 && counts.iter().sum::<usize>() > 60, "{counts:?}");
}

#[test]
fn every_suggestion_on_two_settings_keeps_the_rule_it_is_told_for() {
    let all = || VALUES.iter().flat_map(|(key, values)| values.iter().map(move |value| (*key, *value)));
    let mut count = 0;
    for (i, first) in all().enumerate() {
        count += follow_each(&over_small([first]));
        for second in all().skip(i + 1).filter(|second| second.0 != first.0) {
            count += follow_each(&over_small([first, second]));
        }
    }
    assert!(count > 3000, "{count}");
}
