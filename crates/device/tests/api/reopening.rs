//! Ranks and groups that come back after they were gone.

use device::*;

use super::{
    drivers::Driver,
    ranks::{all_well, run_ranks},
    work::{expect_values, floats, open, set},
};

conformance! {
    every:
        a_rank_is_taken_while_any_handle_of_it_lives,
        a_rank_can_be_opened_again_as_soon_as_its_handles_are_gone,
        memory_of_a_former_device_is_refused,
        a_group_is_whole_again_when_its_ranks_are_opened_again,
        a_name_that_all_have_closed_is_free_for_another_group,
        a_name_is_not_free_while_a_call_is_under_way,
        one_machine_runs_many_programs
}

fn a_rank_is_taken_while_any_handle_of_it_lives(driver: &Driver) {
    let machine = driver.machine();
    let (device, stream) = open(&machine, 5, "compute");
    let (event, view) = (device.event("e"), floats(&device, "v", 1));
    let taken = || matches!(machine.device(5), Err(Error::RankTaken { rank: 5 }));
    let again = device.clone();
    drop(device);
    assert!(taken());
    drop(again);
    assert!(taken(), "a stream is a handle of its device");
    drop(stream);
    assert!(taken(), "an event is a handle of its device");
    drop(event);
    assert!(!taken());
    drop(view);
}

fn a_rank_can_be_opened_again_as_soon_as_its_handles_are_gone(driver: &Driver) {
    let machine = driver.machine();
    for i in 0..300 {
        let (device, stream) = open(&machine, 5, "compute");
        let v = floats(&device, "v", 2);
        stream.launch(set(&v, i as f32)).unwrap();
        if i % 2 == 0 {
            stream.synchronize().unwrap();
        } else {
            expect_values(&stream, &v, &[i as f32; 2]);
        }
    }
    // As much when work was thrown away.
    for _ in 0..300 {
        let (device, stream) = open(&machine, 5, "compute");
        let v = floats(&device, "v", 2);
        (0..5).for_each(|_| stream.launch(set(&v, 0.0)).unwrap());
    }
}

fn memory_of_a_former_device_is_refused(driver: &Driver) {
    let machine = driver.machine();
    let old = floats(&machine.device(0).unwrap(), "old", 1);
    let (_device, stream) = open(&machine, 0, "compute");
    assert!(matches!(stream.launch(set(&old, 1.0)), Err(Error::Foreign { owner: 0, used_by: 0, .. })));
    stream.synchronize().unwrap();
}

fn meet(machine: &Machine) -> Result<(), Error> {
    let opened = [0, 1].map(|rank| open(machine, rank, "comm"));
    for (device, stream) in &opened {
        let meeting = machine.meeting("g", &[0, 1], device.rank())?;
        stream.joint(&meeting, Exchange::Barrier, "test", Vec::new())?;
    }
    opened.iter().try_for_each(|(_, stream)| stream.synchronize())
}

fn a_group_is_whole_again_when_its_ranks_are_opened_again(driver: &Driver) {
    let machine = driver.machine();
    meet(&machine).unwrap();
    machine.leave(1, Departure::Returned);
    {
        let (_device, stream) = open(&machine, 0, "comm");
        let meeting = machine.meeting("g", &[0, 1], 0).unwrap();
        stream.joint(&meeting, Exchange::Barrier, "test", Vec::new()).unwrap();
        assert!(matches!(stream.synchronize(), Err(Error::PeerGone { rank: 1, .. })));
    }
    meet(&machine).unwrap();
}

fn one_machine_runs_many_programs(driver: &Driver) {
    let machine = driver.machine();
    let ranks = [0, 1, 2];
    let program = |device: &Device| {
        let stream = device.stream("comm")?;
        let meeting = device.machine().meeting("all", &ranks, device.rank())?;
        let v = floats(device, "v", 1);
        stream.launch(set(&v, device.rank() as f32 + 1.0))?;
        stream.joint(&meeting, Exchange::AllReduce(Reduce::Sum), "test", vec![Access::update(&v)])?;
        stream.synchronize()?;
        expect_values(&stream, &v, &[6.0]);
        Ok(())
    };
    for round in 0..20 {
        all_well(&machine, &ranks, program);
        if round % 5 == 0 {
            // One that ends badly must not harm the next.
            let ended = run_ranks(&machine, &ranks, |device| {
                assert_ne!(device.rank(), 1, "a planted panic");
                program(device)
            });
            assert_eq!(ended.iter().filter(|e| matches!(e, Some(Err(Error::PeerGone { rank: 1, .. })))).count(), 2);
        }
    }
}

fn a_name_that_all_have_closed_is_free_for_another_group(driver: &Driver) {
    let machine = driver.machine();
    let opened = [0, 1, 2].map(|rank| open(&machine, rank, "comm"));
    let lists: [&[u32]; 4] = [&[0, 1], &[1, 0], &[2, 0, 1], &[2]];
    for list in lists.into_iter().cycle().take(100) {
        let members: Vec<&Stream> = list.iter().map(|rank| &opened[*rank as usize].1).collect();
        for stream in &members {
            let meeting = machine.meeting("g", list, stream.rank()).unwrap();
            stream.joint(&meeting, Exchange::Barrier, "test", Vec::new()).unwrap();
        }
        members.iter().for_each(|stream| stream.synchronize().unwrap());
    }
}

fn a_name_is_not_free_while_a_call_is_under_way(driver: &Driver) {
    let machine = driver.machine();
    let (_zero, s0) = open(&machine, 0, "comm");
    let (_one, s1) = open(&machine, 1, "comm");
    for _ in 0..50 {
        // Each opens the group for one call only, and the first is closed before the second is open.
        for stream in [&s0, &s1] {
            let meeting = machine.meeting("g", &[0, 1], stream.rank()).unwrap();
            stream.joint(&meeting, Exchange::Barrier, "test", Vec::new()).unwrap();
            drop(meeting);
        }
    }
    s0.synchronize().unwrap();
    s1.synchronize().unwrap();
    let meeting = machine.meeting("g", &[0, 1], 0).unwrap();
    s0.joint(&meeting, Exchange::Barrier, "test", Vec::new()).unwrap();
    drop(meeting);
    assert!(matches!(machine.meeting("g", &[1, 0], 1), Err(Error::Members { .. })));
    s1.joint(&machine.meeting("g", &[0, 1], 1).unwrap(), Exchange::Barrier, "test", Vec::new()).unwrap();
    s0.synchronize().unwrap();
}
