"""Sampled accuracy and reward on held-out prompts: which generator gets a prompt, the results so far, and when all is done.

Evaluation samples use the same path as training samples (generator, reward worker) but never enter the ledger or the buffer;
their group ids are negative, so that they cannot be confused. Invariant: every prompt is pending, at one generator, being scored,
or scored. If a generator dies, its prompts become pending again; a sample that fails at a joined generator is given to one of the
run's own. Seeds do not depend on the version, so that two evaluations differ only by the weights. A sample is right if its rule
rewards, without penalties and reward models, sum to RIGHT_FROM or more; without rules there is no accuracy. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from asyncrl.config.reward import OverlongPenalty, reward_names
from asyncrl.config.run import RunConfig
from asyncrl.control.join import JOINED_PREFIX
from asyncrl.observe.steps import EvalReport
from asyncrl.schema.samples import (
    GroupWork,
    Prompt,
    Sample,
    Samples,
    SamplingParams,
    Score,
    ScoreRequest,
    derive_seed,
    ids_from_bytes,
)

RIGHT_FROM = 0.99


class Evaluation:
    """One pass over the held-out prompts under one version.

    Args:
        config: Gives the number of prompts, samples per prompt and sampling.
        prompts: The task's held-out prompts; the first `eval.num_prompts` are used.
        version: Generators must have at least this version live to take part.
        now: Clock seconds.
    """

    def __init__(self, config: RunConfig, prompts: Sequence[Prompt], version: int, now: float) -> None:
        self.version = version
        self.holders: dict[int, str] = {}
        """The generator that works on a prompt, by group id."""
        self._started_s = now
        self._by_group = {-1 - index: prompt for index, prompt in enumerate(prompts[: config.eval.num_prompts])}
        self._pending = deque(self._by_group)
        self._failed_at_guest: dict[int, set[int]] = {}
        """By group, members that failed at a joined generator; the run's own generators get them next."""
        self._unsampled = {group_id: set(range(config.eval.samples_per_prompt)) for group_id in self._by_group}
        self._unjudged = {group_id: set(members) for group_id, members in self._unsampled.items()}
        functions = zip(reward_names(config.reward), config.reward.functions, strict=True)
        self._verdict_weights = {
            name: each.weight for name, each in functions if each.weight > 0 and not isinstance(each, OverlongPenalty)
        }
        """Weights by name of the functions that judge an answer: all except penalties."""
        self._newest_version = -1
        self._rewards: list[float] = []
        self._num_right = self._num_failed = 0
        self._seed = derive_seed(config.seed, "evaluation")
        self._sampling = sampling_of(config, config.eval.temperature)

    @property
    def done(self) -> bool:
        """Return whether every sample is scored or failed."""
        return not any(self._unjudged.values())

    def next_work(self, generator: str) -> GroupWork | None:
        """Take the next pending prompt for this generator; None when there is none."""
        is_guest = generator.startswith(JOINED_PREFIX)
        group_id = next((each for each in self._pending if not (is_guest and each in self._failed_at_guest)), None)
        if group_id is None:
            return None
        self._pending.remove(group_id)
        self.holders[group_id] = generator
        members = tuple(sorted(self._unsampled[group_id]))
        return GroupWork(group_id, 1, self._by_group[group_id], members, self._sampling, self._seed, purpose="eval")

    def generator_lost(self, name: str) -> None:
        """Make a lost generator's prompts pending again."""
        lost = [group_id for group_id, holder in self.holders.items() if holder == name]
        self._pending.extend(group_id for group_id in lost if self._unsampled[group_id])
        for group_id in lost:
            del self.holders[group_id]

    def awaits(self, samples: Samples) -> bool:
        """Return whether no sample of these members has come yet."""
        return self._unsampled.get(samples.group_id, set()).issuperset(samples.indices)

    def take_samples(self, samples: Sequence[Sample]) -> ScoreRequest:
        """Return a request for the rewards of finished, awaited samples of one prompt."""
        group_id = samples[0].group_id
        self._unsampled[group_id].difference_update(sample.index for sample in samples)
        newest = (int(ids_from_bytes(sample.versions).max(initial=-1)) for sample in samples)
        self._newest_version = max(self._newest_version, *newest)
        return ScoreRequest.of(self._by_group[group_id], samples)

    def take_scores(self, group_id: int, scores: Sequence[Score]) -> None:
        """Count rewards; a reward with an error counts as a wrong answer."""
        for score in scores:
            if score.index in self._unjudged.get(group_id, ()):
                self._rewards.append(0.0 if score.error else score.reward)
                judged = sum(weight * score.parts.get(name, 0.0) for name, weight in self._verdict_weights.items())
                self._num_right += not score.error and judged >= RIGHT_FROM
                self._num_failed += bool(score.error)
                self._unsampled[group_id].discard(score.index)
                self._unjudged[group_id].discard(score.index)
        self._settle(group_id)

    def take_failure(self, group_id: int, index: int, generator: str) -> None:
        """Count a failed sample as a wrong answer; a failure at a joined generator is not counted."""
        if not generator.startswith(JOINED_PREFIX):
            self.take_scores(group_id, [Score(index, 0.0, error="it was not generated")])
        elif index in self._unjudged.get(group_id, ()):
            self._failed_at_guest.setdefault(group_id, set()).add(index)
            self._settle(group_id)

    def _settle(self, group_id: int) -> None:
        """Free a prompt's generator once nothing of it is in progress; hand out again members that failed at a joined one."""
        unjudged, holder = self._unjudged.get(group_id, set()), self.holders.get(group_id, JOINED_PREFIX)
        has_only_failed = unjudged == self._failed_at_guest.get(group_id, set()) and holder.startswith(JOINED_PREFIX)
        if has_only_failed or not unjudged:
            self.holders.pop(group_id, None)
            if unjudged and group_id not in self._pending:
                self._pending.append(group_id)

    def report(self, now: float) -> EvalReport:
        """Return the result; it has no accuracy if no rule judges."""
        count = max(len(self._rewards), 1)
        return EvalReport(
            version=self.version,
            accuracy=self._num_right / count if self._verdict_weights else None,
            num_samples=len(self._rewards),
            reward_mean=sum(self._rewards) / count,
            started_s=self._started_s,
            finished_s=now,
            newest_version=self._newest_version,
            num_failed=self._num_failed,
        )


def sampling_of(config: RunConfig, temperature: float | None = None) -> SamplingParams:
    """Return the run's sampling, with the temperature replaced if one is given."""
    sampling = config.generate.sampling
    asked = sampling.temperature if temperature is None else temperature
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens, temperature=asked, top_p=sampling.top_p, top_k=sampling.top_k,
        stop_token_ids=sampling.stop_token_ids,
    )  # fmt: skip
