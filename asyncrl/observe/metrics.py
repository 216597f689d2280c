"""Every metric there is: name, unit, meaning. The one place; docs/observability.md holds the same table, and a test compares.

Names are `stage/noun_unit`, or the field's own word where it has one. A family ends in `/*`: the last part of the name is chosen
at run time (a drop reason, a staleness, a process). Metrics are returned as values by whoever computes them, never recorded
inside the maths; the controller hands one dict a step to the sinks.
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
    ("reward/mean", "reward", "mean over the samples of the step"),
    ("reward/std", "reward", "standard deviation over the samples of the step"),
    ("reward/max", "reward", "largest of the step"),
    ("reward/min", "reward", "smallest of the step"),
    ("reward/group_std_mean", "reward", "mean over groups of the standard deviation inside the group"),
    ("reward/zero_spread_fraction", "fraction", "groups whose rewards are all equal: they teach nothing"),
    ("reward_part/*", "reward", "mean of one configured reward, unweighted, by its name"),
    ("advantage/mean", "1", "mean over the samples of the step"),
    ("advantage/std", "1", "standard deviation over the samples of the step"),
    ("advantage/max", "1", "largest of the step"),
    ("advantage/min", "1", "smallest of the step"),
    ("eval/accuracy", "fraction", "held-out samples that the rules find right; none with reward models alone"),
    ("eval/reward_mean", "reward", "mean reward of held-out samples"),
    # How the policy moves
    ("kl/mean", "nat", "k3 estimate of KL(behaviour || learner before the step), mean over trained tokens"),
    ("kl/max", "nat", "largest k3 of a token"),
    ("kl/k1", "nat", "k1 estimate of KL(behaviour || learner before the step), mean over trained tokens"),
    ("kl/proximal_k1", "nat", "k1 estimate of KL(behaviour || proximal policy of the loss)"),
    ("kl/proximal_k3", "nat", "k3 estimate of the same"),
    ("kl/current_k1", "nat", "k1 estimate of KL(behaviour || current policy), mean over every update of the step"),
    ("kl/current_k3", "nat", "k3 estimate of the same"),
    ("kl/reference_mean", "nat", "k3 estimate of KL(learner || reference), where there is a reference model"),
    ("kl/reference_k1", "nat", "k1 estimate of the same"),
    ("kl/penalty_mean", "nat", "the configured estimate of the KL penalty (in loss or rewards), mean over trained tokens"),
    ("kl/coefficient", "1", "of the penalty, in force in this step"),
    ("policy/loss", "1", "the objective that is minimised, penalties included"),
    ("policy/entropy", "nat", "mean entropy of the learner's distribution over trained tokens"),
    ("policy/clip_fraction", "fraction", "trained tokens at which the clip holds the gradient back"),
    ("policy/dual_clip_fraction", "fraction", "trained tokens at which the dual clip does"),
    ("policy/kept_fraction", "fraction", "trained tokens that no correction dropped"),
    ("policy/grad_norm", "1", "global gradient norm before clipping, mean over the updates of the step"),
    ("policy/learning_rate", "1", "of the last update"),
    ("policy/relative_update", "1", "how far an update moves the weights, over their size, scaled to the highest learning rate"),
    ("policy/updates", "updates", "optimizer updates in the step"),
    ("policy/skipped_updates", "updates", "left out because float16 gradients overflowed"),
    ("policy/recipe", "1", "what kind = auto picked for the step: 0 near, 1 lagging, 2 far"),
    ("value/loss", "1", "loss of the critic, where there is one"),
    ("value/explained_var", "fraction", "1 - var(return - value) / var(return)"),
    ("value/clip_fraction", "fraction", "trained tokens at which the value clip holds the critic's gradient back"),
    ("value/mean", "reward", "the critic's value before the step, mean over trained tokens"),
    ("value/returns_mean", "reward", "what the critic is trained towards, mean over trained tokens"),
    ("value/grad_norm", "1", "the critic's gradient norm before clipping, mean over the updates of the step"),
    ("dpo/pairs", "pairs", "chosen and rejected samples trained, over every update of the step"),
    ("dpo/loss", "1", "mean over pairs"),
    ("dpo/accuracy", "fraction", "pairs whose chosen sample gained more on the reference than its rejected one"),
    ("dpo/margin", "nat", "(policy - reference) of chosen minus rejected log-probability, mean over pairs"),
    ("dpo/chosen_reward", "nat", "beta (policy - reference), summed over a chosen sample, mean over pairs"),
    ("dpo/rejected_reward", "nat", "the same of rejected samples"),
    # How far the data is from the policy
    ("ratio/mean", "1", "importance ratio learner / behaviour before the step, mean over trained tokens"),
    ("ratio/max", "1", "largest of a token"),
    ("ratio/min", "1", "smallest of a token"),
    ("ratio/p01", "1", "1st percentile over trained tokens"),
    ("ratio/p05", "1", "5th percentile"),
    ("ratio/p50", "1", "median"),
    ("ratio/p95", "1", "95th percentile"),
    ("ratio/p99", "1", "99th percentile"),
    ("ratio/ess", "fraction", "effective sample size of the ratios (Kish), as a fraction of the tokens"),
    ("ratio/capped_fraction", "fraction", "trained tokens whose off-policy correction met its cap"),
    (
        "ratio/high_fraction",
        "fraction",
        "ratios proximal / behaviour over the cap (2 without one, or where it is 1), of tokens or sequences as the cap is",
    ),
    ("ratio/low_fraction", "fraction", "the same under 1 / cap"),
    ("ratio/correction_mean", "1", "mean off-policy correction weight after capping"),
    ("ratio/correction_std", "1", "standard deviation of the correction weights over trained tokens"),
    ("ratio/correction_ess", "fraction", "effective sample size of the correction weights"),
    ("ratio/chi2_token", "1", "chi-squared divergence over tokens: mean ratio squared, minus 1"),
    ("ratio/chi2_sequence", "1", "the same over whole sequences"),
    ("ratio/perplexity", "1", "perplexity of the learner over that of the behaviour policy, mean over sequences"),
    ("perplexity/learner", "1", "exp(-mean log-probability) of a sample under the learner, mean over samples"),
    ("perplexity/learner_log", "nat", "its logarithm, mean over samples"),
    ("perplexity/behaviour", "1", "the same under the policy that sampled"),
    ("perplexity/behaviour_log", "nat", "its logarithm, mean over samples"),
    ("perplexity/log_gap_mean", "nat", "log perplexity of the learner minus that of the behaviour policy, mean over samples"),
    ("perplexity/log_gap_abs_mean", "nat", "its magnitude, mean over samples"),
    ("perplexity/log_gap_max", "nat", "largest of a sample"),
    ("perplexity/log_gap_min", "nat", "smallest of a sample"),
    ("mismatch/tokens", "tokens", "sampled by the very version that trains them: how engine and learner differ is seen on them"),
    ("mismatch/kl_k1", "nat", "k1 estimate of KL(behaviour || learner) over those tokens: numerics, not staleness"),
    ("mismatch/kl_k3", "nat", "k3 estimate of the same"),
    ("mismatch/logprob_gap_mean", "nat", "magnitude of learner minus engine log-probability, mean over those tokens"),
    ("mismatch/logprob_gap_max", "nat", "largest of them"),
    ("mismatch/correlation", "1", "correlation of the learner's and the engine's probabilities of those tokens"),
    ("staleness/mean", "versions", "mean over trained samples; of a sample: of its oldest trained token"),
    ("staleness/max", "versions", "largest over trained samples; never above buffer.max_staleness"),
    ("staleness/token_mean", "versions", "mean over trained tokens"),
    ("staleness/token_max", "versions", "largest over trained tokens"),
    ("staleness/in_flight_mean", "versions", "part that grew while the sample was generated, mean over samples"),
    ("staleness/in_flight_max", "versions", "largest in-flight part"),
    ("staleness/in_queue_mean", "versions", "part that grew after it was generated, mean over samples"),
    ("staleness/in_queue_max", "versions", "largest in-queue part"),
    ("staleness/masked_tokens", "tokens", "left out of the loss for being too old (buffer.policy mask)"),
    ("staleness/histogram/*", "fraction", "trained tokens of exactly this staleness"),
    ("dropped/*", "groups", "dropped since the run began, by reason"),
    ("failed/*", "groups", "failed since the run began, by reason"),
    # What the data looks like
    ("data/response_tokens_mean", "tokens", "mean response length of trained samples"),
    ("data/response_tokens_max", "tokens", "longest response of the step"),
    ("data/prompt_tokens_mean", "tokens", "mean prompt length of trained samples"),
    ("data/truncated_fraction", "fraction", "trained samples that ended at the length limit"),
    ("data/repeated_prompt_tokens", "tokens", "of prompts computed more than once, because their group was cut over rows"),
    ("data/rows", "rows", "micro-batches of the step"),
    ("data/samples", "samples", "trained in the step"),
    ("data/trained_tokens", "tokens", "with loss mask 1 in the step"),
    ("bias/length_ratio", "1", "mean length trained over generated, of the newest cohorts that are over; 1: no selection"),
    ("bias/length_ratio_low", "1", "lower end of its interval of 95 %"),
    ("bias/length_ratio_high", "1", "upper end"),
    ("bias/reward_gap", "reward", "mean reward trained minus mean reward scored, of the same groups; 0: no selection"),
    ("bias/reward_gap_low", "reward", "lower end of its interval of 95 %"),
    ("bias/reward_gap_high", "reward", "upper end"),
    ("bias/flagged", "1", "1 where either interval lies outside its bounds, else 0: what the alarm `bias` looks at"),
    ("bias/length", "tokens", "mean length of what was issued lately, unfinished samples as censored (Kaplan and Meier)"),
    ("bias/length_low", "tokens", "lower end of its interval of 95 %"),
    ("bias/length_high", "tokens", "upper end"),
    ("bias/screened_length_ratio", "1", "mean length of groups that the algorithm's own screens let pass, over that of all"),
    ("bias/lost/*", "fraction", "groups that were not trained, by reason: stale, failed, or an intended screen"),
    # How fast it goes
    ("throughput/tokens_per_sec", "tokens/s", "prompts and responses through the learner, over the time since the last step"),
    ("throughput/generated_tokens_per_sec", "tokens/s", "response tokens finished by all generators, over the same time"),
    ("throughput/trained_tokens_per_sec", "tokens/s", "tokens with loss mask 1, over the same time"),
    ("throughput/samples_per_sec", "samples/s", "trained, over the same time"),
    ("throughput/learner_tokens_per_sec", "tokens/s", "tokens through the learner over the time it worked"),
    ("idle/learner", "fraction", "time since the step before in which the learner had nothing to train"),
    ("idle/generators", "fraction", "the same for having nothing to generate, mean over generators"),
    ("time/step_s", "s", "from the step before to this one"),
    ("time/train_s", "s", "the learner's work on the step"),
    ("time/wait_s", "s", "the learner's wait for the batch"),
    ("time/proximal_s", "s", "forward passes for the proximal policy"),
    ("time/reference_s", "s", "forward passes for the reference, on the learner's devices"),
    ("time/values_s", "s", "forward passes for the critic's values before the step"),
    ("time/update_s", "s", "forward and backward passes and optimizer updates"),
    ("time/generate_mean_s", "s", "from submit to finish of a sample, mean over trained samples"),
    ("time/score_mean_s", "s", "judging of a sample, mean over those judged since the step before"),
    ("time/checkpoint_s", "s", "the newest checkpoint"),
    ("placement/rollout_s", "s", "phase rollout on a shared device, since the step before"),
    ("placement/inference_s", "s", "phase inference, over the same time"),
    ("placement/train_s", "s", "phase train, over the same time"),
    ("placement/switch_s", "s", "from one to the other and back, over the same time"),
    ("queue/lead", "versions", "that generation may be ahead of the learner: what it needs of buffer.max_staleness"),
    ("queue/ready", "groups", "complete and waiting to be trained"),
    ("queue/running", "groups", "being generated"),
    ("queue/scoring", "groups", "being judged"),
    ("queue/slots/*", "requests", "that a generator's engine can run at once, by the memory there is, by name"),
    ("queue/wait_mean_s", "s", "from ready to taken, mean over groups of the step"),
    ("queue/wait_max_s", "s", "longest of them"),
    ("weights/sync_ms", "ms", "from published to live on the slowest generator"),
    ("weights/blocked_ms", "ms", "the learner stood still to publish"),
    ("weights/update_bytes", "bytes", "what a generator that has the version before fetches: the delta, or the whole"),
    ("weights/fetch_ms", "ms", "a generator's fetch of the bytes, slowest"),
    ("weights/swap_ms", "ms", "a generator's token generation stood still, slowest"),
    ("weights/probe_error", "nat", "largest difference of a probe logprob after a swap, generator against learner"),
    # What it takes
    ("memory/allocated_gb", "GB", "held by the learner: on its device, or resident on a CPU"),
    ("memory/peak_gb", "GB", "most the learner ever held"),
    ("memory/peak_share", "fraction", "most the learner ever held, of its device's memory"),
    ("memory/resident_gb/*", "GB", "resident memory of one process, by name"),
    ("disk/free_gb", "GB", "free on the disk of the run's folder"),
    ("memory/available_gb", "GB", "that the machine, or the container, can still give"),
    ("deaths/*", "deaths", "processes that died since the controller began, by kind"),
    ("refused/samples", "samples", "submitted by outside code and refused since the controller began"),
    ("warm_start/loss", "nat", "last loss of the supervised warm start"),
    ("warm_start/accuracy", "fraction", "probability of the worked answer in its last batches"),
    ("warm_start/steps", "steps", "of the supervised warm start"),
    ("warm_start/seconds", "s", "that it took"),
    # Gauges of a process's heartbeat
    ("process/tokens_generated", "tokens", "sampled by this generator since it started"),
    ("process/generated_tokens/*", "tokens", "the same, in the controller's metrics, by the generator's name"),
    ("process/tokens_trained", "tokens", "trained by this learner since it started"),
    ("process/requests_running", "requests", "in flight in this generator's engine"),
    ("process/slots", "requests", "that its engine can run at once, by the memory there is now"),
    ("process/samples_scored", "samples", "judged by this worker since it started"),
    ("process/samples_failed", "samples", "that this worker could not judge since it started"),
    ("process/samples_scoring", "samples", "being judged by this worker"),
    ("process/score_s_mean", "s", "judging of a sample by this worker, mean since it started"),
    ("process/children_replaced", "processes", "of this worker's children that died or hung and were replaced"),
    ("process/samples_over_limit", "samples", "that made a reward run out of time or memory, which scores 0"),
    ("process/tokens_judged", "tokens", "prompts and responses that this inference worker has judged since it started"),
    ("process/judged_tokens_per_sec", "tokens/s", "of them, over the time this inference worker had something to do"),
    ("process/models_loaded", "models", "reference and reward models in this inference worker's memory"),
    ("process/model_bytes", "bytes", "of their weights"),
    ("process/idle_s", "s", "with nothing to do since it started"),
    ("process/busy_s", "s", "with something to do since it started"),
    ("process/resident_bytes", "bytes", "resident memory"),
    ("process/version", "version", "of the weights it holds"),
)

_BY_STALENESS = (
    "kl/proximal_k1", "kl/proximal_k3", "kl/current_k1", "kl/current_k3", "policy/clip_fraction", "policy/kept_fraction",
    "ratio/mean", "ratio/p01", "ratio/p05", "ratio/p50", "ratio/p95", "ratio/p99", "ratio/ess", "ratio/chi2_token",
    "ratio/capped_fraction", "ratio/chi2_sequence", "ratio/perplexity",
)  # fmt: skip
_OF_BUCKET = "of the tokens (of whole samples: by the oldest token) that many versions behind: 0, 1, 2, 3-4, 5-8, 9+"

METRICS: dict[str, Metric] = {name: Metric(name, unit, meaning) for name, unit, meaning in _ROWS}
METRICS |= {
    f"{name}_by_staleness/*": Metric(f"{name}_by_staleness/*", METRICS[name].unit, f"`{name}` {_OF_BUCKET}")
    for name in _BY_STALENESS
}
COUNTERS = frozenset({"dropped/*", "failed/*", "deaths/*", "refused/samples"})
"""Those that never fall while a controller lives."""


def find_metric(name: str) -> Metric | None:
    """Return the row that `name` belongs to, or None where the table has none."""
    if name in METRICS:
        return METRICS[name]
    stem, _, last = name.rpartition("/")
    return METRICS.get(f"{stem}/*") if last else None


def unknown_names(names: Iterable[str]) -> list[str]:
    """Return the names that the table does not know, sorted."""
    return sorted({name for name in names if find_metric(name) is None})


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that JSON has a word for: neither infinite nor NaN."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
