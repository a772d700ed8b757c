//! Ranks compare what they are about to build, before they build anything.

use device::{Access, DType, Device, Exchange, Meeting, MemoryKind, Stream, View};

use crate::{
    error::PgError,
    philox::split,
    plan::{Fingerprint, GroupsPlan, PlanDump},
    rank::GlobalRank,
};

/// All members of a meeting, who compare their plans.
pub(crate) struct Agreement<'a> {
    meeting: &'a Meeting,
    device: &'a Device,
    stream: Stream,
}

impl<'a> Agreement<'a> {
    pub(crate) fn new(device: &'a Device, meeting: &'a Meeting) -> Result<Agreement<'a>, PgError> {
        Ok(Agreement { meeting, device, stream: device.stream("pgroups.agree")? })
    }

    /// Returns when all have the same plan.
    ///
    /// On `dry` there are no values to compare: members only meet.
    pub(crate) fn on(&self, plan: &GroupsPlan) -> Result<(), PgError> {
        let dump = plan.dump();
        let [high, low] = split(dump.fingerprint().0).map(u32::cast_signed);
        let Some(all) = self.gather(vec![high, low])? else { return Ok(()) };
        let fingerprints = all.chunks_exact(2).map(|halves| {
            let [high, low] = [halves[0], halves[1]].map(|half| u64::from(half.cast_unsigned()));
            Fingerprint(high << 32 | low)
        });
        let same: Vec<bool> = fingerprints.map(|theirs| theirs == dump.fingerprint()).collect();
        if same.iter().all(|same| *same) {
            return Ok(());
        }
        // Every member sees the same fingerprints, so all of them come here together.
        let texts = self.gather_texts(&dump)?;
        let other = same.iter().position(|same| !same).expect("BUG: not all are the same");
        let lines = texts[other].lines().map(str::to_owned).collect();
        let other = PlanDump { rank: GlobalRank(self.meeting.members()[other]), lines };
        let source = match dump.agrees_with(&other) {
            Err(source) => Box::new(source),
            Ok(()) => unreachable!("BUG: equal plans with different fingerprints"),
        };
        let (ours, theirs) = (keys(&dump), keys(&other));
        Err(PgError::NeedsDiffer { rank: dump.rank, ours, other: other.rank, theirs, source })
    }

    /// Everybody's text, by place.
    fn gather_texts(&self, dump: &PlanDump) -> Result<Vec<String>, PgError> {
        let text = dump.to_string();
        // A plan's text is a line per key, far below 2 GiB.
        let lengths = self.gather(vec![text.len() as i32])?.unwrap_or_default();
        let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
        let mut bytes = text.into_bytes();
        bytes.resize(longest.next_multiple_of(4), b'\n');
        let words = bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let all = self.gather(words)?.unwrap_or_default();
        let texts = all.chunks_exact(longest.div_ceil(4).max(1)).zip(lengths).map(|(words, length)| {
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            bytes.truncate(length as usize);
            String::from_utf8_lossy(&bytes).into_owned()
        });
        Ok(texts.collect())
    }

    /// Everybody's values, by place; none on a driver without values.
    fn gather(&self, own: Vec<i32>) -> Result<Option<Vec<i32>>, PgError> {
        let numel = own.len();
        let alloc = |label, numel| -> Result<View, device::Error> {
            self.device.alloc(label, &[numel], DType::I32, MemoryKind::Other)
        };
        let part = alloc("pgroups.plan", numel)?;
        let all = alloc("pgroups.plans", numel * self.meeting.members().len())?;
        self.stream.upload(&part, own)?;
        let accesses = vec![Access::read(&part), Access::write(&all)];
        self.stream.joint(self.meeting, Exchange::AllGather, "pgroups.agree", accesses)?;
        if !self.device.machine().computes() {
            self.stream.synchronize()?;
            return Ok(None);
        }
        Ok(Some(self.stream.download::<i32>(&all)?.wait()?))
    }
}

/// The keys of a plan, out of its lines behind the layout's.
fn keys(dump: &PlanDump) -> String {
    let names: Vec<&str> = dump.lines.iter().skip(1).filter_map(|line| Some(line.split_once(": ")?.0)).collect();
    names.join(", ")
}
