//! Capture order and reuse follow the pipeline group that was passed, not the world.

use device::Machine;
use graphcap::{PipelinePlace, PipelinePlan, PipelineSetup, Sharing};
use pgroups::{GlobalRank, Group, GroupRank, Key, Layout, LayoutConfig, Needs, PgError, ProcessGroups, Rank, local};

use super::schedule_support::setup;

/// A model's pipelines: lists of ranks, first stage first.
fn pipelines(rank: &Rank, name: &str, lists: &[&[u32]]) -> Result<Group, PgError> {
    let layout = Layout::new(&LayoutConfig { dp: Some(rank.world_size), ..LayoutConfig::default() })?;
    let lists = lists.iter().map(|list| list.iter().map(|&rank| GlobalRank(rank)).collect());
    let key = Key::named(name)?;
    let needs = Needs { custom: vec![(key.clone(), lists.collect())], ..Needs::default() };
    Ok(ProcessGroups::build(rank, &layout, &needs)?.get(&key, "a test")?.clone())
}

fn captured(pipeline: &Group) -> (u32, GroupRank, String, Sharing) {
    let place = PipelinePlace::of(pipeline);
    let setup = PipelineSetup { place, ..setup(4, 1, 0, None, None) };
    let order = PipelinePlan::for_capture(setup).unwrap().schedule().order();
    (place.size(), place.index(), order.to_string(), Sharing::of(pipeline))
}

#[test]
fn two_models_of_different_depth_in_one_process_have_different_capture_orders() {
    // Permuted, not contiguous, and no rank has the same place twice.
    let deep: &[&[u32]] = &[&[2, 0, 3, 1]];
    let shallow: &[&[u32]] = &[&[3, 0], &[1, 2]];
    let flat: &[&[u32]] = &[&[1], &[3], &[0], &[2]];
    let ranks = local(&Machine::sim(1), 4, |rank| {
        let models = [("deep", deep), ("shallow", shallow), ("flat", flat)];
        let groups = models.map(|(name, lists)| pipelines(&rank, name, lists));
        let [deep, shallow, flat] = groups;
        Ok::<_, PgError>([captured(&deep?), captured(&shallow?), captured(&flat?)])
    });
    let four = ["[1,1,1,1,-1,-1,-1,-1]", "[1,1,1,-1,1,-1,-1,-1]", "[1,1,-1,1,-1,1,-1,-1]", "[1,-1,1,-1,1,-1,1,-1]"];
    let two = ["[1,1,-1,1,-1,1,-1,-1]", "[1,-1,1,-1,1,-1,1,-1]"];
    let wanted = |pipeline: &[u32], rank: u32, orders: &[&str]| {
        let at = pipeline.iter().position(|&member| member == rank).unwrap();
        let stages = pipeline.len() as u32;
        let sharing = if stages == 1 { Sharing::AcrossMicrobatches } else { Sharing::PerMicrobatch { stages } };
        (stages, GroupRank(at as u32), orders[at].to_owned(), sharing)
    };
    for (rank, got) in (0..).zip(ranks.unwrap()) {
        let pair = shallow.iter().find(|pair| pair.contains(&rank)).unwrap();
        assert_eq!(got, [wanted(deep[0], rank, &four), wanted(pair, rank, &two), wanted(&[rank], rank, &["[1,-1]"])]);
    }
}
