"""The table of all metrics: name, unit, meaning. docs/observability.md has the same table; a test compares the two.

Names are `stage/noun_unit`, or the field's standard term if there is one. The name of a family ends in `/*`: the last part of the
name is chosen at run time (a drop reason, a staleness, a process). A function that computes metrics returns them as values; none
is recorded inside the maths. The controller passes one dict per step to the sinks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    unit: str
    meaning: str


_ROWS = (
    # What the policy earns
    ("reward/mean", "reward", "mean reward over the samples of the step"),
    ("reward/std", "reward", "standard deviation of the reward over the samples of the step"),
    ("reward/max", "reward", "highest reward of the step"),
    ("reward/min", "reward", "lowest reward of the step"),
    ("reward/group_std_mean", "reward", "standard deviation of the rewards inside a group, mean over groups"),
    ("reward/zero_spread_fraction", "fraction", "share of groups in which all rewards are equal, so that nothing is learned"),
    ("reward_part/*", "reward", "mean of one configured reward before weighting, by name of the reward"),
    ("advantage/mean", "1", "mean advantage over the samples of the step"),
    ("advantage/std", "1", "standard deviation of the advantage over the samples of the step"),
    ("advantage/max", "1", "highest advantage of a sample"),
    ("advantage/min", "1", "lowest advantage of a sample"),
    ("eval/accuracy", "fraction", "share of held-out samples that the rules judge correct; absent if only reward models judge"),
    ("eval/reward_mean", "reward", "mean reward of held-out samples"),
    # How the policy moves
    ("kl/mean", "nat", "k3 estimate of KL(behaviour || learner before the step), mean over trained tokens"),
    ("kl/max", "nat", "largest k3 estimate of a token"),
    ("kl/k1", "nat", "k1 estimate of KL(behaviour || learner before the step), mean over trained tokens"),
    ("kl/proximal_k1", "nat", "k1 estimate of KL(behaviour || proximal policy of the loss)"),
    ("kl/proximal_k3", "nat", "k3 estimate of KL(behaviour || proximal policy of the loss)"),
    ("kl/current_k1", "nat", "k1 estimate of KL(behaviour || current policy), mean over all updates of the step"),
    ("kl/current_k3", "nat", "k3 estimate of KL(behaviour || current policy), mean over all updates of the step"),
    ("kl/reference_mean", "nat", "k3 estimate of KL(learner || reference), if there is a reference model"),
    ("kl/reference_k1", "nat", "k1 estimate of KL(learner || reference), if there is a reference model"),
    ("kl/penalty_mean", "nat", "KL penalty (in the loss or the rewards) by the configured estimate, mean over trained tokens"),
    ("kl/coefficient", "1", "coefficient of the KL penalty in this step"),
    ("policy/loss", "1", "minimised objective, including penalties"),
    ("policy/entropy", "nat", "entropy of the learner's distribution, mean over trained tokens"),
    ("policy/clip_fraction", "fraction", "share of trained tokens at which the clip stops the gradient"),
    ("policy/dual_clip_fraction", "fraction", "share of trained tokens at which the dual clip stops the gradient"),
    ("policy/kept_fraction", "fraction", "share of trained tokens that no correction dropped"),
    ("policy/grad_norm", "1", "global gradient norm before clipping, mean over the updates of the step"),
    ("policy/learning_rate", "1", "learning rate of the last update"),
    ("policy/relative_update", "1", "norm of an update over the norm of the weights, scaled to the highest learning rate"),
    ("policy/updates", "updates", "number of optimizer updates in the step, without the skipped ones"),
    ("policy/skipped_updates", "updates", "updates that were skipped because float16 gradients overflowed"),
    ("policy/recipe", "1", "recipe that algorithm.kind = auto chose for the step: 0 near, 1 lagging, 2 far"),
    ("value/loss", "1", "loss of the critic, if there is a critic"),
    ("value/explained_var", "fraction", "explained variance of the critic: 1 - var(return - value) / var(return)"),
    ("value/clip_fraction", "fraction", "share of trained tokens at which the value clip stops the critic's gradient"),
    ("value/mean", "reward", "the critic's value before the step, mean over trained tokens"),
    ("value/returns_mean", "reward", "return that the critic is trained to predict, mean over trained tokens"),
    ("value/grad_norm", "1", "the critic's gradient norm before clipping, mean over the updates of the step"),
    ("dpo/pairs", "pairs", "trained pairs of a chosen and a rejected sample, summed over the updates of the step"),
    ("dpo/loss", "1", "preference loss, mean over pairs"),
    ("dpo/accuracy", "fraction", "share of pairs with a greater log-ratio policy / reference for the chosen sample"),
    ("dpo/margin", "nat", "(policy - reference) log-probability of the chosen minus the rejected sample, mean over pairs"),
    ("dpo/chosen_reward", "nat", "beta (policy - reference) log-probability of the chosen sample, mean over pairs"),
    ("dpo/rejected_reward", "nat", "beta (policy - reference) log-probability of the rejected sample, mean over pairs"),
    # How far the data is from the policy
    ("ratio/mean", "1", "importance ratio learner / behaviour before the step, mean over trained tokens"),
    ("ratio/max", "1", "largest importance ratio of a trained token"),
    ("ratio/min", "1", "smallest importance ratio of a trained token"),
    ("ratio/p01", "1", "1st percentile of the importance ratio over trained tokens"),
    ("ratio/p05", "1", "5th percentile of the importance ratio over trained tokens"),
    ("ratio/p50", "1", "median of the importance ratio over trained tokens"),
    ("ratio/p95", "1", "95th percentile of the importance ratio over trained tokens"),
    ("ratio/p99", "1", "99th percentile of the importance ratio over trained tokens"),
    ("ratio/ess", "fraction", "effective sample size (Kish) of the importance ratios, as a share of the trained tokens"),
    ("ratio/capped_fraction", "fraction", "share of trained tokens whose off-policy correction weight reached its cap"),
    (
        "ratio/high_fraction",
        "fraction",
        "share of tokens (sequences for a sequence cap) whose ratio proximal / behaviour exceeds the cap (2 if no cap is over 1)",
    ),
    ("ratio/low_fraction", "fraction", "share of tokens (or sequences) whose ratio proximal / behaviour is below 1 / cap"),
    ("ratio/correction_mean", "1", "off-policy correction weight after capping, mean over trained tokens"),
    ("ratio/correction_std", "1", "standard deviation of the correction weights over trained tokens"),
    ("ratio/correction_ess", "fraction", "effective sample size of the correction weights, as a share of the trained tokens"),
    ("ratio/chi2_token", "1", "chi-squared divergence over tokens: mean of the squared importance ratio, minus 1"),
    ("ratio/chi2_sequence", "1", "chi-squared divergence over sequences: mean of the squared product of ratios, minus 1"),
    ("ratio/perplexity", "1", "perplexity of the learner divided by that of the behaviour policy, mean over sequences"),
    ("perplexity/learner", "1", "perplexity of a sample under the learner: exp(-mean log-probability), mean over samples"),
    ("perplexity/learner_log", "nat", "logarithm of a sample's perplexity under the learner, mean over samples"),
    ("perplexity/behaviour", "1", "perplexity of a sample under the behaviour policy, mean over samples"),
    ("perplexity/behaviour_log", "nat", "logarithm of a sample's perplexity under the behaviour policy, mean over samples"),
    ("perplexity/log_gap_mean", "nat", "log perplexity under the learner minus under the behaviour policy, mean over samples"),
    ("perplexity/log_gap_abs_mean", "nat", "absolute difference of the learner and behaviour log perplexity, mean over samples"),
    ("perplexity/log_gap_max", "nat", "largest log perplexity gap of a sample, learner minus behaviour policy"),
    ("perplexity/log_gap_min", "nat", "smallest log perplexity gap of a sample, learner minus behaviour policy"),
    ("mismatch/tokens", "tokens", "trained tokens of samples without a token of an older version, to compare engine and learner"),
    ("mismatch/kl_k1", "nat", "k1 estimate of KL(behaviour || learner) over `mismatch/tokens`; due to numerics, not staleness"),
    ("mismatch/kl_k3", "nat", "k3 estimate of KL(behaviour || learner) over `mismatch/tokens`"),
    ("mismatch/logprob_gap_mean", "nat", "absolute gap of learner and engine log-probability, mean over `mismatch/tokens`"),
    ("mismatch/logprob_gap_max", "nat", "largest absolute gap of learner and engine log-probability over `mismatch/tokens`"),
    ("mismatch/correlation", "1", "correlation of the learner's and the engine's probabilities of `mismatch/tokens`"),
    ("staleness/mean", "versions", "staleness of a sample (of its oldest trained token), mean over trained samples"),
    ("staleness/max", "versions", "largest staleness of a trained sample; never above buffer.max_staleness"),
    ("staleness/token_mean", "versions", "staleness of a token, mean over trained tokens"),
    ("staleness/token_max", "versions", "largest staleness of a trained token"),
    ("staleness/in_flight_mean", "versions", "staleness that arose while a sample was generated, mean over samples"),
    ("staleness/in_flight_max", "versions", "largest staleness that arose while a sample was generated"),
    ("staleness/in_queue_mean", "versions", "staleness that arose after a sample was generated, mean over samples"),
    ("staleness/in_queue_max", "versions", "largest staleness that arose after a sample was generated"),
    ("staleness/masked_tokens", "tokens", "tokens that are left out of the loss because they are too old (buffer.policy = mask)"),
    ("staleness/histogram/*", "fraction", "share of trained tokens with exactly this staleness"),
    ("dropped/*", "groups", "groups dropped since the run began, by reason"),
    ("failed/*", "groups", "groups failed since the run began, by reason"),
    # The data
    ("data/response_tokens_mean", "tokens", "mean response length of trained samples"),
    ("data/response_tokens_max", "tokens", "longest response of the step"),
    ("data/prompt_tokens_mean", "tokens", "mean prompt length of trained samples"),
    ("data/truncated_fraction", "fraction", "share of trained samples that ended at the length limit"),
    ("data/repeated_prompt_tokens", "tokens", "prompt tokens that were computed again because a group was split over rows"),
    ("data/rows", "rows", "number of rows (micro-batches) in the step"),
    ("data/samples", "samples", "number of samples trained in the step"),
    ("data/trained_tokens", "tokens", "number of tokens with loss mask 1 in the step"),
    ("bias/length_ratio", "1", "mean length of trained samples over that of generated samples, in complete cohorts; 1: no bias"),
    ("bias/length_ratio_low", "1", "lower end of the 95 % interval of `bias/length_ratio`"),
    ("bias/length_ratio_high", "1", "upper end of the 95 % interval of `bias/length_ratio`"),
    ("bias/reward_gap", "reward", "mean reward of trained minus that of scored samples, in complete cohorts; 0: no bias"),
    ("bias/reward_gap_low", "reward", "lower end of the 95 % interval of `bias/reward_gap`"),
    ("bias/reward_gap_high", "reward", "upper end of the 95 % interval of `bias/reward_gap`"),
    ("bias/flagged", "1", "1 if either interval lies outside its bounds, else 0; the alarm `bias` checks this value"),
    ("bias/length", "tokens", "mean length of recently issued samples; unfinished samples are censored (Kaplan-Meier estimate)"),
    ("bias/length_low", "tokens", "lower end of the 95 % interval of `bias/length`"),
    ("bias/length_high", "tokens", "upper end of the 95 % interval of `bias/length`"),
    ("bias/screened_length_ratio", "1", "mean length in groups that pass the algorithm's screens, over that in all groups"),
    ("bias/lost/*", "fraction", "share of groups that were not trained, by reason: stale, failed, released or screened"),
    # Speed
    ("throughput/tokens_per_sec", "tokens/s", "prompt and response tokens trained, per second since the previous step"),
    (
        "throughput/generated_tokens_per_sec",
        "tokens/s",
        "response tokens of finished samples, per second since the previous step",
    ),
    ("throughput/trained_tokens_per_sec", "tokens/s", "tokens with loss mask 1, per second since the previous step"),
    ("throughput/samples_per_sec", "samples/s", "trained samples, per second since the previous step"),
    ("throughput/learner_tokens_per_sec", "tokens/s", "prompt and response tokens trained, per second of the learner's work"),
    ("idle/learner", "fraction", "share of the time since the previous step in which the learner had nothing to train"),
    ("idle/generators", "fraction", "share of the time between heartbeats without anything to generate, mean over generators"),
    ("time/step_s", "s", "time from the end of the previous step to the end of this step"),
    ("time/train_s", "s", "time that the learner worked on the step"),
    ("time/wait_s", "s", "time that the learner waited for the batch"),
    ("time/proximal_s", "s", "time of the forward passes for the proximal policy"),
    ("time/reference_s", "s", "time of the forward passes for the reference, on the learner's devices"),
    ("time/values_s", "s", "time of the forward passes for the critic's values before the step"),
    ("time/update_s", "s", "time of the forward and backward passes and the optimizer updates"),
    ("time/generate_mean_s", "s", "time from submission to completion of a sample, mean over trained samples"),
    (
        "time/score_mean_s",
        "s",
        "time from a sample's arrival at the reward worker until its request is judged, mean over samples",
    ),
    ("time/checkpoint_s", "s", "time to write the newest checkpoint"),
    ("placement/rollout_s", "s", "time in the phase rollout on a shared device since the previous step"),
    ("placement/inference_s", "s", "time in the phase inference on a shared device since the previous step"),
    ("placement/train_s", "s", "time in the phase train on a shared device since the previous step"),
    ("placement/switch_s", "s", "time to switch between the phases since the previous step"),
    ("queue/lead", "versions", "number of versions that generation may be ahead of the learner; at most buffer.max_staleness"),
    ("queue/ready", "groups", "groups that are complete and wait for training"),
    ("queue/running", "groups", "groups that are being generated"),
    ("queue/scoring", "groups", "groups that are being scored"),
    ("queue/slots/*", "requests", "requests that a generator's engine can run at once with its available memory, by generator"),
    ("queue/wait_mean_s", "s", "time from ready to taken, mean over the groups of the step"),
    ("queue/wait_max_s", "s", "longest time from ready to taken, over the groups of the step"),
    ("weights/sync_ms", "ms", "time from the publication of a version until it is live on the slowest generator"),
    ("weights/blocked_ms", "ms", "time that the learner stood still to publish"),
    ("weights/update_bytes", "bytes", "size of what a generator with the previous version fetches: the delta, or all weights"),
    ("weights/fetch_ms", "ms", "time to fetch the weights, on the slowest generator"),
    ("weights/swap_ms", "ms", "time that token generation stood still for the swap, on the slowest generator"),
    ("weights/probe_error", "nat", "largest difference of a probe log-probability after a swap, generator against learner"),
    # Memory, disk, processes
    ("memory/allocated_gb", "GB", "memory that the learner holds: on its device, or resident memory on a CPU"),
    ("memory/peak_gb", "GB", "largest amount of memory that the learner ever held"),
    ("memory/peak_share", "fraction", "largest amount of memory that the learner ever held, as a share of its device's memory"),
    ("memory/resident_gb/*", "GB", "resident memory of one process, by process name"),
    ("disk/free_gb", "GB", "free space on the disk of the run folder"),
    ("memory/available_gb", "GB", "memory that is still available on the machine or in the container"),
    ("deaths/*", "deaths", "processes that died since the controller began, by kind of process"),
    ("refused/samples", "samples", "samples of outside code that were refused since the controller began"),
    ("warm_start/loss", "nat", "last loss of the supervised warm start"),
    ("warm_start/accuracy", "fraction", "probability of the worked answer in the last batches of the supervised warm start"),
    ("warm_start/steps", "steps", "steps of the supervised warm start"),
    ("warm_start/seconds", "s", "time that the supervised warm start took"),
    # Gauges of a process's heartbeat
    ("process/tokens_generated", "tokens", "tokens that this generator has sampled since it started"),
    ("process/generated_tokens/*", "tokens", "tokens that a generator has sampled since it started, by generator"),
    ("process/tokens_trained", "tokens", "tokens that this learner has trained since it started"),
    ("process/requests_running", "requests", "requests that this generator's engine is running"),
    ("process/slots", "requests", "requests that this generator's engine can run at once with the memory that is available now"),
    ("process/samples_scored", "samples", "samples that this worker has scored since it started"),
    ("process/samples_failed", "samples", "samples that this worker could not score since it started"),
    ("process/samples_scoring", "samples", "samples that this worker is scoring"),
    ("process/score_s_mean", "s", "time in which this worker scores a sample, mean since it started"),
    ("process/children_replaced", "processes", "child processes of this worker that died or hung and were replaced"),
    ("process/samples_over_limit", "samples", "samples that scored 0 because a reward exceeded its time or memory limit"),
    ("process/tokens_judged", "tokens", "prompt and response tokens that this inference worker has judged since it started"),
    ("process/judged_tokens_per_sec", "tokens/s", "prompt and response tokens that this worker judges, per second of its work"),
    ("process/models_loaded", "models", "reference and reward models in this inference worker's memory"),
    ("process/model_bytes", "bytes", "size of the weights of the models in this inference worker's memory"),
    ("process/idle_s", "s", "time that this process had nothing to do since it started"),
    ("process/busy_s", "s", "time that this process had something to do since it started"),
    ("process/resident_bytes", "bytes", "resident memory of this process"),
    ("process/version", "version", "version of the weights that this process holds"),
)

_BY_STALENESS = (
    "kl/proximal_k1", "kl/proximal_k3", "kl/current_k1", "kl/current_k3", "policy/clip_fraction", "policy/kept_fraction",
    "ratio/mean", "ratio/p01", "ratio/p05", "ratio/p50", "ratio/p95", "ratio/p99", "ratio/ess", "ratio/chi2_token",
    "ratio/capped_fraction", "ratio/chi2_sequence", "ratio/perplexity",
)  # fmt: skip
_OF_BUCKET = "over the tokens (of sequences: by the oldest token) with one staleness: 0, 1, 2, 3-4, 5-8 or 9+ versions"

METRICS: dict[str, Metric] = {name: Metric(name, unit, meaning) for name, unit, meaning in _ROWS}
METRICS |= {
    f"{name}_by_staleness/*": Metric(f"{name}_by_staleness/*", METRICS[name].unit, f"`{name}` {_OF_BUCKET}")
    for name in _BY_STALENESS
}
COUNTERS = frozenset({"dropped/*", "failed/*", "deaths/*", "refused/samples"})
"""Metrics that never decrease during the life of a controller."""


def find_metric(name: str) -> Metric | None:
    """Return the row that `name` belongs to, or None if the table has no such row."""
    ends = (at for at, letter in enumerate(name[:-1]) if letter == "/")  # the part behind a family's name may have a slash too
    return METRICS.get(name) or next((METRICS[row] for end in ends if (row := f"{name[:end]}/*") in METRICS), None)


def unknown_names(names: Iterable[str]) -> list[str]:
    """Return the names that the table does not know, sorted."""
    return sorted({name for name in names if find_metric(name) is None})


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that JSON can represent, which are neither infinite nor NaN."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
