"""The update rules against numbers worked out by hand (Goyal section 3; LARS)."""
import copy

import pytest
import torch
from torch import nn

from refimpl.model import ResNet, initialise, undecayed
from refimpl.optimizer import Optimizer, lars_nnl, lars_tf


def scalar(w: float = 0.0) -> nn.Module:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, w)
    return model


def run(rates, start=0.0, gradient=1.0, **rule) -> list[float]:
    model = scalar(start)
    optimizer = Optimizer(model, weight_decay=0.0, **rule)
    weights = []
    for lr in rates:
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step(lr, 0.9)
        weights.append(model.weight.item())
    return weights


@pytest.mark.parametrize("rule,expected", [
    (dict(form="eq9"), [0.9, 0.52, -0.564]),
    (dict(form="eq10"), [0.9, 0.52, -0.564]),
    (dict(form="eq10", correction=False), [0.9, 0.61, -0.051])])
def test_momentum_forms_over_a_growing_rate_are_the_hand_values(rule, expected):
    assert run([0.1, 0.2, 0.4], start=1.0, **rule) == pytest.approx(expected, abs=1e-12)


def test_momentum_forms_over_a_falling_rate_are_the_reported_values():
    rates = [0.1] * 5 + [0.01] * 3
    assert run(rates, form="eq9")[-1] == pytest.approx(-1.470389489, abs=1e-9)
    assert run(rates, form="eq10")[-1] == pytest.approx(-1.470389489, abs=1e-9)
    assert run(rates, form="eq10", correction=False)[-1] == pytest.approx(-2.36930489, abs=1e-8)


@pytest.mark.parametrize("nesterov", [False, True])
def test_eq9_is_torch_sgd(nesterov):
    torch.manual_seed(0)
    ours = nn.Linear(500, 300)  # more than one piece of the update
    theirs = copy.deepcopy(ours)
    optimizer = Optimizer(ours, nesterov=nesterov, weight_decay=1e-2)
    reference = torch.optim.SGD(theirs.parameters(), 0.1, 0.9, weight_decay=1e-2,
                                nesterov=nesterov)
    for lr in (0.1, 0.3, 0.03):
        for p, q in zip(ours.parameters(), theirs.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        reference.param_groups[0]["lr"] = lr
        reference.step()
        optimizer.step(lr, 0.9)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(p, q)


def test_nesterov_in_the_absorbed_form_with_correction_is_eq9():
    rates = [0.1, 0.4, 0.4, 0.05]
    assert run(rates, form="eq10", nesterov=True) == pytest.approx(
        run(rates, form="eq9", nesterov=True), abs=1e-12)
    assert run(rates, form="eq10", nesterov=True, correction=False) != pytest.approx(
        run(rates, form="eq9", nesterov=True), abs=1e-3)


def test_correction_is_from_the_last_rate_that_was_used():
    """A step skipped for an overflow changes nothing; the next one corrects over both changes."""
    skipping = [0.1, 0.4]  # the 0.2 between them was skipped
    assert run(skipping, form="eq10") == pytest.approx(run(skipping, form="eq9"), abs=1e-12)


@pytest.mark.parametrize("rule", ["lars_nnl", "lars_tf"])
def test_lars_step_by_hand(rule):
    # |w| = 5, |g| = 1: local = 0.001 * 5 / (1 + 1e-4 * 5) = 0.005 / 1.0005, and g + 1e-4 w is
    # 1.0005 g because g is parallel to w: the step is 0.005 g = (0.003, 0.004) exactly
    model = nn.Linear(2, 1, bias=False).double()
    model.weight.data = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    model.weight.grad = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    optimizer = Optimizer(model, rule=rule, weight_decay=1e-4, coefficient=0.001, eps=0.0)
    optimizer.step(1.0, 0.0)
    assert model.weight.tolist()[0] == pytest.approx([3 - 0.003, 4 - 0.004], abs=1e-15)


@pytest.mark.parametrize("w,g,nnl,tf", [
    (0.0, 1.0, 1.0, 1.0),     # zero weight: plain rate, the layer can move
    (0.0, 0.0, 1.0, 1.0),
    (1.0, 0.0, 1e-3 / 1e-4, 1.0),  # NNL: c / beta, since beta |w| is not below eps
    (1e-9, 1e-9, 1.0, None)])
def test_lars_is_defined_at_zero_norms(w, g, nnl, tf):
    w, g = torch.tensor([w]), torch.tensor([g])
    assert lars_nnl(w, g, 1e-4, 1e-3, 1e-6).item() == pytest.approx(nnl, rel=1e-6)
    ratio = lars_tf(w, g, 1e-4, 1e-3, 1e-6).item()
    assert torch.isfinite(torch.tensor(ratio)) and (tf is None or ratio == tf)


def test_lars_norm_of_many_large_values_is_finite():
    w = torch.full((70_000,), 300.0)
    assert lars_nnl(w, w, 0.0, 1e-3, 1e-6).item() == pytest.approx(1e-3, rel=1e-6)


def test_resnet50_leaves_106_batch_norm_tensors_undecayed():
    model = ResNet()
    optimizer = Optimizer(model)
    free = {name for name, decay in optimizer.decay.items() if decay == 0.0}
    assert len(free) == 106 and free == undecayed(model)
    assert all(p.dim() == 1 for n, p in model.named_parameters() if n in free)
    assert "fc.bias" not in free and "layer1.0.downsample.1.weight" in free
    assert undecayed(model, decay_bias=False) - free == {"fc.bias"}


def test_lars_tf_skips_batch_norm_and_biases_and_nnl_skips_none():
    model = ResNet((1, 1), 8, 10, "small")
    tf, nnl = Optimizer(model, rule="lars_tf"), Optimizer(model, rule="lars_nnl")
    skipped = {n for n, _ in model.named_parameters()} - tf.adapted
    assert skipped == undecayed(model, decay_bias=False)
    assert nnl.adapted == {n for n, _ in model.named_parameters()}


def test_gamma_is_zero_in_the_last_batch_norm_of_each_block_only():
    model = initialise(ResNet(), seed=1)
    zero = [n for n, p in model.named_parameters() if p.dim() == 1 and "weight" in n
            and not p.any()]
    assert len(zero) == 16 and all(n.endswith("bn3.weight") for n in zero)
    assert model.fc.weight.std().item() == pytest.approx(0.01, rel=0.01)  # 2e6 draws
    assert not model.fc.bias.any()
    x = torch.rand(1, 64, 8, 8)  # not negative: ReLU leaves it
    assert torch.equal(model.eval().layer1[1](x.repeat(1, 4, 1, 1)), x.repeat(1, 4, 1, 1))


def test_remark_3_loss_over_kn_with_sum_is_loss_over_n_with_mean_and_cancelling_k_is_not():
    # k = 4 workers, per-worker mean gradients 1, 2, 3, 4; w = 10, decay 0.1, lr 0.5
    means = [1.0, 2.0, 3.0, 4.0]
    over_kn = sum(g / 4 for g in means)
    assert over_kn == sum(means) / 4 == 2.5
    right = 10 - 0.5 * (over_kn + 0.1 * 10)
    cancelled = 10 - 0.5 / 4 * (sum(means) + 0.1 * 10)  # loss / n, sum, lr not multiplied by k
    assert right == 8.25 and cancelled == 10 - 0.125 * 11
    model = scalar(10.0)
    model.weight.grad = torch.full_like(model.weight, over_kn)
    Optimizer(model, weight_decay=0.1).step(0.5, 0.9)
    assert model.weight.item() == right
