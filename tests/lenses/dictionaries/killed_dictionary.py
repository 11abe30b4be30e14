"""Trains a tiny dictionary and kills itself, without any notice, after the checkpoint of step 4."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from microtome.lenses.dictionaries import training, training_state

SETTINGS = training.DictionarySettings(
    steps=12, batch=16, dead_after=40, evaluate_every=3, checkpoint_every=2, held_out_rows=32, rate=0.01
)


def model():
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=50, num_key_value_heads=2)).eval()


def texts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 50, (9,), generator=generator).tolist() for _ in range(20)]


def train(folder: Path | None, buffer: int, **changed):
    settings = replace(SETTINGS, buffer=buffer, **changed)
    return training.train_dictionary(
        model(),
        texts(),
        "resid_post.0",
        features=48,
        k=3,
        settings=settings,
        checkpoint=folder,
        progress=False,
        max_tokens=30,
    )


if __name__ == "__main__":
    kept = training_state.TrainingState.keep

    def keep_and_die(self, path, facts):
        kept(self, path, facts)
        if self.step >= 4:
            os.kill(os.getpid(), signal.SIGKILL)

    training_state.TrainingState.keep = keep_and_die
    train(Path(sys.argv[1]), int(sys.argv[2]))
