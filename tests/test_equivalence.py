"""N ranks with one worker each equal one process that folds N gradients in the stated order.

On real ranks, bit for bit, after several steps with batch norm (DESIGN 2.3, 2.5): the twin below
shares the model and the update rule with the trainer, and nothing of its gradients, buckets,
collectives or loader.
"""
import pathlib
import tempfile

import numpy as np
import pytest
import torch

from refimpl import checkpoint, config
from refimpl.data.images import MEAN, STD, draws, train_view
from refimpl.data.index import open_index
from refimpl.data.order import epoch_order
from refimpl.gradients import TAIL
from refimpl.model import ResNet, batch_norms, initialise
from refimpl.oracle import spec
from refimpl.optimizer import Optimizer
from refimpl.run import Run
from refimpl.train import train_step
from tests.pictures import SMALL, make_zip

STEPS, N, SEED = 4, 3, 5


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def folder(comm) -> pathlib.Path:
    """One temporary folder for all ranks, left to the system's cleaning."""
    from refimpl.ranks import tell
    path = tell(comm, tempfile.mkdtemp() if comm.rank == 0 else None)
    if comm.rank == 0:
        make_zip(pathlib.Path(path) / "data.zip")
    comm.Barrier()
    return pathlib.Path(path)


def trained(comm, where, *more: str) -> Run:
    settings, _ = config.parse([*SMALL, "--data", str(where / "data.zip"), "--out", str(where),
                                "--n", str(N), "--seed", str(SEED), "--epochs", "3",
                                "--warmup-epochs", "1", "--check-every", "1", *more])
    run = Run(settings, comm)
    for step in range(STEPS):
        moment = run.schedule.at(step)
        sums = train_step(run, moment)
        run.after_step(moment, sums)  # agrees the digests of all ranks after every step
    run.log.close()
    return run


def twin(settings, schedule, workers: int, fold) -> tuple[ResNet, Optimizer]:
    """One process, all workers: keeps every gradient and adds them as `fold` says."""
    s = settings
    index = open_index(s.data, "train")
    model = initialise(ResNet(s.depth, s.width, len(index.classes), s.stem), s.seed, s.gamma_zero)
    optimizer = Optimizer(model, s.optimizer, s.momentum_form, nesterov=s.nesterov,
                          weight_decay=s.weight_decay)
    parameters = list(model.parameters())[::-1]
    buffers = [b for m in batch_norms(model) for b in (m.running_mean, m.running_var)]
    scale, shift = (torch.tensor(v).view(1, 3, 1, 1) for v in (
        [1 / (255 * d) for d in STD], [-m / d for m, d in zip(MEAN, STD)]))
    for step in range(STEPS):
        m = schedule.at(step)
        order = epoch_order(s.seed, m.epoch_index, len(index))
        before = [b.clone() for b in buffers]
        gradients, updates = [], []
        for worker in range(workers):
            ids = order[m.position + worker * N:m.position + (worker + 1) * N]
            images = np.stack([train_view(index.read(i), s.image_size,
                                          draws(s.seed, m.epoch_index, int(i))) for i in ids])
            x = torch.from_numpy(images).permute(0, 3, 1, 2).float().contiguous() * scale + shift
            for b, old in zip(buffers, before):
                b.copy_(old)
            for p in parameters:
                p.grad = torch.zeros_like(p)
            labels = torch.from_numpy(index.labels[ids])
            loss = torch.nn.functional.cross_entropy(model(x), labels, reduction="sum")
            (loss / m.kn).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in parameters]).numpy())
            change = torch.cat([(b - old).flatten() for b, old in zip(buffers, before)])
            updates.append(torch.zeros_like(change).add_(change, alpha=1 / workers).numpy())
        total = torch.from_numpy(fold(gradients))
        # the last bucket of the trainer is these updates and a few more values
        tail = np.zeros(len(TAIL), np.float32)
        update = torch.from_numpy(fold([np.append(u, tail) for u in updates]))[:-len(TAIL)]
        for p, g in zip(parameters, total.split([p.numel() for p in parameters])):
            p.grad = g.view_as(p)
        for b, old, u in zip(buffers, before, update.split([b.numel() for b in buffers])):
            b.copy_(old + u.view_as(b))
        optimizer.step(m.lr, m.momentum)
    return model, optimizer


def compare(comm, fold, *more: str) -> None:
    run = trained(comm, folder(comm), "--workers", str(comm.size), "--bucket-mb", "100", *more)
    model, optimizer = twin(run.settings, run.schedule, comm.size, fold)
    for (name, p), q in zip(model.named_parameters(), run.model.parameters()):
        assert torch.equal(p, q), name
        assert torch.equal(optimizer.momentum[name], run.optimizer.momentum[name]), name
    for p, q in zip(batch_norms(model), batch_norms(run.model)):
        assert torch.equal(p.running_mean, q.running_mean)
        assert torch.equal(p.running_var, q.running_var)


@pytest.mark.ranks(1, 2, 3, 4)
def test_ring_training_equals_one_process_that_folds_as_the_ring(comm):
    compare(comm, spec.ring, "--allreduce", "ring")


@pytest.mark.ranks(4)
def test_torus_training_equals_one_process_that_folds_as_the_torus(comm):
    compare(comm, lambda xs: spec.torus(xs, 2, 2), "--allreduce", "torus", "--grid", "2x2")


@pytest.mark.ranks(3)
def test_halving_doubling_training_equals_the_twin(comm):
    compare(comm, spec.halving_doubling, "--allreduce", "halving_doubling")


@pytest.mark.ranks(1, 2, 3, 4)
def test_the_exact_sum_gives_the_same_bits_for_every_rank_count_and_algorithm(comm):
    where = folder(comm)
    from mpi4py import MPI
    more = ("--workers", "4", "--n", "2", "--sum", "exact")
    alone = trained(MPI.COMM_SELF, where, *more, "--name", f"alone{comm.rank}")
    for algorithm in ("ring", "torus", "halving_doubling", "mpi"):
        run = trained(comm, where, *more, "--allreduce", algorithm, "--bucket-mb", "0.01")
        assert checkpoint.digest(run) == checkpoint.digest(alone), algorithm


@pytest.mark.ranks(2)
def test_a_rank_that_plays_several_workers_adds_them_in_worker_order(comm):
    run = trained(comm, folder(comm), "--workers", "3", "--n", "2", "--allreduce", "ring",
                  "--bucket-mb", "100")

    def fold(xs):  # rank 0 plays workers 0 and 1, rank 1 plays worker 2
        return spec.ring([xs[0] + xs[1], xs[2]])

    global N
    N, kept = 2, N
    try:
        model, _ = twin(run.settings, run.schedule, 3, fold)
    finally:
        N = kept
    for p, q in zip(model.parameters(), run.model.parameters()):
        assert torch.equal(p, q)


@pytest.mark.ranks(2, 3)
def test_the_allreduce_behind_backward_gives_the_bits_of_the_naive_twin(comm):
    where = folder(comm)
    for more in ((), ("--wire", "bfloat16"), ("--sum", "exact"), ("--optimizer", "lars_nnl"),
                 ("--precision", "bf16", "--wire", "float16")):
        more = ("--workers", "4", "--n", "2", "--bucket-mb", "0.005", "--allreduce", "ring", *more)
        naive, behind = (trained(comm, where, *more, "--overlap", mode) for mode in ("off", "on"))
        assert len(behind.gradients.buckets) > 4
        assert checkpoint.digest(naive) == checkpoint.digest(behind), more


@pytest.mark.ranks(3)
def test_ranks_without_a_worker_in_a_band_add_zeros(comm):
    where = folder(comm)
    from mpi4py import MPI
    for bands in ("1:2x6 3:4x3", "1:4x3 3:2x6"):  # before they have played any, and after
        more = ("--bands", bands, "--sum", "exact")
        alone = trained(MPI.COMM_SELF, where, *more, "--name", f"alone{comm.rank}")
        for overlap in ("off", "on"):
            run = trained(comm, where, *more, "--overlap", overlap)
            assert {run.schedule.at(step).workers for step in range(STEPS)} == {2, 4}
            assert checkpoint.digest(run) == checkpoint.digest(alone)
