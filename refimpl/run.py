"""What a run is made of: data, model, flat gradients, allreduce, log; and what happens between steps."""
import contextlib
import functools
import hashlib
import time

import numpy as np
import torch
from torch import nn

from refimpl import checkpoint, choice, config, device, evaluate
from refimpl.collective import allreducer, guard
from refimpl.data.index import open_index
from refimpl.data.loader import stream
from refimpl.data.order import epoch_order, minibatch, share
from refimpl.errors import Diverged, UsageError
from refimpl.fused import Fused
from refimpl.gradients import Gradients, shared
from refimpl.model import ResNet, batch_norms, initialise
from refimpl.optimizer import LossScale, Optimizer
from refimpl.overlap import Overlap
from refimpl.ranks import StopSignal, everywhere
from refimpl.runlog import RunLog
from refimpl.schedule import Moment, Schedule
from refimpl.state import State
from refimpl.timeline import STEPS, Timeline

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
STOPPED = 75  # EX_TEMPFAIL: a batch script may requeue


class Run:
    """Everything one rank holds. Built alike on all ranks, or UsageError on all of them."""

    def __init__(self, settings: config.Settings, comm, stop: StopSignal | None = None) -> None:
        self.settings, self.comm, self.stop_signal = settings, comm, stop or StopSignal()
        guard.agree(comm, settings=config.command(settings), code=device.code_digest())
        self._check_ranks()
        everywhere(comm, lambda: device.check_device(settings))
        self.device = device.choose_device(settings, comm)
        self.threads = device.set_threads(settings, comm)
        self._open_data()
        self.schedule = Schedule(settings, len(self.train_images))
        self.timeline = None
        self._build_network()
        self._build_step()
        self.step, self.saved = 0, time.monotonic()
        self.batches, self.order, self.told = None, (None, None), set()
        resumed = checkpoint.resume(self) if settings.resume else None
        self.first_step = self.step
        self.log = everywhere(comm, lambda: RunLog(self, resumed))

    # --- building ---------------------------------------------------------------------------

    def _check_ranks(self) -> None:
        most = max(band.workers for band in self.settings.in_bands())
        if self.comm.size > most:
            raise UsageError(f"{self.comm.size} ranks for {most} workers: start at most {most} "
                             "ranks, or choose a recipe with more --workers")

    def _open_data(self) -> None:
        source = self.settings.source

        def both():
            cache = self.settings.cache or None
            train = open_index(source, "train", cache=cache)
            return train, open_index(source, "val", classes=train.classes, cache=cache)
        self.train_images, self.val_images = everywhere(self.comm, both)
        guard.agree(self.comm, train=self.train_images.digest, val=self.val_images.digest)
        self.classes = self.settings.classes or len(self.train_images.classes)
        if not self.settings.data and self.classes > len(self.train_images.classes):
            raise UsageError(f"recipe {self.settings.recipe} is for {self.classes} classes, the embedded "
                             f"sample has {len(self.train_images.classes)}: give its images by --data")
        if len(self.train_images.classes) < 2:
            raise UsageError(f"{source}: the training images have one class only: nothing to learn")
        if self.classes < len(self.train_images.classes):
            raise UsageError(f"--classes {self.classes}, but the data has "
                             f"{len(self.train_images.classes)}: leave it out")

    def _build_network(self) -> None:
        s = self.settings
        side = -(-s.image_size // ((4 if s.stem == "imagenet" else 2) << len(s.depth) - 1))
        if s.n == 1 and side == 1:
            raise UsageError(f"--n 1 with --image-size {s.image_size}: the last stage sees one value per "
                             "channel, which batch norm cannot normalise; raise either")
        model = ResNet(s.depth, s.width, self.classes, s.stem)
        model = initialise(model, s.seed, s.gamma_zero).to(self.device)
        self.layout = torch.channels_last if s.channels_last else torch.contiguous_format
        self.model = model.to(memory_format=self.layout)
        self.normalise = device.normaliser(self.device, self.layout)
        if s.batch_norm == "last":  # no moving average: the last minibatch's statistics alone
            for module in batch_norms(self.model):
                module.momentum = 1.0

    def _build_step(self) -> None:
        """Gradients, their sum, the update."""
        s = self.settings
        grid = None if s.grid == "auto" else config.GRID(s.grid)
        # where adding and computing share the same cores, nothing can hide behind anything
        one_cpu_node = device.one_node(self.comm) and self.device.type == "cpu"
        bucket = s.bucket_mb * 1e6 or choice.bucket_bytes(self.comm.size)
        name = s.allreduce if s.allreduce != "auto" else "torus" if grid else choice.algorithm(
            self.comm.size, bucket, one_cpu_node)
        across = {"across": s.across} if name == "hierarchical" else {}
        self.allreduce = allreducer(name, self.comm, grid, check="first", **across)
        wire = None if s.wire == "none" else s.wire
        self.gradients = Gradients(self.model, max(1, int(bucket / 4)), wire, s.sum,
                                   shared(self.allreduce) if self.device.type == "cpu" else None)
        behind = not s.state and (s.overlap == "on" or s.overlap == "auto" and not one_cpu_node)
        allreduce = self.allreduce
        if s.timeline:
            self.timeline = Timeline(self.comm, s.timeline)
            allreduce = self.timeline.watched(allreduce, int(behind))
        self.reduce = (Overlap(self.gradients, allreduce).reduce if behind else
                       functools.partial(self.gradients.reduce, allreduce))
        self.state = State(self, s.state) if s.state else None
        self.count = allreducer("ring", self.comm)  # for the integers of validation
        self.optimizer = Optimizer(
            self.model, s.optimizer, s.momentum_form, s.momentum_correction, s.nesterov,
            s.weight_decay, s.decay_bias, s.lars_coefficient, s.lars_eps)
        if self.device.type == "cuda":
            Fused(self.optimizer, self.gradients.flat)
        self.scale = LossScale(s.loss_scale, max(b.workers for b in s.in_bands()),
                               s.precision == "fp16" or wire == "float16")
        self.loss = nn.CrossEntropyLoss(label_smoothing=s.label_smoothing, reduction="sum")

    # --- during a step ----------------------------------------------------------------------

    def workers(self, moment: Moment) -> range:
        """The workers this rank plays: blocks cut as chunks are, sizes differ by at most one."""
        return share(moment.workers, self.comm.size, self.comm.rank)

    def autocast(self):
        dtype = DTYPES[self.settings.precision]
        return contextlib.nullcontext() if dtype is None else torch.autocast(
            self.device.type, dtype)

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next worker's images, normalised, [n, 3, H, W], and labels [n]."""
        if self.batches is None:
            self.batches = stream(self.train_images, self._plan(), view="train",
                                  **self.stream_settings())
        with self.clock("waiting for data"):
            batch = next(self.batches)
        self.log.replaced += batch.replaced
        images = self.normalise(batch.images)
        if self.state:
            self.state.images.append(images.cpu())
            self.state.labels.append(batch.labels)
        return images, batch.labels.to(self.device, non_blocking=True)

    def stream_settings(self) -> dict:
        s = self.settings
        return dict(size=s.image_size, short_side=s.val_short_side, seed=s.seed,
                    processes=device.loader_processes(s, self.threads, self.device),
                    room=max(s.n, *(band.n for band in s.in_bands())),
                    bad_images=s.bad_images, jitter=s.color_jitter, lighting=s.lighting,
                    told=self.told)

    def _plan(self):
        """(epoch, sample ids) of every worker batch this rank still has to play, in order."""
        for step in range(self.first_step, self.schedule.total_steps):
            moment = self.schedule.at(step)
            order = self.order_of(moment.epoch_index)
            for worker in self.workers(moment):
                yield moment.epoch_index, minibatch(order, moment.position, moment.workers,
                                                    moment.n, worker)

    def order_of(self, epoch: int) -> np.ndarray:
        if self.order[0] != epoch:
            self.order = epoch, epoch_order(self.settings.seed, epoch, len(self.train_images))
        return self.order[1]

    def wishes(self) -> list[str]:
        """What this rank asks of all: a checkpoint when its time has come, a stop on a signal."""
        minutes = self.settings.save_minutes
        due = self.comm.rank == 0 and minutes and time.monotonic() - self.saved > 60 * minutes
        return ["save"] * bool(due) + ["stop"] * self.stop_signal.asked

    @contextlib.contextmanager
    def clock(self, what: str):
        """Seconds spent inside join the epoch's line, and the timeline if there is one."""
        start = time.monotonic()
        yield
        self.log.add_seconds(what, time.monotonic() - start)
        if self.timeline:
            self.timeline.span(what, start)

    def trace_line(self, moment: Moment, sums: dict[str, float]) -> dict:
        """One step for `oracle diff`: numbers in hex, SHA-256 over tensors in the model's order."""
        ids = self.order_of(moment.epoch_index)[moment.position:moment.position + moment.kn]
        parameters = list(self.model.parameters())
        return {"step": moment.step, "epoch": moment.epoch, "lr": moment.lr.hex(),
                "loss": sums["loss"].hex(), "samples": hashlib.sha256(ids).hexdigest(),
                "gradient": checkpoint.sha256(p.grad for p in parameters),
                "weights": checkpoint.sha256(parameters), "n": moment.n, "batch_norm": 1,
                "statistics": checkpoint.sha256([self.gradients.common])}

    # --- between steps ----------------------------------------------------------------------

    def after_step(self, moment: Moment, sums: dict[str, float]) -> None:
        s = self.settings
        self.step = moment.step + 1
        self.log.record(moment, sums)
        if self.state:
            self.state.write(moment, sums)
        if self.timeline and self.step == min(self.first_step + STEPS, self.schedule.total_steps):
            self.timeline.write()
        ends = moment.last_of_epoch or self.step == self.schedule.total_steps
        first = self.step == self.first_step + 1
        if ends or first or (s.check_every and self.step % s.check_every == 0):
            guard.agree(self.comm, weights=checkpoint.digest(self))
        due = s.check_every and (self.step + 1) % s.check_every == 0  # the next step's calls too
        self.allreduce.check = "always" if due else "first"
        if ends:
            self._end_of_epoch(moment)
        elif sums["save"] or s.save_steps and self.step % s.save_steps == 0:
            self.save()

    def _end_of_epoch(self, moment: Moment) -> None:
        s, done = self.settings, self.step == self.schedule.total_steps
        result = None
        if done or (s.eval_every and (moment.epoch_index + 1) % s.eval_every == 0):
            with self.clock("validation"):
                result = evaluate.evaluate(self)
        self.log.epoch(moment, result)
        if done or (s.save_every and (moment.epoch_index + 1) % s.save_every == 0):
            self.save()

    def save(self) -> None:
        """A checkpoint, of finite numbers only: the last good one is not given up for others."""
        ends = [torch.stack(torch.aminmax(t)) for t in checkpoint.tensors(self).values()]
        if not torch.isfinite(torch.stack(ends)).all():
            raise Diverged(f"after step {self.step} the weights are not finite: lower --base-lr or "
                           "lengthen --warmup-epochs; the last checkpoint was kept")
        checkpoint.save(self)
        self.saved = time.monotonic()

    def stop(self) -> int:
        """Asked to stop: everything is saved; the same command with --resume auto goes on."""
        self.save()
        self.log.close(f"stopped on request after step {self.step}; the same command with --resume "
                       "auto goes on")
        return STOPPED

    def finish(self) -> int:
        if self.scale.skipped and not self.scale.accepted:
            raise Diverged(f"all {self.scale.skipped} steps were skipped for an overflow in 16 bits, "
                           "nothing was learned: lower --loss-scale, or 0 for automatic")
        nothing = self.first_step >= self.schedule.total_steps
        self.log.close(f"nothing to do: this run has already made its {self.first_step} steps"
                       if nothing else "")
        return 0
