"""One run with a lag that is forced: step k trains on samples of version max(0, k - lag), made by the real engine.

Everything but the processes is the production code: the transformers engine samples, `pack_step` packs, `train_step` trains. A
schedule of old weights stands in for the channels, so that the lag is what it says and nothing else differs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from transformers import PreTrainedModel

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.load import load_config, resolve_config
from asyncrl.config.run import RunConfig
from asyncrl.control.evaluation import sampling_of
from asyncrl.errors import LearnerError
from asyncrl.generate.engine import EngineRequest
from asyncrl.generate.transformers.engine import TransformersEngine
from asyncrl.learner.checkpoint import load_or_make
from asyncrl.learner.model.policy import run_row
from asyncrl.learner.step.microbatch import Division, Row, prepare
from asyncrl.learner.step.train_step import train_step
from asyncrl.packing.pack import pack_step
from asyncrl.schema.samples import Prompt, Sample, ScoredGroup, ScoredSample, derive_seed, ids_to_bytes, logprobs_to_bytes
from asyncrl.sweep.results import code_now, machine_now
from asyncrl.tasks.registry import build_task
from asyncrl.tasks.task import PromptSequence, warm_start_examples

HERE = Path(__file__).parent
EVALUATE_EVERY = 20


class Cell(msgspec.Struct, frozen=True):
    """What is run."""

    method: str
    lag: int
    seed: int
    num_steps: int


class Outcome(msgspec.Struct, frozen=True):
    """What came of it."""

    cell: Cell
    accuracy: list[float]
    """On held-out prompts, before step 0, every EVALUATE_EVERY steps and at the end: the mean probability that the policy gives
    the right answer and stops, which is the expected reward, without the noise of sampling."""
    kl_max: float
    """Largest mean k3 KL(behaviour || learner) of a step."""
    ess_min: float
    recipes: dict[str, int]
    """Steps per recipe, of `auto`."""
    fault: str
    """Why it ended early; empty where it did not."""
    seconds: float
    settings: str
    """`settings_of` the cell."""
    code: str
    machine: str
    date: str


def config_of(cell: Cell, algorithm: dict[str, object]) -> RunConfig:
    """Return the run's config."""
    base = load_config(HERE / "config.toml")
    changed = msgspec.to_builtins(base.algorithm) | algorithm
    return resolve_config(
        msgspec.structs.replace(
            base, algorithm=msgspec.convert(changed, AlgorithmConfig), num_steps=cell.num_steps, seed=cell.seed
        )
    )


def settings_of(cell: Cell, algorithm: dict[str, object]) -> str:
    """Return a digest of all that a cell reads; defaults of what it does not read may change."""
    config = config_of(cell, algorithm)
    read = config.task, config.model, config.generate.engine, config.generate.sampling, config.algorithm, config.learner
    return xxhash.xxh3_64(msgspec.json.encode((cell, config.packing.tokens_per_row, *read))).hexdigest()


@dataclass(slots=True)
class _Loop:
    """The engine and what it needs to turn prompts into scored groups."""

    config: RunConfig
    engine: TransformersEngine
    tokenizer: Any
    token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of prompts met before."""

    async def groups(self, prompts: list[Prompt], first_group: int, group_size: int) -> list[ScoredGroup]:
        """Sample and judge `group_size` completions of each prompt."""
        async with asyncio.TaskGroup() as tasks:
            waiting = [
                [tasks.create_task(self._sample(prompt, first_group + number, index)) for index in range(group_size)]
                for number, prompt in enumerate(prompts)
            ]
        return [
            ScoredGroup(first_group + number, prompt, tuple(task.result() for task in members))
            for number, (prompt, members) in enumerate(zip(prompts, waiting, strict=True))
        ]

    async def _sample(self, prompt: Prompt, group_id: int, index: int) -> ScoredSample:
        prompt_ids = self._ids(prompt.text)
        seed = derive_seed(self.config.seed, group_id, index)
        request = EngineRequest(f"{group_id}.{index}", prompt_ids, sampling_of(self.config), seed, group_key=str(group_id))
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        reason = None
        async for chunk in self.engine.submit(request):
            ids += chunk.token_ids
            logprobs += chunk.logprobs
            versions += chunk.versions
            reason = chunk.finish_reason
        assert reason is not None
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        sample = Sample(
            group_id, index, 1, ids_to_bytes(list(prompt_ids)), ids_to_bytes(ids), logprobs_to_bytes(logprobs),
            ids_to_bytes(versions), reason, text, "loop", 0.0, 0.0,
        )  # fmt: skip
        return ScoredSample(sample, float(text.strip() == prompt.answer))

    def _ids(self, text: str) -> tuple[int, ...]:
        if text not in self.token_ids:
            self.token_ids[text] = tuple(self.tokenizer(text)["input_ids"])
        return self.token_ids[text]


def make_model(folder: Path) -> None:
    """Make the model that all cells start from: the warm start of seed 0, in `folder`/model."""
    config = load_config(HERE / "config.toml")
    task = build_task(config.task, config.seed)
    load_or_make(config, folder, lambda: warm_start_examples(task, config.seed), task.alphabet)


def run_cell(cell: Cell, algorithm: dict[str, object], folder: Path) -> Outcome:
    """Run one cell on this process's one thread."""
    torch.set_num_threads(1)
    return asyncio.run(_run_cell(cell, algorithm, folder))


async def _run_cell(cell: Cell, algorithm: dict[str, object], folder: Path) -> Outcome:
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    config = config_of(cell, algorithm)
    task = build_task(config.task, 0)
    prompts = PromptSequence(task.train, config.seed)
    initial = load_or_make(config, folder, list, task.alphabet)
    train_state = initial.train_state
    engine = TransformersEngine(config.generate.engine, folder / "model")  # type: ignore[arg-type]
    await engine.start()
    source = _Loop(config, engine, initial.tokenizer)
    judged = _judged_row(task.held_out, initial.tokenizer)
    past = deque([_copy(train_state.model)], maxlen=cell.lag + 1)
    accuracy, kl, ess, fault = [], [0.0], [1.0], ""
    recipes: dict[str, int] = {}
    sampled_by = -1
    for step in range(cell.num_steps):
        if step % EVALUATE_EVERY == 0:
            accuracy.append(_accuracy(train_state.model, judged))
        version = max(0, step - cell.lag)
        if version != sampled_by:
            await engine.load_weights(version, past[0], "keep")
            sampled_by = version
        groups_per_step = config.algorithm.groups_per_step
        first = step * groups_per_step
        chosen = [prompts[first + number] for number in range(groups_per_step)]
        groups = await source.groups(chosen, first, config.algorithm.group_size)
        batch = pack_step(step, groups, tokens_per_row=config.packing.tokens_per_row, temperature=1.0)
        try:
            metrics = train_step(train_state, batch, config).metrics
        except LearnerError as error:
            fault = str(error).partition(";")[0]
            break
        kl.append(metrics["kl/mean"])
        ess.append(metrics["ratio/ess"])
        if train_state.memory.recipe:
            recipes[train_state.memory.recipe] = recipes.get(train_state.memory.recipe, 0) + 1
        past.append(_copy(train_state.model))
    accuracy.append(_accuracy(train_state.model, judged))
    await engine.close()
    made = settings_of(cell, algorithm), code_now().commit, machine_now(), datetime.now(tz=UTC).date().isoformat()
    return Outcome(cell, accuracy, max(kl), min(ess), recipes, fault, loop.time() - started_s, *made)


def _judged_row(prompts: Sequence[Prompt], tokenizer: Any) -> Row:
    """Return every prompt with its right answer and the end, packed."""
    members = []
    for number, prompt in enumerate(prompts):
        answer = [*tokenizer(prompt.answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        sample = Sample(
            number, 0, 1, ids_to_bytes(tokenizer(prompt.text)["input_ids"]), ids_to_bytes(answer),
            logprobs_to_bytes([0.0] * len(answer)), ids_to_bytes([0] * len(answer)), "stop", "", "", 0.0, 0.0,
        )  # fmt: skip
        members.append(ScoredGroup(number, prompt, (ScoredSample(sample, 0.0),)))
    (update,) = prepare(pack_step(0, members, tokens_per_row=1 << 20, temperature=1.0), Division(1)).updates
    return update[0]


@torch.no_grad()
def _accuracy(model: PreTrainedModel, judged: Row) -> float:
    logprobs = run_row(model, judged, temperature=1.0, chunk_tokens=1024).logprobs
    sums_S = torch.zeros(len(judged.sample_index), dtype=logprobs.dtype).index_add(0, judged.sequence_ids, logprobs)
    return sums_S.exp().mean().item()


def _copy(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
