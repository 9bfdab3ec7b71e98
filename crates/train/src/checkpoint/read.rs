//! Reading checkpoints: nothing is believed before its length and checksum hold.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::manifest::MANIFEST_FILE;
use super::{
    CheckpointError, Difference, FileEntry, MODEL_FILE, Manifest, Skipped, TensorShape, folder, tensors,
};

/// A checkpoint whose files were read once and are whole. Its tensors are still on the disk.
#[derive(Debug)]
pub struct Loaded {
    /// Its folder.
    pub path: PathBuf,
    /// What it says about itself.
    pub manifest: Manifest,
    /// The files of tensors, in the manifest's order.
    pub files: Vec<TensorFile>,
}

/// A file of tensors that is whole.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its tensors of floating types, in its order.
    pub shapes: Vec<TensorShape>,
}

/// What a path that a person gives means.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GivenPath {
    /// The folder of a run.
    Run(PathBuf),
    /// The folder of a checkpoint.
    Checkpoint(PathBuf),
    /// A file of weights.
    Weights(PathBuf),
}

impl Loaded {
    /// A file, such as [`MODEL_FILE`].
    pub fn file(&self, name: &str) -> Option<&TensorFile> {
        self.files.iter().find(|file| file.path.file_name().is_some_and(|n| n == name))
    }

    /// A file that the checkpoint must have.
    pub fn needed(&self, name: &str) -> Result<&TensorFile, CheckpointError> {
        let hint = "the checkpoint has no such file; it is of another kind of training";
        self.file(name).ok_or_else(|| CheckpointError::missing(&self.path.join(name), hint))
    }

    /// Whether this is a checkpoint of the model with these tensors; if not, what differs.
    pub fn check_model(&self, model: &[TensorShape]) -> Result<(), CheckpointError> {
        let shapes = self.file(MODEL_FILE).map_or(&[][..], |file| &file.shapes);
        match Difference::between(model, shapes.iter().map(|s| (s.name.as_str(), s.dims.as_slice()))) {
            None => Ok(()),
            Some(difference) => {
                Err(CheckpointError::OtherModel { path: self.path.clone(), difference: Box::new(difference) })
            }
        }
    }
}

impl TensorFile {
    /// Reads all numbers: `put` gets the name of a tensor, the first element and elements from there on.
    pub fn read(&self, put: &mut dyn FnMut(&str, usize, &[f32])) -> Result<(), CheckpointError> {
        let reading = |e| CheckpointError::reading(&self.path, e);
        let mut file = File::open(&self.path).map_err(reading)?;
        let n_bytes = file.metadata().map_err(reading)?.len();
        for head in tensors::read_heads(&mut file, n_bytes, &self.path)? {
            let mut first = 0;
            head.read(&mut file, &self.path, &mut |part| {
                put(&head.name, first, part);
                first += part.len();
            })?;
        }
        Ok(())
    }
}

/// Opens the checkpoint in the folder `path`, and verifies every length and checksum.
pub fn load(path: &Path) -> Result<Loaded, CheckpointError> {
    load_files(path, &|_| true)
}

/// The same of some of its files: what a model needs is a third of what its training does.
pub(crate) fn load_files(path: &Path, wanted: &dyn Fn(&str) -> bool) -> Result<Loaded, CheckpointError> {
    let manifest = Manifest::read(path)?;
    let mut files = Vec::with_capacity(manifest.files.len());
    for file in manifest.files.iter().filter(|file| wanted(&file.name)) {
        files.push(verify(path.join(&file.name), file)?);
    }
    Ok(Loaded { path: path.into(), manifest, files })
}

/// The newest checkpoint of a run that is whole, and those newer ones that are damaged. Only what is certainly damaged is
/// passed over: a checkpoint that cannot be read now, or of a newer format, is an error, so that nobody goes back behind
/// it unawares.
pub fn latest_whole(run: &Path) -> Result<(Loaded, Vec<Skipped>), CheckpointError> {
    let mut skipped = Vec::new();
    let mut steps = folder::steps(&folder::root(run))?;
    while let Some((step, path)) = steps.pop_last() {
        match load(&path) {
            Ok(loaded) => return Ok((loaded, skipped)),
            Err(why) if why.is_damage() => skipped.push(Skipped { step, path, why }),
            Err(newer @ CheckpointError::NewerFormat { .. }) => return Err(newer),
            Err(source) => {
                let older = steps.pop_last().map(|(_, path)| path);
                return Err(CheckpointError::Unread { path, source: Box::new(source), older });
            }
        }
    }
    match skipped.is_empty() {
        true => {
            Err(CheckpointError::missing(&folder::root(run), "the run has no checkpoint; train it first"))
        }
        false => Err(CheckpointError::NoneWhole { run: run.into(), skipped }),
    }
}

/// The checkpoint of a run at `step`.
pub fn load_step(run: &Path, step: u64) -> Result<Loaded, CheckpointError> {
    let root = folder::root(run);
    let path = folder::steps(&root)?.remove(&step).unwrap_or_else(|| root.join(folder::step_name(step)));
    load(&path)
}

/// The run that a checkpoint's folder belongs to, and its step.
pub fn run_of(checkpoint: &Path) -> Result<(PathBuf, u64), CheckpointError> {
    folder::run_of_step(checkpoint).ok_or_else(|| CheckpointError::Stray { path: checkpoint.into() })
}

/// What `path` means: a run's folder (or its `checkpoints`), a checkpoint's folder, a run's `best`, or a file of
/// weights.
pub fn resolve(path: &Path) -> Result<GivenPath, CheckpointError> {
    let run_of = |checkpoints: &Path| match checkpoints.parent() {
        Some(parent) if parent.as_os_str().is_empty() => PathBuf::from("."),
        Some(parent) => parent.into(),
        None => checkpoints.join(".."),
    };
    // `best` is a link that dangles for a moment while its step is replaced, and `RUN/best` is short for it.
    if path.file_name().is_some_and(|name| name == "best") {
        let parent = run_of(path);
        for root in [folder::root(&parent), parent] {
            if let Some(best) = folder::best_path(&root)? {
                return Ok(GivenPath::Checkpoint(best));
            }
        }
    }
    if path.is_file() {
        let of_folder = path.file_name().is_some_and(|name| name == MANIFEST_FILE);
        return Ok(if of_folder {
            GivenPath::Checkpoint(run_of(path))
        } else {
            GivenPath::Weights(path.into())
        });
    }
    if path.join(MANIFEST_FILE).is_file() {
        return Ok(GivenPath::Checkpoint(path.into()));
    }
    if folder::root(path).is_dir() {
        return Ok(GivenPath::Run(path.into()));
    }
    if !folder::steps(path).unwrap_or_default().is_empty() {
        return Ok(GivenPath::Run(run_of(path)));
    }
    let mut replacement = path.as_os_str().to_owned();
    replacement.push(".new");
    if Path::new(&replacement).join(MANIFEST_FILE).is_file() {
        return Ok(GivenPath::Checkpoint(replacement.into()));
    }
    let hint = "give the folder of a run or of a checkpoint, or a .safetensors file";
    match fs::metadata(path) {
        Ok(_) => Err(CheckpointError::missing(&path.join(MANIFEST_FILE), hint)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(CheckpointError::missing(path, hint)),
        Err(e) => Err(CheckpointError::reading(path, e)),
    }
}

/// Reads the checkpoint that `path` means; of a run, the newest whole one. A file of weights is none.
pub fn load_at(path: &Path) -> Result<(Loaded, Vec<Skipped>), CheckpointError> {
    match resolve(path)? {
        GivenPath::Run(run) => latest_whole(&run),
        GivenPath::Checkpoint(folder) => Ok((load(&folder)?, Vec::new())),
        GivenPath::Weights(file) => {
            let hint =
                "the file holds weights only; start from them with `model.weights`, or give a run's folder";
            Err(CheckpointError::missing(&file.with_file_name(MANIFEST_FILE), hint))
        }
    }
}

/// Reads a whole file for its checksum, and what tensors it has.
pub(crate) fn verify(path: PathBuf, entry: &FileEntry) -> Result<TensorFile, CheckpointError> {
    let reading = |e| CheckpointError::reading(&path, e);
    let file = File::open(&path).map_err(reading)?;
    let about = file.metadata().map_err(reading)?;
    if !about.is_file() {
        return Err(CheckpointError::missing(&path, "there is something else in its place"));
    }
    let found = about.len();
    if found != entry.bytes {
        return Err(CheckpointError::Length { path, expected: entry.bytes, found });
    }
    let mut reader = Hashing { file, hasher: blake3::Hasher::new() };
    let heads = tensors::read_heads(&mut reader, found, &path);
    // The rest, also after a damaged header: what does not have its checksum is damage, whatever it looks like.
    let mut part = vec![0; HASHED_BYTES];
    while reader.read(&mut part).map_err(reading)? > 0 {}
    let found = reader.hasher.finalize().to_hex().to_string();
    if found != entry.blake3 {
        return Err(CheckpointError::Checksum { path, expected: entry.blake3.clone(), found });
    }
    let floats = heads?.into_iter().filter(tensors::Head::is_float);
    let shapes = floats.map(|head| TensorShape { name: head.name, dims: head.dims }).collect();
    Ok(TensorFile { path, shapes })
}

/// What is read at once for a checksum.
const HASHED_BYTES: usize = 256 * 1024;

struct Hashing {
    file: File,
    hasher: blake3::Hasher,
}

impl Read for Hashing {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let n = loop {
            match self.file.read(to) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        self.hasher.update(&to[..n]);
        Ok(n)
    }
}
