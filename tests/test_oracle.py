"""The ruler, the inputs, the files, the verbs and what hostile files meet."""
import csv
import json
import re
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from refimpl.errors import UsageError
from refimpl.oracle import families, spec, words
from refimpl.oracle.__main__ import USAGE, _arguments, main
from refimpl.oracle.cases import Case, dump, load
from refimpl.oracle.check import where
from tests.mpi import ROOT
from tests.oracle_vectors import FILES, PLACE, TABLE, notes, suite


# --- the ruler -------------------------------------------------------------------------------

def test_ulps_count_the_numbers_between():
    one = np.float32(1)
    for a, b, want in [(one, one, 0), (one, np.nextafter(one, np.float32(2)), 1), (0.0, -0.0, 0),
                       (np.float32(-1e-45), np.float32(1e-45), 2), (one, -one, 2 * 0x3F800000)]:
        assert words.ulps(np.float32(a), np.float32(b), "float32") == want
    assert words.ulps(np.int32(-1), np.int32(2), "int32") == 3
    assert words.ulps(np.int64(-2 ** 63), np.int64(2 ** 63 - 1), "int64") == 2 ** 64 - 1
    assert words.ulps(np.uint16(0x3F80), np.uint16(0x3F82), "bfloat16") == 2
    assert words.ulps(np.float64(1), np.float64(1 + 2 ** -52), "float64") == 1


@pytest.mark.parametrize("dtype", words.STORED)
def test_hex_words_make_the_round_trip(dtype):
    bits = np.array([0, 1, 2 ** 14, 2 ** 15, 2 ** 16 - 1], np.uint16)
    x = np.resize(bits, 16).view(words.stored(dtype))
    assert words.from_hex(words.to_hex(x, dtype), dtype).tobytes() == x.tobytes()
    assert words.to_hex(x[:0], dtype) == "" and words.from_hex("", dtype).size == 0


def test_hex_is_what_a_reader_expects():
    assert words.to_hex(np.array([1, -2], np.float32), "float32") == "3f800000 c0000000"
    assert words.to_hex(np.array([255], np.int64), "int64") == "00000000000000ff"
    for bad in ("3f80000", "3f8000000", "3g800000", "0x3f8000", "3f80 0000", "½½½½½½½½"):
        with pytest.raises(UsageError):
            words.from_hex(bad, "float32")


@pytest.mark.parametrize("dtype", words.FLOATS)
def test_the_bound_holds_for_any_order_and_is_not_slack(dtype):
    worst, rng = 0.0, np.random.default_rng(0)
    for ranks in (2, 3, 7):
        xs = [families.values("spread", dtype, ranks, 1, r, 0, 300) for r in range(ranks)]
        columns = zip(*(words.wide(x, dtype).tolist() for x in xs))
        exact = [sum(map(Fraction, column)) for column in columns]
        for order in ([*range(ranks)], [*rng.permutation(ranks)]):
            got = words.wide(spec.tree(xs, "+".join(map(str, order)), dtype), dtype)
            off = np.array([float(abs(Fraction(g) - e)) for g, e in zip(got.tolist(), exact)])
            limit = words.bound(xs, dtype)
            assert (off <= limit).all()
            worst = max(worst, (off / limit).max())
    assert worst > 0.3


def test_nan_equals_nan_and_zero_is_not_minus_zero():
    a = np.array([0x7FC00000, 0x80000000], np.uint32).view(np.float32)
    b = np.array([-np.nan, 0], np.float32)
    assert words.same(a, b, "float32").tolist() == [True, False]


# --- the inputs ------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", words.STORED)
@pytest.mark.parametrize("family", ["census", "place", "exact"])
def test_every_partial_sum_of_exact_inputs_is_exact(family, dtype):
    rng = np.random.default_rng(0)
    for ranks in (1, 2, 5, 8):
        xs = [families.values(family, dtype, ranks, 0, r, 0, 200) for r in range(ranks)]
        for _ in range(3):
            order = rng.permutation(ranks)
            total = xs[order[0]]
            real = [Fraction(v) for v in words.wide(total, dtype).tolist()]
            for r in order[1:]:
                total = spec.tree([total, xs[r]], "0+1", dtype)
                real = [a + Fraction(v) for a, v in zip(real, words.wide(xs[r], dtype).tolist())]
                assert [Fraction(v) for v in words.wide(total, dtype).tolist()] == real


def test_exact_inputs_fill_the_mantissa_and_have_both_signs():
    x = families.values("exact", "float32", 2, 0, 0, 0, 1000)
    odd = [Fraction(float(v)) * 2 ** 40 for v in x]  # less the power of two: the integer drawn
    odd = [abs(int(v)) // (int(v) & -int(v)) for v in odd]
    assert max(odd).bit_length() == 23 and (x < 0).any() and (x > 0).any()


@pytest.mark.parametrize("dtype", words.STORED)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_piece_of_the_inputs_is_a_piece_of_the_whole(family, dtype):
    if dtype not in words.FLOATS and family in ("spread", "cancel", "special", "overflow"):
        with pytest.raises(UsageError):
            families.values(family, dtype, 4, 0, 0, 0, 1)
        return
    whole = families.values(family, dtype, 4, 3, 2, 0, 100)
    assert whole[37:60].tobytes() == families.values(family, dtype, 4, 3, 2, 37, 60).tobytes()
    assert whole.dtype == words.stored(dtype)


def test_a_census_is_read_in_octal():
    case = Case("float32", 6, 7, "exact", "census")
    assert {oct(int(v)) for v in case.want()} == {"0o111111"}
    second = [families.values("census", "float32", 11, 1, r, 0, 1)[0] for r in range(11)]
    assert second == [0] * 8 + [1, 8, 64]


# --- the files -------------------------------------------------------------------------------

@pytest.mark.parametrize("name", FILES)
def test_vectors_regenerate_byte_for_byte(name):
    assert dump(suite(name), notes()) + "\n" == (PLACE / f"{name}.json").read_text()


def conforms(value, schema, path="$"):
    """The part of JSON Schema that ours uses."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int}
    if "type" in schema:
        assert isinstance(value, kinds[schema["type"]]), path
    assert value == schema.get("const", value) and value in schema.get("enum", [value]), path
    if "pattern" in schema:
        assert re.search(schema["pattern"], value), path
    if isinstance(value, int):
        assert schema.get("minimum", value) <= value <= schema.get("maximum", value), path
    if isinstance(value, dict):
        known = schema.get("properties", {})
        assert set(schema.get("required", [])) <= value.keys(), path
        for key, inner in value.items():
            rest = schema.get("additionalProperties", {})
            assert key in known or rest is not False, f"{path}.{key}"
            conforms(inner, known.get(key, rest), f"{path}.{key}")
    for i, inner in enumerate(value if isinstance(value, list) else []):
        conforms(inner, schema.get("items", {}), f"{path}[{i}]")


@pytest.mark.parametrize("name", FILES)
def test_vectors_conform_to_their_schema(name):
    schema = json.loads((PLACE / "schema.json").read_text())
    data = json.loads((PLACE / f"{name}.json").read_text())
    conforms(data, schema)
    for spoil in (lambda d: d.pop("cases"), lambda d: d["groups"][0].update(op="max"),
                  lambda d: d["groups"][0]["tests"][0].update(id="1")):
        worse = json.loads(json.dumps(data))
        spoil(worse)
        with pytest.raises(AssertionError):
            conforms(worse, schema)


def test_the_table_has_no_column_that_nobody_reads():
    with TABLE.open() as file:
        assert set(next(csv.reader(file))) - {"file"} <= set(Case.__dataclass_fields__)


# --- the verbs -------------------------------------------------------------------------------

@pytest.fixture
def case_file(tmp_path, capsys):
    def make(*options):
        assert main(["gen", *options]) == 0
        path = tmp_path / "case.json"
        path.write_text(capsys.readouterr().out)
        return str(path)
    return make


def written(path, text):
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("options", [
    ["--family", "census", "--ranks", "11"], ["--family", "exact", "--dtype", "int64"],
    ["--family", "spread", "--order", "torus:2x2"], ["--family", "special", "--dtype", "bfloat16"],
    ["--family", "cancel", "--dtype", "float16"], ["--family", "place", "--count", "0"],
    ["--family", "spread", "--order", "ring", "--wire", "float16"],
    ["--family", "overflow", "--order", "ring"]])
def test_what_expect_prints_passes_check(options, case_file, tmp_path, capsys):
    case = case_file(*options)
    assert main(["expect", case]) == 0
    want = written(tmp_path / "want.txt", capsys.readouterr().out)
    assert main(["check", case, want]) == 0
    assert " 0 failed; levels met: " in capsys.readouterr().out
    assert main(["explain", case, want]) == 0
    assert "conforms" in capsys.readouterr().out


def test_another_order_can_be_asked_for(case_file, tmp_path, capsys):
    case = case_file("--family", "spread", "--ranks", "6", "--count", "31")
    main(["expect", case, "--order", "torus:2x3"])
    got = written(tmp_path / "got.txt", capsys.readouterr().out)
    assert main(["check", case, got]) == 0
    assert "bounded 1" in capsys.readouterr().out
    assert main(["check", case, got, "--order", "torus:2x3"]) == 0
    assert "ordered (torus:2x3) 1" in capsys.readouterr().out
    assert main(["check", case, got, "--order", "ring"]) == 1
    assert "right, but not added as ring says" in capsys.readouterr().out


def test_ranks_that_differ_within_the_bound_are_told_as_such(case_file, tmp_path, capsys):
    case = case_file("--family", "spread", "--ranks", "3", "--count", "31")
    for order in ("ring", "(2+1)+0"):
        main(["expect", case, "--order", order])
    lines = [x for x in capsys.readouterr().out.splitlines(keepends=True) if x[0] != "#"]
    got = written(tmp_path / "got.txt", "".join([*lines[:2], lines[5]]))  # rank 2 adds in its own order
    assert main(["check", case, got]) == 1
    *told, _, _ = capsys.readouterr().out.splitlines()
    assert told and all(" rank 2 " in line and " rank 0 has " in line for line in told)


def test_a_mismatch_names_rank_element_chunk_owner_and_distance(case_file, tmp_path, capsys):
    case = case_file("--family", "census", "--ranks", "3", "--count", "4")
    right = "42920000 42920000 42920000 42920000\n"
    got = written(tmp_path / "got.txt", right + right.replace("42920000", "42920001", 1) + right)
    assert main(["check", case, got]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "case 1 rank 1 element 0 chunk 0 owner 2 got 42920001 want 42920000 ulps 1",
        "0 passed, 1 failed; levels met: none",
        "`explain` in place of check says what it looks like"]


def test_at_most_twenty_mismatches(case_file, tmp_path, capsys):
    case = case_file("--family", "exact", "--count", "50")
    got = written(tmp_path / "got.txt", 4 * ((" 00000000" * 50)[1:] + "\n"))
    assert main(["check", case, got]) == 1
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 20 + 3 and told[20] == "... the first of 200 wrong elements"


def test_chunk_and_owner_follow_the_order():
    ring = Case("float32", 4, 4, "exact", "exact")
    assert where(ring, 1) == "element 1 chunk 1 owner 0"
    torus = Case("float32", 6, 13, "ordered", "spread", order="torus:2x3")
    assert [where(torus, e).split(" ", 2)[2] for e in (0, 3, 12)] == [
        "chunk 0.0 owner 5", "chunk 0.1 owner 2", "chunk 2.1 owner 1"]
    halves = Case("float32", 6, 8, "ordered", "spread", order="halving_doubling")
    assert [int(where(halves, e)[-1]) for e in (0, 2, 4, 6)] == [0, 2, 1, 3]


def test_results_may_be_npy_files_per_rank(case_file, tmp_path, capsys):
    case = case_file("--family", "sizes", "--ranks", "2")
    data = json.loads(open(case).read())  # without the large one
    data["groups"][0]["tests"] = data["groups"][0]["tests"][:-1]
    data["cases"] -= 1
    written(tmp_path / "case.json", json.dumps(data))
    pattern = str(tmp_path / "x.{case}.{rank}.npy")
    assert main(["inputs", case, "--npy", pattern]) == 0
    for one in load(case):
        for rank in range(2):
            path = tmp_path / f"x.{one.id}.{rank}.npy"
            assert (np.load(path) == one.input(rank)).all()
            np.save(path, one.want())
    assert main(["check", case, pattern]) == 0
    np.save(tmp_path / "x.2.1.npy", np.zeros(1, np.float64))
    assert main(["check", case, pattern]) == 2


def test_no_arguments_print_the_usage(capsys):
    assert main([]) == 2 and main(["--help"]) == main(["gen", "--help"]) == 0
    assert capsys.readouterr().out == USAGE * 3
    verbs = ("gen", "inputs", "expect", "check", "explain", "identify", "self", "diff", "state")
    assert all(re.search(rf"^  {verb} ", USAGE, re.M) for verb in verbs)
    for name, default in vars(_arguments(["gen"])).items():
        shown = "" if default in (None, False) and name != "seed" else f" [{default}]"
        assert name in ("verb", "paths") or f"--{name}{shown}" in USAGE


# --- hostile files ---------------------------------------------------------------------------

GOOD = {"schema": "refimpl-allreduce-1", "generator": "x", "cases": 1, "notes": {}, "groups": [
    {"op": "sum", "dtype": "float32", "ranks": 2, "level": "exact", "scale": "sum", "tests": [
        {"id": 1, "flags": [], "comment": "", "in": ["3f800000", "3f800000"], "out": "40000000"}]}]}
SPOILS = [
    lambda d: d.update(schema="other"), lambda d: d.update(cases=7), lambda d: d.pop("groups"),
    lambda d: d.update(groups=3), lambda d: d.update(groups=[]), lambda d: d["groups"].append("x"),
    lambda d: d["groups"][0].update(ranks=10 ** 12), lambda d: d["groups"][0].update(ranks=True),
    lambda d: d["groups"][0].update(ranks=-1), lambda d: d["groups"][0].update(ranks="2"),
    lambda d: d["groups"][0].update(dtype="float8"), lambda d: d["groups"][0].update(dtype=["x"]),
    lambda d: d["groups"][0].update(level="perfect"), lambda d: d["groups"][0].update(op="max"),
    lambda d: d["groups"][0].update(level="ordered"), lambda d: d["groups"][0].update(scale="half"),
    lambda d: d["groups"][0].update(level="ordered", order="((((" * 9999),
    lambda d: d["groups"][0].update(level="ordered", order=7),
    lambda d: d["groups"][0].update(level="ordered", order="torus:999999x999999"),
    lambda d: d["groups"][0].update(level="ordered", order="ring", wire="float8"),
    lambda d: d["groups"][0]["tests"][0].update({"in": ["3f800000"]}),
    lambda d: d["groups"][0]["tests"][0].update({"in": ["3f800000", "3f8"]}),
    lambda d: d["groups"][0]["tests"][0].update({"in": ["3f800000", "3f800000 00000000"]}),
    lambda d: d["groups"][0]["tests"][0].update({"in": 5}),
    lambda d: d["groups"][0]["tests"][0].update({"in": [1, 2]}),
    lambda d: d["groups"][0]["tests"][0].update(out="40000001"),
    lambda d: d["groups"][0]["tests"][0].update(out="zzzzzzzz"),
    lambda d: d["groups"][0]["tests"][0].update(out=None),
    lambda d: d["groups"][0]["tests"][0].pop("out"), lambda d: d["groups"][0]["tests"][0].pop("id"),
    lambda d: d["groups"][0]["tests"][0].update(id=10 ** 30),
    lambda d: d["groups"][0]["tests"][0].update(flags=3),
]
RECIPE = {"id": 1, "flags": [], "comment": "", "family": "exact", "seed": 0, "count": 99,
          "sha256": "0" * 64}
RECIPES = [{"count": 10 ** 15}, {"count": -1}, {"count": 1e9}, {"family": "rumour"}, {"seed": -1},
           {"seed": 10 ** 40}, {"family": ["x"]}, {"sha256": 7}]


def refused(capsys, *argv):
    assert main([*argv]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and len(said.err) < 600, said
    return said.err


@pytest.mark.parametrize("number", range(len(SPOILS)))
def test_a_spoilt_case_file_gives_one_line_and_code_2(number, tmp_path, capsys):
    data = json.loads(json.dumps(GOOD))
    got = written(tmp_path / "got.txt", "40000000\n40000000\n")
    assert main(["check", written(tmp_path / "c.json", json.dumps(data)), got]) == 0
    capsys.readouterr()
    SPOILS[number](data)
    refused(capsys, "check", written(tmp_path / "c.json", json.dumps(data)), got)


@pytest.mark.parametrize("change", RECIPES)
def test_a_spoilt_recipe_allocates_nothing(change, tmp_path, capsys):
    data = json.loads(json.dumps(GOOD))
    data["groups"][0]["tests"] = [RECIPE | change]
    got = written(tmp_path / "got.txt", "40000000\n40000000\n")
    refused(capsys, "check", written(tmp_path / "c.json", json.dumps(data)), got)


def test_a_recipe_with_a_digest_of_something_else_is_told(tmp_path, capsys):
    data = json.loads(json.dumps(GOOD))
    data["groups"][0]["tests"] = [RECIPE]
    path = written(tmp_path / "c.json", json.dumps(data))
    line = words.to_hex(load(path)[0].want(), "float32") + "\n"
    assert "sha256" in refused(capsys, "check", path, written(tmp_path / "got.txt", line * 2))


@pytest.mark.parametrize("text", ["", "{", "[" * 100000, "null", "[]", "7", "\x00",
                                  '{"schema": NaN}',
                                  '{"schema": "refimpl-allreduce-1", "cases": ' + "9" * 6000 + "}"])
def test_what_is_no_case_file_gives_one_line_and_code_2(text, tmp_path, capsys):
    got = written(tmp_path / "got.txt", "")
    refused(capsys, "check", written(tmp_path / "c.json", text), got)
    (tmp_path / "c.json").write_bytes(b"\xff\xfe" + text.encode())
    refused(capsys, "check", str(tmp_path / "c.json"), got)
    refused(capsys, "check", str(tmp_path / "none.json"), got)
    refused(capsys, "check", str(tmp_path), got)


@pytest.mark.parametrize("text", ["", "40000000", "40000000\n40000000\n40000000",
                                  "4000000\n40000000",
                                  "40000000 40000000\n40000000", "x\ny\n", "½\n½\n", "\x00\n\x00"])
def test_spoilt_results_give_one_line_and_code_2(text, tmp_path, capsys):
    case = written(tmp_path / "c.json", json.dumps(GOOD))
    got = written(tmp_path / "got.txt", text)
    refused(capsys, "check", case, got)
    refused(capsys, "explain", case, got)
    refused(capsys, "check", case, str(tmp_path / "none.txt"))


def npy(shape, descr="<f4", data=b""):
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


@pytest.mark.parametrize("content", [
    b"", b"\x93NUMPY", npy("(1000000000000,)"), npy("(1,)"), npy("(1,)", "|O", b"x" * 8),
    npy("(1, 1)", data=b"1234"), npy("(1,)", "<f8", b"12345678"), npy("(-1,)"), npy("(1,"),
    b"PK\x03\x04"])
def test_spoilt_npy_results_give_one_line_and_code_2(content, tmp_path, capsys):
    case = written(tmp_path / "c.json", json.dumps(GOOD))
    for rank in range(2):
        (tmp_path / f"got.{rank}.npy").write_bytes(content)
    refused(capsys, "check", case, str(tmp_path / "got.{rank}.npy"))


@pytest.mark.parametrize("argv", [
    ["check"], ["check", "a"], ["explain"], ["inputs"], ["diff", "a"], ["state"], ["identify"],
    ["gen", "--family", "rumour"], ["gen"], ["gen", "--family", "exact", "--ranks", "0"],
    ["gen", "--family", "spread", "--count", "1000000"],
    ["gen", "--family", "spread", "--dtype", "int32"],
    ["gen", "--family", "exact", "--count", "-3"],
    ["gen", "--family", "place", "--dtype", "bfloat16", "--ranks", "99"],
    ["gen", "--family", "spread", "--order", "torus:9x9"], ["diff", "--band", "a", "b"]])
def test_arguments_that_make_no_sense_give_one_line_and_code_2(argv, capsys):
    refused(capsys, *argv)


def test_a_word_that_is_no_verb_gives_one_line(capsys):
    for argv in (["rumour"], ["gen", "--rumour"], ["gen", "--ranks", "many"],
                 ["check", "--level", "x"]):
        refused(capsys, *argv)


def test_the_process_ends_with_the_code(tmp_path):
    case = written(tmp_path / "c.json", json.dumps(GOOD))
    for text, code in (("40000000\n40000000\n", 0), ("40000000\n40000001\n", 1), ("\n", 2)):
        got = written(tmp_path / "got.txt", text)
        job = subprocess.run([sys.executable, "-m", "refimpl.oracle", "check", case, got], cwd=ROOT,
                             capture_output=True, text=True, timeout=60)
        assert job.returncode == code and "Traceback" not in job.stderr
