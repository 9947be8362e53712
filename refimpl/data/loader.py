"""Batches in the order of a plan, made ahead by loader processes or here.

Loader processes come from a forkserver, never by fork from a process that runs MPI; they never
import MPI, do not hear the signals meant for the trainer, and end when it ends, however it ends.
"""
import multiprocessing.resource_tracker
import re
import signal
import sys
from collections import abc, deque
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize

import numpy as np
import torch
from torch.utils.data import DataLoader

from refimpl.data.images import MEAN, STD, BadImage, draws, train_view, val_view, view
from refimpl.data.index import Index, read
from refimpl.data.pool import end_with_parent
from refimpl.errors import LoaderFailed

UNCOUNTED = -100  # label of an unreadable validation image: no prediction equals it, so it is wrong
AHEAD = 2  # batches of each loader process, made or being made
DEAF = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


@dataclass
class Batch:
    """One worker's minibatch: images uint8 [n, size, size, 3], labels int64 [n], ids int64 [n]."""
    images: torch.Tensor
    labels: torch.Tensor
    ids: np.ndarray
    replaced: int
    slot: int | None
    notes: list


class Maker:
    """Makes a batch of (epoch, ids, places, labels, slot), without the index: processes stay small.

    slots: uint8 [slots, room, size, size, 3], shared with the trainer; slot None is new memory.
    """

    def __init__(self, train, size, seed, short_side, replace, colour):
        self.train, self.size, self.seed, self.short_side = train, size, seed, short_side
        self.replace, self.colour, self.slots = replace, colour, None

    def arrived(self, batch):
        """The Batch as the trainer sees it; what stops the run is raised."""
        if isinstance(batch, BadImage):
            raise batch
        batch.labels = torch.from_numpy(batch.labels)
        if batch.slot is not None:
            batch.images = self.slots[batch.slot, :len(batch.ids)]
        return batch

    def __getitem__(self, item):
        """The Batch, or the BadImage that stops the run (returned, to come through as it is)."""
        try:
            return self._batch(item)
        except BadImage as error:
            return error

    def _batch(self, item):
        epoch, ids, places, labels, slot = item
        images = torch.empty((len(ids), self.size, self.size, 3), dtype=torch.uint8) \
            if slot is None else self.slots[slot, :len(ids)]
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
        return Batch(images if slot is None else None, labels, ids, len(bad), slot, notes)

    def _one(self, place, epoch, sample):
        make = partial(val_view, size=self.size, short_side=self.short_side)
        if self.train:
            make = partial(train_view, size=self.size, rng=draws(self.seed, epoch, int(sample)),
                           **self.colour)
        return view(partial(read, place), place.name, make)

    def _mend(self, i, bad, item, pixels, labels):
        """Train: the minibatch's next good image, under the bad one's draws. Val: it is wrong."""
        epoch, ids, places, *_ = item
        if not self.train:
            pixels[i], labels[i] = 0, UNCOUNTED
            return
        following = [j % len(ids) for j in range(i + 1, i + len(ids)) if j % len(ids) not in bad]
        if not following:
            raise BadImage(f"{places[i].name}: no image of its minibatch can be read; "
                           "`python -m refimpl.data check` lists them")
        pixels[i], _ = self._one(places[following[0]], epoch, ids[i])
        labels[i] = labels[following[0]]


def stream(index: Index, plan: abc.Iterable, *, view: str = "train", size: int = 224, seed: int = 0,
           short_side: int | None = None, processes: int = 0, room: int = 0, bad_images: str = "stop",
           jitter: float = 0.0, lighting: float = 0.0, told: set | None = None,
           say: abc.Callable = partial(print, file=sys.stderr, flush=True)) -> abc.Generator[Batch]:
    """Yield a Batch for each (epoch, ids) of `plan`, in its order.

    view: "train" or "val" (the short side becomes short_side, by default size * 256 / 224).
    processes: loader processes, each AHEAD batches ahead; 0: made here, when asked for.
    room: batches of up to that many images come in shared memory that is used again and again:
    they are good until the next one is asked for. Larger ones, or all if 0, have memory of their own.
    jitter, lighting: of the colours of training images, see colour.py.
    bad_images: "stop" raises BadImage with the path; "replace" takes another image of the same
    minibatch (in validation: a black one that counts as wrong) and counts it in Batch.replaced.
    say: gets each kind of warning that the set `told` lacks, with the first path.
    Close the stream to end the processes.
    """
    maker = Maker(view == "train", size, seed, short_side or round(size * 256 / 224),
                  bad_images == "replace", dict(jitter=jitter, lighting=lighting))
    slots = (processes * AHEAD + 1) * bool(processes and room)  # one is with the trainer
    free, told = deque(range(slots)), set() if told is None else told
    items = ((epoch, ids, [index.place(i) for i in ids], index.labels[ids],
              free.popleft() if free and len(ids) <= room else None) for epoch, ids in plan)
    batches = _from_processes(maker, items, processes, (slots, room)) if processes else (
        maker[item] for item in items)
    try:
        for batch in map(maker.arrived, batches):
            for note in batch.notes:
                if (kind := re.sub(r"\d+", "", note.rpartition(": ")[2])) not in told:
                    told.add(kind)
                    say(note)
            yield batch
            free.extend(() if batch.slot is None else [batch.slot])
    finally:
        batches.close()


def _from_processes(maker, items, processes, slots):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["refimpl.data.loader"])  # torch is imported once for all
    others, mine = set(multiprocessing.active_children()), []
    # also if nobody closes the stream
    end = Finalize(None, lambda: [process.kill() for process in mine], exitpriority=1)
    try:
        maker.slots = torch.empty((*slots, maker.size, maker.size, 3), dtype=torch.uint8)
        maker.slots.share_memory_()
        loader = DataLoader(maker, sampler=items, batch_size=None, num_workers=processes,
                            prefetch_factor=AHEAD, multiprocessing_context=context,
                            worker_init_fn=end_with_parent)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, DEAF)  # what is started now inherits this
        try:
            multiprocessing.resource_tracker.ensure_running()  # which unblocks some of them
            signal.pthread_sigmask(signal.SIG_BLOCK, DEAF)
            batches = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        mine += set(multiprocessing.active_children()) - others
        yield from batches
    except (RuntimeError, OSError, EOFError) as error:
        why = str(error).strip().rpartition("\n")[2]
        raise LoaderFailed(f"loader processes failed ({why}); is memory or /dev/shm too small? "
                           "Try fewer (--loaders), or 0") from error
    finally:
        end()


SCALE, SHIFT = ([1 / (255 * s) for s in STD], [-m / s for m, s in zip(MEAN, STD)])


def normalise(images: torch.Tensor, layout: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    """uint8 [n, H, W, 3] -> float32 [n, 3, H, W] in memory `layout`, (x / 255 - mean) / std.

    Image by image on a CPU, so that memory is passed once: the rest happens in its cache.
    """
    n, height, width, _ = images.shape
    step = 1 if images.device.type == "cpu" else n
    scale, shift = torch.tensor([SCALE, SHIFT], device=images.device).unbind()
    if layout is torch.channels_last:  # as it lies there: rows of width x 3
        scale, shift = scale.repeat(width), shift.repeat(width)
    else:
        images, scale, shift = images.permute(0, 3, 1, 2).contiguous(), scale[:, None], shift[:, None]
    out = torch.empty((n, 3, height, width), device=images.device, memory_format=layout)
    flat = out.permute(0, 2, 3, 1) if layout is torch.channels_last else out
    for image, into in zip(images.flatten(2).split(step), flat.flatten(2).split(step)):
        into.copy_(image).mul_(scale).add_(shift)
    return out
