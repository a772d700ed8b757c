//! Who multiplies a gradient by what.

use ddp::{DdpError, Replication, Scaling};
use device::Reduce;
use pgroups::ParamClass::{Dense, Expert};

fn ranks(dense: u32, expert: u32, weight_shards: u32) -> Replication {
    Replication { dense, expert, weight_shards }
}

#[test]
fn means_are_scaled_by_replicas_and_weight_shards_once() {
    for (r, g, net) in [(4, 1, 0.25), (2, 2, 0.25), (4, 2, 0.125), (4, 4, 0.0625)] {
        let s = Scaling::Mean.of(Dense, ranks(r, r, g)).unwrap();
        assert_eq!((s.pre, s.reduce, s.shard, s.net), (1.0 / f64::from(r), Reduce::Sum, 1.0 / f64::from(g), net));
    }
}

#[test]
fn averages_of_experts_are_corrected_to_the_dense_replicas() {
    for (e, r, pre) in [(4, 4, 1.0), (2, 2, 1.0), (2, 4, 0.5), (8, 4, 2.0)] {
        let expert = Scaling::Averaging.of(Expert, ranks(r, e, 1)).unwrap();
        assert_eq!((expert.pre, expert.reduce, expert.net), (pre, Reduce::Avg, 1.0 / f64::from(r)));
        let dense = Scaling::Averaging.of(Dense, ranks(r, e, 1)).unwrap();
        assert_eq!((dense.pre, dense.reduce, dense.net), (1.0, Reduce::Avg, 1.0 / f64::from(r)));
    }
}

#[test]
fn sums_per_token_are_scaled_by_nobody_but_the_token_count() {
    for class in [Dense, Expert] {
        let s = Scaling::PerToken.of(class, ranks(4, 2, 3)).unwrap();
        assert_eq!((s.pre, s.reduce, s.shard, s.net), (1.0, Reduce::Sum, 1.0, 1.0));
    }
}

#[test]
fn averages_with_weight_shards_are_refused() {
    let refused = Scaling::Averaging.of(Dense, ranks(4, 4, 2)).unwrap_err();
    assert!(matches!(refused, DdpError::AveragingShards { weight_shards: 2 }), "{refused}");
}
