"""Answers that want to be right without being so, right answers however they are written, and answers made to hang their judge."""
# ruff: noqa: E501, RUF001 - answers are quoted as they are

import json
import time
from pathlib import Path

import pytest

from asyncrl.config.reward import AnswerMatchReward, FormatCheckReward, ReasoningGymReward
from asyncrl.errors import ConfigError
from asyncrl.reward.inputs import RewardInput
from asyncrl.reward.registry import build_reward
from asyncrl.schema.samples import Prompt

MARKED = Path(__file__).parents[2] / "experiments/benchmarks/marked"
SECONDS = 2.0
"""Of CPU time for one answer, on a busy machine; what these guard against takes hours."""


def scorer(mode, **options):
    reward = build_reward(AnswerMatchReward(mode=mode, **options))
    return lambda text, reference: reward(RewardInput(Prompt("p", answer=reference), text, "stop", 4))


def errors(name, judge):
    """Return the pairs of a marked set that a judge gets wrong: accepted, and refused."""
    pairs = [json.loads(line) for line in (MARKED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    told = [(pair, bool(judge(pair["answer"], pair["reference"]))) for pair in pairs]
    assert len(pairs) >= 300
    return [pair for pair, equal in told if equal and not pair["equal"]], [p for p, equal in told if not equal and p["equal"]]


def test_the_marked_numbers_and_mathematics_are_judged_right():
    assert errors("numbers", scorer("numeric")) == ([], [])
    assert errors("math", scorer("math")) == ([], [])


FIVE = (
    r"\(5\)", "**5**", r"\boxed{\boxed{5}}", "x = 5", "(5)", r"5^\circ", r"$\boxed{5}$", "5.0", "$x=5$", "5.", "+5",
    "5 apples",
)  # fmt: skip
NOT_FIVE = (
    "5 is wrong", "5 or six", "5 million", "5x", "5i", "٥", "５", "5\u0665", "⑤", "Ⅴ", "5\u200b6", "5 6", "5;6", "5/6/7", "0x5", "5e", "--5", "5%%", "\\boxed{5}\\boxed{6}",
    "\\boxed{5 \\boxed{6}}", "$5$$6$", "5 = 6", "six", "", "5 xy", "5\n6", "five (5) or six (6)", "5 km 6 m", "5,6", "not 5", "<5>", "5?", "about 5", "5...", "5..", "5 ± 1", "≥5", "5 wrong",
)  # fmt: skip
NUMBERS_OF_WORDS = (
    "3 fifths", "3 quarters", r"3\text{ hundredths}", r"3\text{hundredths}", "3 halves", "6 billions", r"6\text{ thousands}", "3 dozen", "3 dozens", "3 plus x",
)  # fmt: skip
VARIABLES = (
    r"5\mathrm{i}", r"2\mathrm{e}", r"5\mathrm{x}", r"5\text{k}", r"3\mathrm{x}^2", r"3\operatorname{x}", r"3\textit{x}", "3 x^2", "5 x", "3 x y",
)  # fmt: skip
"""What is no number and a unit."""


RIGHT_NUMBERS = [
    *((text, "5") for text in FIVE),
    (r"10\,000", "10000"), ("10\u2009000", "10000"), ("10\u202f000", "10000"), ("5 cm\u00b2", "5 cm^2"), ("9.81 m/s\u00b2", "9.81"), ("½", "0.5"), ("½", "1/2"), ("1½", "3/2"), ("-¾", "-0.75"),
    ("2 ¾ cups", "2.75"), ("$5$ cm", "5 cm"), ("$5$ cm", "5"), (r"\(5\) km", "5 km"), (r"$5$ \text{cm}", "5"), ("USD 5", "5"), ("USD 5", "$5"), ("US$5", "5 dollars"), ("EUR 5", "€5"),
    ("1÷3", "1/3"), ("6 ÷ 2", "3"), ("1⁄3", "1/3"), ("3 × 10⁸", "300000000"), ("3 × 10⁻²", "0.03"), ("Answer = 5", "5"), ("AB = 5", "5"), (r"\alpha = 5", "5"), ("x_1 = 5", "5"), ("f(x) = 5", "5"),
    (r"$\$18$", "18"), (r"$\$70{,}000$", "70000"), (r"$\$18$ dollars", "18"), ("5 lbs", "5 lb"), ("5 hrs", "5 hours"), ("5 yrs", "5"), ("5 kgs", "5 kg"), ("5 ms", "5 milliseconds"),
    *(("60", f"60 {unit}") for unit in ("km/hr", "ft/s", "N/m", "kg m^2", r"\text{ widgets}")), ("60 km/h", "60 km/hr"), (r"60\text{ ft}/\text{s}", "60 ft/s"), ("60", "$60$ ft/s"),
    ("12", r"12 \text{ ways}"), ("12 widget", r"$12\text{ widgets}$"), (r"5\text{ cm}^2", "5"), (r"5\text{ cm}^2", "5 cm^2"), (r"5\text{ cm}^2", r"5\text{ cm}^{2}"),
    ("3,100", "3100"), ("(3100)", "3100"), ("($3,100)", "3100"), ("(3{,}100)", "3100"), ("1,234,567.5", "1234567.5"),
]  # fmt: skip
WRONG_NUMBERS = [
    *((text, "5") for text in NOT_FIVE),
    ("1÷3", "3"), ("1÷2÷3", "1/6"), ("÷3", "3"), ("3÷", "3"), ("1÷0", "1"), ("Wrong = 5", "5"), ("not = 5", "5"), ("NOT = 5", "5"), ("NO=5", "5"), (r"\not = 5", "5"), (r"\ne = 5", "5"), ("5²", "5"), ("5²", "52"), ("½½", "1/2"), ("½ 5", "5"), ("½", "12"), (r"1\,0", "10"),
    (r"1\,23", "123"), ("1\u20092", "12"), ("$5$ or 6", "5"), ("$5$ wrong", "5"), ("$5$$6$ cm", "5"), ("USD 5 USD 6", "5"), ("USD 5 EUR", "5"), ("EUR 5", "$5"), ("5 cm²", "5 cm"), ("5 cm³", "5 cm²"),
    *((text, "60 ft/s") for text in ("60 ft", "60 s", "60 m/s", "60 ft/", "60 ft/s/s", "60 ft/s^2", "61 ft/s", "60/s")), ("60 m/s", "60 km/hr"), ("5", "5x"),
    ("12 gadgets", r"12\text{ widgets}"), ("12 widgets or 13", r"12\text{ widgets}"), (r"5\text{ cm}^3", "5 cm^2"), (r"5\text{ cm}^2", "5 cm"), (r"5\text{ cm}^22", "5 cm^2"),
    *((reference[0], reference) for reference in (*NUMBERS_OF_WORDS, *VARIABLES)), ("12", r"12\text{ dozens}"),
    (r"$\$5 and \$6$", "5"), ("5 ms", "5 s"), ("5 ms", "5 m"), ("0,125", "125"), ("125", "0,125"), ("(2,128)", "2128"), ("(-2,128)", "-2128"), ("x=(2,128)", "2128"), ("(1,234.5)", "1234.5"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reference", "is_right"), [*((*pair, 1) for pair in RIGHT_NUMBERS), *((*pair, 0) for pair in WRONG_NUMBERS)]
)
def test_a_number_is_read_as_it_is_written_and_nothing_else_is_taken_for_it(text, reference, is_right):
    assert scorer("numeric")(text, reference) == is_right


BOMBS = [
    "9^{9^{9}}", "9^9^9", "(10^9)!", "((10)!)!", "(((9)!)!)!", "100000!", "10^{10^{10}}", "(" * 500 + "7" + ")" * 500, "{" * 500 + "7" + "}" * 500, "(x+1)^{100000}",
    "(x+y+z)^{60}(x+y)^{60}", "((((9^{99})^{99})^{99})^{99})", "\\sqrt{" * 60 + "2" + "}" * 60, "\\binom{1000000}{500000}", "9" * 100_000, "1e999999999", "\\sum_{i=1}^{10^9} i",
    "\\int_0^1 x^x dx", "\\prod_{i=1}^{10^9} i", "\\boxed{" * 20_000, "\\boxed{" * 5_000 + "7" + "}" * 5_000, "$" * 50_000, "$7" * 30_000, "\\(" * 30_000, "," * 50_000, "1," * 20_000,
    "\\frac{1}{" * 200 + "1" + "}" * 200, "-" * 50_000 + "7", "7 " * 30_000, "x" * 50_000, "\\text{" * 10_000, "^" * 10_000, "\\cup" * 10_000, "=" * 50_000, " " * 400_000 + "7 x",
    "\\sin(10^{100000})", "0." + "1" * 50_000, "1/" * 20_000 + "3", "\\begin{pmatrix}" * 2_000, "!" * 10_000, "(7)!" * 200, "**" * 30_000, "**7" * 20_000, "the answer is " * 10_000,
    "x=" * 20_000 + "7", "\\tan(\\tan(\\tan(\\tan(9^{99}))))", "x_{" * 5_000, "7^{-" * 5_000, "(1,(1,(1,(1,(1,(1,1))))))", "\\log_{\\log_{\\log_2 3} 4} 5" * 20, "e^{e^{e^{e^{9}}}}", "2^{-2^{-2^{-99}}}",
    "\\" * 100_000, "\\$" * 50_000, "$" + "\\$" * 50_000, "$\\" * 50_000, "$\\$" * 30_000, "$" + "\\" * 190, "1,100" * 20_000, "\\text{" + "1." * 190 + "}",
]  # fmt: skip


NOT_SEVEN = [
    "1=7", "not 7", r"\not = 7", r"\neg = 7", r"\wrong = 7", "1 or 2 or 7", "x^2=7", "$1$ $2$ $7$", "7, 8", "$7$ or $8$", "\\boxed{6}\\boxed{7}", "7 7", "\\text{7 or 8}", "x=7=8", "7 \\neq 8", "\\{6,7\\}", "(6,7)",
    "either 7", "7!", "7?", "7'", "7...", "7\\ldots", "7 is not it", "the answer is not $7$", "$7$ is wrong", "6\\text{ or }7", "7 \\vee 8", "7\\mid 8", "7 8 9", "\\frac{7}", "٧", "7\\\\8", "7 & 8",
    "\\begin{pmatrix}7\\end{pmatrix}x", "\\boxed{7", "\\pm 7", "7+x-x+y", "7;8", "$$ 7 $$ $$ 8 $$", "\\(7\\) \\(8\\)", "7 \\text{ km } 8",
]  # fmt: skip
"""What is not one expression."""
BEHIND = [
    (r"12\text{ km}{8}", r"12\text{ km}"), (r"12\text{ km}\pi–{8}", r"12\text{ km}"), (r"12\text{ k\text(8){a}m}", r"12\text{ km}"), (r"12\text{ km}^8", r"12\text{ km}"),
    (r"-3\text{a}\gcd{8}", "-3"), (r"2\pi\infty^2", r"2\pi"), (r"\infty\sqrt{2}", r"\sqrt{2}"), ("8\\frac{1}{2}\\ ", r"\frac{1}{2}"), ("\\frac{1}{2}-\\ ", r"\frac{1}{2}"),
    (r"\frac{1}{2}_\ ", r"\frac{1}{2}"), (r"x+1_\pi", "x+1"), (r"x<3_\pi", "x<3"), ("x=3e 8", "x=3"), ("x+1e m", "x+1"), ("2e i", "2"), ("x e e", "x"), ("x+1 m m", "x+1"), (r"0^\circ7", "7"),
    (r"x+1\text{a}:\text{a}", "x+1"), ("2x x", "2"), ("x y x", "x"),
]  # fmt: skip
"""Nothing behind an answer is left out."""


@pytest.mark.parametrize(("answer", "reference", "is_right"), [
    (r"\boxed{11,\! 111,\! 100}", "11111100", 1), (r"$3,\!2$", "32", 0), ("(3,2)", "(p,q)=(3,2)", 1), ("(q,p)=(3,2)", "(p,q)=(3,2)", 0),
    ("x^2+5=0", "x^2+2=0", 0), ("x^2=-1", "x^2=-4", 0), ("x^2=4", "x^2-4=0", 1), ("3", "3s", 0), ("5t", "5", 0), ("5 m", "5", 1), ("11/2", "1 1/2", 0),
    ("1 2", "12", 0), (r"10\,000", "10000", 1), (r"7\text{ is wrong}", "7", 0), (r"\sqrt{2}\text{ million}", r"\sqrt{2}", 0), (r"7\text{ cm}", "7", 1),
    ("2x-y+1=0", "y=2x+1", 1), ("y=2x+1", "2x-y+1=0", 1), ("5=x", "x=5", 1), ("x=2", "x^2=4", 0), ("5=y", "x=5", 0), ("(x^2+y^2=0)1", "x^2+y^2=1", 0),
    (r"a\cdot b", "ab", 1), ("ab", r"b\cdot a", 1), ("ba", "ab", 0), ("a+b", "ab", 0), (r"\mathbf{(A)}", "A", 1), (r"\mathbf{B}", "A", 0), (r"\lvert x\rvert", "|x|", 1),
    ("4, 5, and 6", "4,5,6", 1), (r"4, 5\text{ or }6", "4,5,6", 1), ("4, 5, and", "4,5", 0), ("4, and 5, and 7", "4,5,6", 0), ("1÷3", r"\frac13", 1), ("1÷3", "3", 0),
    ("3.14159265358979323846", r"\pi", 1), ("3.14159", r"\pi", 0), ("1.414214", r"\sqrt{2}", 1), (r"2.9999999\cdot 1", "3", 0), ("3.14159265358979323846", "3.2", 0),
    ("x <= 2", r"x \leq 2", 1), ("x != 3", r"x \ne 3", 1), ("x >= 2", r"x \leq 2", 0),
    # Within brackets a comma separates; elsewhere `3,100` is a number, where no other comma touches it.
    ("2128", "(2,128)", 0), ("(2,128)", "2128", 0), (r"\{3100\}", r"\{3,100\}", 0), (r"\{3,100\}", r"\{3100\}", 0), ("[3,100]", "[3100]", 0), ("[3100]", "[3,100]", 0), ("3,100", "(3,100)", 0),
    (r"\{125,5\}", r"\{5,125\}", 1), (r"(0,\frac{200}{2})", "(0,100)", 1), (r"(\frac12,500)", "(0.5,500)", 1), (r"\left(2,128\right)", "(2, 128)", 1), ("(2,128), (3,5)", "2128, (3,5)", 0),
    ("0,125", "125", 0), ("125", "0,125", 0), ("3,100", "3100", 1), ("3100", "3,100", 1), ("5125,6", "5,125,6", 0), ("6,125,5", "5,125,6", 1), ("2,000 and 1,000", "1000, 2000", 1),
    (r"$\$18$", "18", 1), (r"$\$70{,}000$", "70000", 1), (r"the answer is $\$5.50$.", "5.5", 1), (r"$\$5$ or $\$6$", "5", 0),
    (r"\text{105 hours}", r"\text{10.5 hours}", 0), (r"\text{1. 5 hours}", r"\text{15 hours}", 0), (r"\text{10.5 hours.}", r"\text{10.5 hours}", 1), (r"\text{p.m.}", r"\text{pm}", 1), (r"\text{10.}", "10", 1), (r"\text{10.5}", r"\frac{21}{2}", 1),
    # A unit of the reference's own: no name of a number, no product, no condition.
    *((text, reference, 1) for text in ("12", "12 widget", r"12\text{ widgets}", r"\frac{24}{2}") for reference in ("12 widgets", r"$12\text{ widgets}$")),
    ("12", r"12 \text{ ways}", 1), ("60", r"60\text{ ft/s}", 1), ("60", r"60\text{ widgets}^2", 1), (r"\sqrt{144}\text{ km}", r"12\text{ km}", 1),
    *((text, "12 widgets", 0) for text in ("13", "12 gadgets", "12w", "12 widgets or 13", "12 widgets 8", r"12\text{ widgets}8")), (r"12\text{ widgets}", r"12\text{ widgets}^2", 0),
    *(("5", f"5{behind}", 0) for behind in (" x", " abc", " a/b", " pi", " theta", " lambda", " sqrt", " dozen", r"\text{ dozen}", r"\text{ or more}", r"\text{ or }x", " mod p")),
    *((reference[0], reference, 0) for reference in (*NUMBERS_OF_WORDS, *VARIABLES, r"5\mathrm{dx}", r"5\operatorname{Re}")), ("12", r"12\text{ dozens}", 0),
    (r"7!\text{ arrangements}", r"5040\text{ arrangements}", 1), (r"6!\text{ arrangements}", r"5040\text{ arrangements}", 0), (r"7!\text{ sets}", r"5040\text{ arrangements}", 0),
    ("x²+1", "x^2+1", 1), ("x^2+1", "x²+1", 1), ("x⁻²", "x^{-2}", 1), ("x¹²", "x^{12}", 1), ("5²", "25", 1),
    ("x³+1", "x^2+1", 0), ("x2+1", "x²+1", 0), ("x^²+1", "x^2+1", 0), ("²", "2", 0), ("5²", "52", 0), ("5²", "5", 0), ("2^3²", "64", 0), ("x₂", "x^2", 0),
    # Values decide where these are the same expressions.
    (r"\sqrt{5+2\sqrt{6}}", r"\sqrt{2}+\sqrt{3}", 1), (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}", 1), ("(2+3i)^2", "-5+12i", 1), (r"4+3\cdot i", "4+3i", 1),
    (r"e^{i\pi}", "-1", 1), (r"\cos(\frac{\pi}{5})", r"\frac{1+\sqrt{5}}{4}", 1), (r"2\sin x\cos x", r"\sin 2x", 1), ("(x+1)^{30}", "(1+x)^{30}", 1), (r"\sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}}", "0", 1),
    (r"\sqrt{2}+10^{-20}", r"\sqrt{2}", 0), ("7+10^{-99}", "7", 0), (r"\pi+10^{-90}", r"\pi", 0), ("|x|", "x", 0), (r"\sqrt{x^2}", "x", 0), (r"|x-10^{9}|", "10^{9}-x", 0), (r"\sqrt{(x-10^{9})^2}", "10^{9}-x", 0),
    # sympy takes the y of dy/dx for a constant, and math-verify the points of an angle for factors.
    *((answer, r"\frac{dy}{dx}=\frac{2x}{y}", 0) for answer in (r"0=\frac{2x}{y}", r"\frac{dx}{dy}=\frac{2x}{y}", r"\frac{2x}{y}=\frac{dx}{dy}")), ("0", r"\frac{dV}{dt}", 0), ("0=kQ", r"\frac{dQ}{dt}=-kQ", 0),
    *((answer, r"\frac{dy}{dx}=\frac{2x}{y}", 1) for answer in (r"\frac{dy}{dx}=2\frac{x}{y}", r"\frac{d}{dx}y=\frac{2x}{y}", r"\frac{2x}{y}=\frac{dy}{dx}")), ("2x", r"2x+\frac{dy}{dx}", 0),
    (r"\frac{dy}{dx}+2x", r"2x+\frac{dy}{dx}", 1), (r"x=\frac{d^2y}{dx^2}", r"\frac{d^2y}{dx^2}=x", 1), ("2x", r"\frac{d}{dx}x^2", 1), (r"\angle BAC", r"\angle ABC", 0), (r"2\angle{BAC}", r"2\angle{ABC}", 0),
    (r"\measuredangle BAC", r"\measuredangle ABC", 0), (r"\angle  ABC", r"\angle ABC", 1), (r"\angle{ABC}", r"\angle ABC", 1), (r"\angle CBA", r"\angle A B C", 1), ("ABC", r"\angle ABC", 0),
    (r"\angle ABC=60^{\circ}", r"\angle ABC = 60^\circ", 1), (r"\angle ABC=61^\circ", r"\angle ABC=60^\circ", 0), (r"\angle BAC=\frac{1}{2}\angle BOC", r"\angle BAC=\frac12\angle BOC", 1),
    (r"\angle BOC=\frac12\angle BAC", r"\angle BAC=\frac12\angle BOC", 0), (r"2\angle ABC-\angle DEF", r"-\angle DEF+2\angle ABC", 1), (r"\angle A'BC", r"\angle ABC'", 0), (r"\frac12\angle A_1BC'", r"\frac{\angle{C'BA_{1}}}{2}", 1),
    (r"\angle AB_1C", r"\angle A_1BC", 0), (r"\angle DEF\text{ and }\angle ABC", r"\angle ABC and \angle DEF", 1), (r"\angle A+x", r"x+\angle A", 1),
    (r"90^\circ-\frac12\angle A", r"90^{\circ}-\frac{\angle A}{2}", 1),
    (r"\angle BA^{\prime}C", r"\angle AB^{\prime}C", 0), (r"\angle BA^\prime C^\prime", r"\angle AB^\prime C^\prime", 0), (r"\angle BA_{12}C", r"\angle AB_{12}C", 0), (r"\angle BA_nC", r"\angle AB_nC", 0), (r"\angle BA C", r"\angle AB C", 0),
    (r"\angle BA\,C", r"\angle AB\,C", 0), (r"\angle{BA C}", r"\angle{AB C}", 0), (r"\angle B_{n+1}AC", r"\angle B_{n+1}CA", 0), (r"\angle(BAC)", r"\angle(ABC)", 0), (r"\angle AB_{nC}", r"\angle AB_nC", 0), (r"\angle A_{10}BC", r"\angle A_1'BC", 0), (r"2\angle C^{\prime}A_{12}B", r"\angle BA_{12}C'+\angle BA_{12}C^\prime", 1), (r"\triangle BAC", r"\triangle ABC", 1),
    (r"\frac{355}{113}", r"\pi", 0), (r"e^{\pi\sqrt{163}}", "262537412640768744", 0), ("3.14", r"\pi", 0), ("0.5x", r"\frac{x}{2}", 1), ("0.5000001x", r"\frac{x}{2}", 0),
    *((small, reference, 0) for small in ("0.0", "0", "0.0\\pi", "10^{-12}", "0.0000000\\pi") for reference in ("\\frac{\\pi}{10^{9}}", "0.000000001\\pi")),
    *((answer, "7", 0) for answer in NOT_SEVEN), *((*pair, 0) for pair in BEHIND),
])  # fmt: skip
def test_mathematics_is_equal_where_its_values_are_and_nothing_is_left_out(answer, reference, is_right):
    assert scorer("math")(answer, reference) == is_right


@pytest.mark.parametrize(("answer", "reference", "is_right"), [
    ("0", "1e-7", 0), ("0", "6.63e-34", 0), ("1e-30", "6.63e-34", 0), ("0.0010009", "0.001", 0), ("6.63 \\times 10^{-34}", "6.63e-34", 1), ("6.6300001e-34", "6.63e-34", 1),
    ("0.0000000", "1/10000000", 0), ("0.3333333", "1/3", 1), ("1e401", "1e401", 1),
])  # fmt: skip
def test_small_numbers_are_not_nothing(answer, reference, is_right):
    assert scorer("numeric")(answer, reference) == is_right
    assert scorer("math")(answer, reference) == is_right


def slow_ones(score, bombs):
    """Return the answers that a judge takes too long for; each must score 0."""
    slow = []
    for bomb in bombs:
        started_s = time.process_time()
        assert score(bomb) == 0.0, bomb[:40]
        if time.process_time() - started_s > SECONDS:
            slow.append(bomb[:40])
    return slow


@pytest.mark.parametrize("mode", ["numeric", "math", "exact"])
@pytest.mark.parametrize("reference", ["7", "x+1", "\\frac{1}{2}"])
def test_no_answer_makes_a_judge_hang(mode, reference):
    score = scorer(mode)
    assert not slow_ones(lambda bomb: score(bomb, reference), BOMBS)


BOMBS_OF_FAMILIES = [
    "9**9**9", "(x+1)**100000", "x**10**9", "exp(exp(exp(exp(9))))", "factorial(10**9)", "9**99**9*x + C", "10**(10**8)",
    "R99999999", "R" * 1000 + "!", "A+1" * 290 + "!", "Move disk 1 from Peg 1 to Peg 2 " * 90 + "!", "A=1," * 900 + "!",
    "A+999999999", "P \u2227 " * 3000 + "P", "\u00ac" * 5000 + "P", '["fill A"' + ', "fill A"' * 50_000 + "]",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("family", [
    *("simple_integration", "intermediate_integration", "polynomial_multiplication", "countdown", "fraction_simplification"),
    *("rubiks_cube", "rush_hour", "propositional_logic", "jugs", "graph_color", "boxnet", "dice", "tower_of_hanoi"),
    *("word_ladder", "cryptarithm", "quantum_lock", "prime_factorization"),
])  # fmt: skip
def test_no_answer_makes_a_scorer_of_reasoning_gym_hang(family):
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = json.loads(json.dumps(reasoning_gym.create_dataset(family, size=1, seed=3)[0], default=str))
    reward, prompt = build_reward(ReasoningGymReward()), Prompt("p", reference_json=json.dumps(entry))
    bombs = (*BOMBS, *BOMBS_OF_FAMILIES)
    assert not slow_ones(lambda bomb: reward(RewardInput(prompt, f"<answer>{bomb}</answer>", "stop", 4)), bombs)


SLOW = [
    (r"\cos(324960414789)+\exp(307325671467282494576493190582423075044134223275504197852650)", r"\sqrt{2}"), ("(x+y+z+1)^{20}", "(x+y+z+1)^{27}"),
    (r"\log(9x)+\sinh(10x)+\cos(4x)+\tanh(28x)+\sec(23x)+\sinh(16x)+\tan(11x)+\ln(25x)", r"\exp(13x)+\cot(25x)+\log(14x)+\tan(3x)"),
    (r"\sec(\sec(\log(\sinh(\sinh(\sec(2))))))", r"\sec(\sec(\log(\sinh(\sinh(\sec(3))))))"), ("(7+3i)^{89}/(3-6i)^{47}", "(4+2i)^{73}/(9-3i)^{16}"),
    (r"\ln(x)^{16}+\arctan(x)^{12}+\ln(x)^{10}", r"\ln(x)^{22}+\log(x)^{9}+\sin(x)^{20}+\cosh(x)^{20}"), (r"\log(73!)", "(59!)^{16}"),
    (r"\log_{64}(8290)+\log_{49}(5325)+\log_{52}(1205)+\log_{26}(9739)", r"\log_{76}(6985)+\log_{80}(7768)+\log_{48}(381)"),
]  # fmt: skip
"""What sympy alone takes from 2 s to more than a minute for."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the first signal may come in a callback of gc
def test_sympy_gets_two_seconds_of_an_answer_and_judges_the_next_one_as_ever():
    judge = scorer("math")
    for answer, reference in SLOW:
        started_s = time.process_time()
        assert judge(answer, reference) == 0.0
        assert time.process_time() - started_s < 4.0, answer
        assert judge(r"\frac{x^2-1}{x-1}", "x+1") == 1.0
        assert judge(r"\sqrt{x^2}", "|x|") == 1.0
        assert judge("x < 3", "3 > x") == 1.0


@pytest.mark.parametrize(("pattern", "text"), [
    ("<answer>(.*?)</answer>", "<answer>" * 50_000), ("<answer>(.*?)</answer>", "<answer>7" * 30_000 + "</answer" * 10_000),
    ("(a+)+b", "a" * 50_000), ("(?:(?:x*)*)*y()", "x" * 50_000), (r"answer\s*:?\s*(.*?)\s*$", "answer" + " " * 50_000 + "x"),
    (r"```\s*(.*?)\s*```", "```" + " " * 20_000),
])  # fmt: skip
def test_patterns_run_in_linear_time(pattern, text):
    score, check = scorer("exact", extract=f"({pattern})"), build_reward(FormatCheckReward(pattern=pattern))
    started_s = time.process_time()
    score(text, "7")
    check(RewardInput(Prompt("p"), text, "stop", 1))
    assert time.process_time() - started_s < SECONDS


DOCS_FORMAT = r"\s*<think>(?:[^<]|(?:<(?:an?|th?)?)*<(?:[^</at]|a[^n<]|an[^s<]|t[^h<]|th[^i<]))*(?:<(?:an?|th?)?)*</think>\s*<answer>(?:[^<]|<+[^</at])*<*</answer>\s*"


def test_the_format_that_the_docs_show_takes_one_of_each_tag():
    docs = (Path(__file__).parents[2] / "docs/rewards.md").read_text(encoding="utf-8")
    assert DOCS_FORMAT in docs
    check = build_reward(FormatCheckReward(pattern=DOCS_FORMAT))
    good = (
        "<think>a < b\nc</think>\n<answer>5</answer>", "<think></think><answer>x</answer>\n",
        "\n<think>1 <2</think> <answer>3</answer>", "<think>x<</think><answer>5</answer>",
        "<think>0<a<1, a<b<an<t, if x<threshold: <th</think><answer>5</answer>", "<think>n <a</think><answer>5</answer>",
    )  # fmt: skip
    bad = (
        "<think>a</think><answer>1</answer><answer>2</answer>", "<think><think>a</think></think><answer>1</answer>",
        "<think>a</think><answer><answer>1</answer></answer>", "<think>a <answer>1</answer></think><answer>2</answer>",
        "<think>a</think><answer>1</answer> and more", "<think><<answer>6<</answer></think><answer>5</answer>",
        *(f"<think>{inside}</think><answer>5</answer>" for inside in ("<a<answer>6", "<an<answer>6", "<<th<think>", "a</answer>", "<t</think>")),
        "<think>a</think><answer>6<</answer> <<answer>5</answer>", "<answer>1</answer>", "",
    )  # fmt: skip
    assert [check(RewardInput(Prompt("p"), text, "stop", 1)) for text in (*good, *bad)] == [1.0] * len(good) + [0.0] * len(bad)


@pytest.mark.parametrize("pattern", [r"((a+)+)\2b", r"(?!.*b)(a)", r"(?<=x)(a)", r"(a)(?=b)", r"(?P<n>a)(?P=n)"])
def test_a_pattern_without_linear_time_is_refused_with_what_to_do(pattern):
    with pytest.raises(ConfigError, match=r"extract: .*cannot run in linear time: .*write it without them"):
        build_reward(AnswerMatchReward(extract=pattern))
    with pytest.raises(ConfigError, match=r"pattern: .*cannot run in linear time"):
        build_reward(FormatCheckReward(pattern=pattern))
    with pytest.raises(ConfigError, match=r"reference: .*cannot run in linear time"):
        scorer("regex")("a", pattern)
