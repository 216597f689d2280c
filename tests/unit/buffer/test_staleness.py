import pytest

from asyncrl.buffer.staleness import staleness_figures


def test_token_sample_in_flight_and_in_queue_parts():
    figures = staleness_figures(5, [((3, 10), (4, 30)), ((5, 10),)], queue_s=[1.0, 3.0])

    assert (figures.num_samples, figures.num_tokens) == (2, 50)
    assert figures.token_histogram == {0: 10, 1: 30, 2: 10}
    assert figures.token_mean == pytest.approx((30 + 20) / 50)
    assert (figures.token_max, figures.sample_max) == (2, 2)
    assert figures.sample_mean == 1.0
    assert (figures.in_flight_mean, figures.in_flight_max) == (0.5, 1)
    assert (figures.in_queue_mean, figures.in_queue_max) == (0.5, 1)
    assert (figures.queue_mean_s, figures.queue_max_s) == (2.0, 3.0)


def test_masked_tokens_are_counted_apart_and_a_wholly_masked_sample_not_at_all():
    figures = staleness_figures(5, [((1, 7), (4, 30)), ((2, 9),)], mask_below=3)

    assert (figures.masked_tokens, figures.num_tokens, figures.num_samples) == (16, 30, 1)
    assert figures.token_max == 1
    assert figures.in_flight_max == 0
