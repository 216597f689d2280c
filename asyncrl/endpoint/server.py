"""Any OpenAI client asks the policy of a session, says later what the answers were worth, and the session trains on them.

Each request is one group: `n` choices of one prompt, which hold a place under the staleness bound until they are trained. Tokens
are those that the engine sampled, from the stream to the gradient: a prompt is made into tokens once, answers are never. What is
rewarded is trained, and nothing else: an answer whose client has gone, that is too old, or whose place another needs before
anybody has rewarded it is released, and rewarding it later is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from asyncrl.clock import SystemClock
from asyncrl.control.api import READ_TIMEOUT_S, read_body
from asyncrl.endpoint.dialect import (
    SAMPLING,
    ChatAsked,
    CompletionAsked,
    Form,
    RefusedError,
    Rewarded,
    as_prompt,
    error_body,
    parsed,
    turns_of,
)
from asyncrl.endpoint.following import Following, versions_of
from asyncrl.errors import AsyncRLError, ConfigError, LearnerError, RunError
from asyncrl.groups import with_rewards
from asyncrl.schema.samples import Prompt, ScoredGroup, ids_to_bytes
from asyncrl.session import Session

MOST_BODY_BYTES = 16 << 20
MOST_FORGOTTEN = 4096
"""Answers that can no more be rewarded, of which the reason is remembered."""
LOOK_AGAIN_S = 0.5
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Answer:
    """An answer that can still be trained."""

    group: ScoredGroup
    since_s: float
    """Clock seconds, when it was given."""
    rewards: list[float] | None = None
    """None: nobody has said."""


class Endpoint:
    """OpenAI's HTTP API over a session; use as an async context manager, inside the session's.

    Args:
        session: An open session. Its config says how tokens are sampled; its rewards are not used, so give `reward`.
        host: Address to listen at; for anything but this machine put a proxy with TLS before it.
        port: 0: a free one.
        api_key: That clients have to give; None: a new one.
        unrewarded_s: So long an answer waits for its rewards where other requests need its place; where none does, it waits until
            it is too old.
        ignored: Of the fields about sampling, those that clients may set in vain, `{"temperature"}`: they are sampled as the run
            samples. Others are refused where they differ.

    Raises:
        ConfigError: A name in `ignored` is none of those.

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
        self.base_url = ""
        """For clients, `http://HOST:PORT/v1`, while it is open."""
        self.api_key = api_key or secrets.token_urlsafe(32)
        self._session, self._host, self._port = session, host, port
        self._unrewarded_s, self._ignored = unrewarded_s, frozenset(ignored)
        self._clock = SystemClock()
        self._answers: dict[str, _Answer] = {}
        self._over: deque[tuple[str, str]] = deque(maxlen=MOST_FORGOTTEN)
        """Id of an answer that cannot be rewarded any more, and why."""
        self._rewarded = asyncio.Event()
        self._asking = set[str]()
        """Ids of answers that are being made."""
        self._runner: web.AppRunner | None = None
        self._forgetting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        _ = self._session.tokenizer  # it is open
        app = web.Application(middlewares=[_guard(self.api_key)], client_max_size=MOST_BODY_BYTES)
        app.add_routes([
            web.get("/v1/models", self._models),
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._complete),
            web.post("/v1/rewards", self._reward),
        ])
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise RunError(f"cannot listen at {self._host}:{self._port}: {error.strerror or error}") from error
        port = self._runner.addresses[0][1]
        self.base_url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}/v1"
        self._forgetting = asyncio.get_running_loop().create_task(self._forget(), name="endpoint")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._forgetting is not None:
            self._forgetting.cancel()
            await asyncio.wait([self._forgetting])
        if self._runner is not None:
            await self._runner.cleanup()
        with contextlib.suppress(RunError):
            await self._release(list(self._answers), "the endpoint was closed")

    # -- rewards and steps -----------------------------------------------------------------------------------------------

    def reward(self, answer_id: str, rewards: Sequence[float]) -> None:
        """Say what the choices of an answer were worth; it is trained by one of the next steps.

        Args:
            answer_id: Of the answer, its `id`.
            rewards: One a choice, in their order. Said again before it is trained, it replaces what was said.

        Raises:
            RunError: There is no such answer, or it cannot be trained any more; the message says why.
            LearnerError: They are not as many as choices, or no finite numbers.
        """
        if (answer := self._answers.get(answer_id)) is None:
            why = next((why for one, why in reversed(self._over) if one == answer_id), "")
            raise RunError(f"answer {answer_id} {why}" if why else f"there is no answer {answer_id}")
        with_rewards([answer.group], [rewards])
        answer.rewards = [float(reward) for reward in rewards]
        self._rewarded.set()

    async def batches(self) -> AsyncIterator[list[ScoredGroup]]:
        """Yield the groups of each step as soon as enough answers are rewarded, oldest first; train them before asking for more.

        It ends once the session's `num_steps` are trained.
        """
        size = self._session.config.algorithm.groups_per_step
        while self._session.version < self._session.config.num_steps:
            await self._forget_too_old()
            rewarded = [name for name, answer in self._answers.items() if answer.rewards is not None][:size]
            if len(rewarded) == size:
                answers = [self._answers.pop(name) for name in rewarded]
                self._over += [(name, "was given to a step") for name in rewarded]
                yield with_rewards([one.group for one in answers], [one.rewards or [] for one in answers])
                continue
            self._rewarded.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._rewarded.wait()

    async def _forget(self) -> None:
        """Release, again and again, what is too old, and what others need the places of."""
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            with contextlib.suppress(RunError):  # the run is over, and all groups with it
                await self._forget_too_old()
                await self._make_room()

    async def _make_room(self) -> None:
        """Release as many answers that nobody rewards as there are requests without a place, oldest first."""
        config, before_s = self._session.config, self._clock.now() - self._unrewarded_s
        places = (config.buffer.max_staleness + 1) * config.algorithm.groups_per_step
        num_waiting = max(0, len(self._asking) + len(self._answers) - places)
        late = [name for name, one in self._answers.items() if one.rewards is None and one.since_s <= before_s]
        await self._release(late[:num_waiting], f"was not rewarded within {self._unrewarded_s:g} s, and others needed its place")

    async def _forget_too_old(self) -> None:
        old = [name for name, answer in self._answers.items() if self._session.is_too_old(answer.group)]
        await self._release(old, "is too old by buffer.max_staleness: newer versions were trained before it was rewarded")

    async def _release(self, names: Sequence[str], why: str) -> None:
        answers = [self._answers.pop(name) for name in names]
        self._over += [(name, why) for name in names]
        if answers:
            log.log(logging.WARNING if why.startswith("is too old") else logging.DEBUG, "%d answers: each %s", len(answers), why)
            await self._session.release([answer.group for answer in answers])

    # -- routes ----------------------------------------------------------------------------------------------------------

    async def _models(self, _: web.Request) -> web.StreamResponse:
        config = self._session.config
        model = {"id": config.name, "object": "model", "created": 0, "owned_by": "asyncrl"}
        model["max_model_len"] = config.generate.engine.max_sequence_tokens
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await read_body(request, MOST_BODY_BYTES, READ_TIMEOUT_S), type=Rewarded)
        try:
            self.reward(asked.id, asked.rewards)
        except LearnerError as error:
            raise RefusedError(400, str(error), "invalid_value", "rewards") from error
        except RunError as error:
            known = any(name == asked.id for name, _ in self._over)
            raise RefusedError(410 if known else 404, str(error), "answer_gone" if known else "not_found", "id") from error
        return web.json_response({"id": asked.id, "object": "reward", "state": "waits for a step"})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked: CompletionAsked = self._parsed(await read_body(request, MOST_BODY_BYTES, READ_TIMEOUT_S), CompletionAsked)
        text = asked.prompt if isinstance(asked.prompt, str) else ""
        ids: list[int] = self._session.tokenizer(text)["input_ids"] if isinstance(asked.prompt, str) else asked.prompt
        has_logprobs = asked.logprobs is not None
        return await self._answer(request, asked, Prompt("", text=text), ids, asked.max_tokens, has_logprobs=has_logprobs)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked: ChatAsked = self._parsed(await read_body(request, MOST_BODY_BYTES, READ_TIMEOUT_S), ChatAsked)
        turns = turns_of(asked.messages)
        tools = asked.tools if asked.tool_choice != "none" else None
        most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        prompt, ids = Prompt("", messages=as_prompt(turns)), self._templated(turns, tools)
        return await self._answer(request, asked, prompt, ids, most, has_logprobs=bool(asked.logprobs), has_tools=bool(tools))

    def _parsed(self, body: bytes, kind: type[Any]) -> Any:  # noqa: ANN401
        sampling = self._session.config.generate.sampling
        own = {name: float(getattr(sampling, name)) for name in ("temperature", "top_p", "top_k")}
        return parsed(body, kind, own, self._ignored)

    def _templated(self, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """Return the tokens of a conversation, by the model's chat template."""
        tokenizer = self._session.tokenizer
        if not tokenizer.chat_template:
            advice = "use /v1/completions, or a model whose tokenizer has one"
            raise RefusedError(400, f"the model has no chat template; {advice}", "no_chat_template", "messages")

        def ids(with_tools: list[dict[str, Any]] | None) -> list[int]:
            try:
                found: list[int] = tokenizer.apply_chat_template(
                    turns, tools=with_tools, add_generation_prompt=True, tokenize=True, return_dict=False
                )
            except Exception as error:
                why = f"the model's chat template does not take these messages: {type(error).__name__}: {error}"
                raise RefusedError(400, why, "invalid_value", "messages") from error
            return found

        templated = ids(tools)
        if tools and templated == ids(None):
            raise RefusedError(400, "the model's chat template has no place for tools", "unsupported_value", "tools")
        return templated

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
        """Have a group generated, and answer with it."""
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
        form = Form(
            id=name, model=asked.model or config.name, created=int(self._clock.now()), is_chat=isinstance(asked, ChatAsked),
            has_logprobs=has_logprobs, has_token_ids=asked.return_token_ids, prompt_ids=tuple(prompt_ids),
        )  # fmt: skip
        said = msgspec.structs.replace(prompt, prompt_id=name, token_ids=ids_to_bytes(list(prompt_ids)))
        self._asking.add(name)
        await self._make_room()
        stream = self._session.stream([said], n=asked.n, max_new_tokens=min(most, room), is_followed=asked.stream)
        following = Following(form, stream, self._session.tokenizer, has_tools)
        try:
            if asked.stream:
                usage = asked.stream_options is not None and asked.stream_options.include_usage
                return await self._streamed(request, following, usage=usage)
            group = await self._given(following)
            response = web.json_response(form.answer(following.choices(group), versions_of(group)))
            await response.prepare(request)
            await response.write_eof()
        except BaseException:  # its client is gone, too
            await self._take_back(following)
            raise
        return response

    async def _given(self, following: Following) -> ScoredGroup:
        """Wait for a group; from now on it can be rewarded."""
        group = await following.stream.only()
        self._asking.discard(following.form.id)
        self._answers[following.form.id] = _Answer(group, self._clock.now())
        return group

    async def _take_back(self, following: Following) -> None:
        """Release the group of an answer that was not given whole."""
        self._asking.discard(following.form.id)
        self._answers.pop(following.form.id, None)
        await following.stream.close()

    async def _streamed(self, request: web.Request, following: Following, *, usage: bool) -> web.StreamResponse:
        """Answer with a stream of events; an error in the midst of it is an event, too."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)

        async def say(event: dict[str, Any]) -> None:
            await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")

        try:
            async for part in following.parts():
                await say(part)
            group = await self._given(following)
            for part in following.last_parts(group):
                await say(part)
            if usage:
                await say(following.form.last_part(sum(one.sample.num_tokens for one in group.members), versions_of(group)))
            await response.write(b"data: [DONE]\n\n")
        except AsyncRLError as error:
            log.warning("a streamed answer ends with an error: %s", error)
            await self._take_back(following)
            await say(error_body(_as_refusal(error)))
        await response.write_eof()
        return response


def _as_refusal(error: AsyncRLError) -> RefusedError:
    return error if isinstance(error, RefusedError) else RefusedError(503, str(error), "not_generated")


def _guard(api_key: str) -> Any:  # noqa: ANN401 - aiohttp's middleware type is private
    expected = f"Bearer {api_key}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, expected):
                raise RefusedError(401, "the api_key is not the endpoint's", "invalid_api_key")
            return await handler(request)
        except web.HTTPException as error:
            refused = RefusedError(error.status, error.text or error.reason, "invalid_request")
        except msgspec.MsgspecError as error:
            refused = RefusedError(400, f"the body cannot be understood: {error}", "invalid_request")
        except AsyncRLError as error:
            refused = _as_refusal(error)
        body = msgspec.json.encode(error_body(refused))
        headers = {"x-should-retry": "false"}
        return web.Response(status=refused.status, body=body, content_type="application/json", headers=headers)

    return guard
