use super::*;
use std::fs;

fn run(losses: impl IntoIterator<Item = f32>) -> Vec<StepMetrics> {
    let step = |(i, loss)| StepMetrics {
        step: i as u64 + 1,
        loss,
        lr: 1e-3,
        grad_norm: 1.0,
        tokens: 0,
        tokens_per_s: 0.0,
        mfu: 0.0,
        seconds: 0.1,
        phases: crate::PhaseTimes::default(),
        eval_loss: None,
    };
    losses.into_iter().enumerate().map(step).collect()
}

/// The points of every line, in pixels.
fn lines(svg: &str) -> Vec<Vec<(f64, f64)>> {
    let points = |line: &str| {
        let list = line.split("points=\"").nth(1).unwrap().split('"').next().unwrap();
        let point = |p: &str| p.split_once(',').map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap())).unwrap();
        list.split(' ').map(point).collect()
    };
    svg.lines().filter(|line| line.starts_with("<polyline")).map(points).collect()
}

#[test]
fn a_falling_loss_falls_from_left_to_right_within_the_frame() {
    let svg = loss_curve("a run", &run((0..150).map(|i| 5.5 * 0.99f32.powi(i))));
    let lines = lines(&svg);
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[0].len(), 150);
    for line in lines {
        // Down in the picture is a larger y.
        assert!(line.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1));
        assert!(line.iter().all(|(x, y)| (LEFT..=RIGHT).contains(x) && (TOP..=BOTTOM).contains(y)));
    }
    for text in [">step<", ">loss (nats per token)<", ">each step<", ">mean of the last 7<", ">a run<", "first 5.500"] {
        assert!(svg.contains(text), "{text} is not in the picture");
    }
}

#[test]
fn what_is_no_number_is_a_gap_and_a_lone_point_a_dot() {
    let svg = loss_curve("gaps", &run([4.0, 3.5, f32::NAN, 3.0, f32::INFINITY, 2.0, 1.5, 1.0]));
    let lines = lines(&svg);
    let lengths: Vec<usize> = lines.iter().map(Vec::len).collect();
    // The raw line in three pieces, the lone point twice; the mean goes over the gaps.
    assert_eq!(lengths, [2, 2, 3, 8]);
    assert_eq!(lines[1][0], lines[1][1]);
    assert!(!svg.contains("NaN") && !svg.contains("inf"));
}

#[test]
fn runs_without_a_curve_still_give_a_picture() {
    for losses in [vec![], vec![f32::NAN, f32::NAN]] {
        let svg = loss_curve("none", &run(losses));
        assert!(svg.contains("no step has a loss that is a number") && svg.ends_with("</svg>\n"));
    }
    let svg = loss_curve("one", &run([3.0]));
    assert!(!svg.contains("NaN") && lines(&svg).len() == 2, "{svg}");
}

#[test]
fn a_long_run_keeps_its_spikes_and_stays_small() {
    let mut losses = vec![1.0f32; 100_000];
    losses[54_321] = 9.0;
    let svg = loss_curve("long", &run(losses));
    assert!(svg.len() < 100_000, "{} bytes", svg.len());
    let raw = &lines(&svg)[0];
    let (low, high) = (raw.iter().map(|p| p.1).fold(0.0, f64::max), raw.iter().map(|p| p.1).fold(HEIGHT, f64::min));
    assert!(low - high > 0.7 * (BOTTOM - TOP), "the spike is cut: from {low} to {high}");
}

#[test]
fn the_mean_is_that_of_the_last_finite_losses() {
    let losses: Vec<(f64, f64)> =
        [4.0, 2.0, f64::NAN, 6.0, 1.0].into_iter().enumerate().map(|(i, l)| (i as f64, l)).collect();
    let means: Vec<f64> = running_means(&losses, 3).into_iter().map(|(_, mean)| mean).collect();
    assert_eq!(means, [4.0, 3.0, 3.0, 4.0, 3.5]);
}

#[test]
fn a_title_is_text_not_markup() {
    let svg = loss_curve("a<b & \"c\">", &run([1.0, 2.0]));
    assert!(svg.contains(">a&lt;b &amp; \"c\"&gt;</text>"));
}

#[test]
fn ticks_are_round_and_labelled_without_noise() {
    let labels = |low: f64, high: f64| {
        let scale = Scale::over([low, high].into_iter(), 0.0, 100.0).unwrap();
        scale.ticks().map(|tick| scale.tick_label(tick)).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(labels(1.0, 150.0), "0 25 50 75 100 125 150");
    assert_eq!(labels(0.93, 5.57), "0 1 2 3 4 5 6");
    assert_eq!(labels(-0.1, 0.25), "-0.10 -0.05 0.00 0.05 0.10 0.15 0.20 0.25");
    assert_eq!(labels(2.0, 2.01), "2.000 2.002 2.004 2.006 2.008 2.010");
}

#[test]
fn the_picture_is_written_whole() {
    let dir = std::env::temp_dir().join(format!("trainer-plot-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let metrics = run([2.0, 1.0]);
    let path = write_loss_curve(&dir, "written", &metrics).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), loss_curve("written", &metrics));
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
    fs::remove_dir_all(&dir).unwrap();
    let error = write_loss_curve(&dir, "gone", &metrics).unwrap_err();
    assert!(error.to_string().contains("loss.svg"), "{error}");
}
