"""Plotly figures from tables and tensors; no model."""

from microtome.figures.attribution_bars import attribution_bars as attribution_bars
from microtome.figures.attribution_bars import attribution_heads as attribution_heads
from microtome.figures.attribution_bars import attribution_tokens as attribution_tokens
from microtome.figures.carried_features import carried_features as carried_features
from microtome.figures.cosine_matrix import cosine_matrix as cosine_matrix
from microtome.figures.dose_response import dose_response as dose_response
from microtome.figures.growth_curve import growth_curve as growth_curve
from microtome.figures.head_map import head_map as head_map
from microtome.figures.head_roles import head_role_grid as head_role_grid
from microtome.figures.head_roles import head_score_maps as head_score_maps
from microtome.figures.head_words import head_words as head_words
from microtome.figures.image import screenshot as screenshot
from microtome.figures.image import write_png as write_png
from microtome.figures.layer_curve import layer_curve as layer_curve
from microtome.figures.layer_pairs import layer_pairs as layer_pairs
from microtome.figures.lens_curves import lens_curves as lens_curves
from microtome.figures.lens_table import lens_table as lens_table
from microtome.figures.origin_curves import origin_curves as origin_curves
from microtome.figures.reliability import reliability_curve as reliability_curve
from microtome.figures.report import Section as Section
from microtome.figures.report import html_report as html_report
from microtome.figures.splice_bars import splice_bars as splice_bars
from microtome.figures.trade_off_curves import trade_off_curves as trade_off_curves
from microtome.figures.transfer_matrix import transfer_matrix as transfer_matrix
from microtome.figures.transport_curves import distance_curves as distance_curves
from microtome.figures.transport_curves import efficiency_curves as efficiency_curves
