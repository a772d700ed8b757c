//! A graph of the driver's with its executable, and the gates in it.

use std::{ptr, sync::Arc};

use cudarc::driver::sys;

use super::{
    CudaError,
    card::{Card, RawEvent, RawStream},
    collective::CapturedCall,
    event::CardEvent,
};
use crate::queue::Mark;

/// A graph and its executable. Nodes are told by their handles in the graph, so it stays.
pub(super) struct Exec {
    pub(super) card: Arc<Card>,
    pub(super) graph: sys::CUgraph,
    exec: sys::CUgraphExec,
}

// SAFETY: handles are names; the driver takes them from any thread, and calls that change the executable are made
// for one launch after the other.
unsafe impl Send for Exec {}
// SAFETY: as above.
unsafe impl Sync for Exec {}

/// An external wait or record.
pub(super) struct Gate {
    /// Its number in the graph.
    pub(super) gate: u32,
    pub(super) node: sys::CUgraphNode,
    way: Way,
    /// What the executable's node has.
    event: RawEvent,
    /// Of a record: the event, so that the next launch finds it free. Setting another one costs a call.
    pub(super) own: Option<Arc<CardEvent>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Wait,
    Record,
}

// SAFETY: a node's handle is a name; the driver takes it from any thread.
unsafe impl Send for Gate {}
// SAFETY: as above.
unsafe impl Sync for Gate {}

impl Exec {
    pub(super) fn new(card: &Arc<Card>) -> Result<Exec, CudaError> {
        let mut graph = ptr::null_mut();
        // SAFETY: the context is current; writes one handle.
        card.check("cuGraphCreate", unsafe { sys::cuGraphCreate(&mut graph, 0) })?;
        Ok(Exec { card: card.clone(), graph, exec: ptr::null_mut() })
    }

    pub(super) fn instantiate(&mut self) -> Result<(), CudaError> {
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
        let code = {
            let _waits = self.card.beginnings.may_wait();
            // SAFETY: the graph is whole and lives.
            unsafe { sys::cuGraphInstantiateWithFlags(&mut self.exec, self.graph, flags.0.into()) }
        };
        self.card.check("cuGraphInstantiate", code)?;
        // Or the first launch would ask for memory, and wait there for every stream that stands still.
        self.card.on_side(|stream| {
            let _waits = self.card.beginnings.may_wait();
            // SAFETY: the executable was just made; the stream is of this card.
            unsafe { ("cuGraphUpload", sys::cuGraphUpload(self.exec, stream.0)) }
        })
    }

    /// Until a launch says otherwise, a gate has an event that is reached.
    pub(super) fn add_gate(&self, gate: u32, behind: &[sys::CUgraphNode], way: Way) -> Result<Gate, CudaError> {
        let (mut node, event) = (ptr::null_mut(), self.card.reached);
        let (first, count) = (behind.as_ptr(), behind.len());
        // SAFETY: `behind` are nodes of this graph; the event lives as long as the card.
        let code = unsafe {
            match way {
                Way::Wait => sys::cuGraphAddEventWaitNode(&mut node, self.graph, first, count, event.0),
                Way::Record => sys::cuGraphAddEventRecordNode(&mut node, self.graph, first, count, event.0),
            }
        };
        self.card.check("cuGraphAddEventNode", code).map(|()| Gate { gate, node, way, event, own: None })
    }

    pub(super) fn add_empty(&self, behind: &[sys::CUgraphNode]) -> Result<sys::CUgraphNode, CudaError> {
        let mut node = ptr::null_mut();
        // SAFETY: `behind` are nodes of this graph.
        let code = unsafe { sys::cuGraphAddEmptyNode(&mut node, self.graph, behind.as_ptr(), behind.len()) };
        self.card.check("cuGraphAddEmptyNode", code).map(|()| node)
    }

    pub(super) fn add_child(
        &self,
        behind: &[sys::CUgraphNode],
        child: &CapturedCall,
    ) -> Result<sys::CUgraphNode, CudaError> {
        let (mut node, first, count) = (ptr::null_mut(), behind.as_ptr(), behind.len());
        // SAFETY: `behind` are nodes of this graph; the child is copied, with what its nodes hold.
        let code = unsafe { sys::cuGraphAddChildGraphNode(&mut node, self.graph, first, count, child.0) };
        self.card.check("cuGraphAddChildGraphNode", code).map(|()| node)
    }

    /// Gives `gate` the event that `mark` asks for, unless it has it. Handles are never given back to the driver while
    /// the card is open, so the same handle is the same event.
    pub(super) fn set(&self, gate: &mut Gate, mark: Option<&Mark>) -> Result<(), CudaError> {
        match gate.way {
            Way::Wait => {
                // A wait that a test dropped has no mark.
                let event = mark.and_then(|mark| mark.on_card().raw()).unwrap_or(self.card.reached);
                if event != gate.event {
                    self.set_wait(gate.node, event)?;
                    gate.event = event;
                }
            }
            Way::Record => {
                // Whoever could still ask for the record of the launch before holds its mark, and so the event.
                let is_free = gate.own.as_mut().is_some_and(|own| Arc::get_mut(own).is_some());
                if !is_free {
                    let event = Arc::new(CardEvent::new(&self.card)?);
                    self.set_record(gate.node, event.raw())?;
                    (gate.event, gate.own) = (event.raw(), Some(event));
                }
            }
        }
        Ok(())
    }

    fn set_wait(&self, node: sys::CUgraphNode, event: RawEvent) -> Result<(), CudaError> {
        // SAFETY: a wait node of this graph; the launch that this is for binds to the event's record.
        let code = unsafe { sys::cuGraphExecEventWaitNodeSetEvent(self.exec, node, event.0) };
        self.card.check("cuGraphExecEventWaitNodeSetEvent", code)
    }

    fn set_record(&self, node: sys::CUgraphNode, event: RawEvent) -> Result<(), CudaError> {
        // SAFETY: a record node of this graph; the launch's mark keeps the event.
        let code = unsafe { sys::cuGraphExecEventRecordNodeSetEvent(self.exec, node, event.0) };
        self.card.check("cuGraphExecEventRecordNodeSetEvent", code)
    }

    pub(super) fn launch(&self, stream: RawStream) -> Result<(), CudaError> {
        // SAFETY: the stream is of this card; whatever the nodes touch is kept by the launch until its end is seen.
        self.card.check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.exec, stream.0) })
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        if self.card.beginnings.some_stand() || self.card.bind().is_err() {
            // The driver would wait for what stands, in a call that nobody can end.
            return;
        }
        let _waits = self.card.beginnings.may_wait();
        // SAFETY: no launch is under way, for each of them keeps this; both were made here.
        unsafe {
            if !self.exec.is_null() {
                let _ = sys::cuGraphExecDestroy(self.exec);
            }
            let _ = sys::cuGraphDestroy(self.graph);
        }
    }
}
