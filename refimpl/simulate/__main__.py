"""Collectives on simulated ranks: what they do (trace) and how long they take on a cluster."""
import math
import pathlib
import signal
import sys

import numpy as np

from refimpl.collective.grid import default_shape
from refimpl.config import GRID, PICTURE, Parser, checked, load_recipe
from refimpl.errors import UsageError
from refimpl.settings import Settings
from refimpl.simulate import step as steps, trace as drawing
from refimpl.simulate.cost import Cluster, tomllib
from refimpl.simulate.form import ALGORITHMS, closed_form, simulated
from refimpl.simulate.world import RankFailed

MOST = 1_500_000  # messages that are simulated one by one; above, the closed form answers alone
FIGURES = tomllib.loads(pathlib.Path(__file__).with_name("published.toml").read_text())


UNITS, MOST_RANKS = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}, 1_000_000
COUNT = checked(int, lambda n: 1 <= n <= MOST_RANKS, f"a whole number from 1 to {MOST_RANKS}")
SPAN = checked(lambda text: tuple(map(int, text.split(":"))), lambda span: 1 <= span[0] <= span[1]
               <= MOST_RANKS and len(span) == 2, "FIRST:LAST, such as 4:4096")
SIZE = checked(lambda t: float(t[:-1]) * UNITS[t[-1]] if t[-1] in UNITS else float(t),
               lambda nbytes: 1 <= nbytes <= 1e11, "bytes, from 1 to 100G, such as 51M (a million)")
CONSTANT = checked(lambda text: (text.split("=")[0], float(text.split("=")[1])), bool,
                   "NAME=VALUE, such as between.latency=5e-6")

OPTIONS = {
    "cluster": {}, "grid": {"type": GRID, "metavar": "RxC"},
    "set": {"type": CONSTANT, "action": "append", "default": [], "metavar": "NAME=VALUE",
            "help": "change a constant"}, "plot": {"type": PICTURE, "metavar": "F.png"},
    "recipe": {"default": "mikami_v1_224s"}, "wire": {"choices": ("none", "float16", "bfloat16")},
    "algorithm": {"choices": ALGORITHMS}}


def check_grid(grid, algorithms, ranks: int) -> None:
    text = "x".join(map(str, grid or ()))
    if grid and "torus" not in algorithms:
        raise UsageError(f"--grid {text}: is for a torus; leave it out for {' '.join(algorithms)}")
    if grid and math.prod(grid) != ranks:
        raise UsageError(f"--grid {text}: a torus of {math.prod(grid)} ranks, not of {ranks}")


def trace(settings) -> None:
    check_grid(settings.grid, [settings.algorithm], settings.ranks)
    if settings.ranks_per_node and settings.algorithm != "hierarchical":
        raise UsageError(f"--ranks-per-node: {settings.algorithm} knows no nodes; leave it out")
    if settings.ranks > (16 if settings.plot else 128):
        raise UsageError(f"--ranks {settings.ranks}: at most 16 in a picture, 128 in a table")
    made = drawing.Trace(settings.algorithm, settings.ranks, settings.grid, settings.ranks_per_node)
    print(made.table())
    if settings.plot:
        drawing.draw(made, settings.plot)


def allreduce(settings) -> None:
    cluster, ranks, nbytes = (Cluster(settings.cluster or "abci", settings.set), settings.ranks,
                              settings.bytes)
    names = ALGORITHMS if "all" in settings.algorithms else settings.algorithms
    check_grid(settings.grid, names, ranks)
    shape = settings.grid or default_shape(ranks, cluster.per_node(ranks))
    print(f"{cluster.name}, {ranks} ranks, {nbytes:.4g} bytes, torus {shape[0]}x{shape[1]}\n"
          f"{'':18}{'simulated':>12}{'closed form':>13}{'rounds':>8}   MB between ranks: "
          f"{'in nodes':>9}{'nodes':>9}{'leaves':>9}   busiest")
    for name in names:
        case = cluster, name, ranks, nbytes, shape, settings.across
        form, ran = closed_form(*case), "not run"
        if 0 < form["rounds"] * ranks <= MOST and not settings.closed_form:
            ran = f"{max(simulated(*case)) * 1e3:.3f} ms"
        moved = "".join(f"{form[link] / 1e6:9.0f}" for link in ("inside", "between", "uplink"))
        print(f"{name:18}{ran:>12}{form['seconds'] * 1e3:10.3f} ms{form['rounds']:8}   {'':18}{moved}"
              f"   {form['busiest']}")
    if settings.plot:
        drawing.curves({name: [(b, closed_form(cluster, name, ranks, b, shape, settings.across)[
            "seconds"]) for b in np.geomspace(2 ** 10, 2 ** 30, 21)] for name in names},
            "bytes", "seconds", settings.plot, f"{ranks} ranks of {cluster.name} (closed form)")


def recipe_plans(settings):
    """The recipe, its cluster, and (until epoch, ranks, plan) of each band."""
    recipe = load_recipe(settings.recipe)
    s, machine = Settings(**recipe.values), recipe.machine
    usual = {4: "abci", 8: "bigbasin"}.get(machine.get("per_node"), "h100")
    plan = {"net": (tuple(s.depth), s.width, s.image_size), "algorithm": settings.algorithm or (
                s.allreduce if s.allreduce in ALGORITHMS else "hierarchical"), "across": s.across,
            "wire": 4 if (settings.wire or s.wire) == "none" else 2,
            "shape": vars(settings).get("grid") or GRID(machine.get("grid", "1x1"))}
    if plan["net"] != steps.RESNET50:
        print(f"note: {recipe.name}'s network takes ResNet-50's time per multiplication here, and its "
              "classes and images are counted as ImageNet's")
    return (recipe, Cluster(settings.cluster or usual, settings.set),
            [(b.until_epoch, b.workers, {**plan, "n": b.n}) for b in s.in_bands()])


def step(settings) -> None:
    recipe, cluster, bands = recipe_plans(settings)
    print(f"{recipe.name} on {cluster.name}: middle of the unknown constants, [low, high]")
    totals, begun, base = [0.0, 0.0, 0.0], 0, int(cluster["node.ranks"])
    for until, ranks, plan in bands:
        ranks = settings.ranks or ranks
        check_grid(settings.grid, [plan["algorithm"]], ranks)
        at = steps.step(cluster, ranks, plan)
        *times, most, _ = steps.interval(cluster, lambda c: steps.step(c, ranks, plan)["seconds"])
        low, middle, high = (t * 1e3 for t in times)
        print(f"epochs {begun}-{until}: {ranks} ranks x {plan['n']}: {middle:.1f} ms a step "
              f"[{low:.1f}, {high:.1f}; mostly {most}], allreduce {at['allreduce'] * 1e3:.1f} ms of "
              f"which {at['hidden']:.0%} hidden, {at['images_per_s']:,.0f} images/s, efficiency "
              f"{steps.efficiency(cluster, ranks, base, plan):.1%} against {base}")
        count = math.ceil(steps.IMAGES / (ranks * plan["n"])) * (until - begun)
        totals, begun = [t + count * s for t, s in zip(totals, times)], until
    print(f"whole recipe: {totals[1]:.0f} s [{totals[0]:.0f}, {totals[2]:.0f}], training steps "
          f"alone; published: {recipe.published.get('time', {}).get('value', '-')}")


def scaling(settings) -> None:
    recipe, cluster, bands = recipe_plans(settings)
    ranks, last = settings.range
    plan, base = {**bands[-1][2], "n": 32}, int(cluster["node.ranks"])
    lines = {name: [] for name in ("worst end", "middle", "best end of all ranges")}
    while ranks <= last:
        low, middle, high, *_ = steps.interval(
            cluster, lambda c: steps.efficiency(c, ranks, base, plan))
        print(f"{ranks:6} ranks  efficiency {middle:6.1%} [{low:6.1%}, {high:6.1%}]")
        for line, value in zip(lines.values(), (low, middle, high)):
            line.append((ranks, value))
        ranks *= 2
    if settings.plot:
        lines["published"] = [(e["ranks"], e["published"]) for e in FIGURES.values()
                              if e["cluster"] == cluster.name and e["quantity"] == "efficiency"]
        drawing.curves(lines, "GPUs", "efficiency", settings.plot,
                    f"{recipe.name} on {cluster.name}", ylog=False)


def papers(settings) -> None:
    print(f"{'':54}published   low  middle    high           moved most by")
    for entry in FIGURES.values():
        low, middle, high, most, by = steps.interval(
            Cluster(entry["cluster"]), lambda c: steps.published(entry, c))
        print(f"{entry['claim']:54}{entry['published']:9.3f}{low:8.3f}{middle:8.3f}{high:8.3f}  "
              f"{'inside ' if low <= entry['published'] <= high else 'OUTSIDE'}  {most} ({by:.3f})")


def parser() -> Parser:
    top = Parser(prog="python -m refimpl.simulate", description=__doc__)
    top.set_defaults(run=lambda settings: top.print_help() or 2)
    commands = top.add_subparsers()

    def command(function, text, *options, **own):
        one = commands.add_parser(function.__name__, help=text)
        one.set_defaults(run=function)
        for name, how in {**{name: OPTIONS[name] for name in options}, **own}.items():
            one.add_argument("--" + name.replace("_", "-"), **how)
    recipe = "cluster", "set", "recipe", "wire", "algorithm"
    command(trace, "print and draw who sends what to whom", "grid", "plot",
            ranks={"type": COUNT, "default": 4},
            algorithm={"choices": ALGORITHMS, "default": "ring"},
            ranks_per_node={"type": COUNT, "help": "hierarchical; default: two nodes"})
    command(allreduce, "time on a cluster, simulated and in closed form", "cluster", "set", "grid",
            "plot", closed_form={"action": "store_true", "help": "simulate nothing"},
            ranks={"type": COUNT, "required": True}, bytes={"type": SIZE, "default": 51e6},
            across={"choices": ALGORITHMS[:3], "default": "halving_doubling"}, algorithms={
                "nargs": "+", "choices": (*ALGORITHMS, "window", "all"), "default": ["all"]})
    command(step, "a recipe's step and whole time", *recipe, "grid", ranks={"type": COUNT})
    command(scaling, "efficiency over ranks", *recipe, "plot", ranks={
        "dest": "range", "type": SPAN, "default": "4:4096", "metavar": "FIRST:LAST"})
    command(papers, "published figures beside the model's intervals")
    return top


def main() -> int:
    try:
        return (settings := parser().parse_args()).run(settings) or 0
    except (UsageError, RankFailed) as error:
        if not isinstance(error.__cause__ or error, UsageError):
            raise
        print(f"refimpl.simulate: {error.__cause__ or error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    sys.exit(main())
