"""Blocks that stand still: for one thread alone, whatever other threads do with the same model."""

import threading

import torch

from microtome.capture.dissect import dissect
from microtome.capture.still_blocks import blocks_standing_still, outputs_kept


def test_threads_stand_still_on_one_model_each_for_itself(tiny):
    model = tiny("llama")
    anatomy = dissect(model)
    texts = torch.randint(5, 100, (2, 1, 9), generator=torch.Generator().manual_seed(0))
    blocks = [model.get_submodule(block.path) for block in anatomy.blocks]
    with torch.no_grad():
        alone = [model(text).logits for text in texts]
        kept = []
        for text in texts:
            with outputs_kept(model, anatomy, (1,)) as held:
                model(text)
            kept.append(held)
    entered, left, found = threading.Event(), threading.Event(), {}

    def between(*_: object) -> None:
        if threading.current_thread() is thread:
            entered.set()
            assert left.wait(30)

    def first() -> None:
        # block 0 hands on what is not its own, so that block 1 must not run
        with torch.no_grad(), blocks_standing_still(model, anatomy, kept[0], 2):
            found[0] = model(texts[0]).logits

    thread = threading.Thread(target=first)
    handle = blocks[0].register_forward_hook(between)
    thread.start()
    assert entered.wait(30)
    with torch.no_grad():
        with blocks_standing_still(model, anatomy, kept[1], 2):
            found[1] = model(texts[1]).logits
        found[2] = model(texts[1]).logits
    left.set()
    thread.join()
    handle.remove()
    assert torch.equal(found[0], alone[0])
    assert torch.equal(found[1], alone[1])
    assert torch.equal(found[2], alone[1])
    assert not any("forward" in vars(block) for block in blocks)
