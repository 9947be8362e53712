"""The picture of a trace: every rank's buffer before each round, and an arrow for every message.

The darker a chunk, the more ranks are in it; black is the complete sum. Readable without colour.
"""
from refimpl.simulate.trace import Trace, span


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
    for t, state in enumerate(trace.states):
        for r, buffer in enumerate(state):
            for e, symbol in enumerate(buffer):
                _cell(axes, r * pitch + e, -1.02 * t, symbol, ranks, cell)
    for r in range(ranks):
        place = f": row {r // trace.shape[1]}, column {r % trace.shape[1]}" if trace.shape else ""
        axes.text(r * pitch + ranks / 2, 0.5, f"rank {r}{place if cell > 0.4 else ''}", ha="center",
                  weight="bold")
        for e in range(ranks if cell > 0.2 else 0):
            axes.text(r * pitch + e + .5, 0.30, e, ha="center", va="center", size=7, color=".35")
    for t in trace.transfers:
        _arrow(axes, t, pitch)
    for when in range(rows - 1):
        phases = dict.fromkeys(f"{t.phase}, {t.turn}" for t in trace.transfers if t.when == when)
        axes.text(left, -1.02 * when - 0.61, "\n".join(phases), va="center", size=8.5)
    grid = f" {trace.shape[0]} x {trace.shape[1]}" if trace.shape else ""
    axes.text(left, 0.78, f"{trace.algorithm.replace('_', '/')}{grid}, {ranks} ranks", size=13,
              weight="bold", va="center")
    axes.text(left, -1.02 * rows + 0.24, "complete sums:  " + "     ".join(
        f"chunk {span(e)} = {text}" for e, text in trace.orders()), size=8, va="center")
    axes.text(left, -1.02 * rows - 0.06, "darker: more ranks are in it;  Σ: complete;  "
              "arrow: a message;  white: given away, now scratch", size=8, va="center", color=".35")
    figure.savefig(path, dpi=130)


def _cell(axes, x, y, symbol, ranks, cell):
    from matplotlib.patches import Rectangle
    full = len(symbol.ranks) == ranks
    grey = "0.12" if full else "1" if symbol.spent else str(0.94 - 0.4 * len(symbol.ranks) / ranks)
    axes.add_patch(Rectangle((x, y - 0.19), 1, 0.38, facecolor=grey, edgecolor="0.25", lw=0.7))
    text = "Σ" if full else symbol.text
    size = min(9.0, 80 * cell / max(2, len(text)))
    if size >= 3.5:
        axes.text(x + 0.5, y, text, ha="center", va="center", size=size,
                  color="white" if full else "0.65" if symbol.spent else "black")


def _arrow(axes, transfer, pitch):
    middle = (transfer.elements[0] + transfer.elements[-1] + 1) / 2
    start = (transfer.source * pitch + middle, -1.02 * transfer.when - 0.19)
    end = (transfer.dest * pitch + middle, -1.02 * (transfer.when + 1) + 0.20)
    if len(transfer.elements) > 1:
        for (x, y), rank in ((start, transfer.source), (end, transfer.dest)):
            axes.plot([rank * pitch + transfer.elements[0] + 0.08,
                       rank * pitch + transfer.elements[-1] + 0.92], [y, y], color="k", lw=2.2)
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
