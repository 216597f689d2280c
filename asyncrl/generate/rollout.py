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
from dataclasses import dataclass

import msgspec

from asyncrl.clock import Clock
from asyncrl.errors import EngineDied, GenerationError, kind_of, trace_of
from asyncrl.generate.engine import Engine, EngineRequest, TokenChunk
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
        async with asyncio.TaskGroup() as members:
            for index in work.indices:
                members.create_task(self._run_member(work, index, prompt_ids), name=request_id_of(work, index))

    def abort_group(self, work: GroupWork) -> None:
        """End the group's members; each becomes a SampleFailure."""
        for index in work.indices:
            self.engine.abort(request_id_of(work, index))

    async def _run_member(self, work: GroupWork, index: int, prompt_ids: tuple[int, ...]) -> None:
        if self.is_aborted(work):
            await self.send(_failure(work, index, "aborted before it began"))
            return
        started_s = self.clock.now()
        try:
            answer_ids = self.codec.answer(work.prompt, index)
            chunk = await self._complete(_request(work, index, prompt_ids, answer_ids))
            text = self.codec.decode(chunk.token_ids)
        except EngineDied:
            raise
        except GenerationError as error:
            await self.send(_failure(work, index, str(error), error))
            return
        if chunk.finish_reason is None or chunk.finish_reason == "abort":
            await self.send(_failure(work, index, f"aborted after {len(chunk.token_ids)} tokens"))
            return
        await self.send(
            Sample(
                group_id=work.group_id,
                index=index,
                attempt=work.attempt,
                prompt_ids=ids_to_bytes(list(prompt_ids)),
                token_ids=ids_to_bytes(list(chunk.token_ids)),
                logprobs=logprobs_to_bytes(list(chunk.logprobs)),
                versions=ids_to_bytes(list(chunk.versions)),
                finish_reason=chunk.finish_reason,
                text=text,
                generator=self.generator,
                started_s=started_s,
                finished_s=self.clock.now(),
                purpose=work.purpose,
            )
        )

    async def _complete(self, request: EngineRequest) -> TokenChunk:
        """Return the whole completion as one chunk."""
        token_ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        finish_reason = None
        async for chunk in self.engine.submit(request):
            self.count_tokens(len(chunk.token_ids))
            token_ids.extend(chunk.token_ids)
            logprobs.extend(chunk.logprobs)
            versions.extend(chunk.versions)
            finish_reason = chunk.finish_reason
        return TokenChunk(tuple(token_ids), tuple(logprobs), tuple(versions), finish_reason)


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
