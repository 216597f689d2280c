"""From lines of results to a report and a picture: the same bytes each time, and no claim without a cause."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncrl.errors import ConfigError
from asyncrl.sweep.grid import Plan
from asyncrl.sweep.report import write_picture, write_report
from asyncrl.sweep.results import CellResult, Code, Outcome
from tests.builders import write_jsonl

PLAN = Plan(name="eta", arms=("eta=0", "eta=2"), baseline="eta=0", seeds=tuple(range(8)), metrics=("seconds_to_bar", "accuracy"),
            bar=0.8, window=10)  # fmt: skip
CODE = Code("0.1.0", "abc", "1234")


def line(arm: str, seed: int, seconds: float | None, accuracy: float, **more) -> CellResult:
    curve = tuple((float(step), step * 8, step / 100) for step in range(1, 50))
    made = Outcome(steps=50, samples=400, train_s=60.0, seconds_to_bar=seconds, accuracy=accuracy, reward=0.9,
                   learner_idle=0.25, generators_idle=0.5, staleness_mean=1.0, staleness_max=2, curve=curve)  # fmt: skip
    return CellResult(arm=arm, seed=seed, outcome=made, settings=arm, code=CODE, machine="a machine", ended="2026-11-23T10:00:00",
                      plan=PLAN, **more)  # fmt: skip


def lines() -> list[CellResult]:
    slow = [line("eta=0", seed, 50.0 + seed, 0.9 + seed / 1000) for seed in range(8)]
    return [*slow, *(line("eta=2", seed, 30.0 + 1.1 * seed, 0.9 + (7 - seed) / 1000) for seed in range(8))]


def results(folder: Path, made: list[CellResult]) -> Path:
    write_jsonl(folder / "results.jsonl", made)
    return folder / "results.jsonl"


def row(text: str, *begins: str) -> str:
    return next(found for found in text.splitlines() if found.startswith("| " + " | ".join(begins)))


def test_what_differs_is_told_apart_what_does_not_is_not_and_two_seeds_tell_nothing(tmp_path):
    text = write_report(results(tmp_path, lines()))
    assert "16 cells, 8 seeds; code 0.1.0 abc; a machine; 2026-11-23." in text
    assert "| -19.6 [-19.8, -19.5] | 0.0078 | 0.0156 | lower |" in row(text, "eta=2", "seconds to 0.8", "8")
    assert row(text, "eta=2", "held-out accuracy", "8").endswith("| 1.0000 | 1.0000 | not told apart |")
    assert row(text, "eta=0", "8").startswith("| eta=0 | 8 | 53.5 [")
    assert row(text, "eta=0", "8").endswith("| 0.8 | 25% | 50% | 1.00 (2) |")
    text = write_report(results(tmp_path, [one for one in lines() if one.seed < 2]))
    assert "**12 cells are missing**" in text
    assert "not told apart" in row(text, "eta=2", "seconds to 0.8", "2")
    assert "nothing can be told apart: the smallest corrected p is 1.00" in text


def test_what_is_unlike_the_rest_is_said(tmp_path):
    made = [line("eta=0", 0, 50.0, 0.9, attempts=2), line("eta=2", 0, 30.0, 0.9, jobs=2), *lines()[1:3]]
    made[2] = replace(made[2], machine="another", outcome=replace(made[2].outcome, fault="loss is nan", accuracy=None))
    text = write_report(results(tmp_path, made))
    assert "Not compared" not in text
    for said in ("1 cells were interrupted and resumed", "1 cells ran beside others", "different machines",
                 "eta=0 seed 1 failed: loss is nan."):  # fmt: skip
        assert said in text


def test_a_metric_that_no_cell_has_is_named(tmp_path):
    none = [replace(one, outcome=replace(one.outcome, accuracy=None)) for one in lines()]
    text = write_report(results(tmp_path, none))
    assert "| lower |" in row(text, "eta=2", "seconds to 0.8", "8")
    assert text.endswith("\n\nNot compared, as no cell has a value: held-out accuracy.\n")
    plan = replace(PLAN, metrics=("accuracy",))
    text = write_report(results(tmp_path, [replace(one, plan=plan) for one in none]))
    assert text.endswith("\n\nNot compared, as no cell has a value: held-out accuracy.\n")
    assert "Nothing to compare" not in text


def test_report_and_picture_are_made_of_the_results_alone_byte_for_byte(tmp_path):
    path = results(tmp_path, lines())
    first = write_report(tmp_path), write_picture(path).read_bytes()
    assert (tmp_path / "RESULTS.md").read_text() == first[0]
    assert (write_report(path), write_picture(tmp_path).read_bytes()) == first
    assert first[1].startswith(b"\x89PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["RESULTS.md", "results.jsonl", "results.png"]


def test_results_that_cannot_be_used_are_refused(tmp_path):
    mixed = [*lines(), replace(lines()[0], seed=9, code=replace(CODE, files="other"))]
    with pytest.raises(ConfigError, match="mixes results of different code"):
        write_report(results(tmp_path, mixed))
    for change in ({"bar": 0.1}, {"window": 5}, {"metrics": ("accuracy",)}):
        mixed = [*lines(), replace(lines()[0], seed=9, plan=replace(PLAN, **change))]
        with pytest.raises(ConfigError, match="different bars, windows or metrics"):
            write_report(results(tmp_path, mixed))
    write_report(results(tmp_path, [*lines(), replace(lines()[0], seed=9, plan=replace(PLAN, seeds=(9,)))]))
    with pytest.raises(ConfigError, match="has no results yet"):
        write_report(results(tmp_path, []))
    with pytest.raises(ConfigError, match="eta=0 seed 0 twice"):
        write_report(results(tmp_path, [*lines(), lines()[0]]))
