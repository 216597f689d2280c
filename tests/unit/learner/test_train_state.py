"""The learner's components by phase: what leaves, what comes back, what a budget refuses, and that the weights do not notice."""

import contextlib

import pytest
from msgspec.structs import replace

from asyncrl.clock import SystemClock
from asyncrl.config.algorithm import KLConfig
from asyncrl.config.run import PackingConfig, PlacementConfig, RayLaunch
from asyncrl.errors import LearnerError
from asyncrl.learner.step.microbatch import prepare
from asyncrl.learner.step.plan import make_plan, run_passes
from asyncrl.learner.step.train_step import train_step
from asyncrl.learner.train_state import open_device, open_offload
from asyncrl.observe.steps import read_memory
from asyncrl.residency.plan import GIB


@pytest.fixture
def opened(tmp_path):
    """Put a train_state under a manager that is closed afterwards."""
    with contextlib.ExitStack() as made:

        def open_one(train_state, config):
            train_state.offload = open_offload(train_state, config, tmp_path, SystemClock())
            made.callback(train_state.offload.manager.close)
            return train_state.offload

        yield open_one


def colocated(kit, algorithm=None, learner=None, **placement):
    return kit.config(algorithm, learner, placement=PlacementConfig(**({"kind": "colocated"} | placement)))


def room_for(kit, models=4.9):
    """Policy, its moments, its gradients, and not a reference as well; activations of a small step fit where that was."""
    return sum(parameter.nbytes for parameter in kit.model().parameters()) * models / GIB


@pytest.mark.parametrize(
    ("offload_to", "learner"),
    [("disk", {}), ("host", {"dtype": "bfloat16"}), ("disk", {"optimizer": "adamw_8bit"}), ("host", {"offload_optimizer": True})],
)
def test_steps_between_which_everything_left_the_device_are_the_same_steps(kit, opened, offload_to, learner):
    config, models = colocated(kit, None, learner, offload_to=offload_to), []
    for leaves in (False, True):
        models.append(kit.model(dtype=config.learner.dtype))
        train_state = kit.train_state(models[-1], config)
        residents = opened(train_state, config) if leaves else None
        for step in range(3):
            train_step(train_state, kit.batch(kit.samples(seed=step), step=step), config)
            if leaves:
                assert residents.reach("rollout", 2 * step).resident == {}
                assert all(parameter.numel() == 0 for parameter in train_state.model.parameters())
                residents.reach("train", 2 * step + 1)
    assert kit.same(*(model.parameters() for model in models))


@pytest.mark.parametrize(("room", "tokens_per_row"), [(4.9, 1), (5.1, 40)])
def test_with_little_room_the_reference_and_the_optimizer_take_turns_within_a_step(kit, opened, tmp_path, room, tokens_per_row):
    """Also where the reference had room beside all but activations: of its own forward, and of a backward with larger rows."""
    penalty, models = {"kl": KLConfig(coefficient=0.1)}, []
    for config in (kit.config(penalty), colocated(kit, penalty, device_memory_gib=room_for(kit, room))):
        config = replace(config, packing=PackingConfig(tokens_per_row=40))
        models.append(kit.model())
        train_state = kit.train_state(models[-1], config, reference=kit.model(seed=2))
        if config.placement.kind == "colocated":
            opened(train_state, config)
        for step in range(3):
            train_step(train_state, kit.batch(kit.samples(groups=1, seed=step), tokens_per_row, step=step), config)
    assert {"reference", "policy optimizer"} <= {move.component for line in read_memory(tmp_path) for move in line.moves}
    told = [move.component for move in train_state.offload.reach("rollout", 0).moves]
    assert len(told) == len(set(told)), "the controller is told the moves of its own switch, not those within steps"
    train_state.offload.reach("train", 1)
    kit.assert_near(*models, atol=1e-6)


def test_a_reference_whose_logprobs_come_with_the_batch_is_not_beside_the_backward(kit, opened):
    """As in steps that are repeated after a resume that brought it from inference workers to the learner."""
    config = colocated(kit, {"kl": KLConfig(coefficient=0.1)}, device_memory_gib=1.0)
    train_state = kit.train_state(kit.model(), config, reference=kit.model(seed=2))
    manager = opened(train_state, config).manager
    assert "reference" in manager.resident
    batch = kit.batch([sample | {"reference": sample["logprobs"]} for sample in kit.samples()])
    run_passes(train_state, make_plan(prepare(batch), config, train_state.memory))
    assert "reference" not in manager.resident


def test_a_step_that_runs_out_of_memory_names_the_settings_to_change(kit, opened):
    """The same room with all samples in one row; the optimizer is there, so only activations can be fewer."""
    config = colocated(kit, device_memory_gib=room_for(kit))
    train_state = kit.train_state(kit.model(), config)
    opened(train_state, config)
    train_step(train_state, kit.batch(kit.samples(groups=1), 1), config)  # there are moments from now on
    wanted = r"out of device memory.*policy optimizer.*packing\.tokens_per_row.*gradient_checkpointing"
    with pytest.raises(LearnerError, match=wanted):
        train_step(train_state, kit.batch(kit.samples(), step=1), config)


def test_the_learners_part_of_a_device_is_what_generation_beside_it_leaves(kit):
    def budget(**settings):
        return open_device(kit.config(**settings)).budget_bytes

    beside = PlacementConfig(kind="async_hybrid", device_memory_gib=2.0, generation_share=0.25)
    assert budget(placement=beside) == 1.5 * GIB
    assert budget(placement=beside, launch=RayLaunch()) == 2 * GIB  # no generator of such a run is held to a share
    assert budget(placement=PlacementConfig(device_memory_gib=2.0)) == 2 * GIB
