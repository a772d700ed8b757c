//! What the streams of a rank do beside each other, as text.

use std::collections::BTreeMap;

use super::{TraceEvent, WaitOutcome};
use crate::Label;

/// The streams of one rank as lines of words, an operation each, in the column in which its waits allow it at the
/// earliest if all operations take equally long. Times and other ranks are left out.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    /// By number of the stream.
    lanes: BTreeMap<u32, Lane>,
}

#[derive(Clone, Debug, Default)]
struct Lane {
    /// Behind what it was asked so far.
    next: usize,
    words: Vec<(usize, String)>,
}

impl Columns {
    /// Of the `events` that `rank` has submitted. `word` says what an operation is called, given its place in `events`;
    /// one without a word takes no column.
    pub fn of(events: &[TraceEvent], rank: u32, mut word: impl FnMut(usize, &TraceEvent) -> Option<String>) -> Columns {
        let mut columns = Columns::default();
        // By event and record: the column behind it.
        let mut records: BTreeMap<(&Label, u64), usize> = BTreeMap::new();
        for (at, event) in events.iter().enumerate() {
            match event {
                TraceEvent::Op { rank: of, stream, .. } | TraceEvent::Joint { rank: of, stream, .. } if *of == rank => {
                    if let Some(word) = word(at, event) {
                        let lane = columns.lanes.entry(*stream).or_default();
                        lane.words.push((lane.next, word));
                        lane.next += 1;
                    }
                }
                TraceEvent::Record { rank: of, stream, event, generation, .. } if *of == rank => {
                    records.insert((event, *generation), columns.lanes.entry(*stream).or_default().next);
                }
                TraceEvent::Wait { rank: of, stream, event, generation, outcome: WaitOutcome::Enforced, .. }
                    if *of == rank =>
                {
                    let behind = records.get(&(event, *generation)).copied().unwrap_or(0);
                    let lane = columns.lanes.entry(*stream).or_default();
                    lane.next = lane.next.max(behind);
                }
                _ => {}
            }
        }
        columns
    }

    /// A line for each stream that has words, led by its name, of `names` by number.
    #[must_use]
    pub fn draw(&self, names: &[String]) -> String {
        let lanes = || self.lanes.iter().filter(|(_, lane)| !lane.words.is_empty());
        let name = |stream: u32| names.get(stream as usize).map_or("", String::as_str);
        let lead = lanes().map(|(stream, _)| name(*stream).len()).max().unwrap_or(0);
        let width = lanes().flat_map(|(_, lane)| &lane.words).map(|(_, word)| word.len()).max().unwrap_or(0);
        let mut text = String::new();
        for (stream, lane) in lanes() {
            let mut line = format!("{:<lead$}", name(*stream));
            for (column, word) in &lane.words {
                let at = lead + 1 + column * (width + 1);
                line.push_str(&" ".repeat(at - line.len()));
                line.push_str(word);
            }
            text.push_str(&line);
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use crate::{Access, DType, Machine, MemoryKind, Op, Why};

    use super::*;

    #[test]
    fn an_operation_stands_in_the_first_column_that_its_waits_allow() {
        let machine = Machine::dry();
        machine.trace_start();
        let device = machine.device(0).unwrap();
        let [one, two] = ["one", "second"].map(|name| device.stream(name).unwrap());
        let x = device.alloc("x", &[1], DType::F32, MemoryKind::Other).unwrap();
        let run = |name: &'static str| Op::host(name, "site", vec![Access::read(&x)], |_| Ok(()));
        let middle = device.event("middle");
        one.launch(run("a")).unwrap();
        one.launch(run("b")).unwrap();
        one.record(&middle).unwrap();
        two.launch(run("left out")).unwrap();
        two.wait(&middle, Why("test.middle")).unwrap();
        one.launch(run("c")).unwrap();
        two.launch(run("d")).unwrap();
        // Behind what it is behind already.
        two.wait(&middle, Why("test.middle")).unwrap();
        two.launch(run("ee")).unwrap();
        let trace = machine.trace_stop();
        let name = |_: usize, event: &TraceEvent| match event {
            TraceEvent::Op { name, .. } if name.as_str().len() < 3 => Some(name.to_string()),
            _ => None,
        };
        let drawn = |rank| Columns::of(&trace.events, rank, name).draw(&device.stream_names());
        assert_eq!(drawn(0), "one    a  b  c\nsecond       d  ee\n");
        assert_eq!(drawn(1), "");
    }
}
