"""The policy, made from scratch or opened from a local folder, always with packed attention; its forward over a packed row.

Also the critic: it predicts the return from the state before each token, as a head on the policy or as a separate model.

A checkpoint with LoRA is a Hugging Face folder whose weights are links to the run's model, with the adapters beside them in
peft's format (adapter_config.json, adapter_model.safetensors). `AutoModelForCausalLM.from_pretrained` opens it with the adapters
active; `peft.PeftModel.from_pretrained` opens it over the base.

Invariants: engines and checkpoints get exactly the trained weights; nothing is downloaded; dropout is off (the importance ratio
of an update's first forward is 1 only if the forward depends on weights and tokens alone); a folder written here opens with
`AutoModelForCausalLM.from_pretrained`; peft is imported only if there are adapters. A new critic gives 0 everywhere (its output
layer starts at zero), so that it changes nothing at first; that layer is float32, even if its body is not.

Legend: M targets of a row, D hidden size.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from asyncrl.config.algorithm import CriticConfig
from asyncrl.config.learner import LearnerConfig, ScratchModel
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError, LearnerError
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.ranks.fsdp import save_whole
from asyncrl.learner.step.microbatch import Row
from asyncrl.models.attention import PACKED_ATTENTION, build_layout, use_packed_attention
from asyncrl.models.causal import (
    DTYPES,
    check_folder,
    check_head,
    make_savable,
    open_folder,
    rope_positions,
)
from asyncrl.models.logprobs import run_inside, token_logprobs, use_float32_head
from asyncrl.schema.samples import ids_to_bytes, logprobs_to_bytes
from asyncrl.schema.weights import Probe

PAD, EOS = "<pad>", "<eos>"
ADAPTER_FILE = "adapter_model.safetensors"
PROBE_TOKENS = 16
MOST_FED = 0.9
"""Share of a row's tokens above which skipping the other tokens saves less than it costs."""
SMALL_LOGITS = 1 << 20
"""Up to so many logits (4 MiB in float32) are computed without chunks, which would cost a second forward of the output layer."""


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; ids follow the sorted characters, 0 is `<pad>` and 1 is `<eos>`.

    A character outside the alphabet raises: a task whose prompts do not fit its own alphabet is a bug, not an unknown token.

    Raises:
        ConfigError: The alphabet is empty.
    """
    if not alphabet:
        raise ConfigError("a scratch model has a token for each character of TaskData.alphabet, and the task gave an empty one")
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *sorted(set(alphabet))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False)


def build_scratch(config: ScratchModel, alphabet: str, seed: int) -> tuple[PreTrainedModel, Any]:
    """Make a small Llama with random weights and its character tokenizer.

    Args:
        config: Sizes.
        alphabet: All characters that a prompt or completion may contain.
        seed: Seed of the weights.

    Returns:
        float32 model on the CPU, tokenizer.
    """
    tokenizer = character_tokenizer(alphabet)
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads or config.num_heads,
        intermediate_size=config.intermediate_size or 4 * config.hidden_size,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=config.tie_embeddings,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(llama)
    return model, tokenizer


def open_model(
    folder: Path, config: LearnerConfig, *, trust_remote_code: bool = False, fp32_head: bool = False, needs_head: bool = True
) -> PreTrainedModel:
    """Open a Hugging Face folder with packed attention, on the learner's device and in its dtype, ready to train.

    Args:
        folder: Config, safetensors and tokenizer.
        config: Device, dtype and gradient checkpointing are read.
        trust_remote_code: As in the run's config.
        fp32_head: As `model.fp32_head` in the run's config.
        needs_head: See `open_folder`.

    Raises:
        ConfigError: The folder is incomplete (for example, a weight is missing), or the model cannot be trained on packed rows.
    """
    check_folder(folder)
    model = open_folder(
        "model.path", folder, AutoModelForCausalLM, config.dtype,
        needs_head=needs_head, attn_implementation=PACKED_ATTENTION, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    make_savable(model)
    return made_ready(model, config, fp32_head=fp32_head)


def made_ready(model: PreTrainedModel, config: LearnerConfig, *, fp32_head: bool = False) -> PreTrainedModel:
    """Move a model to device and dtype, set packed attention, switch dropout off, and check that its head is supported."""
    use_packed_attention(model)
    model.to(device=config.device)
    # Not model.to(dtype), which would also round the rotary frequencies: large positions would be wrong by whole radians.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[config.dtype])
    if fp32_head:
        use_float32_head(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train()
    check_head(model)  # before it compiles: a model of several ranks is on the CPU here
    if config.compile:
        for layer in model.modules():
            if type(layer).__name__ in (model._no_split_modules or ()):  # noqa: SLF001 - transformers' name for its repeated blocks
                layer.compile(dynamic=True)  # type: ignore[no-untyped-call]
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def open_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:  # noqa: ANN401 - transformers' own class
    """Open the tokenizer of a folder that passed `check_folder`."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(f"cannot open the tokenizer in {folder}: {str(error).strip().splitlines()[0]}") from error


def save_model(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:  # noqa: ANN401
    """Write model and tokenizer into an existing folder, in Hugging Face layout."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def link_folder(source: Path, folder: Path, *, relative: bool = False) -> None:
    """Fill `folder` with the small files of `source`, and links to its weights; `relative` links survive a move of both."""
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(os.path.relpath(path, folder.resolve()) if relative else path)
        elif path.is_file() and path.suffix in {".json", ".txt", ".model", ".jinja", ".py"}:
            shutil.copyfile(path, folder / path.name)


@dataclass(frozen=True, slots=True)
class RowOutputs:
    """Results of one forward of the policy over a row."""

    logprobs: torch.Tensor
    """float32 [M] (float64 for a float64 model), log-probability of each target."""
    entropy: torch.Tensor
    """As `logprobs`: entropy of the distribution from which each target was drawn."""
    hidden: torch.Tensor
    """[M, D], the output layer's input for each target: the state before it."""


def run_row(
    model: PreTrainedModel,
    row: Row,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy_gradient: bool = False,
    fused: bool = False,
) -> RowOutputs:
    """Run the policy over a row.

    Args:
        model: From `open_model` or `made_ready`.
        row: On the model's device.
        temperature: See `token_logprobs`.
        chunk_tokens: See `token_logprobs`; more if the vocabulary is small (SMALL_LOGITS).
        entropy_gradient: See `token_logprobs`.
        fused: See `token_logprobs`.
    """

    def work() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden, head = row_hidden(model.base_model, row), model.get_output_embeddings()
        logprobs, entropy = token_logprobs(
            hidden,
            row.target_ids,
            head,
            temperature=temperature,
            chunk_tokens=max(chunk_tokens, SMALL_LOGITS // model.config.get_text_config().vocab_size),
            entropy_gradient=entropy_gradient,
            fused=fused,
        )
        return logprobs, entropy, hidden

    return RowOutputs(*run_inside(model, work))


def row_hidden(body: PreTrainedModel, row: Row) -> torch.Tensor:
    """Return [M, D], the last hidden state of the token before each target; `body` is a model without its output layer."""
    assert body.config._attn_implementation == PACKED_ATTENTION, "see use_packed_attention"  # noqa: SLF001

    def work() -> torch.Tensor:
        with _feed_only(body, row.hidden_tokens, len(row.input_ids)):
            output = body(
                input_ids=row.input_ids.unsqueeze(0),
                position_ids=row.position_ids.unsqueeze(0),
                use_cache=False,
                packed_layout=row.layout,
            )
        hidden: torch.Tensor = output.last_hidden_state[0].index_select(0, row.hidden_index)
        return hidden

    return run_inside(body, work)


def _feed_only(body: PreTrainedModel, tokens: torch.Tensor, num_tokens: int) -> contextlib.ExitStack:
    """Return a context in which the last block's feed-forward runs only over `tokens` and gives 0 for the row's other tokens.

    Nothing reads the other tokens (most of a prompt) after that block. If blocks are compiled, checkpointed or have experts, or
    if few tokens would be skipped, it runs over all tokens.
    """
    context, kinds = contextlib.ExitStack(), body._no_split_modules or ()  # noqa: SLF001 - transformers' name for its repeated blocks
    blocks = [one for one in body.modules() if type(one).__name__ in kinds]
    feed_forward = getattr(blocks[-1], "mlp", None) if blocks and len(tokens) < MOST_FED * num_tokens else None
    is_plain = not (body.is_gradient_checkpointing or hasattr(feed_forward, "experts"))
    if feed_forward is not None and is_plain and blocks[-1]._compiled_call_impl is None:  # noqa: SLF001 - torch has no public reader

        def scattered(_: torch.nn.Module, given: tuple[torch.Tensor], computed: torch.Tensor) -> torch.Tensor:
            return computed.new_zeros(*given[0].shape[:1], num_tokens, computed.shape[-1]).index_copy(1, tokens, computed)

        context.enter_context(feed_forward.register_forward_pre_hook(lambda _, given: (given[0].index_select(1, tokens),)))
        context.enter_context(feed_forward.register_forward_hook(scattered))
    return context


def compile_now(model: PreTrainedModel, optimizer: PolicyOptimizer, config: RunConfig, reference: Reference | None) -> None:
    """Compile a step's passes over rows of any size (`learner.compile`) now, so that no step waits for it.

    The memory is released: vLLM counts memory that others allocate while it measures as its own.

    Args:
        model: From `made_ready`.
        optimizer: The model's optimizer.
        config: `algorithm` and `learner` are read.
        reference: The learner's own.
    """
    sequences = [np.arange(40), np.concatenate([np.arange(24), np.arange(40, 72)])]  # the second has the first's prefix
    tokens, zeros = torch.arange(72), torch.zeros(72, dtype=torch.int64)
    row = Row(
        input_ids=zeros,
        position_ids=torch.from_numpy(np.concatenate([sequences[0], np.arange(24, 56)])),
        layout=build_layout(sequences, 72),
        hidden_index=tokens,
        hidden_tokens=tokens,
        target_ids=zeros,
        behaviour_logprobs=zeros.float(),
        versions=zeros,
        sequence_ids=zeros,
        sample_index=np.zeros(1, np.int64),
        places=(np.zeros(72, np.int64), np.arange(72)),
    ).to(model.device)
    learner = config.learner
    run = partial(
        run_row, model, row, temperature=1.0, chunk_tokens=learner.logprob_chunk_tokens, fused=learner.logprobs == "fused"
    )
    outputs = run(entropy_gradient=config.algorithm.entropy_coefficient != 0.0)
    # As in a step, each value has a gradient of its own; for the gradient of a plain sum other code would be compiled.
    losses = [(values * row.behaviour_logprobs).sum() for values in (outputs.logprobs, outputs.entropy)]
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.zero_grad()
    if learner.minibatches * learner.epochs > 1:  # then a step begins with a pass without gradients
        with torch.no_grad():
            run()
    if reference is not None:
        reference.logprobs(row, temperature=1.0)
    torch.cuda.empty_cache()


class Reference:
    """The frozen reference policy on the learner's device: a separate model, or the policy with its adapters off."""

    def __init__(
        self, model: PreTrainedModel, chunk_tokens: int, adapters_off: Callable[[], AbstractContextManager[None]] | None = None
    ) -> None:
        """Freeze `model`, unless it is the policy.

        Args:
            model: The reference, or the policy.
            chunk_tokens: `learner.logprob_chunk_tokens`.
            adapters_off: Context in which the policy is its base model, which saves a second copy; None: `model` is a separate
                model.
        """
        self.model = model if adapters_off is not None else model.requires_grad_(False)
        self.is_own_model = adapters_off is None
        self._adapters_off = adapters_off or contextlib.nullcontext
        self._chunk_tokens = chunk_tokens

    @torch.no_grad()
    def logprobs(self, row: Row, temperature: float) -> torch.Tensor:
        """Return float32 [M], log-probability of each target of the row."""
        with self._adapters_off():
            return run_row(self.model, row, temperature=temperature, chunk_tokens=self._chunk_tokens).logprobs


@torch.no_grad()
def make_probe(model: PreTrainedModel, max_tokens: int) -> Probe:
    """Return a fixed sequence and its log-probabilities, with which a generator verifies that it has the learner's weights.

    Args:
        model: The policy.
        max_tokens: Longest sequence that a generator accepts.
    """
    vocabulary = model.config.get_text_config().vocab_size
    token_ids = np.random.default_rng(0).integers(0, vocabulary, min(PROBE_TOKENS, max_tokens)).astype(np.int32)
    tokens = torch.from_numpy(token_ids.astype(np.int64)).to(model.device)

    def work() -> torch.Tensor:
        hidden = model.base_model(input_ids=tokens[:-1].unsqueeze(0), use_cache=False).last_hidden_state[0]
        return token_logprobs(hidden, tokens[1:], model.get_output_embeddings(), temperature=1.0, chunk_tokens=len(tokens))[0]

    return Probe(ids_to_bytes(token_ids), logprobs_to_bytes(run_inside(model, work).float().cpu().numpy()))


def open_policy(config: RunConfig, model_folder: Path, checkpoint: Path | None = None) -> PreTrainedModel:
    """Open the policy, with its adapters if there are any, ready to train.

    Args:
        config: `model`, `learner`, `generate.engine` and `seed` are read.
        model_folder: `RUN/model`, the policy at version 0.
        checkpoint: Source of the weights or adapters; None: version 0.

    Raises:
        ConfigError: A folder cannot be opened, sequences are too long for the model's positions, or it has no layer of a name in
            `learner.lora`.
        LearnerError: The checkpoint has no adapters, or they are not of this model and this `learner.lora`.
    """
    weights = checkpoint if checkpoint is not None and config.learner.lora is None else model_folder
    model = open_model(weights, config.learner, trust_remote_code=config.trusts_code, fp32_head=config.model.fp32_head)
    longest, most = config.generate.engine.max_sequence_tokens, rope_positions(model.config)
    if most and longest > most:
        raise ConfigError(
            f"generate.engine.max_sequence_tokens is {longest}; beyond {most} tokens the model in {weights} computes positions "
            f"by the longest sequence of a forward pass: set it to at most {most}"
        )
    if config.learner.lora is not None:
        import_module("asyncrl.models.adapters").add_adapters(model, config.learner.lora, config.seed)
        if checkpoint is not None:
            path = checkpoint / ADAPTER_FILE
            if not path.is_file():
                raise LearnerError(
                    f"{checkpoint} has no {ADAPTER_FILE}: it was written without learner.lora; remove it, or start a new run"
                )
            was, own = json.loads((checkpoint / "adapter_config.json").read_bytes()), config.learner.lora
            for name, before, now in (("alpha", was["lora_alpha"], own.alpha), ("rank", was["r"], own.rank)):
                if before != now:
                    raise LearnerError(
                        f"{checkpoint} was written with learner.lora.{name} = {before:g}, the config has {now:g}: "
                        "use the config of the run's start"
                    )
            saved = load_file(path)
            wanted = {_peft_name(name): parameter for name, parameter in publishable_tensors(model).items()}
            if {name: one.shape for name, one in saved.items()} != {name: one.shape for name, one in wanted.items()}:
                raise LearnerError(
                    f"the adapters in {path} do not fit this model and learner.lora: use the config of the run's start"
                )
            with torch.no_grad():
                for name, parameter in wanted.items():
                    parameter.copy_(saved[name])
    return model


def has_adapters(model: PreTrainedModel) -> bool:
    """Return whether `add_adapters` was called on a model."""
    return bool(getattr(model, "peft_config", None))


def publishable_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors that engines must load for this version: the trained adapters if there are any, else all parameters."""
    parameters = model.named_parameters()
    if not has_adapters(model):
        return dict(parameters)
    return {name: parameter for name, parameter in parameters if parameter.requires_grad}


def save_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Fill an empty folder that `AutoModelForCausalLM.from_pretrained` opens as this policy: adapters, and links to the base."""
    base = Path(model.name_or_path).resolve()
    link_folder(base, folder, relative=True)
    save_whole(((_peft_name(name), tensor) for name, tensor in publishable_tensors(model).items()), folder / ADAPTER_FILE)
    config = next(iter(model.peft_config.values()))
    config.base_model_name_or_path = str(base)
    config.save_pretrained(folder)


def _peft_name(name: str) -> str:
    """Return a parameter's name in peft's files: without the adapter's name."""
    return "base_model.model." + name.replace(".default.", ".")


class Critic(torch.nn.Module):
    """A linear layer on the policy's hidden states (a head, whose gradient continues into the policy) or on its own body."""

    def __init__(self, hidden_size: int, body: PreTrainedModel | None = None) -> None:
        """Make a critic on the CPU, or on its body's device.

        Args:
            hidden_size: D.
            body: A transformer without its output layer; None: the critic is a head.
        """
        super().__init__()
        self.body = body
        self.output = torch.nn.Linear(hidden_size, 1)
        for parameter in self.output.parameters():
            torch.nn.init.zeros_(parameter)
        if body is not None:
            self.output.to(next(body.parameters()).device)

    def forward(self, given: Row | torch.Tensor) -> torch.Tensor:
        """Return [M], the value of the state before each target: of a row or, for a head, of the policy's states [M, D]."""
        if isinstance(given, Row):
            assert self.body is not None, "a head is given the policy's hidden states"
            given = row_hidden(self.body, given)
        values: torch.Tensor = self.output(given.to(self.output.weight.dtype)).squeeze(-1)
        return values


def build_critic_optimizer(
    critic: Critic, config: CriticConfig, learner: LearnerConfig, num_steps: int, policy: PolicyOptimizer
) -> PolicyOptimizer:
    """Return the critic's optimizer: the learner's settings with the critic's learning rate; `policy` is the policy's."""
    own = msgspec.structs.replace(learner, learning_rate=config.learning_rate)
    shared = policy if critic.body is None else None
    return PolicyOptimizer(critic.named_parameters(), own, num_steps, shares_scale_of=shared)
