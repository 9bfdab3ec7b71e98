//! A whole job file: the syntax, the overrides, the sections.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use toml::de::DeTable;

use super::cursor::{Cursor, Reading};
use super::declare::{keys, section};
use super::error::{ErrorPlace, JobErrors, Sources};
use super::outline::Outline;
use super::section::{Keyed, Section};
use super::spec::{ClassWeights, Job, LossKind, Source};
use super::train::no_metric;
use super::tree::TreeTable;
use super::types::{table, text};
use super::{data, parallel, sets, tuning};

/// A job file is small; anything larger is another file.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Mistakes of syntax that are told: most that follow a few are no mistakes, and a file of another kind has one at each comma.
const SYNTAX_ERRORS_MAX: usize = 20;

impl Job {
    /// Reads a job file, with overrides such as `train.batch=128`. The job is named after the file.
    pub fn from_file(path: &Path, sets: &[String]) -> Result<Job, JobErrors> {
        let file = path.display().to_string();
        let refuse = |message: String, hint: &str| {
            let sources = Sources { file: file.clone(), text: String::new(), sets: Vec::new() };
            let error = sources.error(&ErrorPlace::FILE, "", message, hint.into());
            JobErrors { file: file.clone(), errors: vec![error] }
        };
        let mut bytes = Vec::new();
        let read = File::open(path).and_then(|f| f.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
        if let Err(e) = read {
            return Err(refuse(
                format!("cannot read {file}: {e}"),
                "give the path of a job file, such as job.toml",
            ));
        }
        if bytes.len() as u64 > FILE_BYTES_MAX {
            let message = format!("{file} is larger than {FILE_BYTES_MAX} bytes, so it is not a job file");
            return Err(refuse(message, ""));
        }
        let text = String::from_utf8(bytes).map_err(|e| {
            let at = e.utf8_error().valid_up_to();
            refuse(format!("{file} is not text: byte {at} is not UTF-8"), "job files are TOML, in UTF-8")
        })?;
        let whole = std::path::absolute(path).unwrap_or_else(|_| path.into());
        let base = whole.parent().unwrap_or(Path::new("/"));
        Job::from_text(&text, &file, base, sets)
    }

    /// Reads a job from text. `origin` is the file's name in errors, and gives the job its name; paths in the text are
    /// relative to `base`, and those in overrides to the working folder.
    pub fn from_text(text: &str, origin: &str, base: &Path, sets: &[String]) -> Result<Job, JobErrors> {
        let sources = Sources {
            file: origin.into(),
            text: text.into(),
            sets: sets.iter().map(|s| format!("{}{s}", sets::PREFIX)).collect(),
        };
        let (table, syntax) = DeTable::parse_recoverable(text);
        if !syntax.is_empty() {
            let mut syntax: Vec<_> = syntax.iter().collect();
            syntax.sort_by_key(|e| e.span().map_or(0, |span| span.start));
            let told = &syntax[..syntax.len().min(SYNTAX_ERRORS_MAX)];
            let errors = told.iter().map(|e| {
                let place = ErrorPlace { source: 0, span: e.span() };
                sources.error(&place, "", format!("not TOML: {}", e.message()), String::new())
            });
            let mut errors: Vec<_> = errors.collect();
            if let Some(last) = errors.last_mut().filter(|_| told.len() < syntax.len()) {
                let n = syntax.len() - told.len();
                last.hint = format!("{n} more errors follow; is this a job file?");
            }
            return Err(JobErrors { file: sources.file.clone(), errors });
        }
        let mut root = TreeTable::of(table.get_ref(), 0, 0);
        let mut errors = sets::apply(&mut root, &sources);
        let reading = Reading::new(sources, base);
        let name = Path::new(origin).file_stem().map(|s| s.to_string_lossy().into_owned());
        let start = Job::new(name.filter(|s| !s.is_empty()).unwrap_or_else(|| "job".into()));
        let c = Cursor::root(&reading, &root, &Job::section().outline);
        let job = Job::section().read_into(start, &c);
        let (sources, faults) = reading.into_faults();
        errors.splice(0..0, faults);
        if errors.is_empty() { Ok(job) } else { Err(JobErrors { file: sources.file, errors }) }
    }
}

section! { Job => {
    let name = text().check(|name| {
        let fits = !name.contains(['/', '\\']) && !name.contains(char::is_control);
        let message = || format!("is {name:?}; it must be usable as the name of a folder");
        (!fits || name.trim_matches(['.', ' ']).is_empty()).then(|| (message(), "leave out slashes"))
    });
    let keys = keys! { Job;
        /// the name of the run
        name: name => |s| Some(&mut s.name); or "the name of the file without its ending";
        /// which network to train
        model: table() => |s| Some(&mut s.model);
            needed "say what to train: [model] and kind = \"mlp\", or another";
        /// which samples to train it on
        data: table() => |s| Some(&mut s.data);
            needed "say what to train on: [data] and kind = \"csv\", or another";
        /// how to train
        train: table() => |s| Some(&mut s.train); or "defaults";
        /// how many ranks and threads, and how they work together
        parallel: table() => |s| Some(&mut s.parallel); or "defaults";
        /// what the run writes
        output: table() => |s| Some(&mut s.output); or "defaults";
    };
    Section::new("", "a job", |_| Job::new("job"), keys).check(check)
} }

/// What follows from several sections, and what does not go together.
fn check(job: &mut Job, c: &Cursor) {
    if let Some(c) = c.inside("parallel") {
        parallel::check_with(&job.parallel, &job.train, &c);
    }
    tuning::check_with(job, c);
    data::check_with(job, c);
    // The next token is right too seldom for accuracy to choose by.
    let is_best_given = c.inside("output").is_some_and(|c| c.has("best"));
    let has_classes = job.train.loss == LossKind::CrossEntropy;
    if (matches!(job.data.source, Source::Text { .. }) || !has_classes) && !is_best_given {
        job.output.best = Some("val_loss".into());
    }
    if let (Some(best), Some(c)) = (&job.output.best, c.inside("output"))
        && !job.train.loss.has_metric(best)
    {
        let (message, hint) = no_metric("output.best", best, job.train.loss);
        c.fault("best", message, hint);
    }
    let Some(c) = c.inside("data") else { return };
    if !has_classes && job.data.class_weights != ClassWeights::None {
        let loss = job.train.loss.name();
        let message = format!("`data.class_weights` is for classes, and `train.loss` is {loss:?}");
        c.fault("class_weights", message, "leave it out");
    }
    if let Source::Table { label, .. } = &job.data.source
        && has_classes
        && label.len() > 1
    {
        let message = format!("`data.label` has {} columns, and classes have one", label.len());
        let hint = "for several numbers write loss = \"mse\" under [train], for several labels of 0 or 1 loss = \"bce\"";
        c.fault("label", message, hint);
    }
}

/// The tables there are, in the order of the page.
pub(super) fn outlines() -> Vec<&'static Outline> {
    let mut found = vec![&Job::section().outline];
    let mut next = 0;
    while let Some(outline) = found.get(next).copied() {
        for inside in outline.rows.iter().filter_map(|row| row.shape.inside()) {
            if !found.iter().any(|known| known.path == inside.path) {
                found.push(inside);
            }
        }
        next += 1;
    }
    found
}
