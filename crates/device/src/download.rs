//! Values on their way to the host.

use std::sync::{Arc, Mutex};

use crate::{
    Access, Device, Element, Error, Launch, Op, Position, Site, View, engine::Awaited, op::Landing, queue::Mark,
};

type Slot<T> = Arc<Mutex<Vec<T>>>;

/// Where values come to.
pub(crate) struct Landed<T> {
    landing: Arc<Landing>,
    slot: Slot<T>,
}

/// Values that a stream will have copied to the host. Dropping it loses nothing but the values.
#[must_use = "the values come from wait()"]
pub struct Download<T> {
    device: Device,
    label: String,
    landed: Landed<T>,
    mark: Arc<Mark>,
    on: Position,
}

impl<T: Element> Download<T> {
    pub(crate) fn op(view: &View) -> (Op, Landed<T>) {
        let slot = Slot::default();
        let out = slot.clone();
        let landing = Landing::new(move |args| {
            let rows = args.rows::<T>(0)?;
            let mut out = out.lock().unwrap_or_else(|poison| poison.into_inner());
            out.clear();
            (0..rows.len()).for_each(|i| out.extend_from_slice(rows.row(i)));
            Ok(())
        });
        let site = Site::from(view.label().to_owned());
        let launch = Launch::Download(landing.clone());
        (Op::new("download", site, vec![Access::read(view)], launch), Landed { landing, slot })
    }

    pub(crate) fn new(device: Device, label: &str, landed: Landed<T>, (mark, on): (Arc<Mark>, Position)) -> Self {
        Download { device, label: label.to_owned(), landed, mark, on }
    }

    /// The copy has been made, or never will be: [`Download::wait`] does not block.
    pub fn is_done(&self) -> bool {
        self.mark.is_done()
    }

    /// The host waits for the copy.
    ///
    /// # Errors
    /// The device's sticky error; [`Error::Timeout`] or [`Error::Deadlock`].
    pub fn wait(self) -> Result<Vec<T>, Error> {
        self.device.wait_host(&self.mark, Awaited::Values(&self.label), self.on)?;
        self.landed.landing.land();
        self.device.inner().check()?;
        Ok(std::mem::take(&mut *self.landed.slot.lock().unwrap_or_else(|poison| poison.into_inner())))
    }
}
