"""Exact validation: every image once, integer counts, true division, for any ranks and batch size."""
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from refimpl.data.loader import UNCOUNTED, stream
from refimpl.data.order import share
from refimpl.gradients import as_array
from refimpl.model import batch_norms

LOSS_UNIT = 2.0**-20  # the loss is added as integers too, so that the order cannot matter
STATISTICS_UNIT = 2.0**-36  # recomputed statistics likewise
RECOMPUTE_SAMPLES = 8192  # of the training set, for batch_norm = "recomputed"


@dataclass(frozen=True)
class Result:
    """Over all `total` validation images: `correct` top-1 (an unreadable image counts as wrong), and
    the mean `loss` of those that could be read, without label smoothing, at most 1e6 each."""
    correct: int
    total: int
    loss: float

    @property
    def top1(self) -> float:
        return self.correct / self.total


@torch.no_grad()
def evaluate(run) -> Result:
    """Each rank scores its block of the validation images; one int64 sum joins the counts."""
    if run.settings.batch_norm == "recomputed":
        recompute_statistics(run)
    run.model.eval()
    counts = np.zeros(4, np.int64)  # correct, total, readable, loss in LOSS_UNIT
    total = len(run.val_images)
    mine = np.asarray(share(total, run.comm.size, run.comm.rank), np.int64)
    for images, labels in batches(run, run.val_images, mine, "val"):
        with run.autocast():
            logits = run.model(images)
        losses = nn.functional.cross_entropy(logits.float(), labels, reduction="none")
        units = (losses.double().clamp_(max=1e6) / LOSS_UNIT).round_()  # NaN counts as the clamp
        counts += [int((logits.argmax(1) == labels).sum()), len(labels),
                   int((labels != UNCOUNTED).sum()), int(torch.nan_to_num(units, nan=1e6 / LOSS_UNIT).sum())]
    run.model.train()
    run.count(counts)
    if counts[1] != total:
        raise RuntimeError(f"validation counted {counts[1]} of {total} images")
    return Result(int(counts[0]), total, float(counts[3]) * LOSS_UNIT / max(1, int(counts[2])))


def batches(run, index, ids: np.ndarray, view: str):
    """Normalised images and labels of `ids`, n at a time."""
    n = run.settings.n
    plan = ((0, ids[start:start + n]) for start in range(0, len(ids), n))
    for batch in stream(index, plan, view=view, **run.stream_settings()):
        run.log.replaced += batch.replaced
        yield run.normalise(batch.images), batch.labels.to(run.device)


def recompute_statistics(run) -> None:
    """Batch-norm statistics of the present weights (Goyal, section 5.2): the mean over worker
    minibatches of the training set, in its own order, seen as validation sees images."""
    n, modules = run.settings.n, batch_norms(run.model)
    count = max(1, min(RECOMPUTE_SAMPLES, len(run.train_images)) // n)  # minibatches, all ranks
    ids = run.order_of(0)[:count * n]
    kept = [module.momentum for module in modules]
    total = torch.zeros_like(run.gradients.running, dtype=torch.int64)
    mine = share(count, run.comm.size, run.comm.rank)
    for module in modules:
        module.momentum = 1.0
    for images, _ in batches(run, run.train_images, ids[mine.start * n:mine.stop * n], "val"):
        with run.autocast():
            run.model(images)
        total += (run.gradients.running.double() / STATISTICS_UNIT).round_().long()
    for module, momentum in zip(modules, kept):
        module.momentum = momentum
    run.count(as_array(total))
    run.gradients.common.copy_(total.double() * (STATISTICS_UNIT / count))
    run.gradients.running.copy_(run.gradients.common)
