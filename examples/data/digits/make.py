"""Writes the IDX files of this folder from the digits.csv.gz of scikit-learn's wheel.

    pip download scikit-learn --no-deps -d wheel
    unzip wheel/scikit_learn-*.whl sklearn/datasets/data/digits.csv.gz -d wheel
    python make.py wheel/sklearn/datasets/data/digits.csv.gz

Needs only Python's standard library. The split is a shuffle of the 1,797 rows with a fixed seed, so the same rows make
the same files, byte for byte.
"""

import gzip
import random
import struct
import sys
from pathlib import Path

N_TRAIN = 1437
SIDE = 8
SEED = 1797


def idx(dims, values):
    """An IDX file of bytes: a magic number that counts the dims, the dims, the values."""
    return struct.pack(f">I{len(dims)}I", 0x0800 + len(dims), *dims) + bytes(values)


def main():
    source, target = Path(sys.argv[1]), Path(__file__).parent
    with gzip.open(source, "rt") as lines:
        rows = [[int(float(cell)) for cell in line.split(",")] for line in lines]
    assert len(rows) == 1797 and all(len(row) == SIDE * SIDE + 1 for row in rows)
    assert all(0 <= pixel <= 16 for row in rows for pixel in row[:-1])
    assert all(0 <= row[-1] <= 9 for row in rows)

    random.Random(SEED).shuffle(rows)
    for name, part in (("train", rows[:N_TRAIN]), ("t10k", rows[N_TRAIN:])):
        pixels = [pixel for row in part for pixel in row[:-1]]
        labels = [row[-1] for row in part]
        (target / f"{name}-images-idx3-ubyte").write_bytes(idx([len(part), SIDE, SIDE], pixels))
        (target / f"{name}-labels-idx1-ubyte").write_bytes(idx([len(part)], labels))
        print(name, len(part), "images; of each digit:", [labels.count(digit) for digit in range(10)])


if __name__ == "__main__":
    main()
