//! The crate's API, on every driver.

use device::*;

#[test]
fn a_stream_runs_in_the_order_of_the_calls() {
    for machine in [Machine::cpu(2).unwrap(), Machine::sim(1)] {
        let device = machine.device(0).unwrap();
        let stream = device.stream("compute").unwrap();
        let v = device.alloc("v", &[3], DType::F32, MemoryKind::Other).unwrap();
        stream.upload(&v, vec![1f32, 2.0, 3.0]).unwrap();
        for _ in 0..100 {
            let double_and_add = |a: &mut Args<'_>| {
                a.write::<f32>(0)?.iter_mut().for_each(|x| *x = (*x * 2.0 + 1.0) % 1000.0);
                Ok(())
            };
            stream.launch(Op::host("step", "test", vec![Access::update(&v)], double_and_add)).unwrap();
        }
        let want = [1f32, 2.0, 3.0].map(|x| (0..100).fold(x, |x, _| (x * 2.0 + 1.0) % 1000.0));
        assert_eq!(stream.download::<f32>(&v).unwrap().wait().unwrap(), want);
    }
}

#[test]
fn a_rank_is_free_as_soon_as_its_last_handle_is_gone() {
    let machine = Machine::cpu(2).unwrap();
    for _ in 0..100 {
        let device = machine.device(0).unwrap();
        let stream = device.stream("compute").unwrap();
        stream.launch(Op::host("nothing", "test", vec![], |_| Ok(()))).unwrap();
        stream.synchronize().unwrap();
        let event = device.event("still here");
        drop((device, stream));
        assert!(matches!(machine.device(0), Err(Error::RankTaken { rank: 0 })));
        drop(event);
    }
}
