"""Batches: the same for every number of loader processes; bad files; ends that leave nothing."""
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch

from refimpl.data.images import MEAN, STD, BadImage
from refimpl.data.index import open_index
from refimpl.data.loader import UNCOUNTED, normalise, stream
from refimpl.data.order import epoch_order, minibatch
from tests.data_files import encoded, photos, picture, tree

IDS = np.arange


def plan(size, n, epochs=1, workers=1, only=None):
    for epoch in range(epochs):
        order = epoch_order(0, epoch, size)
        for at in range(0, size - n * workers + 1, n * workers):
            for worker in range(workers) if only is None else only:
                yield epoch, minibatch(order, at, workers, n, worker)


def by_sample(batches):
    return {(int(i), b.images[k].numpy().tobytes()): int(b.labels[k])
            for b in batches for k, i in enumerate(b.ids)}


def test_batches_do_not_depend_on_ranks_or_loader_processes(tmp_path):
    index = open_index(photos(tmp_path, train=6), "train")
    alone = list(stream(index, plan(12, 2, 2, workers=3), size=16, seed=5))
    assert [b.ids.tolist() for b in alone] == [i.tolist() for _, i in plan(12, 2, 2, workers=3)]
    assert all(b.images.shape == (2, 16, 16, 3) and b.images.dtype == torch.uint8 for b in alone)
    assert len(by_sample(alone)) == 24  # each epoch draws anew
    ranks = [b for only in ((0, 1), (2,)) for b in stream(
        index, plan(12, 2, 2, workers=3, only=only), size=16, seed=5)]
    assert by_sample(ranks) == by_sample(alone)
    for room in (0, 1, 2, 3):  # of shared memory, in images; 1 is too small, and not used
        ahead = stream(index, plan(12, 2, 2, workers=3), size=16, seed=5, processes=2, room=room)
        slots = set()
        for a, b in zip(alone, ahead, strict=True):
            assert torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)
            assert b.images.is_shared() and (a.ids == b.ids).all()
            slots.add(b.images.data_ptr())
        assert room < 2 or len(slots) == 5  # two processes, two ahead, one with the trainer
    other = by_sample(stream(index, plan(12, 2), size=16, seed=6))
    assert other.keys().isdisjoint(by_sample(alone))
    assert not multiprocessing.active_children()


def bad_ones(tmp_path):
    """Samples 1 (cut), 2 (empty) and 5 (gone) of a/0..5 are bad; b/6..8 are good."""
    files = {f"train/{c}/{i}.jpg": encoded(picture(number=i)) for c, r in (
        ("a", range(6)), ("b", range(6, 9))) for i in r}
    files["train/a/1.jpg"] = files["train/a/1.jpg"][:300]
    files["train/a/2.jpg"] = b""
    index = open_index(tree(tmp_path, files), "train")
    os.remove(tmp_path / "train/a/5.jpg")
    return index


@pytest.mark.parametrize("processes", [0, 1])
def test_a_bad_image_stops_with_its_path(tmp_path, processes):
    batches = stream(bad_ones(tmp_path), [(0, IDS(6, 9)), (0, IDS(0, 3))], size=16,
                     processes=processes)
    next(batches)
    with pytest.raises(BadImage, match="^[^\n]*train/a/1.jpg: Trunc[^\n]*$"):
        next(batches)


def test_a_bad_image_is_replaced_counted_and_said_once(tmp_path):
    index, said = bad_ones(tmp_path), []
    items = [(0, np.array([0, 1, 2, 6])), (0, np.array([7, 5])), (1, np.array([8, 1]))]
    batches = list(stream(index, items, size=16, bad_images="replace", say=said.append))
    assert [b.replaced for b in batches] == [2, 1, 1]
    assert batches[0].labels.tolist() == [0, 1, 1, 1]  # the next good one of the minibatch is 6
    assert batches[1].labels.tolist() == [1, 1]  # after the last comes the first
    assert [b.ids.tolist() for b in batches] == [i.tolist() for _, i in items]
    assert [s.split(": ")[0][-11:] for s in said] == ["train/a/1.jpg"[-11:], "train/a/2.jpg"[-11:],
                                                     "train/a/5.jpg"[-11:]]
    told, said = set(), []
    for _ in range(2):  # two streams of one run, as two validations are
        list(stream(index, items, size=16, bad_images="replace", say=said.append, told=told))
    assert len(said) == 3
    with pytest.raises(BadImage, match="no image of its minibatch"):
        list(stream(index, [(0, np.array([1, 2]))], size=16, bad_images="replace", say=said.append))


def test_a_bad_validation_image_counts_as_wrong(tmp_path):
    (batch,) = stream(bad_ones(tmp_path), [(0, IDS(0, 3))], view="val", size=16,
                      bad_images="replace", say=lambda note: None)
    assert batch.labels.tolist() == [0, UNCOUNTED, UNCOUNTED] and batch.replaced == 2
    assert batch.images[1:].max() == 0
    torch.nn.functional.cross_entropy(torch.zeros(3, 2), batch.labels)  # -100 is its ignore_index


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_normalise_is_the_formula(layout):
    x = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(2, 16, 16, 3)
    for channel, (mean, std) in enumerate(zip(MEAN, STD)):
        expected = (np.arange(256) / 255 - mean) / std
        found = normalise(x, layout)
        assert found.is_contiguous(memory_format=layout)
        difference = found[1, channel].flatten().double().numpy() - expected
        assert abs(difference).max() < 2e-6  # float32: |x| < 3, a few roundings


PROGRAM = """
    import multiprocessing, os, signal, sys
    import numpy as np
    from refimpl.data.index import open_index
    from refimpl.data.loader import stream
    if __name__ == "__main__":
        index = open_index(sys.argv[1], "train")
        batches = stream(index, ((0, np.arange(4)) for _ in range(10**6)), size=16, processes=2)
        next(batches)
        children = multiprocessing.active_children()
        print(type(children[0]).__name__, *(p.pid for p in children), flush=True)
        {act}
        for batch in batches:
            pass
"""


SIGNALS = ("deaf = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2; "
           "[signal.signal(s, lambda *_: None) for s in deaf]; [os.killpg(0, s) for s in deaf]; "
           "sys.exit(6 if all(len(next(batches).ids) for _ in range(100)) else 1)")


def program(tmp_path, act):
    """The program's first words, exit code, last error line, seconds after `act`."""
    photos(tmp_path)
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM).format(act=act))
    tree(tmp_path, {"mpi4py/__init__.py": b"raise SystemExit('MPI in a loader process')"})
    job = subprocess.Popen([sys.executable, script, tmp_path], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True, start_new_session=True, env=os.environ
                           | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])})
    try:
        out, err = job.communicate(timeout=60)  # ends only when no process holds the pipes
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    return out.split(), job.returncode, err


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("act, code, message", [
    ("os.kill(children[0].pid, signal.SIGKILL)", 1, "loader processes failed"),
    ("os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    ("os._exit(7)", 7, ""),
    ("signal.signal(signal.SIGINT, signal.default_int_handler); os.killpg(0, signal.SIGINT)",
     -signal.SIGINT, "KeyboardInterrupt"),
    ("signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5)); os.killpg(0, signal.SIGUSR1)", 5, ""),
    (SIGNALS, 6, ""),
], ids=["loader killed", "trainer killed", "_exit", "Ctrl-C", "signal to all", "deaf"])
def test_every_end_is_quick_and_leaves_no_process(tmp_path, act, code, message):
    (kind, *pids), found, err = program(tmp_path, act)
    assert kind == "ForkServerProcess" and message in err
    assert found == code, err
    patience = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < patience:
        time.sleep(0.05)
    assert not any(map(alive, pids))
