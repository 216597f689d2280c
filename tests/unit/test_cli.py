"""The exit status of a run that ended, from its last status and its folder."""

import pytest

from asyncrl.cli import _exit_by
from asyncrl.schema.status import RunStatus


@pytest.mark.parametrize(("version", "reason", "at_end", "missing"), [
    (9, "goal reached", True, ""), (9, "drained by a signal", False, ""), (8, "drained by a signal", False, "its last step"),
    (9, "drained by a signal", True, "the end of its last evaluation"),
])  # fmt: skip
def test_a_run_without_its_last_evaluation_has_not_finished(tmp_path, capsys, version, reason, at_end, missing):
    (tmp_path / "config.toml").write_text(f"num_steps = 9\n[eval]\nat_end = {str(at_end).lower()}\n")
    (tmp_path / "checkpoints" / "step-000009").mkdir(parents=True)
    status = RunStatus(name="r", run_folder=str(tmp_path), phase="ended", reason=reason, version=version, num_steps=9)
    if not missing:
        _exit_by(status, tmp_path)
        return
    with pytest.raises(SystemExit) as ended:
        _exit_by(status, tmp_path)
    assert ended.value.code == 3
    assert f"ended before {missing}; `asyncrl resume" in capsys.readouterr().err
