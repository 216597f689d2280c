"""Every config in configs/ and experiments/ loads, and survives being written to a run folder and read back."""

from pathlib import Path

import pytest

from asyncrl.config.load import dump_config, load_config
from asyncrl.config.run import JsonlTask
from asyncrl.sweep.grid import load_sweep
from asyncrl.tasks.registry import build_task

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted([*(ROOT / "configs").glob("*.toml"), *(ROOT / "experiments").glob("*/config.toml")])
PLACEMENTS = sorted((ROOT / "configs" / "placements").glob("*.toml"))
SWEEPS = sorted(path.parent for path in (ROOT / "experiments").rglob("sweep.toml"))
LAYERS = sorted((ROOT / "experiments" / "quickstart_algorithms").glob("*.toml"))


def test_the_documented_configs_are_there_and_the_layer_of_the_memory_timeline_goes_over_a_placement():
    assert {"quickstart.toml", "smollm2.toml", "gsm8k.toml"} <= {path.name for path in CONFIGS}
    layers = [ROOT / "configs" / "placements" / "colocated.toml", ROOT / "experiments" / "memory_timeline" / "layer.toml"]
    assert load_config(ROOT / "configs" / "quickstart.toml", presets=layers).algorithm.reference.where == "learner"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_config_loads_and_round_trips(path, tmp_path):
    config = load_config(path)
    resolved = tmp_path / "config.toml"
    resolved.write_text(dump_config(config), encoding="utf-8")
    assert load_config(resolved) == config


@pytest.mark.parametrize("folder", SWEEPS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_the_task_of_a_sweep_is_one_that_a_run_takes(folder):
    config = next(cell.config for cell in load_sweep(folder).cells if not cell.command)
    if not isinstance(config.task, JsonlTask):  # files of data are not in the repository
        build_task(config.task, 0)


@pytest.mark.parametrize("path", [*LAYERS, *PLACEMENTS], ids=lambda path: path.stem)
def test_a_layer_goes_over_the_quickstart(path):
    config = load_config(ROOT / "configs" / "quickstart.toml", presets=[path])
    assert config.num_steps == 550 if path in LAYERS else config.placement.kind == path.stem
