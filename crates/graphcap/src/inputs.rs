//! What a graph is given at each replay: memory that is copied to where it was captured, and values that must not
//! change.

use std::fmt;

use device::{DType, Event, Stream, View, ops::Cast};

use crate::{GraphError, why};

/// An argument of a replay.
#[derive(Clone, Copy, Debug)]
pub enum Given<'a> {
    /// Memory: copied to the graph's, unless it is the graph's.
    Memory(&'a View),
    /// A value that the graph was captured with.
    Value(&'a str),
}

impl<'a> From<&'a View> for Given<'a> {
    fn from(view: &'a View) -> Given<'a> {
        Given::Memory(view)
    }
}

impl<'a> From<&'a str> for Given<'a> {
    fn from(value: &'a str) -> Given<'a> {
        Given::Value(value)
    }
}

/// One way in which the arguments of a replay differ from those of the capture.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Difference {
    /// Not given.
    Missing {
        /// Name of the argument.
        argument: String,
    },
    /// Not known.
    Unknown {
        /// Name of the argument.
        argument: String,
    },
    /// Given more than once.
    Twice {
        /// Name of the argument.
        argument: String,
    },
    /// Memory for a value, or the other way round.
    Kind {
        /// Name of the argument.
        argument: String,
        /// What it was.
        captured: &'static str,
        /// What it is.
        given: &'static str,
    },
    /// Other sizes.
    Shape {
        /// Name of the argument.
        argument: String,
        /// When it was captured.
        captured: Vec<usize>,
        /// Now.
        given: Vec<usize>,
    },
    /// Other elements.
    Type {
        /// Name of the argument.
        argument: String,
        /// When it was captured.
        captured: DType,
        /// Now.
        given: DType,
    },
    /// Memory of another rank.
    Rank {
        /// Name of the argument.
        argument: String,
        /// When it was captured.
        captured: u32,
        /// Now.
        given: u32,
    },
    /// Another value.
    Value {
        /// Name of the argument.
        argument: String,
        /// When it was captured.
        captured: String,
        /// Now.
        given: String,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::Missing { argument } => write!(f, "'{argument}' is missing"),
            Difference::Unknown { argument } => write!(f, "'{argument}' is no argument of this graph"),
            Difference::Twice { argument } => write!(f, "'{argument}' is given twice"),
            Difference::Kind { argument, captured, given } => write!(f, "'{argument}' was {captured}, and is {given}"),
            Difference::Shape { argument, captured, given } => {
                write!(f, "'{argument}' had sizes {captured:?}, and has {given:?}")
            }
            Difference::Type { argument, captured, given } => write!(f, "'{argument}' was {captured}, and is {given}"),
            Difference::Rank { argument, captured, given } => {
                write!(f, "'{argument}' was memory of rank {captured}, and is of rank {given}")
            }
            Difference::Value { argument, captured, given } => {
                write!(f, "'{argument}' was \"{captured}\", and is \"{given}\"")
            }
        }
    }
}

/// What a capture has declared.
#[derive(Clone, Debug)]
pub(crate) enum Slot {
    Memory(View),
    Value(String),
}

impl Slot {
    fn kind(&self) -> &'static str {
        match self {
            Slot::Memory(_) => "memory",
            Slot::Value(_) => "a value",
        }
    }
}

/// The arguments of a graph, in the order in which they were declared.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inputs(Vec<(String, Slot)>);

impl Inputs {
    pub(crate) fn declare(&mut self, graph: &str, name: &str, slot: Slot) -> Result<(), GraphError> {
        if self.0.iter().any(|(known, _)| known == name) {
            return Err(GraphError::InputTwice { graph: graph.to_owned(), input: name.to_owned() });
        }
        self.0.push((name.to_owned(), slot));
        Ok(())
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }

    /// Compares everything before anything is done.
    pub(crate) fn check(&self, graph: &str, given: &[(&str, Given<'_>)]) -> Result<(), GraphError> {
        let mut differences = Vec::new();
        for (at, (name, _)) in given.iter().enumerate() {
            let argument = || (*name).to_owned();
            if !self.names().any(|known| known == *name) {
                differences.push(Difference::Unknown { argument: argument() });
            } else if given[..at].iter().any(|(other, _)| other == name) {
                differences.push(Difference::Twice { argument: argument() });
            }
        }
        for (name, slot) in &self.0 {
            match given.iter().find(|(other, _)| other == name) {
                None => differences.push(Difference::Missing { argument: name.clone() }),
                Some((_, given)) => compare(name, slot, *given, &mut differences),
            }
        }
        if differences.is_empty() {
            return Ok(());
        }
        Err(GraphError::Arguments { graph: graph.to_owned(), differences })
    }

    /// Copies what lies elsewhere, behind everyone who has read what the slots hold. Behind [`Inputs::check`].
    pub(crate) fn copy_in<'e>(
        &self,
        graph: &str,
        stream: &Stream,
        given: &[(&str, Given<'_>)],
        readers: impl Iterator<Item = &'e Event> + Clone,
    ) -> Result<(), GraphError> {
        for (name, slot) in &self.0 {
            let given = given.iter().find(|(other, _)| other == name);
            if let (Slot::Memory(slot), Some((_, Given::Memory(view)))) = (slot, given)
                && !slot.same_as(view)
            {
                readers.clone().try_for_each(|ended| stream.wait(ended, why::INPUT_AFTER_READ))?;
                stream.launch(Cast { x: view, y: slot }.op(format!("{graph}.{name}"))?)?;
            }
        }
        Ok(())
    }

    /// Whether replays may have to copy something.
    pub(crate) fn has_memory(&self) -> bool {
        self.0.iter().any(|(_, slot)| matches!(slot, Slot::Memory(_)))
    }
}

fn compare(name: &str, slot: &Slot, given: Given<'_>, differences: &mut Vec<Difference>) {
    let argument = || name.to_owned();
    match (slot, given) {
        (Slot::Memory(slot), Given::Memory(view)) => {
            if slot.shape() != view.shape() {
                let (captured, given) = (slot.shape().to_vec(), view.shape().to_vec());
                differences.push(Difference::Shape { argument: argument(), captured, given });
            }
            if slot.dtype() != view.dtype() {
                let (captured, given) = (slot.dtype(), view.dtype());
                differences.push(Difference::Type { argument: argument(), captured, given });
            }
            if slot.rank() != view.rank() {
                let (captured, given) = (slot.rank(), view.rank());
                differences.push(Difference::Rank { argument: argument(), captured, given });
            }
        }
        (Slot::Value(captured), Given::Value(given)) => {
            if captured != given {
                let (captured, given) = (captured.clone(), given.to_owned());
                differences.push(Difference::Value { argument: argument(), captured, given });
            }
        }
        (slot, given) => {
            let given = if matches!(given, Given::Memory(_)) { "memory" } else { "a value" };
            differences.push(Difference::Kind { argument: argument(), captured: slot.kind(), given });
        }
    }
}
