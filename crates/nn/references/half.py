"""What half precision costs PyTorch: makes `half.json` beside it: `python half.py [NAME ...]` (none: all models).

Losses of 50 steps of each model in float32, and under `autocast` in bfloat16 and float16. The distance of the latter from
the former is what ours is judged by. One run is one draw of many roundings, so there are several: from the reference's
weights, and from weights that are off by up to 1 %, 2 % and so on, each beside float32 from the same weights.
"""

import json
import os
import sys

# Products in bfloat16 end in "could not create a primitive" on some CPUs with AMX.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
import torch.nn.functional as F

import make
import models

FILE = make.HERE / "half.json"
# By model: how many draws. The larger ones take minutes each.
DRAWS = {"mlp": 8, "lstm": 8, "encoder": 6, "cnn": 3, "gpt": 3, "resnet18": 3}
# PyTorch ends in "could not create a primitive descriptor" for an LSTM in float16 on CPUs without AVX512-FP16. The larger models were
# not run in it.
IN_FLOAT16 = ["mlp", "encoder"]
STEPS = 50
# Each draw's weights are this much further from the reference's, as a part of each: more than a rounding to bfloat16.
DISTURB = 0.01
# Gradients of `encoder` overflow with the usual 65536, and a skipped step would shift all later losses.
SCALE = 1024.0


def losses(job, dtype, disturb):
    """The loss of each step, before its update."""
    model = make.load(job, torch.float32, disturb)
    x, y = make.batch(job, torch.float32)
    optimizer = job.make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=dtype == torch.float16)
    got = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        got.append(loss.item())
    assert not scaler.is_enabled() or scaler.get_scale() == SCALE, "a step was skipped"
    return got


def draw(name, row, n):
    """Adds a draw: losses in float32, and for each format how far its losses are from those, as parts of them."""
    job = models.JOBS[name]
    want = losses(job, torch.float32, DISTURB * n)
    row["float32"].append([make.digits(v) for v in want])
    for key in ["bfloat16", "float16"] if name in IN_FLOAT16 else ["bfloat16"]:
        got = losses(job, getattr(torch, key), DISTURB * n)
        row[key].append([float(f"{a / b - 1:.3g}") for a, b in zip(got, want)])
        worst = max(abs(v) for v in row[key][-1])
        print(f"{name} {key} {n}: loss {want[0]:.4g} to {want[-1]:.4g}, at most {worst:.1e} apart", flush=True)


def main(names):
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)
    for name in names or DRAWS:
        row = {"model": name, "float32": [], "bfloat16": [], "float16": []}
        for n in range(DRAWS[name]):
            draw(name, row, n)
            # Read again each time: several models may be made at once.
            rows = json.loads(FILE.read_text())["models"] if FILE.exists() else []
            rows = [r for r in rows if r["model"] != name] + [row]
            rows.sort(key=lambda r: list(DRAWS).index(r["model"]))
            make.write(FILE, {"scale": SCALE, "disturb": DISTURB}, {"models": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
