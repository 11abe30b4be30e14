"""What a model can take: the longest text, the ids that exist, and an id to pad with.

A learned position table that reserves its first rows (RoBERTa kinds count from padding_idx + 1) holds fewer positions
than its size says: limit = table size - padding_idx - 1. Beware: a rotary model does not break past its limit, it
only leaves the lengths it was trained on, and relative-position models state no limit at all.
"""

from torch import nn

# Tokenizers without a limit of their own carry 10**30.
_SANE_LENGTH = 2**30
# `max_position_embeddings` is the common name; old configurations map to it, these two do not.
_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")


def length_limit(module: nn.Module | None, tokenizer) -> int | None:
    """The most tokens one text may have, specials included; None where neither model nor tokenizer states a limit.

    The model's configuration decides; the tokenizer's `model_max_length` is asked only if it says nothing.
    """
    config = getattr(module, "config", None)
    if config is not None:
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        for name in _LENGTH_NAMES:
            size = getattr(config, name, None)
            if isinstance(size, int) and 0 < size < _SANE_LENGTH:
                return size - _reserved_positions(module, size)
    size = getattr(tokenizer, "model_max_length", None)
    return int(size) if size is not None and 0 < size < _SANE_LENGTH else None


def _reserved_positions(module: nn.Module, size: int) -> int:
    """Rows at the start of a position table of this size that no real token uses."""
    words = _word_embedding(module)
    for part in module.modules():
        if (
            isinstance(part, nn.Embedding)
            and part is not words
            and part.num_embeddings == size
            and part.padding_idx is not None
        ):
            return part.padding_idx + 1
    return 0


def vocabulary_size(module: nn.Module | None) -> int | None:
    """Number of rows of the word embedding, or None for a model (or no model) without one."""
    words = None if module is None else _word_embedding(module)
    return None if words is None else words.weight.shape[0]


def _word_embedding(module: nn.Module) -> nn.Module | None:
    if not hasattr(module, "get_input_embeddings"):
        return None
    try:
        words = module.get_input_embeddings()
    except NotImplementedError:  # how transformers says that a vision or audio model has no words
        return None
    return words if hasattr(words, "weight") and words.weight.dim() == 2 else None


def pad_id(module: nn.Module | None, tokenizer) -> int:
    """An id to fill padded places with: the tokenizer's or the configuration's pad id, else 0.

    Any id would do, because the mask is explicit; but RoBERTa kinds also read positions off the pad id, so the model's
    own is taken where there is one.
    """
    config = getattr(module, "config", None)
    known = vocabulary_size(module)
    for candidate in (getattr(tokenizer, "pad_token_id", None), getattr(config, "pad_token_id", None)):
        if isinstance(candidate, int) and candidate >= 0 and (known is None or candidate < known):
            return candidate
    return 0
