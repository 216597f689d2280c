"""A server for the `tinker` SDK: `python experiments/tinker/serve.py CONFIG` prints the base_url and api_key to give to it.

README.md says what of the protocol is supported. A model is a session's: it goes when the session ends, or is silent while
another needs its place. Weights saved by a name stay, in FOLDER/saved, across restarts. Those without a name, and answers, go
with their session, and no session outlives the server.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import logging
import re
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from aiohttp import web
from folder import SNAPSHOT, prepared, remove_sampler_weights
from futures import MOST_CHARS, Answer, Futures
from sampler import FILE, Sampler, Version, find_version, write_version
from tinker import types
from tinker.proto.tinker_public_pb2 import ForwardBackwardRequest
from trainer import ChosenLoss, Policy, with_rank
from wire import Limits, RefusedError, checked, decoded, examples_of, pass_answer, prompt_of, settings_of

from asyncrl.config.run import RunConfig
from asyncrl.errors import AsyncRLError, leaves
from asyncrl.learner.checkpoint import InitialState, load_or_make
from asyncrl.learner.model.sft_warmup import StartAbandoned
from asyncrl.tasks.registry import build_task
from asyncrl.tasks.task import warm_start_examples

POLL_S = 20.0
"""How long a client that asks for an answer is kept waiting; it asks again."""
SILENT_S = 120.0
"""The SDK gives a sign of life every 10 seconds."""
MOST_MODELS, MOST_RANK = 8, 1024
KEPT_SNAPSHOTS = 16
"""Of each model's sampler weights without a name, so many are kept."""
MOST_BODY_BYTES = 64 << 20
ABOUT_ADAPTERS = "adapters are on all linear layers but the output layer: train_unembed changes nothing here"
ALWAYS: dict[str, dict[str, Any]] = {
    "client/config": {"use_pyqwest_transport": False, "parallel_fwdbwd_chunks": False},
    "client/dynamic_config": {},
    "telemetry": {"status": "accepted"},
}
"""Requests with one answer. The SDK's other switches stay as they are by default."""
FILES = {"weights": "step-*/adapter_config.json", "sampler_weights": FILE}
"""What is there of saved weights once they are whole, by the kind in their path."""
_PATH = re.compile(r"tinker://([\w:-]{1,100})/(weights|sampler_weights)/([\w-][\w.-]{0,99})", re.ASCII)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Model:
    """One model of a client's."""

    name: str
    rank: int
    next_number: int = 0
    """Of its next request."""
    policy: Policy | None = None
    """Made by its first request, number 0."""
    has_failed: bool = False
    """It could not be made: nothing can be asked of it, and it takes no place."""


class Server:
    """The protocol's requests, each a method of its name.

    Those of a model are numbered, and run in the trainer's thread in that order. What is wrong with one is its answer, so that
    its number is used up. All others are answered at once.
    """

    def __init__(
        self, config: RunConfig, name: str, made: InitialState, futures: Futures, thread: Executor, stopped: Callable[[], bool]
    ) -> None:
        """Serve the model that was made; `thread` trains, and asks `stopped` now and then."""
        text = made.train_state.model.config.get_text_config()
        positions = getattr(text, "max_position_embeddings", None) or config.packing.tokens_per_row
        self._limits = Limits(text.vocab_size, min(positions, config.packing.tokens_per_row))
        self._config, self._name, self._futures, self._thread, self._stopped = config, name, futures, thread, stopped
        self._base, self._saved, self._tokenizer = made.model_folder, made.model_folder.parent / "saved", made.tokenizer
        self.sampler = Sampler(config, self._base, self._limits)
        self._models: dict[str, Model] = {}
        self._versions: dict[str, Version] = {}
        """By sampling session."""
        self._heard_s: dict[str, float] = {}
        """When each session was last heard of."""

    def routes(self) -> list[web.RouteDef]:
        """Return what is supported."""
        at_once = (self.create_session, self.session_heartbeat, self.create_model, self.get_info, self.create_sampling_session)
        in_turn = (self.forward_backward, self.optim_step, self.save_weights, self.load_weights, self.save_weights_for_sampler)
        ways: list[tuple[Callable[..., Any], Callable[..., Any]]]
        ways = [(self._at_once, work) for work in (*at_once, self.asample)] + [(self._in_turn, work) for work in in_turn]
        return [
            *(web.post(f"/api/v1/{name}", _always(answer)) for name, answer in ALWAYS.items()),
            *(web.post(f"/api/v1/{work.__name__}", partial(way, work, get_type_hints(work)["asked"])) for way, work in ways),
            web.post("/api/v1/retrieve_future", self._retrieve),
            web.get("/api/v1/get_server_capabilities", self._capabilities),
            web.get("/api/v1/samplers/{session}", self._sampling_session),
            web.post("/api/v1/sessions/{session}/finish", self._finish),
        ]

    async def _at_once(self, work: Callable[[Any], Answer], kind: type, request: web.Request) -> web.Response:
        return web.json_response(work(checked(decoded(await request.read(), kind), kind)))

    async def _in_turn(self, work: Callable[[Model, Policy, Any], Answer], kind: type, request: web.Request) -> web.Response:
        body = await request.read()
        said, num_bytes = decoded(body, kind), len(body)
        if kind is types.LoadWeightsRequest and said.get("session_id") is not None:
            return web.json_response(self._open_saved(checked(said, kind)))
        asked_of = said.get if isinstance(said, dict) else partial(getattr, said)
        model, number = self._model(asked_of("model_id")), asked_of("seq_id")

        def in_thread() -> Answer:
            if self._models.get(model.name) is not model:
                raise RefusedError("the session of this model has ended; make a new ServiceClient", 410)
            if model.policy is None:
                raise RefusedError("the model could not be opened; the answer to its first request says why")
            return work(model, model.policy, checked(said, kind))

        return web.json_response(self._begin(model, number, in_thread, num_bytes))

    def _begin(self, model: Model, number: object, in_thread: Callable[[], Answer], num_bytes: int = 0) -> Answer:
        """Have a model's request worked, unless it has been; its number is used up, whatever comes of it."""
        if type(number) is not int or not 0 <= number <= model.next_number:
            raise RefusedError(f"seq_id is {number!r:.80}, and {model.next_number} is the next; send that first", 409)
        request_id = f"{model.name}:{number}"
        if number == model.next_number:
            self._futures.begin(
                request_id, lambda: asyncio.get_running_loop().run_in_executor(self._thread, in_thread), num_bytes
            )
            model.next_number += 1
        return {"request_id": request_id}

    # -- sessions --------------------------------------------------------------------------------------------------------

    async def _capabilities(self, _: web.Request) -> web.Response:
        most_tokens = min(self._limits.most_tokens, self._config.generate.engine.max_sequence_tokens)
        model = {"model_name": self._name, "max_context_length": most_tokens, "trainable": True, "sampleable": True}
        return web.json_response({"supported_models": [model]})

    def create_session(self, asked: types.CreateSessionRequest) -> Answer:
        """Begin a session."""
        del asked
        session = secrets.token_hex(8)
        self._heard_s[session] = time.monotonic()
        return {"session_id": session, "info_message": ABOUT_ADAPTERS}

    def session_heartbeat(self, asked: types.SessionHeartbeatRequest) -> Answer:
        """Note that a client is there."""
        self._hear(asked.session_id)
        return {}

    async def _finish(self, request: web.Request) -> web.Response:
        self._end(request.match_info["session"])
        return web.json_response({})

    def _hear(self, session: str) -> None:
        if session not in self._heard_s:
            raise RefusedError(f"there is no session {session[:80]!r}, or no more; make a new ServiceClient", 410)
        self._heard_s[session] = time.monotonic()

    def _end(self, session: str) -> None:
        if self._heard_s.pop(session, None) is None:
            return
        remove_sampler_weights(self._saved, f"{session}:*", SNAPSHOT)
        self._futures.forget(session)
        for known in (self._models, self._versions):
            for name in [name for name in list(known) if name.startswith(f"{session}:")]:
                del known[name]

    # -- models ----------------------------------------------------------------------------------------------------------

    def create_model(self, asked: types.CreateModelRequest) -> Answer:
        """Open a model with new adapters."""
        self._check_base(asked.base_model, asked.optimizer_config)
        wanted = asked.lora_config
        if wanted is None or not (wanted.train_mlp and wanted.train_attn) or not 1 <= wanted.rank <= MOST_RANK:
            said = "full weights are not supported here, nor adapters on some layers only"
            raise RefusedError(f"{said}: give a lora_config of rank 1 to {MOST_RANK} with train_mlp and train_attn")
        config = self._config if wanted.seed is None else msgspec.structs.replace(self._config, seed=wanted.seed % (1 << 31))
        return self._open(asked.session_id, asked.model_seq_id, with_rank(config, wanted.rank), {}, None, moments=False)

    def _open(
        self,
        session: str,
        number: int,
        config: RunConfig,
        told: dict[str, str],
        saved: Path | None = None,
        *,
        moments: bool = False,
    ) -> Answer:
        """Have a model opened; it is known by its session and its number in it."""
        self._hear(session)
        name, lora = f"{session}:train:{number}", config.learner.lora
        if name not in self._models:
            if self._is_full():
                for silent in [one for one, heard_s in self._heard_s.items() if time.monotonic() - heard_s > SILENT_S]:
                    self._end(silent)
            if self._is_full():
                raise RefusedError(f"{MOST_MODELS} models are open, and no more can be; close a ServiceClient that is done")
            assert lora is not None
            self._models[name] = Model(name, lora.rank)
        model = self._models[name]

        def in_thread() -> Answer:
            try:
                model.policy = Policy(config, self._base, self._stopped, saved, has_moments=moments)
            finally:
                model.has_failed = model.policy is None
            return {"model_id": name} | told

        return self._begin(model, 0, in_thread)

    def _is_full(self) -> bool:
        return sum(not one.has_failed for one in self._models.values()) >= MOST_MODELS

    def _check_base(self, name: str | None, optimizer: types.OptimizerConfig | None = None) -> None:
        if name != self._name:
            raise RefusedError(f"base_model {name!r:.80} is not here; take {self._name!r}, or start serve.py with --model-name")
        if optimizer is not None and optimizer.type != "adamw":
            raise RefusedError(f"optimizer {optimizer.type!r:.80} is not supported here; take adamw")

    def get_info(self, asked: types.GetInfoRequest) -> Answer:
        """Say what a model is."""
        said = {"model_name": self._name, "tokenizer_id": str(self._base.resolve())}
        return {"model_id": asked.model_id, "model_data": said, "is_lora": True, "lora_rank": self._model(asked.model_id).rank}

    def _model(self, name: object) -> Model:
        if not isinstance(name, str) or name not in self._models:
            raise RefusedError(f"there is no model {name!r:.80}, or no more; create one", 404)
        self._hear(name.partition(":")[0])
        return self._models[name]

    # -- training --------------------------------------------------------------------------------------------------------

    def forward_backward(self, _: Model, policy: Policy, asked: ForwardBackwardRequest) -> Answer:
        """Add up the gradients of a loss, or compute it alone."""
        loss, examples = ChosenLoss(asked.loss_fn, settings_of(asked)), examples_of(asked.data, self._limits)
        return pass_answer(*policy.run(examples, loss, is_backward=not asked.forward_only))

    def optim_step(self, _: Model, policy: Policy, asked: types.OptimStepRequest) -> Answer:
        """Train."""
        if not isinstance(asked.optim_params, types.AdamParams):
            raise RefusedError(f"optimizer {asked.optim_params.type!r:.80} is not supported here; give AdamParams")
        return {"metrics": policy.step(asked.optim_params)}

    def save_weights(self, model: Model, policy: Policy, asked: types.SaveWeightsRequest) -> Answer:
        """Write a checkpoint."""
        path = f"tinker://{model.name}/weights/{asked.path}"
        policy.save(self._folder(path, "weights", is_there=None if asked.overwrite else False), self._tokenizer)
        return {"path": path, "type": "save_weights"}

    def load_weights(self, model: Model, policy: Policy, asked: types.LoadWeightsRequest) -> Answer:
        """Go on from a checkpoint."""
        del policy
        saved, config = self._folder(asked.path, "weights", is_there=True), with_rank(self._config, model.rank)
        model.policy = Policy(config, self._base, self._stopped, saved, has_moments=asked.optimizer)
        return {"path": asked.path, "model_id": asked.model_id, "type": "load_weights"}

    def _open_saved(self, asked: types.LoadWeightsRequest) -> Answer:
        """Open a model from a checkpoint."""
        self._check_base(asked.base_model or self._name, asked.optimizer_config)
        saved = self._folder(asked.path, "weights", is_there=True)
        rank = int(json.loads(next(saved.glob(FILES["weights"])).read_bytes())["r"])
        told, config = {"path": asked.path, "type": "load_weights"}, with_rank(self._config, rank)
        return self._open(asked.session_id or "", asked.model_seq_id or 0, config, told, saved, moments=asked.optimizer)

    def _folder(self, path: str, kind: str, *, is_there: bool | None) -> Path:
        """Return where weights lie, or are written; `is_there` says whether they must be there, None: they may be."""
        parts = _PATH.fullmatch(path)
        if parts is None or parts[2] != kind:
            raise RefusedError(f"{path!r:.200} is no {kind}: tinker://MODEL/{kind}/NAME, NAME of letters, digits, - and _")
        folder = self._saved.joinpath(*parts.groups())
        found = any(folder.glob(FILES[kind]))
        if found and is_there is False:
            raise RefusedError(f"{path!r:.200} is there already; take another name, or say overwrite=True")
        if is_there and not found:
            raise RefusedError(f"{path!r:.200} is not here; save it, or give --folder of the server that did", 404)
        return folder

    # -- sampling --------------------------------------------------------------------------------------------------------

    def save_weights_for_sampler(self, model: Model, policy: Policy, asked: types.SaveWeightsForSamplerRequest) -> Answer:
        """Write a version to sample from, and begin a sampling session where it is given no name."""
        number = asked.sampling_session_seq_id
        if asked.kind != "snapshot" or (asked.path is None) == (number is None):
            raise RefusedError(
                "take kind 'snapshot', others are not supported here, and give a path or a sampling_session_seq_id"
            )
        if asked.path is not None and asked.path.startswith(SNAPSHOT):
            raise RefusedError(f"{asked.path!r:.80} begins with {SNAPSHOT}, as weights without a name do; take another name")
        name = f"{SNAPSHOT}{asked.seq_id:08d}" if asked.path is None else asked.path
        path = f"tinker://{model.name}/sampler_weights/{name}"
        folder = self._folder(path, "sampler_weights", is_there=False)
        version = write_version(folder, policy.weights(), model.rank)
        if asked.path is not None:
            return {"path": path, "type": "save_weights_for_sampler"}
        if self._models.get(model.name) is not model:
            shutil.rmtree(folder)
            raise RefusedError("the session of this model has ended; make a new ServiceClient", 410)
        for old in sorted(folder.parent.glob(f"{SNAPSHOT}*"))[:-KEPT_SNAPSHOTS]:
            shutil.rmtree(old, ignore_errors=True)  # the session may end just now
        session = f"{model.name.partition(':')[0]}:sample:{number}"
        self._versions[session] = version
        return {"sampling_session_id": session, "type": "save_weights_for_sampler"}

    def create_sampling_session(self, asked: types.CreateSamplingSessionRequest) -> Answer:
        """Begin to sample from a version, or from the base model."""
        self._hear(asked.session_id)
        path = asked.model_path
        self._check_base(self._name if path and asked.base_model is None else asked.base_model)
        version = find_version(self._folder(path, "sampler_weights", is_there=True)) if path else Version()
        session = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        self._versions.setdefault(session, version)
        return {"sampling_session_id": session}

    async def _sampling_session(self, request: web.Request) -> web.Response:
        session = request.match_info["session"]
        folder = self._version(session).folder
        path = None if folder is None else "tinker://" + folder.relative_to(self._saved).as_posix()
        return web.json_response({"sampler_id": session, "base_model": self._name, "model_path": path})

    def _version(self, session: str | None) -> Version:
        if session is None or session not in self._versions:
            raise RefusedError(f"there is no sampling session {session!r:.80}, or no more; create one", 404)
        self._hear(session.partition(":")[0])
        return self._versions[session]

    def asample(self, asked: types.SampleRequest) -> Answer:
        """Sample from a session's version."""
        num_bytes = 8 * len(prompt_of(asked))  # what is wrong with the request is said now
        version, request_id = self._version(asked.sampling_session_id), f"{asked.sampling_session_id}:{asked.seq_id}"
        self._futures.begin(request_id, lambda: self.sampler.sample(version, asked), num_bytes)
        return {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{index}" for index in range(asked.num_samples)]}

    async def _retrieve(self, request: web.Request) -> web.Response:
        kind = types.FutureRetrieveRequest
        answer = await self._futures.answer(checked(decoded(await request.read(), kind), kind).request_id, POLL_S)
        if isinstance(answer, bytes):
            return web.Response(body=answer, content_type="application/x-protobuf")
        if answer is None:
            return web.json_response({"type": "try_again", "queue_state": "active"}, status=408)
        return web.json_response(answer)


def _always(body: dict[str, Any]) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(body)

    return answer


def guard(api_key: str) -> Any:
    """Let nobody in without the key, and answer what is refused by one sentence."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("X-API-Key", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, api_key.encode()):
            return web.json_response({"detail": "the api_key is not the one that the server has printed"}, status=401)
        try:
            return await handler(request)
        except web.HTTPException as error:
            text, status = (
                f"{request.method} {request.path[:200]}: {error.reason}; README.md says what is supported",
                error.status,
            )
        except web.RequestPayloadError as error:
            text, status = f"the body cannot be read: {error}", 400
        except RefusedError as error:
            text, status = str(error)[:MOST_CHARS], error.status
        return web.json_response({"detail": text}, status=status)

    return guarded


async def serve(args: argparse.Namespace, config: RunConfig, folder: Path) -> None:
    """Make the model where there is none, and serve until a signal says stop."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as tasks:
        futures, thread, task = Futures(tasks), ThreadPoolExecutor(1, "trainer"), build_task(config.task, config.seed)
        examples = partial(warm_start_examples, task, config.seed)
        make = partial(load_or_make, config, folder, examples, task.alphabet, None, stop.is_set)
        name = args.model_name or config.name
        server = Server(config, name, await loop.run_in_executor(thread, make), futures, thread, stop.is_set)
        app = web.Application(middlewares=[guard(args.api_key)], client_max_size=MOST_BODY_BYTES)
        app.add_routes(server.routes())
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, args.host, args.port).start()
            host = f"[{args.host}]" if ":" in args.host else args.host
            print(f"base_url http://{host}:{runner.addresses[0][1]}\napi_key {args.api_key}", flush=True)
            await stop.wait()
        finally:
            stop.set()
            await runner.cleanup()
            futures.cancel_all()
            await asyncio.to_thread(thread.shutdown, cancel_futures=True)
            await server.sampler.close()


def main() -> None:
    """Parse the command line and serve; wrong input is one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="a run's TOML file, or the name of a shipped config")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="laid over the config")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--folder", type=Path, help="of the model and saved weights; otherwise FOLDER/NAME-tinker of the config")
    parser.add_argument("--model-name", help="what clients call the base model; otherwise the config's name")
    args = parser.parse_args()
    args.api_key, faults = f"tml-{secrets.token_urlsafe(24)}", []
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(args, *prepared(args)))
    except* StartAbandoned:
        pass
    except* (AsyncRLError, OSError, OverflowError) as group:
        faults = leaves(group)
    if faults:
        sys.exit(f"serve.py: {faults[0]}")


if __name__ == "__main__":
    main()
