"""`microtome transport`: maps, efficiency, sizes, directions and splices; stopped, gone on with, repeated."""

import json

import pytest
import torch
from filelock import FileLock
from safetensors.torch import save_file
from typer.testing import CliRunner

from microtome.app import transport_run
from microtome.app.cli import app as command
from microtome.app.transport_config import TransportConfig
from microtome.app.transport_run import run_transport, spread_over
from microtome.data.runs import Run
from microtome.lenses.transport.operator import TransportOperator

SMALL = ["--data", "toy", "--texts", "400", "--every", "1", "--draws", "2", "--splices", "6"]


@pytest.fixture
def model(model_folders) -> str:
    return model_folders[0]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # windows of toy sentences are short
    windows = transport_run.token_windows
    monkeypatch.setattr(transport_run, "token_windows", lambda *a, **k: windows(*a, **k, least=4))
    return tmp_path


def run(*arguments: str):
    return CliRunner().invoke(command, ["transport", *arguments], catch_exceptions=True)


def test_everything_is_measured_printed_and_kept(model, here) -> None:
    save_file({"resid_post.2": torch.randn(3, 32)}, here / "mine.safetensors")
    flags = [*SMALL, "--pair", "resid_post.0:resid_post.2", "--word", "film", "--directions", "mine.safetensors"]
    done = run(model, *flags, "--rank", "8")
    assert done.exit_code == 0, done.output
    for said in (
        "Means over pairs",
        "directions carried (null",
        "Each direction",
        "is there",
        "perplexity behind the splice",
    ):
        assert said in " ".join(done.stdout.split())
    path = here / "runs" / "transport--llama--toy"
    assert "Report: runs/transport--llama--toy/report.html" in done.stdout
    folder = Run.open(path)
    pairs = folder.table("pairs")
    assert len(pairs) == 2 * 6
    assert set(pairs["tokens"]) == {"without sinks", "with sinks"}
    assert len(folder.table("by_distance")) == 3
    features = folder.table("features")
    assert features["name"].tolist() == ["'film'", "given 0", "given 1", "given 2"]
    assert set(folder.table("splices")["condition"]) >= {"clean", "operator", "identity", "mean", "zero", "shuffled"}
    operator = TransportOperator.load(path / "operators" / "resid_post.0-resid_post.2")
    assert operator.left.shape == (32, 8)
    assert {"map_r2_vw", "distance", "efficiency_0", "features", "origins_0", "splices_0"} <= set(folder.figures)
    assert "Size of the transport subspace" in (path / "report.html").read_text(encoding="utf-8")
    assert not list((here / "runs").glob(".*"))
    again = run(model, *flags, "--rank", "8", "--json")
    assert again.exit_code == 0, again.output
    said = json.loads(again.stdout)
    assert said["features"] == 4
    assert len(said["pairs"]) == 12
    other = run(model, *flags, "--rank", "7")
    assert other.exit_code != 0
    assert "other settings" in other.output


def test_a_stopped_run_goes_on_with_what_it_had(model, here, monkeypatch) -> None:
    config = TransportConfig(model=model, data="toy", texts=400, every=1, draws=2, splices=6, name="x")
    splices = transport_run.splice_effects

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(transport_run, "splice_effects", killed)
    with pytest.raises(KeyboardInterrupt):
        run_transport(config, progress=False)
    kept = here / "runs" / ".x.fits"
    assert (kept / "moments" / "moments.json").is_file()
    with pytest.raises(FileExistsError, match="other settings"):
        run_transport(config.model_copy(update={"seed": 1}), progress=False)
    monkeypatch.setattr(transport_run, "splice_effects", splices)
    stamp = (kept / "moments" / "moments.json").stat().st_mtime_ns
    seen = []
    made = transport_run.Run.create
    monkeypatch.setattr(
        transport_run.Run,
        "create",
        lambda *a, **k: seen.append((kept / "moments" / "moments.json").stat().st_mtime_ns) or made(*a, **k),
    )
    found = run_transport(config, progress=False)
    assert seen == [stamp]
    assert found.path == here / "runs" / "x"
    assert not kept.exists()
    monkeypatch.setattr(transport_run.Run, "create", made)
    plain = run_transport(config.model_copy(update={"name": "y"}), progress=False)
    for name, table in plain.tables.items():
        assert table.equals(found.tables[name]), name


def test_spliced_windows_are_of_many_documents() -> None:
    assert spread_over(["a"] * 5 + ["b", "c", "c"], 4) == [0, 1, 5, 6]
    assert spread_over(["a", "b"], 8) == [0, 1]


def test_one_process_makes_a_run(model, here) -> None:
    (here / "runs").mkdir()
    with FileLock(here / "runs" / ".x.lock"):
        done = run(model, *SMALL, "--name", "x")
    assert done.exit_code != 0
    assert "another process" in done.output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--pair", "resid_post.2"], "is no pair"),
        (["--pair", "resid_post.2:resid_post.0"], "does not lie behind"),
        (["--pair", "resid_post.0:resid_post.9"], "resid_post.9"),
        (["--word", "catfilm notaword"], "tokens. Give one of a single token"),
        (["--data", "nothing"], "neither a data set"),
        (["--dictionary", "nowhere"], "nothing at nowhere"),
        (["--rank", "99"], "ranks 0 to 32"),
        (["--rank", "0"], "rank"),
        (["--ranks", "0"], "ranks"),
        (["--texts", "12"], "documents leave"),
    ],
)
def test_mistakes_are_told_in_a_line(model, here, flags, said) -> None:
    done = run(model, *SMALL, *flags)
    assert done.exit_code != 0
    assert said in " ".join(done.output.split()), done.output
    assert "Traceback" not in done.output
    assert not list((here / "runs").glob("[!.]*"))


@pytest.mark.parametrize("pair", ["resid_pre.1:resid_post.0", "mlp_out.2:attn_out.0", "resid_post.1:mlp_out.1"])
def test_a_target_that_does_not_lie_behind_its_source_is_refused_before_anything_runs(model, pair) -> None:
    done = run(model, *SMALL, "--pair", pair)
    assert done.exit_code == 2
    assert "does not lie behind" in done.output
