"""Trains a tiny tuned lens and kills itself, without any notice, after the checkpoint of step 4."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
from microtome.lenses import tuned_training
from transformers import LlamaConfig, LlamaForCausalLM

SETTINGS = tuned_training.TunedSettings(
    steps=12, tokens=16, batch_tokens=64, evaluate_every=3, checkpoint_every=2, held_out_tokens=32
)


def model():
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=50, num_key_value_heads=2)).eval()


def texts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 50, (9,), generator=generator).tolist() for _ in range(20)]


def train(folder: Path, optimizer: str) -> tuned_training.TunedLens:
    return tuned_training.fit_tuned_lens(
        model(), texts(), settings=replace(SETTINGS, optimizer=optimizer), checkpoint=folder
    )


if __name__ == "__main__":
    kept = tuned_training._Training.keep

    def keep_and_die(self, path, facts):
        kept(self, path, facts)
        if self.step >= 4:
            os.kill(os.getpid(), signal.SIGKILL)

    tuned_training._Training.keep = keep_and_die
    train(Path(sys.argv[1]), sys.argv[2])
