"""A TCP proxy that tests put in front of a process: it passes bytes on, and breaks, stops or goes slowly when it is told to."""

import contextlib
import socket
import threading
from collections.abc import Callable

TIMEOUT_S = 60
NO_END = 1 << 60


class TcpProxy:
    """Passes so many bytes of what is in front of it on and then no more, or goes slowly from the start."""

    def __init__(self, address: str, stop_after_bytes: int, bytes_per_s: float) -> None:
        self._target = ("127.0.0.1", int(address.rsplit(":", 1)[1]))
        self._left = stop_after_bytes
        self._bytes_per_s = bytes_per_s
        self._closing = threading.Event()
        self._resumed = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def break_off(self) -> None:
        """Break the connections that stand; later ones go through unhindered."""
        self._left = NO_END
        for opened in list(self._sockets):
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
        self._resumed.set()

    def close(self) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self.break_off()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        for opened in (*self._sockets, self._listener):
            opened.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            behind = socket.create_connection(self._target)
            self._sockets += [client, behind]
            self._start(self._pass, client, behind, False)
            self._start(self._pass, behind, client, True)

    def _pass(self, source: socket.socket, target: socket.socket, is_limited: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(16384):
                if is_limited:
                    self._left -= len(chunk)
                    if self._left < 0:
                        self._resumed.wait(TIMEOUT_S)
                    if self._bytes_per_s:
                        self._closing.wait(len(chunk) / self._bytes_per_s)
                target.sendall(chunk)
            target.shutdown(socket.SHUT_RDWR)


def tcp_proxy(
    address: str, stop_after_bytes: int = NO_END, bytes_per_s: float = 0.0
) -> contextlib.AbstractContextManager[TcpProxy]:
    return contextlib.closing(TcpProxy(address, stop_after_bytes, bytes_per_s))
