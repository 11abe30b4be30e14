import numpy as np
import pandas as pd
import pytest

from microtome.figures.attribution_bars import attribution_bars, attribution_heads, attribution_tokens


@pytest.fixture
def parts() -> pd.DataFrame:
    """Two logits by token: an embedding, two layers of two heads over three tokens, two MLPs, a bias."""
    generator = np.random.default_rng(0)
    rows = []
    for row in range(2):
        rows.append({"component": "embed"})
        for layer in range(2):
            for head in range(2):
                for source, token in enumerate(["The", " <b>", "\n"]):
                    rows.append(
                        {
                            "component": "attention",
                            "layer": layer,
                            "head": head,
                            "source": source,
                            "source_token": token,
                        }
                    )
            rows.append({"component": "mlp", "layer": layer})
            rows.append({"component": "neuron", "layer": layer, "neuron": 7})
        rows.append({"component": "unembedding bias"})
        for part in rows[-18:]:
            part["row"] = row
    table = pd.DataFrame(rows).assign(value=generator.normal(size=len(rows)))
    return table.astype({"layer": "Int64", "head": "Int64", "neuron": "Int64", "source": "Int64"})


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("order", ["size", "value", "layer"])
def test_bars_sum_to_the_logit(parts, row, order):
    bars = attribution_bars(parts, row=row, largest=6, order=order).data[0]
    total = parts.loc[parts["row"] == row, "value"].sum()
    assert bars.x[-1] == pytest.approx(total)
    assert sum(bars.x[:-1]) == pytest.approx(total)
    assert len(bars.x) == 8
    own = parts[parts["row"] == row]
    assert sorted(np.abs(bars.x[:6])) == pytest.approx(sorted(own["value"].abs().nlargest(6)))


def test_orders_and_names(parts):
    figure = attribution_bars(parts, largest=50, order="layer")
    names = list(figure.layout.yaxis.ticktext)
    assert names[:2] == ["embed", "unembedding bias"]
    assert names[2:5] == ["L0H0 ← The", "L0H0 ← &lt;b&gt;", "L0H0 ← ⏎"]
    assert names.index("L0 MLP") < names.index("L0 neuron 7") < names.index("L1H0 ← The")
    assert names[-1] == "sum"
    assert not any("other parts" in name for name in names)
    values = attribution_bars(parts, largest=5, order="value").data[0].x[:5]
    assert list(values) == sorted(values, reverse=True)
    sizes = np.abs(attribution_bars(parts, largest=5).data[0].x[:5])
    assert list(sizes) == sorted(sizes, reverse=True)
    assert attribution_bars(parts, largest=5).layout.yaxis.ticktext[5] == "13 other parts"


def test_grid_of_heads_sums_sources(parts):
    figure = attribution_heads(parts, row=1)
    own = parts[(parts["row"] == 1) & (parts["component"] == "attention")]
    for (layer, head), value in own.groupby(["layer", "head"])["value"].sum().items():
        assert figure.data[0].z[head, layer] == pytest.approx(value)
    axis = figure.layout.coloraxis
    assert axis.cmin == -axis.cmax
    assert axis.cmax == pytest.approx(np.abs(figure.data[0].z).max())


def test_tokens_are_coloured_by_their_part(parts):
    figure = attribution_tokens(parts)
    own = parts[(parts["row"] == 0) & parts["source"].notna()].groupby("source")["value"].sum()
    assert [text.split("<br>")[0] for text in figure.data[0].text] == ["The", "&lt;b&gt;", "⏎"]
    for shape, value in zip(figure.layout.shapes, own, strict=True):
        assert shape.fillcolor.startswith("rgba(33,102,172" if value > 0 else "rgba(178,24,43")
    strongest = int(own.abs().reset_index(drop=True).idxmax())
    assert figure.layout.shapes[strongest].fillcolor.endswith("0.880)")
    long = pd.concat([parts[parts["row"] == 0].assign(source=lambda t, n=n: t["source"] + 3 * n) for n in range(20)])
    assert len({y for y in attribution_tokens(long).data[0].y}) > 2


def test_bad_input(parts):
    with pytest.raises(ValueError, match="order='up'"):
        attribution_bars(parts, order="up")
    with pytest.raises(ValueError, match="largest=0: give at least one bar"):
        attribution_bars(parts, largest=0)
    with pytest.raises(ValueError, match=r"the table has no row 5; it has \[0, 1\]"):
        attribution_bars(parts, row=5)
    with pytest.raises(KeyError, match="no column"):
        attribution_bars(parts.drop(columns="value"))
    with pytest.raises(ValueError, match="no part has a head"):
        attribution_heads(parts[parts["head"].isna()])
    with pytest.raises(ValueError, match="no part has a source token"):
        attribution_tokens(parts.drop(columns="source"))
    before = parts.copy(deep=True)
    attribution_bars(parts)
    assert parts.equals(before)
