//! The weights that a run begins with, as files.

use std::path::{Path, PathBuf};

use device::Machine;
use model::GptPlan;
use pgroups::{Layout, LayoutConfig, ParamSet, ParamTypes, Pass, Seed, Turn, Whole};

use super::{data_parallel::precision, outputs::make_folder, rank::sizes};
use crate::{Config, TrainError, whole_file::write_whole};

/// Writes the weights that a run of `config` begins with to `dir`, which is made if it does not exist:
/// `model.safetensors` in the type that the run stores them in, and `config.json`, both as the `transformers` library
/// reads them. Neither layout nor device have a say in them. Gives the paths of both.
///
/// # Errors
/// Files that cannot be written; what keeps the values from memory.
pub fn write_initial_weights(config: &Config, dir: &Path) -> Result<[PathBuf; 2], TrainError> {
    let plan = GptPlan::new(sizes(config))?;
    let weights = initial_weights(config, &plan)?;
    make_folder(dir)?;
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.join(name);
        write_whole(&path, bytes).map(|()| path)
    };
    Ok([write("model.safetensors", &weights)?, write("config.json", plan.export_config().as_bytes())?])
}

/// The file's bytes.
fn initial_weights(config: &Config, plan: &GptPlan) -> Result<Vec<u8>, TrainError> {
    let layout = Layout::new(&LayoutConfig { dp: Some(1), ..LayoutConfig::default() })?;
    let value = precision(config).param;
    let files = pgroups::local(&Machine::cpu(1)?, 1, |rank| -> Result<_, TrainError> {
        let set = ParamSet::allocate(&rank, &layout, &plan.specs(), ParamTypes { value, grad: value })?;
        let stream = rank.device.stream("init")?;
        set.fill(&stream, Seed(config.train.seed))?;
        Ok(plan.export_weights(set.params(), &mut Whole::new(Turn::eager(Pass::Forward)), &stream)?)
    })?;
    Ok(files.into_iter().next().expect("BUG: one rank has no result"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::rank::{RankRun, gpt_plan};

    const MODEL: &str = "[model]\nlayers = 2\ndim = 24\nheads = 4\nseq_len = 10\nvocab = 257\nvocab_rows = 264\n\
                         [train]\nsteps = 1\nglobal_batch = 16\n[optimizer]\nlr = 1e-3\n[data]\npath = \"none\"\n";

    fn config(set: &[&str]) -> Config {
        Config::parse(MODEL, "test".as_ref(), "".as_ref(), set).expect("a valid configuration")
    }

    fn written(config: &Config) -> Vec<u8> {
        initial_weights(config, &GptPlan::new(sizes(config)).unwrap()).unwrap()
    }

    /// What the rank of a run holds when it is built.
    fn held(config: &Config) -> Vec<u8> {
        let files = pgroups::local(&Machine::cpu(1).unwrap(), 1, |rank| -> Result<_, TrainError> {
            let run = RankRun::build(&rank, config, None)?;
            let mut whole = Whole::new(Turn::eager(Pass::Forward));
            Ok(gpt_plan(config)?.export_weights(run.parallel.buffers.params(), &mut whole, &run.stream)?)
        });
        files.unwrap().remove(0)
    }

    #[test]
    fn the_file_has_the_bits_that_a_run_begins_with_in_both_types() {
        for set in [&["train.seed=3"][..], &["precision.param=bf16"], &["model.arch=llama", "model.kv_heads=2"]] {
            let config = config(set);
            assert_eq!(written(&config), held(&config), "{set:?}");
        }
        assert_ne!(written(&config(&["train.seed=3"])), written(&config(&["train.seed=4"])));
    }

    #[test]
    fn no_layout_has_a_say_in_the_file() {
        let whole = written(&config(&[]));
        for layout in [&["layout.tp=2", "layout.gtp=2", "layout.dp=2"][..], &["layout.gtp=4"], &["device.kind=cuda"]] {
            assert_eq!(written(&config(layout)), whole, "{layout:?}");
        }
    }
}
