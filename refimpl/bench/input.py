"""Images per second of the input, stage by stage, against torchvision on the same files.

torchvision may need an environment of its own: run this with that environment's python.
"""
import argparse
import statistics
import time
from functools import partial

import numpy as np
import torch

from refimpl.data.images import MEAN, STD, draws, opened, rgb, train_view, val_view
from refimpl.data.index import open_index
from refimpl.data.loader import normalise, stream
from refimpl.data.order import epoch_order
from refimpl.data.pool import cores

SIZE, N = 224, 32
READY = {", uint8": lambda x: x, ", normalised": normalise,
         ", normalised, channels last": partial(normalise, layout=torch.channels_last)}


def _stages(index, ids):
    """The stages in one process: name -> function of a sample id."""
    data = {i: index.read(i) for i in ids}
    pixels = torch.zeros((1, SIZE, SIZE, 3), dtype=torch.uint8)
    return {"read": index.read, "decode": lambda i: rgb(opened(data[i])),
            "train view": lambda i: train_view(data[i], SIZE, draws(0, 0, i)),
            "validation view": lambda i: val_view(data[i], SIZE, 256),
            "normalise": lambda i: normalise(pixels),
            "normalise, channels last": lambda i: normalise(pixels, torch.channels_last)}


def _ours(index, ids, processes, ready):
    """uint8 batches as they reach the trainer, or also made ready there, as torchvision's are."""
    for batch in stream(index, ((0, ids[i:i + N]) for i in range(0, len(ids) - N + 1, N)),
                        processes=processes, room=N):
        yield ready(batch.images)


def _torchvision(root, ids, processes):
    from torchvision import datasets, transforms as t
    data = datasets.ImageFolder(root, t.Compose([
        t.RandomResizedCrop(SIZE), t.RandomHorizontalFlip(), t.ToTensor(), t.Normalize(MEAN, STD)]))
    for images, _ in torch.utils.data.DataLoader(data, N, sampler=ids.tolist(), drop_last=True,
                                                 num_workers=processes):
        yield images


def _rate(batches):
    """Images per second after the first batch, whose wait is the start of the processes."""
    next(batches)
    start, count = time.perf_counter(), 0
    for images in batches:
        images[:, :, ::8, ::8].sum()  # a trainer touches every page of it
        count += len(images)
    return count / (time.perf_counter() - start)


def _show(name, rates, base=None):
    print(f"{name:54s}{statistics.median(rates):8.0f}  ({min(rates):.0f} to {max(rates):.0f})", end="")
    if base:  # ratios within a round, which a slow moment of the machine meets as a whole
        ratios = [rate / other for rate, other in zip(rates, base)]
        print(f"  {statistics.median(ratios):5.2f} x torchvision ({min(ratios):.2f} to "
              f"{max(ratios):.2f})", end="")
    print(flush=True)


def main(argv=None):
    """`python -m refimpl.bench input --data TREE [--packed ZIP]`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m refimpl.bench input", description=__doc__)
    parser.add_argument("--data", required=True, help="a folder (torchvision reads no zip)")
    parser.add_argument("--packed", help="a zip packed from it, e.g. with --short-side 256")
    parser.add_argument("--processes", type=int, default=cores())
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    a = parser.parse_args(argv)
    torch.set_num_threads(1)  # as in the loader processes, whose cores this process shares
    sources = {name: open_index(path, "train")
               for name, path in (("", a.data), (" packed", a.packed)) if path}
    ids = epoch_order(0, 0, len(sources[""]))[:a.images]
    print(f"images/s, median of {a.repeat} (min to max); {len(ids)} files of mean "
          f"{np.mean(sources[''].sizes[ids]):.0f} bytes")
    for source, index in sources.items():
        for name, stage in _stages(index, some := ids[:200].tolist()).items():
            rates = []
            for _ in range(a.repeat):
                start = time.perf_counter()
                for i in some:
                    stage(i)
                rates.append(len(some) / (time.perf_counter() - start))
            _show(f"{name}{source}, in one process", rates)
    ways = {f"refimpl{s}{what}": partial(_ours, index, ids, a.processes, ready)
            for s, index in sources.items() for what, ready in READY.items()}
    try:
        import torchvision
        ways = {f"torchvision {torchvision.__version__}": lambda: _torchvision(
            f"{a.data}/train", ids, a.processes)} | ways
    except ImportError as error:
        print(f"no torchvision here ({error}); run this with a python that has it to compare")
    rates = {name: [] for name in ways}
    for _ in range(a.repeat):  # in turn, so that a slow moment of the machine meets all
        for name, way in ways.items():
            rates[name].append(_rate(way()))
    base = next((found for name, found in rates.items() if name.startswith("torchvision")), None)
    for name, found in rates.items():
        _show(f"{name}, {a.processes} processes", found, base)
    return 0
