"""What is checked before a learner makes or opens anything."""

import copy
import json
import shutil
import sys

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, dynamic_module_utils

from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig, KLConfig
from asyncrl.config.learner import LearnerConfig, LoRAConfig, PretrainedModel, ScratchModel
from asyncrl.config.run import RunConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.checkpoint import load_trainer, save_checkpoint, save_shards
from asyncrl.learner.checkpoint_folder import StepMemory, TrainerState, newest_checkpoint, write_folder
from asyncrl.learner.resume import build_train_state, load_or_make
from asyncrl.learner.step.train_step import train_step

CONFIG = RunConfig(model=ScratchModel(hidden_size=32, num_layers=1, num_heads=2))
ALPHABET = "abcdefghijklmnopqrstu"


def standing_in(folder):
    return load_or_make(CONFIG, folder, list, ALPHABET)


def save(folder, initial, keep_last=2, controller_json=""):
    state = TrainerState(initial.version, controller_json)
    return save_checkpoint(folder / "checkpoints", initial.train_state, initial.tokenizer, state, keep_last)


def test_shards_are_written_as_they_become_whole_and_open_as_one_model(kit, tmp_path):
    """The largest tensor has a shard of its own, out of order."""
    model = kit.model(tie_word_embeddings=False)
    tensors = dict(model.named_parameters())
    largest = max(tensor.nbytes for tensor in tensors.values())
    save_shards(((name, tensor.detach()) for name, tensor in tensors.items()), tensors, tmp_path, shard_bytes=largest - 1)
    model.config.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(opened.get_parameter(name), tensor) for name, tensor in tensors.items())


def test_only_the_last_ones_are_kept(kit, tmp_path):
    initial = standing_in(tmp_path)
    for version in (1, 2, 3, 10):
        initial.version = version
        save(tmp_path, initial)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000003", "step-000010"]
    for backup in ("step-000010.bak", "step-000099-copy", "old-step-000099"):
        shutil.copytree(tmp_path / "checkpoints" / "step-000010", tmp_path / "checkpoints" / backup)
    assert newest_checkpoint(tmp_path / "checkpoints").name == "step-000010"
    initial.version = 11
    save(tmp_path, initial)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("*step*")) == [
        "old-step-000099", "step-000010", "step-000010.bak", "step-000011", "step-000099-copy",
    ]  # fmt: skip


def test_a_checkpoint_that_is_removed_or_replaced_is_never_seen_in_part(kit, tmp_path):
    initial = standing_in(tmp_path)
    initial.version = 1
    first = save(tmp_path, initial, keep_last=1)
    whole, seen = {path.relative_to(first) for path in first.rglob("*")}, []

    def look(event, _):
        if event == "os.remove" and watches:
            seen.append({path.relative_to(first) for path in first.rglob("*")} in (set(), whole))

    watches = True
    sys.addaudithook(look)
    save(tmp_path, initial, keep_last=1)
    initial.version = 2
    save(tmp_path, initial, keep_last=1)
    watches = False
    assert [path.name for path in first.parent.iterdir()] == ["step-000002"]
    assert len(seen) >= 2 * sum(path.suffix != "" for path in whole)
    assert all(seen)


def test_a_half_written_checkpoint_is_ignored_and_then_removed(kit, tmp_path):
    initial = standing_in(tmp_path)
    initial.version = 2
    complete = save(tmp_path, initial)

    def die_half_way(partial):
        (partial / "model.safetensors").write_bytes(b"half of it")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "checkpoints" / "step-000004", die_half_way)
    (tmp_path / "checkpoints" / "step-000005").mkdir()
    assert newest_checkpoint(tmp_path / "checkpoints") == complete
    initial.version = 6
    save(tmp_path, initial)
    assert not list((tmp_path / "checkpoints").glob(".partial-*"))


def test_a_checkpoint_of_an_earlier_version_is_refused_with_one_line(tmp_path):
    folder = save(tmp_path, standing_in(tmp_path))
    (folder / "trainer" / "manifest.json").unlink()
    (folder / "trainer" / "state.json").write_text('{"version": 0, "format": 1}')
    with pytest.raises(LearnerError, match="has format 1, this version of asyncrl reads 2"):
        newest_checkpoint(tmp_path / "checkpoints")


def test_a_bit_flipped_in_any_file_is_named_and_the_newest_whole_checkpoint_is_used(tmp_path, caplog):
    initial = standing_in(tmp_path)
    whole = save(tmp_path, initial)
    initial.version = 2
    newest = save(tmp_path, initial)
    files = [path for path in newest.rglob("*") if path.is_file()]
    assert {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"} <= {path.name for path in files}
    assert {path.suffix for path in files} == {".json", ".safetensors"}, "nothing is pickled"
    for path in files:
        content = path.read_bytes()
        for place in {0, len(content) // 2, len(content) - 1}:
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            assert newest_checkpoint(tmp_path / "checkpoints") == whole, (path, place)
        path.unlink()
        # Without its state it was never complete, and nothing is to be said.
        caplog.clear()
        assert newest_checkpoint(tmp_path / "checkpoints") == whole
        (said,) = [record.getMessage() for record in caplog.records] or [f"{newest} {path.name} {whole}"]
        assert all(str(each) in said for each in (newest, whole))
        path.write_bytes(content)
    assert newest_checkpoint(tmp_path / "checkpoints") == newest
    (newest / "model.safetensors").write_bytes(b"x")
    (whole / "trainer" / "rng.safetensors").write_bytes(b"x")
    with pytest.raises(LearnerError, match=r"no checkpoint is whole: .*model.safetensors.*rng.safetensors.*restore one"):
        standing_in(tmp_path)


def test_a_damaged_checkpoint_is_not_one_of_those_that_are_kept(tmp_path):
    initial, checkpoints = standing_in(tmp_path), tmp_path / "checkpoints"
    for initial.version in (2, 4):
        newest = save(tmp_path, initial)
    (newest / "model.safetensors").write_bytes(b"x")
    initial = standing_in(tmp_path)
    assert initial.version == 2
    assert sorted(path.name for path in checkpoints.iterdir()) == ["damaged-step-000004", "step-000002"]
    initial.version = 3
    save(tmp_path, initial)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000002", "step-000003"]


def everything_config(critic="separate", **learner):
    """Critic, adaptive penalty and its reference, several updates."""
    algorithm = AlgorithmConfig(
        advantage="gae", critic=CriticConfig(kind=critic, warmup_steps=1), kl=KLConfig(target=0.01, horizon=50)
    )
    settings = {"learning_rate": 1e-3, "warmup_steps": 1, "minibatches": 2} | learner
    return msgspec.structs.replace(CONFIG, algorithm=algorithm, learner=LearnerConfig(**settings))


def auto_config():
    return msgspec.structs.replace(CONFIG, algorithm=AlgorithmConfig(kind="auto"))


@pytest.mark.parametrize(
    "config",
    [
        everything_config(dtype="bfloat16"),
        everything_config("head", lora=LoRAConfig(rank=2)),
        auto_config(),
    ],
    ids=["separate critic, bfloat16", "value head, adapters", "auto"],
)
def test_everything_goes_on_to_the_same_bits(kit, tmp_path, config):
    """Replayed after a crash, a step is the same step: weights, critic, both optimizers, memory and metrics."""

    def stand(folder):
        return load_or_make(config, folder, list, ALPHABET)

    def go(initial, steps):
        results = []
        for step in steps:
            results.append(train_step(initial.train_state, kit.batch(kit.samples(seed=step), 60, step=step), config))
            initial.version = step + 1
        return results

    whole, first = stand(tmp_path / "whole"), stand(tmp_path / "parts")
    expected = go(whole, range(4))
    go(first, range(2))
    state = TrainerState(first.version, memory=copy.deepcopy(first.train_state.memory))
    save_checkpoint(tmp_path / "parts" / "checkpoints", first.train_state, first.tokenizer, state, 1)
    second = stand(tmp_path / "parts")
    assert second.train_state.memory == first.train_state.memory != StepMemory()
    assert go(second, range(2, 4)) == expected[2:]
    assert second.train_state.memory == whole.train_state.memory
    for part in ("model", "critic"):
        ours, theirs = (getattr(initial.train_state, part) for initial in (second, whole))
        if theirs is not None:
            assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def folder_with_own_code(kit, folder):
    kit.model().save_pretrained(folder)
    (folder / "own.py").write_text(OWN_CODE)
    (folder / "tokenizer.json").write_text("{}")
    own = {"model_type": "own_llama", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}}
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    return folder


@pytest.mark.parametrize("path_is_given", [True, False])
def test_a_separate_critic_opens_a_folder_with_code_where_the_run_trusts_it(kit, tmp_path, monkeypatch, path_is_given):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = folder_with_own_code(kit, tmp_path / "model")
    critic = CriticConfig(path=str(folder) if path_is_given else "")
    model = PretrainedModel(path=str(folder), trust_remote_code=True)
    config = kit.config({"advantage": "gae", "critic": critic}, model=model)
    train_state = build_train_state(config, folder)
    assert type(train_state.critic.body.config).__name__ == "OwnConfig"


def test_random_state_is_restored(tmp_path):
    initial = standing_in(tmp_path)
    torch.manual_seed(5)
    folder = save(tmp_path, initial)
    expected = torch.rand(3)
    torch.rand(100)
    load_trainer(folder, initial.train_state)
    assert torch.equal(torch.rand(3), expected)
