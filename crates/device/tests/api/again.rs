//! Operations that are made once and submitted again and again: a driver may keep what it made of them.

use device::{
    ops::{Accumulate, Axpy, BiasGrad, Factor, Finish, Gemm, Trans},
    *,
};

use super::{
    drivers::Driver,
    work::{floats, open},
};

conformance! {
    computing:
        an_operation_that_was_made_before_gives_the_bits_of_its_twin_made_anew,
        handles_of_an_operation_go_in_any_order
}

/// Some of one kernel, one of several, and one that a library may compute.
fn program(driver: &Driver, submit: impl Fn(&Stream, &dyn Fn() -> Op, usize)) -> Vec<u32> {
    let (device, first) = open(&driver.machine(), 0, "first");
    let second = device.stream("second").unwrap();
    let matrix = |label: &str| device.alloc(label, &[37, 37], DType::F32, MemoryKind::Other).unwrap();
    let [x, y, z] = ["x", "y", "z"].map(matrix);
    let sums = floats(&device, "sums", 37);
    let values = |seed: usize| (0..37 * 37).map(|i| ((i * 7 + seed) % 23) as f32 / 23.0 - 0.4).collect::<Vec<f32>>();
    first.upload(&x, values(3)).unwrap();
    first.upload(&y, values(11)).unwrap();
    first.upload(&z, values(5)).unwrap();
    first.upload(&sums, vec![0.0; 37]).unwrap();
    let multiply = || {
        let finish = Finish::Into(Accumulate::Overwrite);
        Gemm { a: &x, b: &y, c: &z, trans: Trans::Nn, finish }.op("again").unwrap()
    };
    let add = || Axpy { alpha: Factor::Const(0.3), x: &x, y: &y }.op("again").unwrap();
    let sum = || BiasGrad { dy: &z, dbias: &sums, into: Accumulate::Add }.op("again").unwrap();
    let passed = device.event("passed");
    for round in 0..5 {
        let (here, there) = if round % 2 == 0 { (&first, &second) } else { (&second, &first) };
        submit(here, &add, 0);
        submit(here, &multiply, 1);
        submit(here, &sum, 2);
        here.record(&passed).unwrap();
        there.wait(&passed, Why("test.passed")).unwrap();
    }
    let all = [&y, &z, &sums].map(|view| second.download::<f32>(view).unwrap().wait().unwrap());
    all.concat().into_iter().map(f32::to_bits).collect()
}

fn an_operation_that_was_made_before_gives_the_bits_of_its_twin_made_anew(driver: &Driver) {
    let anew = program(driver, |stream, make, _| stream.launch(make()).unwrap());
    let kept: [std::cell::OnceCell<Op>; 3] = Default::default();
    let again = program(driver, |stream, make, which| {
        stream.launch(kept[which].get_or_init(make).clone()).unwrap();
    });
    assert_eq!(again, anew);
    assert!(anew.iter().any(|bits| f32::from_bits(*bits) > 1.0), "something was computed");
}

fn handles_of_an_operation_go_in_any_order(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let (x, y) = (floats(&device, "x", 8), floats(&device, "y", 8));
    stream.upload(&x, vec![1.0f32; 8]).unwrap();
    stream.upload(&y, vec![0.0f32; 8]).unwrap();
    let op = Axpy { alpha: Factor::Const(2.0), x: &x, y: &y }.op("again").unwrap();
    let handles: Vec<Op> = (0..200).map(|_| op.clone()).collect();
    drop((op, x));
    handles.into_iter().for_each(|op| stream.launch(op).unwrap());
    assert_eq!(stream.download::<f32>(&y).unwrap().wait().unwrap(), [400.0; 8]);
}
