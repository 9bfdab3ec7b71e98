"""Tables with `mlp` and with scikit-learn's gradient boosting: scores of five folds.

    python3 -m venv V && V/bin/pip install scikit-learn vega_datasets
    V/bin/python bench/tables_peer.py target/release/polyreme

diabetes and breast cancer are scikit-learn's, with their names; cars is the JSON file of `vega_datasets`, with its blanks, dates and
names. Each fold trains on the other four: ours from a job of the lines printed with the result, with a tenth of them to validate and to
choose the best epoch by; theirs with `HistGradientBoosting` and its defaults (categories and blanks as it takes them). Prints one JSON object a set:
the scores of each fold (accuracy, or R^2 for numbers) and their means.
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


def job(label, numbers):
    """The job, of at most 15 lines."""
    return "\n".join(
        [
            "[model]",
            'kind = "mlp"',
            "hidden = [64, 64]",
            "dropout = 0.1",
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


def ours(binary, train, test, label, numbers):
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name, rows in [("train.jsonl", train), ("test.jsonl", test)]:
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "job.toml").write_text(job(label, numbers))
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


def main():
    binary = str(pathlib.Path(sys.argv[1]).resolve())
    for name, load in [("diabetes", diabetes), ("breast cancer", breast_cancer), ("cars", cars)]:
        rows, label, numbers = load()
        folds = (KFold if numbers else StratifiedKFold)(FOLDS, shuffle=True, random_state=0)
        scores = []
        for train, test in folds.split(rows, [str(row[label]) for row in rows]):
            train, test = [rows[i] for i in train], [rows[i] for i in test]
            scores.append((ours(binary, train, test, label, numbers), theirs(train, test, label, numbers)))
        mine, other = zip(*scores)
        result = {
            "set": name,
            "rows": len(rows),
            "score": "r2" if numbers else "accuracy",
            "polyreme mlp": round(float(np.mean(mine)), 4),
            "gradient boosting": round(float(np.mean(other)), 4),
            "folds": [[round(float(a), 4), round(float(b), 4)] for a, b in scores],
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
