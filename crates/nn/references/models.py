"""The models of the references, and the batch and optimizer each one is run with.

`mlp`, `lenet`, `cnn` and `gpt` are the reference jobs at their exact sizes; the others are torchvision's networks and
small recurrent and attention classifiers. Nothing here sets weights: `fill.py` does.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision


class Mlp(nn.Module):
    """784-512-512-10, ReLU."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(784, 512), nn.Linear(512, 512), nn.Linear(512, 10)

    def forward(self, x):
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class NumberVectors(nn.Module):
    """relu(x[j] * weight[j] + bias[j]) for each number j of a row."""

    def __init__(self, numbers, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numbers, width).uniform_(-(width**-0.5), width**-0.5))
        self.bias = nn.Parameter(torch.empty(numbers, width).uniform_(-(width**-0.5), width**-0.5))

    def forward(self, x):
        return F.relu(x[..., None] * self.weight + self.bias).flatten(1)


class TabularBlock(nn.Module):
    """Pre-norm residual block: linear, ReLU, linear."""

    def __init__(self, width, hidden):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class Tabular(nn.Module):
    """Rows of numbers, and of ids of categories and of the words of texts (ids, length) after them: vectors of all, two residual
    blocks, norm, ReLU, linear."""

    def __init__(self, numbers=16, categories=(), embed=8, width=128, hidden=256, layers=2, classes=10, texts=()):
        super().__init__()
        # fastai's rule.
        tables = [*categories, *(ids for ids, _ in texts)]
        vectors = [max(1, min(50, round(1.6 * ids**0.56))) for ids in tables]
        if numbers:
            self.numbers = NumberVectors(numbers, embed)
        for k, (ids, length) in enumerate(zip(categories, vectors)):
            setattr(self, f"embed{k + 1}", nn.Embedding(ids, length))
        for k, ((ids, _), length) in enumerate(zip(texts, vectors[len(categories) :])):
            # A text is the mean of its words' vectors; id 0 is no word.
            setattr(self, f"words{k + 1}", nn.EmbeddingBag(ids, length, mode="mean", padding_idx=0))
        self.n_numbers, self.n_categories, self.texts = numbers, len(categories), texts
        self.first = nn.Linear(numbers * embed + sum(vectors), width)
        self.blocks = nn.ModuleList(TabularBlock(width, hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        parts = [self.numbers(x[:, : self.n_numbers])] if self.n_numbers else []
        for k in range(self.n_categories):
            parts.append(getattr(self, f"embed{k + 1}")(x[:, self.n_numbers + k].long()))
        at = self.n_numbers + self.n_categories
        for k, (_, length) in enumerate(self.texts):
            parts.append(getattr(self, f"words{k + 1}")(x[:, at : at + length].long()))
            at += length
        x = self.first(torch.cat(parts, 1))
        for block in self.blocks:
            x = block(x)
        return self.head(F.relu(self.norm(x)))


class LeNet(nn.Module):
    """Two 5x5 convolutions and three linear layers on 3x32x32, tanh."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(torch.tanh(self.conv1(x)), 2)
        x = F.max_pool2d(torch.tanh(self.conv2(x)), 2).flatten(1)
        return self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))


class Cnn(nn.Module):
    """Six 3x3 conv + batch norm + ReLU blocks (64 64 | 128 128 | 256 256) on 3x32x32."""

    WIDTHS = [(3, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256)]

    def __init__(self):
        super().__init__()
        self.conv = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1, bias=False) for i, o in self.WIDTHS)
        self.norm = nn.ModuleList(nn.BatchNorm2d(o) for _, o in self.WIDTHS)
        self.head = nn.Linear(256, 10)

    def forward(self, x):
        for k, (conv, norm) in enumerate(zip(self.conv, self.norm)):
            x = F.relu(norm(conv(x)))
            if k in (1, 3):
                x = F.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """Pre-norm decoder block: causal attention, then a tanh-GELU pair of linears."""

    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(a)
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Decoder-only transformer: vocabulary 256, width 384, 6 heads, 6 layers, context 256."""

    def __init__(self, vocab=256, d=384, heads=6, layers=6, context=256):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(context, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x)).flatten(0, 1)


class Lstm(nn.Module):
    """Embedding, two LSTM layers, the last time step, linear."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.lstm = nn.LSTM(32, 48, num_layers=2, batch_first=True)
        self.head = nn.Linear(48, 5)

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0][:, -1])


class Gru(nn.Module):
    """The same with GRU layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.gru = nn.GRU(32, 48, num_layers=2, batch_first=True)
        self.head = nn.Linear(48, 5)

    def forward(self, ids):
        return self.head(self.gru(self.embed(ids))[0][:, -1])


class BiLstm(nn.Module):
    """Two LSTM layers in both directions; the mean over time of the 96 outputs, linear."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.lstm = nn.LSTM(32, 48, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(96, 5)

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0].mean(1))


class Encoder(nn.Module):
    """Two pre-norm encoder layers (width 64, 4 heads, hidden 128, erf-GELU), norm, mean over time, linear."""

    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(64, 64), nn.Embedding(32, 64)
        layer = nn.TransformerEncoderLayer(
            64, 4, dim_feedforward=128, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 5)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.encoder(x)).mean(1))


class Residual(nn.Sequential):
    """x + f(x)."""

    def forward(self, x):
        return x + super().forward(x)


class Positions(nn.Embedding):
    """Learnt positions, added."""

    def forward(self, x):
        return x + self.weight[: x.shape[1]]


class Causal(nn.TransformerEncoderLayer):
    """An encoder layer in which a position sees only itself and earlier ones."""

    def forward(self, x):
        return super().forward(x, src_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype))


class Outputs(nn.LSTM):
    """An LSTM without its last state."""

    def forward(self, x):
        return super().forward(x)[0]


class Attention(nn.MultiheadAttention):
    """Of a sequence with itself."""

    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class PerToken(nn.Sequential):
    """The rows of all tokens."""

    def forward(self, x):
        return super().forward(x).flatten(0, 1)


def layers_image():
    """A list of layers for images of 3x16x16."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        Residual(
            nn.Conv2d(8, 8, 3, padding=1, groups=2),
            nn.GroupNorm(4, 8),
            nn.SiLU(),
            nn.Conv2d(8, 8, (3, 1), padding=(2, 0), dilation=(2, 1)),
        ),
        nn.Tanh(),
        nn.ConvTranspose2d(8, 6, 2, stride=2),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * 8 * 8, 24),
        nn.LayerNorm(24),
        nn.GELU(),
        nn.Linear(24, 10),
    )


def layers_ids():
    """A list of layers for 12 ids out of 32, with a label for each."""
    return PerToken(
        nn.Embedding(32, 16),
        Positions(12, 16),
        Causal(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True),
        Outputs(16, 12, batch_first=True, bidirectional=True),
        nn.RMSNorm(24),
        Residual(Attention(24, 3, batch_first=True)),
        nn.Linear(24, 32),
    )


def alexnet():
    """torchvision's AlexNet with ten classes and dropout off."""
    model = torchvision.models.alexnet(num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def resnet(depth, stem):
    """torchvision's ResNet with ten classes; the `cifar` stem is a 3x3 convolution of stride 1 and no pool."""
    model = getattr(torchvision.models, f"resnet{depth}")(num_classes=10)
    if stem == "cifar":
        model.conv1 = nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


@dataclass
class Job:
    """One reference: how to build it, its batch, and its optimizer."""

    build: object
    input: tuple
    classes: int
    optimizer: str
    lr: float
    vocab: int = 0  # nonzero: the input is ids below it; zero: an image
    labels: int = 0  # zero: one label an example
    image: str = "input"  # the generator's name of the image
    ids: tuple = ()  # of rows of a table: how many ids each category has; they take the places of a row's last numbers
    losses_in: str = "float64"  # `float32` where twenty steps in float64 would take minutes

    def config(self):
        labels = self.labels or self.input[0]
        optimizer = {"kind": self.optimizer, "lr": self.lr}
        if self.optimizer == "sgd":
            optimizer["momentum"] = 0.9
        else:
            optimizer.update(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01 if self.optimizer == "adamw" else 0.0)
        return {
            "input": list(self.input),
            "input_name": "ids" if self.vocab else self.image,
            "vocab": self.vocab,
            "ids": list(self.ids),
            "classes": self.classes,
            "labels": labels,
            "optimizer": optimizer,
            "losses_in": self.losses_in,
        }

    def make_optimizer(self, params):
        if self.optimizer == "sgd":
            return torch.optim.SGD(params, lr=self.lr, momentum=0.9)
        if self.optimizer == "adamw":
            return torch.optim.AdamW(params, lr=self.lr)
        return torch.optim.Adam(params, lr=self.lr)


CATEGORIES = (40, 7)

JOBS = {
    "mlp": Job(Mlp, (16, 784), 10, "sgd", 0.01),
    "tabular": Job(Tabular, (16, 16), 10, "adamw", 1e-3),
    "tabular_mixed": Job(lambda: Tabular(5, CATEGORIES, 4, 32, 48, 3, 4), (24, 7), 4, "adamw", 1e-3, ids=CATEGORIES),
    "lenet": Job(LeNet, (8, 3, 32, 32), 10, "sgd", 0.01),
    "cnn": Job(Cnn, (4, 3, 32, 32), 10, "sgd", 0.001),
    "gpt": Job(Gpt, (2, 64), 256, "adamw", 3e-4, vocab=256, labels=128),
    "lstm": Job(Lstm, (4, 20), 5, "adam", 1e-3, vocab=64),
    "gru": Job(Gru, (4, 20), 5, "adam", 1e-3, vocab=64),
    "bilstm": Job(BiLstm, (4, 20), 5, "adam", 1e-3, vocab=64),
    "encoder": Job(Encoder, (4, 32), 5, "adamw", 3e-4, vocab=64),
    "layers_image": Job(layers_image, (4, 3, 16, 16), 10, "sgd", 0.01),
    "layers_ids": Job(layers_ids, (2, 12), 32, "adam", 1e-3, vocab=32, labels=24),
    "alexnet": Job(alexnet, (2, 3, 63, 63), 10, "sgd", 1e-4, losses_in="float32"),
}
# Images are named so that no unit sits within 2.5e-6 of a ReLU's or a max pool's edge; README.md tells why.
for depth, lr, batch, image, image_cifar in (
    (18, 3e-4, 4, "input", "input"),
    (34, 3e-4, 4, "input", "input"),
    (50, 1e-4, 2, "input.1", "input.2"),
    (101, 1e-4, 2, "input.1", "input.2"),
):
    JOBS[f"resnet{depth}"] = Job(lambda d=depth: resnet(d, "imagenet"), (batch, 3, 64, 64), 10, "sgd", lr, image=image, losses_in="float32")
    JOBS[f"resnet{depth}_cifar"] = Job(lambda d=depth: resnet(d, "cifar"), (batch, 3, 32, 32), 10, "sgd", lr, image=image_cifar, losses_in="float32")
