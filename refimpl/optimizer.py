"""The update rules: momentum SGD in both forms of Goyal section 3, and LARS in two variants.

All arithmetic is float32 on master weights; one loop over the parameters, as the papers write it.
"""
import math

import torch
from torch import Tensor, nn

from refimpl.errors import Diverged
from refimpl.model import undecayed


def lars_nnl(w: Tensor, g: Tensor, decay: float, coefficient: float, eps: float) -> Tensor:
    """Trust ratio as Neural Network Libraries computes it: c|w| / (|g| + beta|w|).

    1 (plain learning rate) where |w| < eps; the denominator gets + eps only where it is < eps.
    """
    norm_w, norm_g = torch.linalg.vector_norm(w), torch.linalg.vector_norm(g)
    denominator = norm_g + decay * norm_w
    denominator = torch.where(denominator < eps, denominator + eps, denominator)
    return torch.where(norm_w < eps, 1.0, coefficient * norm_w / denominator)


def lars_tf(w: Tensor, g: Tensor, decay: float, coefficient: float, eps: float) -> Tensor:
    """Trust ratio as TensorFlow and MLPerf compute it: c|w| / (|g| + wd|w| + eps), 1 at zero norms."""
    norm_w, norm_g = torch.linalg.vector_norm(w), torch.linalg.vector_norm(g)
    ratio = coefficient * norm_w / (norm_g + decay * norm_w + eps)
    return torch.where((norm_w > 0) & (norm_g > 0), ratio, 1.0)


PIECE = 1 << 17  # values updated at a time on a CPU: what an update reads twice is still in the cache
TRUST = {"sgd": None, "lars_nnl": lars_nnl, "lars_tf": lars_tf}


class Optimizer:
    """Momentum SGD; `momentum` holds u of eq. (9) or v of eq. (10), one tensor per parameter.

    eq9:  u <- m u + g;          w <- w - lr u        (PyTorch's form: needs no correction)
    eq10: v <- m c v + lr g;     w <- w - v           (c = lr / last lr used: momentum correction)
    g is the gradient over kn samples plus lambda w (eq. 8), where the parameter is decayed.
    LARS multiplies lr by a trust ratio per tensor and is written in the form of eq. (10), as both
    of its sources have it. "lars_tf" leaves batch norm and biases plain: no ratio, no decay.
    """

    def __init__(self, model: nn.Module, rule: str = "sgd", form: str = "eq9",
                 correction: bool = True, nesterov: bool = False, weight_decay: float = 1e-4,
                 decay_bias: bool = True, coefficient: float = 0.001, eps: float = 1e-6) -> None:
        self.trust = TRUST[rule]
        self.form = "eq10" if self.trust else form
        self.correction, self.nesterov = correction, nesterov
        self.coefficient, self.eps = coefficient, eps
        self.parameters = list(model.named_parameters())
        plain = undecayed(model, decay_bias and rule != "lars_tf")
        self.decay = {name: 0.0 if name in plain else weight_decay for name, _ in self.parameters}
        self.adapted = {name for name, _ in self.parameters if self.trust and not (
            rule == "lars_tf" and name in plain)}
        self.momentum = {name: torch.zeros_like(w) for name, w in self.parameters}
        self.rate = 0.0  # of the last update that was made: what v of eq. (10) is scaled by
        largest = max((w for _, w in self.parameters), key=torch.numel)
        self.piece = PIECE if largest.device.type == "cpu" else largest.numel()
        self.scratch = torch.empty_like(flat(largest)[:self.piece])

    @torch.no_grad()
    def step(self, lr: float, momentum: float) -> None:
        """One update from each parameter's .grad. A step skipped for an overflow never comes here,
        so the correction is from the last rate that was used to this one."""
        absorbed = momentum
        if self.form == "eq10" and self.correction and self.rate:
            absorbed = momentum * (lr / self.rate)
        self.rate = lr
        self.update_all(lr, momentum, absorbed)

    def update_all(self, lr: float, momentum: float, absorbed: float) -> None:
        """Tensor after tensor; on a GPU `fused.Fused` takes all at once."""
        for name, w in self.parameters:
            decay, rate = self.decay[name], lr
            if name in self.adapted:
                rate = lr * self.trust(w, w.grad, decay, self.coefficient, self.eps)
            for part in zip(*(flat(t).split(self.piece) for t in (w, w.grad, self.momentum[name]))):
                self._update(*part, decay, rate, momentum, absorbed)

    def _update(self, w: Tensor, g: Tensor, u: Tensor, decay: float, rate, m: float, absorbed: float):
        t = self.scratch[:len(w)]
        torch.add(g, w, alpha=decay, out=t)  # eq. (8): g + lambda w
        if self.form == "eq9":
            u.mul_(m).add_(t)
            w.sub_(t.add_(u, alpha=m) if self.nesterov else u, alpha=rate)
        else:
            t.mul_(rate)
            if self.nesterov:  # step (1 + m) v' - m c v = m v' + lr g
                w.sub_(t)
            u.mul_(absorbed).add_(t)
            w.sub_(u, alpha=m if self.nesterov else 1)


def flat(tensor: Tensor) -> Tensor:
    """The tensor's own memory as one dimension, whatever its (dense) layout."""
    return tensor.as_strided((tensor.numel(),), (1,))


class LossScale:
    """A power of two on the loss, and the decision whether a step counts.

    Overflow (a sum that is not finite or out of range) is read from the reduced buffer, so that
    all ranks decide alike. In 16 bits an overflow skips the step, and an automatic scale halves;
    it doubles after `patience` good steps. In float32, or after too many skips: Diverged.
    """

    def __init__(self, start: float, workers: int, sixteen_bit: bool, patience: int = 2000):
        self.automatic, self.sixteen_bit = start == 0, sixteen_bit
        self.patience, self.good = patience, 0
        self.accepted = self.skipped = self.in_a_row = 0
        # each worker's gradient is 1/k of the mean's size: the smallest power of two >= k lifts it
        lift = 2.0 ** (workers - 1).bit_length() if sixteen_bit else 1.0
        self.value = lift * (start or 1024.0)

    def accept(self, sums: dict[str, float], moment) -> bool:
        """May the weights change? `sums` holds "loss" and "overflow" as all ranks have them."""
        if not sums["overflow"] and math.isfinite(sums["loss"]):
            self.good, self.accepted, self.in_a_row = self.good + 1, self.accepted + 1, 0
            if self.automatic and self.good % self.patience == 0:
                self.value *= 2
            return True
        self.good, self.skipped, self.in_a_row = 0, self.skipped + 1, self.in_a_row + 1
        if self.automatic:
            self.value = max(1.0, self.value / 2)
        if not self.sixteen_bit or self.in_a_row > 40:
            raise Diverged(f"step {moment.step} (epoch {moment.epoch:.2f}, learning rate "
                           f"{moment.lr:g}): loss {sums['loss']:g}, gradient not finite or out of "
                           "range; lower --base-lr, lengthen --warmup-epochs, or see --loss-scale")
        return False

    def state(self) -> dict[str, float]:
        """What a resumed run goes on with."""
        return {name: getattr(self, name)
                for name in ("value", "good", "accepted", "skipped", "in_a_row")}
