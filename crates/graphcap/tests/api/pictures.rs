//! The pictures of docs/graphcap.md are what the tool draws of these programs; set UPDATE_DOCS to draw them anew.

use std::path::PathBuf;

use device::Why;
use graphcap::{
    CaptureScope, GateMode,
    verify::{Finding, Picture, VerifyOptions, verify},
    why,
};
use pgroups::{Pass, Turn};

use super::support::*;

/// A layer's forward and backward in one graph, a reduction and a write behind it.
fn program(without: Why) -> (String, String) {
    let machine = sim(0);
    machine.drop_waits(without);
    machine.trace_start();
    let rig = Rig::new(&machine, &[1]);
    let (reduce, sum) = (rig.device.stream("reduce").unwrap(), floats(&rig.device, "sum", NUMEL));
    let body = |scope: &mut CaptureScope<'_>| -> Result<(), Caught> {
        rig.fold(&mut scope.turn(Pass::Forward), 0, &rig.compute)?;
        rig.contribute(scope.turn(Pass::Backward), 0, &rig.compute, 1.0)
    };
    let (graph, ()) = rig.set(GateMode::InGraph).capture("layer", &rig.compute, body).unwrap();
    graph.replay(&rig.compute, &[]).unwrap();
    rig.sinks[0].reduce(&reduce, &rig.params[0].main_grad(), &sum);
    rig.buckets[0].write(&rig.optimizer, 5.0);
    rig.device.synchronize().unwrap();
    let trace = machine.trace_stop();
    let report = verify(&trace, &VerifyOptions::default());
    let is_named = |finding: &&Finding| match finding {
        Finding::Race(race) => race.dropped.iter().any(|dropped| *dropped == *without.0),
        _ => false,
    };
    let finding = report.findings().iter().find(is_named).unwrap_or_else(|| panic!("{without}: {report}"));
    (finding.to_string(), Picture::new(&trace, finding).to_svg())
}

#[test]
fn the_pages_pictures_and_findings_are_what_the_tool_says() {
    let docs = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let page = std::fs::read_to_string(docs.join("graphcap.md")).unwrap();
    for (name, without) in [("missing_in_gate", Turn::READ_AFTER_PUBLISH), ("missing_out_gate", why::GATE_AFTER_LANDED)]
    {
        let (finding, picture) = program(without);
        let path = docs.join(format!("pictures/{name}.svg"));
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&path, &picture).unwrap();
        }
        let there = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(there == picture, "{} is not what is drawn (UPDATE_DOCS=1 draws it)", path.display());
        assert!(page.contains(&format!("](pictures/{name}.svg)")), "the page shows no {name}");
        assert!(page.contains(&finding), "the page does not say\n{finding}");
    }
}
