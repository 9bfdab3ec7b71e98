"""Tables with `mlp` and `tabular`, with the same networks in PyTorch, and with scikit-learn's gradient boosting: scores of five folds.

    python3 -m venv V && V/bin/pip install scikit-learn vega_datasets torch
    V/bin/python bench/tables_peer.py target/release/polyreme

diabetes and breast cancer are scikit-learn's, with their names; cars is the JSON file of `vega_datasets`, with its blanks, dates and
names. Each fold trains on the other four: ours from a job of the lines printed with the result, with a tenth of them to validate and to
choose the best epoch by; PyTorch with the same layers, optimizer, batch, epochs and choice of the best epoch, on inputs that are made here as
`docs/tables.md` says (standardised numbers, marks of blanks, one-hot words, parts of dates); `HistGradientBoosting` with its
defaults (categories and blanks as it takes them). Prints one JSON object a set: the scores of each fold (accuracy, or R^2 for numbers)
and their means.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.model_selection import KFold, StratifiedKFold

FOLDS = 5


def diabetes():
    frame = load_diabetes(as_frame=True, scaled=False).frame
    return frame.to_dict("records"), "target", True


def breast_cancer():
    loaded = load_breast_cancer(as_frame=True)
    frame = loaded.frame
    frame["target"] = [loaded.target_names[k] for k in frame["target"]]
    return frame.to_dict("records"), "target", False


def cars():
    import vega_datasets

    path = pathlib.Path(vega_datasets.__file__).parent / "_data" / "cars.json"
    rows = json.loads(path.read_text())
    # Rows without a target teach nothing.
    return [row for row in rows if row["Miles_per_Gallon"] is not None], "Miles_per_Gallon", True


MODELS = {
    "mlp": ['kind = "mlp"', "hidden = [64, 64]", "dropout = 0.1"],
    # With its defaults.
    "tabular": ['kind = "tabular"'],
}


def job(kind, label, numbers):
    """The job, of at most 15 lines."""
    return "\n".join(
        ["[model]", *MODELS[kind]]
        + [
            "[data]",
            'kind = "jsonl"',
            'path = "train.jsonl"',
            'test = "test.jsonl"',
            f'label = "{label}"',
            "[train]",
            "batch = 32",
            "epochs = 100",
            'optimizer = { kind = "adamw", lr = 2e-3, weight_decay = 0.05 }',
        ]
        + (['loss = "mse"'] if numbers else [])
    )


def ours(binary, kind, train, test, label, numbers):
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name, rows in [("train.jsonl", train), ("test.jsonl", test)]:
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "job.toml").write_text(job(kind, label, numbers))
        command = [binary, "train", "job.toml", "--json", "--ranks", "1"]
        out = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert out.returncode == 0, out.stderr
        metrics = json.loads(out.stdout.splitlines()[-1])["metrics"]
        return metrics["test_r2" if numbers else "test_accuracy"]


def theirs(train, test, label, numbers):
    """Words become whole numbers, marked as categories; a column in which every row has another word is left out, as we do."""
    keys = [key for key in train[0] if key != label]
    words = [k for k in keys if any(isinstance(row[k], str) for row in train)]
    distinct = {k: sorted({row[k] for row in train if row[k] is not None}) for k in words}
    keys = [k for k in keys if k not in words or 2 * len(distinct[k]) <= len(train)]

    def matrix(rows):
        def number(key, value):
            if value is None:
                return np.nan
            if key in words:
                return distinct[key].index(value) if value in distinct[key] else np.nan
            return value

        return np.array([[number(key, row[key]) for key in keys] for row in rows], dtype=float)

    kinds = [key in words and len(distinct[key]) < 255 for key in keys]
    model = HistGradientBoostingRegressor if numbers else HistGradientBoostingClassifier
    model = model(categorical_features=kinds, random_state=0)
    model.fit(matrix(train), [row[label] for row in train])
    return model.score(matrix(test), [row[label] for row in test])


def inputs(train, test, label):
    """Rows as matrices, and what was found is of the training rows alone."""
    import datetime

    columns = []
    for key in (key for key in train[0] if key != label):
        values = [row[key] for row in train if row[key] is not None]
        blank = len(values) < len(train)
        if all(isinstance(v, str) for v in values):
            try:
                days = [datetime.date.fromisoformat(v) for v in values]
            except ValueError:
                days = None
            if days:
                turn = lambda v: 2 * np.pi * datetime.date.fromisoformat(v).weekday() / 7
                year = lambda v: 1970 + (datetime.date.fromisoformat(v) - datetime.date(1970, 1, 1)).days / 365.2425
                columns += [(key, year, blank), (key, lambda v: np.sin(turn(v)), False), (key, lambda v: np.cos(turn(v)), False)]
            elif 2 * len(set(values)) <= len(train):
                columns += [(key, (lambda word: lambda v: float(v == word))(word), False) for word in sorted(set(values))]
        else:
            columns.append((key, float, blank))
    parts = []
    for key, number, blank in columns:
        mean = np.mean([number(row[key]) for row in train if row[key] is not None])
        part = [[mean if row[key] is None else number(row[key]) for row in rows] for rows in (train, test)]
        parts.append(part)
        if blank:
            parts.append([[float(row[key] is None) for row in rows] for rows in (train, test)])
    x, new = (np.array([part[k] for part in parts], dtype=np.float32).T for k in (0, 1))
    mean, std = x.mean(0), x.std(0)
    std[std == 0] = 1
    return (x - mean) / std, (new - mean) / std


def network(kind, width, n):
    import torch
    from torch import nn

    if kind == "mlp":
        layers = []
        for hidden in (64, 64):
            layers += [nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(0.1)]
            width = hidden
        return nn.Sequential(*layers, nn.Linear(width, n))

    class Vectors(nn.Module):
        def __init__(self, numbers, length):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(numbers, length).uniform_(-(length**-0.5), length**-0.5))
            self.bias = nn.Parameter(torch.empty(numbers, length).uniform_(-(length**-0.5), length**-0.5))

        def forward(self, x):
            return torch.relu(x[..., None] * self.weight + self.bias).flatten(1)

    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    block = lambda: Residual(nn.LayerNorm(128), nn.Linear(128, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 128), nn.Dropout(0.1))
    head = [nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, n)]
    return nn.Sequential(Vectors(width, 8), nn.Linear(8 * width, 128), block(), block(), *head)


def in_torch(kind, train, test, label, numbers):
    """The same network and the same training."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, new = (torch.from_numpy(part) for part in inputs(train, test, label))
    if numbers:
        y, want = (np.array([row[label] for row in rows], dtype=np.float32) for rows in (train, test))
        middle, scale = y.mean(), y.std()
        y, loss_of, n = torch.from_numpy((y - middle) / scale)[:, None], nn.MSELoss(), 1
    else:
        names = sorted({row[label] for row in train})
        y, want = (np.array([names.index(row[label]) for row in rows]) for rows in (train, test))
        y, loss_of, n = torch.from_numpy(y), nn.CrossEntropyLoss(), len(names)
    net = network(kind, x.shape[1], n)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.05)
    order = torch.randperm(len(x))
    held, rest = order[: round(len(x) / 10)], order[round(len(x) / 10) :]
    best, answer = None, None
    for _ in range(100):
        net.train()
        for batch in rest[torch.randperm(len(rest))].split(32):
            optimizer.zero_grad()
            loss_of(net(x[batch]), y[batch]).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            said = net(x[held])
            score = -loss_of(said, y[held]).item() if numbers else (said.argmax(1) == y[held]).float().mean().item()
            if best is None or score > best:
                best, answer = score, net(new)
    if not numbers:
        return (answer.argmax(1).numpy() == want).mean()
    said = answer[:, 0].numpy() * scale + middle
    return 1 - ((said - want) ** 2).sum() / ((want - want.mean()) ** 2).sum()


def main():
    binary = str(pathlib.Path(sys.argv[1]).resolve())
    for name, load in [("diabetes", diabetes), ("breast cancer", breast_cancer), ("cars", cars)]:
        rows, label, numbers = load()
        folds = (KFold if numbers else StratifiedKFold)(FOLDS, shuffle=True, random_state=0)
        scores = []
        for train, test in folds.split(rows, [str(row[label]) for row in rows]):
            train, test = [rows[i] for i in train], [rows[i] for i in test]
            fold = (train, test, label, numbers)
            nets = [score for kind in MODELS for score in (ours(binary, kind, *fold), in_torch(kind, *fold))]
            scores.append((*nets, theirs(*fold)))
        names = [f"{by} {kind}" for kind in MODELS for by in ("polyreme", "PyTorch")] + ["gradient boosting"]
        means = {name: round(float(np.mean(of)), 4) for name, of in zip(names, zip(*scores))}
        result = {
            "set": name,
            "rows": len(rows),
            "score": "r2" if numbers else "accuracy",
            **means,
            "folds": [[round(float(score), 4) for score in fold] for fold in scores],
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
