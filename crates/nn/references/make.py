"""Makes the reference files beside it: `python make.py [NAME ...]` (none: all), `python make.py table`.

Truth is PyTorch in float64 from f32-exact weights and inputs. The same run in float32, and a first step in float64
from weights disturbed by one part in a million, tell how far a correct f32 engine may stray; both are stored too.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import torch.nn.functional as F

import fill
import models
import ops

HERE = pathlib.Path(__file__).parent
STEPS = 20


def load(job, dtype, disturb=0.0):
    """The model with its weights filled, in train mode."""
    model = job.build()
    names = model.state_dict()
    state = {}
    for name, value in names.items():
        want = torch.from_numpy(np.asarray(fill.filled(name, value.shape, *fill.rule(name, value.shape, names))))
        if disturb:
            noise = torch.from_numpy(fill.unit("disturb:" + name, want.numel()).reshape(want.shape))
            want = want.double() * (1 + disturb * noise.double())
        state[name] = want
    model = model.to(dtype)
    model.load_state_dict(state)
    return model.train()


def batch(job, dtype):
    if job.vocab:
        x = torch.from_numpy(fill.integers("ids", job.input, job.vocab))
    else:
        x = torch.from_numpy(fill.uniform(job.image, job.input, 1.5)).to(dtype)
        for k, ids in enumerate(job.ids):
            column = torch.from_numpy(fill.integers(f"ids{k + 1}", (job.input[0],), ids))
            x[:, job.input[1] - len(job.ids) + k] = column.to(dtype)
    labels = job.config()["labels"]
    return x, torch.from_numpy(fill.integers("labels", (labels,), job.classes))


def run(job, dtype, steps=STEPS, disturb=0.0):
    """Logits, loss and gradients of the first step, buffers after it, the losses of all steps, eval logits after."""
    model = load(job, dtype, disturb)
    x, y = batch(job, dtype)
    optimizer = job.make_optimizer(model.parameters())
    got = {"losses": []}
    for step in range(steps):
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        got["losses"].append(loss.item())
        if step == 0:
            got["logits"] = logits.detach().double().clone()
            got["grads"] = {n: p.grad.double().clone() for n, p in model.named_parameters()}
            got["buffers"] = {n: b.double().clone() for n, b in model.named_buffers()}
        optimizer.step()
    got["eval"] = model.eval()(x).detach().double()
    return got


def floor(want):
    """The median of the gradients' norms: what smaller gradients are measured against.

    A shift ahead of a batch norm changes nothing, so the gradient of a norm's bias is what is left when large terms
    cancel, down to nothing at all (`bn1.bias` of the deep ResNets). Relative to itself it has no digits in f32.
    """
    return float(np.median([g.norm().item() for g in want["grads"].values()]))


def apart(got, want):
    """How far `got` is from `want`: the largest of each kind, as README.md defines them."""

    def peak(key):
        return ((got[key] - want[key]).abs().max() / want[key].abs().max()).item()

    norm, element, least = 0.0, 0.0, floor(want)
    for name, g in want["grads"].items():
        delta = got["grads"][name] - g
        size = max(g.norm().item(), least)
        norm = max(norm, delta.norm().item() / size)
        at = torch.from_numpy(fill.samples(name, g.numel()))
        scale = g.flatten()[at].abs().clamp(min=size / g.numel() ** 0.5)
        element = max(element, (delta.flatten()[at].abs() / scale).max().item())
    far = {"logits": peak("logits"), "grad_norm": norm, "grad_element": element}
    if len(got["losses"]) == STEPS:
        far["losses"] = max(abs(a - b) / abs(b) for a, b in zip(got["losses"], want["losses"]))
        far["eval"] = peak("eval")
    return {k: float(f"{v:.1e}") for k, v in far.items()}


def digits(x):
    """Eight significant digits."""
    return float(f"{float(x):.8g}")


def exact(x):
    """Nine significant digits: what an f32 needs to be read back the same."""
    return float(f"{float(x):.9g}")


def probe(name, value):
    """Euclidean norm, and the dot product with the unit numbers named `dot:` + name."""
    flat = value.flatten()
    weights = torch.from_numpy(fill.unit("dot:" + name, flat.numel())).double()
    return digits(flat.norm()), digits(flat @ weights)


def sampled(name, value, most):
    """The whole tensor up to `most` elements; of a larger one its norm and dot, and samples."""
    numel = value.numel()
    at = np.arange(numel) if numel <= most else fill.samples(name, numel, most)
    norm, dot = probe(name, value)
    values = [digits(v) for v in value.flatten()[torch.from_numpy(at)]]
    return {"shape": list(value.shape), "peak": digits(value.abs().max()), "norm": norm, "dot": dot, "at": at.tolist(), "values": values}


def write(path, head, rows):
    """JSON with one key, and one row of each list in `rows`, a line."""
    parts = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
    for key, items in rows.items():
        parts.append(f"{json.dumps(key)}: [\n" + ",\n".join(json.dumps(i) for i in items) + "\n]")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def reference(name):
    job = models.JOBS[name]
    got = run(job, torch.float32)
    if job.losses_in == "float64":
        want = run(job, torch.float64)
        disturbed = apart(run(job, torch.float64, steps=1, disturb=1e-6), want)
    else:
        want = run(job, torch.float64, steps=1)
        want["losses"] += got["losses"][1:]
        want["eval"] = got["eval"]
        disturbed = {}
    single = apart(got, want)
    if job.losses_in == "float32":
        single.pop("losses"), single.pop("eval")
    state = list(job.build().state_dict())
    params = []
    for param, g in want["grads"].items():
        norm, dot = probe(param, g)
        at = fill.samples(param, g.numel())
        center, spread = (np.float32(v) for v in fill.rule(param, g.shape, state))
        first = fill.filled(param, (1,), center, spread)[0]
        params.append(
            {
                "name": param,
                "shape": list(g.shape),
                "fill": [exact(center), exact(spread)],
                "first": exact(first),
                "norm": norm,
                "dot": dot,
                "at": at.tolist(),
                "grad": [digits(v) for v in g.flatten()[torch.from_numpy(at)]],
            }
        )
    buffers = []
    for buffer, value in want["buffers"].items():
        norm, dot = probe(buffer, value)
        buffers.append({"name": buffer, "shape": list(value.shape), "norm": norm, "dot": dot})
    head = {
        "model": name,
        **job.config(),
        "state": state,
        "f32": single,
        "disturbed": disturbed,
        "grad_floor": digits(floor(want)),
        "logits": sampled("logits", want["logits"], 256),
        "loss": digits(want["losses"][0]),
        "losses": [digits(v) for v in want["losses"]],
        "eval_logits": sampled("eval_logits", want["eval"], 64),
    }
    write(HERE / f"{name}.json", head, {"params": params, "buffers": buffers})
    print(name, "losses", *(f"{v:.4g}" for v in want["losses"]), flush=True)
    print(name, "f32", single, "disturbed", disturbed, "logit max", want["logits"].abs().max().item(), flush=True)
    norms = sorted(g.norm().item() for g in want["grads"].values())
    print(name, "gradient norms", f"{norms[0]:.2g} .. {norms[-1]:.2g}", flush=True)


def generator():
    """`fill.json`: values to test another implementation of the generator by."""
    names = ["", "input", "labels", "fc1.weight", "layer1.0.bn2.weight", "größe"]
    streams = [
        {
            "name": n,
            "seed": f"{fill.seed(n):016x}",
            "k": fill.bits(n, 4).tolist(),
            "k_at_16777217": int(fill.bits(n, (1 << 24) + 2)[-1]),
            "unit": fill.unit(n, 4).tolist(),
        }
        for n in names
    ]
    fills = []
    for name, center, spread in [("fc1.weight", 0.0, 0.061859), ("fc1.bias", 0.0, 0.1), ("bn1.weight", 1.0, 0.1), ("bn1.bias", 2.5, 0.5)]:
        values = fill.filled(name, (4,), center, spread)
        row = {"name": name, "fill": [center, spread], "values": [exact(v) for v in values]}
        row["bits"] = [f"{b:08x}" for b in values.view(np.uint32).tolist()]
        fills.append(row)
    write(HERE / "fill.json", {}, {"streams": streams, "fills": fills})


def table():
    """The conditioning table of README.md, from the files."""
    print("| model | loss, first → last | logits | gradient norm | gradient element | losses | eval logits |")
    print("|---|---|---|---|---|---|---|")
    for name in models.JOBS:
        ref = json.loads((HERE / f"{name}.json").read_text())
        cells = []
        for key in ("logits", "grad_norm", "grad_element", "losses", "eval"):
            pair = [ref[run][key] for run in ("f32", "disturbed") if key in ref[run]]
            cells.append(" / ".join(f"{v:.0e}" for v in pair))
        print(f"| `{name}` | {ref['losses'][0]:.3f} → {ref['losses'][-1]:.3f} |", " | ".join(cells), "|")


def main(names):
    # One thread: results do not hang on the machine, and several models can be made at once.
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)
    if names == ["table"]:
        return table()
    for name in names or ["fill", "ops", *models.JOBS]:
        if name == "fill":
            generator()
        elif name == "ops":
            write(HERE / "ops.json", {}, {"cases": ops.cases()})
        else:
            reference(name)


if __name__ == "__main__":
    main(sys.argv[1:])
