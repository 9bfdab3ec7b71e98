"""Loading: Polyreme and PyTorch's DataLoader (2 workers) on the same files, alternating.

    V/bin/pip install torch torchvision numpy pyarrow webdataset
    apt-get install dataset-fashion-mnist
    cargo build --release --features parquet
    V/bin/python bench/load.py [--rounds 3] [--only parquet jsonl tar-jpeg]

Three sets of images: Fashion-MNIST as IDX, 4,000 of its images as 32x32 PNG files, and 2,400 photographs' worth of noise and shapes
as 500x375 JPEG files, resized to 224x224. PyTorch uses the usual code: torchvision's FashionMNIST and ImageFolder
with Resize, CenterCrop, ToTensor and Normalize. The same PNG and JPEG files once more in four shards of tar, which PyTorch reads with
webdataset. And a table of 200,000 rows of 20 numbers and a class, as Parquet (PyTorch: read with pyarrow) and as JSON lines (read with json), in a
`TensorDataset`.

Samples per second; for Polyreme the first epoch, which reads and decodes, and the second, which finds decoded images in memory
(normalisation is off here, as measuring it reads images before). PyTorch's workers are warm: its second epoch counts. Tables are read
when they are opened, on both sides: their first figure has the seconds of that in it, without those of starting the program and importing modules.
"""

import argparse
import gzip
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
FASHION = pathlib.Path("/usr/share/datasets/fashion-mnist")
MODEL = '[model]\nlayers = ["flatten", "linear"]\n'


def make_sets(folder):
    import numpy as np
    from PIL import Image, ImageFilter

    raw = folder / "torch/FashionMNIST/raw"
    raw.mkdir(parents=True)
    for file in FASHION.glob("*.gz"):
        (raw / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    images = np.frombuffer((raw / "train-images-idx3-ubyte").read_bytes(), np.uint8, offset=16).reshape(-1, 28, 28)
    labels = np.frombuffer((raw / "train-labels-idx1-ubyte").read_bytes(), np.uint8, offset=8)
    random = np.random.default_rng(0)
    for i in range(4000):
        place = folder / f"png/{labels[i]}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[i]).convert("RGB").resize((32, 32)).save(place / f"{i}.png")
    for i in range(2400):
        place = folder / f"jpeg/{labels[i]}"
        place.mkdir(parents=True, exist_ok=True)
        noise = Image.fromarray(random.integers(0, 255, (94, 125, 3), np.uint8)).resize((500, 375), Image.BICUBIC)
        shape = Image.fromarray(images[i]).convert("RGB").resize((500, 375), Image.BICUBIC)
        Image.blend(noise, shape, 0.6).filter(ImageFilter.SMOOTH).save(place / f"{i}.jpg", quality=90)
    make_shards(folder, "png")
    make_shards(folder, "jpeg")
    make_tables(folder, random)
    table = f'{MODEL}[data]\nkind = "%s"\npath = "table.%s"\nlabel = "kind"\nvalidation = 0\nnormalise = false\n[train]\nbatch = 128\n'
    jobs = {
        "idx": f'{MODEL}[data]\nkind = "idx"\npath = "{raw}"\nvalidation = 0\nnormalise = false\n[train]\nbatch = 128\n',
        "png": f'{MODEL}[data]\nkind = "images"\npath = "png"\nvalidation = 0\nnormalise = false\n[train]\nbatch = 128\n',
        "jpeg": f'{MODEL}[data]\nkind = "images"\npath = "jpeg"\nsize = [224, 224]\nvalidation = 0\nnormalise = false\n[train]\nbatch = 32\n',
        "parquet": table % ("parquet", "parquet"),
        "jsonl": table % ("jsonl", "jsonl"),
    }
    for name in ("png", "jpeg"):
        jobs[f"tar-{name}"] = jobs[name].replace('"images"', '"tar"').replace(f'"{name}"', f'"{name}-*.tar"')
    for name, text in jobs.items():
        (folder / f"{name}.toml").write_text(text)
    return list(jobs)


def make_shards(folder, name):
    """Four tars of the images of a folder, shuffled, each with its class beside it."""
    import io
    import random
    import tarfile

    files = sorted((folder / name).glob("*/*"))
    random.Random(0).shuffle(files)
    for shard in range(4):
        with tarfile.open(folder / f"{name}-{shard}.tar", "w") as tar:
            for path in files[shard::4]:
                ending = {"png": "png", "jpeg": "jpg"}[name]
                for member, data in ((ending, path.read_bytes()), ("cls", path.parent.name.encode())):
                    about = tarfile.TarInfo(f"{path.stem}.{member}")
                    about.size = len(data)
                    tar.addfile(about, io.BytesIO(data))


def make_tables(folder, random):
    """The same rows as Parquet and as JSON lines."""
    import numpy as np
    import pyarrow
    import pyarrow.parquet

    x = random.normal(size=(200_000, 20)).round(4)
    kinds = x[:, :5].argmax(1)
    columns = {f"x{i}": x[:, i] for i in range(20)} | {"kind": kinds}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "table.parquet")
    names = list(columns)
    with open(folder / "table.jsonl", "w") as file:
        for row, kind in zip(x.tolist(), kinds.tolist()):
            file.write(json.dumps(dict(zip(names, row + [kind]))) + "\n")


def read_table(name, folder):
    """A `TensorDataset` of the rows."""
    import numpy as np
    import pyarrow.parquet
    import torch

    if name == "parquet":
        table = pyarrow.parquet.read_table(folder / "table.parquet")
        x = np.stack([table[f"x{i}"].to_numpy().astype(np.float32) for i in range(20)], 1)
        y = table["kind"].to_numpy()
    else:
        rows = [json.loads(line) for line in open(folder / "table.jsonl")]
        x = np.array([[row[f"x{i}"] for i in range(20)] for row in rows], np.float32)
        y = np.array([row["kind"] for row in rows])
    return torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y.copy()))


def shards(name, folder, transform):
    """webdataset's samples of the four shards."""
    import webdataset

    urls = [str(folder / f"{name}-{shard}.tar") for shard in range(4)]
    data = webdataset.WebDataset(urls, shardshuffle=4, nodesplitter=None).shuffle(1000).decode("pil")
    return data.to_tuple("png;jpg", "cls").map_tuple(transform, lambda kind: kind)


def peer(name, folder):
    """Samples per second of PyTorch's DataLoader."""
    import torch
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    torch.set_num_threads(2)
    end = [transforms.ToTensor(), transforms.Normalize(0.5, 0.5)]
    cut = [transforms.Resize(224), transforms.CenterCrop(224)]
    began = time.perf_counter()
    if name in ("parquet", "jsonl"):
        data = read_table(name, folder)
    elif name.startswith("tar-"):
        data = shards(name[4:], folder, transforms.Compose((cut if name == "tar-jpeg" else []) + end))
    elif name == "idx":
        data = datasets.FashionMNIST(folder / "torch", train=True, transform=transforms.Compose(end))
    elif name == "png":
        data = datasets.ImageFolder(folder / "png", transforms.Compose(end))
    else:
        data = datasets.ImageFolder(folder / "jpeg", transforms.Compose(cut + end))
    opened = time.perf_counter() - began
    batch = 32 if name.endswith("jpeg") else 128
    in_order = isinstance(data, torch.utils.data.IterableDataset)
    loader = DataLoader(data, batch, shuffle=None if in_order else True, num_workers=2, persistent_workers=True)
    speeds = []
    for _ in range(2):
        start = time.perf_counter()
        n = sum(len(y) for _, y in loader)
        speeds.append(n / (time.perf_counter() - start))
    print(json.dumps({"samples": n, "opened_s": opened, "samples_per_s": speeds}))


def speeds(name, found):
    """Samples per second of the first and of the second epoch."""
    first, second = found["samples_per_s"][:2]
    if name in ("parquet", "jsonl"):
        first = found["samples"] / (found["opened_s"] + found["samples"] / first)
    return first, second


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--binary", default=str(ROOT / "target/release/polyreme"))
    args.add_argument("--only", nargs="*")
    args.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    args = args.parse_args()
    if args.peer:
        return peer(args.peer[0], pathlib.Path(args.peer[1]))
    folder = pathlib.Path(tempfile.mkdtemp())
    try:
        print("| files | Polyreme, first epoch | second epoch | PyTorch, first | second | ratio, first | second |\n|---|---|---|---|---|---|---|")
        for name in make_sets(folder):
            if args.only and name not in args.only:
                continue
            ours, theirs = [], []
            for _ in range(args.rounds):
                command = [args.binary, "bench", "load", str(folder / f"{name}.toml"), "--threads", "2", "--json"]
                ours.append(speeds(name, json.loads(subprocess.check_output(command))))
                command = [sys.executable, __file__, "--peer", name, str(folder)]
                first, second = speeds(name, json.loads(subprocess.check_output(command)))
                # Workers are started in the first epoch, unless it is the one that reads the files.
                theirs.append((first if name in ("parquet", "jsonl") else second, second))
            (a, b), (c, d) = ([statistics.median(column) for column in zip(*side)] for side in (ours, theirs))
            print(f"| {name} | {a:.0f} | {b:.0f} | {c:.0f} | {d:.0f} | {a / c:.1f} | {b / d:.1f} |", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
