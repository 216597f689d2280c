"""max_staleness = 0 is synchronous, exactly: in every placement the same weights, bit for bit, as a plain loop."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

import asyncrl
from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.config.run import RunConfig
from asyncrl.control.evaluation import sampling_of
from asyncrl.generate.engine import EngineRequest
from asyncrl.generate.transformers.engine import TransformersEngine
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.step.train_step import train_step
from asyncrl.learner.train_state import TrainState
from asyncrl.packing.pack import pack_step
from asyncrl.schema.samples import Prompt, Sample, ScoredGroup, ScoredSample, derive_seed, ids_to_bytes, logprobs_to_bytes
from asyncrl.tasks.registry import build_task
from asyncrl.tasks.task import PromptSequence


def is_right(prompt: Prompt, text: str) -> float:
    return float(text.strip() == prompt.answer)


async def plain_loop(
    config: RunConfig, model_folder: Path, score: Callable[[Prompt, str], float] = is_right
) -> dict[str, torch.Tensor]:
    """Generate a batch, judge it, train on it, put the weights back, step by step."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    optimizer = PolicyOptimizer(model.named_parameters(), config.learner, config.num_steps)
    engine_config = config.generate.engine
    assert isinstance(engine_config, TransformersEngineConfig)
    engine = TransformersEngine(engine_config, model_folder)
    await engine.start()
    task = build_task(config.task, config.seed)
    prompts = PromptSequence(task.train, config.seed)
    groups_per_step, group_size = config.algorithm.groups_per_step, config.algorithm.group_size
    for step in range(config.num_steps):
        await engine.load_weights(step, dict(model.state_dict()), "keep")
        groups = []
        for group_id in range(step * groups_per_step, (step + 1) * groups_per_step):
            prompt = prompts[group_id]
            prompt_ids = tuple(tokenizer(prompt.text)["input_ids"])
            members = []
            for index in range(group_size):
                request = EngineRequest(
                    f"{group_id}.{index}", prompt_ids, sampling_of(config), derive_seed(config.seed, group_id, index)
                )
                ids, logprobs, versions, reason = [], [], [], None
                async for chunk in engine.submit(request):
                    ids += chunk.token_ids
                    logprobs += chunk.logprobs
                    versions += chunk.versions
                    reason = chunk.finish_reason
                text = tokenizer.decode(ids, skip_special_tokens=True)
                sample = Sample(
                    group_id, index, 1, ids_to_bytes(list(prompt_ids)), ids_to_bytes(ids), logprobs_to_bytes(logprobs),
                    ids_to_bytes(versions), reason, text, "loop", 0.0, 0.0,
                )  # fmt: skip
                members.append(ScoredSample(sample, score(prompt, text)))
            groups.append(ScoredGroup(group_id, prompt, tuple(members)))
        batch = pack_step(step, groups, tokens_per_row=config.packing.tokens_per_row, temperature=1.0)
        train_step(TrainState(model, optimizer), batch, config)
    await engine.close()
    return model.state_dict()


PLACEMENTS = {
    "colocated": {"placement": {"kind": "colocated"}},
    "hybrid": {"placement": {"kind": "hybrid"}, "broadcast": {"medium": {"kind": "shared_storage"}}},
}


async def test_zero_staleness_equals_a_plain_synchronous_loop_in_every_placement(tiny):
    """Evaluation goes on between steps and changes nothing. Disaggregated: session/test_session.py, service/test_serve.py."""
    expected: dict[str, torch.Tensor] = {}
    for kind, settings in PLACEMENTS.items():
        config = tiny(name=kind, num_steps=4, buffer__max_staleness=0, eval__every_steps=2, **settings)
        async with asyncrl.Run(config) as run:
            status = await run.wait()
        assert status.phase == "stopped", status.reason
        expected = expected or await plain_loop(config, run.run_folder / "model")
        trained = load_file(Path(status.checkpoint) / "model.safetensors")
        assert trained
        for name, tensor in trained.items():
            assert torch.equal(tensor, expected[name]), f"{kind}: {name} differs by {(tensor - expected[name]).abs().max():.3g}"
