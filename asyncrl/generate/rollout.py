"""Turns a group of work into samples: tokenise the prompt once, submit every member, send together what finishes together.

Also makes the configured engine and its tokenizer; only the engine that is chosen is imported. The model's own tokenizer encodes
prompts and decodes completions; the fake engine uses bytes instead. Completions are decoded once, for rewards and for people;
training uses the sampled ids and never this text.

Invariants:
- Every member of the work is in exactly one Samples or SampleFailure, whatever the prompt, the tokenizer or the engine does.
- The member `greedy_index` is sampled at temperature 0, all others with the sampling settings of the work.
- A sample's ids are those that the engine sampled.
- Members are submitted together, so that the engine prefills their prompt once.
- In a followed group, every token is sent as Progress before its sample is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.clock import Clock
from asyncrl.config.generate import (
    FakeEngineConfig,
    ReplayEngineConfig,
    TransformersEngineConfig,
    VLLMEngineConfig,
    VLLMServerEngineConfig,
)
from asyncrl.config.run import RunConfig
from asyncrl.errors import MOST_TRACE_CHARS, ConfigError, EngineDied, GenerationError, kind_of, trace_of
from asyncrl.generate.engine import Engine, EngineRequest, TokenStream
from asyncrl.schema.samples import (
    FinishReason,
    GroupWork,
    PreferenceAnswers,
    Progress,
    Prompt,
    SampleFailure,
    Samples,
    derive_seed,
    ids_from_bytes,
    ids_to_bytes,
    logprobs_to_bytes,
)


class TokenizerCodec:
    """The tokenizer in the model's folder, loaded when the first prompt needs it."""

    def __init__(self, model_folder: Path, *, trust_remote_code: bool = False, replays: bool = False) -> None:
        self._model_folder, self._replays = model_folder, replays
        self._trust_remote_code = trust_remote_code
        self._tokenizer: Any = None
        self._backend: Any = None
        """The tokenizer's Rust backend, used directly where the Python layer adds nothing: it takes a fifth of the time."""

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids: `token_ids` as given, `messages` through the chat template, or `text` through the tokenizer.

        Raises:
            GenerationError: The prompt cannot be tokenised.
        """
        if prompt.token_ids:
            return tuple(ids_from_bytes(prompt.token_ids).tolist())
        tokenizer = self._loaded()
        try:
            if prompt.messages:
                turns = [{"role": message.role, "content": message.content} for message in prompt.messages]
                ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
            elif self._backend is not None:
                ids = self._backend.encode(prompt.text).ids
            else:
                ids = tokenizer(prompt.text)["input_ids"]
        except Exception as error:
            raise GenerationError(f"prompt {prompt.prompt_id!r} cannot be tokenised: {type(error).__name__}: {error}") from error
        return tuple(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return a completion's text, without special tokens and with spaces unchanged.

        Raises:
            GenerationError: The tokenizer does not know one of the ids.
        """
        tokenizer, ids = self._loaded(), list(token_ids)
        try:
            if self._backend is not None:
                text: str = self._backend.decode(ids, skip_special_tokens=True)
            else:
                text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        except Exception as error:
            raise GenerationError(f"a completion cannot be turned into text: {type(error).__name__}: {error}") from error
        return text

    def answer(self, prompt: Prompt, index: int) -> tuple[int, ...]:
        """Return the token ids of the answer that member 0 (chosen) or 1 (rejected) replays; empty where the engine samples.

        Raises:
            GenerationError: The prompt is not from a preferences task, there is no such answer, or it cannot be tokenised.
        """
        if not self._replays:
            return ()
        try:
            answers = msgspec.json.decode(prompt.reference_json, type=PreferenceAnswers)
        except msgspec.MsgspecError as error:
            raise GenerationError(f"prompt {prompt.prompt_id!r} has no chosen and rejected answer to replay: {error}") from error
        if index > 1:
            raise GenerationError(f"prompt {prompt.prompt_id!r} has a chosen answer (0) and a rejected one (1), but none {index}")
        text, tokenizer = answers.rejected if index else answers.chosen, self._loaded()
        if tokenizer.eos_token_id is None:
            raise GenerationError(f"the tokenizer in {self._model_folder} has no end-of-sequence token")
        try:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:
            raise GenerationError(f"answer {text[:80]!r} cannot be tokenised: {type(error).__name__}: {error}") from error
        return (*ids, tokenizer.eos_token_id)  # as a model would have sampled it

    def end_ids(self) -> tuple[int, ...]:
        """Return the tokenizer's end-of-sequence token, if it has one. Raises GenerationError without a tokenizer."""
        end = self._loaded().eos_token_id
        return () if end is None else (end,)

    def _loaded(self) -> Any:  # noqa: ANN401 - transformers is untyped
        if self._tokenizer is None:
            modules = import_module("transformers")
            try:
                self._tokenizer = modules.AutoTokenizer.from_pretrained(
                    self._model_folder, local_files_only=True, trust_remote_code=self._trust_remote_code
                )
            except Exception as error:
                raise GenerationError(
                    f"cannot load a tokenizer from {self._model_folder}: {type(error).__name__}: {error}"
                ) from error
            if type(self._tokenizer) is modules.TokenizersBackend:
                self._backend = self._tokenizer.backend_tokenizer
                self._backend.no_truncation()
                self._backend.no_padding()
                self._backend.encode_special_tokens = self._tokenizer.split_special_tokens
        return self._tokenizer


@dataclass(frozen=True, slots=True)
class ByteCodec:
    """No tokenizer: one token per byte, modulo the vocabulary size; decoded text is the ids, separated by spaces."""

    _vocabulary_size: int

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return `token_ids` as given, or the bytes of the text or of all messages."""
        if prompt.token_ids:
            return tuple(ids_from_bytes(prompt.token_ids).tolist())
        text = "\n".join(message.content for message in prompt.messages) if prompt.messages else prompt.text
        return tuple(byte % self._vocabulary_size for byte in text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the ids as numbers, separated by spaces."""
        return " ".join(map(str, token_ids))


PromptCodec = TokenizerCodec | ByteCodec
"""Encodes prompts and decodes completions."""


@dataclass(slots=True)
class Rollout:
    """Turns work into samples, with an engine, a codec, and a function that sends results."""

    engine: Engine
    codec: PromptCodec
    clock: Clock
    generator: str
    """The generator's name, which is written into its samples."""
    send: Callable[[Samples | SampleFailure | Progress], Awaitable[None]]
    is_aborted: Callable[[GroupWork], bool] = lambda _: False
    """Whether a group was aborted; checked before each member, because the engine ignores aborts of requests that it does not
    have yet. An aborted member of a group for which this is False begins again."""
    num_tokens: int = 0
    """Tokens generated so far, including those of unfinished samples."""

    async def run_group(self, work: GroupWork) -> None:
        """Generate the members listed in `work` and send each result; return once the last result was passed to `send`.

        Raises:
            ConnectionClosed: From `send`; members still running are aborted, as on cancellation.
            EngineDied: The members do not count as failed; the group must be handed out again.
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
                    request = self._request(work, index, prompt_ids)
                    members.append(_Member(request, index, self.engine.submit(request, news)))
                except EngineDied:
                    raise
                except GenerationError as error:
                    await self.send(_failure(work, index, str(error), error))
            while members:
                await news.wait()
                news.clear()
                finished = list[_Member]()
                for member in tuple(members):
                    failure = self._take(work, member, news)
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

    def _request(self, work: GroupWork, index: int, prompt_ids: tuple[int, ...]) -> EngineRequest:
        sampling = msgspec.structs.replace(work.sampling, temperature=0.0) if index == work.greedy_index else work.sampling
        if isinstance(self.codec, TokenizerCodec):  # the model's files may name another token, or none
            sampling = msgspec.structs.replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *self.codec.end_ids()))
        return EngineRequest(
            request_id=request_id_of(work, index),
            prompt_ids=prompt_ids,
            sampling=sampling,
            seed=derive_seed(work.seed, work.group_id, index),
            group_key=f"{work.purpose}.g{work.group_id}",
            answer_ids=self.codec.answer(work.prompt, index) if isinstance(self.codec, TokenizerCodec) else (),
        )

    def _take(self, work: GroupWork, member: _Member, news: asyncio.Event) -> SampleFailure | None:
        """Take the member's new tokens; return its failure, if it has failed. Raises EngineDied."""
        try:
            while member.finish_reason is None and (chunk := member.stream.take()) is not None:
                self.num_tokens += len(chunk.token_ids)
                member.token_ids += chunk.token_ids
                member.logprobs += chunk.logprobs
                member.versions += chunk.versions
                member.finish_reason = chunk.finish_reason
            if member.finish_reason == "abort" and self.is_aborted(work):
                return _failure(work, member.index, f"aborted after {len(member.token_ids)} tokens")
            if member.finish_reason == "abort":
                member.stream, member.finish_reason = self.engine.submit(member.request, news), None
                member.token_ids, member.logprobs, member.versions, member.num_told = [], [], [], 0
            elif member.finish_reason is not None:
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

    request: EngineRequest
    index: int
    stream: TokenStream
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """None while the sample is being generated."""
    text: str = ""
    num_told: int = 0
    """Number of tokens that were sent as Progress."""

    def progress(self, work: GroupWork) -> Progress | None:
        """Return the tokens that were not sent as Progress yet, if there are any."""
        start, self.num_told = self.num_told, len(self.token_ids)
        if start == self.num_told:
            return None
        ids, logprobs = ids_to_bytes(self.token_ids[start:]), logprobs_to_bytes(self.logprobs[start:])
        return Progress(work.group_id, self.index, work.attempt, start, ids, logprobs)


def request_id_of(work: GroupWork, index: int) -> str:
    """Return the id under which the engine knows this member in this attempt."""
    return f"{work.purpose}.g{work.group_id}.{index}.{work.attempt}"


def _failure(work: GroupWork, index: int, reason: str, error: Exception | None = None) -> SampleFailure:
    kind, trace = (kind_of(error), trace_of(error)) if error is not None else ("aborted", "")
    return SampleFailure(work.group_id, index, work.attempt, "generate", reason[:MOST_TRACE_CHARS], work.purpose, kind, trace)


ENGINE_MODULES = {
    "transformers": "asyncrl.generate.transformers.engine",
    "vllm": "asyncrl.generate.vllm.embedded",
    "vllm_server": "asyncrl.generate.vllm.server",
    "fake": "asyncrl.generate.fake",
    "replay": "asyncrl.generate.fake",
}


def _build(config: RunConfig, folder: Path, clock: Clock) -> Engine:
    """Import the engine's modules, which may take seconds, and make the engine."""
    settings, lora, trusts = config.generate.engine, config.learner.lora, config.trusts_code
    fp32_head = config.model.fp32_head
    if settings.needs_folder and not folder.is_dir():
        raise GenerationError(
            f"the model's folder {folder} is not on this machine: share it with the learner's machine, or copy it here and set "
            "generate.model_folder (or `asyncrl join --model FOLDER`)"
        )
    module: Any = import_module(ENGINE_MODULES[settings.kind])
    engine: Engine
    match settings:
        case FakeEngineConfig() | ReplayEngineConfig():
            engine = module.FakeEngine(settings, clock)
        case TransformersEngineConfig():
            engine = module.TransformersEngine(settings, folder, trust_remote_code=trusts, fp32_head=fp32_head, lora=lora)
        case VLLMEngineConfig() | VLLMServerEngineConfig():
            is_server = isinstance(settings, VLLMServerEngineConfig)
            backend = module.VLLMServer(settings, clock) if is_server else module.EmbeddedVLLM(settings, fp32_head=fp32_head)
            made = import_module("asyncrl.generate.vllm.engine").VLLMEngine
            engine = made(backend, folder, trust_remote_code=trusts, lora=lora)
    return engine


async def start_engine(
    config: RunConfig, model_folder: Path, clock: Clock, generator: str = "generator-0"
) -> tuple[Engine, PromptCodec]:
    """Make the engine configured for this generator and start it.

    Args:
        config: The run's config.
        model_folder: The model's folder on the learner's machine.
        clock: For engines that need one.
        generator: This process's name.

    Raises:
        ConfigError: generate.engine.url has no server for this generator.
        GenerationError: The model is not on this machine, or the engine does not start.
    """
    config, folder = with_own_server(config, generator), Path(config.generate.model_folder or model_folder)
    settings = config.generate.engine
    engine = await asyncio.to_thread(_build, config, folder, clock)
    codec: PromptCodec = TokenizerCodec(folder, trust_remote_code=config.trusts_code, replays=settings.replays)
    if isinstance(settings, FakeEngineConfig):
        codec = ByteCodec(settings.vocabulary_size)
    await engine.start()
    return engine, codec


def with_own_server(config: RunConfig, generator: str) -> RunConfig:
    """Return the config with only this generator's server, chosen by the number at the end of the generator's name."""
    engine = config.generate.engine
    if not isinstance(engine, VLLMServerEngineConfig):
        return config
    number = generator.rpartition("-")[2]
    index = int(number) if number.isdecimal() else 0
    if index >= len(engine.urls):
        raise ConfigError(f"generate.engine.url names {len(engine.urls)} servers; {generator} is without one: add a URL")
    own = msgspec.structs.replace(engine, url=engine.urls[index])
    return msgspec.structs.replace(config, generate=msgspec.structs.replace(config.generate, engine=own))
