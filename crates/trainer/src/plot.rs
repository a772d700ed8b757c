//! The loss curve of a run, as SVG.

use crate::{error::TrainError, metrics::StepMetrics, whole_file::write_whole};
use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 460.0;
/// Of the plotting area.
const LEFT: f64 = 74.0;
const RIGHT: f64 = WIDTH - 26.0;
const TOP: f64 = 58.0;
const BOTTOM: f64 = HEIGHT - 60.0;

/// Draws loss over steps: every step's loss, the mean of the last few, which is what training is judged by, and the
/// losses of evaluations.
///
/// A loss that is no number leaves a gap. However long the run, the picture has at most about two points per pixel,
/// the lowest and the highest loss of what falls on it.
pub fn loss_curve(title: &str, metrics: &[StepMetrics]) -> String {
    let losses: Vec<(f64, f64)> = metrics.iter().map(|m| (m.step as f64, f64::from(m.loss))).collect();
    let mut svg = String::new();
    open(&mut svg, title);
    let finite = || losses.iter().filter(|(_, loss)| loss.is_finite());
    let evals: Vec<(f64, f64)> =
        metrics.iter().filter_map(|m| Some((m.step as f64, f64::from(m.eval_loss?)))).collect();
    let drawn = finite().chain(evals.iter().filter(|(_, loss)| loss.is_finite()));
    let Some(y) = Scale::over(drawn.map(|(_, loss)| *loss), BOTTOM, TOP) else {
        label(&mut svg, (WIDTH / 2.0, HEIGHT / 2.0), "middle", 15, "no step has a loss that is a number");
        svg.push_str("</svg>\n");
        return svg;
    };
    let x = Scale::over(losses.iter().map(|(step, _)| *step), LEFT, RIGHT).expect("BUG: a finite loss has a step");
    axes(&mut svg, &x, &y);

    let window = (losses.len() / 20).max(5);
    let means = running_means(&losses, window);
    line(&mut svg, &thinned(&losses), &x, &y, "#9dbbe0", 1.0);
    line(&mut svg, &thinned(&means), &x, &y, "#1f4e8c", 2.2);
    legend(&mut svg, 0, "#9dbbe0", "each step");
    legend(&mut svg, 1, "#1f4e8c", &format!("mean of the last {window}"));

    if !evals.is_empty() {
        line(&mut svg, &thinned(&evals), &x, &y, "#c0561e", 2.2);
        legend(&mut svg, 2, "#c0561e", "evaluation");
    }

    let first = finite().next().map_or(f64::NAN, |(_, loss)| *loss);
    let last = means.iter().rev().find(|(_, mean)| mean.is_finite()).map_or(f64::NAN, |(_, mean)| *mean);
    let text = format!("first {first:.3}, last (mean of {window}) {last:.3}");
    label(&mut svg, (RIGHT, TOP - 14.0), "end", 13, &text);
    svg.push_str("</svg>\n");
    svg
}

/// Writes the loss curve as `loss.svg` into a folder; a reader never sees half a picture.
///
/// # Errors
/// [`TrainError::Write`] with the file.
pub fn write_loss_curve(dir: &Path, title: &str, metrics: &[StepMetrics]) -> Result<PathBuf, TrainError> {
    let path = curve_file(dir);
    write_whole(&path, loss_curve(title, metrics).as_bytes())?;
    Ok(path)
}

/// The loss curve of a folder.
pub(crate) fn curve_file(dir: &Path) -> PathBuf {
    dir.join("loss.svg")
}

/// Values to pixels, with round ticks.
struct Scale {
    low: f64,
    high: f64,
    step: f64,
    from: f64,
    to: f64,
}

impl Scale {
    /// Covers all values; none if there are none.
    fn over(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Option<Scale> {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values {
            low = low.min(value);
            high = high.max(value);
        }
        if low > high {
            return None;
        }
        // One value only: some room on both sides.
        let room = if high > low { 0.0 } else { (high.abs() / 10.0).max(0.5) };
        let (low, high) = (low - room, high + room);
        let step = round_step((high - low) / 7.0);
        Some(Scale { low: (low / step).floor() * step, high: (high / step).ceil() * step, step, from, to })
    }

    fn at(&self, value: f64) -> f64 {
        self.from + (value - self.low) / (self.high - self.low) * (self.to - self.from)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let count = ((self.high - self.low) / self.step).round() as u32;
        (0..=count).map(|i| self.low + f64::from(i) * self.step)
    }

    /// With as many decimals as the distance of two ticks needs.
    fn tick_label(&self, value: f64) -> String {
        let decimals = (0..12).find(|&d| {
            let scaled = self.step * 10f64.powi(d);
            (scaled - scaled.round()).abs() < 1e-6 * scaled
        });
        // A tick at 0 may be -1e-17 by rounding.
        let value = if value.abs() < self.step / 2.0 { 0.0 } else { value };
        format!("{value:.*}", decimals.unwrap_or(12) as usize)
    }
}

/// 1, 2, 2.5 or 5 times a power of ten, at least `step`.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let factor = [1.0, 2.0, 2.5, 5.0].into_iter().find(|f| f * power >= step * (1.0 - 1e-9)).unwrap_or(10.0);
    factor * power
}

/// The mean of the last `window` losses at every step; of fewer at the beginning, of the finite ones only.
fn running_means(losses: &[(f64, f64)], window: usize) -> Vec<(f64, f64)> {
    // Sums and counts of the finite losses up to every step: a window is a difference of two, however long it is.
    let (mut sums, mut counts) = (vec![0.0], vec![0u32]);
    for (_, loss) in losses {
        let finite = loss.is_finite();
        sums.push(sums[sums.len() - 1] + if finite { *loss } else { 0.0 });
        counts.push(counts[counts.len() - 1] + u32::from(finite));
    }
    let mean = |end: usize| {
        let start = end.saturating_sub(window);
        (sums[end] - sums[start]) / f64::from(counts[end] - counts[start])
    };
    losses.iter().enumerate().map(|(i, (step, _))| (*step, mean(i + 1))).collect()
}

/// The lowest and the highest of every piece, so that no spike is lost; gaps stay.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let piece = points.len().div_ceil(WIDTH as usize);
    if piece <= 2 {
        return points.to_vec();
    }
    let mut kept = Vec::new();
    for piece in points.chunks(piece) {
        let finite = || piece.iter().filter(|(_, loss)| loss.is_finite());
        let low = finite().min_by(|a, b| a.1.total_cmp(&b.1));
        let high = finite().max_by(|a, b| a.1.total_cmp(&b.1));
        let gap = piece.iter().find(|(_, loss)| !loss.is_finite());
        let mut of_piece: Vec<(f64, f64)> = [low, high, gap].into_iter().flatten().copied().collect();
        of_piece.sort_by(|a, b| a.0.total_cmp(&b.0));
        of_piece.dedup_by(|a, b| a.0 == b.0);
        kept.extend(of_piece);
    }
    kept
}

fn open(svg: &mut String, title: &str) {
    let _ = writeln!(
        svg,
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="Helvetica, Arial, sans-serif" fill="#222">"##
    );
    let _ = writeln!(svg, r#"<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>"#);
    label(svg, (LEFT, 26.0), "start", 17, title);
}

fn axes(svg: &mut String, x: &Scale, y: &Scale) {
    for tick in y.ticks() {
        let at = y.at(tick);
        let _ = writeln!(svg, r##"<line x1="{LEFT}" y1="{at:.1}" x2="{RIGHT}" y2="{at:.1}" stroke="#e3e3e3"/>"##);
        label(svg, (LEFT - 8.0, at + 4.5), "end", 13, &y.tick_label(tick));
    }
    // Steps are whole: a run of a few has no tick at a half.
    for tick in x.ticks().filter(|tick| (tick - tick.round()).abs() < 1e-9) {
        let at = x.at(tick);
        let _ =
            writeln!(svg, r##"<line x1="{at:.1}" y1="{BOTTOM}" x2="{at:.1}" y2="{}" stroke="#444"/>"##, BOTTOM + 5.0);
        label(svg, (at, BOTTOM + 20.0), "middle", 13, &x.tick_label(tick.round()));
    }
    let _ = writeln!(svg, r##"<path d="M{LEFT} {TOP} V{BOTTOM} H{RIGHT}" fill="none" stroke="#444"/>"##);
    label(svg, ((LEFT + RIGHT) / 2.0, HEIGHT - 14.0), "middle", 14, "step");
    let middle = (TOP + BOTTOM) / 2.0;
    let _ = writeln!(
        svg,
        r#"<text transform="translate(20 {middle}) rotate(-90)" text-anchor="middle" font-size="14">loss (nats per token)</text>"#
    );
}

fn line(svg: &mut String, points: &[(f64, f64)], x: &Scale, y: &Scale, color: &str, width: f64) {
    for piece in points.split(|(_, loss)| !loss.is_finite()).filter(|piece| !piece.is_empty()) {
        let mut path = String::new();
        for (step, loss) in piece {
            let _ = write!(path, "{:.1},{:.1} ", x.at(*step), y.at(*loss));
        }
        // A single point has no length; a round cap makes it a dot.
        let points = if piece.len() == 1 { path.repeat(2) } else { path };
        let _ = writeln!(
            svg,
            r#"<polyline points="{}" fill="none" stroke="{color}" stroke-width="{width}" stroke-linejoin="round" stroke-linecap="round"/>"#,
            points.trim_end()
        );
    }
}

fn legend(svg: &mut String, row: u32, color: &str, text: &str) {
    let (from, at) = (RIGHT - 170.0, TOP + 16.0 + 20.0 * f64::from(row));
    let _ = writeln!(
        svg,
        r#"<line x1="{from}" y1="{at}" x2="{}" y2="{at}" stroke="{color}" stroke-width="2.5"/>"#,
        from + 26.0
    );
    label(svg, (from + 34.0, at + 4.5), "start", 13, text);
}

fn label(svg: &mut String, (x, y): (f64, f64), anchor: &str, size: u32, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(svg, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" font-size="{size}">{text}</text>"#);
}

#[cfg(test)]
mod tests;
