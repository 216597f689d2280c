"""`asyncrl replay`: a recorded run gone through again, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from asyncrl.config.load import pairs_of
from asyncrl.errors import ConfigError
from asyncrl.observe.decisions.journal import RECORD_FOLDER, STEPS_FOLDER
from asyncrl.replay.decisions import replay_decisions


def replay_run(
    run_folder: Path, until: int | None, instead: Sequence[str], say: Callable[[str], None], num_samples: int = 0
) -> bool:
    """Replay what a run recorded; return whether everything was as in the run.

    Args:
        run_folder: Of the run.
        until: The last optimizer step to replay; None: all.
        instead: Fields of the config, `algorithm.loss=gspo`: asked of the batch of step `until`, which is then not trained.
        say: Told each line as soon as it is known.
        num_samples: How many samples to draw and generate again.

    Raises:
        ConfigError: There is no recording, or not what is asked for.
    """
    steps = sorted((run_folder / RECORD_FOLDER / STEPS_FOLDER).glob("step-*.bin"))
    if instead and (until is None or not steps):
        raise ConfigError("--with asks of one recorded batch: give --until STEP, of a run with observe.record = 'batches'")
    if num_samples and (instead or not steps):
        raise ConfigError("--samples is for a run with observe.record = 'batches', and without --with")
    lives = replay_decisions(run_folder, until)
    for life in lives:
        say(life.text)
    same = not any(life.difference for life in lives)
    if not steps:
        return same
    replay = import_module("asyncrl.replay.learner").LearnerReplay(run_folder)  # loads torch
    samples = import_module("asyncrl.replay.samples").SampleReplay(replay, num_samples, until) if num_samples else None
    on_step = (lambda step: samples.keep(step + 1)) if samples is not None else (lambda _: None)
    made = replay.run(until - 1 if instead and until is not None else until, on_step)
    say(f"learner: {made.num_equal} versions from their batches: the same weights as in the run")
    if made.fault:
        say(f"  it ends here: {made.fault}")
        return False
    if samples is not None:
        again = samples.run()
        say(
            f"samples: {again.num_equal} with {again.num_tokens} tokens, {again.num_swapped} of them over a change of weights: "
            "the same tokens and log-probabilities as in the run"
        )
        if again.difference:
            say(f"  the first that differs: {again.difference}")
            return False
    if instead:
        found = replay.whatif({field: value for field, value, _ in pairs_of(instead)})
        ess = " -> ".join("none" if value is None else f"{value:.3f}" for value in found.ess)
        say(
            f"step {found.step} with {', '.join(instead)}: cosine of the gradients {found.cosine:.4f}, "
            f"norm {found.norms[0]:.4g} -> {found.norms[1]:.4g}, ESS {ess}\n"
            "  This is one batch of the run as it was, under its weights then. It is not another run."
        )
    return same
