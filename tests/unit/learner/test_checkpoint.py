import copy

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig, KLConfig
from asyncrl.config.learner import LearnerConfig, LoRAConfig
from asyncrl.config.model import ScratchModel
from asyncrl.config.run import RunConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.checkpoint import TrainerState, latest_checkpoint, load_trainer, save_checkpoint, write_folder
from asyncrl.learner.start import prepare_standing
from asyncrl.learner.step import train_step
from asyncrl.learner.trainee import StepMemory

CONFIG = RunConfig(model=ScratchModel(hidden_size=32, num_layers=1, num_heads=2))
ALPHABET = "abcdefghijklmnopqrstu"


def standing_in(folder):
    return prepare_standing(CONFIG, folder, list, ALPHABET)


def save(folder, standing, keep_last=2, controller_json=""):
    state = TrainerState(standing.version, controller_json)
    return save_checkpoint(folder / "checkpoints", standing.trainee, standing.tokenizer, state, keep_last)


def train(kit, standing, steps):
    for step in steps:
        train_step(standing.trainee, kit.batch(kit.samples(seed=step), 60, step=step), CONFIG)
        standing.version = step + 1


def test_resuming_is_bit_identical_to_not_stopping(kit, tmp_path):
    whole = standing_in(tmp_path / "whole")
    train(kit, whole, range(5))
    first = standing_in(tmp_path / "parts")
    train(kit, first, range(3))
    save(tmp_path / "parts", first)
    second = standing_in(tmp_path / "parts")
    assert second.version == 3
    train(kit, second, range(3, 5))
    assert all(
        torch.equal(a, b) for a, b in zip(whole.trainee.model.parameters(), second.trainee.model.parameters(), strict=True)
    )
    moments = []
    for name, standing in (("whole", whole), ("parts", second)):
        standing.trainee.optimizer.save(tmp_path / f"{name}.safetensors")
        moments.append(load_file(tmp_path / f"{name}.safetensors"))
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0].keys() | moments[1].keys())


def test_a_checkpoint_opens_with_plain_transformers(kit, tmp_path):
    standing = standing_in(tmp_path)
    train(kit, standing, range(1))
    folder = save(tmp_path, standing)
    assert folder.name == "step-000001"
    opened = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(standing.trainee.model.parameters(), opened.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(folder).decode([2, 3]) == "ab"


def test_nothing_in_a_checkpoint_is_pickled(kit, tmp_path):
    standing = standing_in(tmp_path)
    train(kit, standing, range(1))
    suffixes = {path.suffix for path in save(tmp_path, standing).rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}


def test_only_the_last_ones_are_kept(kit, tmp_path):
    standing = standing_in(tmp_path)
    for version in (1, 2, 3, 10):
        standing.version = version
        save(tmp_path, standing)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000003", "step-000010"]
    assert latest_checkpoint(tmp_path / "checkpoints").name == "step-000010"


def test_a_half_written_checkpoint_is_ignored_and_then_removed(kit, tmp_path):
    standing = standing_in(tmp_path)
    standing.version = 2
    complete = save(tmp_path, standing)

    def die_half_way(partial):
        (partial / "model.safetensors").write_bytes(b"half of it")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "checkpoints" / "step-000004", die_half_way)
    (tmp_path / "checkpoints" / "step-000005").mkdir()
    assert latest_checkpoint(tmp_path / "checkpoints") == complete
    standing.version = 6
    save(tmp_path, standing)
    assert not list((tmp_path / "checkpoints").glob(".partial-*"))


def test_the_controller_s_part_comes_back_as_it_was(tmp_path):
    standing = standing_in(tmp_path)
    folder = save(tmp_path, standing, controller_json='{"position": 17}')
    assert load_trainer(folder, standing.trainee).controller_json == '{"position": 17}'


def test_random_state_is_restored(tmp_path):
    standing = standing_in(tmp_path)
    torch.manual_seed(5)
    folder = save(tmp_path, standing)
    expected = torch.rand(3)
    torch.rand(100)
    load_trainer(folder, standing.trainee)
    assert torch.equal(torch.rand(3), expected)


def test_another_format_is_refused(tmp_path):
    standing = standing_in(tmp_path)
    folder = save(tmp_path, standing)
    (folder / "trainer" / "state.json").write_text('{"version": 0, "format": 99}')
    with pytest.raises(LearnerError, match="format 99"):
        load_trainer(folder, standing.trainee)


def test_no_checkpoint_is_none(tmp_path):
    assert latest_checkpoint(tmp_path / "nowhere") is None


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
        everything_config(),
        everything_config("head"),
        everything_config(dtype="bfloat16"),
        everything_config(lora=LoRAConfig(rank=2)),
        auto_config(),
    ],
    ids=["separate critic", "value head", "bfloat16", "adapters", "auto"],
)
def test_everything_goes_on_to_the_same_bits(kit, tmp_path, config):
    """Replayed after a crash, a step is the same step: weights, critic, both optimizers, memory and metrics."""

    def stand(folder):
        return prepare_standing(config, folder, list, ALPHABET)

    def go(standing, steps):
        results = []
        for step in steps:
            results.append(train_step(standing.trainee, kit.batch(kit.samples(seed=step), 60, step=step), config))
            standing.version = step + 1
        return results

    whole, first = stand(tmp_path / "whole"), stand(tmp_path / "parts")
    expected = go(whole, range(5))
    go(first, range(3))
    state = TrainerState(first.version, memory=copy.deepcopy(first.trainee.memory))
    save_checkpoint(tmp_path / "parts" / "checkpoints", first.trainee, first.tokenizer, state, 1)
    second = stand(tmp_path / "parts")
    assert second.trainee.memory == first.trainee.memory != StepMemory()
    assert go(second, range(3, 5)) == expected[3:]
    assert second.trainee.memory == whole.trainee.memory
    for part in ("model", "critic"):
        ours, theirs = (getattr(standing.trainee, part) for standing in (second, whole))
        if theirs is not None:
            assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_checkpoint_without_a_critic_is_refused_by_a_run_with_one(kit, tmp_path):
    standing = standing_in(tmp_path)
    train(kit, standing, range(1))
    save(tmp_path, standing)
    with pytest.raises(LearnerError, match="was written without a critic"):
        prepare_standing(everything_config(), tmp_path, list, ALPHABET)


def test_a_checkpoint_from_before_there_was_memory_opens(kit, tmp_path):
    standing = standing_in(tmp_path)
    folder = save(tmp_path, standing)
    (folder / "trainer" / "state.json").write_text('{"version": 0, "controller_json": "", "format": 1}')
    assert load_trainer(folder, standing.trainee).memory == StepMemory()
