"""Weights in both directions: Polyreme's model in PyTorch, and PyTorch's in Polyreme, with the same results.

    V/bin/pip install torch torchvision numpy safetensors
    cargo build --release
    V/bin/python bench/weights_peer.py

Trains `examples/digits.toml` with Polyreme, loads `model.safetensors` with `load_state_dict(strict=True)`, and compares
the probabilities of all test images. Then PyTorch writes weights, and Polyreme's evaluation of them is compared
with PyTorch's.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import train_peer

ROOT = train_peer.ROOT
JOB = ROOT / "examples/digits.toml"


def polyreme(folder, *args):
    binary = ROOT / "target/release/polyreme"
    out = subprocess.run([binary, *args, "--json"], cwd=folder, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in out.splitlines()]


def main():
    job = train_peer.tomllib.loads(JOB.read_text())
    images, labels = train_peer.idx_pair(JOB.parent / job["data"]["path"], "t10k")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        polyreme(folder, "train", JOB, "--output", "run", "--set", "train.epochs=10")
        manifest = json.loads((folder / "run/checkpoints/best/manifest.json").read_text())
        preparation = manifest["progress"]["preparation"]
        mean, std = preparation["mean"][0], preparation["std"][0]
        x = (torch.tensor(images).float() / 255 - mean).div(std).unsqueeze(1)

        model = train_peer.stack(job["model"]["layers"], 1, (8, 8), 10)
        print(model.load_state_dict(load_file(folder / "run/model.safetensors"), strict=True))
        with torch.no_grad():
            theirs = F.softmax(model.eval()(x), 1)
        files = []
        for i, image in enumerate(images):
            files.append(folder / f"{i:03}.png")
            Image.fromarray(image).save(files[-1])
        answers = polyreme(folder, "predict", "run", "--top", "10", *files)
        ours = torch.tensor([[{a["label"]: a["probability"] for a in row["labels"]}[str(k)] for k in range(10)] for row in answers])
        print(f"Polyreme's weights: probabilities differ by at most {(ours - theirs).abs().max():.1e}")

        torch.manual_seed(1)
        model = train_peer.stack(job["model"]["layers"], 1, (8, 8), 10)
        save_file(model.state_dict(), folder / "torch.safetensors")
        with torch.no_grad():
            loss = F.cross_entropy(model.eval()(x), torch.tensor(labels).long()).item()
        args = ["--set", "model.weights=torch.safetensors", "--set", "train.steps=1", "--set", "train.optimizer.lr=1e-12"]
        summary = polyreme(folder, "train", JOB, "--output", "from-torch", *args)[-1]
        print(f"PyTorch's weights: test loss {summary['metrics']['test_loss']:.6f} here, {loss:.6f} there")


if __name__ == "__main__":
    main()
