"""One request's group: what is told of it while it is generated, and when it is whole."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from asyncrl.endpoint.openai_schema import AnswerWriter, Choice
from asyncrl.endpoint.text import TextStream, tool_calls
from asyncrl.errors import RunError
from asyncrl.groups import GroupStream
from asyncrl.schema.samples import Progress, Sample, ScoredGroup, ids_from_bytes, logprobs_from_bytes


class Following:
    """A request's group, and how it is written.

    Invariant: the tokens that were told are those of the sample that is trained, or it ends with an error: a generator that was
    lost leaves its group to another, which may sample other tokens.
    """

    def __init__(self, writer: AnswerWriter, stream: GroupStream, tokenizer: Any, has_tools: bool) -> None:  # noqa: ANN401
        self.writer, self.stream = writer, stream
        self._tokenizer, self._has_tools = tokenizer, has_tools
        self._texts: dict[int, TextStream] = {}
        """By member, of which tokens were told."""

    def choices(self, group: ScoredGroup) -> list[Choice]:
        """Return the choices of an answer that is told at once."""
        choices = []
        for number, member in enumerate(group.members):
            sample = member.sample
            text, calls = tool_calls(sample.text) if self._has_tools else (sample.text, [])
            tokens = self._tokens(ids_from_bytes(sample.token_ids).tolist(), sample.logprobs)
            choices.append(Choice(index=number, text=text, calls=calls, tokens=tokens, finish_reason=sample.finish_reason))
        return choices

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a stream until the group can be had.

        Raises:
            RunError: Another generator has sampled other tokens.
        """
        async with contextlib.aclosing(self.stream.progress()) as pieces:
            async for piece in pieces:
                if (choice := self._chunk(piece)) is not None:
                    yield self.writer.chunk(choice)

    def last_chunks(self, group: ScoredGroup) -> Iterator[dict[str, Any]]:
        """Yield the last event of each choice.

        Raises:
            RunError: A sample is not what was told of it.
        """
        for number, member in enumerate(group.members):
            yield self.writer.chunk(self._last_chunk(number, member.sample))

    def _chunk(self, piece: Progress) -> Choice | None:
        """Return what is new of a member's tokens; nothing where a later attempt says again what was told."""
        is_first, text, ids = piece.index not in self._texts, self._text(piece.index), ids_from_bytes(piece.token_ids).tolist()
        known = text.token_ids[piece.start : piece.start + len(ids)]
        if piece.start > len(text.token_ids) or known != ids[: len(known)]:
            raise RunError("a generator was lost, and another one has sampled other tokens; ask again")
        if not (new := ids[len(known) :]):
            return None
        tokens = self._tokens(new, piece.logprobs[4 * len(known) :])
        return Choice(index=piece.index, text=text.add(new), tokens=tokens, is_first=is_first)

    def _last_chunk(self, number: int, sample: Sample) -> Choice:
        is_first, text = sample.index not in self._texts, self._text(sample.index)
        if text.token_ids != ids_from_bytes(sample.token_ids).tolist():
            raise RunError("a generator was lost, and another one has sampled other tokens; ask again")
        rest, calls = text.end(sample.text)
        return Choice(index=number, text=rest, calls=calls, finish_reason=sample.finish_reason, is_first=is_first)

    def _text(self, index: int) -> TextStream:
        def decode(ids: Sequence[int]) -> str:
            text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            return text

        if index not in self._texts:
            self._texts[index] = TextStream(decode, has_tools=self._has_tools)
        return self._texts[index]

    def _tokens(self, ids: Sequence[int], logprobs: bytes) -> list[tuple[int, str, float]]:
        texts = (self._tokenizer.decode([token]) if self.writer.has_logprobs else "" for token in ids)
        return list(zip(ids, texts, logprobs_from_bytes(logprobs).tolist(), strict=True))


def versions_of(group: ScoredGroup) -> str:
    """Return the versions that sampled a group, in words."""
    versions = [int(version) for member in group.members for version in ids_from_bytes(member.sample.versions)]
    return f"version {min(versions)}" if min(versions) == max(versions) else f"versions {min(versions)} to {max(versions)}"
