"""A submission is checked whole: every fault at once, nothing started, no code of strangers."""

import pytest

from asyncrl.config.load import dump_config, resolve_config
from asyncrl.serve.queue import Machine
from asyncrl.serve.submit import Fork, RefusedError, Submission, of_fork, resolve

MACHINE = Machine(cores=2, memory_bytes=64 << 30)


def faults_of(folder, **given):
    roots = given.pop("roots", ())
    with pytest.raises(RefusedError) as refused:
        resolve(Submission(**given), folder, roots, MACHINE)
    return {fault.field: fault for fault in refused.value.faults}


def test_every_fault_is_named_with_what_was_given_and_what_is_allowed(tmp_path):
    wrong = {
        "num_steps": "x",
        "buffer.max_stalenes": 3,
        "learner.learning_rate": -1,
        "algorithm.loss": "nope",
        "task.kind": "none",
    }
    faults = faults_of(tmp_path, set=wrong, name="../b")
    assert {"num_steps", "buffer.max_stalenes", "learner.learning_rate", "algorithm", "run", "task.kind"} <= set(faults)
    assert faults["num_steps"].given == "x"
    assert "max_staleness" in faults["buffer.max_stalenes"].allowed


@pytest.mark.parametrize("config", ["no\nTOML [", {"num_steps": {"a": 1}}, "/etc/passwd", "../../secret", "nowhere", {"a": []}])
def test_what_is_no_config_is_refused(tmp_path, config):
    assert faults_of(tmp_path, config=config)


def test_a_models_own_code_is_refused_outside_the_code_roots(tmp_path):
    model = {"kind": "pretrained", "path": str(tmp_path / "model"), "trust_remote_code": True}
    assert "trust_remote_code" in faults_of(tmp_path, set={"model": model})["functions"].allowed
    assert "functions" not in faults_of(tmp_path, set={"model": model}, roots=(tmp_path,))


def test_code_is_refused_outside_the_code_roots_and_taken_inside(tmp_path):
    roots = tmp_path / "code"
    roots.mkdir()
    (roots / "mine.py").write_text("def score(prompt, text):\n    return 0.5\n")
    (tmp_path / "other.py").write_text("raise SystemExit('was run')\n")

    def rewards(path):
        return {"reward.functions": [{"kind": "python", "path": f"{path}:score"}]}

    for path in (tmp_path / "other.py", roots / ".." / "other.py", "os"):
        assert "code roots" in faults_of(tmp_path, set=rewards(path), roots=(roots,))["functions"].allowed
    config, demand = resolve(Submission(set=rewards(roots / "mine.py"), name="ok"), tmp_path, (roots,), MACHINE)
    assert config.folder == str(tmp_path)
    assert demand.cores == 2


def test_what_the_machine_does_not_have_is_said_by_its_sum(tmp_path):
    faults = faults_of(tmp_path, set={"learner.device": "cuda", "generate.engine.device": "cuda", "model.hidden_size": 128})
    assert "takes 1 GPUs and this machine has 0" in faults["machine"].allowed


def test_a_fork_has_the_settings_of_its_parent_and_begins_with_the_checkpoint(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    parent = resolve_config("quickstart", {"name": "parent", "seed": 7, "model.fp32_head": True})
    (tmp_path / "config.toml").write_text(dump_config(parent))
    submission = of_fork(Fork("child"), checkpoint, "p")
    assert submission.config["model"] == {"kind": "pretrained", "path": str(checkpoint), "fp32_head": True}
    assert (submission.config["seed"], submission.name, submission.project) == (7, "child", "p")
