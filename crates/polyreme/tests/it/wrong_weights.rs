//! Files of weights that cannot be used as they are, through the binary.

use std::fs;
use std::path::Path;

use polyreme::train::weights::WeightsFile;

use crate::binary::{folder, json, polyreme};

const JOB: &str = "[model]\nlayers = [{ kind = 'linear', outputs = 4 }, 'batch_norm', 'relu', 'linear']\n\
                   [data]\nkind = 'synthetic'\nsamples = 100\nshape = [3]\nclasses = 2\n[train]\nbatch = 10\nsteps = 7\n\
                   [parallel]\nranks = 1\nthreads = 1\n[output]\nbest = 'none'\ntensorboard = false\n";

/// A tensor to be written: name, type, dims, bytes.
type RawTensor<'a> = (&'a str, &'a str, &'a [usize], Vec<u8>);

fn write(path: &Path, tensors: &[RawTensor]) {
    let (mut header, mut data) = (Vec::new(), Vec::new());
    for (name, dtype, dims, bytes) in tensors {
        let (start, end) = (data.len(), data.len() + bytes.len());
        header.push(format!(
            "\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{dims:?},\"data_offsets\":[{start},{end}]}}"
        ));
        data.extend(bytes);
    }
    let header = format!("{{{}}}", header.join(","));
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()).unwrap();
}

fn floats(n: usize, value: f32) -> Vec<u8> {
    value.to_le_bytes().repeat(n)
}

/// All tensors of the job's model, as PyTorch writes them.
fn model() -> Vec<RawTensor<'static>> {
    vec![
        ("1.num_batches_tracked", "I64", &[], 5000i64.to_le_bytes().to_vec()),
        ("0.weight", "F32", &[4, 3], floats(12, 0.1)),
        ("0.bias", "F32", &[4], floats(4, 0.1)),
        ("1.weight", "F32", &[4], floats(4, 1.0)),
        ("1.bias", "F32", &[4], floats(4, 0.0)),
        ("1.running_mean", "F32", &[4], floats(4, 0.0)),
        ("1.running_var", "F32", &[4], floats(4, 1.0)),
        ("3.weight", "F32", &[2, 4], floats(8, 0.1)),
        ("3.bias", "F32", &[2], floats(2, 0.0)),
    ]
}

#[test]
fn weights_that_cannot_be_used_say_why() {
    let folder = folder(JOB);
    let refuse = |file: &str, parts: &[&str]| {
        let set = format!("model.weights={file}");
        let out =
            polyreme(folder.path(), &["train", "job.toml", "--output", "run", "--overwrite", "--set", &set]);
        let said = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{said}");
        parts.iter().for_each(|part| assert!(said.contains(part), "{part} is not in\n{said}"));
        assert!(!said.contains("lr"), "the learning rate has nothing to do with it: {said}");
    };
    let with = |file: &str, at: usize, tensor: RawTensor<'static>| {
        let mut tensors = model();
        tensors[at] = tensor;
        write(&folder.path().join(file), &tensors);
    };
    let mut holes = floats(12, 0.1);
    holes[20..24].copy_from_slice(&f32::NAN.to_le_bytes());
    holes[40..44].copy_from_slice(&f32::INFINITY.to_le_bytes());
    with("nan.safetensors", 1, ("0.weight", "F32", &[4, 3], holes));
    refuse(
        "nan.safetensors",
        &["nan.safetensors: tensor 0.weight: 2 of 12 numbers are not finite", "NaN (element 5)"],
    );
    with("int.safetensors", 7, ("3.weight", "I32", &[2, 4], vec![0; 32]));
    refuse("int.safetensors", &["int.safetensors: tensor 3.weight has elements of type I32", ".float()"]);
    // What `torch.save` writes: an archive, and a pickle by itself before that.
    for (file, start) in [("new.pt", &b"PK\x03\x04\0\0\x08\x08"[..]), ("old.pth", b"\x80\x02\x8a\nl\xfc\x9c")]
    {
        fs::write(folder.path().join(file), [start, &[0; 300]].concat()).unwrap();
        let load = format!("torch.load(\"{file}\", map_location=\"cpu\", weights_only=True)");
        let parts =
            [file, "torch.save", "import torch, safetensors.torch", &load, "save_file(", ".safetensors\")"];
        refuse(file, &parts);
        let out = polyreme(folder.path(), &["inspect", file]);
        assert!(String::from_utf8(out.stderr).unwrap().contains(&load));
    }
}

#[test]
fn batch_norms_go_on_counting_where_the_file_ended() {
    let folder = folder(JOB);
    write(&folder.path().join("start.safetensors"), &model());
    let counted = |path: &str| WeightsFile::read(&folder.path().join(path)).unwrap().batches_tracked();
    let first =
        ["train", "job.toml", "--json", "--output", "run", "--set", "model.weights=start.safetensors"];
    json(folder.path(), &first);
    assert_eq!(counted("run/model.safetensors"), 5007);
    assert_eq!(counted("run/checkpoints/step-00000007/model.safetensors"), 5007);
    json(folder.path(), &["resume", "run", "--json", "--set", "train.steps=9"]);
    assert_eq!(counted("run/model.safetensors"), 5009);
    assert_eq!(counted("run/checkpoints/step-00000009/model.safetensors"), 5009);
}
