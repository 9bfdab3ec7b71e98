"""Trains a job file with PyTorch: the same model, batch, optimizer, schedule and augmentation, with its DataLoader.

    V/bin/pip install torch torchvision numpy
    V/bin/python bench/train_peer.py examples/fashion.toml --threads 2 --workers 2

Prints one JSON line per epoch and a summary, as `polyreme train --json` does. Reads the part of the job file's syntax
that the examples use. Seconds are counted from the first step, evaluations included, imports and start-up left out.
"""

import argparse
import gzip
import json
import pathlib
import sys
import time
import tomllib

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchvision import transforms

ROOT = pathlib.Path(__file__).resolve().parent.parent
FASHION = pathlib.Path("/usr/share/datasets/fashion-mnist")


def read_idx(path):
    """An IDX file of bytes, gzipped or not."""
    raw = pathlib.Path(path).read_bytes()
    data = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    rank = data[3]
    dims = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(rank)]
    return np.frombuffer(data, np.uint8, offset=4 + 4 * rank).reshape(dims)


def idx_pair(folder, start):
    def find(what):
        return next(p for p in sorted(pathlib.Path(folder).iterdir()) if p.name.startswith(f"{start}-{what}"))

    return read_idx(find("images")), read_idx(find("labels"))


class Images(Dataset):
    """Like torchvision's MNIST: an array in memory, one image at a time through PIL and transforms."""

    def __init__(self, images, labels, transform):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        from PIL import Image

        return self.transform(Image.fromarray(self.images[i])), int(self.labels[i])


def image_sets(job, folder):
    data = job["data"]
    place = folder / data["path"] if "path" in data else FASHION
    train, test = idx_pair(place, "train"), idx_pair(place, "t10k")
    mean, std = train[0].mean() / 255.0, train[0].std() / 255.0
    augment = data.get("augment", {})
    if not augment.get("flip") and not augment.get("shift"):
        # Without augmentation, the fastest usual way: tensors in memory.
        as_tensor = lambda s: TensorDataset(
            (torch.tensor(s[0]).float().div_(255).sub_(mean).div_(std)).unsqueeze(1), torch.tensor(s[1]).long()
        )
        return hold_out(as_tensor(train), as_tensor(train), job) + (as_tensor(test),)
    end = [transforms.ToTensor(), transforms.Normalize([mean], [std])]
    steps = [transforms.RandomHorizontalFlip()] if augment.get("flip") else []
    if shift := augment.get("shift"):
        size = train[0].shape[1:]
        steps.append(transforms.RandomAffine(0, translate=(shift / size[1], shift / size[0])))
    plain = transforms.Compose(end)
    sets = hold_out(Images(*train, transforms.Compose(steps + end)), Images(*train, plain), job)
    return sets + (Images(*test, plain),)


def hold_out(changed, plain, job):
    """The training set without its validation part, and that part without augmentation."""
    order = torch.randperm(len(changed)).tolist()
    n = round(len(order) * job["data"].get("validation", 0.1))
    return Subset(changed, order[n:]), Subset(plain, order[:n])


def text_sets(job, folder):
    data, context = job["data"], job["model"]["context"]
    ids = torch.tensor(np.frombuffer((folder / data["path"]).read_bytes(), np.uint8).copy()).long()
    windows = (len(ids) - 1) // context
    x, y = ids[: windows * context].view(-1, context), ids[1 : windows * context + 1].view(-1, context)
    n_val = round(windows * data.get("validation", 0))
    cut = windows - n_val
    return TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:]), None


def stack(layers, channels, size, classes):
    """nn.Sequential of a job file's list of layers."""
    modules, c, (h, w), flat = [], channels, size, None
    for layer in layers:
        layer = {"kind": layer} if isinstance(layer, str) else layer
        kind = layer["kind"]
        if kind == "conv":
            k, p = layer["kernel"], layer.get("padding", 0)
            modules.append(nn.Conv2d(c, layer["outputs"], k, padding=p, bias=layer.get("bias", True)))
            c, h, w = layer["outputs"], h + 2 * p - k + 1, w + 2 * p - k + 1
        elif kind == "batch_norm":
            modules.append(nn.BatchNorm2d(c))
        elif kind == "max_pool":
            modules.append(nn.MaxPool2d(layer["kernel"]))
            h, w = h // layer["kernel"], w // layer["kernel"]
        elif kind == "flatten":
            modules.append(nn.Flatten())
            flat = c * h * w
        elif kind == "linear":
            out = layer.get("outputs", classes)
            modules.append(nn.Linear(flat, out))
            flat = out
        elif kind == "dropout":
            modules.append(nn.Dropout(layer["p"]))
        else:
            modules.append({"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}[kind]())
    return nn.Sequential(*modules)


def build(job, folder):
    if job["data"]["kind"] == "text":
        sys.path.insert(0, str(ROOT / "crates/nn/references"))
        import models

        m = job["model"]
        sets = text_sets(job, folder)
        return models.Gpt(d=m["width"], heads=m["heads"], layers=m["layers"], context=m["context"]), sets
    sets = image_sets(job, folder)
    x, _ = sets[0][0]
    return stack(job["model"]["layers"], x.shape[0], x.shape[1:], 10), sets


def optimizer_of(job, model):
    o = job["train"]["optimizer"]
    if o["kind"] == "sgd":
        return torch.optim.SGD(model.parameters(), o["lr"], o.get("momentum", 0), weight_decay=o.get("weight_decay", 0))
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[o["kind"]]
    return kind(model.parameters(), o["lr"], weight_decay=o.get("weight_decay", 0.01 if o["kind"] == "adamw" else 0))


def scheduler_of(job, opt, steps):
    s, lr = job["train"].get("schedule", {"kind": "constant"}), job["train"]["optimizer"]["lr"]
    sched = torch.optim.lr_scheduler
    if s["kind"] == "one-cycle":
        return sched.OneCycleLR(opt, lr, total_steps=steps, cycle_momentum=False)
    if s["kind"] == "cosine":
        warm, floor = s.get("warmup", 0), s.get("floor", 0)
        after = sched.CosineAnnealingLR(opt, max(steps - warm, 1), eta_min=floor * lr)
        if not warm:
            return after
        return sched.SequentialLR(opt, [sched.LinearLR(opt, 1 / warm, 1, warm - 1), after], [warm])
    return sched.ConstantLR(opt, 1.0)


def main():
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("job", type=pathlib.Path)
    args.add_argument("--threads", type=int, default=2)
    args.add_argument("--workers", type=int, default=0)
    args.add_argument("--epochs", type=int)
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("--channels-last", action="store_true")
    args.add_argument("--weights", help="start from this safetensors file")
    args.add_argument("--save-initial", help="write the weights that training starts from, for the other side")
    args = args.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    job = tomllib.loads(args.job.read_text())
    train = job["train"]
    epochs = args.epochs or train["epochs"]
    model, (train_set, val_set, test_set) = build(job, args.job.parent)
    if args.weights:
        from safetensors.torch import load_file

        model.load_state_dict(load_file(args.weights))
    if args.save_initial:
        from safetensors.torch import save_file

        save_file(model.state_dict(), args.save_initial)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    keep = {"persistent_workers": True} if args.workers else {}
    loader = DataLoader(train_set, train["batch"], shuffle=True, num_workers=args.workers, **keep)

    def evaluate(data):
        model.eval()
        total, right, n = 0.0, 0, 0
        with torch.no_grad():
            for x, y in DataLoader(data, max(train["batch"], 64)):
                logits, y = model(x), y.flatten()
                total += F.cross_entropy(logits, y, reduction="sum").item()
                right += (logits.argmax(1) == y).sum().item()
                n += len(y)
        return total / n, right / n

    opt = optimizer_of(job, model)
    schedule = scheduler_of(job, opt, epochs * len(loader))
    start, steps = time.perf_counter(), 0
    for epoch in range(epochs):
        model.train()
        for x, y in loader:
            if args.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y.flatten())
            loss.backward()
            if "clip" in train:
                nn.utils.clip_grad_norm_(model.parameters(), train["clip"])
            opt.step()
            schedule.step()
            steps += 1
        val_loss, val_accuracy = evaluate(val_set)
        seconds = time.perf_counter() - start
        line = {"epoch": epoch + 1, "steps": steps, "seconds": seconds, "train_loss": loss.item()}
        print(json.dumps(line | {"val_loss": val_loss, "val_accuracy": val_accuracy}), flush=True)
    summary = {"steps": steps, "seconds": seconds, "val_loss": val_loss, "val_accuracy": val_accuracy}
    if test_set is not None:
        summary["test_loss"], summary["test_accuracy"] = evaluate(test_set)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
