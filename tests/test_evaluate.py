"""Validation counts every image once, for any number of ranks and batch size; batch norm by name."""
import numpy as np
import pytest
import torch

from refimpl import evaluate
from refimpl.data.images import MEAN, STD, val_view
from refimpl.model import batch_norms
from tests.test_equivalence import folder, trained


def by_hand(run) -> tuple[int, float]:
    """Correct answers and mean loss, one image at a time, without the loader."""
    index, size = run.val_images, run.settings.image_size
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
    correct, losses = 0, []
    run.model.eval()
    with torch.no_grad():
        for i in range(len(index)):
            pixels = val_view(index.read(i), size, run.settings.val_short_side)
            x = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None]
            logits = run.model(torch.addcmul(-mean / std, x, 1 / (255 * std)))
            label = torch.tensor(index.labels[i:i + 1])
            correct += int(logits.argmax(1).item() == label.item())
            losses.append(torch.nn.functional.cross_entropy(logits, label).item())
    run.model.train()
    return correct, sum(losses) / len(losses)


@pytest.mark.ranks(1, 2, 3, 5)
def test_every_image_counts_once_for_every_rank_count_and_batch_size(comm):
    where = folder(comm)
    for n in (1, 2, 5):
        run = trained(comm, where, "--workers", "5", "--n", str(n), "--epochs", "4")
        result = evaluate.evaluate(run)
        correct, loss = by_hand(run)
        assert (result.correct, result.total) == (correct, 12)
        assert abs(result.loss - loss) < 1e-5 + 2 * evaluate.LOSS_UNIT  # batched convolutions differ


@pytest.mark.ranks(2)
def test_last_is_the_mean_of_the_workers_last_minibatch_statistics(comm):
    run = trained(comm, folder(comm), "--workers", "2", "--batch-norm", "last")
    first = batch_norms(run.model)[0]
    seen = []
    hook = first.register_forward_pre_hook(lambda m, x: seen.append(x[0].mean((0, 2, 3))))
    from refimpl.train import train_step
    train_step(run, run.schedule.at(4))
    hook.remove()
    both = np.empty((2, len(seen[0])), np.float32)
    comm.Allgather(seen[0].detach().numpy(), both)
    # a mean of two float32, whose difference from the old value was summed: a few roundings of 4
    assert np.abs(first.running_mean.numpy() - both.mean(0)).max() < 8 * 4 * 2.0**-24


@pytest.mark.ranks(1, 3)
def test_recomputed_is_the_mean_over_minibatches_of_the_training_set(comm):
    run = trained(comm, folder(comm), "--workers", "3", "--n", "4", "--batch-norm", "recomputed")
    from mpi4py import MPI
    alone = trained(MPI.COMM_SELF, folder(comm), "--workers", "3", "--n", "4", "--name",
                    f"alone{comm.rank}", "--batch-norm", "recomputed", "--allreduce", "ring")
    alone.model.load_state_dict(run.model.state_dict())
    before = run.gradients.running.clone()
    for each in (run, alone):
        evaluate.recompute_statistics(each)
    assert not torch.equal(before, run.gradients.running)
    change = (run.gradients.running - alone.gradients.running).abs()
    # nine minibatches of values up to 4, added in another order
    assert change.max() < 9 * 4 * 2.0**-23 * (1 + alone.gradients.running.abs().max())
