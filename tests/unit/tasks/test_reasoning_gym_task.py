import json

import pytest

pytest.importorskip("reasoning_gym")

from asyncrl.config.tasks import ReasoningGymTask
from asyncrl.errors import ConfigError
from asyncrl.tasks.registry import build_reasoning_gym

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def one_digit_sums(**fields):
    return ReasoningGymTask(**{"family_options": ONE_DIGIT, "size": 2000, "held_out": 60, **fields})


def question(prompt):
    return prompt.messages[-1].content


def test_questions_are_distinct_and_in_one_place_only():
    task = build_reasoning_gym(one_digit_sums(), seed=0)
    train, held_out = [question(p) for p in task.train], [question(p) for p in task.held_out]
    shots = [message.content for message in task.train[0].messages[:-1] if message.role == "user"]
    everything = [*train, *held_out, *shots]
    assert len(everything) == len(set(everything)) <= 200
    assert len(held_out) == 60
    assert len(shots) == 3


def test_the_reference_holds_what_the_familys_own_scorer_needs():
    import reasoning_gym

    prompt = build_reasoning_gym(one_digit_sums(), seed=0).train[0]
    reference = json.loads(prompt.reference_json)
    dataset = reasoning_gym.create_dataset(reference["family"], seed=0, size=1, **reference["family_options"])
    assert dataset.score_answer(prompt.answer, reference["entry"]) == 1.0
    assert dataset.score_answer("nonsense", reference["entry"]) < 0.99


@pytest.mark.parametrize(("fields", "message"), [
    ({"family": "no_such"}, "no_such.*chain_sum"), ({"family_options": {"colour": 3}}, "colour"),
    ({"family_options": {"min_terms": 5, "max_terms": 2}}, "max_terms"),
    ({"held_out": 200}, "distinct problems of 2000.*lower task.held_out"),
    ({"family": "rubiks_cube", "family_options": {}, "size": 70}, "no single reference answer"),
])  # fmt: skip
def test_a_family_that_cannot_serve_is_refused_with_what_to_do(fields, message):
    with pytest.raises(ConfigError, match=message):
        build_reasoning_gym(one_digit_sums(**fields), seed=0)
