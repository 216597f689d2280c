"""Which processes a config asks for, and with how many threads."""

import subprocess
import sys
from pathlib import Path

from asyncrl.config.load import parse_config
from asyncrl.config.run import RunConfig
from asyncrl.control.launch.processes import forked_modules, plan_processes, plan_ranks
from asyncrl.packing.pack import CostModel, RankPlan


def test_ranks_are_one_process_and_share_rows_by_the_models_size(tmp_path: Path) -> None:
    config = parse_config({"learner": {"ranks": 2}, "model": {"kind": "scratch", "hidden_size": 64}})
    assert [item.name for item in plan_processes(config)].count("learner") == 1
    assert plan_ranks(config) == RankPlan(2, CostModel.of_model(64))
    assert plan_ranks(RunConfig()) == RankPlan(1)
    (tmp_path / "config.json").write_text('{"hidden_size": 576}')
    pretrained = parse_config({"learner": {"ranks": 2}, "model": {"kind": "pretrained", "path": str(tmp_path)}})
    assert plan_ranks(pretrained).cost == CostModel.of_model(576)


def test_what_computes_on_a_cpu_is_forked():
    learner, generator = ("asyncrl.learner.worker",), ("asyncrl.generate.worker", "asyncrl.generate.transformers.engine")
    here = sys.platform == "linux"
    assert forked_modules(RunConfig()) == ({"learner": learner, "generator": generator} if here else {})
    assert forked_modules(parse_config({"learner": {"device": "cuda"}})) == ({"generator": generator} if here else {})
    no_model = {"learner": {"fake_step_s": 0.1}, "generate": {"engine": {"kind": "fake"}}}
    assert forked_modules(parse_config(no_model)) == {}


def test_a_rank_without_a_good_config_ends_with_one_line(tmp_path):
    (tmp_path / "config.toml").write_text("[buffer]\nmax_stalenes = 1\n")
    command = [sys.executable, "-m", "asyncrl.pipeline", "rank", "1", str(tmp_path), "tcp://127.0.0.1:1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    (line,) = ended.stderr.strip().splitlines()
    assert (ended.returncode, "max_stalenes" in line) == (1, True)
