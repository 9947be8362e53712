"""The index, and the order in which its samples come."""
import hashlib
import json
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import zipfile

import numpy as np
import pytest

from refimpl.data import zips
from refimpl.data.check import check
from refimpl.data.index import open_index
from refimpl.data.order import epoch_order, minibatch, share
from refimpl.errors import UsageError
from tests.data_files import names, photos, tree

X = b"not looked at by the index"
GOOD = {"train/cat/1.jpg": X, "train/dog/2.PNG": X + X, "val/cat/3.jpeg": X, "val/dog/4.jpg": X}


def zipped(path, files, **options):
    with zipfile.ZipFile(path, "w", **options) as file:
        for name, data in files.items():
            file.writestr(name, data)
    return path


def test_a_tree_and_its_zip_have_the_same_index(tmp_path):
    files = GOOD | {"train/dog/below/é.jpg": X, "train/a b/5.jpg": X, "train/a/6.jpg": X}
    a = open_index(tree(tmp_path / "tree", files), "train")
    b = open_index(zipped(tmp_path / "x.zip", files), "train")
    c = open_index(zipped(tmp_path / "y.zip", {f"top/{n}": d for n, d in files.items()}), "train")
    assert a.classes == b.classes == c.classes == ("a", "a b", "cat", "dog")
    assert names(a) == names(b) == names(c)
    assert a.digest == b.digest == c.digest
    for index in (a, b, c, pickle.loads(pickle.dumps(b))):
        assert [index.read(i) for i in range(len(index))] == [
            files[f"train/{name}"] for name in names(index)]
        assert [index.classes[k] for k in index.labels] == [n.split("/")[0] for n in names(index)]


def test_the_digest_sees_a_name_a_size_and_a_class(tmp_path):
    seen = {open_index(tree(tmp_path / str(i), files), "train").digest for i, files in enumerate((
        GOOD, GOOD | {"train/cat/9.jpg": X}, GOOD | {"train/cat/1.jpg": b"y"},
        {n.replace("dog", "cow"): d for n, d in GOOD.items()}))}
    assert len(seen) == 4


def test_what_is_no_image_moves_no_class_and_is_noted_once(tmp_path):
    odd = {"train/.ipynb_checkpoints/a.jpg": X, "train/.DS_Store": X, "train/cat/._1.jpg": X,
           "train/cat/.hidden.jpg": X, "train/__MACOSX/cat/1.jpg": X, "train/cat/Thumbs.db": X,
           "train/loose.jpg": X}
    plain = open_index(tree(tmp_path / "plain", GOOD), "train")
    mixed = open_index(tree(tmp_path / "mixed", GOOD | odd), "train")
    assert (mixed.classes, mixed.digest) == (plain.classes, plain.digest)
    assert [n.split(": ")[1].split(" (")[0] for n in sorted(mixed.notes)] == [
        "1 files outside any class folder ignored", "1 files without an image's suffix ignored",
        "5 hidden entries ignored"] and not plain.notes


def test_links_are_followed_to_class_folders_and_never_in_circles(tmp_path):
    root = tree(tmp_path / "data", GOOD)
    os.symlink(tree(tmp_path / "far", {"5.jpg": X}), root / "train" / "cow")
    os.symlink(root / "train", root / "train" / "cat" / "loop")
    os.symlink(root / "nowhere", root / "train" / "cat" / "gone.jpg")
    os.mkfifo(root / "train" / "cat" / "pipe.jpg")
    index = open_index(root, "train")
    assert names(index) == ["cat/1.jpg", "cat/gone.jpg", "cow/5.jpg", "dog/2.PNG"]
    assert any("dangling" in note for note in index.notes)
    with pytest.raises(OSError):
        index.read(1)


def test_what_is_no_file_and_what_lies_beside_the_splits_is_counted_and_named_once(tmp_path):
    files = GOOD | {"test/cat/7.jpg": X, ".git/8": X}
    root = tree(tmp_path / "data", files | {"train/cat/x.jpg": None, "train/dog/below/6.jpg": X})
    os.mkfifo(root / "train" / "cat" / "pipe")
    os.symlink(root / "val" / "dog", root / "train" / "cat" / "link")
    report = check(str(root), 0)
    beside, strange = report["notes"]
    assert beside.endswith("train: 1 folders beside train/ and val/ not used (first: test)")
    assert "train: 3 entries that are no files" in strange and "(first: cat/" in strange
    assert report["images"] == len(GOOD) + 1
    assert check(str(zipped(tmp_path / "x.zip", files)), 0)["notes"][0].endswith("(first: test)")


def test_folders_2_and_10_are_numbered_as_text_and_it_is_said(tmp_path):
    index = open_index(tree(tmp_path, {f"train/{c}/1.jpg": X for c in ("2", "10")}), "train")
    assert index.classes == ("10", "2") and "10 before 2" in index.notes[0]


def test_validation_takes_its_numbers_from_training(tmp_path):
    root = tree(tmp_path, GOOD | {"train/ant/5.jpg": X, "val/empty": None})
    train = open_index(root, "train")
    with pytest.raises(UsageError, match="class empty, which training lacks"):
        open_index(root, "val", train.classes)
    os.rmdir(root / "val" / "empty")
    val = open_index(root, "val", train.classes)
    assert val.labels.tolist() == [1, 2] and "no image of 1 classes (first: ant)" in val.notes[-1]
    with pytest.raises(UsageError, match="no class cow, which the model was trained on"):
        open_index(root, "train", (*train.classes, "cow"))


@pytest.mark.parametrize("files, message", [
    ({}, "no train/ "), ({"train": None, "val": None}, "has no image"),
    (GOOD | {"train/empty": None}, "1 classes .* have no image .first: empty"),
    ({"train/cat/readme.txt": X}, "has no image"), ({"images/cat/1.jpg": X}, "it has images"),
    ({"train/1.jpg": X}, "is flat"), ({"train/README": X, "train/a/notes": X}, "has no image"),
], ids=str)
def test_training_data_that_cannot_work_is_refused(tmp_path, files, message):
    with pytest.raises(UsageError, match=message):
        open_index(tree(tmp_path, files), "train")


@pytest.mark.parametrize("files, message", [
    ({"val/1.jpg": X, "val/2.jpg": X}, "is flat.*pack"),
    ({"val/all/1.jpg": X}, "class all, which training lacks"),
    ({"val/cat/1.jpg": X, "val/cat/2.jpg": X}, "one class only, of 2"),
    ({"val/cat/1.jpg": X, "validation/dog/2.jpg": X}, "both val/ and validation/"),
    ({"test/cat/1.jpg": X}, "no val/ or validation/"),
], ids=str)
def test_validation_data_that_cannot_work_is_refused_with_the_cure(tmp_path, files, message):
    for source in (tree(tmp_path / "tree", {"train": None} | files),
                   zipped(tmp_path / "x.zip", {"train/cat/1.jpg": X} | files)):
        with pytest.raises(UsageError, match=message):
            open_index(source, "val", ("cat", "dog"))


@pytest.mark.parametrize("name", ["../x.jpg", "/etc/x.jpg", "train/../../x.jpg", "C:/x.jpg",
                                  "train\\cat\\x.jpg", "train/cat/x\0.jpg"])
def test_hostile_member_names_are_refused(tmp_path, name):
    info = zipfile.ZipInfo("placeholder")
    info.filename = name
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        file.writestr("train/cat/1.jpg", X)
        file.writestr(info, X)
    with pytest.raises(UsageError, match="hostile"):
        open_index(tmp_path / "x.zip", "train")


def test_a_compressed_cut_or_doubled_zip_is_refused(tmp_path):
    packed = zipped(tmp_path / "a.zip", GOOD, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(UsageError, match="compressed"):
        open_index(packed, "train")
    whole = zipped(tmp_path / "b.zip", GOOD).read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 30):
        (tmp_path / "c.zip").write_bytes(whole[:cut])
        with pytest.raises(UsageError, match="no zip, or was cut off"):
            open_index(tmp_path / "c.zip", "train")
    with pytest.warns(UserWarning, match="Duplicate"):
        with zipfile.ZipFile(tmp_path / "b.zip", "a") as file:
            file.writestr("train/cat/1.jpg", X)
    with pytest.raises(UsageError, match="cat/1.jpg is in .* twice"):
        open_index(tmp_path / "b.zip", "train")
    with pytest.raises(UsageError, match="no such data"):
        open_index(tmp_path / "none", "train")


def test_a_zip_that_changes_after_the_start_is_noticed(tmp_path):
    path = zipped(tmp_path / "x.zip", GOOD)
    index = open_index(path, "train")
    path.write_bytes(path.read_bytes().replace(X, X[::-1]))
    with pytest.raises(OSError, match="damaged"):
        index.read(0)


def test_a_kept_index_is_used_until_the_source_changes(tmp_path, monkeypatch):
    root, cache = photos(tmp_path / "data"), tmp_path / "cache"
    first = open_index(root, "train", cache=cache)
    with monkeypatch.context() as m:
        m.setattr("refimpl.data.index.Listing", None)  # a second listing would fail
        again = open_index(root, "train", cache=cache)
    assert again.digest == first.digest and names(again) == names(first)
    assert again.read(3) == first.read(3) and again.classes == first.classes
    tree(root, {"train/dog/more/9.jpg": X})
    assert len(open_index(root, "train", cache=cache)) == len(first) + 1
    for kept in cache.iterdir():
        kept.write_bytes(kept.read_bytes()[:100])
    assert len(open_index(root, "train", cache=cache)) == len(first) + 1


def test_the_written_zip_is_zip64_where_it_must_be(tmp_path):
    writer = zips.Writer(tmp_path / "x.zip")
    writer.file.seek(5 << 30)  # a hole: the members lie beyond 4 GiB
    writer.at = 5 << 30
    for i in range(65_600):
        writer.add(b"train/%d/%d.jpg" % (i % 2, i), b"%d" % i)
    writer.finish()
    index = open_index(tmp_path / "x.zip", "train")
    assert len(index) == 65_600 and index.offsets.min() >= 5 << 30
    for i in (0, 1, 40_000, 65_599):
        assert index.path(i).endswith(f"/{index.read(i).decode()}.jpg")


def test_an_epoch_is_one_permutation_and_no_release_of_numpy_may_change_it():
    orders = [epoch_order(seed, epoch, 1000) for seed in (0, 1) for epoch in (0, 1, 2)]
    for order in orders:
        assert order.dtype == np.int64 and sorted(order) == list(range(1000))
    assert len({order.tobytes() for order in orders}) == len(orders)
    assert epoch_order(0, 0, 8).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert hashlib.sha256(orders[4].tobytes()).hexdigest()[:16] == "033e0aa7e11711ae"


@pytest.mark.parametrize("size, workers, n", [(30, 3, 2), (31, 4, 3), (12, 1, 12), (17, 5, 1)])
def test_no_sample_is_lost_or_seen_twice_but_the_incomplete_last(size, workers, n):
    order, seen = epoch_order(3, 1, size), []
    for step in range(size // (workers * n)):
        for worker in range(workers):
            seen += minibatch(order, step * workers * n, workers, n, worker).tolist()
    assert seen == order[:size // (workers * n) * workers * n].tolist()
    assert size - len(seen) < workers * n


def test_a_band_can_begin_and_a_run_go_on_at_any_sample():
    order = epoch_order(0, 0, 30)
    before = [minibatch(order, 0, 3, 4, w) for w in range(3)]  # then another k and n
    after = [minibatch(order, 12 + 6 * s, 2, 3, w) for s in range(3) for w in range(2)]
    assert np.concatenate(before + after).tolist() == order.tolist()


@pytest.mark.parametrize("size", [0, 1, 7, 10, 50])
def test_shares_count_each_sample_once_for_every_number_of_ranks(size):
    for parts in range(1, 6):
        shares = [share(size, parts, part) for part in range(parts)]
        assert [i for s in shares for i in s] == list(range(size))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


UNPRIVILEGED = """
import json, os, sys
from refimpl.data.check import check
from refimpl.data.index import open_index
root = sys.argv[1]
check(f"{root}/good", 0)  # all imports happen while they can
os.setgroups([]), os.setgid(65534), os.setuid(65534)
for name in ("file", "listing", "class", "split", "root", "x.zip"):
    report = check(f"{root}/{name}", 0)
    print(json.dumps([report["problems"], report["findings"].get("BAD: Permission denied", [])]))
try:
    open_index(f"{root}/good", "train", cache=f"{root}/none/cache")
except ValueError as error:
    print(json.dumps([[str(error)], []]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become somebody else")
def test_what_may_not_be_read_is_said_and_a_file_of_it_is_a_bad_image():
    with tempfile.TemporaryDirectory() as root:  # pytest's own folder is closed to others
        root = pathlib.Path(root)
        for name in ("good", "file", "listing", "class", "split", "root"):
            photos(root / name)
        zipped(root / "x.zip", GOOD)
        closed = ["file/train/cat/1.jpg", "listing/train/cat", "class/train/cat", "split/train", "root",
                  "x.zip"]
        for name in closed:
            (root / name).chmod(0o644 if name.startswith("class") else 0)  # listed, but not entered
        (root / "none").mkdir(0o700)
        root.chmod(0o755)
        job = subprocess.run([sys.executable, "-c", UNPRIVILEGED, root], capture_output=True, text=True)
        assert job.returncode == 0, job.stderr
        said = [json.loads(line) for line in job.stdout.splitlines()]
        where = [str(root / name) for name in closed]
        assert said[0] == [[], where[:1]]
        assert said[2] == [[], [f"{where[2]}/{i}.jpg" for i in range(6)]]
        for at in (1, 3, 4, 5):
            assert said[at] == [[f"{where[at]}: Permission denied; mend that first"], []]
        assert said[6] == [[f"{root}/none/cache: Permission denied; mend that first"], []]
