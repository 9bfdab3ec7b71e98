//! Whole pages: well formed, safe and small, whatever a run left behind.

use std::fs;

use super::*;

fn history(text: &str) -> History {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("metrics.jsonl");
    fs::write(&path, text).unwrap();
    History::read(&path).unwrap()
}

/// A run with everything that a report shows.
fn run(lines: u64) -> String {
    let mut text = String::new();
    for step in 1..=lines {
        let (x, noise) = (step as f64 / lines as f64, ((step * 7919) % 1000) as f64 / 1000.0);
        let loss = 0.2 + 2.1 * (-6.0 * x).exp() + 0.25 * (noise - 0.5) * (1.0 - 0.6 * x);
        let lr = 3e-4 * (step as f64 * 20.0 / lines as f64).min(1.0) * (1.0 + (3.0 * x).cos()) / 2.0;
        let speed = 12_000.0 + 900.0 * noise;
        text += &format!(
            "{{\"step\":{},\"epoch\":{},\"seconds\":{step},\"train_loss\":{loss},\"lr\":{lr},\"samples_per_s\":{speed}}}\n",
            step * 10,
            (x * 10.0) as u64
        );
        if step.is_multiple_of((lines / 10).max(1)) {
            let (loss, accuracy) = (0.25 + 1.9 * (-5.0 * x).exp(), 0.985 - 0.5 * (-5.0 * x).exp());
            text += &format!(
                "{{\"step\":{},\"val_loss\":{loss},\"val_accuracy\":{accuracy},\"val_top5\":{}}}\n",
                step * 10,
                1.0 - (1.0 - accuracy) / 8.0
            );
        }
    }
    text
}

fn summary(classes: usize) -> Summary {
    let rows: Vec<Vec<u64>> = (0..classes as u64)
        .map(|t| {
            (0..classes as u64)
                .map(|p| if t == p { 900 + t * 7 } else { ((t * 31 + p * 17) % 23).saturating_sub(15) * 4 })
                .collect()
        })
        .collect();
    let pair = |(key, value): (&str, &str)| (key.to_string(), value.to_string());
    Summary {
        title: "fashion-cnn".into(),
        ended: "Finished".into(),
        steps: 4690,
        seconds: 83.2,
        samples_per_s: 12_345.0,
        metrics: vec![
            ("test_accuracy".into(), 0.9231),
            ("test_loss".into(), 0.2211),
            ("val_accuracy".into(), 0.9258),
            ("train_loss".into(), 0.1893),
        ],
        best: Some(Best { metric: "val_accuracy".into(), value: Some(0.9263), step: 4221 }),
        settings: [
            ("model.kind", "cnn"),
            ("model.classes", "10"),
            ("data.kind", "idx"),
            ("data.path", "/usr/share/datasets/fashion-mnist"),
            ("data.augment", "shift 2, flip"),
            ("train.batch", "128"),
            ("train.epochs", "10"),
            ("train.optimizer", "adamw, lr 3e-4, weight decay 0.05"),
            ("train.schedule", "cosine, warm-up 100"),
        ]
        .map(pair)
        .into(),
        system: [
            ("polyreme", "0.1.0"),
            ("cpu", "an x86 of 2 cores"),
            ("threads", "2"),
            ("memory", "7.7 GiB"),
        ]
        .map(pair)
        .into(),
        confusion: Confusion::from_rows(&rows),
        class_names: [
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ]
        .map(String::from)
        .into(),
        warnings: Vec::new(),
    }
}

/// Elements open and close in order, and nothing is asked from elsewhere.
fn check_page(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = page;
    while let Some(start) = rest.find('<') {
        let end = start + rest[start..].find('>').expect("a tag ends");
        let tag = &rest[start + 1..end];
        rest = &rest[end + 1..];
        let name = tag.trim_start_matches('/').split([' ', '\n', '/']).next().unwrap_or_default();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "closes in order near {:?}", rest.get(..80));
        } else if !tag.ends_with('/') && !matches!(name, "!doctype" | "meta" | "input") {
            open.push(name);
        }
        // Inside these, `<` starts nothing.
        if matches!(name, "script" | "style") && !tag.starts_with('/') {
            rest = &rest[rest.find(&format!("</{name}>")).expect("a script ends")..];
        }
    }
    assert_eq!(open, Vec::<&str>::new());
    for word in ["src=", "href=", "@import", "url(", "NaN,", "NaN ", "inf "] {
        assert!(!page.contains(word), "{word} in {page}");
    }
    let addresses = page.matches("http").count();
    assert_eq!(addresses, page.matches("http://www.w3.org/2000/svg").count(), "only the name of SVG");
}

fn check(lines: &str, summary: &Summary, holds: &[&str], lacks: &[&str]) -> String {
    let page = render(&history(lines), summary);
    check_page(&page);
    for text in holds {
        assert!(page.contains(text), "{text:?} is missing");
    }
    for text in lacks {
        assert!(!page.contains(text), "{text:?} is there");
    }
    page
}

#[test]
fn a_run_has_everything() {
    let holds = [
        "<h1>fashion-cnn</h1>",
        "Finished after 4,690 steps in 1:23, 12.3k samples/s",
        "92.31%",
        "best val accuracy",
        "at step 4,221",
        "<h2>Loss</h2>",
        "<h2>Accuracy</h2>",
        "<h2>Learning rate</h2>",
        "<h2>Samples per second</h2>",
        "class=\"log\"",
        "class=\"c0 faint\"",
        "<h2>Confusion</h2>",
        "<h2>Most confused</h2>",
        "Ankle boot",
        "<h2>Settings: train</h2>",
        "weight decay 0.05",
        "<h2>System</h2>",
    ];
    check(&run(400), &summary(10), &holds, &["not finite"]);
}

#[test]
fn nothing_and_nonsense_make_a_page_too() {
    let empty = Summary::default();
    let charts = ["class=\"lines\"", "class=\"tiles\"", "<table"];
    check("", &empty, &["after 0 steps"], &charts);
    check("{\"step\":5,\"train_loss\":1.5}\n", &empty, &["<circle"], &["class=\"tiles\""]);
    check("{\"step\":5,\"train_loss\":\"NaN\"}\n", &empty, &[], &charts);
    let bad = "{\"step\":1,\"train_loss\":-1}\n{\"step\":2,\"train_loss\":\"inf\"}\nrubbish\n{\"step\":18446744073709551615,\"train_loss\":1e30}\n";
    check(
        bad,
        &empty,
        &["1 of train not finite", "1 lines of metrics could not be read"],
        &["class=\"log\""],
    );
    let none = Summary { confusion: Confusion::new(0), ..Summary::default() };
    check("", &none, &[], &["<h2>Confusion</h2>"]);
    for classes in [1, 2, 20, 21, 64, 65, 1000] {
        let page = check("", &summary(classes), &["<h2>Classes</h2>"], &[]);
        assert_eq!(page.contains("class=\"heat\""), (2..=64).contains(&classes), "{classes}");
        assert!(page.len() < 1_500_000, "{classes} classes: {} bytes", page.len());
    }
}

#[test]
fn texts_of_others_stay_texts() {
    let evil = "</script><script>alert(1)</script>\"'><img onerror=x>";
    let mut summary = summary(3);
    summary.title = evil.into();
    summary.ended = evil.into();
    summary.metrics = vec![(evil.into(), 1.0)];
    summary.best = Some(Best { metric: evil.into(), value: Some(1.0), step: 1 });
    summary.settings = vec![(format!("{evil}.{evil}"), evil.into())];
    summary.system = vec![(evil.into(), evil.into())];
    summary.class_names = vec![evil.into(); 3];
    summary.warnings = vec![evil.into()];
    let line = serde_json::json!({"step": 1, evil: 2.0, format!("train_{evil}"): 3.0}).to_string();
    check(&line, &summary, &["&lt;img"], &["<img", "<script>alert"]);
}

#[test]
fn long_runs_make_small_pages() {
    let page = check(&run(50_000), &summary(10), &[], &[]);
    assert!(page.len() < 700_000, "{} bytes", page.len());
    for path in page.split(" d=\"").skip(1) {
        let points = path.split('"').next().unwrap().matches('L').count() + 1;
        assert!(points <= curve::POINTS_MAX, "{points} points");
    }
}

#[test]
fn a_page_takes_the_place_of_another_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.html");
    fs::write(&path, "old").unwrap();
    write(&path, &history(""), &summary(3)).unwrap();
    assert!(fs::read_to_string(&path).unwrap().ends_with("</html>\n"));
    let error = write(&folder.path().join("absent/report.html"), &history(""), &summary(3)).unwrap_err();
    assert!(error.to_string().contains("absent/report.html: cannot be written"), "{error}");
}
