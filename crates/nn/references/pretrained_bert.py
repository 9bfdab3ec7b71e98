"""Makes `bert.json`: `python pretrained_bert.py`, with `transformers` beside PyTorch.

A small BERT of `transformers`, in float64, with weights by the filling rule: losses of 20 steps of AdamW, for classes of pairs of texts
(`BertForSequenceClassification`, with types and padding) and for a class of each word (`BertForTokenClassification`). Both
sides make the texts by the generator: words `w0`, `w1`, .., each a token; tokens 0 to 3 are [PAD], [UNK], [CLS] and [SEP].
"""

import json
import pathlib
import re

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification, BertModel

import fill

HERE = pathlib.Path(__file__).parent
STEPS, BATCH, CLASSES = 20, 4, 3
WORDS, SPECIALS = 60, 4
PAD, CLS, SEP = 0, 2, 3
# The first text has 1 to FIRST words, the second 1 to SECOND.
FIRST, SECOND = 9, 6
SIZES = {
    "vocab_size": WORDS + SPECIALS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "type_vocab_size": 2,
}
OPTIMIZER = {"lr": 3e-3, "weight_decay": 0.1}


def spread(name, shape):
    """[center, spread] of a weight, so that layers keep the size of what passes."""
    if "LayerNorm" in name:
        return (1.0, 0.1) if name.endswith("weight") else (0.0, 0.1)
    if len(shape) == 1:
        return 0.0, 0.1
    if "embeddings" in name:
        return 0.0, 0.3
    return 0.0, float((3.0 / shape[1]) ** 0.5)


def build(kind):
    config = BertConfig(
        **SIZES,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=PAD,
        attn_implementation="eager",
    )
    model = kind(config).double()
    params = []
    with torch.no_grad():
        for name, value in model.named_parameters():
            center, width = spread(name, value.shape)
            value.copy_(torch.from_numpy(fill.filled(name, value.shape, center, width)))
            params.append({"name": name, "shape": list(value.shape), "fill": [center, width]})
    return model, params


def words(which, sample, most):
    """The words of a text: how many there are, and each of them, by the generator."""
    n = 1 + int(fill.integers(f"{which}.{sample}.n", (1,), most)[0])
    return [int(w) for w in fill.integers(f"{which}.{sample}", (n,), WORDS)]


def batches(pairs):
    for step in range(STEPS):
        rows, types, labels = [], [], []
        for sample in range(step * BATCH, (step + 1) * BATCH):
            first = [w + SPECIALS for w in words("first", sample, FIRST)]
            row, of = [CLS, *first, SEP], [0] * (len(first) + 2)
            if pairs:
                second = [w + SPECIALS for w in words("second", sample, SECOND)]
                row, of = [*row, *second, SEP], of + [1] * (len(second) + 1)
                labels.append(int(fill.integers(f"label.{sample}", (1,), CLASSES)[0]))
            else:
                tags = fill.integers(f"tags.{sample}", (len(first),), CLASSES)
                labels.append([-100, *(int(t) for t in tags), -100])
            rows.append(row)
            types.append(of)
        time = max(len(row) for row in rows)
        filled = lambda rows, by: torch.tensor([row + [by] * (time - len(row)) for row in rows])
        y = torch.tensor(labels) if pairs else filled(labels, -100)
        yield filled(rows, PAD), filled(types, 0), filled([[1] * len(row) for row in rows], 0), y


def losses(model, pairs):
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    got = []
    for x, types, mask, y in batches(pairs):
        optimizer.zero_grad()
        logits = model(x, attention_mask=mask, token_type_ids=types).logits
        loss = F.cross_entropy(logits.view(-1, CLASSES), y.view(-1), ignore_index=-100)
        loss.backward()
        got.append(loss.item())
        optimizer.step()
    return got


def embeddings():
    """Means of the last hidden states of the first batch of pairs."""
    model, _ = build(BertModel)
    x, types, mask, _ = next(batches(True))
    with torch.no_grad():
        states = model(x, attention_mask=mask, token_type_ids=types).last_hidden_state
    return ((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)).flatten().tolist()


def main():
    model, params = build(BertForSequenceClassification)
    made = {
        "config": json.loads(model.config.to_json_string()),
        "steps": STEPS,
        "batch": BATCH,
        "classes": CLASSES,
        "words": WORDS,
        "most": [FIRST, SECOND],
        "optimizer": OPTIMIZER,
        "params": params,
        "losses": losses(model, True),
    }
    model, params = build(BertForTokenClassification)
    made["tags"] = {"params": params, "losses": losses(model, False)}
    made["embeddings"] = embeddings()
    text = json.dumps(made, indent=1)
    # Lists of numbers on one line.
    text = re.sub(r"\[\s+([^\[\]{}]+?)\s+\]", lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text)
    (HERE / "bert.json").write_text(text + "\n")
    print(made["losses"], made["tags"]["losses"], sep="\n")


if __name__ == "__main__":
    main()
