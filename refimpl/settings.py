"""Every setting of a run: name, type, default, help; and how text or TOML becomes one."""
import dataclasses
import difflib
import pathlib
from dataclasses import dataclass, field

from refimpl.errors import UsageError

SAMPLE = pathlib.Path(__file__).parent / "sample"
MOST = 2**31  # no setting reaches this
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


def _is(default, group: str, text: str, *choices: str, least: float | None = None, below=MOST):
    return field(default=default, metadata={"group": group, "help": text, "choices": choices,
                                            "least": least, "below": below})


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
    save_minutes: float = _is(0.0, RUN, "also a checkpoint every so many minutes (0: no)", least=0)
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
    momentum: float = _is(0.9, STEP, "m", least=0, below=1)
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
    label_smoothing: float = _is(0.0, STEP, "epsilon: target 1 - e + e/classes", least=0, below=1)

    depth: tuple[int, ...] = _is((3, 4, 6, 3), NET, "bottleneck blocks per stage")
    width: int = _is(64, NET, "channels of the stem", least=1, below=4097)
    stem: str = _is("imagenet", NET, "7x7 stride 2 and pooling, or 3x3 stride 2",
                    "imagenet", "small")
    gamma_zero: bool = _is(True, NET, "gamma 0 in the last batch norm of a block (Goyal 5.1)")
    batch_norm: str = _is("running", NET, "statistics of evaluation: running average, last "
                          "minibatch, or recomputed before it", "running", "last", "recomputed")

    image_size: int = _is(224, DATA, "side of a training crop and of the validation crop", least=1,
                          below=4097)
    val_short_side: int = _is(256, DATA, "shorter side before the validation crop", least=1, below=8193)
    classes: int = _is(0, DATA, "0: as many as the data has", least=0, below=1 << 24)
    cache: str = _is("", DATA, "folder that keeps the list of images between runs (default: none)")
    color_jitter: float = _is(0.0, DATA, "brightness, contrast, saturation (0: none)", least=0)
    lighting: float = _is(0.0, DATA, "standard deviation of PCA lighting (0: none)", least=0)
    bad_images: str = _is("stop", DATA, "what a broken image does", "stop", "replace")

    precision: str = _is("fp32", NUMBERS, "forward and backward", "fp32", "bf16", "fp16")
    loss_scale: float = _is(1.0, NUMBERS, "power of two on the loss (0: automatic)", least=0)
    wire: str = _is("none", NUMBERS, "16-bit type of gradients on the network",
                    "none", "float16", "bfloat16")
    sum: str = _is("plain", NUMBERS, "exact: fixed point, equal bits for any number of ranks",
                   "plain", "exact")

    allreduce: str = _is("auto", SUM, "algorithm (auto: as choice.py has it)", "auto", "ring",
                         "torus", "halving_doubling", "hierarchical", "window", "mpi")
    across: str = _is("halving_doubling", SUM, "hierarchical: the algorithm between nodes "
                      "(Goyal 4.1)", "ring", "halving_doubling", "torus")
    grid: str = _is("auto", SUM, "RxC: rows x columns of the torus, or auto")
    bucket_mb: float = _is(0.0, SUM, "gradients summed together, in MB (0: choice.py)", least=0)
    overlap: str = _is("auto", SUM, "allreduce while backward runs", "auto", "on", "off")

    device: str = _is("auto", SPEED, "where tensors live", "auto", "cpu", "cuda")
    threads: int = _is(0, SPEED, "threads per rank (0: cores of the node / its ranks)", least=0, below=1025)
    loaders: int = _is(-1, SPEED, "loader processes per rank (0: none, -1: by cores)", least=-1, below=257)
    channels_last: bool = _is(False, SPEED, "NHWC memory layout")

    trace: str = _is("", CHECKS, "file: a JSON line per step with digests of sums and weights")
    state: str = _is("", CHECKS, "file: the whole first step as .npz, for `oracle state` (its "
                      "allreduce follows backward)")
    timeline: str = _is("", CHECKS, "file: the first steps as a Chrome trace (Perfetto opens it)")
    check_every: int = _is(0, CHECKS, "steps between comparisons of calls and weights over the ranks "
                           "(0: the first step, and epochs)", least=0)
    timeout: float = _is(300.0, CHECKS, "seconds of silence before the watchdog stops", least=1)

    @property
    def source(self) -> str:
        """The data's path: what was given, or the embedded sample."""
        return self.data or str(next(SAMPLE.glob("*.zip"), SAMPLE / "missing.zip"))

    def in_bands(self) -> tuple[Band, ...]:
        """The bands, also where there is only one."""
        return self.bands or (Band(self.epochs, self.workers, self.n),)


FIELDS = {f.name: f for f in dataclasses.fields(Settings)}


def convert(name: str, given):
    """`given` (text, or a TOML or JSON value) as the setting's type; UsageError if it cannot be."""
    if name not in FIELDS:
        raise UsageError(f"unknown setting {name!r}{nearest(name, FIELDS)}; see --help")
    default, rules = FIELDS[name].default, FIELDS[name].metadata
    kind = "bands" if name == "bands" else type(default).__name__
    make, expected = _KINDS[kind]
    try:
        value = make(given)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
        raise UsageError(f"{option(name)} {_short(given)}: expected {expected}") from None
    if rules["choices"] and value not in rules["choices"]:
        raise UsageError(f"{option(name)} {_short(given)}{nearest(value, rules['choices'])}; "
                         f"choose one of {', '.join(rules['choices'])}")
    least, below = rules["least"], rules["below"]
    if least is not None and not least <= value < below:
        raise UsageError(f"{option(name)} {value}: at least {least} and below {below}")
    return value


def _short(given) -> str:
    return repr(given) if len(repr(given)) < 80 else repr(given)[:80] + " ..."


def _only(*kinds, make):
    """`make(given)` for these types; True is not the number 1."""
    def of(given):
        if not isinstance(given, kinds) or isinstance(given, bool) and bool not in kinds:
            raise TypeError
        return make(given)
    return of


_whole, _number = _only(int, str, make=int), _only(int, float, str, make=float)


def _wholes(given) -> tuple[int, ...]:
    items = given.split(",") if isinstance(given, str) and given else given
    values = tuple(map(_whole, items))
    if any(not 0 < value < MOST for value in values):
        raise ValueError
    return values


def _band(given) -> Band:
    if isinstance(given, str):
        until, size, *extra = given.split(":")
        workers, n = size.split("x")
        names = {"m": "momentum", "lr": "lr"}
        given = {"until_epoch": until, "workers": workers, "n": n,
                 **{names[key]: value for key, value in (item.split("=") for item in extra)}}
    band = Band(**{key: (_number if key in ("momentum", "lr") else _whole)(value)
                   for key, value in given.items() if value is not None})
    whole = all(0 < x < MOST for x in (band.until_epoch, band.workers, band.n))
    if not (whole and 0 <= (band.momentum or 0) < 1 and 0 <= (band.lr or 0) < MOST):
        raise ValueError
    return band


def _bands(given) -> tuple[Band, ...]:
    return tuple(map(_band, given.split() if isinstance(given, str) else given))


_KINDS = {
    "bool": (_only(bool, make=bool), "true or false"), "str": (_only(str, make=str), "text"),
    "int": (_whole, "a whole number"), "float": (_number, "a number"),
    "tuple": (_wholes, "whole numbers from 1 with commas, such as 30,60,80"),
    "bands": (_bands, "UNTIL:KxN[:m=M][:lr=RATE] ..., such as '5:12x4 20:12x8'")}


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def nearest(given: str, known) -> str:
    found = difflib.get_close_matches(str(given), list(known), 1)
    return f" (did you mean {found[0]}?)" if found else ""
