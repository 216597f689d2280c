"""The judge's side of a test: the test's code runs here and uses the program's objects through handles.

Sent as text into a separate sandbox (guest.py): standard library only, Python 3.9 and later. Why a program cannot fake a pass:
- The judge requests only the names that test_code.py finds in the test's source.
- Plain data is rebuilt as exact built-in types. Any other object is a `Handle`: each use of it is a request to the candidate.
- A handle equals plain data only by its own data, if its class extends a built-in one, and has no order relative to plain data.
  The program sends its data without knowing the other side, and the judge compares. The data is sent at the comparison, since the
  object may have changed; by then the program may have seen the expected value in an earlier call of the test.
- The result of an operator of `TELLING` on a handle and plain data stays a handle. It cannot be compared with plain data,
  counted, iterated or converted to a number, since the program may have seen the expected value there.
- An operation that the judge cannot request ends the session: an error would pass a test that expects an error of the program.
- The judge serves one request: a call, with plain data, of a function that the test passed to a call that is still running.
"""
# ruff: noqa: ANN401, S102, BLE001, SLF001 - values of any kind, foreign code and whatever it raises are its business

from __future__ import annotations

import _thread
import builtins
import collections
import sys
import types

from asyncrl.reward.sandbox.guest_values import (
    SEVERAL,
    Malformed,
    Pipe,
    SessionOver,
    as_list,
    decode,
    encode,
    only_plain,
    refuse_objects,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any, NoReturn

    from asyncrl.reward.sandbox.guest_values import Frame

TELLING = ("add", "sub", "truediv", "floordiv", "mod", "and_", "or_", "xor", "divmod")
"""Operators that a test may use to compare with an expected value, as in `abs(f(x) - 5) < 1e-6`."""
SCALING = ("mul", "matmul", "pow", "lshift", "rshift")
ASKED = ("str", "repr", "setattr", "delattr", "getitem", "setitem", "delitem", "enter", "copy")
CONVERTED = ("len", "int", "float", "complex", "index", "round", "next", "reversed", "hash", "contains")
_iteration_ends = (StopIteration, StopAsyncIteration, GeneratorExit)


class JudgeSession:
    """The judge's end of a session: sends requests, and serves calls of functions that are arguments of a running call."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.lock = _thread.RLock()
        """Held during a request and its answer, so that threads of a test take turns."""
        self.is_over = False
        self.handles: dict[int, Handle] = {}
        self.error_classes: dict[int, type] = {}
        self.functions: dict[int, Callable[..., Any]] = {}

    def ask(self, operation: str, *args: Any, kwargs: dict[str, Any] | None = None, derived: bool = False) -> Any:
        """Request an operation of the candidate; return its value, or raise its exception or SessionOver.

        If `derived`, any value stays a handle.
        """
        kwargs, passed = kwargs or {}, list[int]()
        with self.lock:
            if self.is_over:
                raise SessionOver("the program ended")
            try:
                self._request(operation, args, kwargs, passed, derived)
                while True:
                    frame = self.pipe.read()
                    if type(printed := frame.get("printed", "")) is str:
                        sys.stdout.write(printed)  # a test may capture it
                    if "call" not in frame:
                        break
                    self.pipe.write(self._call(frame))
            except SessionOver:
                self.is_over = True  # Otherwise a test that catches everything would wait for an answer for ever.
                raise
            finally:
                for number in passed:
                    del self.functions[number]
        if "raise" in frame:
            raise self._error(frame["raise"], operation)
        if "value" not in frame:
            raise SessionOver("the program ended")
        if operation == "call":
            for place, after in frame.get("changed", ()):
                target, contents = args[place] if type(place) is int else kwargs[place], self.decode(after)
                if type(target) is type(contents) and isinstance(target, (list, bytearray, dict, set, collections.deque)):
                    target.clear()
                    (target.update if isinstance(target, (dict, set)) else target.extend)(contents)
        value = self.decode(frame["value"])
        if derived:
            if not isinstance(value, Handle):
                raise SessionOver("a value where an object was asked for")
            object.__setattr__(value, "_handle_derived", True)
        return value

    def refuse(self, what: str) -> NoReturn:
        """End the session because a test did something unsupported."""
        self.is_over = True
        raise SessionOver(what)

    def _request(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any], passed: list[int], derived: bool) -> None:
        try:
            self.pipe.write({
                "op": operation,
                "args": [self._encode(each, passed) for each in args],
                "kwargs": {name: self._encode(each, passed) for name, each in kwargs.items()},
                "as_object": derived,
            })
        except Exception as error:
            self.refuse(f"the test's values cannot be sent: {error}")

    def _encode(self, value: Any, passed: list[int]) -> Any:
        def other(each: Any) -> Any:
            # Errors of the program and their classes are not handles, but also have a number.
            if isinstance(each, Handle) or "_handle_number" in getattr(each, "__dict__", ()):
                return {"t": "yours", "v": each._handle_number}
            if type(each) is slice:
                return {"t": "slice", "v": [encode(place, refuse_objects) for place in (each.start, each.stop, each.step)]}
            name = getattr(each, "__name__", "")
            if getattr(builtins, name, None) is each and not name.startswith("_"):
                return {"t": "built-in", "v": name}
            if callable(each):
                number = next(number for number in range(len(self.functions) + 1) if number not in self.functions)
                self.functions[number] = each
                passed.append(number)
                return {"t": "function", "v": number}
            if isinstance(each, SEVERAL):
                return {"t": "iterator", "v": [self._encode(item, passed) for item in as_list(each)]}
            raise TypeError(f"a test cannot hand an object of {type(each).__name__} to the program")

        return encode(value, other)

    def decode(self, value: Any) -> Any:
        """Rebuild a value from the program, with handles; raise SessionOver if it is not a value."""
        try:
            return decode(value, self._decode_other)
        except (Malformed, RecursionError) as error:
            raise SessionOver(f"not a value: {error}") from error

    def _decode_other(self, tag: str, value: Any, depth: int = 0) -> Any:
        number = value.get("v")
        if type(number) is not int or depth > 20:
            raise Malformed(f"{tag} without a number")
        if tag == "object":
            return self.handles.setdefault(number, Handle(self, number))
        if tag != "error class":
            raise Malformed(f"unknown tag {tag}")
        if number not in self.error_classes:
            bases = value.get("bases")
            if type(bases) is not list or not 0 < len(bases) <= 8:
                raise Malformed("an error class without bases")
            name, module = str(value.get("name"))[:100], str(value.get("module"))
            known = None if module == "solution" else getattr(sys.modules.get(module), "__dict__", {}).get(name)
            is_error = isinstance(known, type) and issubclass(known, Exception) and not issubclass(known, _iteration_ends)
            # Some errors of unittest, such as SkipTest, end a test without failing it.
            if is_error and known.__module__.split(".")[0] not in ("unittest", "asyncrl"):
                parents: tuple[Any, ...] = (known,)  # A test that catches json.JSONDecodeError uses the judge's class.
            else:
                parents = tuple(self._error_class(each, depth) for each in bases)
            self.error_classes[number] = _stand_in(self, number, name, parents)
        return self.error_classes[number]

    def _error_class(self, told: Any, depth: int = 0) -> Any:
        """Return a built-in class by its name, or a stand-in for the program's class; a mixin that is no error is Exception."""
        if type(told) is str:
            kind = getattr(builtins, told, None)
            return kind if isinstance(kind, type) and issubclass(kind, (Exception, SystemExit)) else RuntimeError
        is_class = type(told) is dict and told.get("t") == "error class"
        return self._decode_other("error class", told, depth + 1) if is_class else Exception

    def _call(self, frame: Frame) -> Frame:
        """Serve the only request that a program may make: a call of a function of the test."""
        function = self.functions.get(frame["call"]) if type(frame["call"]) is int else None
        if function is None:
            raise SessionOver("the program called a function that is no argument of a running call")
        try:
            args = [decode(each, only_plain) for each in frame["args"]]
            kwargs = {name: decode(each, only_plain) for name, each in frame["kwargs"].items()}
            return {"value": encode(function(*args, **kwargs), refuse_objects)}
        except Exception as error:
            return {"raise": [type(error).__name__, *(each for each in error.args if type(each) in (str, int, float))]}

    def _error(self, told: Any, operation: str) -> BaseException:
        """Return the program's exception as one that the test can catch by name."""
        if type(told) is not dict or type(told.get("text")) is not str or type(told.get("args")) is not list:
            raise SessionOver("not an error")
        error_class = self._error_class(told.get("kind"))
        if issubclass(error_class, _iteration_ends) and operation != "next":
            # Raised in a test's `all(map(f, values))`, it would end the loop, and the test would pass.
            return RuntimeError(f"the program raised {error_class.__name__}")
        args = [self.decode(each) for each in told["args"]]
        if hasattr(error_class, "_handle_number") and type(told.get("object")) is int:
            error: BaseException = error_class.__new__(error_class, *args)
            error.__dict__.update(_handle_number=told["object"], _text=told["text"])
            return error
        try:
            return error_class(*args)  # type: ignore[no-any-return]
        except (TypeError, ValueError):
            return RuntimeError(told["text"])


def _stand_in(session: JudgeSession, class_number: int, name: str, parents: tuple[Any, ...]) -> type:
    """Return a stand-in for one of the program's error classes."""

    def construct(self: Any, /, *args: Any, **kwargs: Any) -> None:
        made = session.ask("call", session.error_classes[class_number], *args, kwargs=kwargs)
        self.__dict__.update(_handle_number=made._handle_number, _text=str(made))

    def attribute(self: Any, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return session.ask("getattr", self, name)

    members = {"_handle_number": class_number, "__init__": construct, "__getattr__": attribute}
    return types.new_class(name, parents, {}, lambda made: made.update(members, __str__=lambda self: self._text))


class Handle:
    """An object of the program. The program decides whether two handles are equal, but not whether one equals plain data."""

    __slots__ = ("_handle_derived", "_handle_number", "_handle_session")

    def __init__(self, session: JudgeSession, number: int) -> None:
        object.__setattr__(self, "_handle_session", session)
        object.__setattr__(self, "_handle_number", number)
        object.__setattr__(self, "_handle_derived", False)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call it in the program's process."""
        return self._handle_session.ask("call", self, *args, kwargs=kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._handle_session.ask("getattr", self, name)

    def __await__(self) -> Generator[None, None, Any]:
        return self._handle_session.ask("await", self)
        yield

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        """Report how the block ended. It cannot suppress the error: that would skip later checks of the test."""
        told = kind and next(each for each in kind.__mro__ if getattr(builtins, each.__name__, None) is each)
        self._handle_session.ask("exit", self, told, None, None)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Handle) and self._handle_session.ask("isinstance", value, self) is True

    def __subclasscheck__(self, value: Any) -> bool:
        return isinstance(value, Handle) and self._handle_session.ask("issubclass", value, self) is True

    def __bool__(self) -> bool:
        return self._handle_convert("bool") is True

    def __format__(self, form: str) -> Any:
        return self._handle_convert("format", form) if form else str(self)

    def __deepcopy__(self, _memo: Any) -> Any:
        return self._handle_session.ask("deepcopy", self)

    def __iter__(self) -> Any:
        values = self._handle_convert("iter")
        return values if isinstance(values, Handle) else iter(values)

    def _handle_convert(self, operation: str, *args: Any) -> Any:
        if self._handle_derived:
            self._handle_session.refuse(f"{operation} of what an operator made of a program's object and the test's data")
        return self._handle_session.ask(operation, self, *args)


def _combined(operation: str, tells: bool, reflected: bool = False) -> Callable[..., Any]:
    def combine(self: Handle, other: Any, *rest: Any) -> Any:
        if type(other).__module__ == "datetime":
            # A difference of dates is read by its attributes, which the program could then invent.
            self._handle_session.refuse(f"{operation} of a program's object and a date")
        is_handle = isinstance(other, Handle)
        derived = self._handle_derived or (is_handle and other._handle_derived) or (tells and not is_handle)
        pair = (other, self) if reflected else (self, other)
        return self._handle_session.ask(operation, *pair, *rest, derived=derived)

    return combine


def _compared(operation: str) -> Callable[..., Any]:
    def compare(self: Handle, other: Any) -> Any:
        if isinstance(other, Handle):
            return self._handle_session.ask(operation, self, other) is True
        if operation != "eq":
            self._handle_session.refuse(f"{operation} of a program's object and data")
        # A subclass of a built-in type is compared by its data, which the program sends without knowing the other side.
        value = self if self._handle_derived else self._handle_session.ask("plain", self)
        return NotImplemented if isinstance(value, Handle) else value == other

    return compare


for _name in ASKED:
    setattr(Handle, f"__{_name}__", lambda self, *args, _name=_name: self._handle_session.ask(_name, self, *args))
for _name in CONVERTED:
    setattr(Handle, f"__{_name}__", lambda self, *args, _name=_name: self._handle_convert(_name, *args))
for _name in ("neg", "pos", "invert", "abs"):
    setattr(Handle, f"__{_name}__", lambda self, _name=_name: self._handle_session.ask(_name, self, derived=self._handle_derived))
for _name in ("eq", "lt", "le", "gt", "ge"):
    setattr(Handle, f"__{_name}__", _compared(_name))
for _name in (*TELLING, *SCALING):
    _plain_name, _tells = _name.rstrip("_"), _name in TELLING
    setattr(Handle, f"__{_plain_name}__", _combined(_name, _tells))
    setattr(Handle, f"__r{_plain_name}__", _combined(_name, _tells, reflected=True))
    if _name != "divmod":
        setattr(Handle, f"__i{_plain_name}__", _combined(f"i{_plain_name}", _tells))


def passes(candidate: Pipe, frame: Frame) -> bool:
    """Run a test with the program's names in scope; return whether it ran to its end."""
    session = JudgeSession(candidate)
    try:
        told = candidate.read().get("names")
        if type(told) is not dict:  # the program did not load
            return False
        values = {name: session.decode(told[name]) for name in frame["names"] if name in told}
        solution = types.ModuleType("solution")
        vars(solution).update(values)
        sys.modules["solution"] = solution
        if "asyncio" in frame["code"]:
            _let_asyncio_run_handles()
        namespace = {name: values[name] for name in frame["global_names"] if name in values}
        namespace.update({name: __import__(name) for name in frame["modules"]}, __name__="__main__")
        exec(compile(frame["code"], "<test>", "exec", dont_inherit=True), namespace)
        for name in frame["test_functions"]:
            result = namespace[name]()
            if hasattr(result, "__await__"):
                import asyncio  # noqa: PLC0415 - takes as long to import as all of a simple test's run

                asyncio.run(_awaited(result))
    except BaseException:
        return False
    return not session.is_over  # a test that catches everything also catches the end of its session


async def _awaited(value: Any) -> Any:
    return await value


def _let_asyncio_run_handles() -> None:
    """Make asyncio.run, tasks and task groups accept a coroutine of the program, which they would refuse."""
    import asyncio  # noqa: PLC0415

    run, create_task = asyncio.run, asyncio.BaseEventLoop.create_task

    def own(coroutine: Any) -> Any:
        return _awaited(coroutine) if isinstance(coroutine, Handle) else coroutine

    asyncio.run = lambda main, **options: run(own(main), **options)  # type: ignore[assignment]
    asyncio.BaseEventLoop.create_task = lambda loop, task, **options: create_task(loop, own(task), **options)  # type: ignore[method-assign, assignment, misc]
