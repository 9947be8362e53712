"""Recipes are read into the settings, and the command line is made from them.

    defaults  <  recipe (refimpl/recipes/NAME.toml, over its base)  <  command line
"""
import argparse
import dataclasses
import functools
import math
import os
import pathlib
import re
import shlex
from dataclasses import dataclass

from refimpl.errors import UsageError
from refimpl.settings import FIELDS, Settings, convert, nearest, option

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

RECIPES = pathlib.Path(__file__).parent / "recipes"
TAGS = {"read": "read in the paper", "secondary": "from a secondary source, named",
        "derived": "arithmetic from other facts", "assumed": "not read: recalled or chosen",
        "ours": "this project's own"}


@dataclass(frozen=True)
class Recipe:
    """A published run as data. provenance: setting -> (tag, where), values of the base included;
    published, hardware: name -> {value, tag, where, perhaps spread}; published has no base."""
    name: str
    title: str
    notes: str
    values: dict
    provenance: dict
    published: dict
    hardware: dict

    @property
    def machine(self) -> dict:
        """hardware without the provenance: name -> value."""
        return {name: entry["value"] for name, entry in self.hardware.items()}


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def _text(name: str, path: pathlib.Path) -> str:
    """What stands in the recipe's file; UsageError: no such file, or nothing to read whole."""
    try:
        whole = path.is_file() and path.stat().st_size < 1 << 20  # a pipe would hang
        if whole or not path.exists():
            return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"no recipe {name!r}{nearest(name, recipe_names())}; refimpl.train "
                         "--list-recipes shows all, or give a path to a .toml file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"recipe {name!r} cannot be read: {error}") from None
    raise UsageError(f"recipe {name!r} is no file of less than 1 MiB")


def load_recipe(name: str, _above: tuple[pathlib.Path, ...] = ()) -> Recipe:
    """Read a recipe over its base. UsageError: unknown name or key, missing tag, cyclic base."""
    folder = _above[-1].parent if _above else pathlib.Path()
    path = folder / name if name.endswith(".toml") else RECIPES / f"{name}.toml"
    text = _text(name, path)
    path = path.resolve()
    if path in _above:
        raise UsageError(f"recipe {name!r}: its base leads back to itself; remove one `base`")
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"recipe {path} is not TOML: {error}") from None
    head = {key: _typed(path, table, key, str) for key in ("base", "title", "notes")}
    tables = {key: _typed(path, table, key, dict) for key in ("published", "hardware")}
    for key, entry in [*table.items(), *(item for t in tables.values() for item in t.items())]:
        if not (isinstance(entry, dict) and "value" in entry and entry.get("tag") in list(TAGS)
                and isinstance(entry.get("where"), str)):
            raise UsageError(f"recipe {path}: {key} needs {{ value = ..., tag = ..., where = ... }}"
                             f" with a tag of {', '.join(TAGS)}")
    for key in {"gpus", "per_node"} & set(tables["hardware"]):
        count = tables["hardware"][key]["value"]
        if type(count) is not int or not 0 < count < 10**6:
            raise UsageError(f"recipe {path}: hardware {key} {count!r}: 1 GPU or more")
    base = Recipe(path.stem, "", "", {}, {}, {}, {})
    if head["base"]:
        base = load_recipe(head["base"], (*_above, path))
    try:
        values = {key: convert(key, entry["value"]) for key, entry in table.items()}
    except UsageError as error:
        raise UsageError(f"recipe {path}: {error}") from None
    return Recipe(path.stem, head["title"], head["notes"], {**base.values, **values},
                  {**base.provenance, **{k: (v["tag"], v["where"]) for k, v in table.items()}},
                  tables["published"], {**base.hardware, **tables["hardware"]})


def _typed(path, table: dict, key: str, kind: type):
    value = table.pop(key, kind())
    if not isinstance(value, kind):
        raise UsageError(f"recipe {path}: {key} must be {'text' if kind is str else 'a table'}")
    return value


def parse(argv: list[str]) -> tuple[Settings, argparse.Namespace]:
    """Settings, and beside them the flags dry_run, json and list_recipes."""
    known, rest = _parser().parse_known_args(argv)
    if rest:
        names = [*map(option, FIELDS), "--dry-run", "--list-recipes", "--json"]
        cure = ("a setting that is on or off takes no value: --name or --no-name"
                if rest[0].lower() in ("true", "false", "yes", "no") else "see --help")
        raise UsageError(f"unknown {rest[0]}{nearest(rest[0], names)}; {cure}")
    given = {k: convert(k, v) for k, v in vars(known).items() if k in FIELDS}
    recipe = load_recipe(given.get("recipe", "demo"))
    if recipe.values.get("bands") and "bands" not in given and {"workers", "n"} & set(given):
        raise UsageError(f"recipe {recipe.name} sets its minibatch in bands: change --bands")
    return complete(Settings(**{**recipe.values, **given})), known


def complete(s: Settings) -> Settings:
    """Check what one setting alone does not show, and cut the bands at the last epoch."""
    if s.grid != "auto" and not SHAPE.fullmatch(s.grid):
        raise UsageError(f"--grid {s.grid}: expected ROWSxCOLUMNS, such as 2x4, or auto")
    if s.sum == "exact" and s.wire != "none":
        raise UsageError(f"--sum exact cannot go with --wire {s.wire}: leave one out")
    _together(s)
    if s.val_short_side < s.image_size:
        raise UsageError(f"--val-short-side {s.val_short_side}: below --image-size {s.image_size}")
    if s.decay == "polynomial" and s.warmup != "none" and s.warmup_epochs >= s.epochs:
        raise UsageError(f"--warmup-epochs {s.warmup_epochs}: below --epochs {s.epochs}, "
                         "since polynomial decay ends there")
    ends = [band.until_epoch for band in s.bands]
    if s.bands and (ends != sorted(set(ends)) or ends[-1] < s.epochs):
        raise UsageError(f"--bands end at epochs {ends}: they must rise to --epochs {s.epochs}")
    if not s.bands:
        return s
    used = sum(end < s.epochs for end in ends) + 1
    bands = tuple(dataclasses.replace(b, until_epoch=min(b.until_epoch, s.epochs))
                  for b in s.bands[:used])
    return dataclasses.replace(s, bands=bands, workers=max(b.workers for b in bands), n=bands[0].n)


def _together(s: Settings) -> None:
    """Settings that do not go with each other."""
    if s.wire != "none" and s.allreduce == "mpi":
        raise UsageError(f"--wire {s.wire} cannot go with --allreduce mpi, which has no 16-bit wire: "
                         "choose another algorithm")
    files = [os.path.abspath(path) for path in (s.data, s.trace, s.state, s.timeline) if path]
    if len({*files}) < len(files):
        raise UsageError(f"one file for two of --data, --trace, --state, --timeline: {' '.join(files)}")
    if s.grid != "auto" and s.allreduce not in ("auto", "torus") and (
            s.allreduce, s.across) != ("hierarchical", "torus"):
        raise UsageError(f"--grid {s.grid} with --allreduce {s.allreduce}, which has none: leave one out")
    if s.loss_scale and math.frexp(s.loss_scale)[0] != 0.5:
        raise UsageError(f"--loss-scale {s.loss_scale:g}: a power of two (0: automatic), so that "
                         "scaling rounds nothing")
    inside = s.optimizer == "sgd" and s.momentum_form == "eq10" and s.momentum_correction
    if inside and s.warmup != "none" and s.warmup_lr == 0:
        raise UsageError("--warmup-lr 0 with --momentum-form eq10: v = lr g would lose the first "
                         "gradients; give a small rate, or use eq9")
    if not 1 <= len(s.depth) <= 8 or max(s.depth) > 1000:
        raise UsageError(f"--depth {s.depth}: 1 to 8 stages of at most 1000 blocks")
    if s.name and not re.fullmatch(r"[\w+@=,][\w+@=,. -]{0,99}", s.name):
        raise UsageError(f"--name {s.name!r}: at most 100 letters, digits, spaces and _+-=,.@ (it "
                         "names a folder below --out)")


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


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(f"{message}; see --help")


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


PICTURE = checked(pathlib.Path, lambda path: path.suffix in (".png", ".pdf", ".svg") and os.access(
    path.parent, os.W_OK) and not path.is_dir(), "a .png, .pdf or .svg in a folder that exists")
SHAPE = re.compile("([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")
GRID = checked(lambda text: tuple(map(int, SHAPE.fullmatch(text)[0].split("x"))), bool,
               "ROWSxCOLUMNS, such as 34x64")


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = Parser(
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
    groups = functools.cache(parser.add_argument_group)
    for name, f in FIELDS.items():
        group = groups(f.metadata["group"])
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
