//! The command, as a process of its own.

use std::{
    path::Path,
    process::{Command, Output},
};

use crate::fixture::Folder;

fn trainer(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_trainer")).args(args).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn groups_prints_every_key_as_json() {
    let output = trainer(&["groups", "--world", "8", "--layout", "tp=2,gtp=2,dp=2", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let groups: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    let want = [
        ("tp", "[[0,1],[2,3],[4,5],[6,7]]"),
        ("gtp", "[[0,2],[1,3],[4,6],[5,7]]"),
        ("dp", "[[0,4],[1,5],[2,6],[3,7]]"),
        ("cp", "[[0],[1],[2],[3],[4],[5],[6],[7]]"),
        ("pp", "[[0],[1],[2],[3],[4],[5],[6],[7]]"),
        ("dp_cp", "[[0,4],[1,5],[2,6],[3,7]]"),
        ("dp_cp_gtp", "[[0,2,4,6],[1,3,5,7]]"),
        ("mp", "[[0,1,2,3],[4,5,6,7]]"),
    ];
    for (key, lists) in want {
        assert_eq!(groups[key].to_string(), lists, "{key}");
    }
}

#[test]
fn init_writes_weights_and_their_configuration_and_needs_no_text() {
    let folder = Folder::with_config("[train]\nsteps = 2\nglobal_batch = 4\n");
    let (config, out) = (folder.config(), folder.path().join("weights"));
    let [config, out_dir] = [&config, &out].map(|path| path.to_str().unwrap());
    let set = ["--set", "data.path=nothing/*.txt", "--set", "device.kind=cuda"];
    let output = trainer(&[&["init", config, "--out", out_dir], &set[..]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(
        stdout(&output).contains("weights: ") && stdout(&output).contains("model.safetensors"),
        "{}",
        stdout(&output)
    );
    let file = std::fs::read(out.join("model.safetensors")).unwrap();
    assert!(String::from_utf8_lossy(&file).contains("transformer.wte.weight"));
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
    assert_eq!(json["model_type"], "gpt2");
    assert!(!trainer(&["init", config]).status.success(), "without --out there is nowhere to write to");
}

#[test]
fn groups_follows_the_order_it_is_given() {
    let args = ["groups", "--world", "8", "--layout", "tp=2,pp=2,dp=2", "--order", "tp-pp-dp", "--json"];
    let groups: serde_json::Value = serde_json::from_str(&stdout(&trainer(&args))).unwrap();
    assert_eq!(groups["pp"].to_string(), "[[0,2],[1,3],[4,6],[5,7]]");
    let refused = trainer(&["groups", "--world", "8", "--layout", "tp=3"]);
    assert!(!refused.status.success());
    assert!(stderr(&refused).contains("dense tp=3 x gtp=1"), "{}", stderr(&refused));
}

#[test]
fn a_run_that_cannot_begin_says_why_and_fails() {
    let folder = Folder::with_config("[train]\nsteps = 2\nglobal_batch = 4\n");
    let config = folder.config();
    let config = config.to_str().unwrap();
    let run_dir = folder.path().join("run");
    let run_dir = run_dir.to_str().unwrap();
    let cases = [
        (["--set", "train.stepz=3"], "nearest valid: train.steps = 3"),
        (["--set", "model.seq_len=100000"], "tokens"),
        (["--set", "data.path=nothing/*.txt"], "nothing/*.txt"),
        (["--set", "layout.pp=2"], "layout.pp = 2"),
        (["--set", "device.kind=dry"], "trainer plan"),
    ];
    for (set, text) in cases {
        let output = trainer(&["train", config, "--run-dir", run_dir, set[0], set[1]]);
        assert!(!output.status.success(), "{set:?}");
        assert!(stderr(&output).contains(text), "{set:?}: {}", stderr(&output));
        assert!(!folder.path().join("run/metrics.jsonl").exists(), "{set:?} left metrics");
    }
}

#[test]
fn a_host_without_a_card_is_told_what_is_missing_and_others_train() {
    let folder = Folder::with_config("[train]\nsteps = 2\nglobal_batch = 4\n");
    let (config, run_dir) = (folder.config(), folder.path().join("run"));
    let [config, run_dir] = [&config, &run_dir].map(|path| path.to_str().unwrap());
    let output = trainer(&["train", config, "--run-dir", run_dir, "--set", "device.kind=cuda"]);
    let error = stderr(&output);
    if output.status.success() {
        assert!(stdout(&output).contains("on cuda"), "{}", stdout(&output));
        return;
    }
    let missing = ["libcuda", "libnvrtc", "libcublasLt"].iter().any(|library| error.contains(library));
    assert!(missing && error.contains("install it") || error.contains("card"), "{error}");
    assert!(!Path::new(run_dir).join("metrics.jsonl").exists(), "nothing was begun");
}

#[test]
fn plan_needs_no_data_and_names_every_kind_of_memory() {
    let folder = Folder::with_config("[train]\nsteps = 2\nglobal_batch = 4\n");
    let output = trainer(&["plan", folder.config().to_str().unwrap(), "--set", "data.path=nothing.txt"]);
    assert!(output.status.success(), "{}", stderr(&output));
    for kind in ["param", "grad", "optimizer", "arena", "other"] {
        assert!(stdout(&output).contains(kind), "{}", stdout(&output));
    }
}

#[test]
fn a_plan_of_sequences_that_no_host_holds_a_batch_of_is_made() {
    // 128 sequences of a million tokens: a gigabyte of text, which nobody needs to plan with.
    let folder = Folder::with_config("[train]\nsteps = 2\nglobal_batch = 128\nmicro_batch = 1\neval_interval = 1\n");
    let config = folder.config();
    let output = trainer(&["plan", config.to_str().unwrap(), "--set", "model.seq_len=1000000"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let refused = trainer(&["plan", config.to_str().unwrap(), "--set", "model.seq_len=4000000000"]);
    assert!(stderr(&refused).contains("tokens in a step: at most 2147483647"), "{}", stderr(&refused));
}

#[test]
fn what_cannot_be_written_at_the_end_is_told_before_training() {
    let folder = Folder::with_config("[train]\nsteps = 2\nglobal_batch = 4\n");
    let config = folder.config();
    let run = |dir: &str, more: &[&str]| {
        let dir = folder.path().join(dir);
        let args = [&["train", config.to_str().unwrap(), "--run-dir", dir.to_str().unwrap()], more].concat();
        let output = trainer(&args);
        assert!(!output.status.success(), "{}", stdout(&output));
        assert!(!dir.join("metrics.jsonl").exists(), "nothing was trained");
        stderr(&output)
    };
    for name in ["loss.svg", "loss.svg.tmp"] {
        std::fs::create_dir_all(folder.path().join(name).join(name)).unwrap();
        let text = run(name, &[]);
        assert!(text.contains("cannot write '") && text.contains(&format!("{name}/{name}'")), "{text}");
    }
    let blocked = folder.path().join("loss.svg/timeline");
    std::fs::create_dir(&blocked).unwrap();
    let text = run("fresh", &["--timeline", blocked.to_str().unwrap()]);
    assert!(text.contains("cannot write '") && text.contains("/timeline'"), "{text}");
    assert!(!folder.path().join("fresh/loss.svg").exists(), "trying leaves nothing");
}

#[test]
fn what_is_read_is_told_as_one_file_or_as_random_tokens() {
    let folder = Folder::with_config("[train]\nsteps = 1\nglobal_batch = 4\n");
    let (config, run_dir) = (folder.config(), folder.path().join("run"));
    let train = ["train", config.to_str().unwrap(), "--run-dir", run_dir.to_str().unwrap()];
    let train = [&train[..], &["--set", "log.progress=lines", "--set"]].concat();
    let text = trainer(&[&train[..], &["log.sample_tokens=0"]].concat());
    assert!(
        stdout(&text).lines().next().is_some_and(|line| line.ends_with(" tokens from 1 file")),
        "{}",
        stdout(&text)
    );
    let random = trainer(&[&train[..], &["data.path=", "--set", "data.random_tokens=5000"]].concat());
    assert!(stdout(&random).starts_with("5000 random tokens\n"), "{}", stdout(&random));
}

#[test]
fn plan_draws_a_step_that_nobody_ran() {
    let folder = Folder::with_config("[layout]\ndp = 4\n[train]\nsteps = 2\nglobal_batch = 4\n");
    let file = folder.path().join("plan.json");
    let output = trainer(&["plan", folder.config().to_str().unwrap(), "--timeline", file.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    let picture: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let events = picture["traceEvents"].as_array().unwrap();
    for process in 1..=4 {
        let products = |e: &&serde_json::Value| e["pid"] == process && e["name"].as_str().unwrap().starts_with("gemm@");
        assert!(events.iter().filter(products).count() >= 3 * 9, "process {process}");
    }
}

#[test]
fn the_readme_shows_every_command_with_every_option() {
    let page = include_str!("../../README.md");
    let help = |args: &[&str]| stdout(&trainer(args));
    // Names stand two spaces from the begin of a line; what is further in goes on with the line before.
    let commands = help(&["--help"]);
    let commands = commands.split_once("Commands:\n").unwrap().1.split_once("\n\n").unwrap().0;
    let named = commands.lines().filter_map(|line| line.strip_prefix("  ")).filter(|line| !line.starts_with(' '));
    let names = named.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help");
    let mut count = 0;
    for name in names {
        count += 1;
        let shown: String = page.lines().filter(|line| line.starts_with(&format!("trainer {name} "))).collect();
        let help = help(&[name, "--help"]);
        let options = help.split_whitespace().filter(|word| word.starts_with("--") && *word != "--help");
        let options = options.map(|word| word.split(|c: char| !c.is_alphabetic() && c != '-').next().unwrap());
        for option in options {
            assert!(shown.contains(&format!("{option} ")) || shown.contains(&format!("{option}]")), "{name} {option}");
        }
        assert!(!shown.is_empty(), "{name}");
    }
    assert!(count >= 6, "{commands}");
}

#[test]
fn doctor_names_what_is_there_and_holds_a_configuration_against_it() {
    let plain = stdout(&trainer(&["doctor"]));
    let always = ["cores", "memory", "thread limit", "drivers", "local transport", "nccl transport", "mpi transport"];
    for what in always.into_iter().chain(["optional features"]) {
        assert!(plain.lines().any(|line| line.contains(what)), "{what} is not in\n{plain}");
    }
    assert!(!plain.contains("memory for the run"));
    let numbers = Folder::with_config("[train]\nsteps = 2\nglobal_batch = 4\n");
    let set = ["--set", "data.path=", "--set", "data.random_tokens=5000"];
    let held = stdout(&trainer(&[&["doctor", numbers.config().to_str().unwrap()], &set[..]].concat()));
    assert!(held.lines().any(|line| line.starts_with("there") && line.contains("5000 random tokens")), "{held}");
    let folder = Folder::with_config("[train]\nsteps = 2\nglobal_batch = 4\n");
    let config = folder.config();
    let held = stdout(&trainer(&["doctor", config.to_str().unwrap(), "--set", "device.threads=1000"]));
    for (word, what) in [("missing", "threads"), ("there", "memory for the run"), ("there", "text")] {
        let line =
            held.lines().find(|line| line.split_once("  ").is_some_and(|(_, rest)| rest.trim().starts_with(what)));
        assert!(line.is_some_and(|line| line.starts_with(word)), "{what} in\n{held}");
    }
}

#[test]
fn spans_are_told_if_the_environment_asks_for_them() {
    let folder =
        Folder::with_config("[train]\nsteps = 3\nglobal_batch = 4\neval_interval = 2\n[graph]\nscope = \"layer\"\n");
    let (config, run_dir) = (folder.config(), folder.path().join("run"));
    let told = |filter: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
        command.args(["train", config.to_str().unwrap(), "--run-dir", run_dir.to_str().unwrap()]);
        stderr(&command.env("RUST_LOG", filter).output().unwrap())
    };
    let text = told("trainer=debug");
    let spans = ["load_data", "plan_run", "build_rank", "run_steps", "run_step", "evaluate_model", "write_sample"];
    for span in spans {
        let closed = |line: &str| line.contains(&format!("trainer.{span}")) && line.contains("time.busy=");
        assert!(text.lines().any(closed), "{span} in\n{text}");
    }
    assert_eq!(text.lines().filter(|line| line.contains("trainer.step_done")).count(), 3);
    // Captures are inside the steps of their rank, and the graphs inside those.
    let text = told("trainer=debug,graphcap=debug");
    let inside = "trainer.run_steps{rank=0}:trainer.capture_graphs{scope=layer}:graphcap.capture_graph{";
    assert!(text.lines().any(|line| line.contains(inside)), "{inside} in\n{text}");
    assert_eq!(told("warn"), "");
}

#[test]
fn captured_steps_are_told_with_their_number_time_and_memory() {
    let folder = Folder::with_config("[layout]\ndp = 2\n[train]\nsteps = 3\nglobal_batch = 4\neval_interval = 2\n");
    let (config, run_dir) = (folder.config(), folder.path().join("run"));
    let told = |scope: &str| -> Vec<String> {
        let scope = format!("graph.scope={scope}");
        let args = ["train", config.to_str().unwrap(), "--run-dir", run_dir.to_str().unwrap()];
        let output = trainer(&[&args[..], &["--set", &scope, "--set", "log.progress=lines"]].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output).lines().filter(|line| line.contains(" nodes captured in ")).map(str::to_owned).collect()
    };
    assert!(told("none").is_empty(), "nothing was captured");
    // Two layers between an embedding and a head, there and back; forward only in an evaluation.
    for (scope, graphs, eval_graphs) in [("layer", 8, 4), ("chunk", 2, 1), ("microbatch", 1, 1), ("step", 1, 1)] {
        let lines = told(scope);
        let [training, evaluation] = &lines[..] else { panic!("{scope}: {lines:?}") };
        for (line, what, graphs) in [(training, "training", graphs), (evaluation, "evaluation", eval_graphs)] {
            let s = if graphs == 1 { "" } else { "s" };
            assert!(line.starts_with(&format!("{what}, each rank: {graphs} graph{s} of ")), "{scope}: {line}");
            assert!(line.ends_with(" ms, no memory allocated"), "{scope}: {line}");
        }
    }
}

#[test]
fn verify_ends_with_success_where_nothing_is_missing_and_with_the_missing_wait_where_one_is() {
    let folder = Folder::with_config("[layout]\ndp = 2\n[train]\nsteps = 1\nglobal_batch = 4\n");
    let config = folder.config();
    let config = config.to_str().unwrap();
    for scope in ["none", "layer", "chunk", "microbatch", "step"] {
        let scope = format!("graph.scope={scope}");
        let output = trainer(&["verify", config, "--set", &scope, "--set", "optimizer.distributed=true"]);
        assert!(output.status.success(), "{scope}: {}{}", stdout(&output), stderr(&output));
        assert!(stdout(&output).contains("operations on 2 ranks: nothing to object to"), "{}", stdout(&output));
    }
    let (trace, picture) = (folder.path().join("run.trace"), folder.path().join("race.svg"));
    let mut broken = vec!["verify", config, "--set", "optimizer.distributed=true", "--set", "graph.scope=microbatch"];
    broken.extend(["--on", "sim", "--seeds", "2", "--drop", "pgroups.read_after_publish"]);
    broken.extend(["--trace", trace.to_str().unwrap(), "--picture", picture.to_str().unwrap()]);
    let output = trainer(&broken);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let told = stdout(&output);
    assert!(told.contains("a wait named 'pgroups.read_after_publish' was dropped here"), "{told}");
    assert!(told.contains("sim, seed 0") && !told.contains("seed 1"), "{told}");
    assert!(told.contains("without 'pgroups.read_after_publish': ") && told.contains("waits named 'pgroups"), "{told}");
    let picture = std::fs::read_to_string(picture).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("nothing orders these: no 'pgroups.read_after_publish'"));
    let seeds = trainer(&["verify", config, "--on", "dry", "--seeds", "3"]);
    assert_eq!((seeds.status.code(), stdout(&seeds)), (Some(2), String::new()));
    assert!(stderr(&seeds).contains("dry runs no order"), "{}", stderr(&seeds));
    let typo = trainer(&["verify", config, "--drop", "pgroups.read_after_publsh"]);
    assert_eq!(typo.status.code(), Some(2), "an error, no finding");
    assert!(stderr(&typo).contains("no wait is named 'pgroups.read_after_publsh'"), "{}", stderr(&typo));
    assert!(stderr(&typo).contains("pgroups.read_after_publish"), "{}", stderr(&typo));
    let covered = trainer(&["verify", config, "--drop", "ddp.grad_after_free"]);
    assert!(covered.status.success(), "{}", stderr(&covered));
    assert!(stdout(&covered).contains("waits named 'ddp.grad_after_free' were dropped: each is covered by others"));
    // The order that failed, by the command that was printed.
    let line = told.lines().find_map(|line| line.strip_prefix("this order again: ")).unwrap();
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", line]).env("PATH", Path::new(env!("CARGO_BIN_EXE_trainer")).parent().unwrap());
    let again = shell.output().unwrap();
    assert_eq!(again.status.code(), Some(1), "{}", stderr(&again));
    let report =
        |text: &str| text[text.find("without '").unwrap()..text.find(" operations on 2 ranks").unwrap()].to_owned();
    assert_eq!(report(&stdout(&again)), report(&told));
    // The trace that was written, and the smallest part of it.
    let small = folder.path().join("small.trace");
    let args = ["verify", "--read", trace.to_str().unwrap(), "--shrunk", small.to_str().unwrap()];
    let read = trainer(&args);
    assert_eq!(read.status.code(), Some(1), "{}", stderr(&read));
    assert_eq!(report(&stdout(&read)), report(&told));
    assert!(std::fs::metadata(&small).unwrap().len() * 20 < std::fs::metadata(&trace).unwrap().len());
    let read = trainer(&["verify", "--read", small.to_str().unwrap()]);
    assert_eq!(read.status.code(), Some(1), "{}", stderr(&read));
    assert!(stdout(&read).contains("without 'pgroups.read_after_publish': 1 finding\n"), "{}", stdout(&read));
    for (file, text) in [("nothing.trace", "cannot read trace"), ("run.toml", "this is no trace")] {
        let refused = trainer(&["verify", "--read", folder.path().join(file).to_str().unwrap()]);
        assert_eq!(refused.status.code(), Some(2));
        assert!(stderr(&refused).contains(text), "{}", stderr(&refused));
    }
}

#[test]
fn a_limit_that_is_too_short_is_named_with_its_setting() {
    let folder = Folder::with_config("[train]\nsteps = 2\nglobal_batch = 4\n");
    let (config, run_dir) = (folder.config(), folder.path().join("run"));
    let (config, run_dir) = (config.to_str().unwrap(), run_dir.to_str().unwrap());
    let output = trainer(&["train", config, "--run-dir", run_dir, "--set", "device.timeout_seconds=1e-9"]);
    assert_eq!(output.status.code(), Some(1));
    let told = stderr(&output);
    assert!(told.contains("device.timeout_seconds = 0.000000001: raise it") && told.contains("waited 1ns"), "{told}");
}

#[test]
fn the_process_grows_by_what_was_planned() {
    // Large enough that threads and packing buffers are small beside it.
    let folder = Folder::with_config(
        "[train]\nsteps = 3\nglobal_batch = 16\n[device]\nthreads = 2\n[optimizer]\nlr = 1e-3\nwarmup_steps = 1\n",
    );
    let (run_dir, config) = (folder.path().join("run"), folder.config());
    let model = ["model.dim=256", "model.heads=4", "model.seq_len=128", "model.layers=5"];
    for layout in [&["layout.dp=2"][..], &["layout.tp=2", "layout.gtp=2"]] {
        let mut args = vec!["train", config.to_str().unwrap(), "--run-dir", run_dir.to_str().unwrap()];
        model.iter().chain(layout).for_each(|set| args.extend(["--set", set]));
        let output = trainer(&args);
        assert!(output.status.success(), "{}", stderr(&output));
        let text = stdout(&output);
        let line = text.lines().find(|l| l.starts_with("memory: ")).expect("a memory line");
        let numbers: Vec<f64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [planned, grown] = numbers[..] else { panic!("{line}") };
        assert!((grown - planned).abs() <= 0.1 * planned, "{layout:?}: {line}");
    }
}

#[test]
fn a_plan_in_detail_shows_slots_what_gathers_hide_behind_and_who_publishes() {
    let folder = Folder::with_config(
        "[layout]\ntp = 2\ngtp = 2\ndp = 2\n[train]\nsteps = 3\nglobal_batch = 8\n[optimizer]\nlr = 1e-3\n\
         distributed = true\n[ddp]\nbucket_size = 2_000\n",
    );
    let config = folder.config();
    let brief = stdout(&trainer(&["plan", config.to_str().unwrap()]));
    assert!(!brief.contains("hide behind"), "{brief}");
    // Parts of a small model have their sizes too.
    let sizes: Vec<&str> = brief.lines().skip(1).take_while(|line| line.ends_with("iB")).collect();
    let small = |line: &&&str| line.ends_with(" KiB") && !line.contains(" 0.00 ");
    assert!(sizes.iter().filter(small).count() >= 2 && !brief.contains(" 0.00 MiB"), "{brief}");
    let output = trainer(&["plan", config.to_str().unwrap(), "--verbose"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.starts_with(&brief), "{text}");
    for part in
        ["pass 'train': gathered weights", " at byte", "what gathers hide behind", "issued at", "each write once"]
    {
        assert!(text.contains(part), "no '{part}' in\n{text}");
    }
    assert!(!text.contains("no plan had foreseen"), "{text}");
    assert!(text.contains("\n  no.  weight "), "{text}");
    // Long names of buckets move no column.
    let table = text.lines().skip_while(|line| !line.starts_with("  bucket "));
    let rows: Vec<&str> = table.take_while(|line| line.starts_with("  ")).collect();
    let end = rows[0].find(" write ").expect("a column of writes") + " write".len();
    assert!(rows.iter().any(|row| row.contains("  h.0.attn.c_attn.weight ")), "{rows:#?}");
    for row in &rows[1..] {
        let digit = row.as_bytes()[end - 1].is_ascii_digit();
        assert!(digit && row[end..].starts_with("  ") && row[..end - 5].ends_with(' '), "{row}\n{}", rows[0]);
    }
    // The trained run tells the same with times.
    let run_dir = folder.path().join("run");
    let timeline = folder.path().join("t.json");
    let [config, run_dir, timeline] = [&config, &run_dir, &timeline].map(|path| path.to_str().unwrap());
    let trained = trainer(&["train", config, "--run-dir", run_dir, "--verbose", "--timeline", timeline]);
    assert!(trained.status.success(), "{}", stderr(&trained));
    let text = stdout(&trained);
    assert!(text.contains("exposed") && text.contains(" us"), "{text}");
}

#[test]
fn a_process_among_several_refuses_to_train_alone() {
    let folder = Folder::with_config("[train]\nsteps = 2\nglobal_batch = 4\n");
    let config = folder.config();
    let run = |variables: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
        command.args(["train", config.to_str().unwrap(), "--run-dir", folder.path().join("run").to_str().unwrap()]);
        command.envs(variables.iter().copied()).output().unwrap()
    };
    let two = run(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]);
    assert!(!two.status.success() && stderr(&two).contains("WORLD_SIZE is 2"), "{}", stderr(&two));
    let unreadable = run(&[("RANK", "abc"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")]);
    assert!(!unreadable.status.success() && stderr(&unreadable).contains("abc"), "{}", stderr(&unreadable));
    assert!(!folder.path().join("run/metrics.jsonl").exists());
    let alone = run(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")]);
    assert!(alone.status.success(), "{}", stderr(&alone));
}
