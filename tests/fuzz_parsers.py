"""The five parsers that `tests.fuzz` tries: valid inputs, how they are changed, what reads them.

Each function gets a folder for files and returns (make, first_check, use, allowed): make(rng) an
input; first_check(input) whether it gets past the outermost one; use(input) as the command line
does; allowed: the exceptions that the command line turns into a line and an exit code.
"""
import functools
import io
import json
import os
import pathlib
import pickle
import shlex
import struct
import types
import warnings
import zipfile
import zlib
from functools import partial

import numpy as np
from PIL import Image

from refimpl.errors import BadImage, UsageError
from tests.fuzz import BYTES, NUMBERS, WORDS, in_bytes, in_text, in_tree, some
from tests.mpi import ROOT


def works(call, *args) -> bool:
    try:
        call(*args)
    except Exception:
        return False
    return True


# --- recipe files ----------------------------------------------------------------------------

def recipes(folder):
    from refimpl import config, dryrun
    names = ("demo", "goyal_8k", "goyal_256", "goyal_8k_warmup_none", "mikami_v1_119k", "mikami_v1_224s")
    texts = [(ROOT / "refimpl" / "recipes" / f"{name}.toml").read_text() for name in names]
    path = os.path.join(folder, "recipe.toml")

    def make(rng):
        return some(rng, in_text, rng.choice(texts), rng.choice(texts))

    def use(text):
        pathlib.Path(path).write_bytes(text.encode(errors="surrogateescape" if "\udcff" in text
                                                   else "surrogatepass"))
        settings, _ = config.parse(["--recipe", path])
        dryrun.text(settings, 1_281_167)
    return make, partial(works, config.tomllib.loads), use, UsageError


# --- command lines ---------------------------------------------------------------------------

def commands(folder):
    from refimpl import config, dryrun, launch
    from refimpl.oracle.__main__ import _arguments
    from refimpl.settings import FIELDS, option
    from refimpl.simulate.__main__ import parser
    for module in (config, dryrun):  # recipes have a fuzzer of their own: here they are read once
        module.load_recipe = functools.cache(config.load_recipe)
    simulate = parser()
    train = [[option(name)] if f.default is True else [option(name), choice]
             for name, f in FIELDS.items() if name not in ("recipe", "data")
             for choice in f.metadata["choices"] or [",".join(map(str, f.default)) if isinstance(
                 f.default, tuple) else "5:12x4 20:12x8:m=0.8" if name == "bands" else
                 str(f.default) or "name"]]
    others = [shlex.split(line) for line in (
        "sbatch mikami_v1_224s --data x.zip --nodes 2 --per-node 4 --time 1:00 --epochs 4",
        "oracle gen --family quick --ranks 6 --count 13 --dtype float16 --level exact",
        "oracle check case.json got.{rank}.npy --order torus:2x3 --wire float16",
        "oracle diff a.jsonl b.jsonl --agree --seed 3",
        "simulate allreduce --cluster abci --ranks 64 --bytes 51M --grid 8x8 --set rank.add=1e-9",
        "simulate step --recipe goyal_8k --wire float16", "simulate scaling --ranks 4:4096",
        "simulate trace --ranks 6 --algorithm torus --grid 2x3 --plot a.png")]

    def make(rng):
        if rng.random() < 0.3:
            words = list(rng.choice(others))
        else:
            recipe = rng.choice(("demo", "goyal_8k", "mikami_v1_224s"))
            words = ["train", "--recipe", recipe, "--dry-run", "--images", "1281167"]
            for pair in rng.sample(train, rng.randrange(6)):
                words += pair
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            at, kind = rng.randrange(1, len(words)), rng.random()
            if kind < 0.45:
                words[at] = in_text(rng, words[at], rng.choice(train)[-1])
            elif kind < 0.6:
                words[at] = rng.choice((*WORDS, *NUMBERS))
            elif kind < 0.75:
                words[at:at] = rng.choice(train)
            elif kind < 0.85:
                words[at:at + 2] = ["=".join(words[at:at + 2])]
            else:
                words[at:at + 1] = rng.choice(([], [words[at]] * 2))
        return [word.replace("\0", "") for word in words] or ["train"]

    def first_check(words):  # every option is known
        try:
            config.parse(words[1:]) if words[0] == "train" else use(words)
        except UsageError as error:
            return not any(text in str(error) for text in ("unknown", "expected one", "see --help"))
        except SystemExit:
            return False
        return True

    def use(words):
        try:
            if words[0] == "train":
                settings, flags = config.parse(words[1:])
                if flags.dry_run and not settings.data:
                    launch.describe(settings, flags)
                if len(words) % 2:
                    again, _ = config.parse(shlex.split(config.command(settings))[3:])
                    assert again == settings, "the printed command gives other settings"
            elif words[0] == "sbatch":
                if launch.main(words) == 2:
                    raise UsageError("told")
            elif words[0] == "oracle":
                _arguments(words[1:])
            else:
                simulate.parse_args(words[1:])
        except SystemExit as end:  # --help, and argparse's own line
            if end.code not in (0, 2):
                raise
    return make, first_check, use, UsageError


# --- checkpoints -----------------------------------------------------------------------------

class Alone:
    """A communicator of one rank."""
    rank, size = 0, 1

    def Bcast(self, *_, **__):
        pass

    Barrier = Bcast


def checkpoints(folder):
    import torch
    from refimpl import checkpoint, config
    from refimpl.gradients import Gradients
    from refimpl.optimizer import LossScale, Optimizer
    from torch import nn
    torch.set_num_threads(1)
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Linear(2, 3))
    settings, _ = config.parse(["--out", folder])
    path = pathlib.Path(folder, "checkpoint.pt")
    optimizer = Optimizer(model, "sgd", "eq9", True, True, 1e-4, True, 0.001, 1e-6)
    run = types.SimpleNamespace(
        comm=Alone(), model=model, gradients=Gradients(model), scale=LossScale(1.0, 1, False),
        optimizer=optimizer, settings=settings, step=3, log=types.SimpleNamespace(
            folder=pathlib.Path(folder), state=lambda: {"lines": 4, "replaced": 0, "steps": 3,
                                                        "sums": {"loss": 6.0, "correct": 0.5}}),
        train_images=types.SimpleNamespace(classes=("cat", "dog"), digest="ab" * 32))
    checkpoint.save(run)
    whole, content = path.read_bytes(), torch.load(path, weights_only=True)
    os.unlink(path)
    wider = torch.zeros(1).expand(1 << 40)
    others = [None, -1, 1 << 70, 0.5, float("nan"), "x", "", [], {}, [1, "a"], True, torch.ones(3),
              torch.zeros(2, 2, dtype=torch.int64), wider, torch.zeros(()), {"a": {}}, "9" * 5000,
              content["settings"], json.dumps([[]] * 3), "[" * 3000, b"bytes", (1, 2), 7]
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in members if name.endswith("data.pkl"))

    def make(rng):
        kind = rng.random()
        if kind < 0.35:  # other contents, properly saved and sealed
            new = some(rng, in_tree, content, others)
            if isinstance(new, dict) and rng.random() < 0.8:
                if works(seal := lambda: checkpoint.seal(new)):
                    new["seal"] = seal()
            out = io.BytesIO()
            torch.save(new, out)
            return out.getvalue()
        if kind < 0.7:  # another pickle, in a sound zip; sometimes compressed
            out, packing = io.BytesIO(), zipfile.ZIP_DEFLATED * (rng.random() < 0.1)
            with zipfile.ZipFile(out, "w", packing) as archive:
                for name, data in members.items():
                    archive.writestr(name, some(rng, in_pickle, data) if name == pickled else data)
            return out.getvalue()
        return some(rng, in_bytes, whole)

    def use(data):
        path.write_bytes(data)
        run.settings = config.dataclasses.replace(settings, resume=str(path))
        run.step = 0
        verdict = checkpoint.resume(run)
        assert type(run.step) is int and 0 <= run.step < 1 << 62
        assert run.optimizer.rate is None or isinstance(run.optimizer.rate, float)
        assert {k: type(v) for k, v in verdict["log"].items()} == {
            "lines": int, "replaced": int, "steps": int, "sums": dict}, verdict["log"]
        assert all(isinstance(v, float) for v in verdict["log"]["sums"].values())
        assert all(type(v) in (int, float) for v in run.scale.state().values())

    def first_check(data):
        path.write_bytes(data)
        return works(partial(torch.load, weights_only=True), path)
    return make, first_check, use, UsageError


def in_pickle(rng, data):
    """A change of a number, of an opcode, or of any byte."""
    if data and rng.random() < 0.6:
        numbers = [i for i, byte in enumerate(data) if byte in b"KMJ"]
        at = rng.choice(numbers or [0])
        new = rng.choice((pickle.dumps(int(rng.choice(NUMBERS[:14])), 2)[2:-1], b"N", b"]", b"}",
                          b"\x88", b"(", b"t", b"h\0", b"K" + rng.randbytes(1)))
        return data[:at] + new + data[at + 1 + {75: 1, 77: 2, 74: 4}.get(data[at], 0):]
    return in_bytes(rng, data)


# --- oracle vectors and results --------------------------------------------------------------

def oracle(folder):
    from refimpl.oracle import __main__ as main
    from refimpl.oracle.cases import Case, dump
    from refimpl.oracle.trainer import STATE
    case, got, other = (os.path.join(folder, name) for name in ("case.json", "got.txt", "b"))
    sets = [[Case("float32", 3, 4, "exact", "exact", 1)], [Case("float16", 2, 3, "bounded", "spread", 2)],
            [Case("float32", 4, 3, "ordered", "spread", order="torus:2x2", wire="bfloat16"),
             Case("int64", 2, 2, "exact", "place", id=2)],
            [Case("float64", 3, 8, "special", "special"), Case("bfloat16", 2, 2, "agree", "spread", id=2)]]
    vectors = [json.loads(dump(cases)) for cases in sets]
    results = ["\n".join(main.to_hex(c.want(), c.dtype) for c in cases for _ in range(c.ranks))
               for cases in sets]
    large = json.loads(dump([Case("float32", 2, 70000, "exact", "exact")]))
    record = {"step": 0, "epoch": 0.0, "lr": (0.1).hex(), "loss": (2.5).hex(), "samples": "ab",
              "gradient": "cd", "weights": "ef", "n": 4, "batch_norm": 1, "statistics": "01"}
    trace = "".join(json.dumps(record | {"step": step}) + "\n" for step in range(3))
    others = [None, -1, 0, 1, 2, 65536, 1 << 31, 1 << 70, 0.5, float("nan"), "", "x", [], {}, True,
              "3f800000", "ring", "torus:1x999999", "((0+1)+2)", "((((" * 99, "float64", "exact",
              "bounded", "agree", ["3f800000"] * 3, "9" * 5000, "hierarchical:2:torus:1x1"]
    state, array = io.BytesIO(), io.BytesIO()
    np.savez(state, n=1, ranks=1, batch_norm=1, **{
        f"{key}w" if key[-1] == "/" else key: np.ones(2, np.float32) for key, _ in STATE})
    np.save(array, np.ones(4, np.float32))

    def make(rng):
        """(verb and paths, case.json, got, b)"""
        kind, which = rng.random(), rng.randrange(len(sets))
        cases, lines = json.dumps(vectors[which]), results[which]
        if kind < 0.4:
            tree = some(rng, in_tree, rng.choice((*vectors, large)) if kind < 0.1 else vectors[which],
                        others)
            return (rng.choice(("check", "explain")), case, got), json.dumps(tree), lines, b""
        if kind < 0.55:
            return ("expect", case), some(rng, in_text, cases, cases), lines, b""
        if kind < 0.7:
            return (rng.choice(("check", "explain")), case, got), cases, some(
                rng, in_text, lines, rng.choice(results)), b""
        if kind < 0.8:
            return ("check", case, other + ".npy"), json.dumps(vectors[0]), "", some(
                rng, in_bytes, array.getvalue(), 0, 130)
        if kind < 0.92:
            return ("diff", got, other), cases, trace, (some(rng, in_text, trace, trace)).encode(
                errors="surrogatepass")
        return ("state", other + ".npy", other + ".npy"), "", "", some(rng, in_bytes, state.getvalue())

    def write(made):
        pathlib.Path(case).write_bytes(made[1].encode(errors="surrogatepass"))
        pathlib.Path(got).write_bytes(made[2].encode(errors="surrogatepass"))
        pathlib.Path(other).write_bytes(made[3])
        pathlib.Path(other + ".npy").write_bytes(made[3])

    def use(made):
        write(made)
        assert main.main(list(made[0])) in (0, 1, 2)

    def first_check(made):  # it is JSON, numbers, an array
        if made[0][0] == "state":
            return works(np.load, io.BytesIO(made[3]))
        if made[0][-1].endswith(".npy"):
            return works(np.load, io.BytesIO(made[3]))
        if made[0][0] == "diff":
            return all(works(json.loads, line) for line in made[3].splitlines())
        return works(json.loads, made[1]) and works(bytes.fromhex, made[2])
    return make, first_check, use, UsageError


# --- image and zip headers -------------------------------------------------------------------

def images(folder):
    import torch
    from refimpl.data.images import FORMATS, draws, train_view, val_view, view
    from refimpl.data.index import open_index
    from tests.data_files import encoded, picture
    torch.set_num_threads(1)
    small, path = picture(20, 15), os.path.join(folder, "data.zip")
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [encoded(small, exif=exif), encoded(small, progressive=True), encoded(small, "PNG"),
             encoded(small.convert("P"), "PNG"), encoded(small.convert("L"), "TIFF"),
             encoded(small.convert("RGBA"), "PNG", optimize=True), encoded(small, "BMP"),
             encoded(small.convert("CMYK")), encoded(small, "WEBP"), encoded(small, "PPM"),
             encoded(small, "WEBP", lossless=True), encoded(small.convert("P"), "GIF"),
             encoded(Image.fromarray(np.asarray(small.convert("L")).astype(np.uint16) << 8), "PNG"),
             encoded(small, "TIFF", compression="tiff_lzw"), encoded(small.convert("1"), "TIFF",
                                                                     compression="group4"),
             encoded(small, "GIF", save_all=True, append_images=[picture(20, 15, 1)])]
    out, tiny = io.BytesIO(), encoded(small, "PNG")
    with zipfile.ZipFile(out, "w") as archive:
        for split in ("train", "val"):
            for name in ("cat/1.png", "dog/1.png"):
                archive.writestr(f"{split}/{name}", tiny)
    archive = out.getvalue()
    directory = archive.index(b"PK\1\2")

    def make(rng):
        if rng.random() < 0.3:
            start, stop = rng.choice(((directory, len(archive)), (0, 60), (len(archive) - 22, len(archive))))
            data = some(rng, in_bytes, archive, start, stop)
            return "zip", data
        data = rng.choice(files)
        if data[:4] == b"\x89PNG" and rng.random() < 0.7:
            return "image", some(rng, in_png, data)
        return "image", some(rng, in_bytes, data, 0, rng.choice((30, 100, 700)))

    def use(made):
        kind, data = made
        if kind == "image":
            view(lambda: data, "a file", partial(val_view, size=24, short_side=28) if len(data) % 2
                 else partial(train_view, size=24, rng=draws(1, 0, 1)))
            return
        with open(path, "wb") as file:
            file.write(data)
        classes = None
        for split in ("train", "val"):
            index = open_index(path, split, classes)
            classes = index.classes
            for i in range(len(index)):
                view(partial(index.read, i), index.name(i), partial(val_view, size=24, short_side=28))

    def first_check(made):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind, data = made
            return works(zipfile.ZipFile, io.BytesIO(data)) if kind == "zip" else works(
                partial(Image.open, formats=FORMATS), io.BytesIO(data))
    return make, first_check, use, (UsageError, BadImage)


def in_png(rng, data):
    """A change inside a chunk, whose checksum is then right again; mostly of the header."""
    at = 8
    while rng.random() < 0.4 and at + 12 + (size := int.from_bytes(data[at:at + 4], "big")) < len(data):
        at += 12 + size
    size = int.from_bytes(data[at:at + 4], "big")
    body = data[at + 4:at + 8 + size]
    if rng.random() < 0.4 and size >= 4:
        place = 4 + 4 * rng.randrange(size // 4)
        body = body[:place] + struct.pack(">L", rng.choice((0, 1, 65535, 1 << 20, 1 << 26, (1 << 31) - 1,
                                                           rng.getrandbits(32)))) + body[place + 4:]
    else:
        body = body[:4] + in_bytes(rng, body[4:])
    return (data[:at] + struct.pack(">L", len(body) - 4) + body + struct.pack(">L", zlib.crc32(body))
            + data[at + 12 + size:])


PARSERS = {f.__name__: f for f in (recipes, commands, checkpoints, oracle, images)}
