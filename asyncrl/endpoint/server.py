"""An OpenAI-compatible server: clients query the policy of a session, reward the answers later, and the session trains on them.

Each request is one group: `n` choices of one prompt, which hold a place under the staleness bound until they are trained. The
trained tokens are those that the engine sampled: a prompt is tokenized once, an answer never. Only rewarded answers are trained.
An answer is released if its client disconnects, if it is too old, or if another request needs its place before it has a reward;
a later reward for it is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from asyncrl.algorithms.screening import Screen
from asyncrl.clock import SystemClock
from asyncrl.control.api import read_body
from asyncrl.endpoint.answers import Answers
from asyncrl.endpoint.following import Following, versions_of
from asyncrl.endpoint.openai_schema import (
    SAMPLING,
    AnswerWriter,
    ChatAsked,
    CompletionAsked,
    RefusedError,
    Rewarded,
    decoded,
    error_body,
    parsed,
    turns_of,
)
from asyncrl.errors import AsyncRLError, ConfigError, LearnerError, RunError, RunLostError
from asyncrl.groups import to_its_end
from asyncrl.schema.samples import ChatMessage, Prompt, ScoredGroup, ids_to_bytes
from asyncrl.session import Session

MOST_BODY_BYTES = 4 << 20
UNREAD_S = 60.0
"""A client that reads nothing for this time counts as disconnected."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger(__name__)


class Endpoint:
    """OpenAI's HTTP API over a session; use it as an async context manager inside the session's.

    Args:
        session: An open session. Its config determines the sampling. Its reward functions are not used: call `reward`.
        host: Address to listen on; for clients on other machines put a TLS proxy in front of it.
        port: Port to listen on; 0: a free port.
        api_key: The key that clients must send; None: a new key.
        unrewarded_s: Seconds that an answer waits for its rewards if other requests need its place; if none does, it waits until
            it is too old.
        ignored: Sampling fields, for example `{"temperature"}`, that clients may set without effect: the run's own values apply.
            Other sampling fields are refused if they differ from the run's.

    Raises:
        ConfigError: A name in `ignored` is unknown, `api_key`, `port` or `unrewarded_s` is invalid, or the algorithm drops groups
            by their rewards or lengths (`dynamic_sampling`, DPO, `mask_truncated`) or needs a greedy sample (`remax`).

    Example:
        >>> async with asyncrl.Endpoint(session) as endpoint:  # doctest: +SKIP
        ...     client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    """

    def __init__(
        self,
        session: Session,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        api_key: str | None = None,
        unrewarded_s: float = 60.0,
        ignored: Collection[str] = (),
    ) -> None:
        if unknown := sorted(set(ignored) - set(SAMPLING)):
            raise ConfigError(f"ignored may have {', '.join(SAMPLING)}; got {unknown}")
        if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable()):
            raise ConfigError("api_key must be printable ASCII characters, one or more")
        screen = Screen.of(session.config.algorithm)
        if screen.drop_equal or screen.preference is not None:
            why = "drop groups by their rewards, but rewards of an endpoint arrive later"
            raise ConfigError(f"algorithm.dynamic_sampling and kind = 'dpo' {why}: take neither")
        if screen.mask_truncated:
            raise ConfigError("algorithm.mask_truncated drops a request whose choices are all cut off: set it to false")
        if screen.greedy_index >= 0:
            why = "needs a greedy sample in each group, and a request's choices have none"
            raise ConfigError(f"algorithm.advantage = 'remax' {why}: choose another, 'rloo' say")
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"port must be 0 to 65535, got {port}")
        self.base_url = ""
        """The URL for clients while it is open, `http://HOST:PORT/v1`."""
        self.api_key = api_key or secrets.token_urlsafe(32)
        self._session, self._host, self._port, self._ignored = session, host, port, frozenset(ignored)
        self._answers, self._clock = Answers(session, unrewarded_s), SystemClock()
        self._thread = ThreadPoolExecutor(1, "asyncrl-endpoint")
        """Tokenizes prompts, since a long prompt takes seconds."""
        self._runner: web.AppRunner | None = None
        self._forgetting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        _ = self._session.tokenizer  # it is open
        app = web.Application(middlewares=[self._guard], client_max_size=MOST_BODY_BYTES)
        app.add_routes([
            web.get("/v1/models", self._models),
            web.get("/v1/models/{name:.*}", self._models),
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._complete),
            web.post("/v1/rewards", self._reward),
        ])
        self._runner = runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)

        async def listen() -> None:
            await runner.setup()
            await web.TCPSite(runner, self._host, self._port).start()

        try:
            await to_its_end(listen())  # an interrupted start would leave an open socket without an owner
        except BaseException as error:
            await runner.cleanup()
            if not isinstance(error, OSError):
                raise
            raise RunError(f"cannot listen at {self._host}:{self._port}: {error.strerror or error}") from error
        port = runner.addresses[0][1]
        self.base_url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}/v1"
        self._forgetting = asyncio.get_running_loop().create_task(self._answers.forget(), name="endpoint")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.base_url = ""
        await to_its_end(self._close())

    async def _close(self) -> None:
        try:
            if self._forgetting is not None:
                self._forgetting.cancel()
                await asyncio.wait([self._forgetting])
        finally:
            if self._runner is not None:
                await self._runner.cleanup()
            self._thread.shutdown(wait=False, cancel_futures=True)
            await self._answers.close()

    def reward(self, answer_id: str, rewards: Sequence[float]) -> None:
        """Set the rewards of an answer's choices; one of the next steps trains it.

        Args:
            answer_id: The `id` of the answer.
            rewards: One per choice, in order. A second call before training replaces the first.

        Raises:
            RunError: The id is unknown, or the answer can no longer be trained; the message says why.
            LearnerError: There is not one reward per choice, or a reward is not a number from -1e9 to 1e9.
        """
        self._answers.reward(answer_id, rewards)

    def batches(self) -> AsyncIterator[list[ScoredGroup]]:
        """Yield the groups of each step as soon as enough answers are rewarded, oldest first; train them before asking for more.

        Groups that are not trained by the next request give their places back. It ends after the session's `num_steps` steps.
        """
        return self._answers.batches()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Require the key, and return errors in the form that OpenAI's clients read."""
        try:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if hmac.compare_digest(given, f"Bearer {self.api_key}".encode()):
                return await handler(request)
            refused = RefusedError(401, "the api_key is not the endpoint's", "invalid_api_key")
        except ConnectionError:
            raise
        except web.HTTPException as error:
            refused = RefusedError(error.status, error.text or error.reason, "invalid_request")
        except Exception as error:  # noqa: BLE001 - said to the client and the log
            refused = _as_refusal(error)
        body = msgspec.json.encode(error_body(refused))
        headers = {"x-should-retry": "false"} if refused.status < 500 else {}
        return web.Response(status=refused.status, body=body, content_type="application/json", headers=headers)

    # -- routes ----------------------------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.StreamResponse:
        config, name = self._session.config, request.match_info.get("name")
        length = config.generate.engine.max_sequence_tokens
        own = {"id": config.name, "object": "model", "created": 0, "owned_by": "asyncrl", "max_model_len": length}
        if name is not None and name != config.name:
            raise RefusedError(404, f"there is no model {name[:80]!r}, only {config.name!r}", "model_not_found", "model")
        return web.json_response({"object": "list", "data": [own]} if name is None else own)

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        asked: Rewarded = decoded(await read_body(request, MOST_BODY_BYTES), Rewarded)
        try:
            self.reward(asked.id, asked.rewards)
        except LearnerError as error:
            raise RefusedError(400, str(error), "invalid_value", "rewards") from error
        except RunError as error:
            is_over = bool(self._answers.why_over(asked.id))
            raise RefusedError(410 if is_over else 404, str(error), "answer_gone" if is_over else "not_found", "id") from error
        return web.json_response({"id": asked.id, "object": "reward", "state": "waits for a step"})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked: CompletionAsked = self._parsed(await read_body(request, MOST_BODY_BYTES), CompletionAsked)
        said = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
        texts = [one for one in said if isinstance(one, str)]
        if texts and len(said) > 1:
            raise RefusedError(400, "one prompt a request, a text or a list of token ids", "invalid_value", "prompt")
        ids = [one for one in said if isinstance(one, int)]
        if texts:
            ids = await self._tokenized(lambda tokenizer: tokenizer(texts[0])["input_ids"], "prompt")
        prompt, has_logprobs = Prompt("", text="".join(texts)), asked.logprobs is not None
        return await self._answer(request, asked, prompt, ids, asked.max_tokens, has_logprobs=has_logprobs)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked: ChatAsked = self._parsed(await read_body(request, MOST_BODY_BYTES), ChatAsked)
        turns = turns_of(asked.messages)
        tools = asked.tools if asked.tool_choice != "none" else None
        most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        ids = await self._tokenized(lambda tokenizer: _templated(tokenizer, turns, tools), "messages")
        prompt = Prompt("", messages=tuple(ChatMessage(turn["role"], turn["content"]) for turn in turns))
        return await self._answer(request, asked, prompt, ids, most, has_logprobs=bool(asked.logprobs), has_tools=bool(tools))

    async def _tokenized(self, work: Callable[[Any], list[int]], param: str) -> list[int]:
        """Tokenize a prompt outside the event loop."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._session.tokenizer)
        except AsyncRLError:
            raise
        except Exception as error:
            why = f"the model's tokenizer does not take this: {type(error).__name__}: {error}"
            raise RefusedError(400, why[:1000], "invalid_value", param) from error

    def _parsed(self, body: bytes, kind: type[Any]) -> Any:  # noqa: ANN401
        sampling = self._session.config.generate.sampling
        own = {name: float(getattr(sampling, name)) for name in ("temperature", "top_p", "top_k")}
        return parsed(body, kind, own, self._ignored)

    async def _answer(
        self,
        request: web.Request,
        asked: ChatAsked | CompletionAsked,
        prompt: Prompt,
        prompt_ids: Sequence[int],
        most_tokens: int | None,
        *,
        has_logprobs: bool,
        has_tools: bool = False,
    ) -> web.StreamResponse:
        """Request a group, and answer with it."""
        config, where = self._session.config, "messages" if isinstance(asked, ChatAsked) else "prompt"
        most = min(most_tokens or config.generate.sampling.max_new_tokens, config.generate.sampling.max_new_tokens)
        room = config.generate.engine.max_sequence_tokens - len(prompt_ids)
        if not prompt_ids or max(prompt_ids) >= len(self._session.tokenizer) or min(prompt_ids) < 0:
            raise RefusedError(400, "the prompt is empty, or has ids that are no tokens", "invalid_value", where)
        if most_tokens is not None and most_tokens < 1:
            raise RefusedError(400, f"max_tokens is {most_tokens}, and must be at least 1", "invalid_value", "max_tokens")
        if room < (1 if most_tokens is None else most):
            limit = f"generate.engine.max_sequence_tokens ({len(prompt_ids) + room})"
            why = f"the prompt has {len(prompt_ids)} tokens, and {limit} leaves {max(room, 0)} for the answer"
            raise RefusedError(400, why, "context_length_exceeded", where)
        name = ("chatcmpl-" if isinstance(asked, ChatAsked) else "cmpl-") + secrets.token_hex(12)
        writer = AnswerWriter(
            id=name, model=asked.model or config.name, created=int(self._clock.now()), is_chat=isinstance(asked, ChatAsked),
            has_logprobs=has_logprobs, has_token_ids=asked.return_token_ids, prompt_ids=tuple(prompt_ids),
        )  # fmt: skip
        said = msgspec.structs.replace(prompt, prompt_id=name, token_ids=ids_to_bytes(list(prompt_ids)))
        stream = self._session.stream([said], n=asked.n or 1, max_new_tokens=min(most, room), is_followed=bool(asked.stream))
        following = Following(writer, stream, self._session.tokenizer, has_tools)
        try:
            if asked.stream:
                usage = asked.stream_options is not None and asked.stream_options.include_usage
                return await self._streamed(request, following, asked.n or 1, usage=usage)
            group = await self._given(following, asked.n or 1)
            response = web.json_response(writer.answer(following.choices(group), versions_of(group)))
            await _unless_unread(request, response.prepare(request))
            await _unless_unread(request, response.write_eof())
            self._answers.sent(name)
        except BaseException:  # also a disconnected client: release the group of an answer that was not sent whole
            self._answers.drop(name)
            await stream.close()
            raise
        return response

    async def _given(self, following: Following, num_choices: int) -> ScoredGroup:
        """Wait for a group; then it can be rewarded."""
        (group,) = await following.stream.all()
        if len(group.members) < num_choices:
            raise RunError(f"{num_choices - len(group.members)} of {num_choices} choices have failed; the run's log says why")
        self._answers.hold(following.writer.id, group)
        return group

    async def _streamed(self, request: web.Request, following: Following, num_choices: int, *, usage: bool) -> web.StreamResponse:
        """Answer with a stream of events; an error during the stream is an event too."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)

        async def say(event: dict[str, Any]) -> None:
            await _unless_unread(request, response.write(b"data: " + msgspec.json.encode(event) + b"\n\n"))

        try:
            async with contextlib.aclosing(following.chunks()) as chunks:
                async for chunk in chunks:
                    await say(chunk)
            group = await self._given(following, num_choices)
            for chunk in following.last_chunks(group):
                await say(chunk)
            if usage:
                await say(following.writer.last_chunk(sum(one.sample.num_tokens for one in group.members), versions_of(group)))
            await _unless_unread(request, response.write(b"data: [DONE]\n\n"))
            await _unless_unread(request, response.write_eof())
            self._answers.sent(following.writer.id)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - said to the client and the log
            self._answers.drop(following.writer.id)
            await following.stream.close()
            await say(error_body(_as_refusal(error)))
            await response.write_eof()
        return response


def _templated(tokenizer: Any, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:  # noqa: ANN401
    """Return the tokens of a conversation, by the model's chat template."""
    if not tokenizer.chat_template:
        advice = "use /v1/completions, or a model whose tokenizer has one"
        raise RefusedError(400, f"the model has no chat template; {advice}", "no_chat_template", "messages")
    how = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    templated: list[int] = tokenizer.apply_chat_template(turns, tools=tools, **how)
    if tools and templated == tokenizer.apply_chat_template(turns, **how):
        raise RefusedError(400, "the model's chat template has no place for tools", "unsupported_value", "tools")
    return templated


async def _unless_unread(request: web.Request, writing: Awaitable[Any]) -> None:
    """Write; close the connection if the client does not read."""
    try:
        async with asyncio.timeout(UNREAD_S):
            await writing
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("its client does not read") from error


def _as_refusal(error: Exception) -> RefusedError:
    if isinstance(error, RefusedError):
        return error
    if not isinstance(error, AsyncRLError):
        log.error("a request could not be answered", exc_info=error)
        return RefusedError(500, "the endpoint failed; its log says why", "failed")
    log.warning("a request was refused or failed: %s", str(error).partition("\n")[0])
    said = "the run is lost" if isinstance(error, RunLostError) else str(error)  # its message names files
    return RefusedError(503, said, "not_generated")
