"""Medium `zeromq`: versions and deltas part by part over TCP, from the learner and from generator to generator.

    learner ── ZeroMQWriter: slots ▸ Shelf ▸ PartServer (ROUTER, a thread) ▸ LearnerDesk: RelayTree, SubscriberBoard
                    │ PlaceRequest, PlaceReply, ChunkRequest, ChunkReply (chunks.py)
    generator ─ ZeroMQReader: PartFetch (DEALERs; RelayChild, Download) ▸ staging buffer ▸ Shelf ▸ PartServer ── other generators

Nothing is pushed: a part is sent because it was asked for, and a generator has at most WINDOW under way, so a slow one slows
nobody and no queue grows. Invariants stand in the files named above; relay_tree.py says who feeds whom.

Called by media.py, publisher.py, subscriber.py.
"""

from asyncrl.broadcast.zeromq_keys import CurveKeys, keys_of_run
from asyncrl.broadcast.zeromq_reader import ZeroMQReader
from asyncrl.broadcast.zeromq_writer import ZeroMQWriter

__all__ = ["CurveKeys", "ZeroMQReader", "ZeroMQWriter", "keys_of_run"]
