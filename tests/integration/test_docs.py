"""What the docs show runs as it stands: Python snippets compile, TOML snippets are TOML, those of running.md are run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch

import asyncrl
from asyncrl.config.load import dump_config
from tests.integration.conftest import NO_MODEL

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
pytestmark = pytest.mark.timeout(240)


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
    config = tmp_path / "c.toml"
    config.write_text(dump_config(tiny(eval__at_start=False, eval__at_end=False, generate__engine=NO_MODEL, num_steps=50)))
    names = shown("step.version == 20")
    text = (
        names["text"].replace("configs/quickstart.toml", str(config)).replace("== 20", "== 2").replace("asyncio.run(main())", "")
    )
    exec(text, names)
    await names["main"]()
    assert (tmp_path / "tiny" / "checkpoints").is_dir()
    assert len(capsys.readouterr().out.splitlines()) == 3


async def test_the_snippet_of_an_outside_learner(tiny):
    names = shown("WeightPublisher")
    exec(names["text"], names)
    engine = {"kind": "fake", "num_slots": 16, "mean_tokens": 4.0, "max_sequence_tokens": 16}
    config = tiny(num_steps=3, eval__at_start=False, eval__at_end=False, generate__engine=engine)
    trained = []
    await names["train"](config, torch.nn.Linear(4, 4), "nothing-to-load", trained.append)
    assert [taken.step for taken in trained] == [0, 1, 2]


async def test_the_snippet_that_hands_in_samples(tiny):
    names = shown("ExternalGroup")
    exec(names["text"], names)
    settings = {"learner__kind": "external", "eval__at_start": False, "eval__at_end": False, "generate__engine": NO_MODEL}
    sample = asyncrl.Sample(
        0, 0, 0, asyncrl.ids_to_bytes([5, 6]), asyncrl.ids_to_bytes([7]), asyncrl.logprobs_to_bytes([-0.5]),
        asyncrl.ids_to_bytes([9]), "stop", "2", "mine", 0.0, 1.0,
    )  # fmt: skip
    async with asyncrl.Run(tiny(**settings)) as run:
        refused = await names["hand_in"](run.run_folder, asyncrl.Prompt("mine/1", text="1+1=", answer="2"), (sample,))
    assert "version" in refused
