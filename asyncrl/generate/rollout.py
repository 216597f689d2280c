"""From a group of work to its samples: tokenise once, submit every member, hand on together what finishes together.

Invariants:
- Every member of the work is in exactly one Samples or SampleFailure, whatever the prompt, the tokenizer or the engine does.
- The member `greedy_index` is drawn at temperature 0, all others as the work says.
- A sample's ids are those the engine sampled; its text is only for rewards and people.
- Members are submitted together, so that the engine prefills their prompt once.
- Of a group that is followed, every token is told before its sample is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from asyncrl.clock import Clock
from asyncrl.errors import MOST_TRACE_CHARS, EngineDied, GenerationError, kind_of, trace_of
from asyncrl.generate.engine import Engine, EngineRequest, TokenStream
from asyncrl.generate.tokenizer import PromptCodec
from asyncrl.schema.samples import (
    FinishReason,
    GroupWork,
    Progress,
    SampleFailure,
    Samples,
    derive_seed,
    ids_to_bytes,
    logprobs_to_bytes,
)

SendResult = Callable[[Samples | SampleFailure | Progress], Awaitable[None]]


@dataclass(slots=True)
class Rollout:
    """What turns work into samples: an engine, a codec, and where results go."""

    engine: Engine
    codec: PromptCodec
    clock: Clock
    generator: str
    """Name that samples carry."""
    send: SendResult
    is_aborted: Callable[[GroupWork], bool] = lambda _: False
    """Asked before a member begins: an engine forgets an abort of what it was not given yet."""
    num_tokens: int = 0
    """That came so far, those of unfinished samples too."""

    async def run_group(self, work: GroupWork) -> None:
        """Generate the members that `work` names and send each result; returns once the last one was handed to `send`.

        Raises:
            ConnectionClosed: From `send`; members still running are aborted then, and likewise on cancellation.
            EngineDied: No member failed by it: the group is to be handed out again.
        """
        try:
            prompt_ids = self.codec.encode(work.prompt)
        except GenerationError as error:
            for index in work.indices:
                await self.send(_failure(work, index, str(error), error))
            return
        news, members, started_s = asyncio.Event(), list[_Member](), self.clock.now()
        try:
            for index in work.indices:
                if self.is_aborted(work):
                    await self.send(_failure(work, index, "aborted before it began"))
                    continue
                try:
                    request = _request(work, index, prompt_ids, self.codec.answer(work.prompt, index))
                    members.append(_Member(index, self.engine.submit(request, news)))
                except EngineDied:
                    raise
                except GenerationError as error:
                    await self.send(_failure(work, index, str(error), error))
            while members:
                await news.wait()
                news.clear()
                finished = list[_Member]()
                for member in tuple(members):
                    failure = self._take(work, member)
                    if work.is_followed and (progress := member.progress(work)) is not None:
                        await self.send(progress)
                    if failure is not None or member.finish_reason is not None:
                        members.remove(member)
                    if failure is not None:
                        await self.send(failure)
                    elif member.finish_reason is not None:
                        finished.append(member)
                if finished:
                    await self.send(self._samples(work, ids_to_bytes(prompt_ids), started_s, finished))
        finally:
            for member in members:
                member.stream.close()

    def abort_group(self, work: GroupWork) -> None:
        """End the group's members; each becomes a SampleFailure."""
        for index in work.indices:
            self.engine.abort(request_id_of(work, index))

    def _take(self, work: GroupWork, member: _Member) -> SampleFailure | None:
        """Take what came for a member; return why it has failed, if it has. Raises EngineDied."""
        try:
            while member.finish_reason is None and (chunk := member.stream.take()) is not None:
                self.num_tokens += len(chunk.token_ids)
                member.token_ids += chunk.token_ids
                member.logprobs += chunk.logprobs
                member.versions += chunk.versions
                member.finish_reason = chunk.finish_reason
            if member.finish_reason == "abort":
                return _failure(work, member.index, f"aborted after {len(member.token_ids)} tokens")
            if member.finish_reason is not None:
                member.text = self.codec.decode(member.token_ids)
        except EngineDied:
            raise
        except GenerationError as error:
            return _failure(work, member.index, str(error), error)
        return None

    def _samples(self, work: GroupWork, prompt_ids: bytes, started_s: float, members: Sequence[_Member]) -> Samples:
        return Samples(
            group_id=work.group_id,
            attempt=work.attempt,
            generator=self.generator,
            prompt_ids=prompt_ids,
            indices=tuple([member.index for member in members]),
            lengths=tuple([len(member.token_ids) for member in members]),
            token_ids=ids_to_bytes([token for member in members for token in member.token_ids]),
            logprobs=logprobs_to_bytes([logprob for member in members for logprob in member.logprobs]),
            versions=ids_to_bytes([version for member in members for version in member.versions]),
            finish_reasons=tuple([member.finish_reason or "stop" for member in members]),
            texts=tuple([member.text for member in members]),
            started_s=started_s,
            finished_s=self.clock.now(),
            purpose=work.purpose,
        )


@dataclass(slots=True)
class _Member:
    """A sample that is being generated."""

    index: int
    stream: TokenStream
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """None while it goes on."""
    text: str = ""
    num_told: int = 0
    """Tokens that were told as they came."""

    def progress(self, work: GroupWork) -> Progress | None:
        """Return the tokens that nobody was told yet, if there are any."""
        start, self.num_told = self.num_told, len(self.token_ids)
        if start == self.num_told:
            return None
        ids, logprobs = ids_to_bytes(self.token_ids[start:]), logprobs_to_bytes(self.logprobs[start:])
        return Progress(work.group_id, self.index, work.attempt, start, ids, logprobs)


def request_id_of(work: GroupWork, index: int) -> str:
    """Return the id under which the engine knows this member in this attempt."""
    return f"{work.purpose}.g{work.group_id}.{index}.{work.attempt}"


def _request(work: GroupWork, index: int, prompt_ids: tuple[int, ...], answer_ids: tuple[int, ...]) -> EngineRequest:
    sampling = msgspec.structs.replace(work.sampling, temperature=0.0) if index == work.greedy_index else work.sampling
    return EngineRequest(
        request_id=request_id_of(work, index),
        prompt_ids=prompt_ids,
        sampling=sampling,
        seed=derive_seed(work.seed, work.group_id, index),
        group_key=f"{work.purpose}.g{work.group_id}",
        answer_ids=answer_ids,
    )


def _failure(work: GroupWork, index: int, reason: str, error: Exception | None = None) -> SampleFailure:
    kind, trace = (kind_of(error), trace_of(error)) if error is not None else ("aborted", "")
    return SampleFailure(work.group_id, index, work.attempt, "generate", reason[:MOST_TRACE_CHARS], work.purpose, kind, trace)
