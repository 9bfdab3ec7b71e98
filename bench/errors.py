"""How far PyTorch's convolutions and products are from f64: what `crates/kernels/examples/errors.rs` does, for PyTorch.

    V/bin/python bench/errors.py

Operands are normal, 8 images of 16x16; errors are relative to the root mean square of the result.
"""

import torch
import torch.nn.functional as F


def errors(got, want):
    error, scale = got.double() - want, want.square().mean().sqrt()
    return f"{(error.square().mean().sqrt() / scale).item():10.1e} {(error.abs().max() / scale).item():10.1e}"


def passes(x, weight, dy):
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = F.conv2d(x, weight, padding=1)
    y.backward(dy)
    return y.detach(), x.grad, weight.grad


torch.manual_seed(1)
print(f"PyTorch {torch.__version__}")
for channels in [64, 128, 256, 512]:
    x, dy = torch.randn(8, channels, 16, 16), torch.randn(8, channels, 16, 16)
    weight = torch.randn(channels, channels, 3, 3)
    exact = passes(x.double(), weight.double(), dy.double())
    for layout in [torch.contiguous_format, torch.channels_last]:
        lay = lambda t: t.detach().clone().to(memory_format=layout)
        for name, got, want in zip(["Forward", "GradInput", "GradWeight"], passes(lay(x), lay(weight), lay(dy)), exact):
            print(f"3x3, {channels} channels, {name:10} {str(layout).split('.')[1]:18} {errors(got, want)}")
for n in [1024, 1536, 2048]:
    a, b = torch.randn(n, n), torch.randn(n, n)
    print(f"product of {n} {errors(a @ b, a.double() @ b.double())}")
