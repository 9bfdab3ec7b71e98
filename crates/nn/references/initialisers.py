"""Prints how PyTorch fills new layers, measured beside the rule: `python initialisers.py`.

Nothing reads its output; the rules stand in README.md. A row whose measured bound or deviation is off its rule by more
than two parts in a hundred stops the script.
"""

from math import sqrt

import torch
import torch.nn as nn
import torchvision


def check(layer, name, value, law, size):
    """`law` is `uniform` (size: the bound), `normal` (size: the deviation) or `constant` (size: the value)."""
    value = value.detach().double()
    std = value.std().item()
    peak = value.abs().max().item()
    if law == "uniform":
        good = peak <= size * (1 + 1e-6) and abs(std * sqrt(3) / size - 1) < 0.02
    elif law == "normal":
        good = abs(std / size - 1) < 0.02 and peak > 3 * size
    else:
        good = bool((value == size).all())
    print(f"{layer:28} {name:24} {str(list(value.shape)):20} {law:9} {size:.6f}  measured max {peak:.6f} std {std:.6f}")
    assert good, f"{layer} {name} does not follow its rule"


def main():
    torch.manual_seed(1)
    linear = nn.Linear(300, 20000)
    check("Linear(300, 20000)", "weight", linear.weight, "uniform", 1 / sqrt(300))
    check("", "bias", linear.bias, "uniform", 1 / sqrt(300))
    conv = nn.Conv2d(32, 20000, 3, groups=4)
    check("Conv2d(32, 20000, 3, g=4)", "weight", conv.weight, "uniform", 1 / sqrt(32 // 4 * 9))
    check("", "bias", conv.bias, "uniform", 1 / sqrt(32 // 4 * 9))
    up = nn.ConvTranspose2d(300, 20000, 3)
    check("ConvTranspose2d(300, 20000)", "weight", up.weight, "uniform", 1 / sqrt(20000 * 9))
    check("", "bias", up.bias, "uniform", 1 / sqrt(20000 * 9))
    embedding = nn.Embedding(1000, 300, padding_idx=3)
    check("Embedding(1000, 300, pad 3)", "weight", embedding.weight[4:], "normal", 1.0)
    check("", "weight[padding_idx]", embedding.weight[3], "constant", 0.0)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        recurrent = kind(300, 4000, num_layers=1)
        for name, value in recurrent.named_parameters():
            check(f"{kind.__name__}(300, 4000)", name, value, "uniform", 1 / sqrt(4000))
    heads = nn.MultiheadAttention(512, 8)
    check("MultiheadAttention(512, 8)", "in_proj_weight", heads.in_proj_weight, "uniform", sqrt(6 / (512 + 3 * 512)))
    check("", "in_proj_bias", heads.in_proj_bias, "constant", 0.0)
    check("", "out_proj.weight", heads.out_proj.weight, "uniform", 1 / sqrt(512))
    check("", "out_proj.bias", heads.out_proj.bias, "constant", 0.0)
    for norm in (nn.LayerNorm(64), nn.GroupNorm(4, 64), nn.BatchNorm2d(64)):
        check(type(norm).__name__, "weight", norm.weight, "constant", 1.0)
        check("", "bias", norm.bias, "constant", 0.0)
    layer = nn.TransformerEncoderLayer(512, 8, 20000)
    check("TransformerEncoderLayer", "linear1.weight", layer.linear1.weight, "uniform", 1 / sqrt(512))
    check("", "linear1.bias", layer.linear1.bias, "uniform", 1 / sqrt(512))
    check("", "linear2.weight", layer.linear2.weight, "uniform", 1 / sqrt(20000))
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers
    assert torch.equal(stack[0].linear1.weight, stack[1].linear1.weight), "the layers are copies of one"
    resnet = torchvision.models.resnet50()
    for name in ("conv1", "layer1.0.conv2", "layer3.0.conv3", "layer4.0.downsample.0"):
        w = resnet.get_submodule(name).weight
        check("torchvision resnet50", name, w, "normal", sqrt(2 / (w.shape[0] * w.shape[2] * w.shape[3])))
    check("", "layer1.0.bn3.weight", resnet.layer1[0].bn3.weight, "constant", 1.0)
    check("", "bn1.bias", resnet.bn1.bias, "constant", 0.0)
    check("", "fc.weight", resnet.fc.weight, "uniform", 1 / sqrt(2048))
    alexnet = torchvision.models.alexnet()
    check("torchvision alexnet", "features.3.weight", alexnet.features[3].weight, "uniform", 1 / sqrt(64 * 25))
    check("", "classifier.4.weight", alexnet.classifier[4].weight, "uniform", 1 / sqrt(4096))


if __name__ == "__main__":
    main()
