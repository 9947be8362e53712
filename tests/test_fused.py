"""The update on a GPU, by the kernels' host build behind a stand-in for CuPy, beside its slow twin."""
import copy
import sys

import pytest
import torch

from refimpl.fused import Fused
from refimpl.gradients import Gradients
from refimpl.model import ResNet, initialise
from refimpl.optimizer import Optimizer
from tests.test_kernels_launch import LAUNCHES, Array, cupy  # noqa: F401 (a fixture)

RULES = [dict(rule="sgd"), dict(rule="sgd", nesterov=True), dict(rule="sgd", form="eq10"),
         dict(rule="sgd", form="eq10", nesterov=True), dict(rule="lars_nnl"),
         dict(rule="lars_tf", nesterov=True), dict(rule="lars_nnl", decay_bias=False)]


def trained(model, fuse, rule):
    """Three steps with gradients of its own and a rate that changes; weights and momentum."""
    optimizer, gradients = Optimizer(model, **rule), Gradients(model)
    if fuse:
        Fused(optimizer, gradients.flat, as_array=lambda t: t.numpy().view(Array))
    torch.manual_seed(3)
    for lr in (0.1, 0.2, 0.05):
        for p in model.parameters():
            p.grad.copy_(torch.randn(p.shape) * 0.1)
        optimizer.step(lr, 0.9)
    return [*model.parameters(), *(optimizer.momentum[name] for name, _ in optimizer.parameters)]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: " ".join(map(str, rule.values())))
def test_the_fused_update_is_the_plain_one(cupy, monkeypatch, rule, layout):  # noqa: F811
    monkeypatch.setattr(Array, "__module__", "stand_in")
    monkeypatch.setitem(sys.modules, "stand_in", cupy)
    model = initialise(ResNet((1,), 4, 5, "small"), 1).to(memory_format=layout)
    plain = trained(copy.deepcopy(model), False, rule)
    fused = trained(model, True, rule)
    expected = ["update_float32"]
    if rule["rule"] != "sgd":
        expected = ["lars_norms_float32", f"lars_ratio_{rule['rule'][5:]}", *expected]
    assert [name for name, *_ in LAUNCHES] == 3 * expected
    for a, b in zip(fused, plain):  # each of a step's five operations rounds by half an ulp
        assert a.stride() == b.stride()
        assert (a - b).abs().max() <= 3 * 5 * 2**-24 * max(1, b.abs().max())
