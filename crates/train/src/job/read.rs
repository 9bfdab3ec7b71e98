//! A whole job file: the syntax, the overrides, the sections.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use toml::de::DeTable;

use super::cursor::{At, Cursor, Reading};
use super::error::{JobErrors, Place, Sources};
use super::spec::{Job, OutputSpec, ParallelSpec, TrainSpec};
use super::tree::{Table, Value};
use super::{data, model, output, parallel, sets, train};

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
            let error = sources.error(&Place::FILE, "", message, hint.into());
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
            let message = format!("{file} is larger than {FILE_BYTES_MAX} bytes, so it is no job file");
            return Err(refuse(message, ""));
        }
        let text = String::from_utf8(bytes).map_err(|e| {
            let at = e.utf8_error().valid_up_to();
            refuse(format!("{file} is no text: byte {at} is not UTF-8"), "job files are TOML, in UTF-8")
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
                let place = Place { source: 0, span: e.span() };
                sources.error(&place, "", format!("not TOML: {}", e.message()), String::new())
            });
            let mut errors: Vec<_> = errors.collect();
            if let Some(last) = errors.last_mut().filter(|_| told.len() < syntax.len()) {
                let n = syntax.len() - told.len();
                last.hint = format!("{n} more errors follow; is this a job file?");
            }
            return Err(JobErrors { file: sources.file.clone(), errors });
        }
        let mut root = Table::of(table.get_ref(), 0, 0);
        let mut errors = sets::apply(&mut root, &sources);
        let reading = Reading::new(sources, base);
        let job = job(&reading, &root, origin);
        let (sources, faults) = reading.into_faults();
        errors.splice(0..0, faults);
        match job {
            Some(job) if errors.is_empty() => Ok(job),
            _ => Err(JobErrors { file: sources.file, errors }),
        }
    }
}

/// The job, if nothing is wrong with it.
fn job(reading: &Reading, root: &Table, origin: &str) -> Option<Job> {
    let c = Cursor::new(reading, root, &Place::FILE, "", "");
    let stem = Path::new(origin).file_stem().map(|s| s.to_string_lossy().into_owned());
    let name = match c.get("name") {
        Some(at) => name(&at),
        None => stem.filter(|s| !s.is_empty()).unwrap_or_else(|| "job".into()),
    };
    let section = |key: &'static str| {
        let at = c.get(key)?;
        match &at.node.value {
            Value::Table(_) => at.table(key, "a section"),
            _ => {
                at.fault(
                    format!("`{key}` is {}; a section is needed", at.node.value.describe()),
                    format!("write [{key}]"),
                );
                None
            }
        }
    };
    let missing = |key: &str, hint: &str| {
        if !c.has(key) && !c.has_slip_of(key) {
            reading.fault(&Place::FILE, key, format!("there is no section [{key}]"), hint);
        }
    };
    missing("model", "say what to train: [model] and kind = \"mlp\", or another");
    missing("data", "say what to train on: [data] and kind = \"csv\", or another");
    let model = section("model").and_then(|c| model::read(&c));
    let data = section("data").and_then(|c| data::read(&c));
    let train = section("train").map_or_else(TrainSpec::default, |c| train::read(&c));
    let parallel = section("parallel").map_or_else(ParallelSpec::default, |c| parallel::read(&c, &train));
    let source = data.as_ref().map(|d| &d.source);
    let output = match section("output") {
        Some(c) => output::read(&c, source),
        None => OutputSpec { best: Some(output::default_best(source).into()), ..OutputSpec::default() },
    };
    c.finish();
    Some(Job { name, model: model?, data: data?, train, parallel, output })
}

/// A name becomes a folder's.
fn name(at: &At) -> String {
    let name = at.string().unwrap_or_default();
    let fits = !name.contains(['/', '\\']) && !name.contains(char::is_control);
    if matches!(at.node.value, Value::String(_)) && (!fits || name.trim_matches(['.', ' ']).is_empty()) {
        at.fault(format!("`name` is {name:?}; it must do as the name of a folder"), "leave out slashes");
    }
    name.into()
}
