"""Lists once, before training, what a run would meet in its images."""
import json
import os
import re
import signal
import warnings

import numpy as np

from refimpl.data import images
from refimpl.data.index import Place, open_index, read
from refimpl.data.listing import FORMAT
from refimpl.data.pool import ordered
from refimpl.errors import UsageError

MODES = {"L": "grey", "1": "black and white", "P": "palette", "RGBA": "alpha", "LA": "alpha",
         "PA": "alpha", "I;16": "16-bit", "I;16B": "16-bit", "I": "32-bit grey"}
TINY, HUGE = 32, 4096  # pixels: shortest side below, longest side above


def inspect(place: Place) -> tuple[str, int, int, int, list[str]]:
    """(path, bytes, width, height, findings) of one image; a finding with BAD stops a run."""
    found, size, (width, height) = [], 0, (0, 0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            data = read(place)
            size = len(data)
            image = images.opened(data)
            width, height = image.size
            found += _about(image, data, os.path.splitext(place.name)[1].lower())
            images.rgb(image)
            found += _exif(image)
        except (images.BadImage, OSError) as error:
            why = getattr(error, "strerror", None) or str(error)
            found.append("BAD: " + re.sub(r"\d+", "N", why[:90]))
    found += {re.sub(r"\d+", "N", f"warning: {w.message}"[:90]) for w in heard}
    return place.name, size, width, height, found


def _about(image, data, suffix):
    if image.format not in (FORMAT.get(suffix), "MPO"):
        yield f"{image.format} behind {suffix}"
    if image.format == "PNG" and data[24] == 16:
        yield "16-bit"
    elif image.mode != "RGB":
        yield MODES.get(image.mode, image.mode)
    if "transparency" in image.info:
        yield "alpha"
    if min(image.size) < TINY:
        yield f"tiny (a side below {TINY})"
    if max(image.size) > HUGE:
        yield f"huge (a side above {HUGE})"


def _exif(image):
    try:
        turned = image.getexif().get(0x0112, 1) not in (0, 1)
        return ["rotated by EXIF (training does not turn it)"] * turned
    except Exception:
        return ["broken EXIF"]


def check(path: str, processes: int, progress=lambda jobs, total: jobs) -> dict:
    """The report as a dict; Ctrl-C or SIGTERM ends it early with what it has."""
    report = {"path": path, "problems": [], "notes": [], "splits": {}, "images": 0, "checked": 0,
              "bad": 0, "stopped": False, "findings": {}}
    indexes, classes = [], None
    for split in ("train", "val"):
        try:
            indexes.append(index := open_index(path, split, classes))
        except UsageError as error:
            report["problems"] += {str(error)} - set(report["problems"])
            continue
        classes = index.classes if split == "train" else classes
        counts = np.bincount(index.labels, minlength=len(index.classes)).tolist()
        report["splits"][split] = dict(zip(index.classes, counts))
        report["notes"] += index.notes
        report["images"] += len(index)
    places = (index.place(i) for index in indexes for i in range(len(index)))
    sizes = np.zeros((3, report["images"]), np.int64)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    results = ordered(inspect, places, processes)
    try:
        for name, *sizes[:, report["checked"]], found in progress(results, report["images"]):
            report["checked"] += 1
            report["bad"] += any(f.startswith("BAD") for f in found)
            for kind in found:
                report["findings"].setdefault(kind, []).append(name)
    except KeyboardInterrupt:
        report["stopped"] = True
    finally:
        signal.signal(signal.SIGTERM, before)
        results.close()
    for what, values in zip(("bytes", "width", "height"), sizes[:, :report["checked"]]):
        if (values := values[values > 0]).size:  # of what could be opened
            report[what] = [round(q) for q in np.percentile(values, (0, 5, 50, 95, 100))]
    return report


def run(path: str, processes: int, as_json: bool, progress) -> int:
    """Print the report; exit code 0: nothing would stop a run, 1: something would, 130: stopped."""
    report = check(path, processes, progress)
    print(json.dumps(report, indent=1) if as_json else "\n".join(_text(report)), flush=True)
    return 130 if report["stopped"] else 1 if report["bad"] or report["problems"] else 0


def _text(r):
    stopped = ", STOPPED" * r["stopped"]
    yield f"{r['path']}: {r['checked']} of {r['images']} images checked{stopped}"
    for split, classes in r["splits"].items():
        n = sorted(classes.values())
        yield (f"{split}: {sum(n)} images in {len(n)} classes, {n[0]} to {n[-1]} each, "
               f"median {n[len(n) // 2]}")
    for what in ("width", "height", "bytes"):
        if what in r:
            yield "{}: min {}, 5 % {}, median {}, 95 % {}, max {}".format(what, *r[what])
    for kind, names in sorted(r["findings"].items(), key=lambda item: -len(item[1])):
        yield f"{len(names):8d}  {kind}   {names[0]}" + " ..." * (len(names) > 1)
    yield from (f"note: {note}" for note in r["notes"])
    yield from (f"PROBLEM: {problem}" for problem in r["problems"])
    yield (f"{r['bad']} bad: a run stops at the first, or replaces them with --bad-images replace"
           if r["bad"] else "no bad image" if r["checked"] else "nothing to check")
