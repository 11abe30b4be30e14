"""Maps and controllers on a real model: what they promise on the texts they were fitted on."""

import pytest

from microtome.capture import capture
from microtome.interventions.contrast import contrast, contrast_rows
from microtome.interventions.controllers import controlled
from microtome.interventions.steering_task import sentiment_task
from microtome.interventions.transport_maps import transport_maps

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def texts():
    task = sentiment_task(contrast=80)
    return task.texts(True), task.texts(False)


def test_mean_maps_in_steps_end_at_the_wanted_means(smollm2, texts):
    wanted, unwanted = texts
    sites = ["mlp_out.10", "mlp_out.18"]
    found = transport_maps(smollm2, wanted, unwanted, sites, "mean", progress=False)
    aims = capture(smollm2, wanted, sites, "mean", progress=False)
    edits = found.steering(smollm2).edits(smollm2)
    moved = capture(smollm2, unwanted, sites, "mean", edits=edits, progress=False)
    clean = capture(smollm2, unwanted, sites, "mean", progress=False)
    for site in sites:
        before, left = ((x[site].mean(0) - aims[site].mean(0)).norm() for x in (clean, moved))
        assert left < 1e-4 * before


def test_p_brings_every_layer_nearer_to_its_setpoint(smollm2, texts):
    sites = [f"resid_post.{k}" for k in range(8, 26)]
    means = contrast(smollm2, contrast_rows(smollm2, *texts, sites), positions="generated")
    steering = controlled(smollm2, means, kp=0.3)
    clean = capture(smollm2, texts[1], sites, "last", progress=False)
    moved = capture(smollm2, texts[1], sites, "last", edits=steering.edits(smollm2), progress=False)
    for one, site in zip(steering, sites, strict=True):
        law = one.operation
        before, after = (abs(law.setpoint - float((x[site] @ law.direction).mean())) for x in (clean, moved))
        assert after < before
