//! What captures have taken.

use std::{fmt, time::Duration};

use device::Device;

use crate::Graph;

/// What the captures of a set have taken: those that succeeded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CaptureCost {
    /// Graphs of the set.
    pub graphs: usize,
    /// Nodes of all of them, gates included.
    pub nodes: usize,
    /// Of the host, from the first call of the body to the last executable.
    pub time: Duration,
    /// Bytes of device memory behind the last capture, less those when the set was made. A capture allocates nothing; who
    /// captures may, between two of them.
    pub grown_bytes: i64,
}

impl fmt::Display for CaptureCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CaptureCost { graphs, nodes, time, grown_bytes } = self;
        let s = if *graphs == 1 { "" } else { "s" };
        write!(f, "{graphs} graph{s} of {nodes} nodes captured in {:.1} ms, ", time.as_secs_f64() * 1e3)?;
        match grown_bytes {
            0 => f.write_str("no memory allocated"),
            bytes => write!(f, "memory grown by {bytes} bytes"),
        }
    }
}

/// Adds up over the captures of a set.
pub(crate) struct Costs {
    time: Duration,
    bytes_before: i64,
    grown_bytes: i64,
}

impl Costs {
    pub(crate) fn new(device: &Device) -> Costs {
        Costs { time: Duration::ZERO, bytes_before: bytes(device), grown_bytes: 0 }
    }

    /// Behind a capture.
    pub(crate) fn add(&mut self, time: Duration, device: &Device) {
        self.time += time;
        self.grown_bytes = bytes(device) - self.bytes_before;
    }

    /// None if there is no graph.
    pub(crate) fn of(&self, graphs: &[Graph]) -> Option<CaptureCost> {
        let &Costs { time, grown_bytes, .. } = self;
        let nodes = graphs.iter().map(Graph::node_count).sum();
        (!graphs.is_empty()).then_some(CaptureCost { graphs: graphs.len(), nodes, time, grown_bytes })
    }
}

/// Bytes that live on a device.
fn bytes(device: &Device) -> i64 {
    device.memory_by_kind().values().sum::<usize>() as i64
}
