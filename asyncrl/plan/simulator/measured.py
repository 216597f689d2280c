"""Derives a scenario from a real run's spans: lengths, decode speed, rewards, steps and weight transfers."""

from __future__ import annotations

import bisect
import heapq
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from asyncrl.buffer.open import limits_of
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.observe.spans import GENERATE, SCORE, STEP, SWAP, WAIT, Span, read_spans
from asyncrl.observe.steps import read_events, read_steps
from asyncrl.plan.simulator.scenario import WARM_UP, Distribution, Scenario, fixed, recorded

MOST_VALUES = 4096
"""Maximum number of values of a measured distribution; more values are thinned out evenly."""
SHORTEST_S = 1e-6
PAUSE_STEPS, SHORTEST_PAUSE_S = 10, 5.0
"""If nothing begins or ends for so many usual steps and so many seconds, the run was paused, or stopped and resumed."""


def scenario_of_run(run_folder: Path) -> Scenario:
    """Return the scenario of a run.

    Lengths and step times keep their order: with long tails the few longest samples determine the step times, and a random draw
    would give other samples.

    Raises:
        ConfigError: The folder has no run, a run with too few steps, or one whose phases take turns.
    """
    config = load_config(run_folder / "config.toml")
    if config.placement.takes_turns:
        raise ConfigError(
            f"{run_folder} has placement.kind = {config.placement.kind!r}, whose phases take turns on one device; a simulation "
            "generates and trains at the same time: use a run with 'disaggregated' or 'async_hybrid'"
        )
    working_s, spans = working_time(run_folder), defaultdict[str, list[Span]](list)
    for item in read_spans(run_folder):
        spans[item.name].append(msgspec.structs.replace(item, start_s=working_s(item.start_s), end_s=working_s(item.end_s)))
    steps = sorted(spans[STEP], key=lambda item: item.start_s)
    samples = _each_sample([item for item in spans[GENERATE] if item.attributes.get("purpose", "train") == "train"])
    if len(steps) < 5 or not samples:
        raise ConfigError(f"{run_folder} has {len(steps)} steps and {len(samples)} samples: use a run of at least 5 steps")
    num_slots, group_size = config.generate.engine.slots, config.algorithm.members_per_group
    sequence_s, decode_s, decode_s_per_sequence = fit_decode(samples, _started_in_slots(samples, num_slots))
    tokens = {(item.attributes["group"], item.attributes["index"]): float(item.attributes["tokens"]) for item in samples}
    usual = statistics.median(tokens.values())
    groups = sorted({int(group) for group, _ in tokens})  # in a long run the spans of the first groups were removed
    members = itertools.product(range(groups[0], groups[-1] + 1), range(group_size))
    # From the start of one step to the start of the next, without the wait for its batch. With an outside learner: from taking a
    # batch to reporting it as trained.
    is_outside = config.learner.kind != "builtin"
    waited = {item.attributes["step"]: item.end_s - item.start_s for item in spans[WAIT]}
    step_s = (
        [step.end_s - step.start_s for step in steps]
        if is_outside
        else [
            after.start_s - step.start_s - waited.get(after.attributes["step"], 0.0) for step, after in itertools.pairwise(steps)
        ]
    )
    # From a step's end until a generator has verified the version's bytes, if the generator fetched that version.
    done_s = {item.attributes["version"]: item.end_s for item in steps}
    swaps = [(item, float(item.attributes["swap_ms"]) / 1e3) for item in spans[SWAP]]
    taken = [(item, swap_s) for item, swap_s in swaps if item.attributes["version"] in done_s]
    # Half the time from a sample's end to the start of its scoring, which is two message delays.
    began = {(item.attributes["group"], item.attributes["index"]): item.start_s for item in _each_sample(spans[SCORE])}
    ended = {(item.attributes["group"], item.attributes["index"]): item.end_s for item in samples}
    gaps = [began[key] - end_s for key, end_s in ended.items() if key in began]
    return Scenario(
        num_workers=config.generate.num_workers,
        num_slots=num_slots,
        lengths=recorded([tokens.get(member, usual) for member in members]),
        decode_s=decode_s,
        decode_s_per_sequence=decode_s_per_sequence,
        sequence_s=sequence_s,
        groups_per_step=config.algorithm.groups_per_step,
        group_size=group_size,
        max_staleness=config.buffer.max_staleness,
        ahead="as_needed" if limits_of(config).as_needed else "as_allowed",
        policy=config.buffer.policy,
        max_running_groups=config.buffer.max_running_groups,
        reward_s=_measured([item.end_s - item.start_s for item in spans[SCORE]]),  # with the wait for other samples
        step_s=recorded([max(SHORTEST_S, seconds) for seconds in step_s]),
        steps_ahead=1 if is_outside else 2,
        sync_s=_measured([max(0.0, item.end_s - swap_s - done_s[item.attributes["version"]]) for item, swap_s in taken]),
        swap_s=statistics.median([swap_s for _, swap_s in swaps] or [0.0]),
        hop_s=max(0.0, statistics.median(gaps)) / 2 if gaps else 0.0,
        num_steps=len(steps),
        seed=config.seed,
    )


def _each_sample(items: Sequence[Span]) -> list[Span]:
    """Return a span for each sample: split spans of members that ended together, which have the sum of their tokens."""
    found, placed = list[Span](), Counter[float | str]()
    for item in items:
        group, number = item.attributes["group"], int(item.attributes["samples"])
        tokens = float(item.attributes.get("tokens", 0.0)) / number
        for index in range(placed[group], placed[group] + number):
            found.append(msgspec.structs.replace(item, attributes=item.attributes | {"index": index, "tokens": tokens}))
        placed[group] += number
    return found


def working_time(run_folder: Path) -> Callable[[float], float]:
    """Return a function from a time in a run to its seconds of work, without intervals in which the run was paused or stopped.

    In such an interval no span began or ended, for at least PAUSE_STEPS usual steps and SHORTEST_PAUSE_S. Or the run ended, and
    was resumed and began to generate or train; spans of its start are no work.
    """
    spans = list(read_spans(run_folder))
    moments = sorted({moment for item in spans for moment in (item.start_s, item.end_s)})
    lives = [event.time_s for event in read_events(run_folder) if (event.kind, event.subject) == ("phase", "starting")]
    working_from_s = [item.start_s for item in spans if item.name in {GENERATE, STEP}]
    for begin_s in lives:
        first_s = min((start_s for start_s in working_from_s if start_s > begin_s), default=begin_s)
        moments = [moment for moment in moments if not begin_s < moment < first_s]
    done_s = sorted(item.end_s for item in spans if item.name == STEP)
    usual_s = statistics.median([after - before for before, after in itertools.pairwise(done_s)] or [0.0])
    limit_s = max(SHORTEST_PAUSE_S, PAUSE_STEPS * usual_s)
    pauses = [
        (before, after) for before, after in itertools.pairwise(moments)
        if after - before > limit_s or bisect.bisect(lives, before) < bisect.bisect(lives, after)
    ]  # fmt: skip
    return lambda moment: moment - sum(min(moment, after) - before for before, after in pauses if moment > before)


def fit_decode(samples: Sequence[Span], started_s: Sequence[float]) -> tuple[float, float, float]:
    """Return (sequence_s, decode_s, decode_s_per_sequence), none below zero: by least squares, then scaled to the total time.

    A sequence takes `sequence_s + tokens x (decode_s + (n - 1) x decode_s_per_sequence)` seconds, where n run on its generator in
    the middle of it. A term that would be below zero is left out and the others are fitted again.
    """
    tokens = np.array([max(1.0, float(item.attributes["tokens"])) for item in samples])
    starts, ends = np.array(started_s), np.array([item.end_s for item in samples])
    seconds, middles = np.maximum(ends - starts, SHORTEST_S), (starts + ends) / 2
    processes, beside = np.array([item.process for item in samples]), np.zeros(len(samples))
    for process in set(processes):
        mine = processes == process
        running = np.searchsorted(np.sort(starts[mine]), middles[mine], "right")
        beside[mine] = np.maximum(running - np.searchsorted(np.sort(ends[mine]), middles[mine], "right") - 1, 0)
    columns = np.stack([np.ones_like(tokens), tokens, tokens * beside], axis=1)
    kept = [0, 1, 2]
    while True:
        # Relative errors: long sequences must not outweigh short ones. By themselves they give too short times for noisy ones.
        found = np.linalg.lstsq(columns[:, kept] / seconds[:, None], np.ones(len(tokens)), rcond=None)[0]
        if len(kept) == 1 or found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    found *= seconds.sum() / (columns[:, kept] @ found).sum()
    terms = dict.fromkeys(range(3), 0.0) | dict(zip(kept, map(float, found), strict=True))
    return max(terms[0], 0.0), max(terms[1], SHORTEST_S), max(terms[2], 0.0)


def _started_in_slots(samples: Sequence[Span], num_slots: int) -> list[float]:
    """Return when each sample got its slot: a sample's span starts at the request to the engine."""
    ends: dict[str, list[float]] = defaultdict(list)
    started = [0.0] * len(samples)
    for index in sorted(range(len(samples)), key=lambda number: samples[number].start_s):
        item = samples[index]
        running = ends[item.process]
        while running and running[0] <= item.start_s:
            heapq.heappop(running)
        started[index] = heapq.heappop(running) if len(running) >= num_slots else item.start_s
        heapq.heappush(running, item.end_s)
    return started


def _measured(values: Sequence[float]) -> Distribution:
    return Distribution("measured", values=tuple(values[:: -(-len(values) // MOST_VALUES)])) if values else fixed(0.0)


def real_figures(run_folder: Path) -> tuple[float, float]:
    """Return (steps/s, mean staleness) of a run, without its pauses and, as in a simulation, without its warm-up."""
    steps, working_s = read_steps(run_folder), working_time(run_folder)
    first = int(WARM_UP * len(steps))
    seconds = working_s(steps[-1].time_s) - working_s(steps[first].time_s)
    counted = steps[first + 1 :]
    return len(counted) / seconds, statistics.fmean(report.staleness_mean for report in counted)
