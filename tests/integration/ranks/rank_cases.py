"""Training cases, with one rank or, by `python -m tests.integration.ranks.rank_cases RANK SIZE ADDRESS FOLDER`, as one of
several.

Not a test: test_rank_cases.py starts it and compares what rank 0 leaves in FOLDER with its own.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from asyncrl.clock import SystemClock
from asyncrl.config.algorithm import CriticConfig, KLConfig, MaskedSequence, SecondMomentMask, TruncatedToken
from asyncrl.config.learner import LoRAConfig
from asyncrl.config.run import PlacementConfig
from asyncrl.errors import ResidencyError
from asyncrl.learner.checkpoint import build_train_state, contribute_checkpoint, load_trainer, save_checkpoint
from asyncrl.learner.checkpoint_folder import TrainerState
from asyncrl.learner.model.policy import Critic, Reference, character_tokenizer, publishable_tensors
from asyncrl.learner.ranks.fsdp import Divider, whole_tensors
from asyncrl.learner.ranks.group import joined_ranks, whole
from asyncrl.learner.step.train_step import train_step
from asyncrl.learner.train_state import open_offload
from asyncrl.models.adapters import adapters_off, add_adapters
from asyncrl.models.layout import copy_out, make_manifest, view_tensors
from asyncrl.weights.media.collective_group import join_store
from tests.unit.learner import conftest as kit

TIMEOUT_S = 100.0
STEPS = 2
LEARNER = {"learning_rate": 1e-2, "epsilon": 1e-2, "max_grad_norm": 1e9, "logprob_chunk_tokens": 16}
"""A large epsilon keeps AdamW from turning rounding of tiny gradients into whole steps."""
DECOUPLED = {"loss": "decoupled_ppo", "corrections": (TruncatedToken(1.1), MaskedSequence()), "entropy_coefficient": 0.01}
GAE = {"advantage": "gae", "gamma": 0.97, "gae_lambda": 0.9}
M2PO = {"corrections": (SecondMomentMask(0.02), TruncatedToken(1.5, normalize=True)), "denominator": "kept"}
KL_REWARD = KLConfig(coefficient=0.3, estimator="k1", where="reward", target=0.01, horizon=50)
CASES = {
    "tied": {"sizes": {"tie_word_embeddings": True}, "rows": 60, "algorithm": DECOUPLED},
    "fewer_rows_than_ranks": {"rows": 10_000, "algorithm": DECOUPLED},
    "checkpointed_layers": {"rows": 60, "algorithm": DECOUPLED, "learner": {"gradient_checkpointing": True}},
    "value_head": {"rows": 60, "algorithm": GAE | {"critic": CriticConfig(kind="head", learning_rate=1e-2)}},
    "separate_critic": {"rows": 60, "algorithm": GAE | {"critic": CriticConfig(kind="separate", learning_rate=1e-2)}},
    "kept_over_an_update": {"rows": 60, "algorithm": M2PO, "learner": {"minibatches": 2}},
    "kl_in_the_reward": {"rows": 60, "algorithm": GAE | {"critic": CriticConfig(learning_rate=1e-2), "kl": KL_REWARD}},
    "lora_with_its_base_for_reference": {
        "rows": 60,
        "algorithm": DECOUPLED | {"kl": KLConfig(coefficient=0.3)},
        "learner": {"lora": LoRAConfig(rank=4), "minibatches": 2},
    },
    "bfloat16": {"rows": 60, "algorithm": DECOUPLED, "learner": {"dtype": "bfloat16"}, "tolerance": 1e-2},
    "float16": {"rows": 60, "algorithm": DECOUPLED, "learner": {"dtype": "float16"}, "tolerance": 1e-3},
    "pairs": {"rows": 60, "algorithm": {"kind": "dpo", "group_size": 4}, "learner": {"minibatches": 2}, "has_pairs": True},
}
"""By name: sizes of the model, tokens of a row, algorithm and learner; how far from one rank's each tensor may be."""
FIGURES = ("policy/loss", "policy/grad_norm", "value/loss", "ratio/p95", "ratio/ess", "ratio/perplexity", "policy/entropy")
"""Of a step; those of tokens and of sequences are of all ranks together."""
TOLERANCE = 1e-5
"""Of a tensor's largest element, in float32."""


def batch_at(step, tokens_per_row, num_ranks, *, has_pairs=False):
    samples = kit.random_samples(seed=step, groups=4)
    for sample in samples if has_pairs else ():
        sample |= {"pair": sample["group_id"] if sample["index"] < 2 else -1, "is_chosen": sample["index"] == 1}
    return kit.batch_of(samples, tokens_per_row, step, temperature=0.9, num_ranks=num_ranks)


def train_state_of(case, config, ranks):
    divide = Divider("cpu", ranks.size)
    model = kit.tiny_model(dtype=config.learner.dtype, **case.get("sizes", {}))
    if config.learner.lora is not None:
        add_adapters(model, config.learner.lora, seed=3)
    if config.learner.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    divide.policy(model)
    reference = critic = None
    if config.algorithm.needs_reference and config.learner.lora is None:
        reference = divide.policy(kit.tiny_model(seed=2))
    if config.algorithm.critic is not None:
        critic = Critic(32, None if config.algorithm.critic.kind == "head" else kit.tiny_model(seed=1).base_model)
        torch.manual_seed(5)
        torch.nn.init.normal_(critic.output.weight, std=0.1)
        divide.critic(critic)
    train_state = kit.train_state_of(model, config, critic, reference)
    train_state.ranks = ranks
    if config.algorithm.needs_reference and config.learner.lora is not None:
        train_state.reference = Reference(model, 16, lambda: adapters_off(model))
    return train_state


def run_case(name, ranks):
    """Train a case; return gradients of the first step and weights after the last, and each step's loss and norm."""
    case = CASES[name]
    config = kit.run_config(case["algorithm"], LEARNER | case.get("learner", {}))
    train_state, found = train_state_of(case, config, ranks), {}
    parts = {"policy": (train_state.model, train_state.optimizer), "critic": (train_state.critic, train_state.critic_optimizer)}
    for step in range(STEPS):
        batch = batch_at(step, case["rows"], ranks.size, has_pairs=case.get("has_pairs", False))
        result = train_step(train_state, batch, config)
        assert not result.metrics.get("policy/skipped_updates"), f"{name} has nothing to compare in step {step}"
        found[f"figures/{step}"] = torch.tensor([result.metrics.get(name, 0.0) for name in FIGURES])
        for part, (module, optimizer) in parts.items():
            if module is None:
                continue
            if step == 0 and config.learner.minibatches == 1:
                state = whole_tensors(optimizer.named_state())
                found |= {f"gradient/{part}/{key}": value / 0.1 for key, value in state if key.startswith("exp_avg/")}
            if step == STEPS - 1:
                found |= {f"weight/{part}/{key}": value for key, value in whole_tensors(module.named_parameters())}
    return found


def run_resumed(ranks, folder):
    """Train a step, save, go on; then open what was saved and do the same steps again. Return both ends."""
    config = kit.run_config(DECOUPLED, LEARNER)
    train_state, rows = train_state_of(CASES["tied"], config, ranks), CASES["tied"]["rows"]
    train_state.model.register_buffer("kept", torch.full((2,), 7.0))  # as some mixtures of experts have
    train_step(train_state, batch_at(0, rows, ranks.size), config)
    saved = folder / "checkpoints" / "step-000001"
    if ranks.rank == 0:
        save_checkpoint(folder / "checkpoints", train_state, character_tokenizer("0123456789"), TrainerState(1), 2)
    else:
        contribute_checkpoint(train_state)
    ranks.sum(torch.zeros(1))  # nobody reads before it is written
    return {
        **{f"went_on/{key}": value for key, value in the_rest(train_state, config, rows)},
        **{f"resumed/{key}": value for key, value in resumed(saved, config, ranks, rows)},
    }


def resumed(saved, config, ranks, rows):
    train_state = build_train_state(config, saved, saved, ranks)
    load_trainer(saved, train_state)
    return the_rest(train_state, config, rows)


def the_rest(train_state, config, rows):
    for step in range(1, STEPS):
        train_step(train_state, batch_at(step, rows, train_state.ranks.size), config)
    return list(whole_tensors(train_state.model.named_parameters()))


MOVED = {"tied": "host", "separate_critic": "disk", "lora_with_its_base_for_reference": "host"}
"""Cases whose components leave the device between steps, and where to."""


def run_moved(name, ranks, folder):
    """Train a case with everything off the device between steps; return its end, and bytes while it was off.

    `left` has this rank's device after the move, resident components before it, and the tensors that still had memory then.
    """
    case, found = CASES[name], {}
    placement = PlacementConfig(kind="colocated", offload_to=MOVED[name])
    config = kit.run_config(case["algorithm"], LEARNER | case.get("learner", {}), placement=placement)
    train_state = train_state_of(case, config, ranks)
    residents = open_offload(train_state, config, folder / "moved" / name, SystemClock())
    for step in range(STEPS):
        train_step(train_state, batch_at(step, case["rows"], ranks.size), config)
        found["left"] = ranks.gather(leave_and_come_back(residents, train_state, step))
    residents.reach("rollout", 2 * STEPS)
    with residents.manager.readable():
        found |= {f"read/{key}": value for key, value in whole_tensors(train_state.model.named_parameters())}
    residents.manager.close()
    return found


def leave_and_come_back(residents, train_state, step):
    held = residents.reach("train", 2 * step).resident
    left = residents.reach("rollout", 2 * step)
    still = [tensor for tensor in train_state.model.state_dict().values() if tensor.to_local().untyped_storage().nbytes()]
    counted = residents.device.allocated_bytes
    residents.reach("train", 2 * step + 1)
    return torch.tensor([[counted, sum(held.values()), len(left.resident), len(still)]])


def run_refused(ranks, folder):
    """Have rank 1 alone unable to leave the device; return what each rank says, and weights after a step that follows."""
    placement = PlacementConfig(kind="colocated", offload_to="disk")
    config = kit.run_config(DECOUPLED, LEARNER, placement=placement)
    train_state = train_state_of(CASES["tied"], config, ranks)
    residents = open_offload(train_state, config, folder / "refused", SystemClock())
    if ranks.rank == 1:
        (folder / "refused" / "swap").mkdir(exist_ok=True)
        (folder / "refused" / "swap" / "learner-1").write_text("a file where the folder should be")
    try:
        residents.reach("rollout", 0)
        said = "nothing"
    except ResidencyError as error:
        said = str(error)
    residents.reach("train", 1)
    train_step(train_state, batch_at(0, 60, ranks.size), config)
    residents.manager.close()
    return {"said": ranks.gather(as_bytes(f"rank {ranks.rank}: {said}\n")), **dict(the_rest(train_state, config, 60))}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes that operations made and that are still alive, at their peak."""

    def __init__(self, *there_before):
        super().__init__()
        self.peak = 0
        self._there_before = [StorageWeakRef(tensor.untyped_storage()) for tensor in there_before]
        self._made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for result in tree_flatten(results)[0]:
            made = StorageWeakRef(result.untyped_storage()) if isinstance(result, torch.Tensor) else None
            if made is not None and made not in self._there_before:
                self._made.append((made, result.untyped_storage().nbytes()))
        self._made = [(made, size) for made, size in self._made if not made.expired()]
        self.peak = max(self.peak, sum(dict(self._made).values()))
        return results


def publishing_model(*, tied):
    """Many tensors of one size, so that two at once would show."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12}
    return kit.tiny_model(tie_word_embeddings=tied, **sizes)


def run_publish(ranks, *, tied, dtype="model"):
    """Gather a divided model's weights as a publisher does; return what rank 0 has then, and how much was alive at once."""
    model = Divider("cpu", ranks.size).policy(publishing_model(tied=tied))
    tensors = publishable_tensors(model)
    peak = torch.zeros(ranks.size)
    if ranks.rank != 0:
        with LiveBytes() as alive:
            for tensor in tensors.values():
                whole(tensor)
        peak[ranks.rank] = alive.peak
        return {"peak": ranks.sum(peak)}
    manifest = make_manifest(tensors, dtype)
    flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    views = view_tensors(flat, manifest)
    with LiveBytes(flat) as alive:
        copy_out(tensors, views)
    peak[0] = alive.peak
    return {"flat": flat, "peak": ranks.sum(peak), "names": as_bytes("\n".join(views))}


def as_bytes(text):
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


PUBLISHED = {"tied": {"tied": True}, "bfloat16": {"tied": False, "dtype": "bfloat16"}}


def main(rank, size, address, folder):
    torch.set_num_threads(1)
    store = join_store(address, TIMEOUT_S)
    with joined_ranks(rank, size, store, "cpu", TIMEOUT_S) as ranks:
        found = {f"{name}/{key}": value for name in CASES for key, value in run_case(name, ranks).items()}
        found |= {f"checkpoint/{key}": value for key, value in run_resumed(ranks, folder).items()}
        for name in MOVED:
            found |= {f"moved/{name}/{key}": value for key, value in run_moved(name, ranks, folder).items()}
        found |= {f"refused/{key}": value for key, value in run_refused(ranks, folder).items()}
        for name, options in PUBLISHED.items():
            found |= {f"published/{name}/{key}": value for key, value in run_publish(ranks, **options).items()}
    if rank == 0:
        save_file({key: value.contiguous() for key, value in found.items()}, folder / "found.safetensors")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
