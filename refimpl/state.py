"""--state FILE: the first step of a run, whole, as one .npz that another trainer can load.

    images float32 [k n, 3, H, W], labels int64 [k n], loss float64: the minibatch in worker order
    weights_before/NAME, weights_after/NAME    float32, torchvision's parameter names
    gradient_local/NAME  float32 [ranks, ...]  what each rank gives to the sum (loss already / kn)
    gradient_sum/NAME    float32               what every rank holds after it
    lr, momentum, kn, n, ranks, batch_norm     numbers
`python -m refimpl.oracle state A B` compares two such files.
"""
import numpy as np
import torch

from refimpl.collective.exchange import waiting
from refimpl.gradients import QUANTUM
from refimpl.ranks import cut, everywhere, writable, writing


class State:
    """Stands around `reduce` for one step and writes the file after it."""

    def __init__(self, run, path: str) -> None:
        self.run, self.inner = run, run.reduce
        self.file = everywhere(run.comm, lambda: writable(path, "--state", b"batch_norm.npy")
                               if run.comm.rank == 0 else None)
        self.images, self.labels = [], []
        run.reduce = self.reduce

    def reduce(self, scale: float) -> dict[str, float]:
        gradients = self.run.gradients
        unit = (QUANTUM if gradients.exact else 1.0) / scale
        self.local = (gradients.summed[:gradients.values].double() * unit).float().cpu()
        self.before = self._weights()
        return self.inner(scale)

    def write(self, moment, sums: dict[str, float]) -> None:
        """Gather the ranks' parts on rank 0 and write; then get out of the way."""
        run = self.run
        names = [name for name, _ in run.model.named_parameters()]
        shapes = [w.shape for w in run.model.parameters()]
        images = gather(run.comm, torch.cat([torch.empty(0), *self.images]).numpy())
        labels = gather(run.comm, torch.cat([torch.empty(0, dtype=torch.long), *self.labels]).numpy())
        local = gather(run.comm, self.local.numpy())
        if run.comm.rank == 0:
            pieces = torch.from_numpy(local).view(run.comm.size, -1).split(
                [shape.numel() for shape in shapes[::-1]], dim=1)[::-1]
            size = run.settings.image_size
            with writing(self.file.name), self.file:
                cut(self.file)
                np.savez(
                    self.file, batch_norm=1, images=images.reshape(-1, 3, size, size), labels=labels,
                    loss=sums["loss"], lr=moment.lr, momentum=moment.momentum, kn=moment.kn,
                    n=moment.n, ranks=run.comm.size,
                    **{f"gradient_local/{name}": piece.reshape(-1, *shape).numpy()
                       for name, piece, shape in zip(names, pieces, shapes)},
                    **{f"gradient_sum/{name}": w.grad.contiguous().cpu().numpy()
                       for name, w in run.model.named_parameters()},
                    **{f"weights_before/{name}": w for name, w in self.before.items()},
                    **{f"weights_after/{name}": w for name, w in self._weights().items()})
        run.reduce, run.state = self.inner, None

    def _weights(self) -> dict[str, np.ndarray]:
        return {name: w.detach().contiguous().cpu().numpy().copy()
                for name, w in self.run.model.named_parameters()}


def gather(comm, mine: np.ndarray) -> np.ndarray | None:
    """All ranks' arrays, flat, end to end in rank order, on rank 0."""
    counts = np.empty(comm.size, np.int64)
    with waiting("state", comm):
        comm.Allgather(np.array([mine.size]), counts)
        whole = np.empty(counts.sum(), mine.dtype) if comm.rank == 0 else None
        comm.Gatherv(np.ascontiguousarray(mine).reshape(-1), [whole, counts] if comm.rank == 0 else None)
    return whole
