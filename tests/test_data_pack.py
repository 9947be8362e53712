"""The two commands: pack makes the zip, check tells beforehand what a run would meet."""
import gzip
import json
import signal
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from PIL import Image

from refimpl.data import zips
from refimpl.data.check import check
from refimpl.data.images import opened, rgb
from refimpl.data.index import open_index
from refimpl.data.pack import pack
from refimpl.errors import UsageError
from tests.data_files import encoded, names, photos, picture, tree


def command(*argv):
    return subprocess.run([sys.executable, "-m", "refimpl.data", *map(str, argv)], text=True,
                          capture_output=True, timeout=60)


def test_originals_are_packed_byte_for_byte(tmp_path):
    root = photos(tmp_path / "data")
    job = command("pack", root, tmp_path / "x.zip", "--processes", 2)
    assert job.returncode == 0, job.stderr
    for split in ("train", "val"):
        assert open_index(tmp_path / "x.zip", split).digest == open_index(root, split).digest
    assert zipfile.ZipFile(tmp_path / "x.zip").testzip() is None
    pack(tmp_path / "x.zip", tmp_path / "again.zip", processes=0)  # a zip is a source too
    assert (tmp_path / "again.zip").read_bytes() == (tmp_path / "x.zip").read_bytes()


@pytest.mark.parametrize("left", [0, 20, 150, 3000, 0.5, 0.7, 1])
def test_a_stopped_pack_goes_on_and_ends_with_the_same_bytes(tmp_path, left):
    root, out, part = photos(tmp_path / "data"), tmp_path / "x.zip", tmp_path / "x.zip.part"
    pack(root, tmp_path / "whole.zip", short_side=20, processes=0)
    whole = (tmp_path / "whole.zip").read_bytes()
    cut = whole[:left if left > 1 else int(left * len(whole))]
    part.write_bytes(cut + b"torn" * (left == 3000))
    made = []
    pack(root, out, short_side=20, processes=0,
         progress=lambda jobs, total: (made.append(job) or job for job in jobs))
    assert out.read_bytes() == whole and not part.exists()
    assert (len(made) == 0) == (left == 1) and (len(made) < 16) == (left in (3000, 0.5, 0.7, 1))
    with pytest.raises(UsageError, match="exists already"):
        pack(root, out, processes=0)


def test_what_the_disk_did_not_keep_gets_no_name(tmp_path, monkeypatch):
    def finish(writer, whole=zips.Writer.finish):
        writer.file.seek(writer.at - 1)
        writer.file.write(b"?")  # the last byte of the last image
        whole(writer)
    monkeypatch.setattr(zips.Writer, "finish", finish)
    with pytest.raises(OSError, match="damaged"):
        pack(photos(tmp_path / "data"), tmp_path / "x.zip", processes=0)
    assert not (tmp_path / "x.zip").exists()


def test_an_unfinished_pack_of_something_else_is_refused(tmp_path):
    root = photos(tmp_path / "data")
    pack(root, tmp_path / "a.zip", short_side=20, processes=0)
    (tmp_path / "b.zip.part").write_bytes((tmp_path / "a.zip").read_bytes())
    with pytest.raises(UsageError, match="b.zip.part was begun with other settings"):
        pack(root, tmp_path / "b.zip", short_side=21, processes=0)


def test_shrunk_images_have_that_short_side_and_small_ones_stay(tmp_path):
    root = tree(tmp_path / "d", {f"{s}/{c}/{n}": data for s in ("train", "val") for c in "ab"
                                 for n, data in {
        "wide.jpg": encoded(picture(80, 60)), "tall.png": encoded(picture(50, 100), "PNG"),
        "small.jpg": encoded(picture(30, 20)), "bad.jpg": b"no image"}.items()})
    notes = pack(root, tmp_path / "x.zip", short_side=24, processes=0)
    index = open_index(tmp_path / "x.zip", "train")
    files = {name: index.read(i) for i, name in enumerate(names(index))}
    assert list(files) == [f"{c}/{n}" for c in "ab" for n in (
        "bad.jpg", "small.jpg", "tall.png.jpg", "wide.jpg")]
    assert files["a/bad.jpg"] == b"no image" and len(notes) == 4 and "kept as it is" in notes[0]
    assert files["a/small.jpg"] == encoded(picture(30, 20))
    assert opened(files["a/wide.jpg"]).size == (32, 24)
    assert opened(files["a/tall.png.jpg"]).size == (24, 48)
    shrunk = np.asarray(rgb(opened(files["a/wide.jpg"]))).astype(int)
    assert abs(shrunk - np.asarray(picture(32, 24)).astype(int)).mean() < 6


def test_at_most_keeps_that_many_of_each_class(tmp_path):
    pack(photos(tmp_path / "data"), tmp_path / "x.zip", at_most=(3, 1), processes=0)
    assert open_index(tmp_path / "x.zip", "train").labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert open_index(tmp_path / "x.zip", "val").labels.tolist() == [0, 1]


WNIDS = ("n02", "n01", "n03")  # the truth of ILSVRC2012_val_1..3


def ilsvrc(root):
    jpeg = {i: encoded(picture(number=i)) for i in range(6)}
    return tree(root, {f"ILSVRC/Data/CLS-LOC/train/n0{c}/n0{c}_1.JPEG": jpeg[c] for c in (1, 2, 3)}
                | {f"ILSVRC/Data/CLS-LOC/val/ILSVRC2012_val_{i}.JPEG": jpeg[i] for i in (1, 2, 3)})


@pytest.mark.parametrize("name, text, given", [
    ("LOC_val_solution.csv", "ImageId,PredictionString\n" + "".join(
        f"ILSVRC2012_val_{i},{WNIDS[i - 1]} 1 2 3 4 {WNIDS[i - 1]} 5 6 7 8\n"
        for i in (3, 1, 2)), False),
    ("truth.csv", "".join(f"ILSVRC2012_val_{i}.JPEG,{WNIDS[i - 1]}\n" for i in (1, 2, 3)), True),
    ("synset_labels.txt", "\n".join(WNIDS) + "\n", True),
])
def test_imagenet_with_a_flat_val_is_sorted_by_its_ground_truth(tmp_path, name, text, given):
    root = ilsvrc(tmp_path / "data")
    (root / name).write_text(text)
    pack(root, tmp_path / "x.zip", truth=str(root / name) if given else None, processes=0)
    train = open_index(tmp_path / "x.zip", "train")
    val = open_index(tmp_path / "x.zip", "val", train.classes)
    assert names(val) == [f"n0{c}/ILSVRC2012_val_{i}.JPEG" for c, i in ((1, 2), (2, 1), (3, 3))]
    assert [val.read(i) for i in range(3)] == [encoded(picture(number=i)) for i in (2, 1, 3)]


@pytest.mark.parametrize("text, message", [
    (None, "val is flat, and there is no LOC_val_solution.csv; give --truth"), ("n01\nn02\n", "2 lines for 3 images"),
    ("n01\nn02\nn99\n", "the class n99, which train lacks"), ("1\n2\n3\n", "class numbers"),
    ("ILSVRC2012_val_1,n01\n", "ILSVRC2012_val_2.JPEG the class None"),
])
def test_a_wrong_ground_truth_is_refused(tmp_path, text, message):
    root = ilsvrc(tmp_path / "data")
    if text:
        (tmp_path / "truth").write_text(text)
    with pytest.raises(UsageError, match=message):
        pack(root, tmp_path / "x.zip", truth=text and str(tmp_path / "truth"), processes=0)


def test_class_numbers_go_through_meta_mat(tmp_path):
    savemat = pytest.importorskip("scipy.io").savemat
    root = ilsvrc(tmp_path / "data")
    savemat(tmp_path / "meta.mat", {"synsets": np.array(
        [(i + 1, w) for i, w in enumerate(("n03", "n01", "n02", "n04"))],
        dtype=[("ILSVRC2012_ID", "f8"), ("WNID", "O")])})
    (tmp_path / "truth.txt").write_text("3\n2\n1\n")
    pack(root, tmp_path / "x.zip", truth=str(tmp_path / "truth.txt"), processes=0)
    assert [n[:3] for n in names(open_index(tmp_path / "x.zip", "val"))] == ["n01", "n02", "n03"]


def idx(array):
    head = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}L", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def test_idx_files_become_lossless_images(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 28, 28))
    labels = np.array([10, 3, 2, 10, 0, 1, 2, 3, 10, 0, 1, 1])
    tree(tmp_path / "mnist", {
        "train-images-idx3-ubyte.gz": gzip.compress(idx(pixels)),
        "train-labels-idx1-ubyte.gz": gzip.compress(idx(labels)),
        "t10k-images-idx3-ubyte": idx(pixels[:5]), "t10k-labels-idx1-ubyte": idx(labels[:5])})
    pack(tmp_path / "mnist", tmp_path / "x.zip", processes=0)
    train = open_index(tmp_path / "x.zip", "train")
    assert train.classes == ("00", "01", "02", "03", "10")
    assert len(open_index(tmp_path / "x.zip", "val", train.classes)) == 5
    for i, name in enumerate(names(train)):
        label, number = name.removesuffix(".png").split("/")
        assert int(label) == labels[int(number)] == int(train.classes[train.labels[i]])
        assert (np.asarray(opened(train.read(i))) == pixels[int(number)]).all()
    (tmp_path / "mnist" / "t10k-images-idx3-ubyte").write_bytes(idx(pixels)[:99])
    with pytest.raises(UsageError, match="not a whole IDX file"):
        pack(tmp_path / "mnist", tmp_path / "y.zip", processes=0)


ODD = {"png.jpg": encoded(picture(), "PNG"), "cmyk.jpg": encoded(picture().convert("CMYK")),
       "grey.jpg": encoded(picture().convert("L")), "cut.jpg": encoded(picture())[:-2],
       "no.jpg": b"", "huge.jpg": encoded(picture(4200, 40)),
       "palette.png": encoded(picture().quantize(8), "PNG"), "tiny.jpg": encoded(picture(9, 9)),
       "alpha.png": encoded(picture().convert("RGBA"), "PNG"),
       "deep.png": encoded(Image.fromarray(np.zeros((40, 40), np.uint16)), "PNG")}
FINDINGS = {"PNG behind .jpg": ["png.jpg"], "CMYK": ["cmyk.jpg"], "grey": ["grey.jpg"],
            "BAD: empty file": ["no.jpg"], "palette": ["palette.png"], "alpha": ["alpha.png"],
            "16-bit": ["deep.png"], "rotated by EXIF (training does not turn it)": ["turned.jpg"],
            "BAD: OSError: image file is truncated (N bytes not processed)": ["cut.jpg"]}


def odd_tree(root):
    exif = Image.Exif()
    exif[0x0112] = 6
    files = ODD | {"turned.jpg": encoded(picture(), exif=exif),
                   "good.jpg": encoded(picture(60, 40))}
    return tree(root, {f"train/cat/{n}": d for n, d in files.items()}
                | {"train/dog/1.jpg": encoded(picture(60, 40)), "val/1.jpg": b""})


def test_check_lists_everything_a_run_would_meet(tmp_path):
    root = odd_tree(tmp_path)
    job = command("check", root, "--json", "--processes", 2)
    report = json.loads(job.stdout)
    found = {kind: sorted(p.rpartition("/")[2] for p in paths)
             for kind, paths in report["findings"].items()}
    assert {kind: found[kind] for kind in FINDINGS} == FINDINGS
    others = {kind.split()[0] for kind in set(found) - set(FINDINGS)}
    assert others == {"tiny", "huge"} and found["huge (a side above 4096)"] == ["huge.jpg"]
    assert job.returncode == 1 and report["bad"] == 2 and report["checked"] == 13
    assert report["splits"] == {"train": {"cat": 12, "dog": 1}} and "flat" in report["problems"][0]
    assert report["width"][4] == 4200 and report["height"][2] == 30
    text = command("check", root).stdout
    for words in ("12 each", "train/cat/cut.jpg", "PROBLEM", "2 bad"):
        assert words in text


def test_check_of_good_images_ends_with_success(tmp_path):
    job = command("check", photos(tmp_path, width=50, height=40))
    assert job.returncode == 0 and "no bad image" in job.stdout, job.stderr
    assert command("check", tmp_path / "none").returncode == 1


def test_a_stopped_check_gives_what_it_has(tmp_path):
    def three_then_stop(jobs, total):
        for i, job in enumerate(jobs):
            if i == 3:
                signal.raise_signal(signal.SIGTERM)
            yield job
    report = check(photos(tmp_path), 2, three_then_stop)
    assert report["stopped"] and report["checked"] == 3 and len(report["width"]) == 5


@pytest.mark.parametrize("which", [0, 1])  # one of them holds the lock of their queue
def test_a_killed_process_ends_the_work_and_leaves_none_behind(which):
    code = f"""
import multiprocessing, time
from refimpl.data.pool import ordered
if __name__ == "__main__":
    results = ordered(abs, range(1000), 2)
    next(results)
    time.sleep(1)  # both have done what is in flight, and wait
    multiprocessing.active_children()[{which}].kill()
    list(results)"""
    job = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert job.returncode == 1 and "RuntimeError: a process died" in job.stderr


@pytest.mark.parametrize("argv, message", [
    (("pack", "/nowhere", "x.zip"), "no such data: /nowhere"),
    (("pack", ".", "x.zip", "--short-side", "0"), "short side"),
    (("pack", ".", "x.zip", "--at-most", "0,1"), "'0,1': expected TRAIN[,VAL], each from 1"),
    (("pack", ".", "x.zip", "--at-most", "x"), "expected TRAIN[,VAL]"),
    (("check", ".", "--processes", "-1"), "'-1': expected a whole number from 0"),
])
def test_wrong_use_is_one_line_and_code_2(tmp_path, argv, message):
    job = command(*argv)
    assert job.returncode == 2 and message in job.stderr and "Traceback" not in job.stderr
