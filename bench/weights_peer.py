"""Weights in both directions: Polyreme's models in PyTorch, and PyTorch's in Polyreme, with the same results.

    V/bin/pip install torch torchvision numpy safetensors transformers
    cargo build --release
    V/bin/python bench/weights_peer.py [--binary target/release/polyreme] [digits] [table] [texts] [gpt2] [resnet18]

`digits`: trains `examples/digits.toml`, uses `model.safetensors` as `docs/pytorch.md` says, and compares the probabilities of all
test images; then PyTorch writes weights, and Polyreme's evaluation of them is compared with PyTorch's.

`table`, `texts`: the same lines with a table of numbers whose columns are in another order, and with texts and a tokenizer (`tokenizers`).

`gpt2`: `transformers` writes the folder of a GPT-2 with random weights. Both fine-tune it for 20 steps on the same batches, all of it and
with frozen layers; then `from_pretrained` reads what Polyreme wrote, and its loss is compared.

`resnet18`: torchvision writes a ResNet-18 with random weights. Both evaluate it, and fine-tune it for 20 steps with frozen layers and a new
head, which is the same on both sides.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import train_peer

ROOT = train_peer.ROOT
JOB = ROOT / "examples/digits.toml"
BINARY = ROOT / "target/release/polyreme"
STEPS = 20


def polyreme(folder, *args):
    out = subprocess.run([BINARY, *args, "--json"], cwd=folder, capture_output=True, text=True)
    if out.returncode:
        sys.exit(out.stderr or out.stdout)
    return [json.loads(line) for line in out.stdout.splitlines()]


def losses_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["train_loss"] for row in rows if "train_loss" in row]


def apart(ours, theirs):
    assert len(ours) == len(theirs) == STEPS, (len(ours), len(theirs))
    return max(abs(a - b) for a, b in zip(ours, theirs))


def digits(folder):
    job = train_peer.tomllib.loads(JOB.read_text())
    images, labels = train_peer.idx_pair(JOB.parent / job["data"]["path"], "t10k")
    polyreme(folder, "train", JOB, "--output", "run", "--set", "train.epochs=10")
    pixels = torch.tensor(images).float().unsqueeze(1)
    model = train_peer.stack(job["model"]["layers"], 1, (8, 8), 10)

    # The lines of docs/pytorch.md.
    with safe_open(folder / "run/model.safetensors", "pt") as file:
        about, state = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    how = json.loads(about["preparation"])
    model.load_state_dict(state)
    mean, std = (torch.tensor(how[key]).view(-1, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        theirs = model.eval()((pixels / 255 - mean) / std).softmax(1)

    files = []
    for i, image in enumerate(images):
        files.append(folder / f"{i:03}.png")
        Image.fromarray(image).save(files[-1])
    answers = polyreme(folder, "predict", "run", "--top", "10", *files)
    by_name = [{a["label"]: a["probability"] for a in row["labels"]} for row in answers]
    ours = torch.tensor([[row[name] for name in how["classes"]] for row in by_name])
    print(f"digits: Polyreme's weights: probabilities differ by at most {(ours - theirs).abs().max():.1e}")

    torch.manual_seed(1)
    model = train_peer.stack(job["model"]["layers"], 1, (8, 8), 10)
    save_file(model.state_dict(), folder / "torch.safetensors")
    x = (pixels / 255 - mean) / std
    with torch.no_grad():
        loss = F.cross_entropy(model.eval()(x), torch.tensor(labels).long()).item()
    args = ["--set", "model.weights=torch.safetensors", "--set", "train.steps=1", "--set", "train.optimizer.lr=1e-12"]
    summary = polyreme(folder, "train", JOB, "--output", "from-torch", *args)[-1]
    print(f"digits: PyTorch's weights: test loss {summary['metrics']['test_loss']:.6f} here, {loss:.6f} there")


def probabilities(folder, run, file, classes):
    """What `polyreme predict` says of each row, by class."""
    answers = polyreme(folder, "predict", run, file, "--top", str(len(classes)))
    by_name = [{a["label"]: a["probability"] for a in row["labels"]} for row in answers]
    return torch.tensor([[row[name] for name in classes] for row in by_name])


TABLE_JOB = """[model]
kind = "mlp"
hidden = [16]
[data]
kind = "csv"
path = "train.csv"
label = "kind"
[train]
batch = 16
steps = 100
"""


def table(folder):
    torch.manual_seed(0)
    x = torch.randn(300, 3) * torch.tensor([1.0, 30.0, 0.1]) + 5
    rows = [f"{a},{'small' if a < 5 else 'large'},{b},{c}\n" for a, b, c in x.tolist()]
    (folder / "train.csv").write_text("a,kind,b,c\n" + "".join(rows))
    (folder / "new.csv").write_text("c,a,b\n" + "".join(f"{c},{a},{b}\n" for a, b, c in x.tolist()))
    (folder / "job.toml").write_text(TABLE_JOB)
    polyreme(folder, "train", "job.toml", "--output", "run")
    with safe_open(folder / "run/model.safetensors", "pt") as file:
        about, state = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    how = json.loads(about["preparation"])
    shapes = [w.shape for name, w in state.items() if name.endswith("weight")]
    sizes = sorted((tuple(shape) for shape in shapes), key=lambda shape: shape[0] == 2)
    model = torch.nn.Sequential(torch.nn.Linear(*sizes[0][::-1]), torch.nn.ReLU(), torch.nn.Linear(*sizes[1][::-1]))
    named = sorted(state)  # The two layers in their order, bias before weight.
    model.load_state_dict(dict(zip(sorted(model.state_dict()), (state[name] for name in named))))
    inputs = torch.stack([x[:, "abc".index(column)] for column in how["columns"]], 1)
    with torch.no_grad():
        theirs = model((inputs - torch.tensor(how["mean"])) / torch.tensor(how["std"])).softmax(1)
    ours = probabilities(folder, "run", "new.csv", how["classes"])
    print(f"table: probabilities differ by at most {(ours - theirs).abs().max():.1e}; classes {how['classes']}")


TEXTS_JOB = """[model]
layers = [{ kind = "embedding", width = 16 }, "mean_time", "linear"]
[data]
kind = "csv"
path = "train.csv"
text = "body"
label = "kind"
tokenizer = "tokenizer.json"
[train]
batch = 16
steps = 60
optimizer = { kind = "adam", lr = 1e-2 }
"""


def texts(folder):
    from tokenizers import Tokenizer

    import spam

    bodies = [" ".join(["the", "sea", "is", "quiet", "storm"][(i * k + k) % 5] for k in range(1, 2 + i % 7)) for i in range(200)]
    lines = [f"{body},{'storm' if 'storm' in body else 'calm'}\n" for body in bodies]
    (folder / "train.csv").write_text("body,kind\n" + "".join(lines))
    spam.write_tokenizer(bodies, folder / "tokenizer.json")
    (folder / "job.toml").write_text(TEXTS_JOB)
    polyreme(folder, "train", "job.toml", "--output", "run")
    with safe_open(folder / "run/model.safetensors", "pt") as file:
        about, state = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    how = json.loads(about["preparation"])
    tokenizer = Tokenizer.from_file(str(folder / about["tokenizer"]))
    tokenizer.enable_truncation(how["sample"]["texts"][-1])
    table, weight, bias = (state[name] for name in ("0.weight", "2.weight", "2.bias"))
    means = torch.stack([table[torch.tensor(tokenizer.encode(body).ids)].mean(0) for body in bodies])
    theirs = F.linear(means, weight, bias).softmax(1)
    ours = probabilities(folder, "run", "train.csv", how["classes"])
    print(f"texts: probabilities differ by at most {(ours - theirs).abs().max():.1e}; classes {how['classes']}")


GPT2_JOB = """[model]
kind = "gpt2"
path = "gpt2"
freeze = [{freeze}]
[data]
kind = "text"
path = "text.txt"
context = 64
order = "in-order"
validation = 0
[train]
batch = 4
steps = {steps}
log_every = 1
optimizer = {{ kind = "adamw", lr = {lr}, weight_decay = 0.1 }}
[output]
tensorboard = false
"""


def gpt2(folder):
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=256, n_embd=192, n_head=6, n_layer=4, n_positions=128, **no_dropout, **ends)
    GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")
    text = (ROOT / "README.md").read_bytes() + (ROOT / "ARCHITECTURE.md").read_bytes()
    text = text[: STEPS * 4 * 64 + 1]
    (folder / "text.txt").write_bytes(text)
    ids = torch.tensor(list(text))

    def batches():
        for first in range(0, STEPS * 256, 256):
            window = ids[first : first + 257]
            yield window[:-1].view(4, 64), window[1:]

    for name, freeze in [("all", []), ("frozen", ["wte.", "wpe.", "h.0.", "h.1."])]:
        ours_frozen = [{"wte.": "tok", "wpe.": "pos", "h.0.": "blocks.0", "h.1.": "blocks.1"}[f] for f in freeze]
        words = ", ".join(f'"{f}"' for f in ours_frozen)
        (folder / f"{name}.toml").write_text(GPT2_JOB.format(freeze=words, steps=STEPS, lr="1e-3"))
        polyreme(folder, "train", f"{name}.toml", "--output", name)
        model = AutoModelForCausalLM.from_pretrained(folder / "gpt2")
        for key, value in model.named_parameters():
            value.requires_grad = not any(key.startswith("transformer." + f) for f in freeze)
        learnt = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(learnt, lr=1e-3, weight_decay=0.1)
        theirs = []
        for x, y in batches():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).logits.flatten(0, 1), y)
            loss.backward()
            theirs.append(loss.item())
            optimizer.step()
        ours = losses_of(folder / name)
        print(f"gpt2 ({name}): first losses {ours[0]:.7f}, {theirs[0]:.7f}; {STEPS} losses differ by at most {apart(ours, theirs):.1e}")
        back = AutoModelForCausalLM.from_pretrained(folder / name)
        x, y = next(batches())
        with torch.no_grad():
            a, b = back(x).logits, model(x).logits
        before, after = load_file(folder / "gpt2/model.safetensors"), load_file(folder / name / "model.safetensors")
        assert before.keys() == after.keys(), before.keys() ^ after.keys()
        same = [k for k in before if torch.equal(before[k], after[k])]
        untouched = [k for k in before if any(k.startswith("transformer." + f) for f in freeze)]
        assert set(untouched) <= set(same), set(untouched) - set(same)
        print(f"gpt2 ({name}): from_pretrained reads the run; logits after training differ by at most {(a - b).abs().max():.1e}")


RESNET_JOB = """[model]
kind = "resnet18"
weights = "{weights}"
{more}
[data]
kind = "arrays"
path = "images.safetensors"
x = "x"
labels = "labels"
order = "in-order"
validation = 0
normalise = false
[train]
batch = 8
steps = {steps}
log_every = 1
precision = "f32-strict"
optimizer = {{ kind = "sgd", lr = {lr}, momentum = 0.9 }}
[output]
tensorboard = false
"""


# With all layers learnt at 1e-3, PyTorch's own float32 and float64 are 0.03 apart after 20 steps: rounding grows through the batch norms.
CASES = [("whole", 1000, 1e-6, []), ("frozen", 5, 1e-3, ["conv1.", "bn1.", "layer1.", "layer2."])]


def resnet18(folder):
    import torchvision

    torch.manual_seed(0)
    net = torchvision.models.resnet18(weights=None)
    save_file(net.state_dict(), folder / "resnet18.safetensors")
    x = torch.randn(8 * STEPS, 3, 64, 64)
    for name, classes, lr, freeze in CASES:
        labels = torch.randint(0, classes, (8 * STEPS,))
        labels[0] = classes - 1
        save_file({"x": x, "labels": labels}, folder / "images.safetensors")
        net = torchvision.models.resnet18(weights=None)
        net.load_state_dict(load_file(folder / "resnet18.safetensors"))
        weights, more = "resnet18.safetensors", ""
        if freeze:
            # The new head that Polyreme draws is read from a run of a vanishing rate, so that both have it.
            more = 'head = "new"'
            (folder / "head.toml").write_text(RESNET_JOB.format(weights=weights, more=more, steps=1, lr="1e-30"))
            polyreme(folder, "train", "head.toml", "--output", "head")
            drawn = load_file(folder / "head/model.safetensors")
            net.fc = torch.nn.Linear(512, classes)
            net.fc.load_state_dict({"weight": drawn["fc.weight"], "bias": drawn["fc.bias"]})
            more += "\nfreeze = [" + ", ".join(f'"{f}*"' for f in freeze) + "]"
        (folder / f"{name}.toml").write_text(RESNET_JOB.format(weights=weights, more=more, steps=STEPS, lr=lr))
        polyreme(folder, "train", f"{name}.toml", "--output", name)
        for key, value in net.named_parameters():
            value.requires_grad = not any(key.startswith(f) for f in freeze)
        learnt = [p for p in net.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(learnt, lr=lr, momentum=0.9)
        theirs = []
        for first in range(0, 8 * STEPS, 8):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x[first : first + 8]), labels[first : first + 8])
            loss.backward()
            theirs.append(loss.item())
            optimizer.step()
        ours = losses_of(folder / name)
        print(f"resnet18 ({name}): first losses {ours[0]:.7f}, {theirs[0]:.7f}; {STEPS} losses differ by at most {apart(ours, theirs):.1e}")
        before, after = load_file(folder / "resnet18.safetensors"), load_file(folder / name / "model.safetensors")
        parameters = dict(net.named_parameters())
        same = [k for k in before if k in parameters and torch.equal(before[k], after[k])]
        untouched = [k for k in parameters if any(k.startswith(f) for f in freeze)]
        assert set(untouched) <= set(same), set(untouched) - set(same)
        # What Polyreme trained, in torchvision: the same logits as what torchvision trained, up to the difference of the runs.
        again = torchvision.models.resnet18(weights=None, num_classes=classes)
        again.load_state_dict(after)
        with torch.no_grad():
            a, b = again.eval()(x[:16]), net.eval()(x[:16])
        far = (a - b).abs().max() / b.abs().max()
        print(f"resnet18 ({name}): logits after training differ by at most {far:.1e} of the largest")


def main():
    global BINARY
    known = {"digits": digits, "table": table, "texts": texts, "gpt2": gpt2, "resnet18": resnet18}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=list(known))
    parser.add_argument("--binary", type=pathlib.Path, default=BINARY)
    args = parser.parse_args()
    BINARY = args.binary.resolve()
    for what in args.what:
        with tempfile.TemporaryDirectory() as folder:
            known[what](pathlib.Path(folder))


if __name__ == "__main__":
    main()
