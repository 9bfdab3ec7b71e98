"""Operations one by one: what each gives, and the gradient of sum(output * w) in each input, in float64.

A case is a line of `CASES`: its op, its attributes, its inputs and the PyTorch call. Tensors are in PyTorch's layouts
(images NCHW, convolution weights OIHW). `make.py` writes the rows to `ops.json`; README.md tells the fields.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import fill


class Case:
    """Collects the inputs of one case, named `CASE.ARGUMENT` for the generator."""

    def __init__(self, name, dtype):
        self.name, self.dtype, self.inputs, self.leaves = name, dtype, [], {}

    def real(self, arg, *shape, center=0.0, spread=1.0, grad=True):
        values = fill.filled(f"{self.name}.{arg}", shape, center, spread)
        self.inputs.append({"name": arg, "shape": list(shape), "fill": [center, spread]})
        leaf = torch.from_numpy(values).to(self.dtype).requires_grad_(grad)
        if grad:
            self.leaves[arg] = leaf
        return leaf

    def whole(self, arg, *shape, modulus):
        self.inputs.append({"name": arg, "shape": list(shape), "modulus": modulus})
        return torch.from_numpy(fill.integers(f"{self.name}.{arg}", shape, modulus))

    def flag(self, arg, *shape, modulus):
        """False where k % modulus is zero."""
        return self.whole(arg, *shape, modulus=modulus) != 0


def recurrent(kind, c, layers, both):
    """`params` in PyTorch's order: weight_ih, weight_hh, bias_ih, bias_hh, a layer and a direction at a time."""
    module = kind(3, 4, num_layers=layers, batch_first=True, bidirectional=both).to(c.dtype)
    x = c.real("x", 2, 5, 3)
    params = {n: c.real(n, *p.shape, spread=0.7) for n, p in module.named_parameters()}
    return torch.func.functional_call(module, params, (x,))[0]


def cross_entropy(c, weights=False, **attrs):
    x = c.real("x", 6, 5, spread=2.0)
    y = c.whole("target", 6, modulus=5)
    if weights:
        attrs["weight"] = c.real("class_weight", 5, center=1.0, spread=0.5, grad=False)
    return F.cross_entropy(x, y, **attrs)


def attention(c, mask=False, causal=False, keys=5):
    q, k, v = c.real("q", 2, 2, 5, 4), c.real("k", 2, 2, keys, 4), c.real("v", 2, 2, keys, 4)
    allowed = c.flag("mask", 5, keys, modulus=4) if mask else None
    assert allowed is None or allowed.any(-1).all(), "a row without any allowed key has no defined answer"
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=causal)


def multi_head(c):
    module = nn.MultiheadAttention(8, 2, batch_first=True).to(c.dtype)
    x = c.real("x", 2, 5, 8)
    params = {n: c.real(n, *p.shape, spread=0.5) for n, p in module.named_parameters()}
    return torch.func.functional_call(module, params, (x, x, x), {"need_weights": False})[0]


def batch_norm(c, training):
    x, w, b = c.real("x", 3, 4, 2, 3), c.real("weight", 4, center=1.0, spread=0.5), c.real("bias", 4)
    mean = c.real("running_mean", 4, spread=0.3, grad=False).clone()
    var = c.real("running_var", 4, center=1.0, spread=0.5, grad=False).clone()
    y = F.batch_norm(x, mean, var, w, b, training=training, momentum=0.1, eps=1e-5)
    return {"y": y, "running_mean": mean, "running_var": var}


def group_norm(c):
    return F.group_norm(c.real("x", 2, 6, 3, 3), 3, c.real("weight", 6, center=1.0, spread=0.5), c.real("bias", 6), 1e-5)


def layer_norm(c):
    return F.layer_norm(c.real("x", 4, 9), (9,), c.real("weight", 9, center=1.0, spread=0.5), c.real("bias", 9), 1e-5)


def optimizer(c, kind, **attrs):
    """Three steps with the given gradients g0, g1, g2; the parameter after each."""
    p = nn.Parameter(c.real("p", 7, grad=False).clone())
    steps = kind([p], **attrs)
    out = {}
    for step in range(3):
        p.grad = c.real(f"g{step}", 7, grad=False).clone()
        steps.step()
        out[f"p{step + 1}"] = p.detach().clone()
    return out


def long_run(c, kind, shape, steps, **attrs):
    """So many steps with the given gradients g0, g1, ...; the parameter in the end."""
    p = nn.Parameter(c.real("p", *shape, grad=False).clone())
    optimizer = kind([p], **attrs)
    for step in range(steps):
        p.grad = c.real(f"g{step}", *shape, grad=False).clone()
        optimizer.step()
    return {f"p{steps}": p.detach().clone()}


class Lion(torch.optim.Optimizer):
    """The formulas of Chen et al. 2023, algorithm 2; PyTorch has no Lion."""

    def __init__(self, params, lr, betas, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = torch.sign(beta1 * m + (1 - beta1) * p.grad)
                p.copy_(p - lr * (update + decay * p))
                m.copy_(beta2 * m + (1 - beta2) * p.grad)


def clip(c, max_norm):
    """The norm over both gradients before clipping, and the gradients after."""
    params = [nn.Parameter(torch.zeros(5, dtype=c.dtype)), nn.Parameter(torch.zeros(2, 3, dtype=c.dtype))]
    params[0].grad = c.real("g0", 5, grad=False).clone()
    params[1].grad = c.real("g1", 2, 3, grad=False).clone()
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    return {"norm": norm, "g0": params[0].grad, "g1": params[1].grad}


def conv2d(c, x, w, bias=True, **attrs):
    return F.conv2d(c.real("x", *x), c.real("weight", *w), c.real("bias", w[0]) if bias else None, **attrs)


def conv_transpose2d(c, x, w, **attrs):
    """The weight is [in, out / groups, kh, kw]."""
    outs = w[1] * attrs.get("groups", 1)
    return F.conv_transpose2d(c.real("x", *x), c.real("weight", *w), c.real("bias", outs), **attrs)


def on(call, *shape, spread=3.0):
    """A case of one input x."""
    return lambda c, **attrs: call(c.real("x", *shape, spread=spread), **attrs)


def pair(call, *shape):
    """A case of an input x and a target of the same shape."""
    return lambda c, **attrs: call(c.real("x", *shape, spread=2.0), c.real("target", *shape, grad=False), **attrs)


def bce(c, weights=False):
    x, y = c.real("x", 4, 5, spread=4.0), c.real("target", 4, 5, center=0.5, spread=0.5, grad=False)
    weight = c.real("pos_weight", 5, center=2.0, spread=1.0, grad=False) if weights else None
    return F.binary_cross_entropy_with_logits(x, y, pos_weight=weight)


def gather(c, dim):
    return torch.gather(c.real("x", 4, 5), dim, c.whole("index", 4, 5, modulus=4))


def embedding(c):
    return F.embedding(c.whole("ids", 3, 4, modulus=6), c.real("weight", 6, 5))


SGD, ADAM, ADAMW, ADAFACTOR = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adafactor

# (case, op, attributes that the call takes, call)
CASES = [
    ("conv2d", "conv2d", {}, lambda c, **a: conv2d(c, (2, 3, 5, 5), (4, 3, 3, 3), **a)),
    ("conv2d_stride_padding", "conv2d", {"stride": 2, "padding": 1}, lambda c, **a: conv2d(c, (2, 3, 6, 5), (4, 3, 3, 3), **a)),
    ("conv2d_dilation", "conv2d", {"padding": 2, "dilation": 2}, lambda c, **a: conv2d(c, (1, 2, 6, 6), (3, 2, 3, 3), **a)),
    ("conv2d_groups", "conv2d", {"padding": 1, "groups": 2}, lambda c, **a: conv2d(c, (1, 4, 5, 5), (6, 2, 3, 3), **a)),
    ("conv2d_depthwise", "conv2d", {"stride": 2, "padding": 1, "groups": 4}, lambda c, **a: conv2d(c, (2, 4, 4, 4), (4, 1, 3, 3), **a)),
    ("conv2d_oblong", "conv2d", {"stride": [1, 2], "padding": [0, 2]}, lambda c, **a: conv2d(c, (2, 2, 4, 7), (3, 2, 1, 5), **a)),
    ("conv2d_1x1_stride", "conv2d", {"stride": 2}, lambda c, **a: conv2d(c, (2, 4, 4, 4), (5, 4, 1, 1), bias=False, **a)),
    ("conv_transpose2d", "conv_transpose2d", {"stride": 2, "padding": 1, "output_padding": 1},
     lambda c, **a: conv_transpose2d(c, (1, 3, 4, 4), (3, 2, 3, 3), **a)),
    ("conv_transpose2d_groups", "conv_transpose2d", {"stride": 2, "padding": 0, "dilation": 2, "groups": 2},
     lambda c, **a: conv_transpose2d(c, (1, 4, 3, 3), (4, 1, 2, 2), **a)),
    ("linear", "linear", {}, lambda c: F.linear(c.real("x", 3, 7), c.real("weight", 5, 7), c.real("bias", 5))),
    ("batch_norm_train", "batch_norm", {"training": True}, batch_norm),
    ("batch_norm_eval", "batch_norm", {"training": False}, batch_norm),
    ("group_norm", "group_norm", {}, group_norm),
    ("layer_norm", "layer_norm", {}, layer_norm),
    ("adaptive_avg_pool2d_down", "adaptive_avg_pool2d", {"output_size": [3, 2]}, on(F.adaptive_avg_pool2d, 1, 2, 7, 5)),
    ("adaptive_avg_pool2d_up", "adaptive_avg_pool2d", {"output_size": [6, 6]}, on(F.adaptive_avg_pool2d, 1, 2, 4, 1)),
    ("avg_pool2d_with_pad", "avg_pool2d", {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": True}, on(F.avg_pool2d, 2, 2, 6, 5)),
    ("avg_pool2d_without_pad", "avg_pool2d", {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False}, on(F.avg_pool2d, 2, 2, 6, 5)),
    ("avg_pool2d_ceil", "avg_pool2d", {"kernel_size": 3, "stride": 2, "ceil_mode": True}, on(F.avg_pool2d, 2, 2, 6, 6)),
    ("max_pool2d", "max_pool2d", {"kernel_size": 2}, on(F.max_pool2d, 2, 3, 5, 6)),
    ("max_pool2d_padding", "max_pool2d", {"kernel_size": 3, "stride": 2, "padding": 1}, on(F.max_pool2d, 2, 3, 6, 5)),
    ("max_pool2d_dilation", "max_pool2d", {"kernel_size": 2, "stride": 1, "dilation": 2}, on(F.max_pool2d, 2, 3, 5, 5)),
    ("relu", "relu", {}, on(F.relu, 24)),
    ("leaky_relu", "leaky_relu", {"negative_slope": 0.1}, on(F.leaky_relu, 24)),
    ("gelu_erf", "gelu", {"approximate": "none"}, on(F.gelu, 48, spread=5.0)),
    ("gelu_tanh", "gelu", {"approximate": "tanh"}, on(F.gelu, 48, spread=5.0)),
    ("softplus", "softplus", {"beta": 1.0, "threshold": 20.0}, on(F.softplus, 48, spread=30.0)),
    ("softplus_beta", "softplus", {"beta": 2.0, "threshold": 4.0}, on(F.softplus, 48, spread=4.0)),
    ("elu", "elu", {"alpha": 1.5}, on(F.elu, 24)),
    ("silu", "silu", {}, on(F.silu, 48, spread=8.0)),
    ("sigmoid", "sigmoid", {}, on(torch.sigmoid, 48, spread=8.0)),
    ("tanh", "tanh", {}, on(torch.tanh, 48, spread=4.0)),
    ("softmax", "softmax", {"dim": -1}, on(F.softmax, 4, 7)),
    ("log_softmax", "log_softmax", {"dim": 1}, on(F.log_softmax, 2, 5, 3)),
    ("cross_entropy", "cross_entropy", {}, cross_entropy),
    ("cross_entropy_smooth", "cross_entropy", {"label_smoothing": 0.1}, cross_entropy),
    ("cross_entropy_all", "cross_entropy", {"label_smoothing": 0.1, "ignore_index": 2, "weights": True}, cross_entropy),
    ("cross_entropy_weights", "cross_entropy", {"ignore_index": 2, "weights": True}, cross_entropy),
    ("cross_entropy_sum", "cross_entropy", {"reduction": "sum", "ignore_index": 4}, cross_entropy),
    ("bce_with_logits", "bce_with_logits", {}, bce),
    ("bce_with_logits_pos_weight", "bce_with_logits", {"weights": True}, bce),
    ("mse_loss", "mse_loss", {}, pair(F.mse_loss, 4, 5)),
    ("l1_loss", "l1_loss", {}, pair(F.l1_loss, 4, 5)),
    ("smooth_l1_loss", "smooth_l1_loss", {"beta": 0.5}, pair(F.smooth_l1_loss, 4, 5)),
    ("huber_loss", "huber_loss", {"delta": 0.7}, pair(F.huber_loss, 4, 5)),
    ("attention", "attention", {}, attention),
    ("attention_mask", "attention", {"mask": True, "keys": 7}, attention),
    ("attention_causal", "attention", {"causal": True}, attention),
    ("multi_head_attention", "multi_head_attention", {}, multi_head),
    ("embedding", "embedding", {}, embedding),
    ("gather_0", "gather", {"dim": 0}, gather),
    ("gather_1", "gather", {"dim": 1}, gather),
    ("lstm", "lstm", {"layers": 1, "both": False}, lambda c, **a: recurrent(nn.LSTM, c, **a)),
    ("lstm_both", "lstm", {"layers": 2, "both": True}, lambda c, **a: recurrent(nn.LSTM, c, **a)),
    ("gru", "gru", {"layers": 1, "both": False}, lambda c, **a: recurrent(nn.GRU, c, **a)),
    ("gru_both", "gru", {"layers": 2, "both": True}, lambda c, **a: recurrent(nn.GRU, c, **a)),
    ("sgd", "sgd", {"lr": 0.1}, lambda c, **a: optimizer(c, SGD, **a)),
    ("sgd_momentum", "sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2}, lambda c, **a: optimizer(c, SGD, **a)),
    ("sgd_nesterov", "sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}, lambda c, **a: optimizer(c, SGD, **a)),
    ("adam", "adam", {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}, lambda c, **a: optimizer(c, ADAM, **a)),
    ("adam_weight_decay", "adam", {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-3, "weight_decay": 0.1}, lambda c, **a: optimizer(c, ADAM, **a)),
    ("adamw", "adamw", {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}, lambda c, **a: optimizer(c, ADAMW, **a)),
    ("lion", "lion", {"lr": 0.01, "betas": [0.9, 0.99], "steps": 20}, lambda c, **a: long_run(c, Lion, (5, 7), **a)),
    ("lion_weight_decay", "lion", {"lr": 0.03, "betas": [0.8, 0.95], "weight_decay": 0.1, "steps": 20}, lambda c, **a: long_run(c, Lion, (33,), **a)),
    ("adafactor_vector", "adafactor", {"lr": 0.01, "steps": 20}, lambda c, **a: long_run(c, ADAFACTOR, (33,), **a)),
    ("adafactor_matrix", "adafactor", {"lr": 0.3, "weight_decay": 0.1, "steps": 20}, lambda c, **a: long_run(c, ADAFACTOR, (5, 19), **a)),
    ("adafactor_images", "adafactor", {"lr": 0.1, "beta2_decay": -0.5, "eps": [1e-6, 0.01], "d": 1.5, "steps": 20},
     lambda c, **a: long_run(c, ADAFACTOR, (4, 3, 3, 5), **a)),
    ("clip_grad_norm", "clip_grad_norm", {"max_norm": 0.5}, clip),
    ("clip_grad_norm_idle", "clip_grad_norm", {"max_norm": 100.0}, clip),
]


def run(name, attrs, call, dtype):
    """(inputs, outputs, gradients) of one case; only the first output is differentiated."""
    c = Case(name, dtype)
    out = call(c, **attrs)
    out = out if isinstance(out, dict) else {"y": out}
    if c.leaves:
        y = next(iter(out.values()))
        w = torch.from_numpy(fill.uniform(f"{name}.w", tuple(y.shape), 1.0)).to(dtype)
        (y * w).sum().backward()
    return c.inputs, {k: v.detach() for k, v in out.items()}, {k: v.grad for k, v in c.leaves.items()}


def cases():
    """Rows of `ops.json`."""
    rows = []
    for name, op, attrs, call in CASES:
        inputs, outputs, grads = run(name, attrs, call, torch.float64)
        _, outputs32, grads32 = run(name, attrs, call, torch.float32)
        worst = 0.0
        for wants, gots in ((outputs, outputs32), (grads, grads32)):
            for key, want in wants.items():
                assert want.numel() < 200, f"{name}: {key} has {want.numel()} elements"
                peak = want.abs().max().item()
                error = (gots[key].double() - want).abs().max().item()
                worst = max(worst, error / peak if peak else error)

        def listed(tensors):
            return {
                k: {"shape": list(v.shape), "values": [float(f"{x:.8g}") for x in v.flatten().tolist()]}
                for k, v in tensors.items()
            }

        rows.append({"case": name, "op": op, "attrs": attrs, "inputs": inputs, "outputs": listed(outputs),
                     "grads": listed(grads), "f32": float(f"{worst:.1e}")})
    return rows
