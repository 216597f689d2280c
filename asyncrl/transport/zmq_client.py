"""The connecting end over ZeroMQ: one DEALER socket that reconnects by itself.

    connecting --handshake done--> greeting --Welcome--> open --GreetAgain, link broken--> greeting | connecting
    any --Refusal, Goodbye, close, too long without a listener--> closed

Invariants: messages are sent only in `open`, so none queue up for a listener that is gone; lost messages are unacknowledged and
are sent again at the next Welcome. If a socket cannot be opened (for example, no file descriptor is left), it is tried again
until the connection is given up. A Welcome to another session (the listener was restarted, or had given up this peer) starts the
numbers from 0. No tasks: reader callbacks and one timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from pathlib import Path
from typing import Literal

import zmq

from asyncrl.config.run import TransportConfig
from asyncrl.errors import CodecError, TransportError
from asyncrl.schema.control import PROTOCOL, Hello
from asyncrl.transport import zmq_wire as wire
from asyncrl.transport.protocol import GOODBYE, Connection, LinkLimits, Refused
from asyncrl.transport.security import ClientKeys, is_encrypted, load_connecting_keys, secure_client
from asyncrl.transport.zmq_wire import GOODBYE_LINGER_MS, LoopSocket, SocketWatch, configure, terminate

_LINK_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 1000

Phase = Literal["connecting", "greeting", "open", "closed"]

_log = logging.getLogger(__name__)


async def open_connection(
    address: str,
    hello: Hello,
    config: TransportConfig,
    run_folder: Path,
    timeout_s: float = 30.0,
    limits: LinkLimits | None = None,
) -> Connection:
    """Connect to a run's listener.

    Args:
        address: `Listener.address`.
        hello: This process's hello (see `new_hello`); its name is unique within the run.
        config: Its encryption is read.
        run_folder: The folder with `keys/own.key`, or with only `keys/client.key`.
        timeout_s: How long to wait for the listener's welcome.
        limits: Overrides the default times (tests).

    Raises:
        TransportError: The listener did not answer, or refused the connection; the message says why.
        ConfigError: The key file is unusable.
    """
    keys = load_connecting_keys(run_folder) if is_encrypted(config, address) else None
    return await ZmqConnector(address, hello, limits or LinkLimits(), keys).connect(timeout_s)


class ZmqConnector:
    """Owns the socket, the timer and the session of one connection; `connect` returns the session."""

    def __init__(self, address: str, hello: Hello, limits: LinkLimits, keys: ClientKeys | None = None) -> None:
        """Start connecting; needs a running event loop.

        Args:
            address: As `Listener.address` gives it.
            hello: This process's hello.
            limits: Times; the sizes come from the listener.
            keys: Use CURVE with these; None: plain text.
        """
        self._address = address
        self._hello = hello
        self._limits = limits
        self._keys = keys
        self._token = uuid.uuid4().hex
        self._loop = asyncio.get_running_loop()
        self._welcomed: asyncio.Future[None] = self._loop.create_future()
        unknown = Hello(PROTOCOL, "controller", address, "", 0)
        self._session = Connection(
            unknown, limits.window, limits.max_message_bytes, lambda _, reason: self.close(reason), Refused()
        )
        self._session_id = ""
        self._heard_s = self._ticked_s = self._lost_s = self._loop.time()
        try:
            self._context: zmq.SyncContext = zmq.Context()
            with contextlib.ExitStack() as undo:
                undo.callback(self._context.destroy, linger=0)
                self._open_socket()
                undo.pop_all()
        except zmq.ZMQError as error:
            raise TransportError(f"no socket to {address} could be opened: {error.strerror}") from error
        self._timer = self._loop.call_later(limits.ping_s, self._tick)

    async def connect(self, timeout_s: float) -> Connection:
        """Return the open connection.

        Raises:
            TransportError: The listener refused the connection (with its reason), or did not answer within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._welcomed)
        except TimeoutError as error:
            await self.close()
            raise TransportError(
                f"no welcome from {self._address} within {timeout_s:.1f} s: is the run alive, are the keys its own (RUN/keys)?"
            ) from error
        except BaseException:
            await self.close()
            raise
        return self._session

    async def close(self, reason: str = "") -> None:
        """Say goodbye if connected, and release everything; safe to repeat."""
        if self._phase != "closed":
            self._session.pump()
            if self._phase == "open":
                self._socket.send([wire.build(wire.Goodbye(self._session_id, reason))])
            self._shut("closed on this side", GOODBYE_LINGER_MS)
        await terminate(self._context)

    def _open_socket(self) -> None:
        with contextlib.ExitStack() as undo:
            socket = self._context.socket(zmq.DEALER)
            undo.callback(socket.close, 0)
            configure(socket)
            socket.reconnect_ivl = _RECONNECT_MS
            socket.reconnect_ivl_max = _RECONNECT_MAX_MS
            if self._keys:
                secure_client(socket, self._keys, self._keys.listener_public)
            loop_socket = LoopSocket(socket, self._on_message)
            undo.callback(loop_socket.close, 0)
            watch = SocketWatch(socket, _LINK_EVENTS, self._on_link_event)
            undo.callback(watch.close)
            socket.connect(self._address)
            undo.pop_all()
        self._socket, self._watch = loop_socket, watch
        self._enter("connecting")

    def _reopen(self) -> None:
        """Start with a new socket, because everything queued in the old one is outdated."""
        self._lose()
        self._enter("greeting")  # to nobody, until there is a socket
        self._watch.close()
        self._socket.close(0)
        try:
            self._open_socket()
        except zmq.ZMQError as error:
            _log.warning("no socket to %s could be opened; trying again: %s", self._address, error.strerror)

    def _on_link_event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._greet()
        elif event == zmq.EVENT_DISCONNECTED:
            self._lose()
            self._enter("connecting")
        elif not self._welcomed.done():
            self._fail(f"{self._address} refused our key: it is not one of this run (RUN/keys)")

    def _greet(self) -> None:
        self._lose()
        self._enter("greeting")
        self._socket.send([wire.build_greeting(self._hello, self._token, self._session_id)])

    def _lose(self) -> None:
        """Stop sending, and remember the time."""
        if self._phase == "open":
            self._session.wire = None
            self._lost_s = self._loop.time()

    def _enter(self, phase: Phase) -> None:
        self._phase: Phase = phase
        self._phase_s = self._loop.time()

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        """Handle one multipart message; ignore it if it is no packet, or belongs to another session."""
        if self._phase == "closed":
            return
        self._heard_s = self._loop.time()
        with contextlib.suppress(CodecError):
            packet = wire.parse(frames[0].buffer)
            match packet:
                case wire.ParcelHead() if packet.session == self._session_id and self._phase == "open":
                    if not self._session.deliver(wire.parse_parcel(packet, [frame.buffer for frame in frames[1:]])):
                        self._greet()
                case wire.Welcome() if self._phase == "greeting":
                    self._enter("open")
                    self._session.window, self._session.max_message_bytes = packet.window, packet.max_message_bytes
                    self._session.wire = lambda parcel: self._socket.send(wire.build_parcel(self._session_id, parcel))
                    if packet.session == self._session_id:
                        self._session.resend_all()
                    else:
                        self._session_id = packet.session
                        self._session.start_over(packet.hello)
                    if not self._welcomed.done():
                        self._welcomed.set_result(None)
                case wire.GreetAgain() if self._phase == "open":
                    self._greet()
                case wire.Refusal():
                    self._fail(f"{self._address} refused {self._hello.name}: {packet.reason}")
                case wire.Goodbye() if packet.session == self._session_id:
                    self._shut(packet.reason or GOODBYE, 0)

    def _tick(self) -> None:
        """Send a ping; notice when the listener does not answer, unless this event loop itself was blocked."""
        limits = self._limits
        self._timer = self._loop.call_later(limits.ping_s, self._tick)
        self._socket.drain()
        if self._phase == "closed":
            return
        now_s = self._loop.time()
        stood_still_s = max(0.0, now_s - self._ticked_s - 2 * limits.ping_s)
        self._heard_s += stood_still_s
        self._lost_s += stood_still_s
        self._ticked_s = now_s
        if self._phase != "open" and self._welcomed.done() and now_s - self._lost_s > limits.give_up_s:
            self._shut(f"no listener on {self._address} for {now_s - self._lost_s:.0f} s", 0)
        elif self._phase == "open" and now_s - self._heard_s <= limits.reconnect_after_s:
            self._socket.send([wire.build(wire.Ping(self._session_id))])
        elif self._phase != "connecting" and now_s - max(self._phase_s, self._heard_s) > limits.reconnect_after_s:
            self._reopen()

    def _fail(self, reason: str) -> None:
        """End for good; a `connect` that still waits gets the reason."""
        if not self._welcomed.done():
            self._welcomed.set_exception(TransportError(reason))
        self._shut(reason, 0)

    def _shut(self, reason: str, linger_ms: int) -> None:
        """Release socket and timer, and end the connection."""
        self._phase = "closed"
        self._timer.cancel()
        self._watch.close()
        self._socket.close(linger_ms)
        self._session.end(reason)
