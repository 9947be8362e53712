"""Batches in the order of a plan, made ahead by loader processes or here.

Loader processes come from a forkserver, never by fork from a process that runs MPI; they never
import MPI, do not hear the signals meant for the trainer, and end when it ends, however it ends.
"""
import multiprocessing.resource_tracker
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.util import Finalize

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from refimpl.data.images import MEAN, STD, BadImage, draws, train_view, val_view, view
from refimpl.data.index import read
from refimpl.data.pool import end_with_parent

UNCOUNTED = -100  # label of an unreadable validation image: no prediction equals it, so it is wrong
DEAF = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


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
    """Makes a batch of (epoch, ids, places, labels), without the index: processes stay small."""

    def __init__(self, train, size, seed, short_side, replace, colour):
        self.train, self.size, self.seed = train, size, seed
        self.short_side, self.replace, self.colour = short_side, replace, colour

    def __getitem__(self, item):
        """The Batch, or the BadImage that stops the run (returned, to come through as it is)."""
        try:
            return self._batch(item)
        except BadImage as error:
            return error

    def _batch(self, item):
        epoch, ids, places, labels = item
        images = torch.empty((len(ids), self.size, self.size, 3), dtype=torch.uint8)
        if get_worker_info():
            images.share_memory_()  # made where the trainer will read it
        bad, notes, pixels, labels = [], [], images.numpy(), labels.copy()
        for i, place in enumerate(places):
            try:
                pixels[i], heard = self._one(place, epoch, ids[i])
                notes += heard
            except BadImage as error:
                if not self.replace:
                    raise
                notes.append(str(error))
                bad.append(i)
        for i in bad:
            self._mend(i, bad, item, pixels, labels)
        return Batch(images, torch.from_numpy(labels), ids, len(bad), notes=notes)

    def _one(self, place, epoch, sample):
        make = partial(val_view, size=self.size, short_side=self.short_side)
        if self.train:
            make = partial(train_view, size=self.size, rng=draws(self.seed, epoch, int(sample)),
                           **self.colour)
        return view(partial(read, place), place.name, make)

    def _mend(self, i, bad, item, pixels, labels):
        """Train: the minibatch's next good image, under the bad one's draws. Val: it is wrong."""
        epoch, ids, places, _ = item
        if not self.train:
            pixels[i], labels[i] = 0, UNCOUNTED
            return
        following = [j % len(ids) for j in range(i + 1, i + len(ids)) if j % len(ids) not in bad]
        if not following:
            raise BadImage(f"{places[i].name}: no image of its minibatch can be read; "
                           "`python -m refimpl.data check` lists them")
        pixels[i], _ = self._one(places[following[0]], epoch, ids[i])
        labels[i] = labels[following[0]]


def stream(index, plan, *, view="train", size=224, seed=0, short_side=None, processes=0,
           bad_images="stop", jitter=0.0, lighting=0.0, ahead=2,
           say=partial(print, file=sys.stderr, flush=True)):
    """Yield a Batch for each (epoch, ids) of `plan`, in its order.

    view: "train" or "val" (the short side becomes short_side, by default size * 256 / 224).
    processes: loader processes, each `ahead` batches ahead; 0: made here, when asked for.
    jitter, lighting: of the colours of training images, see colour.py.
    bad_images: "stop" raises BadImage with the path; "replace" takes another image of the same
    minibatch (in validation: a black one that counts as wrong) and counts it in Batch.replaced.
    say: gets each kind of warning once, with the first path. Close the stream to end the processes.
    """
    maker = Maker(view == "train", size, seed, short_side or round(size * 256 / 224),
                  bad_images == "replace", dict(jitter=jitter, lighting=lighting))
    items = ((epoch, ids, [index.place(i) for i in ids], index.labels[ids]) for epoch, ids in plan)
    batches = _from_processes(maker, items, processes, ahead) if processes else (
        maker[item] for item in items)
    told = set()
    try:
        while True:
            start = time.perf_counter()
            if (batch := next(batches, None)) is None:
                return
            if isinstance(batch, BadImage):
                raise batch
            batch.waited_seconds = time.perf_counter() - start
            for note in batch.notes:
                kind = re.sub(r"\d+", "", note.rpartition(": ")[2])
                if kind not in told:
                    told.add(kind)
                    say(note)
            yield batch
    finally:
        batches.close()


def _from_processes(maker, items, processes, ahead):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["refimpl.data.loader"])  # torch is imported once for all
    loader = DataLoader(maker, sampler=items, batch_size=None, num_workers=processes,
                        prefetch_factor=ahead, multiprocessing_context=context,
                        worker_init_fn=_start)
    others = set(multiprocessing.active_children())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, DEAF)  # what is started now inherits this
    try:
        multiprocessing.resource_tracker.ensure_running()  # which unblocks some of them
        signal.pthread_sigmask(signal.SIG_BLOCK, DEAF)
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    mine = set(multiprocessing.active_children()) - others
    end = Finalize(None, _kill, (mine,), exitpriority=1)  # also if nobody closes the stream
    try:
        yield from batches
    except (RuntimeError, OSError, EOFError) as error:
        why = str(error).strip().splitlines()[-1:]
        raise RuntimeError(f"a loader process died {why}; is memory or /dev/shm too small? Try "
                           "fewer loader processes, or 0") from error
    finally:
        end()


def _kill(processes):
    for process in processes:
        process.kill()


def _start(_):
    end_with_parent()


def normalise(images, layout=torch.contiguous_format):
    """uint8 [n, H, W, 3] -> float32 [n, 3, H, W] in memory `layout`, (x / 255 - mean) / std.

    In this order, since torch.addcmul on permuted bytes takes about twenty times as long on a CPU.
    """
    scale, shift = (torch.tensor(v, device=images.device).view(1, 3, 1, 1) for v in (
        [1 / (255 * s) for s in STD], [-m / s for m, s in zip(MEAN, STD)]))
    x = images.permute(0, 3, 1, 2).contiguous(memory_format=layout)
    return x.float().mul_(scale).add_(shift)
