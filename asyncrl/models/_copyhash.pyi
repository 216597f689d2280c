from asyncrl.models.copy_hash import Bytes

SHORTEST: int

class Hasher:
    def update(self, source: Bytes, target: Bytes | None = None, /) -> None: ...
    def intdigest(self) -> int: ...
