"""Make the README's pictures: `make pictures` (needs a headless Chromium, and a finished `make demo`)."""

import sys
from pathlib import Path

from microtome.app.steer_config import SteerConfig
from microtome.app.steer_run import run_steer
from microtome.app.transport_config import TransportConfig
from microtome.app.transport_run import run_transport
from microtome.capture import load_model
from microtome.data import Run, load_data
from microtome.figures import attribution_bars, head_role_grid, screenshot, write_png
from microtome.lenses import head_roles, lens_table, logit_attribution

FACT = "The capital of France is"


def main(run_path: str = "runs/demo", out: str = "docs/images") -> None:
    """Write the demo's head map, layer curve and report, a fact under the lens, its parts, the heads' roles, and
    transport between depths and what splices cost, and steering by dose and cost (of the README's runs, which are made
    if they are not there)."""
    run, folder = Run.open(run_path), Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("head_map", "layer_curve"):
        print(write_png(run.figure(name), folder / f"{name}.png"))
    report = (run.path / "report.html").read_text(encoding="utf-8")
    print(screenshot(report, folder / "report.png", width=1280, height=900))

    model = load_model("smollm2")
    print(write_png(lens_table(model, FACT).plot(), folder / "lens_table.png"))
    parts = logit_attribution(model, [FACT], target=" Paris", against=" London", by="head")
    print(write_png(attribution_bars(parts.table), folder / "attribution_bars.png"))
    english = load_data("english", texts=48)
    roles = head_roles(model, english.texts, documents=english.table["group"], max_length=256)
    print(write_png(head_role_grid(roles.to_frame()), folder / "head_roles.png"))

    transport = Run.open(run_transport(TransportConfig(words=(" not", " Paris"))).path)
    for name, figure in (("transport_map", "map_r2_vw"), ("transport_splices", "splices_2")):
        print(write_png(transport.figure(figure), folder / f"{name}.png"))

    asked = "Write something positive and happy:"
    config = SteerConfig(prompts=40, dev_prompts=20, random=10, site="resid_post.22", instruction=asked)
    steer = Run.open(run_steer(config).path)
    for name, figure in (("steer_dose", "dose_0"), ("steer_trade_off", "trade_off_word_odds")):
        print(write_png(steer.figure(figure), folder / f"{name}.png"))


if __name__ == "__main__":
    main(*sys.argv[1:])
