//! The well-known sets: their files, where they are, and the checksums that their publishers give.

/// A dataset that can be fetched by name.
#[derive(Clone, Copy, Debug)]
pub struct KnownSet {
    /// Its name on the command line.
    pub name: &'static str,
    /// A one-line description.
    pub about: &'static str,
    /// The files of the set.
    pub files: &'static [SetFile],
    /// The base URLs of the files, best first.
    pub bases: &'static [&'static str],
    /// The folder into which a system package puts the files.
    pub installed: Option<&'static str>,
}

/// A file of a set.
#[derive(Clone, Copy, Debug)]
pub struct SetFile {
    /// The file name, without folders.
    pub name: &'static str,
    /// The size in bytes.
    pub bytes: u64,
    /// The published MD5: protects against damage, not against an attacker.
    pub md5: &'static str,
    /// The MD5 of the same file in the system package, where it was recompressed.
    pub md5_installed: Option<&'static str>,
    /// The members to unpack, if it is an archive (`.tar.gz`); empty otherwise.
    pub members: &'static [Member],
}

/// A file in an archive.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// Its path in the archive; it is unpacked under the last component.
    pub path: &'static str,
    /// The largest size that it may have.
    pub bytes_max: u64,
}

/// The sets that [`get`](super::get) knows, by name.
pub fn known() -> &'static [KnownSet] {
    &KNOWN
}

impl KnownSet {
    /// The total size of its files in bytes.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

const KNOWN: [KnownSet; 4] = [
    KnownSet {
        name: "cifar10",
        about: "60,000 colour images of 32x32 pixels in 10 classes, binary version",
        files: &[SetFile {
            name: "cifar-10-binary.tar.gz",
            bytes: 170_052_171,
            md5: "c32a1d4ab5d03f1284b67883e8d87530",
            md5_installed: None,
            members: &[
                member("cifar-10-batches-bin/data_batch_1.bin", 30_730_000),
                member("cifar-10-batches-bin/data_batch_2.bin", 30_730_000),
                member("cifar-10-batches-bin/data_batch_3.bin", 30_730_000),
                member("cifar-10-batches-bin/data_batch_4.bin", 30_730_000),
                member("cifar-10-batches-bin/data_batch_5.bin", 30_730_000),
                member("cifar-10-batches-bin/test_batch.bin", 30_730_000),
                member("cifar-10-batches-bin/batches.meta.txt", 1 << 16),
            ],
        }],
        bases: &["https://www.cs.toronto.edu/~kriz/"],
        installed: None,
    },
    KnownSet {
        name: "cifar100",
        about: "60,000 colour images of 32x32 pixels in 100 classes, binary version",
        files: &[SetFile {
            name: "cifar-100-binary.tar.gz",
            bytes: 168_513_733,
            md5: "03b5dce01913d631647c71ecec9e9cb8",
            md5_installed: None,
            members: &[
                member("cifar-100-binary/train.bin", 153_700_000),
                member("cifar-100-binary/test.bin", 30_740_000),
                member("cifar-100-binary/coarse_label_names.txt", 1 << 16),
                member("cifar-100-binary/fine_label_names.txt", 1 << 16),
            ],
        }],
        bases: &["https://www.cs.toronto.edu/~kriz/"],
        installed: None,
    },
    KnownSet {
        name: "fashion-mnist",
        about: "70,000 grey images of clothes, 28x28 pixels, in 10 classes",
        files: &[
            SetFile {
                name: "train-images-idx3-ubyte.gz",
                bytes: 26_421_880,
                md5: "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                md5_installed: Some("cf8536b0aa1a6ac5fa3f23001093305c"),
                members: &[],
            },
            SetFile {
                name: "train-labels-idx1-ubyte.gz",
                bytes: 29_515,
                md5: "25c81989df183df01b3e8a0aad5dffbe",
                md5_installed: Some("10bea18fdb374794d4bb42e356e600c9"),
                members: &[],
            },
            SetFile {
                name: "t10k-images-idx3-ubyte.gz",
                bytes: 4_422_102,
                md5: "bef4ecab320f06d8554ea6380940ec79",
                md5_installed: Some("f78720b4224f21cce2f2ccf2d7a94c9a"),
                members: &[],
            },
            SetFile {
                name: "t10k-labels-idx1-ubyte.gz",
                bytes: 5_148,
                md5: "bb300cfdad3c16e7a12a480ee83cd310",
                md5_installed: Some("0d30e22e447f3c33dab9ed536400ac01"),
                members: &[],
            },
        ],
        bases: &[
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ],
        // Debian's dataset-fashion-mnist.
        installed: Some("/usr/share/datasets/fashion-mnist"),
    },
    KnownSet {
        name: "mnist",
        about: "70,000 grey images of handwritten digits, 28x28 pixels",
        files: &[
            plain("train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            plain("train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
            plain("t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
            plain("t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
        ],
        bases: &[
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ],
        installed: None,
    },
];

const fn plain(name: &'static str, bytes: u64, md5: &'static str) -> SetFile {
    SetFile { name, bytes, md5, md5_installed: None, members: &[] }
}

const fn member(path: &'static str, bytes_max: u64) -> Member {
    Member { path, bytes_max }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sound() {
        assert!(KNOWN.windows(2).all(|pair| pair[0].name < pair[1].name), "by name");
        for set in known() {
            assert!(set.bases.iter().all(|base| base.starts_with("http") && base.ends_with('/')), "{set:?}");
            assert!(set.bytes() > 0);
            for file in set.files {
                let sums = [Some(file.md5), file.md5_installed];
                assert!(
                    sums.iter()
                        .flatten()
                        .all(|md5| md5.len() == 32 && !md5.contains(|c: char| c.is_uppercase()))
                );
                assert_eq!(file.members.is_empty(), !file.name.ends_with(".tar.gz"));
                assert!(!file.name.contains('/'));
                assert_eq!(file.md5_installed.is_some(), set.installed.is_some());
            }
        }
    }
}
