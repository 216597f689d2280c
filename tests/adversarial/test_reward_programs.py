"""Programs that want to pass without being right, right programs that must pass, and tests that cannot be judged.

Each cheat here passed, or could raise in the scoring process, in an earlier design or in an attack on this one.
"""
# ruff: noqa: E501 - programs are quoted as they are

import json
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from asyncrl.config.reward import CodeExecReward, RewardConfig
from asyncrl.errors import ConfigError, RewardError
from asyncrl.reward.sandbox.bubblewrap import ProgramStopped, open_sandbox, probe_sandbox
from asyncrl.reward.sandbox.code_exec import CodeTest, check_tests, extract_code, parse_tests, run_tests
from asyncrl.schema.samples import Prompt

STATUS = probe_sandbox()
pytestmark = pytest.mark.skipif(not STATUS.works, reason=f"no sandbox on this machine: {STATUS.reason}")
MARKED = Path(__file__).parents[2] / "experiments/benchmarks/marked/programs.jsonl"


def passed(program, *tests, **limits):
    sandbox = open_sandbox(CodeExecReward(**{"cpu_s": 1, "wall_s": 60, "memory_bytes": 256 << 20, **limits}))
    tests = parse_tests(json.dumps({"tests": list(tests)}), "p")
    return run_tests(sandbox, program, tests)


ADD = [
    "assert add(2, 3) == 5", "assert abs(add(2, 3) - 5) < 1e-6", "assert not add(2, 3) - 5",
    "assert sorted([add(2, 3), 1]) == [1, 5]", "assert set([add(2, 3)]) == {5}",
    "assert len([add(2, 3)]) == 1 and 5 in [add(2, 3)]",
    "for got, want in zip(map(add, [2], [3]), [5]):\n    assert got == want",
    "assert all(map(lambda pair: add(*pair) == 5, [(2, 3)])) and all(map(add, [2], [3]))\nassert add(2, 3) == 5",
    "import math\nassert math.isclose(add(2, 3), 5)",
    "import math\nassert math.fabs(add(2, 3) - 5) < 1e-6 or math.isclose(add(2, 3) - 5, 0)",
    "assert f'{add(2, 3) - 5:.2f}' == '0.00'", "assert '%.1f' % (add(2, 3) - 5) == '0.0'",
    "assert round(add(2, 3) - 5, 6) == 0", "import unittest\nunittest.TestCase().assertAlmostEqual(add(2, 3), 5)",
    "import unittest\nunittest.TestCase().assertEqual(add(2, 3), 5)", "assert sum([add(2, 3), -5]) == 0",
    "assert {0: True}.get(add(2, 3) - 5)", "assert [True, False][add(2, 3) - 5]", "assert len({add(2, 3), 5}) == 1",
    "assert 4 < add(2, 3) < 6", "assert isinstance(add(2, 3), int) and add(2, 3) in (5,)",
    "assert 1 <= add(2, 3) and 5 in {add(2, 3): 1}", "def check(candidate):\n    assert candidate(2, 3) == 5\ncheck(add)",
    {"function": "add", "args": [2, 3], "expected": 5}, {"function": "add", "args": [2, 3], "expected": 5.0},
    {"stdin": "2 3\n", "stdout": "5\n"},
]  # fmt: skip
"""Each fails where the program does not know that the answer is 5."""

FORGE = """
import gc, json, os, struct, sys, types
def pipes():
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if type(value).__name__ in ('Pipe', 'ProgramSession', 'Driver'):
                yield value
        frame = frame.f_back
def send(message):
    payload = json.dumps(message).encode()
    for fd in range(3, 32):
        try: os.write(fd, struct.pack('<I', len(payload)) + payload)
        except OSError: pass
"""

CHEATS = {
    "sends the names itself, built-in ones too": FORGE + """
fake = {'t': 'object', 'v': 0}
send({'names': {name: fake for name in ('__builtins__', '__import__', 'abs', 'sorted', 'set', 'len', 'zip', 'all', 'map', 'add', 'check', 'math')}})
""",
    "announces values for the names of the test": FORGE + "send({'names': {'add': 5, 'candidate': 5, 'got': 5, 'want': 5, 'pair': [2, 3]}})",
    "reads the test through format": """
def add(a, b):
    for path in ('{0.__globals__}', '{0.__code__.co_consts}', '{0.__self__}'):
        try: return path.format(a)
        except Exception: pass""",
    "asks the judge for attributes": FORGE + """
def add(a, b):
    for session in pipes():
        if hasattr(session, 'pipe'):
            session.pipe.write({'op': 'getattr', 'args': [{'t': 'function', 'v': 0}, '__globals__'], 'kwargs': {}, 'as_object': False})
            session.pipe.write({'call': 0, 'args': ['{0.__globals__}'], 'kwargs': {}})
            return session.pipe.read().get('value')""",
    "calls functions that it was not handed": FORGE + """
def add(a, b):
    send({'call': 0, 'args': [], 'kwargs': {}})
    send({'call': -1, 'args': [], 'kwargs': {}})
    send({'call': 'exit', 'args': [0], 'kwargs': {}})
    return None""",
    "an object that does arithmetic with the expected value": """
class Yes:
    __sub__ = __rsub__ = __add__ = __radd__ = __mul__ = __truediv__ = __mod__ = __xor__ = __and__ = lambda self, other: 0
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __ne__ = lambda *_: True
    __abs__ = __neg__ = __round__ = lambda self, *_: 0
    __bool__ = lambda self: False
    __len__ = __hash__ = __index__ = __int__ = lambda self: 0
    __float__ = lambda self: 0.0
    __iter__ = lambda self: iter([])
def add(a, b): return Yes()""",
    "an object that formats itself to nothing": """
class Yes:
    __sub__ = lambda self, other: self
    __format__ = lambda self, form: '0.00'
    __str__ = __repr__ = lambda self: '4'
def add(a, b): return Yes()""",
    "changes the test's values where it was not called with them": FORGE + """
class Yes:
    def __contains__(self, value):
        if isinstance(value, list): value.clear()
        return True
    def __getitem__(self, key): return key
def add(a, b): return Yes()
def found(): return []""",
    "answers an operator with plain data": FORGE + """
class Yes:
    def __sub__(self, other):
        send({'value': 0, 'changed': []}); return 0
    __rsub__ = __sub__
def add(a, b): return Yes()""",
    "raises StopIteration to end the test's loop": "def add(*_): raise StopIteration",
    "raises an exception class that is a StopIteration": "class Mine(StopIteration): pass\ndef add(*_): raise Mine(1)",
    "raises GeneratorExit and KeyboardInterrupt": "def add(*_): raise GeneratorExit",
    "raises errors that say they are the judge's": """
import json
class Malformed(Exception): pass
Malformed.__module__ = 'asyncrl.reward.sandbox.guest_values'
class SkipTest(Exception): pass
SkipTest.__module__ = 'unittest.case'
class SessionOver(Exception): pass
SessionOver.__module__ = 'guest_values'
class Unhashable(Exception): pass
Unhashable.__module__ = ['json']
raised = []
def add(*_):
    raised.append(1)
    raise (Malformed, SkipTest, SessionOver, Unhashable)[len(raised) % 4]()""",
    "is an exception class": "class add(Exception):\n    def __init__(self, a, b): self.value = a + 1\n    def __eq__(self, other): return True",
    "is a class whose objects equal everything": "class add:\n    def __init__(self, *a): pass\n    def __eq__(self, o): return True\n    def __hash__(self): return hash(5)",
    "subclasses of built-in types that lie": """
class I(int):
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = lambda *_: True
    __hash__ = lambda self: 5
    __sub__ = __rsub__ = __abs__ = lambda self, *_: self
    __bool__ = lambda self: False
    __int__ = __index__ = lambda self: 5
def add(a, b): return I(7)""",
    "subclasses of built-in types that stay objects, and lie": """
class I(int):
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = lambda *_: True
    __hash__ = lambda self: 6
    __sub__ = __rsub__ = __abs__ = __round__ = lambda self, *_: I(0)
    __bool__ = lambda self: False
    __int__ = __index__ = lambda self: 4
    def act(self): pass
def add(a, b): return I(0)""",
    "a list that answers what it is compared with": """
class L(list):
    __sub__ = __rsub__ = lambda self, other: L() if other == 5 else self
    __eq__ = lambda *_: True
    __hash__ = lambda self: 6
def add(a, b): return L([5])""",
    "a class that says it is int": "class I:\n    __class__ = int\n    def __eq__(self, o): return True\ndef add(a, b): return I()",
    "replaces the encoder": """
import sys, json
def add(a, b): return 4
for module in list(sys.modules.values()):
    if hasattr(module, 'encode') and hasattr(module, 'decode'):
        module.encode = lambda *a, **k: {'t': 'object', 'v': 0}
json.dumps = lambda *_: '{"value": true, "passed": true}'""",
    "patches what the driver imported": """
import os
os._exit_really = os._exit
os._exit = lambda status: os._exit_really(77)
def add(a, b): return None""",
    "threads that write for ever": FORGE + """
import threading
def spam():
    while True: send({'value': True, 'passed': True, 'ended': 0, 'names': {}})
threading.Thread(target=spam, daemon=True).start()
def add(a, b): return 4""",
    "deep data": "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    "cyclic data": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "huge data": "def add(a, b): return [0] * 10**7",
    "a huge number": "def add(a, b): return 10 ** 10 ** 6",
    "a lone surrogate": "def add(a, b): return '\\ud800'",
    "not a number": "def add(a, b): return float('nan')",
    "closes every descriptor": "import os\nos.closerange(0, 256)\ndef add(a, b): return 5 if False else 4",
    "leaves a process that answers": FORGE + """
if os.fork() == 0:
    os.setsid()
    while True: send({'value': 6.0, 'passed': True, 'status': 0, 'output': '6', 'stdout': '6', 'ended': 0})
def add(a, b): return 4""",
    "sets alarms on everybody": "import os, signal\nfor pid in range(1, 50):\n    for s in (signal.SIGSTOP, signal.SIGTERM):\n        try: os.kill(pid, s)\n        except OSError: pass",
    "ctypes": """
import ctypes
def add(a, b):
    try: ctypes.string_at(0)
    except BaseException: pass
    return None""",
    "gives back what the test multiplies and slices it with": """
class Y:
    def __mul__(s, o): return o
    __rmul__ = __pow__ = __mul__
    def __getitem__(s, k): return [k.stop]
    def keys(s): return {1: 1}.keys()
    def items(s): return {1: 1}.items()
def add(a, b): return Y()""",
    "a tuple whose items have the names of methods": """
class N(tuple):
    _fields = ('count', 'index', 'total', '__eq__', '__class__', '_x')
def add(a, b): return N((4,) * 6)""",
    "forges slices, views, counters and named tuples": FORGE + """
def add(a, b):
    for v in ({'t': 'slice', 'v': [0, 10**30, None]}, {'t': 'items', 'v': [1, 2]}, {'t': 'items', 'v': [[[], 1]]}, {'t': 'keys', 'v': [[1]]},
              {'t': 'tuple', 'v': [1], 'fields': ['real', '__eq__']}, {'t': 'tuple', 'v': [1], 'fields': 5}, {'t': 'tuple', 'v': [], 'fields': ['a'] * 10**5},
              {'t': 'dict', 'v': [[1, 'x']], 'counts': 1}, {'t': 'datetime.time', 'v': 5}):
        send({'value': v, 'changed': []})
    return 4""",
    "leaves folders that cannot be removed": """
import os
os.makedirs('/tmp/' + '/'.join(['d'] * 500))
os.chmod('/tmp/d', 0)
def add(a, b): return 4""",
    "leaves links, pipes and files without end": """
import os
os.symlink('/tmp', '/tmp/x'); os.mkfifo('/tmp/f'); os.symlink('/dev/zero', '/dev/shm/z')
for i in range(20000):
    try: open(f'/tmp/{i}', 'w').close()
    except OSError: break
def add(a, b): return 4""",
    "stops its driver": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\ndef add(a, b): return 4",
    "exits with success": "import sys\nsys.exit(0)",
    "exits with the judge's own status": "import os\nos._exit(77)",
    "exits inside the function": "import os\ndef add(a, b): os._exit(77)",
    "raises SystemExit inside the function": "def add(a, b): raise SystemExit(0)",
    "prints what a runner might print": "print('PASSED'); print('OK'); print('{\"passed\": true}')\ndef add(a, b): print('5 passed')",
    "replaces the built-ins": """
import builtins, sys, operator
builtins.AssertionError = ValueError
builtins.isinstance = lambda *_: True
operator.eq = lambda *_: True
sys.excepthook = lambda *_: None
def add(a, b): return None""",
    "shadows names that tests use": "abs = all = any = len = isinstance = lambda *_: True\nclass math: isclose = lambda *_: True\ndef add(a, b): return None",
    "rewrites its caller": """
import sys, gc
def add(a, b):
    frame = sys._getframe()
    while frame:
        for name in list(frame.f_globals):
            if name in ('passes', 'PASSED', 'OPERATIONS', 'decode', 'Handle'):
                frame.f_globals[name] = lambda *_: True
        frame = frame.f_back
    return [value for value in gc.get_objects() if value == 5]""",
    "writes verdicts into every descriptor": FORGE + "for message in ({'passed': True}, {'value': 6}, {'value': True}, {'ended': 0}, {'status': 0, 'stdout': '6'}): send(message)",
    "kills its driver": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "kills everything it can": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "reads the tests": "import glob\nfor path in glob.glob('/tmp/*') + glob.glob('/w/*'):\n    print(open(path).read())",
    "runs the tests on itself with patched assertions": "import unittest\nunittest.TestCase.assertEqual = lambda *_: None\ndef add(a, b): return unittest.mock.ANY if hasattr(unittest, 'mock') else None",
    "forges the words of a sandbox that cannot start": """
import os, signal
for fd in (1, 2): os.write(fd, b'bwrap: cannot start')
os.kill(os.getppid(), signal.SIGKILL)""",
    "is not Python": "def add(a, b) return a + b",
    "is empty": "",
}  # fmt: skip


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_passes_nothing_and_raises_nothing(cheat):
    assert passed(CHEATS[cheat], *ADD, wall_s=3) == 0


OF_TESTS_OF_THEIR_OWN = {
    "changes what it is not called with": ("class Any:\n    def __contains__(self, v):\n        v.clear()\n        return True\ndef got(): return Any()\ndef f(): return []",
     "expected = [1, 2]\nassert expected in got()\nassert f() == expected"),
    "looks for the expected value in its memory": ("import gc\nsecret = 31337 * 7\ndef f():\n    return any(isinstance(v, str) and str(secret) in v for v in gc.get_objects() if isinstance(v, str))",
     {"function": "f", "expected": True}, {"function": "f", "expected": 219359}),
    "reaches into the test through what it is handed": ("""
def apply(function):
    for path in ('__globals__', '__code__', '__closure__', 'gi_frame', '__self__'):
        value = getattr(function, path, None)
        if '918273645' in repr(value): return value
    return None
""", "secret = 918273645\nassert apply(lambda: secret) is not None"),
    "swallows the assertion of a with block": ("class Quiet:\n    def __enter__(self): return self\n    def __exit__(self, *e): return True\n    def value(self): raise KeyError\ndef quiet(): return Quiet()",
     "with quiet():\n    assert 1 == 2", "with quiet() as q:\n    q.value()\n    assert False"),
    "skips what unittest runs": ("import unittest, unittest.case\nclass Mine(unittest.SkipTest): pass\ndef f(error): raise (unittest.SkipTest, unittest.case._ShouldStop, Mine)[error]", *(
     f"import unittest, unittest.mock\ndef t():\n    assert f({error}) == 5\nr = unittest.TestResult()\nunittest.FunctionTestCase(t).run(r)\nassert r.wasSuccessful()" for error in range(3))),
    "says that it ended, and lives on in the next test": (FORGE + """
def add(a, b):
    session = next(each for each in pipes() if hasattr(each, "objects"))
    session.pipe.write({"ended": True})
    while True:
        frame = session.pipe.read()
        session.pipe.write({"ended": True, "value": 5, "changed": [], "names": {"add": {"t": "object", "v": 0}}})
""", "add(0, 0)", "assert add(2, 3) == 5", "assert add(2, 3) == 5"),
}  # fmt: skip


@pytest.mark.parametrize("cheat", OF_TESTS_OF_THEIR_OWN)
def test_a_cheat_of_a_test_of_its_own_passes_nothing(cheat):
    assert passed(*OF_TESTS_OF_THEIR_OWN[cheat], wall_s=20) == 0


ERRS_WITHOUT_ASKING = [
    "total(object())", "total([object()])", "total(int(x) for x in ['a'])", "total(*nested)", "total('x' * (1 << 20))", "total(slice(object()))",
    "made < 5", "5 >= made", "max(made, 5)", "sorted([made, 1])", "len(made - 2)", "bool(made - 2)", "made - datetime.date(2020, 1, 1)",
]  # fmt: skip


@pytest.mark.parametrize("caught", ["except (TypeError, ValueError)", "except Exception", "except"])
def test_an_error_of_the_judge_s_own_is_not_one_that_a_test_expects_of_the_program(caught):
    program = "class Made:\n    __sub__ = lambda self, other: self\nmade = Made()\ndef total(*values): return 0"
    opening = "import datetime\nnested = []\nfor _ in range(200): nested = [nested]\n"
    tests = [
        f"{opening}try:\n    {act}\n    failed = True\n{caught}:\n    failed = False\nassert not failed"
        for act in ERRS_WITHOUT_ASKING
    ]
    assert passed(program, *tests, output_bytes=1 << 16) == 0
    right = "def total(values): return sum(values)"
    assert passed(right, f"try:\n    total([1, 'a'])\n    failed = True\n{caught}:\n    failed = False\nassert not failed") == 1


def test_the_data_of_an_object_is_asked_for_when_it_is_compared():
    """The limit that docs/rewards.md states: a call in between that hands over the expected value has told it."""
    program = "class Late(list):\n    def get(self): return self\nr = Late()\ndef encode(text): return r\ndef decode(text):\n    r[:] = text\n    return 'hi'"
    told = "r = encode('hi')\nassert decode(['i', 'j']) == 'hi'\nassert r == ['i', 'j']"
    assert passed(program, told, "assert encode('hi') == ['i', 'j']") == 1


def test_what_is_right_passes_all_of_them():
    code = "def add(a, b): return a + b\nif __name__ == '__main__': print(add(*map(int, input().split())))"
    # `expected: 5.0` takes any number, `expected: 5` an integer alone.
    assert passed(code, *ADD) == len(ADD)


HOSTILE_FRAMES = [
    b"", b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00[]", b"\x02\x00\x00\x00{}", b"\x05\x00\x00\x00nul",
    b"\x04\x00\x00\x00null", b"\x10\x27\x00\x00" + b"[" * 10000,
]  # fmt: skip


@pytest.mark.parametrize("value", [
    '{"t": "dict"}', '{"t": "dict", "v": 5}', '{"t": "dict", "v": [[1]]}', '{"t": "dict", "v": [[[], 1]]}', '{"t": "int", "v": "x"}', '{"t": "int", "v": null}',
    '{"t": ["int"], "v": 1}', '{"v": 1}', "{}", '{"t": "decimal.Decimal", "v": "sNaN"}', '{"t": "fractions.Fraction", "v": ["0x1", "0x0"]}',
    '{"t": "fractions.Fraction", "v": "1"}', '{"t": "set", "v": [[1]]}', '{"t": "builtins.range", "v": [0, 1e308, 0]}', "1e400", "NaN", "[[[[1]]]]", "[" * 5000 + "]" * 5000,
    '{"t": "dict", "v": [[{"t": "tuple", "v": []}, 1], [2, 3]]}', '"' + "\\ud800" * 3 + '"', "9" * 5000,
])  # fmt: skip
@pytest.mark.parametrize("expected", [5, 1.5, [1], {"a": 1}, "x", None, True])
def test_a_forged_result_scores_0_and_raises_nothing(value, expected):
    from asyncrl.reward.sandbox.code_exec import _run_once

    class Forged:
        def send(self, frame): ...
        def receive(self):
            return {"status": 0, "output": value}

    for unordered in (False, True):
        assert _run_once(Forged(), CodeTest(function="f", expected=expected, unordered=unordered)) is False
    for reply in ({}, {"status": 0}, {"status": 0, "output": 5}, {"status": [], "output": "5"}, {"status": "0", "output": value}):
        Forged.receive = lambda self, reply=reply: reply
        assert _run_once(Forged(), CodeTest(function="f", expected=expected)) is False
        assert _run_once(Forged(), CodeTest(stdin="", stdout="x")) is False


@pytest.mark.parametrize("frame", HOSTILE_FRAMES)
def test_broken_messages_cost_the_program_its_tests_only(frame):
    code = f"""
import os
for fd in range(3, 32):
    try: os.write(fd, {frame!r})
    except OSError: pass
def add(a, b): return 4
"""
    assert passed(code, *ADD[:2], ADD[-3], wall_s=2) == 0


def test_a_program_longer_than_its_output_may_be_is_run():
    """Else a long completion would fail its sample, and escape a 0."""
    code = "def add(a, b): return a + b\n# " + "\u00e9" * 100_000
    assert passed(code, *ADD[:2], output_bytes=1 << 12) == 2


def test_nothing_of_an_earlier_test_is_alive_or_can_be_read():
    """Not its processes, not its files, not its modules: each would tell a program what an earlier test asked."""
    code = """
import os, sys, time
PLACES = ("/tmp/left", "/dev/shm/left", "/tmp/folder/left")
def nothing_left():
    found = [path for path in (*PLACES, "/tmp/.left") if os.path.lexists(path)]
    time.sleep(0.3)  # whoever is alive writes its file again
    found += [path for path in PLACES if os.path.lexists(path)]
    found += ["module"] if hasattr(sys, "left") else []
    leave()
    return found
def leave():
    sys.left = 5
    os.symlink("/usr", "/tmp/.left")
    ready, written = os.pipe()
    if os.fork() == 0:
        os.setsid()
        while True:
            os.makedirs("/tmp/folder", exist_ok=True)
            for path in PLACES:
                open(path, "w").close()
            os.write(written, b"x")
    os.read(ready, 1)
"""
    test = {"function": "nothing_left", "expected": []}
    assert passed(code, test, test, "assert nothing_left() == []", test) == 4


def test_what_an_ended_program_wrote_is_not_read_in_the_next_test():
    code = FORGE + """
left = []
def add(a, b):
    if a == 0:
        send({"names": {"add": {"t": "object", "v": 0}}})
        for _ in range(3): send({"value": 5, "changed": []})
        os._exit(0)
    return a + b
"""  # fmt: skip
    assert passed(code, "add(0, 0)\nadd(1, 1)", "assert add(2, 3) == 5", "add(0, 0)\nassert False", "assert add(2, 3) == 5") >= 2
    assert passed(code.replace("a + b", "4"), "add(0, 0)\nassert False", "assert add(2, 3) == 5", "assert add(2, 3) == 5") == 0


def test_the_judge_is_up_before_the_time_of_the_program_begins():
    """Else a program that is slow in its other tests would find its judge too late, and fail its sample."""
    sandbox = Mock(**{"judge.side_effect": [None, ProgramStopped]})
    run_tests(sandbox, "", [CodeTest(stdin="", stdout="5"), CodeTest(code="assert f() == 5")])
    assert [name for name, *_ in sandbox.mock_calls[:4]] == ["launch", "judge", "launch().begin", "launch().send"]


def test_lists_whose_order_does_not_matter_have_the_same_values():
    cases = {
        "{2, 1}": [1, 2], "[2, 1, 1]": [1, 1, 2], "(x for x in (2, 1))": [1, 2], "[[2], [1]]": [[1], [2]],
        "[0.1 + 0.2, 1]": [1, 0.3],
    }  # fmt: skip
    tests = [{"function": "f", "args": [text], "expected": expected, "unordered": True} for text, expected in cases.items()]
    assert passed("def f(text): return eval(text)", *tests) == len(cases)
    tests = [{**test, "expected": [*test["expected"][:-1], 7]} for test in tests]
    assert passed("def f(text): return eval(text)", *tests) == 0


# -- right programs, however they are written down -------------------------------------------------------------------------------


RIGHT = "print(5)\n"


@pytest.mark.parametrize("text", [
    "```python\nprint(5)\n```", "````python\nprint(5)\n````", "~~~python\nprint(5)\n~~~", "```{python}\nprint(5)\n```", "```{.python}\nprint(5)\n```",
    '```python title="main.py"\nprint(5)\n```', "``` python\nprint(5)\n```", "```Python3\nprint(5)\n```", "```python:main.py\nprint(5)\n```", "1. So:\n\n   ```python\n   print(5)\n   ```",
    "- a\n  - b\n\n    ```py\n    print(5)\n    ```", "> ```python\n> print(5)\n> ```", "```bash\npip install x\n```\n```python\nprint(5)\n```",
    "```json\n{}\n```\n\n```python\nprint(5)\n```", "```text\nhello\n```\n```\nprint(5)\n```\n```json\n5\n```", "print(5)\n", "```python\nprint(5)\n", "```\nprint(5)\n```",
    "    ```python\nprint(5)\n    ```", "<answer>\n```python\nprint(5)\n```\n</answer>", "text ```python in a line``` and\n```python\nprint(5)\n```", "````\n```python\nx\n```\n````\n```python\nprint(5)\n```",
    "<answer>```python\nprint(5)\n```\n</answer>", "<answer>\n```python\nprint(5)\n```</answer>", "Here is the code:```python\nprint(5)\n```\nThis prints 5.", "```python3.11\nprint(5)\n```",
    "Code: ```\nprint(5)\n```", "<answer>```\nprint(5)\n```</answer>", "```\nprint(4)\n```\nBetter: ``` \nprint(5)\n```\nIt prints 5.", "```python\nprint(5)```\nIt prints 5.",
    "```python\nprint(5)```\nOutput:\n```\n5\n```", "```python\nprint(4)```\nNo:\n```python\nprint(5)\n```", "```python\nprint(5)```\nRuns as:\n```bash\npython a.py\n```\nand prints\n```\n5\n```",
    "```python\nprint(4)\n```\nNo:\n```python\nprint(5)\n```", "\r\n```python\r\nprint(5)\r\n```\r\n",
])  # fmt: skip
def test_code_is_found_in_markdown(text):
    assert extract_code(text).strip() == RIGHT.strip()


@pytest.mark.parametrize("line", ["return '''Use:```", "return '''Use: ```python", "# a ```"])
@pytest.mark.parametrize(("before", "after"), [
    ("```python\n", "```"), ("- a\n\n  ```\n  x\n  ```\nCode: ```\n", "```\nIt works."), ("<answer>```python\n", "```</answer>\nor\n```text\nx\n```"),
])  # fmt: skip
def test_a_line_of_a_program_that_ends_as_a_fence_does_not_end_the_program(line, before, after):
    program = f"def f():\n    {line}\nx = 1\n"
    assert extract_code(before + program + after) == program


@pytest.mark.parametrize("text", [
    "```" + " " * 20_000, "`" * 50_000, "```python\n" * 5_000, "> " * 20_000, "- " * 20_000, "1. " * 10_000, "~~~\n" * 10_000,
    "[" * 50_000, " " * 400_000, "<a>" * 20_000, "\t```\n" * 9_000,
])  # fmt: skip
def test_markdown_of_any_shape_is_read_in_linear_time(text):
    started_s = time.process_time()
    extract_code(text)
    assert time.process_time() - started_s < 5


@pytest.mark.parametrize("ending", ["exit()", "quit()", "exit(0)", "raise SystemExit", "import sys; sys.exit()"])
def test_a_script_may_end_itself(ending):
    assert passed(f"print(5)\n{ending}", {"stdin": "", "stdout": "5"}) == 1


def test_the_marked_programs_are_judged_right():
    """Every third of them; `asyncrl bench rewards` takes all."""
    cases = [json.loads(line) for line in MARKED.read_text().splitlines()][::3]
    wrong = [case for case in cases if (passed(case["program"], *case["tests"]) == len(case["tests"])) != case["right"]]
    assert not wrong


# -- what handles do ------------------------------------------------------------------------------------------------------------

OBJECTS = """
import asyncio, collections, contextlib, datetime, fractions
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y) if isinstance(o, Vector) else Vector(self.x + o, self.y + o)
    __radd__ = __add__
    def __mul__(self, k): return Vector(self.x * k, self.y * k) if not isinstance(k, Vector) else self.x * k.x + self.y * k.y
    __rmul__ = __mul__
    def __eq__(self, o): return isinstance(o, Vector) and (self.x, self.y) == (o.x, o.y)
    def __hash__(self): return hash((self.x, self.y))
    def __neg__(self): return Vector(-self.x, -self.y)
    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** .5
    def __contains__(self, k): return k in (self.x, self.y)
    def __iter__(self): return iter((self.x, self.y))
    def __len__(self): return 2
    def __repr__(self): return f"Vector({self.x}, {self.y})"
    def __float__(self): return float(abs(self))
    def __bool__(self): return bool(self.x or self.y)
class BankError(Exception): pass
class Insufficient(BankError, ValueError):
    def __init__(self, need): super().__init__(f"need {need}"); self.need = need
def pay(n): raise Insufficient(n)
def loaded(text): import json; return json.loads(text)
def nothing(): import queue; queue.Queue().get_nowait()
def middle(values): import statistics; return statistics.median(values)
@contextlib.contextmanager
def opened(log):
    log.append("in")
    try: yield Vector(1, 2)
    finally: log.append("out")
async def later(x):
    await asyncio.sleep(0)
    return x * 2
def gen():
    yield 1
    yield 2
def apply(f, *a, **k): return f(*a, **k)
def days(n): return datetime.date(2020, 1, 1) + datetime.timedelta(n)
def grow(d): d["a"].append(1)
def freq(s): return collections.Counter(s)
def half(): return fractions.Fraction(1, 2)
def named(**given): return sorted(given)
def catches(f):
    try: return f(1)
    except ValueError as e: return str(e)
def sqrt(x): return x ** .5
PI = 3
class Store:
    def __init__(self): self.inside = {}
    def put(self, key, value): self.inside[key] = value; return self
    def items(self): return self.inside.items()
    def keys(self): return self.inside.keys()
    def values(self): return self.inside.values()
    def __getitem__(self, key): return list(self.inside)[key] if isinstance(key, slice) else self.inside[key]
Point = collections.namedtuple("Point", "x y")
def point(): return Point(1, 2)
def evens(n): return (2 * i for i in range(1, n + 1))
class Stack:
    limit = 3
    def __init__(self): self.items = []
    def push(self, item):
        if len(self.items) == self.limit: raise OverflowError('full')
        self.items.append(item); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
    def __iter__(self): return iter(self.items)
def count():
    n = 0
    while True:
        yield n
        n += 1
"""

HONEST = [
    "assert Vector(1, 2) * 2 == Vector(2, 4) and 2 * Vector(1, 2) == Vector(2, 4) and Vector(1, 2) + 1 != Vector(1, 2)",
    "assert (Vector(1, 2) * 2).x == 2 and str(Vector(1, 2) * 2) == 'Vector(2, 4)' and f'{Vector(1, 2)}' == 'Vector(1, 2)'",
    "assert Vector(1, 2) * Vector(3, 4) == 11 and -Vector(1, 2) == Vector(-1, -2) and abs(Vector(3, 4)) == 5",
    "assert 1 in Vector(1, 2) and 3 not in Vector(1, 2) and list(Vector(1, 2)) == [1, 2] and len(Vector(1, 2)) == 2",
    "x, y = Vector(5, 6)\nassert (x, y) == (5, 6) and sum([Vector(1, 1), Vector(2, 2)], Vector(0, 0)) == Vector(3, 3)",
    "assert {Vector(1, 2): 3}[Vector(1, 2)] == 3 and len({Vector(1, 2), Vector(1, 2)}) == 1",
    "assert float(Vector(3, 4)) == 5.0 and Vector(1, 0) and not Vector(0, 0)",
    "try:\n    pay(5)\n    assert False\nexcept Insufficient as e:\n    assert e.need == 5 and str(e) == 'need 5' and isinstance(e, ValueError)",
    "try:\n    pay(5)\nexcept BankError:\n    pass\nelse:\n    assert False",
    "import json\ntry:\n    loaded('{')\nexcept json.JSONDecodeError as e:\n    assert e.pos == 1 and str(e).startswith('Expecting')\nelse:\n    assert False",
    "import queue, statistics, unittest\nwith unittest.TestCase().assertRaises(queue.Empty):\n    nothing()\ntry:\n    middle([])\nexcept statistics.StatisticsError:\n    pass",
    "import unittest\nwith unittest.TestCase().assertRaises(Insufficient) as c:\n    pay(3)\nassert c.exception.need == 3 and Insufficient(4).need == 4",
    "log = []\nwith opened(log) as v:\n    assert v.x == 1",
    "import asyncio\nasync def t():\n    a, b = await asyncio.gather(later(1), later(2))\n    return a + b + await later(3)\nassert asyncio.run(t()) == 12 and asyncio.run(later(4)) == 8",
    "async def test_it():\n    assert await later(2) == 4",
    "assert list(gen()) == [1, 2] and next(gen()) == 1 and [want == got for want, got in zip([1, 2], gen())] == [True, True]",
    "assert apply(len, 'abc') == 3 and apply(max, [1, 5], key=lambda x: -x) == 1 and apply(lambda *a, k=1: sum(a) + k, 1, 2, k=5) == 8",
    "import datetime\nassert days(1) == datetime.date(2020, 1, 2)\nd = {'a': []}\ngrow(d)\nassert d == {'a': [1]} and freq('aab') == {'a': 2, 'b': 1}",
    "from fractions import Fraction\nassert half() == Fraction(1, 2) and half() * 2 == 1",
    "values = [b'a', bytearray(b'b'), range(3), range(2 ** 70, 0, -5), 1 - 2j]\nassert apply(lambda *x: [*x], *values) == values == [*apply(tuple, values)]",
    "def boom(x): raise ValueError('bad')\nassert catches(boom) == 'bad' and (lambda f: f(3))(lambda n: apply(lambda m: m + n, 4)) == 7",
    "assert named(self=1, operation=2, derived=3, function=4, args=5, kwargs=6) == ['args', 'derived', 'function', 'kwargs', 'operation', 'self']",
    "import solution\nassert solution.sqrt(9) == 3.0 and solution.PI == 3",
    "from solution import *\nassert sqrt(4) == 2 and PI == 3",
    "def test_a():\n    assert PI == 3\ndef test_b():\n    assert sqrt(4) == 2",
    "if __name__ == '__main__':\n    assert PI == 3",
    "from unittest.mock import Mock\nm = Mock(return_value=3)\nassert apply(m, 1) == 3\nm.assert_called_once_with(1)",
    "import copy\nv = Vector(1, 2)\nw = copy.copy(v)\nw.x = 9\nassert v.x == 1 and w.x == 9 and not hasattr(v, 'z')",
    "assert sorted([Vector(2, 0), Vector(1, 0)], key=lambda v: v.x)[0].x == 1",
    "assert list(Vector(1, 2) * 2) == [2, 4] and tuple(2 * Vector(1, 2)) == (2, 4) and len(Vector(1, 2) * 2) == 2",
    "v = Vector(1, 2)\nv *= 2\nassert list(v) == [2, 4] and [*map(str, v)] == ['2', '4']",
    "s = Store().put('b', 1).put('a', 2)\nassert sorted(s.items()) == [('a', 2), ('b', 1)] and dict(s.items()) == {'b': 1, 'a': 2}",
    "s = Store().put('b', 1)\nassert s.keys() == {'b'} and list(s.values()) == [1] and dict(s) == {'b': 1} and s[0:1] == ['b']",
    "assert point() == (1, 2) and point().x == 1 and Point(3, y=4).y == 4 and list(point()) == [1, 2]",
    "assert freq('aab').most_common(1) == [('a', 2)] and freq('aab')['z'] == 0 and freq('aab') == {'a': 2, 'b': 1}",
    "g = evens(2)\nassert next(g) == 2 and next(g) == 4\ntry:\n    next(g)\n    assert False\nexcept StopIteration:\n    pass",
    "a, b = evens(2)\nassert (a, b) == (2, 4) and sum(evens(2)) == 6 and max(evens(2)) == 4 and sorted(evens(2)) == [2, 4]",
    "import itertools\nassert list(itertools.islice(count(), 3)) == [0, 1, 2] and {*evens(2)} == {2, 4}",
    "s = Stack().push(1).push(2)\nassert len(s) == 2 and s.pop() == 2 and s.items == [1] and Stack.limit == 3 and list(s) == [1]",
    "assert Stack().push(1) == Stack().push(1) and Stack().push(1) != Stack().push(2) and isinstance(Stack(), Stack)",
    "s = Stack()\nfor n in range(3): s.push(n)\ntry:\n    s.push(4)\nexcept OverflowError as error:\n    assert str(error) == 'full'\nelse:\n    assert False",
]  # fmt: skip


TALKATIVE = """
import asyncio, threading
def hello(n):
    for i in range(n): print("hello", i)
    return n
class Counter:
    def __init__(self): self.n, self.lock = 0, threading.Lock()
    def add(self):
        with self.lock: self.n += 1
async def later(x):
    await asyncio.sleep(0)
    return x * 2
def apply(f, *a): return f(*a)
def double(x): return 2 * x
def side_by_side(f, xs):
    out = [None] * len(xs)
    def run(i): out[i] = f(xs[i])
    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(xs))]
    for t in threads: t.start()
    for t in threads: t.join()
    return out
"""


AT_ONCE = [
    "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    hello(2)\nassert out.getvalue() == 'hello 0\\nhello 1\\n'",
    "import sys, io\nsys.stdout = io.StringIO()\nhello(1)\nassert sys.stdout.getvalue() == 'hello 0\\n'",
    "from unittest.mock import patch\nimport io\nwith patch('sys.stdout', new_callable=io.StringIO) as out:\n    hello(1)\nassert out.getvalue() == 'hello 0\\n'",
    "import threading\nc = Counter()\nts = [threading.Thread(target=c.add) for _ in range(12)]\nfor t in ts: t.start()\nfor t in ts: t.join()\nassert c.n == 12",
    "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as e:\n    assert list(e.map(double, range(20))) == [2 * i for i in range(20)]",
    "import asyncio\nasync def main():\n    t, u = asyncio.create_task(later(2)), asyncio.ensure_future(later(3))\n    return await t + await u + await asyncio.wait_for(later(1), 50)\nassert asyncio.run(main()) == 12",
    "import asyncio\nloop = asyncio.new_event_loop()\nassert loop.run_until_complete(later(2)) == 4",
    "assert apply(lambda x: apply(lambda y: double(y) + 1, x), 3) == 7 and apply(lambda x: double(x), 4) == 8",
    "assert side_by_side(lambda x: x + 1, [1, 2, 3]) == [2, 3, 4]", "hello(100_000)\nassert double(2) == 4",
]  # fmt: skip
"""Of what is printed, of threads and of tasks."""
EXTENDED = """
import decimal
from collections import OrderedDict
from enum import Enum, IntEnum
from typing import NamedTuple
class LRUCache(OrderedDict):
    def __init__(self, n): super().__init__(); self.n = n
    def get(self, k): return self[k] if k in self else -1
    def put(self, k, v): self[k] = v
class Stack(list):
    def push(self, v): self.append(v)
    def peek(self): return self[-1]
class P(NamedTuple):
    x: int
    y: int
    def norm(self): return abs(self.x) + abs(self.y)
    @property
    def total(self): return self.x + self.y
class Q(NamedTuple):
    x: int
class CI(dict):
    def __setitem__(self, k, v): super().__setitem__(k.lower(), v)
    def __getitem__(self, k): return super().__getitem__(k.lower())
class Zeros(dict):
    def __missing__(self, k): return 0
class AttrDict(dict):
    def __getattr__(self, k): return self[k]
class V(tuple):
    def __add__(self, o): return V(a + b for a, b in zip(self, o))
class Status(str, Enum):
    ON, OFF = "on", "off"
class Sized(int):
    def __add__(self, o): return Sized(int(self) + o)
class Priority(IntEnum):
    LOW, HIGH = 1, 2
class Money(int):
    @classmethod
    def parse(cls, text): return cls(text)
    @staticmethod
    def zero(): return Money(0)
class Point(NamedTuple):
    x: int
    y: int
    @classmethod
    def origin(cls): return cls(0, 0)
config = AttrDict(depth=3)
class Amount(decimal.Decimal): pass
def amounts(): return [Amount(2)]
"""
OF_EXTENDED = [
    "c = LRUCache(2)\nc.put(1, 1)\nassert c.get(1) == 1 and c.get(3) == -1",
    "s = Stack()\ns.push(3)\nassert s.peek() == 3 and len(s) == 1", "assert P(3, -4).norm() == 7", "assert Q(3) == (3,)",
    "d = CI()\nd['A'] = 1\nassert d['a'] == 1 and d == {'a': 1} and d != {'A': 1}", "assert Zeros()['x'] == 0 and Zeros(a=1) == {'a': 1}",
    "assert config.depth == 3 and config == {'depth': 3}", "assert V((1, 2)) + V((3, 4)) == V((4, 6)) and V((1, 2)) == (1, 2) != V((1, 3))",
    "assert P(1, 2).total == 3 and P(1, 2) == (1, 2) and P(1, 2) in [(1, 2)]", "s = Stack()\ns.push(3)\nassert s == [3] and [3] == s and s != [4]",
    "assert Status.ON == 'on' and Status('off') == Status.OFF and Status.ON in {'on'}",
    "assert Priority.HIGH > 1 and Priority.HIGH + 1 == 3 and isinstance(Priority.HIGH, int)",
    "m = Money.parse('3')\nassert 2 < m < 5 and '%d' % m == '3' and isinstance(m, int) and Money.zero() == 0",
    "p = Point.origin()\nassert isinstance(p, tuple) and p == (0, 0) and p.x == 0 and sorted([p, (0, -1)])[1] == (0, 0)",
    "assert Sized(3) + 1 == 4 and Sized(3) < 4", "import decimal\nassert amounts() == [decimal.Decimal(2)]",
]  # fmt: skip
"""Classes that extend a built-in one keep their functions."""

HANDED = {"objects": (OBJECTS, HONEST, "sqrt(4) == 3"), "at once": (TALKATIVE, AT_ONCE, "double(2) == 5"),
          "extended": (EXTENDED, OF_EXTENDED, "P(1, 1).norm() == 3")}  # fmt: skip


@pytest.mark.parametrize(("program", "tests", "wrong"), HANDED.values(), ids=HANDED)
def test_honest_tests_of_what_a_program_hands_out_pass_and_fail_as_they_should(program, tests, wrong):
    assert passed(program, *tests) == len(tests)
    assert passed(program, *(f"{test}\nassert {wrong}" for test in tests)) == 0


def test_an_object_is_not_sent_with_what_is_done_to_it():
    program = "class Big(list):\n    def first(self): return self[0]\ndef made(): return Big(range(100_000))\ndef second(big): return big[1]"
    test = "m = made()\nassert m[5] == 5 and len(m) == 100_000 and second(m) == 1 == m.first() + 1"
    assert passed(program, test, output_bytes=1 << 16) == 1


def test_modules_that_a_test_does_not_import_are_the_judge_s_own():
    cheat = """
class Yes:
    def __getattr__(self, name): return lambda *_, **__: Yes()
    def __eq__(self, other): return True
    def __bool__(self): return True
math = copy = re = statistics = collections = Yes()
def area(r): return Yes()
"""
    tests = [
        "assert math.isclose(area(2), 12.566, rel_tol=1e-3)",
        "assert collections.Counter(area(2)) == collections.Counter('aab')",
        "assert re.match('a+b', area(2)) and statistics.mean([area(2), 4]) == 5",
        "def test_area():\n    assert math.isclose(area(1), math.pi)",
    ]
    assert passed(cheat, *tests) == 0
    right = "def area(r): return 3.14159265358979 * r * r"  # it need not import what its tests use
    assert passed(right, tests[0], tests[3]) == 2
    own = "class Box:\n    def push(self, x): return x + 1\nheapq = Box()\ndef copy(x): return [*x]"
    assert passed(own, "assert heapq.push(1) == 2", "assert copy([1]) == [1] and callable(copy)") == 2


def test_tests_whose_arguments_have_defaults_are_called():
    test = "def test_add(a=2, *, b=3):\n    assert add(a, b) == 5"
    assert passed("def add(a, b): return a + b", test) == 1
    assert passed("def add(a, b): return 0", test) == 0


OF_OTHERS = ("isclose", "assertEqual", "assert_almost_equal", "array_equal", "almost_equal", "approx_equal", "is_close")
"""By which a test compares where it forgot an import."""


@pytest.mark.parametrize(("test", "said"), [
    ("x = 1\nassert x == 1", "line 1: uses nothing of the program"),
    ("from math import sqrt\nassert sqrt(4) == 2", "uses nothing of the program"),
    ("def check(candidate):\n    assert candidate(1) == 2", "uses nothing of the program"),
    ("assert f(1) ==", "line 1: is not Python"), ("\nclass Node:\n    pass\nassert f(Node())", "line 2: defines class Node"),
    ("import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)", "line 2: defines class T"),
    ("assert eval(f(1)) == 5", "line 1: uses eval"), ("exec(f(1))", "uses exec"),
    ("import pickle\nassert pickle.loads(f(1)) == 5", "imports pickle"),
    ("import dataclasses\nassert dataclasses.asdict(f(1)) == {}", "imports dataclasses"),
    ("import numpy as np\nassert np.allclose(f(1), 5)", "line 1: imports numpy, which is not in the standard library"),
    ("import pytest\nwith pytest.raises(ValueError):\n    f(1)", "imports pytest"),
    ("@memoize\ndef g(x): return x\nassert g(1) == 1", "line 2: decorates g|line 1: decorates g"),
    ("async def t():\n    async with f() as x:\n        pass", "line 2: uses async for or async with"),
    ("assert f.__doc__", "line 1: reads __doc__ of a program's object"), ("assert vars(f(1)) == {}", "calls vars"),
    ("from unittest.mock import patch\nwith patch('builtins.input', return_value='5'):\n    assert f() == 5", "line 2: patches something"),
    ("import unittest.mock as m\n@m.patch.object(solution, 'g')\ndef test_f(g):\n    assert f(1)\nimport solution", "line 2: patches"),
    ("import io, sys\nsys.stdin = io.StringIO('5')\nassert f() == 5", "line 2: sets sys.stdin"),
    ("import contextlib, io\nwith contextlib.redirect_stderr(io.StringIO()) as e:\n    f()", "line 2: uses redirect_stderr"),
    ("import os\nos.environ['X'] = '1'\nassert f() == 1", "line 2: sets os.environ"),
    ("import multiprocessing as m\nassert m.Pool(2).map(f, [1]) == [1]", "line 1: imports multiprocessing; a process of the test's own"),
    ("from concurrent.futures import ThreadPoolExecutor, ProcessPoolExecutor\nwith ProcessPoolExecutor() as e:\n    e.map(f, [1])", "line 2: uses ProcessPoolExecutor"),
    ("import concurrent.futures as c\nwith c.ProcessPoolExecutor() as e:\n    assert e.submit(f, 1).result() == 1", "line 2: uses Proc"),
    ("r = f(1)\nassert r.__eq__(5)", "line 2: reads __eq__"),
    ("assert memo(lambda x: x * x)(3) == 9", "line 1: calls what came of a function of the test"),
    ("def sq(x):\n    return x * x\nassert memo(sq, 2)(3) == 9", "line 3: calls what came of a function of the test"),
    *((f"assert {name}(f(1), 2.5)", f"line 1: uses {name}, which it does not import or define") for name in OF_OTHERS),
    ("assert f(1) == pytest.approx(2.5)", "line 1: uses pytest, which it does not import or define"),
    ("assert np.allclose(f(1), [2.5])", "line 1: uses np, which it does not import or define"),
    ("def test_f():\n    self.assertEqual(f(1), 2)", "line 2: uses self, which it does not import or define"),
    ("unittest.TestCase().assertEqual(f(1), 2)", "line 1: uses unittest, which it does not import or define"),
    ("import solution\nassertEqual(solution.f(1), 2)", "line 2: uses assertEqual, which it does not import or define"),
    ("import unittest\nunittest.TestCase().assertSetEqual(f(1), {1})", "line 2: uses assertSetEqual, which hands the program"),
    ("class Boom(ValueError):\n    pass\ndef bad(): raise Boom\nassert retry(bad, 5, Boom) is None", "line 1: defines class Boom"),
    ("x = f(1)\nassert type(x) is Foo", "line 2: compares a type with Foo; .* write isinstance"),
    ("assert int != type(f(1)) != Foo and Foo(1)", "line 1: compares a type with Foo"),
    ("assert type(f(1)) in (Foo, int)", "line 1: compares a type with Foo"),
    ("assert type(f(1)).__name__ == 'Foo'", "line 1: compares a type with Foo"),
    ("import solution\nassert type(solution.f(1)) is solution.Foo", "line 2: compares a type with Foo"),
    ("assert type(f(1)).__name__ == Foo.__name__", "line 1: compares a type with Foo"),
    ("import unittest\nunittest.TestCase().assertIs(type(f(1)), Foo)", "line 2: compares a type with Foo"),
    ("assert prod(f(4)) == 4", "line 1: uses prod, which it does not import"),
    ("from math import pi\nassert asin(f(1)) == pi", "line 2: uses asin, which it does not import"),
    ("assert list(chain(f(1), f(2))) == [1, 2]", "line 1: uses chain, which it does not import"),
    ("assert Counter(f(1)) == Counter([1, 2])", "line 1: uses Counter, which it does not import"),
    ("assert fabs(f(2) - 1.4142) < 1e-3", "line 1: uses fabs, which it does not import"),
    ("want = sqrt(2)\nassert f(2) == want", "line 1: uses sqrt, which it does not import"),
    ("random.seed(1)\nfor _ in range(5):\n    n = random.randint(0, 9)\n    assert f(n) == n * n", "line 3: uses random"),
    ("for p in permutations([1, 2]):\n    assert f(p) == [1, 2]", "line 1: uses permutations, which it does not import"),
    ("xs = [2, 1]\nassert f(deepcopy(xs)) == [1, 2]", "line 2: uses deepcopy, which it does not import"),
    ("import os\nif os.fork() == 0:\n    f(1)", "line 2: uses fork"),
    ("def run_tests():\n    assert f(1) == 2", "line 1: run_tests is never called"),
    ("def test_out(capsys):\n    f(1)\n    assert capsys.readouterr().out == '2'", "line 1: test_out is never called"),
    ("def inner():\n    assert f(1) == 2\ndef outer():\n    inner()", "line 3: outer is never called"),
])  # fmt: skip
def test_a_test_that_cannot_be_judged_is_refused_with_its_line(test, said):
    with pytest.raises(RewardError, match=said):
        parse_tests(json.dumps({"tests": [test]}), "p")
    prompts = [
        Prompt(name, reference_json=json.dumps({"tests": [each]}))
        for name, each in (("good", "assert f() == 1"), ("bad/17", test))
    ]
    with pytest.raises(ConfigError, match="cannot judge 1 prompts") as refused:
        check_tests(RewardConfig(functions=(CodeExecReward(),)), prompts)
    assert "'bad/17': test 0, line" in str(refused.value)


FINE = [
    "assert type(f(1)).__name__ == 'int' and type(f(1)) is int and type(f(2)) == type([1])", "import unittest\nunittest.TestCase().assertEqual(type(f(1)), int, 'no int')",
    "try:\n    f(0)\nexcept Exception as e:\n    assert type(e) is BankError and type(e).__name__ == 'BankError'",
    "def almost_equal(a, b): return abs(a - b) < 1e-6\nassert almost_equal(f(1), 2)", "from solution import isclose\nassert isclose(f(1), 2)",
    "assert type_name(5) == type(5).__name__", "import unittest\nunittest.TestCase().assertIsInstance(f(1), type(None))",
    "try:\n    f(0)\nexcept InsufficientFunds as e:\n    assert type(e) is InsufficientFunds and type(e).__name__ == 'InsufficientFunds'",
    "try:\n    f(0)\nexcept Exception as e:\n    assert type(e) is InsufficientFunds and type(e).__name__ == 'InsufficientFunds'",
    "assert is_equal(Node(1), Node(1)) and close(open_account())", "add = f\nassert add(1) == 2",
    "from solution import fork\nassert f().fork() == fork() == 2", "assert isclose(1, 1.0)", "assert add(1)(2) == 3",
    "assert sqrt(4) == 2 and cube(2) == 8 and abs(sqrt(2) - 1.4142) < 1e-3",
    "c = Counter()\nc.add('a')\nassert c.total == double(1)",
    "from solution import Counter\nc = Counter(tokens('a b'))\nassert c.total == 2",
    "from math import sqrt\nassert f(2) == sqrt(2)", "random.seed(1)\nassert f(1) == 2",
]  # fmt: skip


def test_ordinary_tests_are_not_refused():
    assert len(parse_tests(json.dumps({"tests": FINE}), "p")) == len(FINE)
