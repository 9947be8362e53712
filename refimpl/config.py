"""One frozen dataclass of settings; the command line is made from it and recipes are read into it.

    defaults  <  recipe (refimpl/recipes/NAME.toml, over its base)  <  command line
"""
import argparse
import dataclasses
import difflib
import functools
import pathlib
import shlex
from dataclasses import dataclass, field

from refimpl.errors import UsageError

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

RECIPES = pathlib.Path(__file__).parent / "recipes"
TAGS = {"read": "read in the paper", "secondary": "from a secondary source, named",
        "derived": "arithmetic from other facts", "assumed": "not read: recalled or chosen",
        "ours": "this project's own"}
RULES = {"linear": "reference rate x kn / lr_batch (Goyal 2.1)", "sqrt": "x sqrt(kn / lr_batch)",
         "fixed": "the same for every kn"}


@dataclass(frozen=True)
class Band:
    """Epochs up to `until_epoch` (exclusive, counted from 0) with one total minibatch."""
    until_epoch: int
    workers: int
    n: int
    momentum: float | None = None  # None: the recipe's momentum_rule
    lr: float | None = None        # reference rate of this band; None: the recipe's lr_rule

    @property
    def kn(self) -> int:
        return self.workers * self.n

    def __str__(self):
        extra = [f":{k}={v!r}" for k, v in (("m", self.momentum), ("lr", self.lr)) if v is not None]
        return f"{self.until_epoch}:{self.workers}x{self.n}" + "".join(extra)


def _is(default, group: str, text: str, *choices: str, least: float | None = None):
    return field(default=default, metadata=dict(group=group, help=text, choices=choices, least=least))


RUN, BATCH, RATE = "the run", "minibatch", "learning rate (Goyal 2.1, 2.2, 5.1)"
STEP, NET, DATA = "optimizer", "network", "images"
NUMBERS, SUM, SPEED, CHECKS = "numbers", "allreduce", "devices and speed", "checks and stops"


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run; see `python -m refimpl.train --help`."""
    recipe: str = _is("demo", RUN, "name of a recipe (--list-recipes) or a path to a .toml file")
    data: str = _is("", RUN, "folder or stored zip with train/ and val/ (default: embedded sample)")
    name: str = _is("", RUN, "name of the run (default: the recipe's)")
    out: str = _is("runs", RUN, "folder that receives <name>-<time>/")
    seed: int = _is(1, RUN, "of initial weights, sample order and augmentation", least=0)
    epochs: int = _is(90, RUN, "passes over the training images", least=1)
    max_steps: int = _is(0, RUN, "stop after so many steps (0: all)", least=0)
    eval_every: int = _is(1, RUN, "epochs between validations (0: only the last)", least=0)
    save_every: int = _is(1, RUN, "epochs between checkpoints (0: only the last)", least=0)
    save_steps: int = _is(0, RUN, "also a checkpoint every so many steps (0: no)", least=0)
    resume: str = _is("", RUN, "checkpoint to go on from; auto: the newest of this run's name")
    images: int = _is(0, RUN, "training images, for --dry-run without data (0: count)", least=0)

    workers: int = _is(8, BATCH, "k; any number of ranks up to k plays them", least=1)
    n: int = _is(32, BATCH, "samples per worker: the minibatch that batch norm sees", least=1)
    bands: tuple[Band, ...] = _is((), BATCH, "batch-size control: UNTIL:KxN[:m=M][:lr=RATE] ..., "
                                  "e.g. '5:2176x16 90:2176x32' (default: one band)")

    base_lr: float = _is(0.1, RATE, "reference rate of a minibatch of lr_batch", least=0)
    lr_batch: int = _is(256, RATE, "minibatch that base_lr is meant for", least=1)
    lr_rule: str = _is("linear", RATE, "how the rate follows kn", *RULES)
    warmup: str = _is("gradual", RATE, "first epochs", "none", "constant", "gradual")
    warmup_epochs: float = _is(5.0, RATE, "length of the warm-up", least=0)
    warmup_lr: float = _is(0.1, RATE, "rate of the first step of a warm-up", least=0)
    decay: str = _is("step", RATE, "after the warm-up", "step", "polynomial", "none")
    decay_epochs: tuple[int, ...] = _is((30, 60, 80), RATE, "where step decay multiplies the rate")
    decay_factor: float = _is(0.1, RATE, "what step decay multiplies by", least=0)
    decay_power: float = _is(2.0, RATE, "power of polynomial decay", least=0)
    end_lr: float = _is(0.0, RATE, "where polynomial decay ends", least=0)

    optimizer: str = _is("sgd", STEP, "update rule", "sgd", "lars_nnl", "lars_tf")
    momentum: float = _is(0.9, STEP, "m", least=0)
    momentum_form: str = _is("eq9", STEP, "rate outside (eq9) or inside (eq10) the momentum",
                             "eq9", "eq10")
    momentum_correction: bool = _is(True, STEP, "eq10: scale v when the rate changes (remark 2)")
    momentum_rule: str = _is("constant", STEP, "in later bands: as it is, or so that "
                             "lr N / (kn (1 - m)) stays", "constant", "noise_scale")
    nesterov: bool = _is(True, STEP, "Nesterov momentum (Goyal 5.1)")
    weight_decay: float = _is(1e-4, STEP, "lambda; never on batch norm's gamma and beta", least=0)
    decay_bias: bool = _is(True, STEP, "decay the bias of the last layer too")
    lars_coefficient: float = _is(0.001, STEP, "trust coefficient of LARS", least=0)
    lars_eps: float = _is(1e-6, STEP, "epsilon of LARS", least=0)
    label_smoothing: float = _is(0.0, STEP, "epsilon: target 1 - e + e/classes", least=0)

    depth: tuple[int, ...] = _is((3, 4, 6, 3), NET, "bottleneck blocks per stage")
    width: int = _is(64, NET, "channels of the stem", least=1)
    stem: str = _is("imagenet", NET, "7x7 stride 2 and pooling, or 3x3 stride 1",
                    "imagenet", "small")
    gamma_zero: bool = _is(True, NET, "gamma 0 in the last batch norm of a block (Goyal 5.1)")
    batch_norm: str = _is("running", NET, "statistics of evaluation: running average, last "
                          "minibatch, or recomputed before it", "running", "last", "recomputed")

    image_size: int = _is(224, DATA, "side of a training crop and of the validation crop", least=1)
    val_short_side: int = _is(256, DATA, "shorter side before the validation crop", least=1)
    classes: int = _is(0, DATA, "0: as many as the data has", least=0)
    color_jitter: float = _is(0.0, DATA, "brightness, contrast, saturation (0: none)", least=0)
    lighting: float = _is(0.0, DATA, "standard deviation of PCA lighting (0: none)", least=0)
    bad_images: str = _is("stop", DATA, "what a broken image does", "stop", "replace")

    precision: str = _is("fp32", NUMBERS, "forward and backward", "fp32", "bf16", "fp16")
    loss_scale: float = _is(1.0, NUMBERS, "power of two on the loss (0: automatic)", least=0)
    wire: str = _is("none", NUMBERS, "16-bit type of gradients on the network",
                    "none", "float16", "bfloat16")
    sum: str = _is("plain", NUMBERS, "exact: fixed point, equal bits for any number of ranks",
                   "plain", "exact")

    allreduce: str = _is("auto", SUM, "algorithm", "auto", "ring", "torus", "halving_doubling",
                         "hierarchical", "window", "mpi")
    grid: str = _is("auto", SUM, "RxC: rows x columns of the torus, or auto")
    bucket_mb: float = _is(8.0, SUM, "gradients summed together, in MB", least=0)
    overlap: str = _is("auto", SUM, "allreduce while backward runs", "auto", "on", "off")

    device: str = _is("auto", SPEED, "where tensors live", "auto", "cpu", "cuda")
    threads: int = _is(0, SPEED, "threads per rank (0: cores of the node / its ranks)", least=0)
    loaders: int = _is(-1, SPEED, "loader processes per rank (0: none, -1: by cores)", least=-1)
    channels_last: bool = _is(False, SPEED, "NHWC memory layout")

    trace: str = _is("", CHECKS, "file: a JSON line per step with digests of sums and weights")
    state: str = _is("", CHECKS, "file: weights, buffers and momentum at the end")
    timeline: str = _is("", CHECKS, "file: when each bucket was ready and summed")
    check_every: int = _is(0, CHECKS, "steps between weight digests (0: per epoch)", least=0)
    timeout: float = _is(300.0, CHECKS, "seconds of silence before the watchdog stops", least=1)

    def in_bands(self) -> tuple[Band, ...]:
        """The bands, also where there is only one."""
        return self.bands or (Band(self.epochs, self.workers, self.n),)


FIELDS = {f.name: f for f in dataclasses.fields(Settings)}


@dataclass(frozen=True)
class Recipe:
    """A published run as data: `provenance[name]` and the entries of `published` and `hardware`
    hold tag, where and (the latter two) value and perhaps spread."""
    name: str
    title: str
    notes: str
    values: dict
    provenance: dict
    published: dict
    hardware: dict


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load_recipe(name: str, _above: tuple[str, ...] = ()) -> Recipe:
    """Read a recipe over its base. UsageError: unknown name or key, missing tag, cyclic base."""
    path = pathlib.Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    if not path.is_file():
        raise UsageError(f"no recipe {name!r}{_nearest(name, recipe_names())}; "
                         "--list-recipes shows all, or give a path to a .toml file")
    if str(path) in _above:
        raise UsageError(f"recipe {name!r}: its base leads back to itself; remove one `base`")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"recipe {path}: not TOML: {error}") from None
    base = Recipe(path.stem, "", "", {}, {}, {}, {})
    if "base" in table:
        base = load_recipe(table.pop("base"), (*_above, str(path)))
    title, notes = table.pop("title", ""), table.pop("notes", "")
    published, hardware = table.pop("published", {}), table.pop("hardware", {})
    values = {key: convert(key, _tagged(path, key, entry)["value"]) for key, entry in table.items()}
    for part in (published, hardware):
        for key, entry in part.items():
            _tagged(path, key, entry)
    sources = {key: {k: v for k, v in entry.items() if k != "value"} for key, entry in table.items()}
    return Recipe(path.stem, title, notes, {**base.values, **values},
                  {**base.provenance, **sources}, published, {**base.hardware, **hardware})


def _tagged(path, key: str, entry) -> dict:
    if not isinstance(entry, dict) or "value" not in entry or entry.get("tag") not in TAGS:
        raise UsageError(f"recipe {path}: {key} needs {{ value = ..., tag = ..., where = ... }} "
                         f"with a tag of {', '.join(TAGS)}")
    return entry


def convert(name: str, given):
    """`given` (text, or a TOML or JSON value) as the setting's type; UsageError if it cannot be."""
    if name not in FIELDS or name == "recipe" and not isinstance(given, str):
        raise UsageError(f"unknown setting {name!r}{_nearest(name, FIELDS)}; see --help")
    default, rules = FIELDS[name].default, FIELDS[name].metadata
    kind = "bands" if name == "bands" else type(default).__name__
    try:
        value = _CONVERT[kind](given)
    except (ValueError, TypeError, KeyError):
        raise UsageError(f"{option(name)} {given!r}: expected {_EXPECTED[kind]}") from None
    if rules["choices"] and value not in rules["choices"]:
        raise UsageError(f"{option(name)} {given!r}{_nearest(given, rules['choices'])}; "
                         f"choose one of {', '.join(rules['choices'])}")
    if rules["least"] is not None and not rules["least"] <= value < float("inf"):
        raise UsageError(f"{option(name)} {given}: at least {rules['least']}, and finite")
    return value


def _only(kinds: tuple, make):
    def of(given):
        if isinstance(given, bool) and bool not in kinds or not isinstance(given, kinds):
            raise TypeError
        return make(given)
    return of


def _band(given) -> Band:
    if isinstance(given, str):
        until, size, *extra = given.split(":")
        workers, n = size.split("x")
        given = {"until_epoch": int(until), "workers": int(workers), "n": int(n)}
        names = {"m": "momentum", "lr": "lr"}
        given |= {names[k]: float(v) for k, v in (item.split("=") for item in extra)}
    band = Band(**given)
    if min(band.until_epoch, band.workers, band.n) < 1:
        raise ValueError
    return band


_CONVERT = {
    "bool": _only((bool,), bool), "str": _only((str,), str),
    "int": _only((int, str), int), "float": _only((int, float, str), float),
    "tuple": lambda g: tuple(int(i) for i in (g.split(",") if isinstance(g, str) else g) if i != ""),
    "bands": lambda g: tuple(_band(b) for b in (g.split() if isinstance(g, str) else g))}
_EXPECTED = {
    "bool": "true or false", "str": "text", "int": "a whole number", "float": "a number",
    "tuple": "whole numbers with commas, such as 30,60,80",
    "bands": "UNTIL:KxN[:m=M][:lr=RATE] ..., such as '5:12x4 20:12x8'"}


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _nearest(given: str, known) -> str:
    found = difflib.get_close_matches(str(given), list(known), 1)
    return f" (did you mean {found[0]}?)" if found else ""


def parse(argv: list[str]) -> tuple[Settings, argparse.Namespace]:
    """Settings, and beside them the flags dry_run, json and list_recipes."""
    known, rest = _parser().parse_known_args(argv)
    if rest:
        names = [*map(option, FIELDS), "--dry-run", "--list-recipes", "--json"]
        raise UsageError(f"unknown {rest[0]}{_nearest(rest[0], names)}; see --help")
    given = {k: convert(k, v) for k, v in vars(known).items() if k in FIELDS}
    recipe = load_recipe(given.get("recipe", "demo"))
    if recipe.values.get("bands") and "bands" not in given and {"workers", "n"} & set(given):
        raise UsageError(f"recipe {recipe.name} sets its minibatch in bands: change it with --bands")
    flags = argparse.Namespace(dry_run=known.dry_run, json=known.json,
                               list_recipes=known.list_recipes)
    return complete(Settings(**{**recipe.values, **given})), flags


def complete(s: Settings) -> Settings:
    """Check what one setting alone does not show, and cut the bands at the last epoch."""
    rows, _, columns = s.grid.partition("x")
    if s.grid != "auto" and not (rows.isdigit() and columns.isdigit() and int(rows) * int(columns)):
        raise UsageError(f"--grid {s.grid}: expected ROWSxCOLUMNS, such as 2x4, or auto")
    if s.sum == "exact" and s.wire != "none":
        raise UsageError(f"--sum exact cannot go with --wire {s.wire}: set one of them to its default")
    if not (s.momentum < 1 and s.label_smoothing < 1):
        raise UsageError(f"--momentum {s.momentum}, --label-smoothing {s.label_smoothing}: below 1")
    if s.val_short_side < s.image_size:
        raise UsageError(f"--val-short-side {s.val_short_side}: at least --image-size {s.image_size}")
    ends = [band.until_epoch for band in s.bands]
    if s.bands and (ends != sorted(set(ends)) or ends[-1] < s.epochs):
        raise UsageError(f"--bands end at epochs {ends}: they must rise to --epochs {s.epochs}")
    if not s.bands:
        return s
    used = sum(end < s.epochs for end in ends) + 1
    bands = tuple(dataclasses.replace(b, until_epoch=min(b.until_epoch, s.epochs))
                  for b in s.bands[:used])
    return dataclasses.replace(s, bands=bands, workers=max(b.workers for b in bands), n=bands[0].n)


def command(s: Settings) -> str:
    """The shortest command that gives these settings again."""
    start = complete(Settings(**{**load_recipe(s.recipe).values, "recipe": s.recipe}))
    words = ["python", "-m", "refimpl.train", "--recipe", s.recipe]
    for name in FIELDS:
        value = getattr(s, name)
        if value == getattr(start, name) or s.bands and name in ("workers", "n"):
            continue
        if isinstance(value, bool):
            words.append(option(name if value else f"no_{name}"))
        elif isinstance(value, tuple):
            words += [option(name), (" " if name == "bands" else ",").join(map(str, value))]
        else:
            words += [option(name), str(value)]
    return shlex.join(words)


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(f"{message}; see --help")


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m refimpl.train", allow_abbrev=False, argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=100),
        usage="[mpirun -np N] python -m refimpl.train [--recipe NAME] [--setting value ...]",
        description="Train a ResNet as Goyal et al. (2017) and Mikami et al. (2018) did. A recipe "
        "holds a run's settings; what is given here goes on top. Defaults below are those of a "
        "recipe that is silent (Goyal's baseline).")
    for flag, text in (("--dry-run", "print the schedule and stop; needs no data for ImageNet"),
                       ("--json", "with --dry-run: for programs"),
                       ("--list-recipes", "print the recipes and stop")):
        parser.add_argument(flag, action="store_true", default=False, help=text)
    groups = {}
    for name, f in FIELDS.items():
        group = groups.setdefault(f.metadata["group"], None) or parser.add_argument_group(
            f.metadata["group"])
        groups[f.metadata["group"]] = group
        text = f.metadata["help"].replace("%", "%%")
        if isinstance(f.default, bool):
            group.add_argument(option(name), action=argparse.BooleanOptionalAction,
                               help=f"{text} [{'yes' if f.default else 'no'}]")
            continue
        if f.metadata["choices"]:
            text += ": " + " | ".join(f.metadata["choices"])
        shown = ",".join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
        group.add_argument(option(name), help=text + (f" [{shown}]" if shown != "" else ""),
                           metavar=name.split("_")[-1].upper())
    return parser
