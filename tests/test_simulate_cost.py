"""The cost model: by hand for one message, closed form against simulation, steps, the commands."""
import json
import runpy
import shlex
import subprocess
import sys

import pytest

from refimpl.simulate import step as steps
from refimpl.simulate.__main__ import main
from refimpl.simulate.cost import FOLDER, Cluster, tomllib
from refimpl.simulate.form import ALGORITHMS, closed_form, simulated
from tests.mpi import ROOT

NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))


def flat(**changes):
    """One rank per node and card, nothing shared, 1 MB/s, no latency, adding for free."""
    return Cluster("abci").but(**{
        "node__ranks": 1, "node__per_leaf": 1e9, "between__channels": 1, "between__efficiency": 1,
        "between__bandwidth": 1e6, "between__latency": 0, "rank__add": 1e30, **changes})


def both(cluster, algorithm, ranks, nbytes, shape=None):
    ran = simulated(cluster, algorithm, ranks, nbytes, shape)
    return max(ran), closed_form(cluster, algorithm, ranks, nbytes, shape)["seconds"]


@pytest.mark.parametrize("changes, expected", [
    ({}, 6 * 0.1),                                         # 2(N-1) messages of 0.1 MB
    ({"between__latency": 2.0}, 6 * 2.1),
    ({"between__overhead": 3.0}, 6 * 3.1),
    ({"rank__add": 1e5}, 6 * 0.1 + 3 * 1.0),               # N-1 of them are added
])
def test_a_ring_of_four_by_hand(changes, expected):
    for seconds in both(flat(**changes), "ring", 4, 4e5):
        assert seconds == pytest.approx(expected, rel=1e-9)


def test_ranks_of_a_node_share_its_cards():
    one = flat(node__ranks=4, between__channels=1, inside__latency=0, inside__bandwidth=1e30)
    # 2 rows of 4 in 2 nodes: the row is inside, each column crosses; 4 x 0.05 MB on one card
    for cards in (1, 2, 4):
        for seconds in both(one.but(between__channels=cards), "torus", 8, 4e5, (2, 4)):
            assert seconds == pytest.approx(2 * 0.05 * 4 / cards, rel=1e-9)


def test_leaves_share_an_uplink():
    # 2 leaves of 4 nodes; each of the 4 columns crosses between them, both ways
    narrow = flat(node__per_leaf=4, node__oversubscription=2, rank__add=1e30)
    ran, form = both(narrow, "torus", 8, 4e5, (2, 4))
    assert form == pytest.approx(6 * 0.1 + 2 * 4 * 0.05 / 2, rel=1e-9)
    assert ran == pytest.approx(form + 0.025, rel=1e-9)  # the last message is on its way alone


def test_adding_one_segment_hides_behind_sending_the_next():
    segment = 1 << 20
    alone, _ = both(flat(), "ring", 2, 32 * segment)
    assert alone == pytest.approx(32 * segment / 1e6)
    for seconds in both(flat(rank__add=2e6), "ring", 2, 32 * segment):
        assert seconds == pytest.approx(alone + segment / 2e6, rel=1e-3)  # the last one alone


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("algorithm, ranks, shape, within", [
    ("ring", 16, None, 0.1), ("torus", 64, (16, 4), 0.15), ("torus", 64, (8, 8), 0.15),
    ("halving_doubling", 64, None, 0.1), ("hierarchical", 64, None, 0.1)])
@pytest.mark.parametrize("nbytes", [4e3, 1e6, 51e6])
def test_closed_form_and_simulation_agree(name, algorithm, ranks, shape, within, nbytes):
    if name in ("two_cores", "emulated"):
        ranks, shape = min(ranks, 8), shape and (2, 4)
    ran, form = both(Cluster(name), algorithm, ranks, nbytes, shape)
    assert form == pytest.approx(ran, rel=within)


@pytest.mark.parametrize("name, counts", [
    ("abci", (3, 14, 25, 33, 44, 63, 272, 544)), ("bigbasin", (3, 12, 24, 25, 44, 63)),
    ("h100", (3, 14, 24, 25, 44, 63)), ("two_cores", (3, 5, 6, 7)), ("emulated", (3, 5, 6, 7))])
def test_closed_form_and_simulation_agree_on_binary_blocks(name, counts):
    off = [abs(form / ran - 1) for ranks in counts for nbytes in (4e3, 1e6, 51e6)
           for ran, form in [both(Cluster(name), "halving_doubling", ranks, nbytes)]]
    assert max(off) < 0.3 and sorted(off)[len(off) * 3 // 4] < 0.1


def test_the_smallest_block_is_a_chain_that_everybody_waits_for():
    # 3 = 2 + 1, a card each, 1 MB/s, 0.4 MB: halving 0.2 s; 2 x 0.2 s up, as many down; doubling 0.2
    for seconds in both(flat(), "halving_doubling", 3, 4e5):
        assert seconds == pytest.approx(0.2 + 4 * 0.2 + 0.2, rel=1e-9)


def test_shared_cores_serialise_what_their_ranks_do():
    one = Cluster("two_cores").but(**{
        "inside.latency": 0, "inside.overhead": 1, "inside.bandwidth": 1e30, "rank.add": 1e30,
        "rank.turn": 0, "rank.switch": 0, "rank.huge": 1})
    for ranks, crowd in ((2, 1), (4, 2), (8, 4)):  # 2(P-1) rounds, P/2 messages a core
        assert both(one, "ring", ranks, 4e3)[1] == pytest.approx(2 * (ranks - 1) * crowd)
    late = one.but(rank__turn=100, rank__switch=10)  # a turn and a switch for 3 others on the core
    assert both(late, "ring", 8, 4e3)[1] == pytest.approx(300 + 14 * 4 * 31)
    adds = one.but(inside__overhead=0, rank__add=1e6)  # 7 x 1 MB over 2 cores
    assert closed_form(adds, "window", 8, 1e6)["seconds"] == pytest.approx(3.5)


def test_a_token_bucket_lets_through_what_it_saved():
    full = Cluster("emulated").but(**{
        "between.latency": 0, "between.overhead": 0, "between.bandwidth": 1e6, "rank.add": 1e30,
        "between.efficiency": 1, "rank.turn": 1, "rank.switch": 0, "between.burst": 5e5})
    # 4 ranks on 2 cores begin a turn late, a second in which half a MB of 1.5 MB is saved
    for seconds in both(full, "ring", 4, 1e6):
        assert seconds == pytest.approx(1 + 1.5 - 0.5)


def test_the_closed_form_answers_for_100000_ranks():
    times = {a: closed_form(Cluster("abci"), a, 100_000, 51e6, (250, 400))["seconds"]
             for a in ("ring", "torus", "halving_doubling", "hierarchical")}
    assert times["ring"] > 20 * times["torus"] > 20 * times["halving_doubling"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_every_constant_has_a_source_or_a_range_with_its_reason(name):
    tables = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    assert tables.pop("title")
    entries = [e for table in tables.values() for e in table.values()]
    assert all({*e} == {"value", "source"} or ({*e} == {"low", "high", "reason"}
               and e["low"] < e["high"]) for e in entries)
    assert {*Cluster(name)} == {*Cluster("abci")}


def test_layers_and_buckets_are_the_trainers():
    pytest.importorskip("torch")
    from refimpl.gradients import plan_buckets
    from refimpl.model import ResNet
    small = [p.numel() for p in ResNet((1, 1, 1, 1), 16, stem="small").parameters()]
    assert [values for values, _ in steps.layers((1, 1, 1, 1), 16, 64)] == small
    sizes = [p.numel() for p in ResNet().parameters()]
    assert [values for values, _ in steps.layers()] == sizes and steps.tail() == 53_125
    assert sum(work for _, work in steps.layers()) == 4_089_184_256  # 4.089 G
    for limit in (1, 100_000, 2_000_000, 1 << 62):
        plan = plan_buckets(sizes[::-1], limit, steps.tail(), None)
        assert [b.stop - b.start for b in plan] == [
            *(values for values, _ in steps.buckets(limit)), steps.tail()]


def test_a_step_hides_what_overlaps_and_waits_for_the_slowest():
    plan = {"algorithm": "ring", "wire": 4}
    quiet = flat(compute__spread=0, compute__per_bucket=0, compute__per_image=1,
                 between__bandwidth=1e8)
    none, full = (steps.step(quiet.but(compute__overlap=o), 4, plan) for o in (0, 1))
    assert none["compute"] == full["compute"] == 32 and none["hidden"] == pytest.approx(0)
    moved = 2 * 3 / 4 * 4 * (25_557_032 + steps.tail()) / 1e8
    assert none["seconds"] == pytest.approx(32 + moved, rel=1e-3)
    assert full["seconds"] < 32 + moved / 4 and full["allreduce"] == pytest.approx(moved, rel=1e-3)
    slow = steps.step(quiet.but(compute__spread=0.1, compute__overlap=1), 1000, plan)
    assert slow["compute"] == pytest.approx(32 * (1 + 0.1 * 3.717), rel=1e-3)


def test_an_interval_is_that_of_the_ranges_and_names_the_strongest():
    cluster = Cluster("abci")
    low, high = cluster.ranges["between.latency"]
    found = steps.interval(cluster, lambda c: c["between.latency"] * 1e6 + c["compute.spread"])
    assert found[0] == pytest.approx(low * 1e6) and found[2] == pytest.approx(high * 1e6 + 0.04)
    assert found[3] == "between.latency" and found[4] == pytest.approx((high - low) * 1e6)


def test_a_constant_that_is_given_is_no_longer_a_range():
    given = Cluster("abci", [("between.latency", 1e-3)])
    assert "between.latency" in Cluster("abci").ranges and "between.latency" not in given.ranges
    assert steps.interval(given, lambda c: c["between.latency"])[:3] == (1e-3, 1e-3, 1e-3)
    known = Cluster("abci", dict(Cluster("abci")).items())
    assert steps.interval(known, lambda c: 7.0) == (7.0, 7.0, 7.0, "nothing", 0.0)


@pytest.fixture
def command(monkeypatch, capsys):
    """python -m refimpl.simulate in this process (fit: docs/fit.py): arguments -> (exit code,
    stdout, stderr)."""
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["simulate", *arguments])
        if arguments[0] != "fit":
            return main(), *capsys.readouterr()
        sys.argv.pop(1)
        return runpy.run_path(str(ROOT / "docs" / "fit.py"))["main"](), *capsys.readouterr()
    return call


def test_the_commands_answer(command, tmp_path):
    picture = tmp_path / "a.png"
    code, out, _ = command("allreduce", "--cluster", "abci", "--ranks", "16", "--bytes", "1M",
                           "--set", "between.latency=1e-3", "--plot", str(picture))
    assert code == 0 and picture.read_bytes()[:4] == b"\x89PNG"
    assert 30 < float(out.split("\nring")[1].split()[0]) < 31  # 30 rounds of a millisecond
    code, out, _ = command("step", "--recipe", "mikami_v2_122s")
    assert code == 0 and "3456 ranks x 16" in out
    code, out, _ = command("scaling", "--recipe", "goyal_8k", "--ranks", "8:16")
    assert code == 0 and "100.0%" in out
    code, _, err = command("allreduce", "--ranks", "16", "--set", "between.speed=1")
    assert code == 2 and "no constant between.speed" in err and err.count("\n") == 1


@pytest.mark.parametrize("line, said", [(line, said) for lines, said in [
    (["scaling --ranks 0:4", "scaling --ranks 4", "scaling --ranks a:b", "scaling --ranks 64:4"],
     "FIRST:LAST"),
    (["allreduce --ranks 0", "allreduce --ranks -4", "allreduce --ranks 2.5", "step --ranks 0",
      "trace --ranks-per-node 0", "allreduce --ranks 10000000000"], "whole number from 1"),
    ([f"allreduce --ranks 4 --bytes {b}" for b in ("0", "nan", "1e400", "-5", "5GK", "M", "''")],
     "51M"),
    ([f"allreduce --ranks 4 --set {s}" for s in (
        "between.latency=nan", "between.latency=-1", "between.bandwidth=0", "between.bandwidth=inf",
        "node.ranks=0", "node.ranks=2.5", "rank.add=1e-300")], "from "),
    (["allreduce --ranks 4 --set x", "step --set between.latency=fast"], "NAME=VALUE"),
    (["trace --ranks 5 --algorithm ring --grid 2x3", "trace --ranks 6 --algorithm ring --grid 2x3",
      "allreduce --ranks 6 --grid 2x2", "step --ranks 8 --grid 2x3"], "torus"),
    (["trace --ranks-per-node 2", "trace --algorithm torus --ranks-per-node 2"], "knows no nodes"),
    (["trace --grid 2", "trace --grid 0x4", "trace --grid 2x"], "ROWSxCOLUMNS"),
    (["trace --ranks 100 --plot x.png", "trace --ranks 1000"], "at most 16 in a picture"),
    (["trace --plot /nonexist/x.png", "trace --plot x.jpeg2", "scaling --plot /nonexist/x.png"],
     "in a folder that exists"),
    (["fit /nonexist", "fit {0}", "fit {0}/empty", "fit {0}/text", "fit {0}/list", "fit {0}/lacks",
      "fit {0}/zero"], "not rows of bench"),
    (["fit x --constants speed", "step --algorithm speed", "allreduce --ranks 8 --across speed",
      "step --wire speed"], "choose from"),
    (["step --cluster ../published"], "choose from abci")] for line in lines])
def test_what_a_user_gives_wrong_is_one_line_and_code_2(command, tmp_path, line, said):
    for name, text in (("empty", ""), ("text", "x"), ("list", "[1]"), ("lacks", "{}"), ("zero", (
            '{"algorithm": "ring", "ranks": 2, "bytes": 4, "median_s": 0}'))):
        (tmp_path / name).write_text(text)
    code, _, err = command(*shlex.split(line.format(tmp_path)))
    assert code == 2 and said in err and err.count("\n") == 1


@pytest.mark.parametrize("across", ["ring", "torus", "halving_doubling"])
def test_the_last_node_may_have_fewer_ranks(command, across):
    code, out, _ = command("allreduce", "--ranks", "7", "--across", across, "--algorithms", "all")
    assert code == 0 and all(f"\n{name} " in out for name in ALGORITHMS)


def test_one_rank_waits_for_nothing(command):
    code, out, _ = command("step", "--ranks", "1")
    assert code == 0 and out.count("mostly nothing]") == 2


def test_a_step_of_another_network_says_so(command):
    code, out, _ = command("step", "--recipe", "demo")
    assert code == 0 and "note: demo's network takes ResNet-50's time per multiplication" in out


def test_simulating_needs_no_torch():
    code = ("import sys, refimpl.simulate.__main__ as m; sys.argv[1:] = ['step']; m.main();"
            "assert 'torch' not in sys.modules and 'mpi4py' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_a_fit_finds_the_constants_that_made_the_measurements(command, tmp_path):
    truth = Cluster("two_cores").but(**{"inside.overhead": 5e-5, "inside.bandwidth": 2.5e9,
                                        "rank.add": 6e9})
    rows = [{"algorithm": a, "ranks": n, "bytes": b, "median_s": closed_form(
             truth, a, n, b, (1, n) if n < 4 else (2, n // 2), "ring")["seconds"]}
            for a in ("ring", "halving_doubling", "torus") for n in (2, 4, 8)
            for b in (4096, 1 << 20, 1 << 27)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"algorithm": "gloo"}]))
    _, out, _ = command("fit", str(file))
    found = {k: float(v) for k, v in (line.split(" = ") for line in out.splitlines()[:7])}
    assert found["inside.overhead"] == pytest.approx(5e-5, rel=0.05)
    # one core copies and adds, and half of all rounds add: the two rates show only together
    assert 2 / found["inside.bandwidth"] + 1 / found["rank.add"] == pytest.approx(
        2 / 2.5e9 + 1 / 6e9, rel=0.02)
    assert "27 of 27 within 25 %" in out
