"""Bad input: 15,000 changed inputs for each of five parsers, and proof that a fault would be found."""
import io
import os
import pathlib
import re
import signal
import stat
import struct
import subprocess
import sys
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from refimpl import config
from refimpl.data.images import opened, val_view
from refimpl.data.index import open_index
from refimpl.errors import BadImage, UsageError
from refimpl.ranks import writable
from tests import fuzz
from tests.data_files import encoded, picture
from tests.mpi import ROOT

INPUTS, NAMES = 15000, ("recipes", "commands", "checkpoints", "oracle", "images")


@pytest.fixture(scope="module")
def runs():
    """name -> the finished run of that fuzzer; two at a time."""
    def run(name):
        return subprocess.run(
            [sys.executable, "-m", "tests.fuzz", "--parser", name, "--inputs", str(INPUTS)], cwd=ROOT,
            capture_output=True, text=True, errors="replace", timeout=400,
            env={**os.environ, "OMP_NUM_THREADS": "1"})
    with ThreadPoolExecutor(2) as pool:
        yield dict(zip(NAMES, pool.map(run, NAMES)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_input_makes_a_traceback_a_hang_or_a_large_allocation(name, runs):
    job = runs[name]
    assert job.returncode == 0, job.stdout[-5000:] + job.stderr[-2000:]
    share = int(re.search(r"(\d+)% past the first check", job.stdout)[1])
    assert f"{INPUTS} inputs" in job.stdout and 35 <= share <= 70, job.stdout


PLANTS = {  # a fault deep inside each parser: what is patched, and when it strikes
    "recipes": ("refimpl.schedule:Schedule._place", lambda schedule, *_: schedule.settings.workers in (1, 2, 7, 255)),
    "commands": ("refimpl.config:command", lambda settings: settings.seed == 7),
    "checkpoints": ("refimpl.checkpoint:digest", lambda run: run.step == 7 or run.optimizer.rate
                    or run.scale.value != 1),
    "oracle": ("refimpl.oracle.spec:by_order", lambda order, *_: order.startswith("hierarchical")),
    "images": ("refimpl.data.images:rgb", lambda image: image.width == 255)}
STRIKES = {"crash": lambda: {}["planted"], "hang": lambda: [None for _ in iter(int, 1)],
           "allocation": lambda: len(b"x" * (fuzz.LARGE + (64 << 20))),
           "death": lambda: os.kill(os.getpid(), signal.SIGSEGV),
           "swallowed": lambda: bytearray(1 << 60)}


def planted(name: str, strike: str, inputs: int = INPUTS) -> str:
    """What the run prints, up to its first fault, with that fault planted; for a child process."""
    place, when = PLANTS[name]
    module, _, attribute = place.partition(":")
    owner = sys.modules[module] if module in sys.modules else __import__(module, fromlist=["x"])
    *path, last = attribute.split(".")
    for step in path:
        owner = getattr(owner, step)
    right = getattr(owner, last)

    def wrong(*args, **more):
        if when(*args):
            STRIKES[strike]()
        return right(*args, **more)
    setattr(owner, last, wrong)
    fuzz.SECONDS, fuzz.MOST = (1 if strike == "hang" else 30), 1
    return fuzz.main(["--parser", name, "--inputs", str(inputs)])


def plant(name, strike):
    code = f"from tests.test_fuzz import planted; import sys; sys.exit(planted({name!r}, {strike!r}))"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          errors="replace", timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_planted_crash_is_found_by_the_same_run(name):
    job = plant(name, "crash")
    assert job.returncode == 1 and re.search(rf"{name} input \d+: Traceback", job.stdout), job.stdout
    assert "KeyError: 'planted'" in job.stdout


@pytest.mark.parametrize("strike,said", [("hang", "Hang"), ("death", "killed by signal 11"),
                                         ("allocation", r"took \d+ MB"),
                                         ("swallowed", "MemoryError")])
def test_a_planted_hang_death_and_allocation_are_found_too(strike, said):
    job = plant("oracle", strike)
    assert job.returncode == 1 and re.search(said, job.stdout), job.stdout + job.stderr


# --- what is no file of ours, and what only looks like one ------------------------------------

def odd_files(folder) -> dict[str, str]:
    """kind -> a path of it; what a user may give where a file is meant."""
    paths = {kind: str(folder / f"{kind}.toml") for kind in ("pipe", "folder", "empty", "huge", "link")}
    os.mkfifo(paths["pipe"])
    os.mkdir(paths["folder"])
    open(paths["empty"], "w").close()
    with open(paths["huge"], "w") as file:
        file.truncate(200 << 30)  # sparse: takes no room
    os.symlink("/dev/zero", paths["link"])
    return paths | {"device": "/dev/zero"}


def read_checkpoint(path):
    from refimpl import checkpoint
    return checkpoint.load(pathlib.Path(path))


READERS = {"--recipe": lambda path: config.parse(["--recipe", path]),
           "--data": lambda path: open_index(path, "train"), "--resume": read_checkpoint}


@pytest.mark.parametrize("setting", READERS)
def test_a_path_that_is_no_file_is_refused_at_once(setting, tmp_path):
    signal.signal(signal.SIGALRM, fuzz.hang)
    for kind, path in odd_files(tmp_path).items():
        if (setting, kind) == ("--recipe", "empty"):  # a recipe that is silent: the defaults
            continue
        signal.alarm(20)
        with pytest.raises(UsageError):
            READERS[setting](path)
        signal.alarm(0)


def test_a_pipe_to_write_into_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--trace .* pipe"):
        writable(odd_files(tmp_path)["pipe"], "--trace", b"")


def png(width: int, height: int) -> bytes:
    """A PNG of some bytes that claims this size."""
    data = encoded(picture(20, 15), "PNG")
    head = b"IHDR" + struct.pack(">LL", width, height) + data[24:29]
    return data[:12] + head + struct.pack(">L", zlib.crc32(head)) + data[33:]


def test_images_that_would_unpack_to_too_much_are_refused():
    with pytest.raises(BadImage, match="pixels"):
        opened(png(40_000, 40_000))
    with pytest.raises(BadImage, match="too narrow"):  # small, but not when its short side is 256
        val_view(png(20, 4_000_000), 224, 256)


def archive(change=lambda member: None, compress=zipfile.ZIP_STORED, **sizes) -> bytes:
    """A zip of two images; `sizes` are written over its directory's first entry."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compress) as file:
        for name in ("train/a/1.png", "train/b/1.png"):
            member = zipfile.ZipInfo(name)
            change(member)
            file.writestr(member, encoded(picture(20, 15), "PNG"), compress)
    data = bytearray(out.getvalue())
    for offset, value in sizes.values():
        at = data.index(b"PK\1\2") + offset
        data[at:at + 4] = struct.pack("<L", value)
    return bytes(data)


def link(member):
    member.external_attr = (stat.S_IFLNK | 0o777) << 16


HOSTILE = {
    "a link": archive(link), "compressed": archive(compress=zipfile.ZIP_DEFLATED),
    "a size beyond the file": archive(packed=(20, 4_000_000_000), size=(24, 4_000_000_000)),
    "sizes that differ": archive(size=(24, 4_000_000_000)),
    "a place beyond the file": archive(place=(42, 4_000_000_000)),
    "..": archive(lambda m: setattr(m, "filename", f"train/../../{m.filename}")),
    "absolute": archive(lambda m: setattr(m, "filename", "/etc/" + m.filename))}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_archive_that_lies_is_refused_before_anything_of_it_is_read(kind, tmp_path):
    (tmp_path / "data.zip").write_bytes(HOSTILE[kind])
    with pytest.raises(UsageError):
        open_index(tmp_path / "data.zip", "train")
    assert os.listdir(tmp_path) == ["data.zip"]


def test_a_checkpoint_can_only_make_tensors(tmp_path):
    """torch's own weights_only still calls bytearray(n), and unpacks compressed members."""
    import torch

    class Large:
        def __reduce__(self):
            return bytearray, (1 << 40,)
    torch.save({"format": "refimpl-checkpoint-1", "step": Large()}, tmp_path / "call.pt")
    torch.save({"step": torch.zeros(1 << 20)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(
            tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in plain.namelist():
            bomb.writestr(name, plain.read(name))
    for name in ("call.pt", "bomb.pt"):
        with pytest.raises(UsageError, match="damaged"):
            read_checkpoint(tmp_path / name)
