//! The schedules of docs/gtp.md are those of real traces; set UPDATE_DOCS to draw them anew.

use std::{collections::BTreeMap, path::PathBuf};

use device::{Columns, Machine, Trace, TraceEvent};

use crate::api::rig::{Chain, on_all};

/// What an operation of a chain of `weights` is called. Weights come in order in forward, in the other one in backward.
struct Words {
    weights: usize,
    counts: BTreeMap<&'static str, usize>,
}

impl Words {
    fn of(&mut self, events: &[TraceEvent], at: usize) -> Option<String> {
        match &events[at] {
            TraceEvent::Op { site, .. } => {
                let (letter, is_forward) = match site.as_str() {
                    "forward" => ("f", true),
                    "backward" => ("b", false),
                    "wgrad" => ("w", false),
                    "gtp.mean" => ("m", false),
                    "gtp.add" => ("a", false),
                    _ => return None,
                };
                let count = self.counts.entry(letter).or_default();
                *count += 1;
                Some(format!("{letter}{}", if is_forward { *count - 1 } else { self.weights - *count }))
            }
            // A collective is called by the event that is recorded behind it.
            TraceEvent::Joint { rank, stream, .. } => {
                let behind = events[at..].iter().find_map(|next| match next {
                    TraceEvent::Record { rank: of, stream: on, event, .. } if (of, on) == (rank, stream) => Some(event),
                    _ => None,
                });
                let event = behind.expect("an event behind each collective");
                let letter = if event.contains("gathered") { "g" } else { "r" };
                Some(format!("{letter}{}", event.rsplit('w').next().unwrap()))
            }
            _ => None,
        }
    }
}

/// The second pass of a chain of four weights: the first one is what it is planned from.
fn schedule(look_ahead: usize) -> String {
    let machine = Machine::dry();
    let chain = Chain { look_ahead, ..Chain::new(2, &[8, 6, 4, 6, 8]) };
    machine.trace_start();
    let names = on_all(&machine, &chain, |mut rig| {
        let all = rig.all();
        (0..2).try_for_each(|_| rig.pass(&all))?;
        rig.rank.device.synchronize()?;
        Ok(rig.rank.device.stream_names())
    });
    let Trace { events } = machine.trace_stop();
    let is_first = |event: &TraceEvent| matches!(event, TraceEvent::Op { rank: 0, site, .. } if *site == "gtp.add");
    let last = events.iter().enumerate().filter(|(_, event)| is_first(event)).nth(3).expect("a pass").0;
    let second = &events[last + 1..];
    let mut words = Words { weights: 4, counts: BTreeMap::new() };
    Columns::of(second, 0, |at, _| words.of(second, at)).draw(&names.unwrap()[0])
}

#[test]
fn the_pages_schedules_are_those_of_real_traces() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/gtp.md");
    let mut page = std::fs::read_to_string(&path).unwrap();
    for look_ahead in [0, 1] {
        let (begin, drawn) = (format!("```text\nlook_ahead = {look_ahead}\n"), schedule(look_ahead));
        let from = page.find(&begin).expect("a place for the drawing") + begin.len();
        let to = from + page[from..].find("```").unwrap();
        if std::env::var_os("UPDATE_DOCS").is_some() {
            page.replace_range(from..to, &drawn);
            std::fs::write(&path, &page).unwrap();
            continue;
        }
        assert_eq!(&page[from..to], drawn, "UPDATE_DOCS=1 draws it");
    }
}
