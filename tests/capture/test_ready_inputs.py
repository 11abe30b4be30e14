"""Ready model inputs: split along rows, masks explicit, positions of what the model makes of them."""

import pytest
import torch
from torch import nn
from transformers import Wav2Vec2Config, Wav2Vec2Model

from microtome.capture.ready_inputs import ReadyInputs, describe_positions, position_mask

PIXELS = {"pixel_values": torch.arange(3 * 4.0).view(3, 1, 2, 2)}


def test_rows_are_split_in_any_order():
    ready = ReadyInputs.from_mapping(PIXELS | {"interpolate": True})
    assert ready.n_rows == 3
    assert ready.is_splittable
    assert not ready.is_plain_text
    inputs = ready.model_inputs([2, 0], device="cpu", dtype=torch.bfloat16)
    assert inputs["interpolate"] is True
    assert inputs["pixel_values"].dtype == torch.bfloat16
    torch.testing.assert_close(inputs["pixel_values"].float(), PIXELS["pixel_values"][[2, 0]])
    torch.testing.assert_close(ready.model_inputs(device="cpu"), PIXELS | {"interpolate": True})


def test_ids_keep_their_type_and_get_a_mask():
    ready = ReadyInputs.from_mapping({"input_ids": torch.tensor([[5, 6]]), "pixel_values": torch.zeros(1, 2)})
    inputs = ready.model_inputs(device="cpu", dtype=torch.float16)
    assert inputs["input_ids"].dtype == torch.long
    assert inputs["attention_mask"].tolist() == [[1, 1]]
    assert not ready.is_plain_text


def test_flattened_patches_run_as_one_batch():
    ready = ReadyInputs.from_mapping(
        {"input_ids": torch.ones(2, 3, dtype=torch.long), "pixel_values": torch.zeros(8, 5)}
    )
    assert not ready.is_splittable
    assert ready.model_inputs([0, 1], device="cpu")["pixel_values"].shape == (8, 5)
    with pytest.raises(ValueError, match="run as one batch"):
        ready.model_inputs([0], device="cpu")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, r"The mapping has \[\]; expected one of input_ids"),
        ({"input_ids": [[3]]}, 'input_ids must be a tensor.*Got list; ask the processor for return_tensors="pt"'),
        ({"pixel_values": torch.zeros(0, 2)}, r"at least one row. Got \(0, 2\)"),
        ({"input_ids": torch.tensor([[5, 6], [5, 0]])}, "pad token 0 at an end of row 1 and no attention_mask"),
        ({"input_ids": torch.tensor([[0, 6]])}, "pad token 0 at an end of row 0"),
        (
            {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 3)},
            r"attention_mask has shape \(1, 3\), input_ids \(1, 2\)",
        ),
        (
            {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.tensor([[1, 0, 1]])},
            "row 0 has padding between real tokens",
        ),
        (
            {"input_ids": torch.tensor([[5], [6]]), "attention_mask": torch.tensor([[1], [0]])},
            "row 1 has no real token",
        ),
    ],
)
def test_bad_inputs_are_named(inputs, message):
    with pytest.raises(ValueError, match=message):
        ReadyInputs.from_mapping(inputs, pad_id=0)


def test_positions_of_images_and_masked_ids():
    module = nn.Identity()
    assert position_mask(PIXELS, n_rows=3, n_positions=5, module=module).tolist() == [[1] * 5] * 3
    mask = torch.tensor([[1, 1, 0]])
    assert position_mask({"attention_mask": mask}, n_rows=1, n_positions=3, module=module).tolist() == [[1, 1, 0]]
    with pytest.raises(ValueError, match=r"mask has shape \(1, 3\), but the model made 2 positions"):
        position_mask({"attention_mask": mask}, n_rows=1, n_positions=2, module=module)
    assert [row.length for row in describe_positions(torch.tensor([[1, 1, 0], [1, 1, 1]]))] == [2, 3]


def test_frames_of_audio_are_the_models_own_mask():
    config = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
        conv_stride=(4, 2), conv_kernel=(8, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, feat_extract_norm="layer",
    )  # fmt: skip
    model = Wav2Vec2Model(config).eval()
    sound = torch.randn(1, 80)
    padded = torch.cat([sound, torch.zeros(1, 80)], dim=1)
    inputs = {"input_values": padded, "attention_mask": (torch.arange(160) < 80).long()[None]}
    with torch.no_grad():
        alone, together = model(sound).last_hidden_state, model(**inputs).last_hidden_state
    mask = position_mask(inputs, n_rows=1, n_positions=together.shape[1], module=model)
    assert mask.shape == together.shape[:2]
    assert int(mask.sum()) == alone.shape[1]
