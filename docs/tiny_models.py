"""Small language models of one's own, alike in all but seed or depth: what studies of alignment compare.

    a, b = train_tiny(2, seed=0), train_tiny(4, seed=1)         # about 2 and 3 minutes on one thread, once
    python docs/tiny_models.py                                  # trains two seeds of each depth

Llama blocks of width 64 over 2048 byte-pair tokens, trained on plain English documents of the fit split; the tokenizer
is made from the same documents and is one for all. The seed draws weights and the order of windows. On one machine with
one number of threads the same call gives the same weights; they are kept in runs/tiny_models/.
"""

import argparse
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from microtome.capture import LoadedModel, load_model
from microtome.data import plain_english

FOLDER = Path("runs/tiny_models")
VOCABULARY, WIDTH, WINDOW, BATCH = 2048, 64, 64, 32
CHARACTERS = 3_000_000


def train_tiny(
    layers: int, seed: int, steps: int = 600, *, width: int = WIDTH, folder: Path = FOLDER, progress: bool = True
) -> LoadedModel:
    """A model of so many layers after so many steps of 2048 tokens, trained on first use."""
    home = folder / f"llama_{layers}x{width}_seed{seed}_{steps}steps"
    if not (home / "config.json").is_file():
        tokens = token_stream(folder)
        module = tiny_llama(layers, width, seed)
        losses = train(module, tokens, seed, steps, f"{layers} layers, seed {seed}" if progress else None)
        module.save_pretrained(home)
        tiny_tokenizer(folder).save_pretrained(home)
        if progress:
            print(f"{home.name}: mean loss of the last 50 steps {sum(losses[-50:]) / len(losses[-50:]):.3f} nats")
    return load_model(home)


def tiny_llama(layers: int, width: int, seed: int) -> LlamaForCausalLM:
    """Initial weights under a seed; input and output embeddings of their own."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def train(module: LlamaForCausalLM, tokens: Tensor, seed: int, steps: int, shown: str | None = None) -> list[float]:
    """AdamW with a one-cycle rate on random windows of the stream, in place; losses of all steps, in nats per token."""
    module.train()
    optimiser = torch.optim.AdamW(module.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps, pct_start=0.1)
    losses = []
    for batch in tqdm(_windows(tokens, seed, steps), total=steps, desc=shown, unit="step", disable=shown is None):
        loss = module(input_ids=batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(float(loss.detach()))
    module.eval()
    return losses


def tiny_tokenizer(folder: Path = FOLDER) -> PreTrainedTokenizerFast:
    """Byte-level pairs of the training documents, made on first use. Token 0 ends a document, and pads."""
    home = folder / "tokenizer"
    if not (home / "tokenizer.json").is_file():
        made = ByteLevelBPETokenizer()
        made.train_from_iterator(_documents(), VOCABULARY, special_tokens=["<|end|>"], show_progress=False)
        marks = dict.fromkeys(["bos_token", "eos_token", "pad_token"], "<|end|>")
        PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, **marks).save_pretrained(home)
    return PreTrainedTokenizerFast.from_pretrained(home)


@cache
def token_stream(folder: Path = FOLDER) -> Tensor:
    """All training documents, one after the other."""
    tokenizer = tiny_tokenizer(folder)
    ids: list[int] = []
    for encoded in tokenizer(_documents(), add_special_tokens=False)["input_ids"]:
        ids += [*encoded, tokenizer.eos_token_id]
    return torch.tensor(ids)


@cache
def _documents() -> list[str]:
    return plain_english(characters=CHARACTERS, split="fit")["text"].tolist()


def _windows(tokens: Tensor, seed: int, steps: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - WINDOW, (BATCH,), generator=generator)
        yield torch.stack([tokens[start : start + WINDOW] for start in starts.tolist()])


def main() -> None:
    """Train the models that the study of alignment compares."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=600)
    given = parser.parse_args()
    for layers, seed in ((2, 0), (2, 1), (4, 0), (4, 1)):
        train_tiny(layers, seed, given.steps)


if __name__ == "__main__":
    main()
