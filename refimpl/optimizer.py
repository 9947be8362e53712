"""The update rules: momentum SGD in both forms of Goyal section 3, and LARS in two variants.

All arithmetic is float32 on master weights; one loop over the parameters, as the papers write it.
"""
import torch
from torch import Tensor, nn

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


TRUST = {"sgd": None, "lars_nnl": lars_nnl, "lars_tf": lars_tf}


class Optimizer:
    """Momentum SGD; `momentum` holds u of eq. (9) or v of eq. (10), one tensor per parameter.

    eq9:  u <- m u + g;          w <- w - lr u        (PyTorch's form: needs no correction)
    eq10: v <- m c v + lr g;     w <- w - v           (c = lr / previous lr: momentum correction)
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

    @torch.no_grad()
    def step(self, lr: float, momentum: float, previous_lr: float) -> None:
        """One update from each parameter's .grad; `previous_lr` is the last step's rate."""
        absorbed = momentum
        if self.form == "eq10" and self.correction and previous_lr:
            absorbed = momentum * (lr / previous_lr)
        for name, w in self.parameters:
            self._update(name, w, w.grad, lr, momentum, absorbed)

    def _update(self, name: str, w: Tensor, g: Tensor, lr: float, m: float, absorbed: float):
        decay, u = self.decay[name], self.momentum[name]
        rate = lr
        if name in self.adapted:
            rate = lr * self.trust(w, g, decay, self.coefficient, self.eps)
        if decay:
            g = g.add(w, alpha=decay)
        if self.form == "eq9":
            u.mul_(m).add_(g)
            w.sub_(g.add(u, alpha=m) if self.nesterov else u, alpha=rate)
        else:
            before = u.clone() if self.nesterov else None
            u.mul_(absorbed).add_(g * rate)
            w.sub_((1 + m) * u - absorbed * before if self.nesterov else u)
