"""Records, and the files that keep them."""

import json
import math
import os
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avagrad.tune.records import Record, read_records, worst, write_records
from avagrad.tune.space import Point

HALF = '{"lr": 0.1, "eps": 1e-8, "val'


def refuse_constants(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@st.composite
def records(draw: st.DrawFn) -> Record:
    value = draw(st.floats(allow_nan=False, allow_infinity=False) | st.just(math.inf))
    number = st.floats(1e-300, 1e300)
    axes = draw(st.sampled_from(["lr", "eps", "both"]))
    return Record(
        draw(number) if axes != "eps" else None,
        draw(number) if axes != "lr" else None,
        draw(st.integers(0, 3)),
        value=value,
        diverged_at=draw(st.none() | st.integers(0, 10**9)) if math.isinf(value) else None,
        pruned=draw(st.booleans()),
        seconds=draw(st.none() | st.floats(0, 1e9)),
        facts=draw(st.dictionaries(st.sampled_from("abcé\n"), st.none() | st.text() | st.lists(st.integers()))),
    )


@given(made=st.lists(records(), unique_by=lambda record: record.point))
def test_records_come_back_as_they_were_written(made: list[Record], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("records") / "a.jsonl"
    write_records(path, made)
    assert read_records(path) == made
    assert os.listdir(path.parent) == ["a.jsonl"]
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        found = json.loads(line, parse_constant=refuse_constants)
        assert (found["value"] is None) == (found.get("diverged") is True)


def test_a_line_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "a"
    one = Record(0.1, None, 2, value=0.5, pruned=True, seconds=1.5, facts={"test": 3, "curve": (1.0, math.nan)})
    write_records(path, iter([one]))
    assert path.read_text() == (
        '{"lr": 0.1, "seed": 2, "value": 0.5, "seconds": 1.5, "pruned": true, "test": 3, "curve": [1.0, null]}\n'
    )
    assert one.point == Point(0.1, None, 2)
    assert hash(one) == hash(Record(0.1, None, 2, value=0.5, pruned=True, seconds=1.5))


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", '"inf"', '"nan"', '"-inf"', "1e999"])
@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_all_that_is_not_finite_is_divergence(tmp_path: Path, value: str, direction: str) -> None:
    path = tmp_path / "a"
    path.write_text(f'{{"lr": 1, "value": {value}}}\n\n{{"lr": 2, "value": null, "diverged": true}}\r\n')
    found = read_records(path, direction=direction)
    assert [record.value for record in found] == [worst(direction)] * 2
    assert all(record.diverged for record in found)
    assert worst(direction) == (math.inf if direction == "minimize" else -math.inf)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("[1]", r"the line is \[1\], but must be an object in braces"),
        ("{", "Expecting property name"),
        ('{"lr": 1}', "value is missing, but is required"),
        ('{"lr": 1, "value": null}', 'value is None, but must be a number, unless there is "diverged": true'),
        ('{"lr": 1, "value": 1, "diverged": true}', 'value is 1, but must be null if there is "diverged": true'),
        ('{"lr": 1, "value": 1, "diverged": "no"}', "diverged is 'no', but must be true or false"),
        ('{"lr": 1, "value": "1"}', "value is '1', but must be a number, or 'inf' or 'nan'"),
        ('{"lr": 1, "value": "much"}', "value is 'much', but must be"),
        ('{"lr": 1, "value": [1]}', r"value is \[1\], but must be a number"),
        ('{"lr": 1, "value": true}', "value is True, but must be a number"),
        (f'{{"lr": 1, "value": 1{"0" * 400}}}', "value is 1000.*, but must be a number"),
        ('{"value": 1}', "lr and eps are None, but at least one of them must be a number"),
        ('{"lr": "1", "value": 1}', "lr has the value '1', but a value must be a number"),
        ('{"lr": 0, "value": 1}', "lr has the value 0.0"),
        ('{"lr": 1, "value": 1, "seed": 1.5}', "seed is 1.5, but must be a whole number"),
        ('{"lr": 1, "value": 1, "seconds": -1}', "seconds is -1, but must be a finite number"),
        ('{"lr": 1, "value": 1, "pruned": 1}', "pruned is 1, but must be True or False"),
        ('{"lr": 1, "value": 1, "diverged_at": 5}', "diverged_at is 5, but must be None if the value is finite"),
        ('{"lr": 1, "value": NaN, "diverged_at": -5}', "diverged_at is -5, but must be a whole number of at least 0"),
        ("[" * 10**5, "recursion"),
    ],
)
def test_a_bad_line(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"lr": 7, "value": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2: .*{sentence}.*(?<!\.)\.$"):
        read_records(path)


def test_a_line_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"lr": 1, "value": 1, "a": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: 'utf-8' codec"):
        read_records(tmp_path / "a.jsonl")


@pytest.mark.parametrize("last", [HALF, '{"lr": 0.1, "value": 1}'])
def test_a_half_written_last_line(tmp_path: Path, last: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"lr": 7, "value": 1}\n' + last)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: .*half-written, and must be completed or deleted\.$"):
        read_records(tmp_path / "a.jsonl")


def test_two_records_of_one_point(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"lr": 0.3, "value": 1}\n\n{"lr": 0.30000000000000004, "seed": 0, "value": 2}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3: .*lr=0\.3 seed=0 on line 1 already"):
        read_records(path)
    with pytest.raises(ValueError, match="records has lr=1 seed=0 twice"):
        write_records(path, [Record(1, None, value=0), Record(1, None, value=1)])


def test_a_file_that_is_empty_or_missing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    assert read_records(tmp_path / "a") == []
    with pytest.raises(FileNotFoundError):
        read_records(tmp_path / "b")
    with pytest.raises(ValueError, match="direction is 'up', but must be 'minimize' or 'maximize'"):
        read_records(tmp_path / "a", direction="up")


def test_facts_may_have_any_mapping_inside(tmp_path: Path) -> None:
    facts = {"settings": MappingProxyType({"betas": (0.9, math.nan)})}
    write_records(tmp_path / "a", [Record(1, None, value=1, facts=facts)])
    assert read_records(tmp_path / "a")[0].facts == {"settings": {"betas": [0.9, None]}}


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_records(path, [Record(1, None, value=1)])
    before = path.read_bytes()
    with pytest.raises(TypeError, match=r"facts of lr=2 seed=0 is .* which is not JSON serializable"):
        write_records(path, [Record(1, None, value=2), Record(2, None, value=2, facts={"a": object()})])

    def fail(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_records(path, [Record(3, None, value=1)])
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]


def test_what_a_record_keeps() -> None:
    facts: dict[str, Any] = {"test": 1}
    record = Record(0.1 + 0.2, 1, value=1, facts=facts)
    facts["test"] = 2
    assert (record.lr, record.eps, record.value, record.facts) == (0.3, 1.0, 1.0, {"test": 1})
    assert not record.diverged
    assert Record(1, 1, value=-math.inf).diverged


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"value": math.nan}, "value is nan, but must be a number, infinite if the run diverged"),
        ({"value": 1, "facts": {"seed": 1}}, "a key of facts is 'seed', but must be a text other than"),
        ({"value": 1, "facts": {1: 1}}, "a key of facts is 1, but must be a text"),
        ({"value": 1, "facts": [1]}, r"facts is \[1\], but must be a mapping"),
    ],
)
def test_what_a_record_rejects(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Record(1, 1, **given)
