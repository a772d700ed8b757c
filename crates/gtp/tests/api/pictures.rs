//! The schedules of docs/gtp.md are those of real traces; set UPDATE_DOCS to draw them anew.

use std::{collections::BTreeMap, path::PathBuf};

use device::{Label, Machine, Trace, TraceEvent, WaitOutcome};

use crate::api::rig::{Chain, on_all};

/// What a stream does, one word each, in the column in which its waits allow it at the earliest if everything takes
/// equally long.
#[derive(Default)]
struct Lanes {
    /// By stream: the column behind what it was asked so far, and its words.
    streams: BTreeMap<u32, (usize, Vec<(usize, String)>)>,
    /// By event and record: the column behind it.
    records: BTreeMap<(Label, u64), usize>,
    /// By what: how often so far.
    counts: BTreeMap<&'static str, usize>,
}

impl Lanes {
    /// Of rank 0, for a chain of `weights`.
    fn of(trace: &[TraceEvent], weights: usize) -> Lanes {
        let mut lanes = Lanes::default();
        for (at, event) in trace.iter().enumerate() {
            match event {
                TraceEvent::Op { rank: 0, stream, site, .. } => {
                    let word = match site.as_str() {
                        "forward" => format!("f{}", lanes.count("forward")),
                        "backward" => format!("b{}", weights - 1 - lanes.count("backward")),
                        "wgrad" => format!("w{}", weights - 1 - lanes.count("wgrad")),
                        "gtp.mean" => format!("m{}", weights - 1 - lanes.count("mean")),
                        "gtp.add" => format!("a{}", weights - 1 - lanes.count("add")),
                        _ => continue,
                    };
                    lanes.put(*stream, word);
                }
                TraceEvent::Joint { rank: 0, stream, .. } => {
                    let behind = trace[at..].iter().find_map(|next| match next {
                        TraceEvent::Record { rank: 0, stream: on, event, .. } if on == stream => Some(event),
                        _ => None,
                    });
                    let event = behind.expect("an event behind each collective");
                    let (what, weight) = (if event.contains("gathered") { "g" } else { "r" }, event.rsplit('w').next());
                    lanes.put(*stream, format!("{what}{}", weight.unwrap()));
                }
                TraceEvent::Record { rank: 0, stream, event, generation, .. } => {
                    let column = lanes.streams.entry(*stream).or_default().0;
                    lanes.records.insert((event.clone(), *generation), column);
                }
                TraceEvent::Wait { rank: 0, stream, event, generation, outcome: WaitOutcome::Enforced, .. } => {
                    let behind = lanes.records.get(&(event.clone(), *generation)).copied().unwrap_or(0);
                    let lane = lanes.streams.entry(*stream).or_default();
                    lane.0 = lane.0.max(behind);
                }
                _ => {}
            }
        }
        lanes
    }

    fn count(&mut self, what: &'static str) -> usize {
        let count = self.counts.entry(what).or_default();
        *count += 1;
        *count - 1
    }

    fn put(&mut self, stream: u32, word: String) {
        let lane = self.streams.entry(stream).or_default();
        lane.1.push((lane.0, word));
        lane.0 += 1;
    }

    fn draw(&self, names: &[String]) -> String {
        let mut text = String::new();
        for (stream, (_, words)) in self.streams.iter().filter(|(_, (_, words))| !words.is_empty()) {
            let mut line = format!("{:<11}", names[*stream as usize]);
            for (column, word) in words {
                let at = 11 + column * 3;
                line.push_str(&" ".repeat(at - line.len()));
                line.push_str(word);
            }
            text.push_str(&line);
            text.push('\n');
        }
        text
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
    Lanes::of(&events[last + 1..], 4).draw(&names.unwrap()[0])
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
