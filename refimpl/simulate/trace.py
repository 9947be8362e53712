"""The transfer table of an algorithm, made by running it on symbols instead of numbers."""
import dataclasses

import numpy as np

from refimpl.collective import grid, halving_doubling, hierarchical, ring, torus
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


@dataclasses.dataclass
class Transfer:
    """In round `when`, rank `source` sends `elements`, holding `content`, to `dest`."""
    when: int
    phase: str
    turn: int
    source: int
    dest: int
    elements: range
    content: list[Symbol]


class Trace:
    """Runs the algorithm; `transfers` in order of time, `states[t][rank][element]` before round t.

    A round is a unit of time, the length of every message. The buffer has one element per rank.
    """

    def __init__(self, algorithm: str, ranks: int, shape=None, ranks_per_node=None):
        cyclic = algorithm != "halving_doubling"
        shape = shape or grid.default_shape(ranks) if algorithm == "torus" else None
        self.algorithm, self.ranks, self.shape, self.transfers = algorithm, ranks, shape, []
        self.buffers = [np.array([Symbol(str(r), (r,), cyclic)] * ranks) for r in range(ranks)]
        self.states = [[list(b) for b in self.buffers]]

        def program(comm):
            place = comm
            if algorithm == "torus":
                place = grid.make_grid(comm, shape)
            elif algorithm == "hierarchical":
                place = hierarchical.make_nodes(comm, ranks_per_node or max(1, ranks // 2))
            module = {"ring": ring, "torus": torus, "hierarchical": hierarchical,
                      "halving_doubling": halving_doubling}[algorithm]
            module.allreduce(self.buffers[comm.rank], place)
        run(ranks, program, cost=self, watch=self.watch)
        assert _texts(self.buffers) == _texts(self.states[-1]), "the drawing is not what ran"

    def transfer(self, source, dest, nbytes, now, phase):
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
            self.transfers.append(Transfer(when, phase, turn, here.number, there.number, elements,
                                           list(data)))
        for e, symbol in zip(elements, data):
            self.states[-1][there.number][e] = symbol if copies else target[e] + symbol
            if not copies:  # the sender's own copy has had its use
                self.states[-1][here.number][e] = dataclasses.replace(symbol, spent=True)

    def table(self) -> str:
        """One line per message, a heading per round and phase, and the order of addition."""
        lines, heading = [f"{self.algorithm}, {self.ranks} ranks, {self.ranks} chunks"], None
        width = max((len(span(t.elements)) for t in self.transfers), default=1)
        for t in sorted(self.transfers, key=lambda t: (t.when, t.phase, t.turn, t.source)):
            if heading != (t.when, t.phase, t.turn):
                heading = (t.when, t.phase, t.turn)
                lines.append(f"round {t.when}: {t.phase} {t.turn}")
            texts = list(dict.fromkeys(_texts([t.content])[0]))
            lines.append(f"  rank {t.source} -> {t.dest}   chunk {span(t.elements):<{width}}   "
                         f"{texts[0] if len(texts) == 1 else 'complete sums'}")
        lines.append("order of addition")
        return "\n".join(lines + [f"  chunk {span(e):<{width}}   {text}"
                                  for e, text in self.orders()])

    def orders(self) -> list[tuple[range, str]]:
        """(chunks, how their sum was formed), neighbours of one order together."""
        made: list = []
        for e, text in enumerate(_texts(self.buffers)[0]):
            if made and made[-1][1] == text:
                made[-1] = (range(made[-1][0][0], e + 1), text)
            else:
                made.append((range(e, e + 1), text))
        return made


def _texts(buffers) -> list[list[str]]:
    return [[str(symbol) for symbol in buffer] for buffer in buffers]


def span(elements: range) -> str:
    return str(elements[0]) if len(elements) == 1 else f"{elements[0]}-{elements[-1]}"
