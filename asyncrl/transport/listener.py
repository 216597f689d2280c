"""The controller's end over ZeroMQ: one ROUTER socket, one `Endpoint` a peer.

Invariants: a peer is known by its name and at most one incarnation of a name is open; a packet counts only when it comes over
the route its session last greeted from; nothing a peer sends raises here, it is counted in `refused`. A peer whose packets went
missing (its link broke, ours was restarted) is told `Stranger`, greets again, and both sides send what is unacknowledged; repeats
are known by their numbers. No tasks: reader callbacks and one timer. Made by open.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from asyncrl.errors import CodecError, ConnectionClosed, TransportError
from asyncrl.folders import OwnedFolder
from asyncrl.schema.control import PROTOCOL, Hello
from asyncrl.transport.channel import GOODBYE, Connection, RefusalCounts
from asyncrl.transport.endpoint import Endpoint
from asyncrl.transport.link import GOODBYE_LINGER_MS, LinkLimits, Pump, configure, terminate
from asyncrl.transport.loop_socket import LoopSocket, SocketWatch
from asyncrl.transport.packets import (
    Goodbye,
    Greeting,
    Packet,
    ParcelHead,
    Ping,
    Pong,
    Refusal,
    Stranger,
    Welcome,
    build,
    parse,
    parse_hello,
    parse_parcel,
)
from asyncrl.transport.security import KeyGuard, ListenerKeys, secure_listener

MAX_PEERS = 4096
"""Most connections at once."""

_HANDSHAKE_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Peer:
    """One open connection and the way to it."""

    hello: Hello
    token: str
    session: str
    route: bytes
    endpoint: Endpoint
    pump: Pump
    heard_s: float


class ZmqListener:
    """A `Listener` (see channel.py) on `ipc://` or `tcp://`.

    Example:
        >>> listener = ZmqListener("tcp://127.0.0.1:*", hello, LinkLimits())
        >>> listener.address
        'tcp://127.0.0.1:45127'
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        limits: LinkLimits,
        keys: ListenerKeys | None = None,
        judge: Callable[[Hello], str] = lambda _hello: "",
        owned_folder: OwnedFolder | None = None,
    ) -> None:
        """Bind and start listening; needs a running event loop.

        Args:
            address: `ipc://PATH` or `tcp://HOST:PORT`; port `*` takes a free one.
            hello: Who listens.
            limits: Sizes and times.
            keys: Speak CURVE with these; None is plain text.
            judge: Why a peer may not come in; empty lets it in.
            owned_folder: Removed at close (where the ipc socket lies).

        Raises:
            TransportError: The address cannot be bound.
        """
        self._hello = hello
        self._limits = limits
        self._judge = judge
        self._owned_folder = owned_folder
        self._is_secure = keys is not None
        self._refused = RefusalCounts()
        self._by_route: dict[bytes, _Peer] = {}
        self._by_name: dict[str, _Peer] = {}
        self._dismissed: dict[str, str] = {}
        self._accepted: deque[_Peer] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        try:
            self._address = self._open_sockets(address, keys)
        except zmq.ZMQError as error:
            raise TransportError(f"cannot listen on {address}: {error.strerror}") from error
        self._checked_s = self._loop.time()
        self._timer = self._loop.call_later(limits.silence_timeout_s / 4, self._check_silence)

    @property
    def address(self) -> str:
        """The address that a connector takes, ports resolved."""
        return self._address

    @property
    def refused(self) -> RefusalCounts:
        """What was refused so far."""
        return self._refused

    async def accept(self) -> Connection:
        """Return the next new peer. Raises ConnectionClosed once the listener is closed."""
        while not self._accepted:
            if self._is_closed:
                raise ConnectionClosed(f"listener on {self._address} is closed")
            self._changed.clear()
            await self._changed.wait()
        return self._accepted.popleft().endpoint

    async def close(self) -> None:
        """Close every connection and the address; safe to repeat."""
        if self._is_closed:
            return
        self._is_closed = True
        self._timer.cancel()
        self._changed.set()
        self._accepted.clear()
        for peer in list(self._by_name.values()):
            await peer.endpoint.close()
        self._close_sockets()
        try:
            await terminate(self._context)
        finally:
            if self._owned_folder is not None:
                self._owned_folder.close()

    def _open_sockets(self, address: str, keys: ListenerKeys | None) -> str:
        """Return the address bound to; nothing is left open where that fails."""
        self._context: zmq.SyncContext = zmq.Context()
        with contextlib.ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            self._guard = KeyGuard(self._context, keys) if keys else None
            if self._guard:
                undo.callback(self._guard.close)
            socket = self._context.socket(zmq.ROUTER)
            configure(socket, self._limits)
            socket.router_mandatory = True
            if keys:
                secure_listener(socket, keys)
            self._watch = SocketWatch(socket, _HANDSHAKE_FAILURES, self._note_failed_handshake)
            undo.callback(self._watch.close)
            self._socket = LoopSocket(socket, self._on_message)
            undo.callback(self._socket.close, 0)
            socket.bind(address)
            undo.pop_all()
        return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _close_sockets(self) -> None:
        self._watch.close()
        self._socket.close(GOODBYE_LINGER_MS)
        if self._guard:
            self._guard.close()

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        """Judge one multipart message; whatever is wrong with it is counted."""
        route = frames[0].bytes
        if sum(map(len, frames)) > self._limits.max_packet_bytes:
            self._refused.oversized += 1
            return
        try:
            packet = parse(frames[1].buffer if len(frames) > 1 else b"")
            if type(packet) is ParcelHead:
                self._on_parcel(route, packet, frames)
            elif type(packet) is Greeting:
                self._on_greeting(route, packet)
            else:
                self._on_notice(route, packet)
        except CodecError as error:
            self._refused.malformed += 1
            _log.debug("refused a packet: %s", error)

    def _on_parcel(self, route: bytes, head: ParcelHead, frames: list[zmq.Frame]) -> None:
        peer = self._known(route, head.session)
        if peer and not peer.endpoint.deliver(parse_parcel(head, [frame.buffer for frame in frames[2:]])):
            self._socket.send([route, build(Stranger())])

    def _on_notice(self, route: bytes, packet: Packet) -> None:
        """Take a packet that carries nothing."""
        if not isinstance(packet, Ping | Goodbye):
            raise CodecError(f"a listener takes no {type(packet).__name__}")
        peer = self._known(route, packet.session)
        if peer and isinstance(packet, Ping):
            self._socket.send([route, build(Pong(peer.session))])
        elif peer:
            self._forget(peer, packet.reason if isinstance(packet, Goodbye) and packet.reason else GOODBYE)

    def _known(self, route: bytes, session: str) -> _Peer | None:
        """Return the peer that may speak over this route; ask any other to greet."""
        peer = self._by_route.get(route)
        if peer is None or peer.session != session:
            self._refused.unknown_peer += 1
            self._socket.send([route, build(Stranger())])
            return None
        peer.heard_s = self._loop.time()
        return peer

    def _on_greeting(self, route: bytes, greeting: Greeting) -> None:
        """Let a new peer in, or an old one back in."""
        if greeting.protocol != PROTOCOL:
            self._refused.wrong_protocol += 1
            self._refuse(route, f"{self._hello.name} speaks protocol {PROTOCOL}, you speak {greeting.protocol}")
            return
        hello = parse_hello(greeting)
        reason = self._reason_against(hello, greeting.token)
        if reason:
            self._refused.unknown_peer += 1
            self._refuse(route, reason)
            return
        peer = self._by_name.get(hello.name)
        if peer and (peer.hello.incarnation, peer.token) == (hello.incarnation, greeting.token):
            self._by_route.pop(peer.route, None)
            peer.route, peer.heard_s = route, self._loop.time()
        else:
            if peer:
                self._forget(peer, f"replaced by incarnation {hello.incarnation}")
            peer = self._make_peer(route, hello, greeting.token)
        self._by_route[route] = peer
        peer.endpoint.heed(greeting.terms.window, greeting.terms.max_message_bytes)
        peer.pump.is_open = self._socket.send([route, build(Welcome(peer.session, self._hello, self._limits.terms))])
        peer.endpoint.resend_all()

    def _reason_against(self, hello: Hello, token: str) -> str:
        """Return why this peer may not come in; empty where it may."""
        if self._is_closed:
            return "the listener closes"
        if self._dismissed.get(hello.name) == token:
            return "this connection was closed by the listener"
        if hello.name not in self._by_name and len(self._by_name) >= MAX_PEERS:
            return f"there are {MAX_PEERS} peers already"
        return self._judge(hello)

    def _refuse(self, route: bytes, reason: str) -> None:
        self._socket.send([route, build(Refusal(reason))])

    def _make_peer(self, route: bytes, hello: Hello, token: str) -> _Peer:
        pump = Pump(lambda frames: self._socket.send([peer.route, *frames]))
        endpoint = Endpoint(
            hello,
            self._limits.window,
            self._limits.max_message_bytes,
            pump.wake,
            on_close=lambda reason: self._dismiss(peer, reason),
            refused=self._refused,
        )
        pump.endpoint, pump.session = endpoint, uuid.uuid4().hex
        peer = _Peer(hello, token, pump.session, route, endpoint, pump, self._loop.time())
        self._by_name[hello.name] = peer
        self._accepted.append(peer)
        self._changed.set()
        return peer

    async def _dismiss(self, peer: _Peer, reason: str) -> None:
        """Say goodbye to a peer that this side closes; one that was cut off may come back, it would only hear it then."""
        if self._by_name.get(peer.hello.name) is peer:
            if self._loop.time() - peer.heard_s <= self._limits.reconnect_after_s:
                self._dismissed[peer.hello.name] = peer.token
                self._socket.send([peer.route, build(Goodbye(peer.session, reason))])
            self._forget(peer, "closed on this side")

    def _forget(self, peer: _Peer, reason: str) -> None:
        """End a connection and drop every way to it."""
        peer.pump.is_open = False
        peer.endpoint.end(reason)
        self._by_route.pop(peer.route, None)
        if self._by_name.get(peer.hello.name) is peer:
            del self._by_name[peer.hello.name]

    def _check_silence(self) -> None:
        """End the connections of peers that have been silent for too long, unless it was this loop that stood still."""
        period_s = self._limits.silence_timeout_s / 4
        self._timer = self._loop.call_later(period_s, self._check_silence)
        self._socket.drain()
        now_s = self._loop.time()
        stood_still_s = max(0.0, now_s - self._checked_s - 2 * period_s)
        for peer in list(self._by_name.values()):
            peer.heard_s += stood_still_s
            if now_s - peer.heard_s > self._limits.silence_timeout_s:
                self._forget(peer, f"silent for {now_s - peer.heard_s:.1f} s (limit {self._limits.silence_timeout_s:.1f} s)")
        self._checked_s = now_s

    def _note_failed_handshake(self, _event: int) -> None:
        if self._is_secure:
            self._refused.unauthenticated += 1
        else:
            self._refused.malformed += 1
