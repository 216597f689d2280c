"""A sweep's file: which cells it makes, in which order, and what it refuses."""

from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.sweep.grid import load_sweep

SWEEPS = sorted(Path(__file__).resolve().parents[3].glob("experiments/staleness/*.toml"))
ETA = '[[axes]]\nfield = "buffer.max_staleness"\nvalues = [0, 2]\n'


@pytest.fixture
def sweep(tmp_path):
    """Load a sweep of this text over the quickstart."""

    def load(text: str, base: str = 'base = "quickstart"\n'):
        (tmp_path / "sweep.toml").write_text(base + text)
        return load_sweep(tmp_path)

    return load


def test_cells_are_runs_of_the_base_config_seed_by_seed_in_an_order_that_the_seed_decides(sweep, tmp_path):
    found = sweep(f'seeds = 3\nset = {{ num_steps = 7, "learner.learning_rate" = 0.1 }}\n{ETA}')
    assert [cell.seed for cell in found.cells] == [0, 0, 1, 1, 2, 2]
    assert {cell.config.buffer.max_staleness for cell in found.cells[:2]} == {0, 2}
    one = found.cells[0].config
    assert (one.num_steps, one.learner.learning_rate, one.folder) == (7, 0.1, str(tmp_path / "cells"))
    assert len({cell.id for cell in found.cells}) == 6
    assert found.plan.arms == ("max_staleness=0", "max_staleness=2")
    assert found.plan.baseline == "max_staleness=0"
    other = load_sweep(tmp_path, tmp_path / "again.jsonl")
    assert (found.results.name, other.cells_folder.name, other.cells[0].settings) == (
        "results.jsonl", "cells-again", found.cells[0].settings,
    )  # fmt: skip
    named = sweep('metrics = ["reward"]\nsame_settings = true\n[[axes]]\nname = "x"\nchoices = { reward = {}, other = {} }\n')
    assert named.plan.arms == ("reward", "other")
    text = f'seeds = 20\n{ETA}[[axes]]\nfield = "algorithm.group_size"\nvalues = [4, 8]\n'
    found = sweep(text)
    orders = {tuple(cell.arm for cell in found.cells[first : first + 4]) for first in range(0, 80, 4)}
    assert len(orders) > 5
    assert all(len(set(order)) == 4 for order in orders)
    assert sweep(text).cells == found.cells


@pytest.mark.parametrize(("text", "said"), [
    ("seed = 3\n", "unknown field `seed`; known are base, name"),
    ('[[axes]]\nfield = "buffer.max_stale"\nvalues = [1]\n', "cell max_stale=1: .*unknown field `max_stale`"),
    ('metrics = ["seconds_to_bar"]\n', "seconds_to_bar needs a bar, as `bar = 0.8`"),
    ('[[axes]]\nfield = "buffer.max_staleness"\nvalues = [1, 1]\n', "max_staleness=1 is there twice"),
    ("seeds = [1, 2, 1]\n", "1 is there twice"),
    ("bar = 0.5\nwindow = 20\nset = { num_steps = 7 }\n", "cell base: .* 20 steps .*num_steps = 7: set a smaller"),
    ('metrics = ["accuracy", "bias/lengths"]\n', "no step has a metric bias/lengths; there are seconds_to_bar"),
    ('metrics = ["eval/reward_mean", "warm_start/loss", "process/idle_s", "process/generated_tokens/generator-0"]\n',
     "no step has a metric eval/reward_mean, warm_start/loss, process/idle_s; there"),
    ('[[axes]]\nfield = "eval.at_end"\nvalues = [true, false]\n', "cell at_end=False: the metric accuracy needs eval.at_end"),
    ('[[axes]]\nname = "x"\nchoices = { a = {}, b = { "reward.functions" = [{ kind = "answer_match", weight = 0.0 }] } }\n',
     "cell b: .* a reward function that judges"),
    ('[[axes]]\nname = "x"\nchoices = { a = {}, b = {} }\n', "a and b are the same settings under two names; `same_settings"),
    (f'baseline = "max_staleness=1"\n{ETA}', "'max_staleness=1' is no arm; arms are max_staleness=0; max_staleness=2"),
    ('[[axes]]\nfield = "seed"\nvalues = [1]\n', "axis 1: the sweep itself sets seed"),
    ('[[axes]]\nfield = "num_steps"\n', "axis 1 takes either field and values, or name and choices"),
    ('[[axes]]\nfield = "buffer.max_staleness"\nvalues = [-1]\n', "cell max_staleness=-1"), ("seeds = 0\n", "seeds"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_runs(sweep, text, said):
    with pytest.raises(ConfigError, match=said):
        sweep(text)


def test_the_sweep_that_the_docs_show_loads(sweep, tmp_path):
    page = (Path(__file__).resolve().parents[3] / "docs" / "experiments.md").read_text(encoding="utf-8")
    (tmp_path / "slow.toml").write_text("[learner]\nlearning_rate = 1e-5\n")
    shown, external = (part.partition("```")[0] for part in page.split("```toml\n")[1:])
    found = sweep(shown + external, base="")
    assert (found.plan.baseline, len(found.plan.arms)) == ("max_staleness=0, slow", 7)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_sweeps_of_the_repository_have_seeds_enough_to_tell_something(path):
    assert load_sweep(path).plan.smallest_p < 0.05
