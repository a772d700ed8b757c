//! Warm-up: launches before the first replay, of which nothing is left.

use device::{MemoryKind, Stream, View, ops::Cast};

use crate::{Graph, GraphError, graph::Live};

impl Graph {
    /// Launches every executable of the graph `times` times and puts back every byte that it writes. Nobody is asked to
    /// publish and nobody hears of reads or gradients: it works on what memory holds, and what it finds is forgotten.
    ///
    /// The host waits for the device before and after. All members of the groups involved do it together, with nothing
    /// of theirs under way. `stream` is the one that planned memory of the graph belongs to, if it has any.
    ///
    /// # Errors
    /// [`GraphError::Deleted`]; the device's. Also then what was written is put back, as far as the device still works.
    pub fn warm_up(&self, stream: &Stream, times: usize) -> Result<(), GraphError> {
        let live = self.live();
        let Some(live) = live.as_ref() else { return Err(GraphError::Deleted { graph: self.name().to_owned() }) };
        let _span = tracing::debug_span!("graphcap.warm_up", graph = self.name(), times).entered();
        let device = stream.device();
        device.synchronize()?;
        let copy = |view: View| {
            let saved = device.alloc("graphcap.saved", view.shape(), view.dtype(), MemoryKind::Other)?;
            stream.launch(Cast { x: &view, y: &saved }.op("graphcap.save")?)?;
            Ok((view, saved))
        };
        let written: Vec<(View, View)> =
            live.captured.writes().into_iter().map(copy).collect::<Result<_, device::Error>>()?;
        let launched = launch(live, stream, times);
        for (view, saved) in &written {
            stream.launch(Cast { x: saved, y: view }.op("graphcap.put_back")?)?;
        }
        device.synchronize()?;
        launched
    }
}

fn launch(live: &Live, stream: &Stream, times: usize) -> Result<(), GraphError> {
    for lane in &live.lanes {
        // Nobody needs what gradients hold: nothing is under way.
        lane.free.iter().flatten().try_for_each(|free| stream.record(free))?;
        (0..times).try_for_each(|_| stream.launch_graph(&lane.executable))?;
    }
    Ok(())
}
