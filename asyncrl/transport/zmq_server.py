"""The controller's end over ZeroMQ: one ROUTER socket, one `Connection` per peer.

Invariants: a peer is identified by its name, and at most one incarnation of a name is open; a packet is accepted only over the
route of its session's last greeting; a wrong packet raises no error, it is counted in `refused`. If packets of a peer were lost
(its link broke, or this listener was restarted), it gets `GreetAgain`, and both sides send unacknowledged messages again; repeats
are recognised by their numbers. No tasks: reader callbacks and one timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from asyncrl.config.run import TransportConfig
from asyncrl.errors import CodecError, ConnectionClosed, TransportError, shown
from asyncrl.folders import OwnedFolder
from asyncrl.schema.control import PROTOCOL, Hello
from asyncrl.transport import zmq_wire as wire
from asyncrl.transport.protocol import GOODBYE, Connection, LinkLimits, Listener, Refused, new_hello
from asyncrl.transport.security import (
    GUEST,
    OWN,
    ListenerKeys,
    is_encrypted,
    make_keys,
    open_zap_socket,
    secure_server,
    zap_reply,
)
from asyncrl.transport.zmq_wire import GOODBYE_LINGER_MS, MOST_DRAINED, LoopSocket, SocketWatch, configure, terminate

MAX_PEERS = MOST_DRAINED
MOST_TOKENS = 64
"""Maximum number of tokens remembered for one name."""
MIN_QUEUE = 1024
"""Queue length per peer and direction, in packets: twice what four full windows need. A peer that sends too much, or reads
nothing, fills only its own queues."""
MAX_IPC_PATH_BYTES = 100
"""A Unix socket's path may have at most 107 bytes on Linux and 103 elsewhere."""
_HANDSHAKE_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

Judge = Callable[[Hello, bool], str]
"""(hello, whether it has the key of the run's own processes; without keys, True) -> why it is refused; empty: accepted."""


async def open_listener(
    config: TransportConfig,
    run_folder: Path,
    judge: Judge = lambda _hello, _is_own: "",
    limits: LinkLimits | None = None,
) -> Listener:
    """Listen for the processes of a run; make the run's keys if the config asks for CURVE and there are none.

    Args:
        config: Kind, host, encryption, window, message size.
        run_folder: The folder of `keys/`.
        judge: Returns why a peer is refused, which the peer is told; empty accepts it.
        limits: Overrides the config's sizes and the default times (tests).

    Returns:
        A listener; give its `address` to connecting processes. The socket of `ipc` is in a private temporary folder.

    Raises:
        TransportError: The address cannot be bound.
        ConfigError: The key files are unusable.
    """
    keys = make_keys(run_folder) if config.encryption == "curve" else None
    limits = limits or LinkLimits(window=config.window, max_message_bytes=config.max_message_bytes)
    folder = _make_ipc_folder() if config.kind == "ipc" else None
    address = f"ipc://{folder.path}/c" if folder else f"tcp://{config.host}:*"
    keys = keys if is_encrypted(config, address) else None
    try:
        return ZmqListener(address, new_hello("controller", "controller"), limits, keys, judge, folder)
    except BaseException:
        if folder:
            folder.close()
        raise


@dataclass(slots=True, eq=False)
class _Peer:
    """One open connection and the route to it."""

    token: str
    session_id: str
    route: bytes
    session: Connection
    heard_s: float


@dataclass(eq=False)
class ZmqListener:
    """A `Listener` (see protocol.py) on `ipc://` or `tcp://`, listening from the start; needs a running event loop.

    Raises:
        TransportError: The address cannot be bound.

    Example:
        >>> listener = ZmqListener("tcp://127.0.0.1:*", hello, LinkLimits())
        >>> listener.address
        'tcp://127.0.0.1:45127'
    """

    address: str
    """`ipc://PATH` or `tcp://HOST:PORT`; port `*` takes a free one, which it then has."""
    hello: Hello
    limits: LinkLimits
    keys: ListenerKeys | None = field(default=None, repr=False)
    """Use CURVE with these; None: plain text."""
    judge: Judge = lambda _hello, _is_own: ""
    """Returns why a peer is refused; empty accepts it."""
    owned_folder: OwnedFolder | None = None
    """Folder of the ipc socket; removed at close."""
    refused: Refused = field(default_factory=Refused, init=False)

    def __post_init__(self) -> None:
        self._by_route: dict[bytes, _Peer] = {}
        self._by_name: dict[str, _Peer] = {}
        self._tokens: dict[str, deque[str]] = {}
        """Tokens of all peers accepted under a name. Only the last one may come back; the others have been replaced. After a
        connection that this side closed, an empty token is added, which no peer has."""
        self._accepted = asyncio.Queue[Connection | None]()
        """None: the listener is closed."""
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        try:
            self.address = self._open_sockets(self.address)
        except zmq.ZMQError as error:
            raise TransportError(f"cannot listen on {self.address}: {error.strerror}") from error
        self._checked_s = self._loop.time()
        self._timer = self._loop.call_later(self.limits.silence_timeout_s / 4, self._check_silence)

    async def accept(self) -> Connection:
        """Return the next new peer. Raises ConnectionClosed once the listener is closed."""
        session = None if self._is_closed else await self._accepted.get()
        if session is None:
            raise ConnectionClosed(f"listener on {self.address} is closed")
        return session

    async def close(self) -> None:
        """Close every connection and the address; safe to repeat."""
        if self._is_closed:
            return
        self._is_closed = True
        self._timer.cancel()
        self._accepted.put_nowait(None)
        for peer in list(self._by_name.values()):
            await peer.session.close()
        self._watch.close()
        self._socket.close(GOODBYE_LINGER_MS)
        if self._zap:
            self._zap.close(0)
        try:
            await terminate(self._context)
        finally:
            if self.owned_folder is not None:
                self.owned_folder.close()

    def _open_sockets(self, address: str) -> str:
        """Bind and return the address; if that fails, nothing is left open."""
        self._context: zmq.SyncContext = zmq.Context()
        self._zap: LoopSocket | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            socket = self._context.socket(zmq.ROUTER)
            configure(socket)
            # Twice our own limit: what is between the two is read, counted and refused by us; what is above, libzmq cuts off.
            socket.maxmsgsize = 2 * self.limits.max_packet_bytes
            socket.router_mandatory = True
            socket.sndhwm = socket.rcvhwm = max(MIN_QUEUE, 8 * self.limits.window)
            if self.keys:
                allowed = {self.keys.own_public: OWN, self.keys.client_public: GUEST}
                zap = self._zap = LoopSocket(
                    open_zap_socket(self._context), lambda frames: zap.send(zap_reply([frame.bytes for frame in frames], allowed))
                )
                undo.callback(self._zap.close, 0)
                secure_server(socket, self.keys)
            failed = "unauthenticated" if self.keys else "malformed"
            self._watch = SocketWatch(socket, _HANDSHAKE_FAILURES, lambda _event: self.refused.update([failed]))
            undo.callback(self._watch.close)
            self._socket = LoopSocket(socket, self._on_message)
            undo.callback(self._socket.close, 0)
            socket.bind(address)
            undo.pop_all()
        return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        """Handle one multipart message; count it if it is wrong, and ask a peer without a session on this route to greet."""
        route = frames[0].bytes
        if sum(map(len, frames)) > self.limits.max_packet_bytes:
            self.refused["oversized"] += 1
            return
        try:
            packet = wire.parse(frames[1].buffer if len(frames) > 1 else b"")
            if isinstance(packet, wire.Greeting):
                self._on_greeting(route, packet, is_own=not self.keys or frames[1].get("User-Id") == OWN.decode())
                return
            if not isinstance(packet, wire.ParcelHead | wire.Ping | wire.Goodbye):
                self.refused["malformed"] += 1
                return
            peer = self._by_route.get(route)
            if peer is None or peer.session_id != packet.session:
                self.refused["unknown peer"] += 1
                self._tell(route, wire.GreetAgain())
                return
            peer.heard_s = self._loop.time()
            if isinstance(packet, wire.Goodbye):
                self._forget(peer, shown(packet.reason, wire.MAX_NAME) or GOODBYE)
            elif peer.session.wire is None:  # it did not read, and what was sent meanwhile is lost
                self._tell(route, wire.GreetAgain())
            elif isinstance(packet, wire.Ping):
                self._tell(route, wire.Pong(peer.session_id))
            elif not peer.session.deliver(wire.parse_parcel(packet, [frame.buffer for frame in frames[2:]])):
                self._tell(route, wire.GreetAgain())
        except CodecError:
            self.refused["malformed"] += 1

    def _on_greeting(self, route: bytes, greeting: wire.Greeting, *, is_own: bool) -> None:
        """Accept a new peer, or a known one that reconnects."""
        if greeting.protocol != PROTOCOL:
            self.refused["wrong protocol"] += 1
            self._tell(route, wire.Refusal(f"{self.hello.name} speaks protocol {PROTOCOL}, you speak {greeting.protocol}"))
            return
        hello, token = wire.parse_hello(greeting), greeting.token
        peer, tokens = self._by_name.get(hello.name), self._tokens.get(hello.name, ("",))
        if self._is_closed:
            reason = "the listener closes"
        elif token in tokens and token != tokens[-1]:
            reason = "this connection was closed by the listener, or another process of this name has come since"
        elif peer is None and len(self._by_name) >= MAX_PEERS:
            reason = f"there are {MAX_PEERS} peers already"
        else:
            reason = self.judge(hello, is_own)
        if reason:
            self.refused["unknown peer"] += 1
            self._tell(route, wire.Refusal(reason))
            return
        if peer and (peer.session.peer.incarnation, peer.token) == (hello.incarnation, token):
            self._by_route.pop(peer.route, None)
            peer.route, peer.heard_s = route, self._loop.time()
        else:
            if token != tokens[-1]:
                self._tokens.setdefault(hello.name, deque(maxlen=MOST_TOKENS)).append(token)
            if peer:
                reason = f"replaced by incarnation {hello.incarnation}"
                self._tell(peer.route, wire.Goodbye(peer.session_id, reason))
                self._forget(peer, reason)
            session = Connection(hello, self.limits.window, self.limits.max_message_bytes, self._dismiss, self.refused)
            peer = _Peer(token, uuid.uuid4().hex, route, session, self._loop.time())
            self._by_name[hello.name] = peer
            self._accepted.put_nowait(session)
        self._by_route[route] = peer
        self._tell(route, wire.Welcome(peer.session_id, self.hello, self.limits.window, self.limits.max_message_bytes))
        peer.session.wire = lambda parcel: self._socket.send([peer.route, *wire.build_parcel(peer.session_id, parcel)])
        peer.session.resend_all()

    def _tell(self, route: bytes, packet: wire.Packet) -> None:
        self._socket.send([route, wire.build(packet)])

    async def _dismiss(self, session: Connection, reason: str) -> None:
        """Say goodbye to a peer that this side closes; a peer that was cut off gets it only when it comes back."""
        peer = self._by_name.get(session.peer.name)
        if peer is not None and peer.session is session:
            if self._loop.time() - peer.heard_s <= self.limits.reconnect_after_s:
                self._tokens[session.peer.name].append("")
                self._tell(peer.route, wire.Goodbye(peer.session_id, reason))
            self._forget(peer, "closed on this side")

    def _forget(self, peer: _Peer, reason: str) -> None:
        """End a connection and remove every route to it."""
        peer.session.end(reason)
        self._by_route.pop(peer.route, None)
        if self._by_name.get(peer.session.peer.name) is peer:
            del self._by_name[peer.session.peer.name]

    def _check_silence(self) -> None:
        """End the connections of peers that have been silent for too long, unless this event loop itself was blocked."""
        period_s = self.limits.silence_timeout_s / 4
        self._timer = self._loop.call_later(period_s, self._check_silence)
        self._socket.drain()
        now_s = self._loop.time()
        stood_still_s = max(0.0, now_s - self._checked_s - 2 * period_s)
        for peer in list(self._by_name.values()):
            peer.heard_s += stood_still_s
            if now_s - peer.heard_s > self.limits.silence_timeout_s:
                self._forget(peer, f"silent for {now_s - peer.heard_s:.1f} s (limit {self.limits.silence_timeout_s:.1f} s)")
        self._checked_s = now_s


def _make_ipc_folder() -> OwnedFolder:
    """Return a new folder that only this user can enter, with a path short enough for a Unix socket."""
    for parent in (None, Path("/tmp")):  # noqa: S108 - made private; only where TMPDIR is too long a path
        folder = OwnedFolder("asyncrl-ipc-", parent)
        if len(os.fsencode(folder.path / "c")) <= MAX_IPC_PATH_BYTES:
            return folder
        folder.close()
    raise TransportError(
        f"no temporary folder with a path of at most {MAX_IPC_PATH_BYTES} bytes; set TMPDIR, or transport.kind = 'tcp'"
    )
