"""Save and resume: rank 0 writes beside and renames, rank 0 reads and the others are told."""
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable

import torch

from refimpl import __version__
from refimpl.collective.exchange import waiting
from refimpl.errors import UsageError
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
            "format": FORMAT, "version": __version__, "step": run.step,
            "state_dict": {k: torch.tensor(run.step) if k.endswith("num_batches_tracked")
                           else v.contiguous() for k, v in model.items()},
            "momentum": dict(run.optimizer.momentum), "loss_scale": run.scale.state(),
            "settings": json.dumps(dataclasses.asdict(run.settings)),
            "classes": list(run.train_images.classes), "data": run.train_images.digest,
            "log": run.log.state(), "digest": digest(run)}
        folder = run.log.folder
        write(folder / NAME, folder / OLDER, content)
    with waiting("checkpoint", run.comm):
        run.comm.Barrier()


def write(path: pathlib.Path, older: pathlib.Path, content: dict) -> None:
    """Whole on disk under another name first; a crash at any moment leaves a whole file."""
    beside = path.with_suffix(".writing")
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


def resume(run) -> dict:
    """Take over a checkpoint; returns its "step", "folder", "log" and a "note".

    Rank 0 alone reads, on the host, without unpickling objects; the others are told. A file that
    is not whole is named and the older one beside it used; UsageError where neither can be.
    """
    content, verdict = None, {}
    if run.comm.rank == 0:
        try:
            path = find(run.settings)
            content, note = load(path)
            fits(run, content, path)
            verdict = {"step": content["step"], "scale": content["loss_scale"], "note": note,
                       "folder": str(path.parent), "log": content["log"],
                       "digest": content["digest"]}
        except UsageError as error:
            verdict = {"error": str(error)}
    verdict = tell(run.comm, verdict)
    if "error" in verdict:
        raise UsageError(verdict["error"])
    if content:
        run.model.load_state_dict(content["state_dict"])
        for name, u in run.optimizer.momentum.items():
            u.copy_(content["momentum"][name])
        run.gradients.refresh()
    for tensor in tensors(run).values():
        host = tensor.contiguous().cpu()
        run.comm.Bcast(host.view(-1).numpy(), root=0)
        tensor.copy_(host)
    run.gradients.running.copy_(run.gradients.common)
    run.scale.restore(verdict["scale"])
    run.step = verdict["step"]
    if digest(run) != verdict["digest"]:
        raise UsageError(f"the checkpoint in {verdict['folder']} holds other numbers than it says: "
                         "it was changed or damaged; resume from an older one")
    return verdict


def find(settings) -> pathlib.Path:
    """The file that --resume means: a path, a run's folder, or `auto`, the newest of this name."""
    if settings.resume != "auto":
        path = pathlib.Path(settings.resume)
        return path / NAME if path.is_dir() else path
    name = settings.name or pathlib.Path(settings.recipe).stem
    found = sorted(pathlib.Path(settings.out).glob(f"{name}-*/checkpoint*.pt"),
                   key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError(f"--resume auto: no {name}-*/{NAME} in {settings.out}; start without it, "
                         "or give --out or the checkpoint's path")
    return found[-1].parent / NAME


def load(path: pathlib.Path) -> tuple[dict, str]:
    """The newest whole checkpoint of `path` and its older neighbour, and a note on what was not."""
    problems = []
    for file in dict.fromkeys((path, path.parent / OLDER)):
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
            if isinstance(content, dict) and content.get("format") == FORMAT:
                return content, "; ".join(problems)
            problems.append(f"{file} is not a {FORMAT} file")
        except FileNotFoundError:
            problems.append(f"{file} is not there")
        except Exception as error:  # torch and its unpickler raise many kinds for a broken file
            problems.append(f"{file} is damaged ({type(error).__name__})")
    raise UsageError("nothing to resume from: " + "; ".join(problems))


def fits(run, content: dict, path) -> None:
    """UsageError unless this run goes on with the same model, data and recipe."""
    ours, theirs = dataclasses.asdict(run.settings), json.loads(content["settings"])
    fixed = ("seed", "workers", "n", "bands", "depth", "width", "stem", "optimizer",
             "momentum_form", "sum", "wire", "precision", "bucket_mb")
    for name in fixed:
        if json.dumps(ours[name]) != json.dumps(theirs.get(name)):
            raise UsageError(f"--resume {path}: that run has {name} {theirs.get(name)}, this one "
                             f"{ours[name]}: give the same, or start without --resume")
    if tuple(content["classes"]) != run.train_images.classes or (
            content["data"] != run.train_images.digest):
        raise UsageError(f"--resume {path}: that run's training images are not those of "
                         f"{run.settings.data or 'the embedded sample'}: give the same --data")
