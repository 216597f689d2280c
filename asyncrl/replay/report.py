"""`asyncrl replay`: a recorded run gone through again, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from asyncrl.config.load import pairs_of
from asyncrl.errors import ConfigError
from asyncrl.observe.decisions.journal import RECORD_FOLDER, STEPS_FOLDER
from asyncrl.replay.decisions import replay_decisions


def replay_run(run_folder: Path, until: int | None, instead: Sequence[str], say: Callable[[str], None]) -> bool:
    """Replay what a run recorded; return whether everything was as in the run.

    Args:
        run_folder: Of the run.
        until: The last optimizer step to replay; None: all.
        instead: Fields of the config, `algorithm.loss=gspo`: asked of the batch of step `until`, which is then not trained.
        say: Told each line as soon as it is known.

    Raises:
        ConfigError: There is no recording, or not what is asked for.
    """
    steps = sorted((run_folder / RECORD_FOLDER / STEPS_FOLDER).glob("step-*.bin"))
    if instead and (until is None or not steps):
        raise ConfigError("--with asks of one recorded batch: give --until STEP, of a run with observe.record = 'batches'")
    lives = replay_decisions(run_folder, until)
    for life in lives:
        say(life.text)
    same = not any(life.difference for life in lives)
    if not steps:
        return same
    replay = import_module("asyncrl.replay.learner").LearnerReplay(run_folder)  # loads torch
    made = replay.run(until - 1 if instead and until is not None else until)
    say(f"learner: {made.num_equal} versions from their batches: the same weights as in the run")
    if made.fault:
        say(f"  it ends here: {made.fault}")
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
