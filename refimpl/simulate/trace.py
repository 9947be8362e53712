"""The transfer table of an algorithm, made by running it on symbols instead of numbers.

Its picture shows every rank's buffer before each round, and an arrow for every message. The darker
a chunk, the more ranks are in it; black is the complete sum. Readable without colour.
"""
import collections
import dataclasses
import itertools
import sys

import numpy as np

from refimpl.collective import allreducer, default_shape
from refimpl.simulate.world import run


@dataclasses.dataclass
class Symbol:
    """A sum of rank numbers that remembers how it was formed."""
    text: str
    ranks: tuple
    cyclic: bool         # written from the sender on, as round a ring, or else sorted
    depth: int = 0       # 0: one rank; 1: a sum of ranks, as 0+1+2; 2: a sum of such sums
    spent: bool = False  # has been given away, and is scratch where it was

    def __add__(self, received):
        """The sum as the left fold it is part of: 0+1+2 or (0+1)+(2+3)."""
        first, then = (received, self) if self.cyclic else sorted(
            (self, received), key=lambda s: s.ranks[0])
        if first.depth < then.depth:
            first, then = then, first
        grows = first.depth == then.depth + 1
        left = first.text if grows or not first.depth else f"({first.text})"
        right = f"({then.text})" if then.depth else then.text
        return Symbol(f"{left}+{right}", first.ranks + then.ranks, self.cyclic,
                      first.depth + (not grows))

    def __str__(self):
        return self.text


# in round `when`, rank `source` sends `elements`, holding the symbols `content`, to `dest`
Transfer = collections.namedtuple("Transfer", "when phase turn source dest elements content")


class Trace:
    """Runs the algorithm; `transfers` in order of time, `states[t][rank][element]` before round t.

    A round is a unit of time, the length of every message. The buffer has one element per rank.
    """

    def __init__(self, algorithm: str, ranks: int, shape=None, ranks_per_node=None):
        cyclic = algorithm != "halving_doubling"
        shape = shape or default_shape(ranks) if algorithm == "torus" else None
        self.algorithm, self.ranks, self.shape, self.transfers = algorithm, ranks, shape, []
        self.buffers = [np.array([Symbol(str(r), (r,), cyclic)] * ranks) for r in range(ranks)]
        self.states = [[list(b) for b in self.buffers]]

        def program(comm):
            with allreducer(algorithm, comm, shape, ranks_per_node=ranks_per_node or max(
                    1, ranks // 2)) as reduce:  # past its checks: symbols are no numbers
                sys.modules[f"refimpl.collective.{algorithm}"].allreduce(
                    self.buffers[comm.rank], reduce.place)
        run(ranks, program, cost=self, watch=self.watch)
        assert _texts(self.buffers) == _texts(self.states[-1]), "the drawing is not what ran"

    def transfer(self, source, dest, nbytes, now, note):
        """As cost model: every message takes one unit of time."""
        return now + 1, now + 1, 0.0

    def watch(self, here, there, data, into):
        when, (_, phase, turn, *_) = int(max(here.clock, there.clock)), here.record.waiting
        while len(self.states) < when + 2:
            self.states.append([list(b) for b in self.states[-1]])
        buffer, target = self.buffers[here.number], self.buffers[there.number]
        first = (data.ctypes.data - buffer.ctypes.data) // buffer.itemsize
        elements = range(first, first + len(data))
        copies = np.shares_memory(into, target)  # what is to be added arrives beside the buffer
        if elements:
            self.transfers.append(Transfer(when, phase, turn, here.number, there.number,
                                           elements, [*data]))
        for e, symbol in zip(elements, data):
            self.states[-1][there.number][e] = symbol if copies else target[e] + symbol
            if not copies:  # the sender's own copy has had its use
                self.states[-1][here.number][e] = dataclasses.replace(symbol, spent=True)

    def table(self) -> str:
        """One line per message, a heading per round and phase, and the order of addition."""
        lines = [f"{self.algorithm}, {self.ranks} ranks, {self.ranks} chunks"]
        width = max((len(span(t.elements)) for t in self.transfers), default=1)
        for (when, phase, turn), group in itertools.groupby(
                sorted(self.transfers, key=lambda t: t[:4]), key=lambda t: t[:3]):
            lines.append(f"round {when}: {phase} {turn}")
            for t in group:
                text, *more = dict.fromkeys(_texts([t.content])[0])
                lines.append(f"  rank {t.source} -> {t.dest}   chunk {span(t.elements):<{width}}   "
                             f"{'complete sums' if more else text}")
        return "\n".join([*lines, "order of addition", *(
            f"  chunk {span(e):<{width}}   {text}" for e, text in self.orders())])

    def orders(self) -> list[tuple[range, str]]:
        """(chunks, how their sum was formed), neighbours of one order together."""
        return [(range(run[0][0], run[-1][0] + 1), text) for text, group in itertools.groupby(
            enumerate(_texts(self.buffers)[0]), key=lambda pair: pair[1]) for run in [[*group]]]


def _texts(buffers) -> list[list[str]]:
    return [[str(symbol) for symbol in buffer] for buffer in buffers]


def span(elements: range) -> str:
    return str(elements[0]) if len(elements) == 1 else f"{elements[0]}-{elements[-1]}"


def draw(trace: Trace, path: str) -> None:
    """Write the PNG."""
    from matplotlib.figure import Figure
    ranks, rows = trace.ranks, len(trace.states)
    pitch = ranks + max(1.0, ranks / 6)  # of one rank's buffer, in cells
    cell = min(0.62, 15 / (pitch * ranks))  # inches
    figure = Figure(figsize=(max(5.0, cell * (pitch * ranks - 1) + 2.1), 1.02 * rows + 1.5))
    axes, width, left = figure.add_axes((0, 0, 1, 1)), figure.get_figwidth() / cell, -1.65 / cell
    axes.set(xlim=(-1.75 / cell, width - 1.75 / cell), ylim=(-1.02 * rows - 0.45, 1.05))
    axes.axis("off")
    for r in range(ranks):
        for t, state in enumerate(trace.states):
            for e, symbol in enumerate(state[r]):
                _cell(axes, r * pitch + e, -1.02 * t, symbol, ranks, cell)
        place = "row {}, column {}".format(*divmod(r, trace.shape[1])) if trace.shape else ""
        axes.text(r * pitch + ranks / 2, 0.5, f"rank {r}" + f": {place}" * (cell > 0.4 and place > ""),
                  ha="center", weight="bold")
        for e in range(ranks if cell > 0.2 else 0):
            axes.text(r * pitch + e + .5, 0.30, e, ha="center", va="center", size=7, color=".35")
    for t in trace.transfers:
        _arrow(axes, t, pitch)
    grid = f" {trace.shape[0]} x {trace.shape[1]}" if trace.shape else ""
    sums = "     ".join(f"chunk {span(e)} = {text}" for e, text in trace.orders())
    for y, text, style in (
            (0.78, f"{trace.algorithm.replace('_', '/')}{grid}, {ranks} ranks",
             {"size": 13, "weight": "bold"}),
            (-1.02 * rows + 0.24, "complete sums:  " + sums, {"size": 8}),
            (-1.02 * rows - 0.06, "darker: more ranks are in it;  Σ: complete;  arrow: a message;  "
             "white: given away, now scratch", {"size": 8, "color": ".35"}),
            *((-1.02 * when - 0.61, "\n".join(dict.fromkeys(
                f"{t.phase}, {t.turn}" for t in trace.transfers if t.when == when)), {"size": 8.5})
              for when in range(rows - 1))):
        axes.text(left, y, text, va="center", **style)
    figure.savefig(path, dpi=130)


def _cell(axes, x, y, symbol, ranks, cell):
    from matplotlib.patches import Rectangle
    full = len(symbol.ranks) == ranks
    grey = "0.12" if full else "1" if symbol.spent else str(0.94 - 0.4 * len(symbol.ranks) / ranks)
    axes.add_patch(Rectangle((x, y - 0.19), 1, 0.38, facecolor=grey, edgecolor="0.25", lw=0.7))
    text = "Σ" if full else symbol.text
    if (size := min(9.0, 80 * cell / max(2, len(text)))) >= 3.5:
        axes.text(x + 0.5, y, text, ha="center", va="center", size=size,
                  color="white" if full else "0.65" if symbol.spent else "black")


def _arrow(axes, transfer, pitch):
    first, last = transfer.elements[0], transfer.elements[-1]
    ends = [(rank * pitch, y) for rank, y in ((transfer.source, -1.02 * transfer.when - 0.19),
                                              (transfer.dest, -1.02 * transfer.when - 0.82))]
    for x, y in ends if last > first else ():
        axes.plot([x + first + 0.08, x + last + 0.92], [y, y], color="k", lw=2.2)
    start, end = ((x + (first + last + 1) / 2, y) for x, y in ends)
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "lw": 1.0, "color": "0.1",
                                              "shrinkA": 0, "shrinkB": 0})


def curves(lines: dict, xlabel: str, ylabel: str, path: str, title: str, ylog=True) -> None:
    """Lines of (x, y) by name, told apart by dash and mark; "published" as points alone."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for (name, points), dash, mark in zip(lines.items(), ("-", "--", "-.", ":"), "os^x"):
        axes.plot(*zip(*points), color="0.1", marker=mark, label=name,
                  markersize=9 if name == "published" else 4,
                  linestyle="none" if name == "published" else dash)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title, xscale="log",
             yscale="log" if ylog else "linear")
    axes.grid(color="0.88")
    axes.legend()
    figure.savefig(path, dpi=130)
