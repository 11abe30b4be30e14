"""Trainings that are killed: run by test_attention_lens_training.py as a process of its own, which forks each of them.

    python killed_training.py FOLDER 6      a child kills itself with SIGKILL before its n-th write or rename, n = 1..6

Prints {"kills": , "same": whether the lens file of every finished training has the bytes of an uninterrupted one}.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from perturbation import perturb
from transformers import LlamaConfig, LlamaForCausalLM

from microtome.capture import dissect
from microtome.lenses import attention_lens_files
from microtome.lenses.attention_lens_training import train_attention_lens

torch.set_num_threads(1)  # a child of a fork has no threads but its own
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXTS = [[(7 * i + 3 * j * j) % 90 + 5 for j in range(12)] for i in range(30)]
SETTINGS = {"steps": 24, "evaluate_every": 4, "batch_rows": 32, "patience": 40, "start": "zero", "shrink": 0.1}


def train_in_child(model: torch.nn.Module, folder: Path, kill_at: int | None) -> bool:
    """Train in a fork; true if it finished."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    if kill_at is not None:
        count = 0

        def before(function):
            def counted(*given, **named):
                nonlocal count
                count += 1
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*given, **named)

            return counted

        attention_lens_files.save_file = before(attention_lens_files.save_file)
        os.replace = before(os.replace)
    train_attention_lens(model, TEXTS, 1, folder=folder, **SETTINGS)
    os._exit(0)


def main(folder: Path, kills: int) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2, vocab_size=100)).eval()
    perturb(model, 0)
    dissect(model)
    assert train_in_child(model, folder / "whole", None)
    expected = (folder / "whole" / "lens.safetensors").read_bytes()
    killed, same = 0, True
    for number in range(1, kills + 1):
        place = folder / str(number)
        killed += not train_in_child(model, place, number)
        assert train_in_child(model, place, None)
        same &= (place / "lens.safetensors").read_bytes() == expected
    print(json.dumps({"kills": killed, "same": same}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
