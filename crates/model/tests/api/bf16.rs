//! Models whose parameters and activations are bf16.

use device::{DType, Fresh, Machine, Options, bf16};
use model::{GptConfig, GptPlan, RecomputeLayers};
use pgroups::{Pass, Turn, Whole};
use safetensors::{Dtype, SafeTensors};

use crate::{
    machines::cards,
    rig::{Case, Layout, Results, Rig, cut, cut_llama, tiny, tiny_llama, values},
    twins::{differing, inputs},
};

fn poisoned(workers: usize) -> Machine {
    Machine::cpu_with(workers, Options { fresh: Fresh::Poisoned, ..Options::default() }).unwrap()
}

#[test]
fn plans_workers_simulator_scratch_and_recomputation_change_no_bit() {
    let cards = cards();
    for (config, len, batch) in [(tiny(), 7, 3), (tiny_llama(), 6, 3), (cut(), 129, 2), (cut_llama(), 129, 2)] {
        let values = values(&GptPlan::new(config.clone()).unwrap(), 2);
        let microbatches = [inputs(&config, batch * len, 1), inputs(&config, batch * len, 5)];
        let case =
            |recompute| Case { config: config.clone(), values: &values, microbatches: &microbatches, len, recompute };
        let (kept, again) = (case(RecomputeLayers::None), case(RecomputeLayers::All));
        let run = |case: &Case<'_>, machine: Machine| case.run_storing(DType::Bf16, &machine, Layout::Main, None);
        let plan = kept.plan_storing(DType::Bf16);
        for card in &cards {
            let want = run(&kept, card.clone());
            assert!(want.0.iter().all(|loss| loss.is_finite()));
            assert_eq!(differing(&want, &run(&again, card.clone())), [""; 0], "recomputation on a card");
            let planned = kept.run_storing(DType::Bf16, card, Layout::Main, Some(&plan));
            assert_eq!(differing(&want, &planned), [""; 0], "a plan on a card");
        }
        let want = run(&kept, poisoned(2));
        assert!(want.0.iter().all(|loss| loss.is_finite()));
        let same = |got: Results, what| assert_eq!(differing(&want, &got), [""; 0], "{what}");
        same(run(&kept, poisoned(1)), "one worker");
        same(run(&kept, Machine::sim(3)), "the simulator");
        same(run(&again, poisoned(2)), "recomputation");
        same(kept.run_storing(DType::Bf16, &poisoned(2), Layout::Main, Some(&plan)), "a plan");
        // Through scratch two contributions are added in another order than into the gradient itself.
        let scratch = kept.run_storing(DType::Bf16, &poisoned(2), Layout::Scratch, None);
        assert_eq!(
            scratch.0.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
            want.0.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        );
    }
}

#[test]
fn activations_take_half_the_memory() {
    let values = values(&GptPlan::new(cut()).unwrap(), 2);
    let (microbatches, recompute) = ([inputs(&cut(), 4 * 129, 1)], RecomputeLayers::None);
    let case = Case { config: cut(), values: &values, microbatches: &microbatches, len: 129, recompute };
    let [wide, narrow] = [DType::F32, DType::Bf16].map(|dtype| case.plan_storing(dtype).bytes());
    // What stays f32 is a number or two for each row: statistics of norms, of softmax, losses.
    assert!(narrow * 2 > wide && (narrow as f64) < 0.52 * wide as f64, "{narrow} of {wide} bytes");
}

#[test]
fn files_hold_bf16_weights_as_they_are() {
    for config in [tiny(), GptConfig { vocab_rows: 12, ..tiny_llama() }] {
        let plan = GptPlan::new(config.clone()).unwrap();
        let values = values(&plan, 31);
        let machine = Machine::cpu(1).unwrap();
        let rig = Rig::storing(DType::Bf16, &machine, config, Some(&values), &RecomputeLayers::None);
        let mut weights = Whole::new(Turn::eager(Pass::Forward));
        let file = plan.export_weights(&rig.params, &mut weights, &rig.stream).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        assert!(tensors.iter().all(|(_, tensor)| tensor.dtype() == Dtype::BF16));
        for (p, got) in plan.params().iter().zip(plan.import_weights(&file).unwrap()) {
            let mut want: Vec<f32> = values[&p.spec.name].iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
            if p.spec.placement.global[0] == 12 {
                want[plan.config().vocab * plan.config().dim..].fill(0.0);
            }
            assert_eq!(got, want, "{}", p.spec.name);
        }
    }
}
