"""Metrics to Weights & Biases, online or into RUN/wandb for a later `wandb sync`. The only file that imports wandb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import wandb

from asyncrl.config.run import RunConfig
from asyncrl.observe.samples import SampleRow


class WandbSink:
    """Logs to one wandb run, which goes by the name of ours."""

    def __init__(self, config: RunConfig, run_folder: Path) -> None:
        self._run = wandb.init(
            project=config.observe.wandb_project,
            name=config.name,
            dir=str(run_folder),
            mode="online" if config.observe.wandb == "online" else "offline",
            config=msgspec.to_builtins(config),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True),
        )

        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def write(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Log one step.

        Charts run over `version`, a value of ours: wandb's own step must not go backwards, and an evaluation of an earlier
        version may end later.
        """
        self._run.log({**values, "version": step, "time_s": time_s})

    def write_samples(self, step: int, time_s: float, rows: Sequence[SampleRow]) -> None:  # noqa: ARG002 - wandb keeps its own
        """Log a table."""
        table = wandb.Table(columns=list(rows[0].cells), data=[[*({**row.cells, "reward": row.reward}).values()] for row in rows])
        self._run.log({"samples": table, "version": step + 1})

    def close(self) -> None:
        """Hand everything over and end wandb's own process."""
        self._run.finish()
