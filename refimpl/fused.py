"""The update on a GPU: all tensors by three launches, where `Optimizer._update` takes several each.

    lars_norms -> lars_ratio       only with LARS: one trust ratio per tensor
    update                         weight decay, ratio, momentum and step, one pass over memory

`Optimizer.step` is the slow twin; formulas stand in kernels/lars.cu and kernels/update.cu.
"""
import numpy as np
import torch

from refimpl import kernels
from refimpl.collective import buffers
from refimpl.gradients import as_array
from refimpl.optimizer import Optimizer


class Fused:
    """Takes over `optimizer.step`; `gradient` is the flat buffer, parameters in reverse order."""

    def __init__(self, optimizer: Optimizer, gradient: torch.Tensor, as_array=as_array) -> None:
        self.optimizer, self.gradient = optimizer, as_array(gradient)
        self.cupy = buffers.module(self.gradient)
        named = optimizer.parameters[::-1]
        sizes = [w.numel() for _, w in named]
        momenta = gradient.new_zeros(sum(sizes))
        for (name, w), piece in zip(named, momenta.split(sizes)):  # what a checkpoint holds
            optimizer.momentum[name] = piece.as_strided(w.shape, w.stride(), piece.storage_offset())
        self.momenta = as_array(momenta)
        table, first = kernels.pieces(sizes)
        self.pieces, self.tensors = np.int64(len(table)), np.int64(len(sizes))
        on_device = self.cupy.asarray
        self.table, self.first = on_device(table.view(np.uint8)), on_device(first)
        self.weights = on_device(np.array([w.data_ptr() for _, w in named], np.uint64))
        self.decay = on_device(np.array([optimizer.decay[name] for name, _ in named], np.float32))
        self.adapt = on_device(np.array([name in optimizer.adapted for name, _ in named], np.uint8))
        self.sums = on_device(np.zeros(2 * len(table)))
        self.ratio = on_device(np.ones(len(sizes), np.float32))
        optimizer.update_all = self.update_all

    def update_all(self, lr: float, momentum: float, absorbed: float) -> None:
        """u <- absorbed u + inside g; w <- w - outside (u, or with Nesterov's look ahead)."""
        o, ratio = self.optimizer, kernels.NULL
        inside, outside = (1.0, lr) if o.form == "eq9" else (lr, 1.0)
        if o.trust:
            ratio = self.ratio
            self._launch("lars_norms_float32", self.pieces, self.sums, self.weights, self.gradient,
                         self.table, self.pieces)
            self._launch(o.trust.__name__.replace("lars", "lars_ratio"), self.tensors, ratio,
                         self.sums, self.first, self.decay, self.adapt, self.tensors,
                         o.coefficient, o.eps)
        self._launch("update_float32", self.pieces, self.weights, self.momenta, self.gradient,
                     self.table, self.pieces, self.decay, ratio, inside, absorbed, momentum,
                     np.int32(o.nesterov), outside)

    def _launch(self, name: str, blocks, *arguments) -> None:
        kernels.launch(self.cupy, name, int(blocks), *(
            np.float32(a) if type(a) is float else a for a in arguments))
