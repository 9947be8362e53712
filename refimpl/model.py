"""ResNet with bottleneck blocks: the variant of Goyal et al. section 5.1 (stride 2 on the 3x3).

The state_dict has torchvision's key names. ResNet-50: 25,557,032 parameters in 161 tensors.
"""
from collections.abc import Sequence

import torch
from torch import Tensor, nn

EXPANSION = 4  # a block's output channels over its inner channels (He et al. 2016)
BatchNorm = nn.modules.batchnorm._BatchNorm  # the type by which batch norms are found


class Bottleneck(nn.Module):
    """1x1 - 3x3 - 1x1 with a shortcut; the stride sits on the 3x3 (Goyal, section 5.1)."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = inner * EXPANSION
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                                            nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn1(self.conv1(x)).relu_()
        x = self.bn2(self.conv2(x)).relu_()
        return (self.bn3(self.conv3(x)) + shortcut).relu_()


class ResNet(nn.Module):
    """Images [n, 3, H, W] -> logits [n, classes]; `depth` blocks per stage, (3, 4, 6, 3) is 50.

    `stem`: "imagenet" is 7x7/2 and a max pool; "small" is 3x3/2 alone, for images below 100 px.
    """

    def __init__(self, depth: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000,
                 stem: str = "imagenet") -> None:
        super().__init__()
        kernel = {"imagenet": 7, "small": 3}[stem]
        self.conv1 = nn.Conv2d(3, width, kernel, stride=2, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if stem == "imagenet" else nn.Identity()
        channels = width
        for stage, blocks in enumerate(depth):
            inner, layers = width << stage, []
            for block in range(blocks):
                layers.append(Bottleneck(channels, inner, 2 if stage and not block else 1))
                channels = inner * EXPANSION
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))
        self.stages = len(depth)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(x)).relu_())
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(x.mean((2, 3)))


def initialise(model: ResNet, seed: int, gamma_zero: bool = True) -> ResNet:
    """The papers' start (Goyal, section 5.1): He for convolutions, N(0, 0.01) for the classifier.

    `gamma_zero`: the last batch norm of each block starts at 0, so that every block is the
    identity (Table 2b compares both). He's fan is the output's, as in fb.resnet.torch: assumed.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():  # by type, never by name
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu",
                                    generator=generator)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.01, generator=generator)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
    if gamma_zero:
        for module in model.modules():
            if isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)
    return model


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Every batch norm of the model, found by type; ResNet-50 has 53."""
    return [m for m in model.modules() if isinstance(m, BatchNorm)]


def undecayed(model: nn.Module, decay_bias: bool = True) -> set[str]:
    """Names of the parameters without weight decay: gamma and beta of every batch norm (Goyal,
    section 5.1: 106 tensors in ResNet-50), and other biases where `decay_bias` is off."""
    return {name for prefix, module in model.named_modules()
            for name, w in module.named_parameters(prefix, recurse=False)
            if isinstance(module, BatchNorm) or w.ndim == 1 and not decay_bias}
