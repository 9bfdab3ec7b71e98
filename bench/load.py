"""Loading: Polyreme and PyTorch's DataLoader (2 workers) on the same files, alternating.

    V/bin/pip install torch torchvision numpy
    apt-get install dataset-fashion-mnist
    cargo build --release
    V/bin/python bench/load.py [--rounds 3]

Three sets: Fashion-MNIST as IDX, 4,000 of its images as 32x32 PNG files, and 600 photographs' worth of noise and shapes
as 500x375 JPEG files, resized to 224x224. PyTorch uses the usual code: torchvision's FashionMNIST and ImageFolder
with Resize, CenterCrop, ToTensor and Normalize. Samples per second; for Polyreme the first epoch, which reads and
decodes, and the second, which finds decoded images in memory (normalisation is off here, as measuring it reads images
before). PyTorch's workers are warm: its second epoch counts.
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
    for i in range(600):
        place = folder / f"jpeg/{labels[i]}"
        place.mkdir(parents=True, exist_ok=True)
        noise = Image.fromarray(random.integers(0, 255, (94, 125, 3), np.uint8)).resize((500, 375), Image.BICUBIC)
        shape = Image.fromarray(images[i]).convert("RGB").resize((500, 375), Image.BICUBIC)
        Image.blend(noise, shape, 0.6).filter(ImageFilter.SMOOTH).save(place / f"{i}.jpg", quality=90)
    jobs = {
        "idx": f'{MODEL}[data]\nkind = "idx"\npath = "{raw}"\nvalidation = 0\nnormalise = false\n[train]\nbatch = 128\n',
        "png": f'{MODEL}[data]\nkind = "images"\npath = "png"\nvalidation = 0\nnormalise = false\n[train]\nbatch = 128\n',
        "jpeg": f'{MODEL}[data]\nkind = "images"\npath = "jpeg"\nsize = [224, 224]\nvalidation = 0\nnormalise = false\n[train]\nbatch = 32\n',
    }
    for name, text in jobs.items():
        (folder / f"{name}.toml").write_text(text)
    return list(jobs)


def peer(name, folder):
    """Samples per second of PyTorch's DataLoader."""
    import torch
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    torch.set_num_threads(2)
    end = [transforms.ToTensor(), transforms.Normalize(0.5, 0.5)]
    if name == "idx":
        data = datasets.FashionMNIST(folder / "torch", train=True, transform=transforms.Compose(end))
    elif name == "png":
        data = datasets.ImageFolder(folder / "png", transforms.Compose(end))
    else:
        cut = [transforms.Resize(224), transforms.CenterCrop(224)]
        data = datasets.ImageFolder(folder / "jpeg", transforms.Compose(cut + end))
    batch = 32 if name == "jpeg" else 128
    loader = DataLoader(data, batch, shuffle=True, num_workers=2, persistent_workers=True)
    speeds = []
    for _ in range(2):
        start = time.perf_counter()
        n = sum(len(y) for _, y in loader)
        speeds.append(n / (time.perf_counter() - start))
    print(json.dumps({"samples_per_s": speeds}))


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--binary", default=str(ROOT / "target/release/polyreme"))
    args.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    args = args.parse_args()
    if args.peer:
        return peer(args.peer[0], pathlib.Path(args.peer[1]))
    folder = pathlib.Path(tempfile.mkdtemp())
    try:
        print("| files | Polyreme, first epoch | second epoch | PyTorch | ratio, first | second |\n|---|---|---|---|---|---|")
        for name in make_sets(folder):
            ours, theirs = [], []
            for _ in range(args.rounds):
                command = [args.binary, "bench", "load", str(folder / f"{name}.toml"), "--threads", "2", "--json"]
                ours.append(json.loads(subprocess.check_output(command))["samples_per_s"])
                command = [sys.executable, __file__, "--peer", name, str(folder)]
                theirs.append(json.loads(subprocess.check_output(command))["samples_per_s"][1])
            first, second = (statistics.median(o[k] for o in ours) for k in (0, 1))
            other = statistics.median(theirs)
            print(f"| {name} | {first:.0f} | {second:.0f} | {other:.0f} | {first / other:.1f} | {second / other:.1f} |", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
