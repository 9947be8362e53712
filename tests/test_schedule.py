"""Expected numbers are written by hand from the papers (Goyal sections 2.2, 5.1, 5.3, table 2a)."""
import dataclasses

import pytest

from refimpl.config import parse
from refimpl.errors import UsageError
from refimpl.schedule import Schedule, noise_scale

IMAGENET = 1_281_167
near = lambda value: pytest.approx(value, rel=1e-12, abs=0)  # noqa: E731  a few float64 roundings


def schedule(*argv, images=IMAGENET) -> Schedule:
    return Schedule(parse([*argv])[0], images)


def plain(k, n, *more, images=IMAGENET):
    return schedule("--recipe", "goyal_256", "--workers", str(k), "--n", str(n), *more, images=images)


@pytest.mark.parametrize("kn, steps, rate", [
    (256, 5004, 0.1), (512, 2502, 0.2), (1024, 1251, 0.4), (2048, 625, 0.8), (4096, 312, 1.6),
    (8192, 156, 3.2), (11264, 113, 4.4), (16384, 78, 6.4), (32768, 39, 12.8), (34816, 36, 13.6),
    (55296, 23, 21.6), (65536, 19, 25.6), (69632, 18, 27.2), (121856, 10, 47.6), (139264, 9, 54.4)])
def test_steps_per_epoch_and_reference_rate(kn, steps, rate):
    stage, = plain(kn // 32, 32, "--epochs", "2").stages
    assert (stage.kn, stage.steps_per_epoch, stage.until_step) == (kn, steps, 2 * steps)
    assert stage.reference_lr == near(rate)


@pytest.mark.parametrize("workers, n", [(256, 32), (8192, 1), (1, 8192), (64, 128)])
def test_the_rate_follows_kn_and_nothing_else(workers, n):
    assert plain(workers, n).at(0).lr == near(3.2)


def test_gradual_warmup_starts_at_a_tenth_and_rises_by_the_same_amount_each_step():
    s = schedule("--recipe", "goyal_8k")
    rates = [s.at(step).lr for step in range(782)]
    assert rates[0] == 0.1 and rates[780] == rates[781] == 3.2
    assert [rates[e * 156] for e in range(6)] == near([0.1, 0.72, 1.34, 1.96, 2.58, 3.2])
    increments = [b - a for a, b in zip(rates[:780], rates[1:781], strict=True)]
    assert increments == pytest.approx([0.0039743590] * 780, abs=1e-9)  # (3.2 - 0.1) / 780


def test_constant_and_no_warmup():
    constant, none = schedule("--recipe", "goyal_8k_warmup_constant"), schedule(
        "--recipe", "goyal_8k_warmup_none")
    assert [constant.at(t).lr for t in (0, 779, 780)] == near([0.1, 0.1, 3.2])
    assert [none.at(t).lr for t in (0, 779, 780)] == near([3.2, 3.2, 3.2])


@pytest.mark.parametrize("recipe, steps, rate", [
    ("goyal_256", 5004, 0.1), ("goyal_8k", 156, 3.2), ("goyal_8k_warmup_none", 156, 3.2),
    ("goyal_64k", 19, 25.6), ("goyal_8k_lr_half", 156, 1.6), ("goyal_8k_lr_double", 156, 6.4),
    ("goyal_8k_lr_fixed", 156, 0.1), ("goyal_8k_lr_sqrt", 156, 0.1 * 32 ** 0.5)])
def test_step_decay_at_epochs_30_60_80_counted_from_the_start(recipe, steps, rate):
    s = schedule("--recipe", recipe)
    for epoch, factor in ((29, 1), (30, 0.1), (59, 0.1), (60, 0.01), (79, 0.01), (80, 0.001)):
        first = s.first_step(epoch)
        assert first == epoch * steps and s.at(first).epoch_index == epoch
        assert s.at(first).lr == s.at(first + steps - 1).lr == near(rate * factor)
    assert s.total_steps == 90 * steps and s.at(s.total_steps - 1).last_of_epoch


def test_polynomial_decay():
    s = plain(8, 32, "--decay", "polynomial", "--end-lr", "0.02", "--decay-power", "2")
    assert s.at(0).lr == near(0.1)
    assert s.at(45 * 5004).lr == near(0.02 + 0.08 / 4)
    assert s.at(60 * 5004).lr == near(0.02 + 0.08 / 9)


def test_the_ramp_meets_polynomial_decay_without_a_jump():
    s = plain(256, 32, "--decay", "polynomial", "--warmup", "gradual")
    assert s.at(780).lr == near(3.2 * (85 / 90) ** 2)
    assert abs(s.at(780).lr - s.at(779).lr) < 0.0041 and abs(s.at(781).lr - s.at(780).lr) < 0.0041


def test_a_ramp_never_goes_down():
    s = plain(4, 32, "--warmup", "gradual")
    assert {s.at(t).lr for t in range(0, 60_000, 997)} == {0.05}


def test_bands_change_minibatch_and_steps_and_the_rate_follows_the_rule():
    s = schedule("--recipe", "goyal_8k", "--bands", "5:256x32 90:512x32")
    a, b = s.stages
    assert (a.kn, a.steps_per_epoch, a.until_step) == (8192, 156, 780)
    assert (b.kn, b.steps_per_epoch, b.until_step) == (16384, 78, 780 + 85 * 78)
    assert s.at(779).lr == near(3.2 - 3.1 / 780) and s.at(780).lr == near(6.4)
    assert (s.at(780).workers, s.at(780).position) == (512, 0)
    assert s.at(780 + 25 * 78).lr == near(0.64)  # epoch 30
    fixed = schedule("--recipe", "goyal_8k", "--bands", "5:256x32:lr=3.2 90:512x32:lr=3.2")
    assert fixed.at(780).lr == near(3.2)


def test_mikami_v1_has_five_epochs_of_34816_then_69632():
    s = schedule("--recipe", "mikami_v1_224s")
    assert [s.at(t).kn for t in (0, 179, 180, 1709)] == [34816, 34816, 69632, 69632]
    assert s.total_steps == 5 * 36 + 85 * 18 == 1710
    assert schedule("--recipe", "mikami_v2_122s").total_steps == 90 * 23


@pytest.mark.parametrize("size, momentum", [(512, 0.95), (1024, 0.975), (256, 0.9)])
def test_noise_scale_rule_at_equal_rate(size, momentum):
    s = plain(256, 32, "--bands", f"5:256x32 90:{size}x32", "--momentum-rule", "noise_scale",
              "--lr-rule", "fixed")
    assert s.stages[1].momentum == near(momentum)
    scales = [noise_scale(g.reference_lr, IMAGENET, g.kn, g.momentum) for g in s.stages]
    assert scales[0] == near(scales[1])


def test_noise_scale_keeps_momentum_where_the_rate_is_scaled_too():
    s = plain(256, 32, "--bands", "5:256x32 90:512x32", "--momentum-rule", "noise_scale")
    assert s.stages[1].momentum == near(0.9)


def test_noise_scale_that_no_momentum_can_keep_is_refused():
    with pytest.raises(UsageError, match="needs momentum -0.6 .*m="):
        plain(256, 32, "--bands", "5:256x32 90:16x32", "--momentum-rule", "noise_scale",
              "--lr-rule", "fixed")


def test_a_bands_own_momentum_counts():
    assert [g.momentum for g in plain(8, 32, "--bands", "5:8x32:m=0.8 90:8x32").stages] == [0.8, 0.9]


def test_every_step_knows_its_place():
    s = schedule("--bands", "2:12x4 4:6x16 7:12x3", "--epochs", "7", "--warmup-epochs", "3",
                 "--decay-epochs", "4,6", images=1000)
    assert s.total_steps == 2 * 20 + 2 * 10 + 3 * 27
    epoch = position = 0
    for step in range(s.total_steps):
        m = s.at(step)
        assert (m.step, m.epoch_index, m.position) == (step, epoch, position)
        assert m.position + m.kn <= 1000 and int(m.epoch) == epoch
        position += m.kn
        if m.last_of_epoch:
            assert 1000 - position < m.kn  # only an incomplete minibatch is dropped
            epoch, position = epoch + 1, 0
    assert epoch == 7


def test_a_resumed_schedule_is_the_unbroken_one():
    argv = ("--recipe", "goyal_8k", "--epochs", "40")
    whole = schedule(*argv, images=20_000)
    assert [schedule(*argv, images=20_000).at(t) for t in range(whole.total_steps)] == [
        whole.at(t) for t in range(whole.total_steps)]
    assert dataclasses.asdict(whole.at(59)) == dataclasses.asdict(schedule(*argv, images=20_000).at(59))


def test_max_steps_cuts_the_run_but_not_the_schedule():
    short, whole = schedule("--recipe", "goyal_8k", "--max-steps", "7"), schedule("--recipe", "goyal_8k")
    assert short.total_steps == 7 and [short.at(t) for t in range(7)] == [whole.at(t) for t in range(7)]


def test_a_minibatch_larger_than_the_data_is_refused():
    with pytest.raises(UsageError, match="12 x 8 = 96 exceeds the 95 .*lower --workers"):
        schedule("--workers", "12", "--n", "8", images=95)
    assert schedule("--workers", "12", "--n", "8", images=96).stages[0].steps_per_epoch == 1
