"""Checkpoints: whole or not there, kept and removed, and gone on from to the same bits."""

import copy
import itertools
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig, KLConfig
from asyncrl.config.learner import LearnerConfig, LoRAConfig, PretrainedModel, ScratchModel
from asyncrl.config.run import RunConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.checkpoint import load_or_make, save_checkpoint
from asyncrl.learner.checkpoint_folder import StepMemory, TrainerState, newest_checkpoint, write_checkpoint, write_folder
from asyncrl.learner.step.train_step import train_step

ALPHABET = "abcdefghijklmnopqrstu"


def standing_in(folder):
    return load_or_make(RunConfig(model=ScratchModel(hidden_size=32, num_layers=1, num_heads=2)), folder, list, ALPHABET)


def save(folder, initial):
    return save_checkpoint(folder / "checkpoints", initial.train_state, initial.tokenizer, TrainerState(initial.version), 2)


def test_sessions_that_open_at_once_have_the_same_weights(tmp_path):
    with ThreadPoolExecutor(4) as threads:
        made = [each.train_state.model for each in threads.map(standing_in, [tmp_path / str(index) for index in range(16)])]
    first = made[0].state_dict()
    for model in made:
        assert all(torch.equal(tensor, first[name]) for name, tensor in model.state_dict().items())


def written(checkpoints, version, keep_last=2):
    """Write a checkpoint of two files, without a model."""

    def fill(partial):
        for name in ("model.safetensors", "trainer/optimizer.safetensors"):
            (partial / name).write_bytes(bytes(100))

    return write_checkpoint(checkpoints, TrainerState(version), fill, keep_last)


def test_only_the_last_ones_are_kept(tmp_path):
    for version in (1, 2, 3, 10):
        written(tmp_path, version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000010"]
    for backup in ("step-000010.bak", "step-000099-copy", "old-step-000099"):
        shutil.copytree(tmp_path / "step-000010", tmp_path / backup)
    assert newest_checkpoint(tmp_path).name == "step-000010"
    written(tmp_path, 11)
    assert sorted(path.name for path in tmp_path.glob("*step*")) == [
        "old-step-000099", "step-000010", "step-000010.bak", "step-000011", "step-000099-copy",
    ]  # fmt: skip


def test_a_checkpoint_that_is_removed_or_replaced_is_never_seen_in_part(tmp_path):
    first = written(tmp_path, 1, keep_last=1)
    whole, seen = {path.relative_to(first) for path in first.rglob("*")}, []

    def look(event, _):
        if event == "os.remove" and watches:
            seen.append({path.relative_to(first) for path in first.rglob("*")} in (set(), whole))

    watches = True
    sys.addaudithook(look)
    for version in (1, 2):
        written(tmp_path, version, keep_last=1)
    watches = False
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
    assert len(seen) >= 2 * sum(path.suffix != "" for path in whole)
    assert all(seen)


def test_a_checkpoint_that_is_killed_while_it_replaces_one_leaves_a_whole_one(tmp_path):
    """At any moment at which a name in the folder changes: the old one or the new one is found, and what is left is removed."""
    events_left = 0

    def die(event, _):
        nonlocal events_left
        if events_left and event in {"os.rename", "os.remove", "os.rmdir"}:
            events_left -= 1
            if not events_left:
                raise KeyboardInterrupt

    sys.addaudithook(die)
    for moment in itertools.count(1):
        folder = tmp_path / str(moment)
        written(folder, 4)
        events_left = moment
        try:
            written(folder, 4)
        except KeyboardInterrupt:
            assert newest_checkpoint(folder).name == "step-000004", moment
            written(folder, 5)
            assert sorted(path.name for path in folder.iterdir()) == ["step-000004", "step-000005"], moment
        else:
            break
    events_left = 0
    assert moment > 5


def test_a_half_written_checkpoint_is_ignored_and_then_removed(tmp_path):
    complete = written(tmp_path, 2)

    def die_half_way(partial):
        (partial / "model.safetensors").write_bytes(b"half of it")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "step-000004", die_half_way)
    (tmp_path / "step-000005").mkdir()
    assert newest_checkpoint(tmp_path) == complete
    written(tmp_path, 6)
    assert not list(tmp_path.glob(".partial-*"))


def test_a_checkpoint_of_an_earlier_version_is_refused_with_one_line(tmp_path):
    folder = written(tmp_path, 0)
    (folder / "trainer" / "manifest.json").unlink()
    (folder / "trainer" / "state.json").write_text('{"version": 0, "format": 1}')
    with pytest.raises(LearnerError, match="has format 1, this version of asyncrl reads 2"):
        newest_checkpoint(tmp_path)


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


@pytest.mark.parametrize("given", ['{"temperature": 0.9, "top_p": 0.6, "eos_token_id": [1, 2]}', '{"pad_token_id": -1}'])
def test_a_model_whose_generation_config_transformers_does_not_save_has_checkpoints(tmp_path, given):
    standing_in(tmp_path / "source")
    source = tmp_path / "source" / "model"
    (source / "generation_config.json").write_text(given)
    initial = load_or_make(RunConfig(model=PretrainedModel(path=str(source))), tmp_path, list, ALPHABET)
    written = json.loads((save(tmp_path, initial) / "generation_config.json").read_text())
    assert written.get("eos_token_id") == json.loads(given).get("eos_token_id")
    assert not {"temperature", "pad_token_id"} & written.keys()


PLAIN = AlgorithmConfig(kind="policy")


def config_of(algorithm=None, hidden_size=32, **learner):
    settings = {"learning_rate": 1e-3, "warmup_steps": 1, "minibatches": 2} | learner
    model = ScratchModel(hidden_size=hidden_size, num_layers=1, num_heads=2)
    return RunConfig(model=model, algorithm=algorithm or PLAIN, learner=LearnerConfig(**settings))


def with_critic(kind):
    """Critic, adaptive penalty and its reference."""
    critic = CriticConfig(kind=kind, warmup_steps=1)
    return AlgorithmConfig(advantage="gae", critic=critic, kl=KLConfig(target=0.01, horizon=50))


CONFIGS = {
    "separate critic, bfloat16": config_of(with_critic("separate"), dtype="bfloat16"),
    "value head, adapters, moments on the host": config_of(with_critic("head"), lora=LoRAConfig(rank=2), offload_optimizer=True),
    "auto, float16": config_of(AlgorithmConfig(kind="auto"), dtype="float16"),
    "8 bits on the host": config_of(hidden_size=64, optimizer="adamw_8bit", dtype="bfloat16", offload_optimizer=True),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_everything_goes_on_to_the_same_bits(kit, tmp_path, config):
    """Replayed after a crash, a step is the same step: weights, critic, both optimizers, memory, random numbers and metrics."""

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
    drawn, halfway = torch.rand(3), kit.bits(first.train_state.model)
    second = stand(tmp_path / "parts")
    assert torch.equal(torch.rand(3), drawn)
    assert second.train_state.memory == first.train_state.memory
    assert (second.train_state.memory == StepMemory()) == (config.algorithm == PLAIN)
    assert go(second, range(2, 4)) == expected[2:]
    assert second.train_state.memory == whole.train_state.memory
    assert not kit.same(second.train_state.model.parameters(), halfway)
    for part in ("model", "critic"):
        ours, theirs = (getattr(initial.train_state, part) for initial in (second, whole))
        assert theirs is None or kit.same(ours.parameters(), theirs.parameters())
