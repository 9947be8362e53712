"""A trainer of someone else: plain PyTorch DistributedDataParallel over Gloo, and what goes wrong.

    python -m tests.ddp_trainer DATA.zip FOLDER [FAULT ...]

writes FOLDER/FAULT.RANK.jsonl, a trace of every rank, and FOLDER/FAULT.npz, the first step whole
(not for never_averaged). Model, sample order and augmentation are this project's, so that nothing
but the training can differ; gradients, their mean and the update are PyTorch's.
"""
import contextlib
import datetime
import hashlib
import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from refimpl.data.images import draws, train_view
from refimpl.data.index import open_index
from refimpl.data.loader import normalise
from refimpl.data.order import epoch_order
from refimpl.model import ResNet, batch_norms, initialise

SIZE, SEED, STEPS, RANKS = 24, 1, 6, 2
MOMENTUM = 0.9
# fault: (samples per batch-norm batch, how many such batches each rank has)
FAULTS = {
    "right": (4, (1, 1)),
    "never_averaged": (4, (1, 1)),       # the model was not wrapped, or its module was called
    "no_set_epoch": (4, (1, 1)),         # every epoch in the order of the first
    "decays_batch_norm": (4, (1, 1)),    # one parameter group for all
    "unequal": (2, (3, 1)),              # 6 + 2 samples, right: the loss is divided by all 8
    "mean_of_unequal": (2, (3, 1))}      # each rank divides by its own, then the ranks are averaged


def learning_rate(epoch: float, kn: int) -> float:
    """From 0.01 to 0.8 kn/256 in two epochs (Goyal et al., section 2.2)."""
    return 0.01 + (0.8 * kn / 256 - 0.01) * min(epoch / 2, 1)


def digest(some) -> str:
    """SHA-256 over the bytes of tensors in the model's order."""
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in some)).hexdigest()


def batch(index, epoch: int, ids) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = np.stack([train_view(index.read(i), SIZE, draws(SEED, epoch, int(i))) for i in ids])
    return normalise(torch.from_numpy(pixels)), torch.from_numpy(index.labels[ids])


def sgd(model: nn.Module, everything: bool) -> torch.optim.SGD:
    """Nesterov; no decay on batch norm's gamma and beta (Goyal et al., section 5.1)."""
    plain = {p for m in batch_norms(model) for p in m.parameters()} if not everything else set()
    groups = [{"params": [p for p in model.parameters() if p not in plain], "weight_decay": 1e-4},
              {"params": [p for p in model.parameters() if p in plain], "weight_decay": 0.0}]
    return torch.optim.SGD([g for g in groups if g["params"]], lr=0, momentum=MOMENTUM, nesterov=True)


def train(index, rank: int, folder: pathlib.Path, fault: str) -> None:
    n, shares = FAULTS[fault]
    kn, mine = n * sum(shares), n * shares[rank]
    model = initialise(ResNet((1, 1), 8, len(index.classes), "small"), SEED)
    optimizer = sgd(model, fault == "decays_batch_norm")
    ddp = model if fault == "never_averaged" else DistributedDataParallel(model)
    state = None if ddp is model else State(ddp, folder / f"{fault}.npz")
    with (folder / f"{fault}.{rank}.jsonl").open("w") as trace:
        for step in range(STEPS):
            epoch, position = divmod(step, len(index) // kn)
            order = epoch_order(SEED, 0 if fault == "no_set_epoch" else epoch, len(index))
            whole = order[position * kn:(position + 1) * kn]
            lr = learning_rate(epoch + position / (len(index) // kn), kn)
            start, total = n * sum(shares[:rank]), torch.zeros(())
            parts = [batch(index, epoch, whole[i:i + n]) for i in range(start, start + mine, n)]
            divisor = mine if fault == "mean_of_unequal" else kn / RANKS  # DDP divides by RANKS
            optimizer.zero_grad()
            for number, (images, labels) in enumerate(parts):
                quiet = number + 1 < len(parts)
                with ddp.no_sync() if quiet else contextlib.nullcontext():
                    loss = cross_entropy(ddp(images), labels, reduction="sum") / divisor
                    loss.backward()
                total += loss.detach() * (divisor / kn)
            dist.all_reduce(total)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            trace.write(json.dumps({
                "step": step, "lr": lr.hex(), "loss": total.item().hex(), "n": n, "batch_norm": 1,
                "samples": hashlib.sha256(whole).hexdigest(), "weights": digest(model.parameters()),
                "gradient": digest(p.grad for p in model.parameters())}) + "\n")
            if state and step == 0:
                state.write(parts, loss=total.item(), lr=lr, momentum=MOMENTUM, kn=kn, n=n)


class State:
    """The first step whole: the schema is that of refimpl/state.py."""

    def __init__(self, ddp: DistributedDataParallel, path: pathlib.Path) -> None:
        self.model, self.path, self.local = ddp.module, path, {}
        self.before = [p.detach().clone() for p in self.model.parameters()]
        ddp.register_comm_hook(None, self._keep)  # keeps, then does what DDP does without it

    def _keep(self, group, bucket):
        for p, g in zip(bucket.parameters(), bucket.gradients()):
            self.local[p] = g / RANKS if p not in self.local else self.local[p]
        return allreduce_hook(group, bucket)

    def write(self, parts, **numbers) -> None:
        names, weights = zip(*self.model.named_parameters())
        images, labels = (torch.cat(gathered(torch.cat(some))) for some in zip(*parts))
        tensors = {"images": images, "labels": labels}
        local = [torch.stack(gathered(self.local[p])) for p in weights]
        for prefix, some in (("gradient_local", local),
                             ("gradient_sum", [p.grad for p in weights]),
                             ("weights_before", self.before), ("weights_after", weights)):
            tensors |= {f"{prefix}/{name}": t.detach() for name, t in zip(names, some)}
        if dist.get_rank() == 0:
            np.savez(self.path, ranks=RANKS, batch_norm=1, **numbers, **tensors)


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's, of any size."""
    parts = [None] * RANKS
    dist.all_gather_object(parts, x)
    return parts


def run(rank: int, meet: str, data: str, folder: str, faults: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meet}", datetime.timedelta(seconds=60), RANKS, rank)
    for fault in faults:
        train(open_index(data, "train"), rank, pathlib.Path(folder), fault)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.start_processes(
            run, (f"{place}/meet", *sys.argv[1:3], sys.argv[3:] or list(FAULTS)), RANKS,
            start_method="fork")
