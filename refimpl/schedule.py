"""Step -> learning rate, minibatch, momentum: pure functions of the settings and the image count.

    epoch    0    1    2    3    4    5   ...   30   ...      a band: epochs with one kn
    rate     |__/ warm-up, per step /|~~~ reference ~~~|_ decayed _|      (Goyal 2.2, 5.1)

Nothing here remembers a previous step, so a resumed run cannot differ from an unbroken one.
"""
import bisect
import math
from dataclasses import dataclass

from refimpl.settings import Band, Settings
from refimpl.errors import UsageError


@dataclass(frozen=True)
class Moment:
    """What holds at one step. `position`: samples of this epoch's permutation used before it."""
    step: int
    epoch: float
    epoch_index: int
    step_in_epoch: int
    steps_per_epoch: int
    position: int
    workers: int
    n: int
    kn: int
    lr: float
    momentum: float

    @property
    def last_of_epoch(self) -> bool:
        return self.step_in_epoch + 1 == self.steps_per_epoch


@dataclass(frozen=True)
class Stage:
    """A band laid out in steps; the last incomplete minibatch of an epoch is dropped."""
    first_epoch: int
    until_epoch: int
    first_step: int
    steps_per_epoch: int
    workers: int
    n: int
    kn: int
    reference_lr: float
    momentum: float

    @property
    def until_step(self) -> int:
        return self.first_step + (self.until_epoch - self.first_epoch) * self.steps_per_epoch


def reference_lr(s: Settings, band: Band) -> float:
    """Rate of a band after warm-up, before decay: 0.1 kn / 256 in Goyal 2.1 and 5.1."""
    if band.lr is not None:
        return band.lr
    if s.lr_rule == "fixed":
        return s.base_lr
    if s.lr_rule == "sqrt":
        return s.base_lr * math.sqrt(band.kn / s.lr_batch)  # Goyal table 2a
    return s.base_lr * band.kn / s.lr_batch


def noise_scale(lr: float, images: int, kn: int, momentum: float) -> float:
    """lr N / (kn (1 - m)), the scale of gradient noise of Smith et al. that Mikami refers to."""
    return lr * images / (kn * (1 - momentum))


def momentum_of(s: Settings, band: Band) -> float:
    """The band's own; or the recipe's; or the one that keeps the first band's noise scale."""
    if band.momentum is not None:
        return band.momentum
    first = s.in_bands()[0]
    if s.momentum_rule == "constant" or band == first:
        return s.momentum
    start, rate = 1 - momentum_of(s, first), reference_lr(s, first)
    momentum = 1 - start * (reference_lr(s, band) / rate) * (first.kn / band.kn) if rate else 1
    if not 0 <= momentum < 1:
        raise UsageError(f"--momentum-rule noise_scale needs momentum {momentum:g} for the band "
                         f"{band}: give that band m=..., or change its minibatch or rate")
    return momentum


def decayed(s: Settings, reference: float, epoch: float) -> float:
    """Step decay counts whole epochs from 0, warm-up included (Goyal 5.1); polynomial decay too."""
    if s.decay == "step":
        return reference * s.decay_factor ** sum(epoch >= e for e in s.decay_epochs)
    if s.decay == "polynomial":
        return s.end_lr + (reference - s.end_lr) * (1 - epoch / s.epochs) ** s.decay_power
    return reference


def learning_rate(s: Settings, reference: float, epoch: float) -> float:
    """Gradual: from warmup_lr at the first step, by equal amounts per step, onto the decay curve
    at warmup_epochs; never downwards (Goyal 2.2, 5.3). Constant: warmup_lr, then a jump."""
    if s.warmup == "none" or epoch >= s.warmup_epochs:
        return decayed(s, reference, epoch)
    goal = decayed(s, reference, s.warmup_epochs)
    start = min(s.warmup_lr, goal)
    return start if s.warmup == "constant" else start + (goal - start) * (epoch / s.warmup_epochs)


class Schedule:
    """All steps of a run over `images` training images; UsageError where a minibatch exceeds them.

    stages: the bands in steps. total_steps: of the whole run, or max_steps if that is less.
    """

    def __init__(self, s: Settings, images: int):
        self.settings, self.images, self.stages = s, images, []
        epoch = step = 0
        for band in s.in_bands():
            if band.kn > images:
                raise UsageError(f"minibatch {band.workers} x {band.n} = {band.kn} exceeds the "
                                 f"{images} training images: lower --workers, --n or --bands")
            self.stages.append(Stage(epoch, band.until_epoch, step, images // band.kn, band.workers,
                                     band.n, band.kn, reference_lr(s, band), momentum_of(s, band)))
            epoch, step = band.until_epoch, self.stages[-1].until_step
        self.total_steps = min(step, s.max_steps or step)
        self._starts = [stage.first_step for stage in self.stages]

    def _place(self, step: int) -> tuple[Stage, int, int]:
        stage = self.stages[bisect.bisect_right(self._starts, step) - 1]
        epochs, within = divmod(step - stage.first_step, stage.steps_per_epoch)
        return stage, stage.first_epoch + epochs, within

    def lr(self, step: int) -> float:
        stage, epoch, within = self._place(step)
        return learning_rate(self.settings, stage.reference_lr,
                             epoch + within / stage.steps_per_epoch)

    def at(self, step: int) -> Moment:
        """The moment of a step from 0 to the end of the run."""
        stage, epoch, within = self._place(step)
        return Moment(step, epoch + within / stage.steps_per_epoch, epoch, within,
                      stage.steps_per_epoch, within * stage.kn, stage.workers, stage.n, stage.kn,
                      self.lr(step), stage.momentum)

    def first_step(self, epoch: int) -> int:
        """The step an epoch starts with."""
        stage = next(s for s in self.stages if epoch < s.until_epoch)
        return stage.first_step + (epoch - stage.first_epoch) * stage.steps_per_epoch
