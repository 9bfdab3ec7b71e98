//! Timelines that are made up: which step is drawn, what is in the picture, and that nothing leaves it.

use std::path::Path;

use polyreme_graph::{Axis, BlockKind, Exchanged, Moment, MomentKind, MomentLabel};
use polyreme_parallel::Mesh;

use super::{StepTimeline, TimelineError, Trace, svg};
use crate::record::trace::{self, About, TimeSource};

const FORWARD: MomentKind = MomentKind::Block(BlockKind::Forward);
const INPUT: MomentKind = MomentKind::Block(BlockKind::InputGrad);
const WEIGHT: MomentKind = MomentKind::Block(BlockKind::WeightGrad);

fn moment(kind: MomentKind, step: u64, microbatch: Option<usize>, from: f64, to: f64) -> Moment {
    let chunk = matches!(kind, MomentKind::Block(_)).then_some(0);
    let label = MomentLabel { microbatch, chunk, ..MomentLabel::new(kind.name(), kind) };
    Moment { label, step, start_us: from, us: to - from }
}

fn wait(op: &'static str, step: u64, from: f64, to: f64) -> Moment {
    let message = (op == "receive").then_some((0, 0));
    let exchanged = Exchanged { op, axis: Axis::Stage, message, bytes: 8192, text: op.into() };
    let mut wait = moment(MomentKind::Wait, step, None, from, to);
    wait.label.exchanged = Some(exchanged);
    wait
}

/// Steps of a pipeline of which stage `s` begins `s` units late and ends `s` units early; a unit is 1 ms, and steps differ.
pub(super) fn pipeline(stages: usize, microbatches: usize) -> (About, Vec<Vec<Moment>>) {
    let mut about = About::new("toy <1>", Mesh { stage: stages, ..Mesh::data(1) });
    (about.schedule, about.microbatches) = (Some("gpipe".into()), microbatches);
    let rank = |stage: usize| {
        let mut moments = Vec::new();
        let mut start = 0.0;
        // The second step is the median of the later ones.
        for (step, unit) in [(1, 3000.0), (2, 1000.0), (3, 1400.0), (4, 900.0)] {
            let (late, n) = (stage as f64, microbatches as f64);
            let at = |k: f64| start + (late + k) * unit;
            if stage > 0 {
                moments.push(wait("receive", step, start, at(0.0)));
            }
            for k in 0..microbatches {
                let k = k as f64;
                moments.push(moment(FORWARD, step, Some(k as usize), at(k), at(k + 1.0)));
                moments.push(moment(INPUT, step, Some(k as usize), at(n + 2.0 * k), at(n + 2.0 * k + 1.0)));
                moments.push(moment(
                    WEIGHT,
                    step,
                    Some(k as usize),
                    at(n + 2.0 * k + 1.0),
                    at(n + 2.0 * k + 2.0),
                ));
            }
            let end = start + unit * (3.0 * n + 2.0 * stages as f64 + 1.0);
            moments.push(wait("all-reduce", step, at(3.0 * n), end - unit));
            moments.push(moment(MomentKind::Update, step, None, end - unit, end));
            moments.push(moment(MomentKind::Step, step, None, start, end));
            start = end;
        }
        moments
    };
    (about, (0..stages).map(rank).collect())
}

pub(super) fn text_of((about, by_rank): &(About, Vec<Vec<Moment>>)) -> String {
    trace::text(about, by_rank)
}

fn read(text: &str) -> Result<Trace, TimelineError> {
    Trace::from_text(Path::new("trace.json"), text.as_bytes())
}

fn step(of: &(About, Vec<Vec<Moment>>), number: Option<u64>) -> StepTimeline {
    read(&text_of(of)).unwrap().step(number).unwrap()
}

#[test]
fn a_typical_step_is_drawn_unless_one_is_asked_for() {
    let made = pipeline(4, 2);
    assert_eq!(step(&made, None).steps, (2, 2));
    assert_eq!(step(&made, Some(4)).steps, (4, 4));
    let (about, mut by_rank) = made;
    // A rank whose recording was full has not ended the last step, so no picture would be right.
    by_rank[2].pop();
    let trace = read(&text_of(&(about, by_rank))).unwrap();
    let error = trace.step(Some(4)).unwrap_err().to_string();
    assert_eq!(error, "trace.json: step 4 is not in it: it has steps 1 to 3");
    assert_eq!(trace.step(None).unwrap().steps, (2, 2));
}

#[test]
fn several_steps_without_a_flush_are_one_picture() {
    let (about, mut by_rank) = pipeline(2, 2);
    // The last program is one of three steps: 4, 5 and 6.
    for moments in &mut by_rank {
        let from = moments.iter().position(|m| m.step == 4).unwrap();
        let n = moments.len() - 1;
        moments[from + 2].step = 5;
        moments[n - 1].step = 6;
    }
    let trace = read(&text_of(&(about, by_rank))).unwrap();
    for number in [4, 5, 6] {
        assert_eq!(trace.step(Some(number)).unwrap().steps, (4, 6));
    }
    assert!(trace.step(Some(7)).is_err());
    assert_eq!(trace.step(Some(3)).unwrap().steps, (3, 3));
}

#[test]
fn shares_of_idle_time_and_of_exchanges() {
    let step = step(&pipeline(4, 2), Some(2));
    assert_eq!(step.rows.len(), 4);
    // 15 units, of which 6 are passes and one is the update; the rest is waiting, or the sum.
    for (stage, row) in step.rows.iter().enumerate() {
        assert_eq!(row.name, [format!("stage {stage}"), String::new()]);
        assert!((row.idle - stage as f64 / 15.0).abs() < 1e-3, "{} {}", row.idle, stage);
        assert!((row.exchange - (8.0 - stage as f64) / 15.0).abs() < 1e-3, "{}", row.exchange);
    }
    assert!((step.took_us() - 15_000.0).abs() < 1.0);
}

#[test]
fn what_is_no_timeline_is_said() {
    for (text, want) in [
        ("", "not a timeline: EOF"),
        ("[model]\nkind = 1", "not a timeline: expected"),
        ("{}", "not a timeline: missing field `traceEvents`"),
        ("{\"traceEvents\": 3}", "expected a list of events"),
        ("{\"traceEvents\": [{\"ph\": \"X\", \"pid\": \"a\"}]}", "not a timeline: invalid type"),
        (
            "{\"traceEvents\": [{\"ph\":\"X\",\"cat\":\"step\",\"ts\":0,\"dur\":-1,\"args\":{\"step\":1}}]}",
            "a span of -1 µs",
        ),
        ("{\"traceEvents\": []}", "without a step that all ranks recorded whole"),
        // Of another program: a browser's, for instance.
        (
            "{\"otherData\":{\"version\":\"x\"},\"traceEvents\": [{\"ph\":\"X\",\"pid\":7,\"tid\":0,\"cat\":\"v8\",\"name\":\"gc\",\"ts\":1,\"dur\":2}]}",
            "without a step that all ranks recorded whole",
        ),
    ] {
        let error = read(text).and_then(|trace| trace.step(None)).unwrap_err().to_string();
        assert!(error.contains(want) && error.contains("--trace FILE"), "{text}: {error}");
    }
}

/// Every text of a picture: its left and right end by a narrow measure, its height, and what it says.
fn texts(picture: &str) -> Vec<(f64, f64, f64, String)> {
    let number = |line: &str, key: &str| {
        let from = line.split_once(&format!(" {key}=\"")).unwrap().1;
        from.split_once('"').unwrap().0.parse::<f64>().unwrap()
    };
    let of = |line: &str| {
        let words = line.split_once('>').unwrap().1.split_once('<').unwrap().0.to_string();
        let (x, wide) = (number(line, "x"), words.chars().count() as f64 * number(line, "font-size") * 0.5);
        let from = match line {
            line if line.contains("\"end\"") => x - wide,
            line if line.contains("\"middle\"") => x - wide / 2.0,
            _ => x,
        };
        (from, from + wide, number(line, "y"), words)
    };
    let lines = picture
        .lines()
        .flat_map(|line| line.split("<text").skip(1).map(|t| format!("<text{t}")).collect::<Vec<_>>());
    lines.map(|line| of(&line)).collect()
}

#[test]
fn a_picture_has_everything_and_nothing_leaves_it() {
    let mut made = pipeline(4, 8);
    let picture = svg(&[step(&made, None)]);
    for what in [
        "toy &lt;1&gt; · gpipe · 4 stages · 8 microbatches",
        "Measured, step 2: 33 ms",
        ">stage 3</text>",
        "forward of microbatch 7: 1 ms",
        ">waiting</text>",
        ">idle</text>",
        ">exchange</text>",
        ">ms</text>",
    ] {
        assert!(picture.contains(what), "{what} is missing in {picture}");
    }
    // Each microbatch has a number in each of its three passes on each stage.
    let sevens = texts(&picture).into_iter().filter(|t| t.3 == "7").count();
    assert_eq!(sevens, 12);
    // A measured and a simulated one, a long title, many ranks.
    let measured = step(&made, None);
    made.0.source = TimeSource::Simulated;
    let both = svg(&[measured, step(&made, Some(3))]);
    assert!(
        both.contains("Measured, step 2: 33 ms") && both.contains("Simulated, step 3: 46.2 ms"),
        "{both}"
    );
    made.0.job = "a job with a very long name ".repeat(20);
    let long = svg(&[step(&made, None)]);
    let mut many = pipeline(4, 2);
    many.1 = (0..200).map(|rank| many.1[rank / 2 % 4].clone()).collect();
    (many.0.tensor, many.0.data) = (2, 25);
    let many = svg(&[step(&many, None)]);
    assert!(many.contains("8 of 200 ranks are shown, those of data 0."), "{many}");
    assert!(many.contains("rank 3 · tensor 1 · data 0"), "{many}");
    for picture in [picture, both, long, many] {
        let height: f64 =
            picture.split_once("height=\"").unwrap().1.split_once('"').unwrap().0.parse().unwrap();
        for (from, to, y, words) in texts(&picture) {
            assert!(from >= 0.0 && to <= 1280.0 && y > 0.0 && y < height, "{words}: {from} to {to} at {y}");
        }
    }
}
