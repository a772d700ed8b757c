//! Warm-up asks nobody, tells nobody, and puts back what it wrote.

use graphcap::{CaptureScope, GateMode, GraphError};
use pgroups::Pass;

use super::support::*;

#[test]
fn a_warm_up_that_is_refused_half_way_puts_back_what_it_wrote() {
    let rig = Rig::new(&sim(1), &[1]);
    let mut set = rig.set(GateMode::InGraph);
    let grad = rig.params[0].main_grad();
    rig.compute.upload(&grad, vec![3f32; NUMEL]).unwrap();
    let never = rig.device.event("never");
    let writes = |scope: &mut CaptureScope<'_>| rig.contribute(scope.turn(Pass::Backward), 0, &rig.compute, 1.0);
    let waits = |_: &mut CaptureScope<'_>| rig.compute.wait_external(&never, device::Why("test.never"));
    set.capture("writes", &rig.compute, writes).unwrap();
    set.capture("waits for a gate that nobody has opened", &rig.compute, waits).unwrap();
    let error = set.warm_up(&rig.compute, 3).unwrap_err();
    assert!(matches!(error, GraphError::Device(cause) if matches!(*cause, device::Error::NeverRecorded { .. })));
    assert_eq!(get::<f32>(&rig.compute, &grad), [3.0; NUMEL]);
}

#[test]
fn a_warm_up_asks_nobody_and_tells_nobody() {
    for mode in MODES {
        let rig = Rig::new(&sim(1), &[1]);
        let mut set = rig.set(mode);
        set.capture("g", &rig.compute, |scope| -> Result<(), Caught> {
            rig.fold(&mut scope.turn(Pass::Forward), 0, &rig.compute)?;
            rig.contribute(scope.turn(Pass::Backward), 0, &rig.compute, 1.0)
        })
        .unwrap();
        rig.log.take();
        let use_of_device = rig.device.graphs();
        rig.machine.trace_start();
        set.warm_up(&rig.compute, 3).unwrap();
        let launches = submitted(&rig.machine.trace_stop()).iter().filter(|what| *what == "launch g").count();
        assert_eq!((launches, set.graphs()[0].replays(), rig.device.graphs()), (3, 0, use_of_device));
        assert!(rig.log.take().is_empty());
        assert_eq!(rig.result(), [1.0; NUMEL]);
        // What follows is the first replay.
        set.graphs()[0].replay(&rig.compute, &[]).unwrap();
        assert_eq!(rig.result(), [4.0; NUMEL]);
    }
}
