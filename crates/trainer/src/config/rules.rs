//! Defaults, what must hold between settings, and what this version cannot do.

use super::{
    Arch, Config, DataConfig, DdpConfig, DeviceConfig, DeviceKind, Dispatch, GateMode, GraphConfig, GraphOrder,
    GraphScope, GtpConfig, LayoutConfig, LogConfig, LossNormalization, ModelConfig, NoEffect, NotYet, Number,
    OptimizerConfig, PrecisionConfig, ProgressKind, Range, Recompute, Rule, ScheduleKind, Setting, TokenizerKind,
    TrainConfig, Violation,
    layout::violations,
    nearest::{divisors, nearest_divisors, nearest_multiples},
    reader::{Need, Reader, Section},
};
use data::Part;
use model::{ConfigRule, LlamaConfig};
use pgroups::Order;
use std::path::Path;

/// Width that heads are given when their number is left open: the usual one, and a multiple of any vector width.
const HEAD_DIM: u64 = 64;

/// Each costs a pass over `seq_len` tokens, and nobody reads more.
const MOST_SAMPLE_TOKENS: u32 = 100_000;

/// Rows: as many as vector units and matrix tiles like to begin at.
const DEFAULT_ALIGNMENT: usize = 16;

/// Tokens of a step: ranks count and add them in 32 bits.
const MOST_STEP_TOKENS: u64 = i32::MAX as u64;

/// Reads every section and fills in what is left open. What cannot be read is a violation in `reader` and has some
/// valid value in the result.
pub(crate) fn read(reader: &mut Reader, base: &Path) -> Config {
    // Read first: the vocabulary follows the tokenizer.
    let data = reader.section("data", |s| read_data(s, base));
    let vocab = data.source().tokenizer.vocab();
    let model = reader.section("model", |s| read_model(s, vocab));
    let layout = reader.section("layout", read_layout);
    let train = reader.section("train", |s| read_train(s, layout.data_ranks()));
    let optimizer = reader.section("optimizer", |s| read_optimizer(s, train.steps));
    let ddp = reader.section("ddp", |s| read_ddp(s, layout.dp, optimizer.distributed));
    let gtp = reader.section("gtp", |s| read_gtp(s, layout.gtp));
    let graph = reader.section("graph", read_graph);
    let precision = reader.section("precision", read_precision);
    let device = reader.section("device", read_device);
    let log = reader.section("log", |s| read_log(s, data.random_tokens));
    Config { model, layout, train, optimizer, ddp, gtp, graph, precision, data, device, log }
}

fn read_data(s: &mut Section, base: &Path) -> DataConfig {
    let random_tokens = s.size("random_tokens", 1);
    let path = read_path(s, random_tokens);
    let tokenizer = s.choice("tokenizer");
    if let Some(tokens) = random_tokens {
        let text = [
            (!path.is_empty()).then(|| Setting::new("data.path", format!("{path:?}"))),
            tokenizer.map(|kind: TokenizerKind| Setting::text("data.tokenizer", kind.to_string())),
        ];
        // Without random tokens there must be text.
        let instead = (!path.is_empty()).then(|| Setting::absent("data.random_tokens"));
        // One for each, since each has to go.
        for setting in text.into_iter().flatten() {
            let nearest = [Setting::absent(&setting.key)].into_iter().chain(instead.clone()).collect();
            let settings = vec![setting, Setting::new("data.random_tokens", tokens)];
            s.push(Violation { settings, rule: no_effect(NoEffect::RandomTokens), nearest });
        }
    }
    let tokenizer = tokenizer.unwrap_or(TokenizerKind::Bytes);
    let usual = "0.95,0.05";
    let written = s.text("split", "a string of weights like \"0.95,0.05\"").unwrap_or_else(|| usual.to_owned());
    let split = written.parse().unwrap_or_else(|problem: data::DataError| {
        s.push(Violation {
            settings: vec![Setting::text("data.split", &written)],
            rule: Rule::Split { problem: problem.to_string() },
            nearest: vec![Setting::text("data.split", usual)],
        });
        usual.parse().expect("BUG: the default split is valid")
    });
    DataConfig { base: base.to_owned(), path, random_tokens, tokenizer, split }
}

/// Where the text is; nowhere with random tokens.
fn read_path(s: &mut Section, random_tokens: Option<usize>) -> Vec<String> {
    let (meaning, example) = ("the files, folders or globs of text to train on", "\"../docs/**/*.md\"");
    let names_text = |list: &[String]| !list.is_empty() && list.iter().all(|p| !p.trim().is_empty());
    match s.texts("path") {
        Some(list) if names_text(&list) => return list,
        _ if random_tokens.is_some() => return Vec::new(),
        Some(list) => {
            let value = if let [one] = &list[..] { format!("{one:?}") } else { format!("{list:?}") };
            s.push(Violation {
                settings: vec![Setting::new("data.path", value)],
                rule: Rule::Required { meaning },
                nearest: vec![Setting::new("data.path", example)],
            });
        }
        None => {}
    }
    s.required("path", None, Need { meaning, example, meanwhile: vec![".".to_owned()] })
}

fn read_model(s: &mut Section, vocab: usize) -> ModelConfig {
    let arch = s.choice("arch").unwrap_or(Arch::Gpt2);
    let layers = s.size("layers", 1);
    let layers = s.required("layers", layers, Need { meaning: "blocks of the model", example: "4", meanwhile: 1 });
    let dim = s.size("dim", 1);
    let need = Need { meaning: "width of the residual stream", example: "128", meanwhile: 64 };
    let dim = s.required("dim", dim, need);
    let heads = s.size("heads", 1).unwrap_or_else(|| usual_heads(arch, dim));
    let kv_heads = s.size("kv_heads", 1).unwrap_or(heads);
    let ffn_dim = s.size("ffn_dim", 1).unwrap_or_else(|| match arch {
        Arch::Gpt2 => 4 * dim,
        Arch::Llama => LlamaConfig::usual_ffn_dim(dim),
    });
    let vocab = s.size("vocab", 1).unwrap_or(vocab);
    let vocab_rows = s.size("vocab_rows", 1).unwrap_or(vocab);
    let seq_len = s.size("seq_len", 1);
    let need = Need { meaning: "tokens per sequence", example: "128", meanwhile: 1 };
    let seq_len = s.required("seq_len", seq_len, need);
    let rope_base = s.size("rope_base", 1).or((arch == Arch::Llama).then_some(LlamaConfig::ROPE_BASE));
    let tied = s.flag("tied").unwrap_or(arch == Arch::Gpt2);
    ModelConfig { arch, layers, dim, heads, kv_heads, ffn_dim, vocab, vocab_rows, seq_len, rope_base, tied }
}

/// The number of heads that divides `dim` and makes them nearest to [`HEAD_DIM`] wide; of two the more. Heads that are
/// turned have an even width, unless `dim` leaves none.
fn usual_heads(arch: Arch, dim: usize) -> usize {
    let mut widths = divisors(dim as u64);
    if arch == Arch::Llama && dim.is_multiple_of(2) {
        widths.retain(|width| width.is_multiple_of(2));
    }
    let width = widths.into_iter().min_by_key(|width| width.abs_diff(HEAD_DIM)).unwrap_or(1);
    dim / width as usize
}

fn read_layout(s: &mut Section) -> LayoutConfig {
    let mut size = |axis| s.small(axis, 1).unwrap_or(1);
    let [tp, gtp, cp, ep, dp, pp] = ["tp", "gtp", "cp", "ep", "dp", "pp"].map(&mut size);
    let order = s.text("order", "a string of axes like \"tp-gtp-dp\"").unwrap_or_else(|| Order::DEFAULT.to_owned());
    let sequence_parallel = s.flag("sequence_parallel").or((tp > 1).then_some(false));
    LayoutConfig { tp, gtp, cp, ep, dp, pp, order, sequence_parallel }
}

fn read_gtp(s: &mut Section, gtp: u32) -> GtpConfig {
    let sharded = gtp > 1;
    GtpConfig {
        look_ahead: s.size("look_ahead", 0).or(sharded.then_some(1)),
        look_ahead_bytes: s.whole("look_ahead_bytes", 0).and_then(|bytes| usize::try_from(bytes).ok()),
        alignment: s.size("alignment", 0).or(sharded.then_some(DEFAULT_ALIGNMENT)),
        f32_reduce: s.flag("f32_reduce").or(sharded.then_some(false)),
    }
}

fn read_train(s: &mut Section, data_ranks: u64) -> TrainConfig {
    let steps = s.whole("steps", 1);
    let steps = s.required("steps", steps, Need { meaning: "optimizer steps", example: "100", meanwhile: 1 });
    let global_batch = s.whole("global_batch", 1);
    let example = data_ranks.saturating_mul(8).to_string();
    let need = Need { meaning: "sequences per step, over all ranks", example: &example, meanwhile: data_ranks };
    let global_batch = s.required("global_batch", global_batch, need);
    // A share that is not whole is refused later; 1 leaves the most global batches to suggest.
    let share = if global_batch.is_multiple_of(data_ranks) { global_batch / data_ranks } else { 1 };
    TrainConfig {
        steps,
        global_batch,
        micro_batch: s.whole("micro_batch", 1).unwrap_or(share),
        seed: s.whole("seed", 0).unwrap_or(0),
        recompute: s.choice("recompute").unwrap_or(Recompute::None),
        eval_interval: s.whole("eval_interval", 0).unwrap_or(0),
        eval_samples: s.whole("eval_samples", 0).unwrap_or(0),
        replica_check_interval: s.whole("replica_check_interval", 0).unwrap_or(0),
        loss_normalization: s.choice("loss_normalization").unwrap_or(LossNormalization::Mean),
    }
}

fn read_optimizer(s: &mut Section, steps: u64) -> OptimizerConfig {
    let lr = s.number("lr", Range::Above(0.0), 3e-4).unwrap_or(3e-4);
    let schedule = s.choice("schedule").unwrap_or(ScheduleKind::Cosine);
    let min_lr = s.number("min_lr", Range::AtLeast(0.0), lr / 10.0);
    OptimizerConfig {
        lr,
        min_lr: min_lr.or((schedule != ScheduleKind::Constant).then_some(lr / 10.0)),
        warmup_steps: s.whole("warmup_steps", 0).unwrap_or(0),
        schedule,
        decay_steps: s.whole("decay_steps", 0).or((schedule == ScheduleKind::Wsd).then_some(steps.div_ceil(5))),
        weight_decay: s.number("weight_decay", Range::AtLeast(0.0), 0.1).unwrap_or(0.1),
        beta1: s.number("beta1", Range::Below(0.0, 1.0), 0.9).unwrap_or(0.9),
        beta2: s.number("beta2", Range::Below(0.0, 1.0), 0.95).unwrap_or(0.95),
        eps: s.number("eps", Range::Above(0.0), 1e-8).unwrap_or(1e-8),
        clip: s.number("clip", Range::AtLeast(0.0), 1.0).unwrap_or(1.0),
        distributed: s.flag("distributed").unwrap_or(false),
    }
}

fn read_ddp(s: &mut Section, dp: u32, distributed: bool) -> DdpConfig {
    DdpConfig {
        bucket_size: s.size("bucket_size", 1).unwrap_or_else(|| default_bucket_size(dp)),
        overlap_grad_reduce: s.flag("overlap_grad_reduce").unwrap_or(true),
        overlap_param_gather: s.flag("overlap_param_gather").unwrap_or(distributed),
        dispatch: s.choice("dispatch").unwrap_or(Dispatch::Chain),
    }
}

fn default_bucket_size(dp: u32) -> usize {
    usize::try_from((1_000_000 * u64::from(dp)).max(40_000_000)).unwrap_or(usize::MAX)
}

fn read_graph(s: &mut Section) -> GraphConfig {
    let scope = s.choice("scope").unwrap_or(GraphScope::None);
    let gated = !matches!(scope, GraphScope::None | GraphScope::Step);
    let captured = scope != GraphScope::None;
    GraphConfig {
        scope,
        gates: s.choice("gates").or(gated.then_some(GateMode::InGraph)),
        order: s.choice("order").or(captured.then_some(GraphOrder::Accesses)),
    }
}

fn read_precision(s: &mut Section) -> PrecisionConfig {
    let mut number = |key| s.choice(key).unwrap_or(Number::F32);
    PrecisionConfig {
        param: number("param"),
        grad: number("grad"),
        reduce: number("reduce"),
        master: number("master"),
        moments: number("moments"),
    }
}

fn read_device(s: &mut Section) -> DeviceConfig {
    DeviceConfig {
        kind: s.choice("kind").unwrap_or(DeviceKind::Cpu),
        threads: s.threads("threads"),
        seed: s.whole("seed", 0).unwrap_or(0),
        timeout_seconds: s.number("timeout_seconds", Range::Above(0.0), 60.0).unwrap_or(60.0),
        measure_products: s.flag("measure_products").unwrap_or(true),
        deterministic: s.flag("deterministic").unwrap_or(true),
    }
}

fn read_log(s: &mut Section, random_tokens: Option<usize>) -> LogConfig {
    let usual = if random_tokens.is_some() { 0 } else { 200 };
    LogConfig {
        interval: s.whole("interval", 1).unwrap_or(10),
        progress: s.choice("progress").unwrap_or(ProgressKind::Auto),
        sample_tokens: s.up_to("sample_tokens", MOST_SAMPLE_TOKENS).unwrap_or(usual),
        tensorboard: s.flag("tensorboard").unwrap_or(true),
    }
}

/// What must hold between settings that are valid each by itself.
pub(crate) fn between_settings(config: &Config, given: &Reader) -> Vec<Violation> {
    let mut found = Vec::new();
    found.extend(heads_fit(&config.model));
    found.extend(positions_are_turned(&config.model));
    found.extend(vocab_holds_tokens(config));
    found.extend(batch_divides(config));
    found.extend(batch_tokens_fit(config));
    found.extend(config.layout.plan().err().iter().flat_map(|error| violations(&config.layout, error)));
    found.extend(eval_has_text(config));
    let OptimizerConfig { lr, min_lr, schedule, decay_steps, distributed, .. } = config.optimizer;
    if let Some(steps) = decay_steps.filter(|_| schedule != ScheduleKind::Wsd) {
        let kind = |kind: ScheduleKind| Setting::text("optimizer.schedule", kind.to_string());
        found.push(Violation {
            settings: vec![Setting::new("optimizer.decay_steps", steps), kind(schedule)],
            rule: no_effect(NoEffect::DecaySteps),
            nearest: vec![Setting::absent("optimizer.decay_steps"), kind(ScheduleKind::Wsd)],
        });
    }
    if let Some(min_lr) = min_lr {
        let settings = vec![number("optimizer.min_lr", min_lr), number("optimizer.lr", lr)];
        if schedule == ScheduleKind::Constant {
            let nearest = vec![
                Setting::absent("optimizer.min_lr"),
                Setting::text("optimizer.schedule", ScheduleKind::Cosine.to_string()),
            ];
            let settings = vec![settings[0].clone(), Setting::text("optimizer.schedule", schedule.to_string())];
            found.push(Violation { settings, rule: no_effect(NoEffect::ConstantSchedule), nearest });
        } else if min_lr > lr {
            found.push(Violation { settings, rule: Rule::MinLrBelowLr, nearest: vec![number("optimizer.min_lr", lr)] });
        }
    }
    if config.ddp.overlap_param_gather && !distributed {
        found.push(Violation {
            settings: vec![
                Setting::new("ddp.overlap_param_gather", true),
                Setting::new("optimizer.distributed", distributed),
            ],
            rule: no_effect(NoEffect::NothingGathered),
            nearest: vec![Setting::new("ddp.overlap_param_gather", false)],
        });
    }
    found.extend(dispatch_has_gathers(config, given));
    found.extend(gates_have_graphs(config));
    found.extend(order_has_graphs(config));
    found.extend(shards_have_settings(config));
    found.extend(layout_shares_the_model(config));
    found.extend(sequence_has_a_group(config));
    found
}

/// Where no weight is sharded nothing is gathered ahead.
fn shards_have_settings(config: &Config) -> Vec<Violation> {
    let GtpConfig { look_ahead, look_ahead_bytes, alignment, f32_reduce } = config.gtp;
    let set = |key: &str, value: Option<toml::Value>| value.map(|value| Setting::new(format!("gtp.{key}"), value));
    let size = |value: Option<usize>| value.map(|value| toml::Value::Integer(value as i64));
    let given = [
        set("look_ahead", size(look_ahead)),
        set("look_ahead_bytes", size(look_ahead_bytes)),
        set("alignment", size(alignment)),
        set("f32_reduce", f32_reduce.map(toml::Value::Boolean)),
    ];
    let gtp = |n: u32| Setting::new("layout.gtp", n);
    let useless = given.into_iter().flatten().filter(|_| config.layout.gtp == 1);
    let told = |setting: Setting| Violation {
        nearest: vec![Setting::absent(&setting.key), gtp(2)],
        settings: vec![setting, gtp(1)],
        rule: no_effect(NoEffect::NoShards),
    };
    useless.map(told).collect()
}

/// What of the model does not divide over tensor groups and weight shards of a layout that there can be.
fn layout_shares_the_model(config: &Config) -> Vec<Violation> {
    if config.layout.plan().is_err() {
        return Vec::new();
    }
    let Err(mut violations) = crate::train::lay_out(config) else { return Vec::new() };
    let batch_is_told = batch_divides(config).is_some();
    violations.0.retain(|violation| match violation.rule {
        // `heads_fit` tells these, with what is nearest.
        ConfigRule::Divides { .. } | ConfigRule::EvenHeads { .. } => false,
        // A batch that divides may make other microbatches, whose tokens split.
        ConfigRule::SplitsTokens { .. } => !batch_is_told,
        _ => true,
    });
    let told = |violation: &model::ConfigViolation| {
        let section = if violation.setting == "alignment" { "gtp" } else { "model" };
        let setting = |value: usize| Setting::new(format!("{section}.{}", violation.setting), value as i64);
        let axis = |axis: &str, size: u32| Setting::new(format!("layout.{axis}"), size);
        if let ConfigRule::SplitsTokens { seq_len, tp } = violation.rule {
            let length = |n: u64| Setting::new("model.seq_len", n);
            let nearest = nearest_multiples(tp.into(), seq_len as u64).into_iter().map(length);
            return Violation {
                settings: vec![length(seq_len as u64), axis("tp", tp)],
                rule: Rule::SplitsTokens,
                nearest: nearest.chain([Setting::new("layout.sequence_parallel", false)]).collect(),
            };
        }
        let (settings, nearest) = match violation.rule {
            ConfigRule::DividesOver { tp, nearest, nearest_tp } => {
                let nearest = nearest.into_iter().map(setting);
                (vec![axis("tp", tp)], nearest.chain([axis("tp", nearest_tp as u32)]).collect())
            }
            ConfigRule::NotBelow { value, .. } => (Vec::new(), vec![setting(value)]),
            ConfigRule::PadsRows { gtp, .. } => (vec![axis("gtp", gtp)], vec![setting(1)]),
            _ => (Vec::new(), Vec::new()),
        };
        let settings = [setting(violation.value)].into_iter().chain(settings).collect();
        let problem = violation.to_string();
        // Names and values stand in the line above, and "it" is not the last of them.
        let problem = problem.split_once(": ").map_or(problem.as_str(), |(_, rule)| rule);
        let problem = match problem.strip_prefix("it ") {
            Some(rule) => format!("{} {rule}", violation.setting),
            None => problem.to_owned(),
        };
        Violation { settings, rule: Rule::Share { problem }, nearest }
    };
    violations.0.iter().map(told).collect()
}

/// A rank that is alone in its tensor group keeps all tokens.
fn sequence_has_a_group(config: &Config) -> Option<Violation> {
    let LayoutConfig { tp, sequence_parallel, .. } = config.layout;
    let asked = sequence_parallel.filter(|_| tp == 1)?;
    Some(Violation {
        settings: vec![Setting::new("layout.sequence_parallel", asked), Setting::new("layout.tp", 1)],
        rule: no_effect(NoEffect::NoTensorGroup),
        nearest: vec![Setting::absent("layout.sequence_parallel"), Setting::new("layout.tp", 2)],
    })
}

/// Nothing waits at a gate where nothing is captured, and a whole step waits for everything.
fn gates_have_graphs(config: &Config) -> Option<Violation> {
    let scope = |scope: GraphScope| Setting::text("graph.scope", scope.to_string());
    let gated = !matches!(config.graph.scope, GraphScope::None | GraphScope::Step);
    let gates = config.graph.gates.filter(|_| !gated)?;
    Some(Violation {
        settings: vec![Setting::text("graph.gates", gates.to_string()), scope(config.graph.scope)],
        rule: no_effect(NoEffect::NoGates),
        nearest: vec![Setting::absent("graph.gates"), scope(GraphScope::Microbatch)],
    })
}

/// Nothing is in an order of its own where nothing is captured.
fn order_has_graphs(config: &Config) -> Option<Violation> {
    let scope = |scope: GraphScope| Setting::text("graph.scope", scope.to_string());
    let order = config.graph.order.filter(|_| config.graph.scope == GraphScope::None)?;
    Some(Violation {
        settings: vec![Setting::text("graph.order", order.to_string()), scope(config.graph.scope)],
        rule: no_effect(NoEffect::NoGraphs),
        nearest: vec![Setting::absent("graph.order"), scope(GraphScope::Microbatch)],
    })
}

/// Where no gather overlaps, all of them come with the step.
fn dispatch_has_gathers(config: &Config, given: &Reader) -> Option<Violation> {
    let DdpConfig { dispatch, overlap_param_gather, .. } = config.ddp;
    let setting = |dispatch: Dispatch| Setting::text("ddp.dispatch", dispatch.to_string());
    let enabling = match config.optimizer.distributed {
        true => Some(Setting::new("ddp.overlap_param_gather", true)),
        // A distributed optimizer gathers beside forward unless that is refused, too.
        false => {
            let refused = given.is_given("ddp", "overlap_param_gather");
            (!refused).then(|| Setting::new("optimizer.distributed", true))
        }
    };
    (dispatch != Dispatch::Chain && !overlap_param_gather).then(|| Violation {
        settings: vec![setting(dispatch), Setting::new("ddp.overlap_param_gather", overlap_param_gather)],
        rule: no_effect(NoEffect::NothingDispatched),
        nearest: [setting(Dispatch::Chain)].into_iter().chain(enabling).collect(),
    })
}

fn heads_fit(model: &ModelConfig) -> Vec<Violation> {
    let &ModelConfig { arch, dim, heads, kv_heads, .. } = model;
    let mut found = Vec::new();
    let set = |key: &str, value: usize| Setting::new(format!("model.{key}"), value);
    if !dim.is_multiple_of(heads) {
        let mut nearest: Vec<Setting> =
            nearest_divisors(dim as u64, heads as u64).into_iter().map(|h| Setting::new("model.heads", h)).collect();
        let wider = nearest_multiples(heads as u64, dim as u64);
        nearest.extend(wider.into_iter().map(|dim| Setting::new("model.dim", dim)));
        found.push(Violation {
            settings: vec![set("heads", heads), set("dim", dim)],
            rule: Rule::HeadsDivideDim,
            nearest,
        });
    } else if arch == Arch::Llama && !(dim / heads).is_multiple_of(2) {
        // Half as many columns in all leave every head a whole number of pairs.
        let half = dim.is_multiple_of(2).then_some(dim as u64 / 2);
        let fewer = half.into_iter().flat_map(|pairs| nearest_divisors(pairs, heads as u64));
        let mut nearest: Vec<Setting> = fewer.map(|h| Setting::new("model.heads", h)).collect();
        let wider = nearest_multiples(2 * heads as u64, dim as u64);
        nearest.extend(wider.into_iter().map(|dim| Setting::new("model.dim", dim)));
        found.push(Violation {
            settings: vec![set("heads", heads), set("dim", dim)],
            rule: Rule::EvenHeads { width: dim / heads },
            nearest,
        });
    }
    let settings = vec![set("kv_heads", kv_heads), set("heads", heads)];
    if arch == Arch::Gpt2 && kv_heads != heads {
        found.push(Violation { settings, rule: Rule::Gpt2HasNoGroups, nearest: vec![set("kv_heads", heads)] });
    } else if !heads.is_multiple_of(kv_heads) {
        let nearest = nearest_divisors(heads as u64, kv_heads as u64);
        let nearest = nearest.into_iter().map(|h| Setting::new("model.kv_heads", h)).collect();
        found.push(Violation { settings, rule: Rule::KvHeadsDivideHeads, nearest });
    }
    found
}

fn positions_are_turned(model: &ModelConfig) -> Option<Violation> {
    let base = model.rope_base.filter(|_| model.arch == Arch::Gpt2)?;
    let arch = |arch: Arch| Setting::text("model.arch", arch.to_string());
    Some(Violation {
        settings: vec![Setting::new("model.rope_base", base), arch(Arch::Gpt2)],
        rule: no_effect(NoEffect::LearnedPositions),
        nearest: vec![Setting::absent("model.rope_base"), arch(Arch::Llama)],
    })
}

fn vocab_holds_tokens(config: &Config) -> Option<Violation> {
    let (vocab, tokens) = (config.model.vocab, config.data.source().tokenizer.vocab());
    (vocab < tokens && config.data.random_tokens.is_none()).then(|| Violation {
        settings: vec![Setting::new("model.vocab", vocab)],
        rule: Rule::VocabHoldsTokens { tokens, tokenizer: config.data.tokenizer.to_string() },
        nearest: vec![Setting::new("model.vocab", tokens)],
    })
}

/// An evaluation needs a part of the text that is not trained on, and samples of an evaluation that there is.
fn eval_has_text(config: &Config) -> Option<Violation> {
    let TrainConfig { eval_interval, eval_samples, .. } = config.train;
    let interval = |steps: u64| Setting::new("train.eval_interval", steps);
    if eval_interval == 0 {
        let samples = Setting::new("train.eval_samples", eval_samples);
        return (eval_samples > 0).then(|| Violation {
            settings: vec![samples, interval(0)],
            rule: no_effect(NoEffect::NeverEvaluated),
            nearest: vec![Setting::new("train.eval_samples", 0), interval(10)],
        });
    }
    // Of a thousand tokens' weights: a part of weight 0 has none of them, whatever the text.
    let empty = config.data.split.range(Part::Eval, usize::MAX >> 11).is_empty();
    empty.then(|| Violation {
        settings: vec![interval(eval_interval), Setting::text("data.split", config.data.split.to_string())],
        rule: Rule::EvalSplit,
        nearest: vec![Setting::text("data.split", "0.95,0.05"), interval(0)],
    })
}

fn batch_divides(config: &Config) -> Option<Violation> {
    let TrainConfig { global_batch, micro_batch, .. } = config.train;
    let data_ranks = config.layout.data_ranks();
    let step = micro_batch.saturating_mul(data_ranks);
    if global_batch.is_multiple_of(step) {
        return None;
    }
    let mut nearest: Vec<Setting> = nearest_multiples(step, global_batch)
        .into_iter()
        .map(|batch| Setting::new("train.global_batch", batch))
        .collect();
    // With this many ranks, other microbatches may do; as small as asked for or smaller, so that memory suffices.
    if global_batch.is_multiple_of(data_ranks) {
        let fitting = nearest_divisors(global_batch / data_ranks, micro_batch).into_iter().find(|&m| m < micro_batch);
        nearest.extend(fitting.map(|micro| Setting::new("train.micro_batch", micro)));
    }
    // With this batch, other numbers of ranks may do.
    let each = micro_batch.saturating_mul(config.layout.gtp.into());
    if !global_batch.is_multiple_of(data_ranks) && global_batch.is_multiple_of(each) {
        let fitting = nearest_divisors(global_batch / each, config.layout.dp.into());
        nearest.extend(fitting.into_iter().map(|ranks| Setting::new("layout.dp", ranks)));
    }
    // It is 1 if nobody set it, and then not what hinders.
    let micro = (micro_batch > 1).then(|| Setting::new("train.micro_batch", micro_batch));
    let batch = [Setting::new("train.global_batch", global_batch)].into_iter().chain(micro);
    let layout = [("layout.dp", config.layout.dp), ("layout.gtp", config.layout.gtp)];
    Some(Violation {
        settings: batch.chain(layout.map(|(key, ranks)| Setting::new(key, ranks))).collect(),
        rule: Rule::BatchMultiple { micro_batch, data_ranks },
        nearest,
    })
}

fn batch_tokens_fit(config: &Config) -> Option<Violation> {
    let (global_batch, seq_len) = (config.train.global_batch, config.model.seq_len as u64);
    let tokens = u128::from(global_batch) * u128::from(seq_len);
    let batch = |n: u64| Setting::new("train.global_batch", n);
    let length = |n: u64| Setting::new("model.seq_len", n);
    let step = config.train.micro_batch.saturating_mul(config.layout.data_ranks());
    let fewer = (MOST_STEP_TOKENS / seq_len / step).saturating_mul(step);
    let shorter = MOST_STEP_TOKENS / global_batch;
    let nearest = [(fewer > 0).then(|| batch(fewer)), (shorter > 0).then(|| length(shorter))];
    (tokens > u128::from(MOST_STEP_TOKENS)).then(|| Violation {
        settings: vec![batch(global_batch), length(seq_len)],
        rule: Rule::BatchTokens { tokens, most: MOST_STEP_TOKENS },
        nearest: nearest.into_iter().flatten().collect(),
    })
}

/// What this version cannot do: refused, so that no setting is silently without effect. A line goes when its feature
/// comes.
pub(crate) fn not_yet(config: &Config) -> Vec<Violation> {
    let Config { layout, precision, .. } = config;
    let mut found = Vec::new();
    let mut refuse = |asked: bool, setting: Setting, what: NotYet, instead: Setting| {
        if asked {
            found.push(Violation { settings: vec![setting], rule: Rule::NotYet { what }, nearest: vec![instead] });
        }
    };
    let text = |key: &str, choice: &dyn ToString| Setting::text(key, choice.to_string());

    let LayoutConfig { cp, ep, pp, .. } = *layout;
    for (axis, ranks) in [("cp", cp), ("ep", ep), ("pp", pp)] {
        let size = |ranks: u32| Setting::new(format!("layout.{axis}"), ranks);
        refuse(ranks > 1, size(ranks), NotYet::Axis, size(1));
    }
    let PrecisionConfig { grad, reduce, master, moments, .. } = *precision;
    let numbers = [("grad", grad), ("reduce", reduce), ("master", master), ("moments", moments)];
    for (key, stored) in numbers {
        let setting = |number: Number| text(&format!("precision.{key}"), &number);
        refuse(stored == Number::Bf16, setting(stored), NotYet::Bf16, setting(Number::F32));
    }
    found
}

fn number(key: &str, value: f64) -> Setting {
    Setting::new(key, toml::Value::Float(value))
}

fn no_effect(because: NoEffect) -> Rule {
    Rule::NoEffect { because }
}
