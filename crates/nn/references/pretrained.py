"""Makes `gpt2.json`: `python pretrained.py`, with `transformers` and `peft` beside PyTorch.

A small GPT-2 of `transformers`, in float64, with weights by the filling rule: logits of a batch, losses of 20 steps of AdamW
with all parameters, with frozen ones, and with low-rank factors of `peft` beside frozen weights. Every step has a batch of its
own: the text that both sides make by the generator, read in its order.
"""

import json
import pathlib
import re

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import fill

HERE = pathlib.Path(__file__).parent
STEPS, BATCH, CONTEXT = 20, 4, 16
# Tokens are bytes, and some more that never occur; the text has the 95 printable characters of ASCII.
VOCAB, FIRST, CHARACTERS = 260, 32, 95
SIZES = {"vocab_size": VOCAB, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 24}
OPTIMIZER = {"lr": 3e-3, "weight_decay": 0.1}
FROZEN = ["transformer.wte.", "transformer.wpe.", "transformer.h.0."]
RANK, ALPHA = 4, 8


def spread(name, shape):
    """[center, spread] of a weight, so that layers keep the size of what passes."""
    if ".ln_" in name:
        return (1.0, 0.1) if name.endswith("weight") else (0.0, 0.1)
    if len(shape) == 1:
        return 0.0, 0.1
    if ".wte" in name or ".wpe" in name:
        return 0.0, 0.3
    # `Conv1D` has [inputs, outputs].
    return 0.0, float((3.0 / shape[0]) ** 0.5)


def build():
    config = GPT2Config(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager")
    model = GPT2LMHeadModel(config).double()
    params = []
    with torch.no_grad():
        for name, value in model.named_parameters():
            center, width = spread(name, value.shape)
            value.copy_(torch.from_numpy(fill.filled(name, value.shape, center, width)))
            params.append({"name": name, "shape": list(value.shape), "fill": [center, width]})
    return model, params


def batches():
    ids = torch.from_numpy(fill.integers("text", (STEPS * BATCH * CONTEXT + 1,), CHARACTERS)) + FIRST
    for step in range(STEPS):
        first = step * BATCH * CONTEXT
        window = ids[first : first + BATCH * CONTEXT + 1]
        yield window[:-1].view(BATCH, CONTEXT), window[1:]


def losses(model):
    learnt = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learnt, **OPTIMIZER)
    got = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).logits.flatten(0, 1), y)
        loss.backward()
        got.append(loss.item())
        optimizer.step()
    return got


def main():
    model, params = build()
    x, _ = next(batches())
    with torch.no_grad():
        logits = model(x).logits.flatten(0, 1)
    at = fill.samples("logits", logits.numel(), 256)
    made = {
        "config": json.loads(model.config.to_json_string()),
        "steps": STEPS,
        "batch": BATCH,
        "context": CONTEXT,
        "characters": CHARACTERS,
        "optimizer": OPTIMIZER,
        "params": params,
        "logits": {"at": at.tolist(), "values": logits.flatten()[torch.from_numpy(at)].tolist()},
        "losses": losses(model),
    }
    model, _ = build()
    for name, value in model.named_parameters():
        value.requires_grad = not any(name.startswith(frozen) for frozen in FROZEN)
    made["frozen_losses"] = losses(model)

    model, _ = build()
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    model = get_peft_model(model, config).double()
    factors = []
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" not in name:
                assert not value.requires_grad, name
                continue
            assert value.requires_grad, name
            block, factor = name.split(".h.")[1].split(".")[0], "lora_a" if "lora_A" in name else "lora_b"
            ours = f"blocks.{block}.qkv.{factor}"
            width = 0.3 if factor == "lora_a" else 0.05
            value.copy_(torch.from_numpy(fill.filled(ours, value.shape, 0.0, width)))
            factors.append({"name": ours, "shape": list(value.shape), "fill": [0.0, width]})
    made["lora"] = {"rank": RANK, "alpha": ALPHA, "params": factors, "losses": losses(model)}
    text = json.dumps(made, indent=1)
    # Lists of numbers on one line.
    text = re.sub(r"\[\s+([^\[\]{}]+?)\s+\]", lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text)
    (HERE / "gpt2.json").write_text(text + "\n")
    print(made["losses"], made["frozen_losses"], made["lora"]["losses"], sep="\n")


if __name__ == "__main__":
    main()
