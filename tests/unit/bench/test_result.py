"""Benchmarks say what was measured against what was asked for."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable

import pytest

from asyncrl.bench.registry import BENCHMARKS, run_benchmark
from asyncrl.bench.result import BenchResult, interleaved, interleaved_async, ratio
from asyncrl.errors import ConfigError


def test_ratio_holds_at_its_goal_in_either_direction() -> None:
    assert ratio(0.33, 0.33).holds
    assert not ratio(0.32, 0.33).holds
    assert ratio(4.0, 4.0, at_least=False).holds
    assert not ratio(4.1, 4.0, at_least=False).holds


def test_result_is_one_json_object_of_the_agreed_form() -> None:
    result = BenchResult("transport", {"durable_samples_per_s": 3200.0}, {"vs_pyzmq": ratio(0.4, 0.33)})
    assert (
        json.loads(result.to_json())
        == result.to_dict()
        == {
            "bench": "transport",
            "figures": {"durable_samples_per_s": 3200.0},
            "ratios": {"vs_pyzmq": {"value": 0.4, "goal": 0.33, "holds": True}},
        }
    )
    assert result.holds


def test_sides_are_measured_in_turns_after_a_warm_up_and_medians_taken() -> None:
    order: list[str] = []

    def side(name: str, figures: list[float]) -> Callable[[], float]:
        def measure() -> float:
            order.append(name)
            return figures.pop(0)

        return measure

    medians = interleaved({"a": side("a", [99.0, 1.0, 5.0, 2.0]), "b": side("b", [99.0, 10.0, 30.0, 20.0])}, rounds=3, warmup=1)
    assert medians == {"a": 2.0, "b": 20.0}
    assert order == ["a", "b"] * 4


async def test_coroutine_sides_are_measured_in_turns_too() -> None:
    figures = iter([1.0, 10.0, 3.0, 30.0, 2.0, 20.0])

    async def measure() -> float:
        return next(figures)

    assert await interleaved_async({"a": measure, "b": measure}, rounds=3, warmup=0) == {"a": 2.0, "b": 20.0}


def test_unknown_benchmark_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="there are transport, broadcast, engine, pipeline"):
        run_benchmark("speed")


@pytest.mark.parametrize("module", BENCHMARKS.values())
def test_every_listed_benchmark_has_its_module(module: str) -> None:
    assert importlib.util.find_spec(module) is not None
