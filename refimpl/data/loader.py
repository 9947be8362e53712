"""Batches in the order of a plan, made ahead by loader processes or here.

Loader processes come from a forkserver, never by fork from a process that runs MPI; they never
import MPI, do not hear the signals meant for the trainer, and end when it ends, however it ends.
"""
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from refimpl.data.images import MEAN, STD, BadImage, draws, train_view, val_view, view
from refimpl.data.index import read

UNCOUNTED = -100  # label of an unreadable validation image: cross_entropy ignores it, it matches none


@dataclass
class Batch:
    """One worker's minibatch: images uint8 [n, size, size, 3], labels int64 [n], ids int64 [n]."""
    images: torch.Tensor
    labels: torch.Tensor
    ids: np.ndarray
    replaced: int = 0
    waited_seconds: float = 0.0
    notes: list = field(default_factory=list)


class Maker:
    """Makes the batch of (epoch, ids, places, labels); needs no index, so loader processes stay small."""

    def __init__(self, train, size, seed, short_side, replace):
        self.train, self.size, self.seed = train, size, seed
        self.short_side, self.replace = short_side, replace

    def __getitem__(self, item):
        epoch, ids, places, labels = item
        images = torch.empty((len(ids), self.size, self.size, 3), dtype=torch.uint8)
        if torch.utils.data.get_worker_info():
            images.share_memory_()
        labels, bad, notes, pixels = labels.copy(), [], [], images.numpy()
        for i, place in enumerate(places):
            try:
                pixels[i], heard = self.one(place, epoch, ids[i])
                notes += heard
            except BadImage as error:
                if not self.replace:
                    raise
                notes.append(str(error))
                bad.append(i)
        for i in bad:
            self.mend(i, bad, item, pixels, labels)
        return Batch(images, torch.from_numpy(labels), ids, len(bad), 0.0, notes)

    def one(self, place, epoch, sample):
        if self.train:
            make = partial(train_view, size=self.size, rng=draws(self.seed, epoch, int(sample)))
        else:
            make = partial(val_view, size=self.size, short_side=self.short_side)
        return view(lambda: read(place), place.name, make)

    def mend(self, i, bad, item, pixels, labels):
        """Training: the next good image of this minibatch, under the bad one's draws. Val: uncounted."""
        epoch, ids, places, _ = item
        if not self.train:
            pixels[i], labels[i] = 0, UNCOUNTED
            return
        n = len(ids)
        good = next((j % n for j in range(i + 1, i + n) if j % n not in bad), None)
        if good is None:
            raise BadImage(f"{places[i].name}: no image of this minibatch can be read; "
                           "see `python -m refimpl.data check`")
        pixels[i], _ = self.one(places[good], epoch, ids[i])
        labels[i] = labels[good]


def stream(index, plan, *, view="train", size=224, seed=0, short_side=None, processes=0,
           bad_images="stop", ahead=2, say=partial(print, file=sys.stderr, flush=True)):
    """Yield a Batch for each (epoch, ids) of `plan`, in its order.

    view: "train" or "val" (the short side becomes short_side, by default size * 256 / 224).
    processes: loader processes, each `ahead` batches ahead; 0: made here, when asked for.
    bad_images: "stop" raises BadImage with the path; "replace" takes another image of the same
    minibatch (validation: a black image that counts as wrong) and counts it in Batch.replaced.
    say: gets each kind of warning once, with the path.
    """
    maker = Maker(view == "train", size, seed, short_side or round(size * 256 / 224),
                  bad_images == "replace")
    items = ((epoch, ids, [index.place(i) for i in ids], index.labels[ids]) for epoch, ids in plan)
    batches = _from_processes(maker, items, processes, ahead) if processes else map(
        maker.__getitem__, items)
    told = set()
    try:
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            batch.waited_seconds = time.perf_counter() - start
            for note in batch.notes:
                kind = note.partition(": ")[2][:40]
                if kind not in told:
                    told.add(kind)
                    say(note)
            yield batch
    finally:
        if processes:
            batches.close()


def _from_processes(maker, items, processes, ahead):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["refimpl.data.loader"])
    loader = torch.utils.data.DataLoader(
        maker, sampler=items, batch_size=None, num_workers=processes, prefetch_factor=ahead,
        multiprocessing_context=context, worker_init_fn=_end_with_parent)
    others = set(multiprocessing.active_children())
    deaf = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    multiprocessing.resource_tracker.ensure_running()  # or it would unblock the signals below
    before = signal.pthread_sigmask(signal.SIG_BLOCK, deaf)  # inherited: loader processes hear none
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield from batches
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise RuntimeError(f"a loader process died ({error}); out of memory, or /dev/shm too small? "
                           "Try fewer --loader-processes, or 0") from error
    finally:
        mine = set(multiprocessing.active_children()) - others
        batches._shutdown_workers()
        for process in mine:
            process.kill()


def _end_with_parent(_):
    """Also when the trainer was killed: torch's own watch looks at the forkserver, not at us."""
    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


def normalise(images, out=None):
    """uint8 [n, H, W, 3] -> float32 [n, 3, H, W], (x / 255 - mean) / std per channel."""
    scale = torch.tensor([1 / (255 * s) for s in STD]).view(1, 3, 1, 1)
    shift = torch.tensor([-m / s for m, s in zip(MEAN, STD)]).view(1, 3, 1, 1)
    return torch.addcmul(shift, images.permute(0, 3, 1, 2), scale)
