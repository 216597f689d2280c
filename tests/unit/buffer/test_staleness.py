import pytest

from asyncrl.buffer.staleness import staleness_figures


def test_token_sample_in_flight_and_in_queue_parts():
    figures = staleness_figures(5, [((3, 10), (4, 30)), ((5, 10),)], queue_s=[1.0, 3.0])
    assert (figures.num_samples, figures.num_tokens, figures.token_max) == (2, 50, 2)
    assert figures.metrics == pytest.approx({
        "staleness/token_mean": (30 + 20) / 50, "staleness/token_max": 2, "staleness/masked_tokens": 0,
        "staleness/mean": 1.0, "staleness/max": 2, "staleness/in_flight_mean": 0.5, "staleness/in_flight_max": 1,
        "staleness/in_queue_mean": 0.5, "staleness/in_queue_max": 1, "queue/wait_mean_s": 2.0, "queue/wait_max_s": 3.0,
        "staleness/histogram/0": 0.2, "staleness/histogram/1": 0.6, "staleness/histogram/2": 0.2,
    })  # fmt: skip


def test_masked_tokens_are_counted_apart_and_a_wholly_masked_sample_not_at_all():
    figures = staleness_figures(5, [((1, 7), (4, 30)), ((2, 9),)], mask_below=3)
    assert (figures.num_samples, figures.num_tokens, figures.token_max) == (1, 30, 1)
    assert (figures.metrics["staleness/masked_tokens"], figures.metrics["staleness/in_flight_max"]) == (16, 0)
