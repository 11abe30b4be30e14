"""Head roles of a real model: the induction heads that repeated random tokens tell are few, strong and learned."""

import pytest

from microtome.lenses.head_roles import head_roles

pytestmark = pytest.mark.slow

TEXT = (
    "The harbour was quiet when the last boat came in. Two men stood by the wall and waited for the rope, and neither "
    "of them said a word about the storm. By the time the lamps were lit the whole town knew that the boat was home."
)


def test_induction_and_previous_token_heads_of_smollm2(smollm2) -> None:
    found = head_roles(
        smollm2, [TEXT, TEXT[50:]], with_fresh=False, copy_length=32, made_texts=2, needle_length=96, progress=False
    )
    strongest = found.strongest("induction", 5)
    places = set(zip(strongest["layer"], strongest["head"], strict=True))
    assert {(18, 6), (17, 3)} <= places
    assert strongest["induction"].iloc[0] > 0.7
    assert (strongest["induction_control"] < 0.05).all()
    assert {0, 1, 2} == set(found.table["kv_head"])
    assert (found.table["head"] // 3 == found.table["kv_head"]).all()
    previous = found.strongest("previous", 5)
    assert (16, 0) in set(zip(previous["layer"], previous["head"], strict=True))
