use super::*;

mod errors_page; // docs/errors.md
mod suggestions; // each of them is enough

const SMALL: &str = r#"
[model]
layers = 2
dim = 128
seq_len = 32
[train]
steps = 10
global_batch = 8
[data]
path = "*.txt"
"#;

fn parse(text: &str, overrides: &[&str]) -> Result<Config, TrainError> {
    Config::parse(text, Path::new("run.toml"), Path::new("/base"), overrides)
}

fn config(overrides: &[&str]) -> Config {
    parse(SMALL, overrides).unwrap()
}

fn report(text: &str, overrides: &[&str]) -> Report {
    match parse(text, overrides) {
        Err(TrainError::Config(report)) => report,
        other => panic!("not a report: {other:?}"),
    }
}

/// The only violation of the small configuration with these overrides, as one text.
fn only(overrides: &[&str]) -> String {
    let report = report(SMALL, overrides);
    assert_eq!(report.violations.len(), 1, "{report}");
    report.violations[0].to_string()
}

#[test]
fn what_is_left_open_is_derived() {
    let c = config(&["layout.dp=2"]);
    let ModelConfig { heads, kv_heads, ffn_dim, vocab, tied, .. } = c.model;
    assert_eq!((heads, kv_heads, ffn_dim, vocab, tied), (2, 2, 512, 256, true));
    assert_eq!((c.train.micro_batch, c.microbatches()), (4, 1));
    assert_eq!((c.ranks().world_size(), c.layout.data_ranks()), (2, 2));
    assert_eq!((c.optimizer.lr, c.optimizer.min_lr), (3e-4, Some(3e-4 / 10.0)));
    assert_eq!(c.ddp.bucket_size, 40_000_000);
    assert!(c.ddp.overlap_grad_reduce && !c.ddp.overlap_param_gather && !c.optimizer.distributed);
    assert!(config(&["layout.dp=2", "optimizer.distributed=true"]).ddp.overlap_param_gather);
    assert_eq!(config(&["layout.dp=64", "train.global_batch=64"]).ddp.bucket_size, 64_000_000);
    assert_eq!(c.data.source().base, Path::new("/base"));
    let llama = |overrides: &[&str]| config(&[&["model.arch=llama"], overrides].concat()).model;
    let ModelConfig { heads, kv_heads, ffn_dim, tied, .. } = llama(&["model.dim=384"]);
    assert_eq!((heads, kv_heads, ffn_dim, tied), (6, 6, 1024, false));
    let ModelConfig { kv_heads, ffn_dim, tied, .. } =
        llama(&["model.kv_heads=1", "model.ffn_dim=7", "model.tied=true"]);
    assert_eq!((kv_heads, ffn_dim, tied), (1, 7, true));
    // Heads divide dim, and are as near to 64 wide as that allows.
    for (dim, heads) in [("96", 2), ("384", 6), ("100", 2), ("97", 1), ("7", 1)] {
        assert_eq!(config(&[&format!("model.dim={dim}")]).model.heads, heads, "dim {dim}");
    }
}

#[test]
fn overrides_win_over_the_file_the_last_one_over_the_others() {
    let c = config(&[
        "train.steps=3",
        "train.steps=4",
        "model.arch=gpt2",
        "data.path=[\"a\", \"b/**\"]",
        "log.interval = 2",
    ]);
    assert_eq!((c.train.steps, c.log.interval), (4, 2));
    assert_eq!(c.data.path, ["a", "b/**"]);
    assert_eq!(config(&["data.path=../x y.txt"]).data.path, ["../x y.txt"]);
    // A section that the file does not have.
    assert_eq!(config(&["device.kind=sim", "device.seed=7"]).device.seed, 7);
    // A wrong value in the file is not reported once it is replaced.
    let text = SMALL.replace("steps = 10", "steps = -1");
    assert_eq!(parse(&text, &["train.steps=5"]).unwrap().train.steps, 5);
}

#[test]
fn warm_up_may_exceed_the_run_and_the_schedule_is_that_of_the_settings() {
    let schedule = config(&["optimizer.warmup_steps=1000", "optimizer.lr=0.5"]).schedule();
    assert_eq!(schedule.lr(9), 0.5 * 10.0 / 1000.0);
    let constant = config(&["optimizer.schedule=constant", "optimizer.lr=1e-2"]);
    assert_eq!((constant.optimizer.min_lr, constant.schedule().lr(9)), (None, 1e-2));
    let linear = config(&["optimizer.schedule=linear", "optimizer.lr=1", "optimizer.min_lr=0"]);
    assert_eq!((linear.schedule().lr(0), linear.schedule().lr(9)), (1.0, 0.0));
}

#[test]
fn everything_that_is_wrong_is_in_one_report() {
    let text = r#"
        [model]
        layers = 0
        dim = 128
        heads = 5
        seq_len = "64"
        [train]
        global_batch = 10
        micro_batch = 4
        learning_rate = 1e-3
        [layout]
        dp = 2
        pp = 2
        [optimiser]
        lr = 1
        [data]
        path = []
        split = "0.9"
    "#;
    let report = report(text, &["train.seed", "precision.grad=bf16", "optimizer.betas=0.9"]);
    let text = report.to_string();
    let expected = [
        "configuration 'run.toml': 13 settings to change, nothing was started",
        "--set train.seed\n    an override is written --set section.key=value",
        "data.path = []\n    must be set",
        "data.split = \"0.9\"\n    split '0.9' has 1 weights",
        "model.layers = 0\n    must be a whole number from 1 to 4294967295\n    nearest valid: model.layers = 1",
        "model.seq_len = \"64\"\n    must be a whole number, not string\n    nearest valid: model.seq_len = 64",
        "train.steps (not set)\n    must be set: optimizer steps\n    nearest valid: train.steps = 100",
        "model.heads = 5, model.dim = 128\n    heads must divide dim",
        "nearest valid: model.heads = 4  or  model.heads = 8  or  model.dim = 125  or  model.dim = 130",
        "train.global_batch = 10, train.micro_batch = 4, layout.dp = 2, layout.gtp = 1",
        "nearest valid: train.global_batch = 8  or  train.global_batch = 16  or  train.micro_batch = 1",
        "layout.pp = 2\n    is not there yet",
        "precision.grad = \"bf16\"\n    is not there yet",
        "[optimiser]\n    there is no such section",
        "train.learning_rate = 0.001\n    there is no such key; [train] has: steps, global_batch",
        "optimizer.betas = 0.9\n    there is no such key; [optimizer] has: lr, schedule",
    ];
    for part in expected {
        assert!(text.contains(part), "missing: {part}\n---\n{text}");
    }
}

#[test]
fn an_unknown_name_comes_with_the_nearest_known_one() {
    assert!(only(&["model.layer=3"]).ends_with("nearest valid: model.layers = 3"));
    assert!(only(&["optimizer.warm_up_steps=3"]).ends_with("nearest valid: optimizer.warmup_steps = 3"));
    // Spelled right, but in the wrong section.
    assert!(only(&["train.lr=0.1"]).ends_with("nearest valid: optimizer.lr = 0.1"));
    assert!(only(&["modle.layers=3"]).contains("sections: data, model, layout"));
    assert!(only(&["modle.layers=3"]).ends_with("nearest valid: [model]"));
    let top = report(&format!("steps = 3\n{SMALL}"), &[]);
    assert!(top.to_string().ends_with("nearest valid: train.steps = 3"), "{top}");
    assert!(
        only(&["model.arch=gtp2"])
            .ends_with("must be one of \"gpt2\", \"llama\"\n    nearest valid: model.arch = \"gpt2\"")
    );
    assert!(only(&["optimizer.schedule=cosin"]).ends_with("nearest valid: optimizer.schedule = \"cosine\""));
}

#[test]
fn a_value_of_the_wrong_kind_names_the_key_and_what_is_wanted() {
    let cases = [
        ("train.steps=1.5", "must be a whole number, not float"),
        ("train.steps=1e3", "nearest valid: train.steps = 1000"),
        ("train.steps=-1", "must be a whole number from 1 to 9223372036854775807\n    nearest valid: train.steps = 1"),
        (
            "train.seed=99999999999999999999",
            "from 0 to 9223372036854775807\n    nearest valid: train.seed = 9223372036854775807",
        ),
        ("train.seed=-99999999999999999999", "nearest valid: train.seed = 0"),
        (
            "log.sample_tokens=100001",
            "must be a whole number from 0 to 100000\n    nearest valid: log.sample_tokens = 100000",
        ),
        ("model.dim=4294967296", "nearest valid: model.dim = 4294967295"),
        ("optimizer.lr=\"fast\"", "must be a number, not string\n    nearest valid: optimizer.lr = 0.0003"),
        ("train.steps=many", "nearest valid: train.steps = 1"),
        ("optimizer.lr=\"0.1\"", "nearest valid: optimizer.lr = 0.1"),
        ("optimizer.lr=0", "must be a finite number above 0\n    nearest valid: optimizer.lr = 0.0003"),
        ("optimizer.lr=inf", "must be a finite number above 0"),
        ("optimizer.lr=nan", "must be a finite number above 0"),
        ("optimizer.weight_decay=-0.1", "at least 0\n    nearest valid: optimizer.weight_decay = 0.0"),
        ("optimizer.beta1=1", "must be at least 0 and below 1\n    nearest valid: optimizer.beta1 = 0.9"),
        ("model.tied=yes", "must be true or false, not string\n    nearest valid: model.tied = true"),
        ("optimizer.distributed=0", "not integer\n    nearest valid: optimizer.distributed = false"),
        ("data.path=3", "must be a string or a list of strings, not integer\n    nearest valid: data.path = \"3\""),
        ("data.path=[\"a\", 3]", "strings, not array\n    nearest valid: data.path = [\"a\", \"3\"]"),
        ("data.path=", "must be set"),
        ("data.split=0.9", "must be a string of weights like \"0.95,0.05\", not float"),
        ("device.threads=0", "must be a whole number from 1"),
        ("model.arch=2", "must be one of \"gpt2\", \"llama\"\n    nearest valid: model.arch = \"gpt2\""),
        (
            "graph.scope=true",
            "must be one of \"none\", \"layer\", \"chunk\", \"microbatch\", \"step\"\n    nearest valid: graph.scope =",
        ),
    ];
    for (setting, expected) in cases {
        let text = only(&[setting]);
        assert!(text.contains(expected), "{setting}: {text}");
        let key = setting.split('=').next().unwrap();
        assert!(text.starts_with(key), "{setting}: {text}");
    }
    let section = report("model = 3", &["model.layers=2"]).to_string();
    assert!(section.contains("model = 3\n    must be a section, not integer"), "{section}");
    // What must be set in it is proposed as if it were one.
    assert!(report("model = 3", &[]).to_string().contains("nearest valid: model.dim = 128"));
}

#[test]
fn an_unknown_key_comes_with_those_of_its_section_that_are_like_it_and_take_its_value() {
    let cases = [
        ("train.batch=4", "train.global_batch = 4  or  train.micro_batch = 4"),
        // Eight sequences on two ranks: no rank has eight of them.
        ("train.batch=8", "train.global_batch = 8"),
        ("model.n_heads=4", "model.heads = 4"),
        ("optimizer.warmup=3", "optimizer.warmup_steps = 3"),
        ("optimizer.beta=0.5", "optimizer.beta1 = 0.5  or  optimizer.beta2 = 0.5"),
        // eval_samples would have no effect without an interval.
        ("train.eval=5", "train.eval_interval = 5"),
        // Spelled the same elsewhere: eps and warmup_steps are less like it.
        ("optimizer.steps=5", "train.steps = 5"),
        ("model.seed=5", "train.seed = 5  or  device.seed = 5"),
        // A slip away elsewhere.
        ("train.layer=3", "model.layers = 3"),
    ];
    for (setting, nearest) in cases {
        let text = only(&[setting, "layout.dp=2"]);
        assert!(text.ends_with(&format!("nearest valid: {nearest}")), "{setting}: {text}");
    }
}

#[test]
fn an_unknown_key_that_is_like_none_that_takes_its_value_comes_with_the_names_there_are() {
    let cases = [
        ("device.workers=4", "there is no such key; [device] has: kind, threads, seed"),
        ("optimizer.momentum=0.9", "there is no such key; [optimizer] has: lr, schedule"),
        // layout.order would take it, and is not like it.
        ("device.workers=tp-dp", "there is no such key; [device] has: kind, threads, seed"),
        // Near, but not with this value.
        ("train.batch=many", "there is no such key; [train] has: steps, global_batch"),
        ("precision.grads=bf16", "there is no such key; [precision] has: param, grad"),
        // A section that is spelled a little like one that has nothing of the kind.
        ("layers.count=3", "there is no such section; sections: data, model, layout"),
    ];
    for (setting, names) in cases {
        let text = only(&[setting]);
        assert!(text.contains(names) && !text.contains("nearest"), "{setting}: {text}");
    }
}

#[test]
fn a_value_that_would_be_refused_in_its_turn_is_not_proposed() {
    let cases = [
        ("data.split=0.9", "must be a string of weights like \"0.95,0.05\", not float"),
        ("layout.order=4", "must be a string of axes like \"tp-gtp-dp\", not integer"),
        ("model.heads=\"3\"", "must be a whole number, not string"),
        // Nothing is captured whose operations could have an order.
        ("graph.order=best", "must be one of \"accesses\", \"submission\""),
        ("gtp.look_ahead=-1", "must be a whole number from 0 to 4294967295"),
    ];
    for (setting, wanted) in cases {
        let text = only(&[setting]);
        assert!(text.ends_with(wanted), "{setting}: {text}");
    }
    // With other settings they are taken.
    assert!(only(&["model.heads=\"4\""]).ends_with("nearest valid: model.heads = 4"));
    assert!(only(&["graph.order=best", "graph.scope=step"]).ends_with("nearest valid: graph.order = \"accesses\""));
}

#[test]
fn settings_that_contradict_each_other_are_told_with_both_values() {
    let cases = [
        ("model.heads=3", "model.heads = 3, model.dim = 128", "model.heads = 2  or  model.heads = 4"),
        ("model.kv_heads=1", "model.kv_heads = 1, model.heads = 2", "nearest valid: model.kv_heads = 2"),
        ("model.vocab=255", "at least the 256 tokens of tokenizer \"bytes\"", "nearest valid: model.vocab = 256"),
        ("optimizer.min_lr=1", "optimizer.min_lr = 1.0, optimizer.lr = 0.0003", "optimizer.min_lr = 0.0003"),
        ("ddp.overlap_param_gather=true", "optimizer.distributed = false", "ddp.overlap_param_gather = false"),
        ("ddp.dispatch=aligned", "ddp.overlap_param_gather = false", "\"chain\"  or  optimizer.distributed = true"),
    ];
    for (setting, about, nearest) in cases {
        let text = only(&[setting]);
        assert!(text.contains(about) && text.contains(nearest), "{setting}: {text}");
    }
    let unused = only(&["optimizer.schedule=constant", "optimizer.min_lr=1e-5"]);
    assert!(unused.contains("would have no effect: the constant schedule"), "{unused}");
    assert!(unused.contains("optimizer.min_lr (not set)  or  optimizer.schedule = \"cosine\""), "{unused}");
}

#[test]
fn heads_that_are_turned_have_an_even_width_and_an_odd_one_is_told_with_the_nearest_even_one() {
    let llama = |settings: &[&str]| only(&[&["model.arch=llama"], settings].concat());
    let few = llama(&["model.dim=60", "model.heads=4"]);
    assert!(few.starts_with("model.heads = 4, model.dim = 60\n    llama turns"), "{few}");
    assert!(few.contains("heads of 15 values"), "{few}");
    let dims = "model.dim = 56  or  model.dim = 64";
    assert!(few.ends_with(&format!("nearest valid: model.heads = 3  or  model.heads = 5  or  {dims}")), "{few}");
    // An odd dim has no pairs to give.
    let odd = llama(&["model.dim=63", "model.heads=3"]);
    assert!(odd.ends_with("nearest valid: model.dim = 60  or  model.dim = 66"), "{odd}");
    // gpt2 turns nothing, and what is left open is even: 63 would be nearer to 64 than 42.
    assert_eq!(config(&["model.dim=60", "model.heads=4"]).model.heads, 4);
    assert_eq!(config(&["model.dim=126"]).model.heads, 2);
    assert_eq!(config(&["model.arch=llama", "model.dim=126"]).model.heads, 3);
    // What the configuration accepts the model accepts.
    for (dim, heads) in (1..40).flat_map(|dim| (1..=dim).map(move |heads| (dim, heads))) {
        let settings = ["model.arch=llama".to_owned(), format!("model.dim={dim}"), format!("model.heads={heads}")];
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        let of_pairs = dim % heads == 0 && dim / heads % 2 == 0;
        assert_eq!(parse(SMALL, &settings).is_ok(), of_pairs, "dim {dim}, {heads} heads");
        if let Ok(config) = parse(SMALL, &settings) {
            crate::train::gpt_plan(&config).unwrap();
        }
    }
}

#[test]
fn the_base_of_the_angles_is_llamas_and_without_effect_elsewhere() {
    let base = |settings: &[&str]| config(settings).model.rope_base;
    assert_eq!(base(&[]), None);
    assert_eq!(base(&["model.arch=llama"]), Some(model::LlamaConfig::ROPE_BASE));
    let long = config(&["model.arch=llama", "model.rope_base=500000"]);
    assert_eq!(long.model.rope_base, Some(500_000));
    let model::Arch::Llama(llama) = crate::train::gpt_plan(&long).unwrap().config().arch else { panic!("llama") };
    assert_eq!(llama.rope_base, 500_000);
    let unused = only(&["model.rope_base=500000"]);
    assert!(unused.contains("would have no effect: gpt2 learns its positions"), "{unused}");
    assert!(unused.ends_with("model.rope_base (not set)  or  model.arch = \"llama\""), "{unused}");
    let whole = only(&["model.arch=llama", "model.rope_base=1e6"]);
    assert!(whole.ends_with("nearest valid: model.rope_base = 1000000"), "{whole}");
    let none = only(&["model.arch=llama", "model.rope_base=0"]);
    assert!(none.ends_with("nearest valid: model.rope_base = 1"), "{none}");
}

#[test]
fn an_order_without_a_place_for_an_axis_is_told_with_one_that_has_it() {
    let left_out = only(&["layout.dp=2", "layout.order=tp-pp"]);
    assert!(left_out.starts_with("layout.order = \"tp-pp\"\n    dp = 2, but order"), "{left_out}");
    let unknown = only(&["layout.order=tp-dpp-dp"]);
    assert!(unknown.contains("names 'dpp'") && unknown.ends_with("layout.order = \"tp-gtp-dp\""), "{unknown}");
    let twice = only(&["layout.order=tp-tp"]);
    assert!(twice.contains("twice") && twice.ends_with("layout.order = \"tp-gtp-cp-ep-dp-pp\""), "{twice}");
    let crowd = report(SMALL, &["layout.tp=70000", "layout.pp=70000"]).to_string();
    assert!(crowd.contains("layout.tp = 70000, layout.pp = 70000"), "{crowd}");
}

#[test]
fn a_batch_that_ranks_cannot_share_is_told_with_the_nearest_that_they_can() {
    // With micro_batch left open, only the ranks must divide.
    let open = only(&["layout.dp=4", "train.global_batch=10"]);
    assert!(open.starts_with("train.global_batch = 10, layout.dp = 4, layout.gtp = 1"), "{open}");
    assert!(
        open.ends_with("train.global_batch = 8  or  train.global_batch = 12  or  layout.dp = 2  or  layout.dp = 5"),
        "{open}"
    );
    let fewer = only(&["layout.dp=4", "train.global_batch=3"]);
    assert!(fewer.contains("nearest valid: train.global_batch = 4"), "{fewer}");
    let micro = only(&["layout.dp=2", "train.global_batch=12", "train.micro_batch=4"]);
    assert!(
        micro.ends_with("train.global_batch = 8  or  train.global_batch = 16  or  train.micro_batch = 3"),
        "{micro}"
    );
    let good = config(&["layout.dp=2", "train.global_batch=12", "train.micro_batch=3"]);
    assert_eq!(good.microbatches(), 2);
}

#[test]
fn a_step_of_more_tokens_than_are_counted_is_told_with_a_smaller_batch_and_a_shorter_sequence() {
    let most = u64::from(i32::MAX.unsigned_abs());
    let text = only(&["model.seq_len=500000000", "layout.dp=2", "train.micro_batch=2"]);
    assert!(text.starts_with("train.global_batch = 8, model.seq_len = 500000000"), "{text}");
    assert!(text.contains(&format!("are 4000000000 tokens in a step: at most {most}")), "{text}");
    assert!(text.ends_with(&format!("train.global_batch = 4  or  model.seq_len = {}", most / 8)), "{text}");
    // One sequence for each rank is too much already.
    let short = only(&["model.seq_len=4294967295"]);
    assert!(short.ends_with(&format!("nearest valid: model.seq_len = {}", most / 8)), "{short}");
    config(&[&format!("model.seq_len={}", most / 8)]);
}

#[test]
fn what_does_not_divide_over_the_layout_is_told_beside_whatever_else_is_wrong() {
    let keys = |overrides: &[&str]| -> Vec<String> {
        let violations = report(SMALL, overrides).violations;
        violations.iter().map(|violation| violation.settings[0].key.clone()).collect()
    };
    let bad = ["layout.tp=3", "train.global_batch=7", "layout.dp=2", "optimizer.decay_steps=5"];
    assert_eq!(keys(&bad), ["train.global_batch", "optimizer.decay_steps", "model.heads", "model.ffn_dim"]);
    // Once each, though the model has rules of its own for them.
    assert_eq!(keys(&["model.heads=3", "layout.tp=3"]), ["model.heads", "model.ffn_dim"]);
    assert_eq!(keys(&["model.heads=3", "layout.tp=2"]), ["model.heads", "model.heads"]);
    let turned = ["model.arch=llama", "model.dim=60", "model.heads=4", "layout.tp=2", "model.ffn_dim=160"];
    assert_eq!(keys(&turned), ["model.heads"]);
    // Tokens of a batch that has still to change are nobody's.
    let split = ["layout.tp=2", "layout.sequence_parallel=true", "model.seq_len=31"];
    assert_eq!(keys(&[&split[..], &["train.micro_batch=1"]].concat()), ["model.seq_len"]);
    assert_eq!(keys(&[&split[..], &["train.global_batch=7", "layout.dp=2"]].concat()), ["train.global_batch"]);
    // What would follow from a width that is wrong is no advice.
    assert_eq!(keys(&["layout.tp=2", "model.dim=0"]), ["model.dim"]);
    assert_eq!(keys(&["layout.tp=2", "layout.order=gtp-dp"]), ["layout.order"]);
}

#[test]
fn an_override_without_a_value_takes_the_files_setting_away() {
    let file = format!("{SMALL}[layout]\ntp = 2\nsequence_parallel = true\n");
    let refused = report(&file, &["layout.tp=1"]).violations;
    assert_eq!(refused[0].nearest[0].to_string(), "layout.sequence_parallel (not set)");
    let taken = parse(&file, &["layout.tp=1", "layout.sequence_parallel="]).unwrap();
    assert_eq!((taken.layout.tp, taken.layout.sequence_parallel), (1, None));
    // What is not there cannot be taken away, and a key that does not exist is told.
    assert!(only(&["gtp.look_ahead="]).contains("must be a whole number, not string"));
    assert!(only(&["gtp.lookahead="]).contains("there is no such key"));
}

#[test]
fn what_this_version_cannot_do_is_refused_with_what_it_can() {
    let cases = [
        ("layout.cp=2", "layout.cp = 1"),
        ("layout.ep=2", "layout.ep = 1"),
        ("layout.pp=2", "layout.pp = 1"),
        ("precision.grad=bf16", "precision.grad = \"f32\""),
        ("precision.reduce=bf16", "precision.reduce = \"f32\""),
        ("precision.master=bf16", "precision.master = \"f32\""),
        ("precision.moments=bf16", "precision.moments = \"f32\""),
    ];
    for (setting, instead) in cases {
        // Two ranks: experts need some to lie on.
        let text = only(&[setting, "layout.dp=2"]);
        assert!(text.contains("is not there yet: "), "{setting}: {text}");
        assert!(text.ends_with(&format!("nearest valid: {instead}")), "{setting}: {text}");
    }
}

/// Whoever follows the advice of a report has a configuration that runs, at the latest after as many rounds as there
/// are settings: no advice leads in a circle.
#[test]
fn advice_can_be_followed() {
    let broken: [&[&str]; 13] = [
        &["layout.tp=8"],
        &["layout.tp=3", "model.heads=4", "layout.sequence_parallel=true", "model.seq_len=31"],
        &["layout.gtp=3", "gtp.alignment=0", "layout.tp=2", "model.ffn_dim=77"],
        &["model.heads=5", "model.dim=130"],
        &["layout.dp=3", "train.global_batch=10", "train.micro_batch=4"],
        &["optimizer.schedule=linear", "optimizer.min_lr=7"],
        &["model.arch=lama", "model.vocab=3"],
        &["layout.tp=2", "layout.pp=3", "train.global_batch=1", "layout.dp=2"],
        &["model.kv_heads=3", "model.heads=4"],
        &["model.arch=llama", "model.dim=60", "model.heads=12"],
        &["model.arch=llama", "model.dim=63"],
        &["train.lr=3", "data.split=1,2,3,4", "layout.order=dp"],
        &["precision.param=f16", "train.steps=\"3\"", "device.timeout_seconds=-1"],
    ];
    for start in broken {
        let mut settings: Vec<String> = start.iter().map(|&s| s.to_owned()).collect();
        for _ in 0..8 {
            let overrides: Vec<&str> = settings.iter().map(String::as_str).collect();
            let Err(error) = parse(SMALL, &overrides) else { break };
            let TrainError::Config(report) = error else { panic!("{error}") };
            let violation = &report.violations[0];
            let advice = &violation.nearest[0];
            // A misspelled key goes, its advice comes.
            if matches!(violation.rule, Rule::UnknownKey { .. }) {
                settings.retain(|s| !s.starts_with(&format!("{}=", violation.settings[0].key)));
            }
            let SettingValue::Toml(value) = &advice.value else { panic!("no value in {advice}") };
            settings.push(format!("{}={value}", advice.key));
        }
        let overrides: Vec<&str> = settings.iter().map(String::as_str).collect();
        assert!(parse(SMALL, &overrides).is_ok(), "{start:?} ended as {settings:?}");
    }
}

#[test]
fn a_configuration_reads_back_from_what_it_is_written_as() {
    for overrides in [
        vec!["layout.dp=2", "layout.order=dp-tp-pp", "device.threads=3", "data.split=9,1"],
        vec!["optimizer.schedule=constant", "optimizer.lr=1e-3", "train.seed=12", "device.kind=dry"],
        vec!["model.arch=llama", "model.rope_base=20000"],
        vec!["model.arch=llama"],
    ] {
        let mut first = config(&overrides);
        let again = Config::parse(&first.to_toml(), Path::new("again.toml"), Path::new("/base"), &[""; 0]).unwrap();
        // From any folder: relative patterns are written in full.
        first.data.path = vec!["/base/*.txt".to_owned()];
        assert_eq!(again, first, "{}", first.to_toml());
    }
}

#[test]
fn a_file_is_read_from_its_own_folder_and_a_bad_one_is_named() {
    let dir = std::env::temp_dir().join(format!("trainer-config-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let path = dir.join("a.toml");
    fs::write(&path, SMALL).unwrap();
    let loaded = Config::load(&path, &["train.steps=2"]).unwrap();
    assert_eq!((loaded.data.base, loaded.train.steps), (fs::canonicalize(&dir).unwrap(), 2));

    fs::write(&path, "[model]\narch = gpt2\n").unwrap();
    let syntax = Config::load(&path, &[""; 0]).unwrap_err();
    assert!(syntax.to_string().contains("a.toml' is not valid TOML"), "{syntax}");
    let cause = std::error::Error::source(&syntax).unwrap().to_string();
    assert!(cause.contains("line 2"), "{cause}");

    let gone = Config::load(&dir.join("gone.toml"), &[""; 0]).unwrap_err();
    assert!(matches!(&gone, TrainError::ReadConfig { path, .. } if path.ends_with("gone.toml")), "{gone}");
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn the_quickstart_is_a_valid_configuration() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/quickstart.toml");
    let quickstart = Config::load(&path, &[""; 0]).unwrap();
    assert!(quickstart.layout.dp == 2 && quickstart.model.layers >= 2);
    // Its globs stay clear of build output: they name sources and docs only.
    assert!(quickstart.data.path.iter().all(|p| p.contains("/src/") || p.contains("/docs/") || p == "../README.md"));
}
