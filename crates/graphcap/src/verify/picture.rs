//! A finding drawn: a row for each stream that has part in it, its operations and waits in the order of submission.

use std::{collections::BTreeMap, fmt::Write};

use device::{Label, Position, Trace, TraceEvent, WaitOutcome};

use super::{
    Finding, StaleReason,
    place::{OpAt, Place, Places, position},
};

/// So many items around the two ends of a finding are drawn.
const ITEMS: usize = 14;

/// What is drawn of a finding.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    title: String,
    rows: Vec<String>,
    boxes: Vec<Item>,
    arrows: Vec<Arrow>,
}

#[derive(Clone, Debug, PartialEq)]
struct Item {
    row: usize,
    text: String,
    role: Role,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Role {
    /// Named by the finding.
    Culprit,
    Operation,
    Synchronisation,
}

#[derive(Clone, Debug, PartialEq)]
struct Arrow {
    from: usize,
    to: usize,
    text: String,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Orders.
    Holds,
    /// Was taken away.
    Dropped,
    /// Should be there and is not.
    Missing,
}

impl Picture {
    /// Of a finding in the report on `trace`.
    pub fn new(trace: &Trace, finding: &Finding) -> Picture {
        let text = finding.to_string();
        let title = text.lines().next().unwrap_or_default().to_owned();
        let places = Places::new(trace);
        let mut drawing = Drawing {
            places,
            picture: Picture { title, rows: vec![], boxes: vec![], arrows: vec![] },
            records: BTreeMap::new(),
        };
        match finding {
            Finding::Circle(circle) => {
                let boxes: Vec<usize> = circle.iter().map(|one| drawing.culprit(&one.who)).collect();
                for (i, one) in circle.iter().enumerate() {
                    drawing.arrow(boxes[i], boxes[(i + 1) % boxes.len()], one.until.clone(), Kind::Holds);
                }
            }
            Finding::CallOrder(calls) => {
                let boxes: Vec<usize> = calls.iter().map(|call| drawing.culprit(call)).collect();
                (0..boxes.len()).for_each(|i| {
                    drawing.arrow(boxes[i], boxes[(i + 1) % boxes.len()], "before".into(), Kind::Holds);
                });
            }
            other => drawing.pair(&ends(other)),
        }
        drawing.picture
    }

    /// For Graphviz.
    pub fn to_dot(&self) -> String {
        let mut out =
            format!("digraph finding {{\n  rankdir=LR;\n  label={};\n  node [shape=box];\n", quoted(&self.title));
        for (row, name) in self.rows.iter().enumerate() {
            writeln!(out, "  subgraph cluster_{row} {{\n    label={};", quoted(name))
                .expect("BUG: writing to a string");
            let mut last = None;
            for (i, item) in self.boxes.iter().enumerate().filter(|(_, item)| item.row == row) {
                let look = match item.role {
                    Role::Culprit => " color=red penwidth=2",
                    Role::Operation => "",
                    Role::Synchronisation => " shape=oval",
                };
                writeln!(out, "    n{i} [label={}{look}];", quoted(&item.text)).expect("BUG: writing to a string");
                if let Some(last) = last.replace(i) {
                    writeln!(out, "    n{last} -> n{i} [color=gray];").expect("BUG: writing to a string");
                }
            }
            out.push_str("  }\n");
        }
        for arrow in &self.arrows {
            let look = match arrow.kind {
                Kind::Holds => "",
                Kind::Dropped => " style=dashed color=orange",
                Kind::Missing => " style=dotted color=red penwidth=2",
            };
            let (from, to) = (arrow.from, arrow.to);
            writeln!(out, "  n{from} -> n{to} [label={}{look}];", quoted(&arrow.text))
                .expect("BUG: writing to a string");
        }
        out.push_str("}\n");
        out
    }

    /// As an image: time from left to right, a row for each stream.
    pub fn to_svg(&self) -> String {
        let x = |i: usize| LEFT + i * COLUMN;
        let y = |i: usize| TOP + self.boxes[i].row * ROW;
        let (width, height) = (x(self.boxes.len().max(1)), TOP + self.rows.len().max(1) * ROW);
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" \
             font-size=\"11\">\n<defs><marker id=\"tip\" markerWidth=\"8\" markerHeight=\"8\" refX=\"7\" refY=\"4\" \
             orient=\"auto\"><path d=\"M0,0 L8,4 L0,8 z\"/></marker></defs>\n\
             <text x=\"10\" y=\"20\" font-size=\"13\">{}</text>\n",
            escaped(&self.title)
        );
        for (row, name) in self.rows.iter().enumerate() {
            let line = TOP + row * ROW + HEIGHT / 2;
            let text = format!(
                "<text x=\"10\" y=\"{}\">{}</text>\n<line x1=\"{LEFT}\" y1=\"{line}\" x2=\"{width}\" y2=\"{line}\" \
                 stroke=\"#ddd\"/>\n",
                line + 4,
                escaped(name)
            );
            out.push_str(&text);
        }
        for (i, item) in self.boxes.iter().enumerate() {
            let (stroke, fill) = match item.role {
                Role::Culprit => ("#c00", "#fee"),
                Role::Operation => ("#333", "#fff"),
                Role::Synchronisation => ("#888", "#f4f4f4"),
            };
            let (left, top) = (x(i), y(i));
            let text = format!(
                "<rect x=\"{left}\" y=\"{top}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" rx=\"4\" fill=\"{fill}\" \
                 stroke=\"{stroke}\"/>\n<text x=\"{}\" y=\"{}\">{}</text>\n",
                left + 6,
                top + HEIGHT / 2 + 4,
                escaped(&shortened(&item.text))
            );
            out.push_str(&text);
        }
        for arrow in &self.arrows {
            let (color, dash) = match arrow.kind {
                Kind::Holds => ("#333", ""),
                Kind::Dropped => ("#d80", " stroke-dasharray=\"6 3\""),
                Kind::Missing => ("#c00", " stroke-dasharray=\"2 3\""),
            };
            let (from, to) = ((x(arrow.from) + WIDTH / 2, y(arrow.from)), (x(arrow.to) + WIDTH / 2, y(arrow.to)));
            // From the side that faces the other row; along one row, from above.
            let side = |own: usize, other: usize| if own < other { own + HEIGHT } else { own };
            let (y1, y2) = (side(from.1, to.1), side(to.1, from.1));
            let (middle_x, middle_y) =
                ((from.0 + to.0) / 2, ((y1 + y2) / 2).saturating_sub(if y1 == y2 { 14 } else { 0 }));
            let text = format!(
                "<path d=\"M{},{y1} Q{middle_x},{middle_y} {},{y2}\" fill=\"none\" stroke=\"{color}\"{dash} \
                 marker-end=\"url(#tip)\"/>\n<text x=\"{middle_x}\" y=\"{middle_y}\" fill=\"{color}\">{}</text>\n",
                from.0,
                to.0,
                escaped(&arrow.text)
            );
            out.push_str(&text);
        }
        out.push_str("</svg>\n");
        out
    }
}

/// Sizes of an image, in its units.
const COLUMN: usize = 200;
const ROW: usize = 110;
const WIDTH: usize = 180;
const HEIGHT: usize = 34;
const LEFT: usize = 150;
const TOP: usize = 60;

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// What fits a box.
fn shortened(text: &str) -> String {
    const FITS: usize = 28;
    if text.chars().count() <= FITS { text.to_owned() } else { text.chars().take(FITS - 1).chain(['…']).collect() }
}

/// The places that a finding is about, and names of waits that were taken away.
fn ends(finding: &Finding) -> (Vec<&Place>, &[Label]) {
    match finding {
        Finding::Race(race) => (vec![&race.first, &race.second], &race.dropped),
        Finding::Stale(stale) => match &stale.reason {
            StaleReason::NotThere { writer: Some(writer), .. } => (vec![&**writer, &stale.read], &[]),
            _ => (vec![&stale.read], &[]),
        },
        Finding::PublishedTwice { first, second, .. } => (vec![first, second], &[]),
        Finding::ReducedEarly { reduced, landed, .. } => (vec![landed, reduced], &[]),
        Finding::ForbiddenInGraph { at, .. } | Finding::ForeignWait { at, .. } => (vec![at], &[]),
        Finding::Missing { waiting, .. } => (vec![waiting], &[]),
        Finding::Disagree { .. } | Finding::Circle(_) | Finding::CallOrder(_) => (Vec::new(), &[]),
    }
}

/// A picture in the making.
struct Drawing<'t> {
    places: Places<'t>,
    picture: Picture,
    /// Boxes of records by rank and position.
    records: BTreeMap<(u32, Position), usize>,
}

impl Drawing<'_> {
    /// Of an event.
    fn place(&self, event: usize, node: Option<u32>) -> Place {
        match &self.places.trace.events[event] {
            TraceEvent::Note { .. } => self.places.note(event as u32),
            _ => self.places.op(OpAt { event: event as u32, node }),
        }
    }

    fn row(&mut self, rank: u32, stream: &str) -> usize {
        let name = format!("rank {rank} {stream}");
        let rows = &mut self.picture.rows;
        rows.iter().position(|row| *row == name).unwrap_or_else(|| {
            rows.push(name);
            rows.len() - 1
        })
    }

    fn add(&mut self, place: &Place, role: Role) -> usize {
        let row = self.row(place.rank, &place.stream);
        let node = place.on.node.map_or(String::new(), |node| format!(".{node}"));
        let text = format!("{}{node} {} {}", place.on.seq, place.name, place.site).trim_end().to_owned();
        self.picture.boxes.push(Item { row, text, role });
        self.picture.boxes.len() - 1
    }

    fn culprit(&mut self, place: &Place) -> usize {
        self.add(place, Role::Culprit)
    }

    fn arrow(&mut self, from: usize, to: usize, text: String, kind: Kind) {
        self.picture.arrows.push(Arrow { from, to, text, kind });
    }

    /// Two operations, and what their streams do between them.
    fn pair(&mut self, (ends, dropped): &(Vec<&Place>, &[Label])) {
        let trace = self.places.trace;
        // A wait that was taken away, or a note, has the position of what follows it.
        let find = |place: &&Place| {
            let is_it = |(i, event): (usize, &TraceEvent)| {
                position(event) == Some((place.rank, place.on.stream, place.on.seq))
                    && self.place(i, place.on.node) == **place
            };
            trace.events.iter().enumerate().position(is_it)
        };
        let at: Vec<usize> = ends.iter().filter_map(find).collect();
        let (Some(&from), Some(&to)) = (at.iter().min(), at.iter().max()) else { return };
        let is_row = |rank: u32, stream: u32| ends.iter().any(|end| (end.rank, end.on.stream) == (rank, stream));
        let mut between: Vec<usize> = (from..=to).filter(|&i| self.is_drawn(i, dropped, &is_row)).collect();
        if between.len() > ITEMS {
            between.drain(ITEMS / 2..between.len() - ITEMS / 2);
        }
        between.extend(&at);
        between.sort_unstable();
        between.dedup();
        let mut culprits = Vec::new();
        for i in between {
            let node = ends.iter().zip(&at).find(|(_, at)| **at == i).and_then(|(end, _)| end.on.node);
            let place = self.place(i, node);
            let role = match &trace.events[i] {
                _ if at.contains(&i) => Role::Culprit,
                TraceEvent::Record { .. } | TraceEvent::Wait { .. } => Role::Synchronisation,
                _ => Role::Operation,
            };
            let made = self.add(&place, role);
            if at.contains(&i) {
                culprits.push(made);
            }
            match &trace.events[i] {
                TraceEvent::Record { .. } => drop(self.records.insert((place.rank, place.on), made)),
                TraceEvent::Wait { rank, why, on, outcome, .. } => {
                    if let Some(&record) = self.records.get(&(*rank, *on)) {
                        let kind = if *outcome == WaitOutcome::Dropped { Kind::Dropped } else { Kind::Holds };
                        self.arrow(record, made, why.to_string(), kind);
                    }
                }
                _ => {}
            }
        }
        if let [first, second] = culprits[..] {
            let names: Vec<String> = dropped.iter().map(|why| format!("'{why}'")).collect();
            let text = match names.is_empty() {
                true => "nothing orders these".to_owned(),
                false => format!("nothing orders these: no {}", names.join(", ")),
            };
            self.arrow(first, second, text, Kind::Missing);
        }
    }

    /// Whether an event belongs to the streams of the two ends and says something about their order.
    fn is_drawn(&self, i: usize, dropped: &[Label], is_row: &impl Fn(u32, u32) -> bool) -> bool {
        match &self.places.trace.events[i] {
            TraceEvent::Wait { rank, stream, why, outcome, .. } => {
                is_row(*rank, *stream)
                    && match outcome {
                        WaitOutcome::Enforced => true,
                        WaitOutcome::Elided => false,
                        WaitOutcome::Dropped => dropped.contains(why),
                    }
            }
            TraceEvent::Record { rank, stream, .. }
            | TraceEvent::Joint { rank, stream, .. }
            | TraceEvent::Launch { rank, stream, .. } => is_row(*rank, *stream),
            _ => false,
        }
    }
}
