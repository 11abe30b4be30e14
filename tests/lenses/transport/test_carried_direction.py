"""Directions through planted maps, and what random maps and random directions give."""

import pytest
import torch

from microtome.lenses.linear_map import LinearMap
from microtome.lenses.transport.carried_direction import carried_direction

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def test_a_direction_goes_where_the_map_sends_differences():
    weight, u = normal(6, 9), normal(6)
    found = LinearMap(weight, 100 + normal(9))
    x = normal(6)
    native = found(x + u) - found(x)
    carried = carried_direction(found, u, native=native)
    assert carried.cosine == pytest.approx(1)
    torch.testing.assert_close(carried.vector, native)
    assert carried.gain == pytest.approx(float(native.norm() / u.norm()))
    assert carried.p_map == pytest.approx(1 / 1001)
    assert carried_direction(found, -u, native=native).cosine == pytest.approx(-1)


def test_lengths():
    found, u = LinearMap(2 * torch.eye(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)), normal(4)
    plain = carried_direction(found, u)
    torch.testing.assert_close(plain.vector, 2 * u)
    assert plain.gain == pytest.approx(2)
    assert len(plain.of_maps) == 0
    assert plain.p_map != plain.p_map  # NaN: nothing to compare with
    assert float(carried_direction(found, u, norm=3).vector.norm()) == pytest.approx(3)
    native = 5 * torch.nn.functional.normalize(normal(4), dim=0)
    assert float(carried_direction(found, u.float(), native=native.float()).vector.norm()) == pytest.approx(5, rel=1e-6)
    assert float(carried_direction(found, u, native=native, norm=0.1).vector.norm()) == pytest.approx(0.1)


def test_nulls_have_their_known_spread():
    found = LinearMap(torch.linalg.qr(normal(40, 40))[0], torch.zeros(40, dtype=torch.float64))
    carried = carried_direction(found, normal(40), native=normal(40), draws=4000)
    for draws in (carried.of_maps, carried.of_directions):  # a rotation: both point anywhere
        assert float(draws.std()) == pytest.approx(40**-0.5, rel=0.05)
        assert abs(float(draws.mean())) < 0.01
    assert list(carried.to_frame().columns) == [
        "gain", "cosine", "map_mean", "map_95", "p_map", "direction_mean", "direction_95", "p_direction",
    ]  # fmt: skip
    assert carried.to_frame()["map_95"][0] == pytest.approx(1.96 * 40**-0.5, rel=0.1)


def test_a_map_that_writes_along_one_axis_takes_every_direction_there():
    axis = torch.nn.functional.normalize(normal(30), dim=0)
    found = LinearMap(torch.outer(normal(20), axis), torch.zeros(30, dtype=torch.float64))
    carried = carried_direction(found, normal(20), native=axis)
    assert abs(carried.cosine) == pytest.approx(1)
    assert carried.p_map < 0.01  # a random map would not
    assert carried.p_direction == 1  # any direction through this one does
    assert float(carried.of_directions.abs().min()) == pytest.approx(1)


def test_draws_are_those_of_the_seed():
    found = LinearMap(normal(5, 7), normal(7))
    u, v = normal(5), normal(7)
    one, same, other = (carried_direction(found, u, native=v, draws=50, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.of_maps, same.of_maps)
    assert torch.equal(one.of_directions, same.of_directions)
    assert not torch.equal(one.of_maps, other.of_maps)
    assert one.p_map == (1 + int((one.of_maps.abs() >= abs(one.cosine)).sum())) / 51


def test_errors():
    found = LinearMap(torch.zeros(3, 4).double(), torch.zeros(4).double(), source="a", target="b")
    with pytest.raises(ValueError, match="direction has 4 channels and norm"):
        carried_direction(found, torch.ones(4))
    with pytest.raises(ValueError, match="native has 4 channels and norm 0"):
        carried_direction(found, torch.ones(3), native=torch.zeros(4))
    with pytest.raises(ValueError, match="the map a -> b sends this direction to 0"):
        carried_direction(found, torch.ones(3))
    with pytest.raises(ValueError, match="draws=0"):
        carried_direction(found, torch.ones(3), draws=0)
    with pytest.raises(ValueError, match="norm=-1"):
        carried_direction(found, torch.ones(3), norm=-1)
    with pytest.raises(ValueError, match="norm=inf"):
        carried_direction(found, torch.ones(3), norm=float("inf"))
