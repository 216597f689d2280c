"""From a group of work to its samples: tokenise once, submit every member, hand each result on as it finishes.

Invariants:
- Every member of the work gives exactly one Sample or SampleFailure, whatever the prompt, the tokenizer or the engine does.
- The member `greedy_index` is drawn at temperature 0, all others as the work says.
- A sample's ids are those the engine sampled; its text is only for rewards and people.
- Members are submitted together, so that the engine prefills their prompt once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from asyncrl.clock import Clock
from asyncrl.errors import EngineDied, GenerationError, kind_of, trace_of
from asyncrl.generate.engine import Engine, EngineRequest, TokenStream
from asyncrl.generate.tokenizer import PromptCodec
from asyncrl.schema.samples import GroupWork, Sample, SampleFailure, derive_seed, ids_to_bytes, logprobs_to_bytes

SendResult = Callable[[Sample | SampleFailure], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Rollout:
    """What turns work into samples: an engine, a codec, and where results go."""

    engine: Engine
    codec: PromptCodec
    clock: Clock
    generator: str
    """Name that samples carry."""
    send: SendResult
    count_tokens: Callable[[int], None] = lambda _: None
    """Told of new tokens as they come, long before their sample is finished."""
    is_aborted: Callable[[GroupWork], bool] = lambda _: False
    """Asked before a member begins: an engine forgets an abort of what it was not given yet."""

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
        news, members = asyncio.Event(), list[_Member]()
        try:
            for index in work.indices:
                if self.is_aborted(work):
                    await self.send(_failure(work, index, "aborted before it began"))
                    continue
                try:
                    request = _request(work, index, prompt_ids, self.codec.answer(work.prompt, index))
                    members.append(_Member(index, self.clock.now(), self.engine.submit(request, news)))
                except EngineDied:
                    raise
                except GenerationError as error:
                    await self.send(_failure(work, index, str(error), error))
            while members:
                await news.wait()
                news.clear()
                for member in tuple(members):
                    result = self._result(work, prompt_ids, member)
                    if result is not None:
                        members.remove(member)
                        await self.send(result)
        finally:
            for member in members:
                member.stream.close()

    def abort_group(self, work: GroupWork) -> None:
        """End the group's members; each becomes a SampleFailure."""
        for index in work.indices:
            self.engine.abort(request_id_of(work, index))

    def _result(self, work: GroupWork, prompt_ids: tuple[int, ...], member: _Member) -> Sample | SampleFailure | None:
        """Take what came for a member; return its sample once it is over. Raises EngineDied."""
        try:
            finish_reason = None
            while finish_reason is None and (chunk := member.stream.take()) is not None:
                self.count_tokens(len(chunk.token_ids))
                member.token_ids += chunk.token_ids
                member.logprobs += chunk.logprobs
                member.versions += chunk.versions
                finish_reason = chunk.finish_reason
            if finish_reason is None:
                return None
            if finish_reason == "abort":
                return _failure(work, member.index, f"aborted after {len(member.token_ids)} tokens")
            text = self.codec.decode(member.token_ids)
        except EngineDied:
            raise
        except GenerationError as error:
            return _failure(work, member.index, str(error), error)
        return Sample(
            group_id=work.group_id,
            index=member.index,
            attempt=work.attempt,
            prompt_ids=ids_to_bytes(prompt_ids),
            token_ids=ids_to_bytes(member.token_ids),
            logprobs=logprobs_to_bytes(member.logprobs),
            versions=ids_to_bytes(member.versions),
            finish_reason=finish_reason,
            text=text,
            generator=self.generator,
            started_s=member.started_s,
            finished_s=self.clock.now(),
            purpose=work.purpose,
        )


@dataclass(slots=True)
class _Member:
    """A sample that is being generated."""

    index: int
    started_s: float
    stream: TokenStream
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


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
    return SampleFailure(work.group_id, index, work.attempt, "generate", reason, work.purpose, kind, trace)
