//! How workers of a host share themselves between streams.

use std::{
    sync::{Arc, Mutex},
    thread::sleep,
    time::Duration,
};

use device::*;

use super::work::held;

/// Operations of the stream that is busy for long.
const MANY: usize = 30;

#[test]
fn a_stream_with_little_to_do_does_not_wait_for_one_that_is_busy_for_long() {
    let machine = Machine::cpu(1).unwrap();
    let device = machine.device(0).unwrap();
    let [long, short] = ["long", "short"].map(|name| device.stream(name).unwrap());
    let order = Arc::new(Mutex::new(Vec::new()));
    let op = |name: &'static str| {
        let order = order.clone();
        Op::host(name, "test", Vec::new(), move |_| {
            sleep(Duration::from_millis(1));
            order.lock().unwrap().push(name);
            Ok(())
        })
    };
    // The only worker stands until all is submitted.
    let (first, begun, go) = held(Vec::new());
    long.launch(first).unwrap();
    begun.recv().unwrap();
    for _ in 0..MANY {
        long.launch(op("long")).unwrap();
    }
    short.launch(op("short")).unwrap();
    go.send(()).unwrap();
    short.synchronize().unwrap();
    long.synchronize().unwrap();
    let order = order.lock().unwrap();
    let at = order.iter().position(|name| *name == "short").expect("it ran");
    assert!(at <= 2, "{at} of {MANY} operations came first");
    assert_eq!(order.len(), MANY + 1, "nothing is lost or runs twice");
}
