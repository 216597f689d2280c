"""Which version sampled each token of one request that a vLLM server generates.

Pieces of a stream arrive some time after they were sampled, so the moment of arrival says little around an update. Where the
server says at the end which weights sampled what (spans, 0.32 and later), tokens that arrive after an update are held until then;
before the first update they are handed on at once, since only one version can have made them. Where it does not say (0.26 to
0.31), the engine waits for the streams to fall silent during the pause, and the tokens counted then are the boundary.

Invariants: versions never decrease; what was handed on is never contradicted, or the request fails. Pure: no clock, no IO.
Called by generate/vllm_server_engine.py, one per request.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.errors import GenerationError
from asyncrl.generate.engine import TokenChunk
from asyncrl.generate.vllm_server_wire import Choice, VersionSpan
from asyncrl.schema.samples import FinishReason

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class VersionLabels:
    """Versions under the names that the server is given: with a mark of our own, so that foreign weights are noticed."""

    def __init__(self, mark: str) -> None:
        self._prefix = f"{mark}."

    def of(self, version: int) -> str:
        """Return the label of a version."""
        return f"{self._prefix}{version}"

    def version_of(self, label: str) -> int:
        """Return the version.

        Raises:
            GenerationError: The weights are not ours.
        """
        number = label.removeprefix(self._prefix)
        if number == label:
            raise GenerationError(
                f"the server sampled with weights labelled {label!r}, which this generator did not load: it was restarted, or "
                "another generator or program drives it too (give each generator a server of its own)"
            )
        return int(number)


class VersionedTokens:
    """The tokens of one request so far."""

    def __init__(self, version: int, labels: VersionLabels | None, *, is_greedy: bool = False) -> None:
        """Begin.

        Args:
            version: That samples now.
            labels: How the server's spans name versions; None where it sends none.
            is_greedy: Temperature 0: every logprob is 0.
        """
        self._version = version
        self._labels = labels
        self._is_greedy = is_greedy
        self._given: list[int] = []
        self._held_ids: list[int] = []
        self._held_logprobs: list[float] = []
        self._is_certain = True

    @property
    def num_tokens(self) -> int:
        """Tokens that arrived."""
        return len(self._given) + len(self._held_ids)

    def note_update(self, version: int) -> None:
        """Take note that from now on `version` samples; earlier tokens may still be on their way if the server sends spans."""
        self._version = version
        self._is_certain = self._labels is None

    def take(self, choice: Choice) -> TokenChunk | None:
        """Return what can be handed on now that a piece arrived; None: nothing yet.

        Raises:
            GenerationError: The piece contradicts itself or what was handed on.
        """
        logprobs = choice.sampled_logprobs()
        self._held_ids += choice.token_ids or ()
        self._held_logprobs += [0.0] * len(logprobs) if self._is_greedy else logprobs
        reason = choice.finish_reason
        if reason is not None and reason not in _REASONS:
            raise GenerationError(f"the server ended the request with {reason!r}")
        if reason is not None:
            return self._hand_on(self._final_versions(choice.weight_versions), _REASONS[reason])
        if self._is_certain and self._held_ids:
            return self._hand_on([self._version] * len(self._held_ids), None)
        return None

    def end(self) -> TokenChunk:
        """Return the end of a stream that stopped without a reason (aborted on the server): what is uncertain is dropped."""
        self._held_ids, self._held_logprobs = [], []
        return TokenChunk((), (), (), "abort")

    def _final_versions(self, spans: Sequence[VersionSpan] | None) -> list[int]:
        """Return the held tokens' versions, now that all is known."""
        if self._labels is None or (spans is None and not self.num_tokens):
            return [self._version] * len(self._held_ids)
        versions = [self._labels.version_of(span.version) for span in spans or () for _ in range(span.start, span.end)]
        if len(versions) != self.num_tokens:
            raise GenerationError(f"the server named the weights of {len(versions)} of {self.num_tokens} tokens")
        num_given = len(self._given)
        if versions[:num_given] != self._given or versions != sorted(versions):
            raise GenerationError("the server's account of which weights sampled which token contradicts what was streamed")
        return versions[num_given:]

    def _hand_on(self, versions: list[int], reason: FinishReason | None) -> TokenChunk:
        chunk = TokenChunk(tuple(self._held_ids), tuple(self._held_logprobs), tuple(versions), reason)
        self._given += versions
        self._held_ids, self._held_logprobs = [], []
        return chunk
