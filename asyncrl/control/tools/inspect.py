"""`asyncrl inspect`: the ledger as text. Read-only; works during a run and after it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.buffer.ledger.reader import GroupStory, LedgerReader, SampleStory
from asyncrl.errors import ConfigError
from asyncrl.observe.samples import SampleRow, read_samples
from asyncrl.schema.samples import ids_from_bytes, logprobs_from_bytes

TOKENS_SHOWN = 64


def inspect_run(run_folder: Path, *, sample: str = "", prompt: str = "", as_json: bool = False) -> str:
    """Return the ledger as text: an overview, or the history of one sample or group.

    Args:
        run_folder: The run.
        sample: `g17.3` or `17.3` for a sample, `g17` or `17` for a group; empty for the overview.
        prompt: Only prompts whose id contains this.
        as_json: One JSON object instead of text.

    Raises:
        ConfigError: `sample` has another form.
        LedgerError: The ledger, group or sample does not exist.
    """
    reader = LedgerReader(run_folder)
    if sample:
        parts = re.fullmatch(r"g?([0-9]{1,18})(?:\.([0-9]{1,18}))?", sample)
        if parts is None:
            raise ConfigError(f"--sample takes g17.3 (a sample) or g17 (a group), got {sample!r}")
        group_id, index = parts.groups()
        story = reader.group(int(group_id)) if index is None else reader.sample(int(group_id), int(index))
        if as_json:
            return msgspec.json.encode(story).decode()
        one = None if index is None else (int(group_id), int(index))
        kept = (row for row in read_samples(run_folder) if (row.group_id, row.index) == one) if one else iter(())
        return _story_text(story, next(kept, None))
    states, versions, steps = reader.counts(), reader.versions(), reader.steps(last=10)
    prompts = [row for row in reader.prompts(limit=1_000_000 if prompt else 20) if prompt in row.prompt_id]
    if as_json:
        return msgspec.json.encode({"states": states, "versions": versions, "steps": steps, "prompts": prompts}).decode()
    sections = [
        f"{sum(row.groups for row in states)} groups issued",
        _table(("state", "reason", "groups"), [(row.state, row.reason, row.groups) for row in states]),
        _table(
            ("oldest version", "samples", "tokens", "mean reward"),
            [(row.version, row.samples, row.tokens, row.mean_reward) for row in versions[-20:]],
        ),
        _table(
            ("step", "state", "groups", "max staleness"),
            [(row.step, row.state, len(row.group_ids), row.max_staleness) for row in steps],
        ),
        _table(
            ("prompt", "groups", "trained", "dropped", "failed", "mean reward", "mean tokens"),
            [
                (row.prompt_id, row.groups, row.trained, row.dropped, row.failed, row.mean_reward, row.mean_tokens)
                for row in prompts
            ],
        ),
    ]
    return "\n\n".join(sections)


def _story_text(story: GroupStory | SampleStory, kept: SampleRow | None) -> str:
    group = story.group if isinstance(story, SampleStory) else story
    lines = [
        f"group {group.group_id} ({group.prompt.prompt_id}): {group.state}{f', {group.reason}' if group.reason else ''}",
        f"issued to {group.generator} at version {group.version}, attempt {group.attempt}"
        + (f", trained at step {group.step}" if group.step is not None else "")
        + (f", replaces group {group.replaces}" if group.replaces is not None else ""),
        f"prompt: {group.prompt.text or ' | '.join(f'{turn.role}: {turn.content}' for turn in group.prompt.messages)}",
        f"reference answer: {group.prompt.answer}",
        "",
        *(f"{event.at_s:.3f}  {event.what:12} {event.detail}" for event in group.events),
        "",
        _table(
            ("sample", "state", "reward", "tokens", "versions", "finish", "generator", "failure"),
            [
                (f"g{row.group_id}.{row.index}", row.state, row.reward, row.num_tokens,
                 f"{row.oldest_version}-{row.newest_version}", row.finish_reason, row.generator, row.failure)
                for row in group.samples
            ],
        ),
    ]  # fmt: skip
    if not isinstance(story, SampleStory):
        return "\n".join(lines)
    sample, row = story.sample, story.row
    rewards = f"rewards: {row.parts or row.reward}"
    if sample is None:
        why = row.failure or "trained before the oldest checkpoint"
        text = f"completion: {kept.text!r}" if kept else "completion: not among the samples that observe.samples keeps as text"
        lines += ["", f"g{row.group_id}.{row.index}: its tokens are not kept ({why})", text, rewards]
        return "\n".join(lines)
    ids, logprobs = ids_from_bytes(sample.token_ids), logprobs_from_bytes(sample.logprobs)
    versions = ids_from_bytes(sample.versions)
    rows = [
        (position, token, f"{logprob:.4f}", version)
        for position, (token, logprob, version) in enumerate(zip(ids[:TOKENS_SHOWN], logprobs, versions, strict=False))
    ]
    lines += ["", f"completion: {sample.text!r}", rewards, _table(("t", "token", "logprob", "version"), rows)]
    lines += [f"... {len(ids) - TOKENS_SHOWN} more"] if len(ids) > TOKENS_SHOWN else []
    return "\n".join(lines)


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    shown = [
        ["-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value) for value in row] for row in rows
    ]
    cells = [header, *shown]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    return "\n".join("  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)).rstrip() for line in cells)
