//! What a launcher says: read strictly, checked together (fault B58).

use pgroups::{Attendee, DeviceSharing, GlobalRank, PlanError, World, check_attendance};

fn world(vars: &[(&str, &str)]) -> Result<World, PlanError> {
    let owned: Vec<(String, String)> =
        vars.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    World::from_env(move |name| {
        let found = owned.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.clone())
    })
}

#[test]
fn a_world_is_read_through_the_look_up() {
    let read = world(&[("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")]).unwrap();
    let wanted = World { rank: GlobalRank(5), world_size: 8, local_rank: 1 };
    assert_eq!(read, wanted);
}

#[test]
fn an_unreadable_rank_is_an_error_with_variable_value_and_range_never_rank_0() {
    for value in ["", "abc", "2", "-1", "1.0", "0x1", "4294967296"] {
        let error = world(&[("RANK", value), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("RANK") && message.contains(&format!("'{value}'")), "{message}");
        assert!(message.contains("0..=1"), "{message}");
    }
    for (name, value, range) in [("WORLD_SIZE", "0", "1..=4294967294"), ("LOCAL_RANK", "2", "0..=1")] {
        let mut vars = vec![("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")];
        vars.retain(|(known, _)| *known != name);
        let missing = world(&vars).unwrap_err().to_string();
        assert!(missing.contains(&format!("{name} is not set")) && missing.contains(range), "{missing}");
        vars.push((name, value));
        let wrong = world(&vars).unwrap_err().to_string();
        assert!(wrong.contains(&format!("{name} is '{value}'")) && wrong.contains(range), "{wrong}");
    }
}

fn attendee(rank: u32, host: &str, device: u32) -> Attendee {
    Attendee { rank: GlobalRank(rank), host: host.into(), device, process: format!("pid {}", 100 + rank * 10 + device) }
}

#[test]
fn two_processes_with_one_rank_are_refused_with_both_named() {
    let equal = [attendee(1, "a", 0), attendee(1, "a", 1)];
    let error = check_attendance(2, &equal, DeviceSharing::Refuse).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("rank 1") && message.contains("pid 110") && message.contains("pid 111"), "{message}");
}

#[test]
fn two_ranks_on_one_device_are_refused_unless_allowed() {
    let shared = [attendee(0, "a", 3), attendee(1, "b", 3), attendee(2, "a", 3)];
    let error = check_attendance(3, &shared, DeviceSharing::Refuse).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("ranks 0 and 2") && message.contains("device 3 of host 'a'"), "{message}");
    assert_eq!(check_attendance(3, &shared, DeviceSharing::Allow), Ok(()));
    assert_eq!(check_attendance(2, &shared[..2], DeviceSharing::Refuse), Ok(()));
}

#[test]
fn ranks_that_nobody_announced_or_the_world_does_not_have_are_named() {
    let some = [attendee(3, "a", 0), attendee(0, "a", 1)];
    let error = check_attendance(5, &some, DeviceSharing::Refuse).unwrap_err();
    assert_eq!(error, PlanError::RanksMissing { missing: vec![1, 2, 4], world_size: 5 });
    let error = check_attendance(3, &some, DeviceSharing::Refuse).unwrap_err();
    assert!(error.to_string().contains("is 3, the world's ranks are 0..3"), "{error}");
}
