//! Weights after 20 steps, as digests that are kept: a change of structure changes no bit.
//!
//! On one rank, and in reproducible mode on 1, 2, 3, 5 and 8, which all have one digest. They hold for every instruction
//! set whose kernels give the same bits (AVX2 and AVX-512). A change of arithmetic on purpose replaces them, and its
//! commit says so: a failure prints the new ones.

use polyreme_train::run::Given;

use crate::runs::{job, run};

const TRAIN: &str = "[train]\nsteps = 20\nbatch = 24\nevaluate_every = 10\n";
const OUTPUT: &str = "[output]\ntensorboard = false\n";
const ROWS: &str = "[data]\nkind = \"synthetic\"\nsamples = 120\nshape = [20]\nclasses = 5\nnoise = 0.6\n";
const IMAGES: &str =
    "[data]\nkind = \"synthetic\"\nsamples = 100\nshape = [3, 32, 32]\nclasses = 4\nnoise = 0.8\n";

/// FNV-1a over names and bits.
fn digest(weights: &[(String, Vec<f32>)]) -> u64 {
    let bytes = weights.iter().flat_map(|(name, data)| {
        name.bytes().chain(data.iter().flat_map(|x| x.to_bits().to_le_bytes())).collect::<Vec<_>>()
    });
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn trained(lines: &str, ranks: usize) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    let outcome = run(&job(lines), Given::default(), ranks, &folder.path().join("run"), None).unwrap();
    digest(&outcome.weights)
}

/// The digests of one rank, and of reproducible mode on these ranks.
#[track_caller]
fn check(model: &str, data: &str, train: &str, ranks: &[usize], want: [u64; 2]) {
    let lines = format!("{model}{data}{TRAIN}{train}{OUTPUT}");
    let one = trained(&lines, 1);
    let same = format!("{lines}[parallel]\nreproducible = true\nshards = 8\n");
    let of_ranks: Vec<u64> = ranks.iter().map(|&ranks| trained(&same, ranks)).collect();
    let got = format!("[{one:#x}, {:#x}]", of_ranks[0]);
    assert!(of_ranks.iter().all(|d| *d == of_ranks[0]), "{ranks:?} ranks: {of_ranks:x?}\n{lines}");
    assert_eq!([one, of_ranks[0]], want, "{got}\n{lines}");
}

const ALL: &[usize] = &[1, 2, 3, 5, 8];

#[test]
fn mlp() {
    let model = "[model]\nkind = \"mlp\"\nhidden = [64, 48]\n";
    let sgd = "optimizer = { kind = \"sgd\", lr = 0.01, momentum = 0.9 }\n";
    check(model, ROWS, sgd, ALL, [0x4b8e_8f58_c491_5e60, 0x35f9_3232_df73_a39e]);
    check(
        model,
        ROWS,
        "clip = 0.5\noptimizer = \"lamb\"\nema = 0.9\n",
        ALL,
        [0x456f_dbc1_5867_c5f6, 0x614a_1c3f_9cf8_1e4e],
    );
    // Several microbatches in a step.
    let lines = format!("{model}{ROWS}{TRAIN}clip = 0.5\naccumulate = 3\n{OUTPUT}");
    let got = trained(&lines, 1);
    assert_eq!(got, 0xc732_3061_a1f2_c4dc, "{got:#x}");
}

#[test]
fn lenet() {
    check(
        "[model]\nkind = \"lenet\"\n",
        IMAGES,
        "optimizer = \"sgd\"\n",
        ALL,
        [0x8382_8e05_d7e0_9722, 0x7442_b0de_024d_2406],
    );
}

#[test]
fn cnn() {
    let model = "[model]\nkind = \"cnn\"\nwidths = [8, 16, 24]\n";
    check(model, IMAGES, "optimizer = \"sgd\"\n", ALL, [0x8c6b_d169_e083_ed83, 0x58ac_7785_f24a_2878]);
}

#[test]
fn gpt() {
    let model = "[model]\nkind = \"gpt\"\nlayers = 2\nwidth = 32\nheads = 4\ncontext = 24\ndropout = 0.1\n";
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text");
    let text: String = (0u32..9000).map(|i| char::from(b'a' + (i * i / 7 % 23) as u8)).collect();
    std::fs::write(&path, text).unwrap();
    let data = format!("[data]\nkind = \"text\"\npath = \"{}\"\n", path.display());
    check(
        model,
        &data,
        "clip = 1.0\noptimizer = { kind = \"adamw\", lr = 1e-3 }\n",
        ALL,
        [0x7b59_cbca_d7f7_6c0c, 0xe2e6_a7f0_80fe_e564],
    );
}
