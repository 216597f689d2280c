"""Who comes in and who is gone: connections accepted, both lanes served, and guests, generators that this run did not start.

Invariants: a connection that takes another's name is the end of that one, and what was on its way over it is given out again; a
guest's end is no death of the run's. Called by control/controller.py, on its event loop.
"""

from __future__ import annotations

import asyncio
import logging
import platform
from typing import TYPE_CHECKING

from asyncrl.config.load import dump_config
from asyncrl.control.life_events import ProcessFault, ProcessReady
from asyncrl.control.messages import Messages
from asyncrl.control.peers import Peer
from asyncrl.errors import ConnectionClosed
from asyncrl.schema.control import JoinTerms
from asyncrl.transport.channel import GOODBYE, Connection, Lane

if TYPE_CHECKING:
    from asyncrl.control.controller import Controller

log = logging.getLogger(__name__)


class Reception:
    """The run's door."""

    def __init__(self, controller: Controller, messages: Messages) -> None:
        self._run, self._messages = controller, messages

    async def accept(self, group: asyncio.TaskGroup) -> None:
        """Take in whoever connects, until the listener is closed; each is served by a task of the group."""
        while True:
            try:
                connection = await self._run.listener.accept()
            except ConnectionClosed:
                return
            # Asked again: a guest that greeted while it was being given up had a place then, and has none by now.
            refusal = self._run.roster.judge(connection.peer)
            if refusal:
                log.warning("%s is turned away: %s", connection.peer.name, refusal)
                await connection.close(refusal)
                continue
            before = self._run.peers.get(connection.peer.name)
            peer = self._run.peers.add(connection)
            if before is not None and self._run.roster.is_guest(peer.name):
                self._take_back(peer.name)
            elif before is not None:
                self._run.post(ProcessFault(peer.name, "its connection broke, and what was on its way is lost", fatal=False))
            group.create_task(self._serve_both(peer, connection), name=f"serve-{peer.name}")
            self._connected(peer)

    async def _serve_both(self, peer: Peer, connection: Connection) -> None:
        """Serve both lanes until the connection is over and all that came over it is dealt with."""
        async with asyncio.TaskGroup() as lanes:
            for lane in Lane:
                lanes.create_task(self._serve(peer, connection, lane), name=f"serve-{peer.name}-{lane.name}")
        if self._run.roster.is_guest(peer.name) and self._run.peers.remove(peer):
            self._guest_gone(peer)

    async def _serve(self, peer: Peer, connection: Connection, lane: Lane) -> None:
        """Hand every message of one lane to its handler until the connection ends."""
        while True:
            try:
                delivery = await connection.receive(lane)
            except ConnectionClosed:
                return
            self._messages.dispatch(peer, delivery)

    def _connected(self, peer: Peer) -> None:
        log.info("%s connected (pid %d)", peer.name, peer.connection.peer.pid)
        if self._run.roster.is_guest(peer.name):
            self._welcome(peer)
        if self._run.ending.is_set():
            self._run.say_goodbye(peer)
        elif peer.kind == "reward":
            self._run.post(ProcessReady(peer.name))
            self._run.flow.pump()
        elif peer.kind in {"generator", "inference"} and self._run.model_folder:
            self._run.let_load(peer)

    def _welcome(self, peer: Peer) -> None:
        """Tell a guest what the run is; it loads the model like any generator."""
        self._run.roster.connected(peer.name, self._run.clock.now())
        peer.tell(JoinTerms(dump_config(self._run.config), str(self._run.run_folder.resolve()), platform.node()))

    def _guest_gone(self, peer: Peer) -> None:
        """Hand out again what a guest held, and give its place back. Its end is no death of ours."""
        why = peer.connection.closed_reason
        self._run.roster.gone(peer.name, said_goodbye=why == GOODBYE or self._run.ending.is_set())
        log.info("%s has left: %s", peer.name, why)
        if not self._run.ending.is_set():
            self._take_back(peer.name)

    def _take_back(self, name: str) -> None:
        self._run.reporter.forget(name)
        self._run.flow.generator_dead(name)

    async def drop_silent_guests(self, now: float) -> None:
        """End the connection of guests that are there and say nothing; what follows is as if it had broken."""
        for name, silent_s in self._run.roster.overdue(now).items():
            peer = self._run.peers.get(name)
            if peer is not None:
                log.warning("%s sent no heartbeat for %.0f s: it is left out", name, silent_s)
                await peer.connection.close()
