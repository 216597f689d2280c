"""What the docs show runs as it stands: Python snippets compile, TOML snippets are TOML, those of running.md are run."""

import asyncio
import re
import tomllib
from pathlib import Path

import pytest
import torch

import asyncrl
from asyncrl.observe.steps import read_steps
from tests.integration.conftest import NO_EVALUATION, NO_MODELS, trained_groups, written

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]


def snippets(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_are_python_and_toml(page):
    for text in snippets(page, "python"):
        compile(text, str(page), "exec")
    for text in snippets(page, "toml"):
        tomllib.loads(text)


def shown(*words: str) -> dict:
    """The names that the one snippet of running.md with these words defines."""
    (text,) = [text for text in snippets(ROOT / "docs" / "running.md", "python") if all(word in text for word in words)]
    return {"__name__": "snippet", "text": text}


async def test_the_snippet_that_follows_a_run(tiny, tmp_path, capsys):
    config = written(tiny(num_steps=10_000, **NO_EVALUATION | NO_MODELS), tmp_path / "c.toml")
    names = shown("step.version == 20")
    text = names["text"].replace("configs/quickstart.toml", str(config)).replace("== 20", "== 2")
    exec(text.replace("asyncio.run(main())", ""), names)
    await names["main"]()
    assert (tmp_path / "tiny" / "checkpoints").is_dir()
    assert len(capsys.readouterr().out.splitlines()) == 3


OUTSIDE = {
    **NO_EVALUATION, "learner__kind": "external", "packing__tokens_per_row": 256,
    "generate__engine": {"kind": "fake", "num_slots": 16, "mean_tokens": 8.0, "max_sequence_tokens": 128},
    "generate__sampling__max_new_tokens": 100,
}  # fmt: skip
"""A run without torch: fake generators, a learner outside."""


async def test_the_snippet_of_an_outside_learner_takes_every_step_and_none_is_too_old(tiny, tmp_path):
    names = shown("WeightPublisher")
    exec(names["text"], names)
    config, trained = tiny(num_steps=6, **OUTSIDE), []
    await names["train"](config, torch.nn.Linear(4, 4), "nothing-to-load", trained.append)
    assert [taken.step for taken in trained] == list(range(6))
    assert {len(taken.groups) for taken in trained} == {config.algorithm.groups_per_step}
    for taken in trained:
        versions = [memoryview(member.sample.versions).cast("i") for group in taken.groups for member in group.members]
        assert taken.step - min(map(min, versions)) <= config.buffer.max_staleness
    assert len(trained_groups(tmp_path / "tiny")) == len({group.group_id for taken in trained for group in taken.groups})
    assert [report.version for report in read_steps(tmp_path / "tiny")] == [1, 2, 3, 4, 5, 6]


async def test_the_snippet_that_hands_in_samples_which_are_checked_scored_and_trained(tiny):
    names = shown("ExternalGroup")
    exec(names["text"], names)
    own = {"generate__num_workers": 0, "algorithm__groups_per_step": 1, "algorithm__group_size": 2, "num_steps": 1}
    prompt = asyncrl.Prompt("mine/1", text="1+1=", answer="2")

    def sample(index: int, text: str, *, logprob: float = -0.5, version: int = 0) -> asyncrl.Sample:
        return asyncrl.Sample(
            0, index, 0, asyncrl.ids_to_bytes([5, 6]), asyncrl.ids_to_bytes([7]), asyncrl.logprobs_to_bytes([logprob]),
            asyncrl.ids_to_bytes([version]), "stop", text, "my-generator", 0.0, 1.0,
        )  # fmt: skip

    async with asyncrl.Run(tiny(**OUTSIDE | own)) as run:
        for bad, said in (
            (sample(1, "3", logprob=float("nan")), "sample 1 of the group"),
            (sample(1, "3", version=9), "version"),
        ):
            assert said in await names["hand_in"](run.run_folder, prompt, (sample(0, "2"), bad))
        assert await names["hand_in"](run.run_folder, prompt, (sample(0, "2"), sample(1, "3"))) == ""
        taken = await asyncio.wait_for(run.take(), 120)
        assert [member.reward for member in taken.groups[0].members] == [1.0, 0.0]
        await run.trained(0)
        status = await run.status()
    assert status.refused_samples == 4
    assert status.groups["trained"] == 1
