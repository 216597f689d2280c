from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("config", "said"), [("[buffer]\nmax_stalenes = 1\n", "max_stalenes"), (None, "config.toml")])
def test_a_rank_without_a_good_config_ends_with_one_line(tmp_path, config, said):
    if config is not None:
        (tmp_path / "config.toml").write_text(config)
    command = [sys.executable, "-m", "asyncrl.control.learner_rank", "1", str(tmp_path), "tcp://127.0.0.1:1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    (line,) = ended.stderr.strip().splitlines()
    assert said in line
