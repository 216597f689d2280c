"""A submission is checked whole: every fault at once, nothing started, no code of strangers."""

import contextlib
import copy
import random
import time
from pathlib import Path

import msgspec
import pytest

from asyncrl.config.load import dump_config, resolve_config
from asyncrl.serve.machine import Machine
from asyncrl.serve.submit import MOST_SAID, Fork, RefusedError, Submission, change_faults, foreign_code, of_fork, resolve
from tests.builders import laid_over
from tests.unit.config.test_rules import ALGORITHMS, RULES, SERVERS, served

MACHINE = Machine(cores=2, memory_bytes=64 << 30)


def faults_of(folder, **given):
    roots = given.pop("roots", ())
    with pytest.raises(RefusedError) as refused:
        resolve(Submission(**given), folder, roots, MACHINE)
    return {fault.field: fault for fault in refused.value.faults}


NO_CONFIGS = ["no\nTOML [", {"num_steps": {"a": 1}}, "/etc/passwd", "../../secret", "nowhere", {"a": []}, "\0", "\u2603" * 90]


@pytest.mark.parametrize("config", NO_CONFIGS, ids=range(len(NO_CONFIGS)))
def test_what_is_no_config_is_refused(tmp_path, config):
    assert faults_of(tmp_path, config=config)


def test_a_name_means_a_shipped_config_whatever_lies_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quickstart").mkdir()
    Path("quickstart/mine.toml").write_text("seed = 7\n")
    for name in ("quickstart/mine", "quickstart/mine.toml", "./quickstart/mine.toml"):
        assert "not the name of a shipped config" in faults_of(tmp_path, config=name)["config"].allowed
    for name in ("quickstart", "quickstart.toml", "configs/quickstart.toml"):
        assert resolve(Submission(name), tmp_path, (), MACHINE)[0].name == "quickstart"
    assert resolve(Submission(presets=("algorithms/gspo",)), tmp_path, (), MACHINE)
    other = {"generate.engine.num_slots": 8, "generate.engine.kind": "fake", "learner.fake_step_s": 0.1}
    assert resolve(Submission("quickstart", set=other), tmp_path, (), MACHINE)[0].generate.engine.num_slots == 8


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
    assert resolve(Submission("[algorithm]\nloss = 'decoupled_ppo'"), tmp_path, (), MACHINE)[0].algorithm.kind == "policy"
    assert demand.cores == 2


def test_the_folder_is_the_daemons_and_two_names_are_refused(tmp_path):
    faults = faults_of(tmp_path, set={"folder": "/elsewhere", "name": "b"}, name="a")
    assert set(faults) == {"folder", "name"}
    assert resolve(Submission(set={"name": "a"}, name="a"), tmp_path, (), MACHINE)[0].name == "a"


def test_what_is_wrong_with_the_prompts_is_said_and_no_device_is_opened(tmp_path):
    assert "must be under 100" in faults_of(tmp_path, set={"task.digits": 1})["task.held_out"].allowed
    (tmp_path / "data.jsonl").write_text('{"question": "1+1="}\n')
    assert "'answer'" in str(
        faults_of(tmp_path, set={"task": {"kind": "jsonl", "path": str(tmp_path / "data.jsonl"), "chat": False}})
    )
    fake = {"learner.fake_step_s": 0.0, "learner.device": "cuda", "generate.engine": {"kind": "fake"}}
    assert resolve(Submission(set=fake), tmp_path, (), Machine(("GPU-a",), cores=2, memory_bytes=64 << 30))[1].gpus == 1


def test_a_model_that_is_not_there_is_said_beside_what_the_machine_does_not_have(tmp_path):
    missing = {"model": {"kind": "pretrained", "path": "/nowhere"}, "learner.device": "cuda:1"}
    faults = faults_of(tmp_path, set=missing)  # its memory is not known, its GPUs are
    assert set(faults) == {"model.path", "machine"}
    assert "there is no folder" in faults["model.path"].allowed


def test_a_change_to_more_than_the_machine_has_is_refused_since_the_run_could_not_be_resumed():
    small, changes = Machine(cores=2, memory_bytes=4 << 30), {"generate.num_workers": 30}
    assert change_faults(resolve_config("quickstart"), changes, MACHINE) == []
    (fault,) = change_faults(resolve_config("quickstart"), changes, small)
    assert (fault.field, "this machine has 4.0" in fault.allowed) == ("generate.num_workers", True)
    large = resolve_config("quickstart", changes)
    assert change_faults(large, {"generate.num_workers": 29}, small) == [], "it is still too large, but smaller"
    assert [fault.field for fault in change_faults(large, {"generate.num_workers": 31}, small)] == ["generate.num_workers"]


def test_whatever_is_wrong_together_is_refused_with_what_was_given(tmp_path):
    source = random.Random(0)
    settings = [one for one, _ in RULES] + [{"algorithm": one} for one, _ in ALGORITHMS]
    settings += [served(server, changes) for server, changes, _ in SERVERS]
    for _ in range(60):
        config = {}
        for one in source.sample(settings, 3):
            with contextlib.suppress(AttributeError, TypeError):  # a table over what is none
                laid_over(config, copy.deepcopy(one))
        with pytest.raises(RefusedError) as refused:
            resolve(Submission(config=config), tmp_path, (), MACHINE)
        assert [fault for fault in refused.value.faults if fault.given is None or not fault.allowed] == [], config


def test_a_fork_has_the_settings_of_its_parent_and_begins_with_the_checkpoint(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    parent = resolve_config("quickstart", {"name": "parent", "seed": 7, "model.fp32_head": True})
    (tmp_path / "config.toml").write_text(dump_config(parent))
    submission = of_fork(Fork("child"), checkpoint, "p")
    assert submission.config["model"] == {"kind": "pretrained", "path": str(checkpoint), "fp32_head": True}
    assert (submission.config["seed"], submission.name, submission.project) == (7, "child", "p")


CODE = [
    {"reward.functions": [{"kind": "code_exec", "sandbox": "none"}]},
    {"generate.engine": {"kind": "vllm", "max_sequence_tokens": 16, "arguments": {"trust_remote_code": True}}},
    {"generate.engine": {"kind": "vllm", "max_sequence_tokens": 16, "arguments": {"worker_cls": "os.system"}}},
    {"generate.engine": {"kind": "vllm", "max_sequence_tokens": 16, "arguments": {"logits_processors": "/tmp/mine.py:run"}}},
]


@pytest.mark.parametrize("setting", CODE, ids=range(len(CODE)))
def test_code_that_has_no_file_asks_for_the_whole_machine_as_code_root(tmp_path, setting):
    assert "`/`" in faults_of(tmp_path, set=setting, roots=(tmp_path,))["functions"].allowed
    config = resolve_config("quickstart", setting)
    assert not foreign_code(config, (Path("/"),))


def test_every_folder_whose_code_a_model_trusts_lies_below_a_code_root(tmp_path):
    roots = tmp_path / "code"
    model = {"kind": "pretrained", "path": str(roots / "model"), "trust_remote_code": True}
    assert "trust_remote_code" in faults_of(tmp_path, set={"model": model})["functions"].allowed
    assert "functions" not in faults_of(tmp_path, set={"model": model}, roots=(roots,))
    elsewhere = {"path": str(tmp_path)}
    outside = {"generate.model_folder": str(tmp_path), "algorithm.critic": elsewhere, "algorithm.reference": elsewhere}
    for field, value in outside.items():
        refused = faults_of(tmp_path, set={"model": model, "algorithm.kl": {}, field: value}, roots=(roots,))["functions"]
        assert (refused.given, field in refused.allowed) == (str(tmp_path), True)
    on_worker = {"algorithm.kl": {}, "algorithm.reference": {**elsewhere, "where": "worker"}}  # where none of its code is run
    assert "functions" not in faults_of(tmp_path, set={"model": model, **on_worker}, roots=(roots,))


SECRETS = ["admin.token", "session.key", "server.sqlite-wal", "runs/r/api.json", "runs/r/keys/server.key", "runs/../admin.token"]


@pytest.mark.parametrize("secret", SECRETS)
def test_a_run_reads_no_tokens_and_keys_of_the_daemon_by_any_path(tmp_path, secret):
    (tmp_path / "runs" / "r" / "keys").mkdir(parents=True)
    (tmp_path / secret).write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / secret)
    engine = {"kind": "vllm_server", "url": "http://127.0.0.1:1"}
    for path in (tmp_path / secret, tmp_path / "link", f"/proc/self/root{tmp_path / secret}"):
        settings = {
            "task.path": {"task": {"kind": "jsonl", "path": str(path)}},
            "generate.engine.api_key_file": {"generate.engine": {**engine, "api_key_file": str(path)}},
        }
        for field, table in settings.items():
            assert "the daemon's own" in faults_of(tmp_path / "runs", set=table)[field].allowed


def test_what_no_json_can_hold_and_paths_that_lead_nowhere_are_faults_too(tmp_path):
    refused = faults_of(tmp_path, config="num_steps = 0x" + "f" * 60_000)["num_steps"]
    assert msgspec.json.encode(refused)
    (tmp_path / "loop").symlink_to("loop")
    for path in ("a" * 5000, "a/" * 3000, "\0", str(tmp_path / "loop")):
        assert faults_of(tmp_path, set={"task": {"kind": "jsonl", "path": path}})
        assert faults_of(tmp_path, set={"task": {"kind": "python", "path": f"{path}.py:f"}})


LONG = [
    {"task": {"kind": "jsonl", "path": "a/" * 450_000}},  # each folder was looked up: 40 s
    {"reward.functions": [{"kind": "python", "path": f"m{number}:f"} for number in range(20_000)]},  # names in 100 s
    {"generate.engine": {"kind": "vllm_server", "url": ",".join(["http://a"] * 80_000)}},  # 80,000 faults of 1 MB each
    {"name": "x" * 900_000}, {"learner": {f"x{number}": 1 for number in range(20_000)}},
]  # fmt: skip


@pytest.mark.parametrize("setting", LONG, ids=range(len(LONG)))
def test_a_submission_of_a_megabyte_has_an_answer_that_is_small_and_soon_there(tmp_path, setting):
    began_s = time.process_time()
    with pytest.raises(RefusedError) as refused:
        resolve(Submission(set=setting), tmp_path, (), MACHINE)
    assert 1 <= len(refused.value.faults) <= MOST_SAID
    assert len(msgspec.json.encode(refused.value.faults)) < 500_000
    assert time.process_time() - began_s < 20.0
