"""CURVE keys of the `zeromq` medium: who may fetch, and whom to believe.

Called by zeromq_server.py, zeromq_reader.py, and whoever opens the medium.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.transport.security import CLIENT_FILE, KEYS_FOLDER, load_client_keys


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One end's CURVE keys, Z85 (40 bytes each)."""

    public: bytes
    secret: bytes
    peers: tuple[bytes, ...]
    """Public keys of the other end: whoever may fetch (learner's end), or the learner's, one (generator's end)."""


def keys_of_run(run_folder: Path) -> CurveKeys | None:
    """Return the keys of a run whose channels are encrypted, None for one without keys.

    Every process of a run holds the same client pair (transport/security.py), so all ends show it and believe no other.
    """
    if not (run_folder / KEYS_FOLDER / CLIENT_FILE).exists():
        return None
    keys = load_client_keys(run_folder)
    public = keys.public.encode()
    return CurveKeys(public, keys.secret.encode(), (public,))


def relay_keys(keys: CurveKeys | None) -> CurveKeys | None:
    """Return what a generator serves others with: its own pair, which the other generators hold too, and nobody else."""
    return CurveKeys(keys.public, keys.secret, (keys.public,)) if keys else None
