"""Collectives on simulated ranks: what they do (trace) and how long they take on a cluster."""
import argparse
import math
import os
import pathlib
import sys

from refimpl.collective.grid import default_shape
from refimpl.config import Parser, load_recipe
from refimpl.errors import UsageError
from refimpl.settings import Settings
from refimpl.simulate import draw, fit as fits, step as steps
from refimpl.simulate.cost import ALGORITHMS, WHOLE, Cluster, closed_form, simulated, tomllib
from refimpl.simulate.trace import Trace
from refimpl.simulate.world import RankFailed

MOST = 1_500_000  # messages that are simulated one by one; above, the closed form answers alone
FIGURES = tomllib.loads(pathlib.Path(__file__).with_name("published.toml").read_text())


def checked(convert, sound, expected: str):
    """An argparse type: convert(text) if that is `sound`; otherwise a line saying what is."""
    def made(text):
        try:
            if sound(value := convert(text)):
                return value
        except (ValueError, LookupError, TypeError):
            pass
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
    return made


UNITS, MOST_RANKS = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}, 1_000_000
COUNT = checked(int, lambda n: 1 <= n <= MOST_RANKS, f"a whole number from 1 to {MOST_RANKS}")
SPAN = checked(lambda text: tuple(map(int, text.split(":"))), lambda span: len(span) == 2
               and 1 <= span[0] <= span[1] <= MOST_RANKS, "FIRST:LAST, such as 4:4096")
SIZE = checked(lambda t: float(t[:-1]) * UNITS[t[-1]] if t[-1] in UNITS else float(t),
               lambda nbytes: 1 <= nbytes <= 1e11, "bytes, from 1 to 100G, such as 51M")
GRID = checked(lambda text: tuple(map(int, text.lower().split("x"))),
               lambda shape: len(shape) == 2 and min(shape) > 0, "ROWSxCOLUMNS, such as 34x64")
CONSTANT = checked(lambda text: (text.split("=")[0], float(text.split("=")[1])), bool,
                   "NAME=VALUE, such as between.latency=5e-6")
PICTURE = checked(pathlib.Path, lambda path: path.suffix in (".png", ".pdf", ".svg") and os.access(
    path.parent, os.W_OK) and not path.is_dir(), "a .png, .pdf or .svg in a folder that exists")


def check_grid(settings, algorithms, ranks: int) -> None:
    if settings.grid and ("torus" not in algorithms or math.prod(settings.grid) != ranks):
        raise UsageError(f"--grid {settings.grid}: is for a torus of {ranks} ranks, and holds "
                         f"{math.prod(settings.grid)}; leave it out for {' '.join(algorithms)}")


def trace(settings) -> None:
    check_grid(settings, [settings.algorithm], settings.ranks)
    if settings.ranks > (16 if settings.plot else 128):
        raise UsageError(f"--ranks {settings.ranks}: at most 16 in a picture, 128 in a table")
    made = Trace(settings.algorithm, settings.ranks, settings.grid, settings.ranks_per_node)
    print(made.table())
    if settings.plot:
        draw.draw(made, settings.plot)


def allreduce(settings) -> None:
    cluster, ranks, nbytes = (Cluster(settings.cluster or "abci", settings.set), settings.ranks,
                              settings.bytes)
    names = ALGORITHMS if "all" in settings.algorithms else settings.algorithms
    check_grid(settings, names, ranks)
    shape = settings.grid or default_shape(ranks, cluster.per_node(ranks))
    print(f"{cluster.name}, {ranks} ranks, {nbytes:.4g} bytes, torus {shape[0]}x{shape[1]}\n"
          f"{'':18}{'simulated':>12}{'closed form':>13}{'rounds':>8}   MB between ranks: "
          f"{'in nodes':>9}{'nodes':>9}{'leaves':>9}   busiest")
    for name in names:
        form = closed_form(cluster, name, ranks, nbytes, shape, settings.across)
        ran = "not run"
        if form["rounds"] * ranks <= MOST and not settings.closed_form:
            at = simulated(cluster, name, ranks, nbytes, shape, settings.across)
            ran = f"{max(at) * 1e3:.3f} ms"
        print(f"{name:18}{ran:>12}{form['seconds'] * 1e3:10.3f} ms{form['rounds']:8}   {'':18}"
              f"{form['inside'] / 1e6:9.0f}{form['between'] / 1e6:9.0f}{form['uplink'] / 1e6:9.0f}"
              f"   {form['busiest']}")
    if settings.plot:
        draw.curves({name: [
            (b, closed_form(cluster, name, ranks, b, shape, settings.across)["seconds"])
            for b in (2.0 ** e for e in range(10, 31))] for name in names},
               "bytes", "seconds", settings.plot, f"{ranks} ranks of {cluster.name} (closed form)")


def recipe_plans(settings):
    """The recipe, its cluster, and (until epoch, ranks, plan) of each band."""
    recipe = load_recipe(settings.recipe)
    s = Settings(**recipe.values)
    hardware = {k: v["value"] for k, v in recipe.hardware.items()}
    usual = {4: "abci", 8: "bigbasin"}.get(hardware.get("per_node"), "h100")
    plan = {"algorithm": settings.algorithm or (
                s.allreduce if s.allreduce in ALGORITHMS else "hierarchical"), "across": s.across,
            "wire": 4 if (settings.wire or s.wire) == "none" else 2,
            "shape": vars(settings).get("grid") or GRID(hardware.get("grid", "1x1"))}
    if (s.depth, s.width, s.image_size) != ((3, 4, 6, 3), 64, 224):
        print(f"note: {recipe.name} is another network; these are times of ResNet-50 on ImageNet")
    return (recipe, Cluster(settings.cluster or usual, settings.set),
            [(b.until_epoch, b.workers, {**plan, "n": b.n}) for b in s.in_bands()])


def step(settings) -> None:
    recipe, cluster, bands = recipe_plans(settings)
    print(f"{recipe.name} on {cluster.name}: middle of the unknown constants, [low, high]")
    totals, begun, base = [0.0, 0.0, 0.0], 0, int(cluster["node.ranks"])
    for until, ranks, plan in bands:
        ranks = settings.ranks or ranks
        check_grid(settings, [plan["algorithm"]], ranks)
        at = steps.step(cluster, ranks, plan)
        *times, most, _ = steps.interval(cluster, lambda c: steps.step(c, ranks, plan)["seconds"])
        print(f"epochs {begun}-{until}: {ranks} ranks x {plan['n']}: {times[1] * 1e3:.1f} ms a "
              f"step [{times[0] * 1e3:.1f}, {times[2] * 1e3:.1f}; mostly {most}], allreduce "
              f"{at['allreduce'] * 1e3:.1f} ms of which {at['hidden']:.0%} hidden, "
              f"{at['images_per_s']:,.0f} images/s, efficiency "
              f"{steps.efficiency(cluster, ranks, base, plan):.1%} against {base}")
        count = math.ceil(steps.IMAGES / (ranks * plan["n"])) * (until - begun)
        totals, begun = [t + count * s for t, s in zip(totals, times)], until
    print(f"whole recipe: {totals[1]:.0f} s [{totals[0]:.0f}, {totals[2]:.0f}], training steps "
          f"alone; published: {recipe.published.get('time', {}).get('value', '-')}")


def scaling(settings) -> None:
    recipe, cluster, bands = recipe_plans(settings)
    ranks, last = settings.range
    plan, base, rows = {**bands[-1][2], "n": 32}, int(cluster["node.ranks"]), []
    while ranks <= last:
        low, middle, high, *_ = steps.interval(
            cluster, lambda c: steps.efficiency(c, ranks, base, plan))
        rows.append((ranks, low, middle, high))
        print(f"{ranks:6} ranks  efficiency {middle:6.1%} [{low:6.1%}, {high:6.1%}]")
        ranks *= 2
    if settings.plot:
        lines = {name: [(r[0], r[i]) for r in rows] for i, name in (
            (3, "best end of all ranges"), (2, "middle"), (1, "worst end"))}
        lines["published"] = [(e["ranks"], e["published"]) for e in FIGURES.values()
                              if e["cluster"] == cluster.name and e["quantity"] == "efficiency"]
        draw.curves(lines, "GPUs", "efficiency", settings.plot, f"{recipe.name} on {cluster.name}",
               ylog=False)


def papers(settings) -> None:
    print(f"{'':54}published   low  middle    high           moved most by")
    for entry in FIGURES.values():
        low, middle, high, most, by = steps.interval(
            Cluster(entry["cluster"]), lambda c: steps.published(entry, c))
        print(f"{entry['claim']:54}{entry['published']:9.3f}{low:8.3f}{middle:8.3f}{high:8.3f}  "
              f"{'inside ' if low <= entry['published'] <= high else 'OUTSIDE'}  {most} ({by:.3f})")


def fit(settings) -> None:
    rows = fits.read(settings.measured)
    cluster = Cluster(settings.cluster or "two_cores", settings.set)
    cluster = fits.fit(cluster, rows, settings.constants)
    for name in settings.constants:
        print(f"{name} = {cluster[name]:.4g}")
    print(fits.report(cluster, rows))


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="python -m refimpl.simulate", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)

    def command(function, text, *options):
        one = commands.add_parser(function.__name__, help=text)
        one.set_defaults(run=function)
        for name, *rest in options:
            one.add_argument(name, **(rest[0] if rest else {}))
    common = (("--cluster",), ("--set", {"type": CONSTANT, "action": "append", "default": [],
               "metavar": "NAME=VALUE", "help": "change a constant"}))
    layout = (("--grid", {"type": GRID, "metavar": "RxC"}),
              ("--plot", {"type": PICTURE, "metavar": "F.png"}))
    recipe = (("--recipe", {"default": "mikami_v1_224s"}),
              ("--wire", {"choices": ("none", "float16", "bfloat16")}),
              ("--algorithm", {"choices": ALGORITHMS}))
    command(trace, "print and draw who sends what to whom", *layout,
            ("--ranks", {"type": COUNT, "default": 4}),
            ("--algorithm", {"choices": ALGORITHMS, "default": "ring"}),
            ("--ranks-per-node", {"type": COUNT, "help": "hierarchical; default: two nodes"}))
    command(allreduce, "time on a cluster, simulated and in closed form", *common, *layout,
            ("--closed-form", {"action": "store_true", "help": "simulate nothing"}),
            ("--ranks", {"type": COUNT, "required": True}), ("--across", {
                "choices": ALGORITHMS[:3], "default": "halving_doubling"}),
            ("--bytes", {"type": SIZE, "default": 51e6}),
            ("--algorithms", {"nargs": "+", "choices": (*ALGORITHMS, "all"), "default": ["all"]}))
    command(step, "a recipe's step and whole time", *common, *layout[:1], *recipe,
            ("--ranks", {"type": COUNT}))
    command(scaling, "efficiency over ranks", *common, *layout[1:], *recipe, ("--ranks", {
            "dest": "range", "type": SPAN, "default": "4:4096", "metavar": "FIRST:LAST"}))
    command(papers, "published figures beside the model's intervals")
    command(fit, "constants from measurements", *common, ("measured", {"nargs": "+",
            "metavar": "F.jsonl"}), ("--constants", {"nargs": "+", "default": [
                "inside.overhead", "inside.bandwidth", "rank.add"],
                "choices": sorted({*Cluster("abci")} - {*WHOLE})}))
    return top


def main() -> int:
    try:
        (settings := parser().parse_args()).run(settings)
    except (UsageError, RankFailed) as error:
        if not isinstance(error.__cause__ or error, UsageError):
            raise
        print(error.__cause__ or error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
