//! Processes that train the same model with PyTorch: idle, but for one measurement at a time.

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use crate::Failed;

pub(crate) struct Peer {
    child: Child,
    ask: ChildStdin,
    answer: BufReader<ChildStdout>,
    name: String,
}

impl Peer {
    /// Waits until its first steps are done.
    pub(crate) fn start(python: &str, (kind, world): (&str, u32), text: &Path) -> Result<Peer, Failed> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/training/torch_peer.py");
        let mut command = Command::new(python);
        command.args([script, "--kind", kind, "--world", &world.to_string(), "--text"]).arg(text);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let ask = child.stdin.take().ok_or("the peer has no input")?;
        let answer = BufReader::new(child.stdout.take().ok_or("the peer has no output")?);
        let mut peer = Peer { child, ask, answer, name: String::new() };
        peer.name = peer.line()?;
        Ok(peer)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Seconds a step, out of `steps` of them, and the loss of the last one.
    pub(crate) fn measure(&mut self, steps: usize) -> Result<(f64, f64), Failed> {
        writeln!(self.ask, "{steps}")?;
        let line = self.line()?;
        let (seconds, loss) = line.split_once(' ').ok_or("the peer's answer has one number")?;
        Ok((seconds.parse()?, loss.parse()?))
    }

    fn line(&mut self) -> Result<String, Failed> {
        let mut line = String::new();
        if self.answer.read_line(&mut line)? == 0 {
            return Err("the peer has ended; its own message is above".into());
        }
        Ok(line.trim().to_owned())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let asked = writeln!(self.ask, "0").and_then(|()| self.child.wait());
        if let Err(error) = asked {
            eprintln!("the peer did not end: {error}");
        }
    }
}
