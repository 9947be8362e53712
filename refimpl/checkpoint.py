"""Save and resume: rank 0 writes beside and renames, rank 0 reads and the others are told."""
import dataclasses
import hashlib
import json
import os
import pathlib
import pickletools
import re
import shutil
import stat
import sys
import zipfile
from collections.abc import Iterable

import torch

from refimpl import __version__
from refimpl.collective.exchange import waiting
from refimpl.errors import CannotWrite, UsageError
from refimpl.ranks import tell

FORMAT = "refimpl-checkpoint-1"
NAME, OLDER = "checkpoint.pt", "checkpoint-older.pt"


def tensors(run) -> dict[str, torch.Tensor]:
    """All that training goes on from, in a fixed order: weights, running statistics, momentum."""
    state = {f"weight {name}": w.detach() for name, w in run.model.named_parameters()}
    state["running statistics"] = run.gradients.common
    return state | {f"momentum {name}": u for name, u in run.optimizer.momentum.items()}


def digest(run) -> str:
    """SHA-256 of `tensors`: equal on all ranks after every step."""
    return sha256(tensors(run).values())


def sha256(some: Iterable[torch.Tensor]) -> str:
    """Of the tensors' bytes in order, each as if contiguous."""
    sha = hashlib.sha256()
    for tensor in some:
        sha.update(tensor.detach().contiguous().cpu().view(-1).numpy())
    return sha.hexdigest()


def save(run) -> None:
    """Write the checkpoint of the present step; the last one is kept until this one is whole."""
    if run.comm.rank == 0:
        model = run.model.state_dict()  # torchvision's key names
        content = {
            "format": FORMAT, "version": __version__, "step": run.step, "ranks": run.comm.size,
            "state_dict": {k: torch.tensor(run.step) if k.endswith("num_batches_tracked")
                           else v.contiguous() for k, v in model.items()},
            "momentum": dict(run.optimizer.momentum), "rate": run.optimizer.rate,
            "loss_scale": run.scale.state(), "log": run.log.state(),
            "settings": json.dumps(dataclasses.asdict(run.settings)),
            "classes": list(run.train_images.classes), "data": run.train_images.digest,
            "digest": digest(run)}
        folder = run.log.folder
        write(folder / NAME, folder / OLDER, content | {"seal": seal(content)})
    with waiting("checkpoint", run.comm):
        run.comm.Barrier()


def seal(content: dict) -> str:
    """SHA-256 of all that is not a tensor; `digest` covers those."""
    small = {k: v for k, v in content.items() if k not in ("state_dict", "momentum", "seal")}
    return hashlib.sha256(json.dumps(small, sort_keys=True).encode()).hexdigest()


def write(path: pathlib.Path, older: pathlib.Path, content: dict) -> None:
    """Whole on disk under another name first; a crash at any moment leaves a whole file."""
    beside = path.with_suffix(".writing")
    try:
        with open(beside, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.replace(path, older)
        os.replace(beside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except Exception as error:  # torch says "unexpected pos" where the disk is full
        free = shutil.disk_usage(path.parent).free >> 20
        beside.unlink(missing_ok=True)
        kept = "; the last checkpoint is whole" if path.exists() or older.exists() else ""
        raise CannotWrite(f"{path} could not be written ({error}); {free} MB are free there: make room "
                          f"or give another --out{kept}") from error


def resume(run) -> dict | None:
    """Take over a checkpoint; returns its "step", "folder", "log" and a "note", or None where
    --resume auto finds none: then the run starts anew.

    Rank 0 alone reads, on the host, without unpickling objects; the others are told. A file that
    is not whole is named and the older one beside it used; UsageError where neither can be.
    """
    verdict = {}
    if run.comm.rank == 0:
        try:
            verdict = take(run)
        except UsageError as error:
            verdict = {"error": str(error)}
    verdict = tell(run.comm, verdict)
    if verdict and "error" in verdict:
        raise UsageError(verdict["error"])
    if not verdict:
        return None
    for tensor in tensors(run).values():
        host = tensor.contiguous().cpu()
        with waiting("checkpoint from rank 0", run.comm):
            run.comm.Bcast(host.view(-1).numpy(), root=0)
        tensor.copy_(host)
    run.gradients.running.copy_(run.gradients.common)
    vars(run.scale).update(verdict["loss_scale"])
    run.step, run.optimizer.rate = verdict["step"], verdict["rate"]
    if digest(run) != verdict["digest"]:
        raise UsageError(f"the checkpoint in {verdict['folder']} holds other numbers than it says: "
                         "it was changed or damaged; resume from an older one")
    return verdict


def take(run) -> dict | None:
    """Rank 0: find, read, check and load; what the other ranks must know."""
    path = find(run.settings)
    if path is None:
        print("refimpl.train: --resume auto: no checkpoint of this name yet, so this run starts",
              file=sys.stderr)
        return None
    content, note = load(path)
    try:
        note += fits(run, content, path)
        run.model.load_state_dict(content["state_dict"])
        for name, u in run.optimizer.momentum.items():
            u.copy_(content["momentum"][name])
        run.gradients.refresh()
        assert set(content["loss_scale"]) == set(run.scale.state())
        return {"folder": str(path.parent), "note": note, **{key: content[key] for key in (
            "step", "rate", "loss_scale", "log", "digest")}}
    except UsageError:
        raise
    except Exception as error:  # whatever a foreign content leads to
        raise UsageError(f"--resume {path}: not a checkpoint of this model "
                         f"({type(error).__name__}: {str(error)[:200]})") from None


def find(settings) -> pathlib.Path | None:
    """The file that --resume means: a path, a run's folder, or `auto`, the newest of this name."""
    if settings.resume != "auto":
        path = pathlib.Path(settings.resume)
        return path / NAME if path.is_dir() else path
    pattern = re.compile(re.escape(run_name(settings)) + r"-\d{8}-\d{6}(-\d+)?")
    out = pathlib.Path(settings.out)
    folders = [f for f in (out.iterdir() if out.is_dir() else ()) if pattern.fullmatch(f.name)]
    files = [f / name for f in folders for name in (NAME, OLDER) if (f / name).is_file()]
    newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    return newest and newest.parent / NAME


def run_name(settings) -> str:
    """What a run's folder is called, before its time."""
    return settings.name or pathlib.Path(settings.recipe).stem


def load(path: pathlib.Path) -> tuple[dict, str]:
    """The newest whole checkpoint of `path` and its older neighbour, and a note on what was not."""
    problems = []
    for file in dict.fromkeys((path, path.parent / OLDER)):
        try:
            screen(file)
            content = torch.load(file, map_location="cpu", weights_only=True)
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                problems.append(f"{file} is not a {FORMAT} file")
            elif not like(content, PARTS) or sum(map(len, content["classes"])) > 1 << 26:
                problems.append(f"{file} lacks a part, or has one of another kind")
            elif content.get("seal") != seal(content):
                problems.append(f"{file} was changed after it was written")
            else:
                return content, "".join(f"; {problem}" for problem in problems)
        except FileNotFoundError:
            problems.append(f"{file} is not there")
        except Exception as error:  # torch and its unpickler raise many kinds for a broken file
            problems.append(f"{file} is damaged ({type(error).__name__}: {str(error)[:60]!r})")
    raise UsageError("nothing to resume from: " + "; ".join(problems))


CALLS = re.compile(r"torch\._utils _rebuild_tensor_v2|torch \w+Storage|collections OrderedDict")


def screen(file: pathlib.Path) -> None:
    """ValueError for what `weights_only` would still load: calls that only allocate, members that
    unpack to more than the file holds. FileNotFoundError; OSError for a pipe or a device."""
    if not stat.S_ISREG((status := file.stat()).st_mode):
        raise OSError("no regular file")
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(m.compress_type for m in members) or sum(m.file_size for m in members) > status.st_size:
            raise ValueError("compressed")
        for name in (m.filename for m in members if m.filename.endswith(".pkl")):
            for code, argument, _ in pickletools.genops(archive.read(name)):
                if code.name == "STACK_GLOBAL" or code.name == "GLOBAL" and not CALLS.fullmatch(argument):
                    raise ValueError(f"call of {argument}")


PARTS = {"format": str, "version": str, "step": int, "ranks": int, "state_dict": dict,
         "momentum": dict, "rate": (float, type(None)), "settings": str, "classes": [str],
         "data": str, "digest": str, "seal": str,
         "loss_scale": {"value": float, **dict.fromkeys(("good", "accepted", "skipped", "in_a_row"), int)},
         "log": {"lines": int, "replaced": int, "steps": int, "sums": {"loss": float, "correct": float}}}


def like(value, kind) -> bool:
    """Is `value` built as `kind` says? Whole numbers count something: from 0, of 62 bits."""
    if isinstance(kind, dict):
        return isinstance(value, dict) and value.keys() == kind.keys() and all(
            like(value[key], kind[key]) for key in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(isinstance(each, kind[0]) for each in value)
    return type(value) is int and 0 <= value < 1 << 62 if kind is int else isinstance(value, kind)


FREE = {"recipe", "data", "name", "out", "max_steps", "eval_every", "save_every", "save_steps",
        "save_minutes", "resume", "images", "trace", "state", "timeline", "check_every", "timeout",
        "loaders", "bad_images", "cache", "device", "threads", "allreduce", "across", "grid", "overlap"}


def fits(run, content: dict, path) -> str:
    """UsageError unless this run goes on with the same model, data and rules; a note on bits."""
    ours = json.loads(json.dumps(dataclasses.asdict(run.settings)))
    theirs = json.loads(content["settings"])
    for name in sorted((ours.keys() | theirs.keys()) - FREE):
        if ours.get(name) != theirs.get(name):
            raise UsageError(f"--resume {path}: that run has {name} {theirs.get(name)}, this one "
                             f"{ours.get(name)}: give the same, or start without --resume")
    if tuple(content["classes"]) != run.train_images.classes or (
            content["data"] != run.train_images.digest):
        raise UsageError(f"--resume {path}: that run's training images are not those of "
                         f"{run.settings.data or 'the embedded sample'}: give the same --data")
    same = content["ranks"] == run.comm.size and all(
        ours[name] == theirs[name] for name in ("allreduce", "grid", "across", "device", "threads"))
    return "" if same or run.settings.sum == "exact" else (
        f"; on {run.comm.size} ranks after {content['ranks']}, or by another algorithm: without "
        "--sum exact the last bits will differ")
