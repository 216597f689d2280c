"""A character tokenizer for models made from scratch: one token a character, then `<pad>` and `<eos>`; no beginning-of-sequence.

A character outside the alphabet raises: a task whose prompts do not fit its own alphabet is a bug, not an unknown token.
Called by learner/model.py.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer over `alphabet`; ids follow the sorted characters, 0 is `<pad>` and 1 is `<eos>`.

    Raises:
        ValueError: The alphabet is empty.
    """
    if not alphabet:
        raise ValueError("a character tokenizer needs at least one character, got an empty alphabet")
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *sorted(set(alphabet))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False)
