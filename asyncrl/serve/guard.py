"""Who may ask what: tokens with roles, and the checks of Host and Origin, on every route.

A browser sends the cookie of a page to whoever has the address, so every request's Host must be one of the daemon's own names,
and its Origin, where there is one, must be the daemon's. Programs send a bearer token, the page a cookie. The cookie is no token:
it is signed with the daemon's key and the token's hash, and is void after SESSION_S, or once the token is removed. With it, a
request that is no GET must name the daemon's Origin. Only hashes of tokens are kept.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection

from aiohttp import web

from asyncrl.clock import Clock, SystemClock
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.serve.records import ROLES, Records, Role, TokenRecord

WHO = web.RequestKey("who", TokenRecord)
OPEN = "open"
"""In place of a role: of routes that ask for no token."""
ANYBODY = TokenRecord("anybody", "viewer", "", 0.0)
MOST_TOKENS = 1000
SESSION_S = 12 * 3600


class ForbiddenError(AsyncRLError):
    """The request is refused with a status of its own."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def new_token(records: Records, name: str, role: str, clock: Clock) -> str:
    """Make a token and return it; it cannot be had again.

    Raises:
        ConfigError: There is no such role, or a token of that name.
    """
    if role not in ROLES:
        raise ConfigError(f"the role must be one of {', '.join(ROLES)}, got {role!r}")
    if not (0 < len(name) <= 64 and name.isprintable()):
        raise ConfigError(f"the name of a token has 1 to 64 printable characters, got {name!r}")
    if name in records.tokens:
        raise ConfigError(f"there is a token {name!r}; remove it first, or take another name")
    if len(records.tokens) >= MOST_TOKENS:
        raise ConfigError(f"there are {MOST_TOKENS} tokens; remove some first")
    token = secrets.token_urlsafe(32)
    records.put_token(TokenRecord(name, role, hashlib.sha256(token.encode()).hexdigest(), clock.now()))  # type: ignore[arg-type]
    return token


class Guard:
    """Lets requests in, or says why not.

    Args:
        records: Has the tokens.
        names: Hosts by which the daemon may be asked.
        clock: Ends the page's sessions.
        key: Signs their cookies; left out: one that is gone with this object.
    """

    def __init__(self, records: Records, names: Collection[str], clock: Clock | None = None, key: bytes = b"") -> None:
        self._records, self._names = records, {name.lower() for name in names}
        self._clock, self._key = clock or SystemClock(), key or secrets.token_bytes(32)

    def check(self, request: web.Request, least: Role | str) -> TokenRecord:
        """Return who asks.

        Raises:
            ForbiddenError: Host, Origin, token or role are not right.
        """
        host = request.headers.get("Host", "").lower()
        if host.removesuffix(f":{host.rpartition(':')[2]}") not in self._names and host not in self._names:
            raise ForbiddenError(403, "this host name is not the daemon's; name it with serve --allow-host")
        origin = request.headers.get("Origin", "")
        if origin and origin.partition("://")[2].lower() != host:
            raise ForbiddenError(403, "the request comes from a page of another origin")
        if least == OPEN:
            return ANYBODY
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        by_cookie = not scheme and (request.method == "GET" or bool(origin))
        who = self.by_cookie(request) if by_cookie else self.by_token(given if scheme.lower() == "bearer" else "")
        if who is None:
            raise ForbiddenError(401, "a bearer token is needed; `asyncrl token add NAME ROLE` makes one")
        if ROLES.index(who.role) < ROLES.index(least):  # type: ignore[arg-type]
            raise ForbiddenError(403, f"{who.name} is a {who.role}, and this wants at least a {least}")
        return who

    def by_token(self, token: str) -> TokenRecord | None:
        """Return whose token it is."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
        return next((one for one in self._records.tokens.values() if hmac.compare_digest(one.digest, digest)), None)

    def by_cookie(self, request: web.Request) -> TokenRecord | None:
        """Return whose page it is."""
        if request.headers.get("Sec-Fetch-Site", "same-origin") not in {"same-origin", "none"}:
            return None  # another port of this machine is another origin, and gets the cookie all the same
        given = request.cookies.get(cookie_name(request), "")
        ends = given.partition(".")[0]
        if not (ends.isascii() and ends.isdecimal()) or len(ends) > 12 or int(ends) < self._clock.now():
            return None
        signed = ((one, self._signed(int(ends), one).encode()) for one in self._records.tokens.values())
        return next((one for one, right in signed if hmac.compare_digest(right, given.encode("utf-8", "surrogateescape"))), None)

    def cookie(self, who: TokenRecord) -> str:
        """Return the cookie of a page that has shown a token."""
        return self._signed(int(self._clock.now()) + SESSION_S, who)

    def _signed(self, ends: int, who: TokenRecord) -> str:
        return f"{ends}.{hmac.new(self._key, f'{ends}.{who.name}.{who.digest}'.encode(), 'sha256').hexdigest()}"


def cookie_name(request: web.Request) -> str:
    """Return the name of the page's cookie: browsers send cookies of one port to all ports of a host."""
    port = request.headers.get("Host", "").rpartition(":")[2]
    return f"asyncrl-{port}" if port.isdecimal() else "asyncrl"
