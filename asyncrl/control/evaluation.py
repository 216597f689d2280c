"""Sampled accuracy and reward on held-out prompts: which prompt goes where, what came back, when it is done.

Evaluation samples take the same road as training samples (generator, reward worker) but never enter the ledger or the buffer;
their group ids are negative, so that nothing confuses them. Invariant: every prompt is pending, out at one generator, being
scored, or judged; a generator that dies gives its prompts back, and what fails at a joined generator goes to one of the run's
own. The seeds do not depend on the version, so that two evaluations differ by the weights alone. A sample is right where the
rules that judge it, without penalties and reward models, come to RIGHT_FROM or more; where no rule judges there is no accuracy.
Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from asyncrl.config.reward import verdict_weights
from asyncrl.config.run import RunConfig
from asyncrl.control.join import JOINED_PREFIX
from asyncrl.observe.steps import EvalReport
from asyncrl.schema.samples import GroupWork, Prompt, Sample, SampleFailure, SamplingParams, Score, ScoreRequest, derive_seed

RIGHT_FROM = 0.99


class Evaluation:
    """One pass over the held-out prompts under one version.

    Args:
        config: For the number of prompts, samples per prompt and sampling.
        prompts: The task's held-out prompts; the first `eval.num_prompts` are used.
        version: Generators must have at least this version live to take part.
        now: Clock seconds.
    """

    def __init__(self, config: RunConfig, prompts: Sequence[Prompt], version: int, now: float) -> None:
        self.version = version
        self.holders: dict[int, str] = {}
        """The generator that is at work on a prompt, by group id."""
        self._started_s = now
        self._by_group = {-1 - index: prompt for index, prompt in enumerate(prompts[: config.eval.num_prompts])}
        self._pending = deque(self._by_group)
        self._failed_at_guest: dict[int, set[int]] = {}
        """Of each group: members that failed at a joined generator, which the run's own generators are given."""
        self._missing = {group_id: set(range(config.eval.samples_per_prompt)) for group_id in self._by_group}
        self._verdict_weights = verdict_weights(config.reward)
        self._rewards: list[float] = []
        self._num_right = 0
        self._seed = derive_seed(config.seed, "evaluation")
        self._sampling = sampling_of(config, config.eval.temperature)

    @property
    def done(self) -> bool:
        """Return whether every sample has been judged or has failed."""
        return not any(self._missing.values())

    def next_work(self, generator: str) -> GroupWork | None:
        """Take the next pending prompt for this generator; None when there is none."""
        is_guest = generator.startswith(JOINED_PREFIX)
        group_id = next((each for each in self._pending if not (is_guest and each in self._failed_at_guest)), None)
        if group_id is None:
            return None
        self._pending.remove(group_id)
        self.holders[group_id] = generator
        members = tuple(sorted(self._missing[group_id]))
        return GroupWork(group_id, 1, self._by_group[group_id], members, self._sampling, self._seed, purpose="eval")

    def generator_lost(self, name: str) -> None:
        """Hand its prompts out again."""
        lost = [group_id for group_id, holder in self.holders.items() if holder == name]
        self._pending.extend(group_id for group_id in lost if self._missing[group_id])
        for group_id in lost:
            del self.holders[group_id]

    def take_sample(self, sample: Sample) -> ScoreRequest | None:
        """Turn a finished sample into a request for its reward; None where it is not awaited."""
        if sample.index not in self._missing.get(sample.group_id, ()):
            return None
        return ScoreRequest(
            sample.group_id, sample.index, sample.attempt, self._by_group[sample.group_id], sample.text,
            sample.finish_reason, sample.num_tokens, purpose="eval",
        )  # fmt: skip

    def take_verdict(self, verdict: Score | SampleFailure, generator: str = "") -> None:
        """Count a reward, or a failure as a wrong answer; one at a joined generator counts for nothing."""
        group_id = verdict.group_id
        awaited = self._missing.get(group_id, set())
        if verdict.index not in awaited:
            return
        is_again = isinstance(verdict, SampleFailure) and generator.startswith(JOINED_PREFIX)
        if is_again:
            self._failed_at_guest.setdefault(group_id, set()).add(verdict.index)
        else:
            awaited.discard(verdict.index)
        if awaited == self._failed_at_guest.get(group_id, set()):  # Nothing else of the group is under way.
            self.holders.pop(group_id, None)
            if awaited and group_id not in self._pending:
                self._pending.append(group_id)
        if is_again:
            return
        if isinstance(verdict, SampleFailure) or verdict.error:
            self._rewards.append(0.0)
            return
        self._rewards.append(verdict.reward)
        judged = sum(weight * verdict.parts.get(name, 0.0) for name, weight in self._verdict_weights.items())
        self._num_right += judged >= RIGHT_FROM

    def report(self, now: float) -> EvalReport:
        """Return the result; without rules that judge, no accuracy."""
        count = max(len(self._rewards), 1)
        return EvalReport(
            version=self.version,
            accuracy=self._num_right / count if self._verdict_weights else None,
            num_samples=len(self._rewards),
            reward_mean=sum(self._rewards) / count,
            started_s=self._started_s,
            finished_s=now,
        )


def sampling_of(config: RunConfig, temperature: float | None = None) -> SamplingParams:
    """Return the run's sampling, at another temperature where one is given."""
    sampling = config.generate.sampling
    asked = sampling.temperature if temperature is None else temperature
    return SamplingParams(max_new_tokens=sampling.max_new_tokens, temperature=asked, top_p=sampling.top_p, top_k=sampling.top_k)
