"""The generator and the filling rule that both sides share: every number follows from a name and an index.

README.md states the rule in words; `fill.json`, made by `make.py`, holds values to test another implementation by.
"""

import math

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
EMBEDDINGS = ("tok.weight", "pos.weight", "embed.weight")


def seed(name):
    """FNV-1a, 64 bits, of the name's UTF-8 bytes."""
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = ((h ^ byte) * 0x100000001B3) & MASK
    return h


def bits(name, n):
    """k[i] for i in 0..n: the top 24 bits of the i-th output of a SplitMix64 started at the name's seed."""
    out = np.empty(n, np.uint32)
    start = np.uint64(seed(name))
    for lo in range(0, n, 1 << 20):
        hi = min(n, lo + (1 << 20))
        with np.errstate(over="ignore"):
            z = start + np.arange(lo + 1, hi + 1, dtype=np.uint64) * np.uint64(GOLDEN)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z = z ^ (z >> np.uint64(31))
        out[lo:hi] = z >> np.uint64(40)
    return out


def unit(name, n):
    """v[i] = (k - 2^23) / 2^23, in [-1, 1), exact in f32."""
    return (bits(name, n).astype(np.float32) - np.float32(1 << 23)) / np.float32(1 << 23)


def uniform(name, shape, bound):
    """v * bound: one f32 multiply, bound rounded to f32 first."""
    return (unit(name, math.prod(shape)) * np.float32(bound)).reshape(shape)


def integers(name, shape, modulus):
    """k % modulus."""
    return (bits(name, math.prod(shape)) % modulus).astype(np.int64).reshape(shape)


def samples(name, numel, n=8):
    """Where a parameter's gradient is sampled. Indices may repeat, and none passes 2^24."""
    return integers("sample:" + name, (n,), numel)


def rule(name, shape, state):
    """(center, spread) of the parameter or buffer `name`; `state` holds all names of the model.

    A unit that sits within rounding of zero may fall on either side of a ReLU, and one such unit moves a gradient by
    about 1/sqrt(units): some 1e-3. So batch norms push what they pass 2.5 deviations up: a few units in a thousand stay
    below zero, enough to see a missing ReLU, and hardly any sits on the edge.
    """
    owner, leaf = name.rsplit(".", 1)
    if leaf == "running_var":
        return 1.0, 0.0
    if leaf in ("running_mean", "num_batches_tracked"):
        return 0.0, 0.0
    if name in EMBEDDINGS or owner.startswith("embed"):
        return 0.0, 0.5
    if owner == "numbers":
        return 0.0, 1.0
    if len(shape) >= 2:
        return 0.0, math.sqrt((6.0 if len(shape) == 4 else 3.0) / math.prod(shape[1:]))
    batch_norm = owner + ".running_mean" in state
    block = owner.rsplit(".", 1)[0]
    # The last norm of a residual block is damped, so that the stream keeps its size however deep it runs.
    last = "bn3" if block + ".bn3.weight" in state else "bn2"
    damped = batch_norm and owner.endswith("." + last)
    if "bias" in leaf:
        return ((0.1, 0.1) if damped else (2.5, 0.5)) if batch_norm else (0.0, 0.1)
    return (0.25, 0.025) if damped else (1.0, 0.1)


def filled(name, shape, center, spread):
    """center + spread * v: a product and a sum, each rounded to f32."""
    return np.float32(center) + uniform(name, tuple(shape), spread)
