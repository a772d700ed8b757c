//! Traces written and read back.

use device::{Note, Trace, TraceEvent};
use graphcap::verify::{TraceError, file};
use proptest::prelude::*;

use super::oracle::{Act, played};
use super::traces::access;

fn round(trace: &Trace) -> (String, Trace) {
    let mut text = Vec::new();
    file::write(trace, &mut text).unwrap();
    let back = file::read(text.as_slice()).unwrap();
    (String::from_utf8(text).unwrap(), back)
}

/// One of each note.
fn notes(rank: u32, text: &str) -> Vec<TraceEvent> {
    let label = || text.to_owned().into();
    let regions = || vec![access(rank, 3, device::Mode::Update, 4..9), access(rank, 4, device::Mode::Read, 0..0)];
    let notes = [
        Note::Stream { stream: 3, name: label() },
        Note::Step(u64::MAX),
        Note::Microbatch(2),
        Note::Pass(label()),
        Note::Written { publisher: label(), epoch: 4, regions: regions() },
        Note::Issued { publisher: label(), epoch: 4, group: "".into(), by: label(), regions: regions() },
        Note::Read { publisher: label(), param: label(), pass: "p".into(), written: 4, issued: 3, regions: regions() },
        Note::Released { publisher: label() },
        Note::Landed { param: label(), regions: regions() },
        Note::Reduced { bucket: label(), group: label(), regions: vec![] },
        Note::Scope { graph: 9, scope: label() },
        Note::Gathered { param: label(), epoch: 7, regions: regions() },
        Note::Used { param: label(), epoch: 7, regions: regions() },
    ];
    let at = |i: usize| i.is_multiple_of(2).then_some((i as u32, i as u64));
    let told = notes.into_iter().enumerate().map(|(i, note)| TraceEvent::Note { rank, at: at(i), note });
    let name = "n".into();
    told.chain([TraceEvent::Ran { rank, stream: 1, seq: 2, node: Some(0), name, start: 5, end: 6 }]).collect()
}

proptest! {
    #[test]
    fn a_trace_comes_back_as_it_was(acts in prop::collection::vec(any::<Act>(), 0..30), text in any::<String>()) {
        let mut trace = played(&acts);
        trace.events.extend(notes(1, &text));
        let (_, back) = round(&trace);
        prop_assert_eq!(&back, &trace);
    }

    #[test]
    fn one_byte_that_was_changed_is_told_or_changes_nothing(
        acts in prop::collection::vec(any::<Act>(), 1..20), at in any::<prop::sample::Index>(), byte in any::<u8>(),
    ) {
        let (text, whole) = round(&played(&acts));
        let mut bytes = text.into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        // A tab between two numbers is as good as a space.
        if let Ok(read) = file::read(bytes.as_slice()) {
            prop_assert_eq!(read, whole);
        }
    }
}

/// A few events with a label that takes two lines to print.
fn sample() -> Vec<u8> {
    let mut trace = Trace::default();
    trace.events.extend(notes(0, "two\nlines"));
    round(&trace).0.into_bytes()
}

#[test]
fn a_trace_that_was_cut_anywhere_is_refused() {
    let whole = sample();
    file::read(whole.as_slice()).unwrap();
    for end in 0..whole.len() {
        let cut = file::read(&whole[..end]);
        let Err(TraceError::TraceCut { lines }) = cut else { panic!("{end} of {} bytes: {cut:?}", whole.len()) };
        let there = whole[..end].iter().filter(|byte| **byte == b'\n').count();
        assert_eq!(lines, there, "{end} of {} bytes", whole.len());
    }
    let told = file::read(&b"warpweft trace 2\nL a\n"[..]).unwrap_err().to_string();
    assert_eq!(told, "a trace ends behind line 2 and has no last line: the file was cut; record it again");
}

#[test]
fn a_trace_that_lacks_a_line_or_has_one_more_is_refused() {
    let whole = String::from_utf8(sample()).unwrap();
    let lines: Vec<&str> = whole.split_inclusive('\n').collect();
    for left_out in 1..lines.len() {
        let kept = lines.iter().enumerate().filter(|(i, _)| *i != left_out).map(|(_, line)| *line).collect::<String>();
        assert!(file::read(kept.as_bytes()).is_err(), "without '{}'", lines[left_out]);
    }
    // Step and microbatch in the other order: as many lines, another sum.
    let mut swapped = lines.clone();
    let step = lines.iter().position(|line| line.contains(&u64::MAX.to_string())).unwrap();
    swapped.swap(step, step + 1);
    let changed = file::read(swapped.concat().as_bytes());
    assert!(matches!(changed, Err(TraceError::TraceChanged { .. })), "{changed:?}");
    let more = file::read([whole.as_str(), "L more\n"].concat().as_bytes()).unwrap_err();
    let want = format!("line {} of a trace: needs the end of the file, has 'L more'", lines.len() + 1);
    assert!(more.to_string().starts_with(&want), "{more}");
}

#[test]
fn a_trace_of_an_older_version_is_refused_by_name() {
    let error = file::read(&b"warpweft trace 1\nL gemm\n"[..]).unwrap_err().to_string();
    let want = "its first line is 'warpweft trace 1', needs 'warpweft trace 2'; record it again with this version";
    assert!(error.ends_with(want), "{error}");
}

#[test]
fn a_line_that_makes_no_sense_is_told_by_number() {
    let text = "warpweft trace 2\nL gemm\no 0 0 0 0 0 7 1 0 0 0 9 0 4 1 4 0\n";
    let error = file::read(text.as_bytes()).unwrap_err();
    let want = "line 3 of a trace: needs a kind of memory, has '9'; the file was cut or changed";
    assert_eq!(error.to_string(), want);
    assert!(matches!(file::read("{}".as_bytes()), Err(TraceError::NotATrace { .. })));
    let binary = file::read(&b"\x1b\0\xff"[..]).unwrap_err().to_string();
    assert!(binary.contains("its first line is '\\u{1b}\\u{0}\u{FFFD}'"), "{binary}");
}
