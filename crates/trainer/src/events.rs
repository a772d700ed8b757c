//! Metrics as TensorBoard reads them: an event file of length-prefixed records with checksums.

use crate::{
    error::TrainError,
    metrics::{Spread, StepMetrics},
};
use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

/// Writes an event file: `DIR/tensorboard/run-N/events.out.tfevents.SECONDS`. Every run of a folder has a number of its
/// own, so that TensorBoard draws them apart.
///
/// Source: the TFRecord format (length, its checksum, data, its checksum; CRC-32C, rotated and shifted) and the messages
/// `Event` and `Summary` of TensorFlow's protocol buffers.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Makes the folders if need be and a new file.
    ///
    /// # Errors
    /// [`TrainError::Write`] with the file or folder.
    pub fn create(dir: &Path) -> Result<EventFile, TrainError> {
        let runs = dir.join("tensorboard");
        let free = (1u64..).map(|n| runs.join(format!("run-{n}"))).find(|run| !run.exists());
        let run = free.expect("BUG: one of 2^64 names is free");
        let now = seconds();
        let path = run.join(format!("events.out.tfevents.{now:.0}"));
        let made = fs::create_dir_all(&run).and_then(|()| File::create_new(&path));
        let file = made.map_err(|source| TrainError::Write { path: path.clone(), source })?;
        let mut events = EventFile { path, file };
        let mut first = Message::default();
        first.double(1, now);
        first.bytes(3, b"brain.Event:2");
        events.record(&first.0)?;
        Ok(events)
    }

    /// Adds a step's numbers, which are in the file when this returns.
    ///
    /// # Errors
    /// [`TrainError::Write`], as when the disk is full.
    pub fn write(&mut self, metrics: &StepMetrics) -> Result<(), TrainError> {
        let timed = |phase: Spread| Some(phase.slowest).filter(|seconds| !seconds.is_nan());
        let numbers = [
            ("train/loss", Some(metrics.loss)),
            ("train/lr", Some(metrics.lr as f32)),
            ("train/grad_norm", Some(metrics.grad_norm)),
            ("train/tokens_per_s", Some(metrics.tokens_per_s as f32)),
            ("train/mfu", Some(metrics.mfu as f32)),
            ("seconds/forward", timed(metrics.phases.forward)),
            ("seconds/backward", timed(metrics.phases.backward)),
            ("seconds/update", timed(metrics.phases.update)),
            ("eval/loss", metrics.eval_loss),
        ];
        let mut summary = Message::default();
        for (tag, number) in numbers.into_iter().filter_map(|(tag, number)| Some((tag, number?))) {
            let mut value = Message::default();
            value.bytes(1, tag.as_bytes());
            value.float(2, number);
            summary.bytes(1, &value.0);
        }
        let mut event = Message::default();
        event.double(1, seconds());
        event.varint(2, metrics.step);
        event.bytes(5, &summary.0);
        self.record(&event.0)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn record(&mut self, data: &[u8]) -> Result<(), TrainError> {
        let length = (data.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(data.len() + 16);
        record.extend(length);
        record.extend(masked_crc(&length).to_le_bytes());
        record.extend(data);
        record.extend(masked_crc(data).to_le_bytes());
        let written = self.file.write_all(&record).and_then(|()| self.file.flush());
        written.map_err(|source| TrainError::Write { path: self.path.clone(), source })
    }
}

/// Since 1970.
fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// A protocol buffer message as it grows: fields of the wire types 0, 1, 2 and 5.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, field: u32, value: u64) {
        self.key(field, 0);
        self.raw_varint(value);
    }

    fn double(&mut self, field: u32, value: f64) {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u32, value: &[u8]) {
        self.key(field, 2);
        self.raw_varint(value.len() as u64);
        self.0.extend(value);
    }

    fn float(&mut self, field: u32, value: f32) {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
    }

    fn key(&mut self, field: u32, wire_type: u32) {
        self.raw_varint(u64::from(field << 3 | wire_type));
    }

    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

/// A checksum of data that holds checksums would be weak if it were not changed.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xA282_EAD8)
}

/// CRC-32C (Castagnoli), bit by bit: a step has some hundred bytes.
fn crc32c(data: &[u8]) -> u32 {
    const REFLECTED: u32 = 0x82F6_3B78;
    !data.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ if crc & 1 == 1 { REFLECTED } else { 0 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_castagnolis() {
        // Check values of RFC 3720 and of the catalogue of CRC algorithms.
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(&[0xFF; 32]), 0x62A8_AB43);
        assert_eq!(crc32c(b""), 0);
    }

    #[test]
    fn numbers_of_more_than_seven_bits_take_more_bytes() {
        let mut message = Message::default();
        message.varint(1, 300);
        message.varint(20, 1);
        assert_eq!(message.0, [0x08, 0xAC, 0x02, 0xA0, 0x01, 0x01]);
    }

    /// The fields of a message: number, and value as bytes.
    fn fields(mut data: &[u8]) -> Vec<(u64, Vec<u8>)> {
        fn varint(data: &mut &[u8]) -> u64 {
            let mut value = 0;
            for shift in (0..).step_by(7) {
                let byte = data[0];
                *data = &data[1..];
                value |= u64::from(byte & 0x7F) << shift;
                if byte < 0x80 {
                    break;
                }
            }
            value
        }
        let mut out = Vec::new();
        while !data.is_empty() {
            let key = varint(&mut data);
            let value = match key & 7 {
                0 => varint(&mut data).to_le_bytes().to_vec(),
                wire => {
                    let length = match wire {
                        1 => 8,
                        2 => varint(&mut data) as usize,
                        5 => 4,
                        other => panic!("wire type {other}"),
                    };
                    let (value, rest) = data.split_at(length);
                    data = rest;
                    value.to_vec()
                }
            };
            out.push((key >> 3, value));
        }
        out
    }

    /// The records of a file whose checksums are right.
    fn records(mut data: &[u8]) -> Vec<Vec<u8>> {
        let mut out = Vec::new();
        while !data.is_empty() {
            let length = u64::from_le_bytes(data[..8].try_into().unwrap()) as usize;
            assert_eq!(masked_crc(&data[..8]).to_le_bytes(), data[8..12]);
            let record = &data[12..12 + length];
            assert_eq!(masked_crc(record).to_le_bytes(), data[12 + length..16 + length]);
            out.push(record.to_vec());
            data = &data[16 + length..];
        }
        out
    }

    fn scalars(event: &[u8]) -> (u64, Vec<(String, f32)>) {
        let fields_of = |data: &[u8], number: u64| {
            let of: Vec<Vec<u8>> = fields(data).into_iter().filter(|(n, _)| *n == number).map(|(_, v)| v).collect();
            of
        };
        let step = u64::from_le_bytes(fields_of(event, 2)[0].clone().try_into().unwrap());
        let summary = &fields_of(event, 5)[0];
        let value = |value: Vec<u8>| {
            let tag = String::from_utf8(fields_of(&value, 1)[0].clone()).unwrap();
            (tag, f32::from_le_bytes(fields_of(&value, 2)[0].clone().try_into().unwrap()))
        };
        (step, fields_of(summary, 1).into_iter().map(value).collect())
    }

    #[test]
    fn what_is_written_can_be_decoded_and_every_run_has_a_folder_of_its_own() {
        let dir = std::env::temp_dir().join(format!("trainer-events-{}", std::process::id()));
        let metrics = StepMetrics {
            step: 300,
            loss: 2.5,
            lr: 1e-3,
            grad_norm: 0.75,
            tokens: 0,
            tokens_per_s: 1e4,
            mfu: 0.5,
            seconds: 0.1,
            phases: crate::PhaseTimes {
                forward: crate::Spread { fastest: 0.25, slowest: 0.5 },
                ..crate::PhaseTimes::default()
            },
            eval_loss: None,
        };
        let mut first = EventFile::create(&dir).unwrap();
        first.write(&metrics).unwrap();
        first.write(&StepMetrics { step: 301, eval_loss: Some(3.25), ..metrics }).unwrap();
        let second = EventFile::create(&dir).unwrap();
        assert_ne!(first.path().parent(), second.path().parent());
        assert!(first.path().to_string_lossy().contains("run-1/events.out.tfevents."), "{}", first.path().display());

        let records = records(&fs::read(first.path()).unwrap());
        assert_eq!(records.len(), 3);
        assert!(fields(&records[0]).contains(&(3, b"brain.Event:2".to_vec())));
        let want = [("train/loss", 2.5), ("train/lr", 1e-3), ("train/grad_norm", 0.75), ("train/tokens_per_s", 1e4)];
        let want = want
            .into_iter()
            .chain([("train/mfu", 0.5), ("seconds/forward", 0.5), ("seconds/backward", 0.0), ("seconds/update", 0.0)])
            .map(|(tag, n)| (tag.to_owned(), n as f32));
        let mut want: Vec<_> = want.collect();
        assert_eq!(scalars(&records[1]), (300, want.clone()));
        want.push(("eval/loss".to_owned(), 3.25));
        assert_eq!(scalars(&records[2]), (301, want));
        fs::remove_dir_all(dir).unwrap();
    }
}
