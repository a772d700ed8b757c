//! A backend of the smallest kind: masters in halves over replicas, a publication and a reduction for each weight.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering},
};

use device::{
    DType, Event, MemoryKind, Note, Reduce, Stream, TraceAccess, View, Why,
    ops::{Axpy, Factor, Fill},
};
use pgroups::{After, Epochs, Group, Keep, Key, Landed, Param, PgError, Publish};

use crate::api::{rig::Caught, stand::Stand};

const STEP_AFTER_LANDED: Why = Why("test.step_after_landed");
const WRITE_AFTER_READ: Why = Why("test.write_after_read");
const PUBLISH_AFTER_STEP: Why = Why("test.publish_after_step");
const GRAD_AFTER_STEP: Why = Why("test.grad_after_step");

/// What a weight's publisher and sink were asked, in order.
pub(crate) type Heard = Arc<Mutex<Vec<String>>>;

/// The backend of one rank: each weight is a bucket.
pub(crate) struct Backend {
    pub(crate) buckets: Vec<Arc<Bucket>>,
    pub(crate) heard: Heard,
    optimizer: Stream,
    replicas: Group,
}

/// One weight.
pub(crate) struct Bucket {
    name: String,
    value: View,
    /// This replica's part of the value, f32, where the optimizer writes.
    master: View,
    grads: View,
    publish: Stream,
    reduce: Stream,
    over: Group,
    published: Event,
    stepped: Event,
    landed: Event,
    reduced: Event,
    /// Gradients may be written.
    free: Event,
    epochs: Mutex<Epochs>,
    releases: Mutex<Vec<(u32, Event)>>,
    /// Whoever owns the schedule publishes nothing.
    pub(crate) off: AtomicBool,
    heard: Heard,
}

impl Backend {
    /// Attaches itself to all weights of a rank. Every weight has as many elements for each replica.
    pub(crate) fn attach(stand: &Stand) -> Result<Backend, Caught> {
        let device = &stand.rank.device;
        let on = &stand.script.streams[0];
        let heard = Heard::default();
        let replicas = stand.groups.get(&Key::DP, "the backend")?.clone();
        let bucket = |(i, param): (usize, &Param)| -> Result<Arc<Bucket>, Caught> {
            let placed = &stand.params.placed()[i];
            let (value, grads) =
                (stand.params.values().flat(placed.range.clone())?, param.main_grad().flat(0..param.numel())?);
            let name = param.name();
            let part = value.numel() / replicas.size() as usize;
            let from = part * replicas.place().0 as usize;
            let master = device.alloc("master", &[part], DType::F32, MemoryKind::Optimizer)?;
            // The initial values count as published.
            on.launch(Fill { y: &master, value: 0.0 }.op("master")?)?;
            on.launch(
                Axpy { alpha: Factor::Const(1.0), x: &value.flat(from..from + part)?, y: &master }.op("master")?,
            )?;
            let event = |what: &str| -> Result<Event, Caught> {
                let event = device.event(&format!("test.{what}.{name}"));
                on.record(&event)?;
                Ok(event)
            };
            let bucket = Arc::new(Bucket {
                name: name.to_owned(),
                value,
                master,
                grads,
                publish: device.stream(&format!("publish {name}"))?,
                reduce: device.stream(&format!("reduce {name}"))?,
                over: replicas.second(&format!("bucket_{i}"))?,
                published: event("published")?,
                stepped: event("stepped")?,
                landed: event("landed")?,
                reduced: event("reduced")?,
                free: event("free")?,
                epochs: Mutex::default(),
                releases: Mutex::default(),
                off: AtomicBool::new(false),
                heard: heard.clone(),
            });
            param.attach(Some(bucket.clone()), Some(bucket.clone()));
            Ok(bucket)
        };
        let buckets = stand.script.params.iter().enumerate().map(bucket).collect::<Result<_, _>>()?;
        device.synchronize()?;
        Ok(Backend { buckets, heard, optimizer: device.stream("optimizer")?, replicas })
    }

    /// What was asked since the last time.
    pub(crate) fn heard(&self) -> Vec<String> {
        std::mem::take(&mut self.heard.lock().unwrap())
    }

    /// Gradient descent by mean gradients over the replicas; gradients are zero behind it.
    pub(crate) fn step(&self, rate: f32) -> Result<(), Caught> {
        let (on, place) = (&self.optimizer, self.replicas.place().0 as usize);
        for bucket in &self.buckets {
            on.wait(&bucket.reduced, STEP_AFTER_LANDED)?;
            let part = bucket.master.numel();
            let grad = bucket.grads.flat(part * place..part * (place + 1))?;
            // What is being published of the step before is read first.
            on.wait(&bucket.published, PUBLISH_AFTER_STEP)?;
            on.launch(Axpy { alpha: Factor::Const(-rate), x: &grad, y: &bucket.master }.op("descend")?)?;
            on.launch(Fill { y: &bucket.grads, value: 0.0 }.op("zero")?)?;
            on.record(&bucket.free)?;
            bucket.written(on)?;
        }
        let step = self.buckets[0].epochs().written;
        on.device().note(|| Note::Step(step));
        Ok(())
    }

    /// Every element of every weight is `value` from now on.
    pub(crate) fn load(&self, value: f32) -> Result<(), Caught> {
        let on = &self.optimizer;
        for bucket in &self.buckets {
            on.wait(&bucket.published, PUBLISH_AFTER_STEP)?;
            on.launch(Fill { y: &bucket.master, value }.op("load")?)?;
            bucket.written(on)?;
        }
        Ok(())
    }
}

impl Bucket {
    fn written(&self, on: &Stream) -> Result<(), Caught> {
        let mut epochs = self.epochs.lock().unwrap();
        epochs.written += 1;
        let (publisher, epoch) = (self.published.label(), epochs.written);
        on.note(|| Note::Written { publisher, epoch, regions: Vec::new() });
        Ok(on.record(&self.stepped)?)
    }
}

impl Publish for Bucket {
    fn epochs(&self) -> Epochs {
        *self.epochs.lock().unwrap()
    }

    fn issue(&self) -> Result<(), PgError> {
        self.heard.lock().unwrap().push(format!("ask {}", self.name));
        let mut epochs = self.epochs.lock().unwrap();
        if epochs.is_current() || self.off.load(Ordering::Relaxed) {
            return Ok(());
        }
        let on = &self.publish;
        on.wait(&self.stepped, PUBLISH_AFTER_STEP)?;
        self.releases.lock().unwrap().iter().try_for_each(|(_, event)| on.wait(event, WRITE_AFTER_READ))?;
        epochs.issued = epochs.written;
        let (publisher, epoch) = (self.published.label(), epochs.issued);
        let regions = vec![TraceAccess::from(&device::Access::write(&self.value))];
        let (group, by) = (self.over.name().to_owned().into(), "the backend".to_owned().into());
        on.note(|| Note::Issued { publisher, epoch, group, by, regions });
        self.over.all_gather(on, &self.master, &self.value)?;
        Ok(on.record(&self.published)?)
    }

    fn event(&self) -> &Event {
        &self.published
    }

    fn done(&self, after: After<'_>) -> Result<(), PgError> {
        let mut releases = self.releases.lock().unwrap();
        let (key, gate) = match after {
            After::Stream(stream) => (stream.index(), None),
            After::Gate(event) => (u32::MAX, Some(event.clone())),
        };
        let at = releases.iter().position(|(known, _)| *known == key);
        let at = at.unwrap_or_else(|| {
            releases.push((key, self.publish.device().event("test.release")));
            releases.len() - 1
        });
        match (gate, after) {
            (Some(gate), _) => releases[at].1 = gate,
            (None, After::Stream(stream)) => stream.record(&releases[at].1)?,
            (None, After::Gate(_)) => unreachable!("BUG: a gate is a gate"),
        }
        Ok(())
    }
}

impl Landed for Bucket {
    fn open(&self, _: &Param, stream: &Stream) -> Result<Keep, PgError> {
        stream.wait(&self.free, GRAD_AFTER_STEP)?;
        Ok(Keep::All)
    }

    fn first_use(&self) -> Keep {
        Keep::All
    }

    fn landed(&self, param: &Param, after: After<'_>) -> Result<(), PgError> {
        self.heard.lock().unwrap().push(format!("landed {}", param.name()));
        let on = &self.reduce;
        match after {
            After::Stream(stream) => {
                stream.record(&self.landed)?;
                on.wait(&self.landed, STEP_AFTER_LANDED)?;
            }
            After::Gate(gate) => on.wait(gate, STEP_AFTER_LANDED)?,
        }
        let regions = vec![TraceAccess::from(&device::Access::update(&self.grads))];
        let bucket = self.published.label();
        on.note(|| Note::Reduced { bucket, group: self.over.name().to_owned().into(), regions });
        self.over.all_reduce(on, &self.grads, Reduce::Avg)?;
        Ok(on.record(&self.reduced)?)
    }
}
