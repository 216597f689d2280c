"""The samples themselves, in memory, from the moment they are held until their step is taken.

Invariant: payloads are held of exactly the live groups (running, scoring, ready), at most (eta + 1) x B of them by admission.
Those of a step taken go to buffer/step_payloads.py. Called by buffer/buffer.py; filled by buffer/restore.py after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.schema.samples import Prompt, Sample, Score, ScoredGroup, ScoredSample, ScoreRequest


@dataclass(slots=True)
class HeldGroup:
    """Payloads of a live group: generated members, of which some are scored."""

    prompt: Prompt
    samples: dict[int, Sample] = field(default_factory=dict)
    scored: dict[int, ScoredSample] = field(default_factory=dict)


@dataclass(slots=True)
class Payloads:
    """Everything held, by group."""

    groups: dict[int, HeldGroup] = field(default_factory=dict)

    def open(self, group_id: int, prompt: Prompt) -> HeldGroup:
        """Start holding a group."""
        held = self.groups[group_id] = HeldGroup(prompt)
        return held

    def score(self, score: Score) -> None:
        """Join a held sample and its reward."""
        held = self.groups[score.group_id]
        held.scored[score.index] = ScoredSample(held.samples[score.index], score.reward, score.parts, score.reference_logprobs)

    def drop_member(self, group_id: int, index: int) -> None:
        """Let go of a failed member; its group may be over already."""
        if held := self.groups.get(group_id):
            held.samples.pop(index, None)

    def drop_group(self, group_id: int) -> Prompt:
        """Let go of a dropped or failed group; return its prompt, which may be issued again."""
        return self.groups.pop(group_id).prompt

    def take(self, group_ids: tuple[int, ...]) -> tuple[ScoredGroup, ...]:
        """Give these groups away, failed members left out."""
        return tuple(self._scored(group_id) for group_id in group_ids)

    def num_tokens(self, group_id: int, index: int) -> int:
        """Return T of a held member."""
        return self.groups[group_id].samples[index].num_tokens

    def score_request(self, group_id: int, index: int) -> ScoreRequest:
        """Return the message that asks for a held member's score."""
        held = self.groups[group_id]
        sample = held.samples[index]
        return ScoreRequest(
            group_id,
            index,
            sample.attempt,
            held.prompt,
            sample.text,
            sample.finish_reason,
            sample.num_tokens,
            sample.purpose,
        )

    def _scored(self, group_id: int) -> ScoredGroup:
        held = self.groups.pop(group_id)
        return ScoredGroup(group_id, held.prompt, tuple(held.scored[index] for index in sorted(held.scored)))
