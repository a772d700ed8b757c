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
    fn a_file_that_was_cut_or_changed_is_refused_or_read_and_never_a_panic(
        acts in prop::collection::vec(any::<Act>(), 1..20), cut in any::<prop::sample::Index>(), byte in any::<u8>(),
    ) {
        let (text, _) = round(&played(&acts));
        let mut bytes = text.into_bytes();
        let at = cut.index(bytes.len());
        bytes[at] = byte;
        if let Ok(trace) = file::read(bytes.as_slice()) {
            graphcap::verify::verify(&trace, &Default::default());
        }
        bytes.truncate(at);
        let _ = file::read(bytes.as_slice());
    }
}

#[test]
fn a_line_that_makes_no_sense_is_told_by_number() {
    let text = "warpweft trace 1\nL gemm\no 0 0 0 0 0 7 1 0 0 0 9 0 4 1 4 0\n";
    let error = file::read(text.as_bytes()).unwrap_err();
    let want = "line 3 of a trace: needs a kind of memory, has '9'; the file was cut or changed";
    assert_eq!(error.to_string(), want);
    assert!(matches!(file::read("{}".as_bytes()), Err(TraceError::NotATrace { .. })));
}
