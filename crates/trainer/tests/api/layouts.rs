//! The configurations that come with the repository.

use std::{collections::BTreeMap, path::PathBuf};

use trainer::{Config, RunOptions, plan_run};

use crate::fixture::{Folder, losses};

fn files() -> Vec<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let mut files: Vec<PathBuf> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn name(file: &std::path::Path) -> String {
    file.file_stem().unwrap().to_string_lossy().into_owned()
}

/// Of the first steps, by the name of the file.
fn train_all(steps: usize) -> BTreeMap<String, Vec<f32>> {
    let train = |file: PathBuf| {
        let set = [&format!("train.steps={steps}"), "log.progress=none", "log.sample_tokens=0"];
        let config = Config::load(&file, &set).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let folder = Folder::new();
        let trained = trainer::train(&config, RunOptions::new(folder.path().join("run"))).unwrap();
        (name(&file), losses(&trained.metrics))
    };
    files().into_iter().map(train).collect()
}

#[test]
fn every_configuration_trains_and_layouts_of_one_model_have_its_losses() {
    let all = train_all(3);
    assert!(all.values().all(|losses| losses.iter().all(|loss| loss.is_finite()) && losses[2] < losses[0]));
    let layouts: BTreeMap<_, _> = all.iter().filter(|(name, _)| *name != "quickstart").collect();
    let names: Vec<&str> = layouts.keys().map(|name| name.as_str()).collect();
    assert_eq!(names, ["gtp2", "gtp2-dp2", "gtp4", "tp2", "tp2-dp2", "tp2-gtp2", "tp2-gtp2-dp2"]);
    let tp2 = &all["tp2"];
    for (name, losses) in &layouts {
        // f32 sums over ranks run in another order.
        let close = losses.iter().zip(tp2).all(|(a, b)| (a - b).abs() <= 2e-6 * b);
        assert!(close, "{name}: {losses:?} against {tp2:?}");
    }
}

#[test]
fn layouts_use_as_many_ranks_as_their_names_say() {
    for file in files().into_iter().filter(|file| name(file) != "quickstart") {
        let config = Config::load(&file, &[] as &[&str]).unwrap();
        let sizes = name(&file);
        let product: u32 = sizes.split('-').map(|axis| axis[axis.len() - 1..].parse::<u32>().unwrap()).product();
        assert_eq!(plan_run(&config).unwrap().ranks, product, "{sizes}");
    }
}
