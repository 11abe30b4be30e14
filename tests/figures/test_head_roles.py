import numpy as np
import pandas as pd
import pytest

from microtome.figures.head_roles import ROLES, SCORES, described_head, head_role_grid, head_score_maps


def make_table(layers=6, heads=4, seed=0):
    rng = np.random.default_rng(seed)
    table = pd.DataFrame([(layer, head) for layer in range(layers) for head in range(heads)], columns=["layer", "head"])
    table["kv_head"] = table["head"] // 2
    table["role"] = rng.choice(["", *ROLES], len(table))
    table["roles"] = [
        role + (" sink" if role not in ("", "sink") and i % 3 == 0 else "") for i, role in enumerate(table["role"])
    ]
    for score in (*SCORES, "distance"):
        table[score] = rng.random(len(table))
        table[f"{score}_low"], table[f"{score}_high"] = table[score] - 0.05, table[score] + 0.05
        table[f"fresh_{score}"] = 0.011
    return table


@pytest.mark.parametrize(("layers", "heads"), [(6, 4), (30, 9), (1, 1)])
def test_every_cell_has_its_roles_colour_and_letters(layers, heads):
    table = make_table(layers, heads)
    figure = head_role_grid(table)
    trace = figure.data[0]
    assert trace.z.shape == (heads, layers)
    scale = dict(trace.colorscale)
    for row in table.itertuples():
        code = trace.z[row.head][row.layer]
        span = trace.zmax - trace.zmin
        if row.role:
            middle = (code - trace.zmin) / span
            colour = [c for edge, c in trace.colorscale if edge <= middle][-1]
            assert colour == ROLES[row.role][1]
        else:
            assert code == 0
        assert trace.text[row.head][row.layer] == "".join(ROLES[role][0] for role in row.roles.split())
        assert trace.hovertext[row.head][row.layer].startswith(f"<b>L{row.layer}H{row.head}</b>")
    assert scale
    named = {trace.name.split()[1] for trace in figure.data[1:]}
    assert named == set(table["role"]) - {""}
    assert figure.layout.yaxis.range == (heads - 0.5, -0.5)


def test_hover_tells_scores_intervals_and_the_untrained_model():
    table = make_table()
    said = described_head(table.assign(role="sink", roles="sink", sink=0.5, sink_low=0.4, sink_high=0.6).iloc[5])
    assert said.startswith("<b>L1H1</b>, key-value head 0: sink<br>")
    assert "sink 0.50 [0.40, 0.60], untrained 0.01" in said
    assert "no role" in described_head(table.assign(roles="").iloc[0])


def test_layers_that_are_missing_are_squeezed_out_and_heads_are_gaps():
    table = make_table()
    table = table[~table["layer"].isin([1, 2])]
    table = table[(table["layer"] != 4) | (table["head"] != 2)]
    figure = head_role_grid(table)
    assert figure.layout.xaxis.ticktext == ("0", "3", "4", "5")
    assert np.argwhere(np.isnan(figure.data[0].z.astype(float))).tolist() == [[2, 2]]


def test_a_role_from_elsewhere_is_grey_and_safe_to_show():
    table = make_table(2, 2).assign(role=["<b>x", "", "", ""], roles=["<b>x", "", "", ""])
    figure = head_role_grid(table)
    assert figure.data[1].name.endswith("&lt;b&gt;x (1)")
    assert "key-value head 0: &lt;b&gt;x" in figure.data[0].hovertext[0][0]


def test_scores_have_a_map_each_and_rings_above_the_threshold():
    table = make_table()
    figure = head_score_maps(table, thresholds={"sink": 0.4})
    maps = [trace for trace in figure.data if trace.type == "heatmap"]
    assert len(maps) == len(SCORES)
    assert [note.text for note in figure.layout.annotations][:2] == ["induction", "previous"]
    of_sink = maps[SCORES.index("sink")]
    for row in table.itertuples():
        assert of_sink.z[row.head][row.layer] == row.sink
    [rings] = [trace for trace in figure.data if trace.type == "scatter"]
    above = table[table["sink"] > 0.4]
    assert set(zip(rings.x, rings.y, strict=True)) == set(zip(above["layer"], above["head"], strict=True))
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 1)
    assert len(head_score_maps(table, scores=["sink", "nothing"]).data) == 1


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda t: t.drop(columns="roles"), KeyError, r"no column \['roles'\]"),
        (lambda t: t[:0], ValueError, "has no heads"),
        (lambda t: pd.concat([t, t]), ValueError, "several rows for one head"),
    ],
)
def test_other_tables_are_refused(change, error, says):
    with pytest.raises(error, match=says):
        head_role_grid(change(make_table()))


def test_a_table_without_scores_is_refused():
    with pytest.raises(KeyError, match="none of the columns"):
        head_score_maps(make_table()[["layer", "head"]])
