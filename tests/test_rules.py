"""Rules of the training step that one process can show, with values worked out by hand."""
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from refimpl.errors import Diverged
from refimpl.gradients import Gradients, plan_buckets
from refimpl.model import ResNet, initialise
from refimpl.optimizer import LossScale

MOMENT = SimpleNamespace(step=7, epoch=0.5, lr=0.1)


def test_label_smoothing_by_hand():
    # logits 2 1 0 -1 0.5, target 0, e = 0.1: target row 0.92 0.02 0.02 0.02 0.02 (e / C each)
    logits = [2.0, 1.0, 0.0, -1.0, 0.5]
    total = math.log(sum(math.exp(x) for x in logits))
    hand = -sum(w * (x - total) for w, x in zip([0.92, 0.02, 0.02, 0.02, 0.02], logits))
    assert hand == pytest.approx(0.72444, abs=5e-6)
    loss = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")
    assert loss(torch.tensor([logits]), torch.tensor([0])).item() == pytest.approx(hand, abs=1e-6)


def test_buckets_hold_neighbours_up_to_the_limit_and_the_tail_is_float32():
    plan = [(b.start, b.stop, b.wire) for b in plan_buckets([3, 4, 9, 1, 1], 8, 6, "float16")]
    assert plan == [(0, 7, "float16"), (7, 16, "float16"), (16, 18, "float16"), (18, 24, None)]


def one_step(gradients: Gradients, losses: list[float], kn: int = 4) -> dict[str, float]:
    gradients.clear(len(losses), kn)
    for i, loss in enumerate(losses):
        gradients.begin_worker(last=i == len(losses) - 1)
        for p in gradients.parameters:
            p.grad += loss
        gradients.end_worker(torch.tensor(loss) / kn, torch.tensor(1))
    return gradients.reduce(lambda array, wire, name: None)


@pytest.mark.parametrize("sum_", ["plain", "exact"])
def test_the_tail_tells_loss_top1_stop_and_overflow_of_all_workers(sum_):
    gradients = Gradients(initialise(ResNet((1,), 4, 3, "small"), 1), sum_=sum_)
    sums = one_step(gradients, [1.0, 2.0, 3.0])
    assert (sums["loss"], sums["correct"], sums["stop"], sums["overflow"]) == (1.5, 0.75, 0, 0)
    assert gradients.parameters[0].grad.unique().tolist() == [6.0]
    gradients.clear(1, 4, idle=True)  # this rank plays no worker: it adds nothing but its wish
    gradients.wish("stop")
    sums = gradients.reduce(lambda array, wire, name: None)
    assert list(sums.values()) == [0, 0, 0, 1, 0] and not gradients.flat[:-5].any()


@pytest.mark.parametrize("sum_,bad", [("plain", float("nan")), ("plain", float("inf")),
                                      ("exact", float("nan")), ("exact", 2.0**15)])
def test_a_value_that_is_not_finite_or_out_of_range_is_an_overflow(sum_, bad):
    gradients = Gradients(initialise(ResNet((1,), 4, 3, "small"), 1), sum_=sum_)
    sums = one_step(gradients, [1.0, bad])
    assert sums["overflow"] > 0 and (sum_ == "plain" or math.isnan(sums["loss"]))
    assert one_step(gradients, [1.0, 2.0])["overflow"] == 0  # and it leaves nothing behind


def test_exact_sums_are_exact_above_2_to_the_minus_25_and_blind_to_order():
    values = [1.0, 2.0**-24 * (1 + 2.0**-23), -1.0, 1000.5, -1000.5]
    results = set()
    for order in (values, values[::-1], values[2:] + values[:2]):
        gradients = Gradients(initialise(ResNet((1,), 4, 3, "small"), 1), sum_="exact")
        one_step(gradients, order)
        results.add(gradients.parameters[0].grad.flatten()[0].item())
    assert results == {2.0**-24 * (1 + 2.0**-23)}  # float32 in any order would lose it or its end


def test_grad_stays_a_view_of_the_flat_buffer_through_backward():
    for layout in (torch.contiguous_format, torch.channels_last):
        model = initialise(ResNet((1,), 4, 3, "small"), 1).to(memory_format=layout)
        gradients = Gradients(model)
        gradients.clear(1, 2)
        gradients.begin_worker()
        model(torch.randn(2, 3, 16, 16)).sum().backward()
        low = gradients.flat.data_ptr()
        for p in gradients.parameters:
            assert low <= p.grad.data_ptr() < low + 4 * len(gradients.flat)
            assert p.grad.stride() == p.stride()
        assert gradients.flat[:gradients.values].any()


def test_loss_scale_lifts_by_the_power_of_two_above_k_and_halves_on_overflow():
    scale = LossScale(0, 2176, True)
    assert scale.value == 4096 * 1024
    assert not scale.accept({"loss": 1.0, "overflow": 1.0}, MOMENT)
    assert scale.value == 4096 * 512
    assert scale.accept({"loss": 1.0, "overflow": 0.0}, MOMENT) and scale.good == 1
    assert LossScale(1.0, 1, False).value == 1.0
    assert LossScale(1.0, 2176, False).value == 1.0


def test_without_16_bits_an_overflow_is_the_end_with_a_cure():
    with pytest.raises(Diverged, match="step 7.*base-lr"):
        LossScale(1.0, 8, False).accept({"loss": float("nan"), "overflow": 1.0}, MOMENT)


def test_batch_norm_updates_are_the_mean_over_the_workers():
    model = initialise(ResNet((1,), 4, 3, "small"), 1)
    gradients = Gradients(model)
    gradients.clear(2, 8)
    images = torch.randn(2, 4, 3, 16, 16)
    each = []
    for i in range(2):
        gradients.begin_worker(last=i == 1)
        model(images[i])
        each.append(model.bn1.running_var.clone())
        gradients.end_worker(torch.tensor(0.0), torch.tensor(0))
    gradients.reduce(lambda array, wire, name: None)
    gradients.apply_statistics()
    assert each[0].ne(each[1]).any()
    # a mean of two float32 near 1, formed by three rounded operations
    assert (model.bn1.running_var - (each[0] + each[1]) / 2).abs().max() <= 3 * 2.0**-23
